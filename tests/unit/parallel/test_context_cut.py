"""Who has which positions of a sequence: tokens that name their place, on every rank of a layout, without messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, cast

import pytest
import torch
from support import tiny
from torch import Tensor

from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.config.schema import KernelConfig
from megatron_sp.inference.decoder import KVCache, RowPass
from megatron_sp.models import language_model
from megatron_sp.models.language_model import rotary_of
from megatron_sp.models.transformer import TransformerBlock
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.ops.dropout import DropoutKeys
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.forward_context import ForwardContext, row_mask
from megatron_sp.parallel.layers import ParallelLMHead
from megatron_sp.parallel.lm_head import HeadLoss
from megatron_sp.parallel.parallel_context import ContextParallel, ParallelContext, SequenceParallel
from megatron_sp.parallel.row_mask import RowMask, Runs
from megatron_sp.parallel.tensor_parallel import TensorParallel

BATCH = 3


def positions_of(runs: Runs) -> list[int]:
    return [position for start, stop in runs for position in range(start, stop)]


SIZES = [(1, 1, 1), (2, 1, 1), (3, 1, 2), (2, 3, 1), (4, 2, 2), (3, 2, 2)]  # cp, sp, tp with tp_seq


def group(rank: int, size: int) -> Group:
    return cast(Group, tiny.Rank(rank, size)) if size > 1 else SINGLE_RANK


def layouts(cp: int, sp: int, tp: int, chunks: int | None = None) -> Iterator[tuple[tuple[int, int, int], ParallelContext]]:
    """Every rank's view of a layout, with its place (cp, sp, tp)."""
    for place in product(range(cp), range(sp), range(tp)):
        yield place, ParallelContext(
            TensorParallel(group(place[2], tp), tp > 1), SequenceParallel(group(place[1], sp)), cp=ContextParallel(group(place[0], cp)),
            cp_chunks=chunks,
        )  # fmt: skip


def random_masks(length: int, seed: int) -> list[AttentionMask]:
    """Masks of a micro-batch of ``BATCH`` sequences."""
    random = Random(seed)
    ends = [sorted({*random.sample(range(1, length), min(length - 1, random.randrange(4))), length}) for _ in range(BATCH)]
    lengths = tuple(random.randrange(1, length + 1) for _ in range(BATCH))
    documents = tuple(tuple(each) for each in ends)
    return [
        AttentionMask(), AttentionMask(False), AttentionMask(window=random.randrange(1, length + 2)), AttentionMask(documents=documents),
        AttentionMask(False, documents=documents), AttentionMask(documents=documents, window=2),
        AttentionMask(False, torch.tensor(lengths)), AttentionMask(False, torch.tensor(lengths), lengths=lengths),
    ]  # fmt: skip


@pytest.mark.parametrize("cp, sp, tp", SIZES)
@pytest.mark.parametrize("length", [1, 2, 5, 16, 37])
def test_every_position_is_somewhere_once_and_in_order(cp: int, sp: int, tp: int, length: int) -> None:
    """The rows of all ranks are the plan's, in order; behind them is padding, and everybody has at least one row."""
    places = torch.arange(1, length + 1)[:, None].expand(length, BATCH)  # 0 is padding
    for mask, chunks in product(random_masks(length, seed=length), (None, 1, 3)):
        of_mask, found, seen = row_mask(mask, length), dict[tuple[int, int], list[int]](), []
        owners: dict[int, tuple[int, int, int]] = {}
        shares = cut_row(of_mask, cp, chunks)
        for (cp_rank, sp_rank, tp_rank), layout in layouts(cp, sp, tp, chunks):
            cut = layout.cut(of_mask)
            assert cut.whole == length and cut.shares == (shares if cp > 1 else (((0, length),),)) and cut.runs == cut.shares[cp_rank]
            mine = [position + 1 for position in positions_of(cut.runs)]
            assert cut.share(places)[:, 0].tolist() == mine and len(mine) == cut.length
            rows = cut.take(places)
            assert rows.shape == (cut.padded, BATCH) and rows[:, 1].tolist() == mine + [0] * (cut.padded - cut.length)
            assert cut.padded % (sp * tp) == 0 and cut.padded - max(1, cut.length) < sp * tp and cut.padded > 0
            inside, outside = rows[cut.sp_slice, 0].tolist(), rows[cut.tp_seq_slice, 0].tolist()
            assert len(inside) == cut.padded // sp and len(outside) == cut.padded // (sp * tp) > 0
            assert outside == inside[tp_rank * len(outside) : (tp_rank + 1) * len(outside)]
            found.setdefault((cp_rank, sp_rank), inside)
            assert found[cp_rank, sp_rank] == inside, "the same on the whole tp group"
            seen += outside
            for position in range(length):
                at = cut.row_of(position)
                assert (at is None) == (position + 1 not in inside) and (at is None or inside[at] == position + 1)
                owners.setdefault(position, cut.place(position))
                assert cut.place(position) == owners[position], "all ranks agree"
                assert at is None or owners[position] == (cp_rank, sp_rank, at)
        assert sorted(each for each in seen if each) == list(range(1, length + 1))
        whole = [torch.tensor([each for part in range(sp) for each in found[rank, part]]) for rank in range(cp)]
        assert cut.put_together(whole).tolist() == list(range(1, length + 1))


