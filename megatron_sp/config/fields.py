"""Flags as fields of dataclasses: help and bounds, kinds of values, and conditions under which a run reads a flag."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field
from functools import cache
from typing import Any

from megatron_sp.utils.numbers import MAX_COUNT

MAX_NUMBER = 1e30
"""Largest number where a field names no bound of its own."""
RANKS: dict[str, Any] = {"unit": "ranks", "low": 1, "high": 2**16}
LAYERS: dict[str, Any] = {"unit": "layers", "low": 1, "high": 10_000}
POSITIONS: dict[str, Any] = {"unit": "tokens", "low": 1, "high": 2**27}
STEPS: dict[str, Any] = {"unit": "steps", "low": 1, "high": 10**12}
STEPS_FROM_0: dict[str, Any] = {**STEPS, "low": 0}
_WORDS = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"}
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class Condition:
    """Condition under which a run reads a field."""

    needs: str  # what must be there, as behind the word "with" or "without"
    holds: Callable[[Any], bool]  # returns whether a ``Config`` has it
    why: str = ""  # reason for the line about a field without it (default: from ``needs``)
    of_model: bool = False  # it looks at the model, which may have to be read from a checkpoint first
    keeps: bool = False  # a field without it keeps its value, for checkpoints to be compared with

    @property
    def reason(self) -> str:
        """Why a field has no effect without it."""
        return self.why or f"without {self.needs} it has no effect"


# fmt: off
def flag(
    default: Any, help: str, *, aliases: tuple[str, ...] = (), unit: str = "", low: float | None = None,
    high: float | None = None, alone: int | str | None = None, path: bool = False,
    only: Condition | tuple[Condition, ...] = (),
) -> Any:
    """Create a dataclass field that becomes a flag.

    ``high``: by default ``MAX_COUNT``, or ``MAX_NUMBER`` for a float. ``alone``: the value if the flag is given without
    one. ``path``: a file's path, or a prefix of one. ``only``: the run reads it only under these conditions, which
    --help says in front of ``help``.
    """
    metadata = {
        "help": help, "unit": unit, "aliases": aliases, "low": low, "high": high, "alone": alone, "path": path,
        "only": (only,) if isinstance(only, Condition) else only,
    }
    return field(default=default, metadata=metadata)
# fmt: on


def described(item: Field[Any]) -> str:
    """Return the meaning of a flag, after what it needs to have an effect."""
    needs = " and ".join(condition.needs for condition in item.metadata["only"])
    return f"with {needs}: {item.metadata['help']}" if needs else str(item.metadata["help"])


def flag_name(field_name: str) -> str:
    """Return the flag of a field, such as --num-layers."""
    return f"--{field_name.replace('_', '-')}"


def shorten(text: str, most: int = 60) -> str:
    """Return a text of a user's for a message: printable, on one line, and cut off."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= most else line[: most - 3] + "..."


# --------------------------------------------------------------------------------------------------------------- kinds


