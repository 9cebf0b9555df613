"""Live bytes of tensors on the CPU: what ``torch.cuda.max_memory_allocated`` counts on a GPU.

A dispatch mode sees every operator, and counts each new storage once, from its first appearance in a result until the
last tensor on it is gone: views, ``out=`` and in-place results add nothing, tensors made inside autograd functions and
saved for backward are seen like all others. A storage that is emptied and filled again through its own ``resize_``, as
FSDP2 does, counts with the size that it has; of a DTensor the local part counts. Not seen: memory that a kernel takes
and gives back inside one operator, and what the collectives' backend keeps for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCount(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        live: bytes of all storages seen that still exist.
        peak: the largest ``live`` since ``reset_peak``.
        on_peak: called at each new peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.on_peak: Callable[[], None] | None = None
        self._seen: dict[int, int] = {}
        self._resizers: list[Any] = []  # the storage's own method, as it was outside

    def __enter__(self) -> StorageCount:
        self._resizers.append(torch.UntypedStorage.resize_)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resizers.pop()  # type: ignore[method-assign]

    @property
    def _resize(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        plain = self._resizers[-1]

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            plain(storage, size)
            if storage._cdata in self._seen:
                self._add_storage(storage)
            return storage

        return resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result

    def add(self, tensors: Iterable[Any]) -> None:
        """Count these as if an operator had made them."""
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._add_storage(tensor.untyped_storage())

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if self._seen.get(key) == size:
            return
        if key in self._seen:  # resized
            self.live += size - self._seen[key]
        else:
            self.live += size
            # torch keeps a storage's Python object as long as the storage itself, so this runs when the memory goes
            weakref.finalize(storage, self._gone, key).atexit = False
        self._seen[key] = size
        if self.live > self.peak:
            self.peak = self.live
            if self.on_peak is not None:
                self.on_peak()

    def reset_peak(self) -> None:
        self.peak = self.live

    def _gone(self, key: int) -> None:
        self.live -= self._seen.pop(key)
