#!/usr/bin/env bash
# GPT with 6.6 billion parameters on sequences of 16,384 tokens, on 8 GPUs: bash scripts/pretrain_gpt_7b_16k.sh [FLAGS of pretrain_gpt.py]
#
# SMOKE=1 tries the same flags with a tiny model on 2 CPU processes in some ten seconds. DATA_PATH, TOKENIZER_MODEL, SAVE, TRAIN_ITERS,
# TP, SP: see scripts/pretrain_gpt_8gpus.sh; NNODES, NODE_RANK, MASTER_ADDR for several such hosts: docs/several_hosts.md.
title="GPT 6.6B, sequences of 16K: 32 layers, hidden 4096, 32 heads; 16 sequences (0.26 M tokens) a step, bf16"
# With tp=1 every GPU holds all weights, gradients and optimizer state (GPUs of 141 GB); TP=2 SP=4 fits GPUs of 80 GB. 2,048 tokens on a
# GPU: a layer keeps about 35 * 2048 * 4096 bytes, so nothing is recomputed; --recompute-granularity full behind the command saves most of it.
gib_static=112
gib_active=12
shape=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 16384 --max-position-embeddings 16384 --rotary-base 500000
    --train-iters "${TRAIN_ITERS:-500000}" --lr 1.5e-4 --min-lr 1.5e-5 --lr-warmup-iters 2000)
# shellcheck source=scripts/pretrain_gpt_8gpus.sh
source "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_8gpus.sh"
