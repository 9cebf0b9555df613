"""Exchanges of context parallelism in numbers: which rows of keys and values a cp rank sends and receives in each shift.

The plan is that of a run's mask (``parallel/context_plan.py``) as far as flags say it: causal or bidirectional, and the
window. Documents and padding differ from row to row and are not known beforehand, so each row counts as one document
without padding. Packed documents send less (and are dealt in other chunks); ``num_rows`` of a plan says how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_sp.config.schema import ModelConfig, ParallelConfig
from megatron_sp.estimate.flops import pairs_per_position
from megatron_sp.parallel.context_plan import ContextPlan, PieceKind, cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask, Runs, merge_runs


@dataclass(frozen=True)
class ContextForm:
    """Exchanges of the keys and values of one sequence, in rows (positions); the same for all sequences of a micro-batch.

    Attributes:
        lengths: positions of each cp rank.
        shifts: distances at which at least one rank sends anything to another.
        sent, received: for each rank, rows of each of ``shifts``.
        packed: for each rank, rows of each of ``shifts`` that it copies before it sends them, since they are not one run.
        areas: for each rank, pairs of queries and keys that it computes.
        shortest_run: positions of the shortest run of a rank, of which calls consist.
        keys: for each rank, rows of its own keys: its positions, or with slices of the row those of all slices so far.
        plan: from which all of it follows.
    """

    lengths: tuple[int, ...]
    shifts: tuple[int, ...]
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    packed: tuple[tuple[int, ...], ...]
    areas: tuple[int, ...]
    shortest_run: int
    keys: tuple[int, ...]
    plan: ContextPlan = field(repr=False, compare=False)

    @classmethod
    def of(cls, plan: ContextPlan) -> ContextForm:
        """Return the exchanges of a plan."""
        c = plan.cp_size
        sent, received = ([rows(i, 1) for i in range(c)] for rows in (plan.rows_sent, plan.rows_received))
        shifts = [t for t in range(1, c) if any(of_rank[t - 1] for of_rank in sent)]

        def copied(i: int, t: int) -> int:
            return sent[i][t - 1] if len(plan.local_rows((i + t) % c, i)[0]) > 1 else 0

        def of_shifts(rows: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(of_rank[t - 1] for t in shifts) for of_rank in rows)

        packed = tuple(tuple(copied(i, t) for t in shifts) for i in range(c))
        areas, shortest = (
            tuple(map(plan.area, range(c))),
            min(stop - start for runs in plan.runs for start, stop in runs),
        )
        keys = tuple(sum(stop - start for start, stop in runs) for runs in plan.keys)
        return cls(
            plan.lengths, tuple(shifts), of_shifts(sent), of_shifts(received), packed, areas, shortest, keys, plan
        )

    def calls(self, rank: int, stage: int) -> list[tuple[int, int, PieceKind]]:
        """Return (queries, keys, kind) of the pieces of a stage; the rank's own is -1."""
        source = rank if stage < 0 else (rank - self.shifts[stage]) % len(self.lengths)
        pieces = self.plan.pieces(rank, source)
        return [(p.q_stop - p.q_start, p.k_stop - p.k_start, p.kind) for p in pieces]

    @property
    def longest(self) -> int:
        """Positions of the rank that has most."""
        return max(self.lengths)

    @property
    def most_sent(self) -> int:
        """Rows of keys and values that the rank that sends most sends."""
        return max(map(sum, self.sent))

    @property
    def most_received(self) -> int:
        """Rows that the rank that receives most receives."""
        return max(map(sum, self.received))

    @property
    def slowest(self) -> int:
        """Rows of the largest message of each shift, together: what takes the time, since shifts come one after another."""
        return sum(map(max, zip(*self.sent, strict=True)))

    @lru_cache(maxsize=256)  # noqa: B019 - as few as there are masks and sizes
    def forward_rows(self, ahead: int, *, keeps: bool) -> tuple[int, ...]:
        """Return for each rank the most rows that it holds of others in forward, with those copied for a message that is under way.

        Args:
            ahead: exchanges under way at a time (--cp-stages-ahead).
            keeps: what has arrived is kept, and counted elsewhere.
        """

        def held(rank: int, stage: int) -> int:
            here = 0 if stage < 0 or keeps else self.received[rank][stage]
            return here + self._under_way(rank, stage, ahead, received=not keeps)

        return tuple(
            max(held(rank, stage) for stage in range(-1, len(self.shifts))) for rank in range(len(self.lengths))
        )

    def _under_way(self, rank: int, stage: int, ahead: int, *, received: bool = True) -> int:
        """Return the rows that are received while a rank computes a stage, its own being -1, and those copied to be sent."""
        coming = slice(stage + 1, stage + 1 + ahead)
        return sum(self.packed[rank][coming]) + (sum(self.received[rank][coming]) if received else 0)

    @lru_cache(maxsize=256)  # noqa: B019
    def backward_rows(
        self, ahead: int, *, keeps: bool, width: float, kernel: Callable[[int, int], float] | None = None
    ) -> tuple[float, ...]:
        """Return the most that each rank holds in backward beside its own queries, keys and gradients, in rows of the activations' dtype.

        In a stage these are the keys and values that have arrived and those under way, the gradient that the stage makes,
        that of the stage before on its way to its owner, and what others have found for this rank's rows.

        Args:
            ahead: as for ``forward_rows``.
            keeps: keys and values are kept from forward, and counted elsewhere.
            width: size of an element of a stage's gradient, relative to the activations'.
            kernel: temporaries of the kernel, for (rank, stage), in the same rows; the rank's own stage is -1. None: they are
                counted elsewhere.
        """
        kernel = kernel or _nothing
        found, last = list[float](), len(self.shifts) - 1
        for rank in range(len(self.lengths)):
            received, sent = self.received[rank], self.sent[rank]
            coming = [0 if keeps else self._under_way(rank, stage, ahead) for stage in range(-1, last + 1)]
            back = [
                0,
                *(a + b for a, b in zip(received, sent, strict=True)),
            ]  # both ways of a gradient: of their rows, of mine
            most = max(coming[0], back[-1]) + kernel(rank, -1)
            for stage in range(last + 1):
                here = 0 if keeps else received[stage]
                inside = here + received[stage] * width + kernel(rank, stage)
                rest = coming[stage + 1] + back[stage]
                most = max(most, rest + inside, rest + back[stage + 1])
            found.append(most)
        return tuple(found)

    @property
    def balance(self) -> float:
        """Largest area of a rank divided by the mean."""
        return max(self.areas) * len(self.areas) / sum(self.areas)


