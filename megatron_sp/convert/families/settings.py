"""Validating reader of config.json: types are checked, and unsupported settings that would change the model are refused."""

from __future__ import annotations

import sys
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.utils.errors import CheckpointError

_MISSING = object()
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")
"""Where they say, one way or another, what rotary positions are."""
ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
    "gelu_python": "gelu", "relu": "relu",
}  # fmt: skip
"""Their names of an activation -> ours."""


class Settings:
    """The entries of a config.json.

    Args:
        document: the parsed file.
        where: its path, for error messages.
    """

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self.document, self.where = document, where

    def get(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """Return an entry of this type (an int is accepted as a float), or the default if it is missing or null.

        Raises:
            CheckpointError: it has another type, is not finite, or is missing without a default.
        """
        value = self.document.get(name)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where} has no {name}: it cannot be told what model this is")
            return default
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._finite(name, value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.where}: {name} must be {kind.__name__}, found {str(value)[:100]!r}")
        return value

    def _finite(self, name: str, value: float) -> float:
        """Return the value as a float; refuse NaN, Infinity and integers too large for a float, which Python's JSON reader accepts."""
        if not abs(value) <= sys.float_info.max:
            raise CheckpointError(f"{self.where}: {name} must be a finite number, found {str(value)[:100]}")
        return float(value)

    def count(self, name: str, default: Any = _MISSING) -> Any:
        """Return an integer from 1 to 2**31 - 1. Raises CheckpointError."""
        value = self.get(name, int, default)
        if value is not default and not 1 <= value < 1 << 31:
            raise CheckpointError(f"{self.where}: {name} must be at least 1 and below 2**31, found {value}")
        return value

    def require(self, name: str, allowed: Any, why: str) -> None:
        """Refuse any value of an entry but ``allowed``, which is also the meaning of a missing entry.

        Raises:
            CheckpointError: another value; ``why`` completes the message "NAME is VALUE, which ...".
        """
        value = self.document.get(name)
        if value is not None and value != allowed:
            raise CheckpointError(f"{self.where}: {name} is {str(value)[:100]!r}, which {why}: only {allowed!r} can be converted")

    def choice(self, name: str, options: dict[str, Any], default: str) -> Any:
        """Return the value that ``options`` assigns to the word in an entry.

        Raises:
            CheckpointError: an unknown word; the message lists the known ones.
        """
        word = self.get(name, str, default)
        if word not in options:
            raise CheckpointError(f"{self.where}: {name} is {word[:100]!r}: only {', '.join(options)} can be converted")
        return options[word]

    def take_rotary(
        self, config: ModelConfig, *, share: float = 1.0, base: str = "rope_theta", percent: str | None = None, theta: float = 10000.0
    ) -> None:  # fmt: skip
        """Set the rotary positions of a model from rope_parameters or, in older files, from rope_theta and rope_scaling.

        Where both rope_parameters and rope_scaling are present, only rope_scaling is used, as in transformers.

        Args:
            share: fraction of each head that is rotated, if the file does not specify it.
            base, percent: older names of the entries for the base and the fraction; without ``percent`` all of a head
                must be rotated.
            theta: the base, if the file does not specify it.
        Raises:
            CheckpointError: an unsupported kind of scaling.
        """
        rope = Settings(self._rope(), self.where)
        kind = rope.get("rope_type", str, rope.get("type", str, "default"))
        config.rotary_base = rope.get("rope_theta", float, self.get(base, float, theta))
        if percent is None:
            Settings({**self.document, **rope.document}, self.where).require("partial_rotary_factor", 1.0, "turns a part of each head")
        else:
            config.rotary_percent = rope.get("partial_rotary_factor", float, self.get(percent, float, share))
        if kind == "linear":
            config.rotary_seq_len_interpolation_factor = rope.get("factor", float)
        elif kind == "llama3":
            config.use_rope_scaling = True
            config.rope_scaling_factor = rope.get("factor", float)
            config.rope_scaling_low_freq_factor = rope.get("low_freq_factor", float)
            config.rope_scaling_high_freq_factor = rope.get("high_freq_factor", float)
            config.rope_scaling_original_length = rope.count("original_max_position_embeddings")
        elif kind != "default":
            same = "; without that entry the model is the same up to max_position_embeddings tokens" if kind == "dynamic" else ""
            raise CheckpointError(f"{self.where}: rope_type is {kind[:100]!r}: only default, linear and llama3 can be converted{same}")

    @staticmethod
    def rotary(config: ModelConfig, *, base: str = "rope_theta", percent: str | None = None) -> dict[str, Any]:
        """Return the entries that ``take_rotary`` reads, under names that all versions of transformers understand."""
        found: dict[str, Any] = {base: config.rotary_base}
        if percent is not None:
            found[percent] = config.rotary_percent
        if config.use_rope_scaling:
            low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
            found["rope_scaling"] = {
                "rope_type": "llama3", "factor": config.rope_scaling_factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": config.rope_scaling_original_length,
            }  # fmt: skip
        elif config.rotary_seq_len_interpolation_factor != 1.0:
            found["rope_scaling"] = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
        return found

    def _rope(self) -> dict[str, Any]:
        name = "rope_scaling" if self.get("rope_scaling", dict, {}) else "rope_parameters"
        found: dict[str, Any] = self.get(name, dict, {})
        if nested := next((key for key, value in found.items() if isinstance(value, dict)), None):
            raise CheckpointError(
                f"{self.where}: {name} has entries of its own for {nested[:100]!r}: layers of one kind alone can be converted"
            )
        return found


def set_activation(config: ModelConfig, name: str) -> None:
    """Set the activation of a model's MLP to one of the values of ``ACTIVATIONS``."""
    config.relu = name == "relu"
    if name != "relu":
        config.gelu_approximate = "tanh" if name == "gelu_tanh" else "none"


def word_of(activation: str) -> str:
    """Return Hugging Face's name of one of our activations."""
    return {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu"}[activation]


def set_biases(config: ModelConfig, *, qkv: bool, proj: bool, mlp: bool) -> None:
    """Set which linear layers have biases."""
    config.disable_bias_linear = not (qkv and proj and mlp)
    if config.disable_bias_linear:
        config.add_qkv_bias, config.add_proj_bias, config.add_mlp_bias = qkv, proj, mlp
