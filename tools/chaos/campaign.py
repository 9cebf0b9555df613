"""A campaign of runs without and with faults, and the check that all end with the same weights.

    clean                    the training without faults
    round 1, 2, ...          the same training from the start: a fault, a restart if it has ended, another fault, ...

After each round every tensor of the last checkpoint, and the loss of every logged step, is compared with the clean
run's, bit for bit.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chaos import faults
from chaos.faults import KINDS, Kind, Scene
from chaos.jobs import Job, Watch, in_child, start_built_in, start_command
from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.stream import NativeReader
from megatron_sp.config.schema import Config
from megatron_sp.report.run_history import are_equal, repetitions
from megatron_sp.utils.errors import ConfigError, ReportedError
from megatron_sp.utils.format import aligned
from megatron_sp.utils.run_log import read_records, read_status

MARK = "chaos.json"
PER_ROUND = 10
_TRIES = 4  # consecutive starts that fail


@dataclass
class Tally:
    """Outcome of the faults of one kind."""

    times: int = 0
    resumed: int = 0
    went_on: int = 0
    lost_steps: int = 0


@dataclass
class Campaign:
    """State of one call of the command.

    Attributes:
        folder: folder of the runs, prepared by ``claim``.
        command: command of a training; [] for the built-in one.
        say: prints a line.
    """

    folder: Path
    command: list[str]
    num_faults: int
    seed: int
    ranks: int
    minutes: float
    patience_s: float
    say: Callable[[str], None]
    tallies: dict[str, Tally] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    done: int = 0
    rounds: int = 0
    equal: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._began, self._starts, self._start_s = time.monotonic(), 0, 1.0
        self._jobs: list[Job] = []

    def run(self) -> bool:
        """Run the campaign; return whether all faults were injected and every round ended like the clean run."""
        try:
            self._clean()
            while self.done < self.num_faults and not self._is_late() and len(self.problems) < 10:
                self._round()
        finally:
            for job in self._jobs:
                job.kill()
            self._write()
        return not self.problems and self.rounds > 0 and self.equal == self.rounds and self.done >= self.num_faults

    def _is_late(self) -> bool:
        return time.monotonic() - self._began > 60 * self.minutes

    def _start(self, run: Path) -> Job:
        self._starts += 1
        output = self.folder / "output" / f"{run.name}-{self._starts:04d}.txt"
        job = start_command(self.command, run, output) if self.command else start_built_in(self.ranks, run, output)
        self._jobs = [*(j for j in self._jobs if not j.has_ended() or j.processes()), job]
        return job

    def _clean(self) -> None:
        run = self.folder / "clean"
        watch, began = Watch(run), time.monotonic()
        job = self._start(run)
        job.wait(lambda: watch.of("start"), self.patience_s)
        self._start_s = time.monotonic() - began
        # the user's training may take longer than any single wait, so patience is measured from one step to the next
        seen = -1
        while not job.has_ended() and len(watch.look()) != seen:
            seen = len(watch.look())
            job.wait(lambda seen=seen: len(watch.look()) > seen, self.patience_s)  # type: ignore[misc]
        if not job.has_ended() or job.code != 0 or read_status(run).get("status") != "done":
            ended = (
                f"ended with code {job.code}" if job.has_ended() else f"made no progress for {self.patience_s:.0f} s"
            )
            raise ConfigError(
                f"the training does not finish even without a fault: it {ended}; its last lines:\n{_last(job)}"
            )
        saves = [r for r in watch.of("save") if r.get("saved")]
        if len(saves) < 3:
            raise ConfigError(
                f"the training saves {len(saves)} times only: give it a --save-interval a fifth of its --train-iters or less"
            )
        require_settled(watch.of("start")[0])
        steps = max((r["step"] for r in watch.of("train")), default=0)
        self.say(
            f"clean run: {steps} steps, {len(saves)} saves, {time.monotonic() - began:.1f} s, of which {self._start_s:.1f} to start"
        )

    def _round(self) -> None:
        self.rounds += 1
        run = self.folder / f"round-{self.rounds:03d}"
        left, fruitless, after = min(PER_ROUND, self.num_faults - self.done), 0, _After()
        while True:
            kind = self._choose(left)
            watch, job = Watch(run), self._start(run)
            if kind is not None and kind.inflict is faults.killed_while_starting:
                time.sleep(self.rng.random() * self._start_s)
                left -= self._inflict(kind, job, watch, after)
                continue
            if not job.wait(lambda watch=watch: watch.of("start"), self.patience_s):  # type: ignore[misc]
                self._problem(job, f"it made no start within {self.patience_s:.0f} s")
                job.kill()
            if not watch.of("start"):
                fruitless += 1
                if fruitless == _TRIES or self._is_wrong(job):
                    self._problem(job, f"a restart ended with code {job.code} before it began")
                    job.kill()
                    return
                continue
            fruitless = 0
            self._resumed(after, watch, job)
            after = _After()
            while not job.has_ended() and kind is not None:
                left -= self._inflict(kind, job, watch, after)
                kind = None if job.has_ended() else self._choose(left, but=faults.killed_while_starting)
            if kind is None:
                self._goes_to_its_end(job, watch)
            if job.has_ended() and read_status(run).get("status") == "done" and job.code == 0:
                break
        self._compare(run)

    def _goes_to_its_end(self, job: Job, watch: Watch) -> None:
        seen = -1
        while not job.has_ended() and len(watch.look()) != seen:
            seen = len(watch.look())
            job.wait(lambda seen=seen: len(watch.look()) > seen, self.patience_s)  # type: ignore[misc]
        if not job.has_ended():
            self._problem(job, f"it made no progress for {self.patience_s:.0f} s")
            job.kill()

    def _choose(self, left: int, but: faults.Fault | None = None) -> Kind | None:
        if left <= 0 or self._is_late():
            return None
        # the other ranks wait for a permanently stopped one until their timeout, which the user sets
        kinds = [
            k for k in KINDS if k.inflict is not but and (k.inflict is not faults.rank_stopped or self._may_stop())
        ]
        return self.rng.choices(kinds, [k.weight for k in kinds])[0]

    def _may_stop(self) -> bool:
        return not self.command and self.ranks > 1

    def _inflict(self, kind: Kind, job: Job, watch: Watch, after: _After) -> int:
        """Inject a fault; return the number of faults, 1, or 0 if the training had ended before."""
        scene = Scene(job, watch, self.rng, self.patience_s, lambda: self._start(job.run))
        problem = kind.inflict(scene)
        if problem:
            self._problem(job, problem)
            job.kill()
        has_ended = job.has_ended()
        if has_ended:
            job.kill()  # processes left over below the launcher
            self._check_output(job, kind)
            after.last_step = max(
                [after.last_step, *(r["step"] for what in ("start", "train") for r in watch.of(what))]
            )
        if not scene.struck:
            return 0
        spoilt = faults.damage(job.run, self.rng) if kind.damages else None
        if spoilt is not None:
            after.damaged.append(spoilt)
        name = kind.name if spoilt is not None or not kind.damages else faults.ALL_KILLED
        tally = self.tallies.setdefault(name, Tally())
        tally.times += 1
        if has_ended:
            after.names.append(name)
        else:
            tally.went_on += 1
        self.done += 1
        if self.done % 10 == 0:
            self.say(
                f"{self.done} faults, {len(self.problems)} problems, {(time.monotonic() - self._began) / 60:.1f} min"
            )
        return 1

    def _check_output(self, job: Job, kind: Kind) -> None:
        if not self.command and "Traceback (most recent call last)" in job.text():
            self._problem(job, f"a traceback after '{kind.name}'")

    def _is_wrong(self, job: Job) -> bool:
        """Return whether an attempt ended with an error of its own (exit codes 2 to 5), not with a lost port or peer."""
        return job.has_ended() and read_status(job.run).get("exit_code") in (2, 3, 4, 5)

    def _resumed(self, after: _After, watch: Watch, job: Job) -> None:
        begins = int(watch.of("start")[-1].get("step", 0))
        for name in after.names:
            self.tallies[name].resumed += 1
            self.tallies[name].lost_steps += max(0, after.last_step - begins)
        for step, what in after.damaged:
            if begins >= step:
                self._problem(job, f"a damaged checkpoint was loaded silently ({what}): it went on from step {begins}")

    def _compare(self, run: Path) -> None:
        found = in_child(lambda: differences(self.folder / "clean", run))
        if found:
            self.problems += [f"{run.name}: {line}" for line in found]
            self.say(f"{run.name} differs from the clean run: {found[0]}")
            return
        self.equal += 1
        shutil.rmtree(run)
        for path in (self.folder / "output").glob(f"{run.name}-*.txt"):
            path.unlink()

    def _problem(self, job: Job, what: str) -> None:
        self.problems.append(f"{what}; see {job.output}")
        self.say(f"problem: {what}\n{_last(job)}")

    def table(self) -> str:
        """Return a table of the faults by kind: number and outcome."""
        rows = [("fault", "times", "resumed", "went on", "steps lost (mean)")]
        for kind in KINDS:
            t = self.tallies.get(kind.name)
            if t is not None:
                lost = f"{t.lost_steps / t.resumed:.1f}" if t.resumed else "-"
                rows.append((kind.name, str(t.times), str(t.resumed), str(t.went_on), lost))
        return "\n".join(aligned(rows, range(1, 5), indent=""))

    def _write(self) -> None:
        record: dict[str, Any] = {
            "command": self.command, "seed": self.seed, "faults": self.done, "rounds": self.rounds, "equal": self.equal,
            "minutes": (time.monotonic() - self._began) / 60, "problems": self.problems,
            "kinds": {name: vars(tally) for name, tally in self.tallies.items()}, "starts": self._starts,
        }  # fmt: skip
        (self.folder / MARK).write_text(json.dumps(record, indent=1) + "\n")


@dataclass
class _After:
    """Faults since the last attempt that reached its start."""

    names: list[str] = field(default_factory=list)
    last_step: int = 0
    damaged: list[tuple[int, str]] = field(default_factory=list)


def _last(job: Job) -> str:
    return "\n".join(f"    {line[:300]}" for line in job.text().splitlines()[-6:])


def differences(clean: Path, run: Path) -> list[str]:
    """Return a description of each difference; an empty list if the two runs are equal to the last bit."""
    torch.set_num_threads(1)
    try:
        folders = [Checkpointer(None).find(path) for path in (clean, run)]
        readers = [NativeReader(folder, verified=True) for folder in folders]  # ``find`` has read every byte
        first, second = (reader.tensors() for reader in readers)
        found = (
            [f"the last checkpoint is {folders[1].name}, not {folders[0].name}"]
            if folders[0].name != folders[1].name
            else []
        )
        found += [f"{name} is in only one of the two" for name in sorted(first.keys() ^ second.keys())]
        for name in first.keys() & second.keys():
            a, b = (reader.read(name).contiguous() for reader in readers)
            if (
                a.dtype != b.dtype
                or a.shape != b.shape
                or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
            ):
                found.append(f"{name} has other bits")
        return found + _of_logs(clean, run)
    except ReportedError as error:
        return [str(error)]


def _of_logs(clean: Path, run: Path) -> list[str]:
    records = [read_records(path)[0] for path in (clean, run)]
    losses = {r["step"]: r.get("loss_hex") for r in records[0] if r["kind"] == "train"}
    found = [
        f"the loss of step {r['step']} is {r.get('loss_hex')}, not {losses[r['step']]}"
        for r in records[1] if r["kind"] == "train" and r["step"] in losses and r.get("loss_hex") != losses[r["step"]]
    ]  # fmt: skip
    return found + [
        f"step {step} was repeated with different results"
        for step, taken in repetitions(records[1]).items()
        if not are_equal(taken)
    ]


def require_settled(start: dict[str, Any]) -> None:
    """Check in the ``start`` record that no setting was chosen by timing, which may differ after a restart.

    Raises:
        ConfigError: --sp-overlap-mode, --attention-backend or the sizes of --cp-comm-type auto were chosen by timing.
    """
    attention = start.get("attention", {})
    if attention.get("ms"):
        names = {"sdpa": "fused", "sdpa-fa3": "flash3", "sdpa-fa4": "flash4"}
        raise ConfigError(
            "the training settles --attention-backend by timing; killed before its first save it may choose another"
            " kernel, which rounds differently: add --attention-backend"
            f" {names.get(attention['kernel'], attention['kernel'])}, which it has chosen now"
        )
    parallel = Config.from_dict(start["config"])[0].parallel
    if start["environment"]["layout"].get("sizes") == "timed":
        raise ConfigError(
            "the training settles --cp-comm-type auto by timing; killed before its first save it may choose other"
            " sizes, whose sums differ in the last bits: in its place give --sequence-parallel-size"
            f" {parallel.sequence_parallel_size} --context-parallel-size {parallel.context_parallel_size}, which it"
            " has chosen now"
        )
    if parallel.sequence_parallel_size > 1 and parallel.overlap_mode == "auto":
        chosen = start["environment"]["layout"]["sp_overlap"]
        chunks = f" --sp-head-chunks {chosen['chunks']}" if chosen["mode"] == "chunked" else ""
        raise ConfigError(
            "the training settles --sp-overlap-mode by timing; killed before its first save it may choose another"
            f" mode, whose sums differ in the last bits: add --sp-overlap-mode {chosen['mode']}{chunks}, which it"
            " has chosen now, in place of the flags that say auto"
        )


def claim(folder: Path) -> None:
    """Create the folder, or empty it if it is from an earlier call, and mark it.

    Raises:
        ConfigError: the folder holds anything else, or cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries = sorted(entry.name for entry in folder.iterdir())
        if entries and MARK not in entries:
            raise ConfigError(
                f"{folder} holds files already ({', '.join(entries[:3])}): give a new folder, or an empty one"
            )
        strange = [name for name in entries if not _is_ours(folder / name)]
        if strange:
            raise ConfigError(
                f"{folder} holds files that no earlier call has left there ({', '.join(strange[:3])}): give a new folder"
            )
        for name in entries:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
        (folder / MARK).write_text("{}\n")
        (folder / "output").mkdir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}; give another folder") from None


def _is_ours(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.name == MARK:
        return path.is_file()
    return path.is_dir() and (
        path.name in ("clean", "output") or re.fullmatch(r"round-[0-9]{3,}", path.name) is not None
    )
