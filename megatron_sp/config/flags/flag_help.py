"""Text of --help, formatted by tyro from the fields of ``config/schema.py``: one box per group, with units and defaults."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro

from megatron_sp.config.field_kinds import FieldKind, field_kinds
from megatron_sp.config.schema import GROUPS

_FOOTER = (
    "Flags of Megatron-LM and Megatron-DeepSpeed that have no meaning here are accepted and listed once as ignored; docs/reference/flags.md"
    " has all of them. Underscores may stand for hyphens. A flag given twice takes the last value; --config FILE comes before all flags."
)


_PRESET = "shape of a published model, such as gpt2-124m or llama3-8b, as defaults of the flags (`megatron-sp presets` lists them)"
_DRY_RUN = "print parameters, memory and traffic of every rank, as a table or as JSON, and exit; needs no GPU and starts no process"


def print_help(prog: str, description: str) -> None:
    """Print --help to standard output."""
    text = f"{description}\n\n{_FOOTER}" if description else _FOOTER
    try:
        tyro.cli(_types(), prog=prog, description=text, args=["--help"], config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff))
    except SystemExit as end:
        if end.code:
            raise


def _types() -> Any:
    """Return a dataclass of dataclasses for tyro, of which only names, help and metavars are used."""
    general = [
        ("preset", Annotated[Any, _argument(_PRESET), _word("NAME")], None),
        ("config", Annotated[Any, _argument("YAML file of flags, flat or grouped; the command line comes after it"), _word("FILE")], None),
        (
            "deepspeed_config",
            Annotated[Any, _argument("DeepSpeed's JSON; it must agree with the flags, docs/reference/flags.md"), _word("FILE")],
            None,
        ),
        ("print_config", Annotated[bool, _argument("print the whole configuration as YAML for --config, and exit")], False),
        ("dry_run", Annotated[Any, _argument(_DRY_RUN), _word("[text|json]")], None),
        ("world_size", Annotated[Any, _argument("with --dry-run: number of processes (default: WORLD_SIZE, else 1)"), _word("INT")], None),
    ]
    groups = []
    for group, cls in GROUPS.items():
        kinds = field_kinds(cls)
        fields = [(item.name, _type(item, kinds[item.name]), item.default) for item in dataclasses.fields(cls)]
        made = _dataclass(cls.__name__, fields)
        made.__doc__ = cls.__doc__
        groups.append((group, made, dataclasses.field(default_factory=made)))
    return dataclasses.make_dataclass("Flags", [*_with_defaults(general), *groups])


def _type(item: dataclasses.Field[Any], kind: FieldKind) -> Any:
    notes = [item.metadata["unit"]] if item.metadata["unit"] else []
    if kind.base != "bool" and item.default not in (None, ()):
        notes.append(f"default: {show_default(item.default)}")
    argument = _argument(item.metadata["help"], f"[{'; '.join(notes)}]" if notes else "", item.metadata["aliases"])
    return Annotated[bool, argument] if kind.base == "bool" else Annotated[Any, argument, _word(kind.metavar)]


def show_default(value: Any) -> str:
    """Format a default value as it would be typed."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _argument(text: str, hint: str = "", aliases: tuple[str, ...] = ()) -> Any:
    return tyro.conf.arg(help=text, help_behavior_hint=hint, aliases=tuple("--" + name for name in aliases) or None)


def _word(metavar: str) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar=metavar, instance_from_str=lambda words: words[0], is_instance=lambda _: True, str_from_instance=lambda v: [str(v)]
    )


def _with_defaults(fields: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    return [(name, kind, dataclasses.field(default=default)) for name, kind, default in fields]


def _dataclass(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    return dataclasses.make_dataclass(name, _with_defaults(fields))
