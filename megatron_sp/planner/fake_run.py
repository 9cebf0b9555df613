"""Predict by running: memory, traffic and launches of a step, from the program itself on a device that is not there.

A rank takes two steps on tensors without contents (``planner/fake_device.py``), and the second one counts. So what
the program allocates and sends is described in one place, by the program; of measured steps on a CPU this is the very
number of bytes (``tests/dist/test_fake_run.py``).

Deep models are run with a few layers, once more with one more layer of each kind, and continued from there: at each
point of a step memory is linear in the number of layers. So it is for micro-batches: of many the second one stands
for all between the first and the last. The points are those where a pass begins and where it comes to a unit; they
are counted from the nearer end of their pass, since layers are added in the middle.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.nobody import put
from megatron_sp.config.schema import Config
from megatron_sp.estimate.layout import context_plan, enough_micro_batches, layer_costs, layers_of_stages, pipeline_plan
from megatron_sp.estimate.memory_plan import Line, MemoryPlan, Moment, Phase
from megatron_sp.estimate.suggestions import with_saves
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.ops import attention as attention_ops
from megatron_sp.ops.attention_choice import AttentionKernel, choose_kernel, known_lack
from megatron_sp.ops.fused_kernels import ELEMENTWISE, FusedKernel, FusedKernels
from megatron_sp.ops.kernels import launch
from megatron_sp.parallel.expert_exchange import Counts
from megatron_sp.parallel.pipeline_plan import Action, replay
from megatron_sp.planner.expert_rows import RoutedRows, even_rows
from megatron_sp.planner.fake_device import FakeDevice, Kind, fake_device
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.timeline import Key, Replay, StepTime, TrafficPlan, assemble, flows_of
from megatron_sp.tasks.bert import bert_task
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training import kernel_selection, run
from megatron_sp.training.kernel_selection import AttentionChoice, use_of
from megatron_sp.training.pipelined import Pipeline
from megatron_sp.training.setup import layout_groups
from megatron_sp.training.step import TrainStep

Layers = tuple[bool, ...]  # of a stage: which of them have experts
_FEW = 4  # layers of a stage that are run where there are more
_HALF = 2  # of these, those before the middle, where layers are added
_PASSES = 3  # micro-batches, without a pipeline
_SECOND = (4, 5)  # numbers of the passes of the second one: the first is before any pass
_OF_LAYERS = ("tp", "sp", "cp", "ep", "pp", "sequence")  # groups over which layers and stages send

# what a tensor is part of, by the beginning of the file that has allocated it; the first that fits counts
_PARTS = (
    ("gradients", ("optim/flat.py", "optim/gradients.py", "ops/main_grad")),
    ("buffers for whole parameters", ("optim/weights.py",)),
    ("update", ("optim/",)),
    ("experts", ("models/experts.py", "parallel/expert", "ops/expert", "ops/routing", "ops/kernels/grouped")),
    ("MLP", ("parallel/chunked_mlp", "ops/activation", "ops/kernels/activations")),
    ("head and loss", ("parallel/lm_head", "ops/kernels/cross")),
    ("norms", ("ops/norm", "ops/kernels/norms")),
    ("attention", (
        "parallel/ulysses", "parallel/attention", "parallel/context", "parallel/split_projection", "parallel/heads",
        "parallel/row_", "ops/attention", "ops/lse", "ops/gpu", "ops/partial", "ops/tile", "ops/flash", "ops/rotary",
        "ops/kernels/rotary",
    )),
    ("residual stream", ("ops/dropout", "ops/kernels/dropout", "models/")),
    ("messages between stages", ("parallel/pipeline",)),
    ("products", ("parallel/linear", "parallel/tensor")),
)  # fmt: skip
_WHOLE = ("gradients", "buffers for whole parameters", "messages between stages")
# what a collective is about, by the beginning of its place
_KINDS = (
    ("gradients", "optim/gradients.py"), ("parameters", "optim/weights.py"), ("gradient norm", "optim/optimizer.py"),
    ("losses and counts", "training/"), ("keys and values", "parallel/context"), ("rows of experts", "parallel/expert"),
    ("loads of experts", "parallel/router"), ("maxima and sums of the loss", "parallel/lm_head"),
    ("activations of stages", "parallel/pipeline"), ("activations", ("parallel/", "ops/")),
    ("comparison of sequences", "planner/"),
)  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """A stretch of a step, from one unit of the model to the next."""

    of_pass: int  # number of the pass that it is part of
    phase: Phase
    place: int  # unit of the model that it begins with; -1: none
    peak: float  # bytes on the device at most
    lines: Counter[str]  # of which, by name
    calls: Counter[Key]  # number of collectives
    sent: Counter[Key]  # their bytes
    launches: float  # on the device
    spent: Counter[Any]  # seconds by cause (``timeline.py :: Replay.of``)


@dataclass(frozen=True)
class RankRun:
    """The second step of a rank."""

    resident: Counter[str]  # bytes that it holds when the step begins, by name
    segments: list[Segment]
    host: float  # bytes of host memory for copies of activations
    optimizer_host: float  # and of the optimizer

    @property
    def peak(self) -> float:
        """Bytes at most."""
        return max(segment.peak for segment in self.segments)

    def peak_of(self, phase: str) -> float:
        """Return the bytes at most within a phase."""
        return max((segment.peak for segment in self.segments if segment.phase == phase), default=0)

    def spent(self, phase: str = "") -> Counter[Any]:
        """Return seconds by cause, of a phase or of all of the step."""
        found = Counter[Any]()
        for segment in self.segments:
            if phase in ("", segment.phase):
                found.update(segment.spent)
        return found

    def sent(self) -> dict[Key, tuple[float, float]]:
        """Return number and bytes of collectives, by (kind, op, group, ranks)."""
        calls, sent = Counter[Any](), Counter[Any]()
        for segment in self.segments:
            calls.update(segment.calls)
            sent.update(segment.sent)
        return {key: (calls[key], sent[key]) for key in calls}


@dataclass(frozen=True)
class Prediction:
    """Prediction of a step."""

    memory: MemoryPlan  # of the rank that holds most
    traffic: TrafficPlan  # of the rank that sends most
    launches: int  # of the first rank, on the device
    time: StepTime | None  # of the rank that computes longest; None: no machine was given


def predict(config: Config, world_size: int, kind: Kind, machine: Machine | None = None) -> Prediction:
    """Predict a step of a validated configuration, with its vocabulary size, from runs of the ranks that matter."""
    deep = _Deep(config, world_size, kind, machine)
    runs = [deep.run(rank) for rank in ranks_to_run(config, world_size)]
    fullest = max(runs, key=lambda run: run.peak)
    busiest = max(runs, key=lambda run: sum(num_bytes for _, num_bytes in run.sent().values()))
    traffic = TrafficPlan(flows_of(busiest.sent(), busiest.spent()))
    launches = round(sum(segment.launches for segment in runs[0].segments))
    return Prediction(_memory_plan(fullest), traffic, launches, None if machine is None else deep.time(runs, machine))


def step_time(config: Config, machine: Machine) -> StepTime:
    """Return the time of a step of a validated configuration on a machine."""
    found = predict(config, machine.gpus, "cpu" if machine.is_cpu else "cuda", machine).time
    assert found is not None
    return found


def ranks_to_run(config: Config, world_size: int) -> list[int]:
    """Return the ranks of which one holds most, and one sends most, of the pipeline ranks and of the cp ranks.

    In every schedule a rank of a pipeline has as many passes between F and B as the next one, or more; so of those
    between the ends only the first of each number of layers is run. Of the cp ranks those run that have most positions
    and pairs, receive and send most rows.
    """
    parallel, model = config.parallel, config.model
    pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    each = parallel.tensor_model_parallel_size * parallel.sequence_parallel_size
    of_cp = list(range(cp))
    if cp > 1:
        plan = context_plan(model, parallel)
        received, sent = ([sum(rows(rank, 1)) for rank in of_cp] for rows in (plan.rows_received, plan.rows_sent))
        most = (plan.lengths, received, sent, [plan.area(rank) for rank in of_cp])
        of_cp = sorted({max(of_cp, key=lambda rank: (numbers[rank], plan.lengths[rank])) for numbers in most})
    of_pp = [0]
    if pp > 1:
        layers = layers_of_stages(model, parallel)
        shape = lambda rank: tuple(layers[stage] for stage in range(rank, len(layers), pp))
        inner = {shape(rank): rank for rank in range(pp - 2, 0, -1)}
        of_pp = sorted({0, *inner.values(), pp - 1})
    return [rank * (world_size // pp) + place * each for rank in of_pp for place in of_cp]


class _Deep:
    """Runs of a configuration with many layers and micro-batches, by runs with few."""

    def __init__(self, config: Config, world_size: int, kind: Kind, machine: Machine | None) -> None:
        self.config, self.world_size, self.kind, self.machine = config, world_size, kind, machine
        model, parallel, kernels = config.model, config.parallel, config.kernels
        assert model.num_layers
        which = model.expert_layers(model.num_layers)
        self.group = (kernels.recompute_num_layers or 1) if kernels.recompute_granularity == "full" else 1
        self.pp = parallel.pipeline_model_parallel_size
        of_stages = layers_of_stages(model, parallel) if self.pp > 1 else (model.num_layers,)
        starts = [sum(of_stages[:stage]) for stage in range(len(of_stages))]
        layers = [range(start, start + count) for start, count in zip(starts, of_stages, strict=True)]
        self.stages = [tuple(layer in which for layer in stage) for stage in layers]
        dp = parallel.dp_size(world_size)
        self.count = max(1, (config.batch.global_batch_size or 0) // (config.batch.micro_batch_size * dp))

    def run(self, rank: int) -> RankRun:
        """Return the step of a rank."""
        few = [self._few(stage) for stage in self.stages]
        base = self._run(rank, few)
        found = base
        for kind in (False, True):
            missing = [real.count(kind) - least.count(kind) for real, least in zip(self.stages, few, strict=True)]
            if not any(missing):
                continue
            added = [[kind] * self.group if more else [] for more in missing]
            grown = self._run(
                rank, [(*least[:_HALF], *more, *least[_HALF:]) for least, more in zip(few, added, strict=True)]
            )
            found = _continued(found, base, grown, max(missing) / self.group)
        return found

    def time(self, runs: Sequence[RankRun], machine: Machine) -> StepTime:
        """Return the time of a step by the rank that computes longest, and that it waits for others in a pipeline."""
        computed = lambda spent: sum(spent[name] for name in ("products", "attention", "memory"))
        run = max(runs, key=lambda run: computed(run.spent()))
        spent, forward, backward = run.spent(), computed(run.spent("forward")), computed(run.spent("backward"))
        layers = max(sum(len(stage) for stage in self.stages[rank :: self.pp]) for rank in range(self.pp))
        plan = recompute_plan(self.config.kernels, layers)
        again = sum(last - first for first, last, is_again in plan if is_again) / layers
        of_selective = self.config.kernels.recompute_granularity == "selective"
        recomputed = run.spent("forward")["attention"] if of_selective else again * forward
        bubble = 0.0
        if self.pp > 1:
            weights, of_last = run.spent("backward")["weights"], computed(runs[-1].spent())
            bubble = self._bubble(machine, forward, backward, weights, layers, of_last)
        return assemble(
            self.config, machine, spent, flows_of(run.sent(), spent), layers=layers, count=self.count, again=again,
            host_bytes=run.host, forward=forward, backward=backward, recomputed=recomputed, bubble=bubble,
        )  # fmt: skip

    def _bubble(
        self, machine: Machine, forward: float, backward: float, weights: float, layers: int, of_last: float
    ) -> float:
        """Return the seconds that the busiest rank of a pipeline waits, from those of all passes of its layers."""
        parallel, model, batch = self.config.parallel, self.config.model, self.config.batch
        plan = pipeline_plan(model, self.config.kernels, parallel, enough_micro_batches(parallel, self.count))
        of_stages, each = layers_of_stages(model, parallel), 1 / (plan.num_slices * self.count * layers)
        passes = {"F": forward * each, "B": (backward - weights) * each, "W": weights * each}
        tp, shared = (
            parallel.tensor_model_parallel_size,
            parallel.sequence_parallel_size * parallel.context_parallel_size,
        )
        element = {"float64": 8, "float32": 4}.get(self.config.precision.params_dtype, 2)
        elements: float = batch.micro_batch_size * (model.seq_length or 0) * (model.hidden_size or 0)
        elements /= shared * (tp if parallel.sequence_parallel else 1) * plan.num_slices
        message = machine.seconds("send", "pp", self.pp, tp, 1, elements * element)
        last = sum(of_stages[stage] for stage in plan.stages_of(self.pp - 1))
        head = max(0.0, of_last / (self.count * plan.num_slices) - sum(passes.values()) * last)
        one_stage = parallel.stages_per_pipeline_rank == 1

        def seconds(action: Action) -> float:
            with_head = one_stage and action.kind == "B" and action.stage == plan.num_stages - 1
            return of_stages[action.stage] * passes[action.kind] + head * with_head

        played = replay(plan, seconds, lambda action: message)
        return max(0.0, played.time - max(played.busy))

    def _few(self, stage: Layers) -> Layers:
        """Return the layers of a stage that are run: those at its ends, and of each kind one."""
        most = max(_FEW, 3 * self.group + len(stage) % self.group)
        if len(stage) <= most + self.group or self.config.kernels.recompute_method == "block":
            return stage
        return (*stage[:_HALF], *stage[len(stage) - (most - _HALF) :])

    def _run(self, rank: int, stages: Sequence[Layers]) -> RankRun:
        config = self.config
        enough = _PASSES if self.pp == 1 else 2 * self.pp * config.parallel.stages_per_pipeline_rank + 1
        few = min(self.count, enough)
        if few < self.count:
            config = copy.copy(config)
            config.batch = copy.copy(config.batch)
            ranks = config.parallel.dp_size(self.world_size)
            config.batch.global_batch_size = few * config.batch.micro_batch_size * ranks
        made = run_rank(config, self.world_size, self.kind, rank, stages=stages, machine=self.machine)
        return made if few == self.count else _repeated(made, few, self.count, self.pp)


def _continued(found: RankRun, base: RankRun, grown: RankRun, times: float) -> RankRun:
    """Return ``found`` with as many more layers as ``grown`` has beside those of ``base``, so many times."""

    def line(a: float, b: float, c: float) -> float:
        return a + times * (c - b)

    def sums(a: Counter[Any], b: Counter[Any], c: Counter[Any]) -> Counter[Any]:
        keys = dict.fromkeys((*a, *b, *c))  # in this order, which a set would not have
        return Counter({key: a[key] + times * (c[key] - b[key]) for key in keys})

    segments = []
    for a, b, c in zip(found.segments, base.segments, _aligned(base.segments, grown.segments), strict=True):
        calls, sent, spent = Counter[Any](), Counter[Any](), Counter[Any]()
        for one in c:
            calls.update(one.calls)
            sent.update(one.sent)
            spent.update(one.spent)
        segments.append(replace(
            a, peak=line(a.peak, b.peak, c[0].peak), lines=sums(a.lines, b.lines, c[0].lines),
            calls=sums(a.calls, b.calls, calls), sent=sums(a.sent, b.sent, sent), spent=sums(a.spent, b.spent, spent),
            launches=line(a.launches, b.launches, sum(one.launches for one in c)),
        ))  # fmt: skip
    host = line(found.host, base.host, grown.host)
    of_optimizer = line(found.optimizer_host, base.optimizer_host, grown.optimizer_host)
    return RankRun(sums(found.resident, base.resident, grown.resident), segments, host, of_optimizer)


def _aligned(base: list[Segment], grown: list[Segment]) -> list[list[Segment]]:
    """Return for each segment of a run that of a run with more layers, and behind it those that are there besides."""
    passes: dict[int, tuple[list[Segment], list[Segment]]] = {one.of_pass: ([], []) for one in base}
    for index, segments in enumerate((base, grown)):
        for one in segments:
            passes[one.of_pass][index].append(one)
    found = list[list[Segment]]()
    for fewer, more in passes.values():
        middle, added = (len(fewer) + 1) // 2, len(more) - len(fewer)
        assert added >= 0, "a run with more layers has no fewer segments"
        found += [[one] for one in more[:middle]]
        found[-1] += more[middle : middle + added]
        found += [[one] for one in more[middle + added :]]
    return found


def _repeated(run: RankRun, few: int, count: int, pp: int) -> RankRun:
    """Return a run of so many micro-batches, given one of a few: those between the first and the last are alike.

    In a pipeline, whose passes are in many orders, what is sent within layers and between stages grows with the
    micro-batches.
    """
    data = Counter({"micro-batches": run.resident["micro-batches"] * (count / few - 1)})
    segments = []
    for segment in run.segments:
        times: float = 1 + (count - few) * (segment.of_pass in _SECOND)
        if pp > 1:
            times = count / few if segment.phase != "update" else 1
        of_others = times if pp == 1 else 1
        calls, sent = (
            Counter({key: n * (times if key[2] in _OF_LAYERS else of_others) for key, n in counter.items()})
            for counter in (segment.calls, segment.sent)
        )
        spent = Counter({key: seconds * times for key, seconds in segment.spent.items()})
        peak, launches = segment.peak + data.total(), segment.launches * times
        lines = segment.lines + data
        segments.append(
            replace(segment, peak=peak, lines=lines, calls=calls, sent=sent, launches=launches, spent=spent)
        )
    return RankRun(run.resident + data, segments, run.host, run.optimizer_host)


def _memory_plan(run: RankRun) -> MemoryPlan:
    stays = tuple(Line(name, round(size)) for name, size in run.resident.items())
    moments = []
    for phase in ("forward", "backward", "update"):
        if of_phase := [segment for segment in run.segments if segment.phase == phase]:
            worst = max(of_phase, key=lambda segment: segment.peak)
            more = {name: size - run.resident[name] for name, size in worst.lines.items()}
            lines = [Line(name, round(size)) for name, size in more.items() if size > 0]
            lines.append(Line("rest", round(worst.peak) - sum(line.num_bytes for line in (*stays, *lines))))
            last = max(one.place for one in of_phase)
            places = {-1: "its beginning", 0: "embedding", 1: "first layer", last: "head", last - 1: "last layer"}
            name = "optimizer" if phase == "update" else places.get(worst.place, "in the middle")
            moments.append(Moment(cast("Any", phase), name, tuple(line for line in lines if line.num_bytes > 0)))
    return MemoryPlan(stays, tuple(moments), round(run.host), round(run.optimizer_host))


def _set_layers(config: Config, stages: Sequence[Layers]) -> None:
    layers = [has for stage in stages for has in stage]
    config.model = copy.copy(config.model)
    config.model.num_layers = len(layers)
    if config.model.has_experts:
        config.model.moe_layer_freq = f"[{','.join(str(int(has)) for has in layers)}]"


def run_rank(
    config: Config, world_size: int, kind: Kind, rank: int = 0, *, stages: Sequence[Layers] | None = None,
    routed: RoutedRows | None = None, machine: Machine | None = None,
) -> RankRun:  # fmt: skip
    """Take two steps as a rank of a job; there must be no process group yet.

    Args:
        config: validated, with the vocabulary size.
        world_size: processes of the job.
        kind: of its devices.
        rank: of the job.
        stages: layers of each stage; None: those of the configuration.
        routed: rows of experts (default: even ones).
        machine: whose clock runs.
    """
    config = copy.deepcopy(config)
    config.logging.report_overlap, config.parallel.check_collectives = None, False
    if config.parallel.overlap_mode == "auto":
        config.parallel.sp_overlap_mode, config.parallel.sp_overlap_comm = "none", False
    if stages is not None:
        _set_layers(config, stages)
    share = config.data.mask_prob if config.model.is_bert else 1.0
    with ExitStack() as undo:
        device = undo.enter_context(fake_device(kind, world_size, rank, share))
        device.older_attention = takes_flash2(config)
        step = _build(config, device, undo, stages, routed)
        batches = _batches(config, step.groups, device)
        _take(step, config, 1, batches())
        return _Watch(step, device, Replay(config, machine)).second_step(config, batches())


class _Mark(NamedTuple):
    """Beginning of a segment: numbers of the next entry of the trace, call, event and launch; and what it is of."""

    trace: int
    call: int
    event: int
    launch: int
    of_pass: int
    phase: Phase
    unit: int


class _Watch:
    """Records where the segments of a step begin, and what it does in them."""

    def __init__(self, step: TrainStep, device: FakeDevice, clock: Replay) -> None:
        self.step, self.device, self.clock, self.number = step, device, clock, 0
        self.marks = list[_Mark]()
        self.resident = Counter[str]()

    def second_step(self, config: Config, micro_batches: list[dict[str, Tensor]]) -> RankRun:
        """Take the step, and return what it did."""
        step, device = self.step, self.device
        device.keeps_time = True
        start, inner = step.gradients.start_step, step.events
        before = len(device.calls), len(device.events), device.launches

        def begin() -> None:
            start()
            self.resident = device.restart(_owners(step, micro_batches))
            self._enter("forward")
            self.marks[0] = _Mark(0, *before, *self.marks[0][4:])

        def before_use(unit: int) -> None:
            self._mark(unit)
            inner.before_use(unit)

        step.gradients.start_step = begin  # type: ignore[method-assign]
        step.events = cast("Any", SimpleNamespace(before_use=before_use, backward_done=inner.backward_done))
        idle, clock = lambda: None, SimpleNamespace(now=lambda: None)
        recorder = SimpleNamespace(enter=self._enter, start_step=idle, end_step=idle, recording=True, clock=clock)
        step.recorder = cast("Any", recorder)
        _take(step, config, 2, micro_batches)
        last = len(device.events)  # what is under way goes on in the next step
        step.weights.settle()
        step.events = inner
        return self._read(before[1], last)

    def _enter(self, phase: Phase) -> None:
        self.number, self.device.phase = self.number + 1, phase
        self._mark(-1)

    def _mark(self, unit: int) -> None:
        device, phase = self.device, cast("Phase", self.device.phase)
        next_ones = len(device.trace), len(device.calls), len(device.events), device.launches
        self.marks.append(_Mark(*next_ones, self.number, phase, unit))

    def _read(self, first: int, last: int) -> RankRun:
        """Return the step; ``first``, ``last``: numbers of its events."""
        device, lines, segments = self.device, Counter(self.resident), list[Segment]()
        labels = {number: _part(place) for place, number in device.places.items()}
        places = {number: place for place, number in device.places.items()}
        names, live = _names_of_groups(self.step), sum(lines.values())
        keys = {}
        for index, one in enumerate(device.calls):
            group, ranks = names.get(getattr(one.group, "group_name", ""), ("pp", 2))
            known = {"sp": "heads", "cp": "keys and values"}.get(group, "") if one.op == "all_to_all" else ""
            keys[index] = (_kind(places[one.place], known), one.op, group, ranks), one.num_bytes
        earlier = device.events[:first]
        waited = {event.call for event in earlier if event.is_wait}
        self.clock.start([e.call for e in earlier if e.cost is None and e.call not in waited], keys)
        end = _Mark(len(device.trace), len(device.calls), last, device.launches, 0, "update", -1)
        for mark, following in pairwise([*self.marks, end]):
            entries = device.trace[mark.trace : following.trace]
            after = list(accumulate((size for size, _ in entries), initial=live))
            peak, live = max(after), after[-1]
            held, at_peak = Counter(lines), after.index(peak)
            for number, (size, place) in enumerate(entries, 1):
                lines[labels[place]] += size
                held = Counter(lines) if number == at_peak else held
            calls, sent = Counter[Any](), Counter[Any]()
            for index in range(mark.call, following.call):
                key, num_bytes = keys[index]
                calls[key] += 1
                sent[key] += num_bytes
            spent = self.clock.of(device.events[mark.event : following.event], keys, mark.phase == "update")
            launches = following.launch - mark.launch
            segments.append(Segment(*mark[4:], peak, held, calls, sent, launches, spent))
        of_optimizer = sum(size for place, size in device.host.items() if places[place].startswith("optim/"))
        return RankRun(self.resident, segments, device.host.total() - of_optimizer, of_optimizer)


def _owners(step: TrainStep, micro_batches: list[dict[str, Tensor]]) -> dict[int, str]:
    """Return what the tensors are that stay for the whole run, by the identity of their storages."""
    units, of = step.weights.units, dict[int, str]()

    def name(label: str, tensors: Iterable[Any]) -> None:
        of.update({t.untyped_storage()._cdata: label for t in tensors if isinstance(t, Tensor)})

    name("micro-batches", (t for batch in micro_batches for t in batch.values()))
    if step.weights.stage == 3:
        name("buffers for whole parameters", tree_leaves(step.weights._buffers))
    states = [vars(state) if hasattr(state, "__dict__") else state for state in step.optimizer.states]
    name("optimizer state", tree_leaves(states))
    name("master weights", (unit.master for unit in units))
    name("parameters", (t for unit in units for t in (unit.params, unit.local_params, unit.local_frozen)))
    return of


def _part(place: str) -> str:
    """Return what a tensor is part of that a place has allocated."""
    if place.startswith("="):
        return place[1:]
    file, _, phase = place.partition("|")
    part = next((part for part, starts in _PARTS if file.startswith(starts)), "other tensors")
    return part if part in _WHOLE else f"{part}, {phase}"


def _kind(place: str, known: str) -> str:
    file, _, phase = place.partition("|")
    kind = known or next((kind for kind, starts in _KINDS if file.startswith(starts)), file.partition(":")[0])
    return f"{kind}, {phase}" if kind in ("heads", "keys and values", "rows of experts") else kind


def _names_of_groups(step: TrainStep) -> dict[str, tuple[str, int]]:
    """Return name and size of each group, by torch's name."""
    groups, found = step.groups, dict[str, tuple[str, int]]()
    replicas = "dp x sp" if groups.cp.size() == 1 else "dp x cp x sp"
    ep: Any = getattr(cast("Any", step.model), "layout", SimpleNamespace(ep=None)).ep
    named: list[tuple[str, Any]] = [
        ("tp", groups.tp), ("sp", groups.sp), ("cp", groups.cp), (replicas, groups.dp_cp_sp),
        ("pp x tp", groups.pp_tp), ("ends", groups.ends), ("world", groups.world),
        ("ep", getattr(ep, "group", None)), ("tokens", getattr(ep, "tokens", None)),
        (f"{replicas} / {ep.size if ep else 1}", getattr(ep, "replicas", None)),
        ("sequence", getattr(ep, "sequence", None)),
    ]  # fmt: skip
    for name, group in named:
        if group is not None and hasattr(group, "group_name"):
            found.setdefault(group.group_name, (name, group.size()))
    return found


