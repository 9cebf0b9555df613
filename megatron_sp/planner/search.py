"""Search of all layouts for the fastest ones that fit, with a reason for each group of those that do not."""

# Rough forms of memory and time order all layouts (``estimate/rough.py``, ``forecast.py``). Of each choice of axes the
# fastest are run without contents, and these runs tell what they need and how fast they are (``fake_run.py``). A layout
# that only saves more memory than a fitting one, at the same or a higher cost in time, is skipped: ZeRO stages and
# recomputation are tried from the cheapest on until one fits, larger micro-batches as long as one fits, and for each
# combination only the largest few micro-batches that fit are timed. What does not fit with the smallest micro-batch is
# not tried with larger ones.

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from megatron_sp.config.rules import violations
from megatron_sp.config.schema import Config
from megatron_sp.estimate.memory_plan import Device, MemoryPlan
from megatron_sp.estimate.rough import rough_ranks
from megatron_sp.estimate.suggestions import with_saves
from megatron_sp.planner import parallel_plans as plans
from megatron_sp.planner.forecast import rough_seconds, step_flops
from megatron_sp.planner.machine import Machine, reserve
from megatron_sp.planner.parallel_plans import Axes, Given, ParallelPlan, Saving
from megatron_sp.planner.timeline import StepTime

TIGHT = 0.95  # share of the memory above which a layout counts as tight
FINALISTS = 24  # layouts that are run
_AXES = 8  # choices of axes among them
_SURE = 0.93  # of the memory by the rough form must fit for a layout to be run, which then tells whether all of it does
_ROUNDS = 3  # of runs
_FEW = 4  # runs that are not worth another process
_PROCESSES = 16  # at most: each is a Python of its own, with torch
_SIZES = 3  # micro-batch sizes of a layout that are timed: the largest, a half and a quarter of it


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: ParallelPlan
    config: Config
    machine: Machine
    memory: MemoryPlan
    reserve: int  # bytes for anything but tensors
    time: StepTime
    tokens: int  # of a step
    model_flops: float  # of a step for MFU, counting the query-key pairs that the mask leaves

    @property
    def tokens_per_second(self) -> float:
        # predicted tokens per second of all GPUs together
        return self.tokens / self.time.seconds

    @property
    def mfu(self) -> float:
        # predicted model FLOPs utilization: useful FLOPs relative to the peak of the GPUs
        return self.model_flops / self.time.seconds / (self.machine.gpu.peak_tflops * 1e12 * self.machine.gpus)

    @property
    def needs(self) -> int:
        # memory that a GPU needs, with the reserve
        return self.memory.peak + self.reserve

    @property
    def is_tight(self) -> bool:
        # true if the layout leaves under 5 % of the memory, which may be less than the error of the prediction
        return self.needs > TIGHT * self.machine.memory_bytes


class Rejected(NamedTuple):
    """Layouts rejected for the same reason."""

    who: str  # their common tp, sp, cp and pp sizes
    why: str  # the rule they break, or the memory of the one that needs least
    needs: int = 0  # bytes of that one; 0 if they break a rule


class Tried(NamedTuple):
    """A layout by the rough forms: bytes of a GPU with the reserve, and seconds of a step."""

    layout: ParallelPlan
    config: Config
    needs: int
    seconds: float


@dataclass
class Findings:
    """Results of a search."""

    candidates: list[Candidate] = field(default_factory=list)  # were run, and fit, fastest first; tight ones come last
    fitting: list[Tried] = field(default_factory=list)  # by the rough form, fastest first
    rejected: list[Rejected] = field(default_factory=list)
    tried: int = 0  # layouts whose memory was computed

    def best_of_each(self) -> list[Candidate]:
        # first candidate for each choice of tp, sp, cp and pp sizes
        best: dict[Axes, Candidate] = {}
        for candidate in self.candidates:
            best.setdefault(candidate.layout.axes, candidate)
        return list(best.values())


