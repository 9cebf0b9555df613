"""Attention: every kernel and mask against one plain formula, forward and backward; what nobody may see; calls and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import gradients, leaves, pairs_of, randn
from torch import Tensor

from megatron_sp.ops import allocator, attention_pieces, gpu_kernels, tiled_attention
from megatron_sp.ops import attention as attention_module
from megatron_sp.ops.attention import (
    AttentionMask,
    KernelName,
    attention,
    core_attention,
    cut_qkv,
    fold_mask,
    head_row_keys,
    join_qkv,
    lse_kernel,
    split_qkv,
)
from megatron_sp.ops.attention_kernels import DenseCPU, KeptTensors
from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.ops.attention_pieces import batches_of, pieces_of_documents, pieces_of_lengths, stage_of, tiles_of
from megatron_sp.ops.dropout import DropoutKeys, keep_mask
from megatron_sp.ops.rotary import apply_rotary, rotary_tables
from megatron_sp.ops.tiled_attention import TiledAttention
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.forward_context import micro_batch_context
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.training.step import on_device

S, B, EACH, D = 30, 3, 2, 5  # two columns of each of three sequences
DOCUMENTS = ((3, 4, 9, 10, 11, 30), (30,), (1, 2, 3, 5, 7, 9, 16, 23, 30))
KERNELS: tuple[KernelName, ...] = ("sdpa", "reference")


def padded(causal: bool, *lengths: int, window: int | None = None) -> AttentionMask:
    return AttentionMask(causal, torch.tensor(lengths).repeat_interleave(EACH), lengths=lengths, window=window)


MASKS = {
    "all": AttentionMask(False), "causal": AttentionMask(), **{f"window {n}": AttentionMask(window=n) for n in (1, 6, 19, 30)},
    "documents": AttentionMask(documents=DOCUMENTS), "documents, all": AttentionMask(False, documents=DOCUMENTS),
    **{f"documents, window {n}": AttentionMask(documents=DOCUMENTS, window=n) for n in (1, 4, 6, 19, 29)},
    "padding": padded(False, 13, 30, 0), "padding, causal": padded(True, 13, 30, 0), "padding alone": padded(False, 0, 0, 0),
    "padding, window": padded(True, 13, 30, 0, window=6),
}  # fmt: skip


@pytest.fixture(params=["together", "in blocks", "alone"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small pieces share a call; or results go in blocks as large ones do; or each has a call of its own. Tiles are narrow then."""
    if request.param != "together":
        for module in (attention_pieces, tiled_attention):
            monkeypatch.setattr(module, "window_tile", lambda window: min(window, 5))
    if request.param == "in blocks":
        monkeypatch.setattr(allocator, "_MIN_BYTES", 1)
    if request.param == "alone":
        monkeypatch.setattr(tiled_attention, "_BATCHED_BYTES", 0)
    for cache in (stage_of, tiled_attention._whole_band):  # stages keep their tiles and calls
        cache.cache_clear()
    yield
    for cache in (stage_of, tiled_attention._whole_band):
        cache.cache_clear()


def allowed(mask: AttentionMask, s_q: int, s_k: int) -> Tensor:
    """[sequences, s_q, s_k]: which key a query sees; the last query stands at the last key."""
    at, keys = torch.arange(s_q)[:, None] + s_k - s_q, torch.arange(s_k)
    seen = torch.ones(B, s_q, s_k, dtype=torch.bool)
    if mask.causal:
        seen &= keys <= at
    if mask.window is not None:
        seen &= at - keys < mask.window
    for sequence in range(B):
        if mask.documents is not None:
            ends = torch.tensor(mask.documents[sequence])
            seen[sequence] &= torch.bucketize(at, ends, right=True) == torch.bucketize(keys, ends, right=True)
        if mask.lengths is not None:
            seen[sequence] &= keys < mask.lengths[sequence]
    return seen


def formula(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, keep: Tensor | float = 1.0) -> Tensor:
    """A query that sees nothing gets zero; ``keep``: factors of the probabilities [m, r, s_q, s_k]."""
    scores = torch.einsum("qmrd,kmd->mrqk", q, k[:, :, 0]) / math.sqrt(q.shape[-1])
    hidden = ~allowed(mask, len(q), len(k)).repeat_interleave(EACH, 0)[:, None]
    probs = torch.softmax(scores.masked_fill(hidden, -1e300), -1).masked_fill(hidden, 0.0)
    return torch.einsum("mrqk,kmd->qmrd", probs * keep, v[:, :, 0])


