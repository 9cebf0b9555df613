"""A run that was stopped or killed and goes on is, bit for bit, the run that never stopped."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.training import (
    KILLED,
    assert_same_run,
    assert_same_tensors,
    records,
    saved_steps,
    state,
    status,
    tensors,
    trace,
    train,
    write_data,
)  # fmt: skip

from megatron_sp.checkpoint import lock
from megatron_sp.utils import host as host_facts

SAVE_EVERY_2 = ("--save-interval", 2, "--no-async-save")  # a kill in a step finds the one before it saved
IN_BACKGROUND = ("--save-interval", 2)
VARIANTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "accumulation, batches in steps, 1 rank": (1, ("--micro-batch-size", 1, "--step-batch-size-schedule", "0:2 128:6,320:4")),
    "2 ranks, warm-up, decays": (2, (
        "--lr-decay-style", "cosine", "--lr-warmup-iters", 2, "--start-weight-decay", 0.01, "--end-weight-decay", 0.3,
        "--weight-decay-incr-style", "linear", "--decoupled-lr", 3e-3, "--decoupled-min-lr", 1e-3,
    )),
    "bf16, ramp-up, cyclic, no workers": (2, (
        "--bf16", "--micro-batch-size", 1, "--rampup-batch-size", 2, 2, 10, "--dataloader-type", "cyclic", "--num-workers", 0,
    )),
    "fp16, SGD": (2, ("--fp16", "--optimizer", "sgd", "--initial-loss-scale", 2.0**19, "--hysteresis", 1, "--loss-scale-window", 2)),
    "recompute, validation, rotary": (1, (
        "--recompute-granularity", "full", "--eval-interval", 2, "--eval-iters", 2, "--position-embedding-type", "rope",
        "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights",
    )),
}  # fmt: skip


@pytest.mark.often("bf16, ramp-up, cyclic, no workers", "2 ranks, warm-up, decays")
@pytest.mark.parametrize("name", VARIANTS)
def test_stopped_and_resumed(tmp_path: Path, name: str) -> None:
    ranks, flags = VARIANTS[name]
    if "recompute" in name:
        import torch._dynamo  # noqa: F401 - torch's checkpoint() loads it at its first call: here once, not in three children
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    data = ("--data-path", write_data(tmp_path / "d" / "x"), "--split", "8,1,1", "--vocab-size", 60)
    for run, more in ((whole, ()), (parts, ("--exit-interval", 3)), (parts, ("--auto-resume",))):
        train(tmp_path, *flags, "--save", run, *more, ranks=ranks, data=data).expect(0)
    assert sorted(trace(whole)) == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(parts)] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(parts, "start")] == [0, 3]
    assert_same_run(parts, whole)
    same = ("step", "consumed_samples", "consumed_tokens", "skipped_steps", "num_updates", "loss_scaler", "schedule", "data_fingerprint")
    assert {k: state(parts)[k] for k in same} == {k: state(whole)[k] for k in same}
    validations = [[(r["step"], r["loss_hex"]) for r in records(run, kind)] for run in (parts, whole) for kind in ("valid", "test")]
    assert validations[:2] == validations[2:]
    if name.startswith("fp16"):
        scales = [r["loss_scale"] for r in records(whole)]
        assert len(set(scales)) > 2 and 0 < state(whole)["num_updates"] < 6, f"the scale was meant to move: {scales}"


def as_it_was_once(rank: int) -> None:
    """The learning rate is that of the samples at the end of a step, and a checkpoint says nothing else."""
    from megatron_sp.optim.lr_schedule import LRSchedule
    from megatron_sp.training.train_state import TrainState

    lr, to_json, from_config = LRSchedule.lr, TrainState.to_json, LRSchedule.from_config

    def rounded(*args: Any) -> LRSchedule:
        found = from_config(*args)
        return replace(found, warmup=round(found.warmup))

    LRSchedule.lr = lambda self, samples: lr(self, samples + 4)  # type: ignore[method-assign]
    LRSchedule.from_config = rounded  # type: ignore[method-assign,assignment]
    TrainState.to_json = lambda *args: {k: v for k, v in to_json(*args).items() if k != "scheduled_samples"}  # type: ignore[method-assign]


@pytest.mark.long
def test_a_run_of_an_older_version_goes_on_along_its_curve(tmp_path: Path) -> None:
    """Its learning rate was one step ahead: the first step after a resume neither repeats nor leaves out a value."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ("--lr-decay-style", "cosine", "--lr-warmup-fraction", 0.21)
    train(tmp_path, *flags, "--save", whole, setup=as_it_was_once).expect(0)
    train(tmp_path, *flags, "--save", parts, "--exit-interval", 3, setup=as_it_was_once).expect(0)
    on = (*flags, "--save", parts, "--auto-resume")
    train(tmp_path, *on, "--exit-interval", 4).expect(0, "an older version began this run, whose learning rate was that of one step later")
    outcome = train(tmp_path, *on).expect(0, "resumed from")
    assert "older version" not in outcome.text, "what it has saved since says all"
    assert_same_run(parts, whole)
    assert [r["lr"] for r in records(parts)] == [r["lr"] for r in records(whole)]


