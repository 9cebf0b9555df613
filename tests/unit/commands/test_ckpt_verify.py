"""``megatron-sp ckpt verify``: all that is wrong is listed, and each kind of it is found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ckpts
from torch import Tensor

from megatron_sp.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatron_sp.commands import cli
from megatron_sp.commands.ckpt import folders
from megatron_sp.commands.ckpt.tensors import deep_problems

Capture = pytest.CaptureFixture[str]
Tensors = dict[str, Tensor]
EMBEDDING = "embedding.word_embeddings.weight"
NORM = "decoder.final_layernorm.weight"


def run_verify(capsys: Capture, *words: object) -> tuple[int, str, str]:
    code = cli.main(["ckpt", "verify", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_sound_ones(tmp_path: Path, capsys: Capture) -> None:
    tensors = ckpts.make_tensors(dtype=torch.bfloat16)
    ckpts.save(tmp_path, 1, 2, tensors=tensors, rows=3)
    code, out, err = run_verify(capsys, tmp_path, "--deep")
    listed = read_manifest(tmp_path / "checkpoints" / "step-000002")
    said = f"{tmp_path}/checkpoints/step-000002: sound: {listed.num_bytes / 1024:.1f} KiB in {len(listed.files)} files, 64 tensors\n"
    assert (code, out, err) == (0, said, "")
    assert [line.split(":")[0][-6:] for line in run_verify(capsys, tmp_path, "--all")[1].splitlines()] == ["000001", "000002"]
    assert "000001" in run_verify(capsys, tmp_path, "--ckpt-step", 1)[1]
    assert "000001" in run_verify(capsys, tmp_path / "checkpoints" / "step-000001")[1]
    code, _, err = run_verify(capsys, tmp_path / "checkpoints" / "step-000001", "--all")
    assert code == 3 and "--all asks for every step of a run" in err


@pytest.mark.parametrize("shape", [{"position_embedding_type": "rope", "swiglu": True, "untie_embeddings_and_output_weights": True},
                                   {"model_family": "bert"}, {"model_family": "bert", "classes": 3}], ids=str)  # fmt: skip
def test_other_models_are_sound(shape: dict[str, Any], tmp_path: Path) -> None:
    tensors = ckpts.make_tensors(**shape)
    shape.pop("classes", None)
    assert folders.problems(ckpts.save(tmp_path, 1, tensors=tensors, state=ckpts.make_state(tensors, **shape)), deep=deep_problems) == []


def test_every_problem_of_the_bytes_is_listed(tmp_path: Path, capsys: Capture) -> None:
    folder = ckpts.save(tmp_path, 1, 2, 3, rows=4)
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(files) > 6
    (folder / files[0]).unlink()
    (folder / files[1]).write_bytes((folder / files[1]).read_bytes()[:-3])
    for name in (*files[2:], "state.json"):
        ckpts.flip(folder / name)
    (folder / "more.txt").write_text("")
    (tmp_path / "checkpoints" / "step-000001" / MANIFEST_NAME).write_text("{}")
    code, out, err = run_verify(capsys, tmp_path, "--all")
    assert code == 3 and out.startswith(f"{tmp_path}/checkpoints/step-000002: sound") and out.count("\n") == 1
    lines = err.splitlines()
    assert lines[0].endswith("step-000001: damaged, 1 problem:") and "format_version" in lines[1]
    assert "step-000003 holds files that its manifest does not list, ignored: more.txt" in err
    assert f"step-000003: damaged, {len(files) + 1} problems:" in err and f"  {files[0]} is missing" in lines
    assert err.count("its contents have changed") == len(files) - 1 and f"{files[1]} has " in err


def test_state_of_another_step(tmp_path: Path) -> None:
    folder = ckpts.save(tmp_path, 3)
    ckpts.reseal(folder, step=4)
    assert folders.problems(folder) == ["state.json is of step 3, the manifest of step 4"]


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


def with_(**changes: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name.replace("__", "."): t for name, t in changes.items()}


def spoil(tensors: Tensors) -> Tensors:
    tensors[EMBEDDING][2, 3], tensors[EMBEDDING][4, 4] = math.nan, math.inf
    return tensors


DEEP: list[tuple[str, Callable[[Tensors], Tensors], list[str]]] = [
    ("not finite", spoil, [f"{EMBEDDING} has values that are not finite: 1 NaN and 1 infinite of 518"]),
    ("a weight is missing", without(NORM), [f"optimizer.exp_avg.{NORM} is of a weight that is not there ({NORM})",
        f"optimizer.exp_avg_sq.{NORM} is of a weight that is not there ({NORM})",
        f"{NORM} [14] is missing: the configuration's model has it"]),
    ("a weight too many", with_(extra=torch.ones(2)), ["extra [2] is not in the configuration's model"]),
    ("another vocabulary", lambda t: {n: torch.ones(40, 14) if n.endswith(EMBEDDING) else v for n, v in t.items()}, [
        f"{EMBEDDING} has the shape [40, 14], the configuration's model [37, 14]"]),
    ("half of the optimizer state", without(f"optimizer.exp_avg_sq.{NORM}"), [
        f"optimizer.exp_avg_sq.{NORM} is missing: other state of this weight is there"]),
    ("state of another shape", with_(optimizer__exp_avg__decoder__final_layernorm__weight=torch.ones(13)), [
        f"optimizer.exp_avg.{NORM} has the shape [13], its weight [14]"]),
    ("no master weight", lambda t: {n: v.bfloat16() if n == NORM else v for n, v in t.items()}, [
        f"optimizer.master.{NORM} is missing: other state of this weight is there"]),
    ("no optimizer at all", lambda t: {n: v for n, v in t.items() if not n.startswith("optimizer.")}, [
        "state.json says has_optimizer True, but the checkpoint has no optimizer state"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), [case[1:] for case in DEEP], ids=[case[0] for case in DEEP])
def test_what_the_bytes_cannot_tell(change: Callable[[Tensors], Tensors], expected: list[str], tmp_path: Path) -> None:
    sound = ckpts.make_tensors()
    folder = ckpts.save(tmp_path, 1, tensors=change(dict(sound)), rows=2, state=ckpts.make_state(sound))
    assert folders.problems(folder) == []
    assert folders.problems(folder, deep=deep_problems) == expected


def test_tensors_that_are_not_whole(tmp_path: Path) -> None:
    """A file less, another's header of another tensor, a manifest that lists more: with hashes that fit."""
    folder = ckpts.save(tmp_path, 1, rows=2)
    listed = read_manifest(folder)
    dtype = listed.tensors[NORM][0]
    tensors = {**listed.tensors, NORM: (dtype, (15,)), EMBEDDING: ("BF16", listed.tensors[EMBEDDING][1])}
    (folder / MANIFEST_NAME).write_bytes(Manifest(**{**vars(listed), "tensors": tensors}).encode())
    found = folders.problems(folder, deep=deep_problems)
    assert sum(f"holds {EMBEDDING} as F32, the manifest lists it as BF16" in problem for problem in found) == 4
    assert f"{NORM} [15] is not stored completely and once: its pieces hold 14 elements in total, the tensor has 15" in found
    assert any(problem.startswith(f"{EMBEDDING} [37, 14] is not stored completely") for problem in found)


@pytest.mark.parametrize(("config", "says"), [
    (None, "a stored configuration must be an object"),
    ({"model": {"num_layers": 10**9, "hidden_size": 8}}, "the configuration has 1000000000 layers, the checkpoint 48 tensors"),
    ({"model": {"num_layers": 2, "hidden_size": -8, "num_attention_heads": 2}}, "no model can be built from the configuration"),
])  # fmt: skip
def test_a_configuration_that_makes_no_model(config: Any, says: str, tmp_path: Path) -> None:
    tensors = ckpts.make_tensors()
    folder = ckpts.save(tmp_path, 1, tensors=tensors, state={**ckpts.make_state(tensors), "config": json.loads(json.dumps(config))})
    (problem,) = folders.problems(folder, deep=deep_problems)
    assert says in problem
