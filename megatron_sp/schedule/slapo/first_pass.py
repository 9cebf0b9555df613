"""Diagnosis of missing lines: ``build()`` trusts its lines, so a missing one would show only as a size mismatch in the first pass.

If the model takes one input that can be guessed from its first layer, ``build()`` itself follows the shares through the
model. Otherwise a first pass that fails is explained by following the shares with its own inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from megatron_sp.schedule.check.check import follow
from megatron_sp.schedule.check.derive import as_said
from megatron_sp.schedule.check.meta_copy import without_weights
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.placements import PlacementError
from megatron_sp.utils.errors import ReportedError

_NO_FIT = "sizes do not fit"  # as the dry run words it


class FirstPass:
    """Diagnosis of the first pass of one model; created before the model is split.

    Args:
        model: the whole model, of which a copy without weight values is kept until the first pass has succeeded.
        lines, mesh, seq_dim: those of its schedule.
    """

    def __init__(self, model: nn.Module, lines: list[Directive], mesh: Mesh, seq_dim: int) -> None:
        self.whole: nn.Module | None = None
        if mesh.tp.size() > 1:
            try:
                self.whole = without_weights(model)
            except Exception:  # it cannot be copied: the model's own error is reported
                return
        self.lines, self.mesh, self.seq_dim = as_said(lines), mesh, seq_dim

    def look(self) -> None:
        """Check the lines with a guessed input, if there is one. Raises PlacementError: a share would reach a layer that is whole."""
        if self.whole is None or any(m._forward_hooks or m._forward_pre_hooks for m in self.whole.modules()):
            return  # the user's hooks are not called only to infer something
        for batch in _guesses(self.whole, self.mesh.tp.size()):
            self._require_fit(batch)

    def watch(self, model: nn.Module) -> None:
        """Explain the first pass of the split model if it fails; a pass that succeeds removes the wrapper."""
        if self.whole is None:
            return
        inner, own = model.forward, model.__dict__.get("forward")

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                result = inner(*args, **kwargs)
            except ReportedError:
                raise
            except Exception as error:
                self._explain(error, args, kwargs)
            if model.__dict__.get("forward") is forward:
                del model.forward
                if own is not None:
                    model.forward = own  # type: ignore[method-assign]
            self.whole = None
            return result

        model.forward = forward  # type: ignore[method-assign]

    def _explain(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        if self.whole is not None:
            self._require_fit(inspect.signature(self.whole.forward).bind(*args, **kwargs).arguments, error)
        raise error

    def _require_fit(self, batch: dict[str, Any], cause: Exception | None = None) -> None:
        assert self.whole is not None
        try:
            follow(self.whole, self.lines, self.mesh, self.seq_dim, batch)
        except PlacementError as error:
            if cause is not None or _NO_FIT in str(error):
                raise PlacementError(f"{error}; is a .shard() missing there?") from cause
        except Exception:  # the model needs other inputs, or cannot be followed
            return


def _guesses(model: nn.Module, tp: int) -> Iterator[dict[str, Tensor]]:
    """Yield a guess of a model's only input, from its first layer."""
    kinds = inspect.signature(model.forward).parameters.values()
    wanted = [p.name for p in kinds if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    if len(wanted) != 1:
        return
    if isinstance(first, nn.Linear):
        yield {wanted[0]: torch.zeros(2 * tp, 2 * tp, first.in_features)}
    elif isinstance(first, nn.Embedding):
        yield {wanted[0]: torch.zeros(2 * tp, 2 * tp, dtype=torch.int64)}
    elif isinstance(first, _ConvNd):
        yield {wanted[0]: torch.zeros(2 * tp, first.in_channels, *[16 * tp] * (first.weight.ndim - 2))}
