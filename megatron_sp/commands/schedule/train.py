"""``megatron-sp schedule train``: train a local transformers model with a plan, or with the preset of its family.

torchrun --nproc-per-node 4 -m megatron_sp schedule train auto --model FOLDER --tp 2 --sp 2 --lr 1e-3 --train-iters 100
...
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_sp.commands.schedule.train_flags import LONG, parse_external
from megatron_sp.schedule import Schedule, presets
from megatron_sp.tasks.external_task import external_task
from megatron_sp.tasks.external_weights import ModelFolder
from megatron_sp.training.loop import pretrain
from megatron_sp.utils.errors import ConfigError

_CLASSES = {"next": ("gpt", "AutoModelForCausalLM"), "masked": ("bert", "AutoModelForMaskedLM")}


def run(args: argparse.Namespace) -> int:
    """Parse the remaining arguments as those of a training, and train; exits the process."""
    family, auto_class = _CLASSES[args.task]
    words = ["--bert-no-binary-head"] if family == "bert" else []
    for axis, flag in LONG.items():
        if getattr(args, axis) is not None:
            words += [f"--{flag}", str(getattr(args, axis))]
    config, folder = parse_external(
        [*words, "--model", args.model, *args.words], description="", family=family, prog="megatron-sp schedule train"
    )
    assert folder is not None
    writer = Writer(args.plan)
    task = external_task("schedule_train", ModelFolder(folder, auto_class), writer, causal=family == "gpt", prepare=writer.prepare)
    pretrain(config, task)
    return 0


class Writer:
    """Writer of a plan's directives into a schedule: from a file, a function, or the preset of the model's family.

    Args:
        plan: ``auto`` (the preset), MODULE:FUNCTION, or the path of a file.
    """

    def __init__(self, plan: str) -> None:
        self.plan = plan
        self._function: Callable[[Schedule, bool], object] | None = None

    def prepare(self, _: object = None) -> None:
        """Find the function or the file, on every rank. Raises ConfigError if it does not exist."""
        if re.fullmatch(r"[\w.]+:\w+", self.plan):
            self._function = _import(self.plan)
        elif self.plan != "auto" and not Path(self.plan).is_file():
            raise ConfigError(f"{self.plan} is not a file: give a plan.yaml, `auto`, or your own MODULE:FUNCTION")

    def __call__(self, s: Schedule, seq: bool) -> None:
        if self.plan == "auto":
            if s.mesh.tp.size() == 1:
                return  # a preset says how layers are split over tp, and a family without one may be trained on other axes
            s.directives += presets.auto(s.model, s.mesh, seq=seq, ulysses=False, context=False).directives
        elif self._function is not None:
            self._function(s, seq)
        else:
            s.load(self.plan)
            self._require_same(s, seq)
        if any(d.do == "zero" for d in s.directives):
            raise ConfigError(f"{self.plan} says zero, which is a flag of a training: take the line out, and give --zero-stage")

    def _require_same(self, s: Schedule, seq: bool) -> None:
        """Raise ConfigError if the plan and --sequence-parallel differ about sharding activations between the layers."""
        says = any(d.do == "sequence" for d in s.directives)
        if says != seq and s.mesh.tp.size() > 1:
            raise ConfigError(
                f"{self.plan} {'cuts' if says else 'does not cut'} activations along the sequence over tp, and --sequence-parallel is"
                f" {'not given: add it' if says else 'given: leave it out'}, or take another plan"
            )


def _import(name: str) -> Callable[[Schedule, bool], object]:
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:  # where the user's module is, as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever a module of the user's may raise
        raise ConfigError(f"{name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{name}: {module} has no function {function}")
    writer: Callable[[Schedule, bool], object] = found
    return writer
