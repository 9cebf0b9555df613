"""Schedules of well-known models of transformers, written in ordinary lines.

    s = presets.auto(model, Mesh.of(groups), seq=True)     # by config.model_type
    s.verify(batch)
    s.apply()

To add a family, decorate a function that writes its lines with ``@register_preset("its model_type")``.
"""

from megatron_sp.schedule.presets.families import (
    Blocks,
    auto,
    bert,
    clip,
    falcon,
    families,
    gpt2,
    gpt_neox,
    llama,
    modernbert,
    opt,
    register_preset,
    t5,
    vit,
    whisper,
)  # fmt: skip
from megatron_sp.schedule.presets.hf_plan import from_hf_plan

__all__ = [
    "Blocks", "auto", "bert", "clip", "falcon", "families", "from_hf_plan", "gpt2", "gpt_neox", "llama", "modernbert",
    "opt", "register_preset", "t5", "vit", "whisper",
]  # fmt: skip
