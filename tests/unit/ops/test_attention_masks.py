"""Packed documents, windows and padding: each document as if it were alone, in batches and one by one; what no piece covers is zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.errors import FP32, FP64, assert_law
from support.op_checks import in_blocks, pairs_of, randn
from torch import Tensor

from megatron_sp.ops import attention as attention_module
from megatron_sp.ops import attention_pieces, flash_packages, gpu_kernels, tiled_attention
from megatron_sp.ops.attention import AttentionMask, KernelName, core_attention, fold_mask, lse_kernel, split_qkv
from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.ops.attention_pieces import batches_of, pieces_of_documents, pieces_of_lengths, stage_of, tiles_of
from megatron_sp.ops.tiled_attention import TiledAttention
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.forward_context import micro_batch_context
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.training.step import on_device

__all__ = ["in_blocks"]
D = 4
DOCUMENTS = ((3, 4, 9, 10, 11, 30), (30,), (1, 2, 3, 5, 7, 9, 16, 23, 30))
Documents = tuple[tuple[int, ...], ...]


@pytest.fixture(params=["batches", "alone"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pieces go in batches, or each is long enough for a call of its own."""
    stage_of.cache_clear()  # stages keep their calls
    if request.param == "alone":
        monkeypatch.setattr(tiled_attention, "_BATCHED_BYTES", 0)
    yield
    stage_of.cache_clear()


def inputs(s: int, m: int, r: int, dtype: torch.dtype = torch.float64, apart: bool = False) -> tuple[Tensor, ...]:
    """Leaf [s, m, (r + 2) * d] and q, k, v, views of it or copies."""
    qkv = randn(s, m, (r + 2) * D, dtype=dtype).requires_grad_()
    q, k, v = split_qkv(qkv, r, D)
    return (qkv, *((t.clone() for t in (q, k, v)) if apart else (q, k, v)))


def result(qkv: Tensor, out: Tensor, grad: Tensor) -> dict[str, Tensor | None]:
    qkv.grad = None
    out.backward(grad.to(out.dtype))
    assert qkv.grad is not None
    return {"out": out.detach(), "qkv": qkv.grad.clone()}


def alone(q: Tensor, k: Tensor, v: Tensor, documents: Documents, causal: bool, window: int | None = None) -> Tensor:
    """Every document by itself, by the plain reference."""
    each, columns = q.shape[1] // len(documents), []
    for index, ends in enumerate(documents):
        mine = slice(index * each, (index + 1) * each)
        parts = [
            core_attention(q[a:b, mine], k[a:b, mine], v[a:b, mine], AttentionMask(causal, window=window), kernel="reference")
            for a, b in zip((0, *ends), ends, strict=False)
        ]
        columns.append(torch.cat(parts))
    return torch.cat(columns, dim=1)


@pytest.mark.usefixtures("in_blocks", "sizes")
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("r", "groups", "apart"), [(1, 2, False), (3, 1, False), (2, 2, True)])
def test_each_document_is_as_if_alone(kernel: KernelName, causal: bool, r: int, groups: int, apart: bool) -> None:
    qkv, q, k, v = inputs(30, 3 * groups, r, apart=apart)
    grad, mask = randn(*q.shape, seed=1), AttentionMask(causal, documents=DOCUMENTS)
    want = result(qkv, alone(q, k, v, DOCUMENTS, causal), grad)
    assert_law(result(qkv, core_attention(q, k, v, mask, kernel=kernel), grad), want, FP64)


