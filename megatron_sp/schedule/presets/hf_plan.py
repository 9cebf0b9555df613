"""Conversion of transformers' own tensor parallel plans (``base_model_tp_plan``, the head's ``_tp_plan``) to schedules.

A plan gives modules and parameters a style; heads and norms within heads are taken from the configuration. An unknown
style is an error: a plan that is partly ignored would give wrong results. Names without a module are ignored.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn

from megatron_sp.schedule.core.directives import Mesh, PathError, expand
from megatron_sp.schedule.core.hooks import parameter_names
from megatron_sp.schedule.presets.families import base_of, families, share_key_values
from megatron_sp.schedule.schedule import Schedule, schedule
from megatron_sp.utils.errors import ConfigError

# what the style of a module writes: see ``_write``; "" nothing
_MODULES = {
    "colwise": "column", "colwise_gather_output": "gathered", "colwise_rep": "gathered", "packed_colwise": "packed",
    "rowwise": "row", "rowwise_split_input": "cut and row", "rowwise_rep": "cut and row",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "gathered table", "replicated_with_grad_allreduce": "summed", "mla_kv_a_proj": "latent",
    "moe_tp_experts": "experts", "replicate": "", "local_params": "",
}  # fmt: skip
# the style of a parameter: the dim that is split, and the parts along it
_TENSORS: dict[str, tuple[int, int | None] | None] = {
    "colwise": (-2, None), "packed_colwise": (-2, 2), "rowwise": (-1, None), "packed_rowwise": (-1, 2),
    "replicated_with_grad_allreduce": None, "replicate": None,
}  # fmt: skip


def from_hf_plan(model: nn.Module, mesh: Mesh | None = None) -> Schedule:
    """Make a schedule from transformers' plan for a model; it is not yet applied, and lines may be added."""
    s, cls, config = schedule(model, mesh), type(model).__name__, model.config
    plan = {f"{base_of(s)}{path}": style for path, style in (getattr(config, "base_model_tp_plan", None) or {}).items()}
    plan |= getattr(model, "_tp_plan", None) or {}
    if not plan:
        has_preset = getattr(config, "model_type", None) in families()
        nothing = "nor is there a preset: write its lines with schedule(model, mesh)"
        way = "take presets.auto(model), which knows it" if has_preset else nothing
        raise ConfigError(f"transformers has no tensor parallel plan for {cls}: {way}")
    modules, tensors = dict[str, str](), dict[str, str]()
    for path, style in plan.items():
        owner, _, name = path.rpartition(".")
        if _matches(model, path):
            modules[path] = style
        elif any(name in model.get_submodule(match)._parameters for match in _matches(model, owner)):
            tensors[path] = style
    if not modules and not tensors:
        raise ConfigError(f"the plan of {cls} names no module of it: {', '.join(plan)}; write the lines")
    unknown = {path: style for path, style in modules.items() if style not in _MODULES}
    unknown |= {path: style for path, style in tensors.items() if style not in _TENSORS}
    if unknown:
        styles = ", ".join(f"{style!r} at {path}" for path, style in unknown.items())
        raise ConfigError(
            f"the plan of {cls} has {styles}, which is not known here, only {', '.join(_MODULES)}: write the lines with"
            " schedule(model, mesh) instead, and leave whole what is not clear"
        )
    for path, style in modules.items():
        latent = f"{path.rpartition('.')[0]}.kv_a_proj_with_mqa" if path.endswith(".kv_b_proj") else ""
        _write(s, path, _MODULES[style], is_prepared=modules.get(latent) == "mla_kv_a_proj")
    for path, style in tensors.items():
        owner, _, name = path.rpartition(".")
        if style == "replicated_with_grad_allreduce":
            s[owner].sum_gradients(name)
        elif (cut := _TENSORS[style]) is not None:
            _split(s, owner, name, *cut)
    _write_omitted(s, modules)
    return s


def _matches(model: nn.Module, glob: str) -> list[str]:
    try:
        return expand(model, glob)
    except PathError:
        return []


def _near(s: Schedule, glob: str, name: str) -> str | None:
    # the glob of a module beside another one
    path = f"{glob.rpartition('.')[0]}.{name}"
    return path if _matches(s.model, path) else None


