"""Search of all layouts for the fastest ones that fit, with a reason for each group of those that do not.

Rough forms of memory and time order all layouts (``estimate/rough.py``, ``forecast.py``). Of each choice of axes the
fastest are run without contents, and these runs tell what they need and how fast they are (``fake_run.py``). A layout
that only saves more memory than a fitting one, at the same or a higher cost in time, is skipped: ZeRO stages and
recomputation are tried from the cheapest on until one fits, larger micro-batches as long as one fits, and for each
combination only the largest few micro-batches that fit are timed. What does not fit with the smallest micro-batch is
not tried with larger ones.
"""

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
from megatron_sp.planner.forecast import rough_seconds, step_flops
from megatron_sp.planner.machine import Machine, reserve
from megatron_sp.planner.parallel_plans import (
    Axes,
    Given,
    ParallelPlan,
    Saving,
    frames,
    micro_batches,
    most_saving,
    saves_no_less,
    savings,
)
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
        """Predicted tokens per second of all GPUs together."""
        return self.tokens / self.time.seconds

    @property
    def mfu(self) -> float:
        """Predicted model FLOPs utilization: useful FLOPs relative to the peak of the GPUs."""
        return self.model_flops / self.time.seconds / (self.machine.gpu.peak_tflops * 1e12 * self.machine.gpus)

    @property
    def needs(self) -> int:
        """Memory that a GPU needs, with the reserve."""
        return self.memory.peak + self.reserve

    @property
    def is_tight(self) -> bool:
        """True if the layout leaves under 5 % of the memory, which may be less than the error of the prediction."""
        return self.needs > TIGHT * self.machine.memory_bytes


@dataclass
class Rejected:
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
    smallest: tuple[int, ParallelPlan] | None = None  # bytes and layout that needs least, whether it fits or not
    tried: int = 0  # layouts whose memory was computed

    def best_of_each(self) -> list[Candidate]:
        """Return the first candidate for each choice of tp, sp, cp and pp sizes."""
        found: dict[Axes, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.layout.axes, candidate)
        return list(found.values())


def search(base: Config, given: Given, machine: Machine, processes: int = 1, finalists: int = FINALISTS) -> Findings:
    """Search all layouts.

    Args:
        base: model, batch and precision, with ``vocab_size`` and ``global_batch_size`` set.
        given: fixed fields.
        machine: machine of the run.
        processes: that share the runs; what is found does not depend on them.
        finalists: layouts that are run.
    """
    found, least, refused = Findings(), dict[Axes, tuple[int, ParallelPlan]](), dict[str, list[ParallelPlan]]()
    for layout in frames(base, given, machine.gpus, machine.per_node):
        # the first rule that it breaks with micro-batches of 1
        if broken := next(iter(violations(layout.apply(base), machine.gpus)), ""):
            refused.setdefault(broken, []).append(layout)
            continue
        for one in _Frame(layout, base, given, machine).fill(found):
            least[layout.axes] = min(least.get(layout.axes, one), one, key=lambda each: each[0])
    found.fitting.sort(key=lambda one: (one.seconds, one.needs))
    found.fitting += _in_chunks(found, base, given, machine)
    found.fitting.sort(key=lambda one: (one.seconds, one.needs))
    _run(found, machine, processes, finalists, least)
    fitting = {c.layout.axes for c in found.fitting}
    found.rejected = [*_too_large(least, fitting, machine), *_refused(refused)]
    found.smallest = min(least.values(), key=lambda each: each[0]) if least else None
    return found