# building a run


def _build(
    config: Config, device: FakeDevice, undo: ExitStack, stages: Sequence[Layers] | None, routed: RoutedRows | None
) -> TrainStep:  # fmt: skip
    """Put a run's model, optimizer and step together, as ``training/run.py`` does, without timing any alternatives."""
    task = bert_task(config) if config.model.is_bert else GPT
    plain = task.build_model

    def build_model(*args: Any) -> Any:
        with torch.device("meta"):  # no weights are drawn
            return plain(*args)

    groups = replace(layout_groups(config, torch.device("cpu"), check=False), device=device.device)
    uses_triton = device.kind == "cuda" and config.kernels.fused_kernels != "torch"
    undo.callback(launch.use_triton, launch._in_use)
    put(undo, kernel_selection, "_choose_fused", lambda _config, _device, norm: _kernels(norm, uses_triton))
    if stages is not None and groups.pp.size() > 1:
        layers, parallel = [len(layers) for layers in stages], config.parallel
        costs = layer_costs(config.model, config.kernels)
        made = Pipeline(groups, cast("Any", parallel.pipeline_kind), layers, parallel.num_pipeline_slices, costs)
        put(undo, run, "build_pipeline", lambda *_: made)
    if config.model.has_experts:
        _route(config, undo, routed)
    faults = SimpleNamespace(at=lambda *_: None, poisons=lambda *_: False, faults=())
    context = cast("Any", SimpleNamespace(
        config=config, groups=groups, task=replace(task, build_model=build_model), faults=faults, sizes="given",
        run_dir=None, peers=SimpleNamespace(parts=[]), console=SimpleNamespace(line=lambda _: None),
        watchdog=SimpleNamespace(),
    ))  # fmt: skip
    attention = _attention(config, device)
    layout = run.choose_layout(context, None, attention)
    parts, _, _ = run.build_model(context, layout)
    return run.build_step(context, layout, parts, attention)


