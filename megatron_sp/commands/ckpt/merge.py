"""``ckpt merge``: rewrite a checkpoint of many processes as one of a single process, with one tensor in memory at a time."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.checkpoint import verify as files
from megatron_sp.checkpoint.finite_tensors import FiniteTensors
from megatron_sp.checkpoint.manifest import read_manifest
from megatron_sp.checkpoint.stream import NativeReader, Source, TensorInfo, require_no_checkpoint, write_checkpoint
from megatron_sp.commands.ckpt.names import WEIGHTS, kind_of
from megatron_sp.commands.ckpt.places import step_folder
from megatron_sp.commands.ckpt.text import Progress, plural, warn
from megatron_sp.commands.ckpt.verify import of_bytes
from megatron_sp.data.tokenizers import kept
from megatron_sp.models.experts import stored_dtype
from megatron_sp.utils.errors import ConfigError, DiskError
from megatron_sp.utils.format import format_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(path: Path, ckpt_step: int | None, output: Path, *, weights_only: bool, dtype: str | None, allow_non_finite: bool = False) -> int:
    """Merge a checkpoint and print the result.

    Args:
        output: run folder to create.
        dtype: dtype of the weights; None: unchanged.
        allow_non_finite: write tensors that have NaN or infinities in them, too, with a warning.
    Raises:
        ConfigError: ``dtype`` is given without ``weights_only``.
        CheckpointError: the checkpoint is missing or damaged, has tensors that are not finite, or the output already has checkpoints.
        DataError: the run's copy of its tokenizer is damaged.
        DiskError, LockError: the output cannot be written.
    """
    if dtype is not None and not weights_only:
        raise ConfigError(
            f"--dtype {dtype} needs --weights-only: a run goes on from unrounded weights, so only weights for use, or to finetune, can be"
            " converted"
        )
    require_no_checkpoint(output)  # before the source is read
    step_dir = step_folder(path, ckpt_step)
    listed = read_manifest(step_dir)
    files.require_none(step_dir, of_bytes(step_dir, listed))
    reader = NativeReader(step_dir, verified=True)
    finite = FiniteTensors(allow=allow_non_finite)
    sources = _sources(reader, finite, weights_only, None if dtype is None else DTYPES[dtype])
    is_new = not output.exists()
    try:
        with Progress("merging", sum(TensorInfo(s.shape, s.dtype).num_bytes for s in sources.values())) as progress:
            state = _state(reader, weights_only)
            _take_tokenizer(state, step_dir, output)
            written = write_checkpoint(output, listed.step, sources, state, progress=progress.add)
    except BaseException:
        if is_new:  # the tokenizer is there before the tensors
            shutil.rmtree(output, ignore_errors=True)
        raise
    for note in finite.notes():
        warn(note)
    new = read_manifest(written)
    files.require_none(written, of_bytes(written, new))
    was = f"{format_bytes(listed.num_bytes)} in {plural(len(listed.files), 'file')} of {plural(listed.world_size, 'process', 'processes')}"
    size = f"{format_bytes(new.num_bytes)} in {plural(len(new.files), 'file')}, {plural(len(new.tensors), 'tensor')}"
    print(f"{written}: {size}, verified (was {was})")
    return 0


def _sources(reader: NativeReader, finite: FiniteTensors, weights_only: bool, dtype: torch.dtype | None) -> dict[str, Source]:
    """Return the tensors to write. A weight is converted to another dtype from its master weight if there is one, to round only once."""
    tensors, found = reader.tensors(), {}
    for name, (shape, stored) in tensors.items():
        if weights_only and kind_of(name)[0] != WEIGHTS:
            continue
        wanted = stored_dtype(name, stored, dtype)
        master = f"optimizer.master.{name}"
        origin = master if wanted != stored and master in tensors else name
        found[name] = Source(shape, wanted, partial(_read, reader, finite, origin, wanted))
    return found


def _read(reader: NativeReader, finite: FiniteTensors, name: str, dtype: torch.dtype) -> Tensor:
    return finite.look(name, reader.read(name), dtype).to(dtype)


def _take_tokenizer(state: dict[str, Any], step_dir: Path, output: Path) -> None:
    """Copy the run's tokenizer to the output. Raises DataError if it is damaged, DiskError if it cannot be written."""
    record = kept.Record.from_json(state.get("tokenizer"))
    if record is None:
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        state["tokenizer"] = kept.copy(record, step_dir, output)._asdict()
    except OSError as error:
        raise DiskError(f"the tokenizer cannot be written into {output}: {error.strerror}") from None


def _state(reader: NativeReader, weights_only: bool) -> dict[str, Any]:
    state = dict(reader.state)
    state["layout"] = {"world_size": 1, "dp": 1, "cp": 1, "sp": 1, "tp": 1, "tp_seq": False, "sp_overlap": None}
    if weights_only:
        state["has_optimizer"] = False
    return state
