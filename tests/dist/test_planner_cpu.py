"""``--gpu cpu-core``: the rates of this machine are measured, and layouts of its processes planned with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from megatron_sp.commands import cli
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.planner.calibrate import rates
from megatron_sp.planner.parallel_plans import ParallelPlan
from megatron_sp.planner.search import search
from megatron_sp.utils.errors import ConfigError

sys.path.insert(0, str(ROOT / "benchmarks"))

import memory
import plan_check

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 128 --attention-dropout 0 --hidden-dropout 0"


def test_processes_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpus", "2", "--gpu", "cpu-core", "--json", *TINY.split()]) == 0
    record = json.loads(capsys.readouterr().out)
    found, link = record["machine"]["rates"], record["machine"]["inside"]
    assert found["matmul_tflops"] > 0 and found["attention_backward_tflops"] > 0 and found["activation_gbs"] > 0 and found["update_gbs"] > 0
    assert link["name"] == "loopback" and link["peak_gbs"] > 0 and link["latency_us"] > 0
    assert record["global_batch_size"] == 2 and {b["layout"]["tp"] for b in record["best"]} == {1, 2}
    assert "--bf16" not in record["best"][0]["flags"]


def test_more_processes_than_the_machine_can_take_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpus", "4096", "--gpu", "cpu-core", *TINY.split()]) == 2
    assert "must be at most four times the cores" in capsys.readouterr().err
    assert issubclass(ConfigError, ValueError)


def test_seconds_become_rates() -> None:
    """One process with nobody to talk to, and four."""
    base = Config(model=ModelConfig(hidden_size=64, num_attention_heads=4, seq_length=128, num_layers=1, vocab_size=64))
    times = {"products": 1.0, "attention forward": 1.0, "attention backward": 2.0, "norm": 1.0, "activation": 1.0, "update": 1.0}
    gpu, _ = rates(times, base, 1, 1)
    assert gpu.matmul_tflops == pytest.approx(6 * 128 * 64 * 256 / 1e12)
    assert gpu.attention_forward_tflops == pytest.approx(2 * 128 * 128 * 4 * 16 / 1e12)
    assert gpu.attention_backward_tflops == pytest.approx(gpu.attention_forward_tflops * 2.5 / 2)
    assert (gpu.overlap_cost, gpu.sustained) == (1, 1), "the same cores copy and compute, and what was measured is what is reached"
    _, link = rates({**times, "collective": 1.0, "small collective": 0.01}, base, 1, 4)
    assert link.gbs == pytest.approx(3 * 4 * 2**20 * 3 / 4 / 0.98 / 1e9) and link.latency_us == pytest.approx(1e4)


@pytest.mark.long
def test_the_planned_memory_is_the_one_that_is_measured() -> None:
    """Through the search, two layouts of two processes, within 7 % (``benchmarks/plan_check.py`` has twelve)."""
    shape = plan_check.SHAPE | {"seq_length": 128, "num_layers": 2, "vocab_size": 512}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in shape.items())
    from megatron_sp.planner.command import read_model
    from megatron_sp.planner.machine import Machine

    base, given, _ = read_model(f"{flags} --global-batch-size 4 --micro-batch-size 2".split(), 2, True)
    times = {"products": 1.0, "attention forward": 1.0, "attention backward": 1.0, "norm": 1.0, "activation": 1.0, "update": 1.0}
    gpu, link = rates({**times, "collective": 1.0, "small collective": 0.1}, base, 2**34, 2)
    planned = {c.layout: c for c in search(base, given, Machine(gpu, 2, 1, link, None, 1, 2**34)).candidates}
    for layout, as_measured in (
        (ParallelPlan(zero=1, micro_batch=2), memory.Layout(dp=2, zero={"zero_stage": 1})),
        (ParallelPlan(tp=2, tp_seq=True, micro_batch=2), memory.Layout(tp=2, tp_seq=True, micro_batches=2)),
    ):
        measured = max(rank["peak"] for rank in memory.run(as_measured, shape, 2))
        assert planned[layout].memory.peak == pytest.approx(measured, rel=plan_check.MEMORY_BOUND), layout


@pytest.mark.long  # steps of an H200 are held in every run: unit/planner/test_planner_h200.py
def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan_check.json"
    assert plan_check.main(["--smoke", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert len(results["published"]["rows"]) == len(plan_check.PUBLISHED) and results["memory"]["worst"] < plan_check.MEMORY_BOUND
    (pair,) = results["pairs"]["rows"]
    assert len(pair["predicted_s"]) == len(pair["measured_s"]) == 2 and min(pair["measured_s"]) > 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        plan_check.main(["--pairs", "99"])


@pytest.mark.long  # steps of an H200 are held in every run: unit/planner/test_planner_h200.py
def test_predictions_stay_near_published_figures() -> None:
    """Short sequences, other people's code: within a fifth in the middle of those to which nothing was fitted."""
    errors = plan_check.published()["errors"]
    assert sorted(map(abs, errors["fitted"]))[5] < 0.06 and sorted(map(abs, errors["not fitted"]))[5] < 0.15
    rows = plan_check.arithmetic()["rows"]
    assert all(abs(row["predicted_ms"] / row["by_hand_ms"] - 1) < 0.13 for row in rows if "by_hand_ms" in row)
    for row in (row for row in rows if "bound" in row):
        # a chunk of heads copies its rows of the weights and of their gradients: at 16K tokens that takes what it hides
        least = 1.0 if "64K" in row["what"] else 0.95
        assert least < row["predicted"] < 1.02 * row["bound"], row
