#!/usr/bin/env bash
# GPT with 1.3 billion parameters on sequences of 65,536 tokens, on the 8 GPUs of a host: bash scripts/pretrain_gpt_1b_64k.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# 8,192 tokens per GPU fit without recomputation, which would be costly: attention is most of the work at this length
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-host}" ZERO="${ZERO:-1}" OVERLAP="${OVERLAP:-auto}"
export RECOMPUTE="${RECOMPUTE:-none}" TRAIN_ITERS="${TRAIN_ITERS:-25000}" # 26 billion tokens

flags=(
    --preset gpt-1.3b --seq-length 65536 --position-embedding-type rope --rotary-base 500000 --disable-bias-linear --bf16
    --micro-batch-size 1 --global-batch-size 16
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --save-interval 500 --eval-interval 500 --eval-iters 4 --log-interval 10 --keep-last 2)

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py "${flags[@]}" -- "$@"
