"""Check that a checkpoint contains exactly what its model needs: every tensor of the source gets a fate, or the conversion fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from megatron_sp.convert.copies import Correspondence, TensorStore
from megatron_sp.convert.model import Fate, nearest
from megatron_sp.utils.errors import CheckpointError

_SHOWN = 12
_MAX_NAME = 200  # characters of a name that are shown


class Coverage(NamedTuple):
    """A correspondence that the source satisfies, and the fates of the source's tensors."""

    correspondence: Correspondence
    fates: list[Fate]


def match_tensors(
    where: str, correspondence: Correspondence, store: TensorStore, ignored: Mapping[str, str], *, tied: Mapping[str, str],
    shown: Mapping[str, str] | None = None,
) -> Coverage:  # fmt: skip
    """Compare the tensors of a checkpoint with those that its model needs.

    Args:
        where: the checkpoint, for error messages.
        correspondence: lists all needed tensors.
        store: the tensors of the checkpoint.
        ignored: regular expressions of names that are dropped, each with the reason.
        tied: further names of tensors that the model has only once; both must have the same values.
        shown: names used in the files, for messages and fates.
    Raises:
        CheckpointError: tensors are missing, of another shape, or unknown; the message lists each with the nearest
            names.
    """
    shown = shown or {}
    there, needed = store.tensors(), correspondence.theirs
    unknown = [name for name in there if name not in needed]
    missing = [name for name in needed if name not in there]
    problems = [(name, " is missing", unknown) for name in missing]
    problems += [
        (name, f" is {list(there[name].shape)}, {list(shape)} is expected", [])
        for name, shape in needed.items()
        if name in there and there[name].shape != shape
    ]
    fates = []
    for copy in correspondence.copies:
        fates.append(Fate(shown.get(copy.theirs.name, copy.theirs.name), copy.ours.name, "compared only" if copy.replica else ""))
    for name in unknown:
        reason = _reason(name, store, ignored, tied)
        if reason is None:
            problems.append((name, " has no place in this model", list(needed)))
        else:
            fates.append(Fate(shown.get(name, name), "", reason))
    if problems:
        raise CheckpointError(f"{where} does not fit the model that it claims to be:\n" + "\n".join(_lines(problems, shown)))
    return Coverage(correspondence, fates)


def _lines(problems: list[tuple[str, str, list[str]]], shown: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each of the first problems (name, problem, candidates for similar names); the rest are only counted."""
    for name, what, among in problems[:_SHOWN]:
        yield f"  {shown.get(name, name)[:_MAX_NAME]}{what}{nearest(name[:_MAX_NAME], among)}"
    if len(problems) > _SHOWN:
        yield f"  and {len(problems) - _SHOWN} more"


def _reason(name: str, store: TensorStore, ignored: Mapping[str, str], tied: Mapping[str, str]) -> str | None:
    """Return why a tensor that is not needed may be present, or None."""
    if name in tied and tied[name] in store.tensors():
        if torch.equal(store.read(name), store.read(tied[name])):
            return f"the same as {tied[name]}"
        raise CheckpointError(f"{name} must be the same as {tied[name]}, because config.json ties them, but it differs")
    return next((reason for pattern, reason in ignored.items() if re.fullmatch(pattern, name)), None)
