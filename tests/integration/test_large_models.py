"""scripts/pretrain_gpt_*.sh: the smoke tests train, and what the real runs would do, on machines with and without the GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training import records, saved_steps, status

pytestmark = pytest.mark.torchrun
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("pretrain_gpt_1b_64k", "pretrain_gpt_7b_16k")
FAKE = """#!/bin/bash
# a python that says which GPUs there are, and whose torchrun says what it was told
case "$*" in
    *device_count*) echo $GPUS ;;
    *torch.distributed.run*) printf '%s\\n' "LAUNCHED $*" ;;
    *) exec "$REAL" "$@" ;;
esac
"""


def run(name: str, *flags: object, **variables: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    foreign = (
        "DATA_PATH",
        "TOKENIZER_MODEL",
        "SAVE",
        "TRAIN_ITERS",
        "TP",
        "SP",
        "SMOKE",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "NPROC_PER_NODE",
    )
    kept = {k: v for k, v in os.environ.items() if k not in foreign}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / f"{name}.sh"), *map(str, flags)], capture_output=True, text=True, timeout=90,
        env={**kept, "PYTHON": sys.executable, **{k: str(v) for k, v in variables.items()}},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def run_with_gpus(tmp_path: Path, name: str, gpus: str, *flags: object, **variables: object) -> tuple[int, str, str]:
    """On a machine with ``gpus``: "how-many GiB-of-the-smallest"."""
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    return run(name, *flags, PYTHON=python, REAL=sys.executable, GPUS=gpus, **variables)


@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke(tmp_path: Path, name: str) -> None:
    code, out, err = run(name, "--seed", 7, SMOKE=1, SAVE=tmp_path / "run")
    assert code == 0, out + err
    assert "sp 2" in out and "--sp-overlap-mode auto:" in out and "bfloat16" in out
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3] and saved_steps(tmp_path / "run") == [3]
    assert status(tmp_path / "run")["status"] == "done"


@pytest.mark.parametrize("name, shape", [
    ("pretrain_gpt_1b_64k", "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 65536"),
    ("pretrain_gpt_7b_16k", "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 16384"),
])  # fmt: skip
def test_on_eight_gpus(tmp_path: Path, name: str, shape: str) -> None:
    """The flags are sound for eight processes (launch.sh has them checked), and the last word is the user's."""
    code, out, err = run_with_gpus(tmp_path, name, "8 139", "--lr", "1e-4", SAVE=tmp_path / "mine")
    assert code == 0, out + err
    (launched,) = [line for line in out.splitlines() if line.startswith("LAUNCHED")]
    assert shape in launched and "--nproc-per-node 8" in launched and f"--save {tmp_path / 'mine'}" in launched
    assert "--sequence-parallel-size 8 --sp-overlap-comm --lr 1e-4" in launched and "--global-batch-size 16" in launched
    assert "--mock-data --vocab-size 50304" in launched and "--recompute" not in launched
    assert "tp=1, sp=8, dp=1" in out and "of 139 GiB on each GPU" in out and "set DATA_PATH=PREFIX" in out


@pytest.mark.parametrize("gpus, variables, message", [
    ("0 0", {}, "needs 8 GPUs on this host, and there are 0. On this machine SMOKE=1 bash scripts/pretrain_gpt_7b_16k.sh"),
    ("4 139", {}, "needs 8 GPUs on this host, and there are 4."),
    ("8 79", {}, "a GPU here has 79 GiB, and each needs about 124 GiB: 112 for weights"),
    ("8 79", {}, "TP=2 SP=4 bash scripts/pretrain_gpt_7b_16k.sh divides the first over 2 GPUs"),
    ("8 44", {}, "TP=4 SP=2 bash scripts/pretrain_gpt_7b_16k.sh"),
    ("8 16", {}, "take GPUs with more memory"),
    ("8 139", {"TP": 3}, "TP=3 must be 1, 2, 4 or 8"), ("8 139", {"TP": 2, "SP": 8}, "TP * SP (2 * 8) must be 8"),
    ("8 139", {"DATA_PATH": "/nowhere/text"}, "DATA_PATH=/nowhere/text: there is no /nowhere/text.idx"),
])  # fmt: skip
def test_what_cannot_work_is_said(tmp_path: Path, gpus: str, variables: dict[str, object], message: str) -> None:
    code, out, err = run_with_gpus(tmp_path, "pretrain_gpt_7b_16k", gpus, **variables)
    assert code == 2 and err.count("error:") == 1 and message in err and "LAUNCHED" not in out, out + err


def test_tensor_parallel_and_own_data(tmp_path: Path) -> None:
    for file in ("text.idx", "pieces.model"):
        (tmp_path / file).write_text("")
    variables: dict[str, object] = {
        "TP": 2,
        "DATA_PATH": tmp_path / "text",
        "TOKENIZER_MODEL": tmp_path / "pieces.model",
        "TRAIN_ITERS": 9000,
    }
    code, out, err = run_with_gpus(tmp_path, "pretrain_gpt_7b_16k", "8 79", **variables)
    assert code == 0, out + err
    assert "--tensor-model-parallel-size 2 --sequence-parallel-size 4 --sequence-parallel --sp-overlap-comm" in out
    assert f"--data-path {tmp_path}/text " in out and f"--tokenizer-model {tmp_path}/pieces.model" in out and "--train-iters 9000" in out
