"""Parser from a command line, and optionally YAML files, to a validated ``Config``.

The fields of ``config/schema.py`` are the flags; ``foreign_flags.py`` has those of Megatron-LM and Megatron-DeepSpeed.
Later values win: defaults, those of --preset, then the files, then the command line from left to right; DeepSpeed's
JSON must agree with them, except for what its engine reads from the file alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_sp.config.fields import FieldKind, field_kinds
from megatron_sp.config.flags import settings as given
from megatron_sp.config.flags.settings import ANY, Draft, Setting, canonical, targets
from megatron_sp.config.rules import normalize, out_of_range, violations
from megatron_sp.config.schema import FIELDS, GROUPS, Config, raise_all
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import launched_processes

_DRY_RUN = ("text", "json")


@dataclass
class CommandLine:
    """A command line split into flags, before names and values are checked."""

    settings: list[Setting] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)
    print_config: bool = False
    dry_run: str | None = None  # text or json
    world_size: int | None = None
    help: bool = False
    problems: list[str] = field(default_factory=list)
    world_size_is_open: bool = False  # it was given, and could not be read
    has_all_settings: bool = True  # else those of the file are missing


class Request(NamedTuple):
    """A parsed command line: the action to perform, and its configuration."""

    action: str  # "run", or "help", "print-config" or "dry-run" instead of a run
    config: Config | None  # normalised and validated; None if ``action`` is "help"
    world_size: int = 1  # number of processes that the configuration is for
    dry_run: str = "text"  # output format of a dry run, "text" or "json"


def read_request(argv: Sequence[str], *, world_size: int | None = None, family: str | None = None) -> Request:
    """Parse the words after a program's name; ``commands/pretrain.py`` performs the request.

    ``world_size``: by default what the launcher has started. ``family``: of the models that the program trains, "gpt"
    or "bert"; None: that of --model-family. Raises ConfigError: a flag is unknown, or a value is invalid.
    """
    line = scan(argv)
    if line.help:
        return Request("help", None)
    config = _configure(line, world_size, family)
    ranks = line.world_size or world_size or launched_processes()
    if line.print_config:
        return Request("print-config", config, ranks)
    return Request("run", config, ranks) if line.dry_run is None else Request("dry-run", config, ranks, line.dry_run)


def config_from_args(argv: Sequence[str], *, world_size: int | None = None, family: str | None = None) -> Config:
    """Return the configuration of a run's command line, ignoring --help, --print-config and --dry-run."""
    return _configure(scan(argv), world_size, family)


def draft_config(argv: Sequence[str]) -> tuple[Config, set[tuple[str, str]]]:
    """Return an incomplete configuration, neither normalised nor validated, and the fields given, as (group, name)."""
    line = scan(argv)
    for name, present in (("--dry-run", line.dry_run is not None), ("--print-config", line.print_config)):
        if present:
            line.problems.append(f"{name} is for a run's own program: leave it out")
    draft = _apply(_settings(line), line.problems, 1)
    raise_all(draft.problems)
    return draft.config, set(draft.config.given)


def config_as_yaml(config: Config) -> str:
    """Return the configuration as YAML that --config reads back to an equal one."""
    import yaml

    notes = "".join(f"# {line}\n" for line in config.remarks)
    if config.preset is not None:
        notes = f"# preset: {config.preset}\n{notes}"
    return notes + yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=1000)


def _configure(line: CommandLine, world_size: int | None, family: str | None) -> Config:
    world_size = line.world_size or world_size or launched_processes()
    draft = _apply(_settings(line, family), line.problems, world_size)
    config = draft.config
    if family is not None and config.model.model_family != family:
        other = config.model.model_family
        says = f"--model-family says {other}: use pretrain_{other}.py"
        draft.problems.append(f"this program trains {family.upper()}, and {says}")
        config.model.model_family = "bert" if family == "bert" else "gpt"
    raise_all(draft.problems + (_broken_rules(draft, line, world_size) if line.has_all_settings else []))
    return normalize(config)


def _settings(line: CommandLine, family: str | None = None) -> list[Setting]:
    settings = [] if family is None else [Setting("model-family", (family,), "this program")]
    for path in line.config_files:
        try:
            settings += given.read_config_file(path)
        except ConfigError as error:
            line.problems.append(str(error))
            line.has_all_settings = False
    return settings + line.settings


