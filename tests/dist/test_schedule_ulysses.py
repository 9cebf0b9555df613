"""Ulysses for models that are not ours: loss, outputs and every gradient of the whole model, and what is said of what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from test_schedule import MODELS, SIZES, B, V
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.utils.errors import ConfigError, NumericsError

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")


def hf_batch(length: int, padding: bool = True) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (B, length), generator=g)
    if not padding:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(length) < torch.tensor([length, 5, 2])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def with_attention(model: Any, kind: str) -> Any:
    model.set_attn_implementation(kind)
    return model


def mesh(tp: int) -> Mesh:
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=dist.get_world_size() // tp))


def check_hugging_face(cases: list[tuple[str, str, int, bool, int, bool, bool]]) -> None:
    for name, kind, tp, seq, length, padding, overlap in cases:
        make, write = MODELS[name]
        s = schedule(with_attention(make(), kind), mesh(tp))
        if tp > 1:
            write(s, seq)
        s.ulysses(overlap_qkv=overlap)
        try:
            s.verify(hf_batch(length, padding))
        except Exception as error:
            raise AssertionError(f"{(name, kind, tp, seq, length, padding, overlap)}: {error}") from error


TWO = [
    # model, attention, tp, tp_seq, length, padding mask, overlap
    ("llama", "sdpa", 1, False, 8, True, False),
    ("llama", "eager", 1, False, 7, False, False),
    ("llama", "sdpa", 1, False, 7, True, True),
    ("bert", "eager", 1, False, 7, True, False),
    ("bert", "sdpa", 1, False, 7, True, True),
    ("gpt2", "sdpa", 1, False, 8, False, False),
    ("gpt2", "eager", 1, False, 7, True, False),
]
FOUR = [
    ("llama", "sdpa", 2, True, 7, True, True),
    ("llama", "sdpa", 1, False, 10, True, True),  # two key/value heads for four ranks
    ("bert", "eager", 2, True, 7, True, True),
    ("gpt2", "sdpa", 2, False, 7, True, False),
]


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(check_hugging_face, 2, tmp_path, TWO)


def test_with_tensor_parallelism_and_few_key_value_heads(tmp_path: Path) -> None:
    run_ranks(check_hugging_face, 4, tmp_path, FOUR)
