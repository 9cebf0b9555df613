"""The command ``megatron-sp``: training and all the tools around it. Each one is imported only when it is used.

Commands with a command line of their own are programs (``PROGRAMS``): modules of this folder with ``main(argv, prog)``,
which the scripts in tools/ also call. The other commands are parsed here.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from megatron_sp import __version__
from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.program import code_of, run_program

Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"
PROGRAMS: dict[str, tuple[str, str]] = {  # name: (module, what it does)
    "pretrain": ("pretrain", "pretrain a GPT or a BERT; several processes: torchrun -m megatron_sp pretrain gpt FLAGS"),
    "preprocess": ("preprocess", "tokenize text into the .bin/.idx data sets that trainings read"),
    "tokenizer": ("tokenizer", "train a SentencePiece or WordPiece tokenizer on text"),
    "generate": ("generate", "continue text with a trained GPT"),
    "evaluate": ("evaluate", "report perplexity and bits per byte; also scores last-word prediction and multiple-choice tasks"),
    "serve": ("serve", "serve a trained GPT over HTTP with OpenAI's completions API"),
    "finetune": ("finetune", "fine-tune a classifier on a pretrained BERT"),
    "fill-mask": ("fill_mask", "fill in masked words with a trained BERT"),
    "report": ("report", "write one page of HTML about a run: curves, time, interruptions, memory, exchanges, configuration"),
    "plot": ("plot", "draw the curves of one or several runs"),
    "summarize": ("summarize", "summarize a run in a few lines"),
    "chaos": ("chaos", "stress a training on this machine: killed, stopped, starved of disk and damaged it must end with the same weights"),
}
DATA_PROGRAMS: dict[str, tuple[str, str]] = {
    "corpus": ("corpus", "write a JSONL corpus of the text that comes with Python"),
    "section-task": ("section_task", "make a classification task from such a corpus"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code of the command, or of the ReportedError whose message was printed.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    program = _find_program(given)
    if program is not None:
        return code_of(program)
    parser = _parser()
    args, words = parser.parse_known_args(given)
    if words and not getattr(args, "takes_words", False):  # those that do take a training's flags, too
        parser.refuse(words, given)
    args.words = words
    return code_of(lambda: args.run(args))


def program() -> NoReturn:
    """Console entry point: run ``main`` and exit the process."""
    run_program(main)


def _find_program(words: list[str]) -> Callable[[], int | None] | None:
    """Return the program that the first words name, with the rest as its command line; None if they name none."""
    table, depth = (DATA_PROGRAMS, 2) if words[:1] == ["data"] else (PROGRAMS, 1)
    name = words[depth - 1] if len(words) >= depth else ""
    if name not in table:
        return None
    main: Callable[[list[str], str], int | None] = importlib.import_module(f"megatron_sp.commands.{table[name][0]}").main
    return lambda: main(words[depth:], " ".join(["megatron-sp", *words[:depth]]))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="megatron-sp",
        description="Megatron-style pretraining in plain PyTorch, and the tools around it; each command has its own --help",
    )
    parser.add_argument("--version", action="version", version=f"megatron-sp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (_, text) in PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)
    for add in (_add_doctor, _add_data, _add_presets, _add_plan, _add_convert, _add_ckpt, _add_schedule):
        add(commands)
    return parser


def _add_command(commands: Commands, name: str, text: str, **more: Any) -> argparse.ArgumentParser:
    """Add a command; its line in the list of commands is also the first sentence of its own --help."""
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **more)


def _add_doctor(commands: Commands) -> None:
    text = "check this machine: torch, devices, backends, optional packages, disk and memory, and suggest a fix for anything missing"
    doctor = _add_command(commands, "doctor", text)
    doctor.add_argument("--json", action="store_true", help="print the rows as JSON")
    doctor.set_defaults(run=_doctor)


def _add_data(commands: Commands) -> None:
    from megatron_sp.commands.data import add_actions

    data = commands.add_parser("data", help="make, inspect, join and split data sets")
    add_actions(data, {name: text for name, (_, text) in DATA_PROGRAMS.items()})


def _add_presets(commands: Commands) -> None:
    text = "list the published models whose shape --preset NAME takes, with their parameters and sources"
    presets = _add_command(commands, "presets", text)
    presets.add_argument("--json", action="store_true", help="print all flags of each as JSON")
    presets.set_defaults(run=_presets)


def _add_plan(commands: Commands) -> None:
    text = "choose a layout for given GPUs: predicted memory and speed of all layouts of a model, the fastest that fit first"
    from megatron_sp.planner import options

    plan = _add_command(commands, "plan", text, usage=options.USAGE, epilog=options.EPILOG)
    options.add_arguments(plan)
    plan.set_defaults(run=_plan, takes_words=True)


def _add_convert(commands: Commands) -> None:
    text = "convert weights from and to Hugging Face, Megatron and Megatron-DeepSpeed; docs/how-to/convert.md has the formats"
    from megatron_sp.convert import arguments

    parser = _add_command(commands, "convert", text, epilog=arguments.EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_arguments(parser)
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    from megatron_sp.convert import command

    return command.run(args)


def _add_ckpt(commands: Commands) -> None:
    from megatron_sp.commands.ckpt.command import add_actions

    text = "list, show, verify, compare, thin out and merge checkpoints"
    add_actions(_add_command(commands, "ckpt", text))


def _add_schedule(commands: Commands) -> None:
    from megatron_sp.commands.schedule.options import add_actions

    text = "check, show, explain, verify and train external models (transformers', yours) by schedules: docs/how-to/schedule.md"
    add_actions(_add_command(commands, "schedule", text))


def _plan(args: argparse.Namespace) -> int:
    from megatron_sp.planner.command import run

    return run(args, args.words)


def _doctor(args: argparse.Namespace) -> int:
    from megatron_sp.commands import doctor

    return doctor.run(as_json=args.json)


def _presets(args: argparse.Namespace) -> int:
    from megatron_sp.commands import preset_table

    print(preset_table.as_json() if args.json else preset_table.table())
    return 0
