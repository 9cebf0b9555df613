"""Slapo's API for schedules: its examples run unchanged, on this package's layers.

    sch = create_schedule(model)
    sch["attention.out_proj"].shard("weight", axis=1)
    sch["attention.out_proj"].sync(mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=1)
    sch["attention.resid_dropout"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=1)
    model, _ = build(sch)

Improvements: nothing but ``replace`` changes the model before ``build()``; the order of the other lines does not
matter; a bias after a sum is added once; gradients that are sums over the ranks are complete after ``backward()``;
``Verify`` compares those, too, and
measures what lines leave open. Subgraph primitives (trace, find, fuse, decompose, pipeline stages) are rejected, with
an alternative. Source: Slapo (Chen et al., ASPLOS 2024, arXiv:2302.08005), from its documentation.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_sp.comm.collectives import broadcast
from megatron_sp.comm.groups import Group, world_group
from megatron_sp.parallel.regions import all_to_all, copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.decide import decide
from megatron_sp.schedule.apply.guards import whole_or_not_at_all
from megatron_sp.schedule.apply.randomness import Streams
from megatron_sp.schedule.apply.splits import names_of, tensor_of
from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.hooks import MODES, OPS
from megatron_sp.schedule.core.kinds import find_kind, knows
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.schedule import Schedule, Selection
from megatron_sp.schedule.verify.derive import with_adjoints
from megatron_sp.schedule.verify.verify import Verdict, default_loss, verify
from megatron_sp.utils.errors import ConfigError, NumericsError

__all__ = [
    "Primitive", "ShardMethod", "SlapoSchedule", "Verify", "all_gather_forward_output", "build", "checkpoint", "create_schedule",
    "get_cuda_rng_tracker", "init_empty_weights", "list_primitives", "reduce_backward_grad", "reduce_forward_output",
    "reduce_scatter_forward_output", "register_primitive", "register_shard_method", "scatter_forward_output", "set_random_seed",
]  # fmt: skip


# Extension points


PRIMITIVES: dict[str, type[Primitive]] = {}
_METHODS: dict[type[nn.Module], type[ShardMethod]] = {}
_M = TypeVar("_M", bound="type[ShardMethod]")
_P = TypeVar("_P", bound="type[Primitive]")


class ShardMethod:
    """Default shard method, which does nothing more; ``build()`` calls preproc and postproc once for each split tensor."""

    @staticmethod
    def preproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """Run before the split, while the module is still whole."""

    @staticmethod
    def postproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """Run after the split, when ``sch.mod`` has this rank's share."""

    @staticmethod
    def infer_output_type(
        sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int
    ) -> tuple[str | None, int | None]:
        return None, None

    @staticmethod
    def sync(sch: SlapoSchedule, mode: str, sync_op_or_fn: str | Callable[..., Any], **kwargs: Any) -> None:
        """Add the collective of ``sch.sync()``."""
        sch.put_sync(mode, sync_op_or_fn, **kwargs)


class Primitive:
    """Base class of user-defined primitives: ``sch.<name>(...)`` calls ``apply(sch, ...)``."""

    @staticmethod
    def name() -> str:
        """Name of the method on a schedule."""
        raise NotImplementedError

    @staticmethod
    def apply(sch: SlapoSchedule, *args: Any, **kwargs: Any) -> Any:
        """Carry the primitive out; the result is what the method returns."""
        raise NotImplementedError

    @staticmethod
    def init_metadata() -> Any:
        # the initial value of ``sch.metadata.primitives[name]``
        return None


def register_shard_method(module_cls: type[nn.Module] | None) -> Callable[[_M], _M]:
    # decorate a ShardMethod with the class that it is for; None, for a class that could not be imported, does nothing

    def decorate(method: _M) -> _M:
        if module_cls is None:
            return method
        if not issubclass(method, ShardMethod):
            raise ConfigError(f"{method.__name__} for {module_cls.__name__} must be a subclass of ShardMethod")
        if module_cls in _METHODS or knows(module_cls):
            raise ConfigError(
                f"{module_cls.__name__} has a way to be split already: register a subclass of it, or use register_shardable()"
            )
        _METHODS[module_cls] = method
        return method

    return decorate