# The command line, YAML files and ``state.json`` all use it, so a value means the same in all of them. Only types that
# occur in ``config/schema*.py`` are supported: int, float, str, bool, ``Literal`` of strings, each possibly ``| None``,
# an int or ``Literal["auto"]``, and ``tuple[int, ...]`` or ``tuple[str, ...]``.
@dataclass(frozen=True)
class FieldKind:
    """Type of one field."""

    base: str  # ``int``, ``float``, ``str``, ``bool`` or ``choice``
    optional: bool = False  # None is allowed
    many: bool = False  # a tuple of ``base``, written as several words
    choices: tuple[str, ...] = ()  # the words allowed if ``base`` is ``choice``
    word: str = ""  # a word allowed instead of a value of ``base``, such as "auto"; "" if there is none

    @property
    def metavar(self) -> str:
        """Placeholder of the value in --help."""
        one = self.base.upper() + (f"|{self.word}" if self.word else "")
        if self.choices:
            one = "{" + ",".join(self.choices) + "}"
        return f"{one} [{one} ...]" if self.many else one

    def parse(self, words: Sequence[str]) -> Any:
        """Convert words of a command line or YAML file to a value. Raises ValueError: what was expected."""
        if self.many:
            if self.base == "int":
                # "16 16 1000" in one pair of quotes is meant as three numbers, and so is "[16 16 1000]"
                plain = (word.removeprefix("[").removesuffix("]").replace(",", " ") for word in words)
                words = [part for text in plain for part in text.split()]
            if not words:
                raise ValueError(f"expected {self._expected}, got nothing")
            return tuple(self._parse_word(word) for word in words)
        if len(words) != 1:
            raise ValueError(f"expected {self._expected}, got {' '.join(words[:4]) or 'nothing'}")
        return self._parse_word(words[0])

    def coerce(self, value: Any) -> Any:
        """Convert a value read from JSON to its exact type (list to tuple, int to float). Raises ValueError."""
        if value is None and self.optional:
            return None
        if self.many:
            return tuple(map(self._coerce_one, value)) if isinstance(value, (list, tuple)) else self._refuse(value)
        return self._coerce_one(value)

    @property
    def _one(self) -> str:
        return _WORDS[self.base] + (f" or {self.word}" if self.word else "")

    @property
    def _expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return {"int": "one or more integers", "str": "one or more texts"}[self.base] if self.many else self._one

    def _parse_word(self, word: str) -> Any:
        text = word.strip().lower()
        if not text:
            raise ValueError(f"expected {self._expected}, got an empty text (an unset shell variable?)")
        if self.base == "choice":
            return self._choose(word)
        if self.base == "str" or text == self.word:
            return word if self.base == "str" else self.word
        if self.base == "bool":
            if word.lower() not in (*_TRUE, *_FALSE):
                raise ValueError(f"expected true or false, got '{shorten(word)}'")
            return word.lower() in _TRUE
        hint = ""
        try:
            value = int(word) if self.base == "int" else float(word)
        except ValueError:
            if self.base == "int":
                with suppress(ValueError, OverflowError):  # 1e3 and 10.0 are integers, spelled another way
                    whole = int(float(word))
                    hint = f": write {whole}" if whole == float(word) and abs(whole) <= MAX_COUNT else ""
            raise ValueError(f"expected {self._one}, got '{shorten(word)}'{hint}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expected a finite number, got '{shorten(word)}'")
        return value

    def _choose(self, word: str) -> str:
        for choice in self.choices:
            if (
                choice.lower() == word.strip().lower()
            ):  # Megatron-DeepSpeed writes rmsnorm where Megatron-LM has RMSNorm
                return choice
        raise ValueError(f"expected {self._expected}, got '{shorten(word)}'")

    def _coerce_one(self, value: Any) -> Any:
        if self.base == "choice" and isinstance(value, str):
            return self._choose(value)
        if self.word and value == self.word:
            return value
        if self.base == "float" and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if type(value).__name__ == self.base != "float":  # exact: True is not an integer here
            return value
        return self._refuse(value)

    def _refuse(self, value: Any) -> Any:
        raise ValueError(f"expected {self._expected}, got {type(value).__name__} {shorten(repr(value))}")


@cache
def field_kinds(cls: type) -> dict[str, FieldKind]:
    """Return the kind of every field of a configuration dataclass, by name."""
    return {name: _kind(hint) for name, hint in typing.get_type_hints(cls).items()}


