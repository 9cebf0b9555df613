"""Flags of Megatron-LM, Megatron-DeepSpeed and their forks that are not fields of ours, and how each is handled.

A flag is *rewritten* (another name of one of our fields), *ignored* (nothing to choose here; listed once when training
starts) or *refused* (it would change the result; the message names what works): ``foreign_flags.txt`` has the names,
from the argument parsers and launch scripts of both projects. A run whose flags are all ours never imports this.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from megatron_sp.config.fields import FieldKind
from megatron_sp.config.flags import settings as given
from megatron_sp.config.flags.expert_dialects import HELD
from megatron_sp.config.flags.settings import ANY, Draft, Setting, is_on, targets
from megatron_sp.config.rules_data import read_group_file
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError


class Meaning(NamedTuple):
    """One flag of ours that a flag of another program stands for."""

    flag: str
    value: str | None  # None: the flag's own words
    weak: bool  # applies only if the flag of ours is not given itself


# ------------------------------------------------------------------------------------------------------------- tables


def _ending(table: dict[str, str], end: str) -> dict[str, str]:
    return {name.removesuffix(end): why for name, why in table.items() if name.endswith(end)}


def _meanings(text: str) -> tuple[Meaning, ...]:
    parts = [(part.strip("()").partition("="), part.startswith("(")) for part in text.split()]
    return tuple(Meaning(flag, None if value == "VALUE" else value, weak) for (flag, _, value), weak in parts)


_TABLES = given.foreign_tables()
_IGNORED, _REFUSED = _TABLES["ignored"], _TABLES["refused"]

IGNORED_SWITCHES = {name: why for name, why in _IGNORED.items() if not name.endswith(("=", "=..", "*"))}
"""Ignored flags without a value: name -> reason."""
IGNORED_LISTS = _ending(_IGNORED, "=..")
"""Ignored flags that take several values: name -> reason."""
IGNORED_VALUES = {name.rstrip("=."): why for name, why in _IGNORED.items() if name.endswith(("=", "=.."))}
"""Ignored flags that take one value or several: name -> reason."""
# beginnings of families that are ignored: the flag that would make them matter, if there is one, is refused itself
_IGNORED_PREFIXES = _ending(_IGNORED, "*")
REFUSED = {name: why for name, why in _REFUSED.items() if not name.endswith("*")}
"""Flags that would change the result and are not there: name -> what works today."""
REFUSED_PREFIXES = _ending(_REFUSED, "*")
"""Beginnings of refused families."""
SYNONYMS = _TABLES["synonyms"]
"""What other programs call our flags; with a name of these the answer is "did you mean"."""
COMPANIONS = {name: tuple(asks.split()) for name, asks in _TABLES["companions"].items()}
"""Flags without effect unless another one enables their feature: name -> the flags of which one has to be given."""
REWRITTEN = {name: _meanings(text) for name, text in _TABLES["rewritten"].items() if "=" not in name}
"""Other names of flags of ours."""
REWRITTEN_VALUES: dict[str, dict[str, tuple[Meaning, ...]]] = {}
"""Flags that are refused, apart from these values of theirs."""
MEGATRON_CHOICES: dict[str, dict[str, str]] = {}
"""Values that Megatron knows and this package does not: what there is instead, by flag and value."""
for _name, _text in _TABLES["rewritten"].items():
    if "=" in _name:
        REWRITTEN_VALUES.setdefault(_name.partition("=")[0], {})[_name.partition("=")[2]] = _meanings(_text)
for _name, _text in _TABLES["values"].items():
    MEGATRON_CHOICES.setdefault(_name.partition("=")[0], {})[_name.partition("=")[2]] = _text

STANDARD_SPECS = (
    "local", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.bert.bert_layer_specs",
    "get_gpt_layer_local_spec", "get_gpt_layer_with_transformer_engine_spec", "gpt_layer_local_spec",
    "gpt_layer_with_transformer_engine_spec", "get_gpt_decoder_block_spec", "bert_layer_local_spec",
    "bert_layer_with_transformer_engine_spec",
)  # fmt: skip
"""Words of Megatron's --spec for the blocks that it has without the flag."""
HARMLESS_VALUES: dict[str, tuple[str, ...]] = {
    "attention-head-type": ("multihead",), "rope-type": ("rope",), "spec": STANDARD_SPECS,
    "mlp-type": ("standard", "mlp"), "moe-input-jitter-eps": ("0", "0.0"),
    "pre-tockens": ("65536", "2147483647"), "next-tockens": ("0",),
    "moe-jitter-eps": ("0", "0.0"), "moe-zloss-weight": ("0", "0.0"),
    "vocab-extra-ids": ("0",), "mtp-num-layers": ("0",), "label-smoothing": ("0", "0.0"),
    "fim-rate": ("0", "0.0"), "mid-level-dataset-surplus": ("0.005",),
    "softmax-type": ("vanilla",), "qk-clip-threshold": ("0",), "glu-linear-offset": ("0", "0.0"),
    "main-grads-dtype": ("fp32", "bf16"), "main-params-dtype": ("fp32",),
    "exp-avg-dtype": ("fp32",), "exp-avg-sq-dtype": ("fp32",),
    "encoder-tensor-model-parallel-size": ("0", "1"), "encoder-pipeline-model-parallel-size": ("0", "1"),
    "sample-rate": ("1.0", "1"),
}  # fmt: skip
"""Refused flags that are ignored with these values, because they then ask for what happens anyway."""
# words with which a flag of ours that asks for the feature of companions does not ask for it
_OFF_VALUES: dict[str, tuple[str, ...]] = {"num-experts": ("1",), "moe-num-experts": ("1",)}
GROUP_FILES = {
    f"{part}-weighted-split-paths-path": f"{part}-weighted-split-paths" for part in ("train", "valid", "test")
}
"""Files with what another flag takes from the command line, by that flag."""
_DEEPSPEED_FILE = ("deepspeed-config", "deepscale-config")
SPECIAL = (*given.OWN_SPECIAL, "profile-steps", "load-tag", *_DEEPSPEED_FILE, *HELD, *GROUP_FILES)


