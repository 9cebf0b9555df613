"""Files of texts and questions, their rows scored by a model over its data-parallel replicas, and metrics."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.inference.team import Team
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.utils.errors import DataError, NumericsError

Numbers = dict[str, float | int | None]

_PROGRESS_S = 10.0


# Files; error messages name the line


class LastWord(NamedTuple):
    """A text and its last word."""

    context: str
    word: str
    where: str


class Choices(NamedTuple):
    """A question with several answers."""

    context: str
    choices: tuple[str, ...]
    answer: int
    where: str


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise DataError(f"{path} is not UTF-8 text: {byte}") from None


def read_documents(path: str | Path, limit: int | None = None) -> list[str]:
    """Read each line's ``text`` of a .jsonl or .json file, any other file as one text."""
    if Path(path).suffix not in (".jsonl", ".json"):
        texts = [_read_text(path)]
    else:
        texts = [_string(row, "text", where) for where, row in read_objects(path, limit)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{path} has no text in it")
    return texts


def read_last_words(path: str | Path, limit: int | None = None) -> list[LastWord]:
    """Read texts and split off their last words. Raises DataError."""
    items = []
    for where, row in read_objects(path, limit):
        text = _string(row, "text", where).rstrip()
        context, _, word = text.rpartition(" ")
        if not context.strip() or not word:
            rule = "at least two words separated by spaces, the last of which is to be predicted"
            raise DataError(f"{where}: 'text' must have {rule}")
        items.append(LastWord(context, " " + word, where))
    return items


def read_choices(path: str | Path, limit: int | None = None) -> list[Choices]:
    """Read ``context``, ``choices`` and ``answer``. Raises DataError."""
    items = []
    for where, row in read_objects(path, limit):
        context, choices, answer = _string(row, "context", where), row.get("choices"), row.get("answer")
        are_texts = isinstance(choices, list) and all(isinstance(c, str) and c.strip() for c in choices)
        if not isinstance(choices, list) or not are_texts or len(choices) < 2:
            raise DataError(f"{where}: 'choices' must be a list of at least two texts, not {_show(choices)}")
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
            rule = f"the number of a choice, 0 to {len(choices) - 1}"
            raise DataError(f"{where}: 'answer' must be {rule}, not {_show(answer)}")
        items.append(Choices(context, tuple(choices), answer, where))
    return items


def read_objects(path: str | Path, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Return (place, object) of the first non-empty lines of a JSON lines file. Raises DataError."""
    objects: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        if limit is not None and len(objects) == limit:
            break
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f'{where}: must be a JSON object, such as {{"text": ...}}, not {_show(row)}')
        objects.append((where, row))
    if not objects:
        raise DataError(f"{path} has no line in it")
    return objects


def _string(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        names = ", ".join(f"'{name}'" for name in list(row)[:8]) or "nothing"
        has = "" if field in row else f" (the line has {names})"
        raise DataError(f"{where}: '{field}' must be a text, not {_show(value)}{has}")
    return value


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# Rows


class ScoredTokens(NamedTuple):
    """Tokens of one row: the model reads all but the last, and predicts all but the first."""

    tokens: Sequence[int] | np.ndarray  # the model reads all but the last
    first: int  # number of leading predictions that are not scored: ``tokens[first + 1:]`` are scored

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - 1 - self.first


def encoded(tokenizer: Tokenizer, texts: Sequence[str], where: str) -> list[list[int]]:
    """Encode texts. Raises DataError if none has a token."""
    sequences = [tokenizer.encode(text) for text in texts]
    if not any(sequences):
        asked = "is it the one that the model was trained with?"
        raise DataError(f"{where}: the tokenizer has no token for any of it: {asked}")
    return sequences


def front(tokenizer: Tokenizer) -> list[int]:
    """Return the unscored tokens before a text: BOS, else an end of document."""
    return list(tokenizer.begin) or [tokenizer.eod]


def windows(tokens: Sequence[int] | np.ndarray, length: int, stride: int, num_known: int = 1) -> Iterator[ScoredTokens]:
    """Yield rows of ``length`` predictions, ``stride`` apart, that score each token after ``num_known`` once."""
    scored, start = num_known - 1, 0  # the labels 1 to ``scored`` are done
    # with a stride below the length, what is scored after the first window has length - stride tokens of context
    while scored < len(tokens) - 1:
        stop = min(start + length, len(tokens) - 1)
        yield ScoredTokens(tokens[start : stop + 1], scored - start)
        scored, start = stop, start + stride


def continuation(tokenizer: Tokenizer, context: str, text: str, length: int, where: str) -> ScoredTokens:
    """Return a row in which ``text`` is scored. Raises DataError."""
    if not tokenizer.encode(text):  # nothing would be scored, or the context's last token
        problem = f"the tokenizer has no token for '{text[:40]}'"
        raise DataError(f"{where}: {problem}: leave the line out, or use the tokenizer of the training")
    # both are encoded together, as they would be in a corpus, and split where the encoding of the context alone ends;
    # trailing spaces of the context belong to the text
    kept = context.rstrip()
    tokens = tokenizer.encode(context + text)
    num_known = min(len(tokenizer.encode(kept)), len(tokens) - 1) if kept else 0
    before = list(tokenizer.begin) if num_known else front(tokenizer)
    num_scored = len(tokens) - num_known
    if num_scored > length:
        problem = f"'{text[:40]}...' has {num_scored} tokens, the model reads {length} at once"
        raise DataError(f"{where}: {problem}: shorten it")
    tokens = [*before, *tokens][-(length + 1) :]  # a context that is too long is cut on the left
    return ScoredTokens(tokens, len(tokens) - 1 - num_scored)


# Scores


class RowScore(NamedTuple):
    """Sum of a row's losses (nats), their number, and how many tokens are ranked first."""

    loss: float
    num_tokens: int
    hits: int


def run_batches(number: int, run: Callable[[int], Any], team: Team) -> list[Any]:
    """Run batches, shared by the replicas, and return the results (JSON) on every rank. Collective."""
    own_results, began = [], time.monotonic()
    reported = began
    for index in range(team.dp_rank, number, team.dp_size):
        own_results.append([index, run(index)])
        now, done = time.monotonic(), index + 1
        if now - reported >= _PROGRESS_S and done < number and sys.stderr is not None:
            reported = now
            left = (now - began) / done * (number - done)
            team.say(f"{done:,} of {number:,} batches, about {left:.0f} s left")
    results = team.gather(own_results if team.is_first_of_replica else [])
    by_index = {index: result for of_rank in results for index, result in of_rank}
    return [by_index[index] for index in range(number)]


def score_rows(model: GPTModel, rows: Sequence[ScoredTokens], batch_size: int, team: Team) -> list[RowScore]:
    """Return the score of every row on every rank. Collective. Raises NumericsError."""
    # batches are formed independently of the layout, rows of similar length together: in any layout every number is
    # that of a single process, up to rounding
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    results = run_batches(len(batches), lambda index: _score_batch(model, [rows[i] for i in batches[index]]), team)
    scores: list[RowScore] = [RowScore(0.0, 0, 0)] * len(rows)
    for batch, result in zip(batches, results, strict=True):
        for i, score in zip(batch, result, strict=True):
            scores[i] = RowScore(*score)
    bad = next((i for i, score in enumerate(scores) if score.loss != score.loss or score.loss == math.inf), None)
    if bad is not None:
        why = "the weights are damaged, or overflow; try --dtype float32"
        raise NumericsError(f"the loss of row {bad} is not finite: {why}")
    return scores


def _score_batch(model: GPTModel, rows: Sequence[ScoredTokens]) -> list[list[float]]:
    shape = len(rows), max(len(row.tokens) for row in rows) - 1
    # padding comes after the row, so no real token attends to it
    tokens, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens) - 1], labels[i, : len(row.tokens) - 1] = row.tokens[:-1], row.tokens[1:]
    device = model.embedding.word_embeddings.weight.device
    ids, wanted = torch.from_numpy(tokens).to(device), torch.from_numpy(labels).to(device)
    losses, hits = model.score(ids, wanted, ForwardContext(AttentionMask()))  # [b, s]
    losses, hits = losses.double().cpu(), hits.cpu()
    scored = []
    for i, row in enumerate(rows):
        part = slice(row.first, len(row.tokens) - 1)
        scored.append([float(losses[i, part].sum()), row.num_scored, int(hits[i, part].sum())])
    return scored


