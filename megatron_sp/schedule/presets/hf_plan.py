"""Conversion of transformers' own tensor parallel plans (``config.base_model_tp_plan``, the head's ``_tp_plan``) to schedules.

A plan names modules and parameters by glob, each with a style (``hf_styles.py``). What it does not contain, such as
heads and norms within heads, is taken from the configuration and the modules. An unknown style is an error: a plan that
is partly ignored would silently give wrong results. Names without a module in this configuration (another kind of
layer) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_sp.schedule.core.directives import Mesh, PathError, expand
from megatron_sp.schedule.core.hooks import parameter_names
from megatron_sp.schedule.presets.registry import base_of, families, share_key_values
from megatron_sp.schedule.schedule import Schedule, schedule
from megatron_sp.utils.errors import ConfigError


def from_hf_plan(model: nn.Module, mesh: Mesh | None = None) -> Schedule:
    """Make a tensor parallel schedule from transformers' plan for a model; it is not yet applied, and lines may be added."""
    s = schedule(model, mesh)
    modules, tensors = _sorted(s.model, plan_of(s))
    unknown = {path: style for path, style in modules.items() if style not in MODULES}
    unknown |= {path: style for path, style in tensors.items() if style not in TENSORS}
    if unknown:
        found = ", ".join(f"{style!r} at {path}" for path, style in unknown.items())
        raise ConfigError(
            f"the plan of {type(model).__name__} has {found}, which is not known here, only {', '.join(MODULES)}: write the lines with"
            " schedule(model, mesh) instead, and leave whole what is not clear"
        )
    plan = Plan(s, modules)
    for path, style in modules.items():
        MODULES[style](plan, path)
    for path, style in tensors.items():
        owner, _, name = path.rpartition(".")
        TENSORS[style](s, owner, name)
    finish(plan)
    _tie(s)
    return s


def plan_of(s: Schedule) -> dict[str, str]:
    """Return path -> style. Raises ConfigError: the model has no plan."""
    model = s.model
    plan = {
        f"{base_of(s)}{path}": style
        for path, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items()
    }
    plan |= getattr(model, "_tp_plan", None) or {}
    if not plan:
        there = getattr(model.config, "model_type", None) in families()
        way = (
            "take presets.auto(model), which knows it"
            if there
            else "nor is there a preset: write its lines with schedule(model, mesh)"
        )
        raise ConfigError(f"transformers has no tensor parallel plan for {type(model).__name__}: {way}")
    return plan


