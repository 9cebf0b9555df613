"""Mistakes on the command lines of the tools: one line, exit code 2, and the nearest names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from support.paths import ROOT, project_files

from megatron_sp.commands import cli
from megatron_sp.commands.cli import PROGRAMS
from megatron_sp.utils.command_parser import CommandParser, similar


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``megatron-sp WORDS`` says on standard error, which is the only thing it says, with exit code 2."""
    try:
        code: object = cli.main(words)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.endswith("\n")
    return err[len("error: ") : -1]


@pytest.mark.parametrize("words, message", [
    ("generate --load x --max-new-token 5", "--max-new-token is unknown: did you mean --max-new-tokens?"),
    ("generate --load x --promt a --top 3", "--promt is unknown: did you mean --prompt or --prompt-file?\n  --top is unknown: did you mean"
     " --top-k, --top-p or --stop?"),
    ("generate --load x --max-new 5", "--max-new is unknown: did you mean --max-new-tokens?"),
    ("generate --prompt x", "--load is missing: megatron-sp generate --help"),
    ("generate --load x --top-k y", "--top-k: invalid int value: 'y'"),
    ("generate --load x y", "'y' is one word too many: megatron-sp generate --help"),
    ("serve --load x --xyzzy", "--xyzzy is unknown; megatron-sp serve --help lists all flags"),
    ("tokenizer --input a --output b --type wordpeice", "--type: 'wordpeice' is unknown: did you mean wordpiece?"),
    ("tokenizer --input a --output b --type x", "--type: 'x' is unknown: choose from sentencepiece, wordpiece"),
    ("plot runs/x --title", "--title: expected one argument"),
    ("data corpus --out x", "--output is missing: megatron-sp data corpus --help"),
    ("data verif x", "megatron-sp data has no 'verif': did you mean verify?"),
    ("serv --load x", "megatron-sp has no 'serv': did you mean serve?"),
    ("ckpt ls x --jsn", "--jsn is unknown: did you mean --json?"),
    ("ckpt verify x --jsno", "--jsno is unknown; megatron-sp ckpt verify --help lists all flags"),
    ("doctor --jso", "--jso is unknown: did you mean --json?"),
    ("plan --gpus 8", "--gpu is missing: megatron-sp plan --help"),
    ("plan --gpus 8 --gpu h100-80g --num-layrs 4", "--num-layrs is unknown: did you mean --num-layers?"),
    ("schedule check auto", "one of the arguments --model --factory is required"),
    ("evaluate --load x --text a --choices b", "--choices: not allowed with argument --text"),
    ("pretrain gpt --num-layrs 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 9 --train-iters 1 --lr 1",
     "--num-layrs is unknown: did you mean --num-layers?"),
    ("pretrain gtp", "the first word must be gpt or bert, not 'gtp': megatron-sp pretrain gpt --help"),
    ("", "COMMAND is missing: megatron-sp --help"),
    ("data", "ACTION is missing: megatron-sp data --help"),
])  # fmt: skip
def test_a_mistake_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(words.split(), capsys) == message


@pytest.mark.parametrize("command", [*PROGRAMS, "data corpus", "data section-task"])
def test_every_program_says_what_an_unknown_flag_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Or what else is wrong with such a command line, in as little."""
    words = [*command.split(), *(["gpt"] if command == "pretrain" else []), "--no-such-flag-anywhere"]
    assert "usage:" not in said(words, capsys)


def test_of_several_ranks_one_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, expected in (("0", "error: --load is missing: megatron-sp generate --help\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            cli.main(["generate"])
        assert capsys.readouterr().err == expected


def test_no_tool_has_a_parser_of_another_kind() -> None:
    """argparse's own prints its usage and takes abbreviations."""
    sources = [path for folder in ("megatron_sp", "tools") for path in (ROOT / folder).rglob("*.py") if "dev" not in path.parts]
    assert [str(path) for path in sources if "argparse.ArgumentParser(" in path.read_text(encoding="utf-8")] == []


def test_no_message_names_a_package_that_pypi_does_not_have() -> None:
    """The project is installed from its folder: pip install -e '.[plot]'."""
    pages = [path for path in project_files("*.py", "*.md", "*.sh") if path.name not in ("CHANGELOG.md", Path(__file__).name)]
    assert [str(path) for path in pages if re.search(r"pip install [^\n`]*'?megatron-sp\[", path.read_text(encoding="utf-8"))] == []


def test_subcommands_have_the_same_kind_of_parser() -> None:
    parser = CommandParser(prog="tool")
    inner = parser.add_subparsers().add_parser("a")
    assert type(inner) is CommandParser and isinstance(parser, argparse.ArgumentParser)


def test_names_that_begin_alike_come_first() -> None:
    assert similar("--zero", ["--hero", "--zero-stage", "--nothing"]) == ["--zero-stage", "--hero"]
    assert similar("--x", ["--xyz", "--long-name"]) == ["--xyz"]