def scan(argv: Sequence[str]) -> CommandLine:
    """Split a command line into flags and their words; those that belong to no flag become problems."""
    line, rest, previous = CommandLine(), list(argv), ""
    while rest:
        word = rest.pop(0)
        if word == "-h":
            word = "--help"
        if not word.startswith("--") or word == "--":
            if not previous or word.startswith("-"):
                name = canonical("-" + word)
                meant = f", as in --{name}" if word.startswith("-") and name in targets() else ""
                line.problems.append(f"unexpected '{word}': a flag begins with --{meant}")
            else:
                takes = "no value" if _arity(canonical(previous)) == 0 else "one value"
                line.problems.append(f"unexpected '{word}': {previous} takes {takes}")
            if word.startswith("-"):  # one dash too few: its value would be reported as well
                del rest[: _num_until_flag(rest)]
            continue
        spelling, equals, value = word.partition("=")
        name, previous = canonical(spelling), spelling
        following = [] if equals else rest[: _num_until_flag(rest)]
        if name == "profile" and rest[:1] and rest[0] in ("pt", "pt-full"):  # Megatron-DeepSpeed's takes a word
            following = following[:1]
        elif name == "dry-run":
            following = following[: rest[:1] != [] and rest[0] in _DRY_RUN]
        elif name != "num-experts" and (wanted := _arity(name)) != ANY:  # Megatron-DeepSpeed's may be a list
            following = following[:wanted]
        del rest[: len(following)]
        _take(line, Setting(name, (value,) if equals else tuple(following), spelling))
    if line.world_size is not None and line.dry_run is None:
        started = "a run has as many processes as the launcher starts (torchrun --nproc-per-node N)"
        line.problems.append(f"--world-size is for --dry-run: {started}")
    return line


def _take(line: CommandLine, setting: Setting) -> None:
    name, words, _ = setting
    if name == "help":
        line.help = True
    elif name == "print-config":
        line.print_config = True
    elif name == "dry-run":
        line.dry_run = words[0] if words else "text"
        if line.dry_run not in _DRY_RUN:
            line.problems.append(f"--dry-run: expected nothing, or one of {', '.join(_DRY_RUN)}, got '{line.dry_run}'")
    elif name == "world-size":
        try:
            line.world_size = FieldKind("int").parse(words)
            if line.world_size >= 1:
                return
            line.problems.append(f"--world-size ({line.world_size}) must be at least 1: it is the number of processes")
        except ValueError as error:
            line.problems.append(f"--world-size: {error}")
        line.world_size_is_open = True
    elif name == "config":
        if words and words[0]:
            line.config_files.append(words[0])
        else:
            line.problems.append("--config: expected the path of a YAML file, got nothing")
    else:
        line.settings.append(setting)


def _arity(name: str) -> int:
    # how many words a flag takes; ``ANY``: as many as follow
    if name in targets():
        kind = targets()[name].kind
        return 0 if kind.base == "bool" else ANY if kind.many else 1
    if name in given.OWN_SPECIAL:
        return given.OWN_SPECIAL[name]
    from megatron_sp.config.flags.foreign_flags import foreign_arity

    return foreign_arity(name)


def _num_until_flag(words: list[str]) -> int:
    for i, word in enumerate(words):
        if word.startswith("-") and len(word) > 1 and word[1] != "." and not word[1].isdigit():  # -1 and -.5 are values
            return i
    return len(words)


# ------------------------------------------------------------------------------------------------------- applying


def _apply(settings: list[Setting], problems: list[str], world_size: int) -> Draft:
    # the configuration that ``settings`` describe, with everything that is wrong with them
    config = Config()
    of_preset = _start_from_preset(config, settings)
    draft, foreign = Draft(config, [*problems, *of_preset]), None
    if of_preset:
        draft.meant |= given.fields_of_groups("model")
    if not all(map(_is_plain, settings)):
        from megatron_sp.config.flags.foreign_flags import ForeignFlags

        foreign = ForeignFlags(draft, settings)
    for setting in settings:
        if setting.name != "preset":
            draft.attempt(setting, draft.assign if foreign is None or _is_plain(setting) else foreign.take)
    ignored = []
    if foreign is not None:
        foreign.apply_weak()
        ignored = foreign.resolve_deepspeed(world_size)
    held = {} if foreign is None else foreign.held
    if held or (config.model.num_experts or 0) > 1:
        from megatron_sp.config.flags.expert_dialects import resolve_expert_dialect

        try:
            ignored += resolve_expert_dialect(config, settings, held, world_size)
        except ValueError as error:
            draft.problems.append(str(error))
            about = ("moe", "num_experts")
            draft.perhaps |= {each for each in given.fields_of_groups("model") if each[1].startswith(about)}
    if foreign is not None:
        foreign.resolve_tokens()
        ignored = [*(f"{where} ({reason})" for where, reason in foreign.ignored.items()), *ignored]
    _trim_preset(config)
    if config.adds_null_end and config.model.vocab_size:
        # as Megatron's tokenizer of this name does; a configuration, on disk too, counts all ids
        config.model.vocab_size += 1
    config.ignored_flags = tuple(ignored)
    return draft


