"""Checkpoints of tiny models with their weights drawn, for the tools that use a model."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.models.experts import expert_biases
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.parallel.layers import shard_specs


def byte_config(seq_length: int = 24) -> Config:
    """A GPT of one layer that reads bytes; its vocabulary has two ids more than they need."""
    config = Config()
    config.model = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=seq_length, vocab_size=259, init_method_std=0.4
    )
    config.data.tokenizer_type = "ByteTokenizer"
    return config


def save(run: Path, config: Config, models: dict[int, LanguageModel]) -> None:
    """A run folder with a checkpoint of each model under its step, and optimizer state beside them."""
    checkpointer = Checkpointer(run)
    checkpointer.prepare()
    for step, model in models.items():
        tensors, specs = {}, shard_specs(model)
        for name, parameter in model.named_parameters():
            valid = parameter.detach()[: specs[name].shape[0]]
            for prefix in ("", "optimizer.exp_avg."):
                tensors[prefix + name] = GlobalTensor(tuple(valid.shape), valid.dtype, [Piece((0,) * valid.ndim, valid)])
        tensors |= {name: GlobalTensor.whole(bias) for name, bias in expert_biases(model).items()}
        checkpointer.save(step, tensors, {"consumed_samples": 0, "config": config.to_dict()})


def byte_run(folder: Path, seq_length: int = 24) -> tuple[Path, GPTModel]:
    """A run folder with the checkpoints of steps 1 and 2, and the model of step 2."""
    config = byte_config(seq_length)
    models = {step: GPTModel(config.model, config.kernels, seed=step, dtype=torch.float32) for step in (1, 2)}
    save(folder / "run", config, dict(models))
    return folder / "run", models[2]
