"""Pipeline schedules as data: every order passes the checker, has the bubble and the memory that it is known for, and no other does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.random_plans import any_plan

from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import (
    SAME_COSTS,
    Action,
    Costs,
    PipelineKind,
    PipelinePlan,
    PlanError,
    check_plan,
    replay,
    replay_costs,
)

SIZES: list[tuple[PipelineKind, int, int]] = [
    ("1f1b", 1, 1), ("zbv", 2, 1), *(("interleaved", v, 1) for v in (2, 3, 4)), *(("zb1p", v, 1) for v in (1, 2, 3)),
    *(("slices", 1, n) for n in (1, 2, 3, 5)),
]  # fmt: skip
ALL_COSTS = [Costs(), Costs(86, 105, 68, 10), Costs(1, 2, 0.1), Costs(1, 1, 3, 0.7), Costs(2, 1, 1)]


def bubble(plan: PipelinePlan, costs: Costs = SAME_COSTS) -> float:
    """Time of a step beyond what one rank computes, with a stage's costs."""
    per_rank = plan.num_micro_batches * plan.num_slices * plan.num_stages // plan.num_ranks
    return replay_costs(plan, costs).time - per_rank * (costs.forward + costs.backward + costs.weights)


@pytest.mark.parametrize(("kind", "v", "n"), SIZES, ids=str)
def test_every_plan_passes_the_check(kind: PipelineKind, v: int, n: int) -> None:
    for p in (1, 2, 3, 5):
        for m in (1, 2, 3, 5, 8):
            for costs in ALL_COSTS if kind in ("zb1p", "zbv") else ALL_COSTS[:1]:
                plan = plan_pipeline(kind, p, v, m, n, costs)
                check_plan(plan)
                assert len(replay_costs(plan, costs).stop) == 3 * p * v * m * n


def test_orders_for_any_times_end_within_their_memory() -> None:
    """Attention may be any share of a layer, and any share of it may be computed again."""
    rng = random.Random(1)
    for _ in range(60):
        (kind, v), p = rng.choice([("zbv", 2), ("zb1p", 2), ("zb1p", 3)]), rng.randint(1, 6)
        dense, again = rng.uniform(0.02, 1), rng.choice([0.0, 1.0, rng.random()])
        costs = Costs(1.0, dense + 2 * (1 - dense) + again, dense)
        plan = plan_pipeline(kind, p, v, rng.randint(1, 3 * p + 1), 1, costs)  # type: ignore[arg-type]
        check_plan(plan)
        if kind == "zbv":
            assert max(map(plan.in_flight, range(p))) <= 2 * p


def test_bubbles_are_those_of_the_papers() -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (p, p + 1, 2 * p, 3 * p + 1):
            for costs in (Costs(), Costs(86, 105, 68), Costs(2, 2, 1)):
                f, b, w, _ = costs
                assert bubble(plan_pipeline("1f1b", p, 1, m), costs) == pytest.approx((p - 1) * (f + b + w))
                assert bubble(plan_pipeline("zb1p", p, 1, m), costs) == pytest.approx((p - 1) * (f + b - w))
                for v in (2, 3):  # of stages that are so much shorter
                    assert bubble(plan_pipeline("interleaved", p, v, m), costs) == pytest.approx((p - 1) * (f + b + w))
            assert bubble(plan_pipeline("slices", p, 1, m, 4)) == pytest.approx((p - 1) * 3)
    # what is put off has room: the only time lost is until the last rank begins
    assert bubble(plan_pipeline("zbv", 4, 2, 8)) == 3 and bubble(plan_pipeline("zb1p", 4, 2, 8)) == 3


def test_activations_in_flight_are_those_of_the_papers() -> None:
    for p in (1, 2, 3, 4):
        for m in (2 * p, 2 * p + 1, 5 * p):
            assert [plan_pipeline("1f1b", p, 1, m).in_flight(r) for r in range(p)] == [p - r for r in range(p)]
            assert [plan_pipeline("zb1p", p, 1, m).in_flight(r) for r in range(p)] == [p] * p
            for n in (2, 3, 5):
                assert [plan_pipeline("slices", p, 1, m, n).in_flight(r) for r in range(p)] == [p - r + n - 1 for r in range(p)]
            for costs in ALL_COSTS:
                assert max(plan_pipeline("zbv", p, 2, m, 1, costs).in_flight(r) for r in range(p)) <= 2 * p
                if m % p == 0:  # of stages; a larger group of micro-batches takes more
                    most = [(v - 1) * p + 2 * p - 1 for v in (2, 3)]
                    assert [plan_pipeline("interleaved", p, v, m).in_flight(0) for v in (2, 3)] == most
                    assert all(plan_pipeline("zb1p", p, v, m, 1, costs).in_flight(r) <= most[v - 2] for v in (2, 3) for r in range(p))


def test_what_is_put_off_is_never_longer() -> None:
    for p in (2, 4):
        for m in (p, p + 1, 2 * p, 4 * p):
            for costs in ALL_COSTS:
                plain = replay_costs(plan_pipeline("interleaved", p, 2, m), costs).time
                assert replay_costs(plan_pipeline("zb1p", p, 2, m, 1, costs), costs).time <= plain * 1.0001


def test_a_plan_by_hand() -> None:
    plan = plan_pipeline("1f1b", 2, 1, 2)
    assert plan.text() == "rank 0: F0:0 F0:1 B0:0 W0:0 B0:1 W0:1\nrank 1: F1:0 B1:0 W1:0 F1:1 B1:1 W1:1"
    sent = [(message.source, message.target, str(message.action), str(message.needed_by)) for r in range(2) for message in plan.messages(r)]
    assert sent == [(0, 1, "F0:0", "F1:0"), (0, 1, "F0:1", "F1:1"), (1, 0, "B1:0", "B0:0"), (1, 0, "B1:1", "B0:1")]
    assert plan_pipeline("zb1p", 2, 1, 2).text() == "rank 0: F0:0 F0:1 B0:0 W0:0 B0:1 W0:1\nrank 1: F1:0 B1:0 F1:1 B1:1 W1:0 W1:1"
    slices = plan_pipeline("slices", 2, 1, 1, 2)
    assert slices.text() == "rank 0: F0:0 F0:0.1 B0:0.1 W0:0.1 B0:0 W0:0\nrank 1: F1:0 F1:0.1 B1:0.1 W1:0.1 B1:0 W1:0"
    v = plan_pipeline("zbv", 2, 2, 1)
    assert v.rank_of == (0, 1, 1, 0) and v.stages_of(0) == (0, 3) and v.text().startswith("rank 0: F0:0 F3:0 B3:0")
    assert [m.target for m in v.messages(1)] == [0, 0], "F1 to F2 stays on rank 1"


def test_a_replay_by_hand() -> None:
    plan = plan_pipeline("1f1b", 2, 1, 2)
    found = replay_costs(plan, Costs(2, 3, 1, 10))
    assert found.start[Action("F", 1, 0)] == 12 and found.stop[Action("W", 1, 0)] == 18
    assert found.start[Action("B", 0, 0)] == 28 and found.time == found.stop[Action("W", 0, 1)] == 38
    assert replay_costs(replace(plan, splits=True), Costs(2, 3, 1, 10)).start[Action("B", 0, 0)] == 27, "sent before W"
    assert found.busy == (12, 12) and found.bubble == pytest.approx(1 - 12 / found.time)
    slow = replay(plan, lambda action: 5.0 if action.stage == 1 else 1.0)
    assert slow.time == 1 + 2 * 15 + 2, "the last rank is never idle"


def test_what_is_sent_is_kept_until_it_must_have_arrived() -> None:
    plan = plan_pipeline("1f1b", 2, 1, 3)
    posts = {index: [str(m.action) for m in messages] for index, messages in plan.posts(0).items()}
    assert posts == {1: ["B1:0"], 4: ["B1:1"], 6: ["B1:2"]}, "one action ahead"
    assert {str(action): count for action, count in plan.received_before(0).items()} == {"B1:0": 1, "B1:1": 2, "B1:2": 3}
    assert {str(action): count for action, count in plan.received_before(1).items()} == {"F0:0": 0, "F0:1": 0, "F0:2": 1}
    for kind, v, n in SIZES:
        for p in (2, 3, 4):
            plan = plan_pipeline(kind, p, v, 2 * p + 1, n)
            at = {action: index for actions in plan.actions for index, action in enumerate(actions)}
            for rank in range(p):
                found = plan.received_before(rank)
                arriving = [m for source in range(p) for m in plan.messages(source) if m.target == rank]
                assert found.keys() == {m.action for m in arriving}
                for m in arriving:
                    there = [at[sent.needed_by] <= at[m.action] for sent in plan.messages(rank) if sent.target == m.source]
                    assert found[m.action] == (there.index(False) if False in there else len(there))


def broken(plan: PipelinePlan, rank: int, actions: list[Action]) -> PipelinePlan:
    """Return the plan with other actions of a rank."""
    return replace(plan, actions=tuple(tuple(actions) if r == rank else mine for r, mine in enumerate(plan.actions)))


