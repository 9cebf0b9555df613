"""``megatron-sp schedule train``: train a local transformers model as a plan, or its family's preset, says.

torchrun --nproc-per-node 4 -m megatron_sp.cli schedule train auto --model FOLDER --tp 2 --sp 2 --lr 1e-3 --train-iters 100 ...
"""

from __future__ import annotations

import argparse
import importlib
import re
from typing import Any

from megatron_sp.schedule import Schedule, presets
from megatron_sp.training.foreign_flags import LONG, parse_foreign
from megatron_sp.training.foreign_task import foreign_task
from megatron_sp.training.foreign_weights import from_folder
from megatron_sp.training.loop import pretrain
from megatron_sp.utils.errors import ConfigError

_CLASSES = {"next": ("gpt", "AutoModelForCausalLM"), "masked": ("bert", "AutoModelForMaskedLM")}


def run(args: argparse.Namespace) -> int:
    """Parse the rest of the words as a training's, and train; exits the process."""
    family, auto_class = _CLASSES[args.task]
    words = ["--bert-no-binary-head"] if family == "bert" else []
    for axis, flag in LONG.items():
        if getattr(args, axis) is not None:
            words += [f"--{flag}", str(getattr(args, axis))]
    config, folder = parse_foreign(
        [*words, "--model", args.model, *args.words], description="", family=family, prog="megatron-sp schedule train"
    )
    assert folder is not None
    pretrain(config, foreign_task("schedule_train", from_folder(folder, auto_class), writer_of(args.plan), causal=family == "gpt"))
    return 0


def writer_of(plan: str) -> Any:
    """What puts the lines of a plan, or of the preset, into a schedule."""

    def write(s: Schedule, seq: bool) -> None:
        if plan == "auto":
            s.directives += presets.auto(s.model, s.mesh, seq=seq, ulysses=False).directives
        elif re.fullmatch(r"[\w.]+:\w+", plan):
            module, _, function = plan.partition(":")
            getattr(importlib.import_module(module), function)(s, seq)
        else:
            s.load(plan)
        if any(d.do == "zero" for d in s.directives):
            raise ConfigError(f"{plan} says zero, which is a flag of a training: take the line out, and give --zero-stage")

    return write
