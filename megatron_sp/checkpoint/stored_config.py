"""The training configuration stored in a checkpoint's state.json."""

from __future__ import annotations

from typing import Any

from megatron_sp.checkpoint.manifest import STATE_NAME
from megatron_sp.config import rules
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import CheckpointError, ConfigError


def stored_configuration(state: dict[str, Any], *, normalize: bool = False) -> tuple[Config, list[str]]:
    """Return the configuration stored in a parsed state.json, whose values have not been checked yet.

    Returns:
        (configuration, a warning for each entry unknown to this version).
    Raises:
        CheckpointError: an entry is invalid (the fault of the file, not of a flag).
    """
    try:
        config, warnings = Config.from_dict(state.get("config"))
        config.model_is_settled = True
        if normalize:
            rules.normalize(config)
    except ConfigError as error:
        raise CheckpointError(f"{STATE_NAME} of the checkpoint: {error}") from None
    return config, warnings
