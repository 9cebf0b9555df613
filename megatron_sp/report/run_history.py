"""Final curves of a run, and steps that resumes have undone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.utils.errors import DataError
from megatron_sp.utils.run_log import read_records

Record = dict[str, Any]
SMOOTHED_FROM = 150  # points from which a running mean is drawn over the single values


@dataclass
class History:
    """Final records of a run."""

    name: str
    # step -> record, in the order of steps; each with ``minutes`` of training so far
    train: dict[int, Record] = field(default_factory=dict)
    valid: dict[int, Record] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)  # steps at which a later process resumed
    undone: list[list[Record]] = field(default_factory=list)  # training records that each resume has undone, as written
    notes: list[str] = field(default_factory=list)  # on lines of the file that were omitted

    def x_of(self, record: Record, axis: str) -> float:
        """Return a record's position on an axis, or NaN."""
        if axis in ("time", "step"):
            return float(record["minutes" if axis == "time" else "step"])
        if "consumed_tokens" in record:
            return number(record["consumed_tokens"])
        # validation records have the step alone: take the training record's, or a share of the nearest one's
        step = record["step"]
        near = self.train.get(step) or min(self.train.values(), key=lambda r: abs(r["step"] - step), default=None)
        if near is None or not near["step"]:
            return 0.0 if not step else math.nan
        return number(near.get("consumed_tokens")) * step / near["step"]

    def series(self, kind: str, key: str, axis: str = "step") -> tuple[list[float], list[float]]:
        """Return x and y of one curve; NaN is a gap."""
        records = list((self.train if kind == "train" else self.valid).values())
        x = [float(r["step"]) for r in records] if axis == "step" else [self.x_of(r, axis) for r in records]
        return x, [value if type(value := r.get(key)) is float else number(value) for r in records]


def number(value: Any) -> float:
    """Convert a JSON value to a float, or NaN."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read_history(path: Path) -> History:
    """Read a run folder or its metrics.jsonl. Raises DataError: no curve yet."""
    records, notes = read_records(path)
    history = History((path if path.is_dir() else path.absolute().parent).resolve().name, notes=notes)
    replay(history, records)
    if not history.train and not history.valid:
        raise DataError(f"{path} holds no training or validation record yet ({len(records)} records of other kinds)")
    return history


def replay(history: History, records: Iterable[Record]) -> None:
    """Add records; set aside what a resume has undone."""
    minutes, previous = 0.0, None
    for record in records:
        kind, step, now = record["kind"], record["step"], number(record.get("time"))
        # the time between the end of one process and the start of the next is no training time
        if previous is not None and math.isfinite(now) and kind != "start":
            minutes += max(0.0, now - previous) / 60
        previous = now if math.isfinite(now) else previous
        record["minutes"] = minutes
        if kind == "start":
            if history.train or history.valid:
                history.resumed = [s for s in history.resumed if s < step] + [step]
            if undone := [r for s, r in history.train.items() if s > step]:
                history.undone.append(undone)
            history.train = {s: r for s, r in history.train.items() if s <= step}
            history.valid = {s: r for s, r in history.valid.items() if s <= step}
        elif kind in ("train", "valid"):
            curve = history.train if kind == "train" else history.valid
            curve.pop(step, None)
            curve[step] = record
    history.train, history.valid = dict(sorted(history.train.items())), dict(sorted(history.valid.items()))


def starts_after_interruptions(records: Iterable[Record]) -> list[Record]:
    """Return starts after interruptions."""
    starts: list[Record] = []
    end, reached = -math.inf, 0
    for record in records:
        if record["kind"] == "start":
            if reached < end:
                starts.append(record)
            planned = number(record.get("train_iters"))
            end, reached = planned if math.isfinite(planned) else math.inf, record["step"]
        else:
            end = math.inf if end == -math.inf else end  # the file begins without a start
            reached = max(reached, record["step"])
    return starts


def smoothed(values: Sequence[float], share: float = 0.01) -> list[float]:
    """Return means over ``share`` of the points to either side."""
    reach, count = max(1, round(share * len(values))), len(values)
    finite = [(v, 1) if math.isfinite(v) else (0.0, 0) for v in values]
    sums = list(itertools.accumulate((v for v, _ in finite), initial=0.0))
    counts = list(itertools.accumulate((n for _, n in finite), initial=0))
    out = []
    for index in range(count):
        side = min(reach, index, count - 1 - index)
        first, end = index - side, index + side + 1
        near = counts[end] - counts[first]
        out.append((sums[end] - sums[first]) / near if near else math.nan)
    return out


def repetitions(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Return the records of repeated training steps, by step."""
    seen: dict[int, list[Record]] = {}
    for record in records:
        if record.get("kind") == "train":
            seen.setdefault(record["step"], []).append(record)
    return {step: taken for step, taken in sorted(seen.items()) if len(taken) > 1}


def are_equal(taken: Iterable[Record]) -> bool:
    """Return whether records of a step are bit-identical."""
    names = ("loss_hex", "grad_norm_hex", "samples_sha")
    return len({tuple(str(record.get(name)) for name in names) for record in taken}) == 1


def accuracies(record: Record) -> list[str]:
    """Return the names of accuracies."""
    return [name for name in record if name.endswith("accuracy")]
