"""The plan that transformers itself has for many models, ``config.base_model_tp_plan`` and the head's ``_tp_plan``, as lines of a schedule.

    colwise                         column; each layer sums the gradient of its own input
    colwise_gather_output           column, and the result made whole (older: colwise_rep); over the vocabulary: vocab_parallel
    packed_colwise                  column with blocks=2: gate and up in one
    rowwise                         row
    rowwise_split_input             row, behind a cut of an input that every rank has whole (older: rowwise_rep)
    embedding_rowwise               vocab_parallel
    embedding_colwise               column, and the result made whole
    replicated_with_grad_allreduce  sum_gradients
    replicate                       nothing

What these strings do not say, heads, is taken from the configuration. Experts and anything else are refused by name: a plan of which a part
is ignored would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_sp.schedule.mesh import Mesh
from megatron_sp.schedule.presets.common import base_of, share_key_values
from megatron_sp.schedule.schedule import Schedule, Selection, schedule
from megatron_sp.utils.errors import ConfigError


def from_hf_plan(model: nn.Module, mesh: Mesh | None = None) -> Schedule:
    """The schedule of a model by transformers' plan for it: tensor parallel only; not applied yet, and more lines may follow.

    Raises:
        ConfigError: the model has no plan, or one with a style that is not known here; names all of those.
    """
    s = schedule(model, mesh)
    plan = plan_of(s)
    unknown = {path: style for path, style in plan.items() if style not in _STYLES}
    if unknown:
        found = ", ".join(f"{style!r} at {path}" for path, style in unknown.items())
        raise ConfigError(f"the plan of {type(model).__name__} has {found}, which is not known here, only {', '.join(_STYLES)}")
    for path, style in plan.items():
        _STYLES[style](s[path], _heads(s, path))
    _tie(s)
    return s


def plan_of(s: Schedule) -> dict[str, str]:
    """Path to style. Raises ConfigError: there is none."""
    model: Any = s.model
    plan = {f"{base_of(s)}{path}": style for path, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items()}
    plan |= getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise ConfigError(f"transformers has no tensor parallel plan for {type(model).__name__}: take presets.auto(), or write the lines")
    return plan


def _heads(s: Schedule, path: str) -> dict[str, Any]:
    """How many heads the outputs of a layer are, for those that have them."""
    config: Any = s.model.config
    last = path.rpartition(".")[2]
    if last in ("k_proj", "v_proj"):
        key_values = getattr(config, "num_key_value_heads", config.num_attention_heads)
        if last == "k_proj":
            share_key_values(s, path.rpartition(".")[0], config.num_attention_heads, key_values)
        return {"heads": key_values, "replicas": True}
    return {"heads": config.num_attention_heads} if last in ("q_proj", "query_key_value") else {}


def _gathered(layers: Selection, heads: dict[str, Any]) -> None:
    model: Any = layers.schedule.model
    if any(model.get_submodule(path) is model.get_output_embeddings() for path in layers):
        layers.vocab_parallel()  # need not be a multiple, and may be tied
    else:
        layers.column(gather=True)


def _split_input(layers: Selection, heads: dict[str, Any]) -> None:
    layers.sync("fwd_pre", "scatter", axis=-1).row()


_STYLES: dict[str, Callable[[Selection, dict[str, Any]], object]] = {
    "colwise": lambda layers, heads: layers.column(**heads),
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,
    "packed_colwise": lambda layers, heads: layers.column(blocks=2),
    "rowwise": lambda layers, heads: layers.row(),
    "rowwise_split_input": _split_input,
    "rowwise_rep": _split_input,
    "embedding_rowwise": lambda layers, heads: layers.vocab_parallel(),
    "embedding_colwise": lambda layers, heads: layers.column(gather=True),
    "replicated_with_grad_allreduce": lambda layers, heads: layers.sum_gradients(),
    "replicate": lambda layers, heads: None,
}


def _tie(s: Schedule) -> None:
    """A plan may name one of two tied modules: the other is split along."""
    split = {path: s.model.get_submodule(path) for d in s.directives if d.do == "vocab_parallel" for path in s[d.on]}
    weights = {id(module.weight) for module in split.values()}
    for path, module in s.model.named_modules():
        if path not in split and isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights:
            s[path].vocab_parallel()
