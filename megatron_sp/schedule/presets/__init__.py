"""Schedules of well-known models of transformers, written in ordinary lines.

    s = presets.auto(model, Mesh.of(groups), seq=True)     # by config.model_type
    s.verify(batch)
    s.apply()

To add a family, decorate a function that writes its lines with ``@register_preset("its model_type")``.
"""

from megatron_sp.schedule.presets.families import (
    bert,
    clip,
    falcon,
    gpt2,
    gpt_neox,
    llama,
    modernbert,
    opt,
    t5,
    vit,
    whisper,
)
from megatron_sp.schedule.presets.hf_plan import from_hf_plan
from megatron_sp.schedule.presets.registry import Blocks, auto, families, register_preset

__all__ = [
    "Blocks", "auto", "bert", "clip", "falcon", "families", "from_hf_plan", "gpt2", "gpt_neox", "llama", "modernbert", "opt",
    "register_preset", "t5", "vit", "whisper",
]  # fmt: skip