@pytest.mark.usefixtures("in_blocks", "sizes")
@pytest.mark.parametrize("kernel", ["sdpa", "reference", "one by one"])
@pytest.mark.parametrize("window", [1, 4, 6, 19, 29])
def test_windows_within_documents(kernel: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents are longer than a tile, and their keys get gradients from several."""
    for module in (attention_pieces, tiled_attention):
        monkeypatch.setattr(module, "window_tile", lambda window: min(window, 5))
    tiled_attention._whole_band.cache_clear()
    monkeypatch.setattr(attention_module, "_HAS_CPU_FLASH", kernel == "sdpa")
    qkv, q, k, v = inputs(30, 6, 2)
    grad, mask = randn(*q.shape, seed=1), AttentionMask(documents=DOCUMENTS, window=window)
    want = result(qkv, alone(q, k, v, DOCUMENTS, True, window), grad)
    got = core_attention(q, k, v, mask, kernel="reference" if kernel == "reference" else "sdpa")
    tiled_attention._whole_band.cache_clear()
    assert_law(result(qkv, got, grad), want, FP64)


def test_attention_dropout_drops_what_it_does_in_each_document_alone() -> None:
    qkv, q, k, v = inputs(30, 6, 2)
    grad, rows = randn(*q.shape, seed=1), torch.randint(-(2**31), 2**31 - 1, (6, 2, 30), dtype=torch.int32)
    got = core_attention(q, k, v, AttentionMask(documents=DOCUMENTS), kernel="reference", dropout=0.4, dropout_rows=rows)
    columns = []
    for index, ends in enumerate(DOCUMENTS):
        mine, parts = slice(2 * index, 2 * index + 2), []
        for a, b in zip((0, *ends), ends, strict=False):
            one = AttentionMask(), rows[mine, :, a:b]
            parts.append(
                core_attention(q[a:b, mine], k[a:b, mine], v[a:b, mine], one[0], kernel="reference", dropout=0.4, dropout_rows=one[1])
            )
        columns.append(torch.cat(parts))
    want = result(qkv, torch.cat(columns, dim=1), grad)
    assert_law(result(qkv, got, grad), want, FP64)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("seed", range(3))
def test_random_mixes(seed: int) -> None:
    random, s = Random(seed), 97
    documents = tuple(tuple(sorted({*random.sample(range(1, s), random.choice([0, 1, 5, 40])), s})) for _ in range(3))
    for dtype, tolerance in ((torch.float64, FP64), (torch.float32, FP32)):
        qkv, q, k, v = inputs(s, 6, 2, dtype)
        grad = randn(*q.shape, seed=1)
        want = result(qkv, alone(q, k, v, documents, True), grad)
        got = result(qkv, core_attention(q, k, v, AttentionMask(documents=documents), kernel="sdpa"), grad)
        assert_law(got, want, tolerance)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(9, 4, 4), (0, 9, 1), (0, 0, 0)])
def test_padding_costs_no_work_and_is_never_seen(lengths: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, q, k, v = inputs(9, 6, 2)
    mask = fold_mask(AttentionMask(causal, torch.tensor(lengths)), 2)
    grad = randn(*q.shape, seed=1)
    want = result(qkv, core_attention(q, k, v, mask, kernel="reference"), grad)
    monkeypatch.setattr(attention_module, "_allowed", lambda *args: pytest.fail("a mask of all pairs was made"))
    assert_law(result(qkv, core_attention(q, k, v, mask, kernel="sdpa"), grad), want, FP64)
    assert_law(result(qkv, one_by_one_of(q, k, v, mask), grad), want, FP64)


def one_by_one_of(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """As on a device without a kernel for all segments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "_HAS_CPU_FLASH", False)
        return core_attention(q, k, v, mask, kernel="sdpa")


def test_lengths_on_the_host_are_kept_for_all_heads() -> None:
    folded = fold_mask(AttentionMask(False, torch.tensor([3, 1])), 4)
    assert folded.lengths == (3, 1) and folded.key_lengths is not None and folded.key_lengths.tolist() == [3] * 4 + [1] * 4
    assert AttentionMask(False, torch.tensor([3, 1], device="meta")).lengths_on_host() is None
    assert AttentionMask(False, torch.tensor([3, 1], device="meta"), lengths=(3, 1)).lengths_on_host() == (3, 1)


def test_one_by_one_writes_in_place_and_runs_backward_once() -> None:
    _, q, k, v = inputs(30, 3, 2)
    out = one_by_one_of(q, k, v, AttentionMask(documents=DOCUMENTS))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran already"):
        out.sum().backward()
    with torch.no_grad():
        assert torch.equal(one_by_one_of(q, k, v, AttentionMask(documents=DOCUMENTS)), out)


def varlen_by_loop(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, window: int | None = None) -> Tensor:
    """What a kernel that takes lengths added up does: q [tokens, heads, d], k and v [tokens, groups, d]."""
    runs = list(zip(ends.tolist(), ends.tolist()[1:], strict=False))
    assert ends.dtype == torch.int32 and runs[0][0] == 0 and runs[-1][1] == len(q) and longest == max(b - a for a, b in runs)
    r = q.shape[1] // k.shape[1]
    parts = []
    for a, b in runs:
        q_heads = q[a:b].reshape(b - a, -1, r, q.shape[2])
        out = core_attention(q_heads, k[a:b, :, None], v[a:b, :, None], AttentionMask(causal, window=window), kernel="reference")
        parts.append(out.reshape(b - a, -1, q.shape[2]))
    return torch.cat(parts)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("documents", "r", "groups"), [(DOCUMENTS, 1, 2), (DOCUMENTS, 3, 2), (DOCUMENTS[:1], 1, 2), (DOCUMENTS[2:], 2, 1)])
