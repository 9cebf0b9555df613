"""cuBLAS's workspaces: torch's rule, and what an H200 has measured beside the tensors of the form."""

from __future__ import annotations

import sys

import pytest
from support.paths import ROOT

from megatron_sp.estimate.memory_plan import cublas_workspaces

sys.path[:0] = [str(ROOT / "benchmarks")]

from first_light.parts import memory_peak  # noqa: E402

MIB = 2**20


@pytest.mark.parametrize(("capability", "setting", "each"), [
    ((9, 0), "", 32 * MIB), ((8, 0), "", 8.125 * MIB), ((10, 0), "", 8.125 * MIB), ((8, 0), ":4096:8", 32 * MIB),
    ((9, 0), ":16:8", 128 * 1024), ((8, 0), ":4096:2:16:8", 8.125 * MIB), ((9, 0), "nonsense", 32 * MIB),
])  # fmt: skip
def test_each_thread_with_products_has_a_workspace(capability: tuple[int, int], setting: str, each: float) -> None:
    assert cublas_workspaces(capability, setting).num_bytes == 2 * each


def test_what_stays_on_an_h200_is_the_form_and_the_workspaces() -> None:
    """Measured: 6,744,417,280 bytes before a step of GPT; a quickstart's peak was 216.8 MiB where tensors were predicted to take 148.1."""
    tensors = memory_peak.form("GPT", memory_peak._SHAPE, 1, "cuda", "triton").resident
    beside = cublas_workspaces((9, 0)).num_bytes
    assert tensors + beside == pytest.approx(6_744_417_280, rel=1e-3) and tensors < 0.99 * 6_744_417_280
    assert 148.1 * MIB + beside == pytest.approx(216.8 * MIB, rel=0.03)


# bytes of a step's peak above what stays, of an H200's eight layers of 2048 channels and 4096 tokens
MEASURED = {
    "GPT": (3_001_205_248, 2_493_719_040), "Llama": (2_951_881_216, 2_437_054_976), "BERT": (3_051_724_288, 2_544_238_080),
    "recompute selective": (2_999_099_904, 2_491_613_696), "hidden dropout": (3_001_517_056, 2_494_030_848),
    "2 micro-batches": (4_874_830_848, 4_367_344_640), "ZeRO 3": (3_001_205_248, 2_493_719_040),
    "recompute full": (2_247_282_176, 2_247_282_176),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_the_form_knows_whose_kernels_ran(name: str, kernel: str) -> None:
    plan = memory_peak.form(name, memory_peak._SHAPE, 1, "cuda", kernel)
    measured = MEASURED[name][kernel == "triton"]
    assert measured == pytest.approx(plan.worst.num_bytes, rel=0.035 if name == "recompute full" else 0.01)
