"""What words mean to a program, and what it answers to those that cannot be: ``meanings.txt`` and ``messages.txt``."""

from __future__ import annotations

import json
import re
import shlex
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.rules import normalize
from megatron_sp.utils.errors import EXIT_CONFIG, ConfigError


def rows(file: str) -> list[Any]:
    processes, base, found = "", "", []
    text = re.sub(r"\n {4}", " ", Path(__file__).with_name(file).read_text())
    for number, line in enumerate(text.splitlines()):
        words, _, wanted = line.partition("=> ")
        if line.startswith("["):
            processes, _, base = line[1:].partition("] ")
        elif line and not line.startswith("#"):
            found.append(pytest.param(base, words, processes, wanted, id=f"{number} {words[:80]}"))
    return found


def split(base: str, words: str, folder: Path) -> list[str]:
    if words.startswith("{"):
        end = json.JSONDecoder().raw_decode(words)[1]
        (folder / "ds.json").write_text(words[:end])
        words = f"--deepspeed_config {folder / 'ds.json'} {words[end:]}"
    return shlex.split(f"{base} {words}")


@pytest.mark.parametrize(("base", "words", "processes", "part"), rows("messages.txt"))
def test_one_message(base: str, words: str, processes: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_args(split(base, words, tmp_path), world_size=int(processes))
    text = str(caught.value)
    assert all(each in text for each in part.split(" ... ")) and text.startswith("ds.json: ") >= words.startswith("{")
    assert "\n" not in text and caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(("base", "words", "processes", "fields"), rows("meanings.txt"))
def test_meaning(base: str, words: str, processes: str, fields: str, tmp_path: Path) -> None:
    config = config_from_args(split(base, words, tmp_path), world_size=int(processes.rstrip("!")))
    for wanted in fields.split("; "):
        group, name, value = re.split(r"\.| = ", wanted, maxsplit=2)
        assert getattr(getattr(config, group), name) == literal_eval(value)
    assert config.ignored_flags == () or not processes.endswith("!")
    before = config.to_dict()
    assert normalize(config).to_dict() == before, "once is enough"


def test_what_is_quoted_of_a_value_is_printable_and_short() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_args(["--load", "a\nb" * 99, "--lr", "x\x1b[31m" * 99, "--mock-data"])
    quoted = str(caught.value).partition("--lr: expected a number, got 'x?[31m")[2].partition("\n")[0]
    assert 0 < len(quoted) < 80 and quoted.isprintable()
