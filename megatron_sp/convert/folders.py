"""Check of the folders of a checkpoint: symbolic links inside it are not followed."""

from __future__ import annotations

from pathlib import Path

from megatron_sp.utils.errors import CheckpointError


def require_inside(folder: Path, root: Path) -> None:
    """Refuse a folder that is in ``root`` only through a symbolic link; ``root`` itself may be a link, since the user named it.

    Raises:
        CheckpointError: a part of the path is a link; the message names it.
    """
    for part in (folder, *folder.parents):
        if part == root:
            return
        if part.is_symlink():
            raise CheckpointError(f"{part} is a symbolic link: a checkpoint consists of plain files and folders, copy the folder there")
