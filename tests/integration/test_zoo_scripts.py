"""scripts/pretrain_*.sh: each trains a tiny model in its layout, and says what its full size takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training import records, saved_steps, state, status
from support.waiting import PATIENCE_S

SMOKE_STEPS = 2
pytestmark = pytest.mark.torchrun
VARIABLES = (
    "NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "TP", "SP", "CP", "PP", "PP_SCHEDULE", "EP", "ZERO", "OVERLAP", "RECOMPUTE",
    "TRAIN_ITERS", "DATA_PATH", "TOKENIZER_MODEL", "VOCAB_FILE", "SAVE", "SMOKE", "DRY_RUN", "WORLD_SIZE",
)  # fmt: skip
# Script: processes of its smoke test, what the run says of the layout, and what the dry run says of the full size.
SCRIPTS = {
    "pretrain_gpt_125m_1gpu": (1, "1 x cpu (dp 1)", "1 process on GPUs: dp 1, ZeRO stage 0, bfloat16, 32 micro-batches of 8 x 2048"),
    "pretrain_gpt_1b_64k": (2, "--sp-overlap-mode auto: ", "dp 1, sp 8, ZeRO stage 1, bfloat16, 16 micro-batches of 1 x 65536"),
    "pretrain_gpt_7b_16k": (2, "--sp-overlap-mode auto: ", "dp 1, sp 8, ZeRO stage 1, bfloat16, 16 micro-batches of 1 x 16384"),
    "pretrain_gpt_175b": (4, "pp 2: interleaved, layers 1+1+1+1, tp 2", "dp 1, pp 16 (interleaved, layers 3+3+3+3"),
    "pretrain_llama_8b_128k": (2, "sp 2: chunked in 2 chunks", "dp 1, sp 8, ZeRO stage 3, bfloat16, 8 micro-batches of 1 x 131072"),
    "pretrain_llama_8b_1m": (4, "cp 2, sp 2: chunked in 2 chunks", "dp 1, sp 8, ZeRO stage 3, bfloat16, 4 micro-batches of 1 x 1048576"),
    "pretrain_olmoe_1b_7b": (2, "2 x cpu (dp 2", "dp 8, ep 8, ZeRO stage 1, bfloat16, 32 micro-batches of 4 x 4096"),
    "pretrain_mixtral_8x7b": (2, "sp 2: chunked in 2 chunks", "dp 4, sp 8, ep 8, ZeRO stage 3, bfloat16, 32 micro-batches of 1 x 32768"),
    "pretrain_bert_large": (2, "2 x cpu (dp 2)", "dp 8, ZeRO stage 1, bfloat16, 4 micro-batches of 32 x 512"),
}  # fmt: skip
SIZES = {
    "pretrain_gpt_125m_1gpu": (1, 125_226_240), "pretrain_gpt_1b_64k": (8, 1_311_086_592), "pretrain_gpt_7b_16k": (8, 6_648_836_096),
    "pretrain_gpt_175b": (8, 174_604_259_328),
    "pretrain_llama_8b_128k": (8, 8_030_261_248),
    "pretrain_olmoe_1b_7b": (8, 6_919_161_856), "pretrain_mixtral_8x7b": (8, 46_702_792_704),
    "pretrain_llama_8b_1m": (8, 8_030_261_248), "pretrain_bert_large": (8, 336_226_108),
}  # fmt: skip


def run(name: str, *flags: object, **variables: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    kept = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / f"{name}.sh"), *map(str, flags)], capture_output=True, text=True, timeout=PATIENCE_S,
        env={**kept, "PYTHON": sys.executable, **{k: str(v) for k, v in variables.items()}},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.often("pretrain_gpt_1b_64k")
@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke(tmp_path: Path, name: str) -> None:
    """Through the real launcher; variables of several hosts, which a job's shell may have, do not reach it."""
    code, out, err = run(name, "--seed", 7, SMOKE=1, SAVE=tmp_path / "run", NNODES=16 if "175b" in name else 2, NODE_RANK=1)
    assert code == 0, out + err
    ranks, layout, _ = SCRIPTS[name]
    assert layout in out and f"{ranks} x cpu" in out and "bfloat16" in out, out
    assert [r["step"] for r in records(tmp_path / "run")] == list(range(1, SMOKE_STEPS + 1))
    assert saved_steps(tmp_path / "run") == [SMOKE_STEPS] and status(tmp_path / "run")["status"] == "done"
    config = state(tmp_path / "run")["config"]
    assert config["batch"]["seed"] == 7 and config["precision"]["bf16"] and config["model"]["hidden_size"] == 64
    assert config["parallel"]["zero_stage"] == (3 if "llama" in name or "mixtral" in name else 0 if "1gpu" in name else 1)
    assert config["kernels"]["recompute_granularity"] == ("full" if any(kind in name for kind in ("llama", "mixtral", "olmoe")) else None)
    assert config["parallel"]["expert_model_parallel_size"] == (2 if config["model"]["num_experts"] else 1)


