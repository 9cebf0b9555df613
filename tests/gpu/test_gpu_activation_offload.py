"""--offload-activations on a GPU: the same bits, less memory, copies on a stream of their own, and a host that does not wait."""

from __future__ import annotations

import pytest
import torch
from support import tiny

from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPE = tiny.shape(
    num_layers=6, hidden_size=512, num_attention_heads=8, kv_channels=64, ffn_hidden_size=2048, seq_length=1024, vocab_size=512
)


def model_of(**kernels: object) -> GPTModel:
    return tiny.make_model(SHAPE, torch.bfloat16, **kernels).to(CUDA)


def step(model: GPTModel) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 512, (4, 1024), generator=g).to(CUDA) for _ in range(2))
    mask = torch.ones(4, 1024, device=CUDA)
    loss: torch.Tensor = model(tokens, labels, mask, ForwardContext(AttentionMask()))[0]
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_the_same_bits_in_less_memory(how: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        peaks, results = [], []
        for offload in (False, True):
            model = model_of(**tiny.RECOMPUTE[how], offload_activations=offload)
            for _ in range(3):  # memory that is used again too early would show in a later step
                model.zero_grad()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                loss = step(model)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            results.append({"loss": loss.cpu(), **{n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}})
            if offload:
                assert model._offload is not None and all(b.is_pinned() for buffers in model._offload._free.values() for b in buffers)
            del model
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
        if how != "full":  # else a block's recomputation is the worst moment either way
            assert peaks[1] < 0.8 * peaks[0], peaks
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_host_does_not_wait() -> None:
    model = model_of(offload_activations=True)
    step(model)  # pinned memory is taken
    g = torch.zeros(4, 1024, dtype=torch.long, device=CUDA)
    mask = torch.ones(4, 1024, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(g, g, mask, ForwardContext(AttentionMask()))[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