def test_flash_attn_takes_all_documents_at_once(
    documents: Documents, r: int, groups: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn itself needs a GPU; its layout, names and arguments are pinned here."""
    calls = []

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, causal: bool = False, window_size: tuple[int, int] = (-1, -1), deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        calls.append(dropout_p)
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        return varlen_by_loop(q, k, v, cu_seqlens_q, max_seqlen_q, causal, window_size[0] + 1 if window_size[0] >= 0 else None)

    monkeypatch.setattr(flash_packages.availability, "load", lambda name: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    qkv, q, k, v = inputs(30, len(documents) * groups, r)
    grad, mask = randn(*q.shape, seed=1), AttentionMask(causal, documents=documents)
    want = result(qkv, alone(q, k, v, documents, causal), grad)
    assert_law(result(qkv, core_attention(q, k, v, mask, kernel="flash2"), grad), want, FP64)
    assert calls == [0.0]
    if causal:
        want = result(qkv, alone(q, k, v, documents, causal, window=4), grad)
        assert_law(result(qkv, core_attention(q, k, v, replace(mask, window=4), kernel="flash2"), grad), want, FP64)


def test_torchs_own_kernel_for_documents_has_the_arguments_it_is_called_with() -> None:
    """The kernel is for GPUs; that the operator is there, differentiable and takes these, can be seen without one."""
    names = [a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments if not a.kwarg_only]
    expected = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask"]
    assert names == expected
    for op in (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward):
        assert {"window_size_left", "window_size_right"} <= {a.name for a in op.default._schema.arguments if a.kwarg_only}
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "Autograd")


def test_one_sequence_with_a_query_for_each_key_reaches_the_kernel_without_a_copy() -> None:
    _, q, k, v = inputs(30, 4, 1)
    seen: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        seen.extend((q, k, v))
        return q.clone()

    gpu_kernels.varlen(q, k, v, pieces_of_documents(((4, 30),), True), 4, kernel)
    assert {t.untyped_storage().data_ptr() for t in seen} == {q.untyped_storage().data_ptr()}


def test_short_documents_share_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 documents of 1 to 20 tokens: no call for each of them."""
    random = Random(0)
    ends = [0]
    while len(ends) <= 200:
        ends.append(ends[-1] + random.randint(1, 20))
    _, q, k, v = inputs(ends[-1], 2, 1)
    calls = count_calls(monkeypatch)
    core_attention(q, k, v, AttentionMask(documents=(tuple(ends[1:]),)), kernel="sdpa")
    assert 1 < len(calls) <= 8


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    plain: Callable[..., Any] = tiled_attention.CPUFlash.attend
    monkeypatch.setattr(tiled_attention.CPUFlash, "attend", lambda *args: calls.append(1) or plain(*args))
    return calls


def test_what_shares_a_batch() -> None:
    ends = (100, 176, 250, 258, 259, 267)
    for causal, want in ((True, [[100, 76], [74], [8, 8, 1]]), (False, [[100], [76], [74], [8, 8], [1]])):
        assert [[t.queries for t in batch] for batch in batches_of(tiles_of(pieces_of_documents((ends,), causal), None))] == want
    for causal in (True, False):
        lengths = pieces_of_lengths([5, 9, 0, 5], 9, causal)
        assert [[t.keys for t in batch] for batch in batches_of(tiles_of(lengths, None))] == [[9], [5, 5]]


@pytest.mark.parametrize(
    ("mask", "row"),
    [
        (AttentionMask(), RowMask(30)), (AttentionMask(window=7), RowMask(30, window=7)), (AttentionMask(False), RowMask(30, False)),
        *(
            (AttentionMask(causal, documents=DOCUMENTS, window=window), RowMask(30, causal, window, DOCUMENTS))
            for causal, window in ((True, None), (False, None), (True, 4))
        ),
        *((AttentionMask(causal, torch.tensor([30, 7, 0])), RowMask(30, causal, lengths=(30, 7, 0))) for causal in (True, False)),
    ],
)  # fmt: skip
def test_one_process_sees_the_pairs_that_the_ranks_of_context_parallelism_do(mask: AttentionMask, row: RowMask) -> None:
    q, k, v = inputs(30, 6, 2)[1:]
    kernel = lse_kernel(q, k, v, mask, "sdpa")
    found = kernel.stage.pieces if isinstance(kernel, TiledAttention) else (Piece(-1, 0, 30, 0, 30, "diagonal" if mask.causal else "full"),)
    plan = plan_context(row, cut_row(row, 1))
    want = pairs_of(plan.pieces(0, 0), 30, row.window, row.sequences)
    assert torch.equal(pairs_of(found, 30, row.window, row.sequences), want) and want.max() == 1


def test_what_the_host_reads_does_not_go_to_the_device() -> None:
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.long), "documents": torch.tensor([[0, 0, 1, 1, 1], [0] * 5])}
    moved = on_device({**batch, "length": torch.tensor([5, 2])}, torch.device("meta"))
    assert {name: t.device.type for name, t in moved.items()} == {"tokens": "meta", "documents": "cpu", "length": "cpu"}
    del moved["documents"]
    mask = micro_batch_context(moved, seed=1, step=1, drops=False, kernel="sdpa", causal=False).mask
    assert mask.lengths == (5, 2) and mask.key_lengths is not None and mask.key_lengths.device.type == "meta"
    assert micro_batch_context(batch, seed=1, step=1, drops=False, kernel="sdpa").mask.documents == ((2, 5), (5,))
