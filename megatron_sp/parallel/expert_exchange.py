"""Rows on their way to the ranks whose experts they have chosen, and back."""

# A row goes to a rank once, however many of its experts it has chosen, with its choices there behind it: weights and
# local numbers. The results of a rank's experts for a row are summed there and come back as one row.
#
#     forward   counts, then  row | weights | numbers ->   <- result
#     backward                gradient of the result  ->   <- gradient of the row | of its weights

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, done
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.expert_mlp import Choices
from megatron_sp.ops.routing import Routed
from megatron_sp.parallel.parallel_context import ExpertParallel
from megatron_sp.utils.numbers import round_up

_ALIGN_BYTES = 16


class RowFormat(NamedTuple):
    """Format of a row on its way: h elements, and after them k weights and k numbers of experts."""

    width: int
    top_k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    @property
    def _start(self) -> int:
        return round_up(self.width * self.dtype.itemsize, _ALIGN_BYTES)

    def elements(self, *, numbers: bool) -> int:
        """Return how many elements of ``dtype`` travel for a row; with ``numbers`` those of the experts, too."""
        after = self.top_k * (self.weight_dtype.itemsize + (4 if numbers else 0))
        return (self._start + round_up(after, _ALIGN_BYTES)) // self.dtype.itemsize

    def weights(self, rows: Tensor) -> Tensor:  # a view, [rows, k]
        start = self._start // self.weight_dtype.itemsize
        return rows.view(self.weight_dtype)[:, start : start + self.top_k]

    def numbers(self, rows: Tensor) -> Tensor:  # a view, int32 [rows, k]
        start = (self._start + self.top_k * self.weight_dtype.itemsize) // 4
        return rows.view(torch.int32)[:, start : start + self.top_k]


@dataclass(frozen=True)
class Journey:
    """Way of one chunk of a rank's tokens: which rows go where, and how many come."""

    tokens: slice  # the chunk's rows among this rank's
    sent: Tensor  # int64 [rows sent], their rows in the chunk, in order of (rank, position)
    ranks: Tensor  # int64 [rows sent], where each goes to
    send_counts: list[int]  # to each rank
    receive_counts: list[int]


# [sent or received][rank][chunk][choices of each of the receiver's experts, rows]
Numbers = list[list[list[list[int]]]]


