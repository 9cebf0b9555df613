#!/usr/bin/env bash
# GPT with 1.3 billion parameters on sequences of 65,536 tokens, on the 8 GPUs of a host: bash scripts/pretrain_gpt_1b_64k.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# 8,192 tokens per GPU fit without recomputation, which would be costly: attention is most of the work at this length
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-host}" ZERO="${ZERO:-1}" OVERLAP="${OVERLAP:-auto}"
export RECOMPUTE="${RECOMPUTE:-none}" TRAIN_ITERS="${TRAIN_ITERS:-25000}" # 26 billion tokens

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/gpt_1b_64k.yaml" -- "$@"