def test_the_cut_is_that_of_the_mask() -> None:
    """By area, chunk by chunk; more chunks on request; with one cp rank nobody asks for it."""
    layout = [each for _, each in layouts(2, 1, 1)]
    assert [each.cut(RowMask(8)).runs for each in layout] == [((0, 2), (6, 8)), ((2, 6),)]
    assert [each.cut(RowMask(8, causal=False)).runs for each in layout] == [((0, 4),), ((4, 8),)]
    assert [replace(each, cp_chunks=1).cut(RowMask(8)).runs for each in layout] == [((0, 4),), ((4, 8),)]
    assert ParallelContext().cut(RowMask(8, documents=((3, 8),))).shares == (((0, 8),),)
    with pytest.raises(ValueError, match="there is no position 8 in a sequence of 8"):
        layout[0].cut(RowMask(8)).place(8)
    with pytest.raises(AssertionError, match="7 positions, and the sequence that was cut has 8"):
        layout[0].cut(RowMask(8)).take(torch.zeros(7))


def test_masks_in_numbers_of_the_host() -> None:
    documents = ((3, 8), (8,))
    assert row_mask(AttentionMask(documents=documents, window=3), 8) == RowMask(8, True, 3, documents)
    assert row_mask(AttentionMask(documents=documents), 8, 2) == RowMask(8, True, 2, documents), "the window of the model's layers"
    assert row_mask(AttentionMask(False, torch.tensor([8, 5])), 8) == RowMask(8, False, lengths=(8, 5))
    with pytest.raises(RuntimeError, match="the mask has them on the device alone"):
        row_mask(AttentionMask(False, torch.empty(2, dtype=torch.int64, device="meta")), 8)
    assert row_mask(AttentionMask(False, torch.empty(2, device="meta"), lengths=(8, 5)), 8) == RowMask(8, False, lengths=(8, 5))


