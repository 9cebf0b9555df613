"""A device that is not there: the program runs on it as on a GPU or a CPU, without contents, as any rank of any job.

Tensors are on torch's meta device: they have shapes, strides and storages that views share, and cost no memory. To
the program they say that they are on ``cuda:0`` or ``cpu:0``, so that it takes the branches of that device;
autograd's engine, which asks C++, sees the meta device, so that a CPU wheel will do. A dispatch mode sees every
operator, in backward passes too. It writes down what is allocated and freed, with the place in the package, counts
collectives, which do nothing, and answers what the host reads: with ones.

Everything that is replaced meanwhile (``torch.cuda``'s streams, the launcher of Triton's kernels, SDPA) is put back
at the end. The process group is torch's "fake" one, so the process must not have another.
"""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.nobody import Call, join_nobody, put
from megatron_sp.ops.kernels.launch import Launch
from megatron_sp.planner.timeline import Event, Moved, Product, cost_of, size_of, tensors_of
from megatron_sp.training import microbatches

Kind = Literal["cpu", "cuda"]
CAPABILITY = (9, 0)
"""Compute capability of the GPU."""
_META = torch.device("meta")
_PACKAGE = f"{Path(__file__).parents[1]}/"
# a place is where these are called
_HELPERS = (__file__, *(f"{_PACKAGE}{file}" for file in ("ops/allocator.py", "comm/collectives.py", "comm/nobody.py")))
_HOST_BYTES = 2**20  # the host's memory has contents up to this size
_FLASH_BACKWARD = ("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward")


class Operator(NamedTuple):
    # one of torch's operators, as far as the device has to know it
    name: str
    arguments: tuple[str, ...]
    writes: tuple[int, ...]  # arguments that it changes
    is_view: bool
    is_in_place: bool  # changes its first operand, returns it and leaves its shape
    makes_new: bool  # has new tensors as results, which share nothing with its operands


