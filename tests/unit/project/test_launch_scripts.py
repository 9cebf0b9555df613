"""Launch scripts as they are found in public, of both dialects: accepted but for paths, or refused for a feature that is named."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.launch_lines import LAUNCHES, Launch

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError


def configured(launch: Launch, folder: Path) -> Config:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(launch.json))
    words = shlex.split(launch.words.replace("=JSON", f"={path}").replace(" JSON", f" {path}"))
    return config_from_args(words, world_size=launch.processes, family=launch.family)


@pytest.mark.parametrize("launch", LAUNCHES, ids=[launch.name for launch in LAUNCHES])
def test_accepted_or_refused_for_a_feature(launch: Launch, tmp_path: Path) -> None:
    if not launch.needs:
        config = configured(launch, tmp_path)
        assert all("\n" not in note and note.startswith(("--", "ds_config.json")) for note in config.ignored_flags)
        return
    with pytest.raises(ConfigError) as caught:
        configured(launch, tmp_path)
    text = str(caught.value)
    assert launch.needs in text
    assert "did you mean" not in text and "is unknown" not in text


def test_every_name_is_another_script() -> None:
    assert len({launch.name for launch in LAUNCHES}) == len(LAUNCHES) >= 83
