"""Attention: every kernel against a literal loop over batch, head and query, all masks, and what nobody may see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import gradients, in_blocks, leaves, randn
from torch import Tensor

from megatron_sp.ops import attention as attention_module
from megatron_sp.ops import attention_pieces, tiled_attention
from megatron_sp.ops.attention import AttentionMask, KernelName, attention, core_attention, cut_qkv, head_row_keys, join_qkv, split_qkv
from megatron_sp.ops.attention_kernels import DenseCPU
from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.ops.attention_pieces import stage_of, tiles_of
from megatron_sp.ops.dropout import DropoutKeys, keep_mask
from megatron_sp.ops.rotary import apply_rotary, rotary_tables

__all__ = ["in_blocks"]
pytestmark = pytest.mark.usefixtures("in_blocks")
D = 5
KERNELS: tuple[KernelName, ...] = ("sdpa", "reference")
SHAPES = {
    "multi-head": (7, 3, 4, 1),
    "grouped": (7, 3, 2, 3),
    "multi-query": (7, 3, 1, 4),
    "one token": (1, 2, 2, 2),
    "one of all": (1, 1, 1, 1),
    "long": (37, 1, 1, 2),
}


def loop(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, keep: Tensor | None = None, rate: float = 0.0) -> Tensor:
    """q [s_q, m, r, d], k and v [s_k, m, 1, d] -> [s_q, m, r, d]; keep: bool [m, r, s_q, s_k]. A query that sees nothing gets zero."""
    s_q, m, r, d = q.shape
    s_k = k.shape[0]
    out = []
    for i in range(s_q):
        for sequence in range(m):
            for head in range(r):
                seen = [
                    j for j in range(s_k)
                    if (not mask.causal or j <= i + s_k - s_q) and (mask.key_lengths is None or j < int(mask.key_lengths[sequence]))
                    and (mask.window is None or j > i + s_k - s_q - mask.window)
                ]  # fmt: skip
                total = torch.zeros(d, dtype=q.dtype) + 0 * q[i, sequence, head]
                if seen:
                    scores = torch.stack([q[i, sequence, head] @ k[j, sequence, 0] / math.sqrt(d) for j in seen])
                    probs = (scores - scores.max()).exp()
                    probs = probs / probs.sum()
                    if keep is not None:
                        probs = probs * keep[sequence, head, i, seen] / (1 - rate)
                    total = total + sum(p * v[j, sequence, 0] for p, j in zip(probs, seen, strict=True))
                out.append(total)
    return torch.stack(out).view(s_q, m, r, d) + 0 * (k.sum() + v.sum())


def loop_on_qkv(qkv: Tensor, g: int, r: int, mask: AttentionMask, keep: Tensor | None = None, rate: float = 0.0) -> Tensor:
    s, b, _ = qkv.shape
    rows = qkv.reshape(s, b * g, r + 2, D)
    lengths = None if mask.key_lengths is None else mask.key_lengths.repeat_interleave(g)
    mask = replace(mask, key_lengths=lengths)
    return loop(rows[:, :, :r], rows[:, :, r : r + 1], rows[:, :, r + 1 :], mask, keep, rate).reshape(s, b, g * r * D)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_is_the_loop(shape: str, causal: bool, kernel: KernelName) -> None:
    s, b, g, r = SHAPES[shape]
    if s == 37 and not causal:
        s = 19  # the loop takes a while
    mask, qkv, grad = AttentionMask(causal), randn(s, b, g * (r + 2) * D), randn(s, b, g * r * D, seed=1)
    want = gradients(lambda i: loop_on_qkv(i["qkv"], g, r, mask), leaves(qkv=qkv), grad)
    assert_law(gradients(lambda i: attention(i["qkv"], r, D, mask, kernel=kernel), leaves(qkv=qkv), grad), want, FP64)


@pytest.mark.parametrize("lengths", [[7, 3, 1], [7, 7, 7], [0, 7, 5], [0, 0, 0]])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_is_never_seen_and_a_query_that_sees_nothing_gets_zero(lengths: list[int], causal: bool, kernel: KernelName) -> None:
    s, b, g, r = 7, 3, 2, 2
    mask, qkv, grad = AttentionMask(causal, torch.tensor(lengths)), randn(s, b, g * (r + 2) * D), randn(s, b, g * r * D, seed=1)
    want = gradients(lambda i: loop_on_qkv(i["qkv"], g, r, mask), leaves(qkv=qkv), grad)
    assert_law(gradients(lambda i: attention(i["qkv"], r, D, mask, kernel=kernel), leaves(qkv=qkv), grad), want, FP64)


@pytest.mark.parametrize("s_q, s_k", [(1, 9), (4, 9), (9, 9), (1, 1), (6, 4)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fewer_or_more_queries_than_keys(s_q: int, s_k: int, causal: bool, kernel: KernelName) -> None:
    """The last query stands at the last key: what a cache of past keys needs."""
    m, r, mask = 3, 2, AttentionMask(causal)
    tensors = {"q": randn(s_q, m, r, D), "k": randn(s_k, m, 1, D, seed=1), "v": randn(s_k, m, 1, D, seed=2)}
    grad = randn(s_q, m, r, D, seed=3)
    want = gradients(lambda i: loop(i["q"], i["k"], i["v"], mask), leaves(**tensors), grad)
    assert_law(gradients(lambda i: core_attention(i["q"], i["k"], i["v"], mask, kernel=kernel), leaves(**tensors), grad), want, FP64)


@pytest.fixture
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tiles of a window that is longer than one of them."""
    for module in (attention_pieces, tiled_attention):
        monkeypatch.setattr(module, "window_tile", lambda window: min(window, 4))
    stage_of.cache_clear()  # stages keep their tiles
    tiled_attention._whole_band.cache_clear()
    yield
    stage_of.cache_clear()
    tiled_attention._whole_band.cache_clear()