def search(base: Config, given: Given, machine: Machine, processes: int = 1, finalists: int = FINALISTS) -> Findings:
    """Search all layouts of a model whose ``vocab_size`` and ``global_batch_size`` are set.

    Fields in ``given`` are fixed; ``finalists`` layouts are run, by so many ``processes``: the result is the same.
    """
    findings, least, refused = Findings(), dict[Axes, tuple[int, ParallelPlan]](), dict[str, list[ParallelPlan]]()
    for layout in plans.frames(base, given, machine.gpus, machine.per_node):
        # the first rule that it breaks with micro-batches of 1
        if broken := next(iter(violations(layout.apply(base), machine.gpus)), ""):
            refused.setdefault(broken, []).append(layout)
            continue
        for tried in _Frame(layout, base, given, machine, findings).fill():
            smallest = tried.needs, tried.layout
            least[layout.axes] = min(least.get(layout.axes, smallest), smallest, key=lambda entry: entry[0])
    order = lambda tried: (tried.seconds, tried.needs)
    findings.fitting.sort(key=order)
    findings.fitting += _in_chunks(findings, base, given, machine)
    findings.fitting.sort(key=order)
    _run(findings, machine, processes, finalists, least)
    fitting, have = {tried.layout.axes for tried in findings.fitting}, machine.memory_bytes / 2**30
    for axes, (needs, layout) in sorted(least.items()):
        if axes not in fitting:
            how = ", ".join(layout.words(machine.gpus).split(", ")[sum(size > 1 for size in axes) :])
            why = f"needs {needs / 2**30:.1f} GiB of {have:.1f} at least ({how})"
            findings.rejected.append(Rejected(_name(layout), why, needs))
    by_rule: dict[str, list[ParallelPlan]] = {}
    for text, layouts in refused.items():
        by_rule.setdefault(text.split(": ")[0].split("; use")[0], []).extend(layouts)
    for rule, layouts in by_rule.items():
        names = list(dict.fromkeys(map(_name, layouts)))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        findings.rejected.append(Rejected("; ".join(names[:3]) + more, rule))
    return findings


def _name(layout: ParallelPlan) -> str:
    more = (f", cp {layout.cp}" if layout.cp > 1 else "") + (f", pp {layout.pp}" if layout.pp > 1 else "")
    return f"tp {layout.tp}, sp {layout.sp}{more}"


