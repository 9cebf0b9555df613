"""Rows on their way to experts and back: who gets which, once for each rank; each way is the adjoint of the other; bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.recorder import Recorder, WallClock
from megatron_sp.ops.routing import Routed, RoutingSpec, route
from megatron_sp.parallel.expert_exchange import Counts, Journey, RowExchange, RowFormat
from megatron_sp.parallel.parallel_context import ExpertParallel, ParallelContext

E, H = 12, 5


def routed_tokens(rank: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Routed]:
    """The tokens of a rank, each rank with another number of them, and the experts that they choose."""
    g = torch.Generator().manual_seed(rank)
    tokens = 4 + 3 * rank
    logits = torch.randn(tokens, E, dtype=torch.float64 if dtype == torch.float64 else torch.float32, generator=g)
    return torch.randn(tokens, H, dtype=dtype, generator=g), route(logits, RoutingSpec(E, k))


def layer(
    ranks: int, k: int, dtype: torch.dtype, chunks: int = 1
) -> tuple[ExpertParallel, RowExchange, list[Journey], list[list[int]], Tensor, Routed]:
    """Tokens of a rank, and their way."""
    groups = ParallelGroups.create(torch.device("cpu"))
    ep = ExpertParallel.create(groups, ranks, chunks=chunks)
    x, routed = routed_tokens(groups.rank, k, dtype)
    parts = [slice(i * len(x) // chunks, (i + 1) * len(x) // chunks) for i in range(chunks)]
    journeys, of_experts = Counts(ep, routed.chosen, E, parts).read()
    exchange = RowExchange(ep, RowFormat(H, k, dtype, routed.weights.dtype), E // ranks)
    return ep, exchange, journeys, of_experts, x, routed


def check_rows(ranks: int, k: int, dtype: torch.dtype) -> None:
    """Every choice arrives at its expert's rank with its row and its weight, and a row arrives once."""
    ep, exchange, journeys, of_experts, x, routed = layer(ranks, k, dtype)
    rows, choices = exchange.received_rows(exchange.send_rows(x, routed, journeys[0]).wait(), routed, journeys[0], of_experts[0])
    own = range(ep.rank * E // ranks, (ep.rank + 1) * E // ranks)
    want_rows, want = [], []
    for rank in range(ranks):
        tokens, theirs = routed_tokens(rank, k, dtype)
        for token, experts, p in zip(tokens, theirs.chosen.tolist(), theirs.weights, strict=True):
            mine = [j for j, e in enumerate(experts) if e in own]
            if mine:
                want += [(experts[j] - own.start, len(want_rows), float(p[j])) for j in mine]
                want_rows.append(token)
    assert torch.equal(rows, torch.stack(want_rows) if want_rows else rows[:0])
    numbers = [e for e, count in enumerate(choices.counts) for _ in range(count)]
    assert list(zip(numbers, choices.rows.tolist(), choices.weights.tolist(), strict=True)) == sorted(want)


def check_adjoint(ranks: int, k: int, chunks: int) -> None:
    """<send x, y> summed over the ranks is <x, add back y>, both for rows and for results."""
    ep, exchange, journeys, of_experts, x, routed = layer(ranks, k, torch.float64, chunks)
    g = torch.Generator().manual_seed(50 + ep.rank)
    there = back = torch.zeros((), dtype=torch.float64)
    grad_x, grad_weights = torch.zeros_like(x), torch.zeros(len(x), k, dtype=torch.float64)
    results = torch.zeros_like(x)
    for journey, numbers in zip(journeys, of_experts, strict=True):
        rows, _ = exchange.received_rows(exchange.send_rows(x, routed, journey).wait(), routed, journey, numbers)
        y = torch.randn(rows.shape, dtype=torch.float64, generator=g)
        there = there + (rows * y).sum()
        nothing = torch.zeros(len(rows), k, dtype=torch.float64)
        exchange.add_row_grads(exchange.send_row_grads(y, nothing, journey).wait(), journey, grad_x, grad_weights)
        exchange.add_results(exchange.send_results(y, journey).wait(), journey, results)
        back = back + (exchange.send_grads(x, journey).wait().view(-1, x.shape[1]) * y).sum()
    sums = all_reduce(torch.stack([there, (x * grad_x).sum(), back, (x * results).sum()]), torch.distributed.group.WORLD)  # type: ignore[attr-defined]
    assert float((sums - sums[0]).abs().max()) < 1e-12 * float(sums[0].abs())
    assert not grad_weights.any()


def check_bytes(ranks: int, k: int, dtype: torch.dtype) -> None:
    """What is recorded of the exchanges is what the choice says, to the byte."""
    recorder = Recorder(WallClock(), 1)
    recorder.start_step()
    groups = ParallelGroups.create(torch.device("cpu"))
    layout = ParallelContext.of(groups, recorder=recorder, ep=ExpertParallel.create(groups, ranks)).in_layer(0)
    ep, wide = layout.ep, torch.float32
    routed = route(torch.randn(9, E, generator=torch.Generator().manual_seed(groups.rank)), RoutingSpec(E, k))
    journeys, of_experts = Counts(ep, routed.chosen, E, [slice(0, 9)]).read()
    form = RowFormat(H, k, dtype, wide)
    exchange, journey, x = RowExchange(ep, form, E // ranks), journeys[0], torch.zeros(9, H, dtype=dtype)
    rows, _ = exchange.received_rows(exchange.send_rows(x, routed, journey).wait(), routed, journey, of_experts[0])
    exchange.add_results(exchange.send_results(rows.contiguous(), journey).wait(), journey, x)
    recorder.end_step()
    sent = [sum(flight.what.sends) * getattr(torch, flight.what.dtype).itemsize for flight in recorder.steps[0].flights]
    goes = [len({e * ranks // E for e in experts}) for experts in routed.chosen.tolist()]
    rounded = -(-H * dtype.itemsize // 16) * 16 + -(-8 * k // 16) * 16
    assert sent == [ranks * (E // ranks + 1) * 8, sum(goes) * rounded, sum(journey.receive_counts) * H * dtype.itemsize]


def check_all(ranks: int) -> None:
    for k, dtype in ((1, torch.float64), (4, torch.float32), (3, torch.bfloat16)):
        check_rows(ranks, k, dtype)
        if dtype != torch.float64:
            check_bytes(ranks, k, dtype)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_choice_arrives_and_a_row_once(ranks: int, tmp_path: Path) -> None:
    run_ranks(check_all, ranks, tmp_path, ranks)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (3, 2), (4, 3)])
def test_each_way_is_the_adjoint_of_the_other(ranks: int, chunks: int, tmp_path: Path) -> None:
    run_ranks(check_adjoint, ranks, tmp_path, ranks, 3, chunks)
