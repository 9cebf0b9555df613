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

flags=(
    --preset llama3-8b --seq-length 131072 --bf16
    --micro-batch-size 1 --global-batch-size 8
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --save-interval 500 --eval-interval 500 --eval-iters 4 --log-interval 10 --keep-last 2)

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py "${flags[@]}" -- "$@"
