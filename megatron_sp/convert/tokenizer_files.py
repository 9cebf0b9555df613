"""Files of a tokenizer: find them, copy them, and enter them in a configuration."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_sp.config.schema import DataConfig
from megatron_sp.data.tokenizers.files import CONFIG, name_files
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.files import fsync_dir
from megatron_sp.utils.strict_json import open_regular

NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
MAX_BYTES = 64 << 20
_SAYS_MORE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # they complete a file that is given alone


def find_files(path: Path) -> dict[str, Path]:
    """Return the files of a tokenizer in a folder, or a single file, by the names that they must have.

    Raises:
        CheckpointError: ``path`` is missing or not a tokenizer, or a file is a link or far too large.
    """
    if path.is_dir():
        found = {name: path / name for name in NAMES if (path / name).exists() or (path / name).is_symlink()}
    elif path.suffix in (".model", ".json", ".txt"):
        found = {{".model": "tokenizer.model", ".json": "tokenizer.json", ".txt": "vocab.txt"}[path.suffix]: path}
        found |= {name: path.with_name(name) for name in _SAYS_MORE if path.with_name(name).is_file()}
    else:
        raise CheckpointError(f"{path} is not a tokenizer: give its folder, or a tokenizer.json, a SentencePiece .model or a vocab.txt")
    _check(found)
    return found


def find_named(paths: list[Path]) -> dict[str, Path]:
    """Return the files of a tokenizer for the paths given to a training: a file, a folder, or GPT-2's two files with any names."""
    if len(paths) < 2:
        return find_files(paths[0]) if paths else {}
    found = {"merges.txt" if path.suffix == ".txt" else "vocab.json": path for path in paths}
    _check(found)
    return found


def _check(found: dict[str, Path]) -> None:
    for file in found.values():
        with open(open_regular(file), "rb"):
            if file.stat().st_size > MAX_BYTES:
                raise CheckpointError(f"{file} has {file.stat().st_size:,} bytes: more than the {MAX_BYTES:,} that such a file can have")


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Copy the files of a tokenizer into a folder. Raises OSError."""
    for name, path in files.items():
        with open(open_regular(path), "rb") as source, open(folder / name, "xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
    fsync_dir(folder)


def tell(data: DataConfig, files: dict[str, Path], folder: Path) -> None:
    """Enter the tokenizer whose files will be in ``folder`` in a configuration. Raises DataError: the tokenizer is not supported."""
    name_files(data, files, folder, files.get(CONFIG))
