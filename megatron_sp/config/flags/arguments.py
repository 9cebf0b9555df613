"""Parser from a command line, and optionally YAML files, to a validated ``Config``.

The fields of ``config/schema.py`` are the flags. The flags of Megatron-LM and Megatron-DeepSpeed are accepted: other
names are rewritten, flags without meaning here are collected in ``Config.ignored_flags``, unsupported flags that would
change the result are rejected (``ignored_flags.py``). Abbreviations are not accepted: a mistyped flag ends the program
with exit code 2 and the nearest names. Later values win: defaults, those of --preset (``config/presets.py``), then the
files, then the command line from left to right; DeepSpeed's JSON (``deepspeed_config.py``) must agree with them, except
for the values that its engine reads from the file alone.

Nothing here imports torch or numpy; a wrong flag is reported in a tenth of a second, before any communication.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.config.field_kinds import FieldKind
from megatron_sp.config.flags import ignored_flags as dialect
from megatron_sp.config.flags.config_file import Setting, canonical, read_config_file
from megatron_sp.config.flags.expert_dialects import HELD, settle_expert_dialect
from megatron_sp.config.flags.flag_names import ANY, DEEPSPEED_FILE, SPECIAL, Target, arity, idleness, meant_by, refusal, targets
from megatron_sp.config.open_fields import OpenFields, certain_violations
from megatron_sp.config.rules import normalize
from megatron_sp.config.schema import GROUPS, Config, raise_all
from megatron_sp.config.split_groups import read_group_file
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


@dataclass(frozen=True)
class Request:
    """A parsed command line: the action to perform, and its configuration.

    Attributes:
        action: "run", or "help", "print-config" or "dry-run" instead of a run.
        config: normalised and validated; None if ``action`` is "help".
        world_size: number of processes that the configuration is for.
        dry_run: output format of a dry run, "text" or "json".
    """

    action: str
    config: Config | None
    world_size: int = 1
    dry_run: str = "text"


def read_request(argv: Sequence[str], *, world_size: int | None = None, family: str | None = None) -> Request:
    """Parse a program's command line; ``commands/pretrain.py`` performs the request.

    Args:
        argv: the words after the program's name.
        world_size: number of processes (default: those that the launcher has started).
        family: family of the models that the program trains, "gpt" or "bert"; None: that of --model-family.
    Raises:
        ConfigError: a flag is unknown, or a value is invalid.
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
    """Return the configuration of a run's command line, ignoring --help, --print-config and --dry-run. Raises ConfigError."""
    return _configure(scan(argv), world_size, family)


def draft_config(argv: Sequence[str]) -> tuple[Config, set[tuple[str, str]]]:
    """Return an incomplete configuration, neither normalised nor validated, and the fields that were given, as (group, name).

    Raises:
        ConfigError: the command line cannot be parsed.
    """
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
        draft.problems.append(f"this program trains {family.upper()}, and --model-family says {other}: use pretrain_{other}.py")
        config.model.model_family = "bert" if family == "bert" else "gpt"
    rules = certain_violations(config, world_size, _open_fields(draft, line)) if line.has_all_settings else []
    raise_all(draft.problems + rules)
    return normalize(config)


def _open_fields(draft: _Draft, line: CommandLine) -> OpenFields:
    """Return the fields about which nothing is known, because of the draft's problems or because a problem says to set them."""
    named = (canonical(flag) for problem in draft.problems for flag in re.findall(r"--[a-z][\w-]*", problem))
    perhaps = {targets()[name][:2] for name in named if name in targets()} | draft.perhaps
    return OpenFields(draft.meant, perhaps - draft.config.given.keys() - draft.meant, world_size=line.world_size_is_open)


def _settings(line: CommandLine, family: str | None = None) -> list[Setting]:
    """Return the program's own settings, then those of the files, then those of the command line."""
    own = [] if family is None else [Setting("model-family", (family,), "this program")]
    of_files: list[Setting] = []
    for path in line.config_files:
        try:
            of_files += read_config_file(path)
        except ConfigError as error:
            line.problems.append(str(error))
            line.has_all_settings = False
    return own + of_files + line.settings


# ------------------------------------------------------------------------------------------------------- scanning


