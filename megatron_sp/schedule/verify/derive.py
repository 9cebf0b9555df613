"""Measurement of what lines leave open: the adjoint of an all_gather, and where random numbers must differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import Group
from megatron_sp.schedule.core.directives import Directive, Mesh, expand
from megatron_sp.schedule.core.hooks import tensors_of
from megatron_sp.utils.errors import ConfigError


def as_said(directives: list[Directive]) -> list[Directive]:
    """Return the lines without what was measured, which ``Directive.derived`` marks."""
    written = []
    for line in directives:
        if line.derived and line.do != "rng":
            args = {name: value for name, value in line.args.items() if name not in line.derived}
            line = replace(line, args=args, derived=())
        if not line.derived:
            written.append(line)
    return written


def with_adjoints(directives: list[Directive], adjoints: Mapping[int, str]) -> list[Directive]:
    """Add measured adjoints to the lines."""
    return [
        replace(d, args={**d.args, "grad": adjoints[i]}, derived=("grad",)) if adjoints.get(i) else d
        for i, d in enumerate(directives)
    ]


def is_open(line: Directive) -> bool:
    """Return whether a line is an all_gather without an adjoint."""
    return line.do == "sync" and line.args["op"] == "all_gather" and "grad" not in line.args


def _spread(x: Tensor, group: Group) -> tuple[float, float]:
    # (largest difference between the ranks, largest magnitude), by one reduction of x and -x to their maxima
    if not x.numel():
        return 0.0, 0.0
    extremes = all_reduce(torch.stack([x, -x]).clone(memory_format=torch.contiguous_format), group, "max")
    return float((extremes[0] + extremes[1]).abs().max()), float(extremes.abs().max())


@dataclass
class OpenAdjoint:
    """Adjoint of one all_gather, decided by the gradients that arrive."""

    by_module: dict[str, str] = field(default_factory=dict)  # for a line may name several

    def choose(self, path: str, grad: Tensor, group: Group) -> str:
        # gradients of ranks that go on alike are equal, and parts of a sum otherwise
        spread, largest = _spread(grad, group)
        value = "slice" if spread <= 1e-6 * largest else "reduce_scatter"
        if largest:  # else this gradient is not needed
            self.by_module[path] = value
        return value

    def decided(self, line: Directive) -> str:
        # what all modules need; "" if no gradient arrived
        paths = {value: path for path, value in self.by_module.items()}
        if len(paths) > 1:
            needs = " and ".join(f"grad='{value}' at {path}" for value, path in paths.items())
            raise ConfigError(f"{line} ({line.where}) needs {needs}: write a line for each (E10)")
        return next(iter(paths), "")


def measuring(directives: Iterable[Directive]) -> tuple[list[Directive], dict[int, OpenAdjoint]]:
    # the lines with an ``OpenAdjoint`` where there is none, and these, by index
    lines, adjoints = list(directives), dict[int, OpenAdjoint]()
    for i, line in enumerate(lines):
        if is_open(line) and line.args.get("over") != "dp":
            adjoints[i] = OpenAdjoint()
            lines[i] = replace(line, args={**line.args, "grad": adjoints[i]})
    return lines, adjoints


class Draws(TorchFunctionMode):
    """Mode that finds where dropout is on, and whether its operand differs between ranks."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.groups = {"tp": (mesh.tp,), "sp": (mesh.sp, mesh.cp)}
        self.found: dict[str, dict[str, bool]] = {"tp": {}, "sp": {}}  # axis -> {path: whether it differs}
        self._running: list[str] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, path=path: self._running.append(path)))
            self._handles.append(module.register_forward_hook(lambda *_: self._running.__delitem__(-1)))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_random(func.__name__, args, kwargs):
            path = self._running[-1] if self._running else ""
            operand = next(t for t in tensors_of([*args, *kwargs.values()]).values() if t.is_floating_point())
            for axis, groups in self.groups.items():
                # over all groups, for the ranks of one may find a difference that those of another do not
                differs = [_spread(operand.detach(), group)[0] > 0 for group in groups]
                self.found[axis][path] = self.found[axis].get(path, False) or any(differs)
        return result


def _is_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # whether a call draws random numbers; its own arguments say whether dropout is on

    def arg(place: int, word: str, default: Any) -> Any:
        return kwargs.get(word, args[place] if place < len(args) else default)

    if name == "scaled_dot_product_attention":
        return float(arg(4, "dropout_p", 0.0)) > 0
    if "dropout" in name:
        return float(arg(1, "p", 0.5)) > 0 and bool(arg(2, "training", arg(2, "train", True)))
    return name in ("rand_like", "randn_like", "bernoulli", "bernoulli_")


def random_lines(model: nn.Module, directives: list[Directive], draws: Draws) -> Iterator[Directive]:
    """Yield rng lines where random numbers must differ, or be the same again inside."""
    tp, sp = draws.found["tp"], draws.found["sp"]
    forks = [path for path in tp if tp[path] and not says_random(model, directives, path, "tp")]
    inside = tuple(f"{fork}." if fork else "" for fork in forks)
    alike = [path for path in sorted(tp) if not tp[path] and path.startswith(inside)]
    over_sp = [path for path in sp if sp[path] and not says_random(model, directives, path, "sp")]
    # those of tp come first, around those of sp: what is the same for the ranks of tp still differs over sp
    for paths, axis in ((forks, "tp"), (alike, "same"), (over_sp, "sp")):
        yield from (Directive(path, "rng", {"axis": axis}, "verify()", ("axis",)) for path in paths)


def says_random(model: nn.Module, directives: list[Directive], path: str, axis: str) -> bool:
    # whether an rng line about tp or sp covers a module
    others = {"tp": ("sp", "dp"), "sp": ("tp", "dp", "same")}[axis]
    paths = {p for d in directives if d.do == "rng" and d.args["axis"] not in others for p in expand(model, d.on)}
    return any(path == p or path.startswith(f"{p}.") or not p for p in paths)
