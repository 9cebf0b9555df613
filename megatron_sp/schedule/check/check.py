"""Check of a schedule, without a job and without a GPU: rules on its lines, then a dry run of the split model.

The verdict is about sums and shares, not about values: ``verify()`` measures, on ranks, whether the split model
computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron_sp.schedule.apply.ulysses_options import OF_CONTEXT
from megatron_sp.schedule.check.decision import decide
from megatron_sp.schedule.check.dry_run import Flow, dry_run, dry_run_over_dp, dry_run_over_sp
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh, imagined
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.core.placements import NotFollowed, Placement, PlacementError
from megatron_sp.utils.errors import ConfigError


@dataclass
class Report:
    """Result of ``check()`` for a schedule without mistakes.

    Attributes:
        inputs, outputs: placements over tp of the tensors that enter and leave each module, by path, then by name or
            index.
        sp_inputs, sp_outputs: the same over sp.
        derived: inferred adjoint of each all_gather that gives none, by the index of its line: reduce_scatter or slice.
        forks: modules where random numbers must differ between ranks (tp), or be the same again inside such a module
            (same), by path.
        sp_forks: modules where they must differ between the ranks of sp.
        warnings: remarks that are no mistakes.
        dry: whether there was a dry run.
        why_not: the reason if there was none, else "".
    """

    inputs: dict[str, dict[str, Placement]] = field(default_factory=dict)
    outputs: dict[str, dict[str, Placement]] = field(default_factory=dict)
    sp_inputs: dict[str, dict[str, Placement]] = field(default_factory=dict)
    sp_outputs: dict[str, dict[str, Placement]] = field(default_factory=dict)
    derived: dict[int, str] = field(default_factory=dict)
    forks: dict[str, str] = field(default_factory=dict)
    sp_forks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    dry: bool = True
    why_not: str = ""

    def __str__(self) -> str:
        """Return one line for each module with an input or output that is cut, or summed later, and the warnings."""
        rows = [*_edges(self.inputs, self.outputs, ""), *_edges(self.sp_inputs, self.sp_outputs, "over sp: ")]
        if not self.dry and not self.warnings:
            rows.append("the lines fit together; no dry run: give check() a batch, the model's keyword arguments")
        return "\n".join([*rows, *(f"warning: {w}" for w in self.warnings)])


def _edges(inputs: dict[str, dict[str, Placement]], outputs: dict[str, dict[str, Placement]], prefix: str) -> Iterator[str]:
    for path, leaves in outputs.items():
        enters = inputs.get(path, {})
        sides = [", ".join(f"{n}: {x}" for n, x in edges.items()) for edges in (enters, leaves)]
        if any(x.kind != "I" for edges in (enters, leaves) for x in edges.values()):
            yield f"{prefix}{path or '(the model)'}: {sides[0]} -> {sides[1]}"


def check(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any] | None = None) -> Report:
    """Check a schedule for mistakes.

    Args:
        batch: keyword arguments of the model, of any size that fits; None: an example, if the model's configuration
            describes its inputs.
    Raises:
        PlacementError: what is wrong, where, and because of which line.
    """
    decide(model, directives, mesh, seq_dim)
    return follow(model, directives, mesh, seq_dim, batch)


def follow(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any] | None = None) -> Report:
    """Follow placements through the model: the second half of ``check``, for lines that ``decide`` has accepted."""
    batch = batch if batch is not None else example(model, mesh)
    if batch is None:
        return Report(dry=False, why_not="it was given no batch, the model's keyword arguments")
    if any(d.do == "hook" for d in directives):
        why = "what functions at hooks do between ranks is not known"
        return Report(warnings=[f"no dry run: {why}; verify() sees it"], dry=False, why_not=why)
    not_followed = ""
    try:
        flow = dry_run(model, directives, mesh, seq_dim, batch)
    except PlacementError:
        raise
    except ConfigError as error:
        if not any(d.do in ("ulysses", "context") for d in directives):  # which pad what this dry run cannot share
            raise
        not_followed = str(error)
    over_sp, not_followed_over_cp = _follow_positions(model, directives, mesh, seq_dim, batch)
    if not_followed:
        return Report(warnings=[f"no dry run over tp: {not_followed}"], dry=False, why_not=not_followed)
    notes = [*flow.notes, *over_sp.notes, *([f"no dry run over cp: {not_followed_over_cp}"] if not_followed_over_cp else [])]
    report = Report(flow.inputs, flow.outputs, over_sp.inputs, over_sp.outputs, warnings=notes)
    report.derived = _derived(flow, directives) | _derived(over_sp, directives)
    _follow_dp(report, model, directives, mesh, seq_dim, batch)
    _find_forks(report, flow, model, directives)
    _find_forks_over_sp(report, over_sp, model, directives)
    return report


def _follow_positions(
    model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]
) -> tuple[Flow, str]:  # fmt: skip
    """Follow placements over sp, or over cp as if its ranks were sp's: outside of attention, positions are cut alike.

    Returns:
        What was found, and why it is nothing if cp cannot be followed.
    """
    around = next((d for d in directives if d.do == "context"), None)
    if mesh.sp.size() > 1 or mesh.cp.size() == 1 or around is None:
        return dry_run_over_sp(model, directives, mesh, seq_dim, batch), ""
    as_if = directives
    if not any(d.do == "ulysses" for d in directives):
        args = {name: value for name, value in around.args.items() if name not in OF_CONTEXT}
        as_if = [replace(d, do="ulysses", args={**args, "axis": "sp"}) if d is around else d for d in directives]
    try:
        return dry_run_over_sp(model, as_if, replace(mesh, sp=imagined(2)), seq_dim, batch), ""
    except PlacementError:
        raise
    except ConfigError as error:  # one head on a tp rank, for instance, which two ranks of sp could not share
        return Flow(), str(error)


def _follow_dp(report: Report, model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]) -> None:
    """Follow lines about dp, whose ranks have rows of their own. What the dry run does not know of rows is a warning, not a mistake."""
    try:
        report.derived |= _derived(dry_run_over_dp(model, directives, mesh, seq_dim, batch), directives)
    except NotFollowed as error:
        report.warnings += [
            f"{d.on or 'the model'}: what {d.do} does over dp was not followed ({d.where}): {error}"
            for d in directives
            if d.args.get("over") == "dp"
        ]
    except PlacementError as error:
        lines = [f"{d.do} at {d.where}" for d in directives if d.args.get("over") == "dp"]
        raise PlacementError(f"{error}; lines about dp: {', '.join(lines)}") from None


def _find_forks_over_sp(report: Report, flow: Flow, model: nn.Module, directives: list[Directive]) -> None:
    """Find dropout on shares of positions, which must draw different numbers on each rank of sp (E14)."""
    for path, name in flow.forks.items():
        if says_random(model, directives, path, "sp"):
            continue
        report.sp_forks.append(path)
        words = f"{path or 'the model'}: {name} on shares of positions: the random numbers of sp's ranks are made to differ there"
        report.warnings.append(f"{words} (E14)")


def _find_forks(report: Report, flow: Flow, model: nn.Module, directives: list[Directive]) -> None:
    """Find modules whose random numbers must differ between the ranks of tp, and that no rng line mentions (E14)."""
    for path, name in flow.forks.items():
        if says_random(model, directives, path, "tp"):
            continue
        report.forks[path] = "tp"
        words = f"{path or 'the model'}: {name} on shares: the ranks' random numbers are made to differ there"
        if path in flow.alike:
            words += ", also in its dropout on what all ranks have whole, which must not: give it dropout modules of its own"
        report.warnings.append(f"{words} (E14)")
    for path in sorted(flow.alike):
        if any(path.startswith(f"{fork}.") for fork in report.forks) and path not in report.forks:
            report.forks[path] = "same"


def _derived(flow: Flow, directives: list[Directive]) -> dict[int, str]:
    """Return one adjoint for each line. Raises PlacementError if its modules need different ones (E10)."""
    found: dict[int, tuple[str, str, str]] = {}
    for (place, path), choice in flow.choices.items():
        if not choice.value:
            continue  # this gradient is not needed
        grad = "slice" if choice.value == "I" else "reduce_scatter"
        before = found.setdefault(place, (grad, path, choice.first().because))
        if before[0] != grad:
            raise PlacementError(
                f"{directives[place]} ({directives[place].where}) needs grad='{before[0]}' at {before[1]}, because of {before[2]}, and"
                f" grad='{grad}' at {path}, because of {choice.first().because}: write a line for each (E10)"
            )
    return {place: grad for place, (grad, _, _) in found.items()}


def says_random(model: nn.Module, directives: list[Directive], path: str, axis: str) -> bool:
    """Return whether an rng line about an axis (tp or sp) covers a module, or one around it."""
    others = {"tp": ("sp", "dp"), "sp": ("tp", "dp", "same")}[axis]
    paths = {p for d in directives if d.do == "rng" and d.args["axis"] not in others for p in expand(model, d.on)}
    return any(path == p or path.startswith(f"{p}.") or not p for p in paths)


def example(model: nn.Module, mesh: Mesh) -> dict[str, Any] | None:
    """Return example inputs: token ids that ranks can share (for language models with labels), images, both, or audio; None: unknown."""
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    text: Any = getattr(config, "text_config", None)
    if "input_ids" in names and text is not None and (pixels := _pixels(model, getattr(config, "vision_config", None))) is not None:
        return {"input_ids": _ids(text, mesh), **pixels}
    vocabulary = getattr(config, "vocab_size", None)
    if (image := _image(model)) is not None:
        return image
    if (sound := _sound(model, mesh)) is not None:
        return sound
    if "input_ids" not in names or not isinstance(vocabulary, int):
        return None
    ids = _ids(config, mesh)
    made = {"input_ids": ids}
    head = type(model).__name__
    if "labels" in names and ("LMHead" in head or "CausalLM" in head or "MaskedLM" in head):
        made["labels"] = ids
    return made


def _sound(model: nn.Module, mesh: Mesh) -> dict[str, Any] | None:
    """Return audio features of the length in the configuration, and decoder token ids if the model takes them; None: it takes no audio."""
    config: Any = getattr(model, "config", None)
    mels, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if "input_features" not in inspect.signature(model.forward).parameters or not isinstance(mels, int) or not isinstance(positions, int):
        return None
    made = {"input_features": torch.zeros(3, mels, 2 * positions)}
    return made | ({"decoder_input_ids": _ids(config, mesh)} if "decoder_input_ids" in inspect.signature(model.forward).parameters else {})


def _ids(config: Any, mesh: Mesh) -> torch.Tensor:
    return (torch.arange(3 * 4 * mesh.tp.size() * mesh.sp.size()) % config.vocab_size).reshape(3, -1)


def _image(model: nn.Module) -> dict[str, Any] | None:
    """Return an input for a model that takes pixels only, of the size in its configuration, or None."""
    return None if "input_ids" in inspect.signature(model.forward).parameters else _pixels(model, getattr(model, "config", None))


def _pixels(model: nn.Module, config: Any) -> dict[str, Any] | None:
    size: Any = getattr(config, "image_size", None)
    channels: Any = getattr(config, "num_channels", None)
    sides = [size, size] if isinstance(size, int) else list(size) if isinstance(size, (tuple, list)) else []
    is_known = len(sides) == 2 and all(isinstance(n, int) for n in (*sides, channels))
    if "pixel_values" not in inspect.signature(model.forward).parameters or not is_known:
        return None
    return {"pixel_values": torch.zeros(3, channels, *sides)}
