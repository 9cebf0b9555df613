"""Slapo's API for schedules (ASPLOS 2024, arXiv:2302.08005): its examples run unchanged, on this package's layers.

    sch = create_schedule(model)
    sch["attention.out_proj"].shard("weight", axis=1)
    sch["attention.out_proj"].sync(mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=1)
    model, _ = build(sch)

Nothing but ``replace`` changes the model before ``build()``; docs/how-to/schedule.md has all differences.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_sp.comm.collectives import broadcast
from megatron_sp.comm.groups import Group, world_group
from megatron_sp.parallel.mappings import all_to_all, copy_to, gather_from, reduce_from, reduce_scatter_to, scatter_to
from megatron_sp.schedule.apply.apply import decide
from megatron_sp.schedule.apply.guards import whole_or_not_at_all
from megatron_sp.schedule.apply.plan import names_of, tensor_of
from megatron_sp.schedule.apply.randomness import Streams
from megatron_sp.schedule.core.directives import Directive, Mesh, expand
from megatron_sp.schedule.core.hooks import MODES, OPS
from megatron_sp.schedule.core.kinds import find_kind, knows
from megatron_sp.schedule.empty_weights import Init, settle_weights
from megatron_sp.schedule.empty_weights import init_empty_weights as init_empty_weights  # a name of Slapo's, too
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.schedule.verify.derive import with_adjoints
from megatron_sp.schedule.verify.verify import Verdict, default_loss, verify
from megatron_sp.utils.errors import ConfigError, NumericsError

BUILT_IN = ("annotate", "checkpoint", "fork_rng", "replace", "replace_all", "shard", "sync")
PRIMITIVES: dict[str, type[Primitive]] = {}
_METHODS: dict[type[nn.Module], type[ShardMethod]] = {}
_SEED = 2023
_GRADIENT_SUMS = (("bwd_post", "all_reduce"), ("fwd_pre", "copy"))
_OLD_MODES = {"fw_pre": "fwd_pre", "fw_post": "fwd_post", "bw_post": "bwd_post"}  # in an example of its documentation
_RESHARDS: dict[str, tuple[str, int] | tuple[str, int, int] | None] = {  # of the last two dims: R whole, S split
    "RR->RR": None, "RS->RS": None, "SR->SR": None, "RR->RS": ("scatter", -1), "RR->SR": ("scatter", -2),
    "RS->RR": ("all_gather", -1), "SR->RR": ("all_gather", -2), "RS->SR": ("all_to_all", -2, -1),
    "SR->RS": ("all_to_all", -1, -2),
}  # fmt: skip
_REFUSED = {
    **dict.fromkeys(("trace", "trace_until"),
        "nothing is traced here: hooks and split layers work on the modules themselves, so leave the line out"),
    "find": "there is no graph to search: name modules by path, or many of them by glob with"
        " megatron_sp.schedule.schedule",
    **dict.fromkeys(("find_node", "find_subgraph"), "there is no graph to search: name modules by path"),
    "fuse": "put the operations into a module of your own and .replace() theirs with it, or leave them to"
        " torch.compile",
    "decompose": "a bias is added after the sum anyway: leave the line out",
    "cut_pipeline_stage": "pipeline stages are not supported: split by tp, sp and ZeRO",
    "hook": ".sync(mode, fn) takes hooks",
}  # fmt: skip
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
SyncOp = str | Callable[..., Any]
_M = TypeVar("_M", bound="type[ShardMethod]")
_P = TypeVar("_P", bound="type[Primitive]")


# what users add


class ShardMethod:
    """Steps around the split of a class's tensors; subclasses are registered for it."""

    @staticmethod
    def preproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """Run before the split, while the module is still whole."""

    @staticmethod
    def postproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
        """Run after the split, when ``sch.mod`` has this rank's share."""

    @staticmethod
    def infer_output_type(sch: SlapoSchedule, param_name: str, size: int, axis: int) -> tuple[str | None, int | None]:
        return None, None

    @staticmethod
    def sync(sch: SlapoSchedule, mode: str, sync_op_or_fn: SyncOp, **kwargs: Any) -> None:
        """Add the collective of ``sch.sync()``."""
        op, where, line = sync_op_or_fn, f"sync on {sch.path}", sch.schedule[sch.path]
        if mode not in MODES:
            known = f"{', '.join(MODES)} (forward: fwd_post, backward: bwd_post)"
            raise ConfigError(f"{where}: mode {mode!r} is not known, only {known}")
        if callable(op):
            if kwargs:
                raise ConfigError(f"{where}: {', '.join(kwargs)} has no meaning beside a hook, which does what it does")
            line.hook(mode, op)
        elif op in _RESHARDS:
            if kwargs:
                raise ConfigError(f"{where}: {op!r} takes no {', '.join(kwargs)}: its letters say which dims are meant")
            if mode == "bwd_post":
                way = "the gradient goes the other way by itself"
                raise ConfigError(f"{where}: {op!r} is for fwd_pre and fwd_post; {way}")
            name, *dims = _RESHARDS[op] or ("",)
            if len(dims) == 1:
                line.sync(mode, name, axis=dims[0])
            elif dims:
                split, join = dims
                exchange = lambda x, group: all_to_all(x, group, split, join)
                exchange.__name__ = "_trade"
                line.sync(mode, exchange, layouts=f"S({join})->S({split})")
        else:
            keywords = ("axis", "tensor_parallel_output_grad", "arg", "out")
            if op not in OPS:
                ops = f"{', '.join(OPS)}, or a function, or one of {', '.join(_RESHARDS)}"
                raise ConfigError(f"{where}: {op!r} is not known, only {ops}")
            if wrong := [name for name in kwargs if name not in keywords]:
                raise ConfigError(f"{where} does not know {', '.join(wrong)}, only {', '.join(keywords)}")
            if "tensor_parallel_output_grad" in kwargs and op != "all_gather":
                about = "tensor_parallel_output_grad is about the gradient of all_gather"
                raise ConfigError(f"{where}: {about}, not of {op}")
            differs, axis = kwargs.pop("tensor_parallel_output_grad", None), kwargs.pop("axis", 0)
            grad = None if differs is None else "reduce_scatter" if differs else "slice"
            line.sync(mode, op, axis=None if op in ("all_reduce", "copy") else axis, grad=grad, **kwargs)


