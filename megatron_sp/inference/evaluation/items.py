"""Reading of files with texts and questions (error messages name the line), and metrics with standard errors.

Standard errors are based on independent units: windows of a text, not tokens (which depend on their neighbours), or
questions. With S_w the loss of window w, n_w its number of tokens, W the number of windows, N that of all tokens and m
= sum S / N the mean:

    stderr(m) = sqrt( W / (W - 1) * sum_w (S_w - n_w m)^2 ) / N
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.inference.evaluation.scoring import RowScore
from megatron_sp.utils.errors import DataError

Numbers = dict[str, float | int | None]


class LastWord(NamedTuple):
    """A text whose last word is to be predicted; the word has a leading space."""

    context: str
    word: str
    where: str


class Choices(NamedTuple):
    """A question with several answers, one of which is correct."""

    context: str
    choices: tuple[str, ...]
    answer: int
    where: str


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file. Raises DataError if it cannot be read or is not UTF-8."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}"
        ) from None


def read_documents(path: str | Path, limit: int | None = None) -> list[str]:
    """Read the texts of a file: the ``text`` field of each line of a .jsonl or .json file, else the whole file as one text.

    Raises:
        DataError: there is no text, or a line is not such an object; the message has its number.
    """
    if Path(path).suffix not in (".jsonl", ".json"):
        texts = [read_text(path)]
    else:
        texts = [_string(row, "text", where) for where, row in read_objects(path, limit)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{path} has no text in it")
    return texts


def read_last_words(path: str | Path, limit: int | None = None) -> list[LastWord]:
    """Read texts and split off their last words. Raises DataError if a line is not an object with a ``text`` of at least two words."""
    items = []
    for where, row in read_objects(path, limit):
        text = _string(row, "text", where).rstrip()
        context, _, word = text.rpartition(" ")
        if not context.strip() or not word:
            raise DataError(
                f"{where}: 'text' must have at least two words separated by spaces, the last of which is to be predicted"
            )
        items.append(LastWord(context, " " + word, where))
    return items


def read_choices(path: str | Path, limit: int | None = None) -> list[Choices]:
    """Read multiple-choice questions. Raises DataError if a line is not an object with ``context``, ``choices`` and ``answer``."""
    items = []
    for where, row in read_objects(path, limit):
        context, choices, answer = _string(row, "context", where), row.get("choices"), row.get("answer")
        if (
            not isinstance(choices, list)
            or len(choices) < 2
            or not all(isinstance(c, str) and c.strip() for c in choices)
        ):
            raise DataError(f"{where}: 'choices' must be a list of at least two texts, not {_show(choices)}")
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
            raise DataError(
                f"{where}: 'answer' must be the number of a choice, 0 to {len(choices) - 1}, not {_show(answer)}"
            )
        items.append(Choices(context, tuple(choices), answer, where))
    return items


def read_objects(path: str | Path, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Return (file and line, object) of each non-empty line of a JSON lines file, at most the first ``limit``.

    Raises:
        DataError: a line is not a JSON object, or there is none.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        if limit is not None and len(found) == limit:
            break
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f'{where}: must be a JSON object, such as {{"text": ...}}, not {_show(row)}')
        found.append((where, row))
    if not found:
        raise DataError(f"{path} has no line in it")
    return found


def _string(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        has = ", ".join(f"'{name}'" for name in list(row)[:8]) or "nothing"
        raise DataError(
            f"{where}: '{field}' must be a text, not {_show(value)}"
            + ("" if field in row else f" (the line has {has})")
        )
    return value


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def perplexity(scores: Sequence[RowScore], num_bytes: int | None) -> Numbers:
    """Compute the perplexity of a text, and related numbers.

    Args:
        scores: the scores of its windows.
        num_bytes: bytes of UTF-8, if all of the text was scored; None: no bits per byte.
    """
    total, count = math.fsum(s.loss for s in scores), sum(s.num_tokens for s in scores)
    mean = total / count
    error = clustered_stderr([s.loss for s in scores], [s.num_tokens for s in scores])
    return {
        "loss": mean, "loss_stderr": error, "perplexity": safe_exp(mean),
        "bits_per_byte": total / math.log(2) / num_bytes if num_bytes else None,
        "accuracy": sum(s.hits for s in scores) / count, "tokens": count, "bytes": num_bytes, "windows": len(scores),
    }  # fmt: skip


def last_word(scores: Sequence[RowScore]) -> Numbers:
    """Compute last-word accuracy (every token of the word is the likeliest) and perplexity, per word, not per token."""
    right = [float(s.hits == s.num_tokens) for s in scores]
    losses = [s.loss for s in scores]
    mean = math.fsum(losses) / len(losses)
    return {
        "accuracy": sum(right) / len(right), "accuracy_stderr": stderr(right), "perplexity": safe_exp(mean), "loss": mean,
        "loss_stderr": stderr(losses), "items": len(scores), "tokens": sum(s.num_tokens for s in scores),
    }  # fmt: skip


def multiple_choice(items: Sequence[Choices], losses: Sequence[Sequence[float]]) -> Numbers:
    """Compute accuracy by the likeliest choice (acc) and by the likeliest per byte (acc_norm); ties go to the first."""
    plain, normed = [], []
    for item, of_item in zip(items, losses, strict=True):
        per_byte = [loss / len(choice.encode()) for loss, choice in zip(of_item, item.choices, strict=True)]
        plain.append(float(of_item.index(min(of_item)) == item.answer))
        normed.append(float(per_byte.index(min(per_byte)) == item.answer))
    return {
        "acc": sum(plain) / len(plain), "acc_stderr": stderr(plain), "acc_norm": sum(normed) / len(normed),
        "acc_norm_stderr": stderr(normed), "chance": math.fsum(1 / len(item.choices) for item in items) / len(items), "items": len(items),
    }  # fmt: skip


def stderr(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of independent values; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def clustered_stderr(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return the standard error of the mean per token, where pieces are independent but not their tokens; None for a single piece."""
    pieces, total = len(sums), sum(counts)
    if pieces < 2:
        return None
    mean = math.fsum(sums) / total
    return (
        math.sqrt(pieces / (pieces - 1) * math.fsum((s - n * mean) ** 2 for s, n in zip(sums, counts, strict=True)))
        / total
    )


def safe_exp(value: float) -> float:
    """Return e to the value, or inf if that would overflow."""
    return math.exp(value) if value < 709 else math.inf
