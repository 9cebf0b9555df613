"""The training program in every layout: one line of numbers, checkpoints that load anywhere, resumes to the bit, --verify-parallelism."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from support.training import (
    KILLED,
    MOCK,
    NO_DROPOUT,
    TINY,
    Program,
    assert_same_run,
    bert,
    gpt,
    records,
    run_once,
    state,
    tensors,
    trace,
    train,
)  # fmt: skip

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.optim import gradients
from megatron_sp.parallel import gather, split_projection
from megatron_sp.parallel.router_pass import RouterStep
from megatron_sp.training import verify
from megatron_sp.utils.errors import ConfigError

Flags = tuple[object, ...]


@dataclass(frozen=True)
class Family:
    """Runs of one model: ``flags`` of all of them, ``quick`` layouts of the ordinary run, and what equals that of one process."""

    flags: Flags
    layouts: dict[str, tuple[int, Flags]]
    quick: tuple[str, ...]
    logged: Flags = ()  # more flags of the runs that are compared
    close: tuple[str, ...] = ("grad_norm",)
    equal: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    zeros: int = 0  # gradients of biases of keys, which are rounding alone: two ranks' parts may cancel exactly
    program: Program = gpt


DOUBLE = ("--fp64", "--num-query-groups", 2, "--seq-length", 31, "--vocab-size", 61, "--global-batch-size", 12)
SHORT = ("--train-iters", 4, "--save-interval", 2)
EVALUATED = ("--eval-interval", 2, "--eval-iters", 1)
NORMS = ("--log-params-norm", "--log-num-zeros-in-grad")
EXPERTS = ("--num-experts", 6, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 24, "--moe-aux-loss-coeff", 0.1, "--moe-z-loss-coeff", 0.01)
BIASED = (
    *EXPERTS, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--moe-router-load-balancing-type",
    "global_aux_loss", "--moe-shared-expert-intermediate-size", 16,
)  # fmt: skip

# 12 sequences in a step of all, in one to six micro-batches: how many makes no difference to what comes out
DENSE: dict[str, tuple[int, Flags]] = {
    "alone": (1, ("--micro-batch-size", 6)),
    "alone, stage 3": (1, ("--zero-stage", 3, "--micro-batch-size", 4)),
    "tp2": (2, ("--tp-size", 2)),
    "sp2 split": (2, ("--sp-size", 2, "--split-qkv-linear", "--sp-overlap-comm")),
    "sp2 auto": (2, ("--ds-sequence-parallel-size", 2, "--sp-overlap-comm", "--micro-batch-size", 4)),
    "sp2 dp2 chunked": (4, ("--sp-size", 2, "--sp-head-chunks", 2)),
    "tp2 sp2": (4, ("--tp-size", 2, "--sp-size", 2, "--sequence-parallel", "--sp-overlap-mode", "split-qkv", "--micro-batch-size", 6)),
    "sp3": (3, ("--sp-size", 3, "--sp-overlap-mode", "chunked", "--recompute-granularity", "full", "--micro-batch-size", 4)),
    "dp2, stage 1": (2, ("--use-distributed-optimizer", "--micro-batch-size", 3)),
    "dp2, stage 2": (2, ("--zero-stage", 2, "--no-overlap-grad-reduce")),
    "dp2, stage 3": (2, ("--zero-stage", 3)),
    "dp3, stage 1": (3, ("--zero-stage", 1)),
    "dp3, stage 3": (3, ("--zero-stage", 3, "--zero3-keep-units", 1)),
    "sp2, stage 3": (2, ("--zero-stage", 3, "--sp-size", 2, "--sp-head-chunks", 2, "--zero3-gather-once", "--micro-batch-size", 6)),
    "tp2, stage 1": (2, ("--zero-stage", 1, "--tp-size", 2, "--sequence-parallel", "--micro-batch-size", 6)),
    "dp2 tp2, stage 2": (4, ("--zero-stage", 2, "--tp-size", 2, "--no-overlap-param-gather", "--micro-batch-size", 3)),
    "dp2 tp2, stage 3": (4, (
        "--zero-stage", 3, "--tp-size", 2, "--sequence-parallel", "--recompute-granularity", "full", "--micro-batch-size", 3,
    )),
    "dp2 sp2, stage 3": (4, ("--zero-stage", 3, "--sp-size", 2, "--split-qkv-linear", "--sp-overlap-comm", "--micro-batch-size", 3)),
    "dp4, stage 3": (4, ("--zero-stage", 3, "--stage3-use-all-reduce-for-fetch-params", "--micro-batch-size", 1)),
}  # fmt: skip
PIPELINES: dict[str, tuple[int, Flags]] = {
    "alone": (1, ("--micro-batch-size", 6)),
    "pp2": (2, ("--pp-size", 2)),
    "pp2, one micro-batch": (2, ("--pp-size", 2, "--micro-batch-size", 12)),
    "pp2, interleaved, stage 1": (2, ("--pp-size", 2, "--num-layers-per-virtual-pipeline-stage", 1, "--zero-stage", 1)),
    "pp2, zb1p, stage 2": (2, ("--pp-size", 2, "--pipeline-schedule", "zb1p", "--zero-stage", 2, "--micro-batch-size", 3)),
    "pp2, zbv, stage 3": (2, ("--pp-size", 2, "--enable-zbv-pipeline", "--zero-stage", 3)),
    "pp3": (3, ("--pp-size", 3, "--decoder-last-pipeline-num-layers", 1)),
    "pp4, untied rows": (4, ("--pp-size", 4, "--recompute-granularity", "full")),
    "pp2 dp2, zb1p, stage 1": (4, (
        "--pp-size", 2, "--pipeline-schedule", "zb1p", "--num-virtual-stages-per-pipeline-rank", 2, "--zero-stage", 1,
    )),
    "pp2 tp2, stage 3": (4, ("--pp-size", 2, "--tp-size", 2, "--sequence-parallel", "--zero-stage", 3, "--micro-batch-size", 3)),
    "pp2 sp2": (4, ("--pp-size", 2, "--sp-size", 2, "--sp-overlap-mode", "chunked", "--micro-batch-size", 3)),
    "pp2, slices, stage 1": (2, ("--pp-size", 2, "--pipeline-slices", 3, "--zero-stage", 1, "--micro-batch-size", 3)),
    "pp2 cp2, slices": (4, (
        "--pp-size", 2, "--cp-size", 2, "--pipeline-schedule", "slices", "--recompute-granularity", "full", "--micro-batch-size", 3,
    )),
    "pp2 cp2, zbv": (4, ("--pp-size", 2, "--cp-size", 2, "--enable-zbv-pipeline", "--micro-batch-size", 3)),
}  # fmt: skip
OF_EXPERTS: dict[str, tuple[int, Flags]] = {
    "alone": (1, ("--micro-batch-size", 6)),
    "ep1": (2, ("--micro-batch-size", 3)),
    "tp2": (2, ("--tp-size", 2, "--micro-batch-size", 6)),
    "ep2": (2, ("--ep-size", 2)),
    "ep1, stage 2": (2, ("--micro-batch-size", 3, "--zero-stage", 2)),
    "ep3, chunks, stage 1": (3, ("--ep-size", 3, "--moe-chunks", 2, "--zero-stage", 1)),
    "ep2 of 4, stage 3": (4, ("--ep-size", 2, "--micro-batch-size", 1, "--zero-stage", 3, "--recompute-granularity", "full")),
    "ep2 tp2": (4, ("--ep-size", 2, "--tp-size", 2, "--micro-batch-size", 3)),
    "ep2 tp2, tp_seq, stage 1": (2, ("--ep-size", 2, "--tp-size", 2, "--sequence-parallel", "--micro-batch-size", 3, "--zero-stage", 1)),
    "ep2 sp2": (2, ("--ep-size", 2, "--sp-size", 2, "--micro-batch-size", 4)),
    "ep2 cp2": (2, ("--ep-size", 2, "--cp-size", 2, "--micro-batch-size", 4)),
    "ep2 pp2, zb1p": (4, ("--ep-size", 2, "--pp-size", 2, "--pipeline-schedule", "zb1p", "--micro-batch-size", 1)),
}  # fmt: skip
OF_BERT: dict[str, tuple[int, Flags]] = {
    "alone": (1, ()),
    "dp2 zero3": (2, ("--zero-stage", 3)),
    "sp2": (2, ("--sp-size", 2, "--sp-overlap-mode", "chunked")),
    "tp2 seq": (2, ("--tp-size", 2, "--sequence-parallel")),
    "pp2": (2, ("--pp-size", 2, "--micro-batch-size", 1)),
}  # fmt: skip
FAMILIES = {
    "dense": Family(
        DOUBLE, DENSE,
        ("sp2 dp2 chunked", "tp2 sp2", "sp3", "dp2 tp2, stage 3", "dp3, stage 3", "sp2, stage 3"),
        NORMS, ("grad_norm", "params_norm"), zeros=2 * 2 * 8,
    ),
    "pipeline": Family(
        (*DOUBLE, *NO_DROPOUT, "--num-layers", 4), PIPELINES, ("pp2, slices, stage 1", "pp2, zbv, stage 3", "pp2 dp2, zb1p, stage 1"),
        (*EVALUATED, *NORMS), ("grad_norm", "params_norm"), valid=("loss",), zeros=4 * 2 * 8,
    ),
    "experts": Family(
        (*DOUBLE[:1], *DOUBLE[3:], *NO_DROPOUT, "--num-layers", 3, *BIASED), OF_EXPERTS,
        ("ep3, chunks, stage 1", "ep2 tp2, tp_seq, stage 1", "ep2 pp2, zb1p"), (*EVALUATED, "--log-params-norm"),
        ("grad_norm", "params_norm", "balance_loss", "z_loss"),
        ("expert_load_max_by_layer", "experts_idle_by_layer", "expert_entropy"), ("loss",),
    ),
    "bert": Family(
        (*DOUBLE[:1], *DOUBLE[3:7], "--norm-placement", "post", *EVALUATED), OF_BERT, ("sp2", "pp2"),
        valid=("loss", "order_loss", "lm_accuracy", "order_accuracy"), program=bert,
    ),
}  # fmt: skip
ALL = [
    pytest.param(family, name, marks=() if name in of.quick else pytest.mark.long)
    for family, of in FAMILIES.items() for name in of.layouts if name != "alone"
]  # fmt: skip


def losses(run: Path) -> list[float]:
    return [float.fromhex(entry[0]) for _, entry in sorted(trace(run).items())]


def biases(run: Path) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors(run).items() if name.endswith("expert_bias")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    @cache
    def of_family(family: str) -> Callable[[str], Path]:
        of = FAMILIES[family]
        layouts = {name: (ranks, (*of.flags, *flags)) for name, (ranks, flags) in of.layouts.items()}
        return run_once(tmp_path_factory, layouts, *SHORT, *of.logged, program=of.program)

    return lambda family, name: of_family(family)(name)


@pytest.mark.parametrize(("family", "name"), ALL)
def test_the_numbers_are_those_of_one_process(family: str, name: str, runs: Callable[[str, str], Path]) -> None:
    of, run, alone = FAMILIES[family], runs(family, name), runs(family, "alone")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-10)
    got, want = records(run), records(alone)
    for a, b in zip(got, want, strict=True):
        assert a["samples_sha"] == b["samples_sha"], "the same samples"
        assert [a[key] for key in of.close] == pytest.approx([b[key] for key in of.close], rel=1e-8)
        assert [a[key] for key in of.equal] == [b[key] for key in of.equal]
        assert not of.zeros or abs(a["num_zeros_in_grad"] - b["num_zeros_in_grad"]) <= of.zeros
    valid = [[[r[key] for key in of.valid] for r in records(each, "valid", "test")] for each in (run, alone)]
    assert not of.valid or len(valid[0]) > 1
    assert all(a == pytest.approx(b, rel=1e-10) for a, b in zip(*valid, strict=True))
    if family != "bert":
        assert records(run, "start")[0]["num_params"] == records(alone, "start")[0]["num_params"]
    if family == "experts":
        moved = biases(alone)
        assert len(moved) == 3 and all(torch.equal(t, moved[n]) and t.any() for n, t in biases(run).items())


def others(family: str) -> list[object]:
    """Each quick layout's checkpoint in the next one, and in the full run that of each layout in one of the others."""
    quick, names = FAMILIES[family].quick, list(FAMILIES[family].layouts)
    near = [("alone", quick[0]), *zip(quick[-2:], (quick[-1], "alone"), strict=True)]
    far = [pair for pair in zip(names, [*names[4:], *names[:4]], strict=True) if pair not in near and pair[0] != pair[1]]
    return [*((family, *pair) for pair in near), *(pytest.param(family, *pair, marks=pytest.mark.long) for pair in far)]


