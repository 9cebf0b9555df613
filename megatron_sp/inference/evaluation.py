"""Evaluations of GPT and BERT on files. All are collective: every rank gets the same numbers.

Pseudo-perplexity (Salazar et al. 2020, arXiv:1910.14659) masks the tokens of a text one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.config.schema import Config
from megatron_sp.data.bert_dataset import BERTDataset, BERTOptions
from megatron_sp.data.gpt_dataset import split_bounds
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.data.tokenizers.tokenizer import special_tokens
from megatron_sp.inference import scoring
from megatron_sp.inference.scoring import Numbers, RowScore, ScoredTokens, run_batches, windows
from megatron_sp.inference.team import Team
from megatron_sp.models.bert import BertModel
from megatron_sp.models.gpt import GPTModel
from megatron_sp.parallel.forward_context import MicroBatch, micro_batch_context
from megatron_sp.utils.errors import DataError, NumericsError

PARTS = ("train", "valid", "test")
Arrays = dict[str, np.ndarray]


class Reading(NamedTuple):
    """Options for reading texts."""

    length: int  # tokens per window
    stride: int  # offset in tokens between consecutive windows
    batch_size: int  # rows per forward pass
    limit: int | None  # use only so many documents or items, from the first; None: all


class GPTEvaluation:
    """Evaluations of a GPT with its tokenizer."""

    def __init__(self, model: GPTModel, tokenizer: Tokenizer, reading: Reading, team: Team) -> None:
        self.model, self.tokenizer, self.reading, self.team = model, tokenizer, reading, team

    def of_data(self, prefix: str | Path, split: str | None, part: str) -> Numbers:
        """Compute the loss on a data set, with documents concatenated as in training."""
        with self.team.agree():
            indexed = IndexedDataset(prefix)
            first, last = (0, len(indexed)) if split is None else split_bounds(split, len(indexed))[PARTS.index(part)]
            last = last if self.reading.limit is None else min(last, first + self.reading.limit)
            pieces, vocab_size = [np.zeros(0, np.int64)], self.model.config.vocab_size or 0
            for i in range(first, last):
                pieces.append(indexed.get(i))
                indexed.check_tokens(pieces[-1], i, 0, vocab_size)
            tokens = np.concatenate(pieces)
            if len(tokens) < 2:
                which = "" if split is None else f", {part} part of --split {split}"
                few = f"{len(tokens)} tokens are too few to predict one from another"
                raise DataError(f"{indexed.prefix}{which}: {few}")
            rows = list(windows(tokens, self.reading.length, self.reading.stride))
        return scoring.perplexity(self._score(rows), None)

    def of_text(self, path: str | Path) -> Numbers:
        """Compute the loss on separate texts, whose ends are not scored."""
        length, stride = self.reading.length, self.reading.stride
        with self.team.agree():
            texts, before = scoring.read_documents(path, self.reading.limit), scoring.front(self.tokenizer)
            rows: list[ScoredTokens] = []
            for ids in scoring.encoded(self.tokenizer, texts, str(path)):
                rows += windows([*before, *ids], length, stride, len(before))
        return scoring.perplexity(self._score(rows), sum(len(text.encode("utf-8", "replace")) for text in texts))

    def of_last_words(self, path: str | Path) -> Numbers:
        """Evaluate whether the model predicts the last word of each text (LAMBADA, arXiv:1606.06031)."""
        with self.team.agree():
            items = scoring.read_last_words(path, self.reading.limit)
            rows = [self._continuation(item.context, item.word, item.where) for item in items]
        return scoring.last_word(self._score(rows))

    def of_choices(self, path: str | Path) -> Numbers:
        """Evaluate multiple choice by the likeliest continuation."""
        rows = []
        with self.team.agree():
            items = scoring.read_choices(path, self.reading.limit)
            for item in items:
                for choice in item.choices:
                    # a space between them, unless context or choice has white space there
                    joins = not item.context or item.context[-1].isspace() or choice[0].isspace()
                    rows.append(self._continuation(item.context, choice if joins else " " + choice, item.where))
        scores = iter(self._score(rows))
        return scoring.multiple_choice(items, [[next(scores).loss for _ in item.choices] for item in items])

    def _continuation(self, context: str, text: str, where: str) -> ScoredTokens:
        return scoring.continuation(self.tokenizer, context, text, self.reading.length, where)

    def _score(self, rows: list[ScoredTokens]) -> list[RowScore]:
        return scoring.score_rows(self.model, rows, self.reading.batch_size, self.team)


class BertEvaluation:
    """Evaluations of a BERT with its tokenizer."""

    def __init__(self, model: BertModel, tokenizer: Tokenizer, config: Config, reading: Reading, team: Team) -> None:
        self.model, self.tokenizer, self.config, self.reading, self.team = model, tokenizer, config, reading, team

    def of_data(self, prefix: str | Path, split: str | None, part: str) -> Numbers:
        """Evaluate masked tokens (drawn by the run's seed) and sentence order."""
        data, model = self.config.data, self.config.model
        with self.team.agree():
            indexed = IndexedDataset(prefix)
            documents = indexed.document_index.size - 1
            bounds = (0, documents) if split is None else split_bounds(split, documents)[PARTS.index(part)]
            options = BERTOptions(
                self.reading.length, self.config.batch.seed, data.mask_prob, data.short_seq_prob,
                binary_head=model.has_order_head, pack=data.bert_pack_sequences,
            )  # fmt: skip
            dataset = BERTDataset(
                indexed, bounds, options, num_samples=None, tokenizer=self.tokenizer, vocab_size=model.vocab_size,
                name=part,
            )  # fmt: skip
            number = len(dataset) if self.reading.limit is None else min(len(dataset), self.reading.limit)
        return self._measure(number, dataset.__getitem__, "perplexity", order=self.model.config.has_order_head)

    def of_text(self, path: str | Path) -> Numbers:
        """Compute the pseudo-perplexity of texts, in pieces that the model can read."""
        with self.team.agree():
            special, room = special_tokens(self.tokenizer), self.reading.length - 2
            texts = scoring.encoded(self.tokenizer, scoring.read_documents(path, self.reading.limit), str(path))
            pieces = [ids[start : start + room] for ids in texts for start in range(0, len(ids), room)]
            places = [(piece, place) for piece in pieces for place in range(len(piece))]

        def hidden(index: int) -> Arrays:
            piece, place = places[index]
            ids = np.array([special.cls, *piece, special.sep] + [special.pad] * (room - len(piece)), np.int64)
            mask = np.zeros(len(ids), np.float32)
            mask[place + 1] = 1.0
            seen = ids.copy()
            seen[place + 1] = special.mask
            length = np.array(len(piece) + 2, np.int64)
            return {"tokens": seen, "types": np.zeros_like(ids), "labels": ids, "loss_mask": mask, "length": length}

        return self._measure(len(places), hidden, "pseudo_perplexity", order=False)

    def _measure(self, number: int, sample: Callable[[int], Arrays], name: str, *, order: bool) -> Numbers:
        size = self.reading.batch_size
        batch = lambda i: self._batch([sample(k) for k in range(i * size, min(number, (i + 1) * size))])
        results = run_batches(-(-number // size), batch, self.team)
        sums = [sum(column) for column in zip(*results, strict=True)]
        loss, count, hits = sums[:3]
        if not loss < float("inf"):
            raise NumericsError("the loss is not finite: the weights are damaged, or overflow; try --dtype float32")
        error = scoring.clustered_stderr([row[0] for row in results], [row[1] for row in results])
        numbers: Numbers = {
            "loss": loss / count, "loss_stderr": error, name: scoring.safe_exp(loss / count), "accuracy": hits / count,
            "tokens": int(count), "rows": number,
        }  # fmt: skip
        if order:
            numbers |= {"order_loss": sums[3] / number, "order_accuracy": sums[4] / number}
        return numbers

    @torch.no_grad()
    def _batch(self, samples: list[Arrays]) -> list[float]:
        # [loss, masked tokens, hits, order loss, order hits], summed over the samples, the same on tp, sp and cp ranks
        batch: MicroBatch = {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in samples[0]}
        order = batch.get("order", torch.zeros(len(samples), dtype=torch.int64))
        counted = float(batch["loss_mask"].sum())
        device = self.team.device
        batch = {name: t if name in ("documents", "length") else t.to(device) for name, t in batch.items()}
        context = micro_batch_context(batch, seed=0, step=0, drops=False, kernel="sdpa", causal=False)
        tokens, types = batch["tokens"], batch.get("types")
        output = self.model(tokens, types, batch["labels"], batch["loss_mask"], order.to(device), context)
        terms = [output.masked, output.masked_hits, output.order, output.order_hits]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([zero if term is None else term.double() for term in terms])
        layout = self.model.layout
        loss, hits, order_loss, order_hits = all_reduce(all_reduce(sums, layout.sp.group), layout.cp.group).tolist()
        return [loss, counted, hits, order_loss, order_hits]
