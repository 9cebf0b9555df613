"""Table of module classes: which dims of their parameters run over outputs, and which over inputs.

    column   each rank has some of the outputs:   y_r = x @ W_r, with its own part of the bias
    row      each rank has some of the inputs:    y = sum over ranks of x_r @ W_r, then the whole bias, once

``register_shardable`` adds a class that is missing from the table; a subclass counts as its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from megatron_sp.utils.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """Description of how a class of modules can be split."""

    out_dims: dict[str, int] = field(default_factory=dict)  # for each parameter, the dim that runs over outputs
    in_dims: dict[str, int] = field(default_factory=dict)  # the dim over inputs, for parameters that have one
    out_attribute: str | None = None  # attributes that hold these sizes, and follow when a module is split
    in_attribute: str | None = None
    # (module, x) -> the result without the bias; None: the module cannot be split by rows
    product: Callable[[nn.Module, Tensor], Tensor] | None = None
    out_axis: int = -1  # the axis of the result that runs over outputs
    refusal: str | None = None  # why such a module cannot be split, and what to do instead; None: it can
    # number of inputs whose gradients are sums over the ranks if outputs are split; 0: see ``by_channel``
    inputs: int = 1
    divided: tuple[str, ...] = ()  # attributes that hold counts, which are divided by the number of ranks

    @property
    def main(self) -> str:
        # the parameter that multiplies the input, or else the first one
        return next(iter(self.in_dims), next(iter(self.out_dims), "weight"))

    @property
    def by_channel(self) -> bool:
        # each output depends only on the input in the same place, so that shares make shares
        return self.inputs == 0


def _convolution(module: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(module, _ConvTransposeNd):
        return module._conv_forward(x, module.weight, None)  # type: ignore[operator,no-any-return]
    functions: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    more = (module.stride, module.padding, module.output_padding, module.groups, module.dilation)
    return functions[module.weight.ndim - 3](x, module.weight, None, *more)  # type: ignore[no-any-return]


def _kind_of_convolution(dims: int, out: int = 0) -> Kind:
    weight, bias = {"weight": 1 - out}, {"weight": out, "bias": 0}
    return Kind(bias, weight, "out_channels", "in_channels", _convolution, out_axis=-1 - dims)


_NORM = (
    "a norm looks at all its features, so every rank keeps it whole: split the layers around it; in a sequence()"
    " region its gradients are summed by themselves, and a norm inside of heads takes .sum_gradients()"
)
_ATTENTION = (
    "it has q, k and v in one parameter and counts its heads itself: put a module with separate projections in its"
    " place with .replace(), or leave it whole"
)
_PART_OF_ATTENTION = f"it is a part of nn.MultiheadAttention, which never calls it; {_ATTENTION}"
_RECURRENT = (
    "its gates are in one matrix, and each step needs all of the last one's result: leave it whole, or put single"
    " layers in its place with .replace()"
)
Product = Callable[[Any, Tensor], Tensor]
_linear: Product = lambda module, x: F.linear(x, module.weight)
_conv1d: Product = lambda module, x: x @ module.weight  # of transformers: [in, out]
_LINEAR = Kind({"weight": 0, "bias": 0}, {"weight": 1}, "out_features", "in_features", _linear)
_STATISTICS = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}
_NORM_BY_CHANNEL = Kind(_STATISTICS, out_attribute="num_features", inputs=0, out_axis=1)
_KINDS: dict[type, Kind] = {
    nn.Linear: _LINEAR,
    nn.Bilinear: Kind({"weight": 0, "bias": 0}, out_attribute="out_features", inputs=2),
    nn.Embedding: Kind({"weight": 1}, {"weight": 0}, "embedding_dim", "num_embeddings"),
    nn.EmbeddingBag: Kind({"weight": 1}, out_attribute="embedding_dim"),
    nn.Conv1d: _kind_of_convolution(1),
    nn.Conv2d: _kind_of_convolution(2),
    nn.Conv3d: _kind_of_convolution(3),
    nn.ConvTranspose1d: _kind_of_convolution(1, out=1),
    nn.ConvTranspose2d: _kind_of_convolution(2, out=1),
    nn.ConvTranspose3d: _kind_of_convolution(3, out=1),
    nn.LayerNorm: Kind({"weight": 0, "bias": 0}, refusal=_NORM),
    nn.RMSNorm: Kind({"weight": 0}, refusal=_NORM),
    nn.GroupNorm: Kind({"weight": 0, "bias": 0}, inputs=0, out_axis=1, divided=("num_groups", "num_channels")),
    _BatchNorm: _NORM_BY_CHANNEL,
    _InstanceNorm: _NORM_BY_CHANNEL,
    nn.RNNBase: Kind(refusal=_RECURRENT),
    nn.MultiheadAttention: Kind(refusal=_ATTENTION),
    NonDynamicallyQuantizableLinear: Kind(refusal=_PART_OF_ATTENTION),
}
_BY_NAME: dict[str, Kind] = {  # classes of packages that may not be installed
    "transformers.pytorch_utils.Conv1D": Kind({"weight": 1, "bias": 0}, {"weight": 0}, "nf", "nx", _conv1d),
    "transformers.models.falcon.modeling_falcon.FalconLinear": _LINEAR,
}
_TORCH_KINDS = frozenset(_KINDS)


def register_shardable(cls: type[nn.Module], kind: Kind) -> None:
    """Add a class of modules to the table, or replace its entry."""
    _KINDS[cls] = kind


def knows(cls: type[nn.Module]) -> bool:
    """Return whether this very class, not just a parent, is in the table."""
    return cls in _KINDS or f"{cls.__module__}.{cls.__qualname__}" in _BY_NAME


def find_kind(module: nn.Module) -> Kind | None:
    """Return the kind of the nearest class in the table."""
    cls, kind = _entry(module)
    if cls not in _TORCH_KINDS or not isinstance(module, _ConvNd) or module.groups == 1:
        return kind
    # each rank has some of the groups of a grouped convolution, with their channels
    counts = ("groups", "in_channels", "out_channels")
    return Kind({"weight": 0, "bias": 0}, inputs=0, divided=counts, out_axis=1 - module.weight.ndim)


def _entry(module: nn.Module) -> tuple[type, Kind] | tuple[None, None]:
    for cls in type(module).__mro__:
        kind = _KINDS.get(cls) or _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if kind is not None:
            return cls, kind
    return None, None


def computes_as_known(module: nn.Module, *, taught: bool = True) -> bool:
    """Return whether no subclass, wrapper or patch adds to the forward of a class in the table.

    Without ``taught``, of a class that no user has registered.
    """
    cls, _ = _entry(module)
    own = module.__dict__.get("forward", type(module).forward)
    if cls is None or own is not cls.forward:  # type: ignore[attr-defined]
        return False
    return taught or cls in _TORCH_KINDS or f"{cls.__module__}.{cls.__qualname__}" in _BY_NAME


def kind_of(module: nn.Module, path: str) -> Kind:
    """Return the kind of a module. Raises ConfigError: its class is unknown, or cannot be split."""
    kind, name = find_kind(module), type(module).__name__
    refusal = kind.refusal if kind is not None else _NORM if name.endswith("Norm") else None
    weight = module._parameters.get("weight")
    if refusal is not None and name.endswith("Norm") and weight is not None and weight.ndim == 2:
        way_out = "it is split with .shard('weight', 0), as the heads are, and not as a layer"
        raise ConfigError(f"{path} is a {name} with a row for each head: {way_out}")
    if refusal is not None:
        raise ConfigError(f"{path} is a {name}, which cannot be split: {refusal}")
    if kind is None:
        teach = f"megatron_sp.schedule.register_shardable({name}, Kind(...)), or shard a module inside it"
        raise ConfigError(f"{path} is a {name}, of which it is not known how to split it: teach it with {teach}")
    return kind
