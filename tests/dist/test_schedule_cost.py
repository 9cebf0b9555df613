"""cost() against the bytes that ranks really send: with Ulysses, with and without overlap, and with modules that are computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.sent_bytes import Wire

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, presets

pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

from support.preset_models import batch_of, make

CASES: list[tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = [
    ("llama", {"sp_size": 2}, {}, {}),
    ("llama", {"sp_size": 2}, {"recompute": True}, {"overlap_qkv": True}),
    ("bert", {"sp_size": 2}, {}, {"enter": "bert.encoder.layer.0", "leave": "bert.encoder.layer.1"}),
    ("gpt2", {"tp_size": 2}, {"recompute": True}, {}),
    ("llama", {"tp_size": 2}, {"recompute": True, "seq": True}, {}),
    ("llama", {"tp_size": 2}, {"recompute": "keep_gathered", "seq": True}, {}),
]


def sends_what_it_costs(cases: list[Any]) -> None:
    for name, sizes, options, ulysses in cases:
        mesh, batch = Mesh.of(ParallelGroups.create(torch.device("cpu"), **sizes)), batch_of(name)
        s = presets.auto(make(name), mesh, ulysses=not ulysses and "sp_size" in sizes, **options)
        if ulysses:
            s.ulysses(**ulysses)
        price = s.cost(batch)
        model: Any = s.apply(batch)
        with Wire(2) as wire:
            model(**batch).loss.backward()
            s.applied.finish_backward()  # type: ignore[union-attr]
        counted, told = sum(wire.num_bytes.values()), price.sent
        assert counted == told, f"{(name, options, ulysses)}: {counted} bytes were sent, cost() tells {told}: {wire.num_bytes}\n{price}"


@pytest.mark.parametrize("cases", [CASES[1:5:2], pytest.param(CASES, marks=pytest.mark.long)], ids=["two", "all"])
def test_costs_are_what_is_sent(tmp_path: Path, cases: list[Any]) -> None:
    for name, *_ in cases:
        make(name)  # everything is imported once, before the fork
    run_ranks(sends_what_it_costs, 2, tmp_path, cases)
