"""Communication volume of a rank in a step, computed from the configuration: number of collectives and bytes sent, by kind.

Bytes are those that one rank sends in ring algorithms, with N the bytes of the whole tensor and W the size of the
group:

    all_gather, reduce_scatter    N (W-1)/W
    all_reduce                    2 N (W-1)/W
    all_to_all                    the bytes sent to other ranks: (W-1)/W of the rank's data if shares are even; over cp the rows of keys
                                  and values that others see, and the gradients of the rows that came from them

    (gloo's all_gather and all_reduce are rings; our reduce_scatter on gloo is an all_to_all of the same bytes. NCCL may choose trees, which
    send no less.) "Can hide" counts communication that can overlap with computation under the given flags: it starts before a computation
    that does not need it. Whether it is actually hidden depends on the link; ``--report-overlap`` measures it.

    This module does not import torch. ``tests/dist/test_traffic.py`` compares it with the collectives of real steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from megatron_sp.estimate.memory_rank import RankForm, forms_of_ranks
from megatron_sp.estimate.workload import Workload
from megatron_sp.models.unit_order import expand_order, unit_order
from megatron_sp.optim.residency import list_fetches

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True)
class Flow:
    """Collectives of one kind in one step.

    Attributes:
        kind: description of the data.
        op: collective operation.
        group: name of the group.
        ranks: size of the group.
        number: number of collectives.
        num_bytes: total bytes sent by one rank.
        can_hide: number of these bytes that can overlap with computation.
        under: the computation that can hide them; "" if there is none.
        slowest: bytes that the time follows from if ranks send unequal amounts: of the largest message of each exchange. 0:
            all ranks send ``num_bytes``.
    """

    kind: str
    op: Op
    group: str
    ranks: int
    number: int
    num_bytes: int
    can_hide: int = 0
    under: str = ""
    slowest: int = 0


@dataclass(frozen=True)
class TrafficPlan:
    """All collectives of a step, for the rank that sends most."""

    flows: tuple[Flow, ...]

    @property
    def number(self) -> int:
        """Number of collectives in a step."""
        return sum(flow.number for flow in self.flows)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(flow.num_bytes for flow in self.flows)

    @property
    def can_hide(self) -> int:
        """Bytes of a step that can be sent under computation."""
        return sum(flow.can_hide for flow in self.flows)

    def as_dict(self) -> dict[str, Any]:
        """Plan for ``--dry-run json``."""
        totals = {"number": self.number, "num_bytes": self.num_bytes, "can_hide": self.can_hide}
        return {**totals, "flows": [asdict(flow) for flow in self.flows]}


def traffic_plan(workload: Workload) -> TrafficPlan:
    """Return the collectives of a training step, and the messages between the stages of a pipeline."""
    return max(plans_of_ranks(workload), key=lambda plan: plan.num_bytes)


def plans_of_ranks(workload: Workload) -> list[TrafficPlan]:
    """Return the collectives and messages of each pipeline rank, without a pipeline of the one."""
    return [_of_rank(form) for form in forms_of_ranks(workload)]


def _of_rank(form: RankForm) -> TrafficPlan:
    counter = _Counter(form)
    passes = [_Counter(of_pass) for of_pass in form.of_passes()]
    most = max(passes[0].sent_by, key=lambda rank: sum(of_pass.sent_by[rank] for of_pass in passes))
    inside = _sums(
        flow
        for of_pass in passes
        for flow in (
            *of_pass.tensor_parallel(),
            *of_pass.heads_and_rows(*most),
            *of_pass.experts(),
            *of_pass.messages(),
        )
    )
    flows = [*counter.gradients(), *counter.parameters(), *inside, *counter.scalars()]
    return TrafficPlan(tuple(flow for flow in flows if flow.number))


def _sums(flows: Iterable[Flow]) -> list[Flow]:
    """Return flows with those of the same kind in one."""
    found: dict[tuple[str, str], Flow] = {}
    for flow in flows:
        before = found.get((flow.kind, flow.op))
        if before is None:
            found[flow.kind, flow.op] = flow
        else:
            sums = {
                name: getattr(before, name) + getattr(flow, name)
                for name in ("number", "num_bytes", "can_hide", "slowest")
            }
            found[flow.kind, flow.op] = replace(before, under=before.under or flow.under, **sums)
    return list(found.values())


def wire_bytes(op: Op, num_bytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends for a whole tensor of ``num_bytes``; for an all_to_all: for its own data, in even shares."""
    if op == "send":
        return num_bytes
    once = num_bytes * (ranks - 1) // ranks
    return 2 * once if op == "all_reduce" else once