@pytest.mark.often("pretrain_gpt_125m_1gpu")
@pytest.mark.parametrize("name", SCRIPTS)
def test_dry_run(name: str) -> None:
    code, out, err = run(name, DRY_RUN=1)
    assert code == 0, out + err
    assert SCRIPTS[name][2] in out and f"({SIZES[name][1]:,})" in out and "; a rank works" in out, out
    (command,) = re.findall(r"^  command     (.*)$", out, re.MULTILINE)
    assert f"scripts/launch.sh {SIZES[name][0]} " in command and "--mock-data" in command and "--auto-resume" in command
    assert f"--save runs/{name.removeprefix('pretrain_')} " in command


@pytest.mark.long
def test_the_layout_of_several_hosts() -> None:
    code, out, err = run("pretrain_llama_8b_128k", "--global-batch-size", 16, DRY_RUN=1, NNODES=4, TP=2, ZERO=1, TRAIN_ITERS=900)
    assert code == 0, out + err
    assert "32 GPUs of 4 hosts: tp 2, sp 4 (exchanges: chunked), dp 4, ZeRO stage 1" in out and "; 900 steps, 1.9 B tokens" in out
    assert "dry run: 32 processes on GPUs: dp 4, sp 4, tp 2 with sequence parallel" in out


@pytest.mark.long  # unit/planner/test_dry_run.py has it in every run
@pytest.mark.parametrize(("name", "flags", "variables", "says"), [
    pytest.param("gpt_1b_64k", (), {"CP": 2}, ("8 GPUs: tp 1, sp 4 (exchanges: auto), cp 2, dp 1", "dp 1, cp 2, sp 4, ZeRO stage 1"),
                 id="within a host"),
    pytest.param("gpt_1b_64k", ("--seq-length", 262144, "--global-batch-size", 4), {"CP": 4, "NNODES": 4},
                 ("32 GPUs of 4 hosts: tp 1, sp 8 (exchanges: auto), cp 4, dp 1", "4 micro-batches of 1 x 262144"), id="between hosts"),
    pytest.param("llama_8b_1m", (), {"NNODES": 8}, ("64 GPUs of 8 hosts: tp 1, sp 8 (exchanges: chunked), cp 8, dp 1",), id="1M"),
])  # fmt: skip
def test_context_parallelism(name: str, flags: tuple[object, ...], variables: dict[str, object], says: tuple[str, ...]) -> None:
    code, out, err = run(f"pretrain_{name}", *flags, DRY_RUN=1, **variables)
    assert code == 0, out + err
    assert all(text in out for text in says), out


