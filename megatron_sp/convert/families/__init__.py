"""Model families of Hugging Face, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_sp.convert.families.bert import Bert, MegatronBert
from megatron_sp.convert.families.decoders import GPT2, GPTNeoX, Llama, Mistral, Mixtral, Olmoe, Qwen2, Qwen3Moe
from megatron_sp.convert.families.family import Family
from megatron_sp.convert.families.relatives import Arcee, Dots1, Ernie, Glm4Moe, HunYuan3, MiniMaxM2, Nemotron, Phi3

from megatron_sp.convert.families.relatives import Qwen3, SeedOss, SolarOpen, Starcoder2  # isort: skip
from megatron_sp.convert.model import Model
from megatron_sp.utils.errors import CheckpointError

_ALL = (
    GPT2, Llama, Mistral, Qwen2, GPTNeoX, Mixtral, Qwen3Moe, Olmoe, Qwen3, SeedOss, Arcee, Ernie, Phi3, Starcoder2,
    Nemotron, Glm4Moe, Dots1, SolarOpen, MiniMaxM2, HunYuan3, Bert, MegatronBert,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family() for family in _ALL}


def family_named(document: dict[str, Any], path: Path) -> Family:
    """Return the family that a config.json names."""
    name = document.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{path}: model_type is {str(name)[:100]!r}: only {', '.join(FAMILIES)} can be converted")
    return FAMILIES[name]


def family_for(model: Model) -> Family:
    """Return a family that computes what a model does."""
    # the one it came from if it fits, else the first that does
    original = model.settings.get("hf")
    first = original.get("model_type") if isinstance(original, dict) else None
    families = sorted(FAMILIES.values(), key=lambda family: family.model_type != first)
    problems = {family.model_type: family.fits(model.config) for family in families}
    for family in families:
        if problems[family.model_type] is None:
            return family
    reasons = "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
    raise CheckpointError(f"no class of Hugging Face computes what this model does:\n{reasons}")