class Counts:
    """Numbers of rows that travel, exchanged over the ep ranks: this starts at once, ``read`` waits for it."""

    def __init__(
        self, ep: ExpertParallel, chosen: Tensor, num_experts: int, chunks: list[slice], numbers: Numbers | None = None
    ) -> None:
        self._ep, self._chosen, self._chunks, self._own = ep, chosen, chunks, num_experts // ep.size
        self.numbers = numbers
        if numbers is not None:  # of the first pass, in a recomputation, which exchanges none
            return
        of_chunks = []
        for chunk in chunks:
            part = chosen[chunk]  # int64 [tokens, k]
            of_experts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
            of_experts.index_add_(0, part.flatten(), torch.ones_like(part).flatten())
            rows = self._goes_to(part).sum(0)
            of_chunks.append(torch.cat([of_experts.view(ep.size, self._own), rows[:, None]], 1))
        self._send = torch.stack(of_chunks, 1)  # [ep, chunks, own experts + 1]
        sizes = [self._send[0].numel()] * ep.size
        self._coming: Handle | None = ep.exchange_async("counts", self._send.view(-1), sizes, sizes)

    def _goes_to(self, chosen: Tensor) -> Tensor:
        # bool [tokens, ep]: whether a token goes to a rank
        goes = torch.zeros(len(chosen), self._ep.size, dtype=torch.bool, device=chosen.device)
        return goes.scatter_(1, chosen // self._own, True)

    def read(self) -> tuple[list[Journey], list[list[int]]]:
        """Return each chunk's journey, and the choices of each own expert in it."""
        if self.numbers is None:
            assert self._coming is not None, "the counts are read once"
            received = self._coming.wait().view_as(self._send)
            self._coming = None
            self.numbers = torch.stack([self._send, received]).tolist()  # the host waits here, once
        sends, receives = self.numbers
        journeys, of_experts = [], []
        for index, chunk in enumerate(self._chunks):
            receive = [of_rank[index] for of_rank in receives]
            send_counts = [of_rank[index][-1] for of_rank in sends]
            sent, ranks = self._order(self._chosen[chunk], sum(send_counts))
            journeys.append(Journey(chunk, sent, ranks, send_counts, [counts[-1] for counts in receive]))
            of_experts.append([sum(of_one) for of_one in zip(*(counts[:-1] for counts in receive), strict=True)])
        return journeys, of_experts

    def _order(self, chosen: Tensor, num_sent: int) -> tuple[Tensor, Tensor]:
        # the rows that go and where each goes to, in order of (rank, position): a stable sort of bytes has the few ones
        # first without the host knowing their number (``nonzero`` would wait for the device)
        if self._ep.size == 1:
            nothing = torch.empty(0, dtype=torch.int64, device=chosen.device)
            return nothing, nothing
        goes = self._goes_to(chosen).t().reshape(-1)
        first = goes.to(torch.uint8).sort(dim=0, descending=True, stable=True).indices[:num_sent]
        return first % max(1, len(chosen)), first // max(1, len(chosen))


class RowExchange:
    """Exchanges of rows over the ep ranks; with one rank nothing moves, and nothing is copied."""

    def __init__(self, ep: ExpertParallel, form: RowFormat, own: int) -> None:
        self._ep, self._form, self._own, self._moves = ep, form, own, ep.size > 1

    def send_rows(self, x: Tensor, routed: Routed, journey: Journey) -> Handle:
        # rows of x [tokens, h] with their choices
        form, tokens = self._form, journey.tokens
        if not self._moves:
            return done(x[tokens])
        sent = empty((len(journey.sent), form.elements(numbers=True)), dtype=x.dtype, device=x.device)
        sent[:, : form.width] = x[tokens].index_select(0, journey.sent)
        form.weights(sent).copy_(routed.weights[tokens].index_select(0, journey.sent))
        numbers = routed.chosen[tokens].index_select(0, journey.sent) - journey.ranks[:, None] * self._own
        form.numbers(sent).copy_(torch.where((numbers >= 0) & (numbers < self._own), numbers, -1))
        return self._exchange("tokens", sent, journey.send_counts, journey.receive_counts)

    def received_rows(
        self, arrived: Tensor, routed: Routed, journey: Journey, of_experts: list[int]
    ) -> tuple[Tensor, Choices]:
        # the rows of ``send_rows`` that have arrived, [rows, h], and who has chosen whom, in order of (expert, rank
        # they came from, position)
        form = self._form
        if self._moves:
            arrived = arrived.view(-1, form.elements(numbers=True))
            numbers = form.numbers(arrived).to(torch.int64)
            numbers = torch.where(numbers < 0, self._own, numbers)  # after all others
            rows, weights = arrived[:, : form.width], form.weights(arrived)
        else:
            rows, numbers, weights = arrived, routed.chosen[journey.tokens], routed.weights[journey.tokens]
        places = numbers.flatten().sort(stable=True).indices[: sum(of_experts)]
        chosen_weights = weights.flatten().index_select(0, places)
        return rows, Choices(places // form.top_k, places, of_experts, chosen_weights, form.top_k)

    def rows_of(self, arrived: Tensor, own: Tensor, journey: Journey) -> Tensor:
        # the rows of a forward pass, [rows, h]: those that ``send_rows`` has brought; on one rank those of ``own``
        # [tokens, h]
        if not self._moves:
            return own[journey.tokens]
        return arrived.view(-1, self._form.elements(numbers=True))[:, : self._form.width]

    def place_for(self, total: Tensor, journey: Journey) -> Tensor:
        # where the sums for rows that have arrived are added up, [rows, h]; on one rank in ``total`` [tokens, h] itself
        if not self._moves:
            return total[journey.tokens]
        return torch.zeros(sum(journey.receive_counts), total.shape[1], dtype=total.dtype, device=total.device)

    def send_results(self, results: Tensor, journey: Journey) -> Handle:
        if not self._moves:
            return done(results)
        return self._exchange("results", results.to(self._form.dtype), journey.receive_counts, journey.send_counts)

    def add_results(self, came: Tensor, journey: Journey, total: Tensor) -> None:
        if self._moves:
            self._add(came.view(-1, self._form.width), journey, total)

    def send_grads(self, grad: Tensor, journey: Journey) -> Handle:
        if not self._moves:
            return done(grad[journey.tokens])
        sent = grad[journey.tokens].index_select(0, journey.sent)
        return self._exchange("gradients of results", sent, journey.send_counts, journey.receive_counts)

    def send_row_grads(self, grad_x: Tensor, grad_weights: Tensor, journey: Journey) -> Handle:
        form = self._form
        if not self._moves:
            return done(grad_weights)
        sent = empty((len(grad_x), form.elements(numbers=False)), dtype=form.dtype, device=grad_x.device)
        sent[:, : form.width] = grad_x
        form.weights(sent).copy_(grad_weights)
        return self._exchange("gradients of tokens", sent, journey.receive_counts, journey.send_counts)

    def add_row_grads(self, came: Tensor, journey: Journey, grad_x: Tensor, grad_weights: Tensor) -> None:
        if not self._moves:
            grad_weights[journey.tokens] += came
            return
        form, rows = self._form, came.view(-1, self._form.elements(numbers=False))
        self._add(rows[:, : form.width], journey, grad_x)  # [tokens, h]
        self._add(form.weights(rows), journey, grad_weights)  # [tokens, k]

    def _add(self, rows: Tensor, journey: Journey, total: Tensor) -> None:
        # rows of one rank after another, each of which has a token once: the same sums in every run
        of_chunk, start = total[journey.tokens], 0
        for count in journey.send_counts:
            part = slice(start, start + count)
            of_chunk.index_add_(0, journey.sent[part], rows[part].to(total.dtype))
            start += count

    def _exchange(self, name: str, rows: Tensor, to: list[int], coming: list[int]) -> Handle:
        width = rows.shape[1]
        return self._ep.exchange_async(name, rows.view(-1), [n * width for n in to], [n * width for n in coming])
