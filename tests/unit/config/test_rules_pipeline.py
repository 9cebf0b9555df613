"""Rules of pipelines: one message with the values, the rule and the way out."""

from __future__ import annotations

import shlex

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config

BASE = (
    "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --mock-data --lr 1e-3 --train-iters 5"
    " --micro-batch-size 1 --global-batch-size 8 "
)


def config(flags: str, world_size: int = 4) -> Config:
    return config_from_args(shlex.split(BASE + flags), world_size=world_size)


@pytest.mark.parametrize(("flags", "kind", "stages"), [
    ("--pp-size 2", "1f1b", 1),
    ("--pp-size 2 --num-virtual-stages-per-pipeline-rank 3", "interleaved", 3),
    ("--pp-size 2 --num-layers-per-virtual-pipeline-stage 2", "interleaved", 3), ("--pp-size 4 --pipeline-schedule zbv", "zbv", 2),
    ("--pp-size 2 --pipeline-schedule zb1p --num-layers-per-virtual-pipeline-stage 3", "zb1p", 2),
    ("--pp-size 2 --num-layers-per-virtual-pipeline-stage 6", "1f1b", 1), ("--pp-size 2 --enable-zbh1-pipeline", "zb1p", 1),
    ("--pp-size 2 --enable-zero-bubble --zero-bubble-v-schedule", "zbv", 2),
    ("--pp-size 2 --num-layers-in-first-pipeline-stage 5", "1f1b", 1), ("--pp-size 2 --pipeline-slices 3", "slices", 1),
    ("--pp-size 2 --pipeline-schedule slices", "slices", 1),
])  # fmt: skip
def test_what_the_flags_mean(flags: str, kind: str, stages: int) -> None:
    parallel = config(flags).parallel
    assert (parallel.pipeline_kind, parallel.stages_per_pipeline_rank) == (kind, stages)


def test_the_layers_of_given_ranks_are_kept() -> None:
    from megatron_sp.estimate.layout import layers_of_stages

    made = config("--pp-size 4 --num-layers-in-first-pipeline-stage 1 --num-layers-in-last-pipeline-stage 2")
    assert layers_of_stages(made.model, made.parallel) == (1, 5, 4, 2)


@pytest.mark.parametrize(("flags", "kind", "want"), [
    ("--pp-size 2 --pipeline-model-parallel-layout Et*5|t*7L", "1f1b", (5, 7)),
    ("--pp-size 2 --pipeline-model-parallel-layout Ett,|(tt|)*2t*6L", "interleaved", (2, 2, 2, 6)),
    ("--pp-size 2 --pipeline-model-parallel-layout E(t|t)*5tt,L --pipeline-schedule zb1p", "zb1p", (1, 2, 2, 2, 2, 3)),
    ("--pp-size 2 --pipeline-model-parallel-layout Et|tt|t*8|tL --pipeline-schedule zbv", "zbv", (1, 2, 8, 1)),
    ("--pp-size 4 --pipeline-model-parallel-layout E(t*3|)*3t*3L --pipeline-slices 2", "slices", (3, 3, 3, 3)),
])  # fmt: skip
def test_the_layers_of_all_stages_in_megatrons_letters(flags: str, kind: str, want: tuple[int, ...]) -> None:
    from megatron_sp.estimate.layout import layers_of_stages

    made = config(flags)
    assert (made.parallel.pipeline_kind, layers_of_stages(made.model, made.parallel)) == (kind, want)
    assert made.parallel.stages_per_pipeline_rank * made.parallel.pipeline_model_parallel_size == len(want)