def register_primitive() -> Callable[[_P], _P]:
    # decorate a Primitive, to register it. Raises ConfigError: it is not a Primitive, or its name is taken

    def decorate(primitive: _P) -> _P:
        if not issubclass(primitive, Primitive):
            raise ConfigError(f"{primitive.__name__} must be a subclass of Primitive")
        name = primitive.name()
        if name in PRIMITIVES or name in BUILT_IN:
            raise ConfigError(f"there is a primitive {name!r} already: give yours another name")
        PRIMITIVES[name] = primitive
        return primitive

    return decorate


def method_of(module: nn.Module) -> type[ShardMethod]:
    # the method of the first registered class that the module is an instance of, else the default
    return next((method for cls, method in _METHODS.items() if isinstance(module, cls)), ShardMethod)


BUILT_IN = ("annotate", "checkpoint", "fork_rng", "replace", "replace_all", "shard", "sync")


# Collectives as functions, for hooks


def all_gather_forward_output(
    inp: Tensor, dim: int, group: Group | None = None, tensor_parallel_output_grad: bool = True
) -> Tensor:
    # gather all ranks' tensors along ``dim``
    return gather_from(inp, group or world_group(), dim, "reduce_scatter" if tensor_parallel_output_grad else "slice")


def reduce_scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    # this rank's share, along ``dim``, of the sum over the ranks. Raises ValueError: the dim is not divisible
    return reduce_scatter_to(inp, group or world_group(), dim)


def scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    # this rank's share, along ``dim``, of what all ranks have. Raises ValueError: the dim is not divisible
    return scatter_to(inp, group or world_group(), dim)


def reduce_forward_output(inp: Tensor, group: Group | None = None) -> Tensor:
    return reduce_from(inp, group or world_group())


def reduce_backward_grad(inp: Tensor, group: Group | None = None) -> Tensor:
    # ``inp`` itself; its gradient is summed over the ranks
    return copy_to(inp, group or world_group())


# Random numbers


@dataclass(frozen=True)
class RngTracker:
    """Random number tracker of one group."""

    group: Group

    def fork(self) -> AbstractContextManager[None]:
        """Draw different numbers on each rank inside; torch's generators must be equal on all ranks, as after ``set_random_seed``."""
        return Streams().differ(self.group)


def get_cuda_rng_tracker(group: Group | None = None) -> RngTracker:
    # the tracker of a group (default: all ranks); despite Slapo's name, it also forks the CPU's generator
    return RngTracker(group or world_group())


def set_random_seed(
    seed: int = 2013, dp_rank: int | None = None, pp_rank: int | None = None, tp_rank: int | None = None
) -> int:
    # seed Python, torch, and numpy if it is imported: equally over tp, differently over dp and pp
    seed += 100 * (pp_rank or 0) + 10 * (dp_rank or 0)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and recompute it in backward with the same random numbers, including those of ``fork()``."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


# Other arguments of sync: of early versions, and "RS->SR"


_OLD_MODES = {
    "fw_pre": "fwd_pre",
    "fw_post": "fwd_post",
    "bw_post": "bwd_post",
}  # as in an example in Slapo's documentation
RESHARDS: dict[str, tuple[str, int] | tuple[str, int, int] | None] = {
    "RR->RR": None,
    "RS->RS": None,
    "SR->SR": None,
    "RR->RS": ("scatter", -1),
    "RR->SR": ("scatter", -2),
    "RS->RR": ("all_gather", -1),
    "SR->RR": ("all_gather", -2),
    "RS->SR": ("all_to_all", -2, -1),
    "SR->RS": ("all_to_all", -1, -2),
}


