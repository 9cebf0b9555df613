"""--balance-rows: other ranks compute a row, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.training import assert_same_run, bert, records, state, tensors, trace, train, write_data

from megatron_sp.data.loader import Batch, BatchLoader
from megatron_sp.data.writer import IndexedDatasetWriter

PACKED = (
    "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss", "--position-embedding-type", "rope", "--window-size", 20,
    "--attention-dropout", 0,
)  # fmt: skip
DOUBLE = ("--fp64", "--seq-length", 31, "--global-batch-size", 12, "--eval-interval", 3, "--eval-iters", 2)
DEALT = ("--balance-rows",)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "by index": (2, ("--micro-batch-size", 2)),
    "dealt": (2, ("--micro-batch-size", 2, *DEALT)),
    "dealt, dp3, zero 2": (3, ("--micro-batch-size", 1, "--zero-stage", 2, "--num-workers", 0, *DEALT)),
    "dealt, cp2 dp2": (4, ("--micro-batch-size", 3, "--cp-size", 2, *DEALT)),
}


def note_rows(run: Path) -> Callable[[int], None]:
    """In each child: write down the samples of every micro-batch that training reads, and those of validation, a line for each step."""

    def setup(rank: int) -> None:
        step = BatchLoader.step

        def noted(self: BatchLoader, consumed_samples: int, num_microbatches: int) -> list[Batch]:
            batches = step(self, consumed_samples, num_microbatches)
            with (run.parent / f"{run.name}-{'train' if self._digests else 'valid'}-{rank}.txt").open("a") as file:
                file.write(json.dumps([batch["sample_ids"].tolist() for batch in batches]) + "\n")
            return batches

        BatchLoader.step = noted  # type: ignore[method-assign]

    return setup


def rows_of(run: Path, split: str, rank: int) -> list[list[list[int]]]:
    """Samples of each step's micro-batches."""
    return [json.loads(line) for line in (run.parent / f"{run.name}-{split}-{rank}.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    return ("--data-path", write_data(tmp_path_factory.mktemp("data") / "x", longest=60), "--split", "8,2,0", "--vocab-size", 60)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, data: tuple[object, ...]) -> Callable[[str], Path]:
    runs: dict[str, Path] = {}

    def made(name: str) -> Path:
        if name not in runs:
            ranks, flags = LAYOUTS[name]
            run = runs[name] = tmp_path_factory.mktemp("run") / "run"
            save = ("--save", run, "--save-interval", 3)
            train(run.parent, *DOUBLE, *PACKED, *flags, *save, ranks=ranks, data=data, setup=note_rows(run)).expect(0)
        return runs[name]

    return made


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


def assert_on_one_line(got: Path, want: Path, since: int = 0) -> None:
    """Losses, gradient norms and samples of all steps after ``since``, and the weights at the end."""
    taken, wanted = sorted(trace(got).items()), sorted(trace(want).items())[since:]
    assert [step for step, _ in taken] == [step for step, _ in wanted] and len(taken) >= 3
    for (_, a), (_, b) in zip(taken, wanted, strict=True):
        assert float.fromhex(a[0]) == pytest.approx(float.fromhex(b[0]), rel=1e-10)
        assert float.fromhex(a[1]) == pytest.approx(float.fromhex(b[1]), rel=1e-8)
        assert a[2] == b[2], "the same samples, in the order of the global batch"
    weights = tensors(want)
    for name, found in tensors(got).items():
        if found.is_floating_point() and "." in name and "exp_avg" not in name:
            torch.testing.assert_close(found, weights[name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.often("dealt")
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "dealt" in name])
def test_nothing_changes_but_who_computes_a_row(name: str, run_of: Callable[[str], Path]) -> None:
    got, want = run_of(name), run_of("by index")
    assert_on_one_line(got, want)
    assert [s["digests"] for s in state(got)["samples"]] == [s["digests"] for s in state(want)["samples"]]
    assert [r["loss"] for r in records(got, "valid")] == pytest.approx([r["loss"] for r in records(want, "valid")], rel=1e-10)


def test_rows_go_to_other_ranks_and_validation_stays(run_of: Callable[[str], Path]) -> None:
    """Every row of a step once, as many to each rank; in some step they are not those by index."""
    dealt, by_index = ([rows_of(run_of(name), "train", rank) for rank in range(2)] for name in ("dealt", "by index"))
    assert len(dealt[0]) == len(by_index[0]) == 6
    for step in range(6):
        every = [np.array(rank[step]) for rank in dealt]
        assert [rows.shape for rows in every] == [(3, 2)] * 2
        assert sorted(np.concatenate(every).flat) == list(range(12 * step, 12 * step + 12))
    assert sum(a != b for a, b in zip(dealt[0], by_index[0], strict=True)) >= 4
    for rank in range(2):
        assert rows_of(run_of("dealt"), "valid", rank) == rows_of(run_of("by index"), "valid", rank)


@pytest.mark.long
def test_ranks_of_a_replica_have_the_same_rows(run_of: Callable[[str], Path]) -> None:
    rows = [rows_of(run_of("dealt, cp2 dp2"), "train", rank) for rank in range(4)]
    assert rows[0] == rows[1] != rows[2] == rows[3]


@pytest.mark.parametrize("ranks, flags", [
    (3, ("--micro-batch-size", 2, *DEALT)), pytest.param(1, ("--micro-batch-size", 3, *DEALT), marks=pytest.mark.long),
    pytest.param(2, ("--micro-batch-size", 1), marks=pytest.mark.long),
])  # fmt: skip
def test_it_goes_on_at_another_dp_size(
    ranks: int, flags: tuple[object, ...], run_of: Callable[[str], Path], data: tuple[object, ...], tmp_path: Path
) -> None:
    """The samples of the steps before the checkpoint are read again and compared, too."""
    load = ("--load", run_of("dealt"), "--ckpt-step", 3, "--save", tmp_path / "run")
    train(tmp_path, *DOUBLE, *PACKED, *flags, *load, ranks=ranks, data=data).expect(0, "(step 3")
    assert_on_one_line(tmp_path / "run", run_of("by index"), since=3)


def test_a_resumed_run_is_the_same_to_the_bit(run_of: Callable[[str], Path], data: tuple[object, ...], tmp_path: Path) -> None:
    _, flags = LAYOUTS["dealt"]
    for more in (("--exit-interval", 4), ("--auto-resume",)):
        train(tmp_path, *DOUBLE, *PACKED, *flags, *more, "--save", tmp_path / "run", ranks=2, data=data).expect(0)
    assert_same_run(tmp_path / "run", run_of("dealt"))


@pytest.mark.long
def test_packed_rows_of_bert(tmp_path: Path) -> None:
    flags = ("--fp64", "--seq-length", 47, "--bert-no-binary-head", "--bert-pack-sequences", "--global-batch-size", 8, "--train-iters", 3)
    for name, more in (("dealt", DEALT), ("by index", ())):
        run = tmp_path / name
        train(tmp_path, *flags, *more, "--save", run, ranks=2, program=bert, setup=note_rows(run)).expect(0)
    assert_on_one_line(tmp_path / "dealt", tmp_path / "by index")
    assert rows_of(tmp_path / "dealt", "train", 0) != rows_of(tmp_path / "by index", "train", 0)


def test_verify_parallelism_looks_at_dealt_rows(data: tuple[object, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = (*DOUBLE, *PACKED, *DEALT, "--micro-batch-size", 3, "--verify-parallelism")
    train(tmp_path, *flags, ranks=2, data=data, setup=note_rows(run)).expect(0, "the layout equals one process")
    mine = rows_of(run, "valid", 1)[0]  # without digests
    assert sorted(np.array(mine).flat) != [3, 4, 5, 9, 10, 11], "not those by index"


def test_data_whose_documents_end_elsewhere(tmp_path: Path) -> None:
    """The lengths in the index then say little about attention: said at the start, and nothing else is wrong."""
    data = ("--data-path", write_data(tmp_path / "d" / "x"), "--split", "1,0,0", "--vocab-size", 60)
    more = tmp_path / "d" / "more"
    with IndexedDatasetWriter(more, dtype=np.uint16) as writer:
        for tokens in np.random.default_rng(1).integers(50, 60, (60, 40)):
            writer.add_document(np.append(tokens, 59))
    flags = ("--seq-length", 31, "--reset-attention-mask", "--train-iters", 1, *DEALT)
    says = "warning: --balance-rows takes documents to end where those of the data files do, and in 6 of 8 rows looked at"
    train(tmp_path, *flags, ranks=2, data=("--data-path", more, *data[2:])).expect(0, says)
    train(tmp_path, *flags, "--eod-id", 7, ranks=2, data=data).expect(4, "60 end with 59", "--eod-id 59; or leave the flag out")
    assert "--balance-rows" not in train(tmp_path, *flags, ranks=2, data=data).expect(0).text