def scan(argv: Sequence[str]) -> CommandLine:
    """Split a command line into flags and their words; words that belong to no flag and invalid uses are recorded as problems."""
    line, rest = CommandLine(), list(argv)
    previous = ""
    while rest:
        word = rest.pop(0)
        if word == "-h":
            word = "--help"
        if not word.startswith("--") or word == "--":
            line.problems.append(_stray(word, previous))
            if word.startswith("-"):  # one dash too few: its value would be reported as well
                del rest[: next((i for i, other in enumerate(rest) if _is_flag(other)), len(rest))]
            continue
        spelling, equals, value = word.partition("=")
        name, previous = canonical(spelling), spelling
        words = (value,) if equals else tuple(rest[: _num_words(name, rest)])
        del rest[: 0 if equals else len(words)]
        _note(line, Setting(name, words, spelling))
    if line.world_size is not None and line.dry_run is None:
        line.problems.append(
            "--world-size is for --dry-run: a run has as many processes as the launcher starts (torchrun --nproc-per-node N)"
        )
    return line


def _stray(word: str, previous: str) -> str:
    if not previous or word.startswith("-"):
        name = canonical("-" + word)
        meant = f", as in --{name}" if word.startswith("-") and name in targets() else ""
        return f"unexpected '{word}': a flag begins with --{meant}"
    takes = "no value" if arity(canonical(previous)) == 0 else "one value"
    return f"unexpected '{word}': {previous} takes {takes}"


def _note(line: CommandLine, setting: Setting) -> None:
    if setting.name == "help":
        line.help = True
    elif setting.name == "print-config":
        line.print_config = True
    elif setting.name == "dry-run":
        line.dry_run = setting.words[0] if setting.words else "text"
        if line.dry_run not in _DRY_RUN:
            line.problems.append(f"--dry-run: expected nothing, or one of {', '.join(_DRY_RUN)}, got '{line.dry_run}'")
    elif setting.name == "world-size":
        try:
            line.world_size = FieldKind("int").parse(setting.words)
            if line.world_size < 1:
                line.problems.append(f"--world-size ({line.world_size}) must be at least 1: it is the number of processes")
                line.world_size_is_open = True
        except ValueError as error:
            line.problems.append(f"--world-size: {error}")
            line.world_size_is_open = True
    elif setting.name == "config":
        if setting.words and setting.words[0]:
            line.config_files.append(setting.words[0])
        else:
            line.problems.append("--config: expected the path of a YAML file, got nothing")
    else:
        line.settings.append(setting)


def _num_words(name: str, rest: list[str]) -> int:
    """Return how many of the words that follow a flag belong to it."""
    following = next((i for i, word in enumerate(rest) if _is_flag(word)), len(rest))
    if name == "profile" and rest[:1] and rest[0] in ("pt", "pt-full"):  # Megatron-DeepSpeed's --profile takes a word
        return 1
    if name == "dry-run":
        return int(rest[:1] != [] and rest[0] in _DRY_RUN)
    wanted = ANY if name == "num-experts" else arity(name)  # Megatron-DeepSpeed's may be a list
    return following if wanted == ANY else min(wanted, following)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not (word[1].isdigit() or word[1] == ".")


# ------------------------------------------------------------------------------------------------------- applying


@dataclass
class _Draft:
    """A configuration that is being filled in, setting by setting, and what has to wait for the last of them.

    Attributes:
        config: the configuration so far.
        problems: everything that is wrong so far; one error lists it all.
        features: families of refused flags whose feature one of the settings requests.
        weak: settings that yield to an explicit one of the same field, also to a later one.
        tokens: lengths in tokens; their conversion needs the batch size and the sequence length.
        held: words about experts that need to know all others, by name.
        ignored: reasons why flags have no meaning here, by the flag as it was spelled.
        deepspeed_file: path of DeepSpeed's JSON.
        unread_tokens: names of such lengths that are not integers.
        meant: fields that were given in a way that cannot be read.
        perhaps: fields that may have been meant.
    """

    config: Config
    problems: list[str]
    features: list[dialect.Family]
    weak: list[Setting] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    held: dict[str, Setting] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    deepspeed_file: str | None = None
    unread_tokens: list[str] = field(default_factory=list)
    meant: set[tuple[str, str]] = field(default_factory=set)
    perhaps: set[tuple[str, str]] = field(default_factory=set)


