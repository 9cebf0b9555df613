"""Text of --help, from the fields of ``config/schema.py``: one section per group of flags."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from typing import Any

from megatron_sp.config.fields import described, field_kinds
from megatron_sp.config.schema import GROUPS

_FOOTER = (
    "Flags of Megatron-LM and Megatron-DeepSpeed that have no meaning here are accepted and listed once as ignored;"
    " docs/reference/flags.md has all of them. Underscores may stand for hyphens. A flag given twice takes the last"
    " value; --config FILE comes before all flags."
)
_GENERAL = (
    ("-h, --help", "show this help message and exit"),
    ("--preset NAME", "shape of a published model, such as gpt2-124m or llama3-8b, as defaults of the flags"
     " (`megatron-sp presets` lists them)"),
    ("--config FILE", "YAML file of flags, flat or grouped; given twice the second comes over the first, and the"
     " command line over both"),
    ("--deepspeed-config FILE", "DeepSpeed's JSON; it must agree with the flags, docs/reference/flags.md"),
    ("--print-config", "print the whole configuration as YAML for --config, and exit"),
    ("--dry-run [text|json]", "print parameters, memory and traffic of every rank, as a table or as JSON, and exit;"
     " needs no GPU and starts no process"),
    ("--world-size INT", "with --dry-run: number of processes (default: those started, or WORLD_SIZE)"),
)  # fmt: skip
_NARROWEST, _WIDEST = 40, 120  # columns


def print_help(prog: str, description: str) -> None:
    """Print --help to standard output, wrapped to the terminal's width."""
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size().columns))

    def wrapped(text: str, indent: str = "") -> str:
        # flags are not broken at their hyphens, so that they can be copied
        lines = textwrap.wrap(text, width - len(indent), break_on_hyphens=False, break_long_words=False)
        return "\n".join(indent + line for line in lines)

    for paragraph in (f"usage: {prog} [OPTIONS]", description, _FOOTER):
        if paragraph:
            print(wrapped(paragraph), end="\n\n")
    print("options")
    for names, text in _GENERAL:
        print(f"  {names}\n{wrapped(text, ' ' * 8)}")
    for group, cls in GROUPS.items():
        print(f"\n{wrapped(f'{group} options: {cls.__doc__}')}")
        for item in flags_of(cls):
            print(f"  {_names(cls, item)}\n{wrapped(_described(cls, item), ' ' * 8)}")


def flags_of(cls: type) -> list[dataclasses.Field[Any]]:
    """Return a group's fields in the order in which they are listed: its own before those that it inherits."""
    return sorted(dataclasses.fields(cls), key=lambda item: item.name not in cls.__annotations__)


def show_default(value: Any) -> str:
    """Format a default value as it would be typed."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _names(cls: type, item: dataclasses.Field[Any]) -> str:
    kind = field_kinds(cls)[item.name]
    spellings = (item.name.replace("_", "-"), *item.metadata["aliases"])
    if kind.base == "bool":  # a switch that is on is listed as the flag that turns it off
        return ", ".join(f"--no-{name}" if item.default else f"--{name}" for name in spellings)
    return ", ".join(f"--{name}" for name in spellings) + f" {kind.metavar}"


def _described(cls: type, item: dataclasses.Field[Any]) -> str:
    notes = [item.metadata["unit"]] if item.metadata["unit"] else []
    if field_kinds(cls)[item.name].base != "bool" and item.default not in (None, ()):
        notes.append(f"default: {show_default(item.default)}")
    return described(item) + (f" [{'; '.join(notes)}]" if notes else "")