# -------------------------------------------------------------------------------------------------------- answers


def refusal(name: str) -> str | None:
    """Return why a flag of another program is not supported; None if it is not among those."""
    return REFUSED.get(name) or _of_family(name, REFUSED_PREFIXES)


def idleness(name: str) -> str | None:
    """Return why a flag of another program is accepted without effect; None if it is not among those."""
    known = IGNORED_SWITCHES.get(name) or IGNORED_VALUES.get(name)
    return known or (None if name in REFUSED else _of_family(name, _IGNORED_PREFIXES))


def _of_family(name: str, prefixes: dict[str, str]) -> str | None:
    return next((prefixes[start] for start in sorted(prefixes, key=len, reverse=True) if name.startswith(start)), None)


def foreign_arity(name: str) -> int:
    """Return how many words a flag that is none of ours takes; ``ANY``: as many as follow."""
    if name in REWRITTEN:
        return int(any(meaning.value is None for meaning in REWRITTEN[name]))
    if name in IGNORED_VALUES:
        return ANY if name in IGNORED_LISTS else 1
    if name in IGNORED_SWITCHES:
        return 0
    if name in HELD:
        return HELD[name][0]
    # a refused or unknown flag takes its words with it, so they are not reported as well
    return 1 if name in SPECIAL else ANY


@cache
def offered() -> tuple[str, ...]:
    """Return all names that are accepted."""
    tables: tuple[Iterable[str], ...] = (targets(), SPECIAL, REWRITTEN, IGNORED_SWITCHES, IGNORED_VALUES)
    return tuple(name for table in tables for name in table)


def meant_by(name: str) -> list[str]:
    """Return up to three flags that an unknown name may be meant as; fields of ours are preferred."""
    if name in SYNONYMS:
        return [SYNONYMS[name]]
    begun = [other for other in offered() if len(name) >= 3 and other.startswith(name)]
    alike = difflib.get_close_matches(name, offered(), n=3, cutoff=0.6)
    scores = {other: difflib.SequenceMatcher(None, name, other).ratio() for other in alike}
    near = list(begun)
    for other, score in scores.items():
        # a name that has no effect here must be very alike
        if score > max(scores.values()) - 0.12 and (score >= 0.8 or other in targets()):
            near.append(other)
    near = list(dict.fromkeys(near))
    return ([other for other in near if other in targets()] or near)[:3]


