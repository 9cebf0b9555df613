"""Launch scripts as they are found in public, of both dialects: accepted but for paths, or refused for a feature that is named."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError

FILE = yaml.safe_load(Path(__file__).with_name("launch_scripts.yaml").read_text())
SCRIPTS: list[dict[str, Any]] = FILE["scripts"]


def configured(script: dict[str, Any], folder: Path) -> Config:
    path, words = folder / "ds_config.json", script["words"]
    path.write_text(json.dumps(script.get("json")))
    while "$" in words:
        words = re.sub(r"\$(\w+)", lambda part: FILE["parts"][part[1]], words)
    words = re.sub(r"([= ])JSON\b", rf"\1{path}", words)
    return config_from_args(shlex.split(words), world_size=script.get("processes", 8), family=script.get("family", "gpt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script["name"] for script in SCRIPTS])
def test_accepted_or_refused_for_a_feature(script: dict[str, Any], tmp_path: Path) -> None:
    if "needs" not in script:
        config = configured(script, tmp_path)
        assert all("\n" not in note and note.startswith(("--", "ds_config.json")) for note in config.ignored_flags)
        return
    with pytest.raises(ConfigError) as caught:
        configured(script, tmp_path)
    text = str(caught.value)
    assert script["needs"] in text
    assert "did you mean" not in text and "is unknown" not in text
