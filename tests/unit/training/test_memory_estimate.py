"""Predictions against the memory of a host, and beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.paths import ROOT

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.estimate import memory_shape
from megatron_sp.ops.fused_kernels import FusedKernel, FusedKernels
from megatron_sp.training import fused
from megatron_sp.training import memory_estimate as foresight
from megatron_sp.training.memory_estimate import MemoryEstimate, host_memory_bytes, resident_bytes

GIB = 2**30


def config(*flags: str) -> Config:
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 500 --micro-batch-size 2"
    return config_from_args([*shape.split(), "--mock-data", "--lr", "1", "--train-iters", "1", *flags], world_size=4)


def foresee(*flags: str, mode: str = "none") -> MemoryEstimate:
    return MemoryEstimate(config(*flags), {"mode": mode, "chunks": 2}, 4, 2, torch.device("cpu"))


def host(root: Path, available_kib: int | None, limit: str = "max", current: int = 0, cached: int = 0) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    if available_kib is not None:
        (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
    (root / "sys/fs/cgroup/memory.current").write_text(f"{current}\n")
    (root / "sys/fs/cgroup/memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
    return root


def test_memory_of_a_host_and_of_a_container(tmp_path: Path) -> None:
    assert host_memory_bytes(host(tmp_path / "a", 1000)) == 1000 * 1024
    assert host_memory_bytes(host(tmp_path / "b", 1000, "500000", 400000, 50000)) == 150000
    assert host_memory_bytes(host(tmp_path / "c", None, "500000", 600000)) == 0
    assert host_memory_bytes(host(tmp_path / "d", 1000, "nonsense")) == 1000 * 1024
    assert host_memory_bytes(tmp_path / "nowhere") is None
    assert (host_memory_bytes() or 1) > 0 and resident_bytes() >= 0


def test_the_share_of_a_rank_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are on this host: each has half of what is available."""
    foreseen = foresee()
    peak = foreseen.memory.peak
    monkeypatch.setattr(foresight, "host_memory_bytes", lambda: 2 * peak)
    assert foreseen.warning() == []
    monkeypatch.setattr(foresight, "host_memory_bytes", lambda: 2 * peak - 2)
    first, *rest = foreseen.warning()
    assert first.startswith("warning: a rank is predicted to need") and "are available to 2 processes" in first and len(rest) == 3
    monkeypatch.setattr(foresight, "host_memory_bytes", lambda: None)
    assert foreseen.warning() == [], "unknown is no reason to warn"


def test_scores_in_memory_are_counted_whoever_chose_them() -> None:
    """A GPU without a fused kernel for this has the plain one, whatever the flag says."""
    shape, chunks = config("--seq-length", "4096", "--attention-dropout", "0"), {"mode": "none", "chunks": 2}
    plain, fused = (MemoryEstimate(shape, chunks, 4, 2, torch.device("cpu"), name).memory.peak for name in ("reference", "sdpa"))
    assert plain > fused and shape.kernels.attention_backend == "auto", "and the run's own configuration is as it was"


def test_the_line_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "resident_bytes", lambda: 300 * 2**20)
    foreseen = foresee("--zero-stage", "1")
    line = foreseen.line(GIB, 0.25)
    assert line.startswith("memory: predicted ") and "measured 1.0 GiB resident (the whole process, 300.0 MiB of it before" in line
    assert "a step: 0.25 s, " in line and "can run under computation" in line
    record = foreseen.record(GIB, 0.25)
    assert record["predicted_bytes"] == foreseen.memory.peak and record["before_model_bytes"] == 300 * 2**20
    alone = MemoryEstimate(config(), {"mode": "none", "chunks": 2}, 1, 1, torch.device("cpu"))
    assert alone.line(GIB, 1.0).endswith("a step: 1 s, nothing sent")


def test_the_overlap_that_was_chosen_counts() -> None:
    flags = ("--sequence-parallel-size", "2", "--sp-overlap-comm")
    assert foresee(*flags, mode="chunked").traffic.can_hide > foresee(*flags, mode="none").traffic.can_hide


def test_a_gpu_without_triton_needs_more_than_the_flag_says() -> None:
    """--fused-kernels auto falls back to torch where Triton cannot run: the form is then that of --fused-kernels torch."""
    gpu, modes = torch.device("cuda"), {"mode": "none", "chunks": 2}
    auto = MemoryEstimate(config("--bf16"), modes, 4, 2, gpu)
    fallen_back = MemoryEstimate(config("--bf16"), modes, 4, 2, gpu, fused=False)
    asked = MemoryEstimate(config("--bf16", "--fused-kernels", "torch"), modes, 4, 2, gpu)
    assert auto.memory.peak < fallen_back.memory.peak == asked.memory.peak


def test_the_run_tells_the_form_whether_triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "torch"):
        chosen = FusedKernels(None, None, FusedKernel("elementwise operations", name, "found"))  # type: ignore[arg-type]
        monkeypatch.setattr(fused, "choose_fused_kernels", lambda asked, use, chosen=chosen: chosen)
        assert fused.expects_triton(config(), torch.device("cuda")) == (name == "triton")


def test_a_norms_partial_sums_are_those_of_the_kernel() -> None:
    source = (ROOT / "megatron_sp/ops/kernels/norms.py").read_text()
    assert f"_MOST_PROGRAMS = {memory_shape._NORM_PROGRAMS} " in source


def test_attention_that_is_repeated_after_all_keeps_nothing() -> None:
    """The form says what a kernel can keep; the run's ranks may have found that theirs cannot."""
    gpu, modes = torch.device("cuda"), {"mode": "none", "chunks": 2}
    full = (
        "--bf16",
        "--attention-dropout",
        "0",
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    )
    given = config(*full)
    kept, repeated = (MemoryEstimate(given, modes, 4, 2, gpu, "flash4", repeats_attention=repeats).memory for repeats in (False, True))
    asked = MemoryEstimate(config(*full, "--recompute-attention", "full"), modes, 4, 2, gpu).memory
    assert repeated.peak == asked.peak < kept.peak and given.kernels.recompute_attention == "none"
