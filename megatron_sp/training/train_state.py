"""Training state in a checkpoint, and how it is restored; the samples of the last steps, to detect changed data."""

# Tensors are passed to the checkpoint by global name and shape: parameters under their own names, optimizer state as
# ``optimizer.{exp_avg,exp_avg_sq,master}.<name>``. Padding rows of the vocabulary exist in memory only. Everything
# else is JSON. There is no random state (``docs/design/001-frame.md``): it follows from seed and step.

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.comm.groups import Group
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import Config
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.data.dataset import Dataset, from_bytes, sample_digest, to_bytes
from megatron_sp.data.loader import Order, next_ids
from megatron_sp.optim.flat import FlatLayout, FlatUnit, Slot, refresh_params, within
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.training.report import versions
from megatron_sp.utils.errors import CheckpointError, DataError
from megatron_sp.utils.strict_json import is_count


@dataclass
class Progress:
    """Progress of a run, in steps, samples and tokens."""

    step: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0  # without those of skipped steps; determines learning rate and weight decay
    consumed_tokens: int = 0
    bad_steps: int = 0  # non-finite steps in a row
    skipped_steps: int = 0  # all non-finite steps so far

    def load(self, state: dict[str, Any], next_batch: Callable[[int], int]) -> None:
        """Load the counts of a checkpoint. Raises CheckpointError."""
        for key in vars(self):
            value = state.get(key, 0)
            if key == "scheduled_samples" and key not in state:
                # an older checkpoint, of when a step went by the samples at its own end: the next step goes on there,
                # so the curve has no kink; a converted one has no schedule of ours
                value = self.consumed_samples + (next_batch(self.consumed_samples) if is_ahead(state) else 0)
            if not isinstance(value, int) or value < 0:
                raise CheckpointError(f"state.json: {key} must be a whole number, found {value!r}")
            setattr(self, key, value)


