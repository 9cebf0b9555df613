"""Numbers of heads: those of the whole model count, whoever divides them; and they follow where a line says them."""

from __future__ import annotations

import pytest
import torch
from support.schedule_toys import N, Toy, batch
from torch import nn

from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.utils.errors import ConfigError


def attention(s: Schedule, **column: int) -> Schedule:
    s["blocks.*.attention.{q,k,v}"].column(**column)  # type: ignore[arg-type]
    s["blocks.*.attention.o"].row()
    return s


class Counting(Toy):
    """Its attention reads how many heads it has; so does the rule for them (E2), by the class's name."""

    def __init__(self, heads: int = N) -> None:
        super().__init__(written_down=True)
        self.blocks[0].attention.num_heads = heads
        self.blocks[0].attention.num_attention_heads = heads  # type: ignore[union-attr]


def test_heads_that_a_line_divides_are_counted_before_it_does() -> None:
    """2 of 2 would be 1 of 2 after it, and was refused (E2)."""
    for ask in ("check", "apply"):
        s = attention(schedule(Counting(2), Mesh.sizes(tp=2)))
        s["blocks.*.attention"].set("num_heads", divide="tp").set("num_attention_heads", divide="tp")
        getattr(s, ask)(batch())


def test_heads_that_ranks_cannot_share_are_refused_by_both() -> None:
    for ask in ("check", "apply"):
        s = attention(schedule(Counting(4), Mesh.sizes(tp=8)))
        s["blocks.*.attention"].set("num_heads", 1)
        with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) must be multiples of tp \(8\).*E2"):
            getattr(s, ask)(batch())


def test_they_follow_where_a_line_says_how_many() -> None:
    s = attention(schedule(Toy(written_down=True), Mesh.sizes(tp=2)), heads=N)
    s.check()
    assert "set num_heads, divide tp" in s.show()
    assert s.apply(batch()).blocks[0].attention.num_heads == N // 2  # type: ignore[index, union-attr]
    assert s.applied is not None and "set num_heads, divide tp" in s.show()


def test_what_somebody_has_set_stays_so_and_so_do_other_numbers() -> None:
    s = attention(schedule(Toy(written_down=True), Mesh.sizes(tp=2)), heads=N)
    s["blocks.*.attention"].set("num_heads", divide="tp")
    assert s.apply(batch()).blocks[0].attention.num_heads == N // 2  # type: ignore[index, union-attr]
    other = Toy()
    other.blocks[0].attention.num_heads = 3
    assert attention(schedule(other, Mesh.sizes(tp=2)), heads=N).apply(batch()).blocks[0].attention.num_heads == 3  # type: ignore[index, union-attr]


def test_groups_that_a_line_divides_are_divided_once() -> None:
    s = schedule(nn.Sequential(nn.GroupNorm(4, 8)), Mesh.sizes(tp=2))
    s["0"].set("num_groups", divide="tp").shard("weight", 0).shard("bias", 0)
    norm = s.apply(verify=False)[0]  # type: ignore[index]
    assert (norm.num_groups, norm.num_channels) == (2, 4)


def test_dtypes_that_one_buffer_cannot_hold() -> None:
    """Refused with words, by all, before anything is touched: it was an assertion in the middle of apply()."""
    model = Toy()
    model.norm.to(torch.bfloat16)
    for ask in ("check", "verify", "apply"):
        s = schedule(model, Mesh.sizes(dp=2)).zero(1)
        with pytest.raises(ConfigError, match=r"embed.weight is float32 and norm.weight is bfloat16, .* model.to\(torch.float32\)"):
            getattr(s, ask)(batch())