def _attention(config: Config, device: FakeDevice) -> AttentionChoice:
    kernels, use = config.kernels, use_of(config, device.device)
    if kernels.attention_backend in ("unfused", "local") or (device.kind == "cuda" and known_lack("sdpa", use)):
        kernel = AttentionKernel("reference", "")
    elif device.kind == "cuda":
        kernel = AttentionKernel("sdpa", "")
    else:
        kernel = choose_kernel("auto", "cpu", use.dtype, use.dropout, use)
    repeated = None
    if kernels.recompute_granularity == "full":
        why = attention_ops.why_repeated(kernel.name, use.device, use.dtype, use.head_dim, use.dropout)
        repeated = "asked for" if kernels.recompute_attention == "full" else "" if use.context else why
    return AttentionChoice(kernel, {}, repeated)


def takes_flash2(config: Config) -> bool:
    """Return whether the flags leave nothing newer: other kernels have no dropout, and cuDNN is not deterministic."""
    backend, drops = config.kernels.attention_backend, config.model.attention_dropout > 0
    if backend == "flash2" or (backend == "flash" and drops):
        return True
    return config.kernels.deterministic_mode and (backend == "fused" or (backend == "auto" and drops))


def _kernels(norm: Any, uses_triton: bool) -> FusedKernels:
    name: Any = "triton" if uses_triton else "torch"
    of_norm = None if norm is None else FusedKernel(norm.kind, name, "")
    return FusedKernels(None, of_norm, FusedKernel(ELEMENTWISE, name, ""))


