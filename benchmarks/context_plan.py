"""How context parallelism cuts rows, sends keys and plans: simulated, without a model, a process group or a GPU.

    python benchmarks/context_plan.py [--rows 8] [--write]

Packed rows are made of documents whose lengths are log-normal with a median of 1,500 tokens and sigma 1.4 (mean 4,000:
web text with a tail of books and code files), none longer than a quarter of the row; the last is cut off at the row's
end. Three tables: what a cut costs in balance, rows sent and pieces; what the rule for the number of chunks costs
against others, for links and GPUs of several speeds; and milliseconds of planning, least of five. ``--write`` writes
docs/benchmarks/context_plan.md; times apart it repeats to the last digit.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import REPOSITORY

from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.heads import deal
from megatron_sp.parallel.row_mask import RowMask, Runs, merge_runs
from megatron_sp.planner.context_rows import context_svg

CHUNKS = (1, 2, 4, 8, 16)
PAIRS_PER_ROW = (128, 512, 2048, 8192)
Cut = Callable[[RowMask, int], tuple[Runs, ...]]


def packed_row(chance: random.Random, length: int, median: float = 1500, sigma: float = 1.4) -> tuple[int, ...]:
    """Ends of the documents of a packed row."""
    ends = [0]
    while ends[-1] < length:
        tokens = int(chance.lognormvariate(math.log(median), sigma))
        ends.append(min(length, ends[-1] + max(16, min(tokens, length // 4))))
    return tuple(ends[1:])


# ---- cuts


def zigzag(mask: RowMask, c: int) -> tuple[Runs, ...]:
    chunks = [(chunk.start, chunk.stop) for chunk in deal(mask.length, 2 * c)]
    return tuple(merge_runs((chunks[i], chunks[2 * c - 1 - i])) for i in range(c))


def zigzag_of_documents(mask: RowMask, c: int) -> tuple[Runs, ...]:
    """Each document as a zigzag of its own, as TransformerEngine, USP and ring-flash-attention do; of the first sequence."""
    ends = (mask.documents or ((mask.length,),))[0]
    shares: list[list[tuple[int, int]]] = [[] for _ in range(c)]
    for start, stop in zip((0, *ends), ends, strict=False):
        for index, chunk in enumerate(deal(stop - start, 2 * c)):
            shares[min(index, 2 * c - 1 - index)].append((start + chunk.start, start + chunk.stop))
    return tuple(map(merge_runs, shares))


def by_area_alone(k: int) -> Cut:
    """The longest-processing-time rule, which knows no documents."""

    def cut(mask: RowMask, c: int) -> tuple[Runs, ...]:
        chunks = [(chunk.start, chunk.stop) for chunk in deal(mask.length, c * k)]
        each = plan_context(mask, tuple((chunk,) for chunk in chunks))
        areas = [each.area(chunk) for chunk in range(c * k)]
        loads, shares = [0] * c, [list[tuple[int, int]]() for _ in range(c)]
        for chunk in sorted(range(c * k), key=lambda chunk: -areas[chunk]):
            rank = min((rank for rank in range(c) if len(shares[rank]) < k), key=loads.__getitem__)
            loads[rank] += areas[chunk]
            shares[rank].append(chunks[chunk])
        return tuple(map(merge_runs, shares))

    return cut


def ours(k: int | None) -> Cut:
    return lambda mask, c: cut_row(mask, c, k)


CUTS: dict[str, Cut] = {
    "contiguous": ours(1), "zigzag of the row": zigzag, "zigzag of each document": zigzag_of_documents,
    "by area alone, 4 chunks": by_area_alone(4), "by area alone, 8 chunks": by_area_alone(8),
    "ours, 2 chunks": ours(2), "ours, 4 chunks": ours(4), "ours, 8 chunks": ours(8), "ours, 16 chunks": ours(16), "**ours**": ours(None),
}  # fmt: skip


def num_pieces(plan: ContextPlan) -> float:
    """Pieces of a rank, on average."""
    return sum(len(plan.pieces(i, j)) for i in range(plan.cp_size) for j in range(plan.cp_size)) / plan.cp_size


def table_of_cuts(rows: int, k: int) -> Iterator[str]:
    """A line for each cut: largest area / mean; rows received / a ring's, mean (worst rank); pieces of a rank."""
    chance = random.Random(0)
    packed = {s: [RowMask(k * s, documents=(packed_row(chance, k * s),)) for _ in range(rows)] for s in (64, 256, 1024)}
    cases: dict[str, tuple[int, Sequence[RowMask]]] = {
        "documents, 64K, cp 4": (4, packed[64]), "64K, cp 8": (8, packed[64]), "256K, cp 8": (8, packed[256]),
        "1M, cp 8": (8, packed[1024]),
        "one document, 64K, cp 8": (8, [RowMask(64 * k)]), "window 4,096, 64K, cp 8": (8, [RowMask(64 * k, window=4 * k)]),
    }  # fmt: skip
    yield "| | " + " | ".join(cases) + " |"
    yield "|---" * (1 + len(cases)) + "|"
    for name, cut in CUTS.items():
        cells = []
        for c, masks in cases.values():
            if name == "zigzag of each document" and masks[0].documents is None:
                cells.append("-")
                continue
            plans = [plan_context(mask, cut(mask, c)) for mask in masks]
            balance, mean = fmean(plan.balance for plan in plans), fmean(plan.ring_share for plan in plans)
            worst = fmean(plan.worst_ring_share for plan in plans)
            cells.append(f"{balance:.2f}; {mean:.2f} ({worst:.2f}); {fmean(map(num_pieces, plans)):.0f}")
        yield f"| {name} | " + " | ".join(cells) + " |"


