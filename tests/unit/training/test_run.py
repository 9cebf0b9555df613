"""Putting a run together, on one process: the order of its parts, and which of them ends a run that cannot work, with which exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.training import MOCK, TINY

from megatron_sp import training
from megatron_sp.comm.failed_ranks import Peers
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config.schema import Config
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training import loop, memory_estimate
from megatron_sp.training import run as parts
from megatron_sp.training.metrics import Console
from megatron_sp.training.parts import RunContext
from megatron_sp.training.run import prepare, set_vocab_size
from megatron_sp.training.saves import Saves
from megatron_sp.training.setup import RunStatus
from megatron_sp.training.signals import KillSwitch, StopSignals
from megatron_sp.utils.errors import ConfigError, ReportedError
from megatron_sp.utils.faults import FaultPlan
from megatron_sp.utils.launch import Launch

BUILDERS = [
    "open_checkpointer", "find_origin", "build_tokenizer", "plan_steps", "build_data", "choose_split", "choose_attention", "choose_layout",
    "estimate_memory", "build_model", "load_checkpoint", "build_step", "announce",
]  # fmt: skip
FRESH = [name for name in BUILDERS if name != "load_checkpoint"]


class Lines(Console):
    """A console that keeps its lines."""

    def __init__(self) -> None:
        super().__init__(0)
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)


def make_context(folder: Path, *flags: object) -> RunContext:
    """What a run of one process is started with; inside a process group."""
    length = () if "--train-samples" in flags else ("--train-iters", 4)
    data = MOCK[1:] if "--data-path" in flags else MOCK
    words = [str(word) for word in (*TINY, "--save", folder, "--no-async-save", *length, *data, *flags)]
    config, launch = parse_config(words, prog="pretrain_gpt.py"), Launch(0, 0, 1, 1, 0)
    groups = ParallelGroups.create(torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    return RunContext(
        config=config, task=GPT, launch=launch, groups=groups, peers=Peers(["here"], [os.getpid()], ["here"]), run_dir=folder,
        status=RunStatus(), console=Lines(), watchdog=SimpleNamespace(beat=lambda _: None),  # type: ignore[arg-type]
        signals=StopSignals(), kill_switch=KillSwitch(), faults=FaultPlan(),
    )  # fmt: skip


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """The names of the parts that were begun, in order."""
    begun, originals = list[str](), {name: getattr(parts, name) for name in BUILDERS}

    def watch(name: str, build: Callable[..., Any]) -> Callable[..., Any]:
        def built(*given: Any) -> Any:
            begun.append(name)
            return build(*given)

        return built

    for name, build in originals.items():
        setattr(parts, name, watch(name, build))
    try:
        yield begun
    finally:
        for name, build in originals.items():
            setattr(parts, name, build)


def refused(folder: Path, *flags: object) -> tuple[str, int, str]:
    """(the part that ended the run, exit code, message)."""
    with watched() as begun, contextlib.ExitStack() as closing, pytest.raises(ReportedError) as found:
        prepare(make_context(folder, *flags), closing)
    return begun[-1], found.value.exit_code, str(found.value)


def _trains(folder: Path) -> None:
    with watched() as begun, contextlib.ExitStack() as closing:
        run = prepare(make_context(folder, "--exit-interval", 2), closing)
        assert begun == FRESH and run.origin is None and not run.continues_own and run.evaluated == []
        with pytest.raises(dataclasses.FrozenInstanceError):
            run.plan = run.plan  # type: ignore[misc]
        assert loop.train(run, Saves(run)) == 0 and run.state.progress.step == 2 and run.plan.start.step == 0


def _resumes(folder: Path) -> None:
    with watched() as begun, contextlib.ExitStack() as closing:
        context = make_context(folder, "--auto-resume", "--log-interval", 7)
        run = prepare(context, closing)
        assert begun == BUILDERS and run.continues_own and run.origin is not None and run.origin.folder.name == "step-000002"
        assert run.state.progress == run.plan.start and run.plan.start.step == 2 and run.parts.optimizer.num_updates == 2
        lines = context.console.lines  # type: ignore[attr-defined]
        assert any(line.startswith("resumed from ") and "(step 2, 8 samples)" in line for line in lines)
        assert any(line.endswith(f"steps 2 to 4, run folder {folder}") for line in lines)
        assert loop.train(run, Saves(run)) == 0 and run.state.progress.consumed_samples == 16


def _whole_life(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _trains(run)
    part, code, message = refused(run)
    assert (part, code) == ("find_origin", 3) and "add --auto-resume" in message
    part, code, message = refused(run, "--auto-resume", "--seed", 9)
    assert (part, code) == ("load_checkpoint", 4) and "the training data is not what the checkpoint was trained on" in message
    _resumes(run)


def test_the_parts_of_a_run_that_begins_and_resumes(tmp_path: Path) -> None:
    run_ranks(_whole_life, 1, tmp_path, tmp_path)


REFUSED: list[tuple[tuple[object, ...], str, int, str]] = [
    (("--load", "nowhere"), "find_origin", 3, "there is no nowhere"),
    (("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "nowhere.json"), "build_tokenizer", 4, "nowhere.json"),
    (("--train-samples", 3), "plan_steps", 2, "train_samples (3) is less than one step takes (4)"),
    (("--data-path", "nowhere"), "build_data", 4, "nowhere"),
    (("--attention-backend", "flash", "--bf16", "--device", "auto"), "choose_attention", 2, "flash"),
]


def _ends(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    wrong = []
    for number, (flags, *want) in enumerate(REFUSED):
        part, code, message = refused(tmp_path / str(number), *flags)
        if [part, code] != want[:2] or str(want[2]) not in message:
            wrong.append(f"{flags}: {part}, {code}, {message}")
        if code and (tmp_path / str(number) / "metrics.jsonl").exists():
            wrong.append(f"{flags}: metrics.jsonl says that a run began")
    memory_estimate.host_memory_bytes, memory_estimate.swap_bytes = lambda: 2**10, lambda: 0  # type: ignore[assignment]
    part, code, message = refused(tmp_path / "memory")
    assert (part, code) == ("estimate_memory", 2), message
    assert wrong == []


def test_what_cannot_work_ends_at_its_own_part(tmp_path: Path) -> None:
    """Nothing after it is begun: no model is built for a wrong path."""
    run_ranks(_ends, 1, tmp_path, tmp_path)


def test_the_table_of_parts_is_the_order_in_which_they_are_built() -> None:
    """The module's table, and the calls of ``prepare`` as they are written."""
    rows = re.findall(r"^    ([a-z_]+) +[\d-] ", str(parts.__doc__), re.MULTILINE)
    assert rows == [name for name in BUILDERS if name in rows] and len(rows) >= 10
    called = [name for name in prepare.__code__.co_names if name in BUILDERS]
    assert called == BUILDERS


