"""``megatron-sp ckpt show``: one checkpoint in full, and statistics of its values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ckpts

from megatron_sp.commands import cli
from megatron_sp.commands.ckpt import tensors as reading
from megatron_sp.commands.ckpt.tensors import Values

Capture = pytest.CaptureFixture[str]
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show") / "run"
    tensors = ckpts.make_tensors(dtype=torch.bfloat16)
    tensors[EMBEDDING][3, :2] = torch.tensor([math.nan, -math.inf])
    ckpts.save(folder, 1, 2, tensors=tensors, rows=3, state=ckpts.make_state(tensors, {"world_size": 2, "tp": 2}))
    return folder


def show(capsys: Capture, *words: object) -> str:
    assert cli.main(["ckpt", "show", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_what_is_told(run: Path, capsys: Capture) -> None:
    text = show(capsys, run)
    number = sum(t.numel() for t in ckpts.make_tensors(optimizer=False).values())
    for line in (
        f"{run}/checkpoints/step-000002", "  model        GPT, 1 layer, hidden 14, 4 heads, ffn 10, sequence 8, vocabulary 37",
        f"  parameters   2.4 k ({number:,}) bf16", "  optimizer    exp_avg, exp_avg_sq, master", "  processes    2: tp 2",
        "  progress     step 2, consumed samples 40, consumed tokens 320, num updates 4, skipped steps 0, bad steps 0",
        "  schedule     peak 0.1, length 400", "  data         abababababababab", "  versions     torch 2.13",
    ):  # fmt: skip
        assert f"{line}\n" in text, line
    flags = {line.split()[0]: line for line in text.splitlines() if line.startswith("  --")}
    assert flags["--lr"].split() == ["--lr", "0.1", "(default", "none)"] and "--bf16" not in flags
    kinds = [line.split() for line in text.splitlines() if line.split()[:1] in (["weights"], ["master"]) and "tensors" in line]
    assert kinds[0][:3] == ["weights", "bf16", "16"] and kinds[1][:3] == ["master", "fp32", "16"]
    assert kinds[0][4] == f"{number:,}" and kinds[0][-2:] == ["14", "%"]
    module = next(line.split() for line in text.splitlines() if "decoder.layers.*.mlp.linear_fc1" in line)
    assert module[1:4] == ["2", "tensors", f"{14 * 10 + 10:,}"]


def test_json_and_an_older_step(run: Path, capsys: Capture) -> None:
    found = json.loads(show(capsys, run, "--ckpt-step", 1, "--json", "--tensors", "*word*"))
    assert (found["progress"]["step"], found["complete"], found["world_size"]) == (1, True, 1)
    assert found["changed_flags"]["optimizer.lr"] == {"value": 0.1, "default": None}
    assert found["tensors"][EMBEDDING] == {"dtype": "bf16", "shape": [37, 14], "bytes": 37 * 14 * 2, "kind": "weights"}
    assert sorted(found["tensors"]) == [EMBEDDING, *(f"optimizer.{k}.{EMBEDDING}" for k in ("exp_avg", "exp_avg_sq", "master"))]
    assert sum(kind["num_bytes"] for kind in found["by_kind"]) == sum(
        t.numel() * t.element_size() for t in ckpts.make_tensors(dtype=torch.bfloat16).values()
    )


def test_values_of_a_tensor(run: Path, capsys: Capture) -> None:
    found = json.loads(show(capsys, run, "--values", EMBEDDING, "--values", "*final_layernorm.weight", "--json"))["values"]
    x = ckpts.make_tensors(dtype=torch.bfloat16)[EMBEDDING].double().flatten()
    x = torch.cat([x[: 3 * 14], x[3 * 14 + 2 :]])
    got = found[EMBEDDING]
    assert (got["count"], got["nan"], got["infinite"], got["zeros"]) == (37 * 14, 1, 1, 0)
    expected = {"min": x.min(), "max": x.max(), "mean": x.mean(), "std": x.std(correction=0), "norm": x.norm()}
    assert {k: got[k] for k in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-12)
    assert len(found) == 5 and found["decoder.final_layernorm.weight"]["std"] == 0.0
    row = next(line for line in show(capsys, run, "--values", EMBEDDING).splitlines() if line.startswith(f"  {EMBEDDING} "))
    assert row.split()[1:3] == [f"{got['min']:.6g}", f"{got['max']:.6g}"] and row.split()[-4:] == ["518", "0", "1", "1"]


@pytest.mark.parametrize("block_bytes", [40, pytest.param(1, marks=pytest.mark.long), pytest.param(1 << 20, marks=pytest.mark.long)])
def test_statistics_do_not_depend_on_blocks(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from zero, where a sum of squares would have lost the deviation."""
    monkeypatch.setattr(reading, "PART_BYTES", block_bytes)
    torch.manual_seed(0)
    x = 1e6 + torch.randn(50, 3, dtype=torch.float64)
    x[7, 1] = 0.0
    told: list[int] = []
    found = Values.of(iter(x.split(20)), told.append)
    assert (found.mean, found.to_dict()["std"]) == pytest.approx((float(x.mean()), float(x.std(correction=0))), rel=1e-12)
    assert found.norm == pytest.approx(float(x.norm()), rel=1e-12) and (found.smallest, found.zeros) == (0.0, 1)
    assert sum(told) == x.numel() * 8
    nothing = Values.of(iter([torch.full((2,), math.nan), torch.zeros(0, 3)])).to_dict()
    assert nothing == {"min": None, "max": None, "mean": None, "std": None, "norm": None, "count": 2, "zeros": 0, "nan": 2, "infinite": 0}


def test_what_cannot_be_shown(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["ckpt", "show", str(run), "--tensors", "embedding.word"]) == 3
    assert "no tensor matches 'embedding.word'; nearest: embedding.word_embeddings.weight" in capsys.readouterr().err
    assert cli.main(["ckpt", "show", str(run), "--ckpt-step", "5"]) == 3
    assert "has no step-000005" in capsys.readouterr().err
    weights = {"layer.weight": torch.ones(2, 3)}
    state: dict[str, Any] = {"mine": 1}
    ckpts.save(tmp_path / "bare", 3, tensors=weights, state=state)
    assert cli.main(["ckpt", "show", str(tmp_path / "bare")]) == 0
    captured = capsys.readouterr()
    assert "unknown: no configuration" in captured.out and "other state  mine" in captured.out and "no configuration" in captured.err