@pytest.mark.long
@pytest.mark.parametrize(
    "name, variables", [("pretrain_gpt_125m_1gpu", {"NPROC_PER_NODE": 2, "PP_SCHEDULE": "zbv"}), ("pretrain_bert_large", {})]
)
def test_a_smoke_test_of_a_pipeline(tmp_path: Path, name: str, variables: dict[str, object]) -> None:
    """Two processes, which have two layers each with the two stages of zbv."""
    code, out, err = run(name, SMOKE=1, PP=2, SAVE=tmp_path / "run", **variables)
    assert code == 0, out + err
    kind = variables.get("PP_SCHEDULE", "1f1b")
    assert f"2 CPU processes: tp 1, sp 1, pp 2 ({kind}), dp 1" in out and f"2 x cpu (dp 1, pp 2: {kind}" in out, out
    assert [r["step"] for r in records(tmp_path / "run")] == list(range(1, SMOKE_STEPS + 1))
    assert state(tmp_path / "run")["config"]["parallel"]["pipeline_model_parallel_size"] == 2


@pytest.mark.long  # unit/tools/test_recipe.py has it in every run
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_pipeline_of_two_hosts(name: str) -> None:
    variables = {"NPROC_PER_NODE": SIZES[name][0], "NNODES": 2, "PP": 2, "PP_SCHEDULE": "zb1p", "CP": 1}
    code, out, err = run(name, DRY_RUN=1, **variables)
    assert code == 0, out + err
    assert "of 2 hosts: tp " in out and ", pp 2 (zb1p), dp " in out and "pp 2 (zb1p, layers " in out, out


@pytest.mark.long
def test_the_layout_and_the_batches_of_gpt_3() -> None:
    code, out, err = run("pretrain_gpt_175b", DRY_RUN=1)
    assert code == 0, out + err
    assert "128 GPUs of 16 hosts: tp 8, sp 1, pp 16 (interleaved), dp 1, ZeRO stage 1, recomputation: none" in out
    assert "1,536 sequences (16 at the start), 3,145,728 tokens" in out and "300.0 B tokens" in out
    code, more, err = run("pretrain_gpt_175b", DRY_RUN=1, NNODES=32)
    assert code == 0 and "256 GPUs of 32 hosts" in more and "pp 16 (interleaved), dp 2" in more, more + err


@pytest.mark.long
@pytest.mark.parametrize("words, variables", [
    (r"a GPU holds (\d+) GiB", {}), (r"PP_SCHEDULE=1f1b takes (\d+) GiB", {"PP_SCHEDULE": "1f1b"}),
    (r"RECOMPUTE=full takes (\d+) GiB", {"RECOMPUTE": "full"}),
])  # fmt: skip
def test_the_memory_that_gpt_3_says_it_takes(words: str, variables: dict[str, object]) -> None:
    (said,) = re.findall(words, (ROOT / "scripts" / "pretrain_gpt_175b.sh").read_text())
    (peak,) = re.findall(r"^peak: ([\d.]+) GiB", run("pretrain_gpt_175b", DRY_RUN=1, **variables)[1], re.MULTILINE)
    assert float(peak) == pytest.approx(float(said), rel=0.05)


def test_what_cannot_work_is_said() -> None:
    code, out, err = run("pretrain_gpt_7b_16k", TP=2, SP=8)
    assert code == 2 and out == "" and "Traceback" not in err
    assert "the number of processes (8) must be a multiple of" in err and "the variables are NPROC_PER_NODE=8 NNODES=1 TP=2 SP=8" in err
    code, _, err = run("pretrain_gpt_7b_16k", PYTHON="/nowhere/python")
    assert code == 2 and "there is no /nowhere/python: bash scripts/setup_env.sh makes it" in err


def test_every_script_is_here_and_is_sound() -> None:
    scripts = sorted((ROOT / "scripts").glob("pretrain_*.sh"))
    assert [script.stem for script in scripts] == sorted(SCRIPTS)
    for script in [*scripts, ROOT / "scripts" / "recipe.sh"]:
        text = script.read_text()
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0 and len(text.splitlines()) < 40
        assert not re.search(r"^\s*(if|case|for|while|function)\b", text, re.MULTILINE) or script.stem == "recipe"