def _nothing(rank: int, stage: int) -> float:
    return 0.0


def row_mask_of(model: ModelConfig) -> RowMask:
    """Return the mask of a row as far as flags say it: one document, without padding."""
    assert model.seq_length
    return RowMask(model.seq_length, causal=not model.is_bert, window=None if model.is_bert else model.window_size)


def context_form(model: ModelConfig, parallel: ParallelConfig) -> ContextForm:
    """Return the exchanges over the cp ranks of a configuration."""
    return _form_of(row_mask_of(model), parallel.context_parallel_size, parallel.cp_chunks)


@lru_cache(maxsize=64)
def _form_of(mask: RowMask, cp_size: int, num_chunks: int | None) -> ContextForm:
    form = ContextForm.of(plan_context(mask, cut_row(mask, cp_size, num_chunks)))
    if not form.shifts and not is_local(mask):
        raise RuntimeError(
            f"{cp_size} cp ranks would exchange nothing, and {mask} needs keys of other ranks: each would attend to its own positions"
        )
    return form


def slice_forms(model: ModelConfig, parallel: ParallelConfig) -> tuple[ContextForm, ...]:
    """Return the exchanges of each slice of a row that goes through a pipeline slice by slice; with one cp rank there are none."""
    cost = pairs_per_position(model)
    return _forms_of_slices(
        row_mask_of(model), parallel.context_parallel_size, parallel.cp_chunks, parallel.num_pipeline_slices, cost
    )


@lru_cache(maxsize=64)
def _forms_of_slices(
    mask: RowMask, cp_size: int, num_chunks: int | None, num_slices: int, cost: float
) -> tuple[ContextForm, ...]:
    from megatron_sp.parallel.sequence_slices import cut_into_slices  # which a run without slices does without

    found = list[ContextForm]()
    keys: tuple[Runs, ...] = ((),) * cp_size
    for run in cut_into_slices(mask, num_slices, cost):
        runs = ((run,),) if cp_size == 1 else cut_row(mask, cp_size, num_chunks, run)
        keys = tuple(merge_runs([*before, *of_rank]) for before, of_rank in zip(keys, runs, strict=True))
        found.append(ContextForm.of(plan_context(mask, runs, keys)))
    return tuple(found)


def is_local(mask: RowMask) -> bool:
    """Return whether no query sees any key but its own, so that there is nothing to exchange."""
    return mask.window == 1 or mask.length == 1
