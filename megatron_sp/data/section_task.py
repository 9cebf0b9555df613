"""Classification task for fine-tuning, made from the text that comes with Python: predict which part of it a passage is from.

Classes are the language reference and the packages of the standard library with the most text. A passage is a run of
whole lines of one document; passages do not overlap, and those that share a long line with another one (licences,
boilerplate) are excluded. All classes have the same number of passages, so the accuracy of guessing is 1 / (number of
classes).

Training and validation share documents, but no text. A split by document would be a different task: these packages have
a few dozen files, each on its own subject, and a bag-of-words classifier that is right for 95 % of the passages falls
to about 80 % on files that it has not seen. Both files are the same on every run with the same corpus: the choice
depends on a hash of the text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_sp.data.text_input import read_texts
from megatron_sp.utils.errors import DataError, DiskError
from megatron_sp.utils.output_file import write_output

LONGEST, SHORTEST = 480, 200  # characters: about 120 tokens, and enough to tell classes apart
LONG_LINE = 40  # characters


class SectionTask(NamedTuple):
    """Training and validation passages as (class, text), in an order that mixes the classes."""

    train: list[tuple[str, str]]
    valid: list[tuple[str, str]]


def section_of(source: str) -> str | None:
    # the class of a document of the corpus; None for modules that belong to no package
    parts = source.split("/")
    if parts[0] == "topics":
        return "topics"
    return parts[1] if len(parts) > 2 else None


def passages(text: str) -> Iterator[str]:
    """Yield consecutive runs of whole lines, as long as possible; those not of ``SHORTEST`` to ``LONGEST`` characters are skipped."""
    run = ""
    for line in [*text.splitlines(keepends=True), ""]:
        if run and (not line or len(run) + len(line) > LONGEST):
            if SHORTEST <= len(run) <= LONGEST:
                yield run.strip("\n")
            run = ""
        run += line


def make_task(documents: Iterable[tuple[str, str]], num_classes: int, num_train: int, num_valid: int) -> SectionTask:
    """Select the passages of a task.

    Args:
        num_classes: number of classes; those with the most passages are taken.
        num_train: maximum number of training passages per class; all classes get as many as the smallest one can
            provide.
    Raises:
        DataError: there are too few classes or passages.
    """
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
    """Write ``train.jsonl`` and ``valid.jsonl``, with the keys ``text`` and ``label``, from corpus.jsonl.

    Raises:
        DataError: the corpus cannot be read or is too small.
        DiskError: the files cannot be written.
    """
    read = read_texts((str(corpus),), input_format="jsonl", keys=("source", "text"))
    task = make_task(((source, text) for source, text in read if source), num_classes, num_train, num_valid)
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
