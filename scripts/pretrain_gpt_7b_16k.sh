#!/usr/bin/env bash
# GPT with 6.7 billion parameters on sequences of 16,384 tokens, on the 8 GPUs of a host: bash scripts/pretrain_gpt_7b_16k.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# ZeRO 1 keeps parameters and gradients whole on each GPU: 6 bytes for each; ZERO=3 or TP=2 is for GPUs with less memory
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-host}" ZERO="${ZERO:-1}" OVERLAP="${OVERLAP:-auto}"
export RECOMPUTE="${RECOMPUTE:-none}" TRAIN_ITERS="${TRAIN_ITERS:-500000}" # 131 billion tokens

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/gpt_7b_16k.yaml" -- "$@"