def _is_off(words: tuple[str, ...]) -> bool:
    return bool(words) and words[0].lower() in ("false", "no", "off")


def _asks(setting: Setting) -> bool:
    harmless = (*HARMLESS_VALUES.get(setting.name, ()), *_OFF_VALUES.get(setting.name, ()), "0")
    return not setting.words or not (_is_off(setting.words) or all(word in harmless for word in setting.words))


# -------------------------------------------------------------------------------------------------------- reading


class ForeignFlags:
    """Reader that writes what such settings mean into a draft: first ``take`` for each, then the rest once."""

    def __init__(self, draft: Draft, settings: list[Setting]) -> None:
        self.draft = draft
        self.held: dict[str, Setting] = {}  # words about experts that need to know all others, by name
        self.ignored: dict[str, str] = {}  # why flags have no meaning here, by the flag as it was spelled
        self._settings = settings
        self._asking = {setting.name for setting in settings if _asks(setting)}
        self._weak: list[Setting] = []  # they yield to an explicit setting of the same field, also to a later one
        self._tokens: dict[str, int] = {}  # their conversion needs the batch size and the sequence length
        self._deepspeed_file: str | None = None

    def take(self, setting: Setting) -> None:
        """Apply a setting, or keep it until all of them are known. Raises ValueError: it cannot have this value."""
        try:
            self._take(setting)
        except ValueError:
            meant = [meaning.flag for meaning in REWRITTEN.get(setting.name, ())]
            meant += [GROUP_FILES[setting.name]] if setting.name in GROUP_FILES else []
            self.draft.meant |= {targets()[name][:2] for name in meant}
            raise

    def _take(self, setting: Setting) -> None:
        (name, words, where), assign, text = setting, self.draft.assign, FieldKind("str").parse
        if name in given.TOKEN_FLAGS:
            self._tokens[name] = FieldKind("int").parse(words)
        elif name in HELD or name == "num-experts":
            self.held[name] = setting
        elif name in REWRITTEN:
            self._rewrite(setting, REWRITTEN[name])
        elif (value := " ".join(words).lower()) in REWRITTEN_VALUES.get(name, {}):
            self._rewrite(Setting(name, (), f"{where} {words[0]}"), REWRITTEN_VALUES[name][value])
        elif name in GROUP_FILES:
            assign(Setting(GROUP_FILES[name], read_group_file(text(words)), where))
        elif name in _DEEPSPEED_FILE:
            self._deepspeed_file = text(words)
        elif name == "profile-steps":
            steps = text(words).split(",")
            if len(steps) != 2:
                raise ValueError(f"expected two integers joined by a comma, got '{','.join(steps)[:40]}'")
            for flag, step in zip(("profile-step-start", "profile-step-end"), steps, strict=True):
                assign(Setting(flag, (step,), where))
        elif name == "load-tag":
            match = re.fullmatch(r"(?:global_step|step-)0*(\d+)(?:_universal)?", text(words))
            if match is None:
                raise ValueError(
                    f"expected global_stepN, got '{words[0][:40]}': --ckpt-step N says which step is loaded"
                )
            assign(Setting("ckpt-step", (match[1],), where))
        elif name in COMPANIONS and self._asking.isdisjoint(COMPANIONS[name]):
            self.ignored[where] = f"without --{COMPANIONS[name][0]} it has no effect"
        elif REFUSED.keys().isdisjoint(COMPANIONS.get(name, ())):  # else the flag that requests the feature is rejected
            is_harmless = bool(words) and all(word in HARMLESS_VALUES.get(name, ()) for word in words)
            reason = "asks for what happens anyway" if is_harmless else idleness(name)
            if reason is None:
                self._reject(setting)
            elif name not in IGNORED_SWITCHES or is_on(words):
                self.ignored[where] = reason

    def _rewrite(self, setting: Setting, meanings: tuple[Meaning, ...]) -> None:
        takes_value = any(meaning.value is None for meaning in meanings)
        if not takes_value and not is_on(setting.words):
            return
        for flag, value, weak in meanings:
            ours = Setting(flag, setting.words if value is None else (value,), setting.where)
            if weak:
                self._weak.append(ours)
            else:
                self.draft.assign(ours)

    def _reject(self, setting: Setting) -> None:
        (name, words, where), draft = setting, self.draft
        reason = refusal(name)
        if reason is not None:
            if not _is_off(words):
                typed = f"{where} {' '.join(words)}" if 0 < len(words) < 4 else where
                draft.problems.append(f"{typed} is not supported: {reason}")
            return
        meant = meant_by(name)
        if name in SPECIAL:
            draft.problems.append(f"{where} belongs on the command line")
        else:
            dashes = "--" if where.startswith("--") else ""
            *first, last = [dashes + other for other in meant] or [""]
            choice = f": did you mean {', '.join(first)} or {last}?" if first else f": did you mean {last}?"
            draft.problems.append(f"{where} is unknown" + (choice if last else "; --help lists all flags"))
        near = {targets()[other][:2] for other in meant if other in targets()}
        draft.meant |= near if len(near) == 1 else set()
        draft.perhaps |= near

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

    def resolve_deepspeed(self, world_size: int) -> list[str]:
        """Reconcile DeepSpeed's JSON, if there is one, with the settings; return notes about keys without effect."""
        if self._deepspeed_file is None:
            return []
        from megatron_sp.config.flags.deepspeed_config import reconcile
        from megatron_sp.config.flags.deepspeed_keys import read_deepspeed_config

        draft = self.draft
        try:
            found = read_deepspeed_config(self._deepspeed_file, draft.config.given.get(("optimizer", "lr")))
            problems = reconcile(found, draft.config, world_size)
        except ConfigError as error:
            problems = [str(error)]
        if problems:
            draft.problems += problems
            settable = given.fields_of_groups("batch", "optimizer", "precision", "parallel")
            draft.perhaps |= {each for each in settable if not each[1].endswith("_parallel_size")}
            return []
        return [*found.overruled, *filter(None, [found.note()])]

    def resolve_tokens(self) -> None:
        """Convert lengths in tokens, unless sequences have several lengths; those that cannot be leave fields open."""
        draft, config = self.draft, self.draft.config
        if config.batch.seq_length_curriculum is not None:
            for name, value in self._tokens.items():
                config.set(*_token_field(name, "tokens"), value)
            return
        kind = "samples" if config.batch.train_iters is None else "iters"
        draft.meant |= {_token_field(name, kind) for name in given.TOKEN_FLAGS if name in draft.unread}
        if not self._tokens:
            return
        needed = {("model", "seq_length"), ("batch", "global_batch_size"), ("batch", "train_iters")}
        is_open = bool(draft.meant & needed)
        problems = [] if is_open else _count_tokens(config, self._tokens, kind)
        draft.problems += problems
        if problems or is_open:
            draft.meant |= {_token_field(name, kind) for name in self._tokens}


