"""``megatron-sp ckpt merge``: the same bits in few files, or weights alone in another dtype."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import ckpts
from support.training import assert_same_tensors, state, tensors

from megatron_sp.checkpoint.manifest import read_manifest
from megatron_sp.commands import cli
from megatron_sp.commands.ckpt import tensors as merging

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of a bf16 run, in many files."""
    folder, full = tmp_path_factory.mktemp("merge") / "run", ckpts.make_tensors(dtype=torch.bfloat16)
    ckpts.save(folder, 1, 2, tensors=full, rows=4, state=ckpts.make_state(full, {"world_size": 8, "tp": 2, "dp": 4}))
    return folder


def merge(capsys: Capture, run: Path, output: Path, *words: object) -> tuple[int, str, str]:
    code = cli.main(["ckpt", "merge", str(run), "--output", str(output), *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_all_of_it(run: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = merge(capsys, run, tmp_path / "one", "--ckpt-step", 1)
    folder = tmp_path / "one" / "checkpoints" / "step-000001"
    assert code == 0 and out.startswith(f"{folder}: ") and "in 2 files, 64 tensors, verified (was " in out
    assert sorted(os.listdir(folder)) == ["MANIFEST.json", "rank00000-00000.safetensors", "state.json"]
    assert_same_tensors(tensors(tmp_path / "one"), tensors(run, 1))
    alone = {"world_size": 1, "dp": 1, "cp": 1, "sp": 1, "tp": 1, "tp_seq": False, "sp_overlap": None}
    assert state(tmp_path / "one") == {**state(run, 1), "layout": alone}


def test_weights_only(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert merge(capsys, run, tmp_path / "w", "--weights-only")[0] == 0
    weights = ckpts.make_tensors(dtype=torch.bfloat16, optimizer=False)
    assert_same_tensors(tensors(tmp_path / "w"), weights)
    assert state(tmp_path / "w")["has_optimizer"] is False and state(tmp_path / "w")["step"] == 2


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.long), pytest.param("fp16", marks=pytest.mark.long)])
def test_another_dtype_comes_from_the_unrounded_weights(dtype: str, run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert merge(capsys, run, tmp_path / "w", "--weights-only", "--dtype", dtype)[0] == 0
    exact = ckpts.make_tensors(optimizer=False)
    assert_same_tensors(tensors(tmp_path / "w"), {name: t.to(merging.DTYPES[dtype]) for name, t in exact.items()})
    assert (
        merge(capsys, tmp_path / "w", tmp_path / "w2", "--weights-only", "--dtype", "bf16")[0] == 0
    )  # where there are none, from the weights
    assert_same_tensors(tensors(tmp_path / "w2"), {name: t.to(merging.DTYPES[dtype]).bfloat16() for name, t in exact.items()})


def test_biases_of_routers_stay_in_fp32(tmp_path: Path, capsys: Capture) -> None:
    bias = torch.tensor([1.0009765625, -3e-6])
    ckpts.save(tmp_path / "run", 1, tensors={"layers.0.mlp.router.expert_bias": bias, "layers.0.mlp.router.weight": torch.ones(2, 3)})
    assert merge(capsys, tmp_path / "run", tmp_path / "w", "--weights-only", "--dtype", "bf16")[0] == 0
    assert_same_tensors(
        tensors(tmp_path / "w"),
        {"layers.0.mlp.router.expert_bias": bias, "layers.0.mlp.router.weight": torch.ones(2, 3, dtype=torch.bfloat16)},
    )


def test_biases_of_routers_are_no_parameters(tmp_path: Path, capsys: Capture) -> None:
    tensors = {"layers.0.mlp.router.expert_bias": torch.zeros(2), "layers.0.mlp.router.weight": torch.ones(2, 600)}
    ckpts.save(tmp_path / "run", 1, tensors=tensors)
    assert cli.main(["ckpt", "show", str(tmp_path / "run")]) == 0 and "parameters   1.2 k (1,200) fp32" in capsys.readouterr().out


def test_a_nan_is_not_carried_on_in_silence(tmp_path: Path, capsys: Capture) -> None:
    weight = torch.tensor([[1.0, torch.nan], [7e4, 0.0]])
    ckpts.save(tmp_path / "run", 1, tensors={"decoder.weight": weight})
    code, _, err = merge(capsys, tmp_path / "run", tmp_path / "w")
    assert code == 3 and "decoder.weight has 1 NaN of 4 numbers" in err and not (tmp_path / "w").exists()
    code, _, err = merge(capsys, tmp_path / "run", tmp_path / "w", "--allow-non-finite")
    assert code == 0 and "warning: decoder.weight has 1 NaN of 4 numbers" in err
    torch.testing.assert_close(tensors(tmp_path / "w")["decoder.weight"], weight, rtol=0, atol=0, equal_nan=True)


def test_what_is_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    code, _, err = merge(capsys, run, tmp_path / "x", "--dtype", "bf16")
    assert code == 2 and "--dtype bf16 needs --weights-only" in err
    code, _, err = merge(capsys, run, run)
    assert code == 3 and "has step-000001, step-000002 already: name another folder" in err
    assert merge(capsys, tmp_path / "none", tmp_path / "x")[0] == 3
    damaged = ckpts.save(tmp_path / "damaged", 1)
    ckpts.flip(damaged / "rank00000-00000.safetensors")
    code, _, err = merge(capsys, damaged, tmp_path / "x")
    assert code == 3 and "its contents have changed" in err and not (tmp_path / "x").exists()


def test_what_was_written_is_read_back(run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that loses a bit is found out at once."""
    write = merging.stream.write_checkpoint

    def lossy(*args: object, **kwargs: object) -> Path:
        written = write(*args, **kwargs)  # type: ignore[arg-type]
        ckpts.flip(written / "rank00000-00000.safetensors")
        return written

    monkeypatch.setattr(merging.stream, "write_checkpoint", lossy)
    code, out, err = merge(capsys, run, tmp_path / "x")
    assert code == 3 and out == "" and "its contents have changed" in err
    assert read_manifest(tmp_path / "x" / "checkpoints" / "step-000002").world_size == 1
