"""Durations, bytes and counts for people."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def format_duration(seconds: float) -> str:
    """Format a duration like ``3 h 07 min`` or ``42 s``."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def format_bytes(count: float) -> str:
    """Format a number of bytes like ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_parameters(count: int) -> str:
    """Format a number of parameters like ``124.4 M (124,439,808)``."""
    short, exact = format_count(count), f"{count:,}"
    return short if short == exact else f"{short} ({exact})"


def format_count(count: float) -> str:
    """Format a count like ``124.4 M``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def show(value: float, kind: str = "plain") -> str:
    """Format a number: plain, loss, si, bytes, percent (of one), seconds, count."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if kind == "loss":
        return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"
    if kind == "si":
        for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.3g} {unit}"
        return f"{value:.3g}"
    if kind == "bytes":
        return format_bytes(value)
    if kind == "percent":
        return f"{100 * value:.1f} %"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "seconds":
        return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 100 else format_duration(value)
    return f"{value:.4g}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "  ") -> list[str]:
    """Return lines with aligned columns, those in ``right`` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in pairs]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
