"""Changes of a model that split nothing: other modules, other values of attributes, notes on parameters."""

from __future__ import annotations

import inspect

from torch import nn

from megatron_sp.schedule.apply.job import ApplyJob
from megatron_sp.schedule.apply.preconditions import no_parameter
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.utils.errors import ConfigError


def replace_modules(job: ApplyJob) -> None:
    """Put other modules in place, for ``replace`` lines. Raises ConfigError for the model itself."""
    for directive, path, module in list(job.each("replace")):
        if not path:
            raise ConfigError(f"replace on the model itself ({directive.where}): begin the schedule of the other model instead")
        new = directive.args["new"]
        new = new if isinstance(new, nn.Module) else new(path, module)
        parent, _, last = path.rpartition(".")
        setattr(job.model.get_submodule(parent), last, new)


def set_attributes(job: ApplyJob) -> None:
    """Set or divide attributes, for ``set`` lines.

    Raises ConfigError if one does not exist, is not a setting, or cannot be divided evenly.
    """
    for directive, path, module in job.each("set"):
        attribute, where = directive.args["attribute"], directive.where
        if not hasattr(module, attribute):
            raise ConfigError(f"{path} has no attribute {attribute!r} to set ({where})")
        old, value = getattr(module, attribute), directive.args.get("value")
        _require_settable(path, module, directive)
        if (axis := directive.args.get("divide")) is not None:
            size = job.mesh.group(axis).size()
            if not isinstance(old, int) or old % size:
                raise ConfigError(f"{path}.{attribute} ({old!r}) must be a multiple of {axis} ({size}) ({where})")
            value = old // size
        setattr(module, attribute, value(old) if callable(value) else value)


def _require_settable(path: str, module: nn.Module, line: Directive) -> None:
    """Raise ConfigError if a line has two values, or its attribute is a method, a tensor, a module or a dunder attribute."""
    attribute, value = line.args["attribute"], line.args.get("value")
    if value is not None and "divide" in line.args:
        raise ConfigError(f"set {attribute!r} on {path} wants a value, or divide=, and not both ({line.where})")
    if callable(value):  # the author of a function knows what the attribute holds
        return
    is_tensor = any(attribute in named for named in (module._parameters, module._buffers, module._modules))
    if attribute.startswith("__") or is_tensor or inspect.ismethod(getattr(module, attribute)):
        raise ConfigError(
            f"set on {path}: {attribute!r} is a method, a tensor or a module, not a setting: use .shard() or .replace() for these"
            f" ({line.where})"
        )


def annotate_parameters(job: ApplyJob) -> None:
    """Attach notes to parameters, for ``annotate`` lines. Raises ConfigError if a tensor has an attribute of that name anyway."""
    for directive, path, module in job.each("annotate"):
        name, key = directive.args["parameter"], directive.args["key"]
        parameter = module._parameters.get(name)
        if parameter is None:
            raise ConfigError(no_parameter(path, module, name, directive.where))
        if key not in parameter.__dict__ and hasattr(parameter, key):
            raise ConfigError(
                f"annotate on {path}: every tensor has an attribute {key!r}: choose another name for the note ({directive.where})"
            )
        setattr(parameter, key, directive.args.get("value"))
