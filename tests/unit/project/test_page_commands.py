"""What pages, --help and scripts tell readers to type: the commands are there and take these flags, files and exit codes exist."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.paths import ROOT, project_files

from megatron_sp.commands import cli
from megatron_sp.commands.cli import PROGRAMS
from megatron_sp.config.flags.expert_dialects import HELD
from megatron_sp.config.flags.foreign_flags import idleness, offered, refusal
from megatron_sp.utils import errors

PAGES = [page for page in project_files("*.md") if not re.match("CHANGELOG|LOG|mutants", page.name)]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*(?![\w-]*\*)")
# what the pages tell of other programs: torchrun, Slurm, SkyPilot, kubectl, Hugging Face's downloads
OTHERS = {
    "--nproc-per-node", "--nnodes", "--standalone", "--max-restarts", "--nodes", "--array", "--cpus-per-task", "--gpus-per-node",
    "--gpus-per-task", "--signal", "--ntasks-per-node", "--env", "--num-nodes", "--local-dir",
}  # fmt: skip
GROUPS_OF_ACTIONS = ("data", "ckpt", "schedule")
TRAINS = ("pretrain", "finetune", "plan", "schedule train")  # these take the flags of a training, too


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The text of --help of each command."""
    parsers = dict(_parsers(cli.build_parser()))
    found = {name: parser.format_help() for name, parser in parsers.items()}
    for name in PROGRAMS:  # these have parsers of their own
        said = io.StringIO()
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
            cli.main([name, "--help"])
        found[name] = said.getvalue()
    return found


def _parsers(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from _parsers(inner, f"{name} {word}".strip())


def is_accepted(flag: str) -> bool:
    """Whether a training takes it."""
    name = flag.removeprefix("--").replace("_", "-")
    return name in offered() or name in HELD or idleness(name) is not None


def commands_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command line with the program of ours that it calls: ``pretrain``, ``data verify``, ..."""
    scripts = {}
    for path in (ROOT / "tools").glob("*.py"):
        called = re.search(r'enter\("([a-z -]+)"', path.read_text(encoding="utf-8"))
        scripts |= {path.name: called[1]} if called else {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for part in re.split(r"\s(?:&&|\||;)\s|\s#\s", line):
            ours = re.search(r"(?:(?:^|[\s/`$])megatron-sp|\bmegatron_sp) ([a-z-]+)(?: ([a-z-]+))?(.*)", part)
            tool = re.search(r"\btools/(\w+\.py)(.*)", part)
            script = re.search(r"\b(?:pretrain_(?:gpt|bert)\.py|scripts/pretrain_\w+\.sh|examples/train_hf_\w+\.py)(.*)", part)
            if tool and tool[1] in scripts:
                yield scripts[tool[1]], tool[2]
            elif script and "chaos" not in part:
                yield "pretrain", script[1]
            elif ours:
                name = f"{ours[1]} {ours[2]}" if ours[1] in GROUPS_OF_ACTIONS else ours[1]
                yield name, ours[3].split(" -- ")[0]


def blocks(text: str) -> str:
    return "\n".join(re.findall(r"^```(?:bash|sh|console|)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


def wrong_commands(text: str, helps: dict[str, str]) -> list[str]:
    wrong = []
    for name, words in commands_in(text):
        if name not in helps:
            wrong.append(f"there is no megatron-sp {name}")
            continue
        known = {*FLAG.findall(helps[name]), *OTHERS, "--help"}
        unknown = [flag for flag in FLAG.findall(words) if flag not in known and not (name in TRAINS and is_accepted(flag))]
        wrong += [f"megatron-sp {name} has no {flag}" for flag in unknown]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path, helps: dict[str, str]) -> None:
    assert wrong_commands(blocks(page.read_text(encoding="utf-8")), helps) == []


def test_commands_that_help_and_scripts_name_exist(helps: dict[str, str]) -> None:
    """Examples of --help are indented; those of scripts stand in their comments."""
    for command, text in helps.items():
        shown = "\n".join(re.findall(r"^    (?:[A-Z_]+=\S+ )*((?:bash|megatron-sp|python|torchrun) .*)$", text, flags=re.MULTILINE))
        assert wrong_commands(shown, helps) == [], command
    for path in project_files("*.sh", "*.sbatch"):
        comments = re.findall(r"^ *# +((?:bash|megatron-sp|python|torchrun) .*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        shown = "\n".join(comments)
        assert wrong_commands(shown, helps) == [], path.name


def test_what_counts_as_wrong(helps: dict[str, str]) -> None:
    lines = [
        "megatron-sp genera --load x", ".venv/bin/megatron-sp ckpt lst a | head --no-such", "python pretrain_gpt.py \\\n    --num-layrs 2",
        "bash scripts/launch.sh 2 tools/serve.py --lod x --port 1",
        "megatron-sp chaos x --fault 1 -- torchrun pretrain_gpt.py --save-interval 2",
    ]  # fmt: skip
    page = "\n".join(["```bash", *lines, "```", ""])
    assert wrong_commands(blocks(page), helps) == [
        "there is no megatron-sp genera", "there is no megatron-sp ckpt lst", "megatron-sp pretrain has no --num-layrs",
        "megatron-sp serve has no --lod", "megatron-sp chaos has no --fault",
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_that_a_page_names_exist(page: Path) -> None:
    """Of any program of the project: pages name flags of tools and benchmarks, too."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = {flag for code in re.findall(r"`([^`\n]+)`", prose) for flag in FLAG.findall(code) if not flag.endswith("-")}
    others = named - OTHERS - declared_flags()
    assert sorted(flag for flag in others if not is_accepted(flag) and refusal(flag.removeprefix("--")) is None) == []


@cache
def declared_flags() -> frozenset[str]:
    """Flags of all parsers in the sources."""
    folders = ("megatron_sp", "benchmarks", "tools", "tests", "examples")
    texts = (path.read_text(encoding="utf-8") for path in project_files("*.py") if path.relative_to(ROOT).parts[0] in folders)
    return frozenset(flag for text in texts for flag in re.findall(r"\"(--[a-z][\w-]*)\"", text)) | {"--help", "--dry-run"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_a_pages_commands_exist(page: Path) -> None:
    text = blocks(page.read_text(encoding="utf-8"))
    named = re.findall(r"(?<![\w/.$-])((?:scripts|tools|benchmarks|examples|tests|docs)/[\w./-]+\.(?:py|sh|sbatch|md|yaml))\b", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_copied(page: Path) -> None:
    """Without a prompt before them, which the site's button would copy, too."""
    fenced = re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [line for block in fenced for line in block.splitlines() if line.startswith("$ ")] == []


def test_exit_codes_that_pages_name_are_in_the_table() -> None:
    table = (ROOT / "docs/reference/exit_codes.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)}
    constants = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert constants <= listed
    for page in PAGES:
        named = {int(code) for code in re.findall(r"\bexit(?:s with)? code (\d+)\b", page.read_text(encoding="utf-8"))}
        assert named <= listed, page


def test_what_is_promised_names_every_kind_of_parallelism() -> None:
    page = (ROOT / "docs/explanation/promises.md").read_text(encoding="utf-8")
    kinds = re.search(r"with\s+([\w, ]+?) parallelism, ZeRO", page.partition("## What is there")[2])
    assert kinds is not None and set(re.findall(r"\w+", kinds[1])) - {"and"} == {
        "data",
        "tensor",
        "sequence",
        "context",
        "pipeline",
        "expert",
    }
