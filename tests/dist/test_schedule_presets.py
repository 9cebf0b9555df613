"""Presets: models of transformers, unchanged, split as their families' presets say, compute what they did; so do their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from preset_models import FAMILIES, MODELS, batch_of, make
from ranks import run_ranks

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh
from megatron_sp.schedule.presets import auto, from_hf_plan

MODES = {"tp": {}, "tp_seq": {"seq": True}, "recompute": {"seq": True, "recompute": True}}


def mesh() -> Mesh:
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size()))


def equal(names: list[str], modes: list[str]) -> None:
    m = mesh()
    for name in names:
        for mode in modes:
            try:
                auto(make(name), m, **MODES[mode]).verify(batch_of(name))
            except Exception as error:
                raise AssertionError(f"{name}, {mode}") from error


@pytest.mark.parametrize("half", [0, 1])
def test_presets_change_nothing(tmp_path: Path, half: int) -> None:
    for name in FAMILIES:
        make(name)  # its module is imported once, in the parent
    run_ranks(equal, 2, tmp_path, FAMILIES[half::2], list(MODES))
