"""The training program with a pipeline: the losses of one process, checkpoints that load anywhere, bad steps, stops and lost ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.training import KILLED, NO_DROPOUT, assert_same_run, bert, records, run_once, state, trace, train

FOUR = ("--fp64", "--num-layers", 4, "--num-query-groups", 2, "--seq-length", 31, "--vocab-size", 61, "--global-batch-size", 12)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ("--micro-batch-size", 6)),
    "pp2": (2, ("--pp-size", 2, "--micro-batch-size", 2)),
    "pp2, one micro-batch": (2, ("--pp-size", 2, "--micro-batch-size", 12)),
    "pp2, interleaved, stage 1": (2, (
        "--pp-size", 2, "--num-layers-per-virtual-pipeline-stage", 1, "--zero-stage", 1, "--micro-batch-size", 2,
    )),
    "pp2, zb1p, stage 2": (2, ("--pp-size", 2, "--pipeline-schedule", "zb1p", "--zero-stage", 2, "--micro-batch-size", 3)),
    "pp2, zbv, stage 3": (2, ("--pp-size", 2, "--enable-zbv-pipeline", "--zero-stage", 3, "--micro-batch-size", 2)),
    "pp3": (3, ("--pp-size", 3, "--decoder-last-pipeline-num-layers", 1, "--micro-batch-size", 2)),
    "pp4, untied rows": (4, ("--pp-size", 4, "--recompute-granularity", "full", "--micro-batch-size", 2)),
    "pp2 dp2, zb1p, stage 1": (4, (
        "--pp-size", 2, "--pipeline-schedule", "zb1p", "--num-virtual-stages-per-pipeline-rank", 2, "--zero-stage", 1,
        "--micro-batch-size", 2,
    )),
    "pp2 tp2, stage 3": (4, ("--pp-size", 2, "--tp-size", 2, "--sequence-parallel", "--zero-stage", 3, "--micro-batch-size", 3)),
    "pp2 sp2": (4, ("--pp-size", 2, "--sp-size", 2, "--sp-overlap-mode", "chunked", "--micro-batch-size", 3)),
    "pp2, slices, stage 1": (2, ("--pp-size", 2, "--pipeline-slices", 3, "--zero-stage", 1, "--micro-batch-size", 3)),
    "pp2 cp2, slices": (4, (
        "--pp-size", 2, "--cp-size", 2, "--pipeline-schedule", "slices", "--recompute-granularity", "full", "--micro-batch-size", 3,
    )),
    "pp2 cp2, zbv": (4, ("--pp-size", 2, "--cp-size", 2, "--enable-zbv-pipeline", "--attention-dropout", 0, "--micro-batch-size", 3)),
}  # fmt: skip
NAMES = [name for name in LAYOUTS if name != "alone"]
OFTEN = (
    "pp2",
    "pp2, interleaved, stage 1",
    "pp2, zbv, stage 3",
    "pp2 dp2, zb1p, stage 1",
    "pp2, slices, stage 1",
)  # the rest is marked long
CHECKED = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in NAMES]
PAIRS = [
    ("alone", "pp2"), ("pp2", "alone"), ("pp2, zbv, stage 3", "pp2 dp2, zb1p, stage 1"),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in zip(NAMES, [*NAMES[4:], *NAMES[:4]], strict=True)),
]  # fmt: skip


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    layouts = {name: (ranks, (*FOUR, *NO_DROPOUT, *flags)) for name, (ranks, flags) in LAYOUTS.items()}
    return run_once(
        tmp_path_factory, layouts, "--eval-interval", 2, "--eval-iters", 1, "--log-params-norm", "--log-num-zeros-in-grad",
    )  # fmt: skip


@pytest.mark.often("pp2, slices, stage 1", "pp2, zbv, stage 3")
@pytest.mark.parametrize("name", CHECKED)
def test_losses_and_norms_are_those_of_one_process(name: str, runs: Callable[[str], Path]) -> None:
    assert losses(runs(name)) == pytest.approx(losses(runs("alone")), rel=1e-10)
    got, want = records(runs(name)), records(runs("alone"))
    for key in ("grad_norm", "params_norm"):
        assert [r[key] for r in got] == pytest.approx([r[key] for r in want], rel=1e-8)
    biases_of_keys = 4 * 2 * 8  # their gradient is rounding alone
    assert all(abs(a["num_zeros_in_grad"] - b["num_zeros_in_grad"]) <= biases_of_keys for a, b in zip(got, want, strict=True))
    valid = [[r["loss"] for r in records(runs(each), "valid", "test")] for each in (name, "alone")]
    assert len(valid[0]) > 1 and valid[0] == pytest.approx(valid[1], rel=1e-10)
    start, of_one = records(runs(name), "start")[0], records(runs("alone"), "start")[0]
    assert start["num_params"] == of_one["num_params"]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_checkpoint_of_any_pipeline_goes_on_in_any_other(writer: str, reader: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[reader]
    more = ("--load", runs(writer), "--ckpt-step", 3, "--save", tmp_path / "run")
    train(tmp_path, *FOUR, *NO_DROPOUT, *flags, *more, ranks=ranks).expect(0, "(step 3")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs("alone"))[3:], rel=1e-9)


PP2 = ("--pp-size", 2, "--micro-batch-size", 1)


@pytest.mark.often("fp16-1f1b")
@pytest.mark.parametrize("kind", ["1f1b", pytest.param("zb1p", marks=pytest.mark.long)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_to_the_last_bit(tmp_path: Path, precision: str, kind: str) -> None:
    kinds = {"fp32": (), "fp16": ("--fp16", "--initial-loss-scale", 2.0**19, "--hysteresis", 1, "--loss-scale-window", 2)}
    flags = (*kinds[precision], *PP2, "--pipeline-schedule", kind, "--zero-stage", 1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, more in ((whole, ()), (parts, ("--exit-interval", 3)), (parts, ("--auto-resume",))):
        train(tmp_path, *flags, "--save", run, *more, ranks=2).expect(0)
    assert_same_run(parts, whole)
    if precision == "fp16":
        assert 0 < state(whole)["num_updates"] < 6, "some steps were meant to overflow"


def test_dropout_is_that_of_one_process(tmp_path: Path) -> None:
    found = []
    for ranks, flags in ((1, ()), (2, PP2)):
        run = tmp_path / str(ranks)
        train(tmp_path, "--fp64", "--attention-dropout", 0, "--hidden-dropout", 0.3, *flags, "--save", run, ranks=ranks).expect(0)
        found.append(losses(run))
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_bert_with_its_order_head(tmp_path: Path) -> None:
    flags = ("--fp64", *NO_DROPOUT, "--eval-interval", 3, "--eval-iters", 1)
    found = []
    for ranks, more in ((1, ()), (2, PP2)):
        run = tmp_path / str(ranks)
        train(tmp_path, *flags, *more, "--save", run, ranks=ranks, program=bert).expect(0)
        found.append([[r[name] for name in ("loss", "order_loss", "lm_accuracy", "order_accuracy")] for r in records(run, "valid", "test")])
    assert len(found[0]) > 1 and all(a == pytest.approx(b, rel=1e-10) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("rank", "what"), [(1, "loss"), (0, "grad"), (1, "grad")])
def test_a_bad_step_is_skipped_by_all_stages(tmp_path: Path, rank: int, what: str) -> None:
    flags = (*PP2, "--save", tmp_path / "run", "--max-bad-steps", 1)
    train(tmp_path, *flags, ranks=2, fault=f"nan:rank={rank}:at={what}:step=3").expect(0, "is not finite", "skipped")
    assert records(tmp_path / "run")[-1]["skipped_steps"] == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["step.forward", "step.backward"])
def test_the_others_end_when_a_stage_is_lost(tmp_path: Path, rank: int, place: str) -> None:
    flags = (*PP2, "--save", tmp_path / "run")
    ended = train(tmp_path, *flags, ranks=2, fault=f"kill:rank={rank}:at={place}:step=3", setup=lambda _: None)
    assert ended.codes[rank] == KILLED and ended.codes[1 - rank] == 7, ended.text


def test_a_signal_stops_all_stages_after_the_same_step(tmp_path: Path) -> None:
    def stop(pids: list[int]) -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not records(tmp_path / "run"):
            time.sleep(0.01)
        os.kill(pids[1], signal.SIGTERM)

    flags = (*PP2, "--train-iters", 100000, "--save", tmp_path / "run")
    train(tmp_path, *flags, ranks=2, during=stop).expect(75, "saved step")
    train(tmp_path, *PP2, "--train-iters", state(tmp_path / "run")["step"] + 1, "--save", tmp_path / "run", "--auto-resume",
          "--override-opt-param-scheduler", ranks=2).expect(0)  # fmt: skip


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb1p", "zbv", "slices", "auto"])
def test_verify_parallelism(tmp_path: Path, kind: str) -> None:
    flags = ("--num-layers", 4, "--verify-parallelism", "--pp-size", 2, "--pipeline-schedule", kind, "--zero-stage", 1)
    train(tmp_path, *flags, "--micro-batch-size", 1, ranks=2).expect(
        0, "--pipeline-schedule auto: " if kind == "auto" else f"pp 2 ({kind})", "layout: equal"
    )  # fmt: skip
