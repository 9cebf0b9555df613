"""The error measure of the project's first law: a layout changes nothing but rounding.

error = max|a - b| / (max|b| + 1e-3 * rms of all gradients). The second term keeps gradients that are zero in exact
arithmetic (the bias of the keys) from being compared with their own rounding noise.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

FP64, FP32 = 1e-10, 1e-5
"""Largest error allowed for sums of a few hundred terms in a different order."""


def rms_of_all(tensors: Mapping[str, Tensor]) -> float:
    """Root mean square over the elements of all tensors together."""
    count = sum(t.numel() for t in tensors.values())
    return (sum(float(t.detach().double().square().sum()) for t in tensors.values()) / max(count, 1)) ** 0.5


def law_error(got: Tensor, want: Tensor, rms: float = 0.0) -> float:
    """The measure for one tensor; inf where one is NaN or the shapes differ, 0 for two empty ones."""
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    difference = float((got - want).abs().max())
    if difference != difference:
        return float("inf")
    return 0.0 if difference == 0.0 else difference / max(float(want.abs().max()) + 1e-3 * rms, 1e-300)


def assert_law(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], tolerance: float) -> None:
    """Every tensor of ``want`` is in ``got`` and within ``tolerance``; None (no gradient) must be None in both."""
    assert got.keys() == want.keys(), f"names differ: {sorted(got.keys() ^ want.keys())}"
    absent = {k for k in want if (got[k] is None) != (want[k] is None)}
    assert not absent, f"one side has no gradient for {sorted(absent)}"
    present = {k: v for k, v in want.items() if v is not None}
    rms = rms_of_all(present)
    errors = {k: law_error(got[k], v, rms) for k, v in present.items()}  # type: ignore[arg-type]
    worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert all(e <= tolerance for e in errors.values()), f"above {tolerance}: {[w for w in worst if w[1] > tolerance]}"