class FakeDevice(TorchDispatchMode):
    """A device of a kind, while it is entered.

    ``share`` is that of True among the elements of a mask whose places the program asks for (nonzero).
    """

    def __init__(self, kind: Kind, share: float = 1.0) -> None:
        super().__init__()
        self.kind, self.device, self.share = kind, torch.device(kind, 0), share
        self.phase = "forward"  # of the step
        self.places: dict[str, int] = {}  # files of the package that have allocated something, with the phase
        self.trace: list[tuple[int, int]] = []  # bytes that are allocated, or freed if negative, and the place
        self.live = self.launches = 0  # bytes on the device; operators and kernels
        self.host = Counter[int]()  # bytes in host memory that is copied from and to a GPU, by place
        self.calls: list[Call] = []  # collectives
        self.keeps_time = False
        self.events: list[Event] = []  # operators (if it keeps time), and beginnings and ends of collectives
        self.older_attention = False  # it is FlashAttention 2 that computes it
        self._seen: dict[int, tuple[int, int]] = {}  # bytes and place of storages
        self._on_host: set[int] = set()
        self._results: dict[Any, tuple[bool, list[Any]]] = {}
        self._inside = False  # an operator, of which some are torch's own Python
        self._kinds: dict[int, tuple[str, bool]] = {}  # of costs, by place

    # memory

    def _change(self, num_bytes: int, place: int) -> None:
        self.live += num_bytes
        self.trace.append((num_bytes, place))

    def _place(self) -> int:
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_PACKAGE) and name not in _HELPERS:
                return self._number(f"{name[len(_PACKAGE) :]}|{self.phase}")
            frame = frame.f_back
        return self._number(f"|{self.phase}")

    def _number(self, place: str) -> int:
        return self.places.setdefault(place, len(self.places))

    def restart(self, owners: Mapping[int, str]) -> Counter[str]:
        """Begin the trace anew; return the bytes of what is there, by owner (of storages by identity; else tables)."""
        self.trace.clear()
        found = Counter[str]()
        for key, (size, _) in self._seen.items():
            if key not in self._on_host and size:
                name = owners.get(key, "tables of the forward pass")
                self._seen[key] = size, self._number(f"={name}")
                found[name] += size
        return found

    def _note(self, tensor: Tensor, place: int, on_host: bool = False) -> None:
        # a new storage, on the device or in host memory that is for copies from and to it
        if self.kind == "cuda" and not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._seen[key] = size, place
        if on_host:
            self._on_host.add(key)
            self.host[place] += size
        else:
            self._change(size, place)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        size, place = self._seen.pop(key)
        if key in self._on_host:
            self._on_host.discard(key)
            self.host[place] -= size
        else:
            self._change(-size, place)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage's new size."""
        key = storage._cdata
        if key in self._seen:
            before, place = self._seen[key]
            self._seen[key] = storage.nbytes(), place
            self._change(storage.nbytes() - before, place)

    def _of_host(self, made: Tensor) -> Tensor:
        if made.untyped_storage()._cdata not in self._seen:
            self._note(made, self._place(), on_host=True)
        return made

    def where(self, tensor: Tensor) -> torch.device:
        """Return what a tensor says of its device."""
        here: torch.device = _DEVICE_OF(tensor)
        if here.type != "meta" or self._inside:
            return here
        is_of_host = self._on_host and tensor.untyped_storage()._cdata in self._on_host
        return torch.device("cpu") if is_of_host else self.device

    def is_here(self, device: str | torch.device) -> bool:
        """Return whether a device is this one."""
        device = torch.device(device)
        return device.type == self.kind and (device.index == 0 or self.kind == "cuda")

    # operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and to import the compiler takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self._inside = self._inside, True
        try:
            return self._run(func, args, kwargs or {})
        finally:
            self._inside = before

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        operator = _operator(func)
        name, tensors = operator.name, tensors_of((args, kwargs)) if kwargs else tensors_of(args)
        if kwargs:
            if (device := kwargs.get("device")) is not None:
                if self.is_here(device):
                    kwargs = {**kwargs, "device": _META}
                elif name == "_to_copy" and torch.device(device).type == "cpu" and args[0].is_meta:
                    return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if name == "empty" and self.kind == "cuda" and kwargs.get("device") != _META:
            dtype = kwargs.get("dtype") or torch.float32
            if torch.Size(args[0]).numel() * dtype.itemsize > _HOST_BYTES:
                return self._of_host(torch.empty(args[0], dtype=dtype, device=_META))
        copies = name in ("copy_", "_to_copy")
        if name in _STAND_INS:
            result = _STAND_INS[name](self, func, args, kwargs)
        elif operator.is_in_place and args[0].is_meta:
            result = args[0]  # nothing is allocated, and no shape changes
        elif func._overloadname == "dtype_out":
            result = kwargs["out"]  # torch 2.11 fails to check it without contents
        elif not any(x.is_meta for x in tensors):
            result = func(*args, **kwargs)
        else:
            if not copies and not all(x.is_meta for x in tensors):
                move = lambda x: x.to(_META) if isinstance(x, Tensor) and not x.is_meta else x
                args, kwargs = tree_map(move, (args, kwargs))
            is_new = operator.makes_new and tensors[0].is_meta
            result = self._remembered(func, args, kwargs, tensors) if is_new else func(*args, **kwargs)
        if self._on_host and not copies:
            given = tensors_of(args)
            if given and all(not x.is_meta or x.untyped_storage()._cdata in self._on_host for x in given):
                return tree_map(lambda x: self._of_host(x) if isinstance(x, Tensor) and x.is_meta else x, result)
        if not operator.is_view:
            self.launches += 1
            made, place = tensors_of(result), -1
            for x in made:
                if x.untyped_storage()._cdata not in self._seen:
                    place = self._place() if place < 0 else place
                    self._note(x, place)
            if self.keeps_time and any(x.is_meta for x in (made or tensors_of(args))):
                kind, is_weight = self._kind_of_cost(self._place() if place < 0 else place)
                cost = cost_of(*operator[:3], args, kwargs, result, self.older_attention, kind)
                if cost is not None:
                    self.events.append(Event(cost, is_weight=is_weight))
        if name in _FLASH_BACKWARD and self.kind == "cuda":
            # What the flash kernel's backward allocates beside its results: the query's gradient is summed in fp32;
            # keys and values that serve several queries have a gradient for each first
            # (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp :: mha_bwd: dq_accum, dk_expanded).
            query, key = args[1:3]
            expanded = 2 * query.numel() * query.element_size() if key.numel() < query.numel() else 0
            place = self._place()
            self._change(4 * query.numel() + expanded, place)
            self._change(-4 * query.numel() - expanded, place)
        return result

    def _kind_of_cost(self, place: int) -> tuple[str, bool]:
        # which rate of a CPU its operators have, and whether they are products for gradients of weights
        if place not in self._kinds:
            file = next(name for name, number in self.places.items() if number == place)
            is_update = file.startswith(("optim/optimizer", "ops/adamw"))
            kind = "activation" if file.startswith("ops/activation") else "update" if is_update else ""
            self._kinds[place] = kind, file.startswith("ops/main_grad")
        return self._kinds[place]

    def launch(self, launched: Launch) -> None:
        """Take note of one of our kernels."""
        self.launches += 1
        if not self.keeps_time:
            return
        if "grouped" in launched.name:  # gradients of experts' weights
            grad, x = launched.arguments[:2]
            product = Product(grad.shape[1], x.shape[1], grad.shape[0], 1, grad.element_size())
            self.events.append(Event(product, is_weight=True))
        else:
            self.events.append(Event(Moved(size_of([*launched.reads, *launched.writes]))))

    def _remembered(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        # new tensors like those of an earlier call: torch's Python takes long to work out their shapes
        key = func, _key(args), _key(kwargs) if kwargs else ()
        known = self._results.get(key)
        if known is None:
            result = func(*args, **kwargs)
            flat, given = tree_leaves(result), {x.untyped_storage()._cdata for x in tensors}
            own = all(isinstance(x, Tensor) and x.is_meta and x.untyped_storage()._cdata not in given for x in flat)
            if own and isinstance(result, Tensor | tuple):  # _unsafe_view is one that does not say that it is a view
                self._results[key] = isinstance(result, Tensor), [(x.shape, x.stride(), x.dtype) for x in flat]
            return result
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in known[1]]
        return made[0] if known[0] else tuple(made)

    def send(self, op: str, group: Any, x: Tensor, num_bytes: int) -> Callable[[], None]:
        """Count a collective of the device, or a message, with the bytes sent; return what to call at a wait for it."""
        if not x.is_meta:
            return lambda: None
        self.launches += 1
        self.calls.append(Call(op, group, num_bytes, self._place()))
        number = len(self.calls) - 1
        self.events.append(Event(None, number))
        return lambda: self.events.append(Event(None, number, is_wait=True))

    def compare(self, micro_batches: Any, groups: Any) -> None:
        """Stand for ``microbatches.require_same_sequences``, which reads what all ranks say."""
        if max(groups.cp.size(), groups.pp.size()) > 1:
            all_reduce(torch.empty(2 * groups.dp_size, dtype=torch.int64, device=_META), groups.world)


