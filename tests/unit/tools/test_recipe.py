"""What scripts/pretrain_*.sh share: variables, the layout of a smoke test, what is told, and what a host without the GPUs hears."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from support.paths import ROOT

from megatron_sp.commands import cli
from megatron_sp.data.tokenizers.train import train_sentencepiece
from megatron_sp.planner.dry_run import plan_run
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.format import format_duration

sys.path.insert(0, str(ROOT / "scripts"))
import recipe as recipes
from recipe import Recipe, build, check_gpus, describe, main, run
from recipe_variables import LAUNCHER_NAMES, NAMES, Variables, misspelled

GIB = 2**30
FLAGS = {"preset": "gpt-6.7b", "seq-length": 16384, "bf16": True, "micro-batch-size": 1, "global-batch-size": 16, "lr": "1e-4"}
_FILES = tempfile.TemporaryDirectory(prefix="recipes.")


def own(**more: object) -> tuple[str, str]:
    """A script's own flags: a file like those in scripts/recipes."""
    flags = FLAGS | {name.replace("_", "-"): value for name, value in more.items()}
    path = Path(_FILES.name) / f"{abs(hash(str(flags)))}.yaml"
    path.write_text(yaml.safe_dump(flags))
    return "--config", str(path)


OWN = own()
EIGHT = {"NPROC_PER_NODE": "8", "SP": "host", "ZERO": "1", "OVERLAP": "auto", "TRAIN_ITERS": "100"}


def recipe(*users: str, flags: tuple[str, ...] = OWN, **variables: str) -> Recipe:
    return build("scripts/pretrain_gpt_7b_16k.sh", "pretrain_gpt.py", flags, users, {**EIGHT, **variables}, "/tmp/scratch")


