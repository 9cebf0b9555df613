"""Scoring of rows in batches, distributed over the data-parallel replicas of a model.

Batches are formed independently of the layout: longest rows first, so that the rows of a batch have similar lengths.
Replica r of the model (dp) takes every dp-th batch; within a replica the tp and sp ranks work on it together. So in any
layout every number equals that of a single process, up to rounding.

A row has at most one more token than the model reads at once: all but the last are its input, all but the first its
labels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.team import Team
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.utils.errors import DataError, NumericsError


class RowScore(NamedTuple):
    """Score of a row: sum of the losses of its scored tokens (nats), their number, and how many of them the model ranks first."""

    loss: float
    num_tokens: int
    hits: int


class Progress:
    """Progress report, a line from time to time through ``say``."""

    def __init__(self, total: int, what: str, say: Callable[[str], None], every_s: float = 10.0) -> None:
        self.total, self.what, self.say, self.every_s = total, what, say, every_s
        self.began = self.told = time.monotonic()

    def at(self, done: int) -> None:
        """Report progress, at most once in an interval."""
        now = time.monotonic()
        if now - self.told >= self.every_s and done < self.total:
            self.told = now
            left = (now - self.began) / done * (self.total - done)
            self.say(f"{done:,} of {self.total:,} {self.what}, about {left:.0f} s left")


def run_batches(number: int, run: Callable[[int], Any], team: Team) -> list[Any]:
    """Return the results of batches 0 to ``number - 1`` on every rank, passed as JSON. Collective.

    Args:
        run: computes one batch, together with the other tp and sp ranks.
    """
    progress = Progress(number, "batches", team.say if sys.stderr is not None else lambda line: None)
    own_results = {}
    for index in range(team.dp_rank, number, team.dp_size):
        own_results[index] = run(index)
        progress.at(index + 1)
    all_results = team.gather(
        [[index, result] for index, result in own_results.items()] if team.is_first_of_replica else []
    )
    by_index = {index: result for of_rank in all_results for index, result in of_rank}
    return [by_index[index] for index in range(number)]


def score_rows(model: GPTModel, rows: Sequence[ScoredTokens], batch_size: int, team: Team) -> list[RowScore]:
    """Return the score of every row, in order, on every rank. Collective.

    Raises:
        NumericsError: a loss is not finite.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    results = run_batches(len(batches), lambda index: _score_batch(model, [rows[i] for i in batches[index]]), team)
    scores: list[RowScore] = [RowScore(0.0, 0, 0)] * len(rows)
    for batch, result in zip(batches, results, strict=True):
        for i, score in zip(batch, result, strict=True):
            scores[i] = RowScore(*score)
    bad = next((i for i, score in enumerate(scores) if score.loss != score.loss or score.loss == float("inf")), None)
    if bad is not None:
        raise NumericsError(
            f"the loss of row {bad} is not finite: the weights are damaged, or overflow; try --dtype float32"
        )
    return scores


def _score_batch(model: GPTModel, rows: Sequence[ScoredTokens]) -> list[list[float]]:
    longest = max(len(row.tokens) for row in rows) - 1
    tokens, labels = (
        np.zeros((len(rows), longest), np.int64) for _ in range(2)
    )  # padding comes after the row, so no real token attends to it
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens) - 1], labels[i, : len(row.tokens) - 1] = row.tokens[:-1], row.tokens[1:]
    device = model.embedding.word_embeddings.weight.device
    losses, hits = model.score(
        torch.from_numpy(tokens).to(device), torch.from_numpy(labels).to(device), ForwardContext(AttentionMask())
    )  # [b, s]
    losses, hits = losses.double().cpu(), hits.cpu()
    scored = []
    for i, row in enumerate(rows):
        part = slice(row.first, len(row.tokens) - 1)
        scored.append([float(losses[i, part].sum()), row.num_scored, int(hits[i, part].sum())])
    return scored


class ScoredTokens(NamedTuple):
    """Tokens of one row of a forward pass."""

    tokens: Sequence[int] | np.ndarray  # the model reads all but the last
    first: int  # number of leading predictions that are not scored: ``tokens[first + 1:]`` are scored

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - 1 - self.first


def encoded(tokenizer: Tokenizer, texts: Sequence[str], where: str) -> list[list[int]]:
    """Encode texts. Raises DataError if there are no tokens at all, as some tokenizers drop what they do not know."""
    sequences = [tokenizer.encode(text) for text in texts]
    if not any(sequences):
        raise DataError(
            f"{where}: the tokenizer has no token for any of it: is it the one that the model was trained with?"
        )
    return sequences


def front(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens before a text, which are not scored: those with which its texts begin, else the one that ends documents."""
    return list(tokenizer.begin) or [tokenizer.eod]


def windows(tokens: Sequence[int] | np.ndarray, length: int, stride: int, num_known: int = 1) -> Iterator[ScoredTokens]:
    """Yield rows in which every token but the first ``num_known`` is scored exactly once.

    Args:
        tokens: a document, or several concatenated.
        length: tokens that the model reads at once.
        stride: offset between consecutive windows; with ``length`` they do not overlap, with less every scored token
            after the first window has at least ``length - stride`` tokens of context.
    """
    scored, start = num_known - 1, 0  # the labels 1 to ``scored`` are done
    while scored < len(tokens) - 1:
        stop = min(start + length, len(tokens) - 1)
        yield ScoredTokens(tokens[start : stop + 1], scored - start)
        scored, start = stop, start + stride


def continuation(tokenizer: Tokenizer, context: str, text: str, length: int, where: str) -> ScoredTokens:
    """Return a row with the tokens of ``context + text``, of which those of ``text`` are scored.

    Both are encoded together, as they would be in a corpus, and split where the encoding of the context alone ends;
    trailing spaces of the context belong to the text. Before them stands what texts begin with (BOS); with nothing before
    the text, an end-of-document token. A context that is too long is truncated on the left.

    Args:
        length: tokens that the model reads at once.
    Raises:
        DataError: the text alone is too long, or has no tokens.
    """
    if not tokenizer.encode(text):  # nothing would be scored, or the context's last token
        raise DataError(
            f"{where}: the tokenizer has no token for '{text[:40]}': leave the line out, or use the tokenizer of the training"
        )
    kept = context.rstrip()
    whole = tokenizer.encode(context + text)
    known = min(len(tokenizer.encode(kept)), len(whole) - 1) if kept else 0
    before = list(tokenizer.begin) if known else front(tokenizer)
    whole, known = [*before, *whole], len(before) + known
    num_scored = len(whole) - known
    if num_scored > length:
        raise DataError(
            f"{where}: '{text[:40]}...' has {num_scored} tokens, the model reads {length} at once: shorten it"
        )
    whole = whole[-(length + 1) :]
    return ScoredTokens(whole, len(whole) - 1 - num_scored)
