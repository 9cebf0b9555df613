"""Learning rates and weight decays against Megatron-core's own scheduler, to the bit.

Not part of the test run, for it needs megatron-core (``benchmarks/setup_peers.sh megatron``):

    PYTHONPATH=. .venv-peers/bin/python -W ignore tests/peers/check_megatron_schedule.py [FIRST [COUNT]]

Random flags FIRST to FIRST + COUNT (0 and 1000 if absent): all shapes of the decay and of the ramp, lengths in steps,
in samples and as a share; some steps skipped. Both go through the whole run and beyond its end. Prints what differs and
a summary; ends with 1 if something does.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("PYTHONWARNINGS", "ignore")  # Megatron misses its GPU libraries

import numpy as np
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_sp.config.schema import BatchConfig, OptimizerConfig
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.training.microbatches import BatchPlan


def flags(random: np.random.Generator) -> tuple[OptimizerConfig, BatchConfig]:
    """A run that both understand: Megatron wants a warm-up below the horizon, and no batch ramp-up where it counts steps."""
    iters, size = int(random.integers(3, 120)), int(random.choice([1, 4, 6, 16]))
    by_samples, shared = random.random() < 0.4, random.random() < 0.3
    unit, scale = ("samples", size) if by_samples else ("iters", 1)
    horizon = int(random.integers(2, iters + 20)) if random.random() < 0.5 else iters
    given: dict[str, Any] = {f"lr_decay_{unit}": horizon * scale} if horizon != iters else {}
    warmup = int(random.integers(0, horizon))
    given |= {"lr_warmup_fraction": float(random.random())} if shared else {f"lr_warmup_{unit}": warmup * scale}
    style = str(random.choice(["constant", "linear", "cosine", "inverse-square-root", "WSD"]))
    if style == "WSD":
        given |= {
            f"lr_wsd_decay_{unit}": int(random.integers(1, max(2, horizon - warmup))) * scale,
            "lr_wsd_decay_style": str(random.choice(["linear", "cosine", "exponential", "minus_sqrt"])),
        }
    if random.random() < 0.5:
        ramp = sorted(random.random(2).tolist())
        given |= {
            "start_weight_decay": ramp[0],
            "end_weight_decay": ramp[1],
            "weight_decay_incr_style": str(random.choice(["linear", "cosine"])),
        }
    peak = float(10 ** random.uniform(-5, 0))
    optimizer = OptimizerConfig(
        lr=peak, min_lr=peak * float(random.choice([0.0, 0.1, 0.37])), lr_warmup_init=peak * float(random.choice([0.0, 0.2])),
        weight_decay=0.1, lr_decay_style=style, **given,
    )  # fmt: skip
    length: dict[str, Any] = {"train_samples": iters * size + int(random.integers(0, size))} if by_samples else {"train_iters": iters}
    return optimizer, BatchConfig(micro_batch_size=1, global_batch_size=size, **length)


def theirs(o: OptimizerConfig, b: BatchConfig) -> OptimizerParamScheduler:
    """Megatron's, with the lengths that its training hands over: samples."""
    size = b.global_batch_size or 1
    length = b.train_samples or (b.train_iters or 0) * size
    horizon = o.lr_decay_samples or (o.lr_decay_iters or 0) * size or length
    warmup = o.lr_warmup_samples or o.lr_warmup_iters * size if o.lr_warmup_fraction is None else o.lr_warmup_fraction * horizon
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[{}]), init_lr=o.lr_warmup_init, max_lr=o.lr, min_lr=o.min_lr, lr_warmup_steps=warmup,
        lr_decay_steps=horizon, lr_decay_style=o.lr_decay_style, wd_incr_style=o.weight_decay_incr_style, wd_incr_steps=length,
        start_wd=o.weight_decay if o.start_weight_decay is None else o.start_weight_decay,
        end_wd=o.weight_decay if o.end_weight_decay is None else o.end_weight_decay,
        wsd_decay_steps=o.lr_wsd_decay_samples or (o.lr_wsd_decay_iters or 0) * size, lr_wsd_decay_style=o.lr_wsd_decay_style,
    )  # fmt: skip


def check(number: int) -> int:
    """Returns how many steps were compared; 0: something differs."""
    random = np.random.default_rng([number, 19])
    optimizer, batch = flags(random)
    peer, size = theirs(optimizer, batch), batch.global_batch_size or 1
    schedule = LRSchedule.from_config(optimizer, batch, BatchPlan.from_config(batch, 1).samples_after)
    samples = 0
    for step in range(1, 160):
        group = peer.optimizer.param_groups[0]
        if (schedule.lr(samples), schedule.weight_decay(samples)) != (group["lr"], group["weight_decay"]):
            mine = (schedule.lr(samples), schedule.weight_decay(samples))
            print(f"case {number}, step {step}: {mine} here, {group} in Megatron: {optimizer}, {batch}")
            return 0
        if random.random() < 0.9:  # else it is skipped
            peer.step(size)
            samples += size
    return 159


def main(first: int, count: int) -> int:
    steps = [check(number) for number in range(first, first + count)]
    equal = sum(n > 0 for n in steps)
    print(f"schedules {first} to {first + count - 1}: {equal} of {count} equal to the bit, {sum(steps):,} steps")
    return 0 if equal == count else 1


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in (sys.argv[1:] + ["0", "1000"][len(sys.argv) - 1 :]))))
