"""Labelled texts, one or two per example, from GLUE's files, any TSV with a header, or JSONL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_sp.data.dataset import Sample, SampleSet, hash_of
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, special_tokens
from megatron_sp.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class TextTable:
    """Names of the columns (keys in JSONL) of an example's parts, or column numbers from 0 if there is no header."""

    first: str | int = "text"
    second: str | int | None = None
    label: str | int = "label"
    group: str | int | None = None  # for exact match: a group is correct only if all its examples are
    header: bool = True  # True if the first line names the columns
    labels: tuple[str, ...] | None = None  # all labels, in order; None: those of the training file, sorted


# gluebenchmark.com, the files as downloaded. STS-B is not here: its labels are scores, and nothing of it is classified.
_ENTAILMENT = ("entailment", "not_entailment")
GLUE: dict[str, TextTable] = {
    "cola": TextTable(3, None, 1, header=False, labels=("0", "1")),
    "sst-2": TextTable("sentence", None, "label", labels=("0", "1")),
    "mrpc": TextTable("#1 String", "#2 String", "Quality", labels=("0", "1")),
    "qqp": TextTable("question1", "question2", "is_duplicate", labels=("0", "1")),
    "mnli": TextTable("sentence1", "sentence2", "gold_label", labels=("contradiction", "entailment", "neutral")),
    "qnli": TextTable("question", "sentence", "label", labels=_ENTAILMENT),
    "rte": TextTable("sentence1", "sentence2", "label", labels=_ENTAILMENT),
    "wnli": TextTable("sentence1", "sentence2", "label", labels=("0", "1")),
}
_LEAST_LENGTH = 8  # [CLS], two [SEP], and a few tokens of text


class Example(NamedTuple):
    """One labelled text, or pair of texts."""

    first: str
    second: str | None
    label: str
    group: str | None


class _BadLineError(DataError):
    """A line is not a valid example."""


_Cell = Callable[[str | int], str]  # the text under a column's name or number; raises _BadLineError


def read_examples(path: str | Path, table: TextTable, *, skip_bad_lines: bool = False) -> tuple[list[Example], int]:
    """Read all examples of a .tsv or .jsonl file; return them and the number of lines that were skipped as bad."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # read_text takes a carriage return for the end of a line
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from None
    rows = _json_rows(path, text) if path.suffix in (".jsonl", ".json") else _tsv_rows(path, text, table)
    examples, skipped = [], 0
    for number, cell in rows:
        try:
            second = None if table.second is None else cell(table.second)
            group = None if table.group is None else cell(table.group)
            # a label is written on one line of predictions.tsv, and JSON allows line ends
            label = " ".join(cell(table.label).split())
            if not label:
                raise _BadLineError(f"{path} line {number} has no label")
            if table.labels is not None and label not in table.labels:
                none = f"the label '{label}' is none of {', '.join(table.labels)}"
                raise _BadLineError(f"{path} line {number}: {none}")
            examples.append(Example(cell(table.first), second, label, group))
        except _BadLineError:
            if not skip_bad_lines:
                raise
            skipped += 1
    if not examples:
        raise DataError(f"{path} has no examples" + (f": {skipped} bad lines were left out" if skipped else ""))
    return examples, skipped


def _tsv_rows(path: Path, text: str, table: TextTable) -> Iterator[tuple[int, _Cell]]:
    # yield (line number, its cells); tabs separate columns and there is no quoting, as in GLUE's files
    lines, skip = text.split("\n"), int(table.header)
    head = lines[0].strip()
    names = [name.strip() for name in lines[0].rstrip("\r").split("\t")] if table.header else []
    wanted = [column for column in (table.first, table.second, table.label, table.group) if column is not None]
    for column in wanted:
        if isinstance(column, str) and column not in names:
            about = f"its header has {', '.join(names)}"
            if not head:
                about = "its first line is empty, and would be the header"
            elif head.startswith(("{", "[")):
                about = "its first line looks like JSON; files with one object on each line end in .jsonl"
            elif "\t" not in head and "," in head:
                about += "; it has no tab, and only tabs separate columns"
            raise DataError(f"{path} has no column '{column}': {about}")
    places = {column: column if isinstance(column, int) else names.index(column) for column in wanted}
    for number, line in enumerate(lines[skip:], 1 + skip):
        cells = line.rstrip("\r").split("\t")
        if cells == [""]:
            continue

        def cell(column: str | int, cells: list[str] = cells, number: int = number) -> str:
            counted = f"{path} line {number} has {len(cells)} column{'' if len(cells) == 1 else 's'}"
            if table.labels is None and len(cells) > len(names) > 0:  # else a part of the text would become a class
                inside = "tabs separate cells, inside quotes as well"
                raise _BadLineError(f"{counted}, and the header {len(names)}: {inside}")
            if places[column] >= len(cells):
                named = f"'{column}'" if isinstance(column, str) else "the one that is needed"
                raise _BadLineError(f"{counted}, and {named} is number {places[column] + 1}")
            return cells[places[column]]

        yield number, cell


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, _Cell]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        parsed: list[object] = []  # the line, once a cell of it was asked for

        def cell(key: str | int, number: int = number, line: str = line, parsed: list[object] = parsed) -> str:
            where = f"{path} line {number}"
            try:
                record = parsed[0] if parsed else json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _BadLineError(f"{where} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise _BadLineError(f"{where} is not a JSON object: each line is one, with a text and a label")
            parsed[:] = [record]
            value = record.get(str(key))
            if value is None or isinstance(value, (dict, list)) or value != value:  # pandas writes NaN for none
                keys = ", ".join(record) or "nothing"
                raise _BadLineError(f"{where} has no text or number under '{key}': it has {keys}")
            text = str(value).lower() if isinstance(value, bool) else str(value)  # as JSON spells it
            try:
                text.encode()
            except UnicodeEncodeError:
                half = "is not text: it has half of a surrogate pair"
                raise _BadLineError(f"{where}: the value of '{key}' {half}") from None
            return text

        yield number, cell


def labels_of(table: TextTable, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the class labels in the order of their ids. Raises DataError: there is only one class."""
    labels = table.labels or tuple(sorted({example.label for example in examples}))
    if len(labels) < 2:
        one = f"all training examples have one label, '{', '.join(labels)}'"
        raise DataError(f"{one}: classification takes at least two")
    return labels


