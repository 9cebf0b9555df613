"""Device names accepted by --peak-tflops; separate from ``estimate/flops.py`` so that a typo is reported before torch is loaded."""

from __future__ import annotations

# dense (not sparse) peak TFLOP/s of matrix products, from the vendors' data sheets
PEAK_TFLOPS = {
    "a100-bf16": 312.0, "a100-fp16": 312.0, "h100-bf16": 989.0, "h100-pcie-bf16": 756.0, "h200-bf16": 989.0, "h800-bf16": 989.0,
    "b200-bf16": 2250.0, "l40s-bf16": 362.0, "a10-bf16": 125.0, "v100-fp16": 125.0, "rtx4090-bf16": 165.0, "mi300x-bf16": 1307.0,
}  # fmt: skip
