#!/usr/bin/env bash
# GPT-3 with 175 billion parameters on sequences of 2,048 tokens, on the GPUs of 16 hosts with 8 each, or of 2, 4, 8, 16 times as many:
# bash scripts/pretrain_gpt_175b.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 trains a tiny model in the same layout on CPU processes, DRY_RUN=1 says what the full size takes. All variables: docs/how-to/zoo.md.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Layout, batch and learning rate of Megatron-LM's script: tensor parallelism within a host, a pipeline over 16 hosts. Each GPU has two stages
# of 3 layers (interleaved, arXiv:2104.04473). With 16 hosts a GPU holds 33 GiB: 19 of parameters and optimizer state, 6 of gradients, 8 of
# activations. PP_SCHEDULE=1f1b takes 30 GiB and waits twice as long; RECOMPUTE=full takes 26 GiB.
export NPROC_PER_NODE="${NPROC_PER_NODE:-8}" NNODES="${NNODES:-16}" TP="${TP:-8}" SP="${SP:-1}" PP="${PP:-16}"
export PP_SCHEDULE="${PP_SCHEDULE:-interleaved}" ZERO="${ZERO:-1}" OVERLAP="${OVERLAP:-auto}"
export RECOMPUTE="${RECOMPUTE:-none}" TRAIN_ITERS="${TRAIN_ITERS:-111350}" # 300 billion tokens, as in the GPT-3 paper

exec bash "$root/scripts/recipe.sh" "$0" pretrain_gpt.py --config "$root/scripts/recipes/gpt_175b.yaml" -- "$@"
