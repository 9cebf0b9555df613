"""Predictions against the memory of a host, and beside what was measured."""

from __future__ import annotations

import pytest
import torch

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.estimate.rough import CERTAIN
from megatron_sp.ops.fused_kernels import FusedKernel, FusedKernels
from megatron_sp.training import kernel_selection
from megatron_sp.training import memory_estimate as foresight
from megatron_sp.training.memory_estimate import MemoryEstimate, require_order_fits
from megatron_sp.utils.errors import ConfigError

GIB = 2**30


SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 500 --micro-batch-size 2 --mock-data --lr 1"
    " --train-iters 1"
)


def config(*flags: str) -> Config:
    return config_from_args([*SHAPE.split(), *flags], world_size=4)


def foresee(*flags: str, mode: str = "none") -> MemoryEstimate:
    return MemoryEstimate(config(*flags), {"mode": mode, "chunks": 2}, 4, 2, torch.device("cpu"))


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


def test_what_certainly_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the prediction may be an error of it; swap space counts, and a save's copy does not."""
    foreseen, saving = foresee(), foresee("--save", "run", "--save-interval", "1")
    need = 2 * round(CERTAIN * foreseen.memory.peak)
    for swap in (0, 1000):
        monkeypatch.setattr(foresight, "swap_bytes", lambda swap=swap: swap)
        monkeypatch.setattr(foresight, "host_memory_bytes", lambda swap=swap: need - swap + 2)
        assert foreseen.warning()[0].startswith("warning: a rank is predicted to need") and saving.warning()
        monkeypatch.setattr(foresight, "host_memory_bytes", lambda swap=swap: need - swap - 4)
        with pytest.raises(ConfigError, match=r"(?s)^a rank is predicted .* available to 2 processes.*  --allow-oom: start all the same$"):
            foreseen.warning()
        assert foresee("--allow-oom").warning()[0].startswith("warning: a rank is predicted")


