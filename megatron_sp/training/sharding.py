"""Sharding of a task's model, unit by unit, so that with ZeRO stage 3 the whole model never exists on one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megatron_sp.comm.groups import SINGLE_RANK, Group, ParallelGroups
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.config.schema import Config, ParallelConfig
from megatron_sp.models.transformer import delayed_weights
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer
from megatron_sp.optim.weights import WholeWeights
from megatron_sp.parallel.forward_context import TABLE, Unit
from megatron_sp.parallel.layers import attach_main_grad, shard_specs, table_names
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.pipeline_stages import Stage
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.optim.offload import HostCopies
    from megatron_sp.optim.residency import Pool


@dataclass
class ShardedModel:
    """A model whose parameters are stored in flat units, and the objects that communicate them."""

    model: nn.Module
    units: list[FlatUnit]
    weights: WholeWeights
    gradients: FlatGradients
    fingerprint: Fingerprint  # fingerprint of the initial parameters, before sharding
    host: HostCopies | None  # copies for master weights in host memory (--offload-optimizer), else None
    # index of the unit that the first and the last rank of a pipeline share, if this is one of them
    tables: tuple[int, ...] = ()
    # ranks that have the same parameters of a unit, by index, where they are others than those of dp x cp x sp
    own_groups: dict[int, Group] = field(default_factory=dict)

    def optimizer(
        self, config: Config, groups: ParallelGroups | None, kernel: Literal["torch", "apex"] = "torch"
    ) -> FlatOptimizer:
        """Return the optimizer of the model; without groups for this process alone."""
        decoupled = table_names(self.model)
        if groups is None:
            return FlatOptimizer(self.units, config.optimizer, host=self.host, kernel=kernel, decoupled=decoupled)
        has_experts = config.model.has_experts
        whole, elsewhere = counted_by(groups, len(self.units), self.own_groups, self.tables, has_experts=has_experts)
        return FlatOptimizer(
            self.units, config.optimizer, tp=groups.tp, everybody=groups.world, host=self.host, kernel=kernel,
            whole=whole, counted_elsewhere=elsewhere, decoupled=decoupled,
        )  # fmt: skip


def counted_by(
    groups: ParallelGroups, num_units: int, own_groups: Mapping[int, Group], tables: Collection[int], *,
    has_experts: bool,
) -> tuple[Group, set[int]]:  # fmt: skip
    """Return ranks that together count each parameter once in the norm, and which of this rank's units others count."""
    # has_experts: of the whole model, for all must sum over the same ranks: also those of a stage without experts
    if not has_experts:
        return groups.pp_tp, set(tables if groups.pp_rank else ())
    # no axis has each of them once: all ranks add up what the first of each kind has
    return groups.world, {index for index in range(num_units) if own_groups.get(index, groups.dp_cp_sp).rank() > 0}


def build_sharded(
    build_model: Callable[..., nn.Module], config: Config, layout: ParallelContext, groups: ParallelGroups | None,
    device: torch.device, prepare: Callable[[nn.Module, Unit], None] | None = None,
) -> ShardedModel:  # fmt: skip
    """Build a model and move its parameters into flat units, on this process alone without groups."""
    parallel = config.parallel
    zero = Zero() if groups is None else Zero(parallel.zero_stage, groups.dp_cp_sp)
    units: list[FlatUnit] = []
    own_groups: dict[int, Group] = {}
    tables: list[int] = []
    fingerprint = Fingerprint()

    def take(model: nn.Module, unit: Unit) -> None:
        unit.module.to(device)
        if prepare is not None:
            prepare(model, unit)
        named = named_parameters(model, unit)
        of_unit = zero.of(unit.alike)
        if unit.name == TABLE and groups is not None and groups.ends is not None:
            of_unit = Zero(of_unit.stage, groups.ends)
            tables.append(len(units))
            own_groups[len(units)] = groups.ends
        elif unit.alike == "experts" and groups is not None:
            of_unit = Zero(parallel.zero_stage, layout.ep.replicas)
            own_groups[len(units)] = layout.ep.replicas
        fingerprint.add(named, of_experts=unit.alike == "experts")
        units.append(FlatUnit(unit.name, named, shard_specs(model), of_unit, offload=parallel.offload_optimizer))

    model = build_model(config, layout, take)
    model.to(device)  # buffers
    order = [] if layout.stages else model.unit_order(backward=True)  # type: ignore[operator]
    pools = pools_of_model(model, parallel) if any(unit.zero.stage == 3 for unit in units) else ()
    weights = WholeWeights(
        units, pools=pools, order=order, overlap=parallel.overlap_param_gather,
        fetch=parallel.zero3_fetch, together=units_together(model),
    )  # fmt: skip
    host: HostCopies | None = None
    if parallel.offload_optimizer:
        from megatron_sp.optim.offload import HostCopies

        host = HostCopies(units)
    gradients = FlatGradients(
        units, SINGLE_RANK if groups is None else groups.dp_cp_sp, tp=layout.tp.group,
        overlap=parallel.overlap_grad_reduce, reduce_dtype=torch.bfloat16 if parallel.grad_reduce_in_bf16 else None,
        host=host, own_groups=own_groups, delayed=delayed_weights(model, layout.tp) if parallel.delay_wgrad else (),
    )  # fmt: skip
    attach_main_grad(model, gradients)
    if (attach_units := getattr(model, "attach_units", None)) is not None:
        attach_units(units)
    return ShardedModel(model, units, weights, gradients, fingerprint, host, tuple(tables), own_groups)


