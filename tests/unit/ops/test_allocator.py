"""The arena: blocks do not overlap, come back when their last tensor is gone, and are joined again."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from megatron_sp.ops.allocator import Arena, blocks, empty
from megatron_sp.parallel.linear import row_linear

MIB, PAGE = 1 << 20, 4096


def place(block: np.ndarray) -> int:
    return int(block.__array_interface__["data"][0])


def test_lowest_address_first_and_holes_are_reused() -> None:
    arena = Arena(64 * MIB)
    blocks = [arena.take(n * MIB) for n in (4, 2, 8)]
    first, second, third = (place(b) for b in blocks if b is not None)
    assert (second, third) == (first + 4 * MIB, first + 6 * MIB)
    blocks[1] = None
    again = arena.take(2 * MIB - 7)
    assert again is not None and place(again) == second and again.size == 2 * MIB - 7, "a hole of the same size is taken"


def test_neighbours_are_joined_in_any_order_of_return() -> None:
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)):
        arena = Arena(16 * MIB)
        blocks: list[np.ndarray | None] = [arena.take(4 * MIB) for _ in range(4)]
        assert arena.take(PAGE) is None, "it is full"
        for i in order:
            blocks[i] = None
        whole = arena.take(16 * MIB)
        assert whole is not None, order


def test_random_traffic_never_overlaps() -> None:
    arena, draw = Arena(32 * MIB), random.Random(0)
    held: list[tuple[np.ndarray, int]] = []
    for mark in range(400):
        block = arena.take(draw.randrange(1, 2 * MIB))
        if block is not None:
            block[:] = mark % 251
            held.append((block, mark % 251))
        if block is None or draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        del block
    assert held and all((block == mark).all() for block, mark in held)


def test_a_tensor_lives_as_long_as_its_last_view() -> None:
    tensor = empty((512, 1024), dtype=torch.float32, device=torch.device("cpu"))
    address = tensor.data_ptr()
    view = tensor.fill_(3.0)[100:, 7]
    del tensor
    gc.collect()
    other = empty((512, 1024), dtype=torch.float32, device=torch.device("cpu")).fill_(5.0)
    assert other.data_ptr() != address and bool((view == 3.0).all())
    del view
    gc.collect()
    third = empty((512, 1024), dtype=torch.float32, device=torch.device("cpu"))
    assert third.data_ptr() == address, "the memory is used again"


def test_small_tensors_other_devices_and_no_room_are_left_to_torch() -> None:
    assert empty((3, 5), dtype=torch.bfloat16, device=torch.device("cpu")).shape == (3, 5)
    assert empty((4096, 4096), dtype=torch.float32, device=torch.device("meta")).is_meta
    assert empty((0, 7), dtype=torch.float64, device=torch.device("cpu")).numel() == 0
    assert Arena(0).take(MIB) is None
    assert Arena(1 << 60).take(MIB) is None, "an address space that is refused is done without"


@pytest.mark.parametrize("count, bytes_each", [(0, 5), (1, 5), (7, 1 << 30), (1000, 300_000), (100, 0)])
def test_blocks_cover_everything_once_in_order(count: int, bytes_each: int) -> None:
    covered = [i for part in blocks(count, bytes_each, torch.device("cpu")) for i in range(count)[part]]
    assert covered == list(range(count))


def test_blocks_are_about_a_megabyte_with_work_for_every_thread() -> None:
    threads = torch.get_num_threads()
    sizes = {part.stop - part.start for part in blocks(threads * 1000, 1 << 10, torch.device("cpu"))}
    assert max(sizes) <= 1024 and all(size % threads == 0 for size in sizes)
    assert next(blocks(threads * 3, 1 << 30, torch.device("cpu"))) == slice(0, threads)
    assert [*blocks(1000, 1 << 30, torch.device("cuda"))] == [slice(0, 1000)], "a GPU takes all at once"


def test_a_function_s_result_from_the_arena_may_be_written_in_place() -> None:
    """As rotary embedding does with a QKV projection of more than a megabyte."""
    x, weight = torch.randn(600, 64, requires_grad=True), torch.randn(1024, 64)
    y = row_linear(x, weight)
    assert y.numel() * 4 > MIB
    y.mul_(2).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * weight.sum(0).expand(600, 64), rtol=1e-4, atol=1e-4)
