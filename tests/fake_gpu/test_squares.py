"""Attention never has a tensor of queries x keys on the device, unless the plain kernel is asked for, which says so."""

from __future__ import annotations

import pytest

from fake_gpu.grid import DOCUMENTS, NO_DROPOUT
from fake_gpu.jobs import Job, require_sound, run_rank

LENGTH = 1200  # longer than anything else in the model is wide
SMALL = f"--num-layers 1 --train-iters 1 --seq-length {LENGTH} --max-position-embeddings {LENGTH} --ffn-hidden-size 128"
GROUPED = "--num-query-groups 2"
JOBS = {
    "fp32, grouped": ("", GROUPED), "fp32, grouped, dropout": ("", f"{GROUPED} --attention-dropout 0.1"),
    "fp32, grouped, documents": (NO_DROPOUT, f"{GROUPED} {DOCUMENTS}"), "fp32, grouped, heads of 6": ("", f"{GROUPED} --kv-channels 6"),
    "fp32, grouped, a window": (NO_DROPOUT, f"{GROUPED} --window-size 9"),
    "fp32, nearly no window": (NO_DROPOUT, f"--window-size {LENGTH - 1}"), "bf16, grouped": ("--bf16", GROUPED),
    "bf16, grouped, heads of 12": ("--bf16", f"{GROUPED} --kv-channels 12"),
    "bf16, grouped, heads of 264": ("--bf16", "--num-attention-heads 2 --num-query-groups 1 --kv-channels 264"),
    "bf16, a window": (f"--bf16 {NO_DROPOUT}", "--window-size 9"),
    "fp32, grouped, recomputed": ("", f"{GROUPED} --recompute-granularity selective"),
}  # fmt: skip


@pytest.mark.often("bf16, grouped, heads of 264")
@pytest.mark.parametrize("name", JOBS)
def test_no_scores_in_memory(name: str) -> None:
    """Head widths that the kernels do not take are padded; masks of windows are narrow."""
    outcome = run_rank(Job(f"{SMALL} {' '.join(JOBS[name])}", micro_batches=1, square_from=LENGTH))
    require_sound(outcome)
    assert outcome["squares"] == {}


@pytest.mark.parametrize("precision", ["", pytest.param("--bf16", marks=pytest.mark.long)])
def test_no_scores_in_memory_of_padded_sequences(precision: str) -> None:
    """Lengths are known to the host; no mask stands for them."""
    outcome = run_rank(Job(f"{SMALL} {precision}", family="bert", micro_batches=1, square_from=LENGTH))
    require_sound(outcome)
    assert outcome["squares"] == {}


def test_the_plain_kernel_has_them() -> None:
    """And they are seen here."""
    outcome = run_rank(Job(f"{SMALL} --bf16 --attention-backend unfused", micro_batches=1, square_from=LENGTH))
    require_sound(outcome)
    assert any("aten::_softmax" in where and "ops/attention.py" in where for where in outcome["squares"])
    assert "attention: reference (asked for" in outcome["output"]
