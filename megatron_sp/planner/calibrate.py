"""Calibration for ``--gpu cpu-core``: the rates of this machine's processes, measured in a few seconds, all at once.

Each process has its share of the cores, as in ``training/setup.py``; with more processes than cores the rates are lower
accordingly. Matrix products and attention of the model's own shape, the activation and a norm, AdamW, and small and
large gloo collectives are measured. Every figure is the median of a few rounds, in which all are measured in turn.
Hiding communication gains nothing here: the same cores copy and compute.
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce, all_to_all_async, barrier
from megatron_sp.comm.groups import ParallelGroups, destroy_process_group, init_process_group
from megatron_sp.config.schema import Config
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.attention import AttentionMask, core_attention
from megatron_sp.ops.norm import NormSpec, norm
from megatron_sp.planner.hardware import CPU, Gpu, Link
from megatron_sp.planner.machine import Machine
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.host import host_memory_bytes, num_cores
from megatron_sp.utils.launch import Launch

ROUNDS = 5
_TOKENS = 1024  # tokens of a measured product
_SEQUENCE = 2048  # longest sequence of a measured attention
_LARGE, _SMALL = 4 * 2**20, 256  # bytes of a measured collective
_ELEMENTS = 2**21  # parameters of the measured update
_UNKNOWN_MEMORY = 2**40

Times = dict[str, float]  # seconds


def measure_machine(processes: int, base: Config, reserve_gib: float | None = None, rounds: int = ROUNDS) -> Machine:
    """Return this machine with ``processes`` processes, with measured rates.

    Raises:
        ConfigError: there are more than four processes per core.
    """
    cores = num_cores()
    if processes > 4 * cores:
        rule = f"must be at most four times the cores of this machine ({cores}) with --gpu {CPU}"
        raise ConfigError(f"--gpus ({processes}) {rule}")
    import torch.multiprocessing as mp

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, max(1, cores // processes), base, rounds, port, folder)
        mp.start_processes(_worker, arguments, nprocs=processes, start_method="fork")  # type: ignore[no-untyped-call]
        times = dict(json.loads((Path(folder) / "times.json").read_text()))
    memory = (host_memory_bytes() or _UNKNOWN_MEMORY) // processes
    gpu, link = rates(times, base, memory, processes)
    return Machine(gpu, processes, 1, link, None, 1, memory, reserve_gib)


def rates(times: Times, base: Config, memory: int, processes: int) -> tuple[Gpu, Link]:
    """Convert the measured times to rates of a process and a link."""
    shape = _Shape(base)
    matmul = shape.product_flops / times["products"] / 1e12
    large, small = times.get("collective", 0.0), times.get("small collective", 0.0)
    once = _LARGE * (processes - 1) / processes
    moved = once + 2 * once  # an all_to_all and an all_reduce
    gbs = moved / max(large - 2 * small, 0.1 * large) / 1e9 if large else 1.0
    forward = shape.attention_flops / times["attention forward"] / 1e12
    backward = 2.5 * shape.attention_flops / times["attention backward"] / 1e12
    activation, update = shape.activation_bytes / times["activation"], _ELEMENTS * 28 / times["update"]
    gpu = Gpu(
        CPU, memory, matmul, matmul, forward, backward, shape.norm_bytes / times["norm"] / 1e9, 0, "loopback",
        "measured now", narrow_heads=1.0, launch_us=5.0, host_ms=0.0, overlap_cost=1.0, sustained=1.0,
        activation_gbs=activation / 1e9, update_gbs=update / 1e9,
    )  # fmt: skip
    return gpu, Link("loopback", gbs, 1.0, 1e6 * small, 0.0, False, "measured now")


class _Shape:
    # shapes of the measured operations

    def __init__(self, base: Config) -> None:
        model = base.model
        assert model.hidden_size and model.num_attention_heads and model.seq_length
        self.model, self.h, self.f, self.d = model, model.hidden_size, model.ffn_size, model.head_dim
        self.s = min(model.seq_length, _SEQUENCE)
        self.heads = min(model.num_attention_heads, 4)
        self.tokens = min(model.seq_length, _TOKENS)
        self.product_flops = 6.0 * self.tokens * self.h * self.f
        self.attention_flops = 2.0 * self.s * self.s * self.heads * self.d
        self.norm_bytes = 6.0 * self.tokens * self.h * 4  # read and written; twice as much in backward
        self.activation_bytes = 8.0 * self.tokens * self.f * 4  # two forward passes, and backward


def _worker(rank: int, processes: int, threads: int, base: Config, rounds: int, port: int, folder: str) -> None:
    torch.set_num_threads(threads)  # first: after a fork
    launch, device = Launch(rank, rank, processes, processes, 0, ("127.0.0.1", port)), torch.device("cpu")
    init_process_group(launch, device, "gloo", timedelta(minutes=5))
    try:
        groups = ParallelGroups.create(device)
        operations = _operations(_Shape(base), groups)
        seconds: dict[str, list[float]] = {name: [] for name in operations}
        for index in range(rounds + 1):
            for name, operation in operations.items():
                barrier(groups.control)
                began = time.perf_counter()
                operation()
                spent = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
                if index > 0:  # the first is for warming up
                    seconds[name].append(float(all_reduce(spent, groups.control)) / processes)
        if rank == 0:
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            (Path(folder) / "times.json").write_text(json.dumps(medians))
    finally:
        destroy_process_group()


def _operations(shape: _Shape, groups: ParallelGroups) -> dict[str, Callable[[], object]]:
    x, w = torch.randn(shape.tokens, shape.h), torch.randn(shape.f, shape.h)
    y = torch.randn(shape.tokens, shape.f)
    qkv = torch.randn(shape.s, shape.heads, 3, shape.d, requires_grad=True)
    out: list[Tensor] = []
    weight, bias = torch.ones(shape.h, requires_grad=True), torch.zeros(shape.h, requires_grad=True)
    spec, source = NormSpec("LayerNorm", 1e-5), x.clone().requires_grad_()
    activation = Activation(shape.model.activation)
    u, grad = torch.randn(shape.tokens, shape.f * activation.width_factor), torch.randn(shape.tokens, shape.f)
    parameter = torch.nn.Parameter(torch.randn(_ELEMENTS))
    parameter.grad = torch.randn(_ELEMENTS)

    def products() -> None:
        torch.mm(x, w.t())
        torch.mm(y, w)
        torch.mm(y.t(), x)

    def attention() -> None:
        q, k, v = (qkv[:, :, i : i + 1] for i in range(3))
        out[:] = [core_attention(q, k, v, AttentionMask(), kernel="sdpa")]

    def normed() -> None:
        torch.autograd.grad(norm(source, weight, bias, spec), (source, weight, bias), x)

    def activated() -> None:
        activation.forward(u)
        activation.forward(u)
        activation.backward_(grad.clone(), u)

    operations: dict[str, Callable[[], object]] = {
        "products": products, "attention forward": attention,
        "attention backward": lambda: torch.autograd.grad(out[0], qkv, torch.ones_like(out[0])),
        "norm": normed, "activation": activated, "update": torch.optim.AdamW([parameter], fused=True).step,
    }  # fmt: skip
    world, size = groups.world, groups.world.size()

    def exchange(num_bytes: int) -> Callable[[], object]:
        count = max(1, num_bytes // 4 // size)
        send, receive = torch.zeros(count * size), torch.zeros(count * size)
        return lambda: all_to_all_async(send, [count] * size, receive, [count] * size, world).wait()

    if size > 1:
        large, whole = exchange(_LARGE), torch.zeros(_LARGE // 4)
        operations["collective"] = lambda: (large(), all_reduce(whole, world))
        operations["small collective"] = exchange(_SMALL)
    return operations
