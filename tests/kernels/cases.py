"""Launches of every kernel at the shapes of real models, on tensors without contents."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_sp.ops.kernels import activations, biases, cross_entropy, dropout, grouped, norms, rotary, squares

BF16 = torch.bfloat16


def _meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(width: int, *, centered: bool, dtype: torch.dtype = BF16) -> None:
    x, weight = _meta(4096, width, dtype=dtype), _meta(width, dtype=dtype)
    y, stats = norms.forward(x, weight, weight if centered else None, 1e-5, centered=centered, zero_centered=False)
    norms.backward(y, x, weight, stats, (True, True, centered), y, zero_centered=False)


def _dropout(width: int) -> None:
    x, samples, positions = _meta(4096, width), _meta(1, dtype=torch.int64), _meta(4096, dtype=torch.int64)
    keys = dropout.token_keys(2**40 + 1, samples[0], samples, positions)[:, 0]
    dropout.dropout(x, keys, -2_000_000_000, 1.25, site=2**50 + 1, residual=x)
    dropout.dropout(x, keys, -2_000_000_000, 1.25, site=2**50 + 1)


def _activation(name: str, *, gated: bool) -> None:
    u = _meta(4096, 22016 if gated else 16384)
    out = activations.forward(u, name, gated=gated)
    activations.backward_(out, u, name, gated=gated, wants_out=gated)


def _rotary(heads: int, groups: int, dim: int, half: int) -> None:
    queries = heads // groups
    x, tables = _meta(4096, groups, queries + 2, dim), (_meta(4096, half, dtype=torch.float32),) * 2
    rotary.rotate_(x[:, :, : queries + 1], *tables)
    of_q, of_kv = _meta(groups, queries, 4096, dim).permute(2, 0, 1, 3), _meta(groups, 1, 4096, dim).permute(2, 0, 1, 3)
    rotary.pack(of_q, of_kv, of_kv, tables)


def _cross_entropy(vocabulary: int, rows: int) -> None:
    logits, labels = _meta(1024, rows, dtype=torch.float32), _meta(1024, dtype=torch.int64)
    losses, hits = _meta(1024, dtype=torch.float32), _meta(1024, dtype=torch.bool)
    stats = cross_entropy.statistics(logits, labels, vocabulary, (losses, hits))
    cross_entropy.gradient(logits, labels, stats, losses, vocabulary, BF16, whole=True)


def _grouped(experts: int, width_out: int, width_in: int, dtype: torch.dtype = BF16) -> None:
    out, ends = _meta(experts, width_out, width_in, dtype=torch.float32), _meta(experts, dtype=torch.int32)
    grad, x, rows = _meta(65536, width_out, dtype=dtype), _meta(65536, width_in, dtype=dtype), _meta(65536, dtype=torch.int64)
    grouped.weight_grads(out, grad, x, ends, None, fresh=True)
    grouped.weight_grads(out, grad, x, ends, rows, fresh=False)


def _bias(width: int) -> None:
    x, bias, to = _meta(16384, width), _meta(width), _meta(width, dtype=torch.float32)
    biases.add_bias(x, bias, x)
    biases.put_column_sums(x, (to, False))


def _squares() -> None:
    squares.squares([_meta(n, dtype=torch.float32) for n in (1 << 26, 7_087_872, 1536)])


CASES: dict[str, Callable[[], None]] = {
    "RMSNorm, h 128": lambda: _norm(128, centered=False),
    "RMSNorm, h 2048": lambda: _norm(2048, centered=False),
    "RMSNorm, h 4096": lambda: _norm(4096, centered=False),
    "RMSNorm, h 8192": lambda: _norm(8192, centered=False),
    "RMSNorm, h 8192, fp32": lambda: _norm(8192, centered=False, dtype=torch.float32),
    "RMSNorm, h 5001": lambda: _norm(5001, centered=False),
    "RMSNorm, h 16384": lambda: _norm(16384, centered=False),
    "LayerNorm, h 1024": lambda: _norm(1024, centered=True),
    "LayerNorm, h 8192": lambda: _norm(8192, centered=True),
    "LayerNorm, h 12288": lambda: _norm(12288, centered=True),
    "RMSNorm, h 8200": lambda: _norm(8200, centered=False),
    "dropout, h 4096": lambda: _dropout(4096),
    "dropout, h 1023": lambda: _dropout(1023),
    "SwiGLU": lambda: _activation("swiglu", gated=True),
    "GEGLU": lambda: _activation("geglu", gated=True),
    "GEGLU, tanh": lambda: _activation("geglu_tanh", gated=True),
    "GELU": lambda: _activation("gelu", gated=False),
    "squared ReLU": lambda: _activation("squared_relu", gated=False),
    "rotary, 32 heads of 128": lambda: _rotary(32, 32, 128, 64),
    "rotary, 32 heads in 8 groups": lambda: _rotary(32, 8, 128, 64),
    "rotary, a quarter of 96": lambda: _rotary(16, 16, 96, 12),
    "cross entropy, 128256": lambda: _cross_entropy(128256, 128256),
    "cross entropy, 50257": lambda: _cross_entropy(50257, 50304),
    "bias, h 2048": lambda: _bias(2048),
    "bias, h 1023": lambda: _bias(1023),
    "squares of gradients": _squares,
    "experts, 64 of 2048 x 2048": lambda: _grouped(64, 2048, 2048),
    "experts, 8 of 28672 x 4096, fp16": lambda: _grouped(8, 28672, 4096, torch.float16),
}
