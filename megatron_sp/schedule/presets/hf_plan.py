"""Conversion of transformers' own tensor parallel plans (``config.base_model_tp_plan``, the head's ``_tp_plan``) to schedules.

A plan names modules and parameters by glob, each with a style (``hf_styles.py``). What it does not contain, such as
heads and norms within heads, is taken from the configuration and the modules. An unknown style is an error: a plan that
is partly ignored would silently give wrong results. Names without a module in this configuration (another kind of
layer) are ignored.
"""

from __future__ import annotations

from torch import nn

from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.paths import PathError, expand
from megatron_sp.schedule.presets.common import base_of
from megatron_sp.schedule.presets.hf_styles import MODULES, TENSORS, Plan, finish
from megatron_sp.schedule.presets.registry import families
from megatron_sp.schedule.schedule import Schedule, schedule
from megatron_sp.utils.errors import ConfigError


def from_hf_plan(model: nn.Module, mesh: Mesh | None = None) -> Schedule:
    """Make a tensor parallel schedule from transformers' plan for a model; it is not yet applied, and lines may be added.

    Raises:
        ConfigError: the model has no plan, or the plan has unknown styles (all are named) or experts that cannot be
            split.
    """
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
    plan = {f"{base_of(s)}{path}": style for path, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items()}
    plan |= getattr(model, "_tp_plan", None) or {}
    if not plan:
        there = getattr(model.config, "model_type", None) in families()
        way = "take presets.auto(model), which knows it" if there else "nor is there a preset: write its lines with schedule(model, mesh)"
        raise ConfigError(f"transformers has no tensor parallel plan for {type(model).__name__}: {way}")
    return plan


def _sorted(model: nn.Module, plan: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Separate a plan into modules and parameters. Raises ConfigError: it names none of the model's."""
    modules, tensors = {}, {}
    for path, style in plan.items():
        owner, _, name = path.rpartition(".")
        if _found(model, path):
            modules[path] = style
        elif any(name in model.get_submodule(each)._parameters for each in _found(model, owner)):
            tensors[path] = style
    if not modules and not tensors:
        raise ConfigError(f"the plan of {type(model).__name__} names no module of it: {', '.join(plan)}; write the lines")
    return modules, tensors


def _found(model: nn.Module, glob: str) -> list[str]:
    try:
        return expand(model, glob)
    except PathError:
        return []


def _tie(s: Schedule) -> None:
    """Split modules that are tied to split vocabulary layers, since a plan may name only one of them."""
    split = {path: s.model.get_submodule(path) for d in s.directives if d.do == "vocab_parallel" for path in s[d.on]}
    weights = {id(module.weight) for module in split.values()}
    for path, module in s.model.named_modules():
        if path not in split and isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights:
            s[path].vocab_parallel()
