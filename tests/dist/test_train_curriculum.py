"""Sequences that are cut off by a curriculum: losses are those of truncated samples, in every layout; what is counted and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.training import NO_DROPOUT, assert_same_run, records, train, write_data

from megatron_sp.data.dataset import Sample
from megatron_sp.data.gpt_dataset import MockGPTDataset

STAGES = ("--seq-length-curriculum", "fixed_discrete", "5:1", "13:3", "32")  # steps 1, 2 and 3, then all others
LENGTHS = (5, 13, 13, 32, 32)
EXACT = ("--fp64", *NO_DROPOUT, "--train-iters", 5)


def of_truncated(length: int) -> Callable[[int], None]:
    """Replace the samples by their beginnings, for a run that knows of no longer ones."""

    def setup(_: int) -> None:
        original = MockGPTDataset.__getitem__

        def beginning(self: MockGPTDataset, i: int) -> Sample:
            self.seq_length = 32
            return {name: row[:length] for name, row in original(self, i).items()}

        MockGPTDataset.__getitem__ = beginning  # type: ignore[method-assign]

    return setup


def numbers(run: Path) -> list[tuple[float, float]]:
    return [(r["loss"], r["grad_norm"]) for r in records(run)]


def test_losses_and_gradients_are_those_of_truncated_samples(tmp_path: Path) -> None:
    run, found = tmp_path / "run", []
    train(tmp_path, "--save", run, *STAGES, *EXACT, "--lr", 0, "--eval-iters", 1).expect(
        0, "global batch 4 x 32 tokens (now 4 x 5), steps", "length 13 "
    )
    for length in sorted(set(LENGTHS)):
        short = tmp_path / str(length)
        flags = ("--seq-length", length, "--max-position-embeddings", 32, *EXACT, "--lr", 0, "--save", short)
        train(tmp_path, *flags, setup=of_truncated(length)).expect(0)
        found += [each for each, own in zip(numbers(short), LENGTHS, strict=True) if own == length]
    assert numbers(run) == found
    assert [r["seq_length"] for r in records(run)] == list(LENGTHS)
    assert [r["consumed_tokens"] for r in records(run)] == [4 * sum(LENGTHS[: i + 1]) for i in range(5)]
    assert [r["loss_tokens"] for r in records(run)] == [4 * length for length in LENGTHS]
    whole = tmp_path / "whole"
    train(tmp_path, "--save", whole, *EXACT, "--lr", 0, "--eval-iters", 1).expect(0)
    assert [r["loss"] for r in records(run, "valid", "test")] == [r["loss"] for r in records(whole, "valid", "test")], "on whole samples"


LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "tp and its sequence, dp": (4, ("--tp-size", 2, "--sequence-parallel", "--zero-stage", 3, "--recompute-granularity", "full")),
    "sp and cp": (4, ("--sp-size", 2, "--cp-size", 2, "--zero-stage", 1)),
    "slices of a pipeline, cp": (4, ("--pp-size", 2, "--cp-size", 2, "--pipeline-schedule", "slices", "--pipeline-slices", 3)),
}


@pytest.mark.long
def test_every_layout_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """With documents, whose ends are cut off, too."""
    data = ("--data-path", write_data(tmp_path / "d" / "x"), "--split", "1,0,0", "--vocab-size", 60)
    documents = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss", "--position-embedding-type", "rope")
    train(tmp_path, "--save", tmp_path / "one", *STAGES, *EXACT, *documents, data=data).expect(0)
    for name, (ranks, layout) in LAYOUTS.items():
        run = tmp_path / name.replace(" ", "-")
        train(tmp_path, "--save", run, *STAGES, *EXACT, *documents, *layout, data=data, ranks=ranks).expect(0)
        for got, want in zip(numbers(run), numbers(tmp_path / "one"), strict=True):
            assert got == pytest.approx(want, rel=1e-9), name


def test_a_resumed_run_goes_on_with_the_length_of_its_step_and_ends_when_its_tokens_are_over(tmp_path: Path) -> None:
    """4 * (8 + 12 + 12 + 16 + 20 + 24) tokens in six steps; the learning rate goes by them."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = (
        "--seq-length-curriculum", "fixed_linear", 6, 32, 8, 4, "--train-tokens", 333, "--train-samples", 1000, "--lr-decay-tokens", 1000,
        "--lr-warmup-tokens", 64, "--lr-decay-style", "linear", "--lr", 1,
    )  # fmt: skip
    train(tmp_path, *flags, "--save", whole).expect(0, "stopped at step 6: the run is complete")
    train(tmp_path, *flags, "--save", parts, "--exit-interval", 3).expect(0)
    train(tmp_path, *flags, "--save", parts, "--auto-resume").expect(0)
    assert_same_run(parts, whole)
    before = [0, 32, 80, 128, 192, 272]
    assert [r["consumed_tokens"] for r in records(whole)] == [*before[1:], 368]
    assert [r["lr"] for r in records(whole)] == pytest.approx([n / 64 if n <= 64 else 1 - (n - 64) / 936 for n in before])
