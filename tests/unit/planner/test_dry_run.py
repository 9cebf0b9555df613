"""--dry-run: what it says, for any number of processes; and remedies that have been tried."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.paths import ROOT

from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.estimate import suggestions as remedies
from megatron_sp.estimate.flops import count_active_parameters, count_parameters
from megatron_sp.estimate.suggestions import find_suggestions, plan_of, shortage
from megatron_sp.planner import dry_run
from megatron_sp.planner.dry_run import plan_run

MODEL = (
    "--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "2048", "--vocab-size", "32000",
    "--mock-data", "--lr", "1e-4", "--train-iters", "10", "--micro-batch-size", "4", "--global-batch-size", "256",
)  # fmt: skip
GIB = 2**30


def config_of(*flags: str, world_size: int = 16) -> Config:
    return config_from_args([*MODEL, *flags], world_size=world_size)


def says(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        parse_config([*MODEL, *flags], prog="pretrain_gpt.py")
    assert end.value.code == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


def test_the_report_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, "--dry-run", "--world-size", "16", "--sp-size", "2", "--zero-stage", "3", "--sp-overlap-comm", "--bf16")
    for part in (
        "16 processes on GPUs: dp 8, sp 2, ZeRO stage 3, bfloat16, 8 micro-batches of 4 x 2048 tokens", "parameters: 135.",
        "buffers for whole parameters", "and at the worst moment (", "peak: ", "forward ", "backward ", "update ",
        "x reduce_scatter between 16 (dp x sp): gradients;", "x all_gather between 16 (dp x sp): parameters;", "optimizer state",
        "x all_to_all between 2 (sp)",
        "can run under computation", "auto is resolved by timing", "less memory: ",
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing in\n{text}"


def test_what_context_parallelism_sends_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--dry-run", "--world-size", "16", "--bf16", "--cp-size", "4", "--seq-length", "64", "--num-layers", "2")
    measured = "--cp-comm-type auto is resolved by timing when the run starts; here all these ranks count as cp"
    text = says(capsys, *flags, "--cp-comm-type", "auto", "--reset-attention-mask")
    for part in (
        "dp 4, cp 4,", "all_to_all between 4 (cp): keys and values, forward; 100% under ", "between 16 (dp x cp x sp): gradients",
        "each row is counted as one document", measured,
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing in\n{text}"
    alone = says(capsys, *flags, "--window-size", "1")
    assert "the 4 cp ranks exchange no keys and values: with this mask a token sees itself alone" in alone and "(cp)" not in alone
    assert "each row is counted as one document" not in alone and measured not in alone


def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(
        says(
            capsys,
            "--dry-run",
            "json",
            "--world-size",
            "16",
            "--zero-stage",
            "2",
            "--device",
            "cpu",
            "--seq-length",
            "32",
            "--num-layers",
            "2",
        )
    )
    assert record["layout"] == {"pp": 1, "dp": 16, "cp": 1, "sp": 1, "tp": 1, "tp_seq": False, "zero_stage": 2}
    assert record["device"] == "cpu" and record["micro_batches"] == 4 and record["world_size"] == 16
    memory, traffic = record["memory"], record["traffic"]
    assert memory["resident"] == sum(memory["stays"].values()) and memory["peak"] == max(memory["phases"].values())
    assert traffic["num_bytes"] == sum(flow["num_bytes"] for flow in traffic["flows"]) > 0
    assert record["parameters"]["kept_per_rank"] >= record["parameters"]["model"]
    assert all(remedy["peak"] < memory["peak"] for remedy in record["remedies"])


@pytest.mark.usefixtures("rough_runs")
def test_mistakes_are_those_of_a_run_with_so_many_processes(capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, "--dry-run", "--world-size", "6", "--sp-size", "4", code=2)
    assert "the number of processes (6) must be a multiple of" in text
    assert "--world-size is for --dry-run" in says(capsys, "--world-size", "4", code=2)
    assert "--world-size (0) must be at least 1" in says(capsys, "--dry-run", "--world-size", "0", code=2)
    assert "--world-size: expected an integer" in says(capsys, "--dry-run", "--world-size", "many", code=2)
    assert "unexpected 'yaml': --dry-run takes" in says(capsys, "--dry-run", "yaml", code=2)
    assert "--dry-run: expected nothing, or one of text, json, got 'yaml'" in says(capsys, "--dry-run=yaml", code=2)


@pytest.mark.usefixtures("rough_runs")
def test_a_launcher_says_how_many_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "8 processes on" in says(capsys, "--dry-run")
    monkeypatch.setenv("RANK", "1")
    assert says(capsys, "--dry-run") == "", "rank 0 alone speaks"


@pytest.mark.usefixtures("rough_runs")
def test_it_says_what_its_host_would_refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs it knows nothing, and of other hosts neither."""
    monkeypatch.setattr(dry_run, "host_memory_bytes", lambda: 2**20)
    monkeypatch.setattr(dry_run, "swap_bytes", lambda: 0)
    refused = "this host would refuse to start all of it: "
    small = ("--dry-run", "--seq-length", "64", "--num-layers", "2")
    assert refused in says(capsys, *small, "--device", "cpu")
    for more in (["--device", "cuda"], ["--device", "cpu", "--allow-oom"]):
        assert refused not in says(capsys, *small, *more)


