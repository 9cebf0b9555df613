"""The interface of the checkpoint formats, and a check of their folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron_sp.convert.model import Model
from megatron_sp.convert.options import Options
from megatron_sp.utils.errors import CheckpointError

Progress = Callable[[int], None]
"""Told how many bytes have been written since the last call."""


class Writer(Protocol):
    """Interface of what ``command.convert`` writes with: ``Format``, or what has a model of its own."""

    def write(self, model: Any, path: Path, options: Options, progress: Progress) -> None:
        """Write a checkpoint into a folder that does not exist yet."""
        ...

    def size(self, model: Any, options: Options) -> int:
        """Return about how many bytes ``write`` writes."""
        ...


class Format(Protocol):
    """A checkpoint format: detects, reads and writes its files."""

    @property
    def name(self) -> str: ...

    @property
    def holds_optimizer(self) -> bool:
        """True if the format can store the optimizer's state."""
        ...

    def recognises(self, path: Path) -> bool:
        """Return whether a folder contains a checkpoint of this format, judged by its file names."""
        ...

    def read(self, path: Path, options: Options) -> Model:
        """Read the description of a checkpoint without its tensors; nothing in the files is trusted unchecked.

        Raises:
            CheckpointError: something is missing, damaged or not supported.
            ConfigError: a flag is needed for something that the files do not specify; the message names it.
        """
        ...

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None: ...

    def size(self, model: Model, options: Options) -> int:
        """Return the size in bytes of the tensors that ``write`` will write."""
        ...


def require_inside(folder: Path, root: Path) -> None:
    """Refuse a folder that is in ``root`` through a symbolic link; ``root`` may be one, since the user named it."""
    for part in (folder, *folder.parents):
        if part == root:
            return
        if part.is_symlink():
            raise CheckpointError(f"{part} is a symbolic link: a checkpoint consists of plain files and folders, copy"
                                  " the folder there")  # fmt: skip
