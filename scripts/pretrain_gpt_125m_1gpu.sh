#!/usr/bin/env bash
# GPT with 125 million parameters, the smallest of the GPT-3 paper, on one GPU: bash scripts/pretrain_gpt_125m_1gpu.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model with the same flags on a CPU, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

export NPROC_PER_NODE="${NPROC_PER_NODE:-1}" TP="${TP:-1}" SP="${SP:-1}" ZERO="${ZERO:-0}" OVERLAP="${OVERLAP:-auto}"
export RECOMPUTE="${RECOMPUTE:-none}" TRAIN_ITERS="${TRAIN_ITERS:-20000}" # 10 billion tokens

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/gpt_125m_1gpu.yaml" -- "$@"
