"""``argparse``, with mistakes said in one line and the nearest names."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from megatron_sp.utils.errors import EXIT_CONFIG
from megatron_sp.utils.launch import is_first_rank


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviations whose errors are one line."""

    # argparse prints its usage first, twenty lines of it, and guesses what an abbreviated flag means

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        options, unknown = self.parse_known_args(given, namespace)
        if unknown:
            self.refuse(unknown, given)
        return options

    def refuse(self, unknown: Sequence[str], given: Sequence[str]) -> NoReturn:
        # end the program, naming words that its subcommand does not know
        parser = self._selected(given)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        all_flags = f"; {parser.prog} --help lists all flags"
        lines = [f"{flag} is unknown{_choice(similar(flag, known)) or all_flags}" for flag in flags]
        parser.error("\n  ".join(lines) if lines else f"'{unknown[0][:60]}' is one word too many: {parser.prog} --help")

    def _selected(self, given: Sequence[str]) -> CommandParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                name = next((word for word in given if word in action.choices), None)
                if name is not None:
                    inner: CommandParser = action.choices[name]
                    return inner._selected(given[list(given).index(name) + 1 :])
        return self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        near = _choice(similar(str(value), names))
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"{self.prog} has no '{str(value)[:40]}'{near or f': {self.prog} --help'}")
        hint = near or f": choose from {', '.join(names)}"
        raise argparse.ArgumentError(action, f"'{str(value)[:40]}' is unknown{hint}")

    def error(self, message: str) -> NoReturn:
        # end the program with one line, from the first rank
        message = message.removeprefix("argument ")
        missing = re.fullmatch(r"the following arguments are required: (.*)", message)
        if missing:
            names = missing[1].split(", ")
            message = f"{missing[1]} {'is' if len(names) == 1 else 'are'} missing: {self.prog} --help"
        if is_first_rank():
            print(f"error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG)


def documented_parser(prog: str | None, text: str | None, epilog: str | None = None) -> CommandParser:
    """Return a parser that shows a module's docstring as it is laid out."""
    return CommandParser(
        prog=prog, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def similar(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that ``name`` may be meant as, those that it begins first."""
    names = list(names)
    begun = [other for other in names if len(name.strip("-")) >= 3 and other.startswith(name)]
    return list(dict.fromkeys([*begun, *difflib.get_close_matches(name, names, n=3, cutoff=0.6)]))[:3]


def _choice(names: Sequence[str]) -> str:
    if not names:
        return ""
    *first, last = names
    return f": did you mean {', '.join(first)} or {last}?" if first else f": did you mean {last}?"
