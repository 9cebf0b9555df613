"""Attention in pieces by torch's flash kernel, against fp64 on the CPU: all stages of a rank, merged; and what the host waits for."""

from __future__ import annotations

import pytest
import torch
from support.op_checks import randn
from torch import Tensor

from megatron_sp.ops.attention_pieces import Stage
from megatron_sp.ops.gpu_kernels import TorchFlash
from megatron_sp.ops.gpu_partial_attention import FlashPieces, piece_kernel
from megatron_sp.ops.partial_attention import Columns, Partial, PieceKernel, Rows, attend, attend_backward
from megatron_sp.ops.tiled_attention import CPUFlash
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask

pytestmark = pytest.mark.gpu
S, B, D = 515, 2, 64
MASKS = {
    "causal": RowMask(S), "all": RowMask(S, causal=False), "window": RowMask(S, window=70), "window of one": RowMask(S, window=1),
    "documents": RowMask(S, documents=((100, 101, 300, S), (S,))),
    "documents, window": RowMask(S, documents=((100, 101, 300, S), (S,)), window=70), "padding": RowMask(S, causal=False, lengths=(400, 0)),
}  # fmt: skip


def run(kernel: PieceKernel, mask: RowMask, r: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Output and gradients of one of three ranks."""
    plan = plan_context(mask, cut_row(mask, 3, 2))
    columns, rank = Columns(B, plan.alike), 1
    length = plan.lengths[rank]
    q, d_out = (randn(length, 2 * B, r, D, seed=seed).bfloat16().to(device, dtype) for seed in (0, 1))
    stages = []
    for source in range(3):
        kv = randn(length if source == rank else S, 2 * B, 2, D, seed=2 + source).bfloat16().to(device, dtype)
        rows = Rows.interleaved(kv, columns.sequences)
        if source != rank and not plan.alike:
            rows = Rows(torch.cat(list(kv.unflatten(1, (B, -1)).unbind(1))), (0, S), 1)
        stages.append((Stage(plan.pieces(rank, source), plan.mask.window), rows))
    so_far = Partial(q, columns)
    for stage, rows in stages:
        attend(kernel, stage, q, rows, so_far, columns)
    out, d_q = so_far.out.to(dtype), torch.zeros_like(so_far.out)
    found = {"out": out, "q": d_q}
    for number, (stage, rows) in enumerate(stages):
        d_kv = Rows(torch.zeros_like(rows.x, dtype=so_far.out.dtype), rows.starts, rows.stride)
        attend_backward(kernel, stage, (q, out, so_far.lse, d_out), rows, d_q, d_kv, columns)
        found[f"kv {number}"] = d_kv.x
    return found


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("r", [1, 3])
def test_all_stages_of_a_rank(r: int, mask: str) -> None:
    want = run(CPUFlash(), MASKS[mask], r, torch.float64, "cpu")
    kernel = piece_kernel("sdpa", torch.empty(1, 1, r, D, device="cuda", dtype=torch.bfloat16))
    assert isinstance(kernel, FlashPieces)
    found = run(kernel, MASKS[mask], r, torch.bfloat16, "cuda")
    for name, x in want.items():
        assert (found[name].cpu().double() - x).norm() <= 2e-2 * max(x.norm().item(), 1.0), (
            name
        )  # with a window of one the queries' is zero


def test_the_host_does_not_wait_and_results_repeat() -> None:
    """But for what the kernel adds with atomics, unless it is told not to."""
    kernel, mask = FlashPieces(TorchFlash()), MASKS["causal"]
    torch.use_deterministic_algorithms(True)
    try:
        first = run(kernel, mask, 3, torch.bfloat16, "cuda")
        again = run(kernel, mask, 3, torch.bfloat16, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], again[name]) for name in first)
    plan = plan_context(mask, cut_row(mask, 3, 2))
    stage, columns = Stage(plan.pieces(1, 1)), Columns(1, True)
    q, kv = (torch.zeros(plan.lengths[1], 2, n, D, device="cuda", dtype=torch.bfloat16) for n in (3, 2))
    attend(kernel, stage, q, Rows.interleaved(kv, 1), Partial(q, columns), columns)  # indices and lengths are copied once
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(kernel, stage, q, Rows.interleaved(kv, 1), Partial(q, columns), columns)
    finally:
        torch.cuda.set_sync_debug_mode("default")
