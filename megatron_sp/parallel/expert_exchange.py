"""Rows on their way to the ranks whose experts they have chosen, and back.

A row goes to a rank once, however many of that rank's experts it has chosen: with 4 of 16 experts on 2 ranks that is a quarter of the
bytes of a copy for each choice. It carries its choices there, local numbers and weights, in a few bytes after its own; the results of
a rank's experts for a row are summed there and come back as one row. Backward sends the results' gradients the same way, and gets the
rows' gradients with those of the weights after them.

    forward   counts, then  row | weights | numbers ->   <- result
    backward                gradient of the result  ->   <- gradient of the row | of its weights

Rows are sent in order of (rank, position), and are used in order of (expert, rank they came from, position). The counts say how many
come: they are exchanged before, 8 bytes for each expert and 8 for each rank, and read by the host, the only time that it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, done
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.expert_mlp import Choices
from megatron_sp.ops.routing import Routed
from megatron_sp.parallel.expert_parallel import ExpertParallel
from megatron_sp.utils.numbers import round_up

_ALIGN_BYTES = 16


class RowFormat(NamedTuple):
    """Format of a row on its way: h elements, and after them k weights and k numbers."""

    width: int
    top_k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    @property
    def _start(self) -> int:
        return round_up(self.width * self.dtype.itemsize, _ALIGN_BYTES)

    def elements(self, *, numbers: bool) -> int:
        """Return the number of elements of ``dtype`` that travel for a row, with ``numbers`` those of the experts, too."""
        after = self.top_k * (self.weight_dtype.itemsize + (4 if numbers else 0))
        return (self._start + round_up(after, _ALIGN_BYTES)) // self.dtype.itemsize

    def weights(self, rows: Tensor) -> Tensor:
        """Return a view of the weights, [rows, k], in ``rows`` [rows, elements]."""
        start = self._start // self.weight_dtype.itemsize
        return rows.view(self.weight_dtype)[:, start : start + self.top_k]

    def numbers(self, rows: Tensor) -> Tensor:
        """Return a view of the numbers of the experts, int32 [rows, k]."""
        start = (self._start + self.top_k * self.weight_dtype.itemsize) // 4
        return rows.view(torch.int32)[:, start : start + self.top_k]


@dataclass(frozen=True)
class Journey:
    """Way of one chunk of a rank's tokens: which rows go where, and how many come.

    Attributes:
        send_counts, receive_counts: rows to and from each rank.
    """

    tokens: slice  # the chunk's rows among this rank's tokens
    sent: Tensor  # int64 [rows sent], their rows in the chunk, in order of (rank, position)
    ranks: Tensor  # int64 [rows sent], where each goes to
    send_counts: list[int]
    receive_counts: list[int]

    @property
    def num_received(self) -> int:
        """Number of rows that arrive."""
        return sum(self.receive_counts)


Numbers = list[
    list[list[list[int]]]
]  # [sent or received][rank][chunk][choices of each of the receiver's experts, rows]


class Counts:
    """Numbers of rows that travel, exchanged over the ep ranks: this starts before anything else, ``read`` waits for it.

    Args:
        ep: the ranks.
        chosen: int64 [tokens, k].
        num_experts: of all ranks.
        chunks: parts of the tokens.
        numbers: of the first pass, if this is a recomputation, in which nothing is exchanged then.

    Attributes:
        numbers: what ``read`` has read.
    """

    def __init__(
        self, ep: ExpertParallel, chosen: Tensor, num_experts: int, chunks: list[slice], numbers: Numbers | None = None
    ) -> None:  # fmt: skip
        self._ep, self._chosen, self._chunks, self._own, self.numbers = (
            ep,
            chosen,
            chunks,
            num_experts // ep.size,
            numbers,
        )
        if numbers is not None:
            return
        per_chunk = [self._of(chosen[chunk]) for chunk in chunks]
        self._send = torch.stack(per_chunk, 1)  # [ep, chunks, own experts + 1]
        each = [self._send[0].numel()] * ep.size
        self._coming: Handle | None = ep.exchange_async("counts", self._send.view(-1), each, each)

    def _of(self, chosen: Tensor) -> Tensor:
        # for each rank the choices of each of its experts, and the rows that go there, int64 [ep, own experts + 1]
        ranks = self._ep.size
        of_experts = torch.zeros(ranks * self._own, dtype=torch.int64, device=chosen.device)
        of_experts.index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        rows = _goes_to(chosen, self._own, ranks).sum(0)
        return torch.cat([of_experts.view(ranks, self._own), rows[:, None]], 1)

    def read(self) -> tuple[list[Journey], list[list[int]]]:
        """Wait for the counts of the others; return each chunk's journey, and the choices of each own expert in it."""
        if self.numbers is None:
            assert self._coming is not None, "the counts are read once"
            received = self._coming.wait().view_as(self._send)
            self._coming = None
            self.numbers = torch.stack([self._send, received]).tolist()  # the host waits here, once
        sends, receives = self.numbers
        journeys, of_experts = [], []
        for index, chunk in enumerate(self._chunks):
            send, receive = [by_chunk[index] for by_chunk in sends], [by_chunk[index] for by_chunk in receives]
            to, coming = [each[-1] for each in send], [each[-1] for each in receive]
            journeys.append(Journey(chunk, *self._order(self._chosen[chunk], sum(to)), to, coming))
            of_experts.append([sum(each) for each in zip(*(each[:-1] for each in receive), strict=True)])
        return journeys, of_experts

    def _order(self, chosen: Tensor, num_sent: int) -> tuple[Tensor, Tensor]:
        if self._ep.size == 1:
            nothing = torch.empty(0, dtype=torch.int64, device=chosen.device)
            return nothing, nothing
        goes = _goes_to(chosen, self._own, self._ep.size).t().reshape(-1)
        first = goes.to(torch.uint8).sort(dim=0, descending=True, stable=True).indices[:num_sent]
        return first % max(1, len(chosen)), first // max(1, len(chosen))