_RESHAPING = ("resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_")


@cache
def _operator(func: Any) -> Operator:
    schema = func._schema
    name, arguments = schema.name.removeprefix("aten::"), schema.arguments
    writes = tuple(i for i, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write)
    is_in_place = (
        func.namespace == "aten" and name.endswith("_") and name not in (*_RESHAPING, "swapaxes_", "swapdims_")
        and 0 in writes and [str(result.type) for result in schema.returns] == ["Tensor"]
    )  # fmt: skip
    makes_new = all(x.alias_info is None for x in (*arguments, *schema.returns))
    return Operator(name, tuple(arg.name for arg in arguments), writes, func.is_view, is_in_place, makes_new)


def _key(x: Any) -> Any:
    # arguments by what a result's shape follows from
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    if isinstance(x, list | tuple):
        return tuple(_key(entry) for entry in x)
    return tuple((name, _key(value)) for name, value in x.items()) if isinstance(x, dict) else (type(x), x)


# operators that need contents, or a device that is there; of tensors with contents they do what they always do


def _item(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not x.is_meta:
        return func(*args, **kwargs)
    return True if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1


def _copy(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    to, source = args[:2]
    if to.is_meta or not source.is_meta:
        return func(*args, **kwargs)
    return to.fill_(1) if to.nbytes <= _HOST_BYTES else to


def _nonzero(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not x.is_meta:
        return func(*args, **kwargs)
    return torch.empty(round(x.numel() * device.share), x.dim(), dtype=torch.int64, device=_META)


def _index(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    if not args[0].is_meta:
        return func(*args, **kwargs)
    places = []
    for at in args[1]:
        if isinstance(at, Tensor):
            at = at if at.is_meta else at.to(_META)
            if at.dtype == torch.bool:
                assert at.dim() == 1, "a mask of several dimensions"
                at = _nonzero(device, func, [at], {})[:, 0]
        places.append(at)
    return func(args[0], places, *args[2:], **kwargs)


def _rms_norm(device: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return torch.empty_like(x), torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=_META)


_STAND_INS: dict[str, Callable[[FakeDevice, Any, Any, Any], Any]] = {
    "_local_scalar_dense": _item, "copy_": _copy, "nonzero": _nonzero, "index": _index, "_fused_rms_norm": _rms_norm,
    # updates, which have no kernel without contents, and allocate nothing
    **dict.fromkeys(("_fused_adamw_", "_fused_sgd_", "record_stream"), lambda *_: None),
    "is_pinned": lambda *_: False, "_pin_memory": lambda device, func, args, kwargs: args[0],
}  # fmt: skip
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class _Stream:
    # a stream or an event: nothing takes time here

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id, self.device = 0, torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


@contextmanager
def fake_device(kind: Kind, world_size: int = 1, rank: int = 0, share: float = 1.0) -> Iterator[FakeDevice]:
    """Be a rank of a job on fake devices; ``share``: see ``FakeDevice``."""
    device = FakeDevice(kind, share)
    with ExitStack() as undo:
        _replace_all(device, undo)
        join_nobody(undo, world_size, rank, "nccl" if kind == "cuda" else "gloo", device.send)
        put(undo, microbatches, "require_same_sequences", device.compare)
        with device:
            yield device


def _replace_all(device: FakeDevice, undo: ExitStack) -> None:
    # replaces what a dispatch mode does not see
    from megatron_sp.ops import allocator, expert_mlp, gpu_kernels, tiled_attention
    from megatron_sp.ops.kernels import launch

    # what another run, or this one, has kept of its device
    for kept in (gpu_kernels.lengths_of, tiled_attention._whole_band, expert_mlp.runs_grouped):
        kept.cache_clear()
        undo.callback(kept.cache_clear)
    put(undo, torch.Tensor, "device", property(device.where))
    put(undo, torch.Tensor, "is_cuda", property(lambda x: device.where(x).type == "cuda"))
    plain_list, plain_to, plain_ptr = torch.Tensor.tolist, torch.Tensor.to, torch.Tensor.data_ptr
    plain_resize, plain_storage_ptr = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        plain_resize(storage, size)
        device.resized(storage)
        return storage

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # C++ does not know that it is there already
        args = tuple(_META if isinstance(arg, str | torch.device) and device.is_here(arg) else arg for arg in args)
        if (target := kwargs.get("device")) is not None and device.is_here(target):
            kwargs["device"] = _META
        return plain_to(x, *args, **kwargs)

    # an address, which tensors without contents have none of, is made of the storage's identity
    def data_ptr(x: Tensor) -> int:
        return x.untyped_storage()._cdata * 4096 + x.storage_offset() * x.element_size() if x.is_meta else plain_ptr(x)

    of_storage = lambda storage: storage._cdata * 4096 if storage.device.type == "meta" else plain_storage_ptr(storage)
    put(undo, torch.Tensor, "tolist", lambda x: plain_list(torch.ones(x.shape, dtype=x.dtype) if x.is_meta else x))
    put(undo, torch.Tensor, "to", to)
    put(undo, torch.Tensor, "data_ptr", data_ptr)
    put(undo, torch.UntypedStorage, "resize_", resize_)
    put(undo, torch.UntypedStorage, "data_ptr", of_storage)
    put(undo, allocator._arena, "_capacity", 0)
    put(undo, allocator._arena, "_range", None)
    torch._C._set_only_lift_cpu_tensors(True)
    undo.callback(torch._C._set_only_lift_cpu_tensors, False)
    if device.kind == "cuda":
        _replace_cuda(undo)
        try:
            importlib.import_module("triton")
        except ImportError:
            for name in ("triton", "triton.language"):
                sys.modules[name] = _Anything(name)
                undo.callback(sys.modules.pop, name)
        put(undo, launch, "launcher", device.launch)


def _replace_cuda(undo: ExitStack) -> None:
    # replaces ``torch.cuda`` and SDPA by those of a GPU
    stand_ins: dict[str, Any] = {
        "Stream": _Stream, "Event": _Stream, "current_stream": _Stream, "default_stream": _Stream,
        "stream": nullcontext, "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 8, "current_device": lambda: 0, "synchronize": lambda *_: None,
        "get_device_capability": lambda *_: CAPABILITY, "get_device_name": lambda *_: "a fake device",
        "get_device_properties": lambda *_: SimpleNamespace(name="a fake device", multi_processor_count=132),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda *_: None, "manual_seed": lambda *_: None, "empty_cache": lambda: None,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        put(undo, torch.cuda, name, stand_in)
    backends = torch.backends.cuda
    put(undo, backends, "is_flash_attention_available", lambda: True)
    put(undo, backends, "can_use_cudnn_attention", lambda *_: False)
    put(undo, backends, "can_use_flash_attention", lambda params, *_: _takes_flash(params.query, params.attn_mask))
    put(undo, F, "scaled_dot_product_attention", _attention_of_gpu)


def _takes_flash(q: Tensor, mask: Tensor | None) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and mask is None and q.shape[-1] <= 256


def _attention_of_gpu(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    # SDPA as a GPU does it (aten/src/ATen/native/transformers: cuda/sdp_utils.cpp and attention.cpp)
    aten, d = torch.ops.aten, q.shape[-1]
    scale = scale or d**-0.5
    if _takes_flash(q, attn_mask) and (enable_gqa or q.shape[1] == k.shape[1]):
        q, k, v = (F.pad(t, (0, -d % 8)) if d % 8 else t for t in (q, k, v))
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return out[..., :d]
    bias = attn_mask
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~attn_mask, -torch.inf)
        assert bias is not None
        if any(stride % 16 for stride in bias.stride()[:-1]):  # rows 16 elements apart
            bias = F.pad(bias, (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    train = torch.is_grad_enabled() and q.requires_grad
    out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, train, dropout_p, is_causal, scale=scale)[0]
    return out


class _Anything(types.ModuleType):
    # stands for Triton where it is not installed: kernels are declared, and never compiled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self