def _token_field(name: str, kind: str) -> tuple[str, str]:
    group = "batch" if name == "train-tokens" else "optimizer"
    return group, f"{name.removesuffix('-tokens').replace('-', '_')}_{kind}"


def _count_tokens(config: Config, tokens: dict[str, int], kind: str) -> list[str]:
    # convert lengths in tokens to samples, or to steps (``kind`` "iters"), rounded up; they take precedence over
    # others, as in Megatron-DeepSpeed
    negative = [f"--{name} ({value}) must be at least 0" for name, value in tokens.items() if value < 0]
    if negative:
        return negative
    batch, size, flag = config.batch, config.model.seq_length, f"--{next(iter(tokens))}"
    if not size or size < 1:
        return [f"{flag} needs --seq-length, to be turned into samples"]
    if kind == "iters":
        if batch.global_batch_size is None or batch.rampup_batch_size or batch.step_batch_size_schedule:
            return [f"{flag} with --train-iters needs a constant --global-batch-size, to be turned into steps"]
        size *= batch.global_batch_size
    for name, value in tokens.items():
        group, field_name = _token_field(name, kind)
        limit = config.get(group, field_name) if name == "train-tokens" else None
        config.set(group, field_name, -(-value // size) if limit is None else min(limit, -(-value // size)))
    return []
