"""The measured processes of step_vs_hf.py: ours, Hugging Face's GPT-2, and bare matrix products.

    python contenders.py ours|hf|matmul

Ours and Hugging Face's do the same work on the same weights and tokens: forward, loss over shifted labels, backward,
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
from torch import Tensor

SEED = 1234
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0
INIT_STD = 0.02
EPSILON = 1e-5


def batch(shape: dict[str, int], step: int) -> Tensor:
    """int64 [b, s], the tokens of one step, the same in every contender."""
    generator = torch.Generator().manual_seed(SEED + step)
    return torch.randint(0, shape["vocab_size"], (shape["batch"], shape["seq_length"]), generator=generator)


class Ours:
    """GPTModel with flat buffers and the flat optimizer, put together as in training."""

    def __init__(self) -> None:
        import megatron_sp.models.gpt
        import megatron_sp.optim.optimizer  # noqa: F401

    def build(self, shape: dict[str, int], dropout: float) -> None:
        from datetime import timedelta

        from megatron_sp.comm.groups import Launch, ParallelGroups, init_process_group
        from megatron_sp.config import KernelConfig, ModelConfig, OptimizerConfig
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.models.transformer import attach_sink
        from megatron_sp.ops.attention import choose_kernel
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.optim.optimizer import FlatOptimizer
        from megatron_sp.optim.weights import UnitWork, WholeWeights

        config = ModelConfig(
            num_layers=shape["num_layers"], hidden_size=shape["hidden_size"], num_attention_heads=shape["num_heads"],
            seq_length=shape["seq_length"], vocab_size=shape["vocab_size"], init_method_std=INIT_STD, norm_epsilon=EPSILON,
            attention_dropout=dropout, hidden_dropout=dropout,
        )  # fmt: skip
        device = torch.device("cpu")
        init_process_group(Launch(0, 0, 1, 1, 0), device, "gloo", timedelta(minutes=10))
        groups = ParallelGroups.create(device)
        self.dropout = dropout
        self.kernel = choose_kernel("auto", "cpu", torch.float32, dropout).name
        self.model = GPTModel(config, KernelConfig(), seed=SEED, dtype=torch.float32)
        names = {id(p): n for n, p in self.model.named_parameters()}
        units = [FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()]) for u in self.model.units()]
        self.gradients = FlatGradients(units, groups.dp_sp)
        self.events = UnitWork(WholeWeights(units), self.gradients)
        self.optimizer = FlatOptimizer(units, OptimizerConfig(lr=LEARNING_RATE, clip_grad=CLIP))
        attach_sink(self.model, self.gradients)

    def step(self, tokens: Tensor, index: int) -> float:
        from megatron_sp.models.transformer import ForwardContext
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.ops.dropout import DropoutKeys

        labels = tokens.roll(-1, dims=1)
        loss_mask = torch.ones(tokens.shape)
        loss_mask[:, -1] = 0.0  # the last token has no successor
        keys = None
        if self.dropout > 0:
            keys = DropoutKeys.create(SEED, index, torch.arange(tokens.shape[0]), torch.arange(tokens.shape[1]))
        self.gradients.start_step()
        self.gradients.last_micro_batch()
        ctx = ForwardContext(AttentionMask(), kernel=self.kernel, dropout=keys)
        loss_sum, _ = self.model(tokens, labels, loss_mask, ctx, self.events)
        loss = loss_sum / loss_mask.sum()
        loss.backward()
        self.gradients.finish_step()
        self.optimizer.step(LEARNING_RATE, WEIGHT_DECAY, self.optimizer.grad_norm().item())
        return loss.item()


class HuggingFace:
    """GPT2LMHeadModel at its best plain setting: SDPA, no key/value cache, fused AdamW."""

    def __init__(self) -> None:
        import transformers  # noqa: F401
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401

    def build(self, shape: dict[str, int], dropout: float) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=shape["vocab_size"], n_positions=shape["seq_length"], n_embd=shape["hidden_size"], n_layer=shape["num_layers"],
            n_head=shape["num_heads"], resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, layer_norm_epsilon=EPSILON,
            activation_function="gelu_pytorch_tanh", use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config).train()
        with torch.no_grad():
            _take_our_weights(self.model, shape)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, fused=True,
        )  # fmt: skip

    def step(self, tokens: Tensor, index: int) -> float:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def _take_our_weights(model: Any, shape: dict[str, int]) -> None:
    """Fill a GPT2LMHeadModel with the weights that our model starts from: transposed, and queries, keys, values apart."""
    from megatron_sp.models.init import draw_normal, output_std

    hidden, heads, layers = shape["hidden_size"], shape["num_heads"], shape["num_layers"]
    small = output_std(INIT_STD, layers)

    def draw(name: str, rows: int, columns: int, std: float = INIT_STD) -> Tensor:
        return draw_normal((rows, columns), std, SEED, f"{name}.weight")

    inner = model.transformer
    inner.wte.weight.copy_(draw("embedding.word_embeddings", shape["vocab_size"], hidden))
    inner.wpe.weight.copy_(draw("embedding.position_embeddings", shape["seq_length"], hidden))
    for index, block in enumerate(inner.h):
        name = f"decoder.layers.{index}"
        qkv = draw(f"{name}.self_attention.linear_qkv", 3 * hidden, hidden).view(heads, 3, hidden // heads, hidden)
        block.attn.c_attn.weight.copy_(qkv.transpose(0, 1).reshape(3 * hidden, hidden).t())
        block.attn.c_proj.weight.copy_(draw(f"{name}.self_attention.linear_proj", hidden, hidden, small).t())
        block.mlp.c_fc.weight.copy_(draw(f"{name}.mlp.linear_fc1", 4 * hidden, hidden).t())
        block.mlp.c_proj.weight.copy_(draw(f"{name}.mlp.linear_fc2", hidden, 4 * hidden, small).t())


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
        tokens = batch(self.shape, index)
        start = time.perf_counter()
        loss = self.contender.step(tokens, index)
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
    trainer = Trainer(Ours() if name == "ours" else HuggingFace())
    serve({"build": trainer.build, "step": trainer.step, "forget_peak": trainer.forget_peak, "memory": trainer.memory})


if __name__ == "__main__":
    main()
