"""A corpus of real text that every machine with Python already has: the language reference and the standard library's sources.

One document per help topic (``pydoc_data.topics``) and per ``.py`` file, ordered by the hash of each text: the order is
the same on every run and independent of the file system, and the last few percent are a fair sample for validation.
Excluded: tests, packages installed by pip, the source file of the topics, tables of data, very short files, duplicates,
files that are not UTF-8, and texts with U+2581, which SentencePiece uses for the space and could not decode back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_sp.utils.errors import ConfigError, DataError, DiskError
from megatron_sp.utils.output_file import write_output

WANTED_BYTES = 8_000_000
LEAST_BYTES = 1_000_000
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "ensurepip",
    "pydoc_data",
    "encodings",
}
_MIN_BYTES = 200  # an empty __init__.py teaches nothing


class Document(NamedTuple):
    """One text and its source, ``topics/NAME`` or ``lib/PATH``."""

    source: str
    text: str


def gather(stdlib: str | Path | None = None) -> list[Document]:
    """Return all documents, each text once, in an order fixed by their contents.

    Args:
        stdlib: folder of the sources (default: the standard library of this Python).
    """
    unique: dict[str, Document] = {}
    for document in [*_topics(), *_sources(Path(stdlib or sysconfig.get_paths()["stdlib"]))]:
        if (
            len(document.text.encode()) >= _MIN_BYTES
            and not _is_table(document.text)
            and "\u2581" not in document.text
            and "\0" not in document.text
        ):
            unique.setdefault(hashlib.sha256(document.text.encode()).hexdigest(), document)
    return [unique[digest] for digest in sorted(unique)]


def write_corpus(path: str | Path, stdlib: str | Path | None = None, max_bytes: int | None = None) -> tuple[int, int]:
    """Write the corpus as JSONL with the keys ``text`` and ``source``.

    Args:
        max_bytes: maximum bytes of text (UTF-8); the documents are mixed, so the first ones are a fair sample. None:
            all.
    Returns:
        Number of documents, and bytes of text (UTF-8).
    Raises:
        ConfigError: ``max_bytes`` is too small for a corpus.
        DataError: this Python comes with too little text.
        DiskError: the file cannot be written; an existing one is left unchanged.
    """
    if max_bytes is not None and max_bytes < LEAST_BYTES:
        raise ConfigError(
            f"--max-bytes ({max_bytes}) must be at least {LEAST_BYTES}: less text than that teaches nothing"
        )
    documents = gather(stdlib)
    num_bytes = sum(len(d.text.encode()) for d in documents)
    if num_bytes < LEAST_BYTES:
        raise DataError(
            f"this Python's standard library has only {num_bytes / 1e6:.2f} MB of source text, at least {LEAST_BYTES / 1e6:.0f} MB are"
            " needed: use a full installation, or bring your own text (JSONL) to megatron-sp preprocess"
        )
    if max_bytes is not None:
        documents, num_bytes = _first(documents, max_bytes)
    lines = [json.dumps({"text": d.text, "source": d.source}) + "\n" for d in documents]
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_output(path, "".join(lines))
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from error
    return len(documents), num_bytes


def _first(documents: list[Document], max_bytes: int) -> tuple[list[Document], int]:
    # the first documents whose text fits into ``max_bytes``, and its total bytes
    total = 0
    for count, document in enumerate(documents):
        size = len(document.text.encode())
        if total + size > max_bytes:
            return documents[:count], total
        total += size
    return documents, total


def _is_table(text: str) -> bool:
    # whether a source is data rather than prose and code; a small model would learn to count before it learns to write
    return sum(map(str.isdigit, text)) > 0.08 * len(text)


def _topics() -> Iterator[Document]:
    with contextlib.suppress(ImportError):  # a stripped installation
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield Document(f"topics/{name}", topics[name])


def _sources(stdlib: Path) -> Iterator[Document]:
    for folder, subfolders, files in os.walk(stdlib):
        subfolders[:] = sorted(
            name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        )
        for name in sorted(files):
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(
                "_sysconfigdata"
            ):  # that one holds this machine's build paths
                with contextlib.suppress(UnicodeDecodeError, OSError):
                    yield Document(
                        f"lib/{path.relative_to(stdlib).as_posix()}",
                        path.read_bytes().decode("utf-8").replace("\r\n", "\n"),
                    )
