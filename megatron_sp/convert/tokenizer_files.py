"""The files of a tokenizer: found, copied, and what they mean for a training."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_sp.checkpoint.strict_json import open_regular
from megatron_sp.config import DataConfig
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.files import fsync_dir

NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
MAX_BYTES = 256 << 20


def find_files(path: Path) -> dict[str, Path]:
    """The files of a tokenizer in a folder, or a single one, by the names that they must have.

    Raises:
        CheckpointError: ``path`` is not there, or a file is a link or far too large.
    """
    if path.is_dir():
        found = {name: path / name for name in NAMES if (path / name).exists() or (path / name).is_symlink()}
    elif path.suffix in (".model", ".json", ".txt"):
        found = {{".model": "tokenizer.model", ".json": "tokenizer.json", ".txt": "vocab.txt"}[path.suffix]: path}
    else:
        raise CheckpointError(f"{path} is no tokenizer: give its folder, or a tokenizer.json, a SentencePiece .model or a vocab.txt")
    for file in found.values():
        with open(open_regular(file), "rb"):
            if file.stat().st_size > MAX_BYTES:
                raise CheckpointError(f"{file} has {file.stat().st_size:,} bytes: more than the {MAX_BYTES:,} that such a file can have")
    return found


def copy_files(files: dict[str, Path], folder: Path) -> None:
    """Raises OSError."""
    for name, path in files.items():
        with open(open_regular(path), "rb") as source, open(folder / name, "xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
    fsync_dir(folder)


def tell(data: DataConfig, files: dict[str, Path], folder: Path) -> None:
    """Make a configuration name the tokenizer whose files will lie in ``folder``."""
    if "tokenizer.model" in files:
        data.tokenizer_type, data.tokenizer_model = "SentencePieceTokenizer", str(folder / "tokenizer.model")
    elif "vocab.txt" in files:
        data.tokenizer_type, data.vocab_file = "BertWordPieceLowerCase", str(folder / "vocab.txt")
