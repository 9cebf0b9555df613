"""A backward pass inside of another one: the gradients of torch's own call, without what that loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask, core_attention
from megatron_sp.ops.custom_backward import gradients_of, run_backward
from megatron_sp.parallel.forward_context import ForwardContext


def leaves_and_outputs() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(3, 4, generator=g, requires_grad=True) for _ in range(3))
    outputs = [a @ b.t(), (a * b).sum(0)]
    return [a, b, c], outputs, [torch.randn(out.shape, generator=g) for out in outputs]


def test_the_gradients_are_those_of_torch() -> None:
    leaves, outputs, gradients = leaves_and_outputs()
    expected = torch.autograd.grad(outputs, leaves[:2], gradients, retain_graph=True)
    for found, wanted in zip(gradients_of(leaves[:2], outputs, gradients), expected, strict=True):
        assert torch.equal(found, wanted)


def test_an_output_without_a_gradient_and_a_leaf_without_use() -> None:
    leaves, outputs, gradients = leaves_and_outputs()
    expected = torch.autograd.grad(outputs[0], leaves[0], gradients[0], retain_graph=True)
    found = gradients_of(leaves, outputs, [gradients[0], None], allow_unused=True)
    assert torch.equal(found[0], expected[0]) and found[2] is None


def test_gradients_add_up_where_they_are_kept() -> None:
    leaves, outputs, gradients = leaves_and_outputs()
    expected = torch.autograd.grad(outputs[0], leaves[0], gradients[0], retain_graph=True)[0]
    leaves[0].grad = torch.ones(3, 4)
    run_backward(outputs[0], gradients[0])
    assert torch.equal(leaves[0].grad, expected + 1)


def test_a_gradient_of_another_shape_is_a_mistake() -> None:
    leaves, outputs, gradients = leaves_and_outputs()
    with pytest.raises(AssertionError, match="is not"):
        gradients_of(leaves[:2], outputs, gradients[::-1])


def test_no_step_asks_torch_to_compare_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For that it would load sympy, in every process."""
    make = torch.autograd._make_grads

    def watched(outputs: Sequence[Any], grads: Sequence[Any], **more: Any) -> Any:
        assert all(grad is None for grad in grads)
        return make(outputs, grads, **more)

    monkeypatch.setattr(torch.autograd, "_make_grads", watched)
    shape = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=11, make_vocab_size_divisible_by=1)
    tokens = torch.arange(8)[None]
    for kernels in (KernelConfig(), KernelConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)):
        model = GPTModel(shape, kernels, seed=1, dtype=torch.float32)
        loss, _ = model(tokens, tokens, torch.ones(1, 8), ForwardContext(AttentionMask()))
        loss.backward()
    q, k, v = (torch.randn(8, 1, 1, 4, requires_grad=True) for _ in range(3))
    core_attention(q, k, v, AttentionMask(documents=((3, 5, 8),)), kernel="sdpa", dropout=0.1).sum().backward()
