"""What fused attention kernels allocate on a GPU, in the closed form: gradients of expanded keys, sums in fp32, masks of windows."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_sp.config.schema import BatchConfig, KernelConfig, ModelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.estimate.memory import memory_plan
from megatron_sp.estimate.memory_attention import AttentionForm
from megatron_sp.estimate.memory_shape import RankShape
from megatron_sp.estimate.workload import Workload

S, N, D = 16384, 8, 64


def workload(
    precision: str = "bf16", *, groups: int = N, device: Any = "cuda", kernels: dict[str, Any] | None = None, **model: Any
) -> Workload:
    shape = ModelConfig(
        num_layers=2, hidden_size=N * D, num_attention_heads=N, seq_length=S, vocab_size=512, num_query_groups=groups,
        max_position_embeddings=S, **{"attention_dropout": 0.0, "hidden_dropout": 0.0, **model},
    )  # fmt: skip
    numbers = PrecisionConfig(**({precision: True} if precision != "fp32" else {}))
    return Workload(shape, ParallelConfig(), KernelConfig(**(kernels or {})), BatchConfig(), numbers, device=device)


def inside(*args: Any, **options: Any) -> int:
    """Bytes that the backward of the attention kernel allocates."""
    run = workload(*args, **options)
    return AttentionForm(run, RankShape(run)).attention_grad_blocks


def test_gradients_of_grouped_keys_and_sums_in_fp32() -> None:
    one = S * N * D  # elements of all query heads
    assert inside("fp32") == 0 and inside("fp32", groups=2) == 2 * one * 4
    assert inside("bf16") == 4 * one and inside("bf16", groups=2) == 2 * one * 2 + 4 * one


def test_deterministic_sums_are_several() -> None:
    """A multiprocessor that has no column of its own has a part of one, with sums of its own."""
    assert inside("bf16", kernels={"deterministic_mode": True}) == -(-132 // N) * 4 * S * N * D
    assert inside("fp32", kernels={"deterministic_mode": True}) == 0


@pytest.mark.parametrize("precision, device, dropout, backend, plain", [
    ("fp64", "cuda", 0.0, "auto", True), ("fp64", "cuda", 0.0, "fused", True), ("fp64", "cpu", 0.0, "auto", False),
    ("fp32", "cuda", 0.1, "fused", False), ("fp32", "cpu", 0.1, "fused", True), ("fp32", "cpu", 0.1, "auto", True),
    ("fp32", "cpu", 0.0, "fused", False), ("bf16", "cuda", 0.0, "unfused", True),
])  # fmt: skip
def test_where_all_scores_are_in_memory(precision: str, device: str, dropout: float, backend: str, plain: bool) -> None:
    run = workload(precision, device=device, kernels={"attention_backend": backend}, attention_dropout=dropout)
    assert AttentionForm(run, RankShape(run)).uses_reference == plain
    assert (memory_plan(run, "adam").peak > N * S * S * 4) == plain


def test_a_windows_mask_on_a_gpu_is_for_fp32() -> None:
    """One for all tiles, of 64 queries with the 99 keys before them; rows are a multiple of 16 elements apart."""
    found = {}
    for precision in ("fp32", "bf16"):
        wide, narrow = (memory_plan(workload(precision, window_size=window), "adam") for window in (None, 100))
        found[precision] = narrow.peak - wide.peak
    assert found == {"fp32": 4 * 64 * 176, "bf16": 0}