def _apply(settings: list[Setting], problems: list[str], world_size: int) -> _Draft:
    """Return the configuration that ``settings`` describe, with everything that is wrong with them."""
    config = Config()
    of_preset = _start_from_preset(config, settings)
    draft = _Draft(config, [*problems, *of_preset], _features_asked_for(settings))
    if of_preset:
        draft.meant |= _fields_of_groups("model")
    for setting in settings:
        _try(draft, setting, next(handle for is_of_kind, handle in _HANDLERS if is_of_kind(setting)))
    for setting in draft.weak:
        if targets()[setting.name][:2] not in config.given:
            _try(draft, setting, _assign)
    _widen_gates(draft, settings)
    overruled = _settle_deepspeed(draft, world_size)
    try:
        overruled += settle_expert_dialect(config, settings, draft.held, world_size)
    except ValueError as error:
        draft.problems.append(str(error))
        draft.perhaps |= {each for each in _fields_of_groups("model") if each[1].startswith(("moe", "num_experts"))}
    _settle_tokens(draft)
    _settle_preset(config)
    if config.adds_null_end and config.model.vocab_size:
        config.model.vocab_size += 1  # as Megatron's tokenizer of this name does; a configuration, on disk too, counts all ids
    config.ignored_flags = (*(f"{where} ({reason})" for where, reason in draft.ignored.items()), *overruled)
    return draft


def _try(draft: _Draft, setting: Setting, handle: Callable[[_Draft, Setting], None]) -> None:
    """Take a setting; what is wrong with it is one of the draft's problems."""
    try:
        handle(draft, setting)
    except ValueError as error:
        draft.problems.append(f"{setting.where}: {error}{_known_elsewhere(setting)}")
        draft.meant |= _fields_of(setting)
        draft.unread_tokens += [setting.name] if setting.name in dialect.TOKEN_FLAGS else []


def _assign(draft: _Draft, setting: Setting) -> None:
    target = targets()[setting.name]
    setattr(getattr(draft.config, target.group), target.name, _value(setting, target))
    draft.config.given[target.group, target.name] = setting.where
    draft.meant.discard((target.group, target.name))  # the last one counts


def _fields_of(setting: Setting) -> set[tuple[str, str]]:
    """Return the fields that a setting would set if it could be read."""
    rewrite = dialect.REWRITTEN.get(setting.name)
    names = [flag for flag, _ in rewrite.to] if rewrite else [dialect.GROUP_FILES.get(setting.name, setting.name)]
    return {targets()[name][:2] for name in names if name in targets()}


def _fields_of_groups(*groups: str) -> set[tuple[str, str]]:
    return {(group, item.name) for group in groups for item in dataclasses.fields(GROUPS[group])}


def _rewrite(draft: _Draft, setting: Setting) -> None:
    _apply_rewrite(draft, setting, dialect.REWRITTEN[setting.name])


def _rewrite_value(draft: _Draft, setting: Setting) -> None:
    for rewrite in dialect.REWRITTEN_VALUES[setting.name][setting.words[0].lower()]:
        _apply_rewrite(draft, Setting(setting.name, (), f"{setting.where} {setting.words[0]}"), rewrite)


def _apply_rewrite(draft: _Draft, setting: Setting, rewrite: dialect.Rewrite) -> None:
    if not rewrite.takes_value and not _is_on(setting.words):
        return
    for flag, value in rewrite.to:
        ours = Setting(flag, setting.words if value is None else (value,), setting.where)
        if rewrite.weak:
            draft.weak.append(ours)
        else:
            _assign(draft, ours)


def _widen_gates(draft: _Draft, settings: list[Setting]) -> None:
    """Give a gate of --glu-activation the width that it has in its program unless told otherwise, 4 * hidden_size for each half."""
    model = draft.config.model
    if model.is_gated and model.hidden_size and model.ffn_hidden_size is None and any(one.name == "glu-activation" for one in settings):
        model.ffn_hidden_size = 4 * model.hidden_size
        draft.config.understood += (f"--glu-activation (the MLP has 4 * hidden_size = {model.ffn_hidden_size} channels, as there)",)