def test_where_a_step_cannot_be_tried_the_rough_form_answers_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise NotImplementedError("aten::new_operator has no kernel for Meta\nand more")

    monkeypatch.setattr("megatron_sp.planner.fake_run.predict", fails)
    text = says(capsys, "--dry-run")
    assert "without contents (aten::new_operator has no kernel for Meta)" in text
    assert "peak: " in text and "launches of a rank" not in text


@pytest.mark.long
def test_the_page_shows_what_its_command_prints() -> None:
    page = (ROOT / "docs/how-to/dry_run.md").read_text()
    command = next(b for b in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL) if "--dry-run" in b)
    shown = next(b for b in re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL) if b.startswith("dry run: "))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *shlex.split(command.replace("\\\n", " "))[1:]]
    printed = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=True).stdout.splitlines()
    missing = [line for line in shown.splitlines() if line != "..." and line not in printed]
    assert not missing, missing


@pytest.mark.usefixtures("rough_runs")
def test_the_vocabulary_may_come_from_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for word in MODEL if word not in ("--vocab-size", "32000")]
    config = config_from_args([*flags, "--tokenizer-type", "ByteTokenizer"], world_size=2)
    assert plan_run(config, 2).config.model.vocab_size in range(256, 300)
    with pytest.raises(SystemExit) as end:
        parse_config([*flags, "--tokenizer-model", "absent.model", "--dry-run"], prog="pretrain_gpt.py")
    assert end.value.code == 4 and "absent.model" in capsys.readouterr().err, "as a run would answer"


