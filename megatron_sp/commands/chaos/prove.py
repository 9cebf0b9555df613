"""Comparison of two runs: every tensor of the last checkpoint, and the loss of every logged step."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.stream import NativeReader
from megatron_sp.report.run_history import are_equal, repetitions
from megatron_sp.utils.errors import ReportedError
from megatron_sp.utils.run_log import read_records


def differences(clean: Path, run: Path) -> list[str]:
    """Return a description of each difference; an empty list if the two runs are equal to the last bit."""
    torch.set_num_threads(1)
    try:
        folders = [Checkpointer(None).find(path) for path in (clean, run)]
        readers = [NativeReader(folder, verified=True) for folder in folders]  # ``find`` has read every byte
        first, second = (reader.tensors() for reader in readers)
        found = [f"the last checkpoint is {folders[1].name}, not {folders[0].name}"] if folders[0].name != folders[1].name else []
        found += [f"{name} is in only one of the two" for name in sorted(first.keys() ^ second.keys())]
        for name in first.keys() & second.keys():
            a, b = (reader.read(name).contiguous() for reader in readers)
            if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
                found.append(f"{name} has other bits")
        return found + _of_logs(clean, run)
    except ReportedError as error:
        return [str(error)]


def _of_logs(clean: Path, run: Path) -> list[str]:
    records = [read_records(path)[0] for path in (clean, run)]
    losses = {r["step"]: r.get("loss_hex") for r in records[0] if r["kind"] == "train"}
    found = [
        f"the loss of step {r['step']} is {r.get('loss_hex')}, not {losses[r['step']]}"
        for r in records[1] if r["kind"] == "train" and r["step"] in losses and r.get("loss_hex") != losses[r["step"]]
    ]  # fmt: skip
    return found + [
        f"step {step} was repeated with different results" for step, taken in repetitions(records[1]).items() if not are_equal(taken)
    ]