def _goes_to(chosen: Tensor, own: int, ranks: int) -> Tensor:
    # whether a token goes to a rank, bool [tokens, ranks]
    goes = torch.zeros(len(chosen), ranks, dtype=torch.bool, device=chosen.device)
    return goes.scatter_(1, chosen // own, True)


class RowExchange:
    """Exchanges of rows over the ep ranks; with one rank nothing moves, and nothing is copied.

    Args:
        ep: the ranks.
        form: what travels for a row.
        own: experts of a rank.
    """

    def __init__(self, ep: ExpertParallel, form: RowFormat, own: int) -> None:
        self._ep, self._form, self._own, self._moves = ep, form, own, ep.size > 1

    def send_rows(self, x: Tensor, routed: Routed, journey: Journey) -> Handle:
        """Start sending rows of ``x`` [tokens, h] with their choices; ``received_rows`` takes them."""
        form, mine = self._form, journey.tokens
        if not self._moves:
            return done(x[mine])
        sent = empty((len(journey.sent), form.elements(numbers=True)), dtype=x.dtype, device=x.device)
        sent[:, : form.width] = x[mine].index_select(0, journey.sent)
        form.weights(sent).copy_(routed.weights[mine].index_select(0, journey.sent))
        numbers = routed.chosen[mine].index_select(0, journey.sent) - journey.ranks[:, None] * self._own
        form.numbers(sent).copy_(torch.where((numbers >= 0) & (numbers < self._own), numbers, -1))
        return self._exchange("tokens", sent, journey.send_counts, journey.receive_counts)

    def received_rows(
        self, arrived: Tensor, routed: Routed, journey: Journey, of_experts: list[int]
    ) -> tuple[Tensor, Choices]:
        """Return the rows that have arrived, [rows, h], and who has chosen whom."""
        form = self._form
        if self._moves:
            arrived = arrived.view(-1, form.elements(numbers=True))
            numbers = form.numbers(arrived).to(torch.int64)
            numbers = torch.where(numbers < 0, self._own, numbers)  # after all others
            rows, weights = arrived[:, : form.width], form.weights(arrived)
        else:
            rows, numbers, weights = arrived, routed.chosen[journey.tokens], routed.weights[journey.tokens]
        places = numbers.flatten().sort(stable=True).indices[: sum(of_experts)]
        return rows, Choices(
            places // form.top_k, places, of_experts, weights.flatten().index_select(0, places), form.top_k
        )

    def rows_of(self, arrived: Tensor, own: Tensor, journey: Journey) -> Tensor:
        """Return the rows of a forward pass, [rows, h]: those that ``send_rows`` has brought, on one rank those of ``own`` [tokens, h]."""
        if not self._moves:
            return own[journey.tokens]
        return arrived.view(-1, self._form.elements(numbers=True))[:, : self._form.width]

    def place_for(self, total: Tensor, journey: Journey) -> Tensor:
        """Return where the sums for rows that have arrived are to be added up, [rows, h]; on one rank in ``total`` [tokens, h] itself."""
        if not self._moves:
            return total[journey.tokens]
        return torch.zeros(journey.num_received, total.shape[1], dtype=total.dtype, device=total.device)

    def send_results(self, results: Tensor, journey: Journey) -> Handle:
        """Start sending results [rows received, h] to where the rows came from; ``add_results`` takes them."""
        if not self._moves:
            return done(results)
        return self._exchange("results", results.to(self._form.dtype), journey.receive_counts, journey.send_counts)

    def add_results(self, came: Tensor, journey: Journey, total: Tensor) -> None:
        """Add results that have come back to the rows of ``total`` [tokens, h]."""
        if self._moves:
            self._add(came.view(-1, self._form.width), journey, total)

    def send_grads(self, grad: Tensor, journey: Journey) -> Handle:
        """Start sending the gradients of results, rows of ``grad`` [tokens, h]; ``received_grads`` takes them."""
        if not self._moves:
            return done(grad[journey.tokens])
        sent = grad[journey.tokens].index_select(0, journey.sent)
        return self._exchange("gradients of results", sent, journey.send_counts, journey.receive_counts)

    def received_grads(self, arrived: Tensor) -> Tensor:
        """Return the gradients of results, [rows received, h]."""
        return arrived.view(-1, self._form.width)

    def send_row_grads(self, grad_x: Tensor, grad_weights: Tensor, journey: Journey) -> Handle:
        """Start sending the gradients of rows [rows received, h] and of their weights [rows received, k]; ``add_row_grads`` takes them."""
        form = self._form
        if not self._moves:
            return done(grad_weights)
        sent = empty((len(grad_x), form.elements(numbers=False)), dtype=form.dtype, device=grad_x.device)
        sent[:, : form.width] = grad_x
        form.weights(sent).copy_(grad_weights)
        return self._exchange("gradients of tokens", sent, journey.receive_counts, journey.send_counts)

    def add_row_grads(self, came: Tensor, journey: Journey, grad_x: Tensor, grad_weights: Tensor) -> None:
        """Add gradients that have come back to ``grad_x`` [tokens, h] and ``grad_weights`` [tokens, k]."""
        if not self._moves:
            grad_weights[journey.tokens] += came
            return
        form, rows = self._form, came.view(-1, self._form.elements(numbers=False))
        self._add(rows[:, : form.width], journey, grad_x)
        self._add(form.weights(rows), journey, grad_weights)

    def _add(self, rows: Tensor, journey: Journey, total: Tensor) -> None:
        # add rows of one rank after another, each of which has a token once: the same sums in every run
        mine, start = total[journey.tokens], 0
        for count in journey.send_counts:
            part = slice(start, start + count)
            mine.index_add_(0, journey.sent[part], rows[part].to(total.dtype))
            start += count

    def _exchange(self, name: str, rows: Tensor, to: list[int], coming: list[int]) -> Handle:
        width = rows.shape[1]
        return self._ep.exchange_async(name, rows.view(-1), [n * width for n in to], [n * width for n in coming])
