"""``torch.cuda`` for the fake device: streams, events, pinned memory, SDPA, and what reads a tensor's address.

``install(device)`` replaces functions of torch in this process for good: the process is for the fake device alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fake_gpu.allocator import EMPTIED, Entry
from fake_gpu.captures import Pool, Recording
from fake_gpu.clocks import HOST
from fake_gpu.device import CUDA, Device, is_on_device, place

MEMORY = 80 << 30
CAPABILITY = (9, 0)
NAME = "a fake device"


def install(device: Device) -> None:
    """Make ``torch.cuda`` that of the fake device."""

    class Event:
        """An event; times between events are 1 ms."""

        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self.number = device.new_event()

        def record(self, stream: Stream | None = None) -> None:
            device.passes()
            device.record(self.number, None if stream is None else stream.stream_id)

        def wait(self, stream: Stream | None = None) -> None:
            device.wait(self.number, None if stream is None else stream.stream_id)

        def synchronize(self) -> None:
            is_dropped = device.drops("event.synchronize")
            if device.is_beside:
                return
            device.require_no_capture("a wait of the host (event.synchronize)")
            device.tally.host_waits["event.synchronize", place(1)] += 1
            if not is_dropped:
                device.wait(self.number, HOST)

        def elapsed_time(self, other: Event) -> float:
            return 1.0

        def query(self) -> bool:
            device.require_no_capture("a question to an event")
            return True

    class Stream:
        """A stream; ``Stream()`` makes a new one, named after the place that made it."""

        def __init__(self, device_: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
            self.stream_id = device.new_stream(f"the stream of {place(1)}") if stream_id is None else stream_id
            self.device = CUDA

        def wait_event(self, event: Event) -> None:
            if not device.drops("wait_event"):
                event.wait(self)

        def wait_stream(self, other: Stream) -> None:
            if not device.drops("wait_stream"):
                event = Event()
                event.record(other)
                event.wait(self)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            if not device.drops("record_event"):
                event.record(self)
            return event

        def synchronize(self) -> None:
            device.passes()
            device.host_waits("stream.synchronize", self.stream_id)

        def query(self) -> bool:
            device.require_no_capture("a question to a stream")
            return True

    class CUDAGraph:
        """A captured graph."""

        def __init__(self) -> None:
            self._recording: Recording | None = None

        def register_generator_state(self, _generator: object) -> None:
            pass

        def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
            if capture_error_mode != "thread_local":
                raise RuntimeError(f"a capture that is {capture_error_mode} fails by what other threads do: NCCL's ask events at any time")
            device.capture_begins(pool)

        def capture_end(self) -> None:
            self._recording = device.capture_ends()

        def replay(self) -> None:
            assert self._recording is not None, "Called CUDAGraph::replay without a preceding successful capture."
            device.replay(self._recording)

    @contextlib.contextmanager
    def graph(cuda_graph: CUDAGraph, pool: Pool, stream: Stream, capture_error_mode: str = "global") -> Iterator[None]:
        synchronize()
        device.memory.history.append(Entry(EMPTIED, 0, stream.stream_id, where=""))
        with use(stream):
            cuda_graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            finally:
                cuda_graph.capture_end()

    def seeds(_: object = None) -> None:
        device.require_no_capture("a new seed of a generator")

    def state_of(_: object = None) -> Tensor:
        device.require_no_capture("a look at the state of a generator")
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(_state: Tensor, _device: object = None) -> None:
        device.require_no_capture("a new state of a generator")

    @contextlib.contextmanager
    def use(stream: Stream | None) -> Iterator[None]:
        before = device.stream
        if stream is not None:
            device.stream = stream.stream_id
        try:
            yield
        finally:
            device.stream = before

    def synchronize(*_: Any) -> None:
        device.passes()
        device.require_no_capture("a wait of the host (synchronize)")
        device.tally.host_waits["synchronize", place(1)] += 1
        device.follow_engine()
        device.clocks.host_waits_for_all()

    stand_ins: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "stream": use, "synchronize": synchronize,
        "current_stream": lambda _=None: Stream(stream_id=device.stream), "default_stream": lambda _=None: Stream(stream_id=0),
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 8, "current_device": lambda: 0,
        "set_device": lambda _: None, "get_device_capability": lambda _=None: CAPABILITY, "get_device_name": lambda _=None: NAME,
        "get_device_properties": lambda _=None: SimpleNamespace(name=NAME, uuid="fake"),
        "mem_get_info": lambda _=None: (MEMORY, MEMORY), "memory_allocated": lambda _=None: device.memory.num_bytes,
        "memory_reserved": lambda _=None: device.memory.num_bytes,
        "max_memory_reserved": lambda _=None: device.memory.peak,
        "max_memory_allocated": lambda _=None: device.memory.peak, "manual_seed": seeds, "manual_seed_all": seeds,
        "get_rng_state": state_of, "set_rng_state": set_state, "CUDAGraph": CUDAGraph, "graph": graph, "graph_pool_handle": Pool,
        "default_generators": [None] * 8,
        "is_bf16_supported": lambda *_: True, "empty_cache": lambda: None,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.nccl.version = lambda: (2, 29, 3)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes it on the host and copies it, seen by the mode
    torch.backends.cuda.is_flash_attention_available = lambda: True
    _install_threads(device)
    _install_addresses(device)
    _install_attention(device)


def _install_threads(device: Device) -> None:
    """A dispatch mode is that of one thread: loaders and writers of checkpoints have their own."""
    run = threading.Thread.run

    def run_on_device(thread: threading.Thread) -> None:
        device.enter_thread()
        with device:
            run(thread)

    threading.Thread.run = run_on_device  # type: ignore[method-assign]


def _install_addresses(device: Device) -> None:
    """Storages of the fake device have no memory: addresses are made of their identity, and resizing is noticed."""
    tensor_ptr, storage_ptr, resize = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr, torch.UntypedStorage.resize_

    def address(x: Tensor) -> int:
        if not isinstance(x, FakeTensor):
            return tensor_ptr(x)
        return int(x.untyped_storage()._cdata * 4096 + x.storage_offset() * x.element_size())

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if storage.device.type == "meta":
            device.resized(storage, num_bytes)
        return resize(storage, num_bytes)

    def to_list(x: FakeTensor) -> Any:
        device.follow_engine()
        device.use(device.stream, [x], [], "tolist")
        device.host_waits("tolist")
        return device.values(x).tolist()

    host_list = torch.Tensor.tolist

    def to_list_of_host(x: Tensor) -> Any:
        if device.is_pinned(x):
            device.use(HOST, [x], [], "tolist of the host")
        return host_list(x)

    torch.Tensor.tolist = to_list_of_host  # type: ignore[method-assign]
    torch.Tensor.data_ptr = address  # type: ignore[method-assign]
    torch.UntypedStorage.data_ptr = lambda s: s._cdata * 4096 if s.device.type == "meta" else storage_ptr(s)  # type: ignore[assignment,method-assign]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
    FakeTensor.tolist = to_list  # type: ignore[assignment]
    FakeTensor.is_cuda = property(is_on_device)  # type: ignore[assignment]


def _install_attention(device: Device) -> None:
    """SDPA as a GPU computes it: the first of its kernels that is switched on and takes the call.

    Facts from aten/src/ATen/native/transformers: cuda/sdp_utils.cpp and attention.cpp.
    """
    plain, backends, aten = F.scaled_dot_product_attention, torch.backends.cuda, torch.ops.aten
    low = (torch.bfloat16, torch.float16)

    def takes_flash(params: Any, debug: bool = False) -> bool:
        q = params.query
        return backends.flash_sdp_enabled() and q.dtype in low and params.attn_mask is None and q.shape[-1] <= 256

    def takes_efficient(q: Tensor, k: Tensor) -> bool:
        whole = q.shape[-1] % (8 if q.dtype in low else 4) == 0
        return backends.mem_efficient_sdp_enabled() and whole and q.dtype in (*low, torch.float32) and q.shape[1] == k.shape[1]

    def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float) -> Tensor:
        d = q.shape[-1]
        q, k, v = (F.pad(t, (0, -d % 8)) if d % 8 else t for t in (q, k, v))
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]
        return out[..., :d]

    def as_bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The mask that the memory-efficient kernel reads: numbers, rows 16 elements apart."""
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        if any(stride % 16 for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
        return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not is_on_device(q):
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        assert attn_mask is None or not is_causal, "Explicit attn_mask should not be set when is_causal=True"
        scale = scale or q.shape[-1] ** -0.5
        if takes_flash(backends.SDPAParams(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)) and (
            enable_gqa or q.shape[1] == k.shape[1]
        ):
            return flash(q, k, v, dropout_p, is_causal, scale)
        if takes_efficient(q, k):
            bias = None if attn_mask is None else as_bias(attn_mask, q, k)
            train = torch.is_grad_enabled() and q.requires_grad
            out: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, bias, train, dropout_p, is_causal, scale=scale)[0]
            return out
        if not backends.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    backends.can_use_flash_attention = takes_flash
    backends.can_use_cudnn_attention = lambda _params, _debug=False: False
