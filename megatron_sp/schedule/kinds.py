"""Which dims of a module's parameters are its outputs and which its inputs: what can be split by columns or by rows.

    column   each rank has some of the outputs:   y_r = x @ W_r, with its own part of the bias
    row      each rank has some of the inputs:    y = sum over ranks of x_r @ W_r, then the whole bias, once

A class that is not in the table is taught with ``register_shardable``; subclasses count as their parents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from megatron_sp.utils.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """What is known of a class of modules.

    Attributes:
        out_dims: the dim of each parameter that runs over outputs.
        in_dims: the dim of each parameter that runs over inputs; parameters that are not here know no inputs.
        out_attribute, in_attribute: attributes that hold these sizes, and must follow.
        product: (module, x) -> the result without the bias; None: the module cannot be split by rows.
        out_axis: the axis of the result that runs over outputs.
        refusal: why such a module cannot be split, and what to do instead; None: it can.
    """

    out_dims: dict[str, int] = field(default_factory=dict)
    in_dims: dict[str, int] = field(default_factory=dict)
    out_attribute: str | None = None
    in_attribute: str | None = None
    product: Callable[[nn.Module, Tensor], Tensor] | None = None
    out_axis: int = -1
    refusal: str | None = None


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return F.linear(x, module.weight)


def _conv1d(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return x @ module.weight


def _convolution(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, _ConvNd) and isinstance(module.weight, Tensor)
    return module._conv_forward(x, module.weight, None)  # type: ignore[operator, no-any-return]


def _conv(dims: int) -> Kind:
    return Kind({"weight": 0, "bias": 0}, {"weight": 1}, "out_channels", "in_channels", _convolution, out_axis=-1 - dims)


_NORM = (
    "a norm looks at all its features, so every rank keeps it whole: split the layers around it; in a sequence() region its gradients"
    " are summed by themselves, and a norm inside of heads takes .sum_gradients()"
)
_ATTENTION = (
    "it has q, k and v in one parameter and counts its heads itself: put a module with separate projections in its place with .replace(),"
    " or leave it whole"
)
_KINDS: dict[type, Kind] = {
    nn.Linear: Kind({"weight": 0, "bias": 0}, {"weight": 1}, "out_features", "in_features", _linear),
    nn.Embedding: Kind({"weight": 1}, {"weight": 0}, "embedding_dim", "num_embeddings"),
    nn.Conv1d: _conv(1),
    nn.Conv2d: _conv(2),
    nn.Conv3d: _conv(3),
    nn.LayerNorm: Kind({"weight": 0, "bias": 0}, refusal=_NORM),
    nn.RMSNorm: Kind({"weight": 0}, refusal=_NORM),
    nn.GroupNorm: Kind(refusal=_NORM),
    _BatchNorm: Kind({"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}, out_attribute="num_features"),  # each channel by itself
    nn.MultiheadAttention: Kind(refusal=_ATTENTION),
    NonDynamicallyQuantizableLinear: Kind(refusal=f"it is a part of nn.MultiheadAttention, which never calls it; {_ATTENTION}"),
}
_BY_NAME: dict[str, Kind] = {  # classes that need not be installed
    "transformers.pytorch_utils.Conv1D": Kind({"weight": 1, "bias": 0}, {"weight": 0}, "nf", "nx", _conv1d),
}


def register_shardable(cls: type[nn.Module], kind: Kind) -> None:
    """Teach a class of modules, or teach it anew."""
    _KINDS[cls] = kind


def knows(cls: type[nn.Module]) -> bool:
    """Whether this very class is in the table."""
    return cls in _KINDS or f"{cls.__module__}.{cls.__qualname__}" in _BY_NAME


def find_kind(module: nn.Module) -> Kind | None:
    """Of the nearest class in the table, or None."""
    for cls in type(module).__mro__:
        if cls in _KINDS:
            return _KINDS[cls]
        if (known := _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return known
    return None


def kind_of(module: nn.Module, path: str) -> Kind:
    """Raises ConfigError: the class is not known, and says how to teach it; or is known to be impossible."""
    kind = find_kind(module)
    refusal = kind.refusal if kind is not None else _NORM if type(module).__name__.endswith("Norm") else None
    if kind is not None and isinstance(module, _ConvNd) and module.groups != 1:
        refusal = f"its channels are in {module.groups} groups, which are not cut here: leave it whole"
    if refusal is not None:
        raise ConfigError(f"{path} is a {type(module).__name__}, which cannot be split: {refusal}")
    if kind is None:
        raise ConfigError(
            f"{path} is a {type(module).__name__}, of which it is not known how to split it: teach it with"
            f" megatron_sp.schedule.register_shardable({type(module).__name__}, Kind(...)), or shard a module inside it"
        )
    return kind