def _kind(hint: Any) -> FieldKind:
    optional, word = False, ""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        optional = True
        hint, *words = (part for part in typing.get_args(hint) if part is not type(None))
        for literal in words:
            (word,) = typing.get_args(literal)
    if typing.get_origin(hint) is typing.Literal:
        return FieldKind("choice", optional, choices=typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return FieldKind(typing.get_args(hint)[0].__name__, optional, many=True)
    return FieldKind(hint.__name__, optional, word=word)


# ---------------------------------------------------------------------------------------------------------- conditions


def tokenizers(*kinds: str) -> Condition:
    """Return the condition of a file that some kinds of tokenizer read."""
    return Condition(f"--tokenizer-type {' or '.join(kinds)}", lambda c: c.data.tokenizer_type in (None, *kinds))


class When:
    """Conditions under which flags have an effect: ``only=`` in ``schema*.py`` names them."""

    # A field whose condition does not hold is not read by the run; ``normalize`` names it in one line if it was set.
    # What --help and docs/reference/flags.md say in front of its meaning ("with --num-experts: ...") comes from here,
    # too. Where a flag without its condition is an error instead, the rule is in ``config/rules*.py``.

    # fmt: off
    EXPERTS = Condition("--num-experts", lambda c: c.model.has_experts, of_model=True)
    EXPERT_BIAS = Condition("--moe-router-enable-expert-bias", lambda c: c.model.moe_router_enable_expert_bias,
        of_model=True)
    BALANCE = Condition("--moe-aux-loss-coeff",
        lambda c: c.model.moe_aux_loss_coeff != 0 or c.model.moe_router_load_balancing_type == "none", of_model=True)
    QK_NORM = Condition("--qk-layernorm", lambda c: c.model.qk_layernorm, of_model=True)
    ROTARY = Condition("--position-embedding-type rope", lambda c: c.model.position_embedding_type == "rope",
        of_model=True)
    ROPE_SCALING = Condition("--use-rope-scaling", lambda c: c.model.use_rope_scaling, of_model=True)
    NO_BIASES = Condition("--disable-bias-linear", lambda c: c.model.disable_bias_linear, of_model=True)
    GELU = Condition("a GELU", lambda c: c.model.activation.startswith(("gelu", "geglu"))
        or (c.model.is_bert and c.model.head_activation.startswith("gelu")), of_model=True)

    TENSOR_PARALLEL = Condition("--tensor-model-parallel-size above 1",
        lambda c: c.parallel.tensor_model_parallel_size > 1, "it cuts activations over the tensor-parallel ranks and"
        " --tensor-model-parallel-size is 1: off; Ulysses is --sequence-parallel-size N")
    EXPERT_PARALLEL = Condition("--expert-model-parallel-size above 1",
        lambda c: c.parallel.expert_model_parallel_size > 1)
    EXCHANGES = Condition("--sequence-parallel-size or --context-parallel-size above 1",
        lambda c: c.parallel.sequence_parallel_size > 1 or c.parallel.context_parallel_size > 1)
    NCCL = Condition("GPUs", lambda c: c.parallel.distributed_backend != "gloo" and c.kernels.device != "cpu",
        "the ranks talk over gloo, not NCCL")
    GRAPHS = Condition("a GPU, unless --cuda-graphs off",
        lambda c: c.kernels.cuda_graphs != "off" and c.kernels.device != "cpu",
        "steps are captured on GPUs, and not with --cuda-graphs off")
    PACKED = Condition("--reset-attention-mask or --bert-pack-sequences",
        lambda c: c.data.reset_attention_mask or c.data.bert_pack_sequences)
    SHARDED = Condition("--zero-stage 1 or more", lambda c: c.parallel.zero_stage > 0)
    RECOMPUTES = Condition("--recompute-granularity", lambda c: c.kernels.recompute_granularity is not None)
    RECOMPUTES_BLOCKS = Condition("--recompute-granularity full", lambda c: c.kernels.recompute_granularity == "full")
    VERIFIES = Condition("--verify-parallelism", lambda c: c.parallel.verify_parallelism)

    VALIDATES = Condition("--eval-iters above 0", lambda c: c.batch.eval_iters > 0)
    ADAM = Condition("--optimizer adam", lambda c: c.optimizer.optimizer == "adam")
    SGD = Condition("--optimizer sgd", lambda c: c.optimizer.optimizer == "sgd")
    # these five are in the schedule that a checkpoint of any version is compared with: their values stay
    WSD = Condition("--lr-decay-style WSD", lambda c: c.optimizer.lr_decay_style == "WSD", keeps=True)
    DECAY = Condition("a --lr-decay-style that decays", lambda c: c.optimizer.lr_decay_style != "constant", keeps=True)
    HORIZON = Condition("a --lr-decay-style that decays or --lr-warmup-fraction",
        lambda c: c.optimizer.lr_decay_style != "constant" or c.optimizer.lr_warmup_fraction is not None, keeps=True)
    ONE_DECAY = Condition("no --start-weight-decay and --end-weight-decay",
        lambda c: c.optimizer.start_weight_decay is None or c.optimizer.end_weight_decay is None,
        "--start-weight-decay and --end-weight-decay say what it is", keeps=True)
    WARMUP = Condition("a warm-up",
        lambda c: bool(c.optimizer.lr_warmup_fraction or c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples
                       or c.optimizer.lr_warmup_tokens), keeps=True)
    FP16 = Condition("--fp16", lambda c: c.precision.fp16)
    DYNAMIC_SCALE = Condition("a dynamic loss scale", lambda c: c.precision.loss_scale is None)

    SPLITS = Condition("--data-path", lambda c: bool(c.data.data_path))
    FILES = Condition("files of tokens", lambda c: not c.data.mock_data)
    SAVES = Condition("--save", lambda c: c.checkpoint.save is not None)
    LOADS = Condition("--load or --auto-resume", lambda c: c.checkpoint.load is not None or c.checkpoint.auto_resume)
    WITH_STATE = Condition("no --finetune", lambda c: not c.checkpoint.finetune, "--finetune loads weights alone")
    PROFILES = Condition("--profile", lambda c: c.logging.profile)
    TENSORBOARD = Condition("--tensorboard-dir", lambda c: c.logging.tensorboard_dir is not None)
    WANDB = Condition("--wandb-project", lambda c: c.logging.wandb_project is not None)
    # fmt: on
