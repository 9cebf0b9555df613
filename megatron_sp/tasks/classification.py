"""Fine-tuning of a classifier as a task of the training loop: data, model, loss, and the scores at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.config.schema import Config
from megatron_sp.data.build import Datasets
from megatron_sp.data.classification import (
    ClassificationDataset,
    Example,
    TextTable,
    check_labels,
    confusion,
    labels_of,
    scores,
)
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.models.classifier import NEW_PARAMETERS, BertClassifier
from megatron_sp.models.language_model import OnUnit
from megatron_sp.optim.weights import UnitWork
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents, micro_batch_context
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.tasks.gpt import tokenizer_provider
from megatron_sp.training.run import Run, Task
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
        self.train, self.valid, self.labels = train, valid, labels_of(table, train)
        check_labels(self.labels, valid)

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
        """Build the classifier of the configuration."""
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
        found = scores(predicted, true, self.labels, [example.group for example in self.valid])
        context.console.line(
            f"{len(true)} validation examples: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        )
        confused = {"labels": self.labels, "confusion": confusion(predicted, true, len(self.labels)).tolist()}
        few = len(self.labels) <= _FEW_LABELS
        run.metrics.write(
            "classification", step=run.state.progress.step, examples=len(true), **found, **(confused if few else {})
        )
        rows = [
            f"{i}\t{self.labels[p]}\t{self.labels[t]}" for i, (p, t) in enumerate(zip(predicted, true, strict=True))
        ]
        path = context.run_dir / "predictions.tsv"
        try:
            atomic_write_text(path, "\n".join(["index\tpredicted\tlabel", *rows]) + "\n")
        except OSError as error:
            raise DiskError(
                f"{path} cannot be written: {error.strerror}; free some space and run the same command again"
            ) from None

    @torch.no_grad()
    def _classified_here(self, run: Run) -> Tensor:
        # int64 [examples]: the predicted classes of the examples that this rank reports, 0 for all others
        found = torch.zeros(len(self.valid), dtype=torch.int64)
        sizes, groups, dataset = run.plan.batches, run.context.groups, run.data.datasets.valid
        model, weights = run.parts.model, run.parts.weights
        assert isinstance(dataset, ClassificationDataset)
        each = sizes.evaluation // (sizes.micro_batch_size * sizes.dp_size)
        model.eval()
        with BatchLoader(
            dataset, micro_batch_size=sizes.micro_batch_size, dp_rank=groups.dp_rank, dp_size=groups.dp_size
        ) as loader:
            for start in range(0, len(dataset), sizes.evaluation):
                run.context.watchdog.beat(f"classification, example {start}")
                batches = loader.step(start, each)
                weights.start_step(len(batches), model.unit_order(backward=False))  # type: ignore[operator]
                events = UnitWork(weights, None)
                for batch in batches:
                    real = batch["weight"] > 0
                    logits = _logits(run, on_device(batch, groups.device), events)
                    if logits is not None and groups.tp_rank == 0:  # on the one cp and sp rank that has [CLS]
                        found[batch["sample_ids"][real]] = logits.argmax(1).cpu()[real]
        return found


def _logits(run: Run, batch: MicroBatch, events: UnitEvents) -> Tensor | None:
    context = micro_batch_context(batch, seed=0, step=0, drops=False, kernel=run.attention.kernel.name, causal=False)
    logits: Tensor | None = run.parts.model(
        batch["tokens"], batch["types"], batch["label"], batch["weight"], context, events
    ).logits
    return logits


def loss_counts(batch: MicroBatch) -> list[Tensor]:
    """Return the number of examples; without gradients twice, for the hits."""
    return [batch["weight"].sum()] * (1 if torch.is_grad_enabled() else 2)


def loss_sums(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]:
    """Return the sum of the cross entropies; without gradients also the number of hits."""
    outputs = model(batch["tokens"], batch["types"], batch["label"], batch["weight"], context, events)
    return [outputs.sum] if torch.is_grad_enabled() else [outputs.sum, outputs.hits]
