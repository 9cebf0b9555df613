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
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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


class Segment(NamedTuple):
    """A stretch of a step, from one unit of the model to the next."""

    number: int  # of the pass that it is part of
    phase: Phase
    unit: int  # of the model that it begins with; -1: none
    peak: float  # bytes on the device at most
    lines: Counter[str]  # of which, by name
    totals: Counter[Any]  # launches on the device ("launches"), and what ``timeline.py :: Replay.of`` counts


class RankRun(NamedTuple):
    """The second step of a rank."""

    resident: Counter[str]  # bytes that it holds when the step begins, by name
    segments: list[Segment]
    host: float  # bytes of host memory for copies of activations
    optimizer_host: float  # and of the optimizer

    @property
    def peak(self) -> float:
        """Bytes at most."""
        return max(segment.peak for segment in self.segments)

    def totals(self, phase: str = "") -> Counter[Any]:
        """Return what segments count, of a phase or of all of the step."""
        total = Counter[Any]()
        for segment in self.segments:
            if phase in ("", segment.phase):
                total.update(segment.totals)
        return total

    def sent(self) -> dict[Key, tuple[float, float]]:
        """Return number and bytes of collectives, by (kind, op, group, ranks)."""
        totals = self.totals()
        keys = [entry[1] for entry in totals if entry[0] == "calls"]
        return {key: (totals["calls", key], totals["sent", key]) for key in keys}


class Prediction(NamedTuple):
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
    launches = round(runs[0].totals()["launches"])
    time = None if machine is None else deep.time(runs, machine)
    return Prediction(_memory_plan(fullest), TrafficPlan(flows_of(busiest.totals())), launches, time)


def step_time(config: Config, machine: Machine) -> StepTime:
    """Return the time of a step of a validated configuration on a machine."""
    time = predict(config, machine.gpus, "cpu" if machine.is_cpu else "cuda", machine).time
    assert time is not None
    return time


