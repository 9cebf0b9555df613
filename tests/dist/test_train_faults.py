"""Trouble from outside: damaged data, full disks, two jobs in one folder, ranks that stand still or never come."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import KILLED, records, saved_steps, status, time_is_over, train, write_data
from support.waiting import NEVER_MINUTES, wait_until

from megatron_sp.comm import groups
from megatron_sp.data.loader import BatchLoader
from megatron_sp.training import run as parts
from megatron_sp.training import setup
from megatron_sp.training.parts import Run, RunContext, RunData
from megatron_sp.training.signals import Watchdog
from megatron_sp.training.step import TrainStep
from megatron_sp.utils.files import atomic_write_text
from megatron_sp.utils.host import is_stopped


def data_flags(prefix: Path, *more: object) -> tuple[object, ...]:
    return ("--data-path", prefix, "--split", "1", "--vocab-size", 60, *more)


# Data


@pytest.mark.often("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_token_outside_the_vocabulary(tmp_path: Path, workers: int) -> None:
    """It is met by one rank in the middle of the run; the launcher's code must be that rank's, not its peers'."""
    prefix = write_data(tmp_path / "d" / "x", num_documents=40)
    tokens = np.fromfile(f"{prefix}.bin", np.uint16)
    tokens[len(tokens) // 2] = 60
    tokens.tofile(f"{prefix}.bin")
    run = tmp_path / "run"
    flags = ("--train-iters", 25, "--num-workers", workers, "--dataloader-type", "cyclic", "--save", run, "--save-interval", 1)
    outcome = train(tmp_path, *flags, ranks=2, data=data_flags(prefix))
    assert sorted(outcome.codes) == [4, 7], outcome.text
    bad = outcome.codes.index(4)
    message = outcome.texts[bad]
    assert all(part in message for part in (f"[rank {bad}] error: ", f"{prefix}.bin", "60", "sequence", "offset"))
    assert status(run)["exit_code"] == 4 and f"{prefix}.bin" in status(run)["message"]
    assert saved_steps(run), "what was saved before stays"


def test_a_file_cut_before_the_start(tmp_path: Path) -> None:
    prefix = write_data(tmp_path / "d" / "x")
    os.truncate(f"{prefix}.bin", os.path.getsize(f"{prefix}.bin") - 2)
    outcome = train(tmp_path, "--save", tmp_path / "run", ranks=2, data=data_flags(prefix)).expect(4, f"{prefix}.bin")
    assert outcome.text.count("error: ") == 1 and status(tmp_path / "run")["exit_code"] == 4


@pytest.mark.often("2")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_cut_while_training(tmp_path: Path, workers: int) -> None:
    prefix, run = write_data(tmp_path / "d" / "x", num_documents=500), tmp_path / "run"

    def cut(pids: list[int]) -> None:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
        os.truncate(f"{prefix}.bin", 100)

    flags = ("--train-iters", 100_000, "--num-workers", workers, "--dataloader-type", "cyclic", "--save", run)
    outcome = train(tmp_path, *flags, ranks=2, data=data_flags(prefix), during=cut)
    assert 4 in outcome.codes and set(outcome.codes) <= {4, 7}, outcome.text
    assert f"{prefix}.bin" in outcome.text and "Traceback" not in outcome.text and status(run)["exit_code"] == 4


def test_a_missing_index_names_the_nearest(tmp_path: Path) -> None:
    prefix = write_data(tmp_path / "d" / "corpus_text_document")
    wrong = prefix.with_name("corpus_txt_document")
    train(tmp_path, ranks=2, data=data_flags(wrong)).expect(4, str(wrong), "corpus_text_document")


@pytest.mark.often("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_data_missing_on_one_host_ends_all_ranks(tmp_path: Path, rank: int) -> None:
    prefix = write_data(tmp_path / "d" / "x")

    def elsewhere(own: int) -> None:
        if own == rank:
            original = parts.build_data

            def build(context: RunContext, *rest: Any) -> RunData:
                context.config.data.data_path = (str(tmp_path / "gone" / "x"),)
                return original(context, *rest)

            parts.build_data = build

    outcome = train(tmp_path, ranks=2, data=data_flags(prefix), setup=elsewhere).expect(4, f"{tmp_path}/gone/x")
    assert outcome.text.count("error: ") == 1 and "error: " in outcome.texts[0] and "Traceback" not in outcome.text


def test_the_end_of_the_data(tmp_path: Path) -> None:
    """An empty split is an error of the start, not of the first step."""
    prefix = write_data(tmp_path / "d" / "x", num_documents=1, longest=10)
    prefixed = data_flags(prefix)
    train(tmp_path, ranks=2, data=(*prefixed, "--split", "1,9")).expect(4, "the train split is empty (0 of 1 sequences)", "--split")
    short = train(tmp_path, ranks=2, data=prefixed).expect(0, "the train split has", "less than one sample of 32")
    assert short.text.count("warning: ") == 1, "once, and not on every rank"


# One writer


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def second(pids: list[int]) -> None:
        wait_until((run / "run_status.json").exists)
        before = status(run).get("pids", pids)
        outcome = train(tmp_path / "second", "--save", run, "--auto-resume", ranks=2).expect(
            8, f"pid {pids[0]} on ", "is in use by", "--save"
        )
        assert outcome.text.count("error: ") == 1
        assert status(run)["status"] == "running" and before == pids, "the first job's status is not touched"
        os.kill(pids[0], signal.SIGTERM)

    train(tmp_path, "--save", run, "--train-iters", 100_000, ranks=2, during=second).expect(75)
    assert len(saved_steps(run)) == 1


# Disks


def test_records_that_cannot_be_written_do_not_stop_the_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "metrics.jsonl").mkdir(parents=True)
    outcome = train(tmp_path, "--save", run, ranks=2).expect(0, "training goes on")
    assert outcome.text.count("metrics.jsonl cannot be written") == 1, "one warning, not one for each step"
    assert saved_steps(run) == [6]


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = train(tmp_path, "--save", tmp_path / "file" / "run", ranks=2).expect(2, "cannot be created", "--save")
    assert outcome.text.count("error: ") == 1


def test_a_lock_that_cannot_be_written(tmp_path: Path) -> None:
    """A folder without write permission (root may write anywhere, so the failure is made)."""

    def read_only(rank: int) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        setup.RunLock = refuse  # type: ignore[assignment, misc]

    outcome = train(tmp_path, "--save", tmp_path / "run", ranks=2, setup=read_only).expect(6, "Permission denied", str(tmp_path / "run"))
    assert "Traceback" not in outcome.text


def limit_files(size: int) -> None:  # Python ignores SIGXFSZ
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_disk_that_is_full_to_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = train(tmp_path, "--save", run, "--save-interval", 2, ranks=2, setup=lambda rank: limit_files(50_000))
    outcome.expect(6, "step 2 was not saved", "step 4 was not saved", "training goes on", "error: the last checkpoint could not be written")
    assert outcome.texts[0].count("not saved") == 3 and outcome.texts[0].count("training goes on") == 2, "not after the last step"
    assert (status(run)["status"], status(run)["exit_code"]) == ("failed", 6)
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5, 6] and os.listdir(run / "checkpoints") == []
    assert [(r["step"], r["saved"]) for r in records(run, "save")] == [(2, False), (4, False), (6, False)]


