"""Preconditions of a split that would silently give wrong results, checked when a schedule is applied, before anything changes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from megatron_sp.schedule.apply.splits import cannot, tensor_of
from megatron_sp.schedule.core.kinds import Kind, computes_as_known, find_kind
from megatron_sp.utils.errors import ConfigError


def no_parameter(path: str, module: nn.Module, name: str, where: str) -> str:
    """Return the message for a parameter that a module does not have itself."""
    found = ", ".join(n for n, p in (*module._parameters.items(), *module._buffers.items()) if p is not None) or "none"
    has = f"{path or 'the model'} has no parameter {name!r}: it has {found}"
    if is_parametrized(module, name):
        by, inside = type(module.parametrizations[name][0]).__name__, f"{path}.parametrizations.{name}".lstrip(".")  # type: ignore[index,union-attr]
        return (
            f"{has}; {name} is computed by {by}: shard what it is computed from, in {inside}, if each share of that makes a share of"
            f" {name}, or leave it whole ({where}, E1)"
        )
    return f"{has} ({where}, E1)"


def require_splittable(path: str, module: nn.Module, name: str, axis: int, size: int, where: str) -> None:
    """Check that one parameter can be split along an axis.

    Raises:
        ConfigError: its class cannot be split, or not along this axis, or not with its options; or it has no shape yet.
    """
    tensor, kind, full = tensor_of(module, name), find_kind(module), f"{path}.{name}" if path else name
    if tensor is not None and is_lazy(tensor):
        raise ConfigError(f"{full} has no shape before the model has run: call it with a batch first, then schedule ({where})")
    if kind is None or tensor is None or not -tensor.ndim <= axis < tensor.ndim:
        return
    if kind.refusal is not None:
        raise ConfigError(f"{path} is a {type(module).__name__}, which cannot be split: {kind.refusal} ({where})")
    dim, known = axis % tensor.ndim, {kind.out_dims.get(name), kind.in_dims.get(name)} - {None}
    if known and dim not in known:
        sides = (kind.out_dims.get(name), "outputs"), (kind.in_dims.get(name), "inputs")
        told = " and ".join(f"{d} ({what})" for d, what in sides if d is not None)
        raise ConfigError(f"{full}: axis {axis} of a {type(module).__name__} cannot be split, only {told} ({where})")
    if size == 1:
        return
    for attribute in kind.divided:
        if (count := int(getattr(module, attribute))) % size:
            raise ConfigError(cannot(full, attribute, count, size, where))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        _require_plain_table(full, module, dim, where)


def _require_plain_table(full: str, module: nn.Embedding | nn.EmbeddingBag, dim: int, where: str) -> None:
    """Raise ConfigError if options change rows, or their gradients, by what a rank does not see."""
    wrong = [] if module.max_norm is None else [f"max_norm={module.max_norm}"]
    if dim == 0:
        wrong += [name for name in ("scale_grad_by_freq", "sparse") if getattr(module, name)]
    if wrong:
        options = " and ".join(wrong)
        raise ConfigError(f"{full} cannot be split along axis {dim} with {options}: leave the table whole, or that out ({where})")


def require_plain(path: str, module: nn.Module, kind: Kind, where: str) -> None:
    """Check a layer that is split by its inputs, whose sum stands between the product and the bias.

    Raises:
        ConfigError: it computes more than that, so there is no place for the sum.
    """
    name, extra = type(module).__name__, [n for n, p in module._parameters.items() if p is not None and n not in (kind.main, "bias")]
    way = "split it by its outputs, or leave it whole"
    if not computes_as_known(module):
        raise ConfigError(
            f"{path} is a {name} with a forward of its own, and what that adds must come after the sum over the ranks: {way};"
            f" if it adds nothing, register_shardable({name}, Kind(..., product=...)) ({where})"
        )
    if extra:
        more = ", ".join(extra)
        raise ConfigError(f"{path} is a {name} with {more} beside {kind.main} and bias, which has no place after the sum: {way} ({where})")


def require_axis(change: Callable[[Tensor], Tensor], axis: int, split: int, path: str, where: str) -> Callable[[Tensor], Tensor]:
    """Wrap ``change`` for a tensor split along ``split``: a call raises ConfigError if it would be joined along another axis (E10)."""

    def checked(x: Tensor) -> Tensor:
        if -x.ndim <= axis < x.ndim and axis % x.ndim != split % x.ndim:
            raise ConfigError(
                f"all_gather at {path}: the result, {list(x.shape)} on each rank, is split along axis {split % x.ndim}, not {axis}"
                f" ({where}, E10)"
            )
        return change(x)

    return checked


def without_fast_paths(model: nn.Module, changed: set[str]) -> None:
    """Disable fast paths of torch's transformer layers around changed modules: in inference they pass the weights to one fused kernel."""
    for path, module in model.named_modules():
        if not isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            continue
        if not any(other == path or other.startswith(f"{path}." if path else "") for other in changed):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        else:
            module.use_nested_tensor = False
