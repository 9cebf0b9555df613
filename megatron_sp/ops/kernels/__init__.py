"""Triton kernels for elementwise operations, norms and sums of products, each with its plain PyTorch form one folder up.

    norms.py          ops/norm.py             RMSNorm and LayerNorm
    biases.py         ops/main_grad.py        gradients of biases; a bias and a residual (parallel/linear.py)
    dropout.py        ops/dropout.py          hash dropout and the residual
    activations.py    ops/activation.py       SwiGLU, GEGLU and the ungated ones
    rotary.py         ops/rotary.py           rotation in place; rotation and packing of dQ, dK, dV
    cross_entropy.py  parallel/lm_head.py     loss and gradient of a chunk of logits
    squares.py        optim/flat.py           squares of gradients
    grouped.py        ops/expert_mlp.py       weight gradients of all experts of a layer

A kernel reads and writes each tensor once (rows above 8192 in a norm: once a pass; sums over
rows: their parts, too), computes in fp32, and rounds once.
``launch.py`` is the way to all of them (``direct.py``: without Triton's JIT from the second time on); the other modules
import Triton and are themselves imported where a kernel is first needed.
"""
