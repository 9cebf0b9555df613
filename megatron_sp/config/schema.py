"""Configuration of a run: plain dataclasses, one per group of flags, cut by subject into the ``schema_*.py`` of this
folder.

Each field is one command-line flag with Megatron's name (``num_layers`` is ``--num-layers``); help text, unit and
aliases are in the field's metadata, so ``--help``, YAML files, ``docs/reference/flags.md`` and the configuration stored
in checkpoints are all derived from here. None of these modules imports torch or numpy: a mistyped flag is reported
before either is loaded. The rules between fields are in ``config/rules.py``; they are checked on every rank before the
first collective.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.config.field_kinds import field_kinds
from megatron_sp.config.schema_data import DataConfig
from megatron_sp.config.schema_model import ModelConfig
from megatron_sp.config.schema_parallel import KernelConfig, ParallelConfig
from megatron_sp.config.schema_run import CheckpointConfig, LoggingConfig
from megatron_sp.config.schema_training import BatchConfig, OptimizerConfig, PrecisionConfig
from megatron_sp.utils.errors import ConfigError

Given = dict[tuple[str, str], str]
"""Where fields were set, in the user's own spelling, by (group, name)."""


@dataclass
class Config:
    """Configuration of a whole run; every instance that reaches training has been checked by ``validate()``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    ignored_flags: tuple[str, ...] = field(default=(), compare=False)
    """Flags of the command line that have no meaning here, with the reason; the training loop lists them once."""
    understood: tuple[str, ...] = field(default=(), compare=False)
    """What flags were taken to mean where their words do not say it, one line each."""
    preset: str | None = field(default=None, compare=False)
    """Name of the preset that the model's defaults came from."""
    preset_fields: frozenset[str] = field(default=frozenset(), compare=False)
    """Fields of ``model`` that have the preset's values, because nothing else was said of them."""
    given: Given = field(default_factory=dict, compare=False)
    """Fields that the command line, --config or DeepSpeed's JSON set, and where each was set."""
    model_is_settled: bool = field(default=False, compare=False)
    """The checkpoint of --use-checkpoint-args has been read."""

    @property
    def knows_model(self) -> bool:
        """False as long as the model is still to be taken from a checkpoint: what the flags say of it is only a part
        then.
        """
        return self.model_is_settled or not self.checkpoint.use_checkpoint_args

    @property
    def adds_null_end(self) -> bool:
        """True if --vocab-size counts the integers of a NullTokenizer that the command line names, and the end of
        documents is one more.
        """
        typed = (("data", "tokenizer_type"), ("model", "vocab_size"))
        return (
            self.data.tokenizer_type == "NullTokenizer" and self.data.eod_id is None
            and all(self.given.get(key, "").startswith("--") for key in typed)
        )  # fmt: skip

    def says(self, group: str, name: str, value: Any = None) -> bool:
        """Return whether a field was set; in a configuration that nobody typed, whether it differs from its default.

        Args:
            value: the one that it had (default: that of now).
        """
        if self.given:
            return (group, name) in self.given
        value = getattr(getattr(self, group), name) if value is None else value
        return bool(value != GROUPS[group].__dataclass_fields__[name].default)  # type: ignore[attr-defined]

    @property
    def remarks(self) -> list[str]:
        """Lines for the user about the flags: those that are ignored, and what others were taken to mean."""
        return [*(f"note: {line}" for line in self.understood), *(f"ignored: {line}" for line in self.ignored_flags)]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return a plain nested dict (tuples as lists), as stored in state.json and printed by --print-config."""
        return {
            group: {
                k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(getattr(self, group)).items()
            }
            for group in GROUPS
        }

    @classmethod
    def from_dict(cls, data: Any) -> tuple[Config, list[str]]:
        """Restore a configuration written by ``to_dict``, possibly in another version of this package.

        Args:
            data: the parsed JSON, untrusted.
        Returns:
            The configuration, neither normalised nor validated, and one warning for every entry unknown to this
            version. Missing entries keep their defaults.
        Raises:
            ConfigError: an entry has the wrong type.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"a stored configuration must be an object of groups, got {type(data).__name__}")
        config, warnings = cls(), []
        for group, entries in data.items():
            if group not in GROUPS or not isinstance(entries, dict):
                warnings.append(
                    f"the group '{group}' of the stored configuration is unknown to this version and left out"
                )
                continue
            kinds = field_kinds(GROUPS[group])
            for name, value in entries.items():
                if name not in kinds:
                    warnings.append(
                        f"'{group}.{name}' of the stored configuration is unknown to this version and left out"
                    )
                    continue
                try:
                    setattr(getattr(config, group), name, kinds[name].coerce(value))
                except ValueError as error:
                    raise ConfigError(f"'{group}.{name}' of the stored configuration: {error}") from None
        return config, warnings


_FACTORIES: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
GROUPS: dict[str, type] = {name: make for name, make in _FACTORIES.items() if dataclasses.is_dataclass(make)}  # type: ignore[misc]
"""The groups of flags: name of the field in ``Config`` and its dataclass."""


def diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the differences, as ``{"group.field": (old value, new value)}`` in the order of the fields."""
    pairs = ((f"{group}.{name}", group, name) for group, cls in GROUPS.items() for name in field_kinds(cls))
    values = (
        (key, getattr(getattr(old, group), name), getattr(getattr(new, group), name)) for key, group, name in pairs
    )
    return {key: (a, b) for key, a, b in values if a != b}


def raise_all(errors: list[str]) -> None:
    """Raise one ConfigError that lists all of ``errors``, if there are any."""
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        raise ConfigError(
            f"{len(errors)} things are wrong:\n" + "\n".join(f"  {i}. {e}" for i, e in enumerate(errors, 1))
        )
