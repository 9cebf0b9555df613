"""The training loop on one process: what it does after which step, what ends it, and with which exit code.

The loop is the real one; the parts of its run are scripted and write down what is asked of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.training import records, status, tensors, train

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.config.schema import Config
from megatron_sp.training import loop, nan_checks
from megatron_sp.training.microbatches import BatchPlan
from megatron_sp.training.parts import Run
from megatron_sp.training.signals import KillSwitch
from megatron_sp.training.step import StepResult
from megatron_sp.training.train_state import Progress
from megatron_sp.utils.errors import DataError, NumericsError
from megatron_sp.utils.run_log import read_records


@dataclass
class Script:
    """A run whose parts write down what is asked of them."""

    train_iters: int = 6
    save_interval: int | None = None
    batches: BatchPlan = field(default_factory=lambda: BatchPlan(1, 1, 4))
    start: Progress = field(default_factory=Progress)
    continues_own: bool = False
    evaluated: tuple[str, ...] = ()
    config: Config = field(default_factory=Config)
    started: float = field(default_factory=time.monotonic)
    finish: bool = False
    results: dict[int, StepResult] = field(default_factory=dict)  # of steps by number; those that are not named are ordinary
    act: Callable[[str], None] = lambda _: None  # called with each event when it happens; a signal can come in between
    events: list[str] = field(default_factory=list)  # what has been asked, in order
    lines: list[str] = field(default_factory=list)  # what the user was told
    rates: list[int] = field(default_factory=list)  # scheduled samples for which the learning rate was asked
    unit: None = None  # of the learning rate's schedule: samples
    requested: bool = False
    kill_switch_path: str | None = None
    failed: bool = False
    saved_step: int = -1

    def note(self, event: str) -> None:
        self.events.append(event)
        self.act(event)

    # of the run

    def make(self) -> Run:
        nothing = lambda *_, **__: None
        self.progress = Progress(**vars(self.start))
        self.status: list[tuple[Any, ...]] = []
        context = SimpleNamespace(
            config=self.config, task=SimpleNamespace(finish=(lambda run: self.note("finish")) if self.finish else None),
            launch=SimpleNamespace(rank=0), groups=SimpleNamespace(control=SINGLE_RANK, world=SINGLE_RANK, device=torch.device("cpu")),
            run_dir=Path("runs/x"), status=SimpleNamespace(write=lambda *a, **k: self.status.append((*a[:2], k["step"]))),
            console=SimpleNamespace(line=self.lines.append, start_progress=nothing), watchdog=SimpleNamespace(beat=nothing),
            signals=self, kill_switch=KillSwitch(self.kill_switch_path), faults=None, started=self.started,
        )  # fmt: skip
        reporter = SimpleNamespace(pause_ended=nothing, step=lambda progress, result, **k: self.note(f"report {progress.step}"))
        run = SimpleNamespace(
            context=context, continues_own=self.continues_own, evaluated=list(self.evaluated), reporter=reporter,
            plan=SimpleNamespace(batches=self.batches, start=self.start, train_iters=self.train_iters, lr_schedule=self, curriculum=None),
            data=SimpleNamespace(train_loader=self),
            layout=SimpleNamespace(overlap_report=None),
            parts=SimpleNamespace(weights=SimpleNamespace(settle=nothing), scaler=SimpleNamespace(scale=1.0), optimizer=None),
            state=SimpleNamespace(progress=self.progress, units=[], samples=SimpleNamespace(add=nothing)),
            train_step=SimpleNamespace(run=self.take_step),
        )  # fmt: skip
        return cast("Run", run)

    def take_step(self, micro_batches: list[Any], step: int, *, stop: bool, **_: Any) -> StepResult:
        self.note(f"step {step} of {len(micro_batches)}")
        ordinary = StepResult([1.0], 0.5, updated=True, overflow=False, stop_requested=stop or self.requested, num_loss_tokens=8.0)
        return self.results.get(step, ordinary)

    def lr(self, samples: int) -> float:
        self.rates.append(samples)
        return 0.1

    def decoupled_lr(self, samples: int) -> float | None:
        return None

    def weight_decay(self, samples: int) -> float:
        return 0.0

    # of a loader

    def step(self, consumed_samples: int, count: int) -> list[dict[str, torch.Tensor]]:
        return [{"tokens": torch.zeros(1, 8), "digests": torch.zeros(1), "places": torch.arange(1)} for _ in range(count)]

    def global_sample_ids(self, consumed_samples: int, count: int) -> np.ndarray:
        return np.arange(count)

    # of the saves

    def poll(self) -> None: ...

    @property
    def interval(self) -> Script:
        return self

    def is_due(self, step: int) -> bool:
        return self.save_interval is not None and step % self.save_interval == 0

    def save(self) -> None:
        self.saved_step = self.progress.step
        self.note(f"save {self.progress.step}")

    def save_last(self) -> None:
        self.saved_step = self.progress.step
        self.note(f"last save {self.progress.step}")

    def train(self) -> int:
        return loop.train(self.make(), cast("Any", self if self.save_interval else None))

    @property
    def happened(self) -> str:
        """The events but reports, without the numbers of micro-batches."""
        return ", ".join(event.split(" of ")[0] for event in self.events if not event.startswith("report"))


@pytest.fixture(autouse=True)
def evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted run's validation or test is an event, which a signal or the kill switch breaks off."""
    original = loop._evaluate

    def evaluate(run: Run, kind: loop.Split) -> bool:
        script = cast("object", run.context.signals)
        if not isinstance(script, Script):
            return original(run, kind)
        script.note(f"{kind} {run.state.progress.step}")
        return not script.requested and not run.context.kill_switch.is_thrown()

    monkeypatch.setattr(loop, "_evaluate", evaluate)
    monkeypatch.setattr(nan_checks, "dump_bad_step", lambda *_: "a file")


