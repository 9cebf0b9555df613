"""Tiny GPTs of every kind that text is generated with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.inference.decoder import Decoder
from megatron_sp.models.gpt import GPTModel

VOCAB = 61
MODELS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rope": {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True},
    "grouped": {"num_query_groups": 2, "position_embedding_type": "rope", "rotary_percent": 0.5},
    "qk_norm": {"qk_layernorm": True, "untie_embeddings_and_output_weights": True},
    "window": {"num_query_groups": 2, "position_embedding_type": "rope", "window_size": 4},
    "parallel": {"position_embedding_type": "rope", "rotary_percent": 0.34, "use_parallel_residual": True},
    "experts": {"num_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 12},
    "one_group_no_positions": {"num_query_groups": 1, "position_embedding_type": "none", "disable_bias_linear": True},
}


def build(name: str = "learned", dtype: torch.dtype = torch.float64, **changes: object) -> GPTModel:
    shape = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 20, "vocab_size": VOCAB, "init_method_std": 0.3}
    config = ModelConfig(**{**shape, **MODELS[name], **changes})
    return GPTModel(config, KernelConfig(), seed=5, dtype=dtype)


class WithoutCache(Decoder):
    """One row; every token runs all positions again."""

    def reserve(self, length: int) -> None: ...

    def read(self, tokens: list[int], keep: bool = True, everywhere: bool = False) -> Tensor:
        self._read = tokens
        self.again()
        return super().read(tokens, keep=False)

    def again(self) -> None:
        self._tokens = list(self._read)

    def step(self, tokens: list[int]) -> Tensor:
        self._tokens += tokens
        return super().read(self._tokens, keep=False)

    def drop(self, row: int) -> None: ...
