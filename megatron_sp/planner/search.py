"""Search of all layouts for the fastest ones that fit, with a reason for each group of those that do not.

Memory is the closed form of ``estimate/memory.py`` plus a reserve, time is that of ``timing.py``. A layout that only
saves more memory than a fitting one, at the same or a higher cost in time, is skipped: ZeRO stages and recomputation
are tried from the cheapest on until one fits, larger micro-batches as long as one fits, and for each combination only
the largest few micro-batches that fit are timed. What does not fit with the smallest micro-batch is not tried with
larger ones.
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
from megatron_sp.estimate.flops import step_flops_per_token
from megatron_sp.estimate.memory_plan import MemoryPlan
from megatron_sp.estimate.suggestions import plan_of
from megatron_sp.estimate.workload import head_share
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
from megatron_sp.planner.timing import StepTime, step_time

TIGHT = 0.95  # share of the memory above which a layout counts as tight
ENOUGH_FRAMES = 1000  # of layouts for more than one process: a process takes as long to start as a hundred of them take
_CHUNK = 32  # frames that a process searches at a time
_PROCESSES = 16  # at most: each is a Python of its own
_SIZES = 3  # micro-batch sizes of a layout that are timed: the largest, a half and a quarter of it


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        reserve: bytes reserved for anything but tensors.
        tokens: number of tokens of a step.
        model_flops: FLOPs of a step for MFU, counting the query-key pairs that the mask leaves.
    """

    layout: ParallelPlan
    config: Config
    machine: Machine
    memory: MemoryPlan
    reserve: int
    time: StepTime
    tokens: int
    model_flops: float

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
    """Layouts rejected for the same reason.

    Attributes:
        who: their common tp, sp, cp and pp sizes.
        why: the rule they break, or the memory of the one that needs least.
        needs: bytes of that one; 0 if they break a rule.
    """

    who: str
    why: str
    needs: int = 0


@dataclass
class Findings:
    """Results of a search.

    Attributes:
        candidates: layouts that fit, fastest first; those that leave under 5 % of the memory come last.
        rejected: the others.
        smallest: (bytes, layout) of the layout that needs least memory, whether it fits or not.
        tried: number of layouts whose memory was computed.
    """

    candidates: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    smallest: tuple[int, ParallelPlan] | None = None
    tried: int = 0

    def best_of_each(self) -> list[Candidate]:
        """Return the first candidate for each choice of tp, sp, cp and pp sizes."""
        found: dict[Axes, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.layout.axes, candidate)
        return list(found.values())


class _Part(NamedTuple):
    """Results of a search among some frames.

    Attributes:
        found: candidates, in no order, and how many layouts were tried.
        least: for each choice of axes the layout that needs least memory, with its bytes.
        refused: frames that break a rule, by its text.
    """

    found: Findings
    least: dict[Axes, tuple[int, ParallelPlan]]
    refused: dict[str, list[ParallelPlan]]


def search(base: Config, given: Given, machine: Machine, processes: int = 1) -> Findings:
    """Search all layouts.

    Args:
        base: model, batch and precision, with ``vocab_size`` and ``global_batch_size`` set.
        given: fixed fields.
        machine: machine of the run.
        processes: share the work where there are many layouts; what is found does not depend on them.
    """
    tried = list(frames(base, given, machine.gpus, machine.per_node))
    work = partial(_search, base=base, given=given, machine=machine)
    parts = [work(tried)] if processes < 2 or len(tried) < ENOUGH_FRAMES else _shared(work, tried, processes)
    found, least, refused = Findings(), dict[Axes, tuple[int, ParallelPlan]](), dict[str, list[ParallelPlan]]()
    for part in parts:
        found.candidates += part.found.candidates
        found.tried += part.found.tried
        for axes, each in part.least.items():
            least[axes] = min(least.get(axes, each), each, key=lambda one: one[0])
        for text, layouts in part.refused.items():
            refused.setdefault(text, []).extend(layouts)
    _sort(found.candidates)
    found.candidates += _in_chunks(found, base, given, machine)
    _sort(found.candidates)
    fitting = {c.layout.axes for c in found.candidates}
    found.rejected = [*_too_large(least, fitting, machine), *_refused(refused)]
    found.smallest = min(least.values(), key=lambda each: each[0]) if least else None
    return found


def _sort(candidates: list[Candidate]) -> None:
    candidates.sort(key=lambda candidate: (candidate.is_tight, -candidate.tokens_per_second, candidate.needs))


def _in_chunks(found: Findings, base: Config, given: Given, machine: Machine) -> list[Candidate]:
    """Return the fastest layout of each choice of axes with tokens sent to experts in two chunks, where that is faster, and fits."""
    if ("parallel", "moe_chunks") in given:
        return []
    made = []
    for best in found.best_of_each():
        layout = best.layout
        if layout.ep > 1:
            frame = _Frame(replace(layout, moe_chunks=2), base, given, machine)
            other = frame.candidate((layout.zero, layout.recompute), layout.micro_batch, found)
            made += [other] if other is not None and other.time.seconds < best.time.seconds else []
    return made


def _shared(work: partial[_Part], tried: list[ParallelPlan], processes: int) -> list[_Part]:
    """Return what several processes find, in the order of the frames; where they cannot be had, this one searches."""
    chunks = [tried[start : start + _CHUNK] for start in range(0, len(tried), _CHUNK)]
    context = multiprocessing.get_context("spawn")  # this process may have threads
    try:
        with ProcessPoolExecutor(
            min(processes, _PROCESSES, len(chunks)), context, initializer=_leave_interrupts
        ) as pool:
            return list(pool.map(work, chunks))
    except (BrokenProcessPool, OSError, NotImplementedError):
        return [work(tried)]


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that has asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _search(tried: Sequence[ParallelPlan], base: Config, given: Given, machine: Machine) -> _Part:
    part = _Part(Findings(), {}, {})
    for frame in tried:
        broken = _broken(frame, base, machine.gpus)
        if broken:
            part.refused.setdefault(broken, []).append(frame)
            continue
        for needs, layout in _Frame(frame, base, given, machine).fill(part.found):
            axes = layout.axes
            part.least[axes] = min(part.least.get(axes, (needs, layout)), (needs, layout), key=lambda each: each[0])
    return part


