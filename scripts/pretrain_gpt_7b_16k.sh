#!/usr/bin/env bash
# GPT with 6.7 billion parameters on sequences of 16,384 tokens, on the 8 GPUs of a host: bash scripts/pretrain_gpt_7b_16k.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# ZeRO 1 keeps parameters and gradients whole on each GPU: 6 bytes for each; ZERO=3 or TP=2 is for GPUs with less memory
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-host}" ZERO="${ZERO:-1}" OVERLAP="${OVERLAP:-auto}"
export RECOMPUTE="${RECOMPUTE:-none}" TRAIN_ITERS="${TRAIN_ITERS:-500000}" # 131 billion tokens

flags=(
    --preset gpt-6.7b --seq-length 16384 --position-embedding-type rope --rotary-base 500000 --disable-bias-linear --bf16
    --micro-batch-size 1 --global-batch-size 16
    --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --save-interval 500 --eval-interval 500 --eval-iters 4 --log-interval 10 --keep-last 2)

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py "${flags[@]}" -- "$@"
