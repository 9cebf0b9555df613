"""``megatron-sp schedule train``: train a local transformers model with a plan, or a preset.

torchrun --nproc-per-node 4 -m megatron_sp schedule train auto --model FOLDER --tp 2 --lr 1e-3 --train-iters 100 ...
"""

# torch is imported only by what trains, so that errors are reported at once, except for folders whose file only
# transformers can read.

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sp.config.schema import raise_all
from megatron_sp.tasks.external_shape import REQUIRED, contradictions, shape_of
from megatron_sp.utils.errors import EXIT_OK, ConfigError, ReportedError
from megatron_sp.utils.launch import is_first_rank

if TYPE_CHECKING:
    from megatron_sp.config.schema import Config
    from megatron_sp.schedule import Schedule

LONG = {"tp": "tensor-model-parallel-size", "sp": "sequence-parallel-size", "cp": "context-parallel-size"}
_CLASSES = {"next": ("gpt", "AutoModelForCausalLM"), "masked": ("bert", "AutoModelForMaskedLM")}


def run(args: argparse.Namespace) -> int:
    """Train by the remaining arguments, and exit the process."""
    family, auto_class = _CLASSES[args.task]
    words = ["--bert-no-binary-head"] if family == "bert" else []
    for axis, flag in LONG.items():
        if getattr(args, axis) is not None:
            words += [f"--{flag}", str(getattr(args, axis))]
    words += ["--model", args.model, *args.words]
    config, folder = parse_external(words, description="", family=family, prog="megatron-sp schedule train")
    assert folder is not None
    from megatron_sp.tasks.external_task import external_task
    from megatron_sp.tasks.external_weights import ModelFolder
    from megatron_sp.training.loop import pretrain

    writer, model = Writer(args.plan), ModelFolder(folder, auto_class)
    task = external_task("schedule_train", model, writer, causal=family == "gpt", prepare=writer.prepare)
    pretrain(config, task)
    return EXIT_OK


class Writer:
    """Writes the directives of a file, a MODULE:FUNCTION or a family's preset into a schedule."""

    def __init__(self, plan: str) -> None:
        self.plan = plan
        self._function: Callable[[Schedule, bool], object] | None = None

    def prepare(self, _: object = None) -> None:
        """Find the function or the file, on every rank. Raises ConfigError if it does not exist."""
        if re.fullmatch(r"[\w.]+:\w+", self.plan):
            module, _, function = self.plan.partition(":")
            if os.getcwd() not in sys.path:  # where the user's module is, as with `python -m`
                sys.path.insert(0, os.getcwd())
            try:
                self._function = getattr(importlib.import_module(module), function, None)
            except Exception as error:  # whatever a module of the user's may raise
                what = f"{type(error).__name__}: {error}"
                raise ConfigError(f"{self.plan}: {module} cannot be imported: {what}") from error
            if not callable(self._function):
                raise ConfigError(f"{self.plan}: {module} has no function {function}")
        elif self.plan != "auto" and not Path(self.plan).is_file():
            raise ConfigError(f"{self.plan} is not a file: give a plan.yaml, `auto`, or your own MODULE:FUNCTION")

    def __call__(self, s: Schedule, seq: bool) -> None:
        if self.plan == "auto":
            # a preset says how layers are split over tp, and a family without one may be trained on other axes
            if s.mesh.tp.size() == 1:
                return
            from megatron_sp.schedule import presets

            s.directives += presets.auto(s.model, s.mesh, seq=seq, ulysses=False, context=False).directives
        elif self._function is not None:
            self._function(s, seq)
        else:
            s.load(self.plan)
            has_seq = any(d.do == "sequence" for d in s.directives)
            if has_seq != seq and s.mesh.tp.size() > 1:
                way = "given: leave it out" if seq else "not given: add it"
                raise ConfigError(
                    f"{self.plan} {'cuts' if has_seq else 'does not cut'} activations along the sequence over tp, and"
                    f" --sequence-parallel is {way}, or take another plan"
                )
        if any(d.do == "zero" for d in s.directives):
            text = f"{self.plan} says zero, which is a flag of a training: take the line out, and give --zero-stage"
            raise ConfigError(text)


def parse_external(
    argv: Sequence[str] | None = None, *, description: str, family: str, prog: str | None = None
) -> tuple[Config, str | None]:
    """Parse the flags of a training and ``--model FOLDER``, whose config.json gives the shape, as ``parse_config``."""
    from megatron_sp.commands.pretrain import parse_config  # not for `megatron-sp --help`

    more = f"{description} Besides the flags below: --model FOLDER, a local config.json, and weights if they are there."
    prog = prog or os.path.basename(sys.argv[0])
    try:
        words, folder, rest = [], None, iter(sys.argv[1:] if argv is None else argv)
        for word in rest:
            name, equals, value = word.partition("=")
            if name != "--model":
                words.append(word)
            elif (folder := value if equals else next(rest, None)) is None:
                raise ConfigError("--model needs a folder with a config.json")
        shape: dict[str, int] = {} if folder is None else shape_of(folder)
        if folder is not None and not all(field in shape for field in REQUIRED):
            # the file does not name them as most do: transformers knows
            from megatron_sp.tasks.external_weights import whole_shape_of

            shape = whole_shape_of(folder)
        flags = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        config = parse_config([*flags, *words], prog=prog, description=more, family=family)
        if folder is not None:
            raise_all(list(contradictions(config, shape, folder)))
    except ReportedError as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    return config, folder
