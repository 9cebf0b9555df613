"""Attention in pieces by torch's flash kernel, against fp64 on the CPU: all stages of a rank, merged; and what the host waits for."""

from __future__ import annotations

import pytest
import torch
from support.op_checks import of_a_rank

from megatron_sp.ops.attention_pieces import Stage
from megatron_sp.ops.gpu_kernels import TorchFlash
from megatron_sp.ops.gpu_partial_attention import FlashPieces, piece_kernel
from megatron_sp.ops.partial_attention import Columns, Partial, Rows, attend
from megatron_sp.ops.tiled_attention import CPUFlash
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask

pytestmark = pytest.mark.gpu
S, D = 515, 64
MASKS = {
    "causal": RowMask(S), "all": RowMask(S, causal=False), "window": RowMask(S, window=70), "window of one": RowMask(S, window=1),
    "documents": RowMask(S, documents=((100, 101, 300, S), (S,))),
    "documents, window": RowMask(S, documents=((100, 101, 300, S), (S,)), window=70), "padding": RowMask(S, causal=False, lengths=(400, 0)),
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("r", [1, 3])
def test_all_stages_of_a_rank(r: int, mask: str) -> None:
    want = of_a_rank(CPUFlash(), MASKS[mask], r, D, torch.float64)
    kernel = piece_kernel("sdpa", torch.empty(1, 1, r, D, device="cuda", dtype=torch.bfloat16))
    assert isinstance(kernel, FlashPieces)
    found = of_a_rank(kernel, MASKS[mask], r, D, torch.bfloat16, "cuda")
    for name, x in want.items():
        # with a window of one the queries' is zero
        assert float((found[name] - x).norm()) <= 2e-2 * max(float(x.norm()), 1.0), name


def test_the_host_does_not_wait_and_results_repeat() -> None:
    """But for what the kernel adds with atomics, unless it is told not to."""
    kernel, mask = FlashPieces(TorchFlash()), MASKS["causal"]
    torch.use_deterministic_algorithms(True)
    try:
        first = of_a_rank(kernel, mask, 3, D, torch.bfloat16, "cuda")
        again = of_a_rank(kernel, mask, 3, D, torch.bfloat16, "cuda")
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
