"""check() is checked: every line of a right schedule is left out, doubled, moved and changed, and each time it must refuse.

What it lets pass is right after all, and ``verify()`` on two ranks says so: a schedule need not split everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.schedule_mutants import mutants
from support.schedule_toys import Toy, write
from support.schedule_toys import batch as toy_batch

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.check.check import check
from megatron_sp.schedule.check.derive import with_derived
from megatron_sp.schedule.check.dry_run import dry_run
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.verify.verify import verify
from megatron_sp.utils.errors import ConfigError

ELSEWHERE = {
    "toy": "blocks.*.norm1",
    "llama": "model.layers.*.input_layernorm",
    "gpt2": "transformer.h.*.ln_1",
    "bert": "bert.encoder.layer.*.attention.output.LayerNorm",
}
RIGHT = {  # a table that is whole, a gather before a norm whose gradients the region sums, a region that ends with the only block, a
    # width that follows from the heads that another line says
    "leaves early: blocks.0: sequence(leave='norm')",
    "left out: model.embed_tokens: vocab_parallel()",
    "left out: lm_head: vocab_parallel()",
    "left out: transformer.h.*.attn: set(attribute='split_size', divide='tp')",
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


# presets


FED_BY_FIRST_NORM = {  # what reads the norm to which lines are moved, where it is not the attention of each block
    "clip": "text_model.encoder.layers.*.self_attn:",
    "modernbert": "model.layers.*.mlp:",  # the first block has no norm before attention
    "whisper": "model.encoder.layers.*.self_attn:",
}
UNTIED = ("clip", "gpt_neox", "llama", "mistral", "qwen3")
PACKED = ("falcon", "gpt_neox")  # projections with q, k and v head by head


def preset(name: str, seq: bool, mesh: Mesh) -> tuple[Schedule, dict[str, Any], list[tuple[str, list[Directive]]]]:
    """(its schedule, a batch, all mutants); what is moved goes to the first norm of each block."""
    from support.preset_models import batch_of, make

    from megatron_sp.schedule.presets import auto

    s = auto(make(name), mesh, seq=seq)
    norms = [path for path, m in s.model.named_modules() if "Norm" in type(m).__name__ and re.search(r"\.\d+\.", path)]
    norm = next(path for path in norms if not path.endswith(("q_norm", "k_norm")))
    return s, batch_of(name), list(mutants(s.directives, re.sub(r"\.0\.", ".*.", norm, count=1), conv=name == "gpt2"))


def is_right(name: str, what: str) -> bool:
    """What a preset could say as well: a table that is whole, a gather before the norm, a sum that is said twice and made once."""
    line = what.partition(": ")[2]
    norm_first = name not in ("bert", "roberta")
    gathers = "op='all_gather'" in line and (
        line.startswith(FED_BY_FIRST_NORM[name]) if name in FED_BY_FIRST_NORM else "arg='hidden_states'" in line
    )
    return (
        (what.startswith("left out") and "vocab_parallel" in line and name in UNTIED)
        or (what.startswith("moved") and gathers and norm_first)
        or (what.startswith("one block, said") and "blocks=1" in line)
        or (what.startswith("doubled") and line.endswith("sum_gradients()"))
        or (what.startswith("summed again") and "relative_attention_bias" in line)
    )


def wrong_ones(name: str, seq: bool, take: slice) -> list[str]:
    """Mutants that pass check() and should not, or are refused and should pass, or whose message names no module of the line."""
    s, data, found = preset(name, seq, Mesh.sizes(tp=2))
    paths = [path for path, _ in s.model.named_modules() if path.count(".") >= 2]
    wrong = []
    for what, lines in found[take]:
        try:
            check(s.model, lines, s.mesh, s.seq_dim, data)
            said = ""
        except ConfigError as error:
            said = str(error)
        line = next(d for d in s.directives if what.endswith(f": {d}"))
        near = [*expand(s.model, line.on), *paths, line.args.get("leave", line.on)]
        if bool(said) == is_right(name, what) or (said and not any(path in said for path in near)):
            wrong.append(f"{what}: {said or 'passes'}")
    return wrong


PRESETS = [
    "bert",
    "roberta",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "opt",
    "t5",
    "vit",
    "falcon",
    "modernbert",
    "whisper",
    "clip",
]


@pytest.mark.long
@pytest.mark.parametrize("seq", [False, True], ids=["tp", "tp_seq"])
@pytest.mark.parametrize("name", PRESETS)
def test_no_mutant_of_a_preset_passes(name: str, seq: bool) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    assert not wrong_ones(name, seq, slice(None))


@pytest.mark.parametrize("name, seq, take", [("t5", False, slice(1, None, 17)), ("qwen3", True, slice(2, None, 19))])
def test_some_mutants_of_presets(name: str, seq: bool, take: slice) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    assert not wrong_ones(name, seq, take)


def compare_presets(name: str, seq: bool) -> None:
    """verify() says of each mutant what check() does, but for sizes that do not fit in either."""
    mesh = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size()))
    s, data, found = preset(name, seq, mesh)
    wrong = []
    for what, lines in found:
        with suppress(ConfigError):
            lines = with_derived(lines, check(s.model, lines, mesh, s.seq_dim, data))
        try:
            equal = verify(s.model, lines, mesh, s.seq_dim, data).ok
        except Exception:  # on every rank alike
            equal = False
        # a packed projection whose heads are whole runs may be cut in one, and has to be told apart from others (E8); a
        # region sums the gradients of norms inside of attention, of which a line has to speak nevertheless (E16)
        asked = (name in PACKED and what.startswith("one block:")) or (seq and "sum_gradients" in what)
        if equal != is_right(name, what) and not asked:
            wrong.append(f"{'equal' if equal else 'different'}: {what}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("seq", [False, True], ids=["tp", "tp_seq"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_and_verify_agree(tmp_path: Path, name: str, seq: bool) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    preset(name, seq, Mesh.sizes(tp=2))  # everything is imported once, before the fork
    run_ranks(compare_presets, 2, tmp_path, name, seq)


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
    from support.preset_models import FAMILIES, batch_of, make

    from megatron_sp.schedule.presets import auto

    for name in FAMILIES:
        report = auto(make(name), Mesh.sizes(tp=2), seq=seq).check(batch_of(name))
        assert report.dry and report.warnings == [], name
        assert set(report.derived.values()) == ({"reduce_scatter"} if seq else set()), name
