"""NVIDIA apex played on the CPU: its extension modules with their functions' names, order of arguments, checks and roundings.

Facts from NVIDIA/apex: csrc/amp_C_frontend.cpp, csrc/multi_tensor_adam.cu, csrc/multi_tensor_apply.cuh,
csrc/layer_norm_cuda.cpp and csrc/layer_norm_cuda_kernel.cu. pybind11 takes these arguments by position only, an int
where C++ says int, a number where it says float.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_sp.ops import availability, fused_kernels

CHUNK = 2048 * 32
"""What apex.multi_tensor_apply gives its kernels as chunk size."""
ADAM = "from {module} import multi_tensor_adam\n"
NORMS = "from {module} import backward_affine, forward_affine, rms_backward_affine, rms_forward_affine\n"
calls: list[str] = []
"""Names of the functions that were called."""
sizes: list[list[int]] = []
"""Elements of the tensors of each call of ``multi_tensor_adam``."""
decays: list[float] = []
"""Weight decay of each of these calls."""


def _fp32(value: float) -> float:
    return float(np.float32(value))


def _is(kind: type, *values: object) -> None:
    allowed = (int,) if kind is int else (int, float)
    for value in values:
        if not isinstance(value, allowed):
            raise TypeError(f"incompatible function arguments: {value!r} is no {kind.__name__}")


def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, epsilon: float, step: int,
    mode: int, bias_correction: int, weight_decay: float, /,
) -> None:  # fmt: skip
    """Lists of gradients, parameters, first and second moments; mode 0 is L2, 1 is AdamW. All arithmetic is in fp32."""
    calls.append("multi_tensor_adam")
    sizes.append([g.numel() for g in tensor_lists[0]])
    decays.append(weight_decay)
    _is(int, chunk_size, step, mode, bias_correction)
    _is(float, lr, beta1, beta2, epsilon, weight_decay)
    assert chunk_size == CHUNK and step >= 1, "legal, and not what apex's own optimizer gives"
    if noop_flag.dtype != torch.int32 or noop_flag.numel() != 1 or noop_flag.device != tensor_lists[0][0].device:
        raise RuntimeError(f"expected scalar type Int, one on the device, but found {noop_flag}")
    if len(tensor_lists) != 4 or not tensor_lists[0] or len({len(each) for each in tensor_lists}) != 1:
        raise RuntimeError("Size mismatch among tensor lists")
    flat = [t for each in tensor_lists for t in each]
    assert {t.dtype for t in flat} == {torch.float32}, "other memory would be read and written"
    if not all(t.is_contiguous() for t in flat):
        raise RuntimeError("A tensor was not contiguous.")
    if noop_flag.item():
        return  # the real one updates all the same; a flag that is set is a mistake here
    lr, beta1, beta2, epsilon, weight_decay = map(_fp32, (lr, beta1, beta2, epsilon, weight_decay))
    correction1, correction2 = (_fp32(1 - beta**step) if bias_correction == 1 else 1.0 for beta in (beta1, beta2))
    for g, p, m, v in zip(*tensor_lists, strict=True):
        if not g.numel() == p.numel() == m.numel() == v.numel():
            raise RuntimeError("Size mismatch")
        grad = g + weight_decay * p if mode == 0 else g
        m.copy_(beta1 * m + _fp32(1 - beta1) * grad)
        v.copy_(beta2 * v + _fp32(1 - beta2) * grad * grad)
        update = (m / correction1) / ((v / correction2).sqrt() + epsilon)
        p.sub_(lr * (update if mode == 0 else update + weight_decay * p))


def _checked(x: Tensor, shape: tuple[int, ...], *params: Tensor) -> tuple[Tensor, ...]:
    if tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape) or any(p.shape != torch.Size(shape) for p in params):
        raise RuntimeError(f"Given normalized_shape={shape}, got input of size {tuple(x.shape)}")
    if not all(t.is_contiguous() for t in (x, *params)):
        raise RuntimeError("input must be contiguous")
    if x.dtype == torch.float64 or any(p.dtype != x.dtype for p in params):
        raise RuntimeError(f"expected scalar type {x.dtype} but found {[p.dtype for p in params]}")
    if x.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return (x.reshape(-1, torch.Size(shape).numel()).float(), *(p.reshape(-1).float() for p in params))


def forward_affine(x: Tensor, normalized_shape: tuple[int, ...], gamma: Tensor, beta: Tensor, epsilon: float, /) -> list[Tensor]:
    """[output, mean [rows], 1 / sqrt(variance + epsilon) [rows]], the last two in fp32."""
    calls.append("forward_affine")
    rows, *_ = _checked(x, normalized_shape, gamma, beta)
    mean, variance = rows.mean(-1), rows.var(-1, unbiased=False)
    invvar = (variance + epsilon).rsqrt()
    normed = ((rows - mean[:, None]) * invvar[:, None]).view(x.shape).to(gamma.dtype)
    return [gamma * normed + beta, mean, invvar]


def rms_forward_affine(x: Tensor, normalized_shape: tuple[int, ...], gamma: Tensor, epsilon: float, /) -> list[Tensor]:
    """[output, 1 / sqrt(mean square + epsilon) [rows]]."""
    calls.append("rms_forward_affine")
    rows, _ = _checked(x, normalized_shape, gamma)
    invvar = (rows.square().mean(-1) + epsilon).rsqrt()
    return [gamma * (rows * invvar[:, None]).view(x.shape).to(gamma.dtype), invvar]


def backward_affine(
    grad_out: Tensor, mean: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: tuple[int, ...], gamma: Tensor, beta: Tensor,
    epsilon: float, memory_efficient: bool, /,
) -> list[Tensor]:  # fmt: skip
    """Gradients of input, gamma and beta, each in its dtype."""
    calls.append("backward_affine")
    rows, scale, shift = _checked(input_or_output, normalized_shape, gamma, beta)
    normed = (rows - shift) / scale if memory_efficient else (rows - mean[:, None]) * invvar[:, None]
    return _gradients(grad_out, normed, invvar, input_or_output, gamma, beta, centered=True)


def rms_backward_affine(
    grad_out: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: tuple[int, ...], gamma: Tensor, epsilon: float,
    memory_efficient: bool, /,
) -> list[Tensor]:  # fmt: skip
    """Gradients of input and gamma, each in its dtype."""
    calls.append("rms_backward_affine")
    rows, scale = _checked(input_or_output, normalized_shape, gamma)
    normed = rows / scale if memory_efficient else rows * invvar[:, None]
    return _gradients(grad_out, normed, invvar, input_or_output, gamma, None, centered=False)


def _gradients(
    grad_out: Tensor, normed: Tensor, invvar: Tensor, like: Tensor, gamma: Tensor, beta: Tensor | None, *, centered: bool
) -> list[Tensor]:  # fmt: skip
    if grad_out.dtype != gamma.dtype or grad_out.shape != like.shape or not grad_out.is_contiguous():
        raise RuntimeError("grad_out must be contiguous, like the output")
    if invvar.dtype != torch.float32 or invvar.shape != (normed.shape[0],):
        raise RuntimeError("expected scalar type Float, one for each row")
    grad = grad_out.reshape(normed.shape).float()
    g = grad * gamma.float()
    grad_x = g - normed * (g * normed).mean(-1, keepdim=True) - (g.mean(-1, keepdim=True) if centered else 0.0)
    grad_x = (grad_x * invvar[:, None]).view(like.shape).to(like.dtype)
    sums = [(grad * normed).sum(0).to(gamma.dtype)]
    return [grad_x, *sums, *([] if beta is None else [grad.sum(0).to(beta.dtype)])]


def forget() -> None:
    """Forget what was found, so that the next look is at what is there now."""
    for name in ("apex", *availability.APEX_EXTENSIONS):
        sys.modules.pop(name, None)
    availability.installed.cache_clear()
    availability.find.cache_clear()
    fused_kernels._trial.cache_clear()
    for recorded in (calls, sizes, decays):
        recorded.clear()


def write_package(where: Path, **extensions: str | None) -> Path:
    """Write apex as pip installs it; ``amp_C`` and ``fused_layer_norm_cuda`` are the text of an extension, None for a build without it.

    Importing ``apex`` itself ends the program: nothing here needs it, and its own start is slow and sets up logging.
    """
    for folder, file in (("optimizers", "fused_adam.py"), ("normalization", "fused_layer_norm.py")):
        (where / "apex" / folder).mkdir(parents=True)
        (where / "apex" / folder / file).write_text("")
    (where / "apex" / "__init__.py").write_text("raise SystemExit('apex was imported')\n")
    for name, text in ({"amp_C": ADAM, "fused_layer_norm_cuda": NORMS} | extensions).items():
        if text is not None:
            (where / f"{name}.py").write_text(text.format(module=__name__))
    return where


Install = Callable[..., None]


@pytest.fixture
def install_apex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Installer of the stand-in for the time of a test, on the CPU; arguments as those of ``write_package``."""

    def install(**extensions: str | None) -> None:
        monkeypatch.syspath_prepend(write_package(tmp_path / "site", **extensions))
        forget()

    monkeypatch.setattr(availability, "APEX_DEVICE", "cpu")
    yield install
    forget()
