"""pretrain_bert.py from end to end: one line of losses in every layout, resume, checkpoints that load anywhere, --verify-parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.training import assert_same_run, bert, copy_run, records, run_once, trace, train

from megatron_sp.parallel import gather
from megatron_sp.report.page import page
from megatron_sp.report.reading import read_run

DOUBLE = ("--fp64", "--seq-length", 31, "--vocab-size", 61, "--eval-interval", 3, "--eval-iters", 2, "--norm-placement", "post")
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ()),
    "dp2 zero3": (2, ("--zero-stage", 3)),
    "sp2": (2, ("--sp-size", 2, "--sp-overlap-mode", "chunked")),
    "tp2 seq": (2, ("--tp-size", 2, "--sequence-parallel")),
}
NAMES = list(LAYOUTS)


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    layouts = {name: (ranks, (*DOUBLE, *flags)) for name, (ranks, flags) in LAYOUTS.items()}
    return run_once(tmp_path_factory, layouts, program=bert)


@pytest.mark.often("dp2 zero3", "sp2")
@pytest.mark.parametrize("name", NAMES[1:])
def test_losses_and_what_is_found_lie_on_one_line(name: str, runs: Callable[[str], Path]) -> None:
    got, want = runs(name), runs("alone")
    assert losses(got) == pytest.approx(losses(want), rel=1e-10)
    assert [r["samples_sha"] for r in records(got)] == [r["samples_sha"] for r in records(want)]
    for a, b in zip(records(got, "valid"), records(want, "valid"), strict=True):
        for key in ("loss", "order_loss", "lm_accuracy", "order_accuracy"):
            assert a[key] == pytest.approx(b[key], rel=1e-10), key
        assert 0 <= a["lm_accuracy"] <= 1 and 0 < a["order_accuracy"] <= 1


def others(name: str) -> list[object]:
    """Every reader of a writer's checkpoint; the default run reads each with its neighbour."""
    near = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
    return [pytest.param(name, reader, marks=() if reader == near else pytest.mark.long) for reader in NAMES]


@pytest.mark.parametrize("writer, reader", [pair for name in NAMES for pair in others(name)])
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(writer: str, reader: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[reader]
    load = ("--load", runs(writer), "--ckpt-step", 3, "--save", tmp_path / "run")
    train(tmp_path, *DOUBLE, *flags, *load, ranks=ranks, program=bert).expect(0, "(step 3")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs("alone"))[3:], rel=1e-9)


def test_killed_and_resumed_it_is_equal_to_the_last_bit(tmp_path: Path) -> None:
    """The training data, dropout and the weights are those of a run that nothing befell."""
    flags = ("--sp-size", 2, "--sp-overlap-mode", "split-qkv", "--save-interval", 2, "--no-async-save", "--auto-resume")
    train(tmp_path, *flags, "--save", tmp_path / "whole", ranks=2, program=bert).expect(0)
    run = tmp_path / "killed"
    train(tmp_path, *flags, "--save", run, ranks=2, program=bert, fault="kill:rank=1:at=step.backward:step=4")
    assert [r["step"] for r in records(run)][-1] == 3
    train(tmp_path, *flags, "--save", run, ranks=2, program=bert).expect(0, "resumed from")
    assert_same_run(run, tmp_path / "whole")


def test_packed_rows_without_the_order_head(tmp_path: Path) -> None:
    flags = ("--fp64", "--bert-no-binary-head", "--bert-pack-sequences", "--eval-iters", 1, "--train-iters", 2)
    for name in ("alone", "sp2"):
        ranks, layout = LAYOUTS[name]
        train(tmp_path, *flags, *layout, "--save", tmp_path / name, ranks=ranks, program=bert).expect(0)
    assert losses(tmp_path / "sp2") == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    assert "order_accuracy" not in records(tmp_path / "alone", "valid")[-1]


@pytest.mark.parametrize("name, placement", [("tp2 seq", "pre"), ("sp2", "post"), ("dp2 zero3", "post")])
def test_verify_parallelism_says_that_a_layout_is_right(name: str, placement: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[name]
    said = train(tmp_path, *flags, "--norm-placement", placement, "--verify-parallelism", ranks=ranks, program=bert)
    said.expect(0, "the layout equals one process")


def test_verify_parallelism_finds_what_is_wrong(tmp_path: Path) -> None:
    """The gradient of what the head gets from the ranks of a tp group is doubled."""

    def sabotage(rank: int) -> None:
        name = next(n for n in vars(gather) if n.startswith("_") and hasattr(getattr(gather, n), "backward"))
        function = getattr(gather, name)
        whole = function.backward
        function.backward = staticmethod(lambda ctx, grad: tuple(None if g is None else 2 * g for g in whole(ctx, grad)))

    ranks, flags = LAYOUTS["tp2 seq"]
    train(tmp_path, *flags, "--verify-parallelism", ranks=ranks, setup=sabotage, program=bert).expect(5, "FAILED", "<- differs")


def test_what_it_has_found_is_in_the_summary_and_on_the_page(
    runs: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(runs("alone"), tmp_path / "run")
    last = records(run, "valid")[-1]
    from megatron_sp.commands.cli import main

    assert main(["summarize", str(run)]) == 0
    said = capsys.readouterr().out
    files = read_run(run)
    text = page([files], files.records[-1]["time"])
    for name, title in (("lm_accuracy", "Masked-token accuracy"), ("order_accuracy", "Sentence-order accuracy")):
        assert f"valid {name.replace('_', ' ')}" in said and f"{100 * last[name]:.1f} %" in said
        assert title in text and f"{100 * last[name]:.1f} %" in text
    assert ", where chance is 50 %" in said and "(chance is 50 %)" in text
    assert "Validation: lm accuracy" in text and "Validation: order accuracy" in text


def test_dry_run(tmp_path: Path) -> None:
    said = train(tmp_path, "--dry-run", "--world-size", 8, "--tp-size", 2, "--sp-size", 2, program=bert).expect(0, "dry run: 8 processes")
    assert "parameters:" in said.text and not (tmp_path / "runs").exists()