class _Sent(NamedTuple):
    """Bytes of each token that a rank sends in a block, each as [exposed, can hide]: to the heads, back, and in backward."""

    there: list[int]
    back: list[int]
    backward: list[int]


@dataclass(frozen=True)
class _Heads:
    """Exchanges of Ulysses that a rank takes part in in a step.

    Attributes:
        number: number of collectives of each kind.
        num_bytes: bytes of each token that it sends, of each kind, as (exposed, can hide).
    """

    number: dict[str, int]
    num_bytes: dict[str, tuple[int, int]]

    @cached_property
    def total(self) -> int:
        """Bytes of each token of all kinds."""
        return sum(map(sum, self.num_bytes.values()))


class _Counter:
    def __init__(self, form: RankForm) -> None:
        workload, shape = form.workload, form.shape
        self.form, self.shape, self.parallel, self.kernels = form, shape, workload.parallel, workload.kernels
        self.num_terms = 2 if workload.model.has_order_head else 1  # of the loss
        self.num_samples = shape.num_micro_batches * workload.batch.micro_batch_size * workload.dp
        self.tp, self.sp = shape.tp, shape.sp
        self.pp = workload.parallel.pipeline_model_parallel_size
        self.ranks = workload.dp * shape.cp * shape.sp
        self.world = self.ranks * shape.tp * self.pp
        self.replicas = "dp x sp" if shape.cp == 1 else "dp x cp x sp"
        self.places = [
            place for place, units in enumerate(form.zero.places) if form.zero.units[units[0]]
        ]  # of a pipeline: not all have both
        self.units = [unit for place in self.places for unit in form.zero.places[place]]
        self.dense = [unit for unit in self.units if unit not in form.zero.experts]
        self.expert_units = sorted(form.zero.experts)
        self.ep = workload.parallel.expert_model_parallel_size
        self.expert_replicas = f"{self.replicas}{' x tp' if shape.parts > 1 else ''} / {self.ep}"
        self.recomputed = sum(last - first for first, last in shape.recomputed)
        self.again = [any(first <= layer < last for first, last in shape.recomputed) for layer in range(shape.layers)]
        self.forwards = (shape.layers + self.recomputed) * shape.num_micro_batches  # passes through blocks in a step
        self.backwards = shape.layers * shape.num_micro_batches
        self.counting = self._counting_passes()
        self.forwards += shape.layers * self.counting

    def _counting_passes(self) -> int:
        """Return how often the blocks are passed for the loads alone, which a balance term of the global batch must know before."""
        model, count = self.form.workload.model, self.shape.num_micro_batches
        return count if model.balance_kind == "global" and (count > 1 or self.pp > 1) else 0

    def _flow(
        self, kind: str, op: Op, group: str, sizes: list[int], hidden: list[int] | None = None, under: str = ""
    ) -> Flow:
        """Return the flow of collectives on whole tensors of ``sizes`` bytes; ``hidden``: the sizes of those that can hide."""
        ranks = {self.replicas: self.ranks, self.expert_replicas: self.form.zero.expert_ranks,
                 "sequence": self.shape.cp * self.sp * self.shape.parts, "tokens": self.ranks * self.shape.parts, "tp": self.tp,
                 "sp": self.sp, "pp": self.pp, "pp x tp": self.pp * self.tp, "world": self.world,
                 "ends": 2 * self.ranks}[group]  # fmt: skip
        sizes = sizes if ranks > 1 else []
        hidden = hidden or [] if ranks > 1 else []
        sent, can_hide = (sum(wire_bytes(op, size, ranks) for size in some) for some in (sizes, hidden))
        return Flow(kind, op, group, ranks, len(sizes), sent, can_hide, under if can_hide else "")

    def gradients(self) -> Iterator[Flow]:
        """Gradients over dp x cp x sp: once, or at stages 2 and 3 per micro-batch; the embedding's last is exposed. Shared ones over tp.

        Those of experts are summed over fewer ranks.
        """
        zero, stage = self.form.zero, self.parallel.zero_stage
        times = self.shape.num_micro_batches if stage >= 2 else 1
        sizes = [zero.size(unit) * zero.travel for unit in self.dense]
        first = 1 if self.shape.share.has_embedding else 0  # how many units are exposed
        # at stages 2 and 3 the next micro-batch's forward pass hides the embedding's, except that of the last
        # micro-batch
        hidden = sizes[first:] * times + sizes[:first] * (times - 1)
        op: Op = "all_reduce" if stage == 0 else "reduce_scatter"
        yield self._flow(
            "gradients",
            op,
            self.replicas,
            sizes * times,
            hidden if self.parallel.overlap_grad_reduce else [],
            "the rest of the backward pass",
        )
        of_experts = [zero.size(unit) * zero.travel_of(unit) for unit in self.expert_units] * times
        yield self._flow(
            "gradients of experts", op, self.expert_replicas, of_experts, of_experts if self.parallel.overlap_grad_reduce else [],
            "the rest of the backward pass",
        )  # fmt: skip
        yield from self._table_gradient()
        shared = [self.form.shared_gradients(place) * self.shape.wide for place in self.places]
        yield self._flow(
            "gradients that tp ranks have in common", "all_reduce", "tp", [size for size in shared if size] * times
        )

    def _table_gradient(self) -> Iterator[Flow]:
        """Gradient of a table that the ends of a pipeline share, after all passes."""
        zero, op = self.form.zero, "all_reduce" if self.parallel.zero_stage == 0 else "reduce_scatter"
        if zero.table:
            travel = 2 if self.parallel.grad_reduce_in_bf16 else self.shape.wide
            yield self._flow("gradient of the shared table", op, "ends", [zero.table_size * travel])  # type: ignore[arg-type]

    def parameters(self) -> Iterator[Flow]:
        """Parameters over dp x cp x sp: after the update (stages 1 and 2), or before each use (stage 3)."""
        zero, stage, overlap = self.form.zero, self.parallel.zero_stage, self.parallel.overlap_param_gather
        sizes = [zero.size(unit) * self.shape.e for unit in self.dense]
        of_experts = [zero.size(unit) * self.shape.e for unit in self.expert_units]
        if stage in (1, 2):
            yield self._flow(
                "parameters",
                "all_gather",
                self.replicas,
                sizes,
                sizes[1:] if overlap else [],
                "the rest of the update, and the next forward pass",
            )
            yield self._flow(
                "parameters of experts", "all_gather", self.expert_replicas, of_experts, of_experts if overlap else [],
                "the rest of the update, and the next forward pass",
            )  # fmt: skip
        if stage > 0 and zero.table:
            yield self._flow("shared table", "all_gather", "ends", [zero.table_size * self.shape.e])
        if stage == 3:
            order = expand_order(
                unit_order(self.kernels, self.shape.layers, tied=zero.tied, backward=True), zero.places
            )
            together = [units for units in zero.places if len(units) > 1]
            fetches = list_fetches(zero.pools, order, self.shape.num_micro_batches, ahead=overlap, together=together)
            if self.counting and self.pp == 1:  # as if they began with nothing gathered
                forward = expand_order(
                    unit_order(self.kernels, self.shape.layers, tied=False, backward=False), zero.places
                )
                fetches += list_fetches(zero.pools, forward, self.counting, ahead=overlap, together=together)
            kinds = (
                ("parameters", self.replicas, self.dense, sizes),
                ("parameters of experts", self.expert_replicas, self.expert_units, of_experts),
            )
            for kind, group, units, num_bytes in kinds:
                by_unit = dict(zip(units, num_bytes, strict=True))
                of_kind = [(by_unit[unit], is_ahead) for unit, is_ahead in fetches if unit in by_unit]
                ahead = [size for size, is_ahead in of_kind if is_ahead]
                yield self._flow(
                    kind, self.parallel.zero3_fetch, group, [size for size, _ in of_kind], ahead, "the unit before"
                )

    def tensor_parallel(self) -> Iterator[Flow]:
        """Activations over tp, on entering and leaving the tensor-parallel parts of layers, embedding and head; sums of the loss."""
        if self.tp == 1:
            return
        shape, times = self.shape, self.shape.num_micro_batches
        size, under = shape.whole_stream, "products of the backward pass"
        # a block has two split parts, the attention and the MLP; each enters once forward and twice backward (the
        # gradient, and its input again, under the product before) and leaves once (in backward under the product of the
        # weight's gradient)
        forwards, backwards, bert = self.forwards, self.backwards, self.form.workload.model.is_bert
        first, last = shape.share.has_embedding, shape.share.has_head
        ends = first + (last and not bert)  # BERT's head has an all_reduce instead
        enters = [size] * (forwards + 2 * backwards + (first + last) * times)
        leaves = [size] * (forwards + backwards + ends * times + first * self.counting)
        entered, left = [size] * backwards, [size] * backwards
        # of layers with experts a shared one is split, and enters and leaves like an MLP in one piece
        of_experts = self._passes_of_experts if any(shape.share.experts) else 0, sum(shape.share.experts) * times
        forwards, backwards = forwards - of_experts[0], backwards - of_experts[1]
        if self.form.workload.model.shared_expert_size:
            enters, leaves = enters + [size] * (of_experts[0] + 2 * of_experts[1]), leaves + [size] * sum(of_experts)
            entered, left = entered + [size] * of_experts[1], left + [size] * of_experts[1]
        pieces = [tokens * shape.parts * shape.h * shape.e for tokens in shape.mlp_pieces]
        enters, leaves = enters + pieces * (forwards + 2 * backwards), leaves + pieces * (forwards + backwards)
        if shape.chunked:  # a piece is gathered under the piece before it, and reduced under the one after it
            under += ", and other pieces of the MLP"
            entered = entered + pieces[1:] * (forwards + 2 * backwards)
            left = left + pieces[:-1] * forwards + pieces * backwards
        else:
            entered, left = entered + pieces * backwards, left + pieces * backwards
        if shape.parts > 1:
            yield self._flow("activations", "all_gather", "tp", enters, entered, under)
            yield self._flow("activations", "reduce_scatter", "tp", leaves, left, under)
        else:
            yield self._flow("activations", "all_reduce", "tp", leaves, left, under)
        chunk, tokens = shape.head_chunk, shape.head_tokens
        yield self._flow(
            "gradient of the head's input",
            "all_reduce",
            "tp",
            [tokens * shape.h * shape.e] * times if bert and last else [],
        )
        chunks = [min(chunk, tokens - start) * shape.wide for start in range(0, tokens, chunk)]
        yield self._flow(
            "maxima and sums of the loss", "all_reduce", "tp", [n for c in chunks for n in (c, 2 * c)] * times * last
        )

    @cached_property
    def sent_by(self) -> dict[tuple[int, int], int]:
        """Bytes that each (sp rank, cp rank) sends over sp and cp together.

        What a rank sends over sp grows with the positions of its cp rank, what it sends over cp with the key/value
        heads of its sp rank.
        """
        return {
            (rank, cp_rank): tokens * self._heads[rank].total + sum(self._of_rows(rank, cp_rank).values())
            for rank in range(self.sp) for cp_rank, tokens in enumerate(self._tokens)
        }  # fmt: skip

    @cached_property
    def _heads(self) -> list[_Heads]:
        return [self._of_heads(rank) for rank in range(self.sp)]

    @property
    def _tokens(self) -> list[int]:
        """Tokens of an sp rank, for each cp rank."""
        context, shape = self.shape.context, self.shape
        return (
            [shape.sp_tokens]
            if context is None
            else [shape.sp_positions(length) * shape.micro_batch for length in context.lengths]
        )

    def heads_and_rows(self, rank: int, cp_rank: int) -> Iterator[Flow]:
        """Ulysses' exchanges of heads over sp and those of keys and values over cp, and sums of norms, for a rank of sp and of cp."""
        yield from self._ulysses(self._heads[rank], self._tokens[cp_rank])
        yield from self._context(rank, cp_rank)
        yield from self._norms_over_all_heads()

    def _norms_over_all_heads(self) -> Iterator[Flow]:
        """Sums of squares of queries and keys over the heads of all ranks, two numbers for each token, whenever heads are made."""
        model, shape = self.form.workload.model, self.shape
        if not model.norms_all_heads:
            return
        context = shape.context
        tokens = shape.all_tokens if context is None else max(context.lengths) * shape.micro_batch
        made = self._forwards_unless(self.form.attention.keeps_results) + self._remade + self.backwards
        for group in ("tp", "sp"):
            yield self._flow(f"norms over all heads, {group}", "all_reduce", group, [2 * tokens * shape.wide] * made)

    def _forwards_unless(self, keeps: bool) -> int:
        """Return the forward passes through blocks in a step that do what a recomputation need not do if it keeps its results."""
        return self.forwards - (self.recomputed * self.shape.num_micro_batches if keeps else 0)

    @property
    def _remade(self) -> int:
        """How often backward makes heads again: with --recompute-qkv, and where a recomputation has kept attention's results."""
        again = self.recomputed * self.shape.num_micro_batches if self.form.attention.keeps_results else 0
        return self.backwards if self.kernels.recompute_qkv else again

    def _context(self, rank: int, cp_rank: int) -> Iterator[Flow]:
        """Exchanges of keys and values over cp, and of their gradients.

        All of them travel under attention: keys and values under the stage before the one that needs them, gradients
        under the stage after, and the last ones under the second half of a rank's own.
        """
        context = self.shape.context
        if context is None:
            return
        stages = len(context.shifts) * sum(bool(chunk.shares[rank].queries) for chunk in self.form.attention.chunks)
        for kind, size in self._of_rows(rank, cp_rank).items():
            times = self._passes_of_rows[kind]
            under, slowest = (
                "attention with other keys" if size else "",
                times * context.slowest * self._bytes_of_row(rank),
            )
            yield Flow(kind, "all_to_all", "cp", self.shape.cp, stages * times, size, size, under, slowest)

    @cached_property
    def _passes_of_rows(self) -> dict[str, int]:
        """How often each kind of exchange over cp takes place in a step."""
        blocks = self.backwards
        return {
            "keys and values, forward": self._forwards_unless(self.form.attention.keeps_results),
            "keys and values, backward": 0 if self.parallel.cp_keep_kv else blocks,
            "gradients of keys and values": blocks,
        }  # fmt: skip

    def _of_rows(self, rank: int, cp_rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends over cp in a step."""
        context = self.shape.context
        if context is None:
            return {}
        row = self._bytes_of_row(rank)
        sent, received = sum(context.sent[cp_rank]) * row, sum(context.received[cp_rank]) * row
        return {
            kind: times * (received if kind.startswith("gradients") else sent) for kind, times in self._passes_of_rows.items()
        }  # fmt: skip

    def _bytes_of_row(self, rank: int) -> int:
        """Return the bytes of the keys and values of a position that an sp rank has, in all sequences of a micro-batch."""
        shape = self.shape
        pairs = sum(len(chunk.shares[rank].uses) for chunk in self.form.attention.chunks if chunk.shares[rank].queries)
        return pairs * 2 * shape.d * shape.e * shape.micro_batch

    def _of_heads(self, rank: int) -> _Heads:
        """Return what an sp rank sends of each token in a step, in bytes."""
        attention, blocks = self.form.attention, self.backwards
        if self.sp == 1:
            return _Heads({}, {})
        hides = self.parallel.overlaps_exchanges and self.parallel.overlap_mode != "auto"
        # a recomputation that has kept attention's results makes the heads again in backward, and may have what came back
        remade, there, back = (
            self._remade,
            *map(self._forwards_unless, (attention.keeps_results, attention.keeps_received)),
        )
        of_forward, of_again, of_back = (sum(len(messages) for messages in each) for each in zip(
            *((chunk.messages, chunk.again, chunk.back) for chunk in attention.chunks), strict=True
        ))  # fmt: skip
        number = {
            "heads, forward": there * of_forward + back * len(attention.chunks), "heads, made again": remade * of_again,
            "heads, backward": (blocks - remade) * of_forward + remade * of_back + blocks * len(attention.chunks),
        }  # fmt: skip
        sent = self._sent(rank, hides)
        forward = there * sent.there[0] + back * sent.back[0], there * sent.there[1] + back * sent.back[1]
        again = remade * sum(sent.there)
        num_bytes = {
            "heads, forward": forward, "heads, made again": (0, again) if hides else (again, 0),
            "heads, backward": (blocks * sent.backward[0], blocks * sent.backward[1]),
        }  # fmt: skip
        return _Heads(number, num_bytes)

    def _ulysses(self, heads: _Heads, tokens: int) -> Iterator[Flow]:
        """Ulysses' exchanges of heads over sp, for a rank with so many tokens."""
        under = "projections and attention of other heads"
        for kind, (shown, hidden) in heads.num_bytes.items():
            sizes = tokens * (shown + hidden), tokens * hidden
            yield Flow(kind, "all_to_all", "sp", self.sp, heads.number[kind], *sizes, under if hidden else "")

    def _sent(self, rank: int, hides: bool) -> _Sent:
        """Return the bytes of each token that a rank sends in a block."""
        shape, chunks = self.shape, self.form.attention.chunks
        per_head = shape.d * shape.e
        sent = _Sent([0, 0], [0, 0], [0, 0])
        messages, delays = sum(len(chunk.messages) for chunk in chunks), self.shape.delays
        for index, chunk in enumerate(chunks):
            last = index == len(chunks) - 1
            of_ranks = [len(share.queries) for share in chunk.shares]
            # forward: only the next chunk's projection can hide the last message of the first chunk
            for place, message in enumerate(chunk.messages):
                widths = [len(rows) for rows in message.rows]
                covered = hides and (len(chunks) > 1 or place < len(chunk.messages) - 1)
                sent.there[covered] += (sum(widths) - widths[rank]) * per_head
                # backward: messages are waited for in the order in which they were sent; with a single chunk the first
                # one at once, unless the MLP's weights come first
                covered = hides and (delays or (messages > 1 and (len(chunks) > 1 or message.part != "v")))
                sent.backward[covered] += widths[rank] * (self.sp - 1) * per_head
            sent.back[hides and not last] += of_ranks[rank] * (self.sp - 1) * per_head
            # the gradient of attention's output, under the gradient of the projection's weight
            sent.backward[hides] += (sum(of_ranks) - of_ranks[rank]) * per_head
        return sent

    def experts(self) -> Iterator[Flow]:
        """Exchanges of rows over ep: to the ranks of the experts that they have chosen, and back; in backward the gradients of both.

        With --moe-chunks rows of all chunks but the first travel under the experts of the chunk before, results of all but the last
        under those of the next; a shared expert is computed under the counts and the first rows, and in backward under the first gradients.
        """
        shape, model, count = self.shape, self.form.workload.model, self.shape.num_micro_batches
        layers = sum(shape.share.experts)
        if not layers:
            return
        assert model.num_experts and shape.experts is not None
        if model.balance_kind == "sequence":
            sizes = [8 * shape.micro_batch * model.num_experts] * (layers * count)
            yield self._flow("choices of sequences", "all_reduce", "sequence", sizes)
        if self.ep == 1:
            return
        rows, each, parts = shape.experts.rows, shape.experts.row_bytes, self.parallel.moe_chunks
        passes = self._passes_of_experts
        group = "ep" if shape.parts == shape.tp else "ep within dp x cp x sp"
        has_shared, later = model.shared_expert_size > 0, (parts - 1) / parts
        first_passes = layers * (count + self.counting)  # a recomputation knows them
        numbers = first_passes * (self.ep - 1) * parts * (model.num_experts // self.ep + 1) * 8
        under = "a shared expert" if has_shared else ""
        yield Flow("numbers of rows", "all_to_all", group, self.ep, first_passes, numbers, numbers * has_shared, under)
        first = 1.0 if has_shared else later
        for kind, times, sent, size, covered in (
            ("rows to experts", passes, rows.to_others, each.there, first),
            ("results of experts", passes, rows.from_others, each.back, later),
            ("gradients of results", layers * count, rows.to_others, each.back, first),
            ("gradients of rows", layers * count, rows.from_others, each.gradient, later),
        ):  # fmt: skip
            num_bytes = round(times * sent * size)
            under = " and ".join(
                ["other experts"] * (parts > 1) + ["a shared expert"] * (has_shared and covered == first)
            )
            yield Flow(
                kind,
                "all_to_all",
                group,
                self.ep,
                times * parts,
                num_bytes,
                int(num_bytes * covered),
                under if covered else "",
            )

    @property
    def _passes_of_experts(self) -> int:
        """Forward passes through layers with experts in a step."""
        shape = self.shape
        again = sum(has and again for has, again in zip(shape.share.experts, self.again, strict=False))
        return sum(shape.share.experts) * (shape.num_micro_batches + self.counting) + again * shape.num_micro_batches

    def messages(self) -> Iterator[Flow]:
        """Messages of a stage of a pipeline to its neighbours, under the passes of other micro-batches."""
        shape, share = self.shape, self.shape.share
        if self.pp == 1:
            return
        # each boundary is to another rank, but for the one in the middle of a V
        forward, backward = (
            not (share.has_head or share.turns == "below"),
            not (share.has_embedding or share.turns == "above"),
        )
        for kind, sends in (("outputs of stages", forward), ("gradients of stages' inputs", backward)):
            sizes = [shape.stream] * (sends * shape.num_micro_batches)
            yield self._flow(kind, "send", "pp", sizes, sizes, "passes of other micro-batches")

    def scalars(self) -> Iterator[Flow]:
        """Scalars: counts of tokens and sequences, digests of samples, loss sums, with cp digests of sequences, gradient norm.

        Beside the loss sums the terms of the routers, and the load of each expert.
        """
        model = self.form.workload.model
        layers = len(model.expert_layers(model.num_layers or 0))
        of_routers = 2 + layers * (model.num_experts or 0) if layers else 0
        everybody = [8 * (self.num_terms + 3 + self.num_samples), 8 * (self.num_terms + of_routers)]
        holders = "world" if self.parallel.zero_stage > 0 or layers else "tp" if self.pp == 1 else "pp x tp"
        yield self._flow(
            "token counts, digests, loss",
            "all_reduce",
            "world",
            everybody,
            everybody,
            "the first forward pass, and the update",
        )
        compared = [16 * self.form.workload.dp] if self.shape.cp > 1 or self.pp > 1 else []
        yield self._flow("comparison of sequences", "all_reduce", "world", compared)
        if model.balance_kind == "global":
            yield self._flow("loads of experts", "all_reduce", "tokens", [8 * layers * (model.num_experts or 0)])
        yield self._flow("gradient norm", "all_reduce", holders, [8])