def test_preempted_with_a_full_disk_is_not_called_preempted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, "--train-iters", 50)
    train(tmp_path, *flags, setup=lambda rank: limit_files(50_000), fault="sigterm:at=step.forward:step=2").expect(6, "nothing was saved")
    assert status(run)["exit_code"] == 6


# Ranks


def at_step_3(act: Callable[[], None]) -> None:
    """In this process, just before the batches of step 3 are read."""
    original = BatchLoader.step

    def step(self: BatchLoader, consumed_samples: int, num_microbatches: int) -> object:
        if taken[0] == 2:
            act()
        taken[0] += 1
        return original(self, consumed_samples, num_microbatches)

    taken = [0]
    BatchLoader.step = step  # type: ignore[method-assign, assignment]


NEVER = ("--distributed-timeout-minutes", NEVER_MINUTES)


def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    """It ends itself and leaves its stacks; those that wait for it end by the collective's timeout, and name it and nobody else."""
    there, run, dogs = tmp_path / "there", tmp_path / "run", list[Watchdog]()

    def stand_still() -> None:
        there.touch()
        wait_until(lambda: status(run)["status"] == "failed")  # the others have ended
        dogs[0]._timeout_s = 2.0
        dogs[0].beat("step 3")
        time.sleep(60 * NEVER_MINUTES)

    def wait() -> None:
        wait_until(there.exists)
        time_is_over(0.5)

    def setup(rank: int) -> None:
        beat = Watchdog.beat
        Watchdog.beat = lambda self, what: (dogs.append(self), beat(self, what))[1]  # type: ignore[method-assign, func-returns-value]
        at_step_3(stand_still if rank == 1 else wait)

    flags = (*NEVER, *THREE, "--save", run, "--save-interval", 1, "--no-async-save")
    outcome = train(tmp_path, *flags, ranks=3, setup=setup).expect(7, "rank 1: no progress in 'step 3' for 2 s")
    stacks = (run / "stacks-rank1.txt").read_text()
    assert "no progress in 'step 3'" in stacks and "_next_micro_batches" in stacks and "in _watch" in stacks
    assert outcome.text.count("] error: rank 1 (pid ") == outcome.text.count("did not answer") == 1, outcome.text
    assert "died" not in outcome.text and "error: " not in outcome.texts[1], outcome.text
    assert status(run)["exit_code"] == 7 and saved_steps(run)[-1] == 2
    assert not (run / "stacks-rank0.txt").exists()