@pytest.mark.parametrize(("family", "writer", "reader"), [pair for family in FAMILIES for pair in others(family)])
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(
    family: str, writer: str, reader: str, runs: Callable[[str, str], Path], tmp_path: Path
) -> None:
    of = FAMILIES[family]
    ranks, flags = of.layouts[reader]
    load = ("--load", runs(family, writer), "--ckpt-step", 2, "--save", tmp_path / "run")
    train(tmp_path, *of.flags, *flags, *SHORT, *load, ranks=ranks, program=of.program).expect(0, "(step 2")
    assert losses(tmp_path / "run") == pytest.approx(losses(runs(family, "alone"))[2:], rel=1e-9)


def test_validation_alone_at_stage_3(runs: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Forward passes only, from a checkpoint of another layout."""
    found = []
    for name in ("alone", "dp2, stage 3"):
        ranks, flags = DENSE[name]
        only = ("--load", runs("dense", "dp2 tp2, stage 3"), "--save", tmp_path / name, "--skip-train", "--eval-iters", 2)
        train(tmp_path, *DOUBLE, *flags, *only, ranks=ranks).expect(0)
        found.append([r["loss"] for kind in ("valid", "test") for r in records(tmp_path / name, kind)])
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=1e-10)


# to the last bit

FP16 = ("--fp16", "--initial-loss-scale", 2.0**19, "--hysteresis", 1, "--loss-scale-window", 2)
BF16 = ("--bf16", "--grad-reduce-in-bf16")
PP2 = ("--pp-size", 2, "--micro-batch-size", 1)
EP2 = (*EXPERTS, "--ep-size", 2, "--micro-batch-size", 1)
LEARNING = ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
RESUMED: dict[str, Flags] = {
    "stage 1": ("--zero-stage", 1), "bf16 stage 3": (*BF16, "--zero-stage", 3), "fp16 stage 3": (*FP16, "--zero-stage", 3),
    "fp16 pp2": (*FP16, *PP2, "--zero-stage", 1), "fp16 ep2": (*FP16, *EP2, *LEARNING, "--zero-stage", 1),
    "stage 2": ("--zero-stage", 2), "stage 3": ("--zero-stage", 3), "bf16 stage 1": (*BF16, "--zero-stage", 1),
    "bf16 stage 2": (*BF16, "--zero-stage", 2), "fp16 stage 1": (*FP16, "--zero-stage", 1), "fp16 stage 2": (*FP16, "--zero-stage", 2),
    "pp2": (*PP2, "--zero-stage", 1), "fp16 pp2 zb1p": (*FP16, *PP2, "--pipeline-schedule", "zb1p", "--zero-stage", 1),
    "pp2 zb1p": (*PP2, "--pipeline-schedule", "zb1p", "--zero-stage", 1), "ep2": (*EP2, *LEARNING, "--zero-stage", 1),
}  # fmt: skip


@pytest.mark.often("bf16 stage 3", "fp16 pp2", "fp16 ep2")
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_to_the_last_bit(tmp_path: Path, name: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, more in ((whole, ()), (parts, ("--exit-interval", 3)), (parts, ("--auto-resume",))):
        train(tmp_path, "--micro-batch-size", 1, *RESUMED[name], "--save", run, *more, ranks=2).expect(0)
    assert_same_run(parts, whole)
    if "fp16" in name.split():
        assert 0 < state(whole)["num_updates"] < 6, "some steps were meant to overflow"


def test_bert_killed_and_resumed_is_equal_to_the_last_bit(tmp_path: Path) -> None:
    """The training data, dropout and the weights are those of a run that nothing befell."""
    flags = ("--sp-size", 2, "--sp-overlap-mode", "split-qkv", "--save-interval", 2, "--no-async-save", "--auto-resume")
    train(tmp_path, *flags, "--save", tmp_path / "whole", ranks=2, program=bert).expect(0)
    run = tmp_path / "killed"
    train(tmp_path, *flags, "--save", run, ranks=2, program=bert, fault="kill:rank=1:at=step.backward:step=4")
    assert [r["step"] for r in records(run)][-1] == 3
    train(tmp_path, *flags, "--save", run, ranks=2, program=bert).expect(0, "resumed from")
    assert_same_run(run, tmp_path / "whole")


def test_16_bit_stages_train_like_stage_0(tmp_path: Path) -> None:
    """Of two ranks without accumulation every sum has two terms: the same bits, but for the clipping by a norm that is summed otherwise."""
    found = []
    for stage in range(4):
        run = tmp_path / str(stage)
        train(tmp_path, "--bf16", "--zero-stage", stage, "--clip-grad", 0, "--train-iters", 3, "--save", run, ranks=2).expect(0)
        found.append([entry[0] for _, entry in sorted(trace(run).items())])
    assert [losses == found[0] for losses in found] == [True] * 4


@pytest.mark.often("fp32-bf16", "bf16-fp16", "fp16-fp64")
@pytest.mark.parametrize(("first", "then"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16"), ("fp32", "fp16"), ("fp16", "fp64")])
def test_another_precision_goes_on_from_the_unrounded_weights(tmp_path: Path, first: str, then: str) -> None:
    """The moments come along, and what is trained on is the fp32 weights, whichever name they have in the checkpoint."""
    flags = {k: () if k == "fp32" else (f"--{k}",) for k in ("fp32", "bf16", "fp16", "fp64")}
    run, scale = tmp_path / "run", ("--initial-loss-scale", 1024)
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


# what all ranks do alike

LAYOUTS: dict[str, Flags] = {
    "stage 1": ("--zero-stage", 1), "stage 2": ("--zero-stage", 2), "stage 3": ("--zero-stage", 3), "pp2": PP2, "ep2": (*EP2, *LEARNING),
}  # fmt: skip


@pytest.mark.often("stage 2-1-grad", "stage 3-1-loss", "pp2-0-grad", "ep2-1-loss")
@pytest.mark.parametrize(("name", "rank", "what"), [
    ("stage 1", 1, "loss"), ("stage 2", 1, "grad"), ("stage 3", 1, "loss"), ("stage 3", 1, "grad"), ("pp2", 1, "loss"), ("pp2", 0, "grad"),
    ("pp2", 1, "grad"), ("ep2", 1, "loss"), ("ep2", 0, "grad"),
])  # fmt: skip
def test_a_bad_step_is_skipped_by_all(tmp_path: Path, name: str, rank: int, what: str) -> None:
    run = tmp_path / "run"
    flags = (*LAYOUTS[name], "--save", run, "--max-bad-steps", 1)
    train(tmp_path, *flags, ranks=2, fault=f"nan:rank={rank}:at={what}:step=3").expect(0, "is not finite", "skipped")
    assert records(run)[-1]["skipped_steps"] == 1
    dump = json.loads((run / "nonfinite-step-000003.json").read_text())
    assert len(dump["layer_grad_norms"]) > 20 and "nan" in dump["layer_grad_norms"].values() and dump["sample_ids"]
    moved = [float(t.abs().max()) for t in biases(run).values()]
    assert max(moved, default=0.0) <= 5 * 1e-3 * (1 + 1e-6) and (name != "ep2") == (not moved), "five of six steps have moved a bias"


@pytest.mark.parametrize(("name", "rank", "place"), [
    ("pp2", 0, "step.forward"), ("pp2", 1, "step.backward"), ("ep2", 1, "step.backward"),
    pytest.param("pp2", 1, "step.forward", marks=pytest.mark.long), pytest.param("pp2", 0, "step.backward", marks=pytest.mark.long),
    pytest.param("ep2", 1, "step.forward", marks=pytest.mark.long),
])  # fmt: skip
def test_the_others_end_when_a_rank_is_lost(tmp_path: Path, name: str, rank: int, place: str) -> None:
    ended = train(tmp_path, *LAYOUTS[name], "--save", tmp_path / "run", ranks=2, fault=f"kill:rank={rank}:at={place}:step=3")
    assert ended.codes[rank] == KILLED and ended.codes[1 - rank] == 7, ended.text


@pytest.mark.parametrize(("base", "more"), [((), PP2), (EXPERTS, EP2)], ids=["pp2", "ep2"])
def test_dropout_is_that_of_one_process(tmp_path: Path, base: Flags, more: Flags) -> None:
    found = []
    for ranks, flags in ((1, base), (2, more)):
        run = tmp_path / str(ranks)
        train(tmp_path, "--fp64", "--attention-dropout", 0, "--hidden-dropout", 0.3, *flags, "--save", run, ranks=ranks).expect(0)
        found.append(losses(run))
    assert found[0] == pytest.approx(found[1], rel=1e-10)


@pytest.mark.long
def test_a_batch_that_grows(tmp_path: Path) -> None:
    """One, two and three micro-batches in a step; the units of stage 3 come in another order each time."""
    flags = (*DOUBLE, "--rampup-batch-size", 4, 4, 24, "--train-samples", 52)
    train(tmp_path, *flags, "--micro-batch-size", 4, "--save", tmp_path / "alone").expect(0)
    for stage in (2, 3):
        run = tmp_path / str(stage)
        train(tmp_path, *flags, "--zero-stage", stage, "--tp-size", 2, "--save", run, ranks=4).expect(0)
        assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9), stage
    assert [r["global_batch_size"] for r in records(tmp_path / "alone")] == [4] * 3 + [8] * 2 + [12] * 2


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


@pytest.mark.parametrize(("flags", "says"), [
    (("--zero-stage", 4), "zero_stage (4) must be 0, 1, 2 or 3"),
    (("--zero-stage", 2, "--zero3-gather-once"), "--zero3-gather-once is about gathering blocks and needs --zero-stage 3 (now 2)"),
    (("--zero3-keep-units", 2), "needs --zero-stage 3 (now 0)"),
    (("--stage3-use-all-reduce-for-fetch-params",), "--zero3-fetch all_reduce is about gathering blocks and needs --zero-stage 3"),
    (("--zero-stage", 3, "--zero3-gather-once", "--zero3-keep-units", 1), "leave --zero3-keep-units out"),
    (("--sp-size", 3), "must be a multiple of tensor_model_parallel_size * sequence_parallel_size (1 * 3 = 3)"),
])  # fmt: skip
def test_flags_that_contradict_each_other(flags: Flags, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        config_from_args([*TINY, *MOCK, "--train-iters", "1", *map(str, flags)])


def short_documents(rank: int) -> None:
    from megatron_sp.data import gpt_dataset

    gpt_dataset._EOD_PROBABILITY = 0.1


@pytest.mark.long
def test_documents_are_kept_apart_in_every_layout(tmp_path: Path) -> None:
    plain = ("--fp64", "--attention-dropout", 0, "--train-iters", 3, "--global-batch-size", 12, "--eod-mask-loss")
    flags = (*plain, "--reset-position-ids", "--reset-attention-mask")
    train(tmp_path, *flags, "--save", tmp_path / "alone", setup=short_documents).expect(0)
    for name in ("tp2, stage 1", "sp2 auto", "sp2 split", "sp3"):
        ranks, layout = DENSE[name]
        train(tmp_path, *flags, *layout, "--save", tmp_path / name, ranks=ranks, setup=short_documents).expect(0)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    for flag in ("--reset-position-ids", "--reset-attention-mask"):
        train(tmp_path, *plain, flag, "--save", tmp_path / flag, setup=short_documents).expect(0)
        assert losses(tmp_path / flag) != pytest.approx(losses(tmp_path / "alone"), rel=1e-6), "each of the two flags does something"


def test_auto_keeps_its_choice_on_resume(tmp_path: Path) -> None:
    flags = ("--sp-size", 2, "--sp-overlap-comm", "--save", tmp_path / "run", "--auto-resume")
    train(tmp_path, *flags, "--exit-interval", 3, ranks=2).expect(0, "--sp-overlap-mode auto: ")
    again = train(tmp_path, *flags, ranks=2).expect(0, "resumed from")
    assert "--sp-overlap-mode auto: " not in again.text, "no second probe: the checkpoint's layout is the same"


# experts


@pytest.mark.often("[1]+[0]")
@pytest.mark.parametrize("has", ["[1]+[0]", "[0]+[1]"])
def test_a_stage_without_experts(tmp_path: Path, has: str) -> None:
    flags = (*FAMILIES["experts"].flags, "--num-layers", 2, "--moe-layer-freq", has, "--zero-stage", 0)
    found = []
    for ranks, more in ((1, ("--micro-batch-size", 6)), (4, ("--pp-size", 2, "--ep-size", 2))):
        run = tmp_path / str(ranks)
        train(tmp_path, *flags, *more, "--save", run, ranks=ranks).expect(0)
        found.append([*losses(run), *(r["grad_norm"] for r in records(run))])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


@pytest.mark.parametrize("term", [("--moe-aux-loss-coeff", 100.0), ("--moe-z-loss-coeff", 1.0)])
def test_the_loss_scale_changes_no_term(tmp_path: Path, term: Flags) -> None:
    norms = []
    for power in (3, 9):
        run = tmp_path / str(power)
        flags = (*EXPERTS[:6], *term, "--fp16", "--initial-loss-scale", 2.0**power, "--train-iters", 2, "--lr", 0.0, "--min-lr", 0.0)
        train(tmp_path, *flags, "--save", run).expect(0)
        norms.append([r["grad_norm"] for r in records(run)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2), "sums in fp16 round differently with another scale"


def test_the_log_line_tells_the_balance(tmp_path: Path) -> None:
    ended = train(tmp_path, *EP2, "--save", tmp_path / "run", ranks=2).expect(0, " of the mean, ", " idle, entropy ")
    record = records(tmp_path / "run")[-1]
    assert "load " in ended.text and 1 <= record["expert_load_max"] <= 3
    assert 0 < record["expert_entropy"] <= 1 and len(record["expert_load_max_by_layer"]) == 2


# --verify-parallelism

PP = ("--num-layers", 4, "--pp-size", 2, "--zero-stage", 1, "--micro-batch-size", 1, "--pipeline-schedule")
ROUTED, TIED = (*EXPERTS, "--hidden-dropout", 0.1, "--ep-size", 2), "the layout makes the choices of the one process"
VERIFIED: dict[str, tuple[int, Flags, str]] = {
    "sp2 auto": (2, DENSE["sp2 auto"][1], ""), "tp2 sp2": (4, (*DENSE["tp2 sp2"][1], "--micro-batch-size", 2), ""), "alone": (1, (), ""),
    "zero 3": (4, ("--zero-stage", 3, "--sp-size", 2), ""), "auto": (2, (*PP, "auto"), "--pipeline-schedule auto: "),
    **{kind: (2, (*PP, kind), f"pp 2 ({kind})") for kind in ("1f1b", "interleaved", "zb1p", "zbv", "slices")},
    "ep2": (2, ROUTED, "loads of experts"), "ep2 sp2": (2, (*ROUTED, "--sp-size", 2, "--moe-chunks", 2), "loads of experts"),
    "ep2 tp2": (2, (*ROUTED, "--tp-size", 2, "--sequence-parallel"), "the smallest margin of a choice of experts is"),
    # with weights of zero all experts tie, and what decides is the number; the choices of one process are made in any case
    "ties": (2, (*EXPERTS, "--ep-size", 2, "--init-method-std", 0), TIED),
    "bert tp2": (2, (*OF_BERT["tp2 seq"][1], "--norm-placement", "pre"), ""),
    "bert sp2": (2, (*OF_BERT["sp2"][1], "--norm-placement", "post"), ""),
}  # fmt: skip


@pytest.mark.often("sp2 auto", "tp2 sp2", "zero 3", "zbv", "auto", "ep2 tp2", "ties", "bert tp2")
@pytest.mark.parametrize("name", VERIFIED)
def test_verify_parallelism_says_that_a_layout_is_right(name: str, tmp_path: Path) -> None:
    ranks, flags, said = VERIFIED[name]
    out = train(tmp_path, *flags, "--verify-parallelism", ranks=ranks, program=bert if "bert" in name else gpt)
    out.expect(0, "the layout equals one process", said)
    if name in ("sp2 auto", "tp2 sp2"):
        assert out.text.count("size ") == 7 * (3 if name == "sp2 auto" else 1), "loss, norm and the five worst gradients of each mode"
    assert not list(tmp_path.glob("runs/*")), "nothing is written"


def test_verification_replays_each_micro_batch(tmp_path: Path) -> None:
    def setup(_: int) -> None:
        verify._SMALL_MARGIN = 10.0

    out = train(tmp_path, *EP2, "--verify-parallelism", ranks=2, setup=setup)
    out.expect(0, TIED, "the layout equals one process")


def twice_the_gradient(rank: int) -> None:
    """What the head of BERT gets from the ranks of a tp group."""
    name = next(n for n in vars(gather) if n.startswith("_") and hasattr(getattr(gather, n), "backward"))
    function = getattr(gather, name)
    whole = function.backward
    function.backward = staticmethod(lambda ctx, grad: tuple(None if g is None else 2 * g for g in whole(ctx, grad)))


def no_sum_over_tp(rank: int) -> None:
    whole = gradients.FlatGradients._sum_over_tp

    def broken(self: gradients.FlatGradients, *args: object) -> None:
        if "Alone" in type(self.tp).__name__:
            whole(self, *args)  # type: ignore[arg-type]

    gradients.FlatGradients._sum_over_tp = broken  # type: ignore[method-assign,assignment]


def a_thousandth_more(rank: int) -> None:
    whole = split_projection.RowWiseGrad.put_product

    def broken(self: split_projection.RowWiseGrad, *args: object) -> None:
        whole(self, *args)  # type: ignore[arg-type]
        if rank == 1:
            self._view.mul_(1.001)

    split_projection.RowWiseGrad.put_product = broken  # type: ignore[method-assign,assignment]


def one_token_more(rank: int) -> None:
    loads_in = RouterStep.loads_in
    RouterStep.loads_in = lambda self, counters: loads_in(self, counters) + (self.watched is None)  # type: ignore[method-assign]


@pytest.mark.parametrize(("setup", "flags", "says"), [
    (no_sum_over_tp, ("--tp-size", 2, "--sequence-parallel"), "layernorm.weight"),
    (a_thousandth_more, ("--sp-size", 2), "linear_qkv.weight"),
    (twice_the_gradient, ("--tp-size", 2, "--sequence-parallel"), "gradient norm"),
    (one_token_more, (*EXPERTS, "--ep-size", 2), "loads of experts"),
])  # fmt: skip
def test_verify_parallelism_finds_what_is_wrong(setup: Callable[[int], None], flags: Flags, says: str, tmp_path: Path) -> None:
    program = bert if setup is twice_the_gradient else gpt
    out = train(tmp_path, *flags, "--verify-parallelism", ranks=2, setup=setup, program=program).expect(5, "FAILED")
    wrong = [line for line in out.text.splitlines() if line.endswith("<- differs")]
    assert any(says in line for line in wrong) and (len(wrong) == 1 or setup is not one_token_more), wrong


def test_verify_parallelism_takes_layers_away_where_memory_is_short(tmp_path: Path) -> None:
    def little_memory(rank: int) -> None:
        verify._free_memory = lambda device: 2_500_000

    flags = ("--tp-size", 2, "--num-layers", 9, "--verify-parallelism")
    train(tmp_path, *flags, ranks=2, setup=little_memory).expect(0, "9 layers on one process do not fit", "the layout equals one process")


# BERT


def test_packed_rows_without_the_order_head(tmp_path: Path) -> None:
    flags = ("--fp64", "--bert-no-binary-head", "--bert-pack-sequences", "--eval-iters", 1, "--train-iters", 2)
    for name in ("alone", "sp2"):
        ranks, layout = OF_BERT[name]
        train(tmp_path, *flags, *layout, "--save", tmp_path / name, ranks=ranks, program=bert).expect(0)
    assert losses(tmp_path / "sp2") == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    assert "order_accuracy" not in records(tmp_path / "alone", "valid")[-1]


def test_what_bert_has_found_is_in_the_summary_and_on_the_page(
    runs: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_sp.commands.cli import main
    from megatron_sp.report.page import page
    from megatron_sp.report.reading import read_run

    run = runs("bert", "alone")
    last = records(run, "valid")[-1]
    assert main(["summarize", str(run)]) == 0
    said, files = capsys.readouterr().out, read_run(run)
    text = page([files], files.records[-1]["time"])
    for name, title in (("lm_accuracy", "Masked-token accuracy"), ("order_accuracy", "Sentence-order accuracy")):
        assert f"valid {name.replace('_', ' ')}" in said and f"{100 * last[name]:.1f} %" in said
        assert title in text and f"{100 * last[name]:.1f} %" in text
    assert ", where chance is 50 %" in said and "(chance is 50 %)" in text
    assert "Validation: lm accuracy" in text and "Validation: order accuracy" in text


def test_dry_run_of_bert(tmp_path: Path) -> None:
    said = train(tmp_path, "--dry-run", "--world-size", 8, "--tp-size", 2, "--sp-size", 2, program=bert).expect(0, "dry run: 8 processes")
    assert "parameters:" in said.text and not (tmp_path / "runs").exists()
