"""Masks of transformers models that are recognised from their functions, and all others, which are refused wherever they deviate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.schedule.apply.context import Context
from megatron_sp.schedule.apply.sequences import Cut, Heads
from megatron_sp.utils.errors import ConfigError

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LENGTH, BATCH = 3000, 3  # many more rows than those of which all keys are looked at


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def both_ways(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0


def within(window: int) -> Function:
    return lambda b, h, q, k: (k <= q) & (k > q - window)


def recognised(function: Function, length: int = LENGTH, batch: int = BATCH) -> tuple[bool, int | None]:
    return Context(SINGLE_RANK, {}, "here").recognise(function, length, batch)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, LENGTH])
def test_what_is_recognised(length: int) -> None:
    assert recognised(causal, length) == (True, None)
    assert recognised(both_ways, length) == ((False, None) if length > 1 else (True, None))
    for window in (1, 2, 50, length - 1, length, length + 1):
        if window > 0:
            assert recognised(within(window), length) == (True, window if window < length else None)


def in_block(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    return (q >= start) & (q < stop) & (k >= start) & (k < stop)


OTHERS: dict[str, Function] = {
    "a block that sees all of itself": lambda b, h, q, k: (k <= q) | in_block(q, k, 1000, 1003),
    "the same in the second sequence": lambda b, h, q, k: (k <= q) | ((b == 1) & in_block(q, k, 1000, 1003)),
    "a row that sees one more": lambda b, h, q, k: (k <= q) | ((q == 1001) & (k == 1002)),
    "a row that sees one less": lambda b, h, q, k: (k <= q) & ~((q == 1001) & (k == 0)),
    "a row that does not see itself": lambda b, h, q, k: (k <= q) & ~((q == 1001) & (k == 1001)),
    "a window on both sides": lambda b, h, q, k: (k - q).abs() < 70,
    "chunks": lambda b, h, q, k: (k <= q) & (k // 128 == q // 128),
    "a window, and a first token that all see": lambda b, h, q, k: ((k <= q) & (k > q - 70)) | ((k == 0) & (q >= 0)),
    "a window that is longer for a while": lambda b, h, q, k: (k <= q) & ((k > q - 70) | ((q > 1000) & (q < 1004) & (k > q - 71))),
    "blocks in order": lambda b, h, q, k: k // 64 <= q // 64,
    "every second key": lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),
    "padding that is everybody's": lambda b, h, q, k: (k < 2900) & (q >= 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"neither causal, nor causal with a window, nor bidirectional, and context\(\) knows no others \(here\)"
    ):
        recognised(OTHERS[name])


def test_a_function_of_the_share_of_a_rank() -> None:
    blocks = torch.zeros(BATCH, 10, dtype=torch.long)  # of fewer positions than the sequence has
    with pytest.raises(ConfigError, match=r"cannot be looked at, and context.* IndexError"):
        recognised(lambda b, h, q, k: blocks[b, q] == blocks[b, k])


def test_a_recomputation_behind_a_pass_of_another_length_is_refused() -> None:
    """Its exchanges would take the other pass's length, and drop positions without a word."""
    heads, shorter = Heads(SINGLE_RANK, 2, 1, "attention"), Cut(5, 6, 1, 0)
    assert heads.enter(torch.zeros(1, 2, 6, 4), shorter).shape == (1, 2, 5, 4)
    with pytest.raises(ConfigError, match="attention computes 8 positions, but the last forward pass had 6"):
        heads.enter(torch.zeros(1, 2, 8, 4), shorter)
