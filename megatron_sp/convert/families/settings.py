"""Reading a config.json without trusting it: types are checked, and what would change the model and is not known here is refused."""

from __future__ import annotations

from typing import Any

from megatron_sp.config import ModelConfig
from megatron_sp.utils.errors import CheckpointError

_MISSING = object()
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "none", "gelu_python": "none"}
"""Their names of an activation -> --gelu-approximate."""


class Settings:
    """The entries of a config.json.

    Args:
        document: the parsed file.
        where: its path, for messages.
    """

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self.document, self.where = document, where

    def get(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """An entry of this type (an int is a float too), or the default where it is absent or null.

        Raises:
            CheckpointError: it is of another type, or absent and there is no default.
        """
        value = self.document.get(name)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where} has no {name}: it cannot be told what model this is")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.where}: {name} must be {kind.__name__}, found {str(value)[:100]!r}")
        return value

    def count(self, name: str, default: Any = _MISSING) -> Any:
        """A whole number from 1 to 2**31. Raises CheckpointError."""
        value = self.get(name, int, default)
        if value is not default and not 1 <= value < 1 << 31:
            raise CheckpointError(f"{self.where}: {name} must be at least 1 and below 2**31, found {value}")
        return value

    def require(self, name: str, allowed: Any, why: str) -> None:
        """Refuse any other value of an entry than this, which is also what its absence means.

        Raises:
            CheckpointError: with ``why``, the end of a sentence.
        """
        value = self.document.get(name)
        if value is not None and value != allowed:
            raise CheckpointError(f"{self.where}: {name} is {str(value)[:100]!r}, which {why}: only {allowed!r} can be converted")

    def choice(self, name: str, options: dict[str, Any], default: str) -> Any:
        """What a word of an entry stands for.

        Raises:
            CheckpointError: another word; names those that are known.
        """
        word = self.get(name, str, default)
        if word not in options:
            raise CheckpointError(f"{self.where}: {name} is {word[:100]!r}: only {', '.join(options)} can be converted")
        return options[word]

    def take_rotary(self, config: ModelConfig) -> None:
        """Set what the rotary positions of a model are: rope_parameters of today, or rope_theta and rope_scaling of older files.

        Raises:
            CheckpointError: a kind of scaling that is not known here.
        """
        rope = Settings({**self.document, **self._rope()}, self.where)
        kind = rope.get("rope_type", str, rope.get("type", str, "default"))
        if kind != "default":
            raise CheckpointError(f"{self.where}: rope_type is {kind[:100]!r}: only 'default' can be converted")
        config.rotary_base = rope.get("rope_theta", float, 10000.0)

    def _rope(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            found |= self.get(name, dict, {})
        return found
