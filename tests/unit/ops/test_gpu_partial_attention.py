"""Attention in pieces by the kernel of a GPU: what it is called with, on a stand-in; its arguments, on torch's meta device."""

from __future__ import annotations

import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.errors import FP64, assert_law
from support.flash_stand_in import FLASH2, FLASH3, FLASH4, Install, install_flash
from support.op_checks import by_stages, message, of_a_rank, randn
from test_attention_kernels import UNDER_FLASH2, UNDER_FLASH4, torchs
from torch import Tensor

from megatron_sp.ops.attention import AttentionMask, core_attention
from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.ops.attention_pieces import Stage
from megatron_sp.ops.flash_packages import FLASH_NAMES, Lengths, Pairs
from megatron_sp.ops.gpu_kernels import PackageFlash, TorchFlash
from megatron_sp.ops.gpu_partial_attention import DensePieces, FlashPieces, calls_of, example_in_pieces
from megatron_sp.ops.partial_attention import Columns, Partial, Rows, attend
from megatron_sp.ops.tiled_attention import CPUFlash
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask

__all__ = ["install_flash", "torchs"]
D = 8


def _scores(q: Tensor, k: Tensor, a: int, b: int, pairs: Pairs) -> Tensor:
    """Scores [heads, queries, keys] of one sequence; the masks are aligned at the last query and key."""
    assert pairs.lengths is not None and pairs.window is None
    left, right = pairs.sides[0], 0 if pairs.causal else pairs.sides[1]
    left, right = (-1 if x >= pairs.lengths.longest_k else x for x in (left, right))
    distance = torch.arange(b) - (torch.arange(a)[:, None] + b - a)
    hidden = torch.zeros(a, b, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    assert not hidden.all(1).any() and a and b, "a query without keys"
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden, -torch.inf)


def _segments(lengths: Lengths | None) -> list[tuple[slice, slice]]:
    assert lengths is not None
    ends_q, ends_k, max_q, max_k = lengths
    assert ends_q.dtype == ends_k.dtype == torch.int32 and len(ends_q) == len(ends_k) and ends_q[0] == ends_k[0] == 0
    assert max_q == ends_q.diff().max() and max_k == ends_k.diff().max()
    of_q, of_k = ends_q.tolist(), ends_k.tolist()
    return [(slice(*of_q[i : i + 2]), slice(*of_k[i : i + 2])) for i in range(len(of_q) - 1)]


