"""The training program under every layout: one line of losses, checkpoints that load anywhere, and --verify-parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.training import run_once, trace, train

from megatron_sp.optim import gradients
from megatron_sp.parallel import split_projection

DOUBLE = ("--fp64", "--num-query-groups", 2, "--seq-length", 31, "--vocab-size", 61)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ()),
    "dp2": (2, ()),
    "tp2": (2, ("--tp-size", 2)),
    "tp2 seq": (2, ("--tp-size", 2, "--sequence-parallel")),
    "sp2": (2, ("--sp-size", 2)),
    "sp2 split": (2, ("--sp-size", 2, "--split-qkv-linear", "--sp-overlap-comm")),
    "sp2 auto": (2, ("--ds-sequence-parallel-size", 2, "--sp-overlap-comm")),
    "sp2 dp2 chunked": (4, ("--sp-size", 2, "--sp-head-chunks", 2)),
    "tp2 sp2": (4, ("--tp-size", 2, "--sp-size", 2, "--sequence-parallel", "--sp-overlap-mode", "split-qkv")),
    "sp3": (3, ("--sp-size", 3, "--sp-overlap-mode", "chunked", "--recompute-granularity", "full")),
}


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return run_once(tmp_path_factory, {name: (ranks, (*DOUBLE, *flags)) for name, (ranks, flags) in LAYOUTS.items()})


@pytest.mark.often("sp3", "sp2 auto", "sp2 dp2 chunked", "tp2 seq")
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "alone"])
def test_losses_and_gradient_norms_lie_on_one_line(name: str, runs: Callable[[str], Path]) -> None:
    got, want = trace(runs(name)), trace(runs("alone"))
    assert losses(runs(name)) == pytest.approx(losses(runs("alone")), rel=1e-10)
    assert [entry[2] for entry in got.values()] == [entry[2] for entry in want.values()], "the same samples"
    norms = [[float.fromhex(entry[1]) for entry in t.values()] for t in (got, want)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-8)


WRITERS, READERS = ("tp2 seq", "sp3", "tp2 sp2"), ("alone", "tp2", "sp2 dp2 chunked")
OFTEN = [*zip(WRITERS, READERS, strict=True), *zip(WRITERS, READERS[1:], strict=False)]  # the rest is marked long


@pytest.mark.often("sp3-sp2 dp2 chunked")
@pytest.mark.parametrize(
    "writer, reader", [pytest.param(w, r, marks=() if (w, r) in OFTEN else pytest.mark.long) for w in WRITERS for r in READERS]
)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(writer: str, reader: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[reader]
    load = ("--load", runs(writer), "--ckpt-step", 3, "--save", tmp_path / "run")
    train(tmp_path, *DOUBLE, *flags, *load, ranks=ranks).expect(0, "(step 3")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs("alone"))[3:], rel=1e-9)


def test_auto_keeps_its_choice_on_resume(tmp_path: Path) -> None:
    flags = ("--sp-size", 2, "--sp-overlap-comm", "--save", tmp_path / "run", "--auto-resume")
    train(tmp_path, *flags, "--exit-interval", 3, ranks=2).expect(0, "--sp-overlap-mode auto: ")
    again = train(tmp_path, *flags, ranks=2).expect(0, "resumed from")
    assert "--sp-overlap-mode auto: " not in again.text, "no second probe: the checkpoint's layout is the same"


@pytest.mark.parametrize("name", ["alone", "dp2", "tp2 seq", "sp2 auto", "tp2 sp2"])
def test_verify_parallelism_says_that_a_layout_is_right(name: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[name]
    out = train(tmp_path, *flags, "--verify-parallelism", ranks=ranks).expect(0, "the layout equals one process")
    assert out.text.count("size ") == 7 * (3 if name == "sp2 auto" else 1), "loss, norm and the five worst gradients of each mode"
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("runs/*")), "nothing is written"


@pytest.mark.parametrize(
    "name, where, what, says",
    [
        ("tp2 seq", gradients.FlatGradients, "_sum_over_tp", "layernorm.weight"),
        ("sp2", split_projection.RowWiseGrad, "put_product", "linear_qkv.weight"),
    ],
)
def test_verify_parallelism_finds_what_is_wrong(name: str, where: type, what: str, says: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[name]

    def sabotage(rank: int) -> None:
        whole = getattr(where, what)

        def broken(self: object, *args: object) -> None:
            if "Alone" not in type(getattr(self, "tp", None)).__name__ and what == "_sum_over_tp":
                return
            whole(self, *args)
            if what == "put_product" and rank == 1:
                self._view.mul_(1.001)  # type: ignore[attr-defined]

        setattr(where, what, broken)

    train(tmp_path, *flags, "--verify-parallelism", ranks=ranks, setup=sabotage).expect(5, "FAILED", says, "<- differs")


def test_verify_parallelism_takes_layers_away_where_memory_is_short(tmp_path: Path) -> None:
    def little_memory(rank: int) -> None:
        from megatron_sp.training import verify

        verify._free_memory = lambda device: 2_500_000  # type: ignore[assignment]

    flags = ("--tp-size", 2, "--num-layers", 9, "--verify-parallelism")
    train(tmp_path, *flags, ranks=2, setup=little_memory).expect(0, "9 layers on one process do not fit", "the layout equals one process")


def test_an_impossible_layout_is_refused_before_anything_starts(tmp_path: Path) -> None:
    train(tmp_path, "--sp-size", 3, ranks=2).expect(
        2, "must be a multiple of tensor_model_parallel_size * sequence_parallel_size (1 * 3 = 3)"
    )
    train(tmp_path, "--tp-size", 2, "--num-query-groups", 2, "--num-attention-heads", 3, "--kv-channels", 8, ranks=2).expect(
        2, "3 = 1 * 2 + 1"
    )


def short_documents(rank: int) -> None:
    from megatron_sp.data import gpt_dataset

    gpt_dataset._EOD_PROBABILITY = 0.1


@pytest.mark.long
def test_documents_are_kept_apart_in_every_layout(tmp_path: Path) -> None:
    plain = ("--fp64", "--attention-dropout", 0, "--train-iters", 3)
    flags = (*plain, "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    train(tmp_path, *flags, "--save", tmp_path / "alone", setup=short_documents).expect(0)
    for name in ("tp2 seq", "sp2", "sp2 split", "sp3"):
        ranks, layout = LAYOUTS[name]
        train(tmp_path, *flags, *layout, "--save", tmp_path / name, ranks=ranks, setup=short_documents).expect(0)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    for flag in ("--reset-position-ids", "--reset-attention-mask"):
        train(tmp_path, *plain, "--eod-mask-loss", flag, "--save", tmp_path / flag, setup=short_documents).expect(0)
        assert losses(tmp_path / flag) != pytest.approx(losses(tmp_path / "alone"), rel=1e-6), "each of the two flags does something"
