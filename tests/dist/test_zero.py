"""ZeRO: bits, messages, memory and order of its stages; test_equality_grid.py has loss, gradients and weights in every layout."""

from __future__ import annotations

import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny
from support.errors import FP32, FP64, assert_law
from support.fetches import list_fetches
from support.late_network import late_network
from support.layouts import Case, Sharded, alone, check_all
from support.ranks import run_ranks
from support.sent_bytes import Wire
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import ModelConfig, OptimizerConfig
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer
from megatron_sp.optim.residency import Pool
from megatron_sp.optim.weights import UnitWork, WholeWeights

DROPOUT = {"hidden_dropout": 0.2}
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
# sizes of whole vector registers: torch's fused AdamW rounds what is left over after them otherwise, wherever that
# lies
UNTIED = tiny.shape(untie_embeddings_and_output_weights=True, hidden_size=32, kv_channels=8, ffn_hidden_size=48, vocab_size=48)
FULL = {"recompute_granularity": "full"}
BY_TWO = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


@pytest.fixture(scope="module", autouse=True)
def _load_once() -> None:
    """What torch imports at the first dispatch mode, DDP or FSDP: here, instead of in every child."""
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401


def _sharded(stage: int, **case: Any) -> Sharded:
    return Sharded(Case(dp=dist.get_world_size(), zero=stage, dtype=torch.float32, **case), tiny.make_model(tiny.BASE, dtype=torch.float32))


def _same_bits() -> None:
    """Weights after five AdamW steps at each stage against those of stage 0, to the last bit."""
    config = OptimizerConfig(lr=0.01, clip_grad=0.0)
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for stage, micro_batches in ((0, 1), (0, 2), (1, 2), (2, 1), (3, 1)):  # stages 2 and 3 add up micro-batches in another order
        sharded = _sharded(stage, micro_batches=micro_batches)
        optimizer = FlatOptimizer(sharded.units, config, everybody=sharded.groups.world)
        for _ in range(5):
            sharded.step()
            optimizer.step(0.01, 0.1, float(optimizer.grad_norm()), updated=sharded.weights.refresh)
            sharded.weights.forget()
            if stage == 3:
                assert not sharded.weights._residency.place and all(p.numel() == 0 for p in sharded.model.parameters())
                assert all(unit.params is None and unit.local_params.numel() == unit.numel // 2 for unit in sharded.units)
        sharded.weights.settle()
        found[stage, micro_batches] = {n: t.clone() for n, t in sharded.params().items()}
        whole, parts = found[0, micro_batches], found[stage, micro_batches]
        assert [n for n in whole if not torch.equal(whole[n], parts[n])] == [], f"stage {stage}"


def test_stages_have_the_bits_of_stage_0_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(_same_bits, 2, tmp_path)


def _poisoned(fetch: str) -> None:
    """Buffers full of NaN before every fetch: padding and tails come from the ranks, not from what lay there (DeepSpeed #5420)."""
    sharded = _sharded(3, fetch=fetch)
    want = {n: t.clone() for n, t in sharded.params().items()}
    weights = sharded.weights
    gather, fetches = weights._gather, []

    def poisoned(unit: FlatUnit, layout: Any, local: Tensor, flat: Tensor | None, lasting: bool) -> Any:
        assert flat is not None
        flat.fill_(float("nan"))
        fetches.append(unit.name)
        return gather(unit, layout, local, flat, lasting)

    weights._gather = poisoned  # type: ignore[method-assign]
    weights.start_step(1)
    for index, unit in enumerate(sharded.units):
        weights.need(index)
        for slot in unit.slots:
            assert torch.equal(slot.param.detach(), want[slot.name])
    weights.forget()
    loss = sharded.step()
    assert len(fetches) > 2 * len(sharded.units)
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in sharded.grads().values())


@pytest.mark.parametrize("world_size, fetch", [(3, "all_gather"), (2, "all_reduce")])
def test_buffers_full_of_nan_before_each_fetch(tmp_path: Path, world_size: int, fetch: str) -> None:
    run_ranks(_poisoned, world_size, tmp_path, fetch)


