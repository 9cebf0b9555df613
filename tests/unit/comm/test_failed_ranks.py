"""Several attempts on one store, and who is said to have died."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from support.waiting import NEVER_MINUTES, PATIENCE_S, wait_until

from megatron_sp.comm import failed_ranks, groups
from megatron_sp.comm.collectives import WaitError
from megatron_sp.comm.failed_ranks import Peers, first_line, is_peer_failure, offer_stack, take_stack
from megatron_sp.comm.groups import fresh_store
from megatron_sp.utils.host import is_stopped, machine

LONG = timedelta(seconds=PATIENCE_S)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return server


def at(store: dist.TCPStore, rank: int, world_size: int) -> dist.Store:
    return fresh_store(("127.0.0.1", store.port), rank, world_size, LONG)


def join(store: dist.TCPStore, world_size: int, order: list[int], pause_s: float = 0.0) -> dict[int, dist.Store]:
    """All ranks of one attempt, coming in this order."""
    stores: dict[int, dist.Store] = {}
    threads = []
    for rank in order:
        threads.append(Thread(target=lambda rank=rank: stores.__setitem__(rank, at(store, rank, world_size))))
        threads[-1].start()
        time.sleep(pause_s)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(stores) == list(range(world_size))
    return stores


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_attempts_do_not_see_each_other(store: dist.TCPStore, order: list[int]) -> None:
    for attempt in range(4):
        stores = join(store, 3, order, pause_s=0.01)
        assert not stores[1].check(["address"]), "a key of an earlier attempt"
        stores[0].set("address", f"attempt {attempt}")
        assert stores[1].get("address") == stores[2].get("address") == f"attempt {attempt}".encode()


def test_an_attempt_in_which_a_rank_died_half_way(store: dist.TCPStore) -> None:
    """Its greeting, its token's answer and its confirmation stay in the store; the next attempt is not taken in."""
    space = dist.PrefixStore("megatron_sp", store)
    space.set("hello/1", "old-token")
    space.set("answer/old-token", "old-prefix")
    space.set("confirmed/old-prefix/1", "1")
    space.set("hello/2", "another-old-token")  # died before it was answered
    stores = join(store, 3, [0, 1, 2], pause_s=0.05)
    stores[2].set("k", "v")
    assert stores[0].get("k") == stores[1].get("k") == b"v"
    assert not dist.PrefixStore("old-prefix", store).check(["k"])


def test_a_rank_that_does_not_come(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    offer, accept, soon = groups._offer_prefix, groups._accept_prefix, timedelta(seconds=0.2)

    def accept_soon(own: dist.Store, rank: int) -> str:
        own.set_timeout(soon)
        return accept(own, rank)

    monkeypatch.setattr(groups, "_offer_prefix", lambda own, world_size, _: offer(own, world_size, soon))
    monkeypatch.setattr(groups, "_accept_prefix", accept_soon)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] of 3 did not join within 0 s") as caught:
        at(store, 0, 3)
    assert is_peer_failure(caught.value)
    with pytest.raises(dist.DistStoreError) as missing:
        at(store, 1, 2)
    assert is_peer_failure(missing.value)


# Peers


@pytest.fixture
def dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


HERE = machine()


def test_the_dead_rank_is_named(dead_pid: int) -> None:
    """Hosts are told apart by their boot, not by a name that clones share."""
    peers = Peers(["node", "node", "other"], [os.getpid(), 1 << 30, dead_pid], [HERE, "another boot", HERE])
    assert peers.dead_here() == [2]
    text = peers.explain(RuntimeError("[gloo] Connection closed by peer\nmore"))
    assert text.startswith(f"rank 2 (pid {dead_pid} on other) died: a collective failed ([gloo] Connection closed by peer)")
    assert "--auto-resume" in text


def test_the_stage_of_a_dead_rank_and_the_message_that_was_waited_for(dead_pid: int) -> None:
    peers = Peers(["node", "node"], [os.getpid(), dead_pid], [HERE, HERE], parts=["pipeline stage 0", "pipeline stage 1"])
    error = WaitError("rank 0 waited 60 s for B1:4 of pipeline stage 1 (rank 1): strange")
    text = peers.explain(error, place="'step 7', action B0:4")
    who = f"rank 1 (pid {dead_pid} on node, pipeline stage 1) died"
    assert text.startswith(f"{who}: a collective failed in 'step 7', action B0:4 (rank 0 waited 60 s for B1:4 of pipeline stage 1 (rank 1)")
    assert is_peer_failure(error), "whatever torch has said"


def test_hosts_of_one_name_are_numbered() -> None:
    assert failed_ranks._number_hosts(["a", "b", "a", "a", "b"], ["1", "2", "3", "1", "2"]) == ["a (1)", "b", "a (2)", "a (1)", "b"]


@pytest.mark.parametrize("lives_s", [0.0, 0.15])
def test_a_process_that_dies_a_little_later_or_is_a_zombie_has_died(lives_s: float) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(lives_s)
        os._exit(0)
    try:
        assert Peers(["a"], [pid], [HERE]).dead_here(PATIENCE_S) == [0]
    finally:
        os.waitpid(pid, 0)


