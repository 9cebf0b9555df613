#!/usr/bin/env bash
# Llama 3 with 8 billion parameters on sequences of 1,048,576 tokens, on the GPUs of 1 to 8 hosts with 8 each:
# bash scripts/pretrain_llama_8b_1m.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Ulysses within a host, one key/value head for each rank; around it context parallelism, a share of every sequence for each host (CP=2 has
# two of four ranks each on one host). Attention is nine tenths of the work: exchanges and copies to host memory overlap with it.
# Rotary base, learning rate and length as of gradientai's Llama 3 at 1048K, which went on from shorter sequences (--load, --finetune).
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-host}" CP="${CP:-${NNODES:-1}}" ZERO="${ZERO:-3}"
export OVERLAP="${OVERLAP:-chunked}" RECOMPUTE="${RECOMPUTE:-full}" TRAIN_ITERS="${TRAIN_ITERS:-200}" # 0.8 billion tokens

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/llama_8b_1m.yaml" -- "$@"
