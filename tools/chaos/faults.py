"""Faults that are injected into a training from outside, into its processes and files."""

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

from chaos.jobs import Job, Watch
from megatron_sp.checkpoint.commit import list_steps, step_number
from megatron_sp.checkpoint.manifest import is_complete

_MOST_STEPS = 6  # records that pass before the fault
_PAUSE_S = 0.3


@dataclass
class Scene:
    """A running training, and the means to inject a fault.

    Attributes:
        job, watch: job and watch of this attempt, which has reported its start (but see ``killed_while_starting``).
        rng: chooses time and target.
        patience_s: longest wait.
        start_again: starts the same command a second time, beside the first.
        struck: True if the fault took effect before the training's own end.
    """

    job: Job
    watch: Watch
    rng: random.Random
    patience_s: float
    start_again: Callable[[], Job]
    struck: bool = False

    def some_rank(self) -> int:
        """Return the process id of a random rank; of any process of the job if the ranks are not known."""
        return self.rng.choice(self.job.ranks() or self.job.processes() or [0])

    def some_steps_pass(self) -> None:
        """Wait for a random number of steps, possibly none, and a fraction of a step."""
        seen = len(self.watch.of("train"))
        wanted = self.rng.randrange(_MOST_STEPS + 1)
        self.job.wait(lambda: len(self.watch.of("train")) >= seen + wanted, self.patience_s)
        steps = [r["step_s"] for r in self.watch.of("train") if isinstance(r.get("step_s"), float)]
        time.sleep(self.rng.random() * min(steps[-1] if steps else 0.02, 5.0))

    def hit(self, pid: int, number: int) -> None:
        """Send a signal to a process of the job, if both are still there."""
        if pid in self.job.processes() and not self.job.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self.struck = True

    def kill_all(self) -> None:
        """Kill all processes of the job at once."""
        self.struck = not self.job.has_ended()
        self.job.kill()

    def ends(self, what: str) -> str:
        """Wait for the end of the job; return a description of the problem if it does not end, else an empty string."""
        if self.job.wait(lambda: False, self.patience_s):
            return ""
        return f"{what}, and it had not ended after {self.patience_s:.0f} s"


Fault = Callable[[Scene], str]  # returns what went wrong, "" for nothing; a job that continues has not ended


def rank_killed(scene: Scene) -> str:
    """Kill one rank; the others end with an error."""
    scene.some_steps_pass()
    scene.hit(scene.some_rank(), signal.SIGKILL)
    return scene.ends("a rank was killed")


def rank_killed_in_a_save(scene: Scene) -> str:
    """Kill a rank as soon as the folder of an unfinished save appears, or a little later."""
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
    """Kill all processes at once, as a power failure does."""
    scene.some_steps_pass()
    scene.kill_all()
    return ""


def stop_asked_for(scene: Scene) -> str:
    """Send SIGTERM or SIGINT to one rank or to the process that was started first: the job has to end."""
    scene.some_steps_pass()
    number = scene.rng.choice((signal.SIGTERM, signal.SIGINT))
    processes = scene.job.processes()
    scene.hit(scene.rng.choice([scene.some_rank(), *processes[:1]]), number)
    return scene.ends(f"{number.name} was sent")


def rank_paused(scene: Scene) -> str:
    """Stop a rank for a moment with SIGSTOP: the others wait, and training goes on."""
    scene.some_steps_pass()
    pid = scene.some_rank()
    scene.hit(pid, signal.SIGSTOP)
    time.sleep(_PAUSE_S)
    scene.hit(pid, signal.SIGCONT)
    return ""


def rank_stopped(scene: Scene) -> str:
    """Stop a rank for good with SIGSTOP: the others must end by their timeout, then the whole job is killed."""
    scene.some_steps_pass()
    pid = scene.some_rank()
    scene.hit(pid, signal.SIGSTOP)
    ranks = scene.job.ranks()
    others = [other for other in ranks if other != pid]
    alone = scene.job.wait(lambda: not set(others) & set(scene.job.processes()), scene.patience_s)
    scene.job.kill()
    return "" if alone else f"a rank was stopped, and the others were still running after {scene.patience_s:.0f} s"


def disk_full(scene: Scene) -> str:
    """Limit the file size of all processes until a save has failed."""
    scene.some_steps_pass()
    metrics = scene.job.run / "metrics.jsonl"
    limit = (metrics.stat().st_size if metrics.exists() else 0) + (64 << 10)
    seen = len(scene.watch.of("save"))
    _limit_files(scene.job, limit)
    told = scene.job.wait(lambda: any(r.get("saved") is False for r in scene.watch.of("save")[seen:]), scene.patience_s)
    _limit_files(scene.job, resource.RLIM_INFINITY)
    scene.struck = any(r.get("saved") is False for r in scene.watch.of("save")[seen:])
    return (
        ""
        if told
        else f"no file could be longer than {limit} bytes, and no save had failed after {scene.patience_s:.0f} s"
    )


def _limit_files(job: Job, size: int) -> None:
    for pid in job.processes():
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))


def second_job(scene: Scene) -> str:
    """Start the same command a second time in the same folder: it must not disturb the first."""
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
    """Kill a job that has not reported its start yet."""
    scene.kill_all()
    return ""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        inflict: function that injects the fault.
        weight: relative frequency.
        damages: True if a checkpoint is damaged after the attempt.
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
    """Damage the newest checkpoint, if there is a sound one before it.

    Returns:
        (its step, description of the damage); None if there are fewer than two sound checkpoints.
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
