"""Regions of tensors: what covers what, and both directions of one list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.convert_models import Tensors
from torch import Tensor

from megatron_sp.convert.copies import Copy, Correspondence, Gathered, Scattered, View, assemble, widest
from megatron_sp.utils.errors import CheckpointError

FIRST, SECOND = slice(0, 2), slice(2, 4)
OURS = {"both": (4, 3), "turned": (2, 3), "alone": (5,)}
COPIES = [
    Copy(View("both", None, (FIRST,)), View("a")),
    Copy(View("both", None, (SECOND,)), View("b")),
    Copy(View("turned"), View("t", order=(1, 0))),
    Copy(View("alone"), View("padded", None, (slice(0, 5),), stored=(8,))),
]
CORRESPONDENCE = Correspondence.of(OURS, COPIES, filled={"padded": 3})
TENSORS = {"both": torch.arange(12.0).view(4, 3), "turned": torch.arange(6.0).view(2, 3) + 20, "alone": torch.arange(5.0) + 40}


def test_shapes_of_theirs_follow_from_the_regions() -> None:
    assert CORRESPONDENCE.theirs == {"a": (2, 3), "b": (2, 3), "t": (3, 2), "padded": (8,)}


def test_there_and_back() -> None:
    theirs = Scattered(CORRESPONDENCE, Tensors(TENSORS))
    made = {name: theirs.read(name) for name in theirs.tensors()}
    assert torch.equal(made["a"], TENSORS["both"][:2]) and torch.equal(made["b"], TENSORS["both"][2:])
    assert torch.equal(made["t"], TENSORS["turned"].t())
    assert made["padded"].tolist() == [40, 41, 42, 43, 44, 0, 0, 0]
    ours = Gathered(CORRESPONDENCE, Tensors(made))
    assert ours.tensors().keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(ours.read(name), tensor)


@pytest.mark.parametrize("copies", [COPIES[1:], [*COPIES, COPIES[0]], [*COPIES[:3], Copy(View("alone"), View("padded"))]])
def test_a_region_that_is_missing_or_there_twice_is_a_mistake(copies: list[Copy]) -> None:
    with pytest.raises(AssertionError):
        Correspondence.of(OURS, copies, filled={"padded": 3})


def test_regions_of_different_shapes_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="both"):
        Correspondence.of({"both": (4, 3)}, [Copy(View("both"), View("a", (3, 4), stored=(3, 4)))])


def test_replicas_are_written_and_compared() -> None:
    copies = [Copy(View("norm"), View("rank 0")), Copy(View("norm"), View("rank 1"), replica=True)]
    correspondence = Correspondence.of({"norm": (3,)}, copies)
    norm = torch.tensor([1.0, float("nan"), -0.0])
    scattered = Scattered(correspondence, Tensors({"norm": norm}))
    theirs = {name: scattered.read(name).clone() for name in ("rank 0", "rank 1")}
    assert torch.equal(theirs["rank 1"].isnan(), norm.isnan())
    assert torch.equal(Gathered(correspondence, Tensors(theirs)).read("norm")[2:], norm[2:])
    theirs["rank 1"][0] = 1.0001
    with pytest.raises(CheckpointError, match="rank 1 must be the same on every rank"):
        Gathered(correspondence, Tensors(theirs)).read("norm")


def test_each_tensor_is_read_once_for_all_that_is_made_of_it_in_a_row() -> None:
    reads: list[str] = []

    class Counted(Tensors):
        def read(self, name: str) -> Tensor:
            reads.append(name)
            return super().read(name)

    theirs = Scattered(CORRESPONDENCE, Counted(TENSORS))
    for name in theirs.tensors():
        theirs.read(name)
    assert reads == ["both", "turned", "alone"]


def test_parts_of_one_tensor_are_read_together() -> None:
    reads: list[str] = []

    def read(name: str) -> Tensor:
        reads.append(name)
        return torch.ones(2)

    parts = [(View("x", None, (slice(i, i + 1),)), View("ab"[i % 2], None, (slice(0, 1),))) for i in range(4)]
    assert assemble((4,), torch.float32, parts, read).tolist() == [1, 1, 1, 1]
    assert reads == ["a", "b"]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.bfloat16], torch.bfloat16), ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float32, torch.bfloat16], torch.float32), ([torch.float64, torch.float32], torch.float64),
    ],
)  # fmt: skip
def test_the_widest_dtype_holds_all(dtypes: list[torch.dtype], expected: torch.dtype) -> None:
    assert widest(dtypes) == expected


def test_a_cast_reaches_what_is_written() -> None:
    cast: Callable[[str], Tensor] = Scattered(CORRESPONDENCE, Tensors(TENSORS), torch.bfloat16).read
    assert cast("a").dtype == cast("padded").dtype == torch.bfloat16
