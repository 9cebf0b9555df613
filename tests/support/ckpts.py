"""Small checkpoints of a real model, written by hand: no training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, STATE_NAME, FileRecord, hash_file, read_manifest
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.config.schema import Config
from megatron_sp.parallel.layers import shard_specs
from support import tiny

LAYERS = 1
STATE = {"consumed_samples": 40, "consumed_tokens": 320, "num_updates": 4, "skipped_steps": 0, "bad_steps": 0, "has_optimizer": True,
         "loss_scaler": {"scale": 1.0}, "schedule": {"peak": 0.1, "length": 400}, "data_fingerprint": "ab" * 32,
         "versions": {"torch": "2.13"}}  # fmt: skip


def make_tensors(
    seed: int = 5, dtype: torch.dtype = torch.float32, optimizer: bool = True, classes: int = 0, **shape: Any
) -> dict[str, Tensor]:
    """Weights of the tiny model and, if asked, state of an optimizer."""
    model = tiny.build(tiny.shape(num_layers=LAYERS, **shape), Config().kernels, classes, seed=seed, dtype=torch.float32)
    specs, found = shard_specs(model), {}
    for name, p in model.named_parameters():
        full = p.detach()[tuple(slice(n) for n in specs[name].shape)].clone() if name in specs else p.detach().clone()
        found[name] = full.to(dtype)
        if optimizer:
            found[f"optimizer.exp_avg.{name}"] = 0.1 * full
            found[f"optimizer.exp_avg_sq.{name}"] = full.square()
            if dtype != torch.float32:
                found[f"optimizer.master.{name}"] = full
    return found


def make_state(tensors: dict[str, Tensor], world: dict[str, int] | None = None, **shape: Any) -> dict[str, Any]:
    config = Config()
    config.model = tiny.shape(num_layers=LAYERS, **shape)
    config.optimizer.lr = 0.1
    layout = {"world_size": 1, "dp": 1, "sp": 1, "tp": 1, "tp_seq": False, "sp_overlap": None} | (world or {})
    has_optimizer = any(name.startswith("optimizer.") for name in tensors)
    return {**STATE, "has_optimizer": has_optimizer, "layout": layout, "config": config.to_dict()}


def cut(tensor: Tensor, rows: int = 2) -> GlobalTensor:
    """In several rectangles, as many ranks would have them."""
    if tensor.dim() < 1 or tensor.shape[0] < rows:
        return GlobalTensor.whole(tensor)
    pieces, at = [], 0
    for part in tensor.tensor_split(rows):
        halves = part.tensor_split(2, dim=1) if tensor.dim() == 2 else (part,)
        column = 0
        for half in halves:
            pieces.append(Piece((at, column) if tensor.dim() == 2 else (at,), half))
            column += half.shape[1] if tensor.dim() == 2 else 0
        at += part.shape[0]
    return GlobalTensor(tuple(tensor.shape), tensor.dtype, pieces)


def save(run: Path, *steps: int, tensors: dict[str, Tensor] | None = None, rows: int = 1, state: dict[str, Any] | None = None) -> Path:
    """Save the same tensors at these steps; the last one's folder."""
    tensors = make_tensors() if tensors is None else tensors
    saver, pieces = Checkpointer(run, keep_last=100), {n: cut(t, rows) if rows > 1 else GlobalTensor.whole(t) for n, t in tensors.items()}
    for step in steps:
        report = saver.save(step, pieces, {**(state or make_state(tensors)), "step": step})
        assert report.saved and report.path is not None
    return report.path


def reseal(step_dir: Path, **changes: Any) -> None:
    """Write a manifest that fits what the folder holds now, or says what ``changes`` (tensors, step) say."""
    listed = read_manifest(step_dir)
    files = {name: FileRecord((step_dir / name).stat().st_size, hash_file(step_dir / name)) for name in listed.files}
    assert STATE_NAME in files
    (step_dir / MANIFEST_NAME).write_bytes(type(listed)(**{**vars(listed), "files": files, **changes}).encode())


def with_state(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the newest checkpoint's state.json says, as if it had been saved so."""
    step_dir = max((run / "checkpoints").glob("step-[0-9]*"))
    state = json.loads((step_dir / STATE_NAME).read_text())
    change(state)
    (step_dir / STATE_NAME).write_text(json.dumps(state))
    reseal(step_dir)


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
