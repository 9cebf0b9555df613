"""Triton's kernels compute what their plain forms compute: under the interpreter, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.interpreter import interpret

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu", "squared_relu")
# of each check of ``checks`` the arguments of its calls
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "norm": [  # kind, dtype, rows, width, zero-centered, with the residual's gradient, wanted gradients
        ("RMSNorm", "fp32", 33, 96, False, True, "xw"), ("RMSNorm", "fp32", 5, 1, True, False, "xw"),
        ("RMSNorm", "fp16", 1, 1000, True, True, "xw"), ("RMSNorm", "bf16", 7, 64, False, True, "xw"),
        ("RMSNorm", "fp32", 3, 5001, False, True, "xw"), ("RMSNorm", "fp32", 2, 8192, True, True, "x"),
        ("RMSNorm", "fp32", 3, 9001, True, True, "xw"), ("RMSNorm", "fp16", 2, 8208, False, False, "w"),
        ("RMSNorm", "fp32", 700, 8, False, True, "xw"),
        ("LayerNorm", "fp32", 33, 96, False, True, "xwb"), ("LayerNorm", "fp16", 4, 1000, True, True, "xwb"),
        ("LayerNorm", "bf16", 7, 64, True, False, "xwb"),
        ("LayerNorm", "fp32", 3, 48, False, True, "xb"), ("LayerNorm", "fp32", 3, 48, False, False, "wb"),
        ("LayerNorm", "fp32", 70, 512, False, True, "xwb"), ("LayerNorm", "fp32", 3, 4104, False, True, "x"),
        ("LayerNorm", "fp32", 3, 4104, True, True, "w"), ("LayerNorm", "fp32", 5, 2, False, True, "xwb"),
        ("RMSNorm", "fp32", 5, 1, False, True, "xw"), ("LayerNorm", "fp16", 5, 2049, False, True, "xwb"),
        ("RMSNorm", "bf16", 300, 48, False, True, "xw"),
    ],
    "norm_of_few_programs": [("RMSNorm", 14, 4101), ("LayerNorm", 7, 8208), ("LayerNorm", 70, 96)],
    "norm_into_buffers": [
        ("LayerNorm", 40, 48, (True, False), (True, True)), ("LayerNorm", 300, 33, (False, True), (True, True)),
        ("LayerNorm", 7, 33, (False, True), (True, False)), ("LayerNorm", 7, 33, (False, False), (False, True)),
        ("RMSNorm", 7, 96, (False, True), (True, False)), ("RMSNorm", 7, 96, (True, True), (False, False)),
    ],
    "norm_of_strided": [("fp32",), ("fp16",)],
    "norm_repeats": [()],
    "norm_of_what_is_not_finite": [()],
    "dropout_mask": [(5, 100, 0.2, 0), (3, 1, 0.5, 7), (9, 600, 1e-4, 4096), (4, 513, 0.999, 1), (8, 512, 0.1, 3 * 10**9)],
    "hash_dropout_and_residual": [
        ("fp32", 5, 100, True), ("fp16", 5, 600, True), ("bf16", 5, 33, True), ("fp32", 5, 64, False), ("fp16", 5, 5, False),
    ],
    "dropout_of_broadcast_keys": [()],
    "activation": [(name, dtype, 4, width) for name in ACTIVATIONS for dtype, width in [("fp32", 40), ("fp16", 1100), ("bf16", 17)]],
    "activation_of_extremes": [(name,) for name in ACTIVATIONS],
    "rotation": [
        ("fp32", 3, 2, 16, 16, False), ("fp16", 1, 1, 8, 8, True), ("bf16", 4, 3, 24, 12, False), ("fp32", 6, 5, 10, 4, True),
        ("fp16", 3, 2, 128, 128, False),
    ],
    "rotation_leaves_the_rest": [()],
    "packing": [
        ("fp32", 1, 16, 16, False), ("fp16", 4, 128, 128, False), ("bf16", 2, 24, 12, True), ("fp32", 3, 10, 0, False),
        ("fp32", 5, 20, 6, True),
    ],
    "cross_entropy": [
        ("fp32", 7, 40, 37, 3), ("fp16", 5, 64, 64, 128), ("bf16", 6, 33, 20, 4), ("fp32", 2, 5000, 4999, 128), ("fp16", 3, 2049, 2048, 2),
    ],
    "cross_entropy_of_extremes": [()],
    "packing_of_long_strides": [()],
    "column_sums": [  # dtype, dtype of the sums, rows, width, overwrites, padding
        ("fp32", "fp32", 300, 300, True, 0), ("bf16", "fp32", 1000, 40, False, 3), ("fp16", "fp32", 256, 1, True, 0),
        ("bf16", "bf16", 257, 65, True, 1), ("fp16", "fp16", 1, 70, False, 0), ("fp32", "fp32", 1300, 8, False, 0),
    ],
    "several_sums": [
        ([40, 33, 1, 64], [True, False, False, True]),
        ([32, 70, 16, 8, 65, 24, 12, 100, 48, 7], [False, True, True, False, False, True, False, True, False, True]),
    ],
    "sums_of_a_unit": [()],
    "squares_of_gradients": [((16,),), ((4112, 64, 16, 16384, 16400, 48, 32, 80),), ((70_000, *[32] * 12),)],
    "bias_gradient": [(300, True, True), (20, False, True), (300, False, False)],
    "bias_and_residual": [("fp32", 7, 40), ("bf16", 33, 1300), ("fp16", 1, 3), ("fp16", 70, 64)],
    "grouped_weight_gradients": [  # dtype, rows of each expert, width of the gradient and of x, rows are gathered, overwrites, padding
        ("bf16", (64, 1, 0, 130), 40, 48, False, True, 0), ("fp16", (3, 0, 65), 16, 300, True, False, 0),
        ("bf16", (0, 0), 8, 8, False, True, 0), ("bf16", (0, 64), 8, 8, True, False, 3), ("fp16", (200,), 130, 257, False, False, 5),
        ("fp16", (7, 9), 1100, 20, True, True, 0), ("bf16", (17,), 1, 1, False, True, 1),
    ],
    "grouped_weight_gradients_of_an_expert_alone": [()],
    "experts_with_one_launch": [("bf16", False, False), ("fp16", True, True), ("fp32", True, False)],
    "relu_cuts_infinite_gradients_off": [()],
    "whole_model": [
        ("llama", "fp32", 1, None), ("gpt, dropout", "fp32", 1, None), ("llama, dropout, 1p, QK norm", "fp32", 3, "full"),
        ("parallel residual, squared ReLU", "fp32", 1, "full"), ("post-norm", "fp32", 2, "selective"),
    ],
}  # fmt: skip
CHECKS = [(name, *arguments) for name, calls in CALLS.items() for arguments in calls]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: "-".join(map(str, check)))
def test_the_interpreted_kernel(check: tuple[Any, ...]) -> None:
    interpret(check[0], *check[1:])


@pytest.mark.long
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("width", [31, 128, 1023, 4097, 8191, 8193, 12288])
@pytest.mark.parametrize("rows", [1, 2, 17, 130])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_of_many_shapes(kind: str, dtype: str, rows: int, width: int, zero_centered: bool) -> None:
    interpret("norm", kind, dtype, rows, width, zero_centered, True, "xwb")
