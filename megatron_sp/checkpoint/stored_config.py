"""The configuration that a checkpoint keeps in its state.json."""

from __future__ import annotations

from typing import Any

from megatron_sp.checkpoint.manifest import STATE_NAME
from megatron_sp.config import rules
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import CheckpointError, ConfigError


def stored_configuration(state: dict[str, Any], *, normalize: bool = False) -> tuple[Config, list[str]]:
    """What was trained, from the parsed state.json, whose values nobody has checked yet.

    Args:
        normalize: with what its shorthands stand for.
    Returns:
        (configuration, a sentence for each entry that this version does not know).
    Raises:
        CheckpointError: an entry cannot be used: the file is wrong, and no flag of the user's.
    """
    try:
        config, warnings = Config.from_dict(state.get("config"))
        if normalize:
            rules.normalize(config)
    except ConfigError as error:
        raise CheckpointError(f"{STATE_NAME} of the checkpoint: {error}") from None
    return config, warnings