def operands(r: int, d_v: int = D, s_q: int = S) -> tuple[dict[str, Tensor], Tensor]:
    m = B * EACH
    return {"q": randn(s_q, m, r, D), "k": randn(S, m, 1, D, seed=1), "v": randn(S, m, 1, d_v, seed=2)}, randn(s_q, m, r, d_v, seed=3)


def compare(got: Callable[..., Tensor], want: Callable[..., Tensor], inputs: dict[str, Tensor], grad: Tensor) -> None:
    found, wanted = (gradients(lambda i, f=f: f(i["q"], i["k"], i["v"]), leaves(**inputs), grad) for f in (got, want))  # type: ignore[misc]
    assert_law(found, wanted, FP64)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("r, d_v", [(1, D), (3, D), (2, 3), (1, 9)])
@pytest.mark.parametrize("kernel", ["sdpa", "sdpa, kept", "sdpa, piece by piece", "reference"])
def test_is_the_formula(kernel: str, r: int, d_v: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept: the results are those of a first pass. Piece by piece: as where no kernel gives the log of its sums, as in fp32 on a GPU."""
    monkeypatch.setattr(attention_module, "_HAS_CPU_FLASH", "piece" not in kernel)
    if "sdpa" in kernel and mask != "padding, window":
        monkeypatch.setattr(attention_module, "_allowed", lambda *_: pytest.fail("a mask of all pairs was made"))
    (inputs, grad), kept, name = operands(r, d_v), None, kernel.partition(",")[0]
    if "kept" in kernel and mask != "padding, window":
        kept = KeptTensors()
        with torch.no_grad():
            core_attention(*inputs.values(), MASKS[mask], kernel="sdpa", kept=kept)
        kept.restore(kept.release())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core_attention(q, k, v, MASKS[mask], kernel=name, kept=kept)  # type: ignore[arg-type]

    compare(attend, lambda q, k, v: formula(q, k, v, MASKS[mask]), inputs, grad)


@pytest.mark.parametrize("d_v", [D, 9])
@pytest.mark.parametrize("s_q", [1, 5, 40])
@pytest.mark.parametrize("mask", ["causal", "all", "window 1", "window 6"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_or_more_queries_than_keys(kernel: KernelName, mask: str, s_q: int, d_v: int) -> None:
    """What a cache of past keys needs."""
    got = lambda q, k, v: core_attention(q, k, v, MASKS[mask], kernel=kernel)
    compare(got, lambda q, k, v: formula(q, k, v, MASKS[mask]), *operands(2, d_v, s_q))


@pytest.mark.parametrize("s, g, r", [(S, EACH, 3), (1, EACH, 2), (1, 1, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_groups_of_the_fused_tensor(kernel: KernelName, s: int, g: int, r: int) -> None:
    """Each group's queries, key and value, of each sequence, whose padding all its groups have."""
    qkv, lengths = randn(s, B, g * (r + 2) * D).requires_grad_(), torch.tensor([13, 30, 1])
    got = attention(qkv, r, D, AttentionMask(True, lengths), kernel=kernel)
    heads = qkv.view(s, B * g, r + 2, D)
    parts = [heads[:, i * g : (i + 1) * g] for i in range(B)]
    want = []
    for part, length in zip(parts, lengths.tolist(), strict=True):
        mask = AttentionMask(True, torch.full((g,), length))
        want.append(core_attention(part[:, :, :r], part[:, :, r : r + 1], part[:, :, r + 1 :], mask, kernel="reference").flatten(1))
    grads = [torch.autograd.grad(out, qkv, randn(s, B, g * r * D, seed=1))[0] for out in (got, torch.stack(want, 1))]
    assert_law({"out": got, "qkv": grads[0]}, {"out": torch.stack(want, 1).detach(), "qkv": grads[1]}, FP64)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.bfloat16, 0.02), (torch.float16, 0.0025)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_dtypes(dtype: torch.dtype, tolerance: float, kernel: KernelName) -> None:
    """16 bits: probabilities are rounded before they meet the values, and gradients of scores are: 2.5 epsilons of the largest element."""
    for mask in (AttentionMask(), AttentionMask(window=20)):
        qkv, grad = randn(33, 2, 2 * 4 * D, dtype=dtype), randn(33, 2, 2 * 2 * D, seed=1, dtype=dtype)
        wide = leaves(qkv=qkv.double())
        want = gradients(lambda i, m=mask: attention(i["qkv"], 2, D, m, kernel="reference"), wide, grad.double())  # type: ignore[misc]
        got = gradients(lambda i, m=mask: attention(i["qkv"], 2, D, m, kernel=kernel), leaves(qkv=qkv), grad)  # type: ignore[misc]
        assert_law(got, want, tolerance)


