"""Time of a step, by replaying what a rank did in it: operators, collectives, and where it waited for them."""

#     product      max(FLOPs / rate, bytes / memory rate) + a launch; the rate is lower if the last wave of tiles is not
#                  full or the inner dimension is short
#     attention    FLOPs of the pairs that the mask leaves, at the kernel's rate; lower for narrow heads and short
#                  sequences
#     the rest     bytes / memory rate
#
# Collectives of a link come one after another. One that is waited for before it has ended exposes what is left of it;
# the rest was hidden under what ran meanwhile, and slows that down by the share of its multiprocessors that NCCL takes.
# With --nccl-sp-ctas and --nccl-dp-ctas it takes no more than those, and moves no more than their share of what a link
# carries.
#
# Python runs ahead of a GPU, so a step takes as long as the slower of the two. Its time does not depend on the size of
# anything: ``host_ms`` for each layer of a micro-batch, as much again for embedding, head and update together, a third
# of it for a forward pass that is repeated, and ``_EXCHANGE`` of it for each of Ulysses' exchanges. Steps that can be
# captured (--cuda-graphs) are launched without Python.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megatron_sp.config.rules_kernels import obstacles
from megatron_sp.config.schema import Config
from megatron_sp.planner.hardware import Gpu
from megatron_sp.planner.machine import Machine

# tiles of a product's kernels, and the share of the rate that they reach
_TILES = ((128, 256, 1.0), (128, 128, 0.88), (64, 128, 0.7))
_SHORT_INNER = 96  # inner dimension at which half of the rate is lost to a tile's start and end
_SHORT_SEQUENCE = 256  # sequence at which attention loses half of its rate
_NARROW, _WIDE = 64, 128  # head widths
_ELEMENTWISE = 0.85  # of the rate of a copy that other kernels reach
_EXCHANGE = 0.043  # measured with 4, 8 and 16 exchanges in a layer: 0.26 ms each, where a layer without takes 6.0

Key = tuple[str, str, str, int]  # of a collective: what it is about, operation, group, ranks


class Product(NamedTuple):
    """So many products of [m, k] and [k, n]."""

    m: int
    n: int
    k: int
    number: int
    element: int

    def seconds(self, gpu: Gpu) -> float:
        flops, elements = 2.0 * self.m * self.n * self.k, self.m * self.k + self.k * self.n + self.m * self.n
        rate = gpu.matmul_tflops * 1e12 * _filled(gpu.units, self.m, self.n, self.number)
        rate *= self.k / (self.k + _SHORT_INNER) if gpu.units else 1.0
        return self.number * max(flops / rate, self.element * elements / (gpu.memory_gbs * 1e9)) + gpu.launch_us * 1e-6


class Scores(NamedTuple):
    """Attention of so many pairs of a query and a key, over all heads."""

    pairs: float
    width: int
    length: int
    is_backward: bool
    is_older: bool  # FlashAttention 2, or torch's own flash kernel with dropout

    def seconds(self, gpu: Gpu) -> float:
        rate = gpu.attention_backward_tflops if self.is_backward else gpu.attention_forward_tflops
        rate *= gpu.flash2_share if self.is_older else 1.0
        share = 1 - (1 - gpu.narrow_heads) * min(1.0, max(0.0, (_WIDE - self.width) / (_WIDE - _NARROW)))
        share *= self.length / (self.length + _SHORT_SEQUENCE) if gpu.units else 1.0
        flops = 4.0 * self.pairs * self.width * (2.5 if self.is_backward else 1)
        return flops / (rate * 1e12 * share) + gpu.launch_us * 1e-6


class Moved(NamedTuple):
    """Bytes that an elementwise kernel reads and writes."""

    num_bytes: int
    kind: str = ""  # activation or update, whose rates a CPU has measured

    def seconds(self, gpu: Gpu) -> float:
        measured = {"activation": gpu.activation_gbs, "update": gpu.update_gbs}.get(self.kind, 0.0)
        rate = measured or gpu.memory_gbs * _ELEMENTWISE
        return self.num_bytes / (rate * 1e9) + (gpu.launch_us * 1e-6 if gpu.units else 0.0)


Cost = Product | Scores | Moved