def _route(config: Config, undo: ExitStack, routed: RoutedRows | None) -> None:
    """Give experts their rows."""
    plain, model, load = Counts.read, config.model, config.parallel.moe_worst_load

    def read(counts: Any) -> Any:
        if counts.numbers is None:
            counts._coming.wait()
            ep, chunks, own = counts._ep.size, len(counts._chunks), counts._own
            rows = routed or even_rows(model, ep, len(counts._chosen), load)
            each, this_rank = round(rows.choices / (own * ep * chunks)), counts._ep.rank

            def of(others: float) -> Any:
                to = [rows.own if rank == this_rank else others / max(1, ep - 1) for rank in range(ep)]
                return [[[each] * own + [round(to[rank] / chunks)]] * chunks for rank in range(ep)]

            counts.numbers = [of(rows.to_others), of(rows.from_others)]
        return plain(counts)

    put(undo, Counts, "read", read)


def _batches(config: Config, groups: ParallelGroups, device: FakeDevice) -> Callable[[], list[dict[str, Tensor]]]:
    batch, model = config.batch, config.model
    each = batch.micro_batch_size * groups.dp_size
    b, s = batch.micro_batch_size, model.seq_length or 1

    def empty(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device.device)

    def one() -> dict[str, Tensor]:
        made = {"tokens": empty(b, s), "labels": empty(b, s), "sample_ids": empty(b)}
        made |= {"loss_mask": empty(b, s, dtype=torch.float32)} | ({"types": empty(b, s)} if model.is_bert else {})
        return made | ({"order": empty(b)} if model.has_order_head else {})

    return lambda: [one() for _ in range(max(1, (batch.global_batch_size or each) // each))]


def _take(step: TrainStep, config: Config, number: int, batches: list[dict[str, Tensor]]) -> None:
    size = config.batch.micro_batch_size
    digests = [torch.zeros(size, dtype=torch.float64)] * len(batches)
    places = list(torch.arange(size * len(batches)).chunk(len(batches)))
    step.run(batches, number, lr=1e-3, weight_decay=0.1, digests=digests, places=places)


def main() -> int:
    """Answer a question in JSON on the standard input: what a step of a run holds and sends."""
    asked = json.load(sys.stdin)
    config, _ = Config.from_dict(asked["config"])
    found = predict(config, asked["world_size"], asked["kind"])
    memory, traffic = with_saves(found.memory, config, asked["world_size"], asked["kind"]), found.traffic
    answer = {"predicted_bytes": memory.peak, "sent_bytes": traffic.num_bytes, "can_hide_bytes": traffic.can_hide}
    print(json.dumps({**answer, "collectives": traffic.number}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
