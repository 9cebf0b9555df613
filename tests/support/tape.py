"""Graphs without a GPU: operations go onto a tape, and a replay runs them again with the same memory.

What a capture runs leaves nothing behind, as on a GPU: what it has written to memory from outside is put back, and what it has
allocated is filled with NaN. So a number of the host that has got into a graph, a tensor that no replay writes, or an input that
is not static shows as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_NOTHING = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")


class Tape(TorchDispatchMode):
    """A captured region; ``replay`` runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # memory from outside, as it was
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            raise RuntimeError("the host reads a number in a captured region")
        for t in _written(func, args, kwargs):
            storage = t.untyped_storage()
            if storage._cdata not in self._own and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()
        out = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known]
        self._own |= {t.untyped_storage()._cdata: t.untyped_storage() for t in fresh}
        # a parameter may be bound to other memory afterwards; a graph keeps addresses
        args, kwargs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
        self._calls.append((func, args, kwargs, fresh))
        return out

    def finish(self) -> None:
        """End the capture."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        for own in self._own.values():
            own.fill_(255)

    def replay(self) -> None:
        """Run what was captured."""
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, fresh in self._calls:
                if func._schema.name in _NOTHING:
                    continue
                out = func(*args, **kwargs)
                known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
                leaves = tree_leaves(out)
                again = [t for t in leaves if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known]
                for old, new in zip(fresh, again, strict=True):
                    old.copy_(new)
                for work in leaves:
                    if hasattr(work, "wait"):
                        work.wait()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    if func._schema.name.startswith("c10d::"):
        yield from (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    for argument, value in [*zip(func._schema.arguments, args, strict=False), *((a, kwargs[a.name]) for a in func._schema.arguments
                            if a.name in kwargs)]:  # fmt: skip
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


class Tapes:
    """Maker of tapes (implements ``graphs.GraphMaker``)."""

    num_captured = num_bytes = 0

    def capture(self, record: Callable[[], None]) -> Tape:
        tape = Tape()
        Tapes.num_captured += 1
        with tape:
            record()
        tape.finish()
        return tape
