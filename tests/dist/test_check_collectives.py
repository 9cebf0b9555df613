"""--check-collectives: ranks that call different collectives are named, and nobody hangs; off, it costs nothing."""

from __future__ import annotations

import os
import re
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import layouts
from support.layouts import Case
from support.ranks import run_ranks
from support.training import KILLED, status, train
from support.waiting import NEVER_MINUTES, PATIENCE_S, wait_until

from megatron_sp.comm.check import CheckedGroup, DivergenceError
from megatron_sp.comm.collectives import all_gather_async, all_reduce, all_reduce_async, all_to_all_async, barrier, broadcast
from megatron_sp.comm.collectives import reduce_scatter_async as reduce_scatter
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.object_collectives import broadcast_json, gather_json
from megatron_sp.optim import gradients
from megatron_sp.utils.errors import PeerError


def groups_of(check: bool = True, timeout_s: float = PATIENCE_S, **sizes: int) -> ParallelGroups:
    return ParallelGroups.create(torch.device("cpu"), timeout=timedelta(seconds=timeout_s), check=check, **sizes)


def exchange(group: Any, send: list[int], receive: list[int], dtype: torch.dtype = torch.float32) -> None:
    all_to_all_async(torch.ones(sum(send), dtype=dtype), send, torch.ones(sum(receive), dtype=dtype), receive, group).wait()