@pytest.mark.parametrize("mask", ["causal", "all", "documents"])
def test_dropout_in_the_reference_is_by_hash(mask: str) -> None:
    """A key's channel is its position in its document: what is dropped there is what is dropped of the document alone."""
    r, rate = 2, 0.3
    rows = DropoutKeys.create(1, 2, torch.arange(B), torch.arange(S)).row_keys(0, 0)
    keys, keep = head_row_keys(rows, EACH, r), torch.zeros(B * EACH, r, S, S, dtype=torch.bool)
    for column in range(B * EACH):
        ends = DOCUMENTS[column // EACH] if mask == "documents" else (S,)
        for start, end in zip((0, *ends), ends, strict=False):
            keep[column, :, start:end, start:end] = keep_mask(keys[column, :, start:end], end - start, rate)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core_attention(q, k, v, MASKS[mask], kernel="reference", dropout=rate, dropout_rows=keys)

    inputs, grad = operands(r)
    compare(attend, lambda q, k, v: formula(q, k, v, MASKS[mask], keep.double() / (1 - rate)), inputs, grad)
    assert law_error(attend(*inputs.values()), formula(*inputs.values(), MASKS[mask])) > 0.1
    with pytest.raises(RuntimeError, match="dropout keys"):
        core_attention(*inputs.values(), MASKS[mask], kernel="reference", dropout=rate)


def test_each_head_of_each_sequence_has_its_own_dropout_keys() -> None:
    """Group by group: group i of r queries is heads i * r to (i + 1) * r, wherever they are computed."""
    rows = torch.arange(10, dtype=torch.int32).view(5, 2)  # [s, b]
    keys = head_row_keys(rows, groups=3, queries_per_group=4, first_head=7)
    assert keys.shape == (2 * 3, 4, 5)
    for b, i, j in ((0, 0, 0), (0, 2, 1), (1, 1, 3)):
        assert torch.equal(keys[b * 3 + i, j], head_row_keys(rows, 1, 1, first_head=7 + i * 4 + j)[b, 0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_seen_may_hold_anything_large_and_large_scores_do_not_overflow(kernel: KernelName) -> None:
    mask, qkv = AttentionMask(True, torch.tensor([5, 4])), randn(7, 2, 2 * 4 * D)
    changed = qkv.clone()
    changed[5:, 0], changed[4:, 1] = 1e6, -1e6
    outs = [attention(t, 2, D, mask, kernel=kernel) for t in (qkv, changed)]
    assert torch.equal(outs[0][:5, 0], outs[1][:5, 0]) and torch.equal(outs[0][:4, 1], outs[1][:4, 1])
    qkv = randn(6, 2, 4 * 3 * D, dtype=torch.float32).mul_(1e3).requires_grad_()
    out = attention(qkv, 1, D, AttentionMask(), kernel=kernel)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(qkv.grad).all()  # type: ignore[arg-type]


def test_lengths_on_the_host_are_kept_for_all_heads() -> None:
    folded = fold_mask(AttentionMask(False, torch.tensor([3, 1])), 4)
    assert folded.lengths == (3, 1) and folded.key_lengths is not None and folded.key_lengths.tolist() == [3] * 4 + [1] * 4
    assert AttentionMask(False, torch.tensor([3, 1], device="meta")).lengths_on_host() is None
    assert AttentionMask(False, torch.tensor([3, 1], device="meta"), lengths=(3, 1)).lengths_on_host() == (3, 1)


def test_what_the_host_reads_does_not_go_to_the_device() -> None:
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.long), "documents": torch.tensor([[0, 0, 1, 1, 1], [0] * 5])}
    moved = on_device({**batch, "length": torch.tensor([5, 2])}, torch.device("meta"))
    assert {name: t.device.type for name, t in moved.items()} == {"tokens": "meta", "documents": "cpu", "length": "cpu"}
    del moved["documents"]
    mask = micro_batch_context(moved, seed=1, step=1, drops=False, kernel="sdpa", causal=False).mask
    assert not mask.causal and mask.lengths == (5, 2) and mask.key_lengths is not None and mask.key_lengths.device.type == "meta"
    assert micro_batch_context(batch, seed=1, step=1, drops=False, kernel="sdpa").mask.documents == ((2, 5), (5,))


# the fused tensor


@pytest.mark.parametrize("d_v", [D, 3])
def test_split_is_views_and_packs_gradients_once(d_v: int) -> None:
    s, b, g, r = 4, 3, 2, 3
    qkv = randn(s, b, g * ((r + 1) * D + d_v)).requires_grad_()
    parts = split_qkv(qkv, r, D, v_width=d_v)
    assert [p.shape for p in parts] == [(s, b * g, r, D), (s, b * g, 1, D), (s, b * g, 1, d_v)]
    assert all(p.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for p in parts)
    grads = [randn(*p.shape, seed=i) for i, p in enumerate(parts)]
    torch.autograd.backward(parts, grads)
    want = torch.cat([grad.flatten(2) for grad in grads], dim=2).view(s, b, -1)
    assert torch.equal(qkv.grad, want)  # type: ignore[arg-type]
    qkv.grad = None
    split_qkv(qkv, r, D, v_width=d_v)[1].sum().backward()  # autograd fills in zeros for the others
    want = torch.zeros(s, b, g, (r + 1) * D + d_v, dtype=qkv.dtype)
    want[..., r * D : (r + 1) * D] = 1
    assert torch.equal(qkv.grad, want.view(qkv.shape))  # type: ignore[arg-type]


@pytest.mark.parametrize("ours", [True, False], ids=["packed by the kernel", "three gradients"])
@pytest.mark.parametrize("b_in_tables", [False, True])
def test_split_turns_what_it_splits(b_in_tables: bool, ours: bool) -> None:
    """As ``apply_rotary`` before it does; the gradient that a kernel has packed is turned where it lies."""
    s, b, g, r, d = 5, 3, 2, 3, 6
    positions = torch.arange(s) if not b_in_tables else torch.arange(s * b).view(s, b)
    tables = rotary_tables(positions, d, 100.0, torch.float64)
    first, second = randn(s, b, g * (r + 2) * d).requires_grad_(), randn(s, b, g * (r + 2) * d).requires_grad_()
    want = split_qkv(apply_rotary(first * 1, *tables, d, heads=r + 2, rotated=r + 1), r, d)
    got = split_qkv(second * 1, r, d, tables)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    packed = randn(s, b * g, r + 2, d, seed=1)
    grads = [packed[:, :, :r], packed[:, :, r : r + 1], packed[:, :, r + 1 :]]
    torch.autograd.backward(want, [t.clone() for t in grads])
    torch.autograd.backward(got, grads if ours else [t.clone() for t in grads])
    assert torch.equal(second.grad, first.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("r", [1, 3])
def test_the_cpu_kernels_gradients_need_no_packing(r: int) -> None:
    heads = cut_qkv(randn(6, 2, 2 * (r + 2) * D), r, D, None)
    kernel = DenseCPU(True)
    results = kernel.forward(*heads)
    grads = kernel.backward(randn(*results[0].shape, seed=1), *heads, *results)
    packed = grads.q._base
    assert packed is not None and packed is grads.k._base and packed is grads.v._base and packed.shape == (6, 4, r + 2, D)
    assert join_qkv(*grads, torch.Size([6, 2, 2 * (r + 2) * D]), None).data_ptr() == packed.data_ptr(), "one tensor, handed on as it is"


# calls of kernels


@pytest.mark.parametrize("documents", [None, ((4, 16), (16,))])
def test_torchs_flash_kernel_gets_the_window_there_and_back(documents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for GPUs; what it is called with, and what its derivative keeps, can be seen without one."""
    monkeypatch.setattr(attention_module, "torch_has_varlen", lambda *_: True)
    q, k, v = (torch.empty(16, 2, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (3, 1, 1))
    out = core_attention(q, k, v, AttentionMask(documents=documents, window=5), kernel="sdpa")
    assert out.shape == q.shape
    node: Any = out.grad_fn
    while node.name() != "FlashAttentionBackward0":
        node = node.next_functions[0][0]
    assert (node._saved_window_size_left, node._saved_window_size_right, node._saved_is_causal) == (4, 0, True)


def test_one_by_one_writes_in_place_and_runs_backward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_HAS_CPU_FLASH", False)
    inputs = leaves(**operands(2)[0])
    out = core_attention(*inputs.values(), MASKS["documents"], kernel="sdpa")
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran already"):
        out.sum().backward()
    with torch.no_grad():
        assert torch.equal(core_attention(*inputs.values(), MASKS["documents"], kernel="sdpa"), out)


def test_one_sequence_with_a_query_for_each_key_reaches_the_kernel_without_a_copy() -> None:
    q, k, v = split_qkv(randn(S, 4, 3 * D), 1, D)
    seen: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        seen.extend((q, k, v))
        return q.clone()

    gpu_kernels.varlen(q, k, v, pieces_of_documents(((4, S),), True), 4, kernel)
    assert {t.untyped_storage().data_ptr() for t in seen} == {q.untyped_storage().data_ptr()}


@pytest.mark.parametrize("form", ["together"], indirect=True)
def test_short_documents_share_calls_and_long_windows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 documents of 1 to 20 tokens: no call for each of them."""
    random, ends = Random(0), [0]
    while len(ends) <= 200:
        ends.append(ends[-1] + random.randint(1, 20))
    calls: list[int] = []
    plain: Callable[..., Any] = tiled_attention.CPUFlash.attend
    monkeypatch.setattr(tiled_attention.CPUFlash, "attend", lambda *args: calls.append(1) or plain(*args))
    core_attention(*split_qkv(randn(ends[-1], 2, 3 * D), 1, D), AttentionMask(documents=(tuple(ends[1:]),)), kernel="sdpa")
    assert 1 < len(calls) <= 8
    for causal, want in ((True, [[100, 76], [74], [8, 8, 1]]), (False, [[100], [76], [74], [8, 8], [1]])):
        documents = pieces_of_documents(((100, 176, 250, 258, 259, 267),), causal)
        assert [[t.queries for t in batch] for batch in batches_of(tiles_of(documents, None))] == want
        lengths = pieces_of_lengths([5, 9, 0, 5], 9, causal)
        assert [[t.keys for t in batch] for batch in batches_of(tiles_of(lengths, None))] == [[9], [5, 5]]
    tiles = tiles_of(stage_of((Piece(-1, 0, 300, 0, 300, "diagonal"),), 100).pieces, 100)
    assert [(t.start, t.queries, t.first_key, t.keys, t.kind) for t in tiles] == [
        (0, 100, 0, 100, "diagonal"), (100, 64, 1, 163, "band"), (164, 64, 65, 163, "band"), (228, 64, 129, 163, "band"),
        (292, 8, 193, 107, "band"),
    ]  # fmt: skip
    qkv = randn(300, 1, 4 * D, dtype=torch.float32)
    want_out = attention(qkv.double(), 2, D, AttentionMask(window=100), kernel="reference")
    assert law_error(attention(qkv, 2, D, AttentionMask(window=100)), want_out) <= FP32


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask not in ("padding, window", "padding alone")])
def test_one_process_sees_the_pairs_that_the_ranks_of_context_parallelism_do(mask: str) -> None:
    given = MASKS[mask]
    row = RowMask(S, given.causal, None if given.window == S else given.window, given.documents, given.lengths)
    kernel = lse_kernel(*operands(2)[0].values(), replace(given, bias=None), "sdpa")
    found = kernel.stage.pieces if isinstance(kernel, TiledAttention) else (Piece(-1, 0, S, 0, S, "diagonal" if given.causal else "full"),)
    plan = plan_context(row, cut_row(row, 1))
    want = pairs_of(plan.pieces(0, 0), S, row.window, row.sequences)
    assert torch.equal(pairs_of(found, S, row.window, row.sequences), want) and want.max() <= 1
    seen = allowed(given, S, S)[: row.sequences]
    if given.lengths is not None:
        seen = seen & (torch.tensor(given.lengths) > 0)[:, None, None]
    assert torch.equal(want.bool(), seen)
