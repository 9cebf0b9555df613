"""check() is checked: every line of a right schedule is left out, doubled, moved and changed, and each time it must refuse.

What it lets pass is right after all, and ``verify()`` on two ranks says so: a schedule need not split everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from schedule_mutants import mutants
from schedule_toys import Toy, write
from schedule_toys import batch as toy_batch

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.check import check
from megatron_sp.schedule.derive import with_derived
from megatron_sp.schedule.directives import Directive
from megatron_sp.schedule.dry_run import dry_run
from megatron_sp.schedule.verify import verify
from megatron_sp.utils.errors import ConfigError

ELSEWHERE = {
    "toy": "blocks.*.norm1",
    "llama": "model.layers.*.input_layernorm",
    "gpt2": "transformer.h.*.ln_1",
    "bert": "bert.encoder.layer.*.attention.output.LayerNorm",
}
RIGHT = {  # a table that is whole, a gather in front of a norm whose gradients the region sums, a region that ends with the only block
    "leaves early: blocks.0: sequence(leave='norm')",
    "left out: model.embed_tokens: vocab_parallel()",
    "left out: lm_head: vocab_parallel()",
    "moved: model.layers.*.self_attn: sync(mode='fwd_pre', op='all_gather', arg='hidden_states')",
    "moved: transformer.h.*.attn: sync(mode='fwd_pre', op='all_gather', arg='hidden_states')",
    "moved: blocks.*.attention: sync(mode='fwd_pre', op='all_gather')",
}


def family(name: str, seq: bool, mesh: Mesh) -> tuple[Schedule, dict[str, Any]]:
    if name == "toy":
        return write(schedule(Toy(), mesh), seq), toy_batch()
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    from dist.test_schedule import MODELS, batch

    make, lines = MODELS[name]
    s = schedule(make(), mesh)
    lines(s, seq)
    return s, batch()


def each(s: Schedule, name: str) -> Iterator[tuple[str, list[Directive]]]:
    return mutants(s.directives, ELSEWHERE[name], conv=name == "gpt2")


def survivors(name: str, seq: bool, judge: Callable[..., Any], take: Callable[[int], bool] = lambda i: True) -> set[str]:
    """Mutants that are not refused; every refusal names a module of the line, or one that it touches."""
    s, data = family(name, seq, Mesh.sizes(tp=2))
    judge(s.model, s.directives, s.mesh, 1, data)
    paths = [path for path, _ in s.model.named_modules() if path]
    found = set()
    for i, (what, lines) in enumerate(each(s, name)):
        if not take(i):
            continue
        try:
            judge(s.model, lines, s.mesh, 1, data)
            found.add(what)
        except ConfigError as error:
            assert any(path in str(error) for path in paths), (what, str(error))
    return found


@pytest.mark.parametrize("seq", [False, pytest.param(True, marks=pytest.mark.long)], ids=["tp", "tp_seq"])
def test_no_mutant_of_a_small_model_passes(seq: bool) -> None:
    assert survivors("toy", seq, check) <= RIGHT


@pytest.mark.parametrize("seq", [False, True], ids=["tp", "tp_seq"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) for n in ("llama", "gpt2", "bert")])
def test_no_mutant_passes(name: str, seq: bool) -> None:
    assert survivors(name, seq, check) <= RIGHT


@pytest.mark.parametrize("name, seq, start", [("llama", True, 0), ("gpt2", False, 3), ("bert", True, 5)])
def test_some_mutants_of_each_family(name: str, seq: bool, start: int) -> None:
    """Every thirteenth: another kind of change on each line."""
    assert survivors(name, seq, check, lambda i: i % 13 == start) <= RIGHT


@pytest.mark.long
@pytest.mark.parametrize("seq", [False, True], ids=["tp", "tp_seq"])
def test_the_dry_run_needs_no_rules_among_lines(seq: bool) -> None:
    """But for a gather whose adjoint it may choose: then the column layer may sum the gradient itself."""
    found = survivors("toy", seq, dry_run) - RIGHT
    assert all(what.startswith(("summed again", "left out")) for what in found) and (seq or not found), found


def compare_with_numbers(name: str, seq: bool, step: int) -> None:
    """check() and verify() say the same of every mutant that both can judge: neither too little is refused, nor too much."""
    mesh = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size()))
    s, data = family(name, seq, mesh)
    wrong = []
    for what, lines in list(each(s, name))[::step]:
        try:
            said = "right"
            lines = with_derived(lines, check(s.model, lines, mesh, 1, data))
        except ConfigError:
            said = "wrong"
        try:
            is_right = verify(s.model, lines, mesh, 1, data).ok
        except Exception:  # sizes that do not fit, on every rank alike
            is_right = False
        if is_right != (said == "right"):
            wrong.append(f"check() finds it {said}: {what}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name, seq, step",
    [
        ("toy", True, 3),
        *(pytest.param(name, seq, 1, marks=pytest.mark.long) for name in ("toy", "llama", "gpt2") for seq in (False, True)),
    ],
)
def test_check_and_verify_agree(tmp_path: Path, name: str, seq: bool, step: int) -> None:
    run_ranks(compare_with_numbers, 2, tmp_path, name, seq, step)


@pytest.mark.parametrize("seq", [pytest.param(False, marks=pytest.mark.long), True], ids=["tp", "tp_seq"])
def test_presets_are_right(seq: bool) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    from preset_models import FAMILIES, batch_of, make

    from megatron_sp.schedule.presets import auto

    for name in FAMILIES:
        report = auto(make(name), Mesh.sizes(tp=2), seq=seq).check(batch_of(name))
        assert report.dry and report.warnings == [], name
        assert set(report.derived.values()) == ({"reduce_scatter"} if seq else set()), name
