"""Model families of Hugging Face: the interface, a validating reader of config.json, regions of our tensors.

Types in config.json are checked, and unsupported settings that would change the model are refused.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, Index, View
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
    """The entries of a config.json."""

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self.document, self.where = document, where

    def get(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """Return an entry of this type (an int is accepted as a float), or the default if it is missing or null."""
        value = self.document.get(name)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where} has no {name}: it cannot be told what model this is")
            return default
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if not abs(value) <= sys.float_info.max:
                raise CheckpointError(f"{self.where}: {name} must be a finite number, found {str(value)[:100]}")
            return float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.where}: {name} must be {kind.__name__}, found {str(value)[:100]!r}")
        return value

    def count(self, name: str, default: Any = _MISSING) -> Any:
        value = self.get(name, int, default)
        if value is not default and not 1 <= value < 1 << 31:
            raise CheckpointError(f"{self.where}: {name} must be at least 1 and below 2**31, found {value}")
        return value

    def require(self, name: str, allowed: Any, why: str) -> None:
        """Refuse any value of an entry but ``allowed``, which is also the meaning of a missing entry."""
        value = self.document.get(name)
        if value is not None and value != allowed:
            raise CheckpointError(f"{self.where}: {name} is {str(value)[:100]!r}, which {why}: only {allowed!r} can be"
                                  " converted")  # fmt: skip

    def choice(self, name: str, options: dict[str, Any], default: str) -> Any:
        """Return the value that ``options`` assigns to the word in an entry."""
        word = self.get(name, str, default)
        if word not in options:
            raise CheckpointError(f"{self.where}: {name} is {word[:100]!r}: only {', '.join(options)} can be converted")
        return options[word]

    def take_rotary(
        self, config: ModelConfig, *, share: float = 1.0, base: str = "rope_theta", percent: str | None = None,
        theta: float = 10000.0
    ) -> None:  # fmt: skip
        """Set the rotary positions from rope_parameters or, in older files, from rope_theta and rope_scaling.

        Where both rope_parameters and rope_scaling are present, only rope_scaling is used, as in transformers.

        Args:
            share: fraction of each head that is rotated, if the file does not specify it.
            base, percent: older names of the entries for the base and the fraction; without ``percent`` all of a head
                must be rotated.
            theta: the base, if the file does not specify it.
        """
        rope = Settings(self._rope(), self.where)
        kind = rope.get("rope_type", str, rope.get("type", str, "default"))
        config.rotary_base = rope.get("rope_theta", float, self.get(base, float, theta))
        if percent is None:
            both = Settings({**self.document, **rope.document}, self.where)
            both.require("partial_rotary_factor", 1.0, "turns a part of each head")
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
            same = "; without that entry the model is the same up to max_position_embeddings tokens"
            raise CheckpointError(f"{self.where}: rope_type is {kind[:100]!r}: only default, linear and llama3 can be"
                                  f" converted{same if kind == 'dynamic' else ''}")  # fmt: skip

    @staticmethod
    def rotary(config: ModelConfig, *, base: str = "rope_theta", percent: str | None = None) -> dict[str, Any]:
        """Return the entries that ``take_rotary`` reads, under names that all versions of transformers understand."""
        entries: dict[str, Any] = {base: config.rotary_base}
        if percent is not None:
            entries[percent] = config.rotary_percent
        if config.use_rope_scaling:
            low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
            entries["rope_scaling"] = {
                "rope_type": "llama3", "factor": config.rope_scaling_factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": config.rope_scaling_original_length,
            }  # fmt: skip
        elif config.rotary_seq_len_interpolation_factor != 1.0:
            entries["rope_scaling"] = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
        return entries

    def _rope(self) -> dict[str, Any]:
        name = "rope_scaling" if self.get("rope_scaling", dict, {}) else "rope_parameters"
        entries: dict[str, Any] = self.get(name, dict, {})
        if nested := next((key for key, value in entries.items() if isinstance(value, dict)), None):
            raise CheckpointError(f"{self.where}: {name} has entries of its own for {nested[:100]!r}: layers of one"
                                  " kind alone can be converted")  # fmt: skip
        return entries


def set_activation(config: ModelConfig, name: str) -> None:
    """Set the activation of a model's MLP to one of the values of ``ACTIVATIONS``."""
    config.relu = name == "relu"
    if name != "relu":
        config.gelu_approximate = "tanh" if name == "gelu_tanh" else "none"