def _sorted(model: nn.Module, plan: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    # separate a plan into modules and parameters. Raises ConfigError: it names none of the model's
    modules, tensors = {}, {}
    for path, style in plan.items():
        owner, _, name = path.rpartition(".")
        if _found(model, path):
            modules[path] = style
        elif any(name in model.get_submodule(each)._parameters for each in _found(model, owner)):
            tensors[path] = style
    if not modules and not tensors:
        raise ConfigError(
            f"the plan of {type(model).__name__} names no module of it: {', '.join(plan)}; write the lines"
        )
    return modules, tensors


def _found(model: nn.Module, glob: str) -> list[str]:
    try:
        return expand(model, glob)
    except PathError:
        return []


def _tie(s: Schedule) -> None:
    # split modules that are tied to split vocabulary layers, since a plan may name only one of them
    split = {path: s.model.get_submodule(path) for d in s.directives if d.do == "vocab_parallel" for path in s[d.on]}
    weights = {id(module.weight) for module in split.values()}
    for path, module in s.model.named_modules():
        if path not in split and isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights:
            s[path].vocab_parallel()


@dataclass
class Plan:
    """Schedule that is being written from a plan."""

    s: Schedule
    modules: dict[str, str]  # glob of modules -> style

    def count(self, name: str) -> int | None:
        """Return a number of the configuration; None if it is missing or differs between layers."""
        try:
            return getattr(self.s.model.config, name, None)  # type: ignore[union-attr]
        except Exception:  # configurations that differ from layer to layer raise an error of their own
            return None

    def near(self, glob: str, name: str) -> str | None:
        """Return the glob of a module beside another one, or None."""
        path = f"{glob.rpartition('.')[0]}.{name}"
        try:
            return path if len(self.s[path]) else None
        except PathError:
            return None

    def heads(self, path: str) -> dict[str, Any]:
        """Return the arguments that describe the heads in a layer's output, if it has any."""
        last, heads = path.rpartition(".")[2], self.count("num_attention_heads")
        if heads is None:
            return {}
        if last in ("k_proj", "v_proj"):
            key_values = self.count("num_key_value_heads") or heads
            if last == "k_proj":
                share_key_values(self.s, path.rpartition(".")[0], heads, key_values)
            return {"heads": key_values, "replicas": True}
        if last == "query_key_value":
            return {"heads": heads, "blocks": 1}  # q, k and v of one head after another
        return {"heads": heads} if last == "q_proj" else {}


def _column(plan: Plan, path: str) -> None:
    latent = plan.near(path, "kv_a_proj_with_mqa") if path.endswith(".kv_b_proj") else None
    prepared = latent is not None and plan.modules.get(latent) == "mla_kv_a_proj"
    plan.s[path].column(input="prepared" if prepared else "copy", **plan.heads(path))


def _gathered(plan: Plan, path: str) -> None:
    model: Any = plan.s.model
    if any(model.get_submodule(each) is model.get_output_embeddings() for each in plan.s[path]):
        plan.s[path].vocab_parallel()  # need not be a multiple, and may be tied
    else:
        plan.s[path].column(gather=True)


def _latent(plan: Plan, path: str) -> None:
    """Write the lines of DeepSeek's latent projection; each rank norms and expands its result to heads; the rest are shared keys."""
    plan.s[path].sync("fwd_post", "copy")
    if (norm := plan.near(path, "kv_a_layernorm")) is not None:
        plan.s[norm].sum_gradients()


def _experts(plan: Plan, path: str) -> None:
    """Write the lines of experts. Raises ConfigError: every rank would add what experts add after their product (a bias, a norm)."""
    module = plan.s.model.get_submodule(plan.s[path].paths[0])
    for name, has in (("a bias", "has_bias"), ("a norm", "has_post_expert_norm")):
        if getattr(module, has, False):
            raise ConfigError(
                f"{path} ({type(module).__name__}) has {name} after the product of each expert, whose sum over the ranks comes later:"
                " leave the experts whole, with lines of schedule(model, mesh) for everything else"
            )
    names = parameter_names(module)
    plan.s[path].sync("fwd_pre", "copy", arg=names[0] if names else 0)
    if len(names) > 2:
        plan.s[path].sync("fwd_pre", "copy", arg=names[2])  # hidden_states, top_k_index, top_k_weights
    plan.s[path].sync("fwd_post", "all_reduce")


MODULES: dict[str, Callable[[Plan, str], object]] = {
    "colwise": _column,
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,
    "packed_colwise": lambda plan, path: plan.s[path].column(blocks=2),
    "rowwise": lambda plan, path: plan.s[path].row(),
    "rowwise_split_input": lambda plan, path: plan.s[path].sync("fwd_pre", "scatter", axis=-1).row(),
    "rowwise_rep": lambda plan, path: plan.s[path].sync("fwd_pre", "scatter", axis=-1).row(),
    "embedding_rowwise": lambda plan, path: plan.s[path].vocab_parallel(),
    "embedding_colwise": lambda plan, path: plan.s[path].column(gather=True),
    "replicated_with_grad_allreduce": lambda plan, path: plan.s[path].sum_gradients(),
    "mla_kv_a_proj": _latent,
    "moe_tp_experts": _experts,
    "replicate": lambda plan, path: None,
    "local_params": lambda plan, path: None,
}


def _cut(axis: int, blocks: int | None = None) -> Callable[[Schedule, str, str], None]:
    def write(s: Schedule, owner: str, name: str) -> None:
        for path in s[owner]:
            module = s.model.get_submodule(path)
            parameter = module._parameters.get(name)
            if parameter is not None:
                by_pairs = not getattr(module, "is_concatenated", True)  # gate and up of one feature lie side by side
                s[path].shard(
                    name, axis % parameter.ndim if parameter.ndim > 1 else 0, blocks=None if by_pairs else blocks
                )

    return write


TENSORS: dict[str, Callable[[Schedule, str, str], object]] = {
    "colwise": _cut(-2),
    "packed_colwise": _cut(-2, 2),
    "rowwise": _cut(-1),
    "packed_rowwise": _cut(-1, 2),
    "replicated_with_grad_allreduce": lambda s, owner, name: s[owner].sum_gradients(name),
    "replicate": lambda s, owner, name: None,
}


def finish(plan: Plan) -> None:
    """Add lines for parameters that plans omit but ranks use on shares: norms with a weight per head, learnable activations."""
    s = plan.s
    for path, style in plan.modules.items():
        name = path.rpartition(".")[2]
        if style == "colwise" and name in ("q_proj", "k_proj"):
            norm = plan.near(path, f"{name[0]}_norm")
            weight = (
                getattr(s.model.get_submodule(s[norm].paths[0]), "weight", None)
                if norm and norm not in plan.modules
                else None
            )
            if norm is not None and weight is not None and weight.ndim == 2:
                s[norm].shard("weight", 0, **{k: v for k, v in plan.heads(path).items() if k != "blocks"})
        if style == "colwise" and name == "up_proj":
            activation = plan.near(path, "act_fn")
            if activation is not None and list(s.model.get_submodule(s[activation].paths[0]).parameters(recurse=False)):
                s[activation].sum_gradients()
