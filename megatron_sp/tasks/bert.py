"""BERT pretraining: masked-language modelling and sentence-order prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from megatron_sp.data.build import Datasets, build_bert_datasets
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.models.bert import BertModel
from megatron_sp.models.language_model import OnUnit
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents
from megatron_sp.tasks.gpt import tokenizer_provider
from megatron_sp.training.loop import Task
from megatron_sp.training.setup import dtype_of
from megatron_sp.training.step import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron_sp.config.schema import Config
    from megatron_sp.parallel.parallel_context import ParallelContext


def dataset_provider(config: Config, tokenizer: Tokenizer, num_samples: tuple[int, int, int]) -> Datasets:
    assert config.model.seq_length
    return build_bert_datasets(
        config.data, seq_length=config.model.seq_length, seed=config.batch.seed, tokenizer=tokenizer,
        vocab_size=config.model.vocab_size, num_samples=num_samples, binary_head=config.model.has_order_head,
    )  # fmt: skip


def model_provider(config: Config, layout: ParallelContext, on_unit: OnUnit | None = None) -> nn.Module:
    return BertModel(
        config.model, config.kernels, seed=config.batch.seed, dtype=dtype_of(config), layout=layout, on_unit=on_unit
    )


def loss_counts(batch: MicroBatch) -> list[Tensor]:
    # the divisors of the sums: masked tokens, and sequences; without gradients each twice, for the hits
    counts = [batch["loss_mask"].sum(dtype=torch.float64)]
    if "order" in batch:
        counts.append(torch.full((), float(len(batch["order"])), device=counts[0].device))
    return counts if torch.is_grad_enabled() else counts * 2


def loss_sums(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]:
    losses = cast("BertModel", model)(
        batch["tokens"], batch["types"], batch["labels"], batch["loss_mask"], batch.get("order"), context, events
    )  # fmt: skip
    terms, hits = [losses.masked], [losses.masked_hits]
    if losses.order is not None and losses.order_hits is not None:
        terms.append(losses.order)
        hits.append(losses.order_hits)
    return terms if torch.is_grad_enabled() else terms + hits


def stage_output(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> Tensor:
    return cast("BertModel", model).hidden(batch["tokens"], context, events, batch["types"])


def bert_task(config: Config) -> Task:
    """Return the task of BERT pretraining: masked tokens, and sentence order unless --bert-no-binary-head is given."""
    names = ("lm loss", "order loss") if config.model.has_order_head else ("lm loss",)
    metrics = ("lm accuracy", "order accuracy")[: len(names)]
    return Task(
        name="pretrain_bert",
        build_tokenizer=tokenizer_provider,
        build_datasets=dataset_provider,
        build_model=model_provider,
        loss=Loss(names=names, counts=loss_counts, sums=loss_sums, causal=False, metrics=metrics, hidden=stage_output),
        of_model=bert_task,
    )
