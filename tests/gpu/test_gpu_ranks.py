"""Layouts over several ranks on GPUs: NCCL where there are two or more, gloo with both ranks on one GPU where not."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_ranks import run_gpu_ranks
from support.layouts import Case, Sharded, check, context
from support.tiny import make_model, shape
from torch import Tensor

from megatron_sp.comm.collectives import all_to_all_async
from megatron_sp.comm.groups import ParallelGroups

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPUS = torch.cuda.device_count()
FP32 = torch.float32
ROPE = {"position_embedding_type": "rope"}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
LLAMA = {
    **ROPE, **GROUPED, "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
CASES = [
    Case(tp=2, dtype=FP32, steps=2),
    Case(tp=2, tp_seq=True, seq=7, dtype=FP32, model=LLAMA),
    *(Case(sp=2, mode=mode, dtype=FP32, model=LLAMA, batch=3) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=2, mode="chunked", dtype=FP32, model={"hidden_dropout": 0.2}, kernels={"recompute_granularity": "full"}),
    Case(sp=2, mode="split-qkv", dtype=FP32, packed=True, model=ROPE),
    Case(sp=2, mode="chunked", dtype=FP32, padding=True, seq=9, batch=3, model=GROUPED),
    Case(dp=2, dtype=FP32, micro_batches=2, steps=2),
    Case(bert=True, tp=2, tp_seq=True, dtype=FP32, seq=7, model={"norm_placement": "post"}, steps=2),
    Case(bert=True, sp=2, mode="chunked", dtype=FP32, seq=9, batch=3, model={"hidden_dropout": 0.2}),
    Case(bert=True, sp=2, mode="split-qkv", dtype=FP32, packed=True, model={"bert_no_binary_head": True}),
    *(Case(sp=3, mode=mode, dtype=FP32, seq=7, model=ROPE, batch=1) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=4, mode="chunked", dtype=FP32, steps=2),
    Case(sp=4, mode="split-qkv", dtype=FP32, model={"group_query_attention": True, "num_query_groups": 1, **ROPE}),
    *(Case(tp=2, sp=2, tp_seq=True, mode=mode, dtype=FP32, model=LLAMA) for mode in ("none", "split-qkv", "chunked")),
    Case(tp=2, sp=2, dp=2, tp_seq=True, mode="chunked", dtype=FP32, model={**LLAMA, "num_attention_heads": 8}, micro_batches=2, steps=2),
]


def _check(device: torch.device, case: Case) -> None:
    check(case, device)


@pytest.mark.parametrize("case", [c for c in CASES if c.world <= GPUS], ids=str)
def test_a_layout_changes_nothing_over_nccl(case: Case, tmp_path: Path) -> None:
    run_gpu_ranks(_check, case.world, tmp_path, case)


@pytest.mark.parametrize("case", [c for c in CASES if c.world == 2], ids=str)
def test_a_layout_changes_nothing_with_two_ranks_on_one_gpu(case: Case, tmp_path: Path) -> None:
    """gloo moves GPU tensors through the host; NCCL refuses two ranks on one device."""
    run_gpu_ranks(_check, 2, tmp_path, case, backend="gloo")


def _no_waiting(device: torch.device, case: Case) -> None:
    sharded = Sharded(case, make_model(shape(**{"seq_length": case.seq, **case.model}), dtype=case.dtype), device=device)
    for watched in (False, True):  # communicators come up in the first pass
        batch = sharded.batch(0)
        ctx = context(sharded.model.config, batch)
        sharded.gradients.start_step()
        sharded.gradients.last_micro_batch()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        loss, _ = sharded.model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx, sharded.events)
        loss.backward()
        sharded.gradients.finish_step()
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(GPUS < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("case", [c for c in CASES if c.world == 2 and not c.packed], ids=str)
def test_the_host_never_waits(case: Case, tmp_path: Path) -> None:
    run_gpu_ranks(_no_waiting, 2, tmp_path, case)


def _overlap(device: torch.device) -> None:
    """A long exchange and products that take about as long: together they must take clearly less than one after the other."""
    groups = ParallelGroups.create(device, sp_size=2)
    send = torch.randn(2**28, device=device, dtype=torch.bfloat16)  # 256 MiB go to the other rank
    receive = torch.empty_like(send)
    counts = [send.numel() // 2] * 2
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def exchange() -> Tensor:
        return all_to_all_async(send, counts, receive, counts, groups.sp).wait()

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    def both(count: int) -> None:
        products(1)  # the GPU is full when the exchange is launched
        handle = all_to_all_async(send, counts, receive, counts, groups.sp)
        products(count - 1)
        handle.wait()

    alone, one = _elapsed_ms(exchange), _elapsed_ms(lambda: products(1))
    count = 2 + round(alone / one)
    covering, together = _elapsed_ms(lambda: products(count)), _elapsed_ms(lambda: both(count))
    assert together < covering + 0.5 * alone, f"exchange {alone:.2f} ms, products {covering:.2f} ms, together {together:.2f} ms"


def _elapsed_ms(fn: Callable[[], object]) -> float:
    """Median of GPU time between two events."""
    times = []
    for _ in range(8):
        torch.distributed.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


@pytest.mark.skipif(GPUS < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("connections", ["", "1", "8"])
def test_an_exchange_runs_under_products(connections: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CUDA_DEVICE_MAX_CONNECTIONS says."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    run_gpu_ranks(_overlap, 2, tmp_path)