def word_of(activation: str) -> str:
    return {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu"}[activation]


def set_biases(config: ModelConfig, *, qkv: bool, proj: bool, mlp: bool) -> None:
    config.disable_bias_linear = not (qkv and proj and mlp)
    if config.disable_bias_linear:
        config.add_qkv_bias, config.add_proj_bias, config.add_mlp_bias = qkv, proj, mlp


Tensors = Mapping[str, tuple[int, ...]]


class Family(ABC):
    """A family of architectures; instances are stateless."""

    model_type: str
    prefix: str  # of all tensor names except those of a head; checkpoints of a bare model lack it

    @abstractmethod
    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig: ...

    @abstractmethod
    def document(self, config: ModelConfig) -> dict[str, Any]:
        """Return config.json without the entries that all families share."""

    @abstractmethod
    def fits(self, config: ModelConfig) -> str | None:
        """Return why no model of this family computes what this one does, or None if one does."""

    @abstractmethod
    def architecture(self, config: ModelConfig, num_classes: int) -> str:
        """Return the name of the transformers class for such a model."""

    @abstractmethod
    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        """Return the correspondence between regions of our tensors and of theirs."""

    def renamed(self, name: str) -> str:
        """Return the family's current name of a tensor; older files may use another."""
        return name

    def num_classes(self, tensors: Tensors) -> int:
        """Return the number of classes of a classifier; 0 for other models."""
        return 0

    def ignored(self, config: ModelConfig) -> Mapping[str, str]:
        """Return regular expressions of names that hold no weights of the model, each with the reason."""
        return {}

    def unstacked(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """Return the tensors that a stacked one contains, and their regions of it; empty if it is none."""
        return {}


_PLAIN = {
    "use_parallel_residual": False, "window_size": None, "rope_scaling": (), "rotary_seq_len_interpolation_factor": 1.0,
    "relu": False, "geglu": False, "has_experts": False, "qk_layernorm_scope": "head",
}  # fmt: skip
"""What a family that does not speak of them does not have."""


def misfit(config: ModelConfig, **wanted: Any) -> str | None:
    """Describe the fields of a model that differ from what a family requires, or return None."""
    wanted = {**_PLAIN, **wanted}
    wrong = [(name, getattr(config, name), value) for name, value in wanted.items() if getattr(config, name) != value]
    return "; ".join(f"{name} is {has}, not {value}" for name, has, value in wrong) or None


ALL = slice(None)
WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model, by the letters used in the docstrings."""

    h: int  # hidden size
    n: int  # query heads
    g: int  # key/value heads
    d: int  # head_dim
    f: int  # width of the MLP
    v: int  # vocabulary

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        c = config
        assert c.hidden_size and c.num_attention_heads and c.vocab_size
        return cls(c.hidden_size, c.num_attention_heads, c.num_groups, c.head_dim, c.ffn_size, c.vocab_size)

    @property
    def r(self) -> int:
        return self.n // self.g

    def columns(self, kind: str) -> tuple[int, ...]:
        """Return the dims after the rows of a projection from the hidden size: (h,) for a weight, () for a bias."""
        return (self.h,) if kind == WEIGHT else ()


def blocks(config: ModelConfig) -> Iterator[tuple[int, str]]:
    """Return each block's number and the prefix of its tensor names."""
    stack = "encoder" if config.is_bert else "decoder"
    assert config.num_layers
    return ((i, f"{stack}.layers.{i}.") for i in range(config.num_layers))


def kinds(has_bias: bool) -> tuple[str, ...]:
    return (WEIGHT, BIAS) if has_bias else (WEIGHT,)


def same(ours: str, theirs: str, which: Iterable[str] = (WEIGHT,)) -> Iterator[Copy]:
    return (Copy(View(f"{ours}.{kind}"), View(f"{theirs}.{kind}")) for kind in which)


def query(name: str, s: Sizes, kind: str) -> View:
    """Return the query rows of our fused projection: [g, r, d, h]."""
    return View(f"{name}.{kind}", (s.g, s.r + 2, s.d, *s.columns(kind)), (ALL, slice(0, s.r)))


def key(name: str, s: Sizes, kind: str) -> View:
    """Return the key rows of our fused projection: [g, d, h]."""
    return View(f"{name}.{kind}", (s.g, s.r + 2, s.d, *s.columns(kind)), (ALL, s.r))


def value(name: str, s: Sizes, kind: str) -> View:
    """Return the value rows of our fused projection: [g, d, h]."""
    return View(f"{name}.{kind}", (s.g, s.r + 2, s.d, *s.columns(kind)), (ALL, s.r + 1))


def separate_qkv(ours: str, theirs: tuple[str, str, str], s: Sizes, which: Iterable[str]) -> Iterator[Copy]:
    """Yield the copies between our fused projection and three of theirs."""
    q, k, v = theirs
    for kind in which:
        wide, narrow, rest = s.n * s.d, s.g * s.d, s.columns(kind)
        yield Copy(query(ours, s, kind), View(f"{q}.{kind}", (s.g, s.r, s.d, *rest), stored=(wide, *rest)))
        yield Copy(key(ours, s, kind), View(f"{k}.{kind}", (s.g, s.d, *rest), stored=(narrow, *rest)))
        yield Copy(value(ours, s, kind), View(f"{v}.{kind}", (s.g, s.d, *rest), stored=(narrow, *rest)))


def gate_up(
    ours: str, gate: str, up: str, f: int, which: Iterable[str] = (WEIGHT,), expert: int | None = None
) -> Iterator[Copy]:
    """Yield the copies between our [gate | up] of width f each, of one of stacked experts or not, and two of theirs."""
    of = () if expert is None else (expert,)
    for kind in which:
        yield Copy(View(f"{ours}.{kind}", None, (*of, slice(0, f))), View(f"{gate}.{kind}"))
        yield Copy(View(f"{ours}.{kind}", None, (*of, slice(f, 2 * f))), View(f"{up}.{kind}"))
