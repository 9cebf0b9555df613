"""The training program with experts: the losses of one process, checkpoints that load over any other ep, bad steps, lost ranks, reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.training import KILLED, NO_DROPOUT, assert_same_run, records, run_once, state, tensors, trace, train

from megatron_sp.parallel.router_pass import RouterStep
from megatron_sp.training import verify

EXPERTS = ("--num-experts", 6, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 24, "--moe-aux-loss-coeff", 0.1, "--moe-z-loss-coeff", 0.01)
BIASED = (
    *EXPERTS, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--moe-router-load-balancing-type",
    "global_aux_loss", "--moe-shared-expert-intermediate-size", 16,
)  # fmt: skip
SHAPE = ("--fp64", *NO_DROPOUT, "--num-layers", 3, "--seq-length", 31, "--vocab-size", 61, "--global-batch-size", 12, *BIASED)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ("--micro-batch-size", 6)),
    "ep2": (2, ("--ep-size", 2, "--micro-batch-size", 2)),
    "ep1": (2, ("--micro-batch-size", 3)),
    "tp2": (2, ("--tp-size", 2, "--micro-batch-size", 6)),
    "ep1, stage 2": (2, ("--micro-batch-size", 3, "--zero-stage", 2)),
    "ep3, chunks, stage 1": (3, ("--ep-size", 3, "--moe-chunks", 2, "--micro-batch-size", 2, "--zero-stage", 1)),
    "ep2 of 4, stage 3": (4, ("--ep-size", 2, "--micro-batch-size", 1, "--zero-stage", 3, "--recompute-granularity", "full")),
    "ep2 tp2": (4, ("--ep-size", 2, "--tp-size", 2, "--micro-batch-size", 3)),
    "ep2 tp2, tp_seq, stage 1": (2, ("--ep-size", 2, "--tp-size", 2, "--sequence-parallel", "--micro-batch-size", 3, "--zero-stage", 1)),
    "ep2 sp2": (2, ("--ep-size", 2, "--sp-size", 2, "--micro-batch-size", 4)),
    "ep2 cp2": (2, ("--ep-size", 2, "--cp-size", 2, "--micro-batch-size", 4)),
    "ep2 pp2, zb1p": (4, ("--ep-size", 2, "--pp-size", 2, "--pipeline-schedule", "zb1p", "--micro-batch-size", 1)),
}  # fmt: skip
NAMES = [name for name in LAYOUTS if name != "alone"]
OFTEN = ("ep1", "tp2", "ep2", "ep3, chunks, stage 1", "ep2 tp2, tp_seq, stage 1", "ep2 pp2, zb1p")
CHECKED = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in NAMES]
PAIRS = [
    ("alone", "ep2"), ("ep3, chunks, stage 1", "ep2 tp2, tp_seq, stage 1"), ("ep2 pp2, zb1p", "alone"),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in zip(NAMES, [*NAMES[4:], *NAMES[:4]], strict=True)),
]  # fmt: skip


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


def biases(run: Path) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors(run).items() if name.endswith("expert_bias")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    layouts = {name: (ranks, (*SHAPE, *flags)) for name, (ranks, flags) in LAYOUTS.items()}
    return run_once(tmp_path_factory, layouts, "--eval-interval", 2, "--eval-iters", 1, "--log-params-norm")


@pytest.mark.often("ep2 tp2, tp_seq, stage 1", "ep2 pp2, zb1p")
@pytest.mark.parametrize("name", CHECKED)
def test_losses_norms_and_loads_are_those_of_one_process(name: str, runs: Callable[[str], Path]) -> None:
    assert losses(runs(name)) == pytest.approx(losses(runs("alone")), rel=1e-10)
    got, want = records(runs(name)), records(runs("alone"))
    for key in ("grad_norm", "params_norm", "balance_loss", "z_loss"):
        assert [r[key] for r in got] == pytest.approx([r[key] for r in want], rel=1e-8), key
    for key in ("expert_load_max_by_layer", "experts_idle_by_layer", "expert_entropy"):
        assert [r[key] for r in got] == [r[key] for r in want], key
    valid = [[r["loss"] for r in records(runs(each), "valid", "test")] for each in (name, "alone")]
    assert len(valid[0]) > 1 and valid[0] == pytest.approx(valid[1], rel=1e-10)
    of_both = biases(runs(name)), biases(runs("alone"))
    assert len(of_both[0]) == 3 and all(torch.equal(of_both[0][n], t) and t.any() for n, t in of_both[1].items())


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_checkpoint_goes_on_over_any_other_ep(writer: str, reader: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[reader]
    more = ("--load", runs(writer), "--ckpt-step", 3, "--save", tmp_path / "run")
    train(tmp_path, *SHAPE, *flags, *more, ranks=ranks).expect(0, "(step 3")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs("alone"))[3:], rel=1e-9)


@pytest.mark.often("[1]+[0]")
@pytest.mark.parametrize("has", ["[1]+[0]", "[0]+[1]"])
def test_a_stage_without_experts(tmp_path: Path, has: str) -> None:
    flags = (*SHAPE, "--num-layers", 2, "--moe-layer-freq", has, "--zero-stage", 0)
    found = []
    for ranks, more in ((1, ("--micro-batch-size", 6)), (4, ("--pp-size", 2, "--ep-size", 2, "--micro-batch-size", 2))):
        run = tmp_path / str(ranks)
        train(tmp_path, *flags, *more, "--save", run, ranks=ranks).expect(0)
        found.append([*losses(run), *(r["grad_norm"] for r in records(run))])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


EP2 = (*EXPERTS, "--ep-size", 2, "--micro-batch-size", 1)


@pytest.mark.often("fp16")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_to_the_last_bit(tmp_path: Path, precision: str) -> None:
    kinds = {"fp32": (), "fp16": ("--fp16", "--initial-loss-scale", 2.0**19, "--hysteresis", 1, "--loss-scale-window", 2)}
    flags = (
        *kinds[precision], *EP2, "--zero-stage", 1, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, more in ((whole, ()), (parts, ("--exit-interval", 3)), (parts, ("--auto-resume",))):
        train(tmp_path, *flags, "--save", run, *more, ranks=2).expect(0)
    assert_same_run(parts, whole)
    if precision == "fp16":
        assert 0 < state(whole)["num_updates"] < 6, "some steps were meant to overflow"


@pytest.mark.parametrize("term", [("--moe-aux-loss-coeff", 100.0), ("--moe-z-loss-coeff", 1.0)])
def test_the_loss_scale_changes_no_term(tmp_path: Path, term: tuple[object, ...]) -> None:
    norms = []
    for power in (3, 9):
        run = tmp_path / str(power)
        flags = (*EXPERTS[:6], *term, "--fp16", "--initial-loss-scale", 2.0**power, "--train-iters", 2, "--lr", 0.0, "--min-lr", 0.0)
        train(tmp_path, *flags, "--save", run).expect(0)
        norms.append([r["grad_norm"] for r in records(run)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2), "sums in fp16 round differently with another scale"


def test_dropout_is_that_of_one_process(tmp_path: Path) -> None:
    found = []
    for ranks, flags in ((1, EXPERTS), (2, EP2)):
        run = tmp_path / str(ranks)
        train(tmp_path, "--fp64", "--attention-dropout", 0, "--hidden-dropout", 0.3, *flags, "--save", run, ranks=ranks).expect(0)
        found.append(losses(run))
    assert found[0] == pytest.approx(found[1], rel=1e-10)


@pytest.mark.parametrize(("rank", "what"), [(1, "loss"), (0, "grad")])
def test_a_bad_step_is_skipped_by_all(tmp_path: Path, rank: int, what: str) -> None:
    """The biases of the routers stay, too: two runs that differ in nothing but the bad step's number end with other ones."""
    flags = (*EP2, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--max-bad-steps", 1)
    train(tmp_path, *flags, "--save", tmp_path / "run", ranks=2, fault=f"nan:rank={rank}:at={what}:step=3").expect(
        0, "is not finite", "skipped"
    )
    assert records(tmp_path / "run")[-1]["skipped_steps"] == 1
    moved = [float(t.abs().max()) for t in biases(tmp_path / "run").values()]
    assert moved and max(moved) <= 5 * 1e-3 * (1 + 1e-6), "a skipped step moved a bias: six steps, of which one was left out"


@pytest.mark.parametrize("place", ["step.forward", "step.backward"])
def test_the_others_end_when_a_rank_is_lost(tmp_path: Path, place: str) -> None:
    ended = train(
        tmp_path, *EP2, "--save", tmp_path / "run", ranks=2, fault=f"kill:rank=1:at={place}:step=3", setup=lambda _: None
    )  # fmt: skip
    assert ended.codes == [7, KILLED], ended.text


@pytest.mark.parametrize(
    "more", [("--ep-size", 2), ("--ep-size", 2, "--sp-size", 2, "--moe-chunks", 2), ("--tp-size", 2, "--sequence-parallel", "--ep-size", 2)]
)
def test_verification(tmp_path: Path, more: tuple[object, ...]) -> None:
    flags = (*EXPERTS, *more, "--verify-parallelism", "--hidden-dropout", 0.1)
    train(tmp_path, *flags, ranks=2).expect(
        0, "the smallest margin of a choice of experts is", "loads of experts", "the layout equals one process"
    )


def test_verification_replays_routing_where_experts_tie(tmp_path: Path) -> None:
    """With weights of zero all experts tie, and what decides is the number; the choices of one process are made in any case."""
    flags = (*EXPERTS, "--ep-size", 2, "--init-method-std", 0, "--verify-parallelism")
    train(tmp_path, *flags, ranks=2).expect(0, "the layout makes the choices of the one process", "the layout equals one process")


def test_verification_replays_each_micro_batch(tmp_path: Path) -> None:
    flags = (*EXPERTS, "--ep-size", 2, "--micro-batch-size", 1, "--global-batch-size", 4, "--verify-parallelism")

    def setup(_: int) -> None:
        verify._SMALL_MARGIN = 10.0

    train(tmp_path, *flags, ranks=2, setup=setup).expect(
        0, "the layout makes the choices of the one process", "the layout equals one process"
    )


def test_verification_compares_loads(tmp_path: Path) -> None:
    def setup(_: int) -> None:
        loads_in = RouterStep.loads_in
        RouterStep.loads_in = lambda self, told: loads_in(self, told) + (self.watched is None)  # type: ignore[method-assign]

    ended = train(tmp_path, *EXPERTS, "--ep-size", 2, "--verify-parallelism", ranks=2, setup=setup).expect(5, "FAILED")
    assert [line.split()[:3] for line in ended.text.splitlines() if line.endswith("<- differs")] == [["loads", "of", "experts"]]


def test_the_log_line_tells_the_balance(tmp_path: Path) -> None:
    ended = train(tmp_path, *EP2, "--save", tmp_path / "run", ranks=2).expect(0, " of the mean, ", " idle, entropy ")
    assert "load " in ended.text
    record = records(tmp_path / "run")[-1]
    assert 1 <= record["expert_load_max"] <= 3 and 0 < record["expert_entropy"] <= 1 and len(record["expert_load_max_by_layer"]) == 2
