"""Whole runs with apex's kernels, played by a stand-in: the losses, the change of kernels on a resume, what is said and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.apex_stand_in import ADAM, NORMS, Install, install_apex
from support.training import NO_DROPOUT, records, tensors, train

__all__ = ["install_apex"]
RMS, ON_GPU = ("--normalization", "RMSNorm"), ("--device", "auto")  # later flags win


COUNTED = """
def counted(fn):
    def call(*args):
        open("called-" + fn.__name__, "a").write("x")
        return fn(*args)
    return call

for name, value in list(globals().items()):
    if callable(value) and name != "counted":
        globals()[name] = counted(value)
"""
"""Code that makes an extension's functions leave a letter in a file for each call."""


def calls(tmp_path: Path) -> dict[str, int]:
    found = {file.name.removeprefix("called-"): file.stat().st_size for file in tmp_path.glob("called-*")}
    for file in tmp_path.glob("called-*"):
        file.unlink()
    return found


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: float(r["loss"]) for r in records(run)}


@pytest.mark.often("RMSNorm, ZeRO")
@pytest.mark.parametrize("layout", [(), ("--zero-stage", 2, "--normalization", "RMSNorm")], ids=["LayerNorm", "RMSNorm, ZeRO"])
def test_a_run_may_go_on_with_other_kernels(install_apex: Install, tmp_path: Path, layout: tuple[Any, ...]) -> None:
    """torch's, apex's, and torch's three steps long, then apex's: the same losses but for rounding, the same tensors on disk."""
    install_apex(amp_C=ADAM + COUNTED, fused_layer_norm_cuda=NORMS + COUNTED)
    flags, ranks = (*NO_DROPOUT, *ON_GPU, *layout), 2 if layout else 1
    norm = "RMSNorm" if layout else "LayerNorm"
    runs = {kernels: tmp_path / kernels for kernels in ("torch", "apex")}
    for kernels, run in runs.items():
        outcome = train(tmp_path, "--save", run, "--fused-kernels", kernels, *flags, ranks=ranks).expect(0)
        ops = f"AdamW and {norm}" if kernels == "apex" else f"AdamW, {norm} and elementwise operations"
        assert outcome.text.count(f"fused kernels: {ops} by {kernels} (asked for)") == 1, "rank 0 says it"
        assert records(run, "start")[0]["environment"]["kernels"] == {"AdamW": kernels, norm: kernels, "elementwise operations": "torch"}
        called = calls(tmp_path)
        assert min(called.values()) > 6 if kernels == "apex" else not called, "in every step, and not only in the examples at the start"
        assert len(called) == (3 if kernels == "apex" else 0)
    both = tmp_path / "both"
    train(tmp_path, "--save", both, "--fused-kernels", "torch", "--exit-interval", 3, *flags, ranks=ranks).expect(0)
    train(tmp_path, "--save", both, "--auto-resume", *flags, ranks=ranks).expect(0, f"AdamW and {norm} by apex (found)")
    want = losses(runs["torch"])
    for run in (runs["apex"], both):
        assert losses(run) == pytest.approx(want, rel=1e-5) and losses(run) != want
    assert {n: t.shape for n, t in tensors(both).items()} == {n: t.shape for n, t in tensors(runs["torch"]).items()}


def test_all_ranks_take_torchs_where_one_lacks_apex(install_apex: Install, tmp_path: Path) -> None:
    install_apex(
        amp_C=f"import os\nif os.environ['RANK'] == '1': raise OSError('no such symbol')\n{'from {module} import multi_tensor_adam'}"
    )
    said = "AdamW by torch (rank 1: apex not used: amp_C of apex is broken: OSError: no such symbol), RMSNorm by apex (found)"
    train(tmp_path, "--train-iters", 1, *RMS, *ON_GPU, ranks=2).expect(0, said)


def test_apex_demanded_where_it_is_not_whole(install_apex: Install, tmp_path: Path) -> None:
    """Before any rank waits for another: every rank ends with the code of a wrong flag and says why, each in one line."""
    install_apex(amp_C=None, fused_layer_norm_cuda=NORMS)
    outcome = train(tmp_path, "--save", tmp_path / "run", "--fused-kernels", "apex", *ON_GPU, ranks=2)
    outcome.expect(
        2, "error: --fused-kernels apex cannot be used for AdamW: apex was built without its extension amp_C. Use --fused-kernels auto"
    )
    assert outcome.text.count("error: ") == 2 and "Traceback" not in outcome.text and not (tmp_path / "run").exists()


def test_apex_demanded_without_a_gpu(tmp_path: Path) -> None:
    train(tmp_path, "--fused-kernels", "apex").expect(2, "--fused-kernels apex needs a GPU, but --device cpu was given: use auto or torch")
    train(tmp_path, "--train-iters", 1).expect(0, "fused kernels: AdamW and LayerNorm by torch (apex not used: it needs a GPU)")