class Odd(nn.Module):
    """Sizes that no world divides, one element, a frozen one, one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(3, 5, generator=g, dtype=torch.float64))
        self.one = nn.Parameter(torch.randn(1, 1, generator=g, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(7, generator=g, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.randn((), generator=g, dtype=torch.float64))
        self.cube = nn.Parameter(torch.randn(3, 2, 3, generator=g, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(2, 5, generator=g, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(11, generator=g, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.matrix.t()).sum() * self.one.sum() + (self.bias.sin().sum() + self.cube.square().sum()) * self.scalar
        return y + (x @ self.frozen.t()).square().sum() * self.one.sum()


def _odd(stage: int) -> None:
    """An awkward unit, a frozen one and a tiny one, foreign to our layers; some ranks skip a unit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = ParallelGroups.create(torch.device("cpu"))
    modules = [Odd(), Odd().requires_grad_(False), nn.Linear(1, 1, dtype=torch.float64)]
    alone = [Odd(), Odd().requires_grad_(False), nn.Linear(1, 1, dtype=torch.float64)]
    alone[2].load_state_dict(modules[2].state_dict())
    dist.broadcast(alone[2].weight.data, 0), dist.broadcast(alone[2].bias.data, 0)
    modules[2].load_state_dict(alone[2].state_dict())
    zero = Zero(stage, groups.dp_cp_sp)
    units = [FlatUnit(str(i), ((f"{i}.{n}", p) for n, p in m.named_parameters()), zero=zero) for i, m in enumerate(modules)]
    gradients = FlatGradients(units, groups.dp_cp_sp)
    weights = WholeWeights(units, pools=[Pool((0, 1), 2), Pool((2,), 1)], order=[0, 1, 2, 2, 1, 0])
    events = UnitWork(weights, gradients)
    settings = OptimizerConfig(optimizer="sgd", clip_grad=1.0)
    optimizer = FlatOptimizer(units, settings, everybody=groups.world)
    theirs = FlatOptimizer([FlatUnit(str(i), ((f"{i}.{n}", p) for n, p in m.named_parameters())) for i, m in enumerate(alone)], settings)
    reference = FlatGradients(theirs.units, groups.tp)

    def loss_of(models: list[nn.Module], of_rank: int, step: int) -> Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + of_rank), dtype=torch.float64)
        y = models[0](x) + models[1](x) * models[0].one.sum()  # type: ignore[union-attr,operator]
        return y if of_rank == 1 else y + models[2](x[:, :1]).square().sum()

    for step in range(3):
        for main_grad in (gradients, reference):
            main_grad.start_step()
        weights.start_step(2)
        for micro in range(2):
            for index in range(3):
                events.before_use(index)
            if micro == 1:
                gradients.last_micro_batch()
            loss_of(modules, rank, 2 * step + micro).backward()
            for index in (2, 1):
                events.backward_done(index)
            gradients.finish_micro_batch()
            for other in range(size):
                loss_of(alone, other, 2 * step + micro).backward()
        gradients.finish_step()
        reference.finish_step()
        got = {s.name: s.view(u.gathered(u.grad_shard)) for u in units for s in u.slots}
        assert_law(got, {s.name: s.view(u.grads) for u in theirs.units for s in u.slots}, FP64)
        norms = float(optimizer.grad_norm()), float(theirs.grad_norm())
        assert norms[0] == pytest.approx(norms[1], rel=1e-12) and norms[0] > 1.0
        optimizer.step(0.05, 0.1, norms[0], updated=weights.refresh)
        theirs.step(0.05, 0.1, norms[1])
        weights.forget()
        assert_law({s.name: s.view(u.gathered(u.local_params)) for u in units for s in u.slots}, dict(_named(alone)), FP64)
    weights.settle()