class TrainState:
    """All state that a resume needs, as tensors and as JSON."""

    def __init__(
        self, model: nn.Module, units: list[FlatUnit], optimizer: FlatOptimizer | None, scaler: LossScaler
    ) -> None:
        self.model, self.units, self.optimizer, self.scaler = model, units, optimizer, scaler
        self.progress, self.samples = Progress(), SampleHistory()
        self.tokenizer: dict[str, Any] | None = None  # its record in a checkpoint
        self.evaluation_data: dict[str, str] = {}  # fingerprints
        specs = shard_specs(model)
        self.specs = {
            name: specs.get(name) or ShardSpec.whole(tuple(p.shape), 0, 1) for name, p in model.named_parameters()
        }

    def weights(self) -> dict[str, GlobalTensor]:
        tensors: dict[str, GlobalTensor] = {}
        for unit in self.units:
            tensors |= {slot.name: _of_slot(unit.layout, slot, unit.local_params) for slot in unit.slots}
            if unit.frozen is not None and unit.local_frozen is not None:
                tensors |= {slot.name: _of_slot(unit.frozen, slot, unit.local_frozen) for slot in unit.frozen.slots}
        for name, p in self.model.named_parameters():
            if name not in tensors:
                tensors[name] = GlobalTensor.of_shard(self.specs[name], p.detach())
        return tensors | {name: GlobalTensor.whole(buffer) for name, buffer in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        # the buffers that a checkpoint keeps: biases of experts, and those of a foreign model's state
        foreign = getattr(self.model, "saved_buffers", None)
        if foreign is not None:
            return foreign()
        return {name: buffer for name, buffer in self.model.named_buffers() if is_expert_bias(name)}

    def optimizer_tensors(self) -> dict[str, GlobalTensor]:
        """Return the optimizer's state, with fp32 master weights if parameters have 16 bits."""
        tensors: dict[str, GlobalTensor] = {}
        if self.optimizer is None:
            return tensors
        for unit, state in zip(self.units, self.optimizer.states, strict=True):
            kinds = {"master": unit.master if unit.is_16_bit else None}
            kinds |= {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
            for slot in unit.slots:
                for kind, flat in kinds.items():
                    if flat is not None:
                        tensors[f"optimizer.{kind}.{slot.name}"] = _of_slot(unit.layout, slot, flat)
        return tensors

    def to_load(self, stored: Collection[str], *, weights_only: bool) -> tuple[dict[str, GlobalTensor], set[str]]:
        """Return the tensors to load, and the names of those that may stay unread."""
        # A 16-bit run takes its master weights from the weights of an fp32 or fp64 checkpoint; such a run takes its
        # weights from the master weights of a 16-bit checkpoint, not from their rounding.
        wanted, unread = self.weights(), set[str]()
        if hasattr(self.model, "saved_buffers"):  # of a foreign model a checkpoint of an older version has none
            wanted = {name: t for name, t in wanted.items() if name in stored or name not in self._buffers()}
        if weights_only:
            return wanted, unread
        optimizer = self.optimizer_tensors()
        for name in list(wanted):
            master = f"optimizer.master.{name}"
            if master in optimizer and master not in stored:
                wanted[name] = optimizer.pop(master)
            elif master in stored and master not in optimizer:
                optimizer[master] = wanted.pop(name)
                unread.add(name)
        return {**wanted, **optimizer}, unread

    def to_json(
        self, config: Config, schedule: dict[str, Any], fingerprint: str, world: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            **vars(self.progress), "num_updates": self.optimizer.num_updates if self.optimizer is not None else 0,
            "has_optimizer": self.optimizer is not None and not config.checkpoint.no_save_optim,
            "loss_scaler": self.scaler.state(), "schedule": schedule, "data_fingerprint": fingerprint,
            "evaluation_data": self.evaluation_data, "samples": self.samples.to_json(), "tokenizer": self.tokenizer,
            "layout": world, "config": config.to_dict(), "foreign_model": getattr(self.model, "description", None),
            "versions": versions(),
        }  # fmt: skip

    def load_json(self, state: dict[str, Any], start: Progress, *, weights_only: bool) -> None:
        """Set the progress, and unless ``weights_only`` the update count and the loss scaler."""
        self.progress = replace(start)
        if self.optimizer is not None and not weights_only:
            self.optimizer.num_updates = int(state["num_updates"])
            self.scaler.load_state(state["loss_scaler"])

    def after_load(self, *, weights_only: bool) -> None:
        # loaded master weights take precedence over model weights
        for unit in self.units:
            if weights_only or not unit.is_16_bit:
                unit.refresh_master()
            else:
                refresh_params([unit])


def is_ahead(state: dict[str, Any]) -> bool:
    """Return whether a checkpoint's learning rate is one step ahead of Megatron's, as in older versions."""
    return "scheduled_samples" not in state and state.get("schedule") is not None


def _of_slot(layout: FlatLayout, slot: Slot, flat: Tensor) -> GlobalTensor:
    # the part of a parameter that is in ``flat``, a rank's range of a unit
    part = within(range(slot.start, slot.stop), layout.shard)
    return GlobalTensor.of_range(
        slot.spec, tuple(slot.shape), flat[part.start : part.stop], max(layout.shard.start - slot.start, 0)
    )


# The fingerprint of a data set is cheap: sizes, lengths, and a few probes of the tokens. It misses data that were
# replaced between the probes. So a checkpoint also holds the digest of every sample of its last steps
# (``data/dataset.py``). A resume reads these samples again, distributed over the ranks, and compares. Layout and
# batch size may differ, since samples are identified by their numbers.

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
        steps = []
        for entry in value:
            counts = [entry.get(name) for name in ("step", "consumed_samples")] if isinstance(entry, dict) else [None]
            if not all(is_count(count) for count in counts):
                raise CheckpointError(
                    "state.json: samples: a step must have its number, the samples consumed before it, and digests"
                )
            try:
                digests = from_bytes(base64.b64decode(entry["digests"], validate=True))
            except (KeyError, TypeError, ValueError, binascii.Error):
                why = f"the digests of step {entry['step']} cannot be read"
                raise CheckpointError(f"state.json: samples: {why}") from None
            steps.append(StepSamples(entry["step"], entry["consumed_samples"], digests))
        return cls(steps)

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
