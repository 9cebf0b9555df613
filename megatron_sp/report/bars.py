"""Horizontal bars that are divided into parts, as static SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from megatron_sp.report.html import Html, tag


def bar(parts: Sequence[tuple[str, float, str]], whole: float, label: str) -> Html:
    """Return a horizontal bar.

    Args:
        parts: (class, amount, title) of its parts, from the left.
        whole: amount that fills the width.
    """
    ends = list(itertools.accumulate((amount for _, amount, _ in parts), initial=0.0))
    whole = whole if math.isfinite(whole) and whole > 0 else 1.0
    rects = [
        tag("rect", tag("title", words), x=f"{1000 * start / whole:.2f}", y=0, width=f"{1000 * amount / whole:.2f}", height=20, class_=kind)
        for (kind, amount, words), start in zip(parts, ends, strict=False)
        if amount > 0
    ]
    return tag("svg", rects, viewBox="0 0 1000 20", preserveAspectRatio="none", role="img", aria_label=label, class_="bar")