def exchanges(sch: SlapoSchedule, mode: str, kwargs: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (mode, operation, keywords) that the modes forward, backward or both of early versions stand for."""
    where = f"sync on {sch.path or 'the model'}"
    if mode not in ("forward", "backward", "both") or kwargs:
        raise ConfigError(
            f"{where}: name the op at {mode!r}, such as sync('fwd_post', 'all_reduce'); only forward, backward and both of early"
            f" versions say it by themselves, and take nothing else{', not ' + ', '.join(kwargs) if kwargs else ''}"
        )
    kind, axis = _result(sch)
    if kind is None:
        raise ConfigError(
            f"{where}: {mode} asks what the result has become: write .shard() of its weight first, or name mode and operation"
        )
    if kind == "partial":
        if mode != "forward":
            raise ConfigError(
                f"{where}: it is split by its inputs, so it has a sum to make of its result, and none of a gradient: use forward"
            )
        yield "fwd_post", "all_reduce", {}
        return
    if mode != "backward":
        yield "fwd_post", "all_gather", {"axis": axis}
    if mode != "forward" and not is_by_channels(sch.mod):
        yield "bwd_post", "all_reduce", {}


def _result(sch: SlapoSchedule) -> tuple[str | None, int | None]:
    known, module = find_kind(sch.mod), sch.mod
    found: tuple[str | None, int | None] = (None, None)
    for line in sch.schedule.directives:
        if line.do != "shard" or line.on != sch.path:
            continue
        name, axis = line.args["tensor"], line.args["axis"]
        tensor = tensor_of(module, name)
        if tensor is None:
            continue  # build() reports it
        dim = axis % tensor.ndim
        if known is not None and dim == known.out_dims.get(name, -1):
            found = ("partition", known.out_axis) if found[0] is None else found
        elif known is not None and dim == known.in_dims.get(name, -1):
            found = ("partial", None)
        elif known is None:
            said = method_of(module).infer_output_type(sch, name, tensor.shape[dim] // sch.world_size, axis)
            found = said if said[0] is not None else found
    return found


def is_by_channels(module: nn.Module) -> bool:
    # whether each output depends on one input only, as in BatchNorm: if split, there is nothing to sum
    kind = find_kind(module)
    return kind is not None and kind.by_channel


def is_reshard(op: str) -> bool:
    return op in RESHARDS


def put_reshard(line: Selection, path: str, mode: str, op: str, kwargs: dict[str, Any]) -> None:
    # add a change of split of the last two dims, R whole and S split. Raises ConfigError: bwd_post, or keywords
    if kwargs:
        raise ConfigError(f"sync on {path}: {op!r} takes no {', '.join(kwargs)}: its letters say which dims are meant")
    if mode == "bwd_post":
        raise ConfigError(
            f"sync on {path}: {op!r} is for fwd_pre and fwd_post; the gradient goes the other way by itself"
        )
    step = RESHARDS[op]
    if step is None:
        return
    if len(step) == 2:
        line.sync(mode, step[0], axis=step[1])
    else:
        line.sync(mode, partial(_trade, split=step[1], join=step[2]), layouts=f"S({step[2]})->S({step[1]})")


def _trade(x: Tensor, group: Group, *, split: int, join: int) -> Tensor:
    return all_to_all(x, group, split, join)


# The schedule


_REFUSED = {
    "trace": "nothing is traced here: hooks and split layers work on the modules themselves, so leave the line out",
    "trace_until": "nothing is traced here: hooks and split layers work on the modules themselves, so leave the line out",
    "find": "there is no graph to search: name modules by path, or many of them by glob with megatron_sp.schedule.schedule",
    "find_node": "there is no graph to search: name modules by path",
    "find_subgraph": "there is no graph to search: name modules by path",
    "fuse": "put the operations into a module of your own and .replace() theirs with it, or leave them to torch.compile",
    "decompose": "a bias is added after the sum anyway: leave the line out",
    "cut_pipeline_stage": "pipeline stages are not supported: split by tp, sp and ZeRO",
    "hook": ".sync(mode, fn) takes hooks",
}


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


@dataclass
class Metadata:
    """Metadata of Slapo's schedules."""

    primitives: dict[str, Any] = field(default_factory=dict)
    param_tags: dict[str, None] = field(default_factory=dict)
    tie_weights: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    base_params: dict[str, torch.Size] = field(default_factory=dict)


class SlapoSchedule:
    """Schedule of one module; ``create_schedule`` makes that of the whole model."""

    def __init__(self, owner: Schedule, path: str = "", name: str = "", parent: SlapoSchedule | None = None) -> None:
        self.schedule, self.path, self.name, self.parent = owner, path, name or path.rpartition(".")[2], parent
        self.metadata: Metadata = parent.metadata if parent is not None else _remember(owner.model)

    # what is there

    @property
    def mod(self) -> nn.Module:
        """Module that the schedule is about."""
        return self.schedule.model.get_submodule(self.path)

    @property
    def group(self) -> Group:
        """Group of tp."""
        return self.schedule.mesh.tp

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.group.size()

    @property
    def child(self) -> dict[str, SlapoSchedule]:
        """Schedules of the direct submodules, by name."""
        return {name: self[name] for name, _ in self.mod.named_children()}

    def __getitem__(self, path: str) -> SlapoSchedule:
        """Return the schedule of a submodule. Raises PathError: there is none; suggests similar names."""
        full = f"{self.path}.{path}" if self.path and path else path or self.path
        (found,) = expand(self.schedule.model, full) if not set("*?{") & set(path) else self._one(full)
        parent = self if "." not in path else self[path.rpartition(".")[0]]
        return SlapoSchedule(self.schedule, found, parent=parent)

    def _one(self, glob: str) -> NoReturn:
        raise ConfigError(
            f"{glob!r} may name several modules: Slapo's spelling takes one; schedule()[{glob!r}] takes them all"
        )

    def __contains__(self, path: object) -> bool:
        return any(name == path for name, _ in self.mod.named_modules() if name)

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, SlapoSchedule]]:
        for path, _ in self.mod.named_modules():
            yield f"{prefix}.{path}".strip("."), self[path] if path else self

    # primitives

    def shard(self, tensor_name: str | list[str], axis: int, *, blocks: Any = None, heads: int | None = None) -> None:
        """Split parameters or buffers over the group along an axis."""
        for name in [tensor_name] if isinstance(tensor_name, str) else tensor_name:
            self._line.shard(name, axis, blocks=blocks, heads=heads)

    def sync(
        self, mode: str = "backward", sync_op_or_fn: str | Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        """Add a collective where a tensor enters or leaves the module."""
        if sync_op_or_fn is None:
            for step in exchanges(self, mode, kwargs):
                self.sync(*step[:2], **step[2])
            return
        method_of(self.mod).sync(self, _OLD_MODES.get(mode, mode), sync_op_or_fn, **kwargs)

    def put_sync(self, mode: str, sync_op_or_fn: str | Callable[..., Any], **kwargs: Any) -> None:
        # add the collective of ``sync`` for a class without its own ShardMethod
        if mode not in MODES:
            raise ConfigError(
                f"sync on {self.path}: mode {mode!r} is not known, only {', '.join(MODES)} (forward: fwd_post, backward: bwd_post)"
            )
        if callable(sync_op_or_fn):
            if kwargs:
                raise ConfigError(
                    f"sync on {self.path}: {', '.join(kwargs)} has no meaning beside a hook, which does what it does"
                )
            self._line.hook(mode, sync_op_or_fn)
            return
        if is_reshard(sync_op_or_fn):
            put_reshard(self._line, self.path, mode, sync_op_or_fn, kwargs)
            return
        self._check(mode, sync_op_or_fn, kwargs)
        differs = kwargs.pop("tensor_parallel_output_grad", None)
        grad = None if differs is None else "reduce_scatter" if differs else "slice"
        axis = kwargs.pop("axis", 0)
        self._line.sync(
            mode, sync_op_or_fn, axis=None if sync_op_or_fn in ("all_reduce", "copy") else axis, grad=grad, **kwargs
        )

    def _check(self, mode: str, op: Any, kwargs: dict[str, Any]) -> None:
        if op not in OPS:
            raise ConfigError(
                f"sync on {self.path}: {op!r} is not known, only {', '.join(OPS)}, or a function, or one of {', '.join(RESHARDS)}"
            )
        known = ("axis", "tensor_parallel_output_grad", "arg", "out")
        if wrong := [name for name in kwargs if name not in known]:
            raise ConfigError(f"sync on {self.path} does not know {', '.join(wrong)}, only {', '.join(known)}")
        if "tensor_parallel_output_grad" in kwargs and op != "all_gather":
            raise ConfigError(
                f"sync on {self.path}: tensor_parallel_output_grad is about the gradient of all_gather, not of {op}"
            )

    def fork_rng(self) -> None:
        """Make random numbers inside differ between the ranks."""
        self._line.rng("tp")

    def annotate(self, param_name: str, key: str, value: Any) -> None:
        """Attach a note to a parameter; with ``replicated_param``, its gradient is summed over the ranks."""
        self._line.annotate(param_name, key, value)
        self.metadata.param_tags[key] = None
        if key == "replicated_param" and value:
            self._line.sum_gradients(param_name)

    def replace(self, new_mod_or_func: Any, target_ops: Any = None, name: str | None = None, **kwargs: Any) -> None:
        """Replace the module at once, so that later lines can refer to its submodules; the new one takes over the old one's hooks."""
        here = self.path or "the model"
        if target_ops is not None or not isinstance(new_mod_or_func, nn.Module):
            raise ConfigError(
                f"replace on {here} takes a module for a module; there is no graph whose nodes could be replaced"
            )
        if kwargs:
            raise ConfigError(f"replace on {here} does not know {', '.join(kwargs)}")
        if self.schedule.applied is not None:
            raise ConfigError(f"replace on {here} comes after build(): write all lines first (E15)")
        old, new = self.mod, new_mod_or_func
        if new is old:
            return
        for hooks in _HOOKS:
            getattr(new, hooks).update(getattr(old, hooks))
        if old._backward_hooks and new._is_full_backward_hook is None:
            new._is_full_backward_hook = old._is_full_backward_hook
        if not self.path:
            self.schedule.model = new
            return
        around, _, last = self.path.rpartition(".")
        self.schedule.model.get_submodule(around)._modules[last] = new

    def replace_all(
        self, target_mod_type: type[nn.Module], make_mod_fn: Callable[..., nn.Module], **kwargs: Any
    ) -> None:
        """Replace every submodule of a type by ``make_mod_fn(path, module, **kwargs)``, except inside one that was replaced."""
        done: list[str] = []
        for path, sub in list(self.named_schedules()):
            inside = any(path.startswith(f"{other}.") for other in done)
            if path and not inside and isinstance(sub.mod, target_mod_type):
                sub.replace(make_mod_fn(path, sub.mod, **kwargs))
                done.append(path)

    def checkpoint(self, subgraph: Any = None, order_args_fn: Any = None) -> None:
        """Recompute the module in backward; keyword arguments need no order."""
        if subgraph is not None:
            raise ConfigError(
                f"checkpoint on {self.path or 'the model'} takes a whole module: there is no graph to take a part of"
            )
        self._line.checkpoint()

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            return partial(self._refuse, name)
        if name in PRIMITIVES:
            return partial(PRIMITIVES[name].apply, self)
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: its primitives are {', '.join(list_primitives())}"
        )

    def _refuse(self, name: str, /, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f".{name}() on {self.path or 'the model'}: {_REFUSED[name]}")

    @property
    def _line(self) -> Selection:
        return self.schedule[self.path]


