#!/usr/bin/env bash
# BERT large, 336 million parameters, on the 8 GPUs of a host: bash scripts/pretrain_bert_large.sh [FLAGS of pretrain_bert.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# sequences are short and the model is small: the ranks share the batch, and ZeRO 1 the optimizer's state
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-1}" ZERO="${ZERO:-1}" OVERLAP="${OVERLAP:-auto}"
export RECOMPUTE="${RECOMPUTE:-none}" TRAIN_ITERS="${TRAIN_ITERS:-500000}"

exec bash "$root/scripts/recipe.sh" "$0" pretrain_bert.py --config "$root/scripts/recipes/bert_large.yaml" -- "$@"