def _hold(draft: _Draft, setting: Setting) -> None:
    draft.held[setting.name] = setting


def _keep_tokens(draft: _Draft, setting: Setting) -> None:
    draft.tokens[setting.name] = FieldKind("int").parse(setting.words)


def _keep_deepspeed_file(draft: _Draft, setting: Setting) -> None:
    draft.deepspeed_file = FieldKind("str").parse(setting.words)


def _read_groups(draft: _Draft, setting: Setting) -> None:
    texts = read_group_file(FieldKind("str").parse(setting.words))
    _assign(draft, Setting(dialect.GROUP_FILES[setting.name], texts, setting.where))


def _skip_preset(draft: _Draft, setting: Setting) -> None:
    """Do nothing: ``_start_from_preset`` has applied it before all settings."""


def _split_profile_steps(draft: _Draft, setting: Setting) -> None:
    """Assign Megatron-DeepSpeed's "first,last" to our two flags."""
    steps = FieldKind("str").parse(setting.words).split(",")
    if len(steps) != 2:
        raise ValueError(f"expected two integers joined by a comma, got '{','.join(steps)[:40]}'")
    for flag, step in zip(("profile-step-start", "profile-step-end"), steps, strict=True):
        _assign(draft, Setting(flag, (step,), setting.where))


def _take_step_of_tag(draft: _Draft, setting: Setting) -> None:
    """Assign the step in the name of one of Megatron-DeepSpeed's folders."""
    tag = FieldKind("str").parse(setting.words)
    found = re.fullmatch(r"(?:global_step|step-)0*(\d+)(?:_universal)?", tag)
    if found is None:
        raise ValueError(f"expected global_stepN, got '{tag[:40]}': --ckpt-step N says which step is loaded")
    _assign(draft, Setting("ckpt-step", (found[1],), setting.where))


def _ignore_companion(draft: _Draft, setting: Setting) -> None:
    family = _family_of(setting)
    assert family is not None
    if family not in draft.features:
        draft.ignored[setting.where] = family.reason
    elif not dialect.REFUSED.keys() & set(family.asks):  # else the flag that requests the feature is rejected, with the reason
        handle = _reject if _ignored_because(setting) is None else _ignore
        handle(draft, setting)


def _ignore(draft: _Draft, setting: Setting) -> None:
    reason = _ignored_because(setting)
    assert reason is not None
    if setting.name not in dialect.IGNORED_SWITCHES or _is_on(setting.words):
        draft.ignored[setting.where] = reason


def _reject(draft: _Draft, setting: Setting) -> None:
    if refusal(setting.name) and _is_off(setting.words):
        return
    draft.problems.append(_unusable(setting))
    if refusal(setting.name) is None:
        near = {targets()[name][:2] for name in meant_by(setting.name) if name in targets()}
        draft.meant |= near if len(near) == 1 else set()
        draft.perhaps |= near


_Handler = Callable[[_Draft, Setting], None]
_HANDLERS: tuple[tuple[Callable[[Setting], bool], _Handler], ...] = (  # the first kind that a setting is of
    (lambda setting: setting.name in dialect.TOKEN_FLAGS, _keep_tokens),
    (lambda setting: setting.name in HELD or (setting.name == "num-experts" and len(setting.words) > 1), _hold),
    (lambda setting: setting.name in targets(), _assign),
    (lambda setting: setting.name in dialect.REWRITTEN, _rewrite),
    (lambda setting: " ".join(setting.words).lower() in dialect.REWRITTEN_VALUES.get(setting.name, {}), _rewrite_value),
    (lambda setting: setting.name in dialect.GROUP_FILES, _read_groups),
    (lambda setting: setting.name in DEEPSPEED_FILE, _keep_deepspeed_file),
    (lambda setting: setting.name == "preset", _skip_preset),
    (lambda setting: setting.name == "profile-steps", _split_profile_steps),
    (lambda setting: setting.name == "load-tag", _take_step_of_tag),
    (lambda setting: _family_of(setting) is not None, _ignore_companion),
    (lambda setting: _ignored_because(setting) is not None, _ignore),
    (lambda setting: True, _reject),
)


