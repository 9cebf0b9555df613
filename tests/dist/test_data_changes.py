"""Data that have changed between two parts of a run: noticed whatever the layout, and named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ckpts import with_state
from support.training import Outcome, bert, gpt, records, state, train, write_data

from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.writer import IndexedDatasetWriter

SIZES = ("--vocab-size", 60, "--split", "1")
MORE = ("--train-iters", 8, "--override-opt-param-scheduler")
LESS = ("--micro-batch-size", 1)


def write_documents(prefix: Path) -> Path:
    """Long enough that the fingerprint's probes do not cover it."""
    return write_data(prefix, num_documents=1500)


def replace_tokens(prefix: Path, *, between_probes: bool = True) -> int:
    """Give the tokens other values of the vocabulary, those that the fingerprint looks at excepted; returns how many are others now."""
    path = Path(f"{prefix}.bin")
    tokens = np.fromfile(path, "<u2")
    kept = np.zeros(tokens.size * 2, bool)
    for k in range(16 if between_probes else 0):
        start = max(tokens.nbytes - 4096, 0) * k // 15
        kept[start : start + 4096] = True
    new = np.where(kept.reshape(-1, 2).any(1) | (tokens == 59), tokens, (tokens + 1) % 59).astype("<u2")
    changed = int((new != tokens).sum())
    new.tofile(path)
    return changed


def run_of(tmp_path: Path, data: list[object], *flags: object, **more: Any) -> Path:
    train(tmp_path, "--save", tmp_path / "run", *flags, data=data, **more).expect(0)
    return tmp_path / "run"


def assert_noticed(outcome: Outcome, path: object, first: str = "of step 1)") -> None:
    outcome.expect(4, "the training data is not what the checkpoint was trained on", first, str(path), "--accept-data-change")
    assert "Traceback" not in outcome.text


@pytest.fixture
def x(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "d" / "x")


LAYOUTS = [
    ((1, ()), (2, LESS)),
    pytest.param((2, LESS), (1, ()), marks=pytest.mark.long),
    ((4, (*LESS, "--tp-size", 2, "--zero-stage", 1)), (2, ("--sp-size", 2))),
]


@pytest.mark.often("before0-after0")
@pytest.mark.parametrize("before, after", LAYOUTS)
def test_tokens_replaced_between_the_probes(tmp_path: Path, x: Path, before: Any, after: Any) -> None:
    data = ["--data-path", x, *SIZES]
    run = run_of(tmp_path, data, *before[1], ranks=before[0])
    again = ("--save", run, "--auto-resume", *MORE, *after[1])
    digest = IndexedDataset(x).digest()
    assert replace_tokens(x) > 20_000 and IndexedDataset(x).digest() == digest, "the fingerprint sees nothing"
    assert_noticed(train(tmp_path, *again, data=data, ranks=after[0]), f"{x}.bin, sequence ")
    train(tmp_path, *again, "--accept-data-change", data=data, ranks=after[0]).expect(
        0, "--accept-data-change: the training data is not what", "sample 0 (number 0 of step 1)", "(step 6, 24 samples)"
    )
    said = train(tmp_path, *again, "--train-iters", 9, data=data, ranks=after[0]).expect(0, "(step 8")
    # it was accepted: from now on these are the data
    assert "not what" not in said.text and [entry["step"] for entry in state(run)["samples"]] == [7, 8, 9]


def test_the_samples_of_the_last_steps_are_those_that_are_compared(tmp_path: Path, x: Path) -> None:
    """Of a run that was resumed, too; what is read by later steps may change."""
    data = ["--data-path", x, *SIZES]
    run = run_of(tmp_path, data, "--exit-interval", 2)
    train(tmp_path, "--save", run, "--auto-resume", data=data).expect(0)
    assert [(e["step"], e["consumed_samples"], len(e["digests"])) for e in state(run)["samples"]] == [
        (k, 4 * k - 4, 32) for k in range(1, 7)
    ]
    train(tmp_path, "--save", run, "--auto-resume", *MORE, data=data).expect(0)


def test_a_file_of_equal_size_with_tokens_outside_the_vocabulary(tmp_path: Path, x: Path) -> None:
    data = ["--data-path", x, *SIZES]
    run = run_of(tmp_path, data)
    size = Path(f"{x}.bin").stat().st_size
    kept = Path(f"{x}.bin").read_bytes()
    Path(f"{x}.bin").write_bytes(b"\xff" * size)
    assert_noticed(train(tmp_path, "--save", run, "--auto-resume", *MORE, data=data, ranks=2), "expected 0 to 59")
    Path(f"{x}.bin").write_bytes(kept)
    train(tmp_path, "--save", run, "--auto-resume", *MORE, data=data, ranks=2).expect(0)


