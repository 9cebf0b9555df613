"""Keys and values that slices of a row leave for those to come."""

from __future__ import annotations

import weakref

import torch

from megatron_sp.parallel.sequence_slices import KeysOfSlices, RowSlice


def test_keys_are_there_for_later_slices_and_gone_with_their_own_backward() -> None:
    keys, runs = KeysOfSlices(), ((0, 3), (3, 5), (5, 6))
    kv = [torch.full((stop - start, 2, 2, 4), float(number)) for number, (start, stop) in enumerate(runs)]
    of_layer = [RowSlice(number, runs, keys).of("layer 0") for number in range(3)]
    other = RowSlice(0, runs, keys).of("layer 1")
    assert other.add(kv[0] + 7)[0, 0, 0, 0] == 7
    for number, each in enumerate(of_layer):
        assert torch.equal(each.add(kv[number]), torch.cat(kv[: number + 1]))
    assert torch.equal(of_layer[1].add(kv[1] + 5), torch.cat(kv[:2])), "a recomputation changes nothing"
    gone = [weakref.ref(part) for part in kv]
    del kv
    for number in (2, 1, 0):
        grad = of_layer[number].gradient(torch.float64)
        assert grad.shape[0] == runs[number][1] and grad.dtype == torch.float64
        grad += 1
        mine = of_layer[number].take_gradient()
        assert mine.shape[0] == runs[number][1] - runs[number][0] and bool((mine == 3 - number).all()), (
            "its own pass and those of later ones"
        )
        assert [part() is None for part in gone] == [index >= number for index in range(3)]
        buffer = weakref.ref(grad._base if grad._base is not None else grad)
        del grad, mine
    assert buffer() is None and torch.equal(other.so_far(), torch.full((3, 2, 2, 4), 7.0))
