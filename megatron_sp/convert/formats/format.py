"""What every format can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megatron_sp.convert.model import Model
from megatron_sp.convert.options import Options

Progress = Callable[[int], None]
"""Told how many bytes have been written since the last call."""


class Format(Protocol):
    """A way to keep a model in files."""

    @property
    def name(self) -> str:
        """On the command line."""
        ...

    @property
    def holds_optimizer(self) -> bool:
        """Whether the optimizer's state has a place in it."""
        ...

    def recognises(self, path: Path) -> bool:
        """Whether there is something of this format, judged by the names of files."""
        ...

    def read(self, path: Path, options: Options) -> Model:
        """Look at a checkpoint without reading its tensors.

        Raises:
            CheckpointError: what is missing, damaged or not known; nothing of it is believed unchecked.
            ConfigError: a flag is needed to tell what the files do not say, named.
        """
        ...

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        """Write a checkpoint.

        Args:
            path: a folder that is not there yet; whoever calls gives it its name when everything is in it.
        Raises:
            CheckpointError: the format cannot hold such a model, and why.
            DiskError: no space, no permission.
        """
        ...

    def size(self, model: Model, options: Options) -> int:
        """Bytes of tensors that ``write`` will write."""
        ...
