"""The command ``megatron-sp``: training and all the tools around it.

Commands that are scripts in tools/, too, are programs: modules of this folder, named like the command, whose
``main(argv, prog)`` parses a command line of its own. The other commands are parsed here. Each is imported only when it
is used, and none of them imports torch before its command line is known to be right.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_sp import __version__
from megatron_sp.utils.command_parser import CommandParser
from megatron_sp.utils.entry_point import code_of, run_program
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.format import aligned

# fmt: off
PROGRAMS = {
    "pretrain": "pretrain a GPT or a BERT; several processes: torchrun -m megatron_sp pretrain gpt FLAGS",
    "preprocess": "tokenize text into the .bin/.idx data sets that trainings read",
    "tokenizer": "train a SentencePiece or WordPiece tokenizer on text",
    "generate": "continue text with a trained GPT",
    "evaluate": "report perplexity and bits per byte; also scores last-word prediction and multiple-choice tasks",
    "serve": "serve a trained GPT over HTTP with OpenAI's completions API",
    "finetune": "fine-tune a classifier on a pretrained BERT",
    "fill-mask": "fill in masked words with a trained BERT",
    "report": "write one page of HTML about a run: curves, time, interruptions, memory, exchanges, configuration",
    "plot": "draw the curves of one or several runs",
    "summarize": "summarize a run in a few lines",
    "chaos": "stress a training on this machine: it is killed, stopped, starved of disk and damaged, and must end with"
             " the same weights",
}
TEXTS = {
    "doctor": "check this machine: torch, devices, backends, optional packages, disk and memory, and suggest a fix for"
              " anything missing",
    "data": "make, inspect, join and split data sets",
    "presets": "list the published models whose shape --preset NAME takes, with their parameters and sources",
    "plan": "choose a layout for given GPUs: predicted memory and speed of all layouts of a model, the fastest that fit"
            " first",
    "convert": "convert weights from and to Hugging Face, Megatron and Megatron-DeepSpeed; docs/how-to/convert.md has"
               " the formats",
    "ckpt": "list, show, verify, compare, thin out and merge checkpoints",
    "schedule": "check, show, explain, verify and train external models (transformers', yours) by schedules:"
                " docs/how-to/schedule.md",
}
PRESET_COLUMNS = (
    "name", "parameters", "layers", "hidden", "heads", "ffn", "sequence", "vocabulary", "positions, norm, MLP",
    "source",
)
# fmt: on
CHAOS = Path(__file__).resolve().parents[2] / "tools" / "chaos"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code of the command, or of the ReportedError whose message was printed."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in PROGRAMS:
        if given[0] == "chaos":
            return code_of(lambda: load_chaos()(given[1:], "megatron-sp chaos"))
        module = _module(f"commands.{given[0].replace('-', '_')}")
        return code_of(lambda: module.main(given[1:], f"megatron-sp {given[0]}"))
    parser = build_parser()
    args, words = parser.parse_known_args(given)
    if words and not getattr(args, "takes_words", False):  # those that do take a training's flags, too
        parser.refuse(words, given)
    args.words = words
    return code_of(lambda: args.run(args))


def program() -> NoReturn:
    """Console entry point: run ``main`` and exit the process."""
    run_program(main)


def build_parser() -> CommandParser:
    from megatron_sp.commands import ckpt, data, schedule
    from megatron_sp.convert import arguments as convert
    from megatron_sp.planner import options as plan

    parser = CommandParser(
        prog="megatron-sp",
        description="Megatron-style pretraining in plain PyTorch, and the tools around it; each command has its own"
        " --help",
    )
    parser.add_argument("--version", action="version", version=f"megatron-sp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)

    def add(name: str, run: Callable[[argparse.Namespace], int] | None = None, **more: Any) -> CommandParser:
        # a command's line in the list is also the first sentence of its own --help
        text = TEXTS[name]
        more = {"description": f"{text[0].upper()}{text[1:]}.", **more}
        command: CommandParser = commands.add_parser(name, help=text, **more)
        command.set_defaults(run=run)
        return command

    add("doctor", lambda args: _module("commands.doctor").run(as_json=args.json)).add_argument(
        "--json", action="store_true", help="print the rows as JSON"
    )
    data.add_actions(add("data", description=None))
    add("presets", _presets).add_argument("--json", action="store_true", help="print all flags of each as JSON")
    planner = add(
        "plan", lambda args: _module("planner.command").run(args, args.words), usage=plan.USAGE, epilog=plan.EPILOG
    )
    plan.add_arguments(planner)
    planner.set_defaults(takes_words=True)
    plain = argparse.RawDescriptionHelpFormatter
    run = lambda args: _module("convert.command").run(args)
    convert.add_arguments(add("convert", run, epilog=convert.EPILOG, formatter_class=plain))
    ckpt.add_actions(add("ckpt"))
    schedule.add_actions(add("schedule"))
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron_sp.{name}")


def _presets(args: argparse.Namespace) -> int:
    from megatron_sp.config.presets import PRESETS

    if args.json:
        print(json.dumps({name: dataclasses.asdict(preset) for name, preset in PRESETS.items()}, indent=1))
    else:
        print("\n".join(aligned([PRESET_COLUMNS, *preset_rows()], right=range(1, 8), indent="")))
    return 0


def preset_rows() -> list[tuple[str, ...]]:
    """Return the presets as rows below ``PRESET_COLUMNS``."""
    from megatron_sp.config.presets import PRESETS
    from megatron_sp.config.schema import ModelConfig

    rows: list[tuple[str, ...]] = []
    for name, preset in PRESETS.items():
        model = ModelConfig(**preset.flags)
        groups = f" ({model.num_query_groups} kv)" if model.num_query_groups else ""
        ffn = f"{model.ffn_size}"
        if model.has_experts:
            ffn = f"{model.expert_ffn_size} ({model.moe_router_topk} of {model.num_experts})"
        kind = "rotary" if model.position_embedding_type == "rope" else "learned"
        kind += "" if model.window_size is None else f" in a window of {model.window_size:,}"
        kind += f", {'post-' if model.norm_placement == 'post' else ''}{model.normalization}"
        kind += f", {'SwiGLU' if model.swiglu else 'GELU'}{' beside attention' if model.use_parallel_residual else ''}"
        if preset.family != "bert":
            kind += ", own head" if model.untie_embeddings_and_output_weights else ", tied head"
        numbers = f"{preset.num_params:,}", f"{model.num_layers}", f"{model.hidden_size}"
        heads, sizes = f"{model.num_attention_heads}{groups}", (f"{model.seq_length:,}", f"{model.vocab_size:,}")
        rows.append((name, *numbers, heads, ffn, *sizes, kind, preset.source))
    return rows


def load_chaos() -> Callable[[list[str], str], int]:
    """Return ``main(argv, prog)`` of tools/chaos, which is no part of the wheel; its modules become ``chaos.*``.

    Raises:
        ConfigError: there is no tools/ beside the package.
    """
    if not (CHAOS / "__init__.py").is_file():
        raise ConfigError(
            "megatron-sp chaos is a program of the repository, tools/chaos, which an installed package does not have"
            f" ({CHAOS} is not there): run `pip install -e .` in a clone of the repository, and the same command again"
        )
    if "chaos" not in sys.modules:  # tools/ itself stays off the path: other packages have its scripts' names, too
        places = [str(CHAOS)]
        spec = importlib.util.spec_from_file_location("chaos", CHAOS / "__init__.py", submodule_search_locations=places)
        assert spec is not None
        sys.modules["chaos"] = importlib.util.module_from_spec(spec)
    program: Callable[[list[str], str], int] = importlib.import_module("chaos.command").main
    return program
