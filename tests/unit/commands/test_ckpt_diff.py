"""``megatron-sp ckpt diff``: what counts as a difference, and how far values are apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ckpts
from torch import Tensor

from megatron_sp.commands import cli
from megatron_sp.commands.ckpt import contents, tensors
from megatron_sp.commands.ckpt.tensors import Distance

Capture = pytest.CaptureFixture[str]
EMBEDDING = "embedding.word_embeddings.weight"
NORM = "decoder.final_layernorm.weight"


def diff(capsys: Capture, *words: object) -> tuple[int, str, Any]:
    """Exit code, text, JSON."""
    words = tuple(map(str, words))
    code = cli.main(["ckpt", "diff", *words])
    text = capsys.readouterr().out
    assert cli.main(["ckpt", "diff", *words, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["same"] == (code == 0)
    return code, text, found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ckpts.save(tmp_path_factory.mktemp("a"), 4)


def saved(folder: Path, tensors: dict[str, Tensor], step: int = 4, rows: int = 1, **state: Any) -> Path:
    return ckpts.save(folder, step, tensors=tensors, rows=rows, state={**ckpts.make_state(ckpts.make_tensors()), **state})


def test_another_layout_is_no_difference(base: Path, tmp_path: Path, capsys: Capture) -> None:
    state = ckpts.make_state(ckpts.make_tensors(), {"world_size": 4, "tp": 2, "dp": 2})
    state["config"]["parallel"]["tensor_model_parallel_size"] = 2
    state["config"]["batch"]["micro_batch_size"] = 3
    state["config"]["checkpoint"]["save"] = "elsewhere"
    state["versions"] = {"torch": "2.11"}
    state["config"]["batch"] |= {"eval_iters": 3, "exit_interval": 7}
    state["config"]["data"]["valid_data_path"] = ["x"]
    other = saved(tmp_path, ckpts.make_tensors(), rows=3, **state)
    code, text, found = diff(capsys, base, other)
    assert code == 0 and text.endswith("the same: 48 of 48 tensors equal\n")
    assert {row["name"] for row in found["state"]} == {
        "processes",
        "versions",
        "--tensor-model-parallel-size",
        "--micro-batch-size",
        "--save",
        "--eval-iters",
        "--exit-interval",
        "--valid-data-path",
    }
    assert not any(row["counts"] for row in found["state"]) and "shown but not counted" in text and "4: dp 2, tp 2" in text


def test_state_and_flags(base: Path, tmp_path: Path, capsys: Capture) -> None:
    state = ckpts.make_state(ckpts.make_tensors())
    state["config"]["optimizer"]["lr"] = 0.2
    other = saved(tmp_path, ckpts.make_tensors(), step=5, **{**state, "consumed_samples": 50, "schedule": {"peak": 0.2, "length": 400}})
    code, text, found = diff(capsys, base, other)
    assert code == 1 and "state and flags:" in text and found["tensors"] == [] and text.endswith("different: 48 of 48 tensors equal\n")
    rows = {row["name"]: (row["a"], row["b"]) for row in found["state"]}
    schedules = {"peak": 0.1, "length": 400}, {"peak": 0.2, "length": 400}
    assert rows == {"step": (4, 5), "consumed_samples": (40, 50), "--lr": (0.1, 0.2), "schedule": schedules}
    assert diff(capsys, base, other, "--tensors")[0] == 0


def test_values(base: Path, tmp_path: Path, capsys: Capture) -> None:
    tensors = ckpts.make_tensors()
    tensors[EMBEDDING][36, 13] += 0.5
    tensors[f"optimizer.exp_avg.{NORM}"][:2] = torch.tensor([math.nan, math.inf])
    other = saved(tmp_path, tensors, rows=2)
    code, text, found = diff(capsys, base, other)
    (first, second) = sorted(found["tensors"], key=lambda row: row["name"])
    size = float(tensors[EMBEDDING].abs().max())
    assert (first["name"], first["beyond"], first["values"]) == (EMBEDDING, 1, 518) and code == 1
    assert (first["max_abs"], first["max_rel"]) == pytest.approx((0.5, 0.5 / size), rel=1e-5)
    assert (second["beyond"], second["max_abs"]) == (2, "inf")
    assert "weights: 1 tensor with other values, max|a-b| up to 0.5" in text and "1 of 518" in text
    assert text.endswith("different: 46 of 48 tensors equal\n")
    assert diff(capsys, base, other, "--tensors", "decoder.*")[0] == 0
    assert diff(capsys, base, other, "--weights-only", "--atol", 0.4)[0] == 1
    code, text, _ = diff(capsys, base, other, "--weights-only", "--atol", 0.6)
    assert code == 0 and text.endswith("the same: 16 of 16 tensors equal within the tolerances\n")
    assert diff(capsys, base, other, "--weights-only", "--rtol", 0.1)[0] == 1
    assert diff(capsys, other, other)[0] == 0  # NaN at the same place is the same


def test_names_shapes_and_dtypes(base: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = ckpts.make_tensors(dtype=torch.bfloat16)
    tensors[NORM] = torch.ones(15, dtype=torch.bfloat16)
    tensors["extra"] = tensors.pop("decoder.final_layernorm.bias")
    other = saved(tmp_path, tensors)
    code, text, found = diff(capsys, base, other)
    rows = {row["name"]: (row["a"], row["b"]) for row in found["tensors"]}
    assert code == 1 and rows[NORM] == ("fp32 [14]", "bf16 [15]") and rows["extra"] == (None, "bf16 [14]")
    assert rows["decoder.final_layernorm.bias"] == ("fp32 [14]", None) and rows[EMBEDDING] == ("fp32 [37, 14]", "bf16 [37, 14]")
    assert "master: 16 tensors only in b" in text and "... and " not in text
    monkeypatch.setattr(contents, "_MAX_ROWS", 3)
    assert "... and 14 more (--json has all)" in diff(capsys, base, other)[1]
    some = ("--tensors", "*layers*weight", "--weights-only")
    assert diff(capsys, base, other, *some)[0] == 1  # other dtypes
    assert diff(capsys, base, other, *some, "--rtol", 0.01)[0] == 0


def test_what_cannot_be_compared(base: Path, tmp_path: Path, capsys: Capture) -> None:
    for words, code, says in (
        (["--rtol", "-1"], 2, "--rtol (-1.0) must be a number of at least 0"),
        (["--atol", "nan"], 2, "--atol (nan) must be"),
        (["--tensors", "nothing"], 3, "matches 'nothing'"),
    ):
        assert cli.main(["ckpt", "diff", str(base), str(base), *words]) == code
        assert says in capsys.readouterr().err
    other = saved(tmp_path, ckpts.make_tensors())
    next(other.glob("*.safetensors")).unlink()
    assert cli.main(["ckpt", "diff", str(base), str(other)]) == 3
    assert "is missing" in capsys.readouterr().err


@pytest.mark.parametrize("block_bytes", [1, pytest.param(1 << 20, marks=pytest.mark.long)])
def test_distance(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PART_BYTES", block_bytes)
    nan, inf = math.nan, math.inf

    def between(a: list[float], b: list[float], rtol: float = 0.0, atol: float = 0.0) -> Distance:
        return Distance.of([(torch.tensor(a), torch.tensor(b, dtype=torch.float64))], rtol, atol, lambda n: None)

    found = between([1.0, 2.0, -4.0], [1.0, 2.5, -4.0])
    assert (found.max_abs, found.largest, found.max_rel(), found.beyond, found.count) == (0.5, 4.0, 0.125, 1, 3)
    assert between([nan, inf, -inf, 0.0], [nan, inf, -inf, -0.0]).beyond == 0
    for a, b in ((nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (inf, -inf)):
        assert (between([a], [b], 0.5, 1e9).beyond, between([a], [b]).max_abs) == (1, inf)
    assert [between([2.0], [1.0], rtol, atol).beyond for rtol, atol in ((1.0, 0.0), (0.0, 1.0), (0.4, 0.5))] == [0, 0, 1]
    assert between([1.0], [0.0]).max_rel() == inf and between([], []).max_rel() == 0.0