def script(eval_interval: int | None = None, **more: Any) -> Script:
    batch = {name: more.pop(name) for name in ("exit_interval", "exit_duration_in_mins", "skip_train") if name in more}
    made = Script(**more)
    for name, value in {"eval_interval": eval_interval, **batch}.items():
        setattr(made.config.batch, name, value)
    return made


def at(event: str, act: Callable[[Script], None], made: Script) -> Script:
    """Let something happen at an event."""
    made.act = lambda now: act(made) if now.split(" of ")[0] == event else None
    return made


def signalled(made: Script) -> None:
    made.requested = True


SIX = "step 1, step 2, save 2, valid 2, step 3, step 4, save 4, valid 4, step 5, step 6, last save 6, valid 6"
GOES_ON = "; the same command with --auto-resume goes on from here"
RUNS: dict[str, tuple[dict[str, Any], str, int, str, str]] = {
    # what is scripted, the event at which a signal comes, exit code, what happens, the last line
    "saves and validations at their intervals, and once at the end": (
        {"eval_interval": 3, "save_interval": 2}, "", 0,
        "step 1, step 2, save 2, step 3, valid 3, step 4, save 4, step 5, step 6, last save 6, valid 6, test 6",
        "stopped at step 6: the run is complete",
    ),
    "an exit after the save and the validation of its step, neither tested nor finished": (
        {"eval_interval": 4, "exit_interval": 4, "save_interval": 2, "finish": True}, "", 0,
        "step 1, step 2, save 2, step 3, step 4, save 4, valid 4, last save 4", "stopped at step 4: --exit-interval",
    ),
    "a signal leaves out what takes long": (
        {"eval_interval": 3, "save_interval": 3, "finish": True}, "step 3", 75, "step 1, step 2, step 3, last save 3",
        f"stopped at step 3: a signal asked for it{GOES_ON}",
    ),
    "a signal in the last step leaves the evaluation to a restart": (
        {"train_iters": 2, "save_interval": 9}, "step 2", 75, "step 1, step 2, last save 2",
        f"stopped at step 2: a signal asked for it{GOES_ON}",
    ),
    "a signal in a save": (
        {"eval_interval": 2, "save_interval": 2}, "save 2", 75, "step 1, step 2, save 2, last save 2",
        f"stopped at step 2: a signal asked for it{GOES_ON}",
    ),
    "a signal in a validation": (
        {"eval_interval": 2, "save_interval": 2}, "valid 2", 75, "step 1, step 2, save 2, valid 2, last save 2",
        f"stopped at step 2: a signal asked for it{GOES_ON}",
    ),
    "a signal in the last validation": (
        {"eval_interval": 2, "save_interval": 2, "finish": True}, "valid 6", 75, SIX, "stopped at step 6: the run is complete",
    ),
    "a signal in the test": (
        {"eval_interval": 2, "save_interval": 2, "finish": True}, "test 6", 75, f"{SIX}, test 6", "stopped at step 6: the run is complete",
    ),
    "a signal without --save, which promises nothing": (
        {}, "step 2", 75, "step 1, step 2", "stopped at step 2: a signal asked for it; nothing was saved, for there is no --save",
    ),
    "a duration that is over, which is no preemption": (
        {"save_interval": 5, "started": time.monotonic() - 3600, "exit_duration_in_mins": 50}, "", 0, "step 1, last save 1",
        "stopped at step 1: --exit-duration-in-mins",
    ),
    "a finished run is evaluated and finished": (
        {"eval_interval": 2, "save_interval": 2, "start": Progress(step=6), "finish": True}, "", 0, "valid 6, test 6, finish", "",
    ),
    "--skip-train only evaluates": ({"eval_interval": 2, "skip_train": True}, "", 0, "valid 0, test 0", ""),
    "a validation that a kill prevented is made up for": (
        {"eval_interval": 2, "start": Progress(step=4), "continues_own": True}, "", 0, "valid 4, step 5, step 6, valid 6, test 6",
        "stopped at step 6: the run is complete; nothing was saved, for there is no --save",
    ),
    "one that none prevented is not": (
        {"eval_interval": 2, "start": Progress(step=4), "continues_own": True, "evaluated": ("valid",)}, "", 0,
        "step 5, step 6, valid 6, test 6", "stopped at step 6: the run is complete; nothing was saved, for there is no --save",
    ),
    "nor that of another run, whose checkpoint was loaded": (
        {"eval_interval": 2, "start": Progress(step=4)}, "", 0, "step 5, step 6, valid 6, test 6",
        "stopped at step 6: the run is complete; nothing was saved, for there is no --save",
    ),
    "nor that of initial weights, also of a converted checkpoint": (
        {"eval_interval": 2, "train_iters": 1, "continues_own": True}, "", 0, "step 1, valid 1, test 1",
        "stopped at step 1: the run is complete; nothing was saved, for there is no --save",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_what_happens_in_which_order(name: str) -> None:
    given, event, code, happened, last_line = RUNS[name]
    made = at(event, signalled, script(**given))
    assert (made.train(), made.happened) == (code, happened)
    assert made.status == [("preempted" if code == 75 else "done", code, made.progress.step)]
    stopped = [line for line in made.lines if line.startswith("stopped")]
    assert stopped == [last_line] * bool(last_line)
    assert ("valid at step 4: done already, as metrics.jsonl says" in made.lines) == bool(made.evaluated)


def test_a_step_is_reported_before_what_it_leads_to() -> None:
    made = script(1, save_interval=1, train_iters=2)
    made.train()
    assert [event.split(" of ")[0] for event in made.events[:5]] == ["step 1", "report 1", "save 1", "valid 1", "step 2"]


@pytest.mark.parametrize(("event", "happened"), [
    ("report 1", "step 1, step 2, last save 2"), ("save 2", "step 1, step 2, save 2, last save 2"),
    ("valid 2", "step 1, step 2, save 2, valid 2, last save 2"), ("test 6", f"{SIX}, test 6"),
])  # fmt: skip
def test_a_kill_switch_stops_as_a_signal_does_though_the_file_is_gone_again(event: str, happened: str, tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    made = script(2, save_interval=2, kill_switch_path=str(switch))

    def act(now: str) -> None:
        if now.split(" of ")[0] == event:
            switch.symlink_to("nowhere")  # a link is a file, too
        elif now.startswith("last save"):
            switch.unlink(missing_ok=True)

    made.act = act
    assert (made.train(), made.happened) == (75, happened)
    if event != "test 6":
        again = "when the file is removed, the same command with --auto-resume goes on from here"
        assert made.lines[-1] == f"stopped at step 2: the file of --kill-switch-path is there; {again}"


def test_a_last_save_that_failed_is_the_exit_code() -> None:
    made = script(save_interval=9, failed=True)
    assert made.train() == 6 and made.status == [("failed", 6, 6)] and "--auto-resume" in made.lines[-1]


def not_finite(overflow: bool = False) -> StepResult:
    return StepResult([1.0], float("nan"), updated=False, overflow=overflow, stop_requested=False, num_loss_tokens=8.0)


def test_the_learning_rate_goes_by_samples_of_steps_that_were_taken_and_the_batch_by_all() -> None:
    """The ramp-up from 2 to 4 lasts 4 samples; the samples of the skipped second step are consumed all the same."""
    made = script(batches=BatchPlan(1, 1, 4, 2, 2, 4), train_iters=4, results={2: not_finite()})
    assert made.train() == 0
    assert [event for event in made.events if event.startswith("step")] == ["step 1 of 2", "step 2 of 2", "step 3 of 4", "step 4 of 4"]
    assert made.rates == [0, 2, 2, 6]
    found = made.progress
    assert (found.consumed_samples, found.scheduled_samples, found.consumed_tokens) == (12, 10, 96)
    assert (found.skipped_steps, found.bad_steps) == (1, 0)


def test_steps_that_are_not_finite_are_counted_in_a_row() -> None:
    made = script(results={2: not_finite(), 3: not_finite(), 5: not_finite(), 6: not_finite()}, train_iters=9)
    made.config.precision.max_bad_steps = 2
    assert made.train() == 0 and made.progress.skipped_steps == 4
    made = script(results={n: not_finite() for n in (2, 3, 4)}, save_interval=9)
    made.config.precision.max_bad_steps = 2
    with pytest.raises(NumericsError, match=r"3 non-finite steps in a row \(--max-bad-steps 2\): stopped at step 4"):
        made.train()
    assert made.happened == "step 1, step 2, step 3, step 4", "weights that nobody asked for are not saved over good ones"


def test_an_overflow_of_fp16_is_skipped_but_nothing_to_worry_about() -> None:
    made = script(results={n: not_finite(overflow=True) for n in range(1, 6)})
    made.config.precision.max_bad_steps = 0
    assert made.train() == 0 and (made.progress.skipped_steps, made.progress.bad_steps) == (5, 0)


def test_a_run_does_not_end_well_in_a_row_of_bad_steps() -> None:
    made = script(results={5: not_finite(), 6: not_finite()}, save_interval=9)
    with pytest.raises(NumericsError, match="ends at step 6 with 2 non-finite steps in a row"):
        made.train()
    assert made.happened.endswith("last save 6, valid 6, test 6"), "the weights are good: they are kept"


def test_bad_data_in_the_middle_is_the_error_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have not read it: they wait in a collective already, and only this rank can say what is wrong."""

    def step(*_: object) -> Any:
        raise DataError("sample 7 is damaged")

    made = script()
    monkeypatch.setattr(made, "step", step)
    with pytest.raises(DataError) as found:
        made.train()
    assert not found.value.on_all_ranks and made.events == []


def test_a_real_run_does_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--log-interval", 2, "--save-interval", 2, "--eval-interval", 3, "--eval-iters", 1, "--exit-interval", 5)
    train(tmp_path, "--save", run, *flags, "--no-async-save").expect(0, "stopped at step 5: --exit-interval")
    kinds = [(record["kind"], record["step"]) for record in read_records(run / "metrics.jsonl")[0]]
    assert kinds == [
        ("start", 0), ("train", 2), ("save", 2), ("valid", 3), ("train", 4), ("save", 4), ("save", 5),
    ]  # fmt: skip
    assert (status(run)["status"], status(run)["step"], status(run)["saved_step"]) == ("done", 5, 5)


def test_embeddings_with_a_learning_rate_of_their_own(tmp_path: Path) -> None:
    """With a rate of 0 for all others, the table and the output layer alone move."""
    run, two_steps = tmp_path / "run", ("--train-iters", 2, "--save-interval", 1, "--log-interval", 1, "--lr-decay-style", "linear")
    flags = ("--lr", 0, "--decoupled-lr", 0.1, "--decoupled-min-lr", 0.05, "--untie-embeddings-and-output-weights")
    train(tmp_path, "--save", run, *flags, *two_steps).expect(0)
    before, after = (tensors(run, step) for step in (1, 2))
    moved = {name for name, tensor in after.items() if "exp_avg" not in name and not torch.equal(tensor, before[name])}
    assert {name.removeprefix("model.") for name in moved} == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert [(record["lr"], record["decoupled_lr"]) for record in records(run)] == [(0, 0.1), (0, pytest.approx(0.075))]
