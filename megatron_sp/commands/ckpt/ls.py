"""``ckpt ls``: one line for each checkpoint of a run, and advice on damaged checkpoints and leftovers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint import foreign
from megatron_sp.checkpoint.find import of_another_program
from megatron_sp.commands.ckpt.facts import facts, layout_words, parameter_words
from megatron_sp.commands.ckpt.places import places_under
from megatron_sp.commands.ckpt.survey import STEP, Entry, Survey, survey
from megatron_sp.commands.ckpt.text import aligned, date, plural
from megatron_sp.utils.format import format_bytes

_HEADINGS = ("folder", "saved", "size", "files", "tensors", "parameters", "optimizer", "processes", "loss", "state")
_RIGHT = (2, 3, 4, 8)


def run(paths: Sequence[Path], *, as_json: bool) -> int:
    """Print the lists. Raises CheckpointError if a folder does not exist."""
    surveys = [survey(place) for path in paths for place in places_under(path)]
    if as_json:
        print(json.dumps([_as_dict(found) for found in surveys], indent=1))
    else:
        print("\n\n".join("\n".join(_text(found)) for found in surveys))
    return 0


def _text(found: Survey) -> list[str]:
    place = found.place
    if not found.entries:
        if (other := foreign.identify(place.folder)) is not None:
            return of_another_program(place.folder, other, None).splitlines()
        return [f"{place.folder}: no checkpoint", *_indented(_advice(found))]
    total = sum(entry.num_bytes for entry in found.entries)
    head = f"{place.folder}: {plural(len(found.steps), 'checkpoint')}"
    head += f", {len(found.leftovers)} left over" if found.leftovers else ""
    rows = [_HEADINGS, *(_row(found, entry) for entry in found.entries)]
    return [f"{head}, {format_bytes(total)}", *aligned(rows, _RIGHT), *_indented(_advice(found))]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _row(found: Survey, entry: Entry) -> tuple[str, ...]:
    loss = found.loss_of(entry)
    told = facts(entry.manifest, entry.state) if entry.manifest else None
    return (
        entry.path.name, date(entry.saved), format_bytes(entry.num_bytes), str(entry.num_files),
        f"{told['tensors']:,}" if told else "-", parameter_words(told) if told else "-",
        ("yes" if told["optimizer"] else "no") if told else "-", layout_words(told["layout"]) if told else "-",
        "-" if loss is None else f"{loss:.4f}", _state(found, entry),
    )  # fmt: skip


def health(found: Survey, entry: Entry) -> str:
    """Return the state of an entry in a few words: complete, damaged, being written or deleted, unfinished, set aside, abandoned."""
    if entry.kind == "part":
        return "being written or deleted" if found.is_written else "unfinished"
    word = {STEP: "complete", "replaced": "set aside", "abandoned": "abandoned"}[entry.kind]
    return word if entry.is_complete else "damaged" if entry.kind == STEP else f"{word}, damaged"


def _state(found: Survey, entry: Entry) -> str:
    words = [health(found, entry)]
    if entry.problems and entry.kind != "part":
        more = f" (and {len(entry.problems) - 1} more)" if len(entry.problems) > 1 else ""
        words[0] += f": {entry.problems[0].splitlines()[0]}{more}"
    words += ["latest"] if entry.kind == STEP and entry.step == found.latest else []
    words += ["a resume takes it"] if found.place.only is None and entry is found.resumes_from else []
    return ", ".join(words)


def _advice(found: Survey) -> list[str]:
    """Return notes and advice for the user, one line each."""
    run, newest, lines = found.place.run or found.place.folder, found.newest, list(found.notes)
    if found.is_written and found.writer is not None:
        lines.append(f"a job is writing here: {found.writer.who}, last sign of life {found.writer.age_s:.0f} s ago")
    if found.place.only is None and newest is not None and not newest.is_complete:
        before = [entry.path.name for entry in found.steps if entry.is_complete and entry.step < newest.step]
        way = f"--resume-fallback takes {before[-1]}" if before else "there is no complete one before it"
        lines.append(f"a resume stops at {newest.path.name}, which is damaged: {way}")
    takes = found.resumes_from
    if takes is not None and takes.manifest is not None and not facts(takes.manifest, takes.state)["optimizer"]:
        lines.append(f"{takes.path.name} has no optimizer state: it loads with --finetune, or with --no-load-optim")
    kinds = {entry.kind for entry in found.leftovers}
    if "part" in kinds and not found.is_written:
        lines.append("unfinished: a save or a deletion was cut short; the next job that saves here removes it")
    if kinds & {"replaced", "abandoned"}:
        lines.append("set aside, abandoned: from a continuation of the run that was given up; each can be loaded by its path")
    if found.entries:
        lines.append(f"checked: manifests and sizes; not the files' contents, which megatron-sp ckpt verify {run} compares")
    if kinds and not found.is_written:
        lines.append(f"to delete what is left over: megatron-sp ckpt prune {run} --leftovers")
    return lines


def _as_dict(found: Survey) -> dict[str, Any]:
    resumes = found.resumes_from
    return {
        "run": str(found.place.run) if found.place.run else None,
        "folder": str(found.place.folder),
        "latest": found.latest,
        "resume": resumes.step if resumes and found.place.only is None else None,
        "writer": {"who": found.writer.who, "age_s": found.writer.age_s, "alive": found.writer.is_alive} if found.writer else None,
        "checkpoints": [_entry_as_dict(found, entry) for entry in found.steps],
        "leftovers": [_entry_as_dict(found, entry) for entry in found.leftovers],
        "notes": _advice(found),
    }


def _entry_as_dict(found: Survey, entry: Entry) -> dict[str, Any]:
    loss = found.loss_of(entry)
    record = {
        "path": str(entry.path), "step": entry.step, "health": health(found, entry), "problems": entry.problems, "saved": entry.saved,
        "bytes": entry.num_bytes, "files": entry.num_files, "loss": loss if loss is not None and math.isfinite(loss) else None,
    }  # fmt: skip
    return record | (facts(entry.manifest, entry.state) if entry.manifest else {})