def create_schedule(
    root: nn.Module, name: str = "", path: str = "", parent: SlapoSchedule | None = None, group: Group | None = None
) -> SlapoSchedule:
    if parent is None:
        return SlapoSchedule(Schedule(root, Mesh(tp=group or world_group()), seq_dim=0), name=name)
    found = parent.schedule.model.get_submodule(path)
    if found is not root:
        raise ConfigError(
            f"{path!r} of the parent's model is another module than the one that was given: take parent[...] instead"
        )
    return SlapoSchedule(parent.schedule, path, name, parent)


def _remember(model: nn.Module) -> Metadata:
    by_id = {id(p): p for p in model.parameters()}
    tied = [by_id[key] for key, names in names_of(model).items() if len(names) > 1]
    made = {name: cls.init_metadata() for name, cls in PRIMITIVES.items()}
    return Metadata(made, {}, {p: p for p in tied}, {name: p.shape for name, p in model.named_parameters()})


def list_primitives(name_only: bool = True) -> list[str] | dict[str, Callable[..., Any]]:
    if name_only:
        return [*BUILT_IN, *PRIMITIVES]
    return {
        **{name: getattr(SlapoSchedule, name) for name in BUILT_IN},
        **{name: cls.apply for name, cls in PRIMITIVES.items()},
    }


