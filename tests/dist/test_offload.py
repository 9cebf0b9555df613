"""--offload-optimizer: the same bits as without it on a CPU, at every ZeRO stage, in every precision; checkpoints go both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import tiny
from support.layouts import Case, Sharded
from support.ranks import run_ranks
from support.training import assert_same_run, assert_same_tensors, records, state, tensors, train
from torch import nn

from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.offload import HostCopies
from megatron_sp.optim.optimizer import FlatOptimizer

KINDS: dict[str, tuple[object, ...]] = {
    "fp32": (), "bf16": ("--bf16", "--grad-reduce-in-bf16"), "sgd": ("--optimizer", "sgd"), "fp64": ("--fp64",),
    "fp16": ("--fp16", "--initial-loss-scale", 2.0**19, "--hysteresis", 1, "--loss-scale-window", 2),
}  # fmt: skip
CASES = [
    ("fp32", 2, ()), ("fp16", 3, ()),
    pytest.param("bf16", 3, ("--no-overlap-grad-reduce", "--zero3-keep-units", 1), id="kept units"),
    pytest.param("bf16", 1, ("--tp-size", 2, "--sequence-parallel", "--micro-batch-size", 2), id="tp_seq"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("bf16", 3, ()), ("sgd", 1, ()), ("fp32", 0, ()), ("fp32", 1, ()), ("fp32", 3, ()), ("bf16", 1, ()), ("bf16", 0, ()),
        ("bf16", 2, ()), ("fp16", 1, ()),
        ("sgd", 3, ()), ("fp64", 2, ()),
        ("fp32", 1, ("--no-overlap-grad-reduce", "--no-overlap-param-gather")), ("fp32", 3, ("--sp-size", 2)),
    )),
]  # fmt: skip


@pytest.mark.often("kept units", "tp_seq")
@pytest.mark.parametrize(("kind", "stage", "more"), CASES)
def test_the_bits_of_a_run_without_it(tmp_path: Path, kind: str, stage: int, more: tuple[object, ...]) -> None:
    """Two micro-batches in each step; log, weights and optimizer state."""
    flags = (*KINDS[kind], "--zero-stage", stage, "--micro-batch-size", 1, "--log-params-norm", "--log-num-zeros-in-grad", *more)
    for name, offload in (("plain", ()), ("offload", ("--offload-optimizer",))):
        train(tmp_path, *flags, *offload, "--save", tmp_path / name, ranks=2).expect(0)
    assert_same_run(tmp_path / "offload", tmp_path / "plain")
    norms = [[r["params_norm"] for r in records(tmp_path / name)] for name in ("plain", "offload")]
    assert norms[0] == norms[1]
    if kind == "fp16":
        assert 0 < state(tmp_path / "plain")["num_updates"] < 6, "some steps were meant to overflow"


@pytest.mark.often("bf16-3-offload")
@pytest.mark.parametrize(("kind", "stage", "first"), [
    ("fp32", 3, "plain"), ("bf16", 3, "offload"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("bf16", 0, "plain"), ("fp32", 0, "plain"), ("fp32", 0, "offload"), ("bf16", 0, "offload"),
        ("fp32", 3, "offload"), ("bf16", 3, "plain"),
    )),
])  # fmt: skip
def test_resumed_without_it_and_with_it_to_the_last_bit(tmp_path: Path, kind: str, stage: int, first: str) -> None:
    flags, offload = (*KINDS[kind], "--zero-stage", stage), ("--offload-optimizer",)
    train(tmp_path, *flags, "--save", tmp_path / "whole", ranks=2).expect(0)
    before, after = (offload, ()) if first == "offload" else ((), offload)
    train(tmp_path, *flags, *before, "--save", tmp_path / "parts", "--exit-interval", 3, ranks=2).expect(0)
    train(tmp_path, *flags, *after, "--save", tmp_path / "parts", "--auto-resume", ranks=2).expect(0, "resumed from")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.often("bf16---finetune")
@pytest.mark.parametrize(
    ("kind", "how"),
    [("bf16", "--finetune"), *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("fp32", "--no-load-optim"), ("fp32", "--finetune"), ("bf16", "--no-load-optim")))],
)  # fmt: skip
def test_weights_that_are_loaded_alone_become_the_master_weights(tmp_path: Path, kind: str, how: str) -> None:
    flags = (*KINDS[kind], "--zero-stage", 1)
    train(tmp_path, *flags, "--save", tmp_path / "first", "--exit-interval", 2, ranks=2).expect(0)
    for name, offload in (("plain", ()), ("offload", ("--offload-optimizer",))):
        train(tmp_path, *flags, *offload, "--load", tmp_path / "first", how, "--save", tmp_path / name, ranks=2).expect(0)
    assert_same_tensors(tensors(tmp_path / "offload"), tensors(tmp_path / "plain"))


@pytest.mark.often("2-grad")
@pytest.mark.parametrize(("stage", "what"), [(1, "loss"), (2, "grad"), pytest.param(0, "grad", marks=pytest.mark.long)])
def test_a_bad_step_changes_nothing(tmp_path: Path, stage: int, what: str) -> None:
    """Neither itself, nor by gradients that are left over for the step after it."""
    flags = ("--zero-stage", stage, "--max-bad-steps", 1)
    for name, offload in (("plain", ()), ("offload", ("--offload-optimizer",))):
        train(tmp_path, *flags, *offload, "--save", tmp_path / name, ranks=2, fault=f"nan:rank=1:at={what}:step=3").expect(0, "skipped")
    assert_same_run(tmp_path / "offload", tmp_path / "plain")


def test_a_cpu_is_told_that_it_gains_nothing(tmp_path: Path) -> None:
    said = "--offload-optimizer: the model is in host memory already"
    out = train(tmp_path, "--offload-optimizer", "--train-iters", 1, ranks=2).expect(0, said)
    assert out.text.count(said) == 1


def test_verify_parallelism_leaves_it_out(tmp_path: Path) -> None:
    train(tmp_path, "--offload-optimizer", "--zero-stage", 1, "--verify-parallelism", ranks=2).expect(0, "the layout equals one process")


def test_deepspeeds_json_is_the_same_run_as_the_flags(tmp_path: Path) -> None:
    """Precision, stage, offload, accumulation and clipping; what is ignored is said once, the optimizer beside --lr among it."""
    block = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}}
    data = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "gradient_clipping": 0.3,
        "zero_optimization": block, "bf16": {"enabled": True}, "communication_data_type": "bf16", "optimizer": optimizer,
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(data))
    common = ("--micro-batch-size", 1, "--save-interval", 6)
    flags = ("--bf16", "--zero-stage", 2, "--offload-optimizer", "--clip-grad", 0.3, "--grad-reduce-in-bf16")
    train(tmp_path, *common, *flags, "--save", tmp_path / "flags", ranks=2).expect(0)
    out = train(tmp_path, *common, "--deepspeed_config", tmp_path / "ds.json", "--save", tmp_path / "json", ranks=2).expect(0)
    assert_same_run(tmp_path / "json", tmp_path / "flags")
    assert state(tmp_path / "json")["config"] == {
        **state(tmp_path / "flags")["config"],
        "checkpoint": state(tmp_path / "json")["config"]["checkpoint"],
    }
    assert out.text.count("zero_optimization.reduce_bucket_size") == 1
    wrong = train(tmp_path, *common, "--deepspeed_config", tmp_path / "ds.json", "--global-batch-size", 8, ranks=2)
    wrong.expect(2, "ds.json: train_batch_size (4) contradicts --global-batch-size (8)")
    assert wrong.texts[1] == "", "said once"


def _fetched_once(stage: int) -> None:
    """Each unit's gradients come once a step, when the last micro-batch's are in them, most of them before backward ends."""
    case = Case(dp=dist.get_world_size(), zero=stage, dtype=torch.float32, micro_batches=3)
    sharded = Sharded(case, tiny.make_model(tiny.BASE, dtype=torch.float32))
    host = HostCopies(sharded.units)
    fetched: list[int] = []
    at_the_end: list[int] = []
    fetch, finish = host.fetch, sharded.gradients.finish_step

    def counted(index: int) -> None:
        fetched.append(index)
        fetch(index)

    def finished() -> None:
        at_the_end.append(len(fetched))
        finish()

    host.fetch = counted  # type: ignore[method-assign]
    sharded.gradients.finish_step = finished  # type: ignore[method-assign]
    sharded.gradients.host = host
    for step in range(2):
        fetched.clear()
        sharded.step()
        assert sorted(fetched) == list(range(len(sharded.units))), fetched
        assert at_the_end[step] >= len(sharded.units) - 2, "they come under the backward pass"
        for index, unit in enumerate(sharded.units):
            assert torch.equal(host.grads(index), unit.grad_shard) and host.grads(index).data_ptr() != unit.grad_shard.data_ptr()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_come_once_and_complete(tmp_path: Path, stage: int) -> None:
    run_ranks(_fetched_once, 2, tmp_path, stage)


def test_the_masters_are_copies() -> None:
    """Also of fp32 parameters; they change with the update, and the parameters follow. A frozen unit has none."""
    layer, frozen = nn.Linear(5, 3), nn.Linear(5, 5).requires_grad_(False)
    unit, other = (FlatUnit("", m.named_parameters(), zero=Zero(), offload=True) for m in (layer, frozen))
    host = HostCopies([unit, other])
    assert unit.params is not None and unit.master.data_ptr() != unit.params.data_ptr() and torch.equal(unit.master, unit.params)
    gradients = FlatGradients([unit, other], unit.zero.group, host=host)
    optimizer = FlatOptimizer([unit, other], OptimizerConfig(lr=0.1), host=host)
    gradients.start_step()
    gradients.last_micro_batch()
    layer(frozen(torch.ones(2, 5))).sum().backward()
    gradients.finish_step()
    before = unit.params.clone()
    optimizer.step(0.1, 0.0, 0.5)
    assert not torch.equal(unit.params, before) and torch.equal(unit.master, unit.params)
    assert all(state.exp_avg.device.type == "cpu" for state in optimizer.states)
