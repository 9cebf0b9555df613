"""Settings of a command line that are not simply fields of ours: other programs' names, DeepSpeed's JSON, lengths in
tokens.

``foreign_names.py`` has the names and what is known of each. A run whose flags are all fields of ours never imports
this.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_sp.config.fields import FieldKind
from megatron_sp.config.flags import foreign_names as names
from megatron_sp.config.flags.draft import Draft, fields_of_groups, is_on
from megatron_sp.config.flags.expert_dialects import HELD
from megatron_sp.config.flags.flag_names import TOKEN_FLAGS, Setting, targets
from megatron_sp.config.rules_data import read_group_file
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError


class ForeignFlags:
    """Reader that writes what such settings mean into a draft: first ``take`` for each, then the rest once.

    Attributes:
        held: words about experts that need to know all others, by name.
        ignored: reasons why flags have no meaning here, by the flag as it was spelled.
    """

    def __init__(self, draft: Draft, settings: list[Setting]) -> None:
        self.draft = draft
        self.held: dict[str, Setting] = {}
        self.ignored: dict[str, str] = {}
        self._settings = settings
        self._asking = {setting.name for setting in settings if _asks(setting)}
        self._weak: list[Setting] = []  # they yield to an explicit setting of the same field, also to a later one
        self._tokens: dict[str, int] = {}  # their conversion needs the batch size and the sequence length
        self._deepspeed_file: str | None = None

    def take(self, setting: Setting) -> None:
        """Apply a setting, or keep it until all of them are known. Raises ValueError: it cannot have this value."""
        self._handler(setting)(setting)

    def _handler(self, setting: Setting) -> Callable[[Setting], None]:
        name = setting.name
        if name in TOKEN_FLAGS:
            return self._keep_tokens
        if name in HELD or name == "num-experts":
            return lambda setting: self.held.update({name: setting})
        if name in names.REWRITTEN:
            return lambda setting: self._rewrite(setting, names.REWRITTEN[name])
        if " ".join(setting.words).lower() in names.REWRITTEN_VALUES.get(name, {}):
            return self._rewrite_value
        if name in names.GROUP_FILES:
            return self._read_groups
        if name in names.DEEPSPEED_FILE:
            return self._keep_deepspeed_file
        if name in ("profile-steps", "load-tag"):
            return self._split_profile_steps if name == "profile-steps" else self._take_step_of_tag
        if name in names.COMPANIONS:
            return self._ignore_companion
        return self._reject if _ignored_because(setting) is None else self._ignore

    def _rewrite(self, setting: Setting, rewrite: names.Rewrite) -> None:
        if not rewrite.takes_value and not is_on(setting.words):
            return
        for flag, value in rewrite.to:
            ours = Setting(flag, setting.words if value is None else (value,), setting.where)
            if rewrite.weak:
                self._weak.append(ours)
            else:
                self.draft.assign(ours)

    def _rewrite_value(self, setting: Setting) -> None:
        for rewrite in names.REWRITTEN_VALUES[setting.name][setting.words[0].lower()]:
            self._rewrite(Setting(setting.name, (), f"{setting.where} {setting.words[0]}"), rewrite)

    def _keep_tokens(self, setting: Setting) -> None:
        self._tokens[setting.name] = FieldKind("int").parse(setting.words)

    def _keep_deepspeed_file(self, setting: Setting) -> None:
        self._deepspeed_file = FieldKind("str").parse(setting.words)

    def _read_groups(self, setting: Setting) -> None:
        texts = read_group_file(FieldKind("str").parse(setting.words))
        self.draft.assign(Setting(names.GROUP_FILES[setting.name], texts, setting.where))

    def _split_profile_steps(self, setting: Setting) -> None:
        steps = FieldKind("str").parse(setting.words).split(",")
        if len(steps) != 2:
            raise ValueError(f"expected two integers joined by a comma, got '{','.join(steps)[:40]}'")
        for flag, step in zip(("profile-step-start", "profile-step-end"), steps, strict=True):
            self.draft.assign(Setting(flag, (step,), setting.where))

    def _take_step_of_tag(self, setting: Setting) -> None:
        tag = FieldKind("str").parse(setting.words)
        found = re.fullmatch(r"(?:global_step|step-)0*(\d+)(?:_universal)?", tag)
        if found is None:
            raise ValueError(f"expected global_stepN, got '{tag[:40]}': --ckpt-step N says which step is loaded")
        self.draft.assign(Setting("ckpt-step", (found[1],), setting.where))

    def _ignore_companion(self, setting: Setting) -> None:
        asks = names.COMPANIONS[setting.name]
        if self._asking.isdisjoint(asks):
            self.ignored[setting.where] = f"without --{asks[0]} it has no effect"
        elif names.REFUSED.keys().isdisjoint(asks):  # else the flag that requests the feature is rejected
            handle = self._reject if _ignored_because(setting) is None else self._ignore
            handle(setting)

    def _ignore(self, setting: Setting) -> None:
        reason = _ignored_because(setting)
        assert reason is not None
        if setting.name not in names.IGNORED_SWITCHES or is_on(setting.words):
            self.ignored[setting.where] = reason

    def _reject(self, setting: Setting) -> None:
        is_refused = names.refusal(setting.name) is not None
        if is_refused and _is_off(setting.words):
            return
        self.draft.problems.append(_unusable(setting))
        if not is_refused:
            near = {targets()[name][:2] for name in names.meant_by(setting.name) if name in targets()}
            self.draft.meant |= near if len(near) == 1 else set()
            self.draft.perhaps |= near

    # -------------------------------------------------------------------------------------- when all settings are known

    def apply_weak(self) -> None:
        """Apply what yields to explicit settings."""
        model, config = self.draft.config.model, self.draft.config
        for setting in self._weak:
            if targets()[setting.name][:2] not in config.given:
                self.draft.attempt(setting, self.draft.assign)
        # a gate of --glu-activation has the width that it has in its program, 4 * hidden_size for each half
        from_fork = any(setting.name == "glu-activation" for setting in self._settings)
        if from_fork and model.is_gated and model.hidden_size and model.ffn_hidden_size is None:
            model.ffn_hidden_size = 4 * model.hidden_size
            channels = f"the MLP has 4 * hidden_size = {model.ffn_hidden_size} channels, as there"
            config.understood += (f"--glu-activation ({channels})",)

    def settle_deepspeed(self, world_size: int) -> list[str]:
        """Reconcile DeepSpeed's JSON, if there is one, with the settings; return notes about its keys that have no
        effect.
        """
        if self._deepspeed_file is None:
            return []
        from megatron_sp.config.flags.deepspeed_config import settle
        from megatron_sp.config.flags.deepspeed_keys import read_deepspeed_config

        draft = self.draft
        try:
            found = read_deepspeed_config(self._deepspeed_file, draft.config.given.get(("optimizer", "lr")))
            problems = settle(found, draft.config, world_size)
        except ConfigError as error:
            problems = [str(error)]
        if problems:
            draft.problems += problems
            settable = fields_of_groups("batch", "optimizer", "precision", "parallel")
            draft.perhaps |= {each for each in settable if not each[1].endswith("_parallel_size")}
            return []
        return [*found.overruled, *filter(None, [found.note()])]

    def settle_tokens(self) -> None:
        """Convert lengths in tokens, unless sequences have several lengths; those that cannot be leave their fields
        open.
        """
        draft, config = self.draft, self.draft.config
        if config.batch.seq_length_curriculum is not None:
            for name, value in self._tokens.items():
                group, field_name = _token_field(name, "tokens")
                setattr(getattr(config, group), field_name, value)
            return
        kind = "samples" if config.batch.train_iters is None else "iters"
        draft.meant |= {_token_field(name, kind) for name in TOKEN_FLAGS if name in draft.unread}
        if not self._tokens:
            return
        needed = {("model", "seq_length"), ("batch", "global_batch_size"), ("batch", "train_iters")}
        is_open = bool(draft.meant & needed)
        problems = [] if is_open else _count_tokens(config, self._tokens, kind)
        draft.problems += problems
        if problems or is_open:
            draft.meant |= {_token_field(name, kind) for name in self._tokens}


def _asks(setting: Setting) -> bool:
    harmless = (*names.HARMLESS_VALUES.get(setting.name, ()), *names.OFF_VALUES.get(setting.name, ()), "0")
    return not setting.words or not (_is_off(setting.words) or all(word in harmless for word in setting.words))


def _is_off(words: tuple[str, ...]) -> bool:
    return bool(words) and words[0].lower() in ("false", "no", "off")


def _ignored_because(setting: Setting) -> str | None:
    name, words, _ = setting
    if words and all(word in names.HARMLESS_VALUES.get(name, ()) for word in words):
        return "asks for what happens anyway"
    return names.idleness(name)


def _unusable(setting: Setting) -> str:
    name, words, where = setting
    reason = names.refusal(name)
    if reason:
        return f"{where}{' ' + ' '.join(words) if 0 < len(words) < 4 else ''} is not supported: {reason}"
    if name in names.SPECIAL:
        return f"{where} belongs on the command line"
    dashes = "--" if where.startswith("--") else ""
    near = [dashes + other for other in names.meant_by(name)]
    choice = " or ".join([", ".join(near[:-1]), near[-1]] if len(near) > 1 else near)
    return f"{where} is unknown" + (f": did you mean {choice}?" if near else "; --help lists all flags")


def _token_field(name: str, kind: str) -> tuple[str, str]:
    group = "batch" if name == "train-tokens" else "optimizer"
    return group, f"{name.removesuffix('-tokens').replace('-', '_')}_{kind}"


def _count_tokens(config: Config, tokens: dict[str, int], kind: str) -> list[str]:
    """Convert lengths in tokens to samples, or to steps (``kind`` "iters"), rounded up.

    They take precedence over others, as in Megatron-DeepSpeed.
    """
    negative = [f"--{name} ({value}) must be at least 0" for name, value in tokens.items() if value < 0]
    if negative:
        return negative
    batch, size = config.batch, config.model.seq_length
    if not size or size < 1:
        return [f"--{next(iter(tokens))} needs --seq-length, to be turned into samples"]
    if kind == "iters":
        if batch.global_batch_size is None or batch.rampup_batch_size or batch.step_batch_size_schedule:
            flag = f"--{next(iter(tokens))} with --train-iters"
            return [f"{flag} needs a constant --global-batch-size, to be turned into steps"]
        size *= batch.global_batch_size
    for name, value in tokens.items():
        count = -(-value // size)
        if name == "train-tokens":
            limit = getattr(batch, f"train_{kind}")
            setattr(batch, f"train_{kind}", count if limit is None else min(limit, count))
        else:
            setattr(config.optimizer, _token_field(name, kind)[1], count)
    return []
