"""Slapo's API for one module of a schedule, and its primitives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from megatron_sp.comm.groups import Group, world_group
from megatron_sp.schedule.apply.splits import names_of
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.core.syncs import MODES, OPS
from megatron_sp.schedule.schedule import Schedule, Selection
from megatron_sp.schedule.slapo import older
from megatron_sp.schedule.slapo.methods import BUILT_IN, PRIMITIVES, method_of
from megatron_sp.utils.errors import ConfigError

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
    """Metadata of Slapo's schedules.

    Attributes:
        primitives: data of user-defined primitives, by name.
        param_tags: keys of ``annotate``.
        tie_weights: parameters with several names.
        base_params: shapes of the whole parameters, by name.
    """

    primitives: dict[str, Any] = field(default_factory=dict)
    param_tags: dict[str, None] = field(default_factory=dict)
    tie_weights: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    base_params: dict[str, torch.Size] = field(default_factory=dict)


class SlapoSchedule:
    """Schedule of one module; ``create_schedule`` makes that of the whole model.

    Attributes:
        schedule: schedule of the whole model, with all lines.
        path: path in the whole model; "" for the model itself.
        name: last component of the path.
        parent: schedule of the enclosing module, or None.
        metadata: metadata of the whole model.
    """

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
        raise ConfigError(f"{glob!r} may name several modules: Slapo's spelling takes one; schedule()[{glob!r}] takes them all")

    def __contains__(self, path: object) -> bool:
        return any(name == path for name, _ in self.mod.named_modules() if name)

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, SlapoSchedule]]:
        """Yield (path from here, schedule) of this module and of all its submodules."""
        for path, _ in self.mod.named_modules():
            yield f"{prefix}.{path}".strip("."), self[path] if path else self

    # primitives

    def shard(self, tensor_name: str | list[str], axis: int, *, blocks: Any = None, heads: int | None = None) -> None:
        """Split parameters or buffers over the group along an axis.

        Args:
            blocks, heads: for a packed projection, as in ``Selection.shard``; Slapo splits it as one piece, which is
                ``blocks=1``.
        """
        for name in [tensor_name] if isinstance(tensor_name, str) else tensor_name:
            self._line.shard(name, axis, blocks=blocks, heads=heads)

    def sync(self, mode: str = "backward", sync_op_or_fn: str | Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Add a collective where a tensor enters or leaves the module.

        Args:
            mode: fwd_pre, fwd_post or bwd_post. Without a second argument, as in early versions: forward, backward or
                both, after the ``shard`` that determines what is exchanged.
            sync_op_or_fn: all_gather, reduce_scatter, scatter, all_reduce; "RS->SR" and the like, with R whole and S
                split for the last two dims; or a hook: (module, inputs), (module, inputs, output), or (module,
                grad_inputs, grad_outputs).
            kwargs: ``axis`` (default: 0, as in Slapo); ``tensor_parallel_output_grad``, for all_gather: whether the
                ranks use the result differently (default: inferred); ``arg``, ``out``: the input or output, if not the
                first.
        """
        if sync_op_or_fn is None:
            for step in older.exchanges(self, mode, kwargs):
                self.sync(*step[:2], **step[2])
            return
        method_of(self.mod).sync(self, older.MODES.get(mode, mode), sync_op_or_fn, **kwargs)

    def put_sync(self, mode: str, sync_op_or_fn: str | Callable[..., Any], **kwargs: Any) -> None:
        """Add the collective of ``sync`` for a class without its own ShardMethod."""
        if mode not in MODES:
            raise ConfigError(
                f"sync on {self.path}: mode {mode!r} is not known, only {', '.join(MODES)} (forward: fwd_post, backward: bwd_post)"
            )
        if callable(sync_op_or_fn):
            if kwargs:
                raise ConfigError(f"sync on {self.path}: {', '.join(kwargs)} has no meaning beside a hook, which does what it does")
            self._line.hook(mode, sync_op_or_fn)
            return
        if older.is_reshard(sync_op_or_fn):
            older.put_reshard(self._line, self.path, mode, sync_op_or_fn, kwargs)
            return
        self._check(mode, sync_op_or_fn, kwargs)
        differs = kwargs.pop("tensor_parallel_output_grad", None)
        grad = None if differs is None else "reduce_scatter" if differs else "slice"
        axis = kwargs.pop("axis", 0)
        self._line.sync(mode, sync_op_or_fn, axis=None if sync_op_or_fn in ("all_reduce", "copy") else axis, grad=grad, **kwargs)

    def _check(self, mode: str, op: Any, kwargs: dict[str, Any]) -> None:
        if op not in OPS:
            raise ConfigError(
                f"sync on {self.path}: {op!r} is not known, only {', '.join(OPS)}, or a function, or one of {', '.join(older.RESHARDS)}"
            )
        known = ("axis", "tensor_parallel_output_grad", "arg", "out")
        if wrong := [name for name in kwargs if name not in known]:
            raise ConfigError(f"sync on {self.path} does not know {', '.join(wrong)}, only {', '.join(known)}")
        if "tensor_parallel_output_grad" in kwargs and op != "all_gather":
            raise ConfigError(f"sync on {self.path}: tensor_parallel_output_grad is about the gradient of all_gather, not of {op}")

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
        """Replace the module at once, so that later lines can refer to its submodules; the new one takes over the old one's hooks.

        Args:
            new_mod_or_func: the new module.
            name: ignored; the module keeps its place, and so its name.
        """
        here = self.path or "the model"
        if target_ops is not None or not isinstance(new_mod_or_func, nn.Module):
            raise ConfigError(f"replace on {here} takes a module for a module; there is no graph whose nodes could be replaced")
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

    def replace_all(self, target_mod_type: type[nn.Module], make_mod_fn: Callable[..., nn.Module], **kwargs: Any) -> None:
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
            raise ConfigError(f"checkpoint on {self.path or 'the model'} takes a whole module: there is no graph to take a part of")
        self._line.checkpoint()

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            return partial(self._refuse, name)
        if name in PRIMITIVES:
            return partial(PRIMITIVES[name].apply, self)
        raise AttributeError(f"{type(self).__name__} has no {name!r}: its primitives are {', '.join(list_primitives())}")

    def _refuse(self, name: str, /, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f".{name}() on {self.path or 'the model'}: {_REFUSED[name]}")

    @property
    def _line(self) -> Selection:
        return self.schedule[self.path]


