"""How even the ranks' attention is when rows of packed documents are dealt by area (--balance-rows) and by index: simulated.

    python benchmarks/balance_rows.py [--steps 200] [--write]

Rows are those of benchmarks/context_plan.py: documents of a log-normal length with a median of 1,500 tokens and sigma
1.4, none longer than a quarter of the row, or than the row. A table of balance, without a model or a process group, and
one of what the dealing costs. ``--write`` writes docs/benchmarks/balance_rows.md; times apart it repeats
to the last digit.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from common import REPOSITORY
from context_plan import packed_row

from megatron_sp.data.gpt_dataset import GPTDataset, GPTOptions, PackedDataset
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import NullTokenizer
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.parallel.load_balancing import RowDealer, area_of_documents, order_by_area

K = 1024
HIDDEN = 4096
LAYOUTS = (
    (8, 1, 1),
    (8, 4, 1),
    (8, 1, 4),
    (8, 16, 1),
    (64, 1, 1),
    (64, 8, 1),
    (64, 2, 4),
)  # dp, micro-batches, rows of each


class Balance(NamedTuple):
    """How uneven a step is, each as a multiple of the mean over the ranks.

    Attributes:
        ranks: area of the rank that has most.
        lockstep: sum over the micro-batches of the area of the rank that has most of it.
        flops: all FLOPs of the rank that has most area, for dense layers of ``HIDDEN`` with an MLP of four times that.
    """

    ranks: float
    lockstep: float
    flops: float


def row(chance: random.Random, s: int, whole: bool) -> list[int]:
    """Tokens of each document of a row; with ``whole`` one may fill it."""
    ends = packed_row(chance, 4 * s if whole else s)
    return np.diff([0, *(end for end in ends if end < s), s]).tolist()


def balance_of(areas: Sequence[int], order: np.ndarray, s: int, dp: int, b: int) -> Balance:
    cells = np.asarray(areas, np.float64)[order].reshape(-1, dp, b).sum(2)  # [micro-batches, dp]
    of_ranks = cells.sum(0)
    products = 6 * HIDDEN * s * b * len(cells)  # 24 h^2 FLOPs a token and layer, 4 h a pair
    mean = of_ranks.mean()
    return Balance(of_ranks.max() / mean, cells.max(1).sum() / mean, (products + of_ranks.max()) / (products + mean))


def table_of_balance(steps: int, k: int) -> Iterator[str]:
    yield "| row | longest document | dp | micro-batches | rows of each | largest area / mean | in lockstep | FLOPs of a step |"
    yield "|---" * 8 + "|"
    for s, whole in ((8 * k, False), (8 * k, True), (64 * k, False), (64 * k, True)):
        for dp, micro_batches, b in LAYOUTS:
            chance = random.Random(0)
            found: dict[str, list[Balance]] = {"by index": [], "dealt": []}
            for _ in range(max(1, steps // dp)):
                areas = [
                    area_of_documents(np.array(row(chance, s, whole)), True, None)
                    for _ in range(dp * micro_batches * b)
                ]
                found["by index"].append(balance_of(areas, np.arange(len(areas)), s, dp, b))
                found["dealt"].append(balance_of(areas, order_by_area(areas, b, dp), s, dp, b))
            means = [[fmean(step[measure] for step in found[how]) for how in found] for measure in range(3)]
            cells = [f"{before:.2f} -> {after:.2f}" for before, after in means]
            yield (
                f"| {s // k}K | {'the row' if whole else 'a quarter'} | {dp} | {micro_batches} | {b} | "
                + " | ".join(cells)
                + " |"
            )


def least_ms(rounds: int, work: Callable[[], object]) -> float:
    """Processor time, which on a machine that others use varies less than time."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def table_of_costs(rounds: int, k: int) -> Iterator[str]:
    yield "| row | documents of a row | rows of a step | dp | lengths, ms | dealing, ms | reading the rows instead, ms |"
    yield "|---" * 7 + "|"
    chance = random.Random(1)
    for s, num_rows in ((8 * k, 256), (64 * k, 32)):
        with tempfile.TemporaryDirectory() as folder:
            with IndexedDatasetWriter(Path(folder) / "x", dtype=np.uint16) as writer:
                for _ in range(num_rows + 1):
                    for length in row(chance, s, True):
                        writer.add_document(
                            np.append(np.ones(length - 1, np.int64), 2) if length > 1 else np.array([2])
                        )
            tokenizer = NullTokenizer(3)
            indexed = IndexedDataset(Path(folder) / "x")
            options = GPTOptions(s, 1)
            data = PackedDataset(
                GPTDataset(indexed, (0, len(indexed)), options, num_samples=num_rows, tokenizer=tokenizer),
                2,
                positions=False,
                documents=True,
            )
            documents = fmean(len(data.document_lengths(i)) for i in range(num_rows))
            for count, dp in ((64, 8), (512, 64), (4096, 512)):
                ids = np.arange(count) % num_rows
                dealer = RowDealer(data.document_lengths, 1, dp)
                areas = dealer.areas(ids)
                lengths = least_ms(rounds, lambda dealer=dealer, ids=ids: dealer.areas(ids))
                dealing = least_ms(rounds, lambda areas=areas, dp=dp: order_by_area(areas, 1, dp))
                read = least_ms(rounds, lambda data=data, n=num_rows: [data[i] for i in range(n)]) / num_rows * count
                yield f"| {s // k}K | {documents:.1f} | {count:,} | {dp} | {lengths:.1f} | {dealing:.1f} | {read:,.0f} |"
            indexed.close()