@pytest.mark.parametrize(
    "overrides",
    [
        {}, {"untie_embeddings_and_output_weights": True, "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True},
        {"num_query_groups": 2, "qk_layernorm": True, "position_embedding_type": "rope"},
        {"disable_bias_linear": True, "add_qkv_bias": True},
        {"max_position_embeddings": 31, "squared_relu": True},
        {"disable_bias_linear": True, "add_mlp_bias": True, "geglu": True},
        {"disable_bias_linear": True, "add_proj_bias": True, "use_parallel_residual": True, "window_size": 3},
        {"num_experts": 6, "moe_ffn_hidden_size": 5, "moe_layer_freq": "[0,1,0]", "moe_shared_expert_intermediate_size": 4},
        {"num_experts": 4, "swiglu": True, "disable_bias_linear": True, "moe_router_topk": 1},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_are_counted_as_the_model_has_them(overrides: dict[str, Any]) -> None:
    config = tiny.shape(**overrides)
    model = tiny.make_model(config)
    assert config.vocab_size and config.hidden_size
    padding = 48 - config.vocab_size
    tables = 2 if config.untie_embeddings_and_output_weights else 1
    assert count_parameters(config) == sum(p.numel() for p in model.parameters()) - tables * padding * config.hidden_size


def test_active_parameters_are_those_of_a_token() -> None:
    """Of four experts it uses one, of each matrix and bias a quarter."""
    config = tiny.shape(num_experts=4, moe_router_topk=1, moe_layer_freq="[0,1,0]")
    model = tiny.make_model(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts == 4 * (2 * 14 * 10 + 10 + 14)
    assert count_parameters(config) - count_active_parameters(config) == experts * 3 // 4
    assert count_active_parameters(tiny.BASE) == count_parameters(tiny.BASE)


def test_remedies_are_tried_and_do_what_they_say() -> None:
    config = config_of("--bf16")
    peak = plan_of(config, 16, "cuda").peak
    found = find_suggestions(config, 16, "cuda", available=peak - 1)
    assert len(found) == 3 and all(remedy.peak < peak for remedy in found)
    for remedy in found:
        changed = config_of("--bf16", *remedy.flags.split())
        assert plan_of(changed, 16, "cuda").peak == remedy.peak, remedy.flags
    assert config == config_of("--bf16"), "nothing was changed on the way"


def test_the_smallest_change_that_suffices_comes_first() -> None:
    config = config_of("--bf16")
    peaks = {stage: plan_of(config_of("--bf16", "--zero-stage", str(stage)), 16, "cuda").peak for stage in range(4)}
    found = find_suggestions(config, 16, "cuda", available=peaks[1])
    assert found[0].flags == "--zero-stage 1" and found[0].peak == peaks[1]


def test_if_nothing_suffices_alone_all_together_are_tried() -> None:
    config = config_of()
    last = find_suggestions(config, 16, "cuda", available=GIB // 2)[-1]
    assert last.flags == "--recompute-granularity full --micro-batch-size 1 --offload-activations --zero-stage 3 --mlp-chunks 4"
    assert last.peak == plan_of(config_of(*last.flags.split()), 16, "cuda").peak


def test_impossible_changes_are_not_recommended() -> None:
    """One process: nothing to shard, no ranks to give a share to."""
    config = config_from_args([*MODEL, "--num-attention-heads", "1", "--kv-channels", "64"], world_size=1)
    flags = [remedy.flags for remedy in find_suggestions(config, 1, "cpu")]
    assert flags and not any(f.startswith(("--zero", "--seq", "--tensor")) for f in flags)


def test_an_absurd_micro_batch_is_answered_as_fast_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes to try instead are found from the small divisors on, not by counting down."""
    size = 2**20
    config = config_of("--micro-batch-size", str(size), "--global-batch-size", str(16 * size))
    plans, plan = [0], remedies.plan_of

    def counted(*args: object, **given: object) -> object:
        plans[0] += 1
        return plan(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(remedies, "plan_of", counted)
    flags = [remedy.flags for remedy in find_suggestions(config, 16, "cpu", available=GIB)]
    assert plans[0] < 1000 and any("--micro-batch-size 1 " in f"{f} " for f in flags)


def test_the_warning_has_the_arithmetic() -> None:
    config = config_of("--bf16")
    plan = plan_of(config, 16, "cuda")
    assert shortage(config, 16, "cuda", plan.peak, "on this GPU") == []
    first, *rest = shortage(config, 16, "cuda", plan.peak // 2, "on this GPU")
    assert first.startswith("warning: a rank is predicted to need ") and " on this GPU: " in first and " that stay + " in first
    assert len(rest) == 3 and all(line.endswith((", fits", ", still too much")) for line in rest)
    smallest = config_of("--bf16", "--zero-stage", "3", "--recompute-granularity", "full", "--micro-batch-size", "1")
    before = copy.deepcopy(smallest)
    shortage(smallest, 16, "cuda", 1, "")
    assert smallest == before


@pytest.mark.usefixtures("rough_runs")
def test_load_and_save_are_looked_at_as_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(code: int, *flags: str) -> str:
        with pytest.raises(SystemExit) as end:
            parse_config([*MODEL, "--dry-run", "--world-size", "4", *flags], prog="x")
        assert end.value.code == code
        return capsys.readouterr().err

    run, other = tmp_path / "run", tmp_path / "other"
    assert f"there is no {other}" in refused(3, "--load", str(other))
    assert f"there is no {other}" in refused(3, "--load", str(other), "--save", str(run))
    assert "has no checkpoint" in refused(3, "--load", str(tmp_path), "--save", str(run))
    assert "there is no" in refused(3, "--load", str(run), "--save", str(run), "--exit-on-missing-checkpoint")
    assert f"{run} has no checkpoint yet: starting from scratch" in says(
        capsys, "--dry-run", "--world-size", "4", "--load", str(run), "--save", str(run)
    )
    (tmp_path / "file").write_text("x")
    assert f"{tmp_path / 'file'} is not a folder" in refused(2, "--save", str(tmp_path / "file" / "run"))
    assert "is a file: a checkpoint is a folder" in refused(3, "--load", str(tmp_path / "file"))
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    assert "already holds checkpoints" in refused(3, "--save", str(run))
    assert "has no MANIFEST.json" in refused(3, "--load", str(run))
    assert not other.exists() and sorted(p.name for p in run.iterdir()) == ["checkpoints"]
    other.mkdir()
    (other / "run_status.json").write_text('{"saved_step": 4}')
    for load in ((), ("--load", str(other))):
        assert "says that step 4 was saved, but" in refused(3, "--save", str(other), *load)


@pytest.mark.usefixtures("rough_runs")
def test_impossible_sizes_are_answered_at_once_and_the_largest_possible_too(capsys: pytest.CaptureFixture[str]) -> None:
    impossible = {
        "--num-layers": 10**8, "--seq-length": 10**8, "--train-iters": 10**20, "--distributed-timeout-minutes": 1e300,
        "--num-threads": 2**31, "--num-workers": 99999999999,
    }  # fmt: skip
    for flags in [*((name, str(value)) for name, value in impossible.items()), ("--train-iters", "1e20")]:
        with pytest.raises(SystemExit) as end:
            parse_config([*MODEL, "--dry-run", *flags], prog="x")
        assert end.value.code == 2 and flags[0] in capsys.readouterr().err
    assert "peak: " in says(capsys, "--dry-run", "--num-layers", "4096", "--hidden-size", str(2**20), "--seq-length", str(2**25))


@pytest.mark.usefixtures("rough_runs")
def test_ignored_flags_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ignored: --sequence-parallel (" in says(capsys, "--dry-run", "--sequence-parallel")


@pytest.mark.usefixtures("rough_runs")
def test_the_copy_of_a_save_is_counted_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """On CPUs among what stays, on GPUs in host memory; none with --no-async-save, or without saves before the end."""
    saves = ("--save", "x", "--save-interval", "5", "--bf16", "--zero-stage", "1", "--seq-length", "64", "--num-layers", "2")
    plan = plan_run(config_of(*saves, "--device", "cpu"), 16)
    each = plan.num_params * 14 / 16
    assert 0.99 * each < plan.copy_of_saves < 1.02 * each
    assert ("copy for saving in the background", plan.copy_of_saves) in [(line.name, line.num_bytes) for line in plan.memory.stays]
    without = plan_run(config_of(*saves, "--device", "cpu", "--no-async-save"), 16)
    assert without.copy_of_saves == 0 and plan.memory.peak - without.memory.peak == plan.copy_of_saves
    small = ("--micro-batch-size", "1", "--recompute-granularity", "full", "--mlp-chunks", "16", "--zero-stage", "3", "--device", "cpu")
    assert "--no-async-save" in [remedy.flags for remedy in find_suggestions(config_of(*saves, *small, world_size=1), 1, "cpu")]
    on_gpus = plan_run(config_of(*saves), 16)
    assert on_gpus.memory.host == on_gpus.copy_of_saves == plan.copy_of_saves
    assert on_gpus.memory.peak == plan_run(config_of(*saves, "--no-async-save"), 16).memory.peak
    text = says(capsys, *saves, "--dry-run", "--world-size", "16", "--offload-activations", "--recompute-granularity", "full")
    assert "saving in the background: " in text and "of host memory, pinned, are kept on each rank" in text
    for fewer in (("--save", "x"), ("--save", "x", "--save-interval", "5", "--no-async-save")):
        assert plan_run(config_of(*fewer), 16).copy_of_saves == 0
