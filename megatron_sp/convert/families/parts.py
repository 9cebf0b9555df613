"""Regions of our own tensors that several families need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, View

ALL = slice(None)
WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True)
class Sizes:
    """Of a model; the letters of the docstrings."""

    h: int  # hidden size
    n: int  # query heads
    g: int  # key/value heads
    d: int  # head_dim
    f: int  # width of the MLP
    v: int  # vocabulary

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        assert config.hidden_size and config.num_attention_heads and config.vocab_size
        return cls(config.hidden_size, config.num_attention_heads, config.num_groups, config.head_dim, config.ffn_size, config.vocab_size)

    @property
    def r(self) -> int:
        """Query heads of each key/value head."""
        return self.n // self.g

    def columns(self, kind: str) -> tuple[int, ...]:
        """Dims of a projection from the hidden size behind that of its rows: none of a bias."""
        return (self.h,) if kind == WEIGHT else ()


def blocks(config: ModelConfig) -> Iterator[tuple[int, str]]:
    """Each block's number and the beginning of its names."""
    stack = "encoder" if config.is_bert else "decoder"
    assert config.num_layers
    return ((i, f"{stack}.layers.{i}.") for i in range(config.num_layers))


def kinds(has_bias: bool) -> tuple[str, ...]:
    """The tensors of a linear layer."""
    return (WEIGHT, BIAS) if has_bias else (WEIGHT,)


def same(ours: str, theirs: str, which: Iterable[str] = (WEIGHT,)) -> Iterator[Copy]:
    """Tensors that differ in their names alone."""
    return (Copy(View(f"{ours}.{kind}"), View(f"{theirs}.{kind}")) for kind in which)


def query(name: str, s: Sizes, kind: str) -> View:
    """The rows of queries in our fused projection: [g, r, d, h]."""
    return View(f"{name}.{kind}", (s.g, s.r + 2, s.d, *s.columns(kind)), (ALL, slice(0, s.r)))


def key(name: str, s: Sizes, kind: str) -> View:
    """The rows of keys: [g, d, h]."""
    return View(f"{name}.{kind}", (s.g, s.r + 2, s.d, *s.columns(kind)), (ALL, s.r))


def value(name: str, s: Sizes, kind: str) -> View:
    """The rows of values: [g, d, h]."""
    return View(f"{name}.{kind}", (s.g, s.r + 2, s.d, *s.columns(kind)), (ALL, s.r + 1))


def separate_qkv(ours: str, theirs: tuple[str, str, str], s: Sizes, which: Iterable[str]) -> Iterator[Copy]:
    """Our fused projection and three of theirs."""
    q, k, v = theirs
    for kind in which:
        wide, narrow, rest = s.n * s.d, s.g * s.d, s.columns(kind)
        yield Copy(query(ours, s, kind), View(f"{q}.{kind}", (s.g, s.r, s.d, *rest), stored=(wide, *rest)))
        yield Copy(key(ours, s, kind), View(f"{k}.{kind}", (s.g, s.d, *rest), stored=(narrow, *rest)))
        yield Copy(value(ours, s, kind), View(f"{v}.{kind}", (s.g, s.d, *rest), stored=(narrow, *rest)))


def gate_up(ours: str, gate: str, up: str, s: Sizes, which: Iterable[str]) -> Iterator[Copy]:
    """Our [gate | up] and two of theirs."""
    for kind in which:
        yield Copy(View(f"{ours}.{kind}", None, (slice(0, s.f),)), View(f"{gate}.{kind}"))
        yield Copy(View(f"{ours}.{kind}", None, (slice(s.f, 2 * s.f),)), View(f"{up}.{kind}"))
