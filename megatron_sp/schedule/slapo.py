"""Slapo's spelling of a schedule: its examples run as they are written, on this package's layers.

    sch = create_schedule(model)
    sch["attention.out_proj"].shard("weight", axis=1)
    sch["attention.out_proj"].sync(mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=1)
    sch["attention.resid_dropout"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=1)
    model, _ = build(sch)

What differs, for the better: nothing changes before ``build()``; the order of the lines does not matter; a bias behind a sum is added once;
gradients that are sums over the ranks are complete after ``backward()``. Subgraphs (trace, find, fuse, decompose, pipeline stages) are
refused with what to do instead. Source: Slapo (Chen et al., ASPLOS 2024, arXiv:2302.08005), after its documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from megatron_sp.comm.collectives import broadcast
from megatron_sp.comm.groups import Group, world_group
from megatron_sp.schedule.apply import Applied
from megatron_sp.schedule.mesh import Mesh
from megatron_sp.schedule.paths import expand
from megatron_sp.schedule.schedule import Schedule, Selection
from megatron_sp.schedule.syncs import MODES, OPS
from megatron_sp.utils.errors import ConfigError

PRIMITIVES = ("annotate", "checkpoint", "fork_rng", "replace", "replace_all", "shard", "sync")
_REFUSED = {
    "trace": "nothing is traced here: hooks and split layers work on the modules themselves, so leave the line out",
    "trace_until": "nothing is traced here: hooks and split layers work on the modules themselves, so leave the line out",
    "find": "there is no graph to search: name modules by path, or many of them by glob with megatron_sp.schedule.schedule",
    "find_node": "there is no graph to search: name modules by path",
    "find_subgraph": "there is no graph to search: name modules by path",
    "fuse": "put the operations into a module of your own and .replace() theirs with it, or leave them to torch.compile",
    "decompose": "a bias is added behind the sum anyway: leave the line out",
    "cut_pipeline_stage": "pipeline stages are not supported: split by tp, sp and ZeRO",
    "hook": ".sync(mode, fn) takes hooks",
}


class SlapoSchedule:
    """One module of a schedule; ``create_schedule`` makes that of the whole model.

    Attributes:
        schedule: of the whole model, which has all lines.
        path: from the whole model; "" for itself.
        name: the last word of the path.
        parent: the module around it, or None.
    """

    def __init__(self, owner: Schedule, path: str = "", name: str = "", parent: SlapoSchedule | None = None) -> None:
        self.schedule, self.path, self.name, self.parent = owner, path, name or path.rpartition(".")[2], parent

    # what is there

    @property
    def mod(self) -> nn.Module:
        return self.schedule.model.get_submodule(self.path)

    @property
    def group(self) -> Group:
        return self.schedule.mesh.tp

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    @property
    def child(self) -> dict[str, SlapoSchedule]:
        """Of the modules right inside."""
        return {name: self[name] for name, _ in self.mod.named_children()}

    def __getitem__(self, path: str) -> SlapoSchedule:
        """A module inside. Raises PathError: there is none; says which names are near."""
        full = f"{self.path}.{path}" if self.path and path else path or self.path
        (found,) = expand(self.schedule.model, full) if not set("*?{") & set(path) else self._one(full)
        parent = self if "." not in path else self[path.rpartition(".")[0]]
        return SlapoSchedule(self.schedule, found, parent=parent)

    def _one(self, glob: str) -> NoReturn:
        raise ConfigError(f"{glob!r} may name several modules: Slapo's spelling takes one; schedule()[{glob!r}] takes them all")

    def __contains__(self, path: object) -> bool:
        return any(name == path for name, _ in self.mod.named_modules() if name)

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, SlapoSchedule]]:
        """(path from here, schedule) of this module and of all inside."""
        for path, _ in self.mod.named_modules():
            yield f"{prefix}.{path}".strip("."), self[path] if path else self

    # primitives

    def shard(self, tensor_name: str | list[str], axis: int) -> None:
        """Split parameters or buffers over the group along an axis."""
        for name in [tensor_name] if isinstance(tensor_name, str) else tensor_name:
            self._line.shard(name, axis)

    def sync(self, mode: str, sync_op_or_fn: str | Callable[..., Any], **kwargs: Any) -> None:
        """Have the ranks talk where a tensor enters or leaves the module.

        Args:
            mode: fwd_pre, fwd_post or bwd_post.
            sync_op_or_fn: all_gather, reduce_scatter, scatter, all_reduce; or a hook: (module, inputs), (module, inputs, output), or
                (module, grad_inputs, grad_outputs).
            kwargs: ``axis`` (default: 0, as in Slapo); ``tensor_parallel_output_grad``, of all_gather: whether the ranks use the result
                differently (default: worked out); ``arg``, ``out``: which input or output, if not the first.
        """
        if mode not in MODES:
            raise ConfigError(
                f"sync on {self.path}: mode {mode!r} is not known, only {', '.join(MODES)} (forward: fwd_post, backward: bwd_post)"
            )
        if callable(sync_op_or_fn):
            if kwargs:
                raise ConfigError(f"sync on {self.path}: {', '.join(kwargs)} has no meaning beside a hook, which does what it does")
            self._line.hook(mode, sync_op_or_fn)
            return
        self._check(mode, sync_op_or_fn, kwargs)
        differs = kwargs.pop("tensor_parallel_output_grad", None)
        grad = None if differs is None else "reduce_scatter" if differs else "slice"
        axis = kwargs.pop("axis", 0)
        self._line.sync(mode, sync_op_or_fn, axis=None if sync_op_or_fn in ("all_reduce", "copy") else axis, grad=grad, **kwargs)

    def _check(self, mode: str, op: Any, kwargs: dict[str, Any]) -> None:
        if op not in OPS:
            raise ConfigError(
                f"sync on {self.path}: {op!r} is not known, only {', '.join(OPS)}, or a function;"
                " what reshards (XY->ZW) is a function of yours"
            )
        known = ("axis", "tensor_parallel_output_grad", "arg", "out")
        if wrong := [name for name in kwargs if name not in known]:
            raise ConfigError(f"sync on {self.path} does not know {', '.join(wrong)}, only {', '.join(known)}")
        if "tensor_parallel_output_grad" in kwargs and op != "all_gather":
            raise ConfigError(f"sync on {self.path}: tensor_parallel_output_grad is about the gradient of all_gather, not of {op}")

    def fork_rng(self) -> None:
        """Random numbers inside differ between the ranks."""
        self._line.rng("tp")

    def annotate(self, param_name: str, key: str, value: Any) -> None:
        """Put a note on a parameter; ``replicated_param``: its gradient is summed over the ranks."""
        self._line.annotate(param_name, key, value)
        if key == "replicated_param" and value:
            self._line.sum_gradients(param_name)

    def replace(self, new_mod_or_func: Any, target_ops: Any = None, **kwargs: Any) -> None:
        """Put another module there."""
        if target_ops is not None or not isinstance(new_mod_or_func, nn.Module):
            raise ConfigError(
                f"replace on {self.path or 'the model'} takes a module for a module; there is no graph whose nodes could be replaced"
            )
        if kwargs.keys() - {"name"}:
            raise ConfigError(f"replace on {self.path or 'the model'} does not know {', '.join(kwargs.keys() - {'name'})}")
        self._line.replace(new_mod_or_func)

    def replace_all(self, target_mod_type: type[nn.Module], make_mod_fn: Callable[..., nn.Module], **kwargs: Any) -> None:
        """Put ``make_mod_fn(path, module, **kwargs)`` in the place of every module of a type inside."""
        for path, sub in self.named_schedules():
            if path and isinstance(sub.mod, target_mod_type):
                sub._line.replace(partial(make_mod_fn, **kwargs))

    def checkpoint(self, subgraph: Any = None, order_args_fn: Any = None) -> None:
        """Compute the inside again in backward; keyword arguments need no order."""
        if subgraph is not None:
            raise ConfigError(f"checkpoint on {self.path or 'the model'} takes a whole module: there is no graph to take a part of")
        self._line.checkpoint()

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            return partial(self._refuse, name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}: its primitives are {', '.join(PRIMITIVES)}")

    def _refuse(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f".{name}() on {self.path or 'the model'}: {_REFUSED[name]}")

    @property
    def _line(self) -> Selection:
        return self.schedule[self.path]


def create_schedule(
    root: nn.Module, name: str = "", path: str = "", parent: SlapoSchedule | None = None, group: Group | None = None
) -> SlapoSchedule:
    """Begin a schedule in Slapo's spelling.

    Args:
        root: the model; with a ``parent``, a module of it.
        name, path: of ``root``, with a ``parent``.
        group: over which is split (default: everybody in the job).
    Raises:
        ConfigError: ``root`` is not the parent's module at ``path``.
    """
    if parent is None:
        return SlapoSchedule(Schedule(root, Mesh(tp=group or world_group()), seq_dim=0), name=name)
    found = parent.schedule.model.get_submodule(path)
    if found is not root:
        raise ConfigError(f"{path!r} of the parent's model is another module than the one that was given: take parent[...] instead")
    return SlapoSchedule(parent.schedule, path, name, parent)


def build(
    sch: SlapoSchedule, target: str | None = None, init_weights: bool | Callable[[nn.Module], Any] = False, **kwargs: Any
) -> tuple[nn.Module, None]:
    """Apply a schedule.

    Args:
        sch: of the whole model.
        target: engines of others are refused.
        init_weights: draw the whole model's weights anew before they are split, with this function of a module, or with the modules' own;
            rank 0's count. Slapo's default is True, which loses weights that have been loaded.
    Returns:
        (the model, None): the optimizer is yours to make, of the parameters that are there now.
    Raises:
        ConfigError: a line that cannot be; a target.
    """
    if target is not None or kwargs:
        what = f"target={target!r}" if target is not None else ", ".join(kwargs)
        raise ConfigError(f"build() knows no {what}: train the model it returns in a loop of yours, or in the project's (docs/schedule.md)")
    if sch.path:
        raise ConfigError(f"build() takes the schedule of the whole model, not of {sch.path}")
    if init_weights:
        _draw(sch.mod, init_weights, sch.group)
    model = sch.schedule.apply()
    assert sch.schedule.applied is not None
    sch.schedule.applied = _complete(sch.schedule.applied)
    return model, None


def _draw(model: nn.Module, init: bool | Callable[[nn.Module], Any], group: Group) -> None:
    own = getattr(model, "_init_weights", None)

    def draw(module: nn.Module) -> None:
        if callable(init):
            init(module)
        elif own is not None:
            own(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    for module in model.modules():
        draw(module)
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast(tensor.detach(), group)


def _complete(applied: Applied) -> Applied:
    """Sum gradients that are parts as they arise, since a loop for Slapo's models does nothing behind backward."""

    def hook(grad: Tensor, name: str) -> Tensor:
        summed = grad.clone()
        applied.sum_parts(name, summed)
        return summed

    for name, parameter in applied.model.named_parameters():
        if applied.specs[name].sums:
            parameter.register_hook(partial(hook, name=name))
    return replace(applied, specs={name: replace(spec, sums=()) for name, spec in applied.specs.items()})


def list_primitives(name_only: bool = True) -> list[str] | dict[str, Callable[..., Any]]:
    """What can be said of a module."""
    return list(PRIMITIVES) if name_only else {name: getattr(SlapoSchedule, name) for name in PRIMITIVES}
