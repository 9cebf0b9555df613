"""Fine-tuning of a classifier as a task of the training loop: data, model, loss, and the scores at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.config.schema import Config
from megatron_sp.data import classification
from megatron_sp.data.build import Datasets
from megatron_sp.data.classification import ClassificationDataset, Example, TextTable
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.models.classifier import NEW_PARAMETERS, BertClassifier
from megatron_sp.models.language_model import OnUnit
from megatron_sp.optim.weights import UnitWork
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents, micro_batch_context
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.tasks.gpt import tokenizer_provider
from megatron_sp.training.parts import Run, Task
from megatron_sp.training.setup import dtype_of
from megatron_sp.training.step import Loss, on_device
from megatron_sp.utils.errors import DiskError
from megatron_sp.utils.files import atomic_write_text

# classes up to which the log holds a confusion matrix; with more, predictions.tsv still has every prediction
_FEW_LABELS = 100


class Classification:
    """Fine-tuning of a classifier on a set of labelled texts.

    Raises:
        DataError: fewer than two labels, or a label in ``valid`` that is not in ``train``.
    """

    def __init__(self, table: TextTable, train: Sequence[Example], valid: Sequence[Example]) -> None:
        self.train, self.valid, self.labels = train, valid, classification.labels_of(table, train)
        classification.check_labels(self.labels, valid)

    def fit(self, config: Config, world_size: int) -> None:
        """Set the global batch size, and as many validation batches as cover every example once."""
        batch = config.batch
        full = batch.global_batch_size or batch.micro_batch_size * config.parallel.dp_size(world_size)
        batch.global_batch_size, batch.eval_iters = full, -(-len(self.valid) // (batch.eval_global_batch_size or full))

    def task(self) -> Task:
        """Return the task for ``training.loop.pretrain``."""
        return Task(
            name="finetune_classifier", build_tokenizer=tokenizer_provider,
            build_datasets=self.build_datasets, build_model=self.build_model,
            loss=Loss(("loss",), loss_counts, loss_sums, causal=False, metrics=("accuracy",), of_tokens=False),
            new_parameters=NEW_PARAMETERS, finish=self.classify,
        )  # fmt: skip

    def build_datasets(self, config: Config, tokenizer: Tokenizer, num_samples: tuple[int, int, int]) -> Datasets:
        """Return data sets with all examples; ``num_samples`` is ignored, since epochs are cyclic."""
        length, size = config.model.seq_length, config.batch.eval_global_batch_size or config.batch.global_batch_size
        assert length and size
        return Datasets(
            ClassificationDataset(self.train, self.labels, tokenizer, length),
            ClassificationDataset(self.valid, self.labels, tokenizer, length, multiple_of=size), None,
        )  # fmt: skip

    def build_model(self, config: Config, layout: ParallelContext, on_unit: OnUnit | None = None) -> nn.Module:
        return BertClassifier(
            config.model, config.kernels, num_classes=len(self.labels), seed=config.batch.seed, dtype=dtype_of(config),
            layout=layout, on_unit=on_unit,
        )  # fmt: skip

    def classify(self, run: Run) -> None:
        """Classify every validation example, log the scores, write ``predictions.tsv``. Collective."""
        context = run.context
        predicted = all_reduce(self._classified_here(run), context.groups.control).numpy()
        if context.launch.rank != 0:
            return
        true = np.array([self.labels.index(example.label) for example in self.valid])
        scored = classification.scores(predicted, true, self.labels, [example.group for example in self.valid])
        words = ", ".join(f"{name} {value:.4f}" for name, value in scored.items())
        context.console.line(f"{len(true)} validation examples: {words}")
        record: dict[str, Any] = {"step": run.state.progress.step, "examples": len(true), **scored}
        if len(self.labels) <= _FEW_LABELS:
            matrix = classification.confusion(predicted, true, len(self.labels))
            record |= {"labels": self.labels, "confusion": matrix.tolist()}
        run.metrics.write("classification", **record)
        pairs = enumerate(zip(predicted, true, strict=True))
        rows = [f"{i}\t{self.labels[p]}\t{self.labels[t]}" for i, (p, t) in pairs]
        path = context.run_dir / "predictions.tsv"
        try:
            atomic_write_text(path, "\n".join(["index\tpredicted\tlabel", *rows]) + "\n")
        except OSError as error:
            way_out = "free some space and run the same command again"
            raise DiskError(f"{path} cannot be written: {error.strerror}; {way_out}") from None

    @torch.no_grad()
    def _classified_here(self, run: Run) -> Tensor:
        # int64 [examples]: the predicted classes of the examples that this rank reports, 0 for all others
        classes = torch.zeros(len(self.valid), dtype=torch.int64)
        sizes, groups, dataset = run.plan.batches, run.context.groups, run.data.datasets.valid
        model, weights = run.parts.model, run.parts.weights
        assert isinstance(dataset, ClassificationDataset)
        num_micro_batches = sizes.evaluation // (sizes.micro_batch_size * sizes.dp_size)
        model.eval()
        ranks: Any = {"dp_rank": groups.dp_rank, "dp_size": groups.dp_size}
        with BatchLoader(dataset, micro_batch_size=sizes.micro_batch_size, **ranks) as loader:
            for start in range(0, len(dataset), sizes.evaluation):
                run.context.watchdog.beat(f"classification, example {start}")
                batches = loader.step(start, num_micro_batches)
                weights.start_step(len(batches), model.unit_order(backward=False))  # type: ignore[operator]
                events = UnitWork(weights, None)
                for batch in batches:
                    real, moved = batch["weight"] > 0, on_device(batch, groups.device)
                    kernel = run.attention.kernel.name
                    state = micro_batch_context(moved, seed=0, step=0, drops=False, kernel=kernel, causal=False)
                    inputs = (moved[name] for name in ("tokens", "types", "label", "weight"))
                    logits = model(*inputs, state, events).logits
                    if logits is not None and groups.tp_rank == 0:  # on the one cp and sp rank that has [CLS]
                        classes[batch["sample_ids"][real]] = logits.argmax(1).cpu()[real]
        return classes


def loss_counts(batch: MicroBatch) -> list[Tensor]:
    # the number of examples; without gradients twice, for the hits
    return [batch["weight"].sum()] * (1 if torch.is_grad_enabled() else 2)


def loss_sums(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]:
    outputs = model(batch["tokens"], batch["types"], batch["label"], batch["weight"], context, events)
    return [outputs.sum] if torch.is_grad_enabled() else [outputs.sum, outputs.hits]