def _named(models: list[nn.Module]) -> list[tuple[str, Tensor]]:
    return [(f"{i}.{n}", p.detach()) for i, m in enumerate(models) for n, p in m.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("world_size, stage", [
    (2, 0), (3, 1), (3, 3), (1, 3), *(pytest.param(*case, marks=pytest.mark.long) for case in [(3, 0), (2, 2), (4, 2), (4, 3)])
])  # fmt: skip
def test_odd_sizes_frozen_units_and_ranks_without_gradient(tmp_path: Path, world_size: int, stage: int) -> None:
    run_ranks(_odd, world_size, tmp_path, stage)


def _on_the_wire() -> None:
    for stage, micro_batches, buffers, fetch, dtype in [
        (1, 1, 2, "all_gather", None), (1, 3, 2, "all_gather", None), (2, 2, 2, "all_gather", None), (3, 1, 2, "all_gather", None),
        (3, 3, 2, "all_gather", None), (3, 3, tiny.LAYERS, "all_gather", None), (3, 2, 2, "all_reduce", None),
        (1, 2, 2, "all_gather", torch.bfloat16), (3, 2, 2, "all_gather", torch.bfloat16),
    ]:  # fmt: skip
        _count_wire(stage, micro_batches, buffers, fetch, dtype)


def _count_wire(stage: int, micro_batches: int, buffers: int, fetch: str, reduce_dtype: torch.dtype | None) -> None:
    """One step and the update: which collectives, how often, how many bytes."""
    sharded = _sharded(stage, micro_batches=micro_batches, buffers=buffers, fetch=fetch)
    sharded.gradients.reduce_dtype = reduce_dtype
    optimizer = FlatOptimizer(sharded.units, OptimizerConfig(lr=0.01), everybody=sharded.groups.world)
    world = dist.get_world_size()
    for _ in range(2):  # the second step like the first
        with Wire(world) as wire:
            sharded.step()
            norm = float(optimizer.grad_norm())
            optimizer.step(0.01, 0.1, norm, updated=sharded.weights.refresh)
            sharded.weights.forget()
            sharded.weights.settle()
        units = [unit for unit in sharded.units if unit.numel]
        each = {unit.name: unit.numel * 4 * (world - 1) // world for unit in units}
        all_once = sum(each.values())
        reductions = micro_batches if stage >= 2 else 1
        halved = 2 if reduce_dtype is not None else 1
        assert wire.calls["alltoall_base_"] == reductions * len(units)
        assert wire.num_bytes["alltoall_base_"] == reductions * all_once // halved
        scalars = 2  # the loss, the gradient norm
        if stage < 3:
            assert (wire.calls["_allgather_base_"], wire.num_bytes["_allgather_base_"]) == (len(units), all_once)
            assert wire.calls["allreduce_"] == scalars
            continue
        fetched = Counter(i for i, _ in list_fetches(sharded.pools, sharded.model.unit_order(backward=True), micro_batches))
        moved = sum(fetched[i] * each[unit.name] for i, unit in enumerate(sharded.units))
        if fetch == "all_gather":
            assert (wire.calls["_allgather_base_"], wire.num_bytes["_allgather_base_"]) == (sum(fetched.values()), moved)
            assert wire.calls["allreduce_"] == scalars
        else:
            assert wire.calls["allreduce_"] == sum(fetched.values()) + scalars
            assert 0 <= wire.num_bytes["allreduce_"] - 2 * moved <= 64
        if buffers >= tiny.LAYERS:
            assert set(fetched.values()) == {1}, "gathered once per step"
        else:
            blocks = [fetched[i] for i in range(1, tiny.LAYERS + 1)]
            assert max(blocks) <= 2 * micro_batches, "one gather for each direction of a micro-batch at most"


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_collectives_and_bytes_of_a_step(tmp_path: Path, world_size: int) -> None:
    run_ranks(_on_the_wire, world_size, tmp_path)


def _even_batch(config: ModelConfig, step: int, rank: int) -> tiny.Batch:
    """Every rank has the same number of loss tokens: peers average over ranks, we over tokens."""
    batch = tiny.make_batch(config, seed=10 * step + rank, mask=1.0)
    batch["loss_mask"] = torch.ones_like(batch["loss_mask"], dtype=torch.float32)
    return batch


def _our_step(sharded: Sharded, optimizer: FlatOptimizer, batch: tiny.Batch, weight_decay: float) -> None:
    """One step and update of ours on a batch given to the peer too."""
    sharded.gradients.start_step()
    sharded.weights.start_step(1)
    sharded.gradients.last_micro_batch()
    loss = sharded.model(batch["tokens"], batch["labels"], batch["loss_mask"], tiny.context(sharded.model.config, batch), sharded.events)[0]
    (loss / (batch["loss_mask"].numel() * dist.get_world_size())).backward()
    sharded.gradients.finish_micro_batch()
    sharded.gradients.finish_step()
    optimizer.step(0.01, weight_decay, 0.0, updated=sharded.weights.refresh)
    sharded.weights.forget()


def _against_ddp(stage: int) -> None:
    """Five steps of torch's DistributedDataParallel with its fused AdamW on the same model, to the last bit.

    Untied: the gradient of a tied table is a sum of two, which autograd and our main_grad take in another order.
    """
    rank, config = dist.get_rank(), UNTIED
    model = tiny.make_model(config, dtype=torch.float32)
    ddp = nn.parallel.DistributedDataParallel(_Mean(model))
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8, fused=True)
    case = Case(dp=2, zero=stage, dtype=torch.float32)
    sharded = Sharded(case, tiny.make_model(config, dtype=torch.float32))
    ours = FlatOptimizer(sharded.units, OptimizerConfig(lr=0.01, clip_grad=0.0), everybody=sharded.groups.world)
    for step in range(5):
        batch = _even_batch(config, step, rank)
        ddp(batch).backward()
        theirs.step()
        theirs.zero_grad()
        _our_step(sharded, ours, batch, weight_decay=0.1)
    sharded.weights.settle()
    want, got = dict(model.named_parameters()), sharded.params()
    different = [n for n in got if not torch.equal(got[n], want[n])]
    assert not different, different


class _Mean(nn.Module):
    """The mean loss of a rank, which DDP averages over ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ctx = tiny.context(self.model.config, batch)  # type: ignore[arg-type]
        loss: Tensor = self.model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx)[0]
        return loss / batch["loss_mask"].numel()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_bits_of_ddp(tmp_path: Path, stage: int) -> None:
    run_ranks(_against_ddp, 2, tmp_path, stage)


def _against_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    rank, config = dist.get_rank(), tiny.shape()
    model = tiny.make_model(config, dtype=torch.float32)
    for layer in model.decoder.layers:
        fully_shard(layer)
    theirs_model = _Mean(model)
    fully_shard(theirs_model)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0)
    sharded = _sharded(3)
    ours = FlatOptimizer(sharded.units, OptimizerConfig(lr=0.01, adam_eps=1e-3, clip_grad=0.0), everybody=sharded.groups.world)
    for step in range(5):
        batch = _even_batch(config, step, rank)
        theirs_model(batch).backward()
        theirs.step()
        theirs.zero_grad()
        _our_step(sharded, ours, batch, weight_decay=0.0)
    sharded.weights.settle()
    want = {n.removeprefix("model."): p.full_tensor() if isinstance(p, DTensor) else p for n, p in theirs_model.named_parameters()}
    assert_law(sharded.params(), {n: t.detach() for n, t in want.items()}, FP32)


@pytest.mark.long
def test_the_weights_of_fsdp2(tmp_path: Path) -> None:
    run_ranks(_against_fsdp2, 2, tmp_path)


def _living_tensors() -> tuple[int, int]:
    time.sleep(0.02)  # gloo's thread may hold the operands of the last collective a little longer
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
    bytes_of = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return len(tensors), sum(bytes_of.values())


def _fifty_steps(stage: int) -> None:
    """What lives after a step is the same after the 10th and the 50th."""
    sharded = _sharded(stage)
    optimizer = FlatOptimizer(sharded.units, OptimizerConfig(lr=1e-4), everybody=sharded.groups.world)
    sizes = []
    for step in range(50):
        sharded.step()
        optimizer.step(1e-4, 0.1, float(optimizer.grad_norm()), updated=sharded.weights.refresh)
        sharded.weights.forget()
        sharded.weights.settle()
        if step in (9, 49):
            sizes.append(min(_living_tensors() for _ in range(10)))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_nothing_grows(tmp_path: Path, stage: int) -> None:
    run_ranks(_fifty_steps, 2, tmp_path, stage)


LATE = [
    *(Case(dp=2, zero=stage, steps=2, micro_batches=2, model=DROPOUT) for stage in (1, 2, 3)),
    Case(dp=2, zero=3, steps=2, fetch="all_reduce"),
    Case(dp=2, zero=3, steps=2, micro_batches=2, buffers=3, kernels=BY_TWO, model=LLAMA),
    Case(dp=2, zero=2, steps=2, micro_batches=3, model=LLAMA, kernels=FULL),
]


def _late(cases: list[Case]) -> None:
    """Results that arrive inside ``wait()`` and not before, and fresh memory full of NaN."""
    for case in cases:
        with late_network() as network:
            check_all([case])
        assert network.started


def test_nothing_is_used_before_it_is_there(tmp_path: Path) -> None:
    for case in LATE:
        alone(case)
    run_ranks(_late, 2, tmp_path, LATE)


def test_ranges_beside_tp_under_a_late_network(tmp_path: Path) -> None:
    run_ranks(_late, 4, tmp_path, [Case(dp=2, tp=2, tp_seq=True, zero=stage, steps=2, micro_batches=2) for stage in (1, 3)])
