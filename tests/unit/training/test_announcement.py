"""What the start says of the last bit."""

from __future__ import annotations

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.training.report import about_repeats

SHAPE = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 9 --mock-data --lr 1 --train-iters 1 --bf16"


@pytest.mark.parametrize(("flags", "device", "ranks", "kernel", "variables", "said"), [
    ("", "cpu", 2, "sdpa", {}, "yes: a resume with the same processes has the losses and weights of a run without it"),
    ("", "cuda", 1, "cudnn", {}, "no: attention's backward pass (cudnn) may add in another order each time; --deterministic-mode takes"),
    ("", "cuda", 1, "reference", {}, "no: kernels of a GPU may add in another order each time; --deterministic-mode takes"),
    ("--deterministic-mode", "cuda", 1, "sdpa", {}, "yes, with --deterministic-mode: a resume"),
    ("--deterministic-mode", "cuda", 2, "sdpa", {}, "as long as NCCL chooses the same algorithms (NCCL_ALGO=Ring leaves it no choice)"),
    ("--deterministic-mode", "cuda", 2, "sdpa", {"NCCL_ALGO": "Ring"}, "yes, with --deterministic-mode: a resume"),
    ("--deterministic-mode --distributed-backend gloo", "cuda", 2, "sdpa", {}, "yes, with --deterministic-mode: a resume"),
])  # fmt: skip
def test_the_start_says_whether_a_run_repeats_and_why_not(
    flags: str, device: str, ranks: int, kernel: str, variables: dict[str, str], said: str
) -> None:
    config = config_from_args([*SHAPE.split(), *flags.split()], world_size=ranks)
    assert about_repeats(config, device, ranks, kernel, variables).startswith(f"repeats to the last bit: {said}")