# Empty weights


META = torch.device("meta")


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Give modules that are created inside parameters without contents (meta device); ``build()`` initialises them."""

    def empty(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == META:
            return None  # stays as it is, so that tied ones stay tied
        return nn.Parameter(parameter.detach().to(META), requires_grad=parameter.requires_grad)

    def no_buffer(_: nn.Module, __: str, buffer: Tensor | None) -> Tensor | None:
        return None if buffer is None else buffer.to(META)

    handles = [register_module_parameter_registration_hook(empty)] if enable else []  # type: ignore[arg-type]
    if enable and include_buffers:
        handles.append(register_module_buffer_registration_hook(no_buffer))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fill(model: nn.Module, group: Group, init: bool | Callable[..., Any] | None) -> None:
    """Initialise empty weights, in full on every rank; with ``init``, initialise all weights."""
    empty = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.device == META]
    if not empty and not init:
        return
    _materialise(model, _device(model, group))
    _draw(model, init or True, None if init else {name.rpartition(".")[0] for name in empty})
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    if missing := [name for name in empty if _is_marked(tensors[name])]:
        raise ConfigError(
            f"{', '.join(missing[:6])}{', ...' if len(missing) > 6 else ''} have no contents, and their modules have no reset_parameters()"
            " that gives them some: build(sch, init_weights=function of (module, path))"
        )


def _device(model: nn.Module, group: Group) -> torch.device:
    found = [t.device for t in (*model.parameters(), *model.buffers()) if t.device != META]
    if found:
        return found[0]
    backend = str(getattr(group, "name", lambda: "")()) if torch.cuda.is_available() else ""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend.lower() else torch.device("cpu")


def _mark(t: Tensor) -> Tensor:
    return t.fill_(
        float("nan")
        if t.is_floating_point() or t.is_complex()
        else 0
        if t.dtype == torch.bool
        else torch.iinfo(t.dtype).min
    )


def _is_marked(t: Tensor) -> bool:
    if t.is_floating_point() or t.is_complex():
        return bool(torch.isnan(t).any())
    return t.dtype == torch.bool or bool((t == torch.iinfo(t.dtype).min).any())


def _materialise(model: nn.Module, device: torch.device) -> None:
    for names in names_of(model).values():
        path, _, last = names[0].rpartition(".")
        old = model.get_submodule(path)._parameters[last]
        if old is None or old.device != META:
            continue
        new = nn.Parameter(_mark(torch.empty_like(old, device=device)), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        for name in names:
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._parameters[last] = new
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device == META:
                module._buffers[name] = _mark(torch.empty_like(buffer, device=device))


def _draw(model: nn.Module, init: bool | Callable[..., Any], only: set[str] | None) -> None:
    own = getattr(model, "_init_weights", None)
    with torch.no_grad():
        for path, module in model.named_modules():
            owns = any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))
            if not owns or (only is not None and path not in only):
                continue
            if callable(init):
                init(*(module, path)[: _arguments(init)])
            elif own is not None:
                own(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def _arguments(function: Callable[..., Any]) -> int:
    # the number of arguments to pass: 1, or 2 if the function takes the path as well
    try:
        kinds = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        return 1
    return 2 if len([p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > 1 else 1


# build


Init = bool | Callable[..., Any] | None
_OLDER = {"init_required": "init_weights", "param_init_fn": "init_weights"}


def build(
    sch: SlapoSchedule, target: str | None = None, init_weights: Init = None, **kwargs: Any
) -> tuple[nn.Module, None]:
    """Apply a schedule."""
    for name in [name for name in _OLDER if name in kwargs]:
        init_weights = kwargs.pop(name)
    if target is not None or kwargs:
        what = f"target={target!r}" if target is not None else ", ".join(kwargs)
        raise ConfigError(
            f"build() knows no {what}: train the model it returns in your own loop, or in the project's (docs/how-to/schedule.md)"
        )
    if sch.path:
        raise ConfigError(f"build() takes the schedule of the whole model, not of {sch.path}")
    owner = sch.schedule
    owner.directives = without_empty_sums(sch)
    decide(sch.mod, owner.directives, owner.mesh, owner.seq_dim)  # before any weight is drawn
    try:
        with whole_or_not_at_all(sch.mod):
            model = _built(sch, init_weights)
    except BaseException:
        owner.applied = None
        raise
    return model, None


def _built(sch: SlapoSchedule, init_weights: Init) -> nn.Module:
    settle_weights(sch.mod, init_weights, sch.group)
    lines = [(path, d.args) for d in sch.schedule.directives if d.do == "shard" for path in expand(sch.mod, d.on)]
    split = [(sch[path] if path else sch, args["tensor"], args["axis"]) for path, args in lines]
    _follow(split, "preproc", sch.world_size)
    model = sch.schedule.apply(verify=False)  # the defaults are Slapo's, and written down (docs/how-to/schedule.md)
    assert sch.schedule.applied is not None
    _follow(split, "postproc", 1)
    _note_shapes(sch.schedule.applied)
    sch.schedule.applied = _complete(sch.schedule.applied)
    return model


def settle_weights(model: nn.Module, init: Init, group: Group) -> None:
    """Initialise weights and broadcast parameters and buffers, so that they are equal on every rank of the group; see ``build``."""
    if init is False:
        return
    fill(model, group, init)
    for tensor in (*model.parameters(), *model.buffers()):
        given = tensor.detach()
        if given.is_contiguous():
            broadcast(given, group)
        else:
            given.copy_(broadcast(given.contiguous(), group))


def without_empty_sums(sch: SlapoSchedule) -> list[Directive]:
    """Return the lines without gradient sums at layers split by channels, which would add up different channels; Slapo's test has one."""
    lines = sch.schedule.directives
    shards = {path for d in lines if d.do == "shard" for path in expand(sch.mod, d.on)}
    by_channel = {path for path in shards if is_by_channels(sch.mod.get_submodule(path))}
    kept = []
    for line in lines:
        sums = line.do == "sync" and (line.args["mode"], line.args["op"]) in (
            ("bwd_post", "all_reduce"),
            ("fwd_pre", "copy"),
        )
        if sums and line.on in by_channel:
            warnings.warn(
                f"{line.on} is split by channels, so ranks have gradients of different channels: {line.args['op']} ({line.where}) would"
                " add them up, and is left out",
                stacklevel=3,
            )
        else:
            kept.append(line)
    return kept


