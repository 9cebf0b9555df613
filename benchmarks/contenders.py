"""The measured processes of step_vs_hf.py: ours, Hugging Face's model (families.py), and bare matrix products.

    python contenders.py ours|hf|matmul [gpt2|bert|llama]

Ours and Hugging Face's do the same work on the same weights and tokens: forward, loss, backward,
clipping to norm 1, AdamW with decay on matrices. Equal losses after several updates prove it. Only torch, transformers
(hf) and this repository's initial weights are imported, each where it is used.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from child import serve
from common import memory_bytes, peak_memory_bytes, reset_peak_memory
from families import EPSILON, FAMILIES, INIT_STD, SEED, Batch, batch, our_loss, peer_loss, take_our_weights
from torch import Tensor

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0


class Ours:
    """Our model with flat buffers and the flat optimizer, put together as in training."""

    def __init__(self, family: str) -> None:
        import megatron_sp.models.bert
        import megatron_sp.models.gpt
        import megatron_sp.optim.optimizer  # noqa: F401

        self.family = family

    def build(self, shape: dict[str, int], dropout: float) -> None:
        from datetime import timedelta

        from megatron_sp.comm.groups import ParallelGroups, init_process_group
        from megatron_sp.config.schema import KernelConfig, ModelConfig, OptimizerConfig
        from megatron_sp.models.bert import BertModel
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.ops.attention_choice import choose_kernel
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.optim.optimizer import FlatOptimizer
        from megatron_sp.optim.weights import UnitWork, WholeWeights
        from megatron_sp.parallel.layers import attach_main_grad
        from megatron_sp.utils.launch import Launch

        config = ModelConfig(
            num_layers=shape["num_layers"], hidden_size=shape["hidden_size"], num_attention_heads=shape["num_heads"],
            seq_length=shape["seq_length"], vocab_size=shape["vocab_size"], init_method_std=INIT_STD, norm_epsilon=EPSILON,
            attention_dropout=dropout, hidden_dropout=dropout, num_query_groups=shape.get("num_groups"), ffn_hidden_size=shape.get("ffn"),
            **FAMILIES[self.family].config,
        )  # fmt: skip
        device = torch.device("cpu")
        init_process_group(Launch(0, 0, 1, 1, 0), device, "gloo", timedelta(minutes=10))
        groups = ParallelGroups.create(device)
        self.dropout = dropout
        self.kernel = choose_kernel("auto", "cpu", torch.float32, dropout).name
        self.model = (BertModel if config.is_bert else GPTModel)(config, KernelConfig(), seed=SEED, dtype=torch.float32)
        names = {id(p): n for n, p in self.model.named_parameters()}
        units = [FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()]) for u in self.model.units()]
        self.gradients = FlatGradients(units, groups.dp_cp_sp)
        self.events = UnitWork(WholeWeights(units), self.gradients)
        self.optimizer = FlatOptimizer(units, OptimizerConfig(lr=LEARNING_RATE, clip_grad=CLIP))
        attach_main_grad(self.model, self.gradients)

    def step(self, batch: Batch, index: int) -> float:
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.ops.dropout import DropoutKeys
        from megatron_sp.parallel.forward_context import ForwardContext

        keys = None
        if self.dropout > 0:
            size = batch["tokens"].shape
            keys = DropoutKeys.create(SEED, index, torch.arange(size[0]), torch.arange(size[1]))
        self.gradients.start_step()
        self.gradients.last_micro_batch()
        ctx = ForwardContext(AttentionMask(causal=self.family != "bert"), kernel=self.kernel, dropout=keys)
        loss = our_loss(self.family, self.model, batch, ctx, self.events)
        loss.backward()
        self.gradients.finish_step()
        self.optimizer.step(LEARNING_RATE, WEIGHT_DECAY, self.optimizer.grad_norm().item())
        return loss.item()


class HuggingFace:
    """Its class at its best plain setting, with fused AdamW."""

    def __init__(self, family: str) -> None:
        import transformers  # noqa: F401
        from transformers import BertForPreTraining, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

        self.family = family

    def build(self, shape: dict[str, int], dropout: float) -> None:
        self.model = FAMILIES[self.family].peer(shape, dropout).train()
        take_our_weights(self.model, self.family, shape)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, fused=True,
        )  # fmt: skip

    def step(self, batch: Batch, index: int) -> float:
        loss = peer_loss(self.family, self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


class Trainer:
    """The actions of a contender that trains."""

    def __init__(self, contender: Ours | HuggingFace) -> None:
        self.contender = contender
        torch.zeros(1).add_(1)
        self.baseline_bytes = memory_bytes()

    def build(self, shape: dict[str, int], dropout: float, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.shape = shape
        self.contender.build(shape, dropout)
        versions = {"torch": torch.__version__}
        if "transformers" in sys.modules:
            versions["transformers"] = sys.modules["transformers"].__version__
        return {"parameters": sum(p.numel() for p in self.contender.model.parameters()), "versions": versions}

    def step(self, index: int) -> dict[str, Any]:
        data = batch(self.contender.family, self.shape, index)
        start = time.perf_counter()
        loss = self.contender.step(data, index)
        return {"seconds": time.perf_counter() - start, "loss": loss}

    def forget_peak(self) -> dict[str, Any]:
        self.life_peak_bytes = peak_memory_bytes()
        return {"reset": reset_peak_memory()}

    def memory(self) -> dict[str, Any]:
        steps_peak = peak_memory_bytes()
        return {
            "baseline_bytes": self.baseline_bytes,
            "steps_peak_bytes": steps_peak,
            "peak_bytes": max(steps_peak, getattr(self, "life_peak_bytes", 0)),
        }


class Matmul:
    """Matrix products alone: what the machine gives at this moment."""

    def __init__(self) -> None:
        self.operands: dict[tuple[int, int, int, bool], tuple[Tensor, Tensor, Tensor]] = {}

    def build(self, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        return {"versions": {"torch": torch.__version__}}

    def multiply(self, shapes: list[list[int]]) -> dict[str, Any]:
        """Seconds of each product [m, k] @ [k, n] in fp32, operands and result allocated before."""
        return {"seconds": [self._one(*shape) for shape in shapes]}

    def _one(self, m: int, k: int, n: int) -> float:
        a, b, out = self._buffers(m, k, n)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        return time.perf_counter() - start

    def _buffers(self, m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        key = (m, k, n)
        if key not in self.operands:
            self.operands[key] = (torch.rand(m, k), torch.rand(k, n), torch.empty(m, n))
            torch.mm(self.operands[key][0], self.operands[key][1], out=self.operands[key][2])
        return self.operands[key]


def main() -> None:
    name = sys.argv[1]
    if name == "matmul":
        matmul = Matmul()
        serve({"build": matmul.build, "multiply": matmul.multiply})
        return
    family = sys.argv[2]
    trainer = Trainer(Ours(family) if name == "ours" else HuggingFace(family))
    serve({"build": trainer.build, "step": trainer.step, "forget_peak": trainer.forget_peak, "memory": trainer.memory})


if __name__ == "__main__":
    main()