# ---- the number of chunks


def masks_by_kind(k: int, sizes: Sequence[int]) -> dict[str, list[tuple[RowMask, int]]]:
    chance = random.Random(1)
    found: dict[str, list[tuple[RowMask, int]]] = {}
    for s, c in itertools.product((16 * k, 64 * k, 256 * k), sizes):

        def add(kind: str, mask: RowMask, c: int = c) -> None:
            found.setdefault(kind, []).append((mask, c))

        add("causal", RowMask(s))
        for window in (k, 4 * k, 16 * k):
            if window < s:
                add("windows", RowMask(s, window=window))
        for median, sigma in ((300, 0.7), (1500, 1.4), (8000, 1.0)):
            for b in (1, 4):
                add(
                    f"documents, median {median:,}",
                    RowMask(s, documents=tuple(packed_row(chance, s, median, sigma) for _ in range(b))),
                )
        documents = tuple([packed_row(chance, s)])
        add("documents, window 4,096", RowMask(s, window=4 * k, documents=documents))
        if s <= 64 * k:
            add("bidirectional documents", RowMask(s, causal=False, documents=documents))
    return found


def times_of(plan: ContextPlan) -> dict[int, float]:
    """Time of the slowest rank where the exchange is hidden, by what a row costs, in pairs."""
    b = plan.mask.sequences
    work = [(plan.area(i), plan.num_received(i, b)) for i in range(plan.cp_size)]
    return {cost: max(max(area, cost * received) for area, received in work) for cost in PAIRS_PER_ROW}


def balance_rule(mask: RowMask, c: int) -> tuple[Runs, ...]:
    """The fewest chunks, up to 8, that are balanced within 2 %, else the best of them."""
    cuts = [cut_row(mask, c, k) for k in CHUNKS[:4]]
    balances = [plan_context(mask, cut).balance for cut in cuts]
    return next(
        (cut for cut, balance in zip(cuts, balances, strict=True) if balance <= 1.02),
        cuts[balances.index(min(balances))],
    )


RULES: dict[str, Cut] = {
    "1 chunk": ours(1), "2 chunks": ours(2), "8 chunks": ours(8), "balanced within 2 %, else the best": balance_rule,
    "**ours**": ours(None),
}  # fmt: skip


def table_of_rules(k: int, sizes: Sequence[int]) -> Iterator[str]:
    """A line for each kind of mask and rule: time / that of the best number of chunks, mean (worst case), by what a row costs."""
    yield (
        "| mask | rule | "
        + " | ".join(f"a row costs {cost:,} pairs" for cost in PAIRS_PER_ROW)
        + " | balance | ring share |"
    )
    yield "|---" * (4 + len(PAIRS_PER_ROW)) + "|"
    for kind, cases in masks_by_kind(k, sizes).items():
        best = [
            {cost: min(times[cost] for times in of_all) for cost in PAIRS_PER_ROW}
            for of_all in (
                [times_of(plan_context(mask, cut_row(mask, c, chunks))) for chunks in CHUNKS] for mask, c in cases
            )
        ]
        for name, rule in RULES.items():
            plans = [plan_context(mask, rule(mask, c)) for mask, c in cases]
            times = [times_of(plan) for plan in plans]
            ratios = {
                cost: [of_plan[cost] / of_best[cost] for of_plan, of_best in zip(times, best, strict=True)]
                for cost in PAIRS_PER_ROW
            }
            cells = [f"{fmean(of_cost):.2f} ({max(of_cost):.2f})" for of_cost in ratios.values()]
            shares = f"{fmean(plan.balance for plan in plans):.2f} | {fmean(plan.ring_share for plan in plans):.2f}"
            yield f"| {kind} | {name} | " + " | ".join(cells) + f" | {shares} |"


# ---- planning


