"""Exchanges of context parallelism in numbers: which rows of keys and values a cp rank sends and receives in each shift.

The plan is that of a run's mask (``parallel/context_plan.py``) as far as flags say it: causal or bidirectional, and the
window. Documents and padding differ from row to row and are not known beforehand, so each row counts as one document
without padding. Packed documents send less (and are dealt in other chunks); ``num_rows`` of a plan says how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_sp.config.schema import ModelConfig, ParallelConfig
from megatron_sp.parallel.context_plan import ContextPlan, RowMask, cut_row, plan_context


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
    """

    lengths: tuple[int, ...]
    shifts: tuple[int, ...]
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    packed: tuple[tuple[int, ...], ...]
    areas: tuple[int, ...]
    shortest_run: int

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
        areas, shortest = tuple(map(plan.area, range(c))), min(stop - start for runs in plan.runs for start, stop in runs)
        return cls(plan.lengths, tuple(shifts), of_shifts(sent), of_shifts(received), packed, areas, shortest)

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
    def balance(self) -> float:
        """Largest area of a rank divided by the mean."""
        return max(self.areas) * len(self.areas) / sum(self.areas)


def row_mask_of(model: ModelConfig) -> RowMask:
    """Return the mask of a row as far as flags say it: one document, without padding."""
    assert model.seq_length
    return RowMask(model.seq_length, causal=not model.is_bert, window=None if model.is_bert else model.window_size)


def context_form(model: ModelConfig, parallel: ParallelConfig) -> ContextForm:
    """Return the exchanges over the cp ranks of a configuration."""
    return _form_of(row_mask_of(model), parallel.context_parallel_size, parallel.cp_chunks)


@lru_cache(maxsize=64)
def _form_of(mask: RowMask, cp_size: int, num_chunks: int | None) -> ContextForm:
    return ContextForm.of(plan_context(mask, cut_row(mask, cp_size, num_chunks)))
