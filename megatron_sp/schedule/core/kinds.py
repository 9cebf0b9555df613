"""Table of module classes: which dims of their parameters run over outputs (split by columns), and which over inputs (by rows).

    column   each rank has some of the outputs:   y_r = x @ W_r, with its own part of the bias
    row      each rank has some of the inputs:    y = sum over ranks of x_r @ W_r, then the whole bias, once

``register_shardable`` adds a class that is missing from the table; a subclass counts as its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from megatron_sp.utils.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """Description of how a class of modules can be split.

    Attributes:
        out_attribute, in_attribute: module attributes that hold these sizes, and are updated when the module is split.
    """

    out_dims: dict[str, int] = field(default_factory=dict)  # for each parameter, the dim that runs over outputs
    # for each parameter, the dim that runs over inputs; parameters missing here have no such dim
    in_dims: dict[str, int] = field(default_factory=dict)
    out_attribute: str | None = None
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
        """Name of the parameter that multiplies the input, or else of the first one."""
        return next(iter(self.in_dims), next(iter(self.out_dims), "weight"))

    @property
    def by_channel(self) -> bool:
        """True if each output depends only on the input in the same place: a split module takes a share and returns one."""
        return self.inputs == 0


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return F.linear(x, module.weight)


def _conv1d(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return x @ module.weight


def _convolution(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, _ConvNd) and isinstance(module.weight, Tensor)
    return module._conv_forward(x, module.weight, None)  # type: ignore[operator, no-any-return]


def _transposed(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, _ConvTransposeNd) and isinstance(module.weight, Tensor)
    run: Callable[..., Tensor] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[module.weight.ndim - 3]
    return run(
        x, module.weight, None, module.stride, module.padding, module.output_padding, module.groups, module.dilation
    )


def _conv(dims: int, out: int = 0) -> Kind:
    product = _transposed if out else _convolution
    return Kind(
        {"weight": out, "bias": 0}, {"weight": 1 - out}, "out_channels", "in_channels", product, out_axis=-1 - dims
    )


def _grouped(module: _ConvNd) -> Kind:
    # the kind of a grouped convolution: each rank has some of the groups, with their channels
    return Kind(
        {"weight": 0, "bias": 0},
        inputs=0,
        divided=("groups", "in_channels", "out_channels"),
        out_axis=1 - module.weight.ndim,
    )


_NORM = (
    "a norm looks at all its features, so every rank keeps it whole: split the layers around it; in a sequence() region its gradients"
    " are summed by themselves, and a norm inside of heads takes .sum_gradients()"
)
ONE_FOR_ALL = (
    "put one module for all heads there with .replace(), whose weight has a row for each, .shard('weight', 0), or leave this attention"
    " whole"
)
_ATTENTION = (
    "it has q, k and v in one parameter and counts its heads itself: put a module with separate projections in its place with .replace(),"
    " or leave it whole"
)
_RECURRENT = (
    "its gates are in one matrix, and each step needs all of the last one's result: leave it whole, or put single layers in its place"
    " with .replace()"
)
_NORM_BY_CHANNEL = Kind(
    {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}, out_attribute="num_features", inputs=0, out_axis=1
)
_KINDS: dict[type, Kind] = {
    nn.Linear: Kind({"weight": 0, "bias": 0}, {"weight": 1}, "out_features", "in_features", _linear),
    nn.Bilinear: Kind({"weight": 0, "bias": 0}, out_attribute="out_features", inputs=2),
    nn.Embedding: Kind({"weight": 1}, {"weight": 0}, "embedding_dim", "num_embeddings"),
    nn.EmbeddingBag: Kind({"weight": 1}, out_attribute="embedding_dim"),
    nn.Conv1d: _conv(1),
    nn.Conv2d: _conv(2),
    nn.Conv3d: _conv(3),
    nn.ConvTranspose1d: _conv(1, out=1),
    nn.ConvTranspose2d: _conv(2, out=1),
    nn.ConvTranspose3d: _conv(3, out=1),
    nn.LayerNorm: Kind({"weight": 0, "bias": 0}, refusal=_NORM),
    nn.RMSNorm: Kind({"weight": 0}, refusal=_NORM),
    nn.GroupNorm: Kind({"weight": 0, "bias": 0}, inputs=0, out_axis=1, divided=("num_groups", "num_channels")),
    _BatchNorm: _NORM_BY_CHANNEL,
    _InstanceNorm: _NORM_BY_CHANNEL,
    nn.RNNBase: Kind(refusal=_RECURRENT),
    nn.MultiheadAttention: Kind(refusal=_ATTENTION),
    NonDynamicallyQuantizableLinear: Kind(
        refusal=f"it is a part of nn.MultiheadAttention, which never calls it; {_ATTENTION}"
    ),
}
_BY_NAME: dict[str, Kind] = {  # classes of packages that may not be installed
    "transformers.pytorch_utils.Conv1D": Kind({"weight": 1, "bias": 0}, {"weight": 0}, "nf", "nx", _conv1d),
    "transformers.models.falcon.modeling_falcon.FalconLinear": Kind(
        {"weight": 0, "bias": 0}, {"weight": 1}, "out_features", "in_features", _linear
    ),
}


_TORCH_KINDS = frozenset(_KINDS)


def register_shardable(cls: type[nn.Module], kind: Kind) -> None:
    """Add a class of modules to the table, or replace its entry."""
    _KINDS[cls] = kind


def knows(cls: type[nn.Module]) -> bool:
    """Return whether this very class, not just a parent, is in the table."""
    return cls in _KINDS or f"{cls.__module__}.{cls.__qualname__}" in _BY_NAME


def find_kind(module: nn.Module) -> Kind | None:
    """Return the kind of the nearest class in the table, or None."""
    cls, kind = _entry(module)
    return _grouped(module) if cls in _TORCH_KINDS and isinstance(module, _ConvNd) and module.groups != 1 else kind


def _entry(module: nn.Module) -> tuple[type, Kind] | tuple[None, None]:
    for cls in type(module).__mro__:
        kind = _KINDS.get(cls) or _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if kind is not None:
            return cls, kind
    return None, None


def computes_as_known(module: nn.Module) -> bool:
    """Return whether a module's forward is that of its class in the table: no subclass, wrapper or patch adds anything to it."""
    cls, _ = _entry(module)
    return cls is not None and "forward" not in module.__dict__ and type(module).forward is cls.forward  # type: ignore[attr-defined]


