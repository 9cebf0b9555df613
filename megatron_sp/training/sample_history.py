"""Digests of the last steps' samples, stored in the checkpoint: a resume detects data that have changed since."""

# The fingerprint of a data set is cheap: sizes, lengths, and a few probes of the tokens. It misses data that were
# replaced between the probes. So a checkpoint also holds the digest of every sample of its last steps
# (``data/dataset.py``). A resume reads these samples again, distributed over the ranks, and compares. Layout and
# batch size may differ, since samples are identified by their numbers.

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_sp.comm.groups import Group
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.data.dataset import Dataset, from_bytes, sample_digest, to_bytes
from megatron_sp.data.loader import Order, next_ids
from megatron_sp.utils.errors import CheckpointError, DataError
from megatron_sp.utils.strict_json import is_count

KEPT_STEPS = 100
MAX_SAMPLES = 1 << 17
"""Kept of these steps, at most: a megabyte of state.json, and some seconds of reading."""


class StepSamples(NamedTuple):
    """Samples of one step: how many were consumed before it, and their digests in order."""

    step: int
    consumed_samples: int
    digests: list[int]


class SampleHistory:
    """Samples of the last steps, the same on every rank."""

    def __init__(self, steps: Sequence[StepSamples] = ()) -> None:
        self._steps: deque[StepSamples] = deque(steps, KEPT_STEPS)

    def __len__(self) -> int:
        return sum(len(step.digests) for step in self._steps)

    def add(self, step: int, consumed_samples: int, digests: list[int]) -> None:
        self._steps.append(StepSamples(step, consumed_samples, digests[:MAX_SAMPLES]))
        while len(self) > MAX_SAMPLES:
            self._steps.popleft()

    def words(self) -> str:
        if not self._steps:
            return "no samples"
        return f"{len(self):,} samples of steps {self._steps[0].step} to {self._steps[-1].step}"

    def to_json(self) -> list[dict[str, Any]]:
        # digests of a step in base64, 8 characters each
        return [
            {**step._asdict(), "digests": base64.b64encode(to_bytes(step.digests)).decode("ascii")}
            for step in self._steps
        ]

    @classmethod
    def from_json(cls, value: Any) -> SampleHistory:
        """Raises CheckpointError."""
        if not isinstance(value, list) or len(value) > KEPT_STEPS:
            raise CheckpointError(f"state.json: samples must be a list of at most {KEPT_STEPS} steps")
        return cls([_step_of(entry) for entry in value])

    def first_difference(self, dataset: Dataset, order: Order, seed: int, group: Group | None) -> str | None:
        """Read all samples again and describe the first that differs. Collective over ``group``."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        own_difference: tuple[int, str] | None = None
        for place, (step, number, i, wanted) in enumerate(self._samples(len(dataset), order, seed)):
            if place % size == rank and (problem := _problem(dataset, i, wanted)) is not None:
                own_difference = place, f"sample {i} (number {number} of step {step}): {problem}"
                break
        differences = [difference for difference in gather_json(own_difference, group) if difference is not None]
        return None if not differences else str(min(differences)[1])

    def _samples(self, total: int, order: Order, seed: int) -> Iterator[tuple[int, int, int, int]]:
        for step, consumed, digests in self._steps:
            try:
                ids = next_ids(order, consumed, len(digests), total, seed).tolist()
            except DataError:  # the data set is shorter now: reading these samples reports it
                ids = list(range(consumed, consumed + len(digests)))
            yield from ((step, number, i, digest) for number, (i, digest) in enumerate(zip(ids, digests, strict=True)))


def _problem(dataset: Dataset, i: int, wanted: int) -> str | None:
    try:
        if sample_digest(dataset[i]) == wanted:
            return None
        return f"its tokens were others then; now they are read from {dataset.where(i)}"
    except IndexError:
        return f"the data set has only {len(dataset)} samples now"
    except DataError as error:
        return str(error)


def _step_of(entry: Any) -> StepSamples:
    if not isinstance(entry, dict) or not (is_count(entry.get("step")) and is_count(entry.get("consumed_samples"))):
        raise CheckpointError(
            "state.json: samples: a step must have its number, the samples consumed before it, and digests"
        )
    try:
        digests = from_bytes(base64.b64decode(entry["digests"], validate=True))
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise CheckpointError(f"state.json: samples: the digests of step {entry['step']} cannot be read") from None
    return StepSamples(entry["step"], entry["consumed_samples"], digests)
