"""Values of another width than queries and keys: every mask and kernel against the plain formula, in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.errors import FP64, assert_law
from support.op_checks import in_blocks, randn
from torch import Tensor

from megatron_sp.ops import attention as attention_module
from megatron_sp.ops.attention import AttentionMask, core_attention
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.ops.attention_pieces import Stage, Tile
from megatron_sp.ops.gpu_kernels import CUDNN
from megatron_sp.ops.gpu_partial_attention import DensePieces
from megatron_sp.ops.partial_attention import Columns, Partial, PieceKernel, Rows, attend, attend_backward
from megatron_sp.ops.tiled_attention import CPUFlash, Reference

__all__ = ["in_blocks"]
S, M, D = 22, 4, 5
DOCUMENTS = ((1, 9, 22), (22,))
LENGTHS = (13, 22)
MASKS: dict[str, AttentionMask] = {
    "all": AttentionMask(False), "causal": AttentionMask(), "window": AttentionMask(window=6),
    "documents": AttentionMask(documents=DOCUMENTS), "documents, all": AttentionMask(False, documents=DOCUMENTS),
    "documents, window": AttentionMask(documents=DOCUMENTS, window=4),
    "padding": AttentionMask(False, torch.tensor(LENGTHS).repeat_interleave(2), lengths=LENGTHS),
    "padding, causal": AttentionMask(True, torch.tensor(LENGTHS).repeat_interleave(2), lengths=LENGTHS),
    "padding, window": AttentionMask(True, torch.tensor(LENGTHS).repeat_interleave(2), lengths=LENGTHS, window=6),
}  # fmt: skip


def allowed(mask: AttentionMask, s_q: int, s_k: int) -> Tensor:
    """[sequences, s_q, s_k]: which key a query sees."""
    at, keys = torch.arange(s_q)[:, None] + s_k - s_q, torch.arange(s_k)
    seen = torch.ones(2, s_q, s_k, dtype=torch.bool)
    if mask.causal:
        seen &= keys <= at
    if mask.window is not None:
        seen &= at - keys < mask.window
    for sequence in range(2):
        if mask.documents is not None:
            ends = torch.tensor(mask.documents[sequence])
            seen[sequence] &= torch.bucketize(at, ends, right=True) == torch.bucketize(keys, ends, right=True)
        if mask.lengths is not None:
            seen[sequence] &= keys < mask.lengths[sequence]
    return seen


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.einsum("qmrd,kmd->mrqk", q, k[:, :, 0]) / math.sqrt(q.shape[-1])
    hidden = ~seen.repeat_interleave(M // 2, 0)[:, None]
    probs = torch.softmax(scores.masked_fill(hidden, -1e300), -1).masked_fill(hidden, 0.0)
    return torch.einsum("mrqk,kmd->qmrd", probs, v[:, :, 0])


def tensors(r: int, d_v: int, s_q: int = S) -> tuple[list[Tensor], Tensor]:
    return [randn(s_q, M, r, D), randn(S, M, 1, D, seed=1), randn(S, M, 1, d_v, seed=2)], randn(s_q, M, r, d_v, seed=3)


def results(attention: Any, inputs: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = attention(*leaves)
    return {"out": out.detach(), **dict(zip("qkv", torch.autograd.grad(out, leaves, grad), strict=True))}


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d_v", [3, 9])
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("kernel", ["sdpa", "sdpa, kept", "sdpa, piece by piece", "reference"])
def test_is_the_formula(kernel: str, r: int, d_v: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept: the results are those of a first pass. Piece by piece: as where no kernel gives the log of its sums."""
    monkeypatch.setattr(attention_module, "_HAS_CPU_FLASH", "piece" not in kernel)
    inputs, grad = tensors(r, d_v)
    kept = KeptTensors() if "kept" in kernel and mask != "padding, window" else None
    if kept is not None:
        with torch.no_grad():
            core_attention(*inputs, MASKS[mask], kernel="sdpa", kept=kept)
        kept.restore(kept.release())
    name: Any = kernel.partition(",")[0]
    found = results(lambda q, k, v: core_attention(q, k, v, MASKS[mask], kernel=name, kept=kept), inputs, grad)
    assert_law(found, results(lambda q, k, v: formula(q, k, v, allowed(MASKS[mask], S, S)), inputs, grad), FP64)