def test_one_file_of_a_blend_under_a_ramp_up(tmp_path: Path, x: Path) -> None:
    y = write_data(tmp_path / "d" / "y", num_documents=1500, seed=1)
    data = ["--data-path", 3, x, 1, y, *SIZES]
    flags = ("--rampup-batch-size", 4, 4, 10, "--global-batch-size", 8, *LESS)
    run = run_of(tmp_path, data, *flags, ranks=2)
    replace_tokens(y)
    outcome = train(tmp_path, "--save", run, "--auto-resume", *flags, *MORE, data=data)
    assert_noticed(outcome, f"{y}.bin, sequence ", "the first that differs is sample ")
    assert f"{x}.bin" not in outcome.text


def write_sentences(prefix: Path) -> Path:
    rng = np.random.default_rng(3)
    prefix.parent.mkdir(parents=True)
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(1200):
            lengths = rng.integers(3, 25, int(rng.integers(2, 6)))
            writer.add_document(rng.integers(0, 55, int(lengths.sum())), [int(n) for n in lengths])
    return prefix


@pytest.mark.often("flags1")
@pytest.mark.parametrize("flags", [(), ("--bert-no-binary-head", "--bert-pack-sequences")])
def test_bert(tmp_path: Path, flags: tuple[str, ...]) -> None:
    x = write_sentences(tmp_path / "d" / "x")
    data = ["--data-path", x, *SIZES]
    run = run_of(tmp_path, data, *flags, program=bert)
    train(tmp_path, "--save", run, "--auto-resume", *flags, *MORE, data=data, program=bert, ranks=2).expect(0)
    replace_tokens(x)
    again = train(tmp_path, "--save", run, "--auto-resume", *flags, "--train-iters", 9, data=data, program=bert)
    assert_noticed(again, f"{x}.bin, sentences ")


def test_another_order_of_the_same_data_names_a_sample_too(tmp_path: Path, x: Path) -> None:
    data = ["--data-path", x, *SIZES, "--dataloader-type", "cyclic"]
    run = run_of(tmp_path, data)
    assert_noticed(train(tmp_path, "--save", run, "--auto-resume", *MORE, "--seed", 3, data=data), "(fingerprint ", "(number 0 of step 1)")


def test_synthetic_data_and_a_checkpoint_without_digests(tmp_path: Path) -> None:
    run = run_of(tmp_path, ["--mock-data", "--vocab-size", 60])
    old = shutil.copytree(run, tmp_path / "old")
    with_state(old, lambda made: made.pop("samples"))
    said = train(tmp_path, "--save", old, "--auto-resume", *MORE).expect(0, "has no digests of its samples", "(step 6, 24 samples)")
    assert said.text.count("has no digests") == 1
    assert [entry["step"] for entry in state(old)["samples"]] == [7, 8]
    assert "digests" not in train(tmp_path, "--save", run, "--auto-resume", *MORE, ranks=2).expect(0).text


def test_finetuning_is_on_other_data_and_begins_a_history_of_its_own(tmp_path: Path, x: Path) -> None:
    run = run_of(tmp_path, ["--data-path", x, *SIZES])
    replace_tokens(x, between_probes=False)
    new = tmp_path / "new"
    train(tmp_path, "--load", run, "--finetune", "--save", new, "--train-iters", 2, data=["--data-path", x, *SIZES]).expect(0)
    assert [entry["step"] for entry in state(new)["samples"]] == [1, 2]


def test_what_is_logged_is_of_tokens(tmp_path: Path, x: Path) -> None:
    """Two runs with the same numbers of samples and other tokens saw other data."""
    runs = []
    for name in ("a", "b"):
        train(tmp_path, "--save", tmp_path / name, "--train-iters", 2, data=["--data-path", x, *SIZES], program=gpt).expect(0)
        runs.append([r["samples_sha"] for r in records(tmp_path / name)])
        replace_tokens(x)
    assert not set(runs[0]) & set(runs[1])


def test_a_cyclic_order_that_a_longer_run_changes_is_noticed_too(tmp_path: Path) -> None:
    """The order of synthetic data, as of blends, is drawn from the number of samples, so samples would repeat."""
    data = ["--mock-data", "--vocab-size", 60, "--dataloader-type", "cyclic"]
    run = run_of(tmp_path, data)
    again = train(tmp_path, "--save", run, "--auto-resume", *MORE, data=data)
    assert_noticed(again, "if no file has changed, the order has")


def test_other_data_to_be_measured_on_is_said(tmp_path: Path) -> None:
    a, b, c = (write_data(tmp_path / "d" / name, seed=seed) for seed, name in enumerate("abc"))
    data = ["--train-data-path", a, "--vocab-size", 60, "--eval-iters", 1]
    run = run_of(tmp_path, [*data, "--valid-data-path", b])
    said = train(tmp_path, "--save", run, "--auto-resume", *MORE, data=[*data, "--valid-data-path", c], ranks=2).expect(
        0, "note: the validation data have changed"
    )
    assert said.text.count("validation data have changed") == 1
    again = train(
        tmp_path, "--save", run, "--auto-resume", "--train-iters", 9, "--override-opt-param-scheduler", data=[*data, "--valid-data-path", c]
    )
    assert "validation data have changed" not in again.expect(0).text