NO_KERNEL = "sdpa without a kernel for windows"


def in_a_window(monkeypatch: pytest.MonkeyPatch, kernel: str) -> KernelName:
    """``NO_KERNEL``: as on a GPU in fp32."""
    if kernel == NO_KERNEL:
        monkeypatch.setattr(attention_module, "_HAS_CPU_FLASH", False)
    return "reference" if kernel == "reference" else "sdpa"


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("window", [1, 2, 7, 8, 21, 22, 23])
@pytest.mark.parametrize("kernel", [*KERNELS, NO_KERNEL])
def test_a_window_is_the_loop(window: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s, b, g, r = 22, 2, 1, 2
    name = in_a_window(monkeypatch, kernel)
    mask, qkv, grad = AttentionMask(window=window), randn(s, b, g * (r + 2) * D), randn(s, b, g * r * D, seed=1)
    want = gradients(lambda i: loop_on_qkv(i["qkv"], g, r, mask), leaves(qkv=qkv), grad)
    assert_law(gradients(lambda i: attention(i["qkv"], r, D, mask, kernel=name), leaves(qkv=qkv), grad), want, FP64)


@pytest.mark.parametrize("s_q, s_k", [(1, 9), (4, 9), (6, 4)])
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_of_past_keys(s_q: int, s_k: int, window: int, kernel: KernelName) -> None:
    m, r, mask = 3, 2, AttentionMask(window=window)
    tensors = {"q": randn(s_q, m, r, D), "k": randn(s_k, m, 1, D, seed=1), "v": randn(s_k, m, 1, D, seed=2)}
    grad = randn(s_q, m, r, D, seed=3)
    want = gradients(lambda i: loop(i["q"], i["k"], i["v"], mask), leaves(**tensors), grad)
    assert_law(gradients(lambda i: core_attention(i["q"], i["k"], i["v"], mask, kernel=kernel), leaves(**tensors), grad), want, FP64)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_with_padding(kernel: KernelName) -> None:
    mask, qkv, grad = AttentionMask(True, torch.tensor([7, 2, 0]), window=3), randn(7, 3, 8 * D), randn(7, 3, 4 * D, seed=1)
    want = gradients(lambda i: loop_on_qkv(i["qkv"], 2, 2, mask), leaves(qkv=qkv), grad)
    assert_law(gradients(lambda i: attention(i["qkv"], 2, D, mask, kernel=kernel), leaves(qkv=qkv), grad), want, FP64)


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


def test_a_window_of_a_realistic_size_in_fp32_and_with_tiles_as_they_are() -> None:
    s, r = 300, 2
    qkv, grad = randn(s, 1, (r + 2) * D, dtype=torch.float32), randn(s, 1, r * D, dtype=torch.float32, seed=1)
    mask = AttentionMask(window=100)
    want = gradients(lambda i: attention(i["qkv"], r, D, mask, kernel="reference"), leaves(qkv=qkv.double()), grad.double())
    assert_law(gradients(lambda i: attention(i["qkv"], r, D, mask), leaves(qkv=qkv), grad), want, FP32)


def test_a_window_costs_no_mask_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_allowed", lambda *args: pytest.fail("a mask of all pairs was made"))
    attention(randn(300, 1, 3 * D), 1, D, AttentionMask(window=100))
    tiles = tiles_of(stage_of((Piece(-1, 0, 300, 0, 300, "diagonal"),), 100).pieces, 100)
    assert [(t.start, t.queries, t.first_key, t.keys, t.kind) for t in tiles] == [
        (0, 100, 0, 100, "diagonal"),
        (100, 64, 1, 163, "band"),
        (164, 64, 65, 163, "band"),
        (228, 64, 129, 163, "band"),
        (292, 8, 193, 107, "band"),
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_future_and_padding_may_hold_anything_large(kernel: KernelName) -> None:
    s, b, g, r = 7, 2, 2, 2
    mask, qkv = AttentionMask(True, torch.tensor([5, 4])), randn(s, b, g * (r + 2) * D)
    changed = qkv.clone()
    changed[5:, 0], changed[4:, 1] = 1e6, -1e6
    outs = [attention(t, r, D, mask, kernel=kernel) for t in (qkv, changed)]
    assert torch.equal(outs[0][:5, 0], outs[1][:5, 0]) and torch.equal(outs[0][:4, 1], outs[1][:4, 1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_scores_do_not_overflow(kernel: KernelName) -> None:
    qkv = randn(6, 2, 4 * 3 * D, dtype=torch.float32).mul_(1e3).requires_grad_()
    out = attention(qkv, 1, D, AttentionMask(), kernel=kernel)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(qkv.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, FP32), (torch.bfloat16, 0.02), (torch.float16, 0.0025)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_dtypes(dtype: torch.dtype, tolerance: float, kernel: KernelName) -> None:
    """16 bits: probabilities are rounded before they meet the values, and gradients of scores are: 2.5 epsilons of the largest element."""
    s, b, g, r = 33, 2, 2, 2
    qkv, grad = randn(s, b, g * (r + 2) * D, dtype=dtype), randn(s, b, g * r * D, seed=1, dtype=dtype)
    want = gradients(lambda i: attention(i["qkv"], r, D, AttentionMask(), kernel="reference"), leaves(qkv=qkv.double()), grad.double())
    assert_law(gradients(lambda i: attention(i["qkv"], r, D, AttentionMask(), kernel=kernel), leaves(qkv=qkv), grad), want, tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_in_the_reference_is_by_hash(causal: bool) -> None:
    s, b, g, r, rate = 7, 3, 2, 2, 0.3
    rows = DropoutKeys.create(1, 2, torch.arange(b), torch.arange(s)).row_keys(0, 0)
    keep = keep_mask(head_row_keys(rows, g, r), s, rate)
    mask, qkv, grad = AttentionMask(causal), randn(s, b, g * (r + 2) * D), randn(s, b, g * r * D, seed=1)
    want = gradients(lambda i: loop_on_qkv(i["qkv"], g, r, mask, keep, rate), leaves(qkv=qkv), grad)
    got = gradients(lambda i: attention(i["qkv"], r, D, mask, kernel="reference", dropout=rate, dropout_rows=rows), leaves(qkv=qkv), grad)
    assert_law(got, want, FP64)
    assert law_error(got["out"], attention(qkv, r, D, mask, kernel="reference")) > 0.1  # type: ignore[arg-type]


def test_dropout_without_keys_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="dropout keys"):
        attention(randn(4, 1, 3 * D), 1, D, AttentionMask(), kernel="reference", dropout=0.1)


def test_split_is_views_and_packs_gradients_once() -> None:
    s, b, g, r = 4, 3, 2, 3
    qkv = randn(s, b, g * (r + 2) * D).requires_grad_()
    parts = split_qkv(qkv, r, D)
    assert [p.shape for p in parts] == [(s, b * g, r, D), (s, b * g, 1, D), (s, b * g, 1, D)]
    assert all(p.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for p in parts)
    grads = [randn(*p.shape, seed=i) for i, p in enumerate(parts)]
    torch.autograd.backward(parts, grads)
    want = torch.cat(grads, dim=2).view(s, b, -1)
    assert torch.equal(qkv.grad, want)  # type: ignore[arg-type]


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


def test_only_some_parts_are_used() -> None:
    """Autograd must fill in zeros for the others."""
    qkv = randn(4, 3, 2 * 4 * D).requires_grad_()
    split_qkv(qkv, 2, D)[1].sum().backward()
    want = torch.zeros(4, 3, 2, 4, D, dtype=qkv.dtype)
    want[:, :, :, 2] = 1
    assert torch.equal(qkv.grad, want.view(qkv.shape))  # type: ignore[arg-type]


@pytest.mark.parametrize("r", [1, 3])
def test_the_cpu_kernels_gradients_need_no_packing(r: int) -> None:
    heads = cut_qkv(randn(6, 2, 2 * (r + 2) * D), r, D, None)
    kernel = DenseCPU(True)
    results = kernel.forward(*heads)
    grads = kernel.backward(randn(*results[0].shape, seed=1), *heads, *results)
    packed = grads.q._base
    assert packed is not None and packed is grads.k._base and packed is grads.v._base and packed.shape == (6, 4, r + 2, D)
    assert join_qkv(*grads, torch.Size([6, 2, 2 * (r + 2) * D]), None).data_ptr() == packed.data_ptr(), "one tensor, handed on as it is"


def test_each_head_of_each_sequence_has_its_own_dropout_keys() -> None:
    """Group by group: group i of r queries is heads i * r to (i + 1) * r, wherever they are computed."""
    rows = torch.arange(10, dtype=torch.int32).view(5, 2)  # [s, b]
    keys = head_row_keys(rows, groups=3, queries_per_group=4, first_head=7)
    assert keys.shape == (2 * 3, 4, 5)
    for b, i, j in ((0, 0, 0), (0, 2, 1), (1, 1, 3)):
        assert torch.equal(keys[b * 3 + i, j], head_row_keys(rows, 1, 1, first_head=7 + i * 4 + j)[b, 0])
