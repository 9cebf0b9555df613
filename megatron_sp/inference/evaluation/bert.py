"""Evaluation of BERT: masked tokens of a data set as in training, and the pseudo-perplexity of texts.

Pseudo-perplexity (Salazar et al. 2020, arXiv:1910.14659) masks the tokens of a text one at a time, and is the
exponential of the mean loss of the masked tokens: a text of n tokens takes n rows. All evaluations are collective.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.config.schema import Config
from megatron_sp.data.bert_dataset import BERTDataset, BERTOptions
from megatron_sp.data.gpt_dataset import split_bounds
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.data.tokenizers.tokenizer import special_tokens
from megatron_sp.inference.evaluation.gpt import PARTS, Reading
from megatron_sp.inference.evaluation.items import Numbers, clustered_stderr, read_documents, safe_exp
from megatron_sp.inference.evaluation.scoring import encoded, run_batches
from megatron_sp.inference.team import Team
from megatron_sp.models.bert import BertModel
from megatron_sp.parallel.forward_context import MicroBatch, micro_batch_context
from megatron_sp.utils.errors import NumericsError

Arrays = dict[str, np.ndarray]


class BertEvaluation:
    """Evaluations of a BERT with its tokenizer, on every rank of a team."""

    def __init__(self, model: BertModel, tokenizer: Tokenizer, config: Config, reading: Reading, team: Team) -> None:
        self.model, self.tokenizer, self.config, self.reading, self.team = model, tokenizer, config, reading, team

    def of_data(self, prefix: str | Path, split: str | None, part: str) -> Numbers:
        """Evaluate masked tokens and sentence order in one pass over a data set of sentences; the masking depends on the run's seed.

        Args:
            split: weights of the parts, as in training; None: use the whole data set.
        """
        with self.team.agree():
            dataset = self._dataset(prefix, split, part)
            number = len(dataset) if self.reading.limit is None else min(len(dataset), self.reading.limit)
        return self._measure(number, dataset.__getitem__, "perplexity", order=self.model.config.has_order_head)

    def _dataset(self, prefix: str | Path, split: str | None, part: str) -> BERTDataset:
        data, model = self.config.data, self.config.model
        indexed = IndexedDataset(prefix)
        documents = indexed.document_index.size - 1
        bounds = (0, documents) if split is None else split_bounds(split, documents)[PARTS.index(part)]
        options = BERTOptions(
            self.reading.length, self.config.batch.seed, data.mask_prob, data.short_seq_prob, binary_head=model.has_order_head,
            pack=data.bert_pack_sequences,
        )  # fmt: skip
        return BERTDataset(
            indexed, bounds, options, num_samples=None, tokenizer=self.tokenizer, vocab_size=model.vocab_size, name=part
        )  # fmt: skip

    def of_text(self, path: str | Path) -> Numbers:
        """Compute the pseudo-perplexity of texts; a text that is too long is split into pieces that are read separately."""
        with self.team.agree():
            special, room = special_tokens(self.tokenizer), self.reading.length - 2
            texts = encoded(self.tokenizer, read_documents(path, self.reading.limit), str(path))
            pieces = [ids[start : start + room] for ids in texts for start in range(0, len(ids), room)]
            places = [(piece, at) for piece in pieces for at in range(len(piece))]

        def hidden(index: int) -> Arrays:
            piece, at = places[index]
            ids = np.array([special.cls, *piece, special.sep] + [special.pad] * (room - len(piece)), np.int64)
            mask = np.zeros(len(ids), np.float32)
            mask[at + 1] = 1.0
            seen = ids.copy()
            seen[at + 1] = special.mask
            length = np.array(len(piece) + 2, np.int64)
            return {"tokens": seen, "types": np.zeros_like(ids), "labels": ids, "loss_mask": mask, "length": length}

        return self._measure(len(places), hidden, "pseudo_perplexity", order=False)

    def _measure(self, number: int, sample: Callable[[int], Arrays], name: str, *, order: bool) -> Numbers:
        size = self.reading.batch_size
        results = run_batches(
            -(-number // size),
            lambda i: self._batch([sample(k) for k in range(i * size, min(number, (i + 1) * size))]),
            self.team,
        )
        sums = [sum(column) for column in zip(*results, strict=True)]
        loss, count, hits = sums[:3]
        if not loss < float("inf"):
            raise NumericsError("the loss is not finite: the weights are damaged, or overflow; try --dtype float32")
        numbers: Numbers = {
            "loss": loss / count, "loss_stderr": clustered_stderr([r[0] for r in results], [r[1] for r in results]),
            name: safe_exp(loss / count), "accuracy": hits / count, "tokens": int(count), "rows": number,
        }  # fmt: skip
        if order:
            numbers |= {"order_loss": sums[3] / number, "order_accuracy": sums[4] / number}
        return numbers

    @torch.no_grad()
    def _batch(self, samples: list[Arrays]) -> list[float]:
        """Return [loss, masked tokens, hits, order loss, order hits], summed over the samples, the same on every tp, sp and cp rank."""
        batch: MicroBatch = {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}
        order = batch.get("order", torch.zeros(len(samples), dtype=torch.int64))
        counted = float(batch["loss_mask"].sum())
        device = self.team.device
        batch = {name: t if name in ("documents", "length") else t.to(device) for name, t in batch.items()}
        context = micro_batch_context(batch, seed=0, step=0, drops=False, kernel="sdpa", causal=False)
        output = self.model(
            batch["tokens"], batch.get("types"), batch["labels"], batch["loss_mask"], order.to(device), context
        )  # fmt: skip
        terms = [output.masked, output.masked_hits, output.order, output.order_hits]
        sums = torch.stack(
            [torch.zeros((), dtype=torch.float64, device=device) if t is None else t.double() for t in terms]
        )
        layout = self.model.layout
        loss, hits, order_loss, order_hits = all_reduce(all_reduce(sums, layout.sp.group), layout.cp.group).tolist()
        return [loss, counted, hits, order_loss, order_hits]