def ranks_to_run(config: Config, world_size: int) -> list[int]:
    """Return the ranks of which one holds most, and one sends most, of the pipeline ranks and of the cp ranks.

    In every schedule a rank of a pipeline has as many passes between F and B as the next one, or more; so of those
    between the ends only the first of each number of layers is run. Of the cp ranks those run that have most positions
    and pairs, receive and send most rows.
    """
    parallel, model = config.parallel, config.model
    pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    ranks_of_cp = parallel.tensor_model_parallel_size * parallel.sequence_parallel_size
    of_cp = list(range(cp))
    if cp > 1:
        plan = context_plan(model, parallel)
        received, sent = ([sum(rows(rank, 1)) for rank in of_cp] for rows in (plan.rows_received, plan.rows_sent))
        measures = (plan.lengths, received, sent, [plan.area(rank) for rank in of_cp])
        of_cp = sorted({max(of_cp, key=lambda rank: (numbers[rank], plan.lengths[rank])) for numbers in measures})
    of_pp = [0]
    if pp > 1:
        layers = layers_of_stages(model, parallel)
        inner = {tuple(layers[rank::pp]): rank for rank in range(pp - 2, 0, -1)}
        of_pp = sorted({0, *inner.values(), pp - 1})
    return [stage * (world_size // pp) + place * ranks_of_cp for stage in of_pp for place in of_cp]


class _Deep:
    # runs of a configuration with many layers and micro-batches, by runs with few

    def __init__(self, config: Config, world_size: int, kind: Kind, machine: Machine | None) -> None:
        self.config, self.world_size, self.kind, self.machine = config, world_size, kind, machine
        model, parallel, kernels = config.model, config.parallel, config.kernels
        assert model.num_layers
        with_experts = model.expert_layers(model.num_layers)
        self.group = (kernels.recompute_num_layers or 1) if kernels.recompute_granularity == "full" else 1
        self.pp = parallel.pipeline_model_parallel_size
        counts = layers_of_stages(model, parallel) if self.pp > 1 else (model.num_layers,)
        ends = list(accumulate(counts, initial=0))
        self.stages: list[Layers] = [
            tuple(layer in with_experts for layer in range(start, stop)) for start, stop in pairwise(ends)
        ]
        self.dp = parallel.dp_size(world_size)
        self.count = max(1, (config.batch.global_batch_size or 0) // (config.batch.micro_batch_size * self.dp))

    def run(self, rank: int) -> RankRun:
        few = []  # of each stage the layers at its ends, of each kind one
        for stage in self.stages:
            most = max(_FEW, 3 * self.group + len(stage) % self.group)
            is_whole = len(stage) <= most + self.group or self.config.kernels.recompute_method == "block"
            few.append(stage if is_whole else (*stage[:_HALF], *stage[len(stage) - (most - _HALF) :]))
        base = deep = self._run_few(rank, few)
        for has_experts in (False, True):
            missing = [
                real.count(has_experts) - run.count(has_experts) for real, run in zip(self.stages, few, strict=True)
            ]
            if any(missing):
                added = [(has_experts,) * self.group if number else () for number in missing]
                more = [(*run[:_HALF], *new, *run[_HALF:]) for run, new in zip(few, added, strict=True)]
                deep = _continued(deep, base, self._run_few(rank, more), max(missing) / self.group)
        return deep

    def _run_few(self, rank: int, stages: Sequence[Layers]) -> RankRun:
        config = self.config
        enough = _PASSES if self.pp == 1 else 2 * self.pp * config.parallel.stages_per_pipeline_rank + 1
        few = min(self.count, enough)
        if few < self.count:
            config = copy.copy(config)
            config.batch = copy.copy(config.batch)
            config.batch.global_batch_size = few * config.batch.micro_batch_size * self.dp
        done = run_rank(config, self.world_size, self.kind, rank, stages=stages, machine=self.machine)
        return done if few == self.count else _repeated(done, few, self.count, self.pp)

    def time(self, runs: Sequence[RankRun], machine: Machine) -> StepTime:
        # of the rank that computes longest; in a pipeline it waits for others
        computed = lambda spent: sum(spent[name] for name in ("products", "attention", "memory"))
        run = max(runs, key=lambda run: computed(run.totals()))
        spent, of_backward = run.totals(), run.totals("backward")
        forward, backward = computed(run.totals("forward")), computed(of_backward)
        layers = max(sum(map(len, self.stages[rank :: self.pp])) for rank in range(self.pp))
        plan = recompute_plan(self.config.kernels, layers)
        again = sum(last - first for first, last, is_again in plan if is_again) / layers
        is_selective = self.config.kernels.recompute_granularity == "selective"
        recomputed = run.totals("forward")["attention"] if is_selective else again * forward
        bubble = 0.0
        if self.pp > 1:
            weights = of_backward["weights"]
            passes = {"F": forward, "B": backward - weights, "W": weights}
            bubble = self._bubble(machine, passes, layers, computed(runs[-1].totals()))
        return assemble(
            self.config, machine, spent, layers=layers, count=self.count, again=again, host_bytes=run.host,
            forward=forward, backward=backward, recomputed=recomputed, bubble=bubble,
        )  # fmt: skip

    def _bubble(self, machine: Machine, passes: dict[str, float], layers: int, of_last: float) -> float:
        # seconds that the busiest rank waits, given those of all passes of its layers, and all of the last rank
        parallel, model = self.config.parallel, self.config.model
        plan = pipeline_plan(model, self.config.kernels, parallel, enough_micro_batches(parallel, self.count))
        of_stages, share = layers_of_stages(model, parallel), 1 / (plan.num_slices * self.count * layers)
        passes = {name: seconds * share for name, seconds in passes.items()}
        tp = parallel.tensor_model_parallel_size
        ranks = parallel.sequence_parallel_size * parallel.context_parallel_size
        elements: float = self.config.batch.micro_batch_size * (model.seq_length or 0) * (model.hidden_size or 0)
        elements /= ranks * (tp if parallel.sequence_parallel else 1) * plan.num_slices
        element = {"float64": 8, "float32": 4}.get(self.config.precision.params_dtype, 2)
        message = machine.seconds("send", "pp", self.pp, tp, 1, elements * element)
        last = sum(of_stages[stage] for stage in plan.stages_of(self.pp - 1))
        head = max(0.0, of_last / (self.count * plan.num_slices) - sum(passes.values()) * last)
        one_stage = parallel.stages_per_pipeline_rank == 1

        def seconds(action: Action) -> float:
            with_head = one_stage and action.kind == "B" and action.stage == plan.num_stages - 1
            return of_stages[action.stage] * passes[action.kind] + head * with_head

        played = replay(plan, seconds, lambda action: message)
        return max(0.0, played.time - max(played.busy))


def _continued(deep: RankRun, base: RankRun, grown: RankRun, times: float) -> RankRun:
    # ``deep`` with as many more layers as ``grown`` has beside those of ``base``, so many times

    def line(a: float, b: float, c: float) -> float:
        return a + times * (c - b)

    def sums(a: Counter[Any], b: Counter[Any], c: Counter[Any]) -> Counter[Any]:
        keys = dict.fromkeys((*a, *b, *c))  # in this order, which a set would not have
        return Counter({key: line(a[key], b[key], c[key]) for key in keys})

    segments = []
    for a, b, c in zip(deep.segments, base.segments, _aligned(base.segments, grown.segments), strict=True):
        totals = Counter[Any]()
        for segment in c:
            totals.update(segment.totals)
        segments.append(a._replace(
            peak=line(a.peak, b.peak, c[0].peak), lines=sums(a.lines, b.lines, c[0].lines),
            totals=sums(a.totals, b.totals, totals),
        ))  # fmt: skip
    host = line(deep.host, base.host, grown.host)
    of_optimizer = line(deep.optimizer_host, base.optimizer_host, grown.optimizer_host)
    return RankRun(sums(deep.resident, base.resident, grown.resident), segments, host, of_optimizer)


def _aligned(base: list[Segment], grown: list[Segment]) -> list[list[Segment]]:
    # for each segment of a run that of a run with more layers, and behind it those that are there besides
    passes: dict[int, tuple[list[Segment], list[Segment]]] = {segment.number: ([], []) for segment in base}
    for index, segments in enumerate((base, grown)):
        for segment in segments:
            passes[segment.number][index].append(segment)
    aligned = list[list[Segment]]()
    for fewer, more in passes.values():
        middle, added = (len(fewer) + 1) // 2, len(more) - len(fewer)
        assert added >= 0, "a run with more layers has no fewer segments"
        aligned += [[segment] for segment in more[:middle]]
        aligned[-1] += more[middle : middle + added]
        aligned += [[segment] for segment in more[middle + added :]]
    return aligned


def _repeated(run: RankRun, few: int, count: int, pp: int) -> RankRun:
    # a run of ``count`` micro-batches, given one of a few: those between the first and the last are alike; in a
    # pipeline, whose passes are in many orders, what is sent within layers and between stages grows with their number
    data = Counter({"micro-batches": run.resident["micro-batches"] * (count / few - 1)})
    segments = []
    for segment in run.segments:
        times: float = 1 + (count - few) * (segment.number in _SECOND)
        if pp > 1:
            times = count / few if segment.phase != "update" else 1
        of_others = times if pp == 1 else 1
        totals: Any = Counter()
        for name, amount in segment.totals.items():
            is_other = name[0] in ("calls", "sent") and name[1][2] not in _OF_LAYERS
            totals[name] = amount * (of_others if is_other else times)
        peak = segment.peak + data.total()
        segments.append(segment._replace(peak=peak, lines=segment.lines + data, totals=totals))
    return run._replace(resident=run.resident + data, segments=segments)


def _memory_plan(run: RankRun) -> MemoryPlan:
    stays = tuple(Line(name, round(size)) for name, size in run.resident.items())
    moments = []
    for phase in ("forward", "backward", "update"):
        if of_phase := [segment for segment in run.segments if segment.phase == phase]:
            worst = max(of_phase, key=lambda segment: segment.peak)
            more = {name: size - run.resident[name] for name, size in worst.lines.items()}
            lines = [Line(name, round(size)) for name, size in more.items() if size > 0]
            lines.append(Line("rest", round(worst.peak) - sum(line.num_bytes for line in (*stays, *lines))))
            last = max(segment.unit for segment in of_phase)
            places = {-1: "its beginning", 0: "embedding", 1: "first layer", last: "head", last - 1: "last layer"}
            name = "optimizer" if phase == "update" else places.get(worst.unit, "in the middle")
            moments.append(Moment(cast("Any", phase), name, tuple(line for line in lines if line.num_bytes > 0)))
    return MemoryPlan(stays, tuple(moments), round(run.host), round(run.optimizer_host))


def run_rank(
    config: Config, world_size: int, kind: Kind, rank: int = 0, *, stages: Sequence[Layers] | None = None,
    routed: RoutedRows | None = None, machine: Machine | None = None,
) -> RankRun:  # fmt: skip
    """Take two steps as a rank of a job; there must be no process group yet.

    ``stages`` are the layers of each stage instead of the configuration's, ``routed`` the rows of experts instead of
    even ones, and ``machine`` the one whose clock runs.
    """
    config = copy.deepcopy(config)
    config.logging.report_overlap, config.parallel.check_collectives = None, False
    if config.parallel.overlap_mode == "auto":
        config.parallel.sp_overlap_mode, config.parallel.sp_overlap_comm = "none", False
    if stages is not None:
        layers = [has_experts for stage in stages for has_experts in stage]
        config.model.num_layers = len(layers)
        if config.model.has_experts:
            config.model.moe_layer_freq = f"[{','.join(str(int(has_experts)) for has_experts in layers)}]"
    share = config.data.mask_prob if config.model.is_bert else 1.0
    with ExitStack() as undo:
        device = undo.enter_context(fake_device(kind, world_size, rank, share))
        device.older_attention = takes_flash2(config)
        step = _build(config, device, undo, stages, routed)
        _take(step, config, 1, _micro_batches(config, step, device.device))
        return _Watch(step, device, Replay(config, machine)).second_step(config)


class _Mark(NamedTuple):
    # beginning of a segment: numbers of the next entry of the trace, event and launch; and what it is of
    trace: int
    event: int
    launch: int
    number: int
    phase: Phase
    unit: int


class _Watch:
    # records where the segments of a step begin, and what it does in them

    def __init__(self, step: TrainStep, device: FakeDevice, clock: Replay) -> None:
        self.step, self.device, self.clock, self.number = step, device, clock, 0
        self.marks = list[_Mark]()
        self.resident = Counter[str]()

    def second_step(self, config: Config) -> RankRun:
        step, device = self.step, self.device
        micro_batches = _micro_batches(config, step, device.device)
        device.keeps_time = True
        start, inner = step.gradients.start_step, step.events
        first_event, first_launch = len(device.events), device.launches

        def begin() -> None:
            start()
            self.resident = device.restart(_owners(step, micro_batches))
            self._enter("forward")
            self.marks[0] = self.marks[0]._replace(trace=0, event=first_event, launch=first_launch)

        def before_use(unit: int) -> None:
            self._mark(unit)
            inner.before_use(unit)

        step.gradients.start_step = begin  # type: ignore[method-assign]
        step.events = cast("Any", SimpleNamespace(before_use=before_use, backward_done=inner.backward_done))
        idle, clock = lambda: None, SimpleNamespace(now=lambda: None)
        recorder = SimpleNamespace(enter=self._enter, start_step=idle, end_step=idle, recording=True, clock=clock)
        step.recorder = cast("Any", recorder)
        _take(step, config, 2, micro_batches)
        last_event = len(device.events)  # what is under way goes on in the next step
        step.weights.settle()
        step.events = inner
        return self._read(first_event, last_event)

    def _enter(self, phase: Phase) -> None:
        self.number, self.device.phase = self.number + 1, phase
        self._mark(-1)

    def _mark(self, unit: int) -> None:
        device, phase = self.device, cast("Phase", self.device.phase)
        next_ones = len(device.trace), len(device.events), device.launches
        self.marks.append(_Mark(*next_ones, self.number, phase, unit))

    def _read(self, first_event: int, last_event: int) -> RankRun:
        device, lines, segments = self.device, Counter(self.resident), list[Segment]()
        places = {number: place for place, number in device.places.items()}
        labels = {number: _part(place) for number, place in places.items()}
        names, live = _names_of_groups(self.step), sum(lines.values())
        calls = dict[int, tuple[Key, int]]()
        for index, call in enumerate(device.calls):
            group, ranks = names.get(getattr(call.group, "group_name", ""), ("pp", 2))
            known = {"sp": "heads", "cp": "keys and values"}.get(group, "") if call.op == "all_to_all" else ""
            calls[index] = (_kind(places[call.place], known), call.op, group, ranks), call.num_bytes
        earlier = device.events[:first_event]
        waited = {event.call for event in earlier if event.is_wait}
        self.clock.start([e.call for e in earlier if e.cost is None and e.call not in waited], calls)
        end = _Mark(len(device.trace), last_event, device.launches, 0, "update", -1)
        for mark, following in pairwise([*self.marks, end]):
            entries = device.trace[mark.trace : following.trace]
            after = list(accumulate((size for size, _ in entries), initial=live))
            peak, live = max(after), after[-1]
            held, at_peak = Counter(lines), after.index(peak)
            for number, (size, place) in enumerate(entries, 1):
                lines[labels[place]] += size
                held = Counter(lines) if number == at_peak else held
            totals = self.clock.of(device.events[mark.event : following.event], calls, mark.phase == "update")
            totals["launches"] = following.launch - mark.launch
            segments.append(Segment(mark.number, mark.phase, mark.unit, peak, held, totals))
        of_optimizer = sum(size for place, size in device.host.items() if places[place].startswith("optim/"))
        return RankRun(self.resident, segments, device.host.total() - of_optimizer, of_optimizer)


def _owners(step: TrainStep, micro_batches: list[dict[str, Tensor]]) -> dict[int, str]:
    # what the tensors are that stay for the whole run, by the identity of their storages
    units, owners = step.weights.units, dict[int, str]()

    def name(label: str, tensors: Iterable[Any]) -> None:
        owners.update({t.untyped_storage()._cdata: label for t in tensors if isinstance(t, Tensor)})

    name("micro-batches", (t for batch in micro_batches for t in batch.values()))
    if step.weights.stage == 3:
        name("buffers for whole parameters", tree_leaves(step.weights._buffers))
    states = [vars(state) if hasattr(state, "__dict__") else state for state in step.optimizer.states]
    name("optimizer state", tree_leaves(states))
    name("master weights", (unit.master for unit in units))
    name("parameters", (t for unit in units for t in (unit.params, unit.local_params, unit.local_frozen)))
    return owners


def _part(place: str) -> str:
    # what a tensor is part of that a place has allocated
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
    # name and size of each group, by torch's name
    groups, known = step.groups, dict[str, tuple[str, int]]()
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
            known.setdefault(group.group_name, (name, group.size()))
    return known


# building a run


def _build(
    config: Config, device: FakeDevice, undo: ExitStack, stages: Sequence[Layers] | None, routed: RoutedRows | None
) -> TrainStep:
    # puts a run's model, optimizer and step together, as ``training/run.py`` does, without timing any alternatives
    task = bert_task(config) if config.model.is_bert else GPT

    def build_model(*args: Any) -> Any:
        with torch.device("meta"):  # no weights are drawn
            return task.build_model(*args)

    def choose_fused(_config: Any, _device: Any, norm: Any) -> FusedKernels:
        uses_triton = device.kind == "cuda" and config.kernels.fused_kernels != "torch"
        name: Any = "triton" if uses_triton else "torch"
        of_norm = None if norm is None else FusedKernel(norm.kind, name, "")
        return FusedKernels(None, of_norm, FusedKernel(ELEMENTWISE, name, ""))

    groups = replace(layout_groups(config, torch.device("cpu"), check=False), device=device.device)
    undo.callback(launch.use_triton, launch._in_use)
    put(undo, kernel_selection, "_choose_fused", choose_fused)
    if stages is not None and groups.pp.size() > 1:
        layers, parallel = [len(layers) for layers in stages], config.parallel
        costs = layer_costs(config.model, config.kernels)
        pipeline = Pipeline(groups, cast("Any", parallel.pipeline_kind), layers, parallel.num_pipeline_slices, costs)
        put(undo, run, "build_pipeline", lambda *_: pipeline)
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


def _route(config: Config, undo: ExitStack, routed: RoutedRows | None) -> None:
    # gives experts their rows, of which each chunk of the tokens has its share
    plain, model, load = Counts.read, config.model, config.parallel.moe_worst_load

    def read(counts: Any) -> Any:
        if counts.numbers is None:
            counts._coming.wait()
            ep, own, tokens = counts._ep, counts._own, len(counts._chosen)
            rows = routed or even_rows(model, ep.size, tokens, load)
            shares = [(chunk.stop - chunk.start) / max(1, tokens) for chunk in counts._chunks]

            def numbers(others: float) -> list[list[list[int]]]:
                to = [rows.own if rank == ep.rank else others / max(1, ep.size - 1) for rank in range(ep.size)]
                choices = [round(rows.choices / (own * ep.size) * share) for share in shares]
                return [
                    [[chosen] * own + [round(number * share)] for chosen, share in zip(choices, shares, strict=True)]
                    for number in to
                ]

            counts.numbers = [numbers(rows.to_others), numbers(rows.from_others)]
        return plain(counts)

    put(undo, Counts, "read", read)


def _micro_batches(config: Config, step: TrainStep, device: torch.device) -> list[dict[str, Tensor]]:
    batch, model = config.batch, config.model
    b, s = batch.micro_batch_size, model.seq_length or 1
    samples = b * step.groups.dp_size

    def empty(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    micro_batches = []
    for _ in range(max(1, (batch.global_batch_size or samples) // samples)):
        tensors = {"tokens": empty(b, s), "labels": empty(b, s), "sample_ids": empty(b)}
        tensors |= {"loss_mask": empty(b, s, dtype=torch.float32)} | ({"types": empty(b, s)} if model.is_bert else {})
        micro_batches.append(tensors | ({"order": empty(b)} if model.has_order_head else {}))
    return micro_batches


def _take(step: TrainStep, config: Config, number: int, batches: list[dict[str, Tensor]]) -> None:
    size = config.batch.micro_batch_size
    digests = [torch.zeros(size, dtype=torch.float64)] * len(batches)
    places = list(torch.arange(size * len(batches)).chunk(len(batches)))
    step.run(batches, number, lr=1e-3, weight_decay=0.1, digests=digests, places=places)


def main() -> int:
    """Answer a question in JSON on the standard input: what a step of a run holds and sends."""
    asked = json.load(sys.stdin)
    config, _ = Config.from_dict(asked["config"])
    predicted = predict(config, asked["world_size"], asked["kind"])
    memory, traffic = with_saves(predicted.memory, config, asked["world_size"], asked["kind"]), predicted.traffic
    answer = {"predicted_bytes": memory.peak, "sent_bytes": traffic.num_bytes, "can_hide_bytes": traffic.can_hide}
    print(json.dumps({**answer, "collectives": traffic.number}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
