"""What a program answers to words that cannot be: ``messages.txt`` has the words, and the one message about them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.utils.errors import EXIT_CONFIG, ConfigError


def rows() -> Iterator[Any]:
    processes = base = ""
    text = re.sub(r"\n {4}", " ", Path(__file__).with_name("messages.txt").read_text())
    for number, line in enumerate(text.splitlines()):
        words, _, part = line.partition(" => ")
        if line.startswith("["):
            processes, _, base = line[1:].partition("] ")
        elif line and not line.startswith("#"):
            yield pytest.param(base, words, int(processes), part, id=f"{number} {words[:80]}")


@pytest.mark.parametrize(("base", "words", "processes", "part"), list(rows()))
def test_one_message(base: str, words: str, processes: int, part: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if words.startswith("{"):
        end = json.JSONDecoder().raw_decode(words)[1]
        path.write_text(words[:end])
        words = f"--deepspeed_config {path} {words[end:]}"
    with pytest.raises(ConfigError) as caught:
        config_from_args(shlex.split(f"{base} {words}"), world_size=processes)
    text = str(caught.value)
    assert all(each in text for each in part.split(" ... ")) and text.startswith("ds.json: ") >= path.exists()
    assert "\n" not in text and caught.value.exit_code == EXIT_CONFIG


def test_what_is_quoted_of_a_value_is_printable_and_short() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_args(["--load", "a\nb" * 99, "--lr", "x\x1b[31m" * 99, "--mock-data"])
    quoted = str(caught.value).partition("--lr: expected a number, got 'x?[31m")[2].partition("\n")[0]
    assert 0 < len(quoted) < 80 and quoted.isprintable()
