"""A configuration in a checkpoint that cannot be used is the checkpoint's fault, and no flag's: exit code 3, and the file is named."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ckpts

from megatron_sp.config.schema import Config
from megatron_sp.inference import team as inference
from megatron_sp.training import resume
from megatron_sp.utils.errors import CheckpointError

READERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "a resume": lambda run, stored: resume.check_model(stored, Config(), finetunes=False),
    "--use-checkpoint-args": lambda run, stored: resume.take_model(stored, Config(), 1),
    "a model to use": lambda run, stored: inference.find_stored(run, None, "GPT", {}, print),
    "a layout to use it in": lambda run, stored: inference.stored_config(Namespace(load=str(run), ckpt_step=None)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_stored_entry_of_another_type(reader: str, tmp_path: Path) -> None:
    ckpts.save(tmp_path, 4)
    stored = ckpts.make_state({})
    stored["config"]["model"]["num_layers"] = [0.5]

    def spoil(found: dict[str, Any]) -> None:
        found["config"]["model"]["num_layers"] = [0.5]

    ckpts.with_state(tmp_path, spoil)
    with pytest.raises(CheckpointError, match=r"state\.json of the checkpoint: 'model\.num_layers' of the stored configuration: expected"):
        READERS[reader](tmp_path, stored)
