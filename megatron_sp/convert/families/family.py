"""The interface of a model family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, Index
from megatron_sp.convert.families.settings import Settings

Tensors = Mapping[str, tuple[int, ...]]


class Family(Protocol):
    """A family of architectures; instances are stateless."""

    @property
    def model_type(self) -> str:
        """``model_type`` of config.json."""
        ...

    @property
    def prefix(self) -> str:
        """Prefix of all tensor names except those of a head; checkpoints of a bare model lack it."""
        ...

    def renamed(self, name: str) -> str:
        """Return the family's current name of a tensor; older files may use another."""
        ...

    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig:
        """Return the configuration of the model.

        Args:
            settings: config.json.
            tensors: shapes of the tensors in the files, by the family's own names.
        Raises:
            CheckpointError: the model has a feature that ours lacks; the message names it.
        """
        ...

    def num_classes(self, tensors: Tensors) -> int:
        """Return the number of classes of a classifier; 0 for other models."""
        ...

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        """Return the correspondence between regions of our tensors and of theirs."""
        ...

    def ignored(self, config: ModelConfig) -> Mapping[str, str]:
        """Return regular expressions of names that hold no weights of the model, each with the reason."""
        ...

    def unstacked(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """Return the tensors that a stacked one contains, and their regions of it; empty if it is none.

        Args:
            name: the family's current name.
            shape: that of the tensor.
        """
        ...

    def architecture(self, config: ModelConfig, num_classes: int) -> str:
        """Return the name of the transformers class for such a model."""
        ...

    def fits(self, config: ModelConfig) -> str | None:
        """Return why no model of this family computes what this one does, or None if one does."""
        ...

    def document(self, config: ModelConfig) -> dict[str, Any]:
        """Return config.json without the entries that all families share."""
        ...


_PLAIN = {
    "use_parallel_residual": False, "window_size": None, "rope_scaling": (), "rotary_seq_len_interpolation_factor": 1.0, "relu": False,
    "geglu": False, "has_experts": False, "qk_layernorm_scope": "head",
}  # fmt: skip
"""What a family that does not speak of them does not have."""


def misfit(config: ModelConfig, **wanted: Any) -> str | None:
    """Describe the fields of a model that differ from what a family requires, or return None."""
    wanted = {**_PLAIN, **wanted}
    wrong = [f"{name} is {getattr(config, name)}, not {value}" for name, value in wanted.items() if getattr(config, name) != value]
    return "; ".join(wrong) or None
