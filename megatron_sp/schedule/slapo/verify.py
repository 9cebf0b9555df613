"""Slapo's ``with Verify(sch, inputs):``: at the end of the block, results and gradients are compared with the model before it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import broadcast
from megatron_sp.schedule.check.decision import decide
from megatron_sp.schedule.check.derive import explained
from megatron_sp.schedule.core.placements import NotFollowed
from megatron_sp.schedule.slapo.build import Init, settle_weights, without_empty_sums
from megatron_sp.schedule.slapo.schedule import SlapoSchedule
from megatron_sp.schedule.verify.verify import Verdict, default_loss, verify
from megatron_sp.utils.errors import ConfigError, NumericsError

_SEED = 2023


@dataclass(frozen=True)
class VerifyOptions:
    """Options of ``Verify`` that Slapo's does not have.

    Attributes:
        init_weights: as for ``build``, on the copy.
        dtype: fp64, or fp32 with its tolerance.
    """

    init_weights: Init = None
    dtype: torch.dtype = torch.float64


class Verify:
    """Verify a schedule on copies, in fp64, as a context manager; the schedule can still be built. Collective over all ranks.

    A replaced module computes with the weights of the old one, where names and shapes are the same. Slapo's version
    compares only results; this one also compares the gradients of all parameters, and of inputs that require one.

    The arguments are Slapo's, in its order.

    Args:
        sch: schedule of the whole model.
        example_inputs: inputs of the model's forward: a tensor, a list in the order of its signature, or a dict by
            name. Those of rank 0 are used.
        example_outputs: second argument of ``loss_fn``.
        loss_fn: (result, example_outputs) -> loss (default: the model's own, or a weighted sum of its results).
        device: where to compute (default: where the model is).
        eval_mode: turn dropout off, and use the running statistics of batch norms.
        enable: False: nothing is compared or checked, and ``build`` may be called inside.
        more: see ``VerifyOptions``.
    Attributes:
        verdict: the result, after the block.
    Raises:
        NumericsError: something differs, at the end of the block; names it.
    """

    def __init__(
        self, sch: SlapoSchedule, example_inputs: Any, example_outputs: Tensor | None = None,
        loss_fn: Callable[..., Tensor] | None = None, device: str | torch.device | None = None, topology: None = None,
        eval_mode: bool = True, enable: bool = True, **more: Any,
    ) -> None:  # fmt: skip
        if enable and (sch.path or topology is not None):
            what = f"the schedule of the whole model, not of {sch.path}" if sch.path else "no topology: there are no pipeline stages"
            raise ConfigError(f"Verify takes {what}")
        self.sch, self.inputs, self.targets, self.loss_fn, self.device = sch, example_inputs, example_outputs, loss_fn, device
        self.eval_mode, self.enable, self.options = eval_mode, enable, VerifyOptions(**more)
        self.verdict: Verdict | None = None
        self.whole = self._settled(sch.mod) if enable else nn.Identity()

    def __enter__(self) -> Verify:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None or not self.enable:
            return
        if self.sch.schedule.applied is not None:
            raise ConfigError("build() was called inside of Verify: call it after the block, whose end compares with the whole model")
        now = self._settled(self.sch.mod)
        _take_over(now, self.whole)
        owner, lines = self.sch.schedule, without_empty_sums(self.sch)
        asked = (lines, owner.mesh, owner.seq_dim, self._batch())
        with torch.random.fork_rng():
            compare = partial(verify, now, *asked, dtype=self.options.dtype, loss=self._loss, whole=self.whole)
            self.verdict = explained(compare, owner.model, *asked)
        if not self.verdict.ok:
            raise NumericsError(f"{self.verdict}{self._way_out(self.verdict)}")
        with suppress(NotFollowed):  # these inputs may be equal by chance: what build() would refuse is refused here, too
            decide(owner.model, lines, owner.mesh, owner.seq_dim)

    def _way_out(self, verdict: Verdict) -> str:
        """Return advice if only gradients of unsplit parameters differ, which most likely lack a sum over the ranks; else nothing."""
        wrong = [row for row in verdict.rows if not row.error <= verdict.tolerance]
        split = {f"{d.on}.{d.args['tensor']}".lstrip(".") for d in self.sch.schedule.directives if d.do == "shard"}
        if any(row.kind != "gradient" or row.name in split for row in wrong):
            return ""
        path, _, last = wrong[0].name.rpartition(".")
        return (
            "\nevery rank has these parameters whole; if it uses them on a share of the positions, their gradients are sums over the ranks:"
            f" sch[{path!r}].annotate({last!r}, 'replicated_param', True)"
        )

    def _settled(self, model: nn.Module) -> nn.Module:
        """Copy a model and initialise it, ready to compute."""
        copied = copy.deepcopy(model)
        settle_weights(copied, self.options.init_weights, self.sch.group)
        if self.device is not None:
            copied.to(self.device)
        copied.train(copied.training and not self.eval_mode)
        copied.register_forward_pre_hook(_seed)
        return copied

    def _batch(self) -> dict[str, Any]:
        given = self.inputs if isinstance(self.inputs, dict) else _named(self.whole, self.inputs)
        return {name: self._everywhere(value) for name, value in given.items()}

    def _everywhere(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.detach().clone() if self.device is None else value.detach().clone().to(self.device)
        return broadcast(moved, self.sch.group).requires_grad_(value.requires_grad)

    def _loss(self, result: Any) -> Tensor:
        if self.loss_fn is None:
            return default_loss(result)
        return self.loss_fn(result) if self.targets is None else self.loss_fn(result, self.targets)


def _seed(*_: Any) -> None:
    torch.manual_seed(_SEED)


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return positional inputs by their names in the forward's signature. Raises ConfigError: it has too few names."""
    given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    kinds = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if len(names) < len(given):
        raise ConfigError(
            f"Verify has {len(given)} inputs, and {type(model).__name__}.forward names {', '.join(names) or 'none'}:"
            " give a dict by name, or a model that names its inputs"
        )
    return dict(zip(names, given, strict=False))


def _take_over(now: nn.Module, whole: nn.Module) -> None:
    """Copy the weights that both models have, which one of them may have initialised separately."""
    known = dict((*whole.named_parameters(), *whole.named_buffers()))
    with torch.no_grad():
        for name, tensor in (*now.named_parameters(), *now.named_buffers()):
            if name in known and known[name].shape == tensor.shape:
                tensor.copy_(known[name])
