"""Rectangles, their tiling, and who writes which."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_sp.checkpoint.pieces import GlobalTensor, NamedPiece, Piece, Rect, describe, make_plan, tiling_problem
from megatron_sp.checkpoint.safetensors_file import cut_into_files


def cut_randomly(shape: tuple[int, ...], times: int, rng: random.Random) -> list[Rect]:
    """Cut a tensor into rectangles by cutting a random rectangle in two, again and again."""
    rects = [Rect((0,) * len(shape), shape)]
    for _ in range(times):
        rect = rects.pop(rng.randrange(len(rects)))
        dims = [dim for dim, size in enumerate(rect.sizes) if size > 1]
        if not dims:
            rects.append(rect)
            continue
        dim = rng.choice(dims)
        at = rng.randrange(1, rect.sizes[dim])
        for start, size in ((0, at), (at, rect.sizes[dim] - at)):
            offsets, sizes = list(rect.offsets), list(rect.sizes)
            offsets[dim] += start
            sizes[dim] = size
            rects.append(Rect(tuple(offsets), tuple(sizes)))
    return rects


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 8), (3, 4, 5), (1, 9, 1)])
def test_random_cuts_tile_and_any_change_does_not(shape: tuple[int, ...]) -> None:
    rng = random.Random(str(shape))
    for times in range(12):
        rects = cut_randomly(shape, times, rng)
        rng.shuffle(rects)
        assert tiling_problem(shape, rects) is None
        assert tiling_problem(shape, [*rects, Rect((0,) * len(shape), (0,) * len(shape))] if shape else rects) is None  # an empty piece
        assert tiling_problem(shape, rects[1:]) is not None  # one missing
        assert tiling_problem(shape, [*rects, rects[0]]) is not None  # one twice


@pytest.mark.parametrize(("shape", "rects", "text"), [
    ((2, 4), [Rect((0, 3), (2, 2))], "reaches outside"),
    ((2, 4), [Rect((-1, 0), (2, 2))], "reaches outside"),
    ((2, 4), [Rect((0,), (8,))], "1 sizes and 1 offsets, the tensor 2"),
    ((4, 4), [Rect((0, 0), (2, 4)), Rect((1, 0), (2, 4))], "piece [2, 4] at [1, 0] overlaps another"),  # and a hole of the same volume
    ((514,), [Rect((0,), (1,))] * 257 + [Rect((i,), (1,)) for i in range(257, 514)], "overlaps"),  # would wrap a byte
])  # fmt: skip
def test_rectangles_that_do_not_fit(shape: tuple[int, ...], rects: list[Rect], text: str) -> None:
    assert text in str(tiling_problem(shape, rects))


def test_a_hostile_number_of_cuts_costs_no_memory() -> None:
    n = 2000  # 2000**3 cells, and the volumes add up
    rects = [*(Rect((i, i, i), (1, 1, 1)) for i in range(n)), Rect((0, 0, 0), (n, n, n - 1)), Rect((0, 0, n - 1), (n - 1, n, 1))]
    assert tiling_problem((n, n, n), rects) == "its 2,002 pieces cut it in too many places to check"


@pytest.mark.parametrize(("name", "tensor", "text"), [
    ("w", GlobalTensor((4, 4), torch.float32, [Piece((0, 2), torch.zeros(4, 3))]),
     r"w \[4, 4\]: piece \[4, 3\] at \[0, 2\]: it reaches outside the tensor"),
    ("w", GlobalTensor((4,), torch.float32, [Piece((0,), torch.zeros(4).double())]), r"dtype is torch\.float64, the tensor.s torch\.float"),
    ("w", GlobalTensor.whole(torch.zeros(2, dtype=torch.complex64)), r"w is torch\.complex64"),
    ("__metadata__", GlobalTensor.whole(torch.zeros(2)), "__metadata__"),
])  # fmt: skip
def test_what_cannot_be_stored(name: str, tensor: GlobalTensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        describe({name: tensor})


def test_replicas_are_written_once_and_evenly() -> None:
    tensors = {f"w{i}": GlobalTensor.whole(torch.zeros(10 + i)) for i in range(40)}
    own = {"own": GlobalTensor((4, 100), torch.float32, [])}
    descriptions = []
    for rank in range(4):
        own["own"].pieces = [Piece((rank, 0), torch.zeros(1, 100))]
        descriptions.append(describe({**tensors, **own}))
    plan = make_plan(descriptions)
    total = sum(plan.rank_bytes)
    assert total == 4 * (400 + sum(10 + i for i in range(40)))
    assert max(plan.rank_bytes) < 1.1 * total / 4
    counts = [sum(item.name.startswith("w") for item in plan.items_of(rank, tensors)) for rank in range(4)]
    assert sum(counts) == 40
    assert all(plan.writer["own", Rect((rank, 0), (1, 100))] == rank for rank in range(4))


def test_replicas_make_up_for_what_ranks_must_write_anyway() -> None:
    copies = {"a": GlobalTensor.whole(torch.zeros(10)), "b": GlobalTensor.whole(torch.zeros(90)), "c": GlobalTensor.whole(torch.zeros(100))}
    own = {"z": GlobalTensor.whole(torch.zeros(200))}
    assert make_plan([describe({**copies, **own}), describe(copies)]).rank_bytes == [800, 800]


def test_a_piece_given_twice_by_one_rank_is_written_once() -> None:
    tensors = {"w": GlobalTensor((3,), torch.float32, [Piece((0,), torch.ones(3)), Piece((0,), torch.ones(3))])}
    assert len(make_plan([describe(tensors)]).items_of(0, tensors)) == 1


def test_ranks_that_disagree_or_leave_holes_cannot_save() -> None:
    half = {"w": GlobalTensor((4, 2), torch.float32, [Piece((0, 0), torch.zeros(2, 2))])}
    with pytest.raises(ValueError, match=r"w \[4, 2\] cannot be saved: its pieces hold 4 elements in total, the tensor has 8"):
        make_plan([describe(half), describe(half)])
    other = {"w": GlobalTensor.whole(torch.zeros(4, 3))}
    with pytest.raises(ValueError, match=r"w is F32 \[4, 3\] on rank 1, but F32 \[4, 2\]"):
        make_plan([describe(half), describe(other)])


def test_files_never_hold_a_name_twice_and_keep_their_size() -> None:
    items = [NamedPiece(f"w{i % 3}", (100,), Piece((i,), torch.zeros(1 + i % 7))) for i in range(60)]
    files = cut_into_files(items, max_bytes=64)
    assert sorted(id(item.piece.tensor) for file in files for item in file) == sorted(id(item.piece.tensor) for item in items)
    for file in files:
        assert len({item.name for item in file}) == len(file)
        assert sum(item.num_bytes for item in file) <= 64
    assert [len(file) for file in cut_into_files([NamedPiece("a", (99,), Piece((0,), torch.zeros(99)))] * 1, 64)] == [1]
