#!/usr/bin/env bash
# GPT with 1.3 billion parameters on sequences of 65,536 tokens, on 8 GPUs: bash scripts/pretrain_gpt_1b_64k.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 tries the same flags with a tiny model on 2 CPU processes in some ten seconds. DATA_PATH, TOKENIZER_MODEL, SAVE, TRAIN_ITERS,
# TP, SP: see scripts/pretrain_gpt_8gpus.sh; NNODES, NODE_RANK, MASTER_ADDR for several such hosts: docs/several_hosts.md.
title="GPT 1.3B, sequences of 64K: 24 layers, hidden 2048, 16 heads; 16 sequences (1.05 M tokens) a step, bf16"
# 8,192 tokens on a GPU: a layer keeps about 35 * 8192 * 2048 bytes. That fits, so nothing is recomputed, least of all attention, which is
# most of the work at this length; --recompute-granularity full behind the command trades a quarter of the speed for most of this memory.
gib_static=22
gib_active=18
shape=(--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 65536 --max-position-embeddings 65536 --rotary-base 500000
    --train-iters "${TRAIN_ITERS:-25000}" --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 500)
# shellcheck source=scripts/pretrain_gpt_8gpus.sh
source "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_8gpus.sh"
