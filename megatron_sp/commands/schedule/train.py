"""``megatron-sp schedule train``: train a local transformers model with a plan, or with the preset of its family.

    torchrun --nproc-per-node 4 -m megatron_sp schedule train auto --model FOLDER --tp 2 --lr 1e-3 --train-iters 100 ...

``parse_external`` is the command line of such a training: the flags of every training, and ``--model FOLDER``, whose
config.json gives the shape. torch is imported only by what trains, so that errors are reported at once, except for
folders whose file only transformers can read.
"""

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
from megatron_sp.utils.errors import ConfigError, ReportedError
from megatron_sp.utils.launch import is_first_rank

if TYPE_CHECKING:
    from megatron_sp.config.schema import Config
    from megatron_sp.schedule import Schedule

_CLASSES = {"next": ("gpt", "AutoModelForCausalLM"), "masked": ("bert", "AutoModelForMaskedLM")}
LONG = {"tp": "tensor-model-parallel-size", "sp": "sequence-parallel-size", "cp": "context-parallel-size"}


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
    from megatron_sp.tasks.external_task import external_task
    from megatron_sp.tasks.external_weights import ModelFolder
    from megatron_sp.training.loop import pretrain

    writer = Writer(args.plan)
    task = external_task(
        "schedule_train", ModelFolder(folder, auto_class), writer, causal=family == "gpt", prepare=writer.prepare
    )
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
            from megatron_sp.schedule import presets

            s.directives += presets.auto(s.model, s.mesh, seq=seq, ulysses=False, context=False).directives
        elif self._function is not None:
            self._function(s, seq)
        else:
            s.load(self.plan)
            self._require_same(s, seq)
        if any(d.do == "zero" for d in s.directives):
            raise ConfigError(
                f"{self.plan} says zero, which is a flag of a training: take the line out, and give --zero-stage"
            )

    def _require_same(self, s: Schedule, seq: bool) -> None:
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


def parse_external(
    argv: Sequence[str] | None = None, *, description: str, family: str, prog: str | None = None
) -> tuple[Config, str | None]:
    """Return (configuration, folder of the model or None), for an entry point; prints and exits like ``parse_config``.

    Args:
        family: "gpt" or "bert": the kind of data that the model is trained on.
    """
    from megatron_sp.commands.pretrain import parse_config  # not for `megatron-sp --help`

    prog = prog or os.path.basename(sys.argv[0])
    try:
        words, folder = take_folder(list(sys.argv[1:] if argv is None else argv))
        shape = {} if folder is None else _shape(folder)
    except ReportedError as error:
        raise SystemExit(_told(error)) from None
    more = f"{description} Besides the flags below: --model FOLDER, a local config.json, and weights if they are there."
    flags = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = parse_config([*flags, *words], prog=prog, description=more, family=family)
    if folder is not None:
        try:
            raise_all(list(contradictions(config, shape, folder)))
        except ReportedError as error:
            raise SystemExit(_told(error)) from None
    return config, folder


def _shape(folder: str) -> dict[str, int]:
    # the shape of a folder's model; transformers is imported only if the file does not name it as most do
    shape = shape_of(folder)
    if all(field in shape for field in REQUIRED):
        return shape
    from megatron_sp.tasks.external_weights import whole_shape_of

    return whole_shape_of(folder)


def _told(error: ReportedError) -> int:
    # print a message, on the first rank; return the exit code
    if is_first_rank():
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def take_folder(words: list[str]) -> tuple[list[str], str | None]:
    # the arguments without ``--model FOLDER``, and the folder
    rest, folder, at = [], None, 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        if name != "--model":
            rest.append(words[at])
        elif equals:
            folder = value
        elif at + 1 < len(words):
            at += 1
            folder = words[at]
        else:
            raise ConfigError("--model needs a folder with a config.json")
        at += 1
    return rest, folder