PAGE = """# Rows dealt by their attention, simulated

Written by `python benchmarks/balance_rows.py --write`, which says how documents are drawn; {steps} / dp steps for each line. Numbers of
the dealing (`megatron_sp/parallel/load_balancing.py`), without a model or a GPU; no training step was timed.

## How even ranks are

By index -> with `--balance-rows`. Area is the number of pairs of tokens that see each other; largest / mean is of the areas of the
ranks in a step. In lockstep: the sum over the micro-batches of the largest area / mean area of a rank, which is what would count if
ranks waited for one another after every micro-batch; `--zero-stage` 2 and 3 come near that, the others wait at the end of the step.
FLOPs of a step: those of the rank with the largest area / mean, for dense layers with h = {hidden:,}: what a step can gain if attention
runs at the rate of the matrix products, without lockstep. Smaller models and slower attention gain more.

{balance}

With one row for each rank there is nothing to deal. With several, ranks are within a few percent of the mean, unless one row alone is
more than a rank's share, as one with a document that fills it: that row is for context parallelism, which divides it. Rows stay where
they are by index unless the largest area of a rank becomes smaller.

## What it costs

For each step and on every rank, in a thread that reads ahead, so under the step before, unless `--num-workers 0`. Processor time, least
of five, of one core of a shared machine. Lengths come from the index of the data set, which is in memory. The alternatives: every rank
reads all rows of the step to see where their documents end, which takes what the last column says from a file in the page cache, and dp
times the reads of a file system otherwise; or each reads a share of them and the areas are exchanged, a few bytes, after which most
rows have to be read again by whoever computes them.

{costs}
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each line, divided by dp (default: 200)")
    parser.add_argument("--smoke", action="store_true", help="short rows, one step of each line")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/balance_rows.md")
    options: Any = parser.parse_args(argv)
    k, steps, rounds = (16, 1, 1) if options.smoke else (K, options.steps, 5)
    balance, costs = ("\n".join(table) for table in (table_of_balance(steps, k), table_of_costs(rounds, k)))
    text = PAGE.format(steps=steps, hidden=HIDDEN, balance=balance, costs=costs)
    if options.write:
        (REPOSITORY / "docs/benchmarks/balance_rows.md").write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