def is_taught(module: nn.Module) -> bool:
    """Return whether a module's class was registered by a user, so that only its ``Kind.product`` is known."""
    cls, _ = _entry(module)
    return cls is not None and cls not in _TORCH_KINDS and f"{cls.__module__}.{cls.__qualname__}" not in _BY_NAME


def is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def has_row_for_each_head(module: nn.Module) -> bool:
    # whether a module is a norm with a weight [heads, head_dim]
    weight = module._parameters.get("weight")
    return is_norm(module) and weight is not None and weight.ndim == 2


def way_out(model: nn.Module, path: str) -> str:
    """Return advice on a module with parameters inside a split region that no line mentions."""
    module, around = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    if is_norm(module) and isinstance(around, nn.ModuleList) and len(around) > 1:
        return f"as one of {len(around)} in a list, it seems to be for one head, of which each rank has others: {ONE_FOR_ALL}"
    if has_row_for_each_head(module):
        return f"it has a row for each head: s[{path!r}].shard('weight', 0)"
    here = f"s[{path!r}].sum_gradients() if every rank uses it on a share of heads or positions"
    return here if is_norm(module) else f"split it (column, row, shard), or {here}"


def kind_of(module: nn.Module, path: str) -> Kind:
    """Return the kind of a module. Raises ConfigError if its class is unknown (the message shows how to add it) or cannot be split."""
    kind = find_kind(module)
    refusal = kind.refusal if kind is not None else _NORM if is_norm(module) else None
    if refusal is not None and has_row_for_each_head(module):
        raise ConfigError(
            f"{path} is a {type(module).__name__} with a row for each head: it is split with .shard('weight', 0), as the heads are, and not"
            " as a layer"
        )
    if refusal is not None:
        raise ConfigError(f"{path} is a {type(module).__name__}, which cannot be split: {refusal}")
    if kind is None:
        raise ConfigError(
            f"{path} is a {type(module).__name__}, of which it is not known how to split it: teach it with"
            f" megatron_sp.schedule.register_shardable({type(module).__name__}, Kind(...)), or shard a module inside it"
        )
    return kind
