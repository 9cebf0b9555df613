#!/usr/bin/env bash
# OLMoE: 64 experts in each layer, 6.9 billion parameters, 1.3 billion of which a token uses, on the 8 GPUs of a host:
# bash scripts/pretrain_olmoe_1b_7b.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# 8 experts of each layer on each GPU; ZeRO 1 cuts the optimizer's state of what all GPUs have
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" TP="${TP:-1}" SP="${SP:-1}" EP="${EP:-8}" ZERO="${ZERO:-1}" OVERLAP="${OVERLAP:-chunked}"
export RECOMPUTE="${RECOMPUTE:-full}" TRAIN_ITERS="${TRAIN_ITERS:-1200000}" # 5 trillion tokens

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/olmoe_1b_7b.yaml" -- "$@"
