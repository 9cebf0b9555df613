"""Folders of a checkpoint: what a link in one leads to is not part of it."""

from __future__ import annotations

from pathlib import Path

from megatron_sp.utils.errors import CheckpointError


def require_inside(folder: Path, root: Path) -> None:
    """Refuse a folder that is not in another one itself, but through a link; the outer one may be a link, for the user has named it.

    Raises:
        CheckpointError: with the link.
    """
    for part in (folder, *folder.parents):
        if part == root:
            return
        if part.is_symlink():
            raise CheckpointError(f"{part} is a symbolic link: a checkpoint consists of plain files and folders, copy the folder there")
