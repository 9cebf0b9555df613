"""``--set NAME=VALUE``: settings of the model that the files do not specify, named like the training's flags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_sp.config.field_kinds import field_kinds
from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.model import nearest
from megatron_sp.utils.errors import ConfigError


class Overrides(dict[str, Any]):
    """Values of fields of ``ModelConfig``, by name."""

    @classmethod
    def parse(cls, words: Iterable[str]) -> Overrides:
        """Parse the NAME=VALUE words of the command line.

        Raises:
            ConfigError: an unknown setting, or a value of the wrong type.
        """
        found, kinds = cls(), field_kinds(ModelConfig)
        for word in words:
            name, _, text = word.partition("=")
            field = name.strip().lstrip("-").replace("-", "_")
            if field not in kinds or not text:
                raise ConfigError(f"--set {word[:100]}: it must be NAME=VALUE with a setting of the model{nearest(field, kinds)}")
            try:
                found[field] = kinds[field].parse(text.split())
            except ValueError as error:
                raise ConfigError(f"--set {word[:100]}: {error}") from None
        return found

    def count(self, name: str, default: int | None) -> int | None:
        """Return a setting that must be at least 1, or the default. Raises ConfigError."""
        value = self.get(name, default)
        if value is not None and value < 1:
            raise ConfigError(f"--set {name.replace('_', '-')}={value} must be at least 1")
        return value

    def apply(self, config: ModelConfig) -> None:
        """Set all values in a configuration."""
        for name, value in self.items():
            setattr(config, name, value)
