"""Text that every machine with Python already has, and a task made from it: tell which part a passage is from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_sp.data.text_input import read_texts
from megatron_sp.utils.errors import ConfigError, DataError, DiskError
from megatron_sp.utils.files import write_output

WANTED_BYTES = 8_000_000
LEAST_BYTES = 1_000_000
_SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "ensurepip", "pydoc_data",
    "encodings",
}  # fmt: skip
_MIN_BYTES = 200  # an empty __init__.py teaches nothing
LONGEST, SHORTEST = 480, 200  # characters of a passage: about 120 tokens, and enough to tell classes apart
LONG_LINE = 40  # characters


# The corpus: one document per help topic and per source file of the standard library, ordered by the hash of each text,
# so that the order is the same on every run, and the last few percent are a fair sample for validation.


class Document(NamedTuple):
    """One text and its source, ``topics/NAME`` or ``lib/PATH``."""

    source: str
    text: str


def gather(stdlib: str | Path | None = None) -> list[Document]:
    """Return all documents, each text once, in an order fixed by their contents."""
    unique: dict[str, Document] = {}
    for document in [*_topics(), *_sources(Path(stdlib or sysconfig.get_paths()["stdlib"]))]:
        text = document.text
        # Tables of data are left out, by which a small model would learn to count before it learns to write, and texts
        # with U+2581, which SentencePiece uses for the space and could not decode back.
        is_table = sum(map(str.isdigit, text)) > 0.08 * len(text)
        if len(text.encode()) >= _MIN_BYTES and not is_table and "\u2581" not in text and "\0" not in text:
            unique.setdefault(hashlib.sha256(text.encode()).hexdigest(), document)
    return [unique[digest] for digest in sorted(unique)]


def write_corpus(path: str | Path, stdlib: str | Path | None = None, max_bytes: int | None = None) -> tuple[int, int]:
    """Write the first ``max_bytes`` of the corpus as JSONL; return its documents and bytes of text.

    Raises:
        ConfigError: ``max_bytes`` is too small. DataError: this Python comes with too little text. DiskError.
    """
    if max_bytes is not None and max_bytes < LEAST_BYTES:
        least = f"must be at least {LEAST_BYTES}: less text than that teaches nothing"
        raise ConfigError(f"--max-bytes ({max_bytes}) {least}")
    documents = gather(stdlib)
    num_bytes = sum(len(d.text.encode()) for d in documents)
    if num_bytes < LEAST_BYTES:
        needed = f"{num_bytes / 1e6:.2f} MB of source text, at least {LEAST_BYTES / 1e6:.0f} MB are needed"
        way = "use a full installation, or bring your own text (JSONL) to megatron-sp preprocess"
        raise DataError(f"this Python's standard library has only {needed}: {way}")
    if max_bytes is not None and num_bytes > max_bytes:
        num_bytes = 0
        for count, document in enumerate(documents):
            size = len(document.text.encode())
            if num_bytes + size > max_bytes:
                documents = documents[:count]
                break
            num_bytes += size
    lines = [json.dumps({"text": d.text, "source": d.source}) + "\n" for d in documents]
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_output(path, "".join(lines))
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from error
    return len(documents), num_bytes


def _topics() -> Iterator[Document]:
    with contextlib.suppress(ImportError):  # a stripped installation
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield Document(f"topics/{name}", topics[name])


def _sources(stdlib: Path) -> Iterator[Document]:
    for folder, subfolders, files in os.walk(stdlib):
        kept = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        subfolders[:] = sorted(kept)
        for name in sorted(files):
            # _sysconfigdata holds this machine's build paths
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                with contextlib.suppress(UnicodeDecodeError, OSError):
                    text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
                    yield Document(f"lib/{path.relative_to(stdlib).as_posix()}", text)


class SectionTask(NamedTuple):
    """Passages as (class, text), in an order that mixes the classes."""

    train: list[tuple[str, str]]
    valid: list[tuple[str, str]]


def section_of(source: str) -> str | None:
    """Return the class of a document: "topics", or a package of the library."""
    parts = source.split("/")
    if parts[0] == "topics":
        return "topics"
    return parts[1] if len(parts) > 2 else None


def passages(text: str) -> Iterator[str]:
    """Yield consecutive runs of whole lines, of ``SHORTEST`` to ``LONGEST`` characters, as long as possible."""
    run = ""
    for line in [*text.splitlines(keepends=True), ""]:
        if run and (not line or len(run) + len(line) > LONGEST):
            if SHORTEST <= len(run) <= LONGEST:
                yield run.strip("\n")
            run = ""
        run += line


def make_task(documents: Iterable[tuple[str, str]], num_classes: int, num_train: int, num_valid: int) -> SectionTask:
    """Select passages from (source, text) pairs, equally many of each of the largest classes. Raises DataError."""
    # Training and validation share documents, but no text: these packages have a few dozen files, each on its own
    # subject, and a bag-of-words classifier that is right for 95 % of the passages falls to 80 % on files that it has
    # not seen. Passages that share a long line with another one (licences, boilerplate) are left out.
    labelled = [
        (section, passage)
        for source, text in documents
        if (section := section_of(source))
        for passage in passages(text)
    ]
    times = Counter(line for _, passage in labelled for line in _telling_lines(passage))
    of: dict[str, list[str]] = {}
    for section, passage in labelled:
        if all(times[line] == 1 for line in _telling_lines(passage)):
            of.setdefault(section, []).append(passage)
    largest = sorted(of, key=lambda section: (-len(of[section]), section))[:num_classes]
    enough = len(largest) == num_classes
    num_train = min(num_train, len(of[largest[-1]]) - num_valid) if enough else 0
    if num_train < 1:
        counts = ", ".join(f"{section} {len(of[section])}" for section in largest)
        raise DataError(
            f"{num_classes} classes with {num_valid} passages to validate on, and more to train on, are wanted, and"
            f" there are {counts or 'none'}: ask for fewer, or take the corpus of megatron-sp data corpus and a Python"
            " with its whole standard library"
        )
    train, valid = [], []
    for section in sorted(largest):
        chosen = sorted(of[section], key=_hash)
        valid += [(section, passage) for passage in chosen[:num_valid]]
        train += [(section, passage) for passage in chosen[num_valid : num_valid + num_train]]
    return SectionTask(*(sorted(half, key=lambda pair: _hash(pair[1])) for half in (train, valid)))


def write_task(corpus: str | Path, folder: str | Path, num_classes: int, num_train: int, num_valid: int) -> SectionTask:
    """Write ``train.jsonl`` and ``valid.jsonl`` from a corpus. Raises DataError, DiskError."""
    texts = read_texts((str(corpus),), input_format="jsonl", keys=("source", "text"))
    task = make_task(((source, text) for source, text in texts if source), num_classes, num_train, num_valid)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, half in task._asdict().items():
            lines = [json.dumps({"label": section, "text": passage}) + "\n" for section, passage in half]
            write_output(Path(folder, f"{name}.jsonl"), "".join(lines))
    except OSError as error:
        raise DiskError(f"{folder}: cannot be written: {error.strerror}") from error
    return task


def _telling_lines(passage: str) -> set[str]:
    # the long lines of a passage, normalised for spaces and case; if there are none, the whole passage
    lines = {" ".join(line.lower().split()) for line in passage.splitlines()}
    return {line for line in lines if len(line) >= LONG_LINE} or {" ".join(passage.lower().split())}


def _hash(passage: str) -> str:
    return hashlib.sha256(passage.encode("utf-8", "replace")).hexdigest()