def _is_plain(setting: Setting) -> bool:
    name = setting.name
    is_list = name == "num-experts" and len(setting.words) > 1  # Megatron-DeepSpeed's
    return name == "preset" or (name in targets() and name not in given.TOKEN_FLAGS and not is_list)


def _start_from_preset(config: Config, settings: list[Setting]) -> list[str]:
    # set the model's fields from the last --preset; return problems with it
    last = {setting.name: setting for setting in settings if setting.name in ("preset", "model-family")}
    if "preset" not in last:
        return []
    from megatron_sp.config.presets import PROGRAMS, preset_named

    chosen, families = last["preset"], last.get("model-family", last["preset"]).words
    try:
        name = FieldKind("str").parse(chosen.words).lower()
        preset = preset_named(name, next((family for family in PROGRAMS if family in families), None))
    except ValueError as error:  # a ConfigError is one
        return [f"{chosen.where}: {error}"]
    for flag, value in (preset.flags | {"model_family": preset.family}).items():
        setattr(config.model, flag, value)
    config.preset, config.preset_fields = name, frozenset(preset.flags)
    return []


def _trim_preset(config: Config) -> None:
    # a tokenizer replaces the preset's vocabulary, a longer sequence its table length
    model, data = config.model, config.data
    own = {name for name in config.preset_fields if ("model", name) not in config.given}
    has_tokenizer = data.tokenizer_model or data.vocab_file or data.merge_file
    if "vocab_size" in own and (has_tokenizer or data.tokenizer_type not in (None, "NullTokenizer")):
        model.vocab_size = None
        own.remove("vocab_size")
    if "max_position_embeddings" in own and (model.seq_length or 0) > (model.max_position_embeddings or 0):
        model.max_position_embeddings = None  # as long as the sequence
        own.remove("max_position_embeddings")
    config.preset_fields = frozenset(own)


# ------------------------------------------------------------------------- rules of what could not be read in full
#
# A value that is no number, a mistyped name or a number out of range leaves a field open. The rules between fields are
# then tried with several values for it, and a violation counts if all of them have it, to the letter: whoever corrects
# a typo is told of everything else at once, and of nothing that only follows from the typo.

_INTEGERS = (1, 2, 3, 8)  # small: some rules go through the ranks and the stages one by one
_NUMBERS = (0.01, 0.5, 1.0, 100.0)
_WORLDS = (1, 2, 3, 48)


def _broken_rules(draft: Draft, line: CommandLine, world_size: int) -> list[str]:
    trial = normalize(copy.deepcopy(draft.config))
    bounds = out_of_range(trial)
    if not draft.problems and not bounds:
        return violations(trial, world_size)
    # nothing is known about fields that a problem says to set, either
    named = (canonical(flag) for problem in draft.problems for flag in re.findall(r"--[a-z][\w-]*", problem))
    perhaps = {targets()[name][:2] for name in named if name in targets()} | draft.perhaps
    meant = draft.meant | bounds.keys()
    perhaps -= draft.config.given.keys() | draft.meant
    if not (meant or perhaps or line.world_size_is_open):
        return violations(trial, world_size)
    common: list[str] | None = None
    for number in range(1 + len(_INTEGERS)):
        trial = copy.deepcopy(draft.config)
        for group, name in meant | perhaps:
            if number > 0 or (group, name) in meant:  # the first trial is without what only may have been meant
                trial.set(group, name, _stand_in(group, name, number))
        broken = violations(normalize(trial), _WORLDS[number % len(_WORLDS)] if line.world_size_is_open else world_size)
        common = broken if common is None else [text for text in common if text in broken]
        if not common:
            break
    return [text for texts in bounds.values() for text in texts] + (common or [])


def _stand_in(group: str, name: str, number: int) -> Any:
    # the field's ``number``-th plausible value: it is within the field's own bounds
    kind, about = field_kinds(GROUPS[group])[name], FIELDS[group, name].metadata
    if kind.base == "choice":
        value: Any = kind.choices[number % len(kind.choices)]
    elif kind.base == "bool":
        value = bool(number % 2)
    elif kind.base == "str":
        value = "xy"[number % 2]  # a message that quotes it is not in all trials
    else:
        values = _INTEGERS if kind.base == "int" else _NUMBERS
        value = values[number % len(values)]
        value = value if about["low"] is None else max(value, about["low"])
        value = value if about["high"] is None else min(value, about["high"])
        value = int(value) if kind.base == "int" else float(value)
    return (value,) * (1, 3)[number % 2] if kind.many else value
