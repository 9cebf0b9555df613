"""Rules of pipelines: one message with the values, the rule and the way out."""

from __future__ import annotations

import shlex

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError

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


@pytest.mark.parametrize(("flags", "words"), [
    ("--pp-size 3", "the number of processes (4) must be a multiple of tensor_model_parallel_size * sequence_parallel_size *"
        " pipeline_model_parallel_size (1 * 1 * 3 = 3)"),
    ("--pp-size 4 --num-virtual-stages-per-pipeline-rank 4",
        "num_layers (12) is less than pipeline_model_parallel_size (4) * 4 stages on each rank = 16: use --pipeline-model-parallel-size 3"
        " or less, or fewer stages on a rank"),
    ("--pp-size 2 --pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2", "1f1b has one stage on each rank"),
    ("--pp-size 2 --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 1", "interleaved needs several stages"),
    ("--pp-size 2 --pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 3", "zbv has two stages on each rank"),
    ("--pp-size 2 --num-layers-per-virtual-pipeline-stage 5",
        "num_layers (12) must be a multiple of pipeline_model_parallel_size (2) * num_layers_per_virtual_pipeline_stage (5) = 10"),
    ("--pp-size 2 --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 3", "say the same: give one"),
    ("--pp-size 2 --decoder-first-pipeline-num-layers 12", "of 12 layers 0 are left for 1 stages"),
    ("--pp-size 2 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
        "decoder_first_pipeline_num_layers (3) + decoder_last_pipeline_num_layers (4) must be num_layers (12)"),
    ("--pp-size 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 3",
        "decoder_first_pipeline_num_layers (3) must be a multiple of the stages on a rank (2): 2 or 4"),
    ("--pp-size 2 --pipeline-schedule zbv --decoder-first-pipeline-num-layers 2", "with zbv one rank has both ends"),
    ("--pp-size 2 --pipeline-schedule slices --num-virtual-stages-per-pipeline-rank 2", "slices has one stage on each rank"),
    ("--pp-size 2 --pipeline-schedule zbv --pipeline-slices 4", "--pipeline-slices 4 is for --pipeline-schedule slices"),
    ("--pp-size 2 --pipeline-slices 33", "pipeline_slices (33) must be at most seq_length (32)"),
    ("--pp-size 2 --pipeline-slices 4 --attention-backend fused --attention-dropout 0.1", "depend on how --pipeline-schedule slices cuts"),
    ("--pp-size 2 --pipeline-slices 4 --model-family bert", "slices is for causal models"),
    ("--pipeline-slices 4", "--pipeline-slices is about the stages of a pipeline"),
    ("--pipeline-schedule zb1p", "--pipeline-schedule is about the stages of a pipeline, and with pipeline_model_parallel_size 1"),
    ("--num-layers-per-virtual-pipeline-stage 2 --decoder-last-pipeline-num-layers 2",
        "--num-layers-per-virtual-pipeline-stage and --decoder-last-pipeline-num-layers are about"),
    ("--pp-size 2 --pipeline-schedule gpipe", "--pipeline-schedule"),
])  # fmt: skip
def test_what_contradicts_itself(flags: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(flags)
    assert words in str(caught.value) and "things are wrong" not in str(caught.value)


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


@pytest.mark.parametrize(("flags", "words"), [
    ("--pp-size 2 --pipeline-model-parallel-layout Et*6|t*5L", "has 11 layers, and num_layers is 12"),
    ("--pp-size 2 --pipeline-model-parallel-layout Et*4|t*4|t*4L", "has 3 stages, and pipeline_model_parallel_size (2) takes 2"),
    ("--pp-size 2 --pipeline-model-parallel-layout Et*6|t*6L --num-virtual-stages-per-pipeline-rank 2",
        "has 2 stages, and pipeline_model_parallel_size (2) with 2 stages on each takes 4"),
    ("--pp-size 4 --pipeline-model-parallel-layout E|t*6|t*6|L", "stage 1 of 4 has only the embedding"),
    ("--pp-size 4 --pipeline-model-parallel-layout Et*6|t*6||L", "stage 3 of 4 has no layer"),
    ("--pp-size 2 --pipeline-model-parallel-layout Et*12|L", "stage 2 of 2 has only the head"),
    ("--pp-size 2 --pipeline-model-parallel-layout Et*6|t*6mL", "m is a head for further tokens"),
    ("--pp-size 2 --pipeline-model-parallel-layout t*6|t*6L", "the embedding (E) comes once, first"),
    ("--pp-size 2 --pipeline-model-parallel-layout Et*6|d*6L", "'d' means nothing there"),
    ("--pp-size 2 --pipeline-model-parallel-layout E(t*99999|)*99999L", "that is more than 65536 letters"),
    ("--pp-size 2 --pipeline-model-parallel-layout Et*6|t*6L --decoder-first-pipeline-num-layers 6", "has the layers of every stage"),
    ("--pipeline-model-parallel-layout Et*12L", "--pipeline-model-parallel-layout is about the stages of a pipeline"),
])  # fmt: skip
def test_letters_that_are_not_this_pipeline(flags: str, words: str) -> None:
    test_what_contradicts_itself(flags, words)