THREE = ("--global-batch-size", 6)


def test_a_stopped_rank(tmp_path: Path) -> None:
    """SIGSTOP stops its watchdog too: the others name it, wake it for its stacks, and it ends as well."""
    run, pid = tmp_path / "run", tmp_path / "pid"

    def stop() -> None:
        atomic_write_text(pid, str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def wait() -> None:
        wait_until(pid.exists)
        wait_until(lambda: is_stopped(int(pid.read_text())))
        time_is_over(0.5)

    def setup(rank: int) -> None:
        at_step_3(stop if rank == 1 else wait)

    outcome = train(tmp_path, *NEVER, *THREE, "--save", run, ranks=3, setup=setup).expect(7)
    assert outcome.text.count(f"error: rank 1 (pid {pid.read_text()} on {socket.gethostname()}) was stopped by a signal") == 1, outcome.text
    assert "died" not in outcome.text and "Traceback" not in outcome.text, outcome.text
    stacks = (run / "stacks-rank1.txt").read_text()
    assert "in stop" in stacks and "_next_micro_batches" in stacks, stacks
    assert str(run / "stacks-rank1.txt") in outcome.text and "was stopped by a signal" in status(run)["message"]


def test_a_launcher_that_ends_the_others_does_not_keep_them_from_saying_why(tmp_path: Path) -> None:
    """torchrun sends SIGTERM as soon as one rank has died; that may come between a survivor's message and its exit."""
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        close = Watchdog.close

        def closed(self: Watchdog) -> None:  # the last part of a run to be closed
            close(self)
            os.kill(os.getpid(), signal.SIGTERM)

        Watchdog.close = closed  # type: ignore[method-assign]

    outcome = train(tmp_path, "--save", run, ranks=2, setup=setup, fault="kill:rank=1:at=step.backward:step=3")
    assert outcome.codes == [7, KILLED] and "rank 1 (pid " in outcome.texts[0], outcome.text
    assert status(run)["exit_code"] == 7


def test_survivors_tell_of_a_lost_rank_once(tmp_path: Path) -> None:
    outcome = train(tmp_path, "--save", tmp_path / "run", "--global-batch-size", 6, ranks=3, fault="kill:rank=1:at=step.backward:step=3")
    assert outcome.codes == [7, KILLED, 7] and "Traceback" not in outcome.text, outcome.text
    assert outcome.text.count("error: rank 1 (pid ") == 1


def test_a_run_that_never_began_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    """With --save the folder is the user's, and its status says why."""
    wrong = ("--load", "nowhere")
    train(tmp_path, *wrong, ranks=2).expect(3, "there is no nowhere")
    assert not (tmp_path / "runs").exists()
    train(tmp_path, *wrong, "--save", tmp_path / "run").expect(3)
    assert status(tmp_path / "run")["exit_code"] == 3


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    def setup(rank: int) -> None:
        if rank == 1:
            os._exit(1)
        offer = groups._offer_prefix
        groups._offer_prefix = lambda store, world_size, _: offer(store, world_size, timedelta(seconds=0.3))

    outcome = train(tmp_path, *NEVER, ranks=2, setup=setup)
    assert outcome.codes == [7, 1] and "error: " in outcome.texts[0] and "Traceback" not in outcome.texts[0], outcome.text
    assert "ranks [1] of 2 did not join" in outcome.texts[0]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        def taken(rank: int) -> None:
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
            os.environ.update(MASTER_PORT=str(port), WORLD_SIZE="2")  # the other rank need not come

        outcome = train(tmp_path, *NEVER, setup=taken)
    outcome.expect(7, "no other job has the port", f"at 127.0.0.1:{port}")
    assert "Traceback" not in outcome.text


def test_a_rank_that_dies_while_starting(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        if rank == 1:
            parts.build_model = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]

    outcome = train(tmp_path, "--save", run, ranks=2, setup=setup)
    assert outcome.codes == [7, KILLED] and "rank 1 (pid " in outcome.texts[0], outcome.text
    assert status(run)["exit_code"] == 7
    train(tmp_path, "--save", run, "--auto-resume", ranks=2).expect(0)


@pytest.mark.parametrize("late", [False, True])
def test_a_bug_on_one_rank_keeps_its_traceback_and_its_status(tmp_path: Path, late: bool) -> None:
    """Late: rank 0 says that the run has begun when the other rank has failed already."""
    run = tmp_path / "run"

    def setup(rank: int) -> None:
        if late and rank == 0:
            announce = parts.announce

            def wait(prepared: Run) -> None:
                wait_until(lambda: status(run)["status"] == "failed")
                announce(prepared)

            parts.announce = wait
        if rank == 1:
            original = parts.build_step

            def build(*given: Any) -> TrainStep:
                step = original(*given)
                step.run = lambda *a, **k: {}["no such key"]  # type: ignore[method-assign]
                return step

            parts.build_step = build

    outcome = train(tmp_path, "--save", run, ranks=2, setup=setup)
    assert outcome.codes == [7, 1] and "KeyError: 'no such key'" in outcome.texts[1] and "rank 1 " in outcome.texts[0], outcome.text
    assert status(run)["exit_code"] == 1 and "KeyError" in status(run)["message"]


def test_faults_are_refused_unless_enabled(tmp_path: Path) -> None:
    def inherited(rank: int) -> None:
        os.environ["MEGATRON_SP_FAULT"] = "kill:at=step.forward"

    train(tmp_path, ranks=2, setup=inherited).expect(2, "--enable-fault-injection was not given")


def test_ranks_other_than_0_leave_their_files_in_the_run_folder(tmp_path: Path) -> None:
    """Also without --save, where rank 0 makes up the folder's name."""
    flags = ("--profile", "--profile-step-start", 1, "--profile-step-end", 3, "--profile-ranks", 0, 1)
    train(tmp_path, *flags, ranks=2).expect(0)
    (run,) = (tmp_path / "runs").iterdir()
    for rank in (0, 1):
        events = json.loads((run / f"profile-rank{rank}.json").read_text())["traceEvents"]
        assert sorted({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep")}) == ["ProfilerStep#1", "ProfilerStep#2"]


def _no_memory(rank: int) -> None:
    parts.build_model = lambda *_: torch.empty(2**48)  # type: ignore[assignment, return-value]


def test_out_of_memory_is_one_message_with_where_it_goes_and_what_helps(tmp_path: Path) -> None:
    outcome = train(tmp_path, "--save", tmp_path / "run", setup=_no_memory)
    outcome.expect(2, "error: out of memory: ", "a rank was predicted to need ", "that stay", "--recompute-granularity full: predicted ")
    assert "Traceback" not in outcome.text
    assert status(tmp_path / "run")["message"].startswith("out of memory: ")