def test_the_list_of_files_is_complete() -> None:
    """Of ``training/__init__.py``."""
    listed = re.findall(r"^    (\w+\.py) +\S", str(training.__doc__), re.MULTILINE)
    found = [path.name for path in Path(str(training.__file__)).parent.glob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(found)


def _is_closed(tmp_path: Path) -> None:
    opened = []
    original = parts.build_data

    def no_model(*_: object) -> Any:
        raise RuntimeError("no model")

    def keep(*given: Any) -> parts.RunData:
        opened.append(original(*given))
        return opened[-1]

    parts.build_data, parts.build_model = keep, no_model
    with pytest.raises(RuntimeError, match="no model"), contextlib.ExitStack() as closing:
        prepare(make_context(tmp_path / "run", "--num-workers", 2, "--eval-iters", 1), closing)
    (data,) = opened
    for loader in (data.train_loader, *(loader for split in ("valid", "test") for _, loader in data.evaluated[split])):
        assert loader is not None
        with pytest.raises(RuntimeError, match=re.escape("after close()")):
            loader.step(0, 1)


def test_what_was_opened_is_closed_if_a_later_part_fails(tmp_path: Path) -> None:
    run_ranks(_is_closed, 1, tmp_path, tmp_path)


def test_the_vocabulary_is_the_tokenizers_unless_a_larger_one_is_given() -> None:
    tokenizer: Any = SimpleNamespace(vocab_size=60)
    for given, settled in ((None, 60), (60, 60), (64, 64)):
        config = Config()
        config.model.vocab_size = given
        set_vocab_size(config, tokenizer)
        assert config.model.vocab_size == settled
    config.model.vocab_size = 59
    with pytest.raises(ConfigError, match=r"vocab_size \(59\) must be at least the tokenizer's \(60\)"):
        set_vocab_size(config, tokenizer)


def test_another_context_parallel_size_is_another_layout() -> None:
    """Choices that were timed are kept for the same layout alone; checkpoints of before there were cp, pp and ep had one rank of each."""
    record = {"world_size": 4, "pp": 1, "dp": 1, "cp": 1, "sp": 4, "tp": 1, "tp_seq": False, "ep": 1}
    older = {name: value for name, value in record.items() if name not in ("cp", "pp", "ep")}
    chosen = {"sp_overlap": {"mode": "chunked", "chunks": 2}, "attention": "sdpa"}

    def kept(stored: object, now: dict[str, object]) -> object:
        return parts.Origin(Path(), {"layout": stored}, True, True, False, False).layout_like(now)

    for stored in ({**older, **chosen}, {**record, **chosen}):
        assert kept(stored, record) == stored
    assert kept({**older, **chosen}, {**record, "cp": 2, "sp": 2}) == {} == kept({**record, "cp": 2, "sp": 2}, record)
    assert kept({**older, **chosen}, {**record, "pp": 2, "sp": 2}) == {} == kept(None, record)
