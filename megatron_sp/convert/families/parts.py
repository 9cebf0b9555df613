"""Regions of our tensors that several families use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, View

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
        """Sizes of a configuration that has all of them."""
        assert config.hidden_size and config.num_attention_heads and config.vocab_size
        return cls(config.hidden_size, config.num_attention_heads, config.num_groups, config.head_dim, config.ffn_size, config.vocab_size)

    @property
    def r(self) -> int:
        """Number of query heads per key/value head."""
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
    """Return the kinds of tensors of a linear layer."""
    return (WEIGHT, BIAS) if has_bias else (WEIGHT,)


def same(ours: str, theirs: str, which: Iterable[str] = (WEIGHT,)) -> Iterator[Copy]:
    """Return copies between tensors that differ only in name."""
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


def gate_up(ours: str, gate: str, up: str, f: int, which: Iterable[str] = (WEIGHT,), expert: int | None = None) -> Iterator[Copy]:
    """Yield the copies between our [gate | up] projection of width f each, or that of one of stacked experts, and two of theirs."""
    of = () if expert is None else (expert,)
    for kind in which:
        yield Copy(View(f"{ours}.{kind}", None, (*of, slice(0, f))), View(f"{gate}.{kind}"))
        yield Copy(View(f"{ours}.{kind}", None, (*of, slice(f, 2 * f))), View(f"{up}.{kind}"))