def _settle_deepspeed(draft: _Draft, world_size: int) -> list[str]:
    """Reconcile DeepSpeed's JSON, if there is one, with the settings; return notes about its keys that have no effect."""
    if draft.deepspeed_file is None:
        return []
    from megatron_sp.config.flags.deepspeed_config import settle
    from megatron_sp.config.flags.deepspeed_keys import read_deepspeed_config

    try:
        found = read_deepspeed_config(draft.deepspeed_file, draft.config.given.get(("optimizer", "lr")))
        problems = settle(found, draft.config, world_size)
    except ConfigError as error:
        problems = [str(error)]
    if problems:
        draft.problems += problems
        settable = _fields_of_groups("batch", "optimizer", "precision", "parallel")
        draft.perhaps |= {each for each in settable if not each[1].endswith("_parallel_size")}
        return []
    return [*found.overruled, *filter(None, [found.note()])]


def _family_of(setting: Setting) -> dialect.Family | None:
    return next((family for family in dialect.FAMILIES if family.has(setting.name)), None)


def _features_asked_for(settings: list[Setting]) -> list[dialect.Family]:
    """Return the flag families whose feature is requested by one of their flags."""

    def asks(setting: Setting) -> bool:
        harmless = (*dialect.HARMLESS_VALUES.get(setting.name, ()), *dialect.OFF_VALUES.get(setting.name, ()), "0")
        return not setting.words or not (_is_off(setting.words) or all(word in harmless for word in setting.words))

    names = {setting.name for setting in settings if asks(setting)}
    return [family for family in dialect.FAMILIES if not names.isdisjoint(family.asks)]


def _start_from_preset(config: Config, settings: list[Setting]) -> list[str]:
    """Set the model's fields from the last --preset; return problems with it."""
    given = {setting.name: setting for setting in settings if setting.name in ("preset", "model-family")}
    if "preset" not in given:
        return []
    from megatron_sp.config.presets import PROGRAMS, preset_named

    chosen, families = given["preset"], given.get("model-family", given["preset"]).words
    try:
        name = FieldKind("str").parse(chosen.words).lower()
        preset = preset_named(name, next((family for family in PROGRAMS if family in families), None))
    except ValueError as error:  # a ConfigError is one
        return [f"{chosen.where}: {error}"]
    for flag, value in (preset.flags | {"model_family": preset.family}).items():
        setattr(config.model, flag, value)
    config.preset, config.preset_fields = name, frozenset(preset.flags)
    return []


def _settle_preset(config: Config) -> None:
    """Record which fields still have the preset's values; a tokenizer replaces its vocabulary, a longer sequence its table length."""
    model, data = config.model, config.data
    own = {name for name in config.preset_fields if ("model", name) not in config.given}
    if "vocab_size" in own and (
        data.tokenizer_model or data.vocab_file or data.merge_file or data.tokenizer_type not in (None, "NullTokenizer")
    ):
        model.vocab_size = None
        own.remove("vocab_size")
    if "max_position_embeddings" in own and (model.seq_length or 0) > (model.max_position_embeddings or 0):
        model.max_position_embeddings = None  # as long as the sequence
        own.remove("max_position_embeddings")
    config.preset_fields = frozenset(own)


def _value(setting: Setting, target: Target) -> Any:
    words = setting.words
    alone = next(item.metadata["alone"] for item in dataclasses.fields(GROUPS[target.group]) if item.name == target.name)
    if alone is not None and not words:
        return alone
    if target.name == "profile" and words and words[0] in ("pt", "pt-full"):
        words = ()
    if target.kind.base == "bool":
        return _is_on(words) != target.negated
    if target.name == "window_size" and len(words) == 1:
        words = (_one_window(words[0]),)
    if target.name in ("split", "moe_layer_freq"):
        words = tuple(word.strip("'\" ") for word in words)  # some shells leave the quotes in the value
    spellings = {theirs.lower(): ours for theirs, ours in dialect.VALUE_SPELLINGS.get(setting.name, {}).items()}
    return target.kind.parse([spellings.get(word.lower(), word) for word in words])


