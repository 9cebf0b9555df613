"""Presets as a table: as text for a terminal, as Markdown for docs/how-to/zoo.md, and as JSON."""

from __future__ import annotations

import dataclasses
import json

from megatron_sp.config.presets import PRESETS, Preset
from megatron_sp.config.schema import ModelConfig
from megatron_sp.utils.format import aligned

_HEADINGS = (
    "name",
    "parameters",
    "layers",
    "hidden",
    "heads",
    "ffn",
    "sequence",
    "vocabulary",
    "positions, norm, MLP",
    "source",
)
_RIGHT = range(1, 8)  # columns of numbers


def table() -> str:
    """Return the presets as text, one line each, with aligned columns."""
    return "\n".join(aligned([_HEADINGS, *_rows()], _RIGHT, indent=""))


def markdown() -> str:
    """Return the presets as a Markdown table."""
    ruler = "|".join("---:" if i in _RIGHT else "---" for i in range(len(_HEADINGS)))
    lines = [f"| {' | '.join(_HEADINGS)} |", f"|{ruler}|"]
    return "\n".join([*lines, *(f"| `{row[0]}` | {' | '.join(row[1:])} |" for row in _rows())])


def as_json() -> str:
    """Return all fields of the presets, by name, as JSON."""
    return json.dumps({name: dataclasses.asdict(preset) for name, preset in PRESETS.items()}, indent=1)


def _rows() -> list[tuple[str, ...]]:
    return [_row(name, preset) for name, preset in PRESETS.items()]


def _row(name: str, preset: Preset) -> tuple[str, ...]:
    model = ModelConfig(**preset.flags)
    heads = f"{model.num_attention_heads}" + (f" ({model.num_query_groups} kv)" if model.num_query_groups else "")
    positions = "rotary" if model.position_embedding_type == "rope" else "learned"
    positions += "" if model.window_size is None else f" in a window of {model.window_size:,}"
    mlp = ("SwiGLU" if model.swiglu else "GELU") + (" beside attention" if model.use_parallel_residual else "")
    norm = ("post-" if model.norm_placement == "post" else "") + model.normalization
    head = (
        "" if preset.family == "bert" else ", own head" if model.untie_embeddings_and_output_weights else ", tied head"
    )
    ffn = (
        f"{model.expert_ffn_size} ({model.moe_router_topk} of {model.num_experts})"
        if model.has_experts
        else f"{model.ffn_size}"
    )
    return (
        name, f"{preset.num_params:,}", f"{model.num_layers}", f"{model.hidden_size}", heads, ffn, f"{model.seq_length:,}",
        f"{model.vocab_size:,}", f"{positions}, {norm}, {mlp}{head}", preset.source,
    )  # fmt: skip
