"""The built-in training of ``megatron-sp chaos``: a GPT of some ten thousand parameters on synthetic tokens."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from megatron_sp.commands.pretrain import parse_config
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training.loop import pretrain

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --mock-data --vocab-size 60 --device cpu"
    " --num-threads 1 --lr 1e-2 --lr-decay-style constant --eval-iters 0 --log-interval 1 --peak-tflops 1 --save-interval 3"
    " --distributed-timeout-minutes 0.15 --no-progress-bar"
)  # fmt: skip
STEPS = 40


def words(ranks: int) -> list[str]:
    """Return the command line; sp is 2 if the number of ranks is a multiple of 4, else 1."""
    layout = ["--zero-stage", "1", "--sequence-parallel-size", "2" if ranks % 4 == 0 else "1"]
    return [*FLAGS.split(), *layout, "--global-batch-size", str(4 * ranks), "--train-iters", str(STEPS)]


def train(rank: int, ranks: int, port: int, more: list[str]) -> None:
    """Run one rank of the training; never returns."""
    torch.set_num_threads(1)  # before anything else: OpenMP with more threads hangs after a fork
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "MEGATRON_SP_FAULT"):
        os.environ.pop(name, None)
    pretrain(parse_config([*words(ranks), *more], prog="megatron-sp chaos"), replace(GPT, name="chaos"))
