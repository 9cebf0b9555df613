#!/usr/bin/env bash
# Llama 3 with 8 billion parameters on sequences of 131,072 tokens, on the 8 GPUs of a host:
# bash scripts/pretrain_llama_8b_128k.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# 16,384 tokens per GPU: each block keeps only its input. One key/value head for each of the 8 sp ranks; its queries are exchanged in
# chunks, so that exchanges overlap with attention.
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-host}" ZERO="${ZERO:-3}" OVERLAP="${OVERLAP:-chunked}"
export RECOMPUTE="${RECOMPUTE:-full}" TRAIN_ITERS="${TRAIN_ITERS:-20000}" # 21 billion tokens on one host

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/llama_8b_128k.yaml" -- "$@"