def _follow(split: list[tuple[SlapoSchedule, str, int]], step: str, ranks: int) -> None:
    for sub, name, axis in split:
        tensor = tensor_of(sub.mod, name)
        if tensor is not None and -tensor.ndim <= axis < tensor.ndim:
            getattr(method_of(sub.mod), step)(sub, name, tensor.shape[axis] // ranks, axis)


def _note_shapes(applied: Applied) -> None:
    # set ``orig_shape`` of split parameters, which Slapo's users rely on
    for name, parameter in applied.model.named_parameters():
        if name in applied.splits:
            parameter.orig_shape = torch.Size(applied.specs[name].shape)  # type: ignore[attr-defined]


def _complete(applied: Applied) -> Applied:
    """Sum partial gradients as soon as they are computed, since training loops for Slapo's models do nothing after backward."""

    def hook(grad: Tensor, name: str) -> Tensor:
        summed = grad.clone()
        applied.sum_parts(name, summed)
        return summed

    for name, parameter in applied.model.named_parameters():
        if applied.specs[name].sums:
            parameter.register_hook(partial(hook, name=name))
    return replace(applied, specs={name: replace(spec, sums=()) for name, spec in applied.specs.items()})


# Verify


_SEED = 2023


@dataclass(frozen=True)
class VerifyOptions:
    """Options of ``Verify`` that Slapo's does not have."""

    init_weights: Init = None
    dtype: torch.dtype = torch.float64


class Verify:
    """Verify a schedule on copies, in fp64, as a context manager; the schedule can still be built. Collective over all ranks."""

    def __init__(
        self, sch: SlapoSchedule, example_inputs: Any, example_outputs: Tensor | None = None,
        loss_fn: Callable[..., Tensor] | None = None, device: str | torch.device | None = None, topology: None = None,
        eval_mode: bool = True, enable: bool = True, **more: Any,
    ) -> None:  # fmt: skip
        if enable and (sch.path or topology is not None):
            what = (
                f"the schedule of the whole model, not of {sch.path}"
                if sch.path
                else "no topology: there are no pipeline stages"
            )
            raise ConfigError(f"Verify takes {what}")
        self.sch, self.inputs, self.targets, self.loss_fn, self.device = (
            sch,
            example_inputs,
            example_outputs,
            loss_fn,
            device,
        )
        self.eval_mode, self.enable, self.options = eval_mode, enable, VerifyOptions(**more)
        self.verdict: Verdict | None = None
        self.whole = self._settled(sch.mod) if enable else nn.Identity()

    def __enter__(self) -> Verify:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self.enable:
            return
        if self.sch.schedule.applied is not None:
            raise ConfigError(
                "build() was called inside of Verify: call it after the block, whose end compares with the whole model"
            )
        now = self._settled(self.sch.mod)
        _take_over(now, self.whole)
        owner, lines = self.sch.schedule, without_empty_sums(self.sch)
        asked = (lines, owner.mesh, owner.seq_dim, self._batch())
        with torch.random.fork_rng():
            self.verdict = verify(now, *asked, dtype=self.options.dtype, loss=self._loss, whole=self.whole)
        if not self.verdict.ok:
            raise NumericsError(f"{self.verdict}{self._way_out(self.verdict)}")
        owner.directives = with_adjoints(lines, self.verdict.adjoints)
        # these inputs may be equal by chance: what build() would refuse is refused here, too
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
    # positional inputs by their names in the forward's signature. Raises ConfigError: it has too few names
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
    known = dict((*whole.named_parameters(), *whole.named_buffers()))
    with torch.no_grad():
        for name, tensor in (*now.named_parameters(), *now.named_buffers()):
            if name in known and known[name].shape == tensor.shape:
                tensor.copy_(known[name])
