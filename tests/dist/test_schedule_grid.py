"""Every preset in every layout: results, loss and all gradients are those of the untouched model, in fp64, on batches with padding.

Layouts of 2 and of 4 ranks, times ZeRO, times recomputation. A sample runs always, all of it with ``-m long``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.preset_models import FAMILIES, MODELS, batch_of, covers, make
from support.ranks import run_ranks
from support.sent_bytes import Wire

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh
from megatron_sp.schedule.presets import auto


class Layout(NamedTuple):
    """Ranks along tp and sp, the rest is dp; and whether tp cuts sequences, too."""

    tp: int = 1
    sp: int = 1
    seq: bool = False


class Case(NamedTuple):
    name: str
    layout: Layout
    zero: int = 0
    recompute: bool | str = False
    changes: dict[str, Any] = {}  # of the configuration
    vocab: bool = True


TP, TP_SEQ, SP = Layout(tp=2), Layout(tp=2, seq=True), Layout(sp=2)
BOTH, ALL = Layout(tp=2, sp=2), Layout(tp=2, sp=2, seq=True)
LAYOUTS = {2: [TP, TP_SEQ, SP], 4: [BOTH, ALL, Layout(sp=4), Layout(tp=4), TP, TP_SEQ, SP]}  # on 4 ranks the last have a dp of 2
OPTIONS: dict[int, list[tuple[int, bool | str]]] = {
    2: [(0, False), (0, True), (1, False), (1, True), (3, False), (3, True)],
    4: [(0, False), (1, False), (3, True)],
}


def cases_of(name: str, ranks: int) -> list[Case]:
    """All that its preset covers."""
    layouts = [layout for layout in LAYOUTS[ranks] if covers(name, sp=layout.sp, tp=layout.tp, seq=layout.seq)]
    gathered = [Case(name, layout, 0, "keep_gathered") for layout in layouts if layout.seq]
    return [Case(name, layout, *options) for layout in layouts for options in OPTIONS[ranks]] + gathered


def equal(cases: list[Case]) -> None:
    """On every rank. Raises AssertionError: with all cases that are not."""
    meshes: dict[tuple[int, int], Mesh] = {}
    wrong = []
    for case in cases:
        tp, sp, seq = case.layout
        if (tp, sp) not in meshes:
            meshes[tp, sp] = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=sp))
        s = auto(make(case.name, **case.changes), meshes[tp, sp], seq=seq, recompute=case.recompute, vocab=case.vocab)
        if case.zero:
            s.zero(case.zero)
        try:
            s.verify(batch_of(case.name))
        except Exception as error:  # the same on every rank
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {len(cases)} on {dist.get_world_size()} ranks:\n" + "\n".join(wrong)


def run_cases(tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    for name in {case.name for case in cases}:
        make(name)  # its module is imported once, before the fork
    run_ranks(equal, ranks, tmp_path, cases)


def test_a_sample_on_two_ranks(tmp_path: Path) -> None:
    """What no other test of the default run has: sequences cut over sp, with ZeRO and recomputation by turns."""
    classifier = Case("roberta-classifier", SP, 0, True)
    sample = [classifier, Case("gpt2", SP, 3, True), Case("mistral", SP, 1), Case("t5", TP_SEQ, 1, True)]
    sample += [Case("modernbert", SP, 1), Case("clip", TP, 3)]
    run_cases(tmp_path, 2, sample)


def test_a_sample_on_four_ranks(tmp_path: Path) -> None:
    run_cases(tmp_path, 4, [Case("bert", ALL, 3, True), Case("opt", ALL, 1)])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout(tmp_path: Path, name: str, ranks: int) -> None:
    run_cases(tmp_path, ranks, cases_of(name, ranks))


ONE_KEY, EIGHT = {"num_key_value_heads": 1}, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_other_attention_heads_and_vocabularies(tmp_path: Path, ranks: int) -> None:
    cases = [Case("llama", Layout(tp=ranks, seq=True), 0, True, ONE_KEY)]
    if ranks == 2:
        cases += [Case(name, TP_SEQ, changes={"attn_implementation": "eager"}) for name in FAMILIES]
        cases += [Case(name, TP, vocab=False) for name in FAMILIES] + [Case("qwen3", TP_SEQ, 0, True, ONE_KEY)]
    else:
        cases += [Case(name, Layout(tp=4, seq=True), changes=EIGHT) for name in ("llama", "qwen3")]
    run_cases(tmp_path, ranks, cases)


# cost() against the bytes that ranks really send: with Ulysses, with and without overlap, and with modules that are recomputed

COSTS: list[tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = [
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
        s = auto(make(name), mesh, ulysses=not ulysses and "sp_size" in sizes, **options)
        if ulysses:
            s.ulysses(**ulysses)
        price = s.cost(batch)
        model: Any = s.apply(batch)
        with Wire(2) as wire:
            model(**batch).loss.backward()
            s.applied.finish_backward()  # type: ignore[union-attr]
        counted, told = sum(wire.num_bytes.values()), price.sent
        assert counted == told, f"{(name, options, ulysses)}: {counted} bytes were sent, cost() tells {told}: {wire.num_bytes}\n{price}"


@pytest.mark.parametrize("cases", [COSTS[1:5:2], pytest.param(COSTS, marks=pytest.mark.long)], ids=["two", "all"])
def test_costs_are_what_is_sent(tmp_path: Path, cases: list[Any]) -> None:
    for name, *_ in cases:
        make(name)  # everything is imported once, before the fork
    run_ranks(sends_what_it_costs, 2, tmp_path, cases)
