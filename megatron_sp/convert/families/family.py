"""The interface of model families, a validating reader of config.json, regions of our tensors."""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, Index, View
from megatron_sp.utils.errors import CheckpointError

_MISSING = object()
# every place that says, one way or another, what rotary positions are
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")
ACTIVATIONS = {  # transformers' names of an activation -> ours
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
    "gelu_python": "gelu", "relu": "relu",
}  # fmt: skip
HIDDEN_ACT = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu"}  # and back
ALL = slice(None)
WEIGHT, BIAS = "weight", "bias"
BOTH = (WEIGHT, BIAS)

Tensors = Mapping[str, tuple[int, ...]]


class Settings:
    """Entries of a config.json, or Megatron's arguments."""

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self.document, self.where = document, where

    def get(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """Return an entry of this type; the default if it is null or missing."""
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
        """Return an integer of at least 1, or the default."""
        value = self.get(name, int, default)
        if value is not default and not 1 <= value < 1 << 31:
            raise CheckpointError(f"{self.where}: {name} must be at least 1 and below 2**31, found {value}")
        return value

    def require(self, name: str, allowed: Any, why: str) -> None:
        """Refuse any value of an entry but ``allowed``; a missing entry is allowed."""
        value = self.document.get(name)
        if value is not None and value != allowed:
            raise CheckpointError(f"{self.where}: {name} is {str(value)[:100]!r}, which {why}: only {allowed!r} can be"
                                  " converted")  # fmt: skip

    def choice(self, name: str, options: dict[str, Any], default: str) -> Any:
        word = self.get(name, str, default)
        if word not in options:
            raise CheckpointError(f"{self.where}: {name} is {word[:100]!r}: only {', '.join(options)} can be converted")
        return options[word]

    def take_rotary(
        self, config: ModelConfig, *, share: float = 1.0, base: str = "rope_theta", percent: str | None = None,
        theta: float = 10000.0
    ) -> None:  # fmt: skip
        # From rope_parameters or, in older files, from rope_theta and rope_scaling. ``base`` and ``percent``: older
        # names of the entries for the base and the rotated fraction of a head, ``theta`` and ``share`` their values if
        # the file does not say; without ``percent`` all of a head must be rotated where both are there, transformers
        # uses rope_scaling alone
        name = "rope_scaling" if self.get("rope_scaling", dict, {}) else "rope_parameters"
        entries: dict[str, Any] = self.get(name, dict, {})
        if nested := next((key for key, value in entries.items() if isinstance(value, dict)), None):
            raise CheckpointError(f"{self.where}: {name} has entries of its own for {nested[:100]!r}: layers of one"
                                  " kind alone can be converted")  # fmt: skip
        rope = Settings(entries, self.where)
        kind = rope.get("rope_type", str, rope.get("type", str, "default"))
        config.rotary_base = rope.get("rope_theta", float, self.get(base, float, theta))
        if percent is None:
            both = Settings({**self.document, **entries}, self.where)
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


def rotary_entries(config: ModelConfig, base: str = "rope_theta", percent: str | None = None) -> dict[str, Any]:
    """Return the entries that ``take_rotary`` reads."""
    # under the older names, which all versions of transformers understand
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


class Entry(NamedTuple):
    """An entry of config.json that is a field of our model, read and written."""

    name: str
    field: str
    default: Any = _MISSING
    kind: type = int  # an int is a count


SIZES = (
    Entry("num_hidden_layers", "num_layers"), Entry("hidden_size", "hidden_size"),
    Entry("num_attention_heads", "num_attention_heads"), Entry("intermediate_size", "ffn_hidden_size"),
    Entry("vocab_size", "vocab_size"), Entry("initializer_range", "init_method_std", 0.02, float),
)  # fmt: skip
# fields that may be left to another one here, and what says their value then
_DERIVED = {"ffn_hidden_size": "ffn_size", "seq_length": "max_positions", "max_position_embeddings": "max_positions"}
# what a family that does not speak of them does not have
_PLAIN = {
    "use_parallel_residual": False, "window_size": None, "rope_scaling": (), "rotary_seq_len_interpolation_factor": 1.0,
    "relu": False, "geglu": False, "has_experts": False, "qk_layernorm_scope": "head",
}  # fmt: skip


class Family(ABC):
    """A family of architectures."""

    model_type: str
    name: str  # of the classes of transformers, and what ends that of the model with a head
    head = "ForCausalLM"
    prefix: str  # of all tensor names except those of a head; checkpoints of a bare model lack it
    entries: tuple[Entry, ...]
    ignored: Mapping[str, str] = {}  # regular expressions of names that a model may do without, each with the reason
    is_tied: bool | None = None  # without an entry tie_word_embeddings; None: that is for ``config`` to say

    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig:
        """Return the model that a config.json describes."""
        values: dict[str, Any] = {}
        for name, field, default, kind in self.entries:
            values[field] = settings.count(name, default) if kind is int else settings.get(name, kind, default)
        config = ModelConfig(**values)
        if self.is_tied is not None:
            config.untie_embeddings_and_output_weights = not settings.get("tie_word_embeddings", bool, self.is_tied)
        self.complete(config, settings, tensors)
        return config

    @abstractmethod
    def complete(self, config: ModelConfig, settings: Settings, tensors: Tensors) -> None:
        """Set the fields that are not among ``entries``."""

    def document(self, config: ModelConfig) -> dict[str, Any]:
        """Return config.json without what all families share."""
        entries = {name: getattr(config, _DERIVED.get(field, field)) for name, field, *_ in self.entries}
        if self.is_tied is not None:
            entries["tie_word_embeddings"] = not config.untie_embeddings_and_output_weights
        return {**entries, **self.own_entries(config)}

    @abstractmethod
    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries of config.json beside ``entries``."""

    @abstractmethod
    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        """Return the values that fields must have, beside ``_PLAIN``."""

    def fits(self, config: ModelConfig) -> str | None:
        """Return why this family does not compute this model, or None."""
        wanted = {**_PLAIN, **self.wanted(config)}
        wrong = [(field, getattr(config, field), value) for field, value in wanted.items()]
        return "; ".join(f"{field} is {has}, not {value}" for field, has, value in wrong if has != value) or None

    def architecture(self, *, classifies: bool, has_order: bool) -> str:
        """Return the transformers class that computes all heads."""
        return self.name + self.head

    @abstractmethod
    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        """Return the copies of all tensors."""

    def passed_over(self, config: ModelConfig) -> dict[str, str]:
        """Return regular expressions of names that this model does without, each with the reason."""
        return dict(self.ignored)

    def renamed(self, name: str) -> str:
        """Return the family's current name of a tensor of an older file."""
        return name

    def unstacked(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """Return the regions of a stacked tensor, by the names of its parts."""
        return {}


def of_layer_norm(config: ModelConfig) -> dict[str, Any]:
    # what the families with LayerNorm and without groups of heads want
    assert config.num_attention_heads
    return {
        "normalization": "LayerNorm", "squared_relu": False, "relu": config.relu, "qk_layernorm": False,
        "apply_layernorm_1p": False, "num_groups": config.num_attention_heads,
        "head_dim": (config.hidden_size or 0) // config.num_attention_heads,
    }  # fmt: skip


def set_activation(config: ModelConfig, settings: Settings, name: str, default: str) -> None:
    activation = settings.choice(name, ACTIVATIONS, default)
    config.relu = activation == "relu"
    if not config.relu:
        config.gelu_approximate = "tanh" if activation == "gelu_tanh" else "none"


def set_biases(config: ModelConfig, *, attention: bool, proj: bool | None = None, mlp: bool) -> None:
    proj = attention if proj is None else proj
    config.disable_bias_linear = not (attention and proj and mlp)
    if config.disable_bias_linear:
        config.add_qkv_bias, config.add_proj_bias, config.add_mlp_bias = attention, proj, mlp


def pattern_of(with_experts: Iterable[bool]) -> str:
    """Return --moe-layer-freq of layers that have experts or not."""
    layers = list(with_experts)
    if all(layers):
        return "1"
    return "+".join(f"[{int(has)}]*{len(list(run))}" for has, run in itertools.groupby(layers))


class Sizes(NamedTuple):
    """Dimensions of a model."""

    h: int  # hidden size
    n: int  # query heads
    g: int  # key/value heads
    r: int  # query heads of each of these
    d: int  # channels of a head

    @classmethod
    def of(cls, c: ModelConfig) -> Sizes:
        assert c.hidden_size and c.num_attention_heads
        heads, groups = c.num_attention_heads, c.num_groups
        return cls(c.hidden_size, heads, groups, heads // groups, c.head_dim)


def blocks(config: ModelConfig) -> Iterator[tuple[int, str]]:
    # (number, prefix of the names)
    stack = "encoder" if config.is_bert else "decoder"
    return ((i, f"{stack}.layers.{i}.") for i in range(config.num_layers or 0))


def kinds(has_bias: bool) -> tuple[str, ...]:
    return BOTH if has_bias else (WEIGHT,)


def same(ours: str, theirs: str, which: Iterable[str] = (WEIGHT,)) -> Iterator[Copy]:
    return (Copy(View(f"{ours}.{kind}"), View(f"{theirs}.{kind}")) for kind in which)


def fused_parts(name: str, s: Sizes, kind: str) -> tuple[View, View, View]:
    """Return the query, key and value rows of our fused projection."""
    # [g, r, d, h] and twice [g, d, h]; a bias has no h
    shape = (s.g, s.r + 2, s.d, s.h) if kind == WEIGHT else (s.g, s.r + 2, s.d)
    query, key, value = (View(f"{name}.{kind}", shape, (ALL, rows)) for rows in (slice(0, s.r), s.r, s.r + 1))
    return query, key, value


def separate_qkv(
    ours: str, theirs: tuple[str, str, str], s: Sizes, which: Iterable[str], pairs: int = 0
) -> Iterator[Copy]:
    """Yield the copies with three projections; ``pairs``: channels of a head that theirs turns as neighbours."""
    # ours turns channel i with i + pairs / 2, so theirs 0, 2, 4, ... come first, and 1, 3, 5, ... after them
    halves = ((slice(0, pairs // 2), slice(0, pairs, 2)), (slice(pairs // 2, pairs), slice(1, pairs, 2)))
    for kind in which:
        rest = (s.h,) if kind == WEIGHT else ()
        for number, (part, name) in enumerate(zip(fused_parts(ours, s, kind), theirs, strict=True)):
            heads = (s.g, s.d) if number else (s.g, s.r, s.d)
            stored, shape = ((s.g if number else s.n) * s.d, *rest), (*heads, *rest)
            if not pairs or number == 2:  # values are not turned
                yield Copy(part, View(f"{name}.{kind}", shape, stored=stored))
                continue
            rest_of_head = [(slice(pairs, None), slice(pairs, None))] * (pairs < s.d)
            for own, other in (*halves, *rest_of_head):
                there = View(f"{name}.{kind}", shape, (*(ALL,) * (len(heads) - 1), other), stored=stored)
                yield Copy(View(part.name, part.shape, (*part.index, own)), there)


def gate_up(
    ours: str, gate: str, up: str, f: int, which: Iterable[str] = (WEIGHT,), expert: int | None = None
) -> Iterator[Copy]:
    """Yield the copies with our [gate | up], perhaps of one expert."""
    of = () if expert is None else (expert,)
    for kind in which:
        yield Copy(View(f"{ours}.{kind}", None, (*of, slice(0, f))), View(f"{gate}.{kind}"))
        yield Copy(View(f"{ours}.{kind}", None, (*of, slice(f, 2 * f))), View(f"{up}.{kind}"))