def store_file() -> Path:
    """Where the job's store is."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return Path(store.path)


# All sound


def _every_collective() -> None:
    groups = groups_of(tp_size=2)
    for group in (groups.tp, groups.dp, groups.world):
        rank, size = group.rank(), group.size()
        for _ in range(3):
            assert all_reduce(torch.ones(3), group).tolist() == [size] * 3
            assert all_reduce(torch.empty(0), group).numel() == 0
            assert all_gather_async(torch.ones(1, 2), group).wait().shape == (size, 2)
            assert reduce_scatter(torch.ones(2 * size, 2), group).wait().tolist() == [[size, size]] * 2
            exchange(group, [rank + 1] * size, [r + 1 for r in range(size)])
            assert broadcast(torch.tensor([rank]), group, 1).tolist() == [1]
            assert gather_json(rank, group) == list(range(size)) and broadcast_json([rank], group, 1) == [1]
            barrier(group)
    handles = [all_reduce_async(torch.ones(i), groups.tp) for i in (1, 2, 3)]
    for handle in (handles[2], handles[0], handles[1]):
        assert handle.wait()[0] == 2


def test_sound_calls_pass(tmp_path: Path) -> None:
    run_ranks(_every_collective, 4, tmp_path)


@pytest.mark.parametrize("case", [
    Case(tp=2, tp_seq=True, steps=2), Case(sp=2, mode="chunked", steps=2),
    Case(tp=2, tp_seq=True, sp=2, mode="chunked", seq=7, micro_batches=2),
], ids=str)  # fmt: skip
def test_whole_steps_pass(tmp_path: Path, case: Case) -> None:
    """Each collective of a step is announced by all ranks alike, in every layout."""
    run_ranks(_checked_steps, case.world, tmp_path, case)


def _checked_steps(case: Case) -> None:
    made = layouts.ParallelGroups

    class Checked(made):  # type: ignore[misc, valid-type]
        @classmethod
        def create(cls, *args: Any, **kwargs: Any) -> ParallelGroups:
            groups = made.create(*args, **kwargs, check=True)
            assert isinstance(groups.tp if case.tp > 1 else groups.sp, CheckedGroup)
            return groups

    layouts.ParallelGroups = Checked  # type: ignore[misc]
    layouts.check(case)


def _traffic(check: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    groups = groups_of(check)
    kept = []
    for _ in range(3):
        for _ in range(10):
            all_reduce(torch.ones(2), groups.world)
            exchange(groups.world, [1, 1], [1, 1])
        torch.distributed.barrier()
        kept.append(store.num_keys())
        torch.distributed.barrier()
    if check:  # what is consumed is deleted: two calls of each rank at most
        assert max(kept) - min(kept) <= 4, kept
    else:
        file = store_file()
        size = file.stat().st_size
        all_reduce(torch.ones(2), groups.world)
        assert len(set(kept)) == 1 and file.stat().st_size == size, "off means no store traffic"
        assert type(groups.world) is type(dist.group.WORLD)


@pytest.mark.parametrize("check", [False, True])
def test_the_store_does_not_grow(tmp_path: Path, check: bool) -> None:
    run_ranks(_traffic, 2, tmp_path, check)


# Calls that differ

_ON_ONE_RANK = {
    "operation": (
        lambda group: all_reduce(torch.ones(4, 3), group), lambda group: all_gather_async(torch.ones(4, 3), group).wait(),
        r"all_reduce sum \(4, 3\) float32 at \S*test_check_collectives.py:\d+",
        r"all_gather \(4, 3\) float32 at \S*test_check_collectives.py:\d+",
    ),
    "reduction": (
        lambda group: all_reduce(torch.ones(4), group), lambda group: all_reduce(torch.ones(4), group, "max"),
        r"all_reduce sum \(4,\)", r"all_reduce max \(4,\)",
    ),
    "shape": (
        lambda group: all_reduce(torch.ones(4, 3), group), lambda group: all_reduce(torch.ones(3, 4), group),
        r"all_reduce sum \(4, 3\) float32", r"all_reduce sum \(3, 4\) float32",
    ),
    "nothing to reduce": (
        lambda group: all_reduce(torch.ones(4), group), lambda group: all_reduce(torch.ones(0), group),
        r"all_reduce sum \(4,\)", r"all_reduce sum \(0,\)",
    ),
    "type": (
        lambda group: all_reduce(torch.ones(4), group), lambda group: all_reduce(torch.ones(4, dtype=torch.float64), group),
        r"all_reduce sum \(4,\) float32", r"all_reduce sum \(4,\) float64",
    ),
    "type of an exchange": (
        lambda group: exchange(group, [1] * group.size(), [1] * group.size()),
        lambda group: exchange(group, [1] * group.size(), [1] * group.size(), torch.float64), "all_to_all float32", "all_to_all float64",
    ),
    "source": (
        lambda group: broadcast(torch.ones(2), group),
        lambda group: broadcast(torch.ones(2), group, 1), "broadcast from 0", "broadcast from 1",
    ),
    "asynchronous": (
        lambda group: [h.wait() for h in [all_reduce_async(torch.ones(n), group) for n in (1, 2)]],
        lambda group: [h.wait() for h in [all_reduce_async(torch.ones(n), group) for n in (1, 3)]],
        r"all_reduce sum \(2,\)", r"all_reduce sum \(3,\)",
    ),
    "json": (lambda group: gather_json(1, group), lambda group: broadcast_json(1, group), "gather_json", "broadcast_json from 0"),
}  # fmt: skip


def _each_differs() -> None:
    for kind in _ON_ONE_RANK:  # each with groups made again: what the ones before left in the store does not confuse them
        _one_differs(kind, 1)


def _one_differs(kind: str, odd: int) -> None:
    groups = groups_of()
    for _ in range(5):
        all_reduce(torch.ones(1), groups.world)
    usual, other, usual_text, other_text = _ON_ONE_RANK[kind]
    with pytest.raises(DivergenceError) as caught:
        (other if dist.get_rank() == odd else usual)(groups.world)
    text, size = str(caught.value), dist.get_world_size()
    number = 7 if kind == "asynchronous" else 6
    assert re.search(rf"^collective {number} of group world differs between its ranks", text), text
    assert (f": rank {odd} diverges" in text) == (size > 2), text
    assert re.search(rf"\n  rank {odd} calls {other_text}", text), text
    many = "ranks " + ", ".join(str(r) for r in range(size) if r != odd) + " call" if size > 2 else f"rank {1 - odd} calls"
    assert re.search(rf"\n  {many} {usual_text}", text), text
    assert caught.value.exit_code == 1 and caught.value.on_all_ranks


def test_one_rank_calls_something_else(tmp_path: Path) -> None:
    run_ranks(_each_differs, 2, tmp_path)


@pytest.mark.parametrize("odd", [0, 2])
def test_the_odd_one_of_three(tmp_path: Path, odd: int) -> None:
    run_ranks(_one_differs, 3, tmp_path, "shape", odd)


def _counts_differ() -> None:
    group, rank = groups_of().world, dist.get_rank()
    with pytest.raises(DivergenceError, match="rank 0 sends 5 elements to rank 1, which expects 4") as caught:
        exchange(group, [2, 5] if rank == 0 else [3, 4], [2, 3] if rank == 0 else [4, 4])
    assert "rank 1 sends" not in str(caught.value), "those fit"


def test_counts_that_do_not_fit(tmp_path: Path) -> None:
    run_ranks(_counts_differ, 2, tmp_path)


def _other_order() -> None:
    group, rank = groups_of().world, dist.get_rank()
    calls = [lambda: all_reduce(torch.ones(2), group), lambda: barrier(group)]
    with pytest.raises(DivergenceError, match=r"collective 1 of group .*\n  rank 0 calls all_reduce .*\n  rank 1 calls barrier at "):
        for call in calls if rank == 0 else reversed(calls):
            call()


def test_another_order(tmp_path: Path) -> None:
    run_ranks(_other_order, 2, tmp_path)


def _in_a_part_of_the_job() -> None:
    """Only the group in trouble fails; its ranks are named by their numbers in the job."""
    groups, rank = groups_of(tp_size=2), dist.get_rank()
    if rank in (0, 1):
        for _ in range(3):
            all_reduce(torch.ones(1), groups.tp)
        return
    with pytest.raises(DivergenceError, match=r"collective 1 of group tp .*\n  rank 2 calls .*\(2,\).*\n  rank 3 calls .*\(3,\)") as caught:
        all_reduce(torch.ones(rank), groups.tp)
    assert not caught.value.on_all_ranks, "rank 0 does not know of it: each says it itself"


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    run_ranks(_in_a_part_of_the_job, 4, tmp_path)


# Ranks that do not come


def _never_comes() -> None:
    groups, rank = groups_of(), dist.get_rank()
    all_reduce(torch.ones(2), groups.world)
    world: Any = groups.world
    done = store_file().with_name("done")
    if rank == 2:
        wait_until(lambda: len(list(done.parent.glob("done*"))) == 2)
        return
    if rank == 0:  # comes second, and its time is over at once: it tells the other
        wait_until(lambda: world._store.check([world._key(1, 2)]))
        world._timeout_s = 0.5
    with pytest.raises(PeerError) as caught:
        all_reduce(torch.ones(3), groups.world)
    done.with_name(f"done{rank}").touch()
    text = str(caught.value)
    assert re.match(
        r"collective 2 of group \S+: ranks 0, 1 call all_reduce sum \(3,\) float32 at \S*test_check_collectives.py:\d+", text
    ), text
    last = r"rank 2 has not come within 0.5 s, its last collective of this group was 1: all_reduce sum \(2,\) float32 at \S*:\d+"
    assert re.search(last, text), text
    assert caught.value.exit_code == 7


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    run_ranks(_never_comes, 3, tmp_path)


def _waits_elsewhere() -> None:
    """Rank 3 waits in its tp group for rank 2, and rank 2 in its dp group for rank 0 and so on: the message says where."""
    groups, rank = groups_of(tp_size=2), dist.get_rank()
    group: Any = groups.tp if rank in (0, 3) else groups.dp

    def time_is_over() -> None:
        wait_until(lambda: group._store.check([f"waiting/{other}" for other in range(4)]))
        group._timeout_s = 2.0

    watch = Thread(target=time_is_over)
    watch.start()
    with pytest.raises(PeerError) as caught:
        all_reduce(torch.ones(1), group)
    watch.join()
    text = str(caught.value)
    assert "has not come within 2 s, it has made no collective of this group; it waits in collective 1 of group " in text, text
    # whoever finds a rank dead that has ended for this very reason quotes it
    assert " has died" not in text or "and this was its last word:\ncollective 1 of group" in text, text


def test_ranks_that_wait_for_each_other_in_two_groups(tmp_path: Path) -> None:
    run_ranks(_waits_elsewhere, 4, tmp_path)


def _dies() -> None:
    groups = groups_of(timeout_s=60 * NEVER_MINUTES)
    all_reduce(torch.ones(2), groups.world)
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(PeerError, match=r"rank 1 \(pid \d+ on .*\) has died, its last collective of this group was 1"):
        barrier(groups.world)


def test_a_rank_that_has_died_is_found_at_once(tmp_path: Path) -> None:
    run_ranks(_dies, 2, tmp_path)


# A whole run


def test_training_with_the_flag(tmp_path: Path) -> None:
    train(tmp_path, "--check-collectives", "--sp-size", 2, "--sp-overlap-comm", "--save", tmp_path / "run", ranks=2).expect(0)


def test_a_bug_in_training_is_named(tmp_path: Path) -> None:
    """Rank 1 forgets the reduction of one block's gradients."""
    run = tmp_path / "run"

    def forget(rank: int) -> None:
        original = gradients.all_reduce_async

        def forgetful(x: Any, group: Any) -> Any:
            forgetful.calls += 1  # type: ignore[attr-defined]
            return gradients.Handle(None, x, "nothing") if rank == 1 and forgetful.calls == 6 else original(x, group)  # type: ignore[attr-defined]

        forgetful.calls = 0  # type: ignore[attr-defined]
        gradients.all_reduce_async = forgetful  # type: ignore[assignment]

    outcome = train(tmp_path, "--check-collectives", "--save", run, ranks=2, setup=forget).expect(1, "differs between its ranks")
    assert outcome.text.count("error: ") == 1 and "Traceback" not in outcome.text, "rank 0 says it, once"
    assert re.search(r"rank 0 calls .* from optim/gradients.py:\d+\n  rank 1 calls .* at training/step.py:\d+ from ", outcome.texts[0]), (
        outcome.text
    )
    assert status(run)["exit_code"] == 1 and "differs between its ranks" in status(run)["message"]


