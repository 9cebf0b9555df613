"""The plan that transformers itself has for many models, ``config.base_model_tp_plan`` and the head's ``_tp_plan``, as lines of a schedule.

A plan names modules and parameters by glob, each with a style (``hf_styles.py``). What these strings do not say, heads and norms inside
of heads, is taken from the configuration and the modules. A style that is not known is refused by name: a plan of which a part is ignored
would compute something else. Names of which this configuration has no module (another kind of layer) have nothing to split.
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
    """The schedule of a model by transformers' plan for it: tensor parallel only; not applied yet, and more lines may follow.

    Raises:
        ConfigError: the model has no plan, or one with a style that is not known here, all of which are named, or of experts that cannot be
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
    """Path to style. Raises ConfigError: there is none."""
    model = s.model
    plan = {f"{base_of(s)}{path}": style for path, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items()}
    plan |= getattr(model, "_tp_plan", None) or {}
    if not plan:
        there = getattr(model.config, "model_type", None) in families()
        way = "take presets.auto(model), which knows it" if there else "nor is there a preset: write its lines with schedule(model, mesh)"
        raise ConfigError(f"transformers has no tensor parallel plan for {type(model).__name__}: {way}")
    return plan


def _sorted(model: nn.Module, plan: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What names modules, and what names parameters. Raises ConfigError: nothing names anything."""
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
    """A plan may name one of two tied modules: the other is split along."""
    split = {path: s.model.get_submodule(path) for d in s.directives if d.do == "vocab_parallel" for path in s[d.on]}
    weights = {id(module.weight) for module in split.values()}
    for path, module in s.model.named_modules():
        if path not in split and isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights:
            s[path].vocab_parallel()
