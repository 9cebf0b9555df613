"""Rules of placements by family: each function has one, and an index is walked in one way, which is torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_sp.schedule.check.rules.indexing import has_mask, names_elements, part_of
from megatron_sp.schedule.check.rules.products import written_out
from megatron_sp.schedule.check.rules.table import FAMILIES, RULES
from megatron_sp.schedule.core.placement_steps import walk_index

SHAPE = (2, 3, 5, 7)  # all different


def test_each_function_belongs_to_one_family() -> None:
    names = [name for family in FAMILIES for name in family.RULES]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert set(names) <= set(RULES)  # and what tests and users have taught


def mask(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    "index, dims",
    [
        (0, [(0, 1), (1, 3)]),
        (slice(1, 2), [(0, 1), (1, 3)]),
        ((0, None, slice(None)), [(0, 1), (1, 0), (1, 1), (2, 2)]),
        ((..., 1), [(0, 3), (3, 1)]),
        ((0, ..., [1, 2], None), [(0, 1), (1, 2), (3, 1), (4, 0)]),
        ((slice(None), True), [(0, 1), (1, 0), (1, 3)]),
        ((torch.tensor([0]), ..., mask(5, 7)), [(0, 1), (1, 1), (2, 2)]),
        (mask(2, 3), [(0, 2), (2, 2)]),
        (..., [(0, 4)]),
    ],
)
def test_which_dims_the_items_of_an_index_are_about(index: Any, dims: list[tuple[int, int]]) -> None:
    walk = walk_index(index, len(SHAPE))
    assert [(i.dim, i.width) for i in walk] == dims
    assert [sum(i.covers(dim) for i in walk) for dim in range(4)] == [1, 1, 1, 1]
    x = torch.zeros(SHAPE)
    assert names_elements(index) or [*x[index].shape] == expected(walk)
    assert has_mask(index) == (part_of(x, index) is None)


def expected(walk: Any) -> list[int]:
    return [n for i in walk for n in _made(i)]


def _made(i: Any) -> Iterator[int]:
    """Yield the sizes that an item leaves of the dims that it indexes, if it names no elements."""
    if i.item is None or i.item is True:
        yield 1
    elif i.item is Ellipsis:
        yield from SHAPE[i.dim : i.dim + i.width]
    elif isinstance(i.item, slice):
        yield len(range(*i.item.indices(SHAPE[i.dim])))


@pytest.mark.parametrize(
    "equation, ndims, letters, out",
    [
        ("ij,jk->ik", [2, 2], ["ij", "jk"], "ik"),
        ("ij,jk", [2, 2], ["ij", "jk"], "ik"),
        ("...ij,jk->...ik", [4, 2], ["ABij", "jk"], "ABik"),
        ("b...,b...->...", [3, 2], ["bAB", "bB"], "AB"),
        ("...A,...A", [2, 1], ["BA", "A"], "B"),
    ],
)
def test_equations_are_written_out(equation: str, ndims: list[int], letters: list[str], out: str) -> None:
    assert written_out(equation, ndims) == (letters, out)
    sizes = {c: n for n, c in enumerate(sorted(set("".join(letters))), 2)}
    tensors = [torch.randn([sizes[c] for c in names], dtype=torch.float64) for names in letters]
    torch.testing.assert_close(torch.einsum(equation, *tensors), torch.einsum(f"{','.join(letters)}->{out}", *tensors))