def test_nobody_died_here(dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid of another host says nothing about ours."""
    monkeypatch.setattr(Peers.dead_here, "__defaults__", (0.0,))
    peers = Peers(["a", "b"], [os.getpid(), dead_pid], [HERE, "another boot"])
    assert peers.dead_here() == []
    assert "a rank on another host died" in peers.explain(RuntimeError(""))


def roll_call(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, where: list[str], pids: list[int], ranks: list[int]) -> list[str]:
    """What these ranks say, which all find a collective broken."""
    monkeypatch.setattr(Peers.dead_here, "__defaults__", (0.0,))
    hosts = [f"host{i}" for i in range(len(where))]
    said: dict[int, str] = {}

    def explain(rank: int) -> None:
        said[rank] = Peers(hosts, pids, where, rank=rank, store=store).explain(RuntimeError("time is over"))

    threads = [Thread(target=explain, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [said[rank].partition(": a collective failed (time is over)")[0] for rank in ranks]


def test_who_does_not_answer_on_another_host_is_named(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_ranks, "_ROLL_CALL_S", 0.5)
    pids = [os.getpid()] * 3
    store.set("broken/1", "1")  # rank 1 has found it broken as well
    want = f"rank 2 (pid {pids[2]} on host2) did not answer"
    for rank in (0, 1):
        assert roll_call(store, monkeypatch, [HERE, "another", "a third"], pids, [rank]) == [want]


def test_what_one_host_knows_all_say(store: dist.TCPStore, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a rank that finds another one gone which has ended for this very reason."""
    pids = [os.getpid(), os.getpid(), dead_pid]
    monkeypatch.setattr(failed_ranks, "_ROLL_CALL_S", PATIENCE_S)
    monkeypatch.setattr(Peers, "_here", lambda self: [0] if self.rank == 0 else [1, 2])
    want = f"rank 2 (pid {dead_pid} on host2) died"
    assert roll_call(store, monkeypatch, ["x", "y", "y"], pids, [0, 1]) == [want] * 2


def test_a_store_that_is_gone_leaves_what_this_rank_knows(dead_pid: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=LONG)
    del server
    text = Peers(["a", "b"], [os.getpid(), dead_pid], [HERE, HERE], store=client).explain(RuntimeError("x"))
    assert text.startswith(f"rank 1 (pid {dead_pid} on b) died: a collective failed (x)")


def test_a_stopped_process_is_woken_for_its_stacks() -> None:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(theirs, str(offer_stack()).encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60 * NEVER_MINUTES)
    try:
        wait_until(lambda: is_stopped(pid))
        peers = Peers(["a"], [pid], [HERE])
        assert peers.dead_here(0.0) == [] and "rank 0 (pid" in peers.explain(RuntimeError("x")) and is_stopped(pid)
        descriptor = int(os.read(ours, 9))
        text = take_stack(pid, descriptor)
        assert "test_a_stopped_process_is_woken_for_its_stacks" in text and not is_stopped(pid)
        assert take_stack(pid, descriptor) == text, "who asks later gets the same: the process has gone on since"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert take_stack(pid, 3) == ""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "tgkill"), reason="glibc has it since 2.30")
def test_the_signal_for_a_stack_is_for_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's other threads do not take it, as they may any that is for all of it: they may have no Python stack."""
    monkeypatch.setattr(failed_ranks.os, "kill", lambda *_: pytest.fail("sent to the whole process"))
    failed_ranks._signal_main_thread(os.getpid(), 0)


def test_a_stack_is_read_when_no_more_of_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parts = tmp_path / "stack", ["", "a", "b", "", "c"]

    def writes_meanwhile(_: float) -> None:
        with open(path, "a") as file:
            file.write(parts.pop(0))

    path.touch()
    monkeypatch.setattr(failed_ranks.time, "sleep", writes_meanwhile)
    with open(path, "rb") as file:
        assert failed_ranks._settled(file) == "ab" and parts == ["c"]


def test_first_line() -> None:
    assert first_line(RuntimeError("\n  \nwhat\nmore")) == "what"
    assert first_line(ValueError()) == "ValueError" and len(first_line(ValueError("x" * 999))) == 200


@pytest.mark.parametrize("error, expected", [
    (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
    (RuntimeError("Timed out waiting 1200ms for recv operation to complete"), True),
    (dist.DistBackendError("NCCL error"), True),
    (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
    (RuntimeError("expected scalar type Float but found Half"), False),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
    (ValueError("connection closed"), False),
    (KeyError("store"), False),
])  # fmt: skip
def test_what_counts_as_a_lost_peer(error: Exception, expected: bool) -> None:
    assert is_peer_failure(error) is expected


def test_a_stack_is_not_written_through_a_link_or_into_a_fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_ranks, "take_stack", lambda pid, descriptor: "its stack")
    peers, path, other = Peers(["here"], [os.getpid()], [machine()], [0]), tmp_path / "stacks-rank0.txt", tmp_path / "other"
    other.write_text("a file of somebody")
    path.symlink_to(other)
    assert peers._keep_stack(0, tmp_path) == "" and other.read_text() == "a file of somebody"
    path.unlink()
    os.mkfifo(path)
    assert peers._keep_stack(0, tmp_path) == ""
    path.unlink()
    assert str(path) in peers._keep_stack(0, tmp_path) and "its stack" in path.read_text()