def test_stages_of_a_pipeline_share_a_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage holds more than the others, and its need is not that of all."""
    foreseen = MemoryEstimate(config("--pp-size", "4", "--num-layers", "4"), {"mode": "none", "chunks": 2}, 4, 4, torch.device("cpu"))
    monkeypatch.setattr(foresight, "swap_bytes", lambda: 0)
    monkeypatch.setattr(foresight, "host_memory_bytes", lambda: int(4 * (CERTAIN - 0.01) * foreseen.memory.peak))
    assert foreseen.warning()[0].startswith("warning: a rank is predicted to need")


def test_what_exceeds_a_gpu_or_its_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreseen(*flags: str) -> MemoryEstimate:
        return MemoryEstimate(config("--device", "cuda", *flags), {"mode": "none", "chunks": 2}, 4, 2, torch.device("cuda"))

    plain, offloaded = foreseen(), foreseen("--offload-optimizer", "--bf16")
    gpu = {"bytes": plain.memory.peak - 1}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, gpu["bytes"]))
    monkeypatch.setattr(foresight, "host_memory_bytes", lambda: 2 * offloaded.memory.optimizer_host)
    assert plain.warning()[0].startswith("warning: a rank is predicted to need")
    gpu["bytes"] = plain.memory.peak // 2
    with pytest.raises(ConfigError, match="on this GPU"):
        plain.warning()
    gpu["bytes"] = GIB
    assert offloaded.warning() == []
    monkeypatch.setattr(foresight, "host_memory_bytes", lambda: offloaded.memory.optimizer_host)
    with pytest.raises(ConfigError, match=r"of host memory for what it offloads, and .* available to 2 processes"):
        offloaded.warning()


@pytest.mark.parametrize(("capability", "setting", "mib"), [((9, 0), "", 64.0), ((8, 0), "", 16.25), ((8, 0), ":4096:8", 64.0)])
def test_what_cublas_works_in_is_a_part_of_a_gpus_prediction(
    capability: tuple[int, int], setting: str, mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foreseen() -> MemoryEstimate:
        return MemoryEstimate(config("--device", "cuda"), {"mode": "none", "chunks": 2}, 4, 2, torch.device("cuda"))

    tensors = foreseen().memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert foreseen().memory.peak - tensors.peak == mib * 2**20
    assert foreseen().memory.stays[-1].name == "workspaces of cuBLAS"


def test_the_order_of_too_many_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(*flags: str) -> Config:
        return config_from_args([word for word in SHAPE.split() if word != "--mock-data"] + ["--data-path", "corpus", *flags])

    monkeypatch.setattr(foresight, "swap_bytes", lambda: 0)
    monkeypatch.setattr(foresight, "host_memory_bytes", lambda: 12 * 10**9)
    require_order_fits(config(), (10**12, 0, 0))  # made up as they are read
    require_order_fits(files(), (10**9 - 10, 5, 5))
    with pytest.raises(ConfigError, match=r"the order of 1,000,000,001 samples takes at least 11.2 GiB.*\n  --allow-oom"):
        require_order_fits(files(), (10**9, 1, 0))
    require_order_fits(files("--allow-oom"), (10**9, 1, 0))


def test_scores_in_memory_are_counted_whoever_chose_them() -> None:
    """A GPU without a fused kernel for this has the plain one, whatever the flag says."""
    shape, chunks = config("--seq-length", "4096", "--attention-dropout", "0"), {"mode": "none", "chunks": 2}
    plain, fused = (MemoryEstimate(shape, chunks, 4, 2, torch.device("cpu"), name).memory.peak for name in ("reference", "sdpa"))
    assert plain > fused and shape.kernels.attention_backend == "auto", "and the run's own configuration is as it was"


def test_the_line_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "resident_bytes", lambda: 300 * 2**20)
    foreseen = foresee("--zero-stage", "1")
    line = foreseen.line(GIB, 0.25)
    assert line.startswith("memory: predicted roughly ") and "measured 1.0 GiB resident (the whole process, 300.0 MiB of it before" in line
    assert line.endswith("a step: 0.25 s")
    record = foreseen.record(GIB, 0.25)
    assert record["predicted_bytes"] == foreseen.memory.peak and record["before_model_bytes"] == 300 * 2**20


def wait_for(foreseen: MemoryEstimate) -> None:
    assert foreseen._child is not None
    foreseen._child.wait()
    assert foreseen.has_run()


def test_a_child_runs_the_program_without_contents() -> None:
    foreseen = foresee("--zero-stage", "1", "--sequence-parallel-size", "2", "--sp-overlap-comm", mode="chunked")
    assert foreseen.has_run(), "nothing was begun"
    foreseen.begin_run()
    wait_for(foreseen)
    line, record = foreseen.line(GIB, 0.25), foreseen.record(GIB, 0.25)
    assert line.startswith("memory: predicted ") and "roughly" not in line and "can run under computation" in line
    assert record["predicted_bytes"] == pytest.approx(foreseen.memory.peak, rel=0.3) and record["predicted_bytes"] != foreseen.memory.peak
    assert record["sent_bytes"] > record["can_hide_bytes"] > 0 and record["collectives"] > 10


def test_a_child_that_fails_or_takes_too_long_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("raise SystemExit(1)", "import time; time.sleep(600)"):
        foreseen = foresee()
        monkeypatch.setattr(foresight, "_PROGRAM", ("-c", program))
        foreseen.begin_run()
        if "raise" in program:
            wait_for(foreseen)
        assert foreseen.has_run() == ("raise" in program)
        foreseen.close()
        assert foreseen.line(GIB, 1.0).startswith("memory: predicted roughly ")


def test_the_memory_of_captured_steps() -> None:
    """All that a step allocates: part of the peak, in a pool of its own."""

    def foreseen(*flags: str) -> MemoryEstimate:
        return MemoryEstimate(config("--attention-dropout", "0", *flags), {"mode": "none", "chunks": 2}, 4, 2, torch.device("cuda"))

    plan = foreseen().memory
    assert plan.graphs == plan.worst.num_bytes == plan.peak - plan.resident == plan.as_dict()["graphs"]
    assert foreseen("--cuda-graphs", "off").memory.graphs == foreseen("--offload-optimizer").memory.graphs == foresee().memory.graphs == 0
    line = foreseen().line(GIB, 0.25, 3 * GIB, 2 * GIB)
    assert "measured 1.0 GiB allocated and 3.0 GiB reserved, 2.0 GiB of them for captured steps; a step" in line
    assert "measured 1.0 GiB allocated and 3.0 GiB reserved; a step" in foreseen().line(GIB, 0.25, 3 * GIB)
    record = foreseen().record(GIB, 0.25, 3 * GIB, 2 * GIB)
    assert (record["reserved_bytes"], record["graphs_bytes"]) == (3 * GIB, 2 * GIB)


def test_a_gpu_without_triton_needs_more_than_the_flag_says() -> None:
    """--fused-kernels auto falls back to torch where Triton cannot run: the form is then that of --fused-kernels torch."""
    gpu, modes = torch.device("cuda"), {"mode": "none", "chunks": 2}
    auto = MemoryEstimate(config("--bf16"), modes, 4, 2, gpu)
    fallen_back = MemoryEstimate(config("--bf16"), modes, 4, 2, gpu, fused=False)
    asked = MemoryEstimate(config("--bf16", "--fused-kernels", "torch"), modes, 4, 2, gpu)
    assert auto.memory.peak <= fallen_back.memory.peak == asked.memory.peak


def test_the_run_tells_the_form_whether_triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "torch"):
        chosen = FusedKernels(None, None, FusedKernel("elementwise operations", name, "found"))  # type: ignore[arg-type]
        monkeypatch.setattr(kernel_selection, "choose_fused_kernels", lambda asked, use, chosen=chosen: chosen)
        assert kernel_selection.expects_triton(config(), torch.device("cuda")) == (name == "triton")


def test_attention_that_is_repeated_after_all_keeps_nothing() -> None:
    """The form says what a kernel can keep; the run's ranks may have found that theirs cannot."""
    gpu, modes = torch.device("cuda"), {"mode": "none", "chunks": 2}
    full = ["--bf16", "--attention-dropout=0", "--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    given = config(*full)
    kept, repeated = (MemoryEstimate(given, modes, 4, 2, gpu, "flash4", repeats_attention=repeats).memory for repeats in (False, True))
    asked = MemoryEstimate(config(*full, "--recompute-attention", "full"), modes, 4, 2, gpu).memory
    assert repeated.peak == asked.peak < kept.peak and given.kernels.recompute_attention == "none"
