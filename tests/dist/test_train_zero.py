"""The training program at every ZeRO stage: one line of losses, checkpoints that load anywhere, resume to the last bit, and bad steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.training import assert_same_run, records, run_once, state, tensors, trace, train

KEY_BIASES = 2 * 2 * 8  # layers, groups, channels
DOUBLE = ("--fp64", "--num-query-groups", 2, "--seq-length", 31, "--vocab-size", 61)
# 12 sequences in a step of all, in one to three micro-batches: how many makes no difference to what comes out
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ("--micro-batch-size", 6)),
    "alone, stage 3": (1, ("--zero-stage", 3, "--micro-batch-size", 4)),
    "dp2, stage 1": (2, ("--use-distributed-optimizer", "--micro-batch-size", 3)),
    "dp2, stage 2": (2, ("--zero-stage", 2, "--no-overlap-grad-reduce", "--micro-batch-size", 2)),
    "dp2, stage 3": (2, ("--zero-stage", 3, "--micro-batch-size", 2)),
    "dp3, stage 1": (3, ("--zero-stage", 1, "--micro-batch-size", 2)),
    "dp3, stage 3": (3, ("--zero-stage", 3, "--zero3-keep-units", 1, "--micro-batch-size", 2)),
    "sp2, stage 3": (2, ("--zero-stage", 3, "--sp-size", 2, "--sp-overlap-mode", "chunked", "--zero3-gather-once",
                        "--micro-batch-size", 6)),
    "tp2, stage 1": (2, ("--zero-stage", 1, "--tp-size", 2, "--sequence-parallel", "--micro-batch-size", 6)),
    "dp2 tp2, stage 2": (4, ("--zero-stage", 2, "--tp-size", 2, "--no-overlap-param-gather", "--micro-batch-size", 3)),
    "dp2 tp2, stage 3": (4, (
        "--zero-stage", 3, "--tp-size", 2, "--sequence-parallel", "--recompute-granularity", "full", "--micro-batch-size", 3,
    )),
    "dp2 sp2, stage 3": (4, ("--zero-stage", 3, "--sp-size", 2, "--split-qkv-linear", "--sp-overlap-comm", "--micro-batch-size", 3)),
    "dp4, stage 3": (4, ("--zero-stage", 3, "--stage3-use-all-reduce-for-fetch-params", "--micro-batch-size", 1)),
}  # fmt: skip
NAMES = [name for name in LAYOUTS if name != "alone"]
OFTEN = ("dp2, stage 1", "dp2, stage 3", "sp2, stage 3", "dp2 tp2, stage 3")  # the rest is marked long
# each writes for another one, and for all others in the full run
PAIRS = [(a, b) for a in NAMES for b in NAMES if a != b] if os.environ.get("MEGATRON_SP_FULL_GRID") else [
    *zip(OFTEN, [*OFTEN[2:], *OFTEN[:2]], strict=True),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in zip(NAMES, [*NAMES[5:], *NAMES[:5]], strict=True)),
]  # fmt: skip


def flags_of(name: str) -> tuple[int, tuple[object, ...]]:
    ranks, flags = LAYOUTS[name]
    return ranks, (*DOUBLE, "--global-batch-size", 12, *flags)


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    more = ("--eval-interval", 2, "--eval-iters", 1, "--log-params-norm", "--log-num-zeros-in-grad")
    return run_once(tmp_path_factory, {name: flags_of(name) for name in LAYOUTS}, *more)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in NAMES])
def test_losses_and_gradient_norms_lie_on_one_line(name: str, runs: Callable[[str], Path]) -> None:
    assert losses(runs(name)) == pytest.approx(losses(runs("alone")), rel=1e-10)
    got, want = records(runs(name)), records(runs("alone"))
    for key in ("grad_norm", "params_norm"):
        assert [r[key] for r in got] == pytest.approx([r[key] for r in want], rel=1e-8)
    zeros = [(a["num_zeros_in_grad"], b["num_zeros_in_grad"]) for a, b in zip(got, want, strict=True)]
    # a bias of keys moves all scores of a query alike, so its gradient is rounding alone, and two ranks' parts may
    # cancel exactly
    assert all(abs(a - b) <= KEY_BIASES for a, b in zeros), zeros


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(writer: str, reader: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    ranks, flags = flags_of(reader)
    train(tmp_path, *flags, "--load", runs(writer), "--ckpt-step", 3, "--save", tmp_path / "run", ranks=ranks).expect(0, "(step 3")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs("alone"))[3:], rel=1e-9)


@pytest.mark.often("bf16-3")
@pytest.mark.parametrize(("precision", "stage"), [
    ("bf16", 3), ("fp16", 1),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (("fp32", 1), ("fp32", 3), ("bf16", 2), ("fp16", 3))),
])  # fmt: skip
def test_resumed_to_the_last_bit(tmp_path: Path, precision: str, stage: int) -> None:
    kinds = {
        "fp32": (), "bf16": ("--bf16", "--grad-reduce-in-bf16"),
        "fp16": ("--fp16", "--initial-loss-scale", 2.0**19, "--hysteresis", 1, "--loss-scale-window", 2),
    }  # fmt: skip
    flags = (*kinds[precision], "--zero-stage", stage, "--micro-batch-size", 1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, more in ((whole, ()), (parts, ("--exit-interval", 3)), (parts, ("--auto-resume",))):
        train(tmp_path, *flags, "--save", run, *more, ranks=2).expect(0)
    assert_same_run(parts, whole)
    if precision == "fp16":
        assert 0 < state(whole)["num_updates"] < 6, "some steps were meant to overflow"


@pytest.mark.parametrize(("first", "then"), [
    ("fp32", "bf16"), ("bf16", "fp16"), *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("bf16", "fp32"), ("fp16", "fp64")))
])  # fmt: skip
def test_another_precision_goes_on_from_the_unrounded_weights(tmp_path: Path, first: str, then: str) -> None:
    """The moments come along, and what is trained on is the fp32 weights, whichever name they have in the checkpoint."""
    flags = {k: () if k == "fp32" else (f"--{k}",) for k in ("fp32", "bf16", "fp16", "fp64")}
    scale = ("--initial-loss-scale", 1024)
    run = tmp_path / "run"
    train(tmp_path, *flags[first], *scale, "--zero-stage", 3, "--save", run, "--exit-interval", 3, ranks=2).expect(0)
    written = tensors(run)
    # a step of no length leaves the weights alone
    still = ("--lr", 0, "--weight-decay", 0, "--min-lr", 0, "--override-opt-param-scheduler", "--exit-interval", 4)
    train(tmp_path, *flags[then], *scale, *still, "--zero-stage", 1, "--save", run, "--auto-resume", ranks=2).expect(0, "(step 3")
    read, wide = tensors(run), {"fp32": torch.float32, "fp64": torch.float64}.get(then)
    for name, weight in written.items():
        if name.startswith("optimizer."):
            continue
        before = written.get(f"optimizer.master.{name}", weight)
        assert torch.equal(read.get(f"optimizer.master.{name}", read[name]).float(), before), name
        assert read[name].dtype == (wide or getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[then]))
        assert torch.equal(read[name], before.to(read[name].dtype)), name
    assert state(run)["num_updates"] == 4 and records(run)[-1]["loss_scale"] == (1024 if then == "fp16" else 1)


def test_16_bit_stages_train_like_stage_0(tmp_path: Path) -> None:
    """Of two ranks without accumulation every sum has two terms: the same bits, but for the clipping by a norm that is summed otherwise."""
    found = []
    for stage in (0, 2, 3):
        run = tmp_path / str(stage)
        train(tmp_path, "--bf16", "--zero-stage", stage, "--clip-grad", 0, "--save", run, ranks=2).expect(0)
        found.append([entry[0] for _, entry in sorted(trace(run).items())])
    assert all(losses == found[0] for losses in found)


@pytest.mark.parametrize(("stage", "what"), [(1, "loss"), (3, "grad")])
def test_a_bad_step_is_skipped_by_all(tmp_path: Path, stage: int, what: str) -> None:
    flags = ("--zero-stage", stage, "--save", tmp_path / "run", "--max-bad-steps", 1)
    train(tmp_path, *flags, ranks=2, fault=f"nan:rank=1:at={what}:step=3").expect(0, "is not finite", "skipped")
    assert [r["skipped_steps"] for r in records(tmp_path / "run")][-1] == 1
    dump = json.loads((tmp_path / "run" / "nonfinite-step-000003.json").read_text())
    norms = dump["layer_grad_norms"]
    assert len(norms) > 20 and any(v == "nan" for v in norms.values()) and dump["sample_ids"]


def test_validation_alone_at_stage_3(runs: Callable[[str], Path], tmp_path: Path) -> None:
    """Forward passes only, from a checkpoint of another layout."""
    found = []
    for name in ("alone", "dp2, stage 3"):
        ranks, flags = flags_of(name)
        only = ("--load", runs("dp2 tp2, stage 3"), "--save", tmp_path / name, "--skip-train", "--eval-iters", 2)
        train(tmp_path, *flags, *only, ranks=ranks).expect(0)
        found.append([r["loss"] for kind in ("valid", "test") for r in records(tmp_path / name, kind)])
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=1e-10)


@pytest.mark.long
def test_a_batch_that_grows(tmp_path: Path) -> None:
    """One, two and three micro-batches in a step; the units of stage 3 come in another order each time."""
    flags = (*DOUBLE, "--global-batch-size", 12, "--rampup-batch-size", 4, 4, 24, "--train-samples", 52)
    train(tmp_path, *flags, "--micro-batch-size", 4, "--save", tmp_path / "alone").expect(0)
    for stage in (2, 3):
        run = tmp_path / str(stage)
        train(tmp_path, *flags, "--micro-batch-size", 2, "--zero-stage", stage, "--tp-size", 2, "--save", run, ranks=4).expect(0)
        assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9), stage
    assert [r["global_batch_size"] for r in records(tmp_path / "alone")] == [4] * 3 + [8] * 2 + [12] * 2


def test_verify_parallelism_at_stage_3(tmp_path: Path) -> None:
    train(tmp_path, "--zero-stage", 3, "--sp-size", 2, "--verify-parallelism", ranks=4).expect(0, "the layout equals one process")


def test_ranks_with_another_model_are_named(tmp_path: Path) -> None:
    """A rank whose weights differ in one bit."""
    from megatron_sp.models import transformer

    def sabotage(rank: int) -> None:
        whole = transformer.MLP.__init__

        def other(self: transformer.MLP, *args: object) -> None:
            whole(self, *args)  # type: ignore[arg-type]
            if rank == 1 and "layers.1" in str(args[1]):
                self.linear_fc2.weight.data[3, 2] += 1e-3

        transformer.MLP.__init__ = other  # type: ignore[method-assign,assignment]

    out = train(tmp_path, ranks=2, setup=sabotage).expect(
        2, "rank 1 has another model than rank 0", "decoder.layers.1.mlp.linear_fc2.weight"
    )
    assert out.texts[1] == "", "said once"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--zero-stage", 4), "zero_stage (4) must be 0, 1, 2 or 3"),
        (("--zero-stage", 2, "--zero3-gather-once"), "--zero3-gather-once is about gathering blocks and needs --zero-stage 3 (now 2)"),
        (("--zero3-keep-units", 2), "needs --zero-stage 3 (now 0)"),
        (("--stage3-use-all-reduce-for-fetch-params",), "--zero3-fetch all_reduce is about gathering blocks and needs --zero-stage 3"),
        (("--zero-stage", 3, "--zero3-gather-once", "--zero3-keep-units", 1), "leave --zero3-keep-units out"),
    ],
)
def test_flags_that_contradict_each_other(tmp_path: Path, flags: tuple[object, ...], says: str) -> None:
    train(tmp_path, *flags).expect(2, says)