def test_a_killed_rank_is_named_within_seconds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--check-collectives", "--tp-size", 2, "--save", run)
    outcome = train(tmp_path, *flags, ranks=2, fault="kill:rank=1:at=step.backward:step=3")
    assert outcome.codes == [7, KILLED] and "rank 1 (pid " in outcome.texts[0] and "died" in outcome.texts[0], outcome.text
    assert status(run)["exit_code"] == 7 and "was never called on" not in outcome.text, "the failure cut the waits off"


# Handles that nobody waits for


def _dropped() -> None:
    group: Any = dist.group.WORLD
    with pytest.warns(RuntimeWarning, match=r"wait\(\) was never called on all_reduce of \(2, 3\) float32"):
        all_reduce_async(torch.ones(2, 3), group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sys.unraisablehook = lambda hook: pytest.fail(f"warned: {hook.exc_value}")
        all_reduce_async(torch.ones(2, 3), group).wait()
        all_reduce_async(torch.empty(0), group)  # nothing is under way
        try:
            handle = all_reduce_async(torch.ones(1), group)
            raise KeyError
        except KeyError:
            del handle  # the exception has cut the wait off
    barrier(group)


def test_a_handle_that_is_dropped_warns(tmp_path: Path) -> None:
    run_ranks(_dropped, 2, tmp_path)
