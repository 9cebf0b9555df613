"""Inference of what the lines of a schedule leave open: the adjoint of an all_gather, and where random numbers must differ.

``check()`` stores what the dry run has inferred as marked lines (``Directive.derived``), which are dropped and inferred
again when it is called again. ``apply()`` does the same for lines that were never checked, and refuses mistakes. If
something is open and no dry run is possible, it refuses too: a guess could silently train with wrong gradients. Lines
that ``verify()`` has measured on ranks are accepted whatever the dry run reports, unless one is about dp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from megatron_sp.schedule.apply.randomness import draws, dropping
from megatron_sp.schedule.check.check import Report, check, follow, says_random
from megatron_sp.schedule.check.decision import decide
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.placements import NotFollowed, PlacementError
from megatron_sp.schedule.verify.verify import DoesNotRun, Verdict
from megatron_sp.utils.errors import ConfigError

_SHOWN = 6
_IDLE = ("zero", "checkpoint", "annotate")


def as_said(directives: list[Directive]) -> list[Directive]:
    """Return the lines as they were written, without what was inferred."""
    said = [d for d in directives if d.do != "rng" or not d.derived]
    return [replace(d, args={k: v for k, v in d.args.items() if k not in d.derived}, derived=()) if d.derived else d for d in said]


def with_derived(directives: list[Directive], report: Report) -> list[Directive]:
    """Return the lines with the inferred adjoints, and with rng lines where random numbers must differ."""
    said = [
        replace(d, args={**d.args, "grad": report.derived[i]}, derived=("grad",)) if i in report.derived else d
        for i, d in enumerate(directives)
    ]
    over_tp = [Directive(path, "rng", {"axis": axis}, "check()", ("axis",)) for path, axis in report.forks.items()]
    # around those of tp: what is the same for the ranks of tp still differs over sp
    return said + over_tp + [Directive(path, "rng", {"axis": "sp"}, "check()", ("axis",)) for path in report.sp_forks]


def complete(
    model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any] | None = None, *, guess: bool = False,
    verified: bool = False,
) -> list[Directive]:  # fmt: skip
    """Return the lines with everything that ``check()`` would add to them.

    Args:
        batch: keyword arguments of the model (default: an example, if its configuration describes its inputs).
        guess: leave open what cannot be inferred; if nothing is open there is no dry run.
        verified: ``verify()`` has accepted these lines, with the default of each adjoint they do not give; it does not
            see dropout.
    Raises:
        PlacementError: a mistake that the dry run found.
        ConfigError: the lines are impossible; or something is open, and no dry run is possible; names the lines and
            modules.
    """
    said, reason = as_said(directives), ""
    try:
        decide(model, said, mesh, seq_dim)
    except NotFollowed as error:
        reason = str(error)
    over_dp = mesh.dp.size() > 1 and any(d.args.get("over") == "dp" for d in said)  # verify() gives all ranks of dp the same rows
    is_open = over_dp or any(open_gathers(said, mesh)) or draws(model) or any(d.args.get("overlap_qkv") for d in said)
    idle = all(d.do in _IDLE for d in said)  # nothing is split, so nothing can be missing
    if idle or (mesh.tp.size() == mesh.sp.size() == mesh.cp.size() == 1 and not over_dp) or (not is_open and (guess or verified)):
        return said
    try:
        report = Report(dry=False, why_not=reason) if reason else follow(model, said, mesh, seq_dim, batch)
    except NotFollowed as error:
        reason = str(error)
    except PlacementError as error:
        if not verified or over_dp:
            raise
        reason = str(error)
    else:
        if report.dry:
            return with_derived(said, report)
        reason = report.why_not
    _require_said(model, said, mesh, reason, guess=guess, verified=verified)
    if not guess and not verified and mesh.tp.rank() == mesh.dp_sp.rank() == 0:
        warnings.warn(f"apply(): no dry run has looked for missing sums ({reason}): verify(batch), on ranks, measures them", stacklevel=4)
    return said


def explained(
    compare: Callable[[], Verdict], model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]
) -> Verdict:
    """Run ``compare``, and add what ``check()`` reports to a bad verdict, so that both give one answer.

    Raises:
        PlacementError: the split model does not run, and ``check()`` knows why.
        DoesNotRun: it does not run, and ``check()`` does not know why.
    """
    try:
        verdict = compare()
    except DoesNotRun as error:  # if sizes do not fit, a line may be missing, which check() names
        why = _mistake(model, directives, mesh, seq_dim, batch)
        if not why:
            raise
        raise PlacementError(f"{why}\nmeasured: {error.failure}") from error.__cause__
    if not verdict.ok:
        verdict.why = _mistake(model, directives, mesh, seq_dim, batch)
    return verdict


def _mistake(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]) -> str:
    """Return the mistake that ``check()`` finds; "" if there is none, or if the model cannot be followed, so the measurement stands."""
    try:
        check(model, as_said(directives), mesh, seq_dim, batch)
    except NotFollowed:
        return ""
    except ConfigError as error:
        return str(error)
    except Exception:  # a model that cannot be followed
        return ""
    return ""


def _require_said(model: nn.Module, said: list[Directive], mesh: Mesh, reason: str, *, guess: bool, verified: bool) -> None:
    """Raise ConfigError if something is open that was neither inferred nor measured, and no guess is allowed."""
    gathers = [] if guess or verified else list(open_gathers(said, mesh))
    found = [] if guess else [*gathers, *open_dropout(model, said, mesh)]
    if not found:
        return
    shown = [*found[:_SHOWN], *([f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])]
    listed = "\n  ".join(shown)
    way = "" if not gathers else "\nor have verify(batch) measure on ranks that what is usual is right here; apply() then believes it"
    raise ConfigError(f"the schedule leaves open what a dry run would decide, and there was none ({reason}):\n  {listed}{way}")


def open_gathers(directives: list[Directive], mesh: Mesh) -> Iterator[str]:
    """Yield, for each all_gather that does not give its adjoint, what to write."""
    for d in directives:
        if d.do != "sync" or d.args["op"] != "all_gather" or "grad" in d.args or d.args.get("over") == "dp":
            continue
        if mesh.group(d.args.get("over", "tp")).size() > 1:
            yield (
                f"all_gather at {d.on or 'the model'} ({d.where}): give grad='reduce_scatter' if the ranks use the result differently (a"
                " split layer), or grad='slice' if alike"
            )


def open_dropout(model: nn.Module, directives: list[Directive], mesh: Mesh) -> Iterator[str]:
    """Yield, for each module with dropout that no rng line covers, what to write."""
    cut = mesh.sp.size() > 1 and any(d.do == "ulysses" or d.args.get("over") == "sp" for d in directives)
    cut = cut or (mesh.cp.size() > 1 and any(d.do == "context" for d in directives))
    for path in dropping(model):
        if mesh.tp.size() > 1 and not says_random(model, directives, path, "tp"):
            yield f"dropout at {path or 'the model'}: use .rng('tp') if it works on what is split there, else .rng('same')"
        if cut and not says_random(model, directives, path, "sp"):
            yield f"dropout at {path or 'the model'}: use .rng('sp'), for each rank has other positions there"
