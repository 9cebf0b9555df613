"""What is done to a training: from outside, to its processes and files, as machines and people do it."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_sp.checkpoint.commit import list_steps, step_number
from megatron_sp.checkpoint.verify import is_complete
from megatron_sp.commands.chaos.jobs import Job, Watch

_MOST_STEPS = 6  # that are let pass before something happens
_PAUSE_S = 0.3


@dataclass
class Scene:
    """A training at work.

    Attributes:
        job, watch: of this attempt, which has said that it begins.
        rng: chooses when and whom.
        patience_s: longest wait.
        start_again: starts the same command a second time, beside the first.
        struck: whether the fault has come in time, before the training's own end.
    """

    job: Job
    watch: Watch
    rng: random.Random
    patience_s: float
    start_again: Callable[[], Job]
    struck: bool = False

    def some_rank(self) -> int:
        """A process; if the ranks cannot be told, any of the job's."""
        return self.rng.choice(self.job.ranks() or self.job.processes() or [0])

    def some_steps_pass(self) -> None:
        """Between no and some steps, and a part of one."""
        seen = len(self.watch.of("train"))
        wanted = self.rng.randrange(_MOST_STEPS + 1)
        self.job.wait(lambda: len(self.watch.of("train")) >= seen + wanted, self.patience_s)
        steps = [r["step_s"] for r in self.watch.of("train") if isinstance(r.get("step_s"), float)]
        time.sleep(self.rng.random() * min(steps[-1] if steps else 0.02, 5.0))

    def hit(self, pid: int, number: int) -> None:
        if pid in self.job.processes() and not self.job.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self.struck = True

    def kill_all(self) -> None:
        self.struck = not self.job.has_ended()
        self.job.kill()

    def ends(self, what: str) -> str:
        """Wait for the end of the job; a problem if it does not come."""
        if self.job.wait(lambda: False, self.patience_s):
            return ""
        return f"{what}, and it had not ended after {self.patience_s:.0f} s"


Fault = Callable[[Scene], str]  # returns what went wrong, "" if nothing did; a job that goes on has not ended


def rank_killed(scene: Scene) -> str:
    scene.some_steps_pass()
    scene.hit(scene.some_rank(), signal.SIGKILL)
    return scene.ends("a rank was killed")


def rank_killed_in_a_save(scene: Scene) -> str:
    """As soon as a folder in the making is there, or a little later."""
    checkpoints = scene.job.run / "checkpoints"
    before = _in_the_making(checkpoints)
    scene.job.wait(lambda: _in_the_making(checkpoints) - before, scene.patience_s)
    time.sleep(scene.rng.random() * 0.01)
    scene.hit(scene.some_rank(), signal.SIGKILL)
    return scene.ends("a rank was killed in a save")


def _in_the_making(checkpoints: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir(checkpoints) if ".part-" in name}
    return set()


def all_killed(scene: Scene) -> str:
    scene.some_steps_pass()
    scene.kill_all()
    return ""


def stop_asked_for(scene: Scene) -> str:
    """SIGTERM or SIGINT, to one rank or to what was started first: it saves and ends."""
    scene.some_steps_pass()
    number = scene.rng.choice((signal.SIGTERM, signal.SIGINT))
    processes = scene.job.processes()
    scene.hit(scene.rng.choice([scene.some_rank(), *processes[:1]]), number)
    return scene.ends(f"{number.name} was sent")


def rank_paused(scene: Scene) -> str:
    """Stopped for a moment: the others wait, and nothing comes of it."""
    scene.some_steps_pass()
    pid = scene.some_rank()
    scene.hit(pid, signal.SIGSTOP)
    time.sleep(_PAUSE_S)
    scene.hit(pid, signal.SIGCONT)
    return ""


def rank_stopped(scene: Scene) -> str:
    """Stopped for good: the others end by their time-out, and then somebody clears up."""
    scene.some_steps_pass()
    pid = scene.some_rank()
    scene.hit(pid, signal.SIGSTOP)
    ranks = scene.job.ranks()
    others = [other for other in ranks if other != pid]
    alone = scene.job.wait(lambda: not set(others) & set(scene.job.processes()), scene.patience_s)
    scene.job.kill()
    return "" if alone else f"a rank was stopped, and the others had not ended after {scene.patience_s:.0f} s"


def disk_full(scene: Scene) -> str:
    """No rank can make a file longer than a little, until a save has failed."""
    scene.some_steps_pass()
    metrics = scene.job.run / "metrics.jsonl"
    limit = (metrics.stat().st_size if metrics.exists() else 0) + (64 << 10)
    seen = len(scene.watch.of("save"))
    _limit_files(scene.job, limit)
    told = scene.job.wait(lambda: any(r.get("saved") is False for r in scene.watch.of("save")[seen:]), scene.patience_s)
    _limit_files(scene.job, resource.RLIM_INFINITY)
    scene.struck = any(r.get("saved") is False for r in scene.watch.of("save")[seen:])
    return "" if told else f"no file could be longer than {limit} bytes, and no save had failed after {scene.patience_s:.0f} s"


def _limit_files(job: Job, size: int) -> None:
    for pid in job.processes():
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))


def second_job(scene: Scene) -> str:
    """The same command is started once more: it must leave the first alone."""
    scene.some_steps_pass()
    if scene.job.has_ended():
        return ""
    scene.struck = True
    second = scene.start_again()
    try:
        if not second.wait(lambda: False, scene.patience_s):
            return "a second job in the same folder had not ended"
    finally:
        second.kill()
    first_went_on = not scene.job.has_ended()
    return "a second job was let into the same folder" if second.code == 0 and first_went_on else ""


def killed_while_starting(scene: Scene) -> str:
    """The scene is that of a job which has not said anything yet."""
    scene.kill_all()
    return ""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        inflict: does it.
        weight: how often, against the others.
        damages: a checkpoint is damaged when the attempt is over.
    """

    name: str
    inflict: Fault
    weight: int = 1
    damages: bool = False


ALL_KILLED = "all ranks killed"
KINDS = (
    Kind("a rank killed", rank_killed, 3),
    Kind("a rank killed in a save", rank_killed_in_a_save, 3),
    Kind(ALL_KILLED, all_killed, 2),
    Kind("killed while starting", killed_while_starting, 2),
    Kind("SIGTERM or SIGINT", stop_asked_for, 2),
    Kind("a rank stopped for a moment", rank_paused),
    Kind("a rank stopped for good", rank_stopped),
    Kind("a full disk", disk_full, 2),
    Kind("a damaged checkpoint", all_killed, 3, damages=True),
    Kind("a second job in the folder", second_job),
)


def damage(run: Path, rng: random.Random) -> tuple[int, str] | None:
    """Spoil the newest checkpoint, if there is a sound one before it.

    Returns:
        (its step, what was done); None if nothing may be touched.
    """
    steps = [(step, path) for step, path in list_steps(run / "checkpoints").items() if is_complete(path)]
    if len(steps) < 2:
        return None
    step, folder = steps[-1]
    path = rng.choice(sorted(folder.iterdir()))
    how = rng.choice(("a bit flipped", "cut", "emptied", "deleted"))
    if how == "deleted":
        path.unlink()
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "cut":
        os.truncate(path, max(0, path.stat().st_size - rng.choice((1, 7, 4096))))
    else:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    latest = run / "checkpoints" / "latest"
    if rng.random() < 0.2 and step_number(folder.name) is not None:
        latest.write_text(rng.choice(("", "step-999999\n", "rubbish")))
    return step, f"{path.name} of step {step}: {how}"