class Primitive:
    """Base class of user-defined primitives: ``sch.<name>(...)`` calls ``apply(sch, ...)``."""

    @staticmethod
    def name() -> str:
        raise NotImplementedError

    @staticmethod
    def apply(sch: SlapoSchedule, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def init_metadata() -> Any:
        """Return the initial value of ``sch.metadata.primitives[name]``."""
        return None


def register_shard_method(module_cls: type[nn.Module] | None) -> Callable[[_M], _M]:
    """Decorate a ShardMethod with its class; None (a class that could not be imported) does nothing."""

    def decorate(method: _M) -> _M:
        if module_cls is None:
            return method
        name = module_cls.__name__
        if not issubclass(method, ShardMethod):
            raise ConfigError(f"{method.__name__} for {name} must be a subclass of ShardMethod")
        if module_cls in _METHODS or knows(module_cls):
            way_out = "register a subclass of it, or use register_shardable()"
            raise ConfigError(f"{name} has a way to be split already: {way_out}")
        _METHODS[module_cls] = method
        return method

    return decorate


def register_primitive() -> Callable[[_P], _P]:
    """Decorate a Primitive. Raises ConfigError: it is none, or its name is taken."""

    def decorate(primitive: _P) -> _P:
        if not issubclass(primitive, Primitive):
            raise ConfigError(f"{primitive.__name__} must be a subclass of Primitive")
        name = primitive.name()
        if name in PRIMITIVES or name in BUILT_IN:
            raise ConfigError(f"there is a primitive {name!r} already: give yours another name")
        PRIMITIVES[name] = primitive
        return primitive

    return decorate


def list_primitives(name_only: bool = True) -> list[str] | dict[str, Callable[..., Any]]:
    built_in = {name: getattr(SlapoSchedule, name) for name in BUILT_IN}
    known = built_in | {name: cls.apply for name, cls in PRIMITIVES.items()}
    return list(known) if name_only else known


def _method_of(module: nn.Module) -> type[ShardMethod]:
    return next((method for cls, method in _METHODS.items() if isinstance(module, cls)), ShardMethod)


# collectives for hooks, and random numbers


def all_gather_forward_output(
    inp: Tensor, dim: int, group: Group | None = None, tensor_parallel_output_grad: bool = True
) -> Tensor:
    return gather_from(inp, group or world_group(), dim, "reduce_scatter" if tensor_parallel_output_grad else "slice")


def reduce_scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    return reduce_scatter_to(inp, group or world_group(), dim)


def scatter_forward_output(inp: Tensor, dim: int, group: Group | None = None) -> Tensor:
    return scatter_to(inp, group or world_group(), dim)


def reduce_forward_output(inp: Tensor, group: Group | None = None) -> Tensor:
    return reduce_from(inp, group or world_group())


def reduce_backward_grad(inp: Tensor, group: Group | None = None) -> Tensor:
    return copy_to(inp, group or world_group())


def get_cuda_rng_tracker(group: Group | None = None) -> SimpleNamespace:
    """Return an object whose ``fork()`` makes random numbers inside differ between the ranks, on the CPU too."""
    return SimpleNamespace(fork=lambda: Streams().differ(group or world_group()))


def set_random_seed(
    seed: int = 2013, dp_rank: int | None = None, pp_rank: int | None = None, tp_rank: int | None = None
) -> int:
    """Seed Python, torch, and numpy if it is imported: equally over tp, differently over dp and pp."""
    seed += 100 * (pp_rank or 0) + 10 * (dp_rank or 0)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and recompute it in backward with the same random numbers, including those of ``fork()``."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


# the schedule


class SlapoSchedule:
    """Schedule of one module; ``create_schedule`` makes that of the whole model."""

    def __init__(self, owner: Schedule, path: str = "", name: str = "", parent: SlapoSchedule | None = None) -> None:
        self.schedule, self.path, self.name, self.parent = owner, path, name or path.rpartition(".")[2], parent
        self.group = owner.mesh.tp
        self.rank, self.world_size = self.group.rank(), self.group.size()
        self._here = path or "the model"
        if parent is not None:
            self.metadata: SimpleNamespace = parent.metadata
            return
        names = names_of(owner.model)
        self.metadata = SimpleNamespace(
            primitives={name: cls.init_metadata() for name, cls in PRIMITIVES.items()}, param_tags={},
            tie_weights={p: p for p in owner.model.parameters() if len(names[id(p)]) > 1},
            base_params={name: p.shape for name, p in owner.model.named_parameters()},
        )  # fmt: skip

    @property
    def mod(self) -> nn.Module:
        """Module that the schedule is about."""
        return self.schedule.model.get_submodule(self.path)

    @property
    def child(self) -> dict[str, SlapoSchedule]:
        """Schedules of the direct submodules, by name."""
        return {name: self[name] for name, _ in self.mod.named_children()}

    def __getitem__(self, path: str) -> SlapoSchedule:
        """Return the schedule of a submodule. Raises PathError: there is none; suggests similar names."""
        full = f"{self.path}.{path}" if self.path and path else path or self.path
        if set("*?{") & set(path):
            takes = f"Slapo's spelling takes one; schedule()[{full!r}] takes them all"
            raise ConfigError(f"{full!r} may name several modules: {takes}")
        (full_path,) = expand(self.schedule.model, full)
        parent = self if "." not in path else self[path.rpartition(".")[0]]
        return SlapoSchedule(self.schedule, full_path, parent=parent)

    def __contains__(self, path: object) -> bool:
        return any(name == path for name, _ in self.mod.named_modules() if name)

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, SlapoSchedule]]:
        for path, _ in self.mod.named_modules():
            yield f"{prefix}.{path}".strip("."), self[path] if path else self

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:

            def refuse(*_: Any, **__: Any) -> NoReturn:
                raise ConfigError(f".{name}() on {self._here}: {_REFUSED[name]}")

            return refuse
        if name in PRIMITIVES:
            return partial(PRIMITIVES[name].apply, self)
        known = ", ".join(list_primitives())
        raise AttributeError(f"{type(self).__name__} has no {name!r}: its primitives are {known}")

    def shard(self, tensor_name: str | list[str], axis: int, *, blocks: Any = None, heads: int | None = None) -> None:
        """Split parameters or buffers over the group along an axis."""
        for name in [tensor_name] if isinstance(tensor_name, str) else tensor_name:
            self.schedule[self.path].shard(name, axis, blocks=blocks, heads=heads)

    def sync(self, mode: str = "backward", sync_op_or_fn: SyncOp | None = None, **kwargs: Any) -> None:
        """Add a collective where a tensor enters or leaves the module."""
        if sync_op_or_fn is None:
            for place, op, more in self._syncs_of_early_versions(mode, kwargs):
                self.sync(place, op, **more)
        else:
            _method_of(self.mod).sync(self, _OLD_MODES.get(mode, mode), sync_op_or_fn, **kwargs)

    def _syncs_of_early_versions(self, mode: str, kwargs: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
        # (mode, operation, keywords) that forward, backward or both stand for, after a shard of the weight
        where = f"sync on {self._here}"
        if mode not in ("forward", "backward", "both") or kwargs:
            more = f", not {', '.join(kwargs)}" if kwargs else ""
            raise ConfigError(
                f"{where}: name the op at {mode!r}, such as sync('fwd_post', 'all_reduce'); only forward, backward and"
                f" both of early versions say it by themselves, and take nothing else{more}"
            )
        kind, module = find_kind(self.mod), self.mod
        result, axis = None, None  # partition along an axis, or partial
        for line in self.schedule.directives:
            name = line.args.get("tensor", "")
            tensor = tensor_of(module, name) if line.do == "shard" and line.on == self.path else None
            if tensor is None:  # build() reports it
                continue
            dim = line.args["axis"] % tensor.ndim
            if kind is None:
                size = tensor.shape[dim] // self.world_size
                inferred = _method_of(module).infer_output_type(self, name, size, line.args["axis"])
                result, axis = inferred if inferred[0] is not None else (result, axis)
            elif dim == kind.out_dims.get(name, -1):
                result, axis = (result, axis) if result is not None else ("partition", kind.out_axis)
            elif dim == kind.in_dims.get(name, -1):
                result, axis = "partial", None
        if result is None:
            ask = "asks what the result has become: write .shard() of its weight first, or name mode and operation"
            raise ConfigError(f"{where}: {mode} {ask}")
        if result == "partial":
            if mode != "forward":
                why = "it is split by its inputs, so it has a sum to make of its result, and none of a gradient"
                raise ConfigError(f"{where}: {why}: use forward")
            return [("fwd_post", "all_reduce", {})]
        gather = [("fwd_post", "all_gather", {"axis": axis})] if mode != "backward" else []
        sums = mode != "forward" and not (kind is not None and kind.by_channel)
        return [*gather, ("bwd_post", "all_reduce", {})] if sums else gather

    def fork_rng(self) -> None:
        """Make random numbers inside differ between the ranks."""
        self.schedule[self.path].rng("tp")

    def annotate(self, param_name: str, key: str, value: Any) -> None:
        """Attach a note to a parameter; with ``replicated_param``, its gradient is summed over the ranks."""
        line = self.schedule[self.path].annotate(param_name, key, value)
        self.metadata.param_tags[key] = None
        if key == "replicated_param" and value:
            line.sum_gradients(param_name)

    def replace(self, new_mod_or_func: Any, target_ops: Any = None, name: str | None = None, **kwargs: Any) -> None:
        """Replace the module at once, so that later lines can name its submodules; the old one's hooks are kept."""
        old, new = self.mod, new_mod_or_func
        if target_ops is not None or not isinstance(new, nn.Module):
            why = "there is no graph whose nodes could be replaced"
            raise ConfigError(f"replace on {self._here} takes a module for a module; {why}")
        if kwargs:
            raise ConfigError(f"replace on {self._here} does not know {', '.join(kwargs)}")
        if self.schedule.applied is not None:
            raise ConfigError(f"replace on {self._here} comes after build(): write all lines first (E15)")
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

    def replace_all(self, target_mod_type: type[nn.Module], make_mod_fn: Callable[..., Any], **kwargs: Any) -> None:
        """Replace every submodule of a type by ``make_mod_fn(path, module, **kwargs)``, except inside replaced ones."""
        done: list[str] = []
        for path, sub in list(self.named_schedules()):
            inside = any(path.startswith(f"{other}.") for other in done)
            if path and not inside and isinstance(sub.mod, target_mod_type):
                sub.replace(make_mod_fn(path, sub.mod, **kwargs))
                done.append(path)

    def checkpoint(self, subgraph: Any = None, order_args_fn: Any = None) -> None:
        """Recompute the module in backward; keyword arguments need no order."""
        if subgraph is not None:
            why = "there is no graph to take a part of"
            raise ConfigError(f"checkpoint on {self._here} takes a whole module: {why}")
        self.schedule[self.path].checkpoint()


def create_schedule(
    root: nn.Module, name: str = "", path: str = "", parent: SlapoSchedule | None = None, group: Group | None = None
) -> SlapoSchedule:
    """Return a schedule of a model for the ranks of a group (default: all), or of a module of the parent's model."""
    if parent is None:
        return SlapoSchedule(Schedule(root, Mesh(tp=group or world_group()), seq_dim=0), name=name)
    if parent.schedule.model.get_submodule(path) is not root:
        why = "is another module than the one that was given: take parent[...] instead"
        raise ConfigError(f"{path!r} of the parent's model {why}")
    return SlapoSchedule(parent.schedule, path, name, parent)


# build


def build(sch: SlapoSchedule, target: Any = None, init_weights: Init = None, **kwargs: Any) -> tuple[nn.Module, None]:
    """Apply a schedule; return (model, None). Raises ConfigError, and leaves the model as it was.

    ``init_weights`` is that of ``settle_weights``.
    """
    for name in ("init_required", "param_init_fn"):  # names of older versions
        init_weights = kwargs.pop(name, init_weights)
    if target is not None or kwargs:
        what = f"target={target!r}" if target is not None else ", ".join(kwargs)
        way_out = "train the model it returns in your own loop, or in the project's (docs/how-to/schedule.md)"
        raise ConfigError(f"build() knows no {what}: {way_out}")
    if sch.path:
        raise ConfigError(f"build() takes the schedule of the whole model, not of {sch.path}")
    owner, model = sch.schedule, sch.mod
    owner.directives = _without_empty_sums(sch)
    decide(model, owner.directives, owner.mesh, owner.seq_dim)  # before any weight is drawn

    def call_methods(step: str, ranks: int) -> None:
        for sub, name, axis in split:
            tensor = tensor_of(sub.mod, name)
            if tensor is not None and -tensor.ndim <= axis < tensor.ndim:
                getattr(_method_of(sub.mod), step)(sub, name, tensor.shape[axis] // ranks, axis)

    try:
        with whole_or_not_at_all(model):
            settle_weights(model, init_weights, sch.group)
            lines = [(path, d.args) for d in owner.directives if d.do == "shard" for path in expand(model, d.on)]
            split = [(sch[path] if path else sch, args["tensor"], args["axis"]) for path, args in lines]
            call_methods("preproc", sch.world_size)
            owner.apply(verify=False)  # the defaults are Slapo's, and written down (docs/how-to/schedule.md)
            call_methods("postproc", 1)
            assert owner.applied is not None
            applied, specs = owner.applied, owner.applied.specs
            for name, parameter in model.named_parameters():
                if name in applied.splits:
                    parameter.orig_shape = torch.Size(specs[name].shape)  # type: ignore[attr-defined]
                if specs[name].sums:  # now, for loops of Slapo's models do nothing after backward
                    parameter.register_hook(partial(applied.summed, name))
            done = {name: replace(spec, sums=()) for name, spec in specs.items()}
            owner.applied = replace(applied, specs=done)
    except BaseException:
        owner.applied = None
        raise
    return model, None


def _without_empty_sums(sch: SlapoSchedule) -> list[Directive]:
    # the lines but for gradient sums at layers that are split by channels, which would add up different channels
    lines = sch.schedule.directives
    shards = {path for d in lines if d.do == "shard" for path in expand(sch.mod, d.on)}
    kept = []
    for line in lines:
        is_sum = line.do == "sync" and (line.args["mode"], line.args["op"]) in _GRADIENT_SUMS
        kind = find_kind(sch.mod.get_submodule(line.on)) if is_sum and line.on in shards else None
        if kind is None or not kind.by_channel:
            kept.append(line)
            continue
        warnings.warn(
            f"{line.on} is split by channels, so ranks have gradients of different channels: {line.args['op']}"
            f" ({line.where}) would add them up, and is left out",
            stacklevel=3,
        )
    return kept


class Verify:
    """Verify a schedule on copies, as a context manager; it can still be built. Collective over all ranks.

    ``example_inputs``: by name or position; ``example_outputs``: the second argument of ``loss_fn``.
    """

    def __init__(
        self, sch: SlapoSchedule, example_inputs: Any, example_outputs: Tensor | None = None,
        loss_fn: Callable[..., Tensor] | None = None, device: str | torch.device | None = None, topology: None = None,
        eval_mode: bool = True, enable: bool = True, init_weights: Init = None, dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        if enable and sch.path:
            raise ConfigError(f"Verify takes the schedule of the whole model, not of {sch.path}")
        if enable and topology is not None:
            raise ConfigError("Verify takes no topology: there are no pipeline stages")
        self.sch, self.inputs, self.targets, self.loss_fn = sch, example_inputs, example_outputs, loss_fn
        self.device, self.eval_mode, self.enable = device, eval_mode, enable
        self.init_weights, self.dtype = init_weights, dtype
        self.verdict: Verdict | None = None
        self.whole = self._ready_copy() if enable else nn.Identity()

    def __enter__(self) -> Verify:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None or not self.enable:
            return
        owner = self.sch.schedule
        if owner.applied is not None:
            way_out = "call it after the block, whose end compares with the whole model"
            raise ConfigError(f"build() was called inside of Verify: {way_out}")
        now = self._ready_copy()
        known = dict((*self.whole.named_parameters(), *self.whole.named_buffers()))
        with torch.no_grad():  # what was replaced has other weights; all others are those of the whole model
            for name, tensor in (*now.named_parameters(), *now.named_buffers()):
                if name in known and known[name].shape == tensor.shape:
                    tensor.copy_(known[name])
        lines = _without_empty_sums(self.sch)
        asked = (lines, owner.mesh, owner.seq_dim, self._batch())
        with torch.random.fork_rng():
            self.verdict = verify(now, *asked, dtype=self.dtype, loss=self._loss, whole=self.whole)
        if not self.verdict.ok:
            wrong = [row for row in self.verdict.rows if not row.error <= self.verdict.tolerance]
            split = {f"{d.on}.{d.args['tensor']}".lstrip(".") for d in lines if d.do == "shard"}
            advice = ""
            if all(row.kind == "gradient" and row.name not in split for row in wrong):
                path, _, last = wrong[0].name.rpartition(".")
                advice = (
                    "\nevery rank has these parameters whole; if it uses them on a share of the positions, their"
                    f" gradients are sums over the ranks: sch[{path!r}].annotate({last!r}, 'replicated_param', True)"
                )
            raise NumericsError(f"{self.verdict}{advice}")
        owner.directives = with_adjoints(lines, self.verdict.adjoints)
        # these inputs may be equal by chance: what build() would refuse is refused here, too
        decide(owner.model, lines, owner.mesh, owner.seq_dim)

    def _ready_copy(self) -> nn.Module:
        copied = copy.deepcopy(self.sch.mod)
        settle_weights(copied, self.init_weights, self.sch.group)
        if self.device is not None:
            copied.to(self.device)
        copied.train(copied.training and not self.eval_mode)
        copied.register_forward_pre_hook(lambda *_: torch.manual_seed(_SEED) and None)  # both drop the same numbers
        return copied

    def _batch(self) -> dict[str, Any]:
        inputs = self.inputs
        if not isinstance(inputs, dict):
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            parameters = inspect.signature(self.whole.forward).parameters.values()
            names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            if len(names) < len(values):
                raise ConfigError(
                    f"Verify has {len(values)} inputs, and {type(self.whole).__name__}.forward names"
                    f" {', '.join(names) or 'none'}: give a dict by name, or a model that names its inputs"
                )
            inputs = dict(zip(names, values, strict=False))
        batch = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                moved = value.detach().clone().to(value.device if self.device is None else self.device)
                batch[name] = broadcast(moved, self.sch.group).requires_grad_(value.requires_grad)
        return batch

    def _loss(self, result: Any) -> Tensor:
        if self.loss_fn is None:
            return default_loss(result)
        return self.loss_fn(result) if self.targets is None else self.loss_fn(result, self.targets)