@cache
def _clean(folder: Path) -> Path:
    train(folder, "--save", folder / "clean", *SAVE_EVERY_2, ranks=2).expect(0)
    return folder / "clean"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _clean(tmp_path_factory.mktemp("clean"))


def both_ranks(points: list[str], once: list[str]) -> list[object]:
    """(point, rank); of the points ``once`` that of rank 1 is left out of the default run."""
    return [pytest.param(p, rank, marks=pytest.mark.long if rank == 1 and p in once else ()) for p in points for rank in (0, 1)]


@pytest.mark.often("optim.step-0", "step.backward-1")
@pytest.mark.parametrize("point, rank", both_ranks(["step.forward", "step.backward", "optim.step"], once=["step.forward", "optim.step"]))
def test_killed_in_a_step(tmp_path: Path, clean: Path, point: str, rank: int) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, *SAVE_EVERY_2, "--auto-resume")
    outcome = train(tmp_path, *flags, ranks=2, fault=f"kill:rank={rank}:at={point}:step=4")
    other = 1 - rank
    assert outcome.codes[rank] == KILLED and outcome.codes[other] == 7, outcome.text
    assert f"[rank {other}] error: rank {rank} (pid " in outcome.texts[other] and ") died: " in outcome.texts[other], outcome.text
    assert "--auto-resume" in outcome.texts[other].splitlines()[-1]
    assert (status(run)["status"], status(run)["exit_code"]) == ("failed", 7)
    assert f"rank {rank} " in status(run)["message"]
    train(tmp_path, *flags, ranks=2).expect(0, "resumed from", "step-000002", "(step 2, 8 samples)")
    assert_same_run(run, clean)
    assert status(run)["status"] == "done" and status(run)["message"] == ""
    assert not (run / "LOCK").exists()


@pytest.mark.often("ext4-0")
@pytest.mark.parametrize("kind, code", [("ext4", 0), ("nfs4", 8)])
def test_the_machine_was_booted_meanwhile(tmp_path: Path, clean: Path, kind: str, code: int) -> None:
    """On a disk of its own, the same command goes on at once; on one that several share, the holder may be their namesake."""
    run = tmp_path / "run"
    flags = ("--save", run, *SAVE_EVERY_2, "--auto-resume")
    train(tmp_path, *flags, ranks=2, fault="kill:at=step.forward:step=4").expect(KILLED)
    assert (run / "LOCK").exists()

    def boot(rank: int) -> None:
        host_facts.machine = lambda: "another-boot pid:[4026531836]"
        lock.file_system = lambda path: kind  # type: ignore[assignment]

    outcome = train(tmp_path, *flags, ranks=2, setup=boot).expect(code, "step-000002" if code == 0 else "is in use by pid ")
    if code == 0:
        assert "which is gone" in outcome.text and not (run / "LOCK").exists()
        assert_same_run(run, clean)