def pools_of_model(model: nn.Module, parallel: ParallelConfig) -> list[Pool]:
    # the buffer pools of a model at ZeRO stage 3: the units that share buffers
    from megatron_sp.optim.residency import pools_of

    units: list[Unit] = model.units()  # type: ignore[operator]
    stages: tuple[Stage, ...] = getattr(model, "stages", ())
    cut = bool(stages) and stages[0].num_stages > 1
    # in a pipeline passes of several micro-batches come in turn: what shared a buffer would be fetched anew for each
    tied = cut or model.unit_order(backward=False).count(0) > 1  # type: ignore[operator]
    return pools_of(
        [u.alike for u in units], 2 + parallel.zero3_keep_units, tied=tied, keep_all=parallel.zero3_gather_once
    )


def units_together(model: nn.Module) -> list[tuple[int, ...]]:
    """Return a model's units that are used together."""
    together = getattr(model, "units_together", None)  # a model of others has none
    return [] if together is None else together()


def named_parameters(model: nn.Module, unit: Unit) -> list[tuple[str, nn.Parameter]]:
    names: dict[int, Any] = {id(p): n for n, p in model.named_parameters()}
    return [(names[id(p)], p) for p in unit.module.parameters()]


class Fingerprint:
    """Names, dtypes, shapes and bit sums of parameters."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self._experts: set[str] = set()

    def add(self, named: Iterable[tuple[str, Tensor]], *, of_experts: bool = False) -> None:
        """Add parameters to the fingerprint; those of experts are the same on ranks with the same ep rank only."""
        widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        for name, param in named:
            if of_experts:
                self._experts.add(name)
            bits = param.detach().contiguous().view(widths[param.element_size()])
            total = int(bits.sum(dtype=torch.int64))  # does not depend on the device
            self.of[name] = f"{str(param.dtype).removeprefix('torch.')} {list(param.shape)} {total}"

    def digest(self, *, of_experts: bool = False) -> str:
        """Return a short hash of all parameters added so far, of experts or of all others."""
        lines = (f"{n} {v}" for n, v in self.of.items() if (n in self._experts) == of_experts)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def require_equal(self, groups: ParallelGroups, ep_rank: int = 0) -> None:
        """Raise ConfigError on all ranks if those that must have the same parameters do not. Collective."""
        stage = groups.pp_rank
        own_digests = [
            [f"{stage}/{groups.tp_rank}", self.digest()],
            [f"{stage}/ep{ep_rank}", self.digest(of_experts=True)],
        ]
        of_part: dict[str, tuple[int, str]] = {}
        odd: tuple[int, int] | None = None
        for rank, digests in enumerate(gather_json(own_digests, groups.control)):
            for part, digest in digests:
                first, known = of_part.setdefault(part, (rank, digest))
                if known != digest and odd is None:
                    odd = first, rank
        if odd is None:
            return
        both = gather_json(self.of if groups.rank in odd else None, groups.control)
        ours, theirs = both[odd[0]], both[odd[1]]
        name = next((n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n)), "the order of the parameters")
        raise ConfigError(
            f"rank {odd[1]} has another model than rank {odd[0]}: {name} is {theirs.get(name, 'absent')} there and"
            f" {ours.get(name, 'absent')} here (type, shape, sum of the bits); start all ranks with the same flags,"
            " seed and versions"
        )
