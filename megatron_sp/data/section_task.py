"""A task to fine-tune a classifier on, from the text that comes with Python: which part of it does a passage come from?

Classes are the language reference and the packages of the standard library with the most text. A passage is a run of whole lines of one
document; passages do not overlap, and those that have a line of some length in common with another (licences, boilerplate) are left out.
Every class has the same number, so guessing is right once in as many times as there are classes.

Training and validation share documents, but no text. Parted by document the task would be about something else: these packages have a few
dozen files, each about a matter of its own, and a count of words that is right for 95 % of the passages falls to about 80 % when it has
seen nothing of their files. Both files are the same on every run with the same corpus: what is chosen hangs on a hash of the text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_sp.data.tokenizers.train import texts_of_jsonl
from megatron_sp.utils.errors import DataError, DiskError
from megatron_sp.utils.output_file import write_output

LONGEST, SHORTEST = 480, 200  # characters: about 120 tokens, and enough to tell
LONG_LINE = 40  # characters


class SectionTask(NamedTuple):
    """The passages of each half as (class, text), in an order that mixes the classes."""

    train: list[tuple[str, str]]
    valid: list[tuple[str, str]]


def section_of(source: str) -> str | None:
    """The class of a document of the corpus; None for modules that belong to no package."""
    parts = source.split("/")
    if parts[0] == "topics":
        return "topics"
    return parts[1] if len(parts) > 2 else None


def passages(text: str) -> Iterator[str]:
    """Runs of whole lines, one behind the other, as long as they may be; short ones and what has no words are left out."""
    run = ""
    for line in [*text.splitlines(keepends=True), ""]:
        if run and (not line or len(run) + len(line) > LONGEST):
            if SHORTEST <= len(run) <= LONGEST:
                yield run.strip("\n")
            run = ""
        run += line


def make_task(documents: Iterable[tuple[str, str]], num_classes: int, num_train: int, num_valid: int) -> SectionTask:
    """Choose passages.

    Args:
        documents: (source, text), as in the corpus.
        num_classes: those with the most passages are taken.
        num_train: passages of each class, at most: all have as many as the smallest can give.
        num_valid: passages of each class.
    Raises:
        DataError: there are not so many.
    """
    found = [(section, passage) for source, text in documents if (section := section_of(source)) for passage in passages(text)]
    times = Counter(line for _, passage in found for line in _telling_lines(passage))
    of: dict[str, list[str]] = {}
    for section, passage in found:
        if all(times[line] == 1 for line in _telling_lines(passage)):
            of.setdefault(section, []).append(passage)
    largest = sorted(of, key=lambda section: (-len(of[section]), section))[:num_classes]
    enough = len(largest) == num_classes
    num_train = min(num_train, len(of[largest[-1]]) - num_valid) if enough else 0
    if num_train < 1:
        have = ", ".join(f"{section} {len(of[section])}" for section in largest)
        raise DataError(
            f"{num_classes} classes with {num_valid} passages to validate on, and more to train on, are wanted, and there are"
            f" {have or 'none'}: ask for fewer, or take the corpus of megatron-sp data corpus and a Python with its whole standard library"
        )
    train, valid = [], []
    for section in sorted(largest):
        chosen = sorted(of[section], key=_hash)
        valid += [(section, passage) for passage in chosen[:num_valid]]
        train += [(section, passage) for passage in chosen[num_valid : num_valid + num_train]]
    return SectionTask(*(sorted(half, key=lambda pair: _hash(pair[1])) for half in (train, valid)))


def write_task(corpus: str | Path, folder: str | Path, num_classes: int, num_train: int, num_valid: int) -> SectionTask:
    """From corpus.jsonl to ``train.jsonl`` and ``valid.jsonl`` with the keys ``text`` and ``label``.

    Raises:
        DataError: the corpus cannot be read, or has too little.
        DiskError: the files cannot be written.
    """
    documents = zip(texts_of_jsonl(str(corpus), "source"), texts_of_jsonl(str(corpus), "text"), strict=True)
    task = make_task(documents, num_classes, num_train, num_valid)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, half in task._asdict().items():
            lines = [json.dumps({"label": section, "text": passage}) + "\n" for section, passage in half]
            write_output(Path(folder, f"{name}.jsonl"), "".join(lines))
    except OSError as error:
        raise DiskError(f"{folder}: cannot be written: {error.strerror}") from error
    return task


def _telling_lines(passage: str) -> set[str]:
    """Lines that are long enough to tell where they are from, but for spaces and case; of a passage without them, all of it."""
    lines = {" ".join(line.lower().split()) for line in passage.splitlines()}
    return {line for line in lines if len(line) >= LONG_LINE} or {" ".join(passage.lower().split())}


def _hash(passage: str) -> str:
    return hashlib.sha256(passage.encode("utf-8", "replace")).hexdigest()