class StandIn:
    """A flash kernel by plain formulas; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[Pairs] = []
        self.storages: set[int] = set()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        self.calls.append(pairs)
        self.storages |= {x.untyped_storage().data_ptr() for x in (q, k, v)}
        segments = _segments(pairs.lengths)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert segments[-1][0].stop == len(q) and segments[-1][1].stop == len(k) == len(v)
        out, lse = q.new_full((*q.shape[:2], v.shape[2]), torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
        for a, b in segments:
            scores = _scores(q[a], k[b], a.stop - a.start, b.stop - b.start, pairs)
            values = v[b].repeat_interleave(q.shape[1] // v.shape[1], 1)
            out[a], lse[:, a] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values), scores.logsumexp(-1)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: Pairs, allocate: Any
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.calls.append(pairs)
        assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q)) and all(x.stride(-1) == 1 for x in (grad, q, k, v, out))
        r, grads = q.shape[1] // k.shape[1], allocate()
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape] and all(x.is_contiguous() for x in grads[1:])
        for x in grads:
            x.zero_()
        for a, b in _segments(pairs.lengths):
            probs = torch.exp(_scores(q[a], k[b], a.stop - a.start, b.stop - b.start, pairs) - lse[:, a, None])
            keys, values = k[b].repeat_interleave(r, 1), v[b].repeat_interleave(r, 1)
            delta = (grad[a] * out[a]).sum(-1).t()[..., None]
            d_scores = probs * (torch.einsum("ihd,jhd->hij", grad[a], values) - delta) / math.sqrt(q.shape[-1])
            grads[0][a] = torch.einsum("hij,jhd->ihd", d_scores, keys)
            of_k, of_v = torch.einsum("hij,ihd->jhd", d_scores, q[a]), torch.einsum("hij,ihd->jhd", probs, grad[a])
            grads[1][b], grads[2][b] = (x.unflatten(1, (-1, r)).sum(2) for x in (of_k, of_v))
        return grads


@pytest.fixture
def kernel() -> StandIn:
    return StandIn()


@pytest.mark.parametrize("b, groups, r, counts", [(1, 2, 1, None), (2, 2, 3, None), (2, 3, 1, (1, 2, 2))])
def test_the_pieces_of_real_plans(kernel: StandIn, b: int, groups: int, r: int, counts: tuple[int, ...] | None) -> None:
    rng, s = Random(b + r), 29
    ends = [tuple(sorted({*(rng.randint(1, s) for _ in range(5)), s})) for _ in range(2)]
    masks = [RowMask(s), RowMask(s, window=9), RowMask(s, causal=False), RowMask(s, documents=tuple(ends[:b]))]
    masks += [RowMask(s, documents=tuple(ends[:b]), window=5), RowMask(s, causal=False, lengths=(20, 0)[:b]), RowMask(s, window=1)]
    for mask in masks:
        for size, chunks in ((2, 2), (3, 3)) if b == 1 else ((3, 2),):
            plan = plan_context(mask, cut_row(mask, size, chunks))
            columns = Columns(b, plan.alike, counts)
            m = b * groups if counts is None else b * sum(counts)
            for rank in range(size):
                length = plan.lengths[rank]
                d_v = D + rank  # of rank 0 as wide as the keys
                tensors = randn(length, m, r, D), randn(length, m, r, d_v, seed=1)
                stages = []
                for source in range(size):
                    own = randn(length, b * groups, D + d_v, seed=2)
                    rows = [sum(y - x for x, y in runs) for runs in plan.rows(rank, source)]
                    kv = randn(max([1, *rows]), b * groups, D + d_v, seed=3 + source)
                    keys = Rows.interleaved(own, columns.sequences) if source == rank else message(kv, b, plan.alike)
                    stages.append((Stage(plan.pieces(rank, source), plan.mask.window), keys))
                want = by_stages(CPUFlash(), stages, *tensors, columns)
                assert_law(by_stages(FlashPieces(kernel), stages, *tensors, columns), want, FP64)
    assert kernel.calls


OF_16_BITS = {
    "causal": RowMask(60), "all": RowMask(60, causal=False), "padding": RowMask(60, causal=False, lengths=(41, 60)),
    "window": RowMask(60, window=9), "documents": RowMask(60, documents=((7, 8, 60), (33, 60))),
}  # fmt: skip


@pytest.mark.parametrize("mask", OF_16_BITS)
@pytest.mark.parametrize("r, d_v", [(1, D), (3, 2 * D)])
@pytest.mark.parametrize("name", [*FLASH_NAMES, "torch", "cudnn"])
def test_the_kernels_of_gpus(install_flash: Install, torchs: None, name: str, r: int, d_v: int, mask: str) -> None:
    """Those of the packages, torch's and cuDNN's, all of them stand-ins with the real ones' arguments."""
    install_flash((9, 0), flash2=FLASH2 + UNDER_FLASH2, flash3=FLASH3, flash4=FLASH4 + UNDER_FLASH4)
    kernel: Any = FlashPieces(TorchFlash()) if name == "torch" else FlashPieces(PackageFlash(name))  # type: ignore[arg-type]
    kernel = DensePieces(groups=r > 1) if name == "cudnn" else kernel
    if name == "cudnn" and mask == "window":
        with pytest.raises(ValueError, match="has no windows"):
            of_a_rank(kernel, OF_16_BITS[mask], r, D, torch.bfloat16)
        return
    found, want = (
        of_a_rank(k, OF_16_BITS[mask], r, D, dtype, d_v=d_v) for k, dtype in ((kernel, torch.bfloat16), (CPUFlash(), torch.float64))
    )
    for name_of, x in want.items():
        assert float((found[name_of] - x).norm()) <= 2e-2 * max(float(x.norm()), 1.0), name_of


@pytest.mark.parametrize("mask", [
    AttentionMask(), AttentionMask(False), AttentionMask(window=5), AttentionMask(window=1), AttentionMask(documents=((3, 4, 20),)),
    AttentionMask(documents=((3, 12, 20),), window=4), AttentionMask(False, documents=((3, 12, 20),)),
])  # fmt: skip
def test_the_example_by_which_kernels_are_tried(mask: AttentionMask) -> None:
    q, k, v = (randn(20, 2, n, D, seed=i).requires_grad_() for i, n in enumerate((3, 1, 1)))
    grad = randn(20, 2, 3, D, seed=5)
    out = core_attention(q, k, v, mask, kernel="reference")
    want = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    for name in ("sdpa", "reference"):
        got = example_in_pieces(name, q.detach(), k.detach(), v.detach(), grad, mask)
        assert_law(dict(zip("oqkv", got, strict=True)), dict(zip("oqkv", want, strict=True)), FP64)


def test_a_stage_is_one_call_and_the_own_one_two_whatever_the_number_of_documents(kernel: StandIn) -> None:
    s = 64
    mask = RowMask(s, documents=((7, 20, 21, 50, s),))
    plan = plan_context(mask, cut_row(mask, 2, 4))
    for i in range(2):
        assert len(calls_of(plan.pieces(i, i), None)) <= 2 and len(calls_of(plan.pieces(i, 1 - i), None)) == 1
    window = RowMask(s, window=16)
    plan = plan_context(window, cut_row(window, 4, 1))
    assert [len(calls_of(plan.pieces(2, j), 16)) for j in range(4)] == [0, 1, 1, 0]


