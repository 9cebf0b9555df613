"""Every flag is read by a run, is refused, or says itself that it is not read: found by watching what a run reads of its configuration."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training import MOCK, TINY, train

from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config.fields import FieldKind, field_kinds
from megatron_sp.config.flags.arguments import draft_config
from megatron_sp.config.rules import normalize, violations
from megatron_sp.config.schema import GROUPS, Config, diff
from megatron_sp.tasks.bert import bert_task
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training.loop import pretrain

Field = tuple[str, str]
RUNS = {
    "gpt": (),
    "gpt with much": ("--position-embedding-type", "rope", "--use-rope-scaling", "--num-experts", 4, "--moe-router-score-function",
        "sigmoid", "--moe-router-enable-expert-bias", "--moe-aux-loss-coeff", 0.1, "--moe-router-num-groups", 2, "--moe-router-group-topk",
        1, "--disable-bias-linear", "--qk-layernorm", "--normalization", "RMSNorm", "--save", "RUN", "--profile", "--profile-step-start", 0,
        "--profile-step-end", 1, "--fp16", "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", 1, "--lr-decay-iters", 9, "--lr-warmup-iters",
        1, "--eval-iters", 1, "--recompute-granularity", "full", "--reset-attention-mask"),
    "bert": ("--model-family", "bert", "--optimizer", "sgd", "--swiglu", "--bert-head-activation", "relu"),
}  # fmt: skip
_NO_USE = ("/dataclasses.py", "/copy.py", "/config/rules.py", "/config/fields.py", "/estimate/")
_PROPERTIES = ("params_dtype",)  # of the dataclasses in config/schema.py, whose other functions only copy and compare


def watch(seen: set[Field]) -> None:
    """Note in ``seen`` which fields are read from now on, but not by what copies, stores, compares or estimates."""

    def watched(group: str, cls: type, names: set[str]) -> Callable[[Any, str], Any]:
        def read(self: Any, name: str) -> Any:
            if name in names:
                code = sys._getframe(1).f_code
                copies = "/config/schema.py" in code.co_filename and code.co_name not in _PROPERTIES
                if not copies and not any(part in code.co_filename for part in _NO_USE):
                    seen.add((group, name))
            return object.__getattribute__(self, name)

        return read

    for group, cls in GROUPS.items():
        cls.__getattribute__ = watched(group, cls, set(cls.__dataclass_fields__))  # type: ignore[attr-defined, method-assign]


def reads(tmp_path: Path, words: list[str]) -> set[Field]:
    """The fields that a run of one step reads, in a process of its own."""
    found = tmp_path / "reads.json"

    def program(words: list[str]) -> None:
        config = parse_config(words, prog="pretrain.py")
        task = bert_task(config) if config.model.is_bert else GPT
        seen: set[Field] = set()
        leave = os._exit

        def note_and_leave(code: int) -> None:
            found.write_text(json.dumps(sorted(seen)))
            leave(code)

        os._exit = note_and_leave  # type: ignore[assignment]
        watch(seen)
        pretrain(config, task)

    train(tmp_path, *words, program=program).expect(0)
    return {(group, name) for group, name in json.loads(found.read_text())}


def other_value(kind: FieldKind, about: Any, now: Any) -> Any:
    """Return a value that is allowed by itself and is not the present one."""
    if kind.base == "bool":
        return not now
    one = {"int": (about["low"] or 0) + 1, "float": 0.75, "str": "x", "choice": next((c for c in kind.choices if c != now), None)}[
        kind.base
    ]
    one = one + 1 if one == now and kind.base == "int" else one
    return (one,) if kind.many else one


def is_noticed(words: list[str], group: str, name: str) -> bool:
    """Return whether setting a field beside these flags is refused, named, or does something when the configuration is settled."""

    def settled(config: Config) -> Config:
        return normalize(copy.deepcopy(config))

    before, now = draft_config(words)[0], draft_config(words)[0]
    kind, about = field_kinds(GROUPS[group])[name], GROUPS[group].__dataclass_fields__[name].metadata
    setattr(getattr(now, group), name, other_value(kind, about, getattr(getattr(before, group), name)))
    one, two = settled(before), settled(now)
    told = len(two.ignored_flags) > len(one.ignored_flags) or len(violations(two, 1)) > len(violations(one, 1))
    return told or bool(diff(one, two).keys() - {f"{group}.{name}"})


@pytest.mark.parametrize("run", RUNS)
def test_a_field_that_is_not_read_is_refused_or_named(run: str, tmp_path: Path) -> None:
    flags = [str(tmp_path / "run") if word == "RUN" else str(word) for word in ("--train-iters", 1, *RUNS[run])]
    words = [*TINY, *MOCK, *flags]
    seen, config, silent = reads(tmp_path, flags), normalize(draft_config(words)[0]), []
    for group, cls in GROUPS.items():
        for name in cls.__dataclass_fields__:
            conditions = cls.__dataclass_fields__[name].metadata["only"]
            declared = any(not condition.holds(config) for condition in conditions)
            if (group, name) not in seen and not declared and not is_noticed(words, group, name):
                silent.append(f"{group}.{name}")
    assert silent == [], "flags without effect in this run, and without only=... in the schema"
