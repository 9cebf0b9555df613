"""Checks of a resumed run: its learning-rate schedule and its training data must be those of the checkpoint.

Both would go wrong silently: the loss goes on falling while the rate jumps, or while samples repeat. The model's shape
is checked in ``training/checkpoint_model.py``, the tokenizer in ``training/run_tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_sp.comm.groups import Group
from megatron_sp.config.schema import Config, OptimizerConfig
from megatron_sp.data.build import Datasets
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.training.sample_history import SampleHistory
from megatron_sp.utils.errors import CheckpointError, ConfigError, DataError


def resume_schedule(stored: dict[str, Any], optimizer: OptimizerConfig, schedule: LRSchedule) -> LRSchedule:
    """Return the learning-rate schedule with which a run goes on.

    Args:
        stored: ``state.json`` of the checkpoint.
        optimizer: says which one counts if they differ.
        schedule: the one of the command line.
    Raises:
        ConfigError: the two differ, and no flag says which one counts.
        CheckpointError: the stored one is invalid.
    """
    old, new = stored.get("schedule"), schedule.state()
    if optimizer.use_checkpoint_opt_param_scheduler and isinstance(old, dict):
        try:
            return LRSchedule(**old)
        except TypeError:
            raise CheckpointError("state.json: the schedule of the checkpoint cannot be read; use --override-opt-param-scheduler") from None
    if optimizer.override_opt_param_scheduler:
        return schedule
    if isinstance(old, dict) and old.get("warmup") == round(new["warmup"]):  # older versions rounded --lr-warmup-fraction
        schedule = replace(schedule, warmup=old["warmup"])
        new = schedule.state()
    if old is not None and old != new:  # None: converted, it is not known
        old = old if isinstance(old, dict) else {}
        names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
        rows = "\n".join(f"  {name}: {old.get(name)} in the checkpoint, {new.get(name)} here" for name in names)
        raise ConfigError(
            f"the learning-rate schedule is not the checkpoint's (lengths in samples):\n{rows}\n"
            "add --override-opt-param-scheduler to use this one from here on, or --use-checkpoint-opt-param-scheduler to keep the old"
        )
    return schedule


def resume_samples(
    stored: dict[str, Any], datasets: Datasets, config: Config, group: Group, tell: Callable[[str], None]
) -> SampleHistory:  # fmt: skip
    """Check that the training data are those of the checkpoint, by reading the samples of its last steps again. Collective.

    Args:
        stored: ``state.json`` of the checkpoint.
        datasets: data sets of this run.
        config: configuration of this run.
        group: group whose ranks share the reading; must support CPU tensors.
        tell: called with notes for the user.
    Returns:
        History of those samples; empty if the checkpoint has none, or the data differ and --accept-data-change is
        given.
    Raises:
        DataError: the data differ, without --accept-data-change.
        CheckpointError: the stored history is invalid.
    """
    then = stored.get("evaluation_data")
    for name, now in datasets.evaluation_fingerprints.items():
        if isinstance(then, dict) and then.get(name, now) != now:
            what = name.replace("valid", "validation", 1)
            tell(f"note: the {what} data have changed, or are repeated differently: do not compare their losses with earlier ones")
    old, new = stored.get("data_fingerprint"), datasets.fingerprint
    if old is None or datasets.train is None:  # converted, it is not known; or there is nothing to train on
        return SampleHistory()
    if "samples" not in stored:
        tell(
            "the checkpoint was written by an older version and has no digests of its samples: only sizes and a few probes tell that"
            " the data are the same"
        )
    history = SampleHistory.from_json(stored.get("samples", []))
    found = history.first_difference(datasets.train, config.data.dataloader_type, config.batch.seed, group)
    if old == new and found is None:
        return history
    what = f"the {history.words()} were read again, and the first that differs is {found}" if found is not None else ""
    if found is not None and old == new and config.data.dataloader_type == "cyclic":
        what += (
            f" (if no file has changed, the order has: --dataloader-type cyclic draws it from the number of samples,"
            f" {len(datasets.train)} now, which for blends and synthetic data follows from the number of steps)"
        )
    if old != new:
        reason = "data files, split, sequence length, seed, tokenizer or number of epochs differ, so samples would repeat or be left out"
        what = f"(fingerprint {old}, now {new}) {reason}{'; ' * bool(what)}{what}"
    if not config.checkpoint.accept_data_change:
        raise DataError(
            f"the training data is not what the checkpoint was trained on: {what}. Restore it (`megatron-sp data verify PREFIX`"
            " compares files with their digests), or add --accept-data-change to go on with it as it is"
        )
    tell(f"--accept-data-change: the training data is not what the checkpoint was trained on: {what}")
    return SampleHistory()
