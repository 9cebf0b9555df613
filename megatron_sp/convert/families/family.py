"""What a family of models says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy
from megatron_sp.convert.families.settings import Settings

Tensors = Mapping[str, tuple[int, ...]]


class Family(Protocol):
    """One family of architectures; an instance has no state."""

    @property
    def model_type(self) -> str:
        """Of config.json."""
        ...

    @property
    def prefix(self) -> str:
        """With which the names of all tensors but those of a head begin; checkpoints of a bare model lack it."""
        ...

    def renamed(self, name: str) -> str:
        """The family's name of today for a tensor that older files call otherwise."""
        ...

    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig:
        """The shape of the model.

        Args:
            settings: config.json.
            tensors: what is there, by the family's own names.
        Raises:
            CheckpointError: the model has something that ours has not, named.
        """
        ...

    def num_classes(self, tensors: Tensors) -> int:
        """Of a classifier; 0: it is none."""
        ...

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        """What of theirs is what of ours."""
        ...

    def ignored(self, config: ModelConfig) -> Mapping[str, str]:
        """Regular expressions of names that hold no weights of the model, each with the reason."""
        ...

    def architecture(self, config: ModelConfig, num_classes: int) -> str:
        """The class in which such a model is used."""
        ...

    def fits(self, config: ModelConfig) -> str | None:
        """Why no model of this family computes what this one does, or None if one does."""
        ...

    def document(self, config: ModelConfig) -> dict[str, Any]:
        """config.json, without what is the same for all families."""
        ...


_PLAIN = {
    "use_parallel_residual": False, "window_size": None, "rope_scaling": (), "rotary_seq_len_interpolation_factor": 1.0, "relu": False,
    "geglu": False,
}  # fmt: skip
"""What a family that does not speak of them does not have."""


def misfit(config: ModelConfig, **wanted: Any) -> str | None:
    """Which fields of a model are not as a family wants them, or None."""
    wanted = {**_PLAIN, **wanted}
    wrong = [f"{name} is {getattr(config, name)}, not {value}" for name, value in wanted.items() if getattr(config, name) != value]
    return "; ".join(wrong) or None
