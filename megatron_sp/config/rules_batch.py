"""Rules of batch sizes: constant, growing by --rampup-batch-size, or in the steps of --step-batch-size-schedule; those
of validation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

from megatron_sp.config.schema import BatchConfig, Config
from megatron_sp.utils.numbers import division

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"([0-9][0-9_]{0,30}(?:\.[0-9]{1,30})?)([KMBT]?)"
_ENTRY = re.compile(f"{_NUMBER}:{_NUMBER}", re.IGNORECASE)
_MOST_TOKENS, _LARGEST = 10**18, 2**31


def read_steps(entries: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return the (tokens, batch size) pairs of --step-batch-size-schedule, in the order of the tokens from which a size
    holds.

    Raises:
        ValueError: an entry is not TOKENS:SIZE, none begins at 0, or two begin at the same number of tokens.
    """
    steps = []
    for entry in " ".join(entries).replace(",", " ").split():
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ValueError(f"expected TOKENS:SIZE such as 2.4B:320, got '{entry[:40]}'")
        tokens = int(float(found[1]) * _SUFFIXES[found[2].upper()])  # as Megatron rounds
        size = float(found[3]) * _SUFFIXES[found[4].upper()]
        if tokens > _MOST_TOKENS or not 1 <= round(size) <= _LARGEST or abs(size - round(size)) > 1e-6:
            raise ValueError(
                f"'{entry[:40]}': expected at most {_MOST_TOKENS:.0e} tokens, and a whole number from 1 to {_LARGEST} as size"
            )
        steps.append((tokens, round(size)))
    steps.sort()
    if not steps or steps[0][0] != 0:
        raise ValueError("the first size is that of 0 tokens: begin with 0:SIZE")
    for (tokens, _), (then, _) in pairwise(steps):
        if tokens == then:
            raise ValueError(f"two sizes begin at {tokens:,} tokens: give one")
    return tuple(steps)