def _write(s: Schedule, path: str, what: str, is_prepared: bool) -> None:
    lines, model = s[path], s.model
    if what == "column":
        lines.column(input="prepared" if is_prepared else "copy", **_heads(s, path))
    elif what == "packed":
        lines.column(blocks=2)
    elif what == "row":
        lines.row()
    elif what == "cut and row":
        lines.sync("fwd_pre", "scatter", axis=-1).row()
    elif what == "vocabulary":
        lines.vocab_parallel()
    elif what == "gathered":
        head = model.get_output_embeddings()  # type: ignore[operator]
        if any(model.get_submodule(match) is head for match in lines):
            lines.vocab_parallel()  # need not be a multiple, and may be tied
        else:
            lines.column(gather=True)
    elif what == "gathered table":
        lines.column(gather=True)
    elif what == "summed":
        lines.sum_gradients()
    elif what == "latent":
        # each rank norms and expands DeepSeek's latent projection to heads; the rest of it are shared keys
        lines.sync("fwd_post", "copy")
        if (norm := _near(s, path, "kv_a_layernorm")) is not None:
            s[norm].sum_gradients()
    elif what == "experts":
        module = model.get_submodule(lines.paths[0])
        for name, flag in (("a bias", "has_bias"), ("a norm", "has_post_expert_norm")):
            if getattr(module, flag, False):  # which every rank would add
                raise ConfigError(
                    f"{path} ({type(module).__name__}) has {name} after the product of each expert, whose sum over the"
                    " ranks comes later: leave the experts whole, with lines of schedule(model, mesh) for everything"
                    " else"
                )
        names = parameter_names(module)
        lines.sync("fwd_pre", "copy", arg=names[0] if names else 0)
        if len(names) > 2:
            lines.sync("fwd_pre", "copy", arg=names[2])  # hidden_states, top_k_index, top_k_weights
        lines.sync("fwd_post", "all_reduce")


def _split(s: Schedule, owner: str, name: str, axis: int, blocks: int | None) -> None:
    for path in s[owner]:
        module = s.model.get_submodule(path)
        parameter = module._parameters.get(name)
        if parameter is not None:
            by_pairs = not getattr(module, "is_concatenated", True)  # gate and up of one feature lie side by side
            dim = axis % parameter.ndim if parameter.ndim > 1 else 0
            s[path].shard(name, dim, blocks=None if by_pairs else blocks)


def _heads(s: Schedule, path: str) -> dict[str, Any]:
    # the arguments that describe the heads in a layer's output, if it has any
    around, _, last = path.rpartition(".")
    counts: dict[str, Any] = {}
    for name in ("num_attention_heads", "num_key_value_heads"):
        # configurations that differ from layer to layer raise an error of their own
        with suppress(Exception):
            counts[name] = getattr(s.model.config, name, None)
    heads = counts.get("num_attention_heads")
    key_values: Any = counts.get("num_key_value_heads") or heads
    if heads is None or last not in ("q_proj", "k_proj", "v_proj", "query_key_value"):
        return {}
    if last == "query_key_value":
        return {"heads": heads, "blocks": 1}  # q, k and v of one head after another
    if last == "k_proj":
        share_key_values(s, around, heads, key_values)
    return {"heads": heads} if last == "q_proj" else {"heads": key_values, "replicas": True}


def _write_omitted(s: Schedule, modules: dict[str, str]) -> None:
    # what plans omit: norms with a weight per head, learnable activations, tied layers
    for path in (path for path, style in modules.items() if style == "colwise"):
        name = path.rpartition(".")[2]
        norm = _near(s, path, f"{name[0]}_norm") if name in ("q_proj", "k_proj") else None
        if norm is not None and norm not in modules:
            weight = getattr(s.model.get_submodule(s[norm].paths[0]), "weight", None)
            if weight is not None and weight.ndim == 2:
                s[norm].shard("weight", 0, **{k: v for k, v in _heads(s, path).items() if k != "blocks"})
        activation = _near(s, path, "act_fn") if name == "up_proj" else None
        if activation is not None and s.model.get_submodule(s[activation].paths[0])._parameters:
            s[activation].sum_gradients()
    # a plan may name only one of two tied vocabulary layers
    split = {path for d in s.directives if d.do == "vocab_parallel" for path in s[d.on]}
    weights = {id(s.model.get_submodule(path).weight) for path in split}
    for path, module in s.model.named_modules():
        if path not in split and isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights:
            s[path].vocab_parallel()