def check_labels(labels: Sequence[str], examples: Sequence[Example]) -> None:
    """Check that the label of every example is one of ``labels``. Raises DataError."""
    unknown = sorted({example.label for example in examples} - set(labels))
    if unknown:
        known = f"they have {', '.join(labels)}"
        raise DataError(f"labels that the training examples do not have: {', '.join(unknown)}; {known}")


class ClassificationDataset(SampleSet):
    """Encoded examples, [CLS] first [SEP] second [SEP], padded, and with examples of weight 0 to a ``multiple_of``.

    A sample has ``tokens`` and ``types`` int64 [s], ``length`` and ``label`` int64 [], ``weight`` float32 [].

    Raises:
        ConfigError: the tokenizer lacks BERT's tokens, or ``seq_length`` leaves no room for text.
    """

    def __init__(
        self, examples: Sequence[Example], labels: Sequence[str], tokenizer: Tokenizer, seq_length: int, *,
        multiple_of: int = 1,
    ) -> None:  # fmt: skip
        self._special = special_tokens(tokenizer)
        if seq_length < _LEAST_LENGTH:
            least = f"--seq-length must be at least {_LEAST_LENGTH}"
            raise ConfigError(f"seq_length ({seq_length}) leaves no room for text: {least}")
        check_labels(labels, examples)
        self.examples, self._tokenizer, self._seq_length = list(examples), tokenizer, seq_length
        self._labels = [labels.index(example.label) for example in examples]
        self._encoded: dict[int, tuple[list[int], list[int]]] = {}  # the next epoch needs them again
        length = -(-len(self.examples) // multiple_of) * multiple_of
        fingerprint = hash_of(
            kind="classification-1", examples=[list(example) for example in self.examples], labels=self._labels,
            seq_length=seq_length, tokenizer=tokenizer.fingerprint(), length=length,
        )  # fmt: skip
        super().__init__(length, fingerprint)

    def _sample(self, i: int) -> Sample:
        real = i < len(self.examples)
        number = i if real else 0
        if number not in self._encoded:
            self._encoded[number] = self._encode(self.examples[number])
        tokens, types = self._encoded[number]
        room = self._seq_length - len(tokens)
        return {
            "tokens": np.array(tokens + [self._special.pad] * room, np.int64),
            "types": np.array(types + [0] * room, np.int64), "length": np.array(len(tokens), np.int64),
            "label": np.array(self._labels[number], np.int64), "weight": np.array(float(real), np.float32),
        }  # fmt: skip

    def _encode(self, example: Example) -> tuple[list[int], list[int]]:
        cls, sep = self._special.cls, self._special.sep
        first = self._tokenizer.encode(example.first)
        if example.second is None:
            first = first[: self._seq_length - 2]
            return [cls, *first, sep], [0] * (len(first) + 2)
        second = self._tokenizer.encode(example.second)
        room = self._seq_length - 3  # the longer of two texts is truncated
        keep_first = max(min(len(first), room - min(len(second), room // 2)), 0)
        first, second = first[:keep_first], second[: room - keep_first]
        return [cls, *first, sep, *second, sep], [0] * (len(first) + 2) + [1] * (len(second) + 1)

    def where(self, i: int) -> str:
        return f"example {i + 1} of the training examples"


def confusion(predicted: np.ndarray, true: np.ndarray, num_labels: int) -> np.ndarray:
    """Confusion matrix of counts, int64 [true, predicted]."""
    confusion = np.zeros((num_labels, num_labels), np.int64)
    np.add.at(confusion, (true, predicted), 1)
    return confusion


def scores(
    predicted: np.ndarray, true: np.ndarray, labels: Sequence[str], groups: Sequence[str | None] = ()
) -> dict[str, float]:
    """Compute accuracy, exact_match (of groups, or of examples), f1 and matthews of class ids, int [n]."""
    # f1: with two classes that of the second, as in GLUE, otherwise the mean over classes; matthews: the correlation
    # coefficient in Gorodkin's form for any number of classes (2004), 0 where undefined
    table = confusion(predicted, true, len(labels)).astype(np.float64)
    hits, true_counts, predicted_counts, n = np.diag(table), table.sum(1), table.sum(0), table.sum()
    both = true_counts + predicted_counts
    f1 = np.divide(2 * hits, both, out=np.zeros_like(hits), where=both > 0)
    spread = (n * n - (predicted_counts**2).sum()) * (n * n - (true_counts**2).sum())
    matthews = (hits.sum() * n - predicted_counts @ true_counts) / np.sqrt(spread) if spread > 0 else 0.0
    right: dict[object, bool] = {}
    for i, good in enumerate(predicted == true):
        key = groups[i] if i < len(groups) and groups[i] is not None else i
        right[key] = right.get(key, True) and bool(good)
    return {
        "accuracy": float(hits.sum() / n), "exact_match": sum(right.values()) / len(right),
        "f1": float(f1[1] if len(labels) == 2 else f1.mean()), "matthews": float(matthews),
    }  # fmt: skip
