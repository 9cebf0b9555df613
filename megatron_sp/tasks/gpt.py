"""GPT pretraining: next-token prediction."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from megatron_sp.config.schema import Config
from megatron_sp.data.build import Datasets, Evaluation, build_datasets
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import OnUnit
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.training.loop import Task
from megatron_sp.training.setup import dtype_of
from megatron_sp.training.step import Loss


def tokenizer_provider(config: Config) -> Tokenizer:
    return build_tokenizer(config.data, config.model.vocab_size)


def dataset_provider(config: Config, tokenizer: Tokenizer, num_samples: tuple[int, int, int]) -> Datasets:
    assert config.model.seq_length
    return build_datasets(
        config.data, seq_length=config.model.seq_length, seed=config.batch.seed, tokenizer=tokenizer,
        vocab_size=config.model.vocab_size, num_samples=num_samples,
        evaluation=Evaluation(config.batch.eval_iters, num_samples[2], not config.says("batch", "eval_iters")),
    )  # fmt: skip


def model_provider(config: Config, layout: ParallelContext, on_unit: OnUnit | None = None) -> nn.Module:
    """Build the GPT of the configuration; with ``on_unit`` it is sharded unit by unit."""
    return GPTModel(
        config.model, config.kernels, seed=config.batch.seed, dtype=dtype_of(config), layout=layout, on_unit=on_unit
    )


def loss_counts(batch: MicroBatch) -> list[Tensor]:
    # the divisor of the sum of token losses
    return [batch["loss_mask"].sum(dtype=torch.float64)]


def loss_sums(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]:
    loss_sum, _ = model(batch["tokens"], batch["labels"], batch["loss_mask"], context, events)
    return [loss_sum]


def stage_output(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> Tensor:
    return cast("GPTModel", model).hidden(batch["tokens"], context, events)


GPT = Task(
    name="pretrain_gpt", build_tokenizer=tokenizer_provider, build_datasets=dataset_provider,
    build_model=model_provider, loss=Loss(names=("lm loss",), counts=loss_counts, sums=loss_sums, hidden=stage_output),
)  # fmt: skip