def steps_in_samples(batch: BatchConfig, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return the (samples, batch size) pairs of a valid --step-batch-size-schedule; none without the flag.

    A size holds from the first step that begins at or after its number of tokens, as full sequences count them, rounded
    down to whole samples, as in Megatron.
    """
    if batch.step_batch_size_schedule is None:
        return ()
    return tuple((tokens // seq_length, size) for tokens, size in read_steps(batch.step_batch_size_schedule))


def all_sizes(batch: BatchConfig) -> tuple[int, ...]:
    """Return the numbers of which every batch size of the run consists, of those that are given and can be read."""
    scheduled: tuple[int, ...] = ()
    with suppress(ValueError):
        scheduled = tuple(size for _, size in read_steps(batch.step_batch_size_schedule or ()))
    return tuple(
        filter(
            None,
            (batch.global_batch_size, batch.eval_global_batch_size, *(batch.rampup_batch_size or ())[:2], *scheduled),
        )
    )


def settle_batch_size(batch: BatchConfig) -> None:
    """Make the last size of --step-batch-size-schedule the global batch size, unless that is given."""
    if batch.step_batch_size_schedule is None or batch.global_batch_size is not None:
        return
    with suppress(ValueError):  # ``batch_violations`` says what is wrong
        batch.global_batch_size = read_steps(batch.step_batch_size_schedule)[-1][1]


def batch_violations(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each violated rule of the batch sizes."""
    batch = config.batch
    dp_size = max(1, config.parallel.dp_size(max(1, world_size)))
    unit = batch.micro_batch_size * dp_size
    unit_text = f"micro_batch_size * data-parallel size ({batch.micro_batch_size} * {dp_size} = {unit})"
    size, of_evaluation = batch.global_batch_size, batch.eval_global_batch_size
    if of_evaluation is not None and (text := _whole("eval_global_batch_size", of_evaluation, unit, unit_text)):
        yield text
    if batch.step_batch_size_schedule is not None:
        yield from _steps(config, unit, unit_text)
        return
    if size is not None and (text := _whole("global_batch_size", size, unit, unit_text)):
        yield text
    if batch.rampup_batch_size is not None:
        yield from _ramp(batch, unit, unit_text)


def _whole(name: str, size: int, unit: int, unit_text: str) -> str | None:
    if size % unit == 0:
        return None
    near = f"{size // unit * unit} or {(size // unit + 1) * unit}" if size > unit else str(unit)
    return f"{name} ({size}) must be a multiple of {unit_text}: {division(size, unit)}; use {near}"


def _steps(config: Config, unit: int, unit_text: str) -> Iterator[str]:
    batch = config.batch
    if batch.rampup_batch_size is not None:
        yield "--rampup-batch-size and --step-batch-size-schedule are two ways for a batch to grow: give one"
    try:
        steps = read_steps(batch.step_batch_size_schedule or ())
    except ValueError as error:
        yield f"step_batch_size_schedule: {error}"
        return
    last = steps[-1][1]
    if batch.global_batch_size != last:
        yield (
            f"global_batch_size ({batch.global_batch_size}) is not the last size of --step-batch-size-schedule"
            f" ({last}), which says all sizes: leave --global-batch-size out"
        )
    if length := config.model.seq_length:
        for (tokens, _), (then, _) in pairwise(steps):
            if tokens // length == then // length:
                yield (
                    f"step_batch_size_schedule: {tokens:,} and {then:,} tokens are the same sample of {length} tokens"
                    f" ({tokens // length}): its thresholds are in tokens; move one, or leave it out"
                )
    # on resume, others may be over
    due = steps[-1:] if config.checkpoint.load or config.checkpoint.auto_resume else steps
    yield from (text for _, each in due if (text := _uneven(each, unit, unit_text)))


def step_violation(batch: BatchConfig, seq_length: int, dp_size: int, consumed_samples: int) -> str | None:
    """Return what is wrong with the sizes of --step-batch-size-schedule from ``consumed_samples`` on; None: nothing."""
    steps, unit = steps_in_samples(batch, seq_length), batch.micro_batch_size * dp_size
    unit_text = f"micro_batch_size * data-parallel size ({batch.micro_batch_size} * {dp_size} = {unit})"
    ahead = [size for i, (_, size) in enumerate(steps) if i + 1 == len(steps) or steps[i + 1][0] > consumed_samples]
    return next((text for size in ahead if (text := _uneven(size, unit, unit_text))), None)


def _uneven(size: int, unit: int, unit_text: str) -> str | None:
    if size % unit == 0:
        return None
    return f"step_batch_size_schedule: {size} must be a multiple of {unit_text}, as every batch size is: {division(size, unit)}"


def _ramp(batch: BatchConfig, unit: int, unit_text: str) -> Iterator[str]:
    ramp, size = batch.rampup_batch_size or (), batch.global_batch_size
    if len(ramp) != 3:
        yield f"rampup_batch_size takes three integers, START INCREMENT SAMPLES, got {len(ramp)}: {' '.join(map(str, ramp))}"
        return
    start, step, samples = ramp
    if start < 1 or step < 1 or samples < 1:
        yield f"rampup_batch_size ({start} {step} {samples}): START, INCREMENT and SAMPLES must be at least 1"
    elif size is None:
        yield "rampup_batch_size needs --global-batch-size, the size to grow to"
    elif start >= size:
        yield f"rampup_batch_size starts at {start} and must start below global_batch_size ({size})"
    elif (size - start) % step:
        yield (
            f"rampup_batch_size must reach global_batch_size in whole increments: ({size} - {start}) / {step} ="
            f" {(size - start) / step:g}; change START or INCREMENT"
        )
    elif start % unit or step % unit:
        name, value = ("START", start) if start % unit else ("INCREMENT", step)
        yield f"rampup_batch_size: {name} ({value}) must be a multiple of {unit_text}, as every batch size is: {division(value, unit)}"