def create_schedule(
    root: nn.Module, name: str = "", path: str = "", parent: SlapoSchedule | None = None, group: Group | None = None
) -> SlapoSchedule:
    """Create a schedule with Slapo's API.

    Args:
        root: the model; with a ``parent``, a module of it.
        name, path: name and path of ``root``, with a ``parent``.
        group: group to split over (default: all ranks).
    Raises:
        ConfigError: ``root`` is not the parent's module at ``path``.
    """
    if parent is None:
        return SlapoSchedule(Schedule(root, Mesh(tp=group or world_group()), seq_dim=0), name=name)
    found = parent.schedule.model.get_submodule(path)
    if found is not root:
        raise ConfigError(f"{path!r} of the parent's model is another module than the one that was given: take parent[...] instead")
    return SlapoSchedule(parent.schedule, path, name, parent)


def _remember(model: nn.Module) -> Metadata:
    by_id = {id(p): p for p in model.parameters()}
    tied = [by_id[key] for key, names in names_of(model).items() if len(names) > 1]
    made = {name: cls.init_metadata() for name, cls in PRIMITIVES.items()}
    return Metadata(made, {}, {p: p for p in tied}, {name: p.shape for name, p in model.named_parameters()})


def list_primitives(name_only: bool = True) -> list[str] | dict[str, Callable[..., Any]]:
    """List the primitives, or return them by name."""
    if name_only:
        return [*BUILT_IN, *PRIMITIVES]
    return {**{name: getattr(SlapoSchedule, name) for name in BUILT_IN}, **{name: cls.apply for name, cls in PRIMITIVES.items()}}
