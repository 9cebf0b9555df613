"""Curves as one line of text, for terminals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return values as bars of text, with the lowest at the bottom and the highest at full height.

    Args:
        values: values in order; if there are more than ``width``, they are averaged in equal groups; non-finite ones
            leave a gap.
        width: maximum number of characters, at least 1.
    """
    if width < 1:
        raise ValueError(f"width ({width}) must be at least 1")
    columns = min(width, len(values))
    bounds = [i * len(values) // columns for i in range(columns + 1)] if columns else []
    means = [_mean(values[a:b]) for a, b in itertools.pairwise(bounds)]
    finite = [m for m in means if m is not None]
    if not finite:
        return " " * columns
    low, span = min(finite), max(finite) - min(finite)
    return "".join(" " if m is None else _BARS[round((m - low) / span * (len(_BARS) - 1)) if span else 0] for m in means)


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None