class Starts:
    """Notes what would be started."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.environ: dict[str, str] = {}

    def __call__(self, command: list[str], environ: dict[str, str]) -> int:
        self.command, self.environ = command, environ
        return 0


def on_host(gpus: list[int], *users: str, **variables: str) -> Starts:
    starts = Starts()
    argv = ["scripts/pretrain_gpt_7b_16k.sh", "pretrain_gpt.py", *OWN, "--", *users]
    assert run(argv, {**EIGHT, "OVERLAP": "none", **variables}, start=starts, gpus=lambda: gpus) == 0  # one plan, not one for each mode
    return starts


@pytest.mark.parametrize("variables, message", [
    ({"TP": "x"}, "TP=x must be a whole number, 1 or more"), ({"TP": "0"}, "TP=0 must be a whole number, 1 or more"),
    ({"SP": "all"}, "SP=all must be a whole number, 1 or more (or 'host': all processes of a host that TP, CP and PP leave)"),
    ({"ZERO": "-1"}, "ZERO=-1 must be a whole number, 0 or more"), ({"NNODES": "2.5"}, "NNODES=2.5 must be a whole number"),
    ({"PP": "two"}, "PP=two must be a whole number, 1 or more"), ({"EP": "0"}, "EP=0 must be a whole number, 1 or more"),
    ({"TRAIN_ITERS": "1e4"}, "TRAIN_ITERS=1e4 must be a whole number"), ({"NPROC_PER_NODE": "²"}, "NPROC_PER_NODE=² must be"),
    ({"PRICE_PER_GPU_HOUR": "2,5"}, "PRICE_PER_GPU_HOUR=2,5 must be a number above 0"), ({"PRICE_PER_GPU_HOUR": "nan"}, "above 0"),
    ({"SMOKE": "yes"}, "SMOKE=yes must be 1 or 0"), ({"SMOKE": "1", "DRY_RUN": "1"}, "SMOKE=1 trains a tiny model and DRY_RUN=1 plans"),
])  # fmt: skip
def test_a_variable_that_cannot_be(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Variables.read({**EIGHT, **variables})
    assert message in str(caught.value)


@pytest.mark.parametrize("typed, meant", [
    ("DRYRUN", "DRY_RUN"), ("dry_run", "DRY_RUN"), ("DRY_RUNS", "DRY_RUN"), ("DRY_RNU", "DRY_RUN"), ("TRAIN_ITER", "TRAIN_ITERS"),
    ("TOKENISER_MODEL", "TOKENIZER_MODEL"), ("SMOK", "SMOKE"), ("ASMOKE", "SMOKE"), ("tp", "TP"), ("NODERANK", "NODE_RANK"),
    ("RESTART", "RESTARTS"), ("NPROC_PER_NODES", "NPROC_PER_NODE"),
])  # fmt: skip
def test_a_variable_that_is_almost_one_of_ours(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Variables.read({**EIGHT, typed: "1"})
    assert str(caught.value) == f"{typed} is unknown: did you mean {meant}?"


def test_variables_of_others_are_none_of_our_business() -> None:
    others = (
        "PATH", "PS1", "HOME", "LANG", "JOBID", "PYTHONS", "IPYTHON", "SLURM_NNODES", "SLURM_NODE_RANK", "OMP_NUM_THREADS", "CUDA_HOME",
        "MASTER", "SHLVL", "TERM", "TZ", "P", "SPS", "DATA", "OUT", "GPU", "SAVES", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    )  # fmt: skip
    assert misspelled(dict.fromkeys(others, "1")) == {} and misspelled({"DRYRUN": ""}) == {}
    assert misspelled({"NODES": "2", "NNODES": "2"}) == {} and misspelled({"NODES": "2", "NNODES": "1"}) == {"NODES": "NNODES"}
    assert misspelled({name: "1" for name in (*NAMES, *LAUNCHER_NAMES)}) == {}


def test_every_variable_of_the_scripts_and_their_launcher_is_known_and_in_the_table() -> None:
    page = (ROOT / "docs/how-to/zoo.md").read_text(encoding="utf-8")
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("pretrain_*.sh"))
    assert set(re.findall(r"\b([A-Z_]+)=\"\$\{\1:-", scripts)) <= set(NAMES)
    assert not [name for name in NAMES if not re.search(rf"^\| .*`{name}(=1)?`.* \|", page, flags=re.MULTILINE)]
    header = (ROOT / "scripts/launch.sh").read_text(encoding="utf-8").partition("set -uo")[0]
    assert set(LAUNCHER_NAMES) - {"PYTHON"} <= set(re.findall(r"[A-Z_]{6,}", header))


@pytest.mark.long
def test_a_dry_run_says_speed_time_and_cost_as_the_planner_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the modes of exchanges it takes the fastest, as a run does."""
    argv = ["scripts/pretrain_gpt_7b_16k.sh", "pretrain_gpt.py", *OWN, "--"]
    assert run(argv, {**EIGHT, "DRY_RUN": "1", "PRICE_PER_GPU_HOUR": "2.5"}) == 0
    said = capsys.readouterr().out
    layout = "--sp-size 8 --tp-size 1 --cp-size 1 --pp-size 1 --zero-stage 1"
    assert cli.main([*f"plan --gpus 8 --gpu h100-80g --json {layout}".split(), *OWN]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    per_second, mode = best["tokens_per_second"], best["layout"]["mode"]
    seconds = 100 * 16 * 16384 / per_second
    assert f", {per_second:,.0f} tokens/s ({per_second / 8:,.0f} a GPU, MFU {best['mfu']:.0%}) on h100-80g (nvlink4)" in said
    assert f"  time        {format_duration(seconds)} for 100 steps" in said
    assert f"  cost        {seconds / 3600 * 8 * 2.5:,.0f}, at 2.5 for an hour of a GPU" in said
    counted = f"{mode} x{best['layout']['chunks']}" if mode == "chunked" else mode
    assert f"here it counts as {counted}, the fastest by prediction" in said


def test_a_dry_run_for_other_machines(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["scripts/pretrain_gpt_7b_16k.sh", "pretrain_gpt.py", *OWN, "--", "--seq-length", "512"]
    assert run(argv, {**EIGHT, "DRY_RUN": "1", "NNODES": "2", "SP": "1", "GPU_TYPE": "a100-80g", "LINK_TYPE": "eth-100g"}) == 0
    said = capsys.readouterr().out
    assert "on a100-80g (nvlink3, eth-100g between hosts)\n" in said and "cost        PRICE_PER_GPU_HOUR=2.5" in said
    for name, value in (("GPU_TYPE", "a100-80"), ("LINK_TYPE", "ib-40g")):
        with pytest.raises(ConfigError, match=f"{name} {value} is unknown: did you mean "):
            run(argv, {**EIGHT, "DRY_RUN": "1", "NNODES": "2", "SP": "1", name: value})


def test_made_up_tokens_cannot_be_missed() -> None:
    made_up = recipe(SP="1")
    block = describe(made_up, plan_run(made_up.config, made_up.world_size)).splitlines()[-4:]
    assert len({len(line) for line in block}) == 1 and "MADE-UP TOKENS" in block[1] and "DATA_PATH=PREFIX" in block[2]
    small = recipe(SMOKE="1")
    assert "MADE-UP" not in describe(small, plan_run(small.config, small.world_size))


def test_empty_variables_are_as_if_not_set() -> None:
    names = ("NPROC_PER_NODE", "NNODES", "TP", "PP", "PP_SCHEDULE", "EP", "ZERO", "OVERLAP", "RECOMPUTE", "TRAIN_ITERS", "DATA_PATH",
             "SAVE", "SMOKE", "DRY_RUN")  # fmt: skip
    assert Variables.read(dict.fromkeys(names, "")) == Variables.read({})


@pytest.mark.parametrize("variables, full, smoke", [
    ({}, (1, 8, 1, 1, 8), (1, 2, 1, 1, 2)),
    ({"TP": "2"}, (2, 4, 1, 1, 8), (2, 2, 1, 1, 4)), ({"TP": "8"}, (8, 1, 1, 1, 8), (2, 1, 1, 1, 2)),
    ({"TP": "8", "SP": "2", "NNODES": "4"}, (8, 2, 1, 1, 32), (2, 2, 1, 1, 4)), ({"SP": "1"}, (1, 1, 1, 1, 8), (1, 1, 1, 1, 2)),
    ({"SP": "1", "ZERO": "0", "NPROC_PER_NODE": "1"}, (1, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
    ({"TP": "16", "NNODES": "2"}, (16, 1, 1, 1, 16), (2, 1, 1, 1, 2)), ({"CP": "4", "NNODES": "4"}, (1, 8, 4, 1, 32), (1, 2, 2, 1, 4)),
    ({"CP": "2"}, (1, 4, 2, 1, 8), (1, 2, 2, 1, 4)), ({"CP": "8", "NNODES": "4", "TP": "2"}, (2, 2, 8, 1, 32), (2, 2, 2, 1, 8)),
    ({"CP": "16"}, (1, 1, 16, 1, 8), (1, 1, 2, 1, 2)), ({"CP": "2", "NNODES": "4"}, (1, 8, 2, 1, 32), (1, 2, 2, 1, 4)),
    ({"PP": "2"}, (1, 4, 1, 2, 8), (1, 2, 1, 2, 4)), ({"PP": "2", "NNODES": "2"}, (1, 8, 1, 2, 16), (1, 2, 1, 2, 4)),
    ({"PP": "16", "NNODES": "16", "TP": "8"}, (8, 1, 1, 16, 128), (2, 1, 1, 2, 4)),
    ({"PP": "4", "SP": "1"}, (1, 1, 1, 4, 8), (1, 1, 1, 2, 2)),
    ({"PP": "2", "CP": "2", "NNODES": "4"}, (1, 8, 2, 2, 32), (1, 2, 2, 2, 8)), ({"PP": "2", "CP": "2"}, (1, 2, 2, 2, 8), (1, 2, 2, 2, 8)),
    ({"PP": "4", "NNODES": "2", "TP": "2"}, (2, 2, 1, 4, 16), (2, 2, 1, 2, 8)), ({"PP": "16"}, (1, 1, 1, 16, 8), (1, 1, 1, 2, 2)),
])  # fmt: skip
def test_step_parity(variables: dict[str, str], full: tuple[int, ...], smoke: tuple[int, ...]) -> None:
    found = Variables.read({**EIGHT, **variables})
    assert (found.full_layout, found.smoke_layout) == ((*full, 1), (*smoke, 1))


@pytest.mark.parametrize("variables, full, smoke", [
    ({"EP": "8", "SP": "1"}, (1, 1, 1, 1, 8, 8), (1, 1, 1, 1, 2, 2)), ({"EP": "4"}, (1, 8, 1, 1, 8, 4), (1, 2, 1, 1, 2, 2)),
    ({"EP": "2", "SP": "1", "PP": "4", "ZERO": "0"}, (1, 1, 1, 4, 8, 2), (1, 1, 1, 2, 4, 2)),
])  # fmt: skip
def test_experts_are_dealt_to_ranks_with_other_tokens(variables: dict[str, str], full: tuple[int, ...], smoke: tuple[int, ...]) -> None:
    found = Variables.read({**EIGHT, **variables})
    assert (found.full_layout, found.smoke_layout) == (full, smoke)
    assert f"EP={variables['EP']} ZERO=" in found.text()


def test_flags_of_a_layout() -> None:
    flags = " ".join(recipe(TP="2", RECOMPUTE="full").flags)
    assert "--tensor-model-parallel-size 2 --sequence-parallel --sequence-parallel-size 4 --sp-overlap-mode auto --zero-stage 1" in flags
    assert "--recompute-granularity full" in flags and "--train-iters 100" in flags and "--save runs/gpt_7b_16k --auto-resume" in flags
    flags = " ".join(recipe(SP="1").flags)
    assert "--sp-overlap-mode" not in flags and "--recompute" not in flags and "--sequence-parallel " not in flags


def test_context_parallelism_between_hosts() -> None:
    made = recipe(NNODES="4", CP="2")
    flags = " ".join(made.flags)
    assert "--sequence-parallel-size 8 --sp-overlap-mode auto --context-parallel-size 2 --zero-stage 1" in flags
    assert made.config.parallel.dp_size(made.world_size) == 2
    small = recipe(NNODES="4", CP="2", SMOKE="1")
    assert (small.world_size, small.config.parallel.context_parallel_size, small.config.batch.global_batch_size) == (4, 2, 2)
    with pytest.raises(ConfigError, match=r"\(1 \* 2 \* 3 = 6\)") as caught:
        recipe(CP="3")
    assert "SP=host CP=3 ZERO=1" in str(caught.value)


def test_pipelines() -> None:
    made = recipe(PP="2", SP="1", PP_SCHEDULE="zb1p", flags=own(seq_length=512, global_batch_size=8))
    assert "--pipeline-model-parallel-size 2 --pipeline-schedule zb1p --zero-stage 1" in " ".join(made.flags)
    assert "tp 1, sp 1, pp 2 (zb1p), dp 4" in describe(made, plan_run(made.config, made.world_size))
    flags = " ".join(recipe(PP="2").flags)
    assert "--sequence-parallel-size 4 " in flags and "--pipeline-model-parallel-size 2" in flags and "--pipeline-schedule" not in flags
    assert "pipeline" not in " ".join(recipe(PP_SCHEDULE="interleaved").flags)  # as OVERLAP with SP=1
    with pytest.raises(ConfigError, match="1f1b, interleaved, zb1p, zbv, slices") as caught:
        recipe(PP="2", PP_SCHEDULE="gpipe")
    assert "SP=host PP=2 PP_SCHEDULE=gpipe ZERO=1" in str(caught.value)
    with pytest.raises(ConfigError, match=r"\(1 \* 2 \* 3 = 6\)") as caught:
        recipe(PP="3")
    assert "SP=host PP=3 ZERO=1" in str(caught.value)
    with pytest.raises(ConfigError, match=r"each stage needs a layer, and num_layers \(32\) is less than .*\(64\)"):
        recipe(PP="64", NNODES="64", SP="1")


@pytest.mark.parametrize("kind, layers", [("", 2), ("interleaved", 4), ("zb1p", 2), ("zbv", 4), ("slices", 2)])
def test_a_smoke_test_has_layers_for_all_stages_and_fills_the_pipeline(kind: str, layers: int) -> None:
    made = recipe(PP="8", SP="1", PP_SCHEDULE=kind, SMOKE="1")
    assert (made.world_size, made.config.model.num_layers, made.config.batch.global_batch_size) == (2, layers, 4)
    assert (made.config.parallel.pipeline_model_parallel_size, made.config.parallel.pipeline_kind) == (2, kind or "1f1b")
    mine = recipe("--num-virtual-stages-per-pipeline-rank", "3", PP="8", SP="1", SMOKE="1")
    assert (mine.config.model.num_layers, mine.config.parallel.pipeline_kind) == (6, "interleaved")


def test_batches_that_grow() -> None:
    ramp = own(global_batch_size=32, rampup_batch_size=[16, 8, 48])
    made = recipe(flags=ramp, TRAIN_ITERS="4")
    told = describe(made, plan_run(made.config, made.world_size))  # 16, 16 and 24 sequences, then 32
    assert "32 sequences (16 at the start), 524,288 tokens, 32 micro-batches; 4 steps, 1.4 M tokens" in told
    small = recipe(flags=ramp, SMOKE="1").config.batch
    assert (small.global_batch_size, small.rampup_batch_size) == (2, (1, 1, 1))


def test_batches_in_steps() -> None:
    steps = own(global_batch_size=32, step_batch_size_schedule="0:16 400K:8 800K:32")
    made = recipe(flags=steps, TRAIN_ITERS="4")
    told = describe(made, plan_run(made.config, made.world_size))  # 16, 16, 8 and 8 sequences, then 32
    assert "32 sequences (16 at the start), 524,288 tokens, 32 micro-batches; 4 steps, 786.4 k tokens" in told
    assert recipe(flags=steps, SMOKE="1").config.batch.global_batch_size == 2


def test_a_smoke_test_has_the_layout_and_not_the_size() -> None:
    full, small = recipe(TP="2", ZERO="2", RECOMPUTE="selective").config, recipe(TP="2", ZERO="2", RECOMPUTE="selective", SMOKE="1").config
    assert (small.parallel.tensor_model_parallel_size, small.parallel.sequence_parallel_size) == (2, 2)
    for group, name in (
        ("parallel", "zero_stage"), ("parallel", "overlap_mode"), ("parallel", "sequence_parallel"), ("kernels", "recompute_granularity"),
        ("precision", "params_dtype"), ("model", "normalization"), ("model", "position_embedding_type"),
    ):  # fmt: skip
        assert getattr(getattr(small, group), name) == getattr(getattr(full, group), name)
    assert small.checkpoint.save == "/tmp/scratch" and small.kernels.device == "cpu" and small.data.mock_data
    assert small.batch.global_batch_size == 2  # accumulates, as the full size does: dp is 1
    assert recipe(SMOKE="1", SP="1").config.batch.global_batch_size == 2 * 2  # dp 2
    assert recipe(SMOKE="1", SP="1", flags=own(global_batch_size=8)).config.batch.global_batch_size == 2
    llama = own(preset="llama3-8b")
    assert recipe(SMOKE="1", flags=llama).config.model.num_groups == 4 and recipe(SMOKE="1").config.model.num_groups == 8
    assert recipe("--seed", "7", "--num-layers", "3", SMOKE="1").config.model.num_layers == 3  # the user's flags come last


def test_a_smoke_test_of_a_layout_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"multiple of tensor_model_parallel_size \* sequence_parallel_size \(2 \* 8 = 16\)") as caught:
        recipe(SMOKE="1", TP="2", SP="8")
    assert "the variables are NPROC_PER_NODE=8 NNODES=1 TP=2 SP=8 ZERO=1 OVERLAP=auto RECOMPUTE=none" in str(caught.value)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"pretrain_t5\.py is not in"):
        build("scripts/pretrain_t5.sh", "pretrain_t5.py", OWN, (), EIGHT)


def test_a_preset_of_the_other_program() -> None:
    with pytest.raises(ConfigError, match="bert-large is a BERT model, and this program trains GPT"):
        recipe("--preset", "bert-large")


def test_own_data(tmp_path: Path) -> None:
    prefix, pieces, words = tmp_path / "text", tmp_path / "pieces.model", tmp_path / "vocab.txt"
    with pytest.raises(ConfigError, match=r"there is no .*text\.idx; megatron-sp preprocess makes it"):
        recipe(DATA_PATH=str(prefix))
    (tmp_path / "text.idx").touch()
    for variables in ({}, {"TOKENIZER_MODEL": str(pieces)}, {"TOKENIZER_MODEL": str(tmp_path), "VOCAB_FILE": str(words)}):
        with pytest.raises(ConfigError, match=r"give the one file that .*text was made with"):
            recipe(DATA_PATH=str(prefix), **variables)
    train_sentencepiece(["one two three four five six seven eight nine ten"] * 9, pieces, 300)
    words.touch()
    with pytest.raises(ConfigError, match="give the one file"):
        recipe(DATA_PATH=str(prefix), TOKENIZER_MODEL=str(pieces), VOCAB_FILE=str(words))
    mine = recipe(DATA_PATH=str(prefix), TOKENIZER_MODEL=str(pieces))
    assert mine.config.data.data_path == (str(prefix),) and mine.config.data.tokenizer_model == str(pieces)
    (tmp_path / "tokenizer.json").touch()
    theirs = recipe(DATA_PATH=str(prefix), TOKENIZER_MODEL=str(tmp_path / "tokenizer.json"))
    assert theirs.config.data.tokenizer_type == "HuggingFaceTokenizer"
    assert mine.config.model.vocab_size is None  # not the preset's
    plan = plan_run(mine.config, mine.world_size)
    assert mine.config.model.vocab_size == 300 and f"  data        {prefix}\n" in describe(mine, plan)
    assert recipe(DATA_PATH=str(prefix), SMOKE="1").config.data.mock_data
    bert = build("b.sh", "pretrain_bert.py", own(preset="bert-base", seq_length=512), (),
                 {"DATA_PATH": str(prefix), "VOCAB_FILE": str(words), "TRAIN_ITERS": "9"}).config  # fmt: skip
    assert bert.data.tokenizer_type == "BertWordPieceLowerCase" and bert.data.vocab_file == str(words) and bert.model.vocab_size is None


def test_flags_for_data_instead_of_variables() -> None:
    """A blend, for example."""
    mine = recipe("--data-path", "0.3", "a", "0.7", "b", "--vocab-size", "500")
    assert mine.config.data.data_path == ("0.3", "a", "0.7", "b") and "--mock-data" not in mine.flags
    assert recipe("--mock_data").flags.count("--mock-data") == 0 and recipe("--mock_data").config.data.mock_data


def test_a_smoke_test_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The run folder is there while it runs; what tells of several hosts is not passed on."""
    seen: list[Path] = []

    def fake(command: list[str], environ: dict[str, str]) -> int:
        seen.append(Path(command[command.index("--save") + 1]))
        assert seen[0].is_dir() and not {"NNODES", "NODE_RANK", "NPROC_PER_NODE"} & environ.keys() and environ["HOME"] == "/h"
        return 9

    monkeypatch.setattr(recipes, "_run", fake)
    argv = ["scripts/pretrain_gpt_7b_16k.sh", "pretrain_gpt.py", *OWN, "--"]
    assert run(argv, {**EIGHT, "SMOKE": "1", "NNODES": "2", "NODE_RANK": "1", "HOME": "/h"}) == 9
    told = capsys.readouterr().out
    assert not seen[0].exists() and "removed at the end" in told and "as of gpt-6.7b" in told
    assert "2 CPU processes: tp 1, sp 2 (exchanges: auto), dp 1" in told and "2 sequences, 256 tokens, 2 micro-batches; 2 steps" in told


def test_the_end_of_a_smoke_test() -> None:
    """Its exit code is passed on, and a SIGTERM of ours to it; then signals are as before."""
    before = signal.getsignal(signal.SIGTERM)
    assert recipes._run(["bash", "-c", "exit 7"], dict(os.environ)) == 7
    program = 'sleep 20 & trap "kill $!; exit 75" TERM; kill -TERM $PPID; wait'
    assert recipes._run(["bash", "-c", program], dict(os.environ)) == 75
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_told_before_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    starts = on_host([80 * GIB] * 8, "--lr", "2e-4", NNODES="2", NODE_RANK="0", OVERLAP="auto")
    told = capsys.readouterr().out
    for part in (
        "pretrain_gpt_7b_16k\n", "gpt-6.7b: 6.7 B (6,717,124,608) parameters, 32 layers, hidden 4096, 32 heads, sequences of 16,384 tokens",
        "16 GPUs of 2 hosts: tp 1, sp 8 (exchanges: auto), dp 2, ZeRO stage 1, recomputation: none",
        "16 sequences, 262,144 tokens, 8 micro-batches; 100 steps, 26.2 M tokens",
        "GiB predicted for a process, of 80.0 GiB; tensors alone",
        "data        made up\n", "DATA_PATH=PREFIX, and TOKENIZER_MODEL=FILE or", "runs/gpt_7b_16k; the same command goes on",
        f"bash {ROOT}/scripts/launch.sh 8 {ROOT}/pretrain_gpt.py",
    ):  # fmt: skip
        assert part in told, told
    assert starts.command[:4] == ["bash", f"{ROOT}/scripts/launch.sh", "8", f"{ROOT}/pretrain_gpt.py"]
    assert starts.command[-2:] == ["--lr", "2e-4"] and starts.environ["NNODES"] == "2"
    on_host([80 * GIB] * 8, NNODES="2", NODE_RANK="1")
    assert capsys.readouterr().out == ""  # the first host has said it


@pytest.mark.parametrize("gpus, message", [
    ([], "8 GPUs are needed on this host, and there are 0. SMOKE=1 bash scripts/pretrain_gpt_7b_16k.sh tries the layout"),
    ([80] * 4, "and there are 4; NPROC_PER_NODE=4 bash scripts/pretrain_gpt_7b_16k.sh takes those. SMOKE=1"),
    ([40] * 8, "and there are 40.0 GiB on a GPU of this host"), ([80] * 7 + [40], "--zero-stage 2: predicted"),
    ([40] * 8, "the variables are NPROC_PER_NODE=8"),
])  # fmt: skip
def test_a_host_that_is_too_small(gpus: list[int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        on_host([gib * GIB for gib in gpus])
    assert message in str(caught.value)


def test_gpus_that_take_no_part_do_not_count() -> None:
    check_gpus(recipe(), [80 * GIB] * 8 + [4 * GIB])


def test_questions_are_answered_without_gpus() -> None:
    for question in ("--help", "--print-config", "--dry-run"):
        starts = on_host([], question, NNODES="2")
        assert starts.command[1] == f"{ROOT}/pretrain_gpt.py" and starts.command[-1] == question
        assert starts.environ["WORLD_SIZE"] == "16"


def test_a_run_on_cpus_asks_for_no_gpu() -> None:
    assert on_host([], "--device", "cpu", "--seq-length", "512").command[1].endswith("launch.sh")


def test_a_message_names_the_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP", "none")
    assert main(["scripts/pretrain_gpt_7b_16k.sh", "pretrain_gpt.py", *OWN, "--"]) == 2
    assert capsys.readouterr().err == "error: TP=none must be a whole number, 1 or more\n"
