"""Section about a classifier: its accuracy on the validation examples, and its confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron_sp.report.html import Html, show, table, tag
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import Record, number
from megatron_sp.report.sections import Section, card, quiet, section, shortened

_SCORES = (("accuracy", "percent"), ("exact_match", "percent"), ("f1", "loss"), ("matthews", "loss"))


class _Confusion(NamedTuple):
    """Confusion matrix of a classifier.

    Attributes:
        labels: labels of the classes.
        counts: number of examples, indexed [true][predicted].
    """

    labels: list[str]
    counts: list[list[float]]


def classification_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section: scores of all runs with a classification, and details by class for the first run."""
    found = [(run, last) for run in runs for last in run.of_kind("classification")[-1:]]
    if not found:
        return None
    head = ["run", "step", "examples", "accuracy", "exact match", "F1", "Matthews correlation"]
    rows = [[run.name, f"{last['step']:,}", show(number(last.get("examples")), "count"), *_scores(last)] for run, last in found]
    confused = _confusion(found[0][1]) if found[0][0] is runs[0] else None
    return section(
        "classification", "Classification",
        card("Validation examples", table(head, rows, numeric=range(1, 7)), _majority_baseline(confused)),
        None if confused is None else _classes(confused),
        None if confused is None else _mistakes(confused),
    )  # fmt: skip


def _scores(record: Record) -> list[str]:
    return [show(number(record.get(name)), kind) for name, kind in _SCORES]


def _confusion(record: Record) -> _Confusion | None:
    """Return the confusion matrix of a record; None if it is missing (older versions, many classes) or inconsistent."""
    labels, rows = record.get("labels"), record.get("confusion")
    if not isinstance(labels, list) or not isinstance(rows, list) or len(rows) != len(labels):
        return None
    counts = [[number(value) for value in row] if isinstance(row, list) else [] for row in rows]
    if not labels or any(len(row) != len(labels) or not all(math.isfinite(v) and v >= 0 for v in row) for row in counts):
        return None
    return _Confusion([str(label) for label in labels], counts)


def _majority_baseline(confused: _Confusion | None) -> Html | None:
    if confused is None:
        return None
    sums = [sum(row) for row in confused.counts]
    label = confused.labels[sums.index(max(sums))]
    return quiet(f"Always predicting “{label}”, the most frequent class, would score {show(_share(max(sums), sum(sums)), 'percent')}.")


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _classes(confused: _Confusion) -> Html:
    rows = []
    for place, (label, row) in enumerate(zip(confused.labels, confused.counts, strict=True)):
        hits, true, said = row[place], sum(row), sum(each[place] for each in confused.counts)
        shares = (_share(hits, true), _share(hits, said))
        rows.append([label, show(true, "count"), *(show(s, "percent") for s in shares), show(_share(2 * hits, true + said), "loss")])
    few, more = shortened(rows, "classes")
    return card("Classes", table(["class", "examples", "recall", "precision", "F1"], few, numeric=range(1, 5)), more)


def _mistakes(confused: _Confusion) -> Html | None:
    labels = confused.labels
    pairs = [
        (count, labels[true], labels[said]) for true, row in enumerate(confused.counts) for said, count in enumerate(row) if said != true
    ]
    rows = [[true, said, show(count, "count")] for count, true, said in sorted(pairs, key=lambda pair: -pair[0]) if count > 0]
    if not rows:
        return None
    few, more = shortened(rows, "pairs of classes")
    return card("Most frequent confusions", table(["class", "predicted as", "examples"], few, numeric=[2]), more,
                tag("p", "predictions.tsv in the folder of the run lists every example.", class_="quiet"))  # fmt: skip