def _run(
    findings: Findings, machine: Machine, processes: int, finalists: int, least: dict[Axes, tuple[int, ParallelPlan]]
) -> None:
    # runs the best layouts, of each choice of axes the fastest first; where none fits the next ones, until some do
    left, done = list(findings.fitting), set[ParallelPlan]()
    for _ in range(_ROUNDS):
        if not left:
            break
        places, order = Counter[Axes](), list[tuple[int, int, Tried]]()
        for number, tried in enumerate(left):
            order.append((places[tried.layout.axes], number, tried))
            places[tried.layout.axes] += 1
        chosen = list(places)[: max(_AXES, finalists // 3)]
        order = sorted((entry for entry in order if entry[2].layout.axes in chosen), key=lambda entry: entry[:2])
        batch = [tried for _, _, tried in order][:finalists]
        for tried, candidate in zip(batch, _predictions(batch, machine, processes), strict=True):
            done.add(tried.layout)
            if candidate is not None and candidate.needs <= machine.memory_bytes:
                findings.candidates.append(candidate)
                continue
            findings.fitting.remove(tried)
            if candidate is not None:
                axes, needs = tried.layout.axes, (candidate.needs, tried.layout)
                least[axes] = min(least[axes], needs, key=lambda entry: entry[0])
        missing = {tried.layout.axes for tried in batch} - {c.layout.axes for c in findings.candidates}
        left = [tried for tried in findings.fitting if tried.layout not in done]
        left = [tried for tried in left if tried.layout.axes in missing or not findings.candidates]
    findings.candidates.sort(key=lambda candidate: (candidate.is_tight, -candidate.tokens_per_second, candidate.needs))


def _predictions(batch: Sequence[Tried], machine: Machine, processes: int) -> list[Candidate | None]:
    # in several processes where there are many and the system allows them, which leave Ctrl-C to this one
    if processes > 1 and len(batch) >= _FEW:
        context = multiprocessing.get_context("spawn")  # this process may have threads
        number, leave = min(processes, _PROCESSES, len(batch)), (signal.SIGINT, signal.SIG_IGN)
        try:
            with ProcessPoolExecutor(number, context, initializer=signal.signal, initargs=leave) as pool:
                return list(pool.map(partial(_predicted, machine=machine), batch))
        except (BrokenProcessPool, OSError, NotImplementedError):
            pass
    return [_predicted(tried, machine) for tried in batch]


def _predicted(tried: Tried, machine: Machine) -> Candidate | None:
    # runs a layout; None: it cannot be run without contents
    from megatron_sp.planner.fake_run import predict  # torch takes a second

    config, gpus, device = tried.config, machine.gpus, _device(machine)
    try:
        run = predict(config, gpus, device, machine)
    except (RuntimeError, TypeError):
        return None
    memory = with_saves(run.memory, config, gpus, device)
    assert run.time is not None
    kept = reserve(machine, memory.peak, num_groups(tried.layout, gpus))
    return Candidate(tried.layout, config, machine, memory, kept, run.time, *step_flops(config, gpus))


def _device(machine: Machine) -> Device:
    return "cpu" if machine.is_cpu else "cuda"


def _in_chunks(findings: Findings, base: Config, given: Given, machine: Machine) -> list[Tried]:
    # the fastest layout of each choice of axes with tokens sent to experts in two chunks
    fastest: dict[Axes, ParallelPlan] = {}
    for tried in findings.fitting:
        fastest.setdefault(tried.layout.axes, tried.layout)
    in_chunks = []
    for layout in fastest.values():
        if layout.ep > 1 and ("parallel", "moe_chunks") not in given:
            frame = _Frame(replace(layout, moe_chunks=2), base, given, machine, findings)
            other = frame.try_one((layout.zero, layout.recompute), layout.micro_batch)
            in_chunks += [other] if other is not None and frame.fits(other) else []
    return in_chunks


class _Frame:
    # search over micro-batch sizes, ZeRO stages and recomputations of one layout of ``frames``

    def __init__(
        self, frame: ParallelPlan, base: Config, given: Given, machine: Machine, findings: Findings
    ) -> None:  # fmt: skip
        self.frame, self.base, self.given, self.machine, self.findings = frame, base, given, machine, findings
        self._known = dict[tuple[Saving, int], Tried | None]()

    def fill(self) -> Iterable[Tried]:
        # adds what fits to the findings; yields what was tried for least memory
        frame, sizes = self.frame, list[int]()
        dp, shares = frame.dp(self.machine.gpus), frame.cp * frame.sp
        tries = plans.savings(self.base, self.given, dp * shares)
        ways = plans.most_saving(tries)
        for size in plans.micro_batches(self.base, self.given, dp, shares):
            smallest = list[Tried]()
            for saving in ways:
                tried = self.try_one(saving, size)
                smallest += [] if tried is None else [tried]
                if tried is not None and sizes and self.fits(tried):
                    break  # of the smallest size all are tried
            yield from smallest
            if not any(map(self.fits, smallest)):
                break
            sizes.append(size)
            least = min(smallest, key=lambda tried: tried.needs).layout
            ways.sort(key=lambda way: way != (least.zero, least.recompute))
        taken: Counter[Saving] = Counter()
        for size in reversed(sizes):
            self._add(tries, size, taken, sizes[0])

    def _add(self, tries: list[Saving], size: int, taken: Counter[Saving], smallest: int) -> None:
        # what does not fit with the smallest micro-batch is not tried with others
        fits: list[Saving] = []
        for saving in tries:
            if any(plans.saves_no_less(other, saving) and other[0] > 0 for other in fits):
                continue
            if taken[saving] == _SIZES:  # it fits, since larger ones did
                fits.append(saving)
                continue
            least = self.try_one(saving, smallest)
            tried = least if least is None or not self.fits(least) else self.try_one(saving, size)
            if tried is not None and self.fits(tried):
                fits.append(saving)
                taken[saving] += 1
                self.findings.fitting.append(tried)

    def try_one(self, saving: Saving, size: int) -> Tried | None:
        # memory and time of one layout, computed once; None if it breaks a rule
        if (saving, size) in self._known:
            return self._known[saving, size]
        layout = replace(self.frame, zero=saving[0], recompute=saving[1], micro_batch=size)
        config, machine, tried = layout.apply(self.base), self.machine, None
        if not violations(config, machine.gpus):
            self.findings.tried += 1
            ranks = rough_ranks(config, machine.gpus, _device(machine))
            plan = max((rank.plan() for rank in ranks), key=lambda plan: plan.peak)
            peak = with_saves(plan, config, machine.gpus, _device(machine)).peak
            needs = peak + reserve(machine, peak, num_groups(layout, machine.gpus))
            tried = Tried(layout, config, needs, max(rough_seconds(rank, machine) for rank in ranks))
        self._known[saving, size] = tried
        return tried

    def fits(self, tried: Tried) -> bool:
        return tried.needs * _SURE <= self.machine.memory_bytes


def num_groups(layout: ParallelPlan, gpus: int) -> int:
    """Return the number of a rank's communicators with several members: of the axes, five of a pipeline, two of ep."""
    of_stages = 5 * (layout.pp > 1) + 2 * (layout.ep > 1)  # each direction to each neighbour, and all stages
    sizes = (gpus, layout.tp, layout.sp, layout.cp, layout.dp(gpus) * layout.cp * layout.sp)
    return of_stages + sum(size > 1 for size in sizes)