class Seen:
    """What a model's embedding, blocks and head were given on one rank; the hidden states are the numbers of the tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.tokens = self.positions = self.labels = self.mask = self.types = torch.empty(0)
        self.ctx = ForwardContext(AttentionMask())

    def of(self, config: Any, layout: ParallelContext, batch: tiny.Batch, ctx: ForwardContext) -> Any:
        """Run the model's forward pass up to its head, without attention or weights."""
        model = tiny.build(config, KernelConfig(), seed=5, dtype=torch.float64, layout=layout)
        model.embedding.forward = self._embed
        self.monkeypatch.setattr(TransformerBlock, "forward", lambda block, x, ctx, *_: self._block(x, ctx))
        self.monkeypatch.setattr(ParallelLMHead, "loss", lambda head, x, labels, loss_mask: self._loss(x, labels, loss_mask))
        self.monkeypatch.setattr("megatron_sp.models.bert.gather_positions", lambda x, tp: x)
        if not config.is_bert:
            return model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx)
        model.selects_on, model._order = (), self._order
        return model(batch["tokens"], batch["types"], batch["labels"], batch["loss_mask"], torch.zeros(BATCH, dtype=torch.int64), ctx)

    def _embed(self, tokens: Tensor, positions: Tensor, ctx: ForwardContext, types: Tensor | None = None) -> Tensor:
        self.tokens, self.positions, self.types = tokens, positions, torch.empty(0) if types is None else types
        return torch.zeros(positions.shape[0], BATCH, tiny.BASE.hidden_size or 0, dtype=torch.float64)

    def _block(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        self.ctx = ctx
        return x

    def _loss(self, x: Tensor, labels: Tensor, loss_mask: Tensor) -> HeadLoss:
        self.labels, self.mask = labels, loss_mask
        return HeadLoss(x.sum(), labels, labels)

    def _order(self, x: Tensor, row: int | None, order: Tensor) -> tuple[Tensor | None, Tensor | None]:
        self.row_of_cls = row
        return None, None


def named(more: float, rows: list[int | None]) -> list[list[float]]:
    """The names of these positions in each sequence, ``more`` + 100 * sequence + position; 0 for padding."""
    return [[0 if p is None else more + 100 * b + p for b in range(1, BATCH + 1)] for p in rows]


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("cp, sp, tp", SIZES[1:])
@pytest.mark.parametrize("length", [2, 21])
def test_all_that_belongs_to_a_position_goes_with_it(
    family: str, cp: int, sp: int, tp: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, labels, loss mask, segments, position ids, rotary tables and dropout keys of each rank name the plan's positions."""
    of_gpt = {"position_embedding_type": "rope"} if length > 2 else {}
    config = tiny.shape(model_family=family, num_layers=1, num_attention_heads=8, hidden_dropout=0.1, ffn_hidden_size=8, **of_gpt)
    config.max_position_embeddings = 64
    names = torch.arange(length).expand(BATCH, length) + 100 * torch.arange(1, BATCH + 1)[:, None]  # 100 * sequence + position
    batch = {"tokens": names, "labels": names + 1000, "loss_mask": names + 0.5, "types": names + 2000}
    keys = DropoutKeys.create(7, 3, torch.arange(BATCH), torch.arange(length))
    ids = names % 100 + 7  # as with --reset-position-ids
    for index, mask in enumerate(random_masks(length, seed=length + cp)):
        if (family == "bert") == mask.causal:
            continue
        own_ids = index % 2 == 0
        ctx = ForwardContext(mask, dropout=keys, positions=ids if own_ids else None)
        owners = 0
        for _, layout in layouts(cp, sp, tp):
            seen = Seen(monkeypatch)
            seen.of(config, layout, batch, ctx)
            cut = layout.cut(row_mask(mask, length))
            at = positions_of(cut.runs)
            row: list[int | None] = [*at, *[None] * (cut.padded - cut.length)]
            inside, outside = row[cut.sp_slice], row[cut.tp_seq_slice]
            assert seen.tokens.tolist() == named(0, inside) and seen.labels.tolist() == named(1000, inside)
            assert seen.mask.tolist() == named(0.5, inside)
            if family == "bert":
                assert seen.types.tolist() == named(2000, outside)
                assert (seen.row_of_cls is not None) == (0 in inside) and (seen.row_of_cls is None or inside[seen.row_of_cls] == 0)
                owners += seen.row_of_cls is not None
            of_position = (lambda p: [p + 7] * BATCH) if own_ids else (lambda p: p)
            nothing = [0] * BATCH if own_ids else 0
            assert seen.positions.tolist() == [nothing if p is None else of_position(p) for p in outside]
            found = seen.ctx
            assert (found.length, found.whole_length) == (len(at), length)
            assert found.plan is plan_context(row_mask(mask, length), cut.shares)
            assert found.dropout is not None and torch.equal(found.dropout.token_keys, keys.token_keys[at])
            zero = torch.zeros(BATCH, dtype=torch.int64)
            local = torch.stack([zero if p is None else keys.token_keys[p] for p in outside])
            assert found.local_dropout is not None and torch.equal(found.local_dropout.token_keys, local)
            if config.position_embedding_type == "rope":
                whole = rotary_of(config, ids.t() if own_ids else torch.arange(length), torch.float64)
                assert whole is not None and found.rotary is not None
                assert all(torch.equal(got, want[at]) for got, want in zip(found.rotary, whole, strict=True))
        assert owners == (tp if family == "bert" else 0), "one cp and sp rank has [CLS]"


def test_one_cp_rank_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut by a mask, and lengths may be on the device alone."""
    monkeypatch.setattr(language_model, "row_mask", lambda *_: pytest.fail("the mask was read"))
    model = tiny.make_model(tiny.shape())
    batch = tiny.make_batch(tiny.BASE)
    assert model(batch["tokens"], batch["labels"], batch["loss_mask"], tiny.context(tiny.BASE, batch))[0] > 0


def test_a_cache_is_for_one_cp_rank() -> None:
    (_, layout), *_ = layouts(2, 1, 1)
    model = tiny.build(tiny.shape(), KernelConfig(), seed=5, dtype=torch.float64, layout=layout)
    with pytest.raises(RuntimeError, match="a KV cache holds all positions"):
        model.hidden(torch.zeros(1, 4, dtype=torch.int64), ForwardContext(AttentionMask(), cache=RowPass(KVCache(tiny.LAYERS, 1, 8), 0, 0)))
