"""Context parallelism and pipelines: what Megatron's words for them mean, and what a layout with cp must fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.rules import normalize
from megatron_sp.config.rules_layout import with_split
from megatron_sp.config.schema import Config
from megatron_sp.estimate.layout import layers_of_stages
from megatron_sp.utils.errors import ConfigError

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --train-iters 10 --lr 1e-3 --mock-data"
    " --attention-dropout 0"
)


PIPELINE = "--num-layers 12 --global-batch-size 8"


def parse(more: str, world_size: int = 8) -> Config:
    return config_from_args([*FLAGS.split(), *more.split()], world_size=world_size)


def error(more: str, world_size: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(more, world_size)
    assert "\n" not in str(caught.value), "one message"
    return str(caught.value)


def test_sizes_that_are_measured() -> None:
    config = parse("--cp-size 8 --cp-comm-type AUTO --sp-overlap-comm --cp-keep-kv")
    assert config.parallel.measures_split and config.parallel.replica_size == 8
    assert normalize(config).parallel.measures_split, "it stays so"
    assert not parse("--cp-size 8").parallel.measures_split and not parse("--cp-comm-type auto").parallel.measures_split
    both, ulysses, context = (with_split(config, sp, 8 // sp).parallel for sp in (4, 8, 1))
    assert (both.sequence_parallel_size, both.context_parallel_size, both.overlap_mode, both.cp_keep_kv) == (4, 2, "auto", True)
    assert (ulysses.overlap_mode, ulysses.cp_keep_kv) == ("auto", False), "there is nothing of cp to keep"
    assert (context.overlap_mode, context.cp_keep_kv) == ("none", True), "there is nothing of sp to overlap"
    assert not (both.measures_split or ulysses.measures_split or context.measures_split) and config.parallel.measures_split


def test_words_without_effect_are_told() -> None:
    told = parse("--cp-comm-type p2p --hierarchical-context-parallel-sizes 1 1 --cp-comm-type a2a+p2p").ignored_flags
    assert told == (
        "--cp-comm-type (--context-parallel-size is 1: nothing is exchanged)",
        "--hierarchical-context-parallel-sizes (--context-parallel-size is 1: nothing is exchanged)",
    )


def test_weights_wait_for_exchanges_that_there_are() -> None:
    for flags in ("--cp-size 2", "--sp-size 2 --sp-overlap-comm", "--sp-size 2 --sp-head-chunks 2", "--cp-size 2 --pp-size 2"):
        assert parse(f"--delay-wgrad {flags}").parallel.delay_wgrad
    measured = parse("--delay-wgrad --cp-size 4 --cp-comm-type auto")
    delays = [with_split(measured, sp, 4 // sp).parallel.delay_wgrad for sp in (1, 2, 4)]
    assert delays == [True, False, False], "Ulysses' exchanges are waited for at once"
    overlapped = parse("--delay-wgrad --cp-size 4 --cp-comm-type auto --sp-overlap-comm")
    assert all(with_split(overlapped, sp, 4 // sp).parallel.delay_wgrad for sp in (1, 2, 4))


def test_attention_dropout_with_the_plain_kernel() -> None:
    for backend in ("auto", "unfused", "local"):
        parse(f"--cp-size 2 --attention-dropout 0.1 --attention-backend {backend}")


def test_processes_are_whole_replicas() -> None:
    text = error("--cp-size 3 --sp-size 2 --tp-size 2", 18)
    assert text == (
        "the number of processes (18) must be a multiple of tensor_model_parallel_size * sequence_parallel_size * context_parallel_size"
        " (2 * 2 * 3 = 12): 18 = 1 * 12 + 6; use 12, 24 or 36 processes, or --tp-size 1, or --sp-size 1"
    )
    assert error("--cp-size 3 --tp-size 2").endswith("or --cp-size 1, 2 or 4")


def test_nothing_else_has_to_divide() -> None:
    """Neither the length nor the heads; and there may be more ranks than positions."""
    assert parse("--cp-size 7 --seq-length 33 --num-attention-heads 1", 7).parallel.dp_size(7) == 1
    parse("--cp-size 5 --sp-size 3 --tp-size 2 --seq-length 7 --hidden-size 60 --num-attention-heads 6", 30)


def test_the_batch_knows_the_data_parallel_size(tmp_path: Path) -> None:
    assert "(2 * 2 = 4)" in error("--cp-size 2 --sp-size 2 --micro-batch-size 2 --global-batch-size 6")
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 1}')
    assert parse(f"--cp-size 2 --deepspeed_config {path}").batch.global_batch_size == 3 * 4


def test_the_mlp_is_cut_by_a_ranks_positions() -> None:
    parse("--cp-size 4 --mlp-chunks 8")
    assert "positions of a rank (32 / 4, rounded up, = 8)" in error("--cp-size 4 --mlp-chunks 9")


def test_the_layers_of_given_ranks_are_kept() -> None:
    made = parse(f"{PIPELINE} --pp-size 4 --num-layers-in-first-pipeline-stage 1 --num-layers-in-last-pipeline-stage 2", 4)
    assert layers_of_stages(made.model, made.parallel) == (1, 5, 4, 2)


@pytest.mark.parametrize(("flags", "kind", "want"), [
    ("--pp-size 2 --pipeline-model-parallel-layout Et*5|t*7L", "1f1b", (5, 7)),
    ("--pp-size 2 --pipeline-model-parallel-layout Ett,|(tt|)*2t*6L", "interleaved", (2, 2, 2, 6)),
    ("--pp-size 2 --pipeline-model-parallel-layout E(t|t)*5tt,L --pipeline-schedule zb1p", "zb1p", (1, 2, 2, 2, 2, 3)),
    ("--pp-size 2 --pipeline-model-parallel-layout Et|tt|t*8|tL --pipeline-schedule zbv", "zbv", (1, 2, 8, 1)),
    ("--pp-size 4 --pipeline-model-parallel-layout E(t*3|)*3t*3L --pipeline-slices 2", "slices", (3, 3, 3, 3)),
])  # fmt: skip
def test_the_layers_of_all_stages_in_megatrons_letters(flags: str, kind: str, want: tuple[int, ...]) -> None:
    made = parse(f"{PIPELINE} {flags}", 4)
    assert (made.parallel.pipeline_kind, layers_of_stages(made.model, made.parallel)) == (kind, want)
    assert made.parallel.stages_per_pipeline_rank * made.parallel.pipeline_model_parallel_size == len(want)