# Metrics; standard errors are of independent units: windows of a text, whose tokens depend on their neighbours, or
# questions


def perplexity(scores: Sequence[RowScore], num_bytes: int | None) -> Numbers:
    """Compute the perplexity of a text, of ``num_bytes`` bytes if all of it was scored."""
    total, count = math.fsum(s.loss for s in scores), sum(s.num_tokens for s in scores)
    mean = total / count
    error = clustered_stderr([s.loss for s in scores], [s.num_tokens for s in scores])
    return {
        "loss": mean, "loss_stderr": error, "perplexity": safe_exp(mean),
        "bits_per_byte": total / math.log(2) / num_bytes if num_bytes else None,
        "accuracy": sum(s.hits for s in scores) / count, "tokens": count, "bytes": num_bytes, "windows": len(scores),
    }  # fmt: skip


def last_word(scores: Sequence[RowScore]) -> Numbers:
    """Compute accuracy and perplexity per word, not per token."""
    right = [float(s.hits == s.num_tokens) for s in scores]
    losses = [s.loss for s in scores]
    mean = math.fsum(losses) / len(losses)
    return {
        "accuracy": sum(right) / len(right), "accuracy_stderr": stderr(right), "perplexity": safe_exp(mean),
        "loss": mean, "loss_stderr": stderr(losses), "items": len(scores), "tokens": sum(s.num_tokens for s in scores),
    }  # fmt: skip


def multiple_choice(items: Sequence[Choices], losses: Sequence[Sequence[float]]) -> Numbers:
    """Compute accuracy by the likeliest choice, and by the likeliest per byte (acc_norm)."""
    plain, normed = [], []
    for item, of_item in zip(items, losses, strict=True):
        per_byte = [loss / len(choice.encode()) for loss, choice in zip(of_item, item.choices, strict=True)]
        plain.append(float(of_item.index(min(of_item)) == item.answer))
        normed.append(float(per_byte.index(min(per_byte)) == item.answer))
    chance = math.fsum(1 / len(item.choices) for item in items) / len(items)
    return {
        "acc": sum(plain) / len(plain), "acc_stderr": stderr(plain), "acc_norm": sum(normed) / len(normed),
        "acc_norm_stderr": stderr(normed), "chance": chance, "items": len(items),
    }  # fmt: skip


def stderr(values: Sequence[float]) -> float | None:
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def clustered_stderr(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return the standard error of the mean per token."""
    # with S_w the loss of piece w, n_w its tokens, W pieces, N tokens, m = sum S / N:
    # sqrt(W / (W - 1) * sum_w (S_w - n_w m)^2) / N
    pieces, total = len(sums), sum(counts)
    if pieces < 2:
        return None
    mean = math.fsum(sums) / total
    squares = math.fsum((s - n * mean) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(pieces / (pieces - 1) * squares) / total


def safe_exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf
