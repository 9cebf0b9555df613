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
    """A run whose parts write down what is asked of them.

    Attributes:
        events: what has been asked, in order.
        lines: what the user was told.
        rates: scheduled samples for which the learning rate was asked.
        act: called with each event when it happens; a signal can come in between.
        results: results of steps by number; those that are not named are ordinary.
    """

    train_iters: int = 6
    save_interval: int | None = None
    batches: BatchPlan = field(default_factory=lambda: BatchPlan(1, 1, 4))
    start: Progress = field(default_factory=Progress)
    continues_own: bool = False
    evaluated: tuple[str, ...] = ()
    config: Config = field(default_factory=Config)
    started: float = field(default_factory=time.monotonic)
    finish: bool = False
    results: dict[int, StepResult] = field(default_factory=dict)
    act: Callable[[str], None] = lambda _: None
    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rates: list[int] = field(default_factory=list)
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


def script(eval_interval: int | None = None, exit_interval: int | None = None, **more: Any) -> Script:
    made = Script(**more)
    made.config.batch.eval_interval, made.config.batch.exit_interval = eval_interval, exit_interval
    return made


def signal_at(event: str, made: Script) -> Script:
    made.act = lambda now: setattr(made, "requested", made.requested or now.split(" of ")[0] == event)
    return made


def test_saves_and_validations_at_their_intervals_and_at_the_end() -> None:
    made = script(3, save_interval=2)
    assert made.train() == 0
    assert made.happened == ("step 1, step 2, save 2, step 3, valid 3, step 4, save 4, step 5, step 6, last save 6, valid 6, test 6"), (
        "the last step is saved and validated once"
    )
    assert made.status == [("done", 0, 6)] and made.lines[-1] == "stopped at step 6: the run is complete"


def test_a_step_is_reported_before_what_it_leads_to() -> None:
    made = script(1, save_interval=1, train_iters=2)
    made.train()
    assert [event.split(" of ")[0] for event in made.events[:5]] == ["step 1", "report 1", "save 1", "valid 1", "step 2"]


def test_exit_interval_ends_the_process_after_the_save_and_the_validation_of_its_step() -> None:
    made = script(4, 4, save_interval=2, finish=True)
    assert made.train() == 0
    assert made.happened == "step 1, step 2, save 2, step 3, step 4, save 4, valid 4, last save 4", "neither tested nor finished"
    assert made.status == [("done", 0, 4)] and made.lines[-1].startswith("stopped at step 4: --exit-interval")


def test_a_signal_ends_the_run_after_the_step_with_a_save_and_code_75() -> None:
    made = signal_at("step 3", script(3, save_interval=3, finish=True))
    assert made.train() == 75
    assert made.happened == "step 1, step 2, step 3, last save 3", "what takes long is left out"
    assert made.status == [("preempted", 75, 3)]
    assert made.lines[-1] == "stopped at step 3: a signal asked for it; the same command with --auto-resume goes on from here"


def test_a_signal_in_the_last_step_leaves_the_evaluation_to_a_restart() -> None:
    made = signal_at("step 6", script(save_interval=9))
    assert made.train() == 75 and made.happened.endswith("step 5, step 6, last save 6") and made.status == [("preempted", 75, 6)]


@pytest.mark.parametrize(
    ("event", "happened"),
    [
        ("save 2", "step 1, step 2, save 2, last save 2"),
        ("valid 2", "step 1, step 2, save 2, valid 2, last save 2"),
        ("valid 6", "step 1, step 2, save 2, valid 2, step 3, step 4, save 4, valid 4, step 5, step 6, last save 6, valid 6"),
        ("test 6", "step 1, step 2, save 2, valid 2, step 3, step 4, save 4, valid 4, step 5, step 6, last save 6, valid 6, test 6"),
    ],
)
def test_a_signal_between_steps(event: str, happened: str) -> None:
    made = signal_at(event, script(2, save_interval=2, finish=True))
    assert (made.train(), made.happened) == (75, happened)


def test_without_save_a_signal_still_ends_it_and_nothing_is_promised() -> None:
    made = signal_at("step 2", script())
    assert made.train() == 75
    assert made.lines[-1] == "stopped at step 2: a signal asked for it; nothing was saved, for there is no --save"


@pytest.mark.parametrize(
    ("event", "happened"),
    [
        ("report 1", "step 1, step 2, last save 2"),
        ("save 2", "step 1, step 2, save 2, last save 2"),
        ("valid 2", "step 1, step 2, save 2, valid 2, last save 2"),
        ("test 6", "step 1, step 2, save 2, valid 2, step 3, step 4, save 4, valid 4, step 5, step 6, last save 6, valid 6, test 6"),
    ],
)
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
        assert made.lines[-1] == (
            "stopped at step 2: the file of --kill-switch-path is there; when the file is removed, the same command with --auto-resume goes"
            " on from here"
        )


def test_exit_duration_is_no_preemption() -> None:
    made = script(save_interval=5, started=time.monotonic() - 3600)
    made.config.batch.exit_duration_in_mins = 50
    assert made.train() == 0 and made.happened == "step 1, last save 1"
    assert made.lines[-1] == "stopped at step 1: --exit-duration-in-mins"


def test_a_finished_run_is_evaluated_and_finished_but_takes_no_step() -> None:
    made = script(2, save_interval=2, start=Progress(step=6), finish=True)
    assert made.train() == 0 and made.happened == "valid 6, test 6, finish"


def test_skip_train_only_evaluates() -> None:
    made = script(2)
    made.config.batch.skip_train = True
    assert made.train() == 0 and made.happened == "valid 0, test 0"


@pytest.mark.parametrize(
    ("evaluated", "happened"), [((), "valid 4, step 5, step 6, valid 6, test 6"), (("valid",), "step 5, step 6, valid 6, test 6")]
)
def test_a_validation_that_a_kill_prevented_is_made_up_for(evaluated: tuple[str, ...], happened: str) -> None:
    made = script(2, start=Progress(step=4), continues_own=True, evaluated=evaluated)
    assert made.train() == 0 and made.happened == happened
    assert ("valid at step 4: done already, as metrics.jsonl says" in made.lines) == bool(evaluated)


def test_the_validation_of_another_run_is_not_made_up_for() -> None:
    """Its checkpoint was loaded from elsewhere, and its records with it."""
    made = script(2, start=Progress(step=4))
    assert made.train() == 0 and made.happened == "step 5, step 6, valid 6, test 6"


def test_initial_weights_are_not_validated() -> None:
    """Also those of a converted checkpoint, at step 0."""
    made = script(2, train_iters=1, continues_own=True)
    assert made.train() == 0 and made.happened == "step 1, valid 1, test 1"


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