def table_of_times(k: int, rounds: int) -> Iterator[str]:
    """A line for each row: milliseconds to cut it, to plan what one rank needs, and to find both again."""
    chance = random.Random(2)
    yield "| row | documents | cp | cut, ms | plan of a rank, ms | again, ms |"
    yield "|---" * 6 + "|"
    for s, c in ((64, 8), (256, 8), (1024, 8), (1024, 64)):
        for documents in sorted(
            {packed_row(chance, k * s), tuple([*sorted(chance.sample(range(1, k * s), 999)), k * s])}, key=len
        ):
            least = [math.inf] * 3
            for turn in range(rounds):  # another length each time, so that nothing is known
                mask = RowMask(k * s + turn, documents=((*documents, k * s + turn) if turn else documents,))
                began = time.perf_counter()
                runs = cut_row(mask, c)
                cut = time.perf_counter()
                plan = plan_context(mask, runs)
                for j in range(c):
                    plan.local_rows(1, j), plan.local_rows(j, 1), plan.pieces(1, j)
                planned = time.perf_counter()
                plan_context(RowMask(mask.length, documents=mask.documents), cut_row(mask, c)).pieces(1, 0)
                again = time.perf_counter()
                least = [min(pair) for pair in zip(least, (cut - began, planned - cut, again - planned), strict=True)]
            yield (
                f"| {s}K | {len(documents):,} | {c} | " + " | ".join(f"{1e3 * seconds:.2f}" for seconds in least) + " |"
            )


PAGE = """# The plan of context parallelism, simulated

Written by `python benchmarks/context_plan.py --write`, which says how documents are drawn; {rows} rows of each length. Numbers of the plan
(`megatron_sp/parallel/context_plan.py`), without a model or a GPU.

## What a cut costs

Largest area of a rank / mean; rows of keys and values received, as a share of those of a ring, mean (worst rank); pieces of a rank. The
exchange is our plan's in every line: a ring sends 1.00, whatever the cut. By area alone is the longest-processing-time rule.

{cuts}

Our cut keeps chunks of a document together where balance allows it (`megatron_sp/parallel/load_balancing.py`). With 8 chunks
it sends about 60 % of what the rule alone sends, in two thirds of the pieces; with the number of chunks that it takes by itself
about half. Zigzags of each document are balanced as well, and send what one document sends, in an order of magnitude more pieces.

![Positions of each of four ranks, and the keys and values that it receives, of one of the rows of 64K](../images/context_plan.svg)

## How many chunks

Time of the slowest rank where an exchange is hidden (of computing its pairs or receiving its rows, whichever is longer), divided by that
with the best number of chunks, mean (worst case), over rows of 16K to 256K and cp 2 to 16. What a row costs is a matter of the machine,
e F / (2 r B) pairs with e bytes an element, F FLOP/s, r query heads for each key head and a link of B bytes/s. In bf16 with 600 TFLOP/s:
440 for r = 4 over NVLink (340 GB/s), 1,800 for r = 1; 3,600 for r = 4 over 400 Gbit/s.

{rules}

"Balanced within 2 %" takes the fewest of 1, 2, 4 and 8 chunks with that balance, else those with the best. Balance alone is
the wrong measure where rows are dear: short documents are quickly computed, and what more chunks send is then what one waits
for. Our rule takes a row for 1,024 pairs: where rows are cheaper it gives up some percent of balance, where they are dearer it
saves more. Windows up to a quarter of the row stay in one chunk each: what that costs in balance, at most 14 % of a small part
of the step, more chunks pay several times in rows.

## Milliseconds of planning

Least of five, one core of a shared machine: cutting the row, then what one rank needs (its pieces with all others, what it sends, what it
receives), then both again, which are remembered. Of each length a packed row and one of 1,000 documents.

{times}
"""


def page(rows: int, smoke: bool) -> str:
    k = 16 if smoke else 1024
    tables = (
        table_of_cuts(rows, k),
        table_of_rules(k, (2,) if smoke else (2, 4, 8, 16)),
        table_of_times(k, 1 if smoke else 5),
    )
    cuts, rules, times = ("\n".join(table) for table in tables)
    return PAGE.format(rows=rows, cuts=cuts, rules=rules, times=times)


def picture(k: int) -> str:
    mask = RowMask(64 * k, documents=(packed_row(random.Random(7), 64 * k),))
    return context_svg(plan_context(mask, cut_row(mask, 4)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="packed rows of each length (default: 8)")
    parser.add_argument("--smoke", action="store_true", help="short rows, one of each length")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/context_plan.md and its picture")
    options: Any = parser.parse_args(argv)
    text = page(1 if options.smoke else options.rows, options.smoke)
    if options.write:
        (REPOSITORY / "docs/benchmarks/context_plan.md").write_text(text)
        (REPOSITORY / "docs/images/context_plan.svg").write_text(picture(1024))
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
