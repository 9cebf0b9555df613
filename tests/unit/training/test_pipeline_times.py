"""Timetables of pipelines from times that are written by hand: clocks, means, the replay, and waits for messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_sp.comm.recorder import Collective, CollectiveTimes, StepTimes
from megatron_sp.parallel.pipeline import Timeline
from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import Action, PipelinePlan, replay
from megatron_sp.training.pipeline_times import Box, RankTimes, clock_shifts, measured, planned, waits_for_messages

ZBV, SLICES, ONE = plan_pipeline("zbv", 3, 2, 4), plan_pipeline("slices", 2, 1, 2, 3), plan_pipeline("1f1b", 3, 1, 4)


def took(action: Action) -> float:
    """Times that differ by kind, stage and slice."""
    return {"F": 1.0, "B": 2.0, "W": 0.5}[action.kind] + 0.1 * action.stage + 0.2 * action.slice


def ranks_of(plan: PipelinePlan, seconds: Callable[[Action], float] = took, message: float = 0.25, late: float = 0.0) -> list[RankTimes]:
    """What ranks would measure that wait for nothing but messages; all of them begin ``late``."""
    run = replay(plan, seconds, lambda action: message)
    ranks = []
    for rank, actions in enumerate(plan.actions):
        made = RankTimes([Box(a, run.start[a] + late, run.stop[a] + late) for a in actions], {}, {})
        free, when = late, {b.action: b for b in made.actions}
        arrives = {}
        for source in range(plan.num_ranks):
            for m in plan.messages(source):
                if m.target == rank:
                    end = m.action if plan.splits or m.action.kind == "F" else m.action._replace(kind="W")
                    arrives[m.needed_by] = str(m.action), run.stop[end] + message + late
                if source == rank:
                    end = m.action if plan.splits or m.action.kind == "F" else m.action._replace(kind="W")
                    made.sent[str(m.action)] = run.stop[end] + late
        for action in actions:
            if action in arrives:
                name, there = arrives[action]
                made.received[name] = max(free, there), max(0.0, there - free)
            free = when[action].end
        ranks.append(made)
    return ranks


def shifted(rank: RankTimes, by: float) -> RankTimes:
    """The same by a clock that is ahead."""
    return RankTimes(
        [Box(action, begin + by, end + by) for action, begin, end in rank.actions], {name: at + by for name, at in rank.sent.items()},
        {name: (end + by, exposed) for name, (end, exposed) in rank.received.items()},
    )  # fmt: skip


@pytest.mark.parametrize("plan", [ZBV, SLICES, ONE], ids=lambda plan: plan.kind)
def test_a_run_without_messages_is_the_plan(plan: PipelinePlan) -> None:
    as_run = measured(plan, ranks_of(plan, message=0.0, late=7.0))
    as_planned, run = planned(plan, as_run), replay(plan, took)
    assert as_run.seconds == pytest.approx(run.time) and as_run.bubble == pytest.approx(run.bubble)
    assert as_planned.seconds == pytest.approx(run.time) and as_planned.bubble == pytest.approx(run.bubble)
    for rows in (as_run.rows, as_planned.rows):
        assert [[box.action for box in row] for row in rows] == [[a for a in each if plan.splits or a.kind != "W"] for each in plan.actions]
    assert as_run.rows[0][0].begin == as_planned.rows[0][0].begin == 0.0
    for mine, its in zip(as_run.rows, as_planned.rows, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert (a.begin, a.end) == (pytest.approx(b.begin), pytest.approx(b.end))


def test_a_backward_pass_that_is_one_has_one_box() -> None:
    (row, *_) = measured(ONE, ranks_of(ONE, message=0.0)).rows
    lengths = {box.action.kind: box.end - box.begin for box in row}
    assert lengths == {"F": pytest.approx(1.0), "B": pytest.approx(2.5)}


def test_the_plan_has_mean_times_of_kind_stage_and_slice() -> None:
    """One slow action is a quarter of itself in each of four; what waits for messages is no action."""
    as_run = measured(ONE, ranks_of(ONE, lambda a: took(a) + 4.0 * (a == Action("F", 1, 2))))
    row = planned(ONE, as_run).rows[1]
    assert [box.end - box.begin for box in row if box.action.kind == "F"] == pytest.approx([2.1] * 4)
    assert [box.end - box.begin for box in row if box.action.kind == "B"] == pytest.approx([2.7] * 4)
    row = planned(SLICES, measured(SLICES, ranks_of(SLICES))).rows[1]
    assert [box.end - box.begin for box in row if box.action.kind == "F"] == pytest.approx([1.1, 1.3, 1.5] * 2)


def test_clocks_that_start_together_are_left_alone() -> None:
    assert clock_shifts(ranks_of(ZBV)) == [0.0, 0.0, 0.0]
    assert clock_shifts([RankTimes([], {}, {})] * 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("plan", [ZBV, ONE], ids=lambda plan: plan.kind)
@pytest.mark.parametrize("ahead", [3.0, -3.0])
def test_no_message_arrives_before_it_was_sent(plan: PipelinePlan, ahead: float) -> None:
    """A clock that is off by more than a message takes is put right up to that."""
    ranks = ranks_of(plan)
    wrong = [ranks[0], shifted(ranks[1], ahead), ranks[2]]
    shifts = clock_shifts(wrong)
    assert shifts[0] == 0.0 and abs(shifts[1] + ahead) <= 0.25 + 1e-9 and abs(shifts[2]) <= 0.25 + 1e-9
    sent = {name: at + shift for rank, shift in zip(wrong, shifts, strict=True) for name, at in rank.sent.items()}
    for rank, shift in zip(wrong, shifts, strict=True):
        assert all(end + shift >= sent[name] - 1e-9 for name, (end, _) in rank.received.items())
    assert measured(plan, wrong).seconds == pytest.approx(measured(plan, ranks).seconds, abs=0.5)


def test_waits_until_messages_are_sent_and_while_they_are_under_way() -> None:
    ranks = ranks_of(ONE)
    until_sent, under_way = waits_for_messages(ranks)
    everything = sum(exposed for rank in ranks for _, exposed in rank.received.values())
    assert until_sent + under_way == pytest.approx(everything)
    assert waits_for_messages(ranks_of(ONE, message=0.0))[1] == pytest.approx(0.0)
    above = RankTimes([], {"F0:0": 1.0, "F0:1": 2.0, "F0:2": 5.0}, {})
    below = RankTimes([], {}, {"F0:0": (1.5, 1.5), "F0:1": (2.75, 0.5), "F0:2": (6.0, 0.0)})
    assert waits_for_messages([above, below]) == (pytest.approx(1.0), pytest.approx(1.0))


def test_times_go_through_json() -> None:
    """As a recorder gives them: messages by their name, exchanges of other axes left out."""
    down, up = Collective("pp", "send", (4,), (), "float32", (0, 1)), Collective("pp", "receive", (), (4,), "float32", (1, 0))
    flights = [
        CollectiveTimes(down, "F0:0", 0, "forward", 1.0, 1.5, 0.0), CollectiveTimes(up, "B1:0", 1, "backward", 0.5, 3.0, 0.75),
        CollectiveTimes(replace_axis(down), "qkv", 0, "forward", 0.0, 1.0, 0.5),
    ]  # fmt: skip
    step = StepTimes(4.0, [], flights, [(Action("F", 0, 0), 0.0, 1.0), (Action("B", 0, 0), 3.0, 4.0)])
    made = RankTimes.of(step)
    assert made.sent == {"F0:0": 1.0} and made.received == {"B1:0": (3.0, 0.75)}
    assert RankTimes.from_json(json.loads(json.dumps(made.as_json()))) == made
    assert replace(made, sent={}) != made


def replace_axis(what: Collective) -> Collective:
    return what._replace(axis="sp", op="all_to_all", pipe=None)


def test_a_timeline_by_a_given_clock() -> None:
    """The moments are the clock's own: on a GPU events, which only ``seconds`` can read."""

    class Clock:
        made = 0

        def now(self) -> object:
            self.made += 1
            return f"event {self.made}"

    timeline = Timeline(Clock())  # type: ignore[arg-type]
    for action in (Action("F", 0, 0), Action("B", 0, 0)):
        timeline.begins(action)
        timeline.ends()
    assert timeline.spans == [(Action("F", 0, 0), "event 1", "event 2"), (Action("B", 0, 0), "event 3", "event 4")]
    plain = Timeline()
    plain.begins(Action("F", 0, 0))
    plain.ends()
    ((_, begin, end),) = plain.spans
    assert 0.0 < begin <= end