def test_wrong_orders_are_refused() -> None:
    plan = plan_pipeline("zb1p", 2, 1, 3)
    mine = list(plan.actions[1])
    cases = {
        "B1:0 is there 0 times": [a for a in mine if a != Action("B", 1, 0)],
        "W1:2 is there 2 times": [*mine, mine[-1]],
        "is of no stage": [*mine, Action("F", 1, 3)],
        "another order": [Action("W", 1, 0), *(a for a in mine if a != Action("W", 1, 0))],
        "wait for each other": [Action("F", 1, 1), *(a for a in mine if a != Action("F", 1, 1))],
    }
    first = plan.actions[0]
    for words, actions in cases.items():
        if words == "wait for each other":  # rank 0 gives F0:1 only after B0:0
            actions = [*actions]
            other = broken(plan, 0, [first[0], *(a for a in first if a != Action("F", 0, 1))][:1])
            order = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), *(a for a in first if a.kind == "W" or a.micro_batch == 2)]
            order.insert(order.index(Action("W", 0, 1)), Action("B", 0, 1))
            other = broken(plan, 0, sorted(set(order) | set(first), key=lambda a: order.index(a) if a in order else 99))
            plan_now = broken(other, 1, actions)
        else:
            plan_now = broken(plan, 1, actions)
        with pytest.raises(PlanError, match=words):
            check_plan(plan_now)
    with pytest.raises(PlanError, match="stage 0 is rank 0's"):
        check_plan(replace(plan, actions=(plan.actions[0][1:], (*plan.actions[1], plan.actions[0][0]))))
    late = [a for a in mine if a.kind != "W"]
    with pytest.raises(PlanError, match="sums of gradients"):
        check_plan(broken(plan, 1, [*late, Action("W", 1, 1), Action("W", 1, 0), Action("W", 1, 2)]))
    for rank, swapped in ((0, Action("B", 0, 1)), (1, Action("B", 1, 1))):  # as if B of the two ends could be put off, too
        mine = [a for a in plan.actions[rank] if a.kind == "F"] + [Action(k, rank, i) for k in "BW" for i in range(3)]  # type: ignore[arg-type]
        mine.insert(mine.index(swapped._replace(micro_batch=0)), mine.pop(mine.index(swapped)))
        with pytest.raises(PlanError, match="the sums of the embedding or the head"):
            check_plan(broken(plan, rank, mine))
    with pytest.raises(PlanError, match="one backward pass computes the two"):
        check_plan(replace(plan, splits=False))
    slices = replace(plan_pipeline("slices", 2, 1, 1, 2), splits=True)
    f = list(slices.actions[0])
    with pytest.raises(PlanError, match="whose keys it needs"):
        check_plan(broken(slices, 0, [f[1], f[0], *f[2:]]))
    with pytest.raises(PlanError, match="gradient of its keys"):
        check_plan(broken(slices, 0, [*f[:2], *f[4:], *f[2:4]]))


def runs(plan: PipelinePlan, rng: random.Random) -> bool:
    """Whether a plan ends: ranks take turns by chance and wait for what they need."""
    at, mail = [0] * plan.num_ranks, set[Action]()
    stuck = 0
    while stuck < 50 * plan.num_ranks:
        rank = rng.randrange(plan.num_ranks)
        if at[rank] == len(plan.actions[rank]):
            if all(at[r] == len(plan.actions[r]) for r in range(plan.num_ranks)):
                return True
            stuck += 1
            continue
        kind, stage, i, j = plan.actions[rank][at[rank]]
        last = plan.num_stages - 1
        needs = {"F": stage > 0 and Action("F", stage - 1, i, j), "B": stage < last and Action("B", stage + 1, i, j), "W": False}[kind]
        if needs and needs not in mail:
            stuck += 1
            continue
        mail.add(Action(kind, stage, i, j))
        at[rank], stuck = at[rank] + 1, 0
    return False


def test_random_orders_pass_if_and_only_if_they_end() -> None:
    rng = random.Random(7)
    passed = refused = 0
    for _ in range(400):
        p, v, m, n = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 4), rng.choice((1, 1, 2))
        plan = any_plan(rng, p, v, m, n)
        try:
            check_plan(plan)
        except PlanError as error:
            refused += 1
            if "wait for each other" in str(error):
                assert not runs(plan, rng)
        else:
            passed += 1
            assert runs(plan, rng)
    assert passed >= 20 and refused >= 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 2, 2, 4, 1), "one stage on each rank, not 2"), (("interleaved", 2, 1, 4, 1), "at least 2 stages"),
        (("zbv", 2, 1, 4, 1), "two stages on each rank, not 1"), (("zb1p", 2, 1, 4, 2), "choose slices"),
        (("1f1b", 0, 1, 4, 1), "at least 1"), (("gpipe", 2, 1, 4, 1), "choose one of 1f1b"),
    ],
)  # fmt: skip
def test_sizes_without_an_order(arguments: tuple[PipelineKind, int, int, int, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_pipeline(*arguments)
