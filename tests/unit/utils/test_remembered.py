"""Results of methods are computed once for each object and arguments, and go with the object."""

from __future__ import annotations

import gc
import weakref

from megatron_sp.utils.remembered import remembered


class Adder:
    def __init__(self, start: int) -> None:
        self.start, self.calls = start, 0

    @remembered
    def sum(self, x: int, *, twice: bool = False) -> list[int]:
        """A sum."""
        self.calls += 1
        return [self.start + x * (1 + twice)]


def test_once_for_each_object_and_arguments() -> None:
    one, other = Adder(1), Adder(10)
    assert one.sum(2) is one.sum(2) and one.sum(2) == [3] and other.sum(2) == [12]
    assert one.sum(2, twice=True) == [5] and one.sum(2, twice=False) == [3]
    assert (one.calls, other.calls) == (3, 1)
    assert Adder.sum.__doc__ == "A sum."


def test_it_does_not_keep_the_object() -> None:
    one = Adder(1)
    one.sum(2)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