def test_a_share_of_one_run_reaches_the_kernel_without_a_copy(kernel: StandIn) -> None:
    q, kv = randn(12, 2, 3, D), randn(12, 2, 2, D)
    pieces: tuple[Piece, ...] = (Piece(-1, 0, 5, 0, 5, "diagonal"), Piece(-1, 5, 12, 5, 12, "diagonal"), Piece(-1, 5, 12, 0, 5, "full"))
    attend(FlashPieces(kernel), Stage(pieces), q, Rows.interleaved(kv, 1), Partial(q, Columns(1, True)), Columns(1, True))
    assert kernel.storages == {q.untyped_storage().data_ptr(), kv.untyped_storage().data_ptr()} and len(kernel.calls) == 2


def test_keys_of_several_pieces_get_the_sum_of_their_gradients(kernel: StandIn) -> None:
    """Three pieces with overlapping keys in one call, of two sequences that lie between one another."""
    pieces: tuple[Piece, ...] = (
        Piece(0, 0, 3, 0, 6, "full"), Piece(0, 3, 6, 2, 9, "full"), Piece(0, 6, 9, 6, 12, "full"), Piece(1, 0, 4, 0, 6, "full"),
        Piece(1, 5, 9, 5, 7, "full"),
    )  # fmt: skip
    assert len(calls_of(pieces, None)) == 1
    tensors = randn(12, 4, 2, D), randn(12, 4, 2, D, seed=1)
    columns, kv = Columns(2, False), randn(12, 4, 2, D, seed=2)
    for rows in (Rows.interleaved(kv, 2), message(kv, 2, False)):
        rounds = calls_of(pieces, None)[0].apart(rows)
        assert len(rounds) == 2  # in each of which no row is twice: sums on a GPU are those of the last time
        every = torch.arange(len(rows.x))
        for mine, of_tensor in rounds:
            assert len(every[of_tensor].unique()) == len(every[of_tensor]) == len(torch.arange(32)[mine])
        stages = [(Stage(pieces), rows)]
        assert_law(by_stages(FlashPieces(kernel), stages, *tensors, columns), by_stages(CPUFlash(), stages, *tensors, columns), FP64)


def test_pieces_that_share_queries_share_no_call() -> None:
    bands: tuple[Piece, ...] = (Piece(0, 0, 10, 0, 5, "band", 7), Piece(0, 5, 15, 5, 10, "band", 7), Piece(1, 5, 15, 5, 10, "band", 7))
    assert [[piece.sequence for piece in call.pieces] for call in calls_of(bands, 20)] == [[0], [0, 1]]


def test_a_band_with_keys_that_no_query_sees_is_refused() -> None:
    with pytest.raises(AssertionError, match="has keys that no query sees, or queries without keys"):
        calls_of((Piece(0, 0, 4, 0, 9, "band", 2),), 3)
    with pytest.raises(AssertionError, match="has keys that no query sees, or queries without keys"):
        calls_of((Piece(0, 0, 4, 0, 3, "band", 3),), 4)  # the last query is four positions behind the last key


@pytest.mark.parametrize("kind, left, right", [("full", -1, -1), ("diagonal", -1, -1), ("band", 3, 0)])
def test_torchs_kernel_takes_what_it_is_called_with(kind: Any, left: int, right: int) -> None:
    """As far as torch's description of its results goes, which is all that there is without a GPU."""
    q, kv = torch.empty(9, 2, 3, D, dtype=torch.bfloat16, device="meta"), torch.empty(9, 2, 2, D, dtype=torch.bfloat16, device="meta")
    (call,) = calls_of((Piece(-1, 0, 4, 0, 4, kind), Piece(-1, 4, 9, 4, 9, kind)), 4)
    assert (call.causal, call.left, call.right) == (kind == "diagonal", left, right)
    pairs, torchs = call.pairs(q.device), TorchFlash()
    out, lse = torchs.forward(q.flatten(1, 2), kv[:, :, 0], kv[:, :, 1], pairs)
    assert out.shape == (9, 6, D) and lse.shape == (6, 9) and lse.dtype == torch.float32
    found = torchs.backward(out, q.flatten(1, 2), kv[:, :, 0], kv[:, :, 1], out, lse, pairs, lambda: pytest.fail("it makes its own"))
    assert [x.shape for x in found] == [(9, 6, D), (9, 2, D), (9, 2, D)]


def test_the_operators_have_the_arguments_that_are_used() -> None:
    ops = SimpleNamespace(f=torch.ops.aten._flash_attention_forward, b=torch.ops.aten._flash_attention_backward)
    of = {name: [a.name for a in op.default._schema.arguments] for name, op in vars(ops).items()}
    assert of["f"][:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert of["b"][:14] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "rng_state", "unused",
    ]  # fmt: skip
    assert all({"window_size_left", "window_size_right"} <= set(names) for names in of.values())