def _broken(frame: ParallelPlan, base: Config, gpus: int) -> str:
    """Return the first rule that the layout breaks at micro-batch size 1; "" if there is none."""
    return next(iter(violations(frame.apply(base), gpus)), "")


class _Tried(NamedTuple):
    """A layout with its predicted memory."""

    layout: ParallelPlan
    config: Config
    memory: MemoryPlan
    reserve: int

    @property
    def needs(self) -> int:
        return self.memory.peak + self.reserve


class _Frame:
    """Search over micro-batch sizes, ZeRO stages and recomputations of one layout of ``frames``."""

    def __init__(self, frame: ParallelPlan, base: Config, given: Given, machine: Machine) -> None:
        self.frame, self.base, self.given, self.machine = frame, base, given, machine
        self.dp = frame.dp(machine.gpus)
        self._known = dict[tuple[Saving, int], _Tried | None]()

    def fill(self, found: Findings) -> Iterable[tuple[int, ParallelPlan]]:
        """Add the candidates that fit; yield (bytes, layout) of those tried for least memory."""
        tries = savings(self.base, self.given, self.dp * self.frame.cp * self.frame.sp)
        ways, sizes = most_saving(tries), list[int]()
        for size in micro_batches(self.base, self.given, self.dp, self.frame.cp * self.frame.sp):
            smallest = self._smallest(ways, size, found, all_of_them=not sizes)
            yield from ((one.needs, one.layout) for one in smallest)
            if not any(self._fits(one) for one in smallest):
                break
            sizes.append(size)
            least = min(smallest, key=lambda one: one.needs).layout
            ways.sort(key=lambda way: way != (least.zero, least.recompute))
        taken: Counter[Saving] = Counter()
        for size in reversed(sizes):
            self._add(tries, size, found, taken, sizes[0])

    def _smallest(self, ways: list[Saving], size: int, found: Findings, *, all_of_them: bool) -> list[_Tried]:
        """Return the memory of the layouts in ``ways``; unless ``all_of_them``, stop at the first that fits."""
        tried: list[_Tried] = []
        for saving in ways:
            one = self._try(saving, size, found)
            tried += [] if one is None else [one]
            if one is not None and not all_of_them and self._fits(one):
                break
        return tried

    def _add(self, tries: list[Saving], size: int, found: Findings, taken: Counter[Saving], smallest: int) -> None:
        """Add the candidates of a micro-batch size; what does not fit with the smallest one is not tried with others."""
        fits: list[Saving] = []
        for saving in tries:
            if any(saves_no_less(other, saving) and other[0] > 0 for other in fits):
                continue
            if taken[saving] == _SIZES:  # it fits, since larger ones did
                fits.append(saving)
                continue
            least = self._try(saving, smallest, found)
            tried = least if least is None or not self._fits(least) else self._try(saving, size, found)
            if tried is not None and self._fits(tried):
                fits.append(saving)
                taken[saving] += 1
                found.candidates.append(self._candidate(tried))

    def _try(self, saving: Saving, size: int, found: Findings) -> _Tried | None:
        """Compute the memory of one layout, once; None if it breaks a rule."""
        if (saving, size) not in self._known:
            self._known[saving, size] = self._compute(saving, size, found)
        return self._known[saving, size]

    def _compute(self, saving: Saving, size: int, found: Findings) -> _Tried | None:
        layout = ParallelPlan(**{**vars(self.frame), "zero": saving[0], "recompute": saving[1], "micro_batch": size})
        config = layout.apply(self.base)
        if violations(config, self.machine.gpus):
            return None
        found.tried += 1
        memory = plan_of(config, self.machine.gpus, "cpu" if self.machine.is_cpu else "cuda")
        memory = replace(memory, moments=(memory.worst,))  # a search has thousands of plans
        return _Tried(layout, config, memory, reserve(self.machine, memory.peak, num_groups(layout, self.machine.gpus)))

    def candidate(self, saving: Saving, size: int, found: Findings) -> Candidate | None:
        """Return one layout of the frame; None if it does not fit or breaks a rule."""
        tried = self._try(saving, size, found)
        return self._candidate(tried) if tried is not None and self._fits(tried) else None

    def _fits(self, tried: _Tried) -> bool:
        return tried.needs <= self.machine.memory_bytes

    def _candidate(self, tried: _Tried) -> Candidate:
        config, batch, model = tried.config, tried.config.batch, tried.config.model
        tokens = (batch.global_batch_size or batch.micro_batch_size * self.dp) * (model.seq_length or 0)
        flops = step_flops_per_token(model, head_share(config))[model.is_bert] * tokens
        return Candidate(*tried[:2], self.machine, *tried[2:], step_time(config, self.machine), tokens, flops)


def num_groups(layout: ParallelPlan, gpus: int) -> int:
    """Return the number of a rank's communicators with more than one member: those of the axes, five of a pipeline, two of ep."""
    of_stages = 5 * (layout.pp > 1) + 2 * (layout.ep > 1)  # each direction to each neighbour, and all stages
    return of_stages + sum(
        size > 1 for size in (gpus, layout.tp, layout.sp, layout.cp, layout.dp(gpus) * layout.cp * layout.sp)
    )


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
