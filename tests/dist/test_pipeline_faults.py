"""Lost and late ranks inside the schedule of a pipeline: the others end, and the message names the stage; a signal anywhere stops all."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.training import KILLED, MOCK, NO_DROPOUT, TINY, records, saved_steps, status, time_is_over, train
from support.waiting import NEVER_MINUTES, wait_until

from megatron_sp.comm import failed_ranks
from megatron_sp.commands.pretrain import parse_config
from megatron_sp.estimate.layout import layer_costs
from megatron_sp.parallel import pipeline
from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import Action
from megatron_sp.training.pipelined import fault_point
from megatron_sp.training.signals import Watchdog
from megatron_sp.utils import faults

STEP = 2  # of the fault
PP2 = ("--num-layers", 4, "--pp-size", 2, "--micro-batch-size", 1, "--global-batch-size", 3, "--train-iters", 3, *NO_DROPOUT)
SHAPE = parse_config([str(word) for word in (*TINY, *MOCK, *PP2[:2], *NO_DROPOUT, "--train-iters", 3)], prog="pretrain_gpt.py")
COSTS = layer_costs(SHAPE.model, SHAPE.kernels)
PLANS = {kind: plan_pipeline(kind, 2, v, 3, costs=COSTS) for kind, v in (("1f1b", 1), ("zbv", 2))}  # type: ignore[arg-type]
EVERYWHERE = [(kind, rank, action) for kind, plan in PLANS.items() for rank, actions in enumerate(plan.actions) for action in actions]


def at(places: list[tuple[str, int, Action]], *often: str) -> list[Any]:
    """Places as parameters of a test, all but those named ("1f1b F1:0") marked long."""
    named = {f"{kind} {action}": (kind, rank, action) for kind, rank, action in places}
    assert named.keys() >= {*often}
    return [pytest.param(*place, id=name, marks=() if name in often else pytest.mark.long) for name, place in named.items()]


def stages_of(kind: str, rank: int) -> str:
    return {"1f1b": f"pipeline stage {rank}", "zbv": f"pipeline stages {('0, 3', '1, 2')[rank]}"}[kind]


@pytest.mark.parametrize(("kind", "rank", "action"), at(EVERYWHERE, "1f1b F1:0", "1f1b W0:2", "zbv F2:1", "zbv B3:0"))
def test_the_others_end_when_a_rank_is_lost_at_any_action(tmp_path: Path, kind: str, rank: int, action: Action) -> None:
    flags = (*PP2, "--pipeline-schedule", kind, "--save", tmp_path / "run")
    ended = train(tmp_path, *flags, ranks=2, fault=f"kill:rank={rank}:at={fault_point(action)}:step={STEP}")
    assert ended.codes[rank] == KILLED and ended.codes[1 - rank] == 7, ended.text
    text = ended.texts[1 - rank]
    assert f"error: rank {rank} (pid " in text and f"{stages_of(kind, rank)}) died: " in text, ended.text
    assert f"failed in 'step {STEP}'" in text and "Traceback" not in text, ended.text


def awaited(kind: str, late: Action) -> Action | None:
    """The message that the other rank waits for when one goes no further than before ``late``; None: it gets to the end of its list."""
    plan, done, at = PLANS[kind], set[Action](), [0, 0]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            while at[rank] < len(actions) and actions[at[rank]] != late and plan.source(action := actions[at[rank]]) in {None, *done}:
                done.add(action)
                at[rank], moved = at[rank] + 1, True
    other = 1 - plan.rank_of[late.stage]
    return plan.source(plan.actions[other][at[other]]) if at[other] < len(plan.actions[other]) else None


LATE = ("1f1b B1:1", "1f1b W1:2", "1f1b F0:2", "1f1b B0:0", "zbv F2:0", "zbv F3:0", "zbv B0:0", "zbv F1:2")


@pytest.mark.often("zbv F2:0")
@pytest.mark.parametrize(
    ("kind", "rank", "late"), at([place for place in EVERYWHERE if f"{place[0]} {place[2]}" in LATE], "1f1b B1:1", "zbv F2:0")
)
def test_who_is_late_is_named_with_its_stage(tmp_path: Path, kind: str, rank: int, late: Action) -> None:
    """One rank hangs at an action. The other one's time is over in its wait for a message, or in the sum over all ranks after the last."""
    there, run, dogs = tmp_path / "there", tmp_path / "run", list[Watchdog]()
    message = awaited(kind, late)
    last_received = [source for action in PLANS[kind].actions[1 - rank] if (source := PLANS[kind].source(action)) is not None
                     and PLANS[kind].rank_of[source.stage] == rank][-1]  # fmt: skip

    def stand_still() -> None:
        there.touch()
        wait_until(lambda: status(run)["status"] == "failed")  # the other one has ended
        dogs[0]._timeout_s = 0.5
        dogs[0].beat(f"step {STEP}")
        time.sleep(60 * NEVER_MINUTES)

    def setup(own: int) -> None:
        beat, take, taken = Watchdog.beat, pipeline._Mail.take, [0]
        Watchdog.beat = lambda self, what: (dogs.append(self), beat(self, what))[1]  # type: ignore[method-assign, func-returns-value]
        faults._hang = stand_still
        failed_ranks._ROLL_CALL_S = 0.2  # nobody else could answer

        def impatient(self: pipeline._Mail, made_by: Action) -> object:
            taken[0] += made_by == (message or last_received)
            if own != rank and made_by == (message or last_received) and taken[0] == STEP:
                wait_until(there.exists)
                time_is_over(0.5)
                work = self._received[made_by]._work  # receives have the time that their group was made with
                assert work is not None
                self._received[made_by]._work = SimpleNamespace(wait=partial(work.wait, timedelta(seconds=0.5)))  # type: ignore[assignment]
            return take(self, made_by)

        pipeline._Mail.take = impatient  # type: ignore[method-assign, assignment]

    flags = (*PP2, "--distributed-timeout-minutes", NEVER_MINUTES, "--pipeline-schedule", kind, "--save", run)
    ended = train(tmp_path, *flags, ranks=2, setup=setup, fault=f"hang:rank={rank}:at={fault_point(late)}:step={STEP}").expect(7)
    said = f"rank {rank} (pipeline stage {late.stage}): no progress in 'step {STEP}', action {late}, for 0 s"
    assert said in ended.texts[rank] and said in (run / f"stacks-rank{rank}.txt").read_text(), ended.text
    waiting = ended.texts[1 - rank]
    assert f"{stages_of(kind, rank)}) did not answer" in waiting and f"{run}/stacks-rank{rank}.txt" in waiting, waiting
    if message is None:
        assert f"failed in 'step {STEP}' (" in waiting and " waited " not in waiting, waiting
    else:
        assert f"failed in 'step {STEP}', action " in waiting, waiting
        assert f" s for {message} of pipeline stage {message.stage} (rank {rank}): " in waiting, waiting
    assert "died" not in ended.text and "Traceback" not in ended.text, ended.text


@pytest.mark.often("1f1b F1:2")
@pytest.mark.parametrize(("kind", "rank", "action"), at(EVERYWHERE, "1f1b B0:1", "1f1b F1:2", "zbv F1:2", "zbv W0:0"))
def test_a_signal_at_any_action_stops_all_stages_after_that_step(tmp_path: Path, kind: str, rank: int, action: Action) -> None:
    """The step that is going on has announced that nobody stops: the next one does."""
    run = tmp_path / "run"
    flags = (*PP2, "--train-iters", 9, "--pipeline-schedule", kind, "--save", run)
    ended = train(tmp_path, *flags, ranks=2, fault=f"sigterm:rank={rank}:at={fault_point(action)}:step={STEP}").expect(75, "saved step")
    assert saved_steps(run) == [STEP + 1] and len(records(run)) == STEP + 1, ended.text
