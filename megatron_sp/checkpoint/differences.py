"""Table of the differences between the tensors a model wants and those a checkpoint has, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from megatron_sp.checkpoint.manifest import Manifest
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.checkpoint.safetensors_file import DTYPE_NAMES

_MAX_ROWS = 20

Row = tuple[str, str, str]  # name, in the checkpoint, wanted


def differences(manifest: Manifest, wanted: dict[str, GlobalTensor], unexpected: Collection[str], cast: bool) -> list[Row]:
    """Return a row for every tensor that cannot be loaded as requested.

    Args:
        unexpected: names in the checkpoint that no rank wants; empty for a partial load.
        cast: whether a stored tensor may be converted to the wanted dtype.
    """
    rows: list[Row] = []
    for name, tensor in wanted.items():
        ask = _show(DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.shape)
        if name not in manifest.tensors:
            near = difflib.get_close_matches(name, sorted(unexpected) or sorted(manifest.tensors), n=1, cutoff=0.6)
            rows.append((name, f"missing{f'; nearest: {near[0]}' if near else ''}", ask))
            continue
        dtype, shape = manifest.tensors[name]
        if shape != tuple(tensor.shape) or (not cast and dtype != DTYPE_NAMES.get(tensor.dtype)):
            rows.append((name, _show(dtype, shape), ask))
    rows += [(name, _show(*manifest.tensors[name]), "not wanted") for name in sorted(unexpected)]
    return rows


def table(step_dir: Path, rows: list[Row]) -> str:
    """Return the error message for a checkpoint that does not fit the model."""
    shown = [("tensor", "in the checkpoint", "wanted"), *rows[:_MAX_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {stored:<{widths[1]}}  {wanted}" for name, stored, wanted in shown]
    if len(rows) > _MAX_ROWS:
        lines.append(f"  ... and {len(rows) - _MAX_ROWS} more")
    return "\n".join(
        [
            f"{step_dir} does not fit this model: {len(rows)} of its tensors differ",
            *lines,
            "Give the model's flags as they were when it was saved (or --use-checkpoint-args),"
            " or load a part of it (--finetune, --no-load-optim).",
        ]
    )


def _show(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
