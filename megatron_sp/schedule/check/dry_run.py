"""Dry run of a split model, without a job and without weight values: placements flow through it, and whatever does not fit is reported.

The model is copied without its weights (meta device); ids, masks, positions and buffers stay real, because models
inspect them. It runs twice, whole and split: a share times the number of ranks must have the whole model's shape in
every step, so a size that is stored in a module shows at once. ``follower.py`` observes the runs. Each axis has a run
of its own, in which exchanges over the others change no placement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.apply import apply, length_multiple
from megatron_sp.schedule.apply.hf_attention import one_sequence_a_row
from megatron_sp.schedule.apply.splits import Split
from megatron_sp.schedule.check.call_values import Seen
from megatron_sp.schedule.check.follower import Axis, Flow, Follower, WrittenLater
from megatron_sp.schedule.check.meta_copy import input_of, meta_copy, without_weights_in
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.core.placement_steps import tensors_in
from megatron_sp.schedule.core.placements import WHOLE, NotFollowed, Placement

LATER = ("zero", "rng", "checkpoint")  # change no placement


def dry_run(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]) -> Flow:
    """Follow placements over tp through one forward pass.

    Args:
        model: not yet split; is not changed.
        batch: its keyword arguments.
    Raises:
        PlacementError: lines that do not fit together.
        ConfigError: raised by ``apply``; or the model cannot be run without weight values.
    """
    mesh = Mesh(tp=mesh.tp)
    said = [d for d in directives if d.do not in (*LATER, "ulysses")]
    if mesh.tp.size() == 1:  # every tensor is that of the whole model
        return Flow()
    batch = inputs_of(batch)

    def run(late: bool) -> Flow:
        made, own = meta_copy(model, late), [without_weights_in(d) for d in said]
        record = _run_whole(made, batch, late)
        lines = _lines_by_path(made, directives)
        applied = apply(made, own, mesh, seq_dim, rules=False)
        return _run_split(made, Axis("tp", mesh.tp), lines, record, placements_of(applied, own), batch, late)

    return _once_or_late(run)


def dry_run_over_sp(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]) -> Flow:
    """Follow placements over sp through one forward pass: shares of positions (in attention, of heads), and parts of the loss.

    All parameters are R: every rank has them and uses them on its positions, and their gradients are summed over sp.
    The reference run is split over tp as well, with sequences cut over one rank. Arguments and errors are those of
    ``dry_run``.
    """
    if mesh.sp.size() == 1:
        return Flow()
    said, batch = [without_overlap(d) for d in directives if d.do not in LATER], inputs_of(batch)
    multiple = length_multiple(said, mesh.sp.size(), mesh.tp.size())
    line = next((f"ulysses at {d.where}" for d in directives if d.do == "ulysses"), "")
    summed = Placement("R", since="gradients of parameters are summed over sp")

    def run(late: bool) -> Flow:
        one, made = meta_copy(model, late), meta_copy(model, late)
        apply(one, [without_weights_in(d) for d in said], Mesh(tp=mesh.tp), seq_dim, rules=False, multiple=multiple)
        record = _run_whole(one, batch, late)
        lines = _lines_by_path(made, directives)
        apply(made, [without_weights_in(d) for d in said], Mesh(tp=mesh.tp, sp=mesh.sp), seq_dim, rules=False)
        parameters = {name: summed for name, p in made.named_parameters() if p.requires_grad}
        return _run_split(made, Axis("sp", mesh.sp, line, True), lines, record, parameters, batch, late)

    return _once_or_late(run)


def dry_run_over_dp(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]) -> Flow:
    """Follow placements over dp through one forward pass, if a line is about dp: each rank has rows of its own.

    As over sp, parameters are R; the reference run has the rows of all ranks. A loss may stay a partial sum or a mean,
    which the training loop divides. Arguments and errors are those of ``dry_run``.
    """
    if mesh.dp.size() == 1 or not any(d.args.get("over") == "dp" for d in directives):
        return Flow()
    said, batch = [d for d in directives if d.do not in (*LATER, "ulysses")], inputs_of(batch)
    dim = 0 if seq_dim else 1
    rows = next((t.shape[dim] for t in tensors_in(batch) if t.ndim > dim), 0)
    cut = [t for t in tensors_in(batch) if t.ndim > dim and t.shape[dim] == rows]
    of_all = {name: torch.cat([t] * mesh.dp.size(), dim) if any(t is c for c in cut) else t for name, t in batch.items()}
    summed = Placement("R", since="gradients of parameters are summed over dp")
    known = {t: Placement("S", dim, since="each rank has rows of its own") for t in cut}

    def run(late: bool) -> Flow:
        one, made = meta_copy(model, late), meta_copy(model, late)
        apply(one, [without_weights_in(d) for d in said], Mesh(tp=mesh.tp), seq_dim, rules=False)
        record = _run_whole(one, of_all, late)
        lines = _lines_by_path(made, directives)
        apply(made, [without_weights_in(d) for d in said], Mesh(tp=mesh.tp, dp=mesh.dp), seq_dim, rules=False)
        parameters = {name: summed for name, p in made.named_parameters() if p.requires_grad}
        return _run_split(made, Axis("dp", mesh.dp, same_program=True), lines, record, parameters, batch, late, known)

    return _once_or_late(run)


def _once_or_late(run: Callable[[bool], Flow]) -> Flow:
    """Run with values in the tensors that the model creates, for it may inspect them; if it writes results into them, run again without."""
    try:
        return run(False)
    except WrittenLater:
        pass
    try:
        return run(True)
    except WrittenLater as error:
        raise NotFollowed(str(error)) from None


def without_overlap(line: Directive) -> Directive:
    """Return a line whose exchanges run one by one: they send the same, and whether they could start early is checked."""
    return replace(line, args={**line.args, "only_looks": True}) if line.do == "ulysses" else line


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs for the dry run, of a batch."""
    return {name: input_of(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _run_whole(model: nn.Module, batch: dict[str, Any], late: bool) -> dict[str, list[Seen]]:
    """Run the whole model and return its calls, by path of the calling module."""
    whole = Follower(model, late=late)
    with whole.inside(), one_sequence_a_row():
        model(**batch)
    return whole.record


def _run_split(
    model: nn.Module, axis: Axis, lines: Mapping[str, list[tuple[int, Directive]]], expected: Mapping[str, list[Seen]],
    parameters: Mapping[str, Placement], batch: dict[str, Any], late: bool,
    known: Mapping[Tensor, Placement] | None = None,
) -> Flow:  # fmt: skip
    split = Follower(model, axis, lines, expected, parameters, late)
    split.known.update(known or {})
    if axis.name == "sp":
        split.known.update({t: Placement("R", since="the batch") for t in tensors_in(batch) if t.requires_grad})
    with split.inside(), one_sequence_a_row():
        result = model(**batch)
    split.finish(result)
    return split.flow


def placements_of(applied: Applied, directives: list[Directive]) -> dict[str, Placement]:
    """Return the placements of parameters and split buffers, by name."""
    found = {}
    for name in [*applied.specs, *applied.splits]:
        split = applied.splits.get(name)
        if split is not None:
            found[name] = _split_placement(split, applied.mesh.tp.size())
        elif applied.specs[name].sums:
            where = next((d for d in directives if d.do == "sum_gradients" and _names(applied.model, d, name)), None)
            where = where or next((d for d in directives if d.do == "sequence"), None)
            found[name] = Placement("R", since=f"{where.do} at {where.where}" if where else "")
        else:
            found[name] = WHOLE
    return found


def _split_placement(split: Split, size: int) -> Placement:
    blocks = split.blocks or ()
    even = len(set(blocks)) <= 1
    uneven = () if even else tuple(n * split.copies // size for n in blocks)
    outer = max(1, len(blocks)) if even else 1
    return Placement("S", split.dim, outer, uneven, split.copies, since=f"split at {split.where}")


def _names(model: nn.Module, directive: Directive, parameter: str) -> bool:
    return any(parameter.startswith(f"{path}.") for path in expand(model, directive.on))


def _lines_by_path(model: nn.Module, directives: list[Directive]) -> dict[str, list[tuple[int, Directive]]]:
    """Return the lines, with their indices, by path of the modules they are about."""
    found: dict[str, list[tuple[int, Directive]]] = defaultdict(list)
    for place, directive in enumerate(directives):
        paths = expand(model, directive.on)
        if directive.do == "sequence":
            paths = [*paths, *expand(model, directive.args["leave"])]
        elif directive.do == "ulysses":
            paths = [path for key in ("enter", "leave", "core") if key in directive.args for path in expand(model, directive.args[key])]
        for path in paths:
            found[path].append((place, directive))
    return found
