"""Facts of a checkpoint, from manifest and state, as words and rows; progress lines."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_sp.checkpoint.manifest import ITEM_BYTES, Manifest
from megatron_sp.config.schema_experts import is_expert_bias
from megatron_sp.utils.format import format_bytes, format_count, format_duration

SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
WEIGHTS = "weights"
_OPTIMIZER = re.compile(r"optimizer\.([a-z_]+)\.(.+)")
_LAYER = re.compile(r"\.[0-9]+(?=\.)")

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # as in a manifest: name -> (dtype, shape)


@dataclass
class Total:
    """Number, elements and bytes of a set of tensors."""

    tensors: int = 0
    elements: int = 0
    num_bytes: int = 0

    def add(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Count a tensor."""
        self.tensors += 1
        self.elements += math.prod(shape)
        self.num_bytes += math.prod(shape) * ITEM_BYTES[dtype]


def kind_of(name: str) -> tuple[str, str]:
    """Return (``weights`` or the kind of optimizer state, name of the weight)."""
    match = _OPTIMIZER.fullmatch(name)
    return (match[1], match[2]) if match else (WEIGHTS, name)


def weights_of(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the weights, without the optimizer's tensors."""
    return {name: value for name, value in tensors.items() if kind_of(name)[0] == WEIGHTS}


def by_kind(tensors: Tensors) -> dict[tuple[str, str], Total]:
    """Return (kind, dtype) -> total, weights first."""
    totals: dict[tuple[str, str], Total] = {}
    for name, (dtype, shape) in tensors.items():
        totals.setdefault((kind_of(name)[0], dtype), Total()).add(dtype, shape)
    return dict(sorted(totals.items(), key=lambda item: (item[0][0] != WEIGHTS, item[0])))


def by_module(tensors: Tensors) -> dict[str, Total]:
    """Return module -> total for the weights; a module of all layers is one entry, with ``*`` for the layer's number."""
    totals: dict[str, Total] = {}
    for name, (dtype, shape) in sorted(weights_of(tensors).items()):
        module = _LAYER.sub(".*", name).rpartition(".")[0] or name
        totals.setdefault(module, Total()).add(dtype, shape)
    return totals


def facts(manifest: Manifest, state: dict[str, Any]) -> dict[str, Any]:
    """Return the facts for a row of a table and for JSON; the contents of the state are not trusted."""
    totals = by_kind(manifest.tensors)
    weights = {dtype: total for (kind, dtype), total in totals.items() if kind == WEIGHTS}
    shapes = {name: shape for name, (_, shape) in weights_of(manifest.tensors).items() if not is_expert_bias(name)}
    return {
        "tensors": len(manifest.tensors),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "dtypes": [SHORT_DTYPES.get(dtype, dtype) for dtype in sorted(weights, key=lambda d: -weights[d].elements)],
        "optimizer": sorted({kind for kind, _ in totals if kind != WEIGHTS}),
        "world_size": manifest.world_size,
        "layout": layout_of(manifest, state),
    }


def layout_of(manifest: Manifest, state: dict[str, Any]) -> dict[str, Any]:
    """Return the world size, and tp, sp, dp and the ZeRO stage as far as the state has them."""
    stored, layout = state.get("layout"), {"world_size": manifest.world_size}
    if isinstance(stored, dict):
        layout |= {
            key: stored[key]
            for key in ("world_size", "dp", "cp", "sp", "tp", "tp_seq")
            if isinstance(stored.get(key), int)
        }
    stage: Any = state
    for key in ("config", "parallel", "zero_stage"):
        stage = stage.get(key) if isinstance(stage, dict) else None
    return layout | ({"zero_stage": stage} if isinstance(stage, int) and layout["world_size"] > 1 else {})


def layout_words(layout: dict[str, Any]) -> str:
    """Return a layout as text, such as ``4: dp 2, sp 2, ZeRO 1``; axes of size 1 are omitted."""
    words = [f"{axis} {layout[axis]}" for axis in ("dp", "cp", "sp", "tp") if layout.get(axis, 1) > 1]
    words += ["tp_seq"] if layout.get("tp_seq") and layout.get("tp", 1) > 1 else []
    words += [f"ZeRO {layout['zero_stage']}"] if layout.get("zero_stage") else []
    return f"{layout['world_size']}{': ' if words else ''}{', '.join(words)}"


def parameter_words(record: dict[str, Any]) -> str:
    """Return the number and dtypes of parameters as text, such as ``5.1 M fp32``."""
    return f"{format_count(record['parameters'])} {'+'.join(record['dtypes'])}".strip()


def flag(field: str) -> str:
    """Return the flag of a configuration's field, such as ``optimizer.lr``."""
    return "--" + field.rpartition(".")[2].replace("_", "-")


def date(seconds: float) -> str:
    """Return a local date and time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def plural(count: int, noun: str, several: str | None = None) -> str:
    """Return a count with its noun, such as ``1 file`` or ``2 files``."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def warn(text: str) -> None:
    """Print a warning to standard error, so that it does not get into a pipe."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Progress:
    """Progress line on standard error with the bytes done and the time left; silent unless that is a terminal.

    Args:
        what: name of the activity.
        total: total bytes.
    """

    _EVERY_S = 0.2

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._width = what, total, 0, 0
        self._began = self._shown = time.monotonic()
        self._lock = threading.Lock()  # files are read by several threads
        self._is_seen = sys.stderr.isatty()

    def add(self, num_bytes: int) -> None:
        """Add bytes that were done."""
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if self._is_seen and now - self._shown >= self._EVERY_S:
                self._shown = now
                left = (now - self._began) * (self._total - self._done) / max(self._done, 1)
                share = 100 * self._done // max(self._total, 1)
                self._show(
                    f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)} ({share} %), {format_duration(left)} left"
                )

    def _show(self, words: str) -> None:
        sys.stderr.write("\r" + words.ljust(self._width))
        sys.stderr.flush()
        self._width = len(words)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:  # erase the line
            self._show("")
            sys.stderr.write("\r")
            sys.stderr.flush()
