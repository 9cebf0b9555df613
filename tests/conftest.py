"""Shared set-up: warm imports before any fork, so that a test on four ranks takes a tenth of a second."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# a forked child must not collect the parent's garbage: a process group in it waits for threads that only the parent has
os.register_at_fork(after_in_child=gc.freeze)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored in every child, which some of them are about
torch.set_num_threads(1)
torch.testing.assert_close(torch.ones(1), torch.ones(1))
_leaf = torch.ones(1, requires_grad=True)
torch.autograd.grad(_leaf * 1, _leaf, torch.ones(1))  # imports sympy, which is half a second of every rank


TIMER = pytest.StashKey[threading.Timer]()
KILLED = pytest.StashKey[list[int]]()


PROVEN = {  # by the path of a test, the first that fits
    "layouts (tp, sp, cp, dp, pp, ep, ZeRO) have the loss, every gradient and the weights of one process": "test_equality_grid",
    "steps on a device that runs as late as it may, or captured, use nothing before it is there": "fake_gpu/|graphs|captured",
    "Triton kernels and plain forms of operations agree": "tests/kernels/|unit/ops/",
    "memory, traffic and time of steps are as predicted": "fake_run|memory_form|traffic|unit/planner/|unit/estimate/",
    "models that others wrote have their own results and gradients when they are parallel": "schedule|slapo",
    "Hugging Face, Megatron and DeepSpeed files convert with their logits, or are refused without running anything": "convert|hugging_face",
    "runs that end, fail or are killed anywhere resume with the bits of one that did not": "checkpoint|resume|stop|faults|save|ckpt|exits",
    "data, tokenizers and their caches give the same samples on every layout and after every restart": "unit/data/|test_data|tokenizer",
    "settings that are wrong are refused in one message, and every flag is read": "unit/config/|flags",
    "commands of README, pages, scripts and tutorials do what they say": "unit/project/|unit/commands/|quickstart|tutorials|scripts",
    "parts of parallel layers, optimizers and models agree with the whole": "unit/(parallel|optim|models|comm)/|dist/",
    "other tests": "",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="files in another order, and the tests of each file: none depends on another one's")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that leaves autograd off, or another default dtype, fails itself and not hundreds of others."""
    left = [what for what, is_so in (("autograd off", not torch.is_grad_enabled()),
                                     ("another default dtype", torch.get_default_dtype() != torch.float32)) if is_so]  # fmt: skip
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    assert not left, f"{item.nodeid} leaves {' and '.join(left)}"
    killed = item.stash.get(KILLED, [])
    assert not killed, f"{item.nodeid} hung; the processes {killed} below it were killed"


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """What a hanging test has started is killed before pytest-timeout ends the worker: its pipes would hide that from pytest-xdist."""
    item.stash[KILLED] = []
    item.stash[TIMER] = threading.Timer(0.95 * settings.timeout, _kill_descendants, (os.getpid(), item.stash[KILLED]))
    item.stash[TIMER].start()


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    item.stash[TIMER].cancel()


def _kill_descendants(pid: int, killed: list[int]) -> None:
    """Kill all processes below ``pid`` (on Linux), and enter their ids."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            killed.append(child)
            _kill_descendants(child, killed)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What a whole run has proven; several layouts of a test count each."""
    config = terminalreporter.config
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword or config.option.collectonly:
        return
    counts = dict.fromkeys(PROVEN, 0)
    for report in terminalreporter.stats.get("passed", []):
        claim = next(claim for claim, path in PROVEN.items() if re.search(path, report.nodeid))
        counts[claim] += dict(report.user_properties).get("cases", 1)
    terminalreporter.section("proven")
    for claim, count in counts.items():
        terminalreporter.write_line(f"{count:6,} {claim}")


def pytest_collection_finish() -> None:
    """What is there now stays: a forked rank that looks for garbage need not walk through it, which would copy every page of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are deselected where there is none; the rest is put in order."""
    unknown = {(item.location[0], often.args): set(often.args) for item in items if (often := item.get_closest_marker("often"))}
    for item in items:
        if often := item.get_closest_marker("often"):
            name = item.name.partition("[")[2][:-1]
            unknown[item.location[0], often.args].discard(name)
            if name not in often.args:
                item.add_marker(pytest.mark.long)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and any(unknown.values()):
        raise pytest.UsageError(f"no parameters of the tests are called as in their marks `often`: {[w for w in unknown.items() if w[1]]}")
    for item in items:
        if isinstance(cases := getattr(item, "callspec", None) and item.callspec.params.get("cases"), list):  # type: ignore[attr-defined]
            item.user_properties.append(("cases", len(cases)))
    unwanted = [item for item in items if item.get_closest_marker("gpu") and not torch.cuda.is_available()]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]
    items.sort(key=lambda item: "integration" not in item.path.parts)  # the longest first: at the end two workers share small ones
    if (seed := config.getoption("--shuffle")) is not None:
        items[:] = _shuffled(items, seed)


def _shuffled(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Another order, the same for every worker: of files, and of the tests of a file, which stay together for the fixtures they share."""
    place = {path: random.Random(f"{seed} {path.name}").random() for path in {item.path for item in items}}
    draw = {item.nodeid: random.Random(f"{seed} {item.nodeid}").random() for item in items}
    return sorted(items, key=lambda item: (place[item.path], draw[item.nodeid]))