def _one_window(text: str) -> str:
    """Convert Megatron's window, the keys before and after a token's own such as "4095,0", to the number of visible keys."""
    pair = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if pair is None:
        return text
    before, behind = int(pair[1]), int(pair[2])
    if before < 0 or behind != 0:
        raise ValueError(
            f"expected N tokens, or Megatron's N-1,0, got '{text[:40]}': no token sees later ones; leave this out to see all earlier ones"
        )
    return str(before + 1)


def _is_on(words: tuple[str, ...]) -> bool:
    """Return whether a switch is on: without a value it is; in a file its value is true or false."""
    return not words or FieldKind("bool").parse(words)


def _is_off(words: tuple[str, ...]) -> bool:
    return bool(words) and words[0].lower() in ("false", "no", "off")


def _ignored_because(setting: Setting) -> str | None:
    name, words, _ = setting
    if words and all(word in dialect.HARMLESS_VALUES.get(name, ()) for word in words):
        return "asks for what happens anyway"
    return idleness(name)


def _unusable(setting: Setting) -> str:
    name, words, where = setting
    reason = refusal(name)
    if reason:
        return f"{where}{' ' + ' '.join(words) if 0 < len(words) < 4 else ''} is not supported: {reason}"
    if name in SPECIAL:
        return f"{where} belongs on the command line"
    dashes = "--" if where.startswith("--") else ""
    near = [dashes + other for other in meant_by(name)]
    choice = " or ".join([", ".join(near[:-1]), near[-1]] if len(near) > 1 else near)
    return f"{where} is unknown" + (f": did you mean {choice}?" if near else "; --help lists all flags")


def _known_elsewhere(setting: Setting) -> str:
    known = dialect.MEGATRON_CHOICES.get(setting.name, {})
    instead = known.get(setting.words[0]) if setting.words else None
    return f" (a value of Megatron's that is not supported yet: {instead})" if instead else ""


def _settle_tokens(draft: _Draft) -> None:
    """Convert lengths in tokens, unless sequences have several lengths; those that cannot be converted leave their fields open."""
    if draft.config.batch.seq_length_curriculum is not None:
        for name, value in draft.tokens.items():
            group, field_name = _token_field(name, "tokens")
            setattr(getattr(draft.config, group), field_name, value)
        return
    kind = "samples" if draft.config.batch.train_iters is None else "iters"
    draft.meant |= {_token_field(name, kind) for name in draft.unread_tokens}
    if not draft.tokens:
        return
    is_open = bool(draft.meant & {("model", "seq_length"), ("batch", "global_batch_size"), ("batch", "train_iters")})
    problems = [] if is_open else _count_tokens(draft.config, draft.tokens, kind)
    draft.problems += problems
    if problems or is_open:
        draft.meant |= {_token_field(name, kind) for name in draft.tokens}


def _token_field(name: str, kind: str) -> tuple[str, str]:
    return "batch" if name == "train-tokens" else "optimizer", f"{name.removesuffix('-tokens').replace('-', '_')}_{kind}"


def _count_tokens(config: Config, tokens: dict[str, int], kind: str) -> list[str]:
    """Convert lengths in tokens to samples, or to steps (``kind`` "iters"), rounded up; they take precedence, as in Megatron-DeepSpeed."""
    negative = [f"--{name} ({value}) must be at least 0" for name, value in tokens.items() if value < 0]
    if negative:
        return negative
    batch, size = config.batch, config.model.seq_length
    if not size or size < 1:
        return [f"--{next(iter(tokens))} needs --seq-length, to be turned into samples"]
    if kind == "iters":
        if batch.global_batch_size is None or batch.rampup_batch_size or batch.step_batch_size_schedule:
            return [f"--{next(iter(tokens))} with --train-iters needs a constant --global-batch-size, to be turned into steps"]
        size *= batch.global_batch_size
    for name, value in tokens.items():
        count = -(-value // size)
        if name == "train-tokens":
            limit = getattr(batch, f"train_{kind}")
            setattr(batch, f"train_{kind}", count if limit is None else min(limit, count))
        else:
            setattr(config.optimizer, _token_field(name, kind)[1], count)
    return []