@pytest.mark.parametrize("d_v", [3, 9])
@pytest.mark.parametrize("s_q", [1, 5, 30])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(False), AttentionMask(window=6)], ids=["causal", "all", "window"])
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_more_or_fewer_queries_than_keys(kernel: Any, mask: AttentionMask, s_q: int, d_v: int) -> None:
    inputs, grad = tensors(2, d_v, s_q)
    found = results(lambda q, k, v: core_attention(q, k, v, mask, kernel=kernel), inputs, grad)
    assert_law(found, results(lambda q, k, v: formula(q, k, v, allowed(mask, s_q, S)), inputs, grad), FP64)


class OneCall(CUDNN):
    """cuDNN's kernel, played by the plain formulas on the CPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = Reference().attend(self._block(q, k, v))
        return out.permute(2, 0, 1, 3), lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lse: Tensor) -> Any:
        block, rows = self._block(q, k, v), [x.permute(1, 2, 0, 3) for x in (out, grad)]
        of_q, of_k, of_v = Reference().attend_backward(block, rows[0], lse[0], rows[1])
        return [x.permute(2, 0, 1, 3) for x in (of_q, of_k.sum(1, keepdim=True), of_v.sum(1, keepdim=True))]

    def _block(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        from megatron_sp.ops.tiled_attention import _Block

        tile = Tile(-1, 0, len(q), 0, len(k), "diagonal" if self.causal else "full", 0)
        return _Block(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), tile, 0, None)


class _Dense(DensePieces):
    def _kernel(self, piece: Any) -> CUDNN:
        return OneCall(piece.kind == "diagonal", True)


@pytest.mark.parametrize("d_v", [3, 9])
@pytest.mark.parametrize("kernel", [CPUFlash(), Reference(), _Dense(True)], ids=["torch", "plain", "a call for each piece"])
@pytest.mark.parametrize("counts", [None, (1, 2, 2)])
def test_keys_that_come_in_two_parts(kernel: PieceKernel, counts: tuple[int, ...] | None, d_v: int) -> None:
    r, m, groups = (3, M, M) if counts is None else (1, 10, 6)
    q, kv, d_out = randn(S, m, r, D), randn(S, groups, D + d_v, seed=1), randn(S, m, r, d_v, seed=3)
    columns, half = Columns(2, True, counts), S // 2
    parts = ((Piece(-1, 0, half, 0, half, "diagonal"), Piece(-1, half, S, 0, half, "full")), (Piece(-1, half, S, 0, half, "diagonal"),))
    so_far, d_q, d_kv = Partial(q, columns, d_v), torch.zeros_like(q), torch.zeros_like(kv)
    stages = [(Stage(pieces), slice(at, at + half)) for pieces, at in zip(parts, (0, half), strict=True)]
    for stage, rows in stages:
        attend(kernel, stage, q, Rows.interleaved(kv[rows], 1), so_far, columns)
    for stage, rows in stages:
        inputs = q, so_far.out, so_far.lse, d_out
        attend_backward(kernel, stage, inputs, Rows.interleaved(kv[rows], 1), d_q, Rows.interleaved(d_kv[rows], 1), columns)
    places = torch.arange(M) if counts is None else torch.tensor([0, 1, 1, 2, 2, 3, 4, 4, 5, 5])

    def plain(q: Tensor, kv: Tensor) -> Tensor:
        k, v = kv[:, places].split((D, d_v), 2)
        scores = torch.einsum("qmrd,kmd->mrqk", q, k) / math.sqrt(D)
        probs = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return torch.einsum("mrqk,kmd->qmrd", probs, v)

    leaves = [q.clone().requires_grad_(), kv.clone().requires_grad_()]
    out = plain(*leaves)
    want = dict(zip(("q", "kv"), torch.autograd.grad(out, leaves, d_out), strict=True))
    assert_law({"out": so_far.out, "q": d_q, "kv": d_kv}, {"out": out.detach(), **want}, FP64)