def _run(
    found: Findings, machine: Machine, processes: int, finalists: int, least: dict[Axes, tuple[int, ParallelPlan]]
) -> None:
    """Run the best layouts, of each choice of axes the fastest first; where none fits the next ones, until some do."""
    left, done = list(found.fitting), set[ParallelPlan]()
    for _ in range(_ROUNDS):
        if not left:
            break
        places, order = Counter[Axes](), list[tuple[int, int, Tried]]()
        for number, one in enumerate(left):
            order.append((places[one.layout.axes], number, one))
            places[one.layout.axes] += 1
        chosen = list(places)[: max(_AXES, finalists // 3)]
        order = sorted((each for each in order if each[2].layout.axes in chosen), key=lambda each: each[:2])
        batch = [one for _, _, one in order][:finalists]
        made = _predictions(batch, machine, processes)
        for one, candidate in zip(batch, made, strict=True):
            done.add(one.layout)
            if candidate is None:
                found.fitting.remove(one)
            elif candidate.needs <= machine.memory_bytes:
                found.candidates.append(candidate)
            else:
                found.fitting.remove(one)
                axes, needs = one.layout.axes, (candidate.needs, one.layout)
                least[axes] = min(least[axes], needs, key=lambda each: each[0])
        missing = {one.layout.axes for one in batch} - {c.layout.axes for c in found.candidates}
        left = [one for one in found.fitting if one.layout not in done]
        left = [one for one in left if one.layout.axes in missing or not found.candidates]
    found.candidates.sort(key=lambda candidate: (candidate.is_tight, -candidate.tokens_per_second, candidate.needs))


def _predictions(batch: Sequence[Tried], machine: Machine, processes: int) -> list[Candidate | None]:
    """Return what runs of layouts predict, in several processes where there are many and the system allows them."""
    if processes > 1 and len(batch) >= _FEW:
        context = multiprocessing.get_context("spawn")  # this process may have threads
        try:
            number = min(processes, _PROCESSES, len(batch))
            with ProcessPoolExecutor(number, context, initializer=_leave_interrupts) as pool:
                return list(pool.map(partial(_predicted, machine=machine), batch))
        except (BrokenProcessPool, OSError, NotImplementedError):
            pass
    return [_predicted(one, machine) for one in batch]


def _predicted(one: Tried, machine: Machine) -> Candidate | None:
    """Run a layout; None: it cannot be run without contents."""
    from megatron_sp.planner.fake_run import predict  # torch takes a second

    config, gpus = one.config, machine.gpus
    try:
        found = predict(config, gpus, _device(machine), machine)
    except (RuntimeError, TypeError):
        return None
    memory = with_saves(found.memory, config, gpus, _device(machine))
    assert found.time is not None
    kept = reserve(machine, memory.peak, num_groups(one.layout, gpus))
    return Candidate(one.layout, config, machine, memory, kept, found.time, *step_flops(config, gpus))


def _device(machine: Machine) -> Device:
    return "cpu" if machine.is_cpu else "cuda"


def _in_chunks(found: Findings, base: Config, given: Given, machine: Machine) -> list[Tried]:
    """Return the fastest layout of each choice of axes with tokens sent to experts in two chunks."""
    if ("parallel", "moe_chunks") in given:
        return []
    made, seen = [], set[Axes]()
    for best in found.fitting:
        layout = best.layout
        if layout.axes in seen:
            continue
        seen.add(layout.axes)
        if layout.ep > 1:
            frame = _Frame(replace(layout, moe_chunks=2), base, given, machine)
            other = frame.try_one((layout.zero, layout.recompute), layout.micro_batch, found)
            made += [other] if other is not None and frame.fits(other) else []
    return made


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that has asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Frame:
    """Search over micro-batch sizes, ZeRO stages and recomputations of one layout of ``frames``."""

    def __init__(self, frame: ParallelPlan, base: Config, given: Given, machine: Machine) -> None:
        self.frame, self.base, self.given, self.machine = frame, base, given, machine
        self.dp = frame.dp(machine.gpus)
        self._known = dict[tuple[Saving, int], Tried | None]()

    def fill(self, found: Findings) -> Iterable[tuple[int, ParallelPlan]]:
        """Add the candidates that fit; yield (bytes, layout) of those tried for least memory."""
        tries = savings(self.base, self.given, self.dp * self.frame.cp * self.frame.sp)
        ways, sizes = most_saving(tries), list[int]()
        for size in micro_batches(self.base, self.given, self.dp, self.frame.cp * self.frame.sp):
            smallest = self._smallest(ways, size, found, all_of_them=not sizes)
            yield from ((one.needs, one.layout) for one in smallest)
            if not any(self.fits(one) for one in smallest):
                break
            sizes.append(size)
            least = min(smallest, key=lambda one: one.needs).layout
            ways.sort(key=lambda way: way != (least.zero, least.recompute))
        taken: Counter[Saving] = Counter()
        for size in reversed(sizes):
            self._add(tries, size, found, taken, sizes[0])

    def _smallest(self, ways: list[Saving], size: int, found: Findings, *, all_of_them: bool) -> list[Tried]:
        """Return the memory of the layouts in ``ways``; unless ``all_of_them``, stop at the first that fits."""
        tried: list[Tried] = []
        for saving in ways:
            one = self.try_one(saving, size, found)
            tried += [] if one is None else [one]
            if one is not None and not all_of_them and self.fits(one):
                break
        return tried

    def _add(self, tries: list[Saving], size: int, found: Findings, taken: Counter[Saving], smallest: int) -> None:
        """Add the candidates of a micro-batch size; what does not fit with the smallest is not tried with others."""
        fits: list[Saving] = []
        for saving in tries:
            if any(saves_no_less(other, saving) and other[0] > 0 for other in fits):
                continue
            if taken[saving] == _SIZES:  # it fits, since larger ones did
                fits.append(saving)
                continue
            least = self.try_one(saving, smallest, found)
            tried = least if least is None or not self.fits(least) else self.try_one(saving, size, found)
            if tried is not None and self.fits(tried):
                fits.append(saving)
                taken[saving] += 1
                found.fitting.append(tried)

    def try_one(self, saving: Saving, size: int, found: Findings) -> Tried | None:
        """Return memory and time of one layout, computed once; None if it breaks a rule."""
        if (saving, size) not in self._known:
            self._known[saving, size] = self._compute(saving, size, found)
        return self._known[saving, size]

    def _compute(self, saving: Saving, size: int, found: Findings) -> Tried | None:
        layout = ParallelPlan(**{**vars(self.frame), "zero": saving[0], "recompute": saving[1], "micro_batch": size})
        config = layout.apply(self.base)
        if violations(config, self.machine.gpus):
            return None
        found.tried += 1
        gpus = self.machine.gpus
        ranks = rough_ranks(config, gpus, _device(self.machine))
        plan = max((rank.plan() for rank in ranks), key=lambda plan: plan.peak)
        peak = with_saves(plan, config, gpus, _device(self.machine)).peak
        seconds = max(rough_seconds(rank, self.machine) for rank in ranks)
        return Tried(layout, config, peak + reserve(self.machine, peak, num_groups(layout, gpus)), seconds)

    def fits(self, tried: Tried) -> bool:
        """Return whether a layout may fit."""
        return tried.needs * _SURE <= self.machine.memory_bytes


def num_groups(layout: ParallelPlan, gpus: int) -> int:
    """Return the number of a rank's communicators with several members: of the axes, five of a pipeline, two of ep."""
    of_stages = 5 * (layout.pp > 1) + 2 * (layout.ep > 1)  # each direction to each neighbour, and all stages
    sizes = (gpus, layout.tp, layout.sp, layout.cp, layout.dp(gpus) * layout.cp * layout.sp)
    return of_stages + sum(size > 1 for size in sizes)


def _too_large(least: dict[Axes, tuple[int, ParallelPlan]], fitting: set[Axes], machine: Machine) -> list[Rejected]:
    have, made = machine.memory_bytes / 2**30, []
    for axes, (needs, layout) in sorted(least.items()):
        if axes not in fitting:
            how = ", ".join(layout.words(machine.gpus).split(", ")[sum(size > 1 for size in axes) :])
            made.append(Rejected(_name(layout), f"needs {needs / 2**30:.1f} GiB of {have:.1f} at least ({how})", needs))
    return made


def _refused(refused: dict[str, list[ParallelPlan]]) -> list[Rejected]:
    by_rule: dict[str, list[ParallelPlan]] = {}
    for text, layouts in refused.items():
        rule = text.split(": ")[0].split("; use")[0]
        by_rule.setdefault(rule, []).extend(layouts)
    return [Rejected(_names(layouts), rule) for rule, layouts in by_rule.items()]


def _names(layouts: list[ParallelPlan]) -> str:
    pairs = list(dict.fromkeys(_name(each) for each in layouts))
    return "; ".join(pairs[:3]) + (f" and {len(pairs) - 3} more" if len(pairs) > 3 else "")


def _name(layout: ParallelPlan) -> str:
    more = (f", cp {layout.cp}" if layout.cp > 1 else "") + (f", pp {layout.pp}" if layout.pp > 1 else "")
    return f"tp {layout.tp}, sp {layout.sp}{more}"