POINTS = ["begin", "copy", "hash", "write", "shard", "manifest", "rename", "prune"]


@pytest.mark.often("shard-1-how9", "manifest-1-how11", "rename-0-how12")
@pytest.mark.parametrize(
    "point, rank, how",
    [pytest.param(p, rank, IN_BACKGROUND, marks=pytest.mark.long if rank and p not in ("shard", "manifest") else ())
     for p in POINTS for rank in (0, 1)]
    + [pytest.param(p, rank, SAVE_EVERY_2, marks=pytest.mark.long) for p in POINTS if p != "copy" for rank in (0, 1)],
)  # fmt: skip
def test_killed_in_a_save(tmp_path: Path, clean: Path, point: str, rank: int, how: tuple[object, ...]) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, *how, "--auto-resume")
    at = 6 if point == "prune" else 4  # the first save that finds one too many
    outcome = train(tmp_path, *flags, ranks=2, fault=f"kill:rank={rank}:at=save.{point}:step={at}")
    assert outcome.codes[rank] == KILLED and outcome.codes[1 - rank] == 7, outcome.text
    assert set(saved_steps(run)) <= {2, 4, at} and at - 2 in saved_steps(run)
    committed = at in saved_steps(run)
    assert committed or (point, rank) != ("prune", 0)
    step = at if committed else at - 2
    outcome = train(tmp_path, *flags, ranks=2).expect(0, f"resumed from {run}/checkpoints/step-{step:06d}")
    assert not list((run / "checkpoints").glob("*.part-*"))
    if not committed and point not in ("begin", "copy"):
        assert ".part-" in outcome.text, "what was removed is said"
    assert_same_run(run, clean)


def test_every_rank_killed(tmp_path: Path, clean: Path) -> None:
    run = tmp_path / "run"
    flags = ("--save", run, *SAVE_EVERY_2, "--auto-resume")
    train(tmp_path, *flags, ranks=2, fault="kill:at=step.forward:step=6").expect(KILLED)
    assert (run / "LOCK").exists() and status(run)["status"] == "running"
    train(tmp_path, *flags, ranks=2).expect(0, "took over the lock")
    assert_same_run(run, clean)


def test_a_restart_by_the_launcher_goes_on_without_auto_resume(tmp_path: Path, clean: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run, *SAVE_EVERY_2, ranks=2, fault="kill:rank=1:at=step.forward:step=4:attempt=0")
    train(tmp_path, "--save", run, *SAVE_EVERY_2, ranks=2, fault="kill:rank=1:at=step.forward:step=4:attempt=0", attempt=1).expect(0)
    assert_same_run(run, clean)


def test_a_restart_before_the_first_save_starts_again(tmp_path: Path, clean: Path) -> None:
    run = tmp_path / "run"
    train(tmp_path, "--save", run, *SAVE_EVERY_2, ranks=2, fault="kill:rank=0:at=step.forward:step=1")
    train(tmp_path, "--save", run, *SAVE_EVERY_2, ranks=2, attempt=1).expect(0)
    assert_same_run(run, clean)


def test_a_restart_goes_on_from_its_own_checkpoints_not_from_those_it_began_with(tmp_path: Path, clean: Path) -> None:
    """--load and --ckpt-step say where the run began; after a restart the run's own checkpoints decide."""
    run = tmp_path / "run"
    flags = ("--load", clean, "--ckpt-step", 4, "--save", run, "--save-interval", 1, "--no-async-save")
    train(tmp_path, *flags, ranks=2, fault="kill:rank=1:at=step.forward:step=6")
    assert saved_steps(run) == [5]
    train(tmp_path, *flags, ranks=2, attempt=1).expect(0, "step-000005")
    assert_same_tensors(tensors(run), tensors(clean))
    train(tmp_path, *flags, "--auto-resume", ranks=2).expect(0, "step-000006")
