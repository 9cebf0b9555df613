"""The command ``megatron-sp``: training and all the tools around it. Each one is imported only when it is used.

Commands with a command line of their own are programs (``PROGRAMS``): modules of this folder with ``main(argv, prog)``,
which the scripts in tools/ also call. The other commands are parsed here.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_sp import __version__
from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.entry_point import code_of, run_program

Run = Callable[[argparse.Namespace], int]
PROGRAMS: dict[str, tuple[str, str]] = {  # name: (module, what it does)
    "pretrain": ("pretrain", "pretrain a GPT or a BERT; several processes: torchrun -m megatron_sp pretrain gpt FLAGS"),
    "preprocess": ("preprocess", "tokenize text into the .bin/.idx data sets that trainings read"),
    "tokenizer": ("tokenizer", "train a SentencePiece or WordPiece tokenizer on text"),
    "generate": ("generate", "continue text with a trained GPT"),
    "evaluate": (
        "evaluate",
        "report perplexity and bits per byte; also scores last-word prediction and multiple-choice tasks",
    ),
    "serve": ("serve", "serve a trained GPT over HTTP with OpenAI's completions API"),
    "finetune": ("finetune", "fine-tune a classifier on a pretrained BERT"),
    "fill-mask": ("fill_mask", "fill in masked words with a trained BERT"),
    "report": (
        "report",
        "write one page of HTML about a run: curves, time, interruptions, memory, exchanges, configuration",
    ),
    "plot": ("plot", "draw the curves of one or several runs"),
    "summarize": ("summarize", "summarize a run in a few lines"),
    "chaos": (
        "chaos",
        "stress a training on this machine: it is killed, stopped, starved of disk and damaged, and must end with the same weights",
    ),
}
DATA_PROGRAMS: dict[str, tuple[str, str]] = {
    "corpus": ("corpus", "write a JSONL corpus of the text that comes with Python"),
    "section-task": ("section_task", "make a classification task from such a corpus"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code of the command, or of the ReportedError whose message was printed."""
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
    # the program that the first words name, with the rest as its command line; None if they name none
    table, depth = (DATA_PROGRAMS, 2) if words[:1] == ["data"] else (PROGRAMS, 1)
    name = words[depth - 1] if len(words) >= depth else ""
    if name not in table:
        return None
    main: Callable[[list[str], str], int | None] = importlib.import_module(
        f"megatron_sp.commands.{table[name][0]}"
    ).main
    return lambda: main(words[depth:], " ".join(["megatron-sp", *words[:depth]]))


def _parser() -> CommandParser:
    from megatron_sp.commands import ckpt, data
    from megatron_sp.commands.schedule import options as schedule
    from megatron_sp.convert import arguments as convert
    from megatron_sp.planner import options as plan

    parser = CommandParser(
        prog="megatron-sp",
        description="Megatron-style pretraining in plain PyTorch, and the tools around it; each command has its own --help",
    )
    parser.add_argument("--version", action="version", version=f"megatron-sp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (_, text) in PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)

    def add(name: str, text: str, run: Run | None = None, **more: Any) -> CommandParser:
        # a command's line in the list is also the first sentence of its own --help
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **more)
        command.set_defaults(run=run)
        return command

    text = "check this machine: torch, devices, backends, optional packages, disk and memory, and suggest a fix for anything missing"
    add("doctor", text, _doctor).add_argument("--json", action="store_true", help="print the rows as JSON")
    data_sets = commands.add_parser("data", help="make, inspect, join and split data sets")
    data.add_actions(data_sets, {name: text for name, (_, text) in DATA_PROGRAMS.items()})
    presets = add(
        "presets",
        "list the published models whose shape --preset NAME takes, with their parameters and sources",
        _presets,
    )
    presets.add_argument("--json", action="store_true", help="print all flags of each as JSON")
    text = "choose a layout for given GPUs: predicted memory and speed of all layouts of a model, the fastest that fit first"
    planner = add("plan", text, _plan, usage=plan.USAGE, epilog=plan.EPILOG)
    plan.add_arguments(planner)
    planner.set_defaults(takes_words=True)
    text = "convert weights from and to Hugging Face, Megatron and Megatron-DeepSpeed; docs/how-to/convert.md has the formats"
    convert.add_arguments(
        add("convert", text, _convert, epilog=convert.EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    ckpt.add_actions(add("ckpt", "list, show, verify, compare, thin out and merge checkpoints"))
    text = "check, show, explain, verify and train external models (transformers', yours) by schedules: docs/how-to/schedule.md"
    schedule.add_actions(add("schedule", text))
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from megatron_sp.commands import doctor

    return doctor.run(as_json=args.json)


def _presets(args: argparse.Namespace) -> int:
    from megatron_sp.commands import preset_table

    print(preset_table.as_json() if args.json else preset_table.table())
    return 0


def _plan(args: argparse.Namespace) -> int:
    from megatron_sp.planner.command import run

    return run(args, args.words)


def _convert(args: argparse.Namespace) -> int:
    from megatron_sp.convert import command

    return command.run(args)
