"""The collectives of ``sync``: what each does forward and backward, and on which tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megatron_sp.comm.groups import Group
from megatron_sp.parallel.regions import copy_to, gather_from, overridable, reduce_from, reduce_scatter_to, scatter_to
from megatron_sp.utils.errors import ConfigError

MODES = ("fwd_pre", "fwd_post", "bwd_post")
OPS = ("all_gather", "reduce_scatter", "scatter", "all_reduce", "copy")


def make_change(args: dict[str, Any], group: Group, seq_dim: int, path: str, where: str) -> Callable[[Tensor], Tensor]:
    """Convert the arguments of a sync to the function that is applied to the tensor.

    Raises:
        ConfigError: unknown mode or operation.
    """
    mode, op = args["mode"], args["op"]
    if mode not in MODES:
        raise ConfigError(f"sync on {path}: mode {mode!r} is not known, only {', '.join(MODES)} ({where})")
    if callable(op):
        return lambda x: own_exchange(x, group, op, args.get("layouts"))
    if mode == "bwd_post":
        if op != "all_reduce":
            raise ConfigError(f"sync on {path}: bwd_post knows all_reduce alone, not {op!r} ({where})")
        return lambda x: copy_to(x, group)
    if op not in OPS:
        raise ConfigError(f"sync on {path}: {op!r} is not known, only {', '.join(OPS)}, or a function ({where})")
    dim, grad = args.get("axis", seq_dim), args.get("grad", "reduce_scatter" if mode == "fwd_pre" else "slice")
    if hasattr(grad, "choose"):
        grad = partial(grad.choose, path)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "all_gather": lambda x: gather_from(x, group, dim, grad),
        "reduce_scatter": lambda x: reduce_scatter_to(x, group, dim),
        "scatter": lambda x: scatter_to(x, group, dim),
        "all_reduce": lambda x: reduce_from(x, group),
        "copy": lambda x: copy_to(x, group),
    }
    return _explained(changes[op], op, path, where, dim if op in ("all_gather", "reduce_scatter", "scatter") else None)


@overridable
def own_exchange(x: Tensor, group: Group, function: Callable[[Tensor, Group], Tensor], layouts: str | None) -> Tensor:
    """Call a user's function, of which ``cost()`` believes that it does what ``layouts`` says, such as "S(1)->R"."""
    return function(x, group)


def _explained(change: Callable[[Tensor], Tensor], op: str, path: str, where: str, dim: int | None) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        if dim is not None and not -x.ndim <= dim < x.ndim:
            raise ConfigError(f"{op} at {path}: axis {dim} of {list(x.shape)} does not exist ({where}, E13)")
        try:
            return change(x)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{op} at {path}: {error}; pad the batch, or choose another number of ranks ({where}, E12)") from None

    return changed
