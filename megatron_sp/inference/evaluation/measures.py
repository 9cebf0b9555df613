"""Metrics with standard errors, computed from scores.

Standard errors are based on independent units: windows of a text, not tokens (which depend on their neighbours), or
questions. With S_w the loss of window w, n_w its number of tokens, W the number of windows, N that of all tokens and m
= sum S / N the mean:

    stderr(m) = sqrt( W / (W - 1) * sum_w (S_w - n_w m)^2 ) / N
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_sp.inference.evaluation.items import Choices
from megatron_sp.inference.evaluation.scoring import RowScore

Numbers = dict[str, float | int | None]


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
    """Compute accuracy by the likeliest choice (acc) and by the likeliest per byte (acc_norm); ties go to the first.

    Args:
        losses: the losses of each item's choices.
    """
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
    return math.sqrt(pieces / (pieces - 1) * math.fsum((s - n * mean) ** 2 for s, n in zip(sums, counts, strict=True))) / total


def safe_exp(value: float) -> float:
    """Return e to the value, or inf if that would overflow."""
    return math.exp(value) if value < 709 else math.inf
