"""Evaluations of GPT on files. All are collective: every rank calls them and gets the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_sp.data.gpt_dataset import split_bounds
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.evaluation.items import (
    Numbers,
    RowScore,
    last_word,
    multiple_choice,
    perplexity,
    read_choices,
    read_documents,
    read_last_words,
)
from megatron_sp.inference.evaluation.scoring import ScoredTokens, continuation, encoded, front, score_rows, windows
from megatron_sp.inference.team import Team
from megatron_sp.models.gpt import GPTModel
from megatron_sp.utils.errors import DataError

PARTS = ("train", "valid", "test")


class Reading(NamedTuple):
    """Options for reading texts."""

    length: int  # tokens per window
    stride: int  # offset in tokens between consecutive windows
    batch_size: int  # rows per forward pass
    limit: int | None  # use only so many documents or items, from the first; None: all


class GPTEvaluation:
    """Evaluations of a GPT with its tokenizer, on every rank of a team."""

    def __init__(self, model: GPTModel, tokenizer: Tokenizer, reading: Reading, team: Team) -> None:
        self.model, self.tokenizer, self.reading, self.team = model, tokenizer, reading, team

    def of_data(self, prefix: str | Path, split: str | None, part: str) -> Numbers:
        """Compute the loss on a data set whose documents are concatenated as in training, with end-of-document tokens scored too.

        Args:
            split: weights of the parts, as in training; None: use the whole data set.
        Raises:
            DataError: a file cannot be read, a token is outside the vocabulary, or there are fewer than two tokens.
        """
        with self.team.agree():
            tokens = self._tokens_of(prefix, split, part)
            rows = list(windows(tokens, self.reading.length, self.reading.stride))
        return perplexity(self._score(rows), None)

    def _tokens_of(self, prefix: str | Path, split: str | None, part: str) -> np.ndarray:
        indexed = IndexedDataset(prefix)
        first, last = (0, len(indexed)) if split is None else split_bounds(split, len(indexed))[PARTS.index(part)]
        last = last if self.reading.limit is None else min(last, first + self.reading.limit)
        pieces, vocab_size = [], self.model.config.vocab_size or 0
        for i in range(first, last):
            pieces.append(indexed.get(i))
            indexed.check_tokens(pieces[-1], i, 0, vocab_size)
        tokens = np.concatenate([np.zeros(0, np.int64), *pieces])
        if len(tokens) < 2:
            which = "" if split is None else f", {part} part of --split {split}"
            raise DataError(f"{indexed.prefix}{which}: {len(tokens)} tokens are too few to predict one from another")
        return tokens

    def of_text(self, path: str | Path) -> Numbers:
        """Compute the loss on separate texts: each follows BOS or an end-of-document token, its own end is not scored."""
        with self.team.agree():
            texts, before = read_documents(path, self.reading.limit), front(self.tokenizer)
            rows = [
                row for ids in encoded(self.tokenizer, texts, str(path))
                for row in windows([*before, *ids], self.reading.length, self.reading.stride, len(before))
            ]  # fmt: skip
        return perplexity(self._score(rows), sum(len(text.encode("utf-8", "replace")) for text in texts))

    def of_last_words(self, path: str | Path) -> Numbers:
        """Evaluate whether the model predicts the last word of each text (LAMBADA, arXiv:1606.06031)."""
        with self.team.agree():
            items = read_last_words(path, self.reading.limit)
            rows = [self._continuation(item.context, item.word, item.where) for item in items]
        return last_word(self._score(rows))

    def of_choices(self, path: str | Path) -> Numbers:
        """Evaluate multiple choice by the likeliest continuation; a space is inserted unless context or choice has white space there."""
        with self.team.agree():
            items = read_choices(path, self.reading.limit)
            rows = [
                self._continuation(item.context, choice if _joins(item.context, choice) else " " + choice, item.where)
                for item in items for choice in item.choices
            ]  # fmt: skip
        scores = iter(self._score(rows))
        return multiple_choice(items, [[next(scores).loss for _ in item.choices] for item in items])

    def _continuation(self, context: str, text: str, where: str) -> ScoredTokens:
        return continuation(self.tokenizer, context, text, self.reading.length, where)

    def _score(self, rows: list[ScoredTokens]) -> list[RowScore]:
        return score_rows(self.model, rows, self.reading.batch_size, self.team)


def _joins(context: str, text: str) -> bool:
    return not context or context[-1].isspace() or text[0].isspace()
