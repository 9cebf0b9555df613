"""Summary of a checkpoint's manifest and state; the contents of the state are not trusted."""

from __future__ import annotations

from typing import Any

from megatron_sp.checkpoint.manifest import Manifest
from megatron_sp.commands.ckpt.names import WEIGHTS, by_kind, num_elements, weights_of
from megatron_sp.commands.ckpt.text import SHORT_DTYPES
from megatron_sp.config.schema_experts import ROUTER_BIAS
from megatron_sp.utils.format import format_count

Facts = dict[str, Any]


def facts(manifest: Manifest, state: dict[str, Any]) -> Facts:
    """Return the facts for a row of a table and for JSON."""
    totals = by_kind(manifest.tensors)
    weights = {dtype: total for (kind, dtype), total in totals.items() if kind == WEIGHTS}
    named = weights_of(manifest.tensors)
    kinds = sorted({kind for kind, _ in totals if kind != WEIGHTS})
    return {
        "tensors": len(manifest.tensors),
        "parameters": sum(num_elements(shape) for name, (_, shape) in named.items() if not name.endswith(ROUTER_BIAS)),
        "dtypes": [SHORT_DTYPES.get(dtype, dtype) for dtype in sorted(weights, key=lambda d: -weights[d].elements)],
        "optimizer": kinds,
        "world_size": manifest.world_size,
        "layout": layout_of(manifest, state),
    }


def layout_of(manifest: Manifest, state: dict[str, Any]) -> Facts:
    """Return the world size, and tp, sp, dp and the ZeRO stage as far as the state has them."""
    layout = state.get("layout")
    found: Facts = {"world_size": manifest.world_size}
    if isinstance(layout, dict):
        found |= {key: layout[key] for key in ("world_size", "dp", "cp", "sp", "tp", "tp_seq") if isinstance(layout.get(key), int)}
    stage = dig(state, "config", "parallel", "zero_stage")
    if isinstance(stage, int) and found["world_size"] > 1:
        found["zero_stage"] = stage
    return found


def layout_words(layout: Facts) -> str:
    """Return a layout as text, such as ``4: dp 2, sp 2, ZeRO 1``; axes of size 1 are omitted."""
    words = [f"{axis} {layout[axis]}" for axis in ("dp", "cp", "sp", "tp") if layout.get(axis, 1) > 1]
    words += ["tp_seq"] if layout.get("tp_seq") and layout.get("tp", 1) > 1 else []
    words += [f"ZeRO {layout['zero_stage']}"] if layout.get("zero_stage") else []
    return f"{layout['world_size']}{': ' if words else ''}{', '.join(words)}"


def parameter_words(found: Facts) -> str:
    """Return the number and dtypes of parameters as text, such as ``5.1 M fp32``."""
    return f"{format_count(found['parameters'])} {'+'.join(found['dtypes'])}".strip()


def dig(value: Any, *keys: str) -> Any:
    """Return an entry of nested objects; None if it is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