def _filled(units: int, m: int, n: int, count: int) -> float:
    # share of a device that a product's tiles keep busy, for the best of the usual tile sizes
    if not units:
        return 1.0
    best = 0.0
    for rows, columns, reached in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * count
        waves = tiles / units
        best = max(best, reached * waves / math.ceil(waves) * (m * n * count / (tiles * rows * columns)))
    return best


def tensors_of(x: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, far faster than torch's ``tree_leaves``."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, list | tuple):
        return []
    found: list[Tensor] = []
    for one in x:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple | dict):
            found += tensors_of(one)
    return found


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; what is repeated counts once."""
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)


def cost_of(
    name: str, arguments: Sequence[str], writes: Sequence[int], args: Any, kwargs: Any, result: Any, is_older: bool,
    kind: str,
) -> Cost | None:  # fmt: skip
    """Return the cost of an operator; None: it only makes room.

    ``arguments`` and ``writes`` are the names of its arguments and the numbers of those that it changes; ``is_older``
    and ``kind`` are those of ``Scores`` and ``Moved``.
    """
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = args[1:3] if "add" in name else args[:2]
        return Product(a.shape[-2], b.shape[-1], a.shape[-1], a.shape[0] if a.dim() == 3 else 1, a.element_size())
    if name == "_grouped_mm":
        a, b = args[:2]
        return Product(a.shape[0], b.shape[-1], a.shape[1], 1, a.element_size())
    if "query" in arguments and "attention" in name:
        return _scores(name, dict(zip(arguments, args, strict=False)) | kwargs, is_older)
    if name.startswith(("empty", "new_empty")) or name in ("detach", "_unsafe_view", "record_stream", "_pin_memory"):
        return None
    num_bytes = size_of(tensors_of((args, kwargs)))
    if name not in ("copy_", "_foreach_copy_", "zero_", "fill_"):  # of which what is there is not read
        num_bytes += size_of(tensors_of([args[i] for i in writes if i < len(args)] or result))
    return Moved(num_bytes, kind)


def _scores(name: str, given: dict[str, Any], is_older: bool) -> Scores:
    q, k = given["query"], given["key"]
    if name.startswith("_scaled_dot"):  # [b, n, s, d]
        queries, keys = q.shape[2], k.shape[2]
    else:  # [b, s, n, d], or rows of several sequences [t, n, d]
        queries, keys = q.shape[-3], k.shape[-3]
        if q.dim() == 3:
            queries, keys = (given.get(side) or length for side, length in (("max_q", queries), ("max_k", keys)))
    window = given.get("window_size_left")
    is_whole = window is None or window < 0
    seen = float(keys) if is_whole else min(float(window + 1), keys)  # type: ignore[operator]
    if given.get("is_causal"):
        corner = min(seen, queries)
        seen -= corner**2 / (2 * max(queries, 1)) * (1.0 if is_whole else seen / max(corner, 1))
    return Scores(q.numel() / q.shape[-1] * seen, q.shape[-1], queries, "backward" in name, is_older)


@dataclass(frozen=True)
class Flow:
    """Collectives of one kind in one step."""

    kind: str  # what the data are
    op: str
    group: str
    ranks: int
    number: int
    num_bytes: int  # sent by one rank, in rings
    can_hide: int = 0  # of these, bytes that are on their way while something is computed
    under: str = ""  # what that mostly is; "" if there is nothing


@dataclass(frozen=True)
class TrafficPlan:
    """All collectives of a step, for the rank that sends most."""

    flows: tuple[Flow, ...]

    @property
    def number(self) -> int:
        return sum(flow.number for flow in self.flows)

    @property
    def num_bytes(self) -> int:
        return sum(flow.num_bytes for flow in self.flows)

    @property
    def can_hide(self) -> int:
        return sum(flow.can_hide for flow in self.flows)

    def as_dict(self) -> dict[str, Any]:
        totals = {"number": self.number, "num_bytes": self.num_bytes, "can_hide": self.can_hide}
        return {**totals, "flows": [asdict(flow) for flow in self.flows]}


class Exchange(NamedTuple):
    """One kind of communication of a step: its link, time without overlap, and the part hidden under computation."""

    flow: Flow
    link: str
    seconds: float
    hidden: float

    @property
    def exposed(self) -> float:
        # time that is not hidden under computation
        return self.seconds - self.hidden


@dataclass(frozen=True)
class StepTime:
    """Time of one step on one rank in seconds, by cause."""

    products: float  # like attention and memory, with recomputation
    attention: float
    memory: float
    recompute: float  # of these three
    update: float  # gradient norm and optimizer
    python: float  # that launches all of it
    overlap: float  # slowdown of computation by communication that it hides
    copies: float  # of activations to host memory and back, exposed
    exchanges: tuple[Exchange, ...]
    bubble: float = 0.0  # for which a pipeline's busiest rank waits

    @property
    def exposed(self) -> float:
        # time of all exchanges that is not hidden
        return sum(exchange.exposed for exchange in self.exchanges)

    @property
    def _of_gpu(self) -> float:
        computed = self.products + self.attention + self.memory + self.update
        return computed + self.overlap + self.copies + self.exposed

    @property
    def host(self) -> float:
        # time that the GPU waits for Python
        return max(0.0, self.python - self._of_gpu)

    @property
    def seconds(self) -> float:
        return self._of_gpu + self.host + self.bubble

    @property
    def bound(self) -> str:
        # text with the cause that takes most of the time
        parts = {
            "matrix products": self.products, "attention": self.attention,
            "memory bandwidth": self.memory + self.update, "Python and launches": self.host,
            "copies to host memory": self.copies, "communication": self.exposed + self.overlap,
            "bubble of the pipeline": self.bubble,
        }  # fmt: skip
        cause = name = max(parts, key=lambda part: parts[part])
        if cause == "communication":
            worst = max(self.exchanges, key=lambda exchange: exchange.exposed)
            name = f"{worst.link}: {worst.flow.kind}"
        return f"{name} {parts[cause]:.3g} s"


class Event(NamedTuple):
    """One step of a rank: an operator with its cost, or the start of a collective or the wait for it, by its number."""

    cost: Cost | None
    call: int = -1
    is_wait: bool = False
    is_weight: bool = False  # a product for the gradient of a weight


_SOME_GPU = Gpu("", 0, 1.0, 1.0, 1.0, 1.0, 1.0, 0, "", "")
# what an operator's time is part of, and what a collective is hidden under while it runs
_CAUSES: dict[type, tuple[str, str]] = {
    Product: ("products", "products"), Scores: ("attention", "attention"), Moved: ("memory", "other kernels"),
}  # fmt: skip


class Replay:
    """The clock of a rank on a machine (None: one without times, of which it is known what can hide)."""

    def __init__(self, config: Config, machine: Machine | None) -> None:
        self._config, self._machine = config, machine
        self._tp = config.parallel.tensor_model_parallel_size
        self._sp = config.parallel.sequence_parallel_size
        self._now = 0.0
        self._free = dict[bool, float]()  # when the links inside a node and between nodes are free again
        self._computed = dict.fromkeys(("products", "attention", "other kernels"), 0.0)
        self._under_way = dict[int, tuple[float, dict[str, float]]]()  # end, computed before

    def start(self, pending: Iterable[int], calls: dict[int, tuple[Key, int]]) -> None:
        """Begin a step with collectives of the one before under way."""
        for call in pending:
            self._send(call, *calls[call])

    def _send(self, call: int, key: Key, num_bytes: int) -> float:
        (_, op, group, ranks), machine, taken, crosses = key, self._machine, 0.0, False
        if machine is not None:
            crosses = machine.crosses(group, ranks, self._tp, self._sp)
            taken = machine.seconds(op, group, ranks, self._tp, 1, num_bytes, self._sp)
            share = share_of_units(self._config, machine, group)
            if share < 1:
                taken = max(taken, num_bytes / (share * machine.inside.gbs * 1e9))
        end = max(self._now, self._free.get(crosses, 0.0)) + taken
        self._free[crosses] = end
        self._under_way[call] = (end, dict(self._computed))
        return taken

    def of(self, events: Sequence[Event], calls: dict[int, tuple[Key, int]], is_update: bool) -> Counter[Any]:
        """Go on by a stretch of a step; return what adds up over stretches.

        Seconds by cause, by ("time", key) and ("exposed", key); bytes that can hide, by ("hides", key, under what);
        number and bytes of collectives, by ("calls", key) and ("sent", key).
        """
        totals: Any = Counter()
        gpu = self._machine.gpu if self._machine is not None else _SOME_GPU
        for cost, call, is_wait, is_weight in events:
            if cost is not None:
                seconds = cost.seconds(gpu) / (1.0 if is_update else gpu.sustained)
                cause, under = _CAUSES[type(cost)]
                totals["update" if is_update else cause] += seconds
                totals["weights"] += seconds if is_weight else 0.0
                self._now += seconds
                self._computed[under] += seconds
                continue
            key, num_bytes = calls[call]
            if not is_wait:
                totals["calls", key] += 1
                totals["sent", key] += num_bytes
                totals["time", key] += self._send(call, key, num_bytes)
            elif call in self._under_way:
                end, before = self._under_way.pop(call)
                meanwhile = {name: seconds - before[name] for name, seconds in self._computed.items()}
                if any(meanwhile.values()):
                    totals["hides", key, max(meanwhile, key=lambda name: meanwhile[name])] += num_bytes
                totals["exposed", key] += max(0.0, end - self._now)
                self._now = max(self._now, end)
        return totals


def share_of_units(config: Config, machine: Machine, group: str) -> float:
    # multiprocessors that a collective takes, of those that NCCL takes by itself, as a share
    gpu, parallel = machine.gpu, config.parallel
    most = parallel.nccl_sp_ctas if group in ("sp", "cp") else parallel.nccl_dp_ctas if group.startswith("dp") else None
    return 1.0 if most is None or not gpu.units else min(1.0, most / (gpu.overlap_cost * gpu.units))


def flows_of(totals: Counter[Any]) -> tuple[Flow, ...]:
    """Return collectives by kind, the largest first, of sums of what ``Replay.of`` returns."""
    flows = []
    keys: list[Key] = [entry[1] for entry in totals if entry[0] == "calls"]
    for key in keys:
        number, num_bytes = totals["calls", key], totals["sent", key]
        hides = {entry[2]: amount for entry, amount in totals.items() if entry[0] == "hides" and entry[1] == key}
        under, can_hide = max(hides, key=lambda name: hides[name]) if hides else "", min(num_bytes, sum(hides.values()))
        flows.append(Flow(*key, round(number), round(num_bytes), round(can_hide), under))
    return tuple(sorted(flows, key=lambda flow: -flow.num_bytes))


def assemble(
    config: Config, machine: Machine, totals: Counter[Any], *, layers: int, count: int, again: float,
    host_bytes: float, forward: float, backward: float, recomputed: float, bubble: float = 0.0,
) -> StepTime:  # fmt: skip
    """Return the time of a step, given ``totals`` (see ``flows_of``) of a rank with so many layers and micro-batches.

    ``again`` is the share of the layers' forward passes that are repeated, ``host_bytes`` what a micro-batch copies to
    the host and back, ``forward`` and ``backward`` are seconds of computation of all micro-batches.
    """
    gpu, parallel = machine.gpu, config.parallel
    tp, sp = parallel.tensor_model_parallel_size, parallel.sequence_parallel_size
    exchanges, slowed, of_sp = [], 0.0, 0.0
    for flow in flows_of(totals):
        key = (flow.kind, flow.op, flow.group, flow.ranks)
        seconds = totals["time", key]
        link, hidden = machine.link_of(flow.group, flow.ranks, tp, sp).name, max(0.0, seconds - totals["exposed", key])
        exchanges.append(Exchange(flow, link, seconds, hidden))
        slowed += hidden * gpu.overlap_cost * share_of_units(config, machine, flow.group)
        of_sp += flow.number if flow.group == "sp" and flow.op == "all_to_all" else 0
    python = 0.0
    if config.kernels.cuda_graphs == "off" or obstacles(config):
        of_sp /= max(1, layers) * count  # Ulysses' exchanges of a layer and micro-batch
        python = 1e-3 * gpu.host_ms * count * (layers * (1 + again / 3 + _EXCHANGE * of_sp) + 1)
    copied = host_bytes / (gpu.host_gbs * 1e9) * count
    copies = max(0.0, copied - forward) + max(0.0, copied - backward)
    return StepTime(
        totals["products"], totals["attention"], totals["memory"], recomputed, totals["update"], python, slowed, copies,
        tuple(exchanges), bubble,
    )  # fmt: skip
