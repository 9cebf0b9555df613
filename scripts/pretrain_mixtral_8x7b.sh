#!/usr/bin/env bash
# Mixtral 8x7B: 8 experts in each layer, 46.7 billion parameters, 12.9 billion of which a token uses, on 4 hosts with 8 GPUs each:
# bash scripts/pretrain_mixtral_8x7b.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# an expert of each layer on each GPU of a host, 4,096 tokens of a sequence on each; parameters and state of the same expert are cut over hosts
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" NNODES="${NNODES:-4}" TP="${TP:-1}" SP="${SP:-host}" EP="${EP:-8}" ZERO="${ZERO:-3}"
export OVERLAP="${OVERLAP:-chunked}" RECOMPUTE="${RECOMPUTE:-full}" TRAIN_ITERS="${TRAIN_ITERS:-100000}" # 420 billion tokens

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/mixtral_8x7b.yaml" -- "$@"
