"""A process's place in its job, from the variables of the launcher that started it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_sp.utils.errors import ConfigError

# torchrun's variables come first: whoever sets RANK has decided. Without them those of mpirun and srun count, so that
# ``srun python pretrain_gpt.py`` is one job and not as many trainings as there are tasks. Variables that contradict
# each other, or of which some are missing, are an error: a rank that guesses would train alone or wait for ranks that
# never come.
Address = tuple[str, int]
_TORCHRUN = "torchrun --standalone --nproc-per-node N"
_DEFAULT_PORT = 29500
_SPEAKING_S = 10.0  # rank 0 may still be importing
_NO_STEP = 0xFFFFFFF0  # from here on Slurm numbers the shells of its own: of sbatch, of salloc
_FIRST_PORT, _PORTS = 20000, 9000  # below those that systems give to outgoing connections


class _Mpi(NamedTuple):
    # variables of an MPI's launcher
    rank: str
    size: str
    local_rank: tuple[str, ...]  # the first of these that is set counts
    local_size: tuple[str, ...]


# Open MPI, MVAPICH, and MPICH, Intel MPI and Cray's, which speak PMI
_MPIS = (
    _Mpi("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",),
         ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    _Mpi("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    _Mpi("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
         ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")),
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """This process's place in its job; a plain ``python`` is a world of one."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # the processes of this host
    attempt: int  # how often this host has started it again: torchrun's count, and that of scripts/launch.sh
    # host and port at which the ranks meet; None: there is one rank
    address: Address | None = field(default=None, compare=False)
    launcher: str = field(default="", compare=False)  # program that started it, torchrun, mpirun or srun; empty: none

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Launch:
        """Read the launcher's variables. Raises ConfigError: some are missing, invalid, or contradict others."""
        variables = _Variables(os.environ if env is None else env)
        if "RANK" in variables.env:
            launch = variables.of_torchrun()
        elif mpi := variables.mpi():
            launch = variables.of_mpi(mpi)
        elif variables.is_step():
            launch = variables.of_srun()
        else:
            launch = variables.alone()
        variables.raise_problems()
        return launch


def launched_processes(env: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that a configuration is for. Raises ConfigError."""
    variables = _Variables(os.environ if env is None else env)
    if "WORLD_SIZE" in variables.env or "RANK" in variables.env:  # WORLD_SIZE may stand alone here
        world_size = variables.world_size()
    elif mpi := variables.mpi():
        world_size = variables.number(mpi.size, low=1)
    else:
        world_size = variables.number(variables.step_size, low=1) if variables.is_step() else 1
    variables.raise_problems()
    return world_size


def processes_of_host() -> int:
    """Return how many processes of this job share the host; 1 if unknown."""
    try:
        return Launch.from_env().local_world_size
    except ConfigError:
        return 1  # a tool that runs alone does not care


def is_first_rank() -> bool:
    """Return whether this process speaks for its job: rank 0, and one whose rank cannot be told."""
    mpi = _Variables(os.environ).mpi()
    text = os.environ.get("RANK") or os.environ.get(mpi.rank if mpi else "SLURM_PROCID") or "0"
    return not text.isdigit() or int(text) == 0


def let_first_rank_speak() -> None:
    """Wait before this rank ends because of what rank 0 tells the user."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not is_first_rank():
        time.sleep(_SPEAKING_S)  # torchrun kills the others as soon as one has ended, so it ends this when rank 0 has


class _Variables:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.problems: list[str] = []
        single = "or for a single process unset RANK, WORLD_SIZE and LOCAL_RANK"
        self.remedy = f"A launcher sets all of them: start with {_TORCHRUN}, {single}"

    def raise_problems(self) -> None:
        if self.problems:
            what = f"this process's place in its job is not clear: {'; '.join(self.problems)}"
            error = ConfigError(f"{what}. {self.remedy}")
            error.on_all_ranks = False  # each rank has variables of its own
            raise error

    # fmt: off
    def number(self, name: str, *, low: int = 0, high: int | None = None, default: int | None = None,
               rule: str = "") -> int:
        # fmt: on
        # a variable's value as an integer; what is wrong with it is noted
        text = self.env.get(name)
        if text is None:
            if default is None:
                self.problems.append(f"{name} is not set")
            return low if default is None else default
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            self.problems.append(f"{name} is {text[:40]!r}, not a number" if text else f"{name} is empty")
            return low
        value = int(text)
        if value < low or (high is not None and value > high):
            rule = rule or (f"at least {low}" if high is None else f"{low} to {high}")
            self.problems.append(f"{name} ({value}) must be {rule}")
        return value

    def first(self, *names: str) -> str:
        # the first of these variables that is set; if none is, the first
        return next((name for name in names if name in self.env), names[0])

    def below(self, name: str, size: int, of: str) -> int:
        # a rank, which must be less than the number of ranks, the variable ``of``
        return self.number(name, high=max(0, size - 1), rule=f"at least 0 and less than {of} ({size})")

    def address(self, size: int, host: str | None = None, port: int = _DEFAULT_PORT) -> Address | None:
        # where the ranks meet: MASTER_ADDR and MASTER_PORT, else these defaults; without a host the first is required
        if size <= 1:
            return None
        address = self.env.get("MASTER_ADDR") or host
        if not address:
            is_empty = "MASTER_ADDR" in self.env
            what = "MASTER_ADDR is empty" if is_empty else "MASTER_ADDR, the address of the first host, is not set"
            self.problems.append(what)
        return address or "", self.number("MASTER_PORT", low=1, high=65535, default=port, rule="a port, 1 to 65535")

    def attempt(self) -> int:
        return self.number("TORCHELASTIC_RESTART_COUNT", default=0) + self.number("MEGATRON_SP_RELAUNCHED", default=0)

    def agree(self, size: int, of: str) -> None:
        if "WORLD_SIZE" in self.env and (world_size := self.number("WORLD_SIZE", low=1)) != size:
            self.problems.append(f"WORLD_SIZE ({world_size}) is not {of} ({size})")

    # ----------------------------------------------------------------------------------------- one for each launcher

    def world_size(self) -> int:
        # torchrun's number of processes, which is 1 if it says nothing, not even a rank
        return self.number("WORLD_SIZE", low=1, default=None if "RANK" in self.env else 1)

    def of_torchrun(self) -> Launch:
        size = self.world_size()
        rank = self.below("RANK", size, "WORLD_SIZE") if "WORLD_SIZE" in self.env else self.number("RANK")
        # DeepSpeed's launcher calls it LOCAL_SIZE; scripts that derive the others from an MPI's or Slurm's variables
        # leave it out
        named = self.first("LOCAL_WORLD_SIZE", "LOCAL_SIZE", *(name for mpi in _MPIS for name in mpi.local_size))
        here = self.number(named, low=1, default=self._tasks_here(size) if self.is_step() and size > 1 else 1)
        local_rank = self.number("LOCAL_RANK", default=0 if size == 1 else None)
        if "LOCAL_WORLD_SIZE" in self.env and size > 1:
            self.below("LOCAL_RANK", here, "LOCAL_WORLD_SIZE") if "LOCAL_RANK" in self.env else None
            self.number("LOCAL_WORLD_SIZE", low=1, high=size, rule=f"at most WORLD_SIZE ({size})")
        if size > 1 and "MASTER_PORT" not in self.env:
            self.problems.append("MASTER_PORT is not set")
        return Launch(rank, local_rank, size, here, self.attempt(), self.address(size), "torchrun")

    def mpi(self) -> _Mpi | None:
        # the variables of the MPI that started this process; None if there are none, or if srun did it in its stead
        matching = next((mpi for mpi in _MPIS if mpi.rank in self.env and mpi.size in self.env), None)
        if matching is not None and self.is_step():
            env = self.env
            if (env[matching.rank], env[matching.size]) == (env.get("SLURM_PROCID"), env.get(self.step_size)):
                return None  # srun --mpi=...; it knows the hosts, too
        return matching

    def of_mpi(self, mpi: _Mpi) -> Launch:
        size = self.number(mpi.size, low=1)
        rank = self.below(mpi.rank, size, mpi.size)
        if size == 1:
            return Launch(rank, 0, size, 1, self.attempt(), None, "mpirun")
        ways = "Give mpirun what is missing (-x NAME=VALUE, or -genv NAME VALUE), or start with torchrun"
        self.remedy = f"{ways}; a single process: unset {mpi.rank} {mpi.size}"
        self.agree(size, mpi.size)
        here = self.number(self.first(*mpi.local_size, "LOCAL_WORLD_SIZE"), low=1, high=size)
        local_rank = self.below(self.first(*mpi.local_rank, "LOCAL_RANK"), here, "those on this host")
        env, port = self.env, _DEFAULT_PORT
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("PBS_JOBID") or ""
        if numbers := re.findall(r"\d+", job):  # jobs of one host do not meet each other
            port = _FIRST_PORT + sum(map(int, numbers)) % _PORTS
        address = self.address(size, "127.0.0.1" if here == size else None, port)
        return Launch(rank, local_rank, size, here, self.attempt(), address, "mpirun")

    @property
    def step_size(self) -> str:
        return self.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

    def is_step(self) -> bool:
        # whether srun started this process: sbatch and salloc set none of these variables, or a step's number that is
        # none; a plain ``python`` in their shell is one process, although it has SLURM_PROCID and SLURM_NTASKS, too
        step = self.env.get(self.first("SLURM_STEP_ID", "SLURM_STEPID"))
        if step is not None:
            return not (step.isdigit() and int(step) >= _NO_STEP)
        return "SLURM_STEP_NUM_TASKS" in self.env or "SLURM_SRUN_COMM_PORT" in self.env

    def of_srun(self) -> Launch:
        size = self.number(self.step_size, low=1)
        if size == 1:
            return Launch(0, 0, 1, 1, self.attempt(), None, "srun")
        single = "a single process: srun --ntasks=1, or unset SLURM_STEP_NUM_TASKS"
        self.remedy = f"Start it with srun, or with scripts/slurm.sbatch; {single}"
        self.agree(size, self.step_size)
        if sys.stdin is not None and sys.stdin.isatty():
            shell = f"this shell is one of the {size} tasks of `srun --pty`"
            self.problems.append(f"{shell}, and the others do not run this command")
        rank = self.below("SLURM_PROCID", size, self.step_size)
        here = self._tasks_here(size)
        local_rank = self.below("SLURM_LOCALID", here, "those on this host")
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((self.env[name] for name in names if self.env.get(name)), "")
        host = first_host(nodes) or ("127.0.0.1" if here == size else None)
        job = self.number(self.first("SLURM_JOB_ID", "SLURM_JOBID"), default=0)
        step = self.number(self.first("SLURM_STEP_ID", "SLURM_STEPID"), default=0)
        port = _FIRST_PORT + (job + 101 * step) % _PORTS  # steps of one job may run beside each other
        return Launch(rank, local_rank, size, here, self.attempt(), self.address(size, host, port), "srun")

    def _tasks_here(self, size: int) -> int:
        counts = tasks_per_host(self.env.get("SLURM_STEP_TASKS_PER_NODE") or "")
        index = self.number("SLURM_NODEID", default=0)
        if index < len(counts):
            return counts[index]
        hosts = self.number(self.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), low=1, default=1)
        return -(-size // max(1, hosts))

    def alone(self) -> Launch:
        # the place of a process that no launcher started; one that is told to have company is an error
        size = self.world_size()
        task = self.number("SLURM_PROCID", default=0)
        if size > 1:
            self.problems.append(f"WORLD_SIZE says {size} processes, and RANK, which of them this one is, is not set")
        elif task > 0:
            how_many = "SLURM_STEP_NUM_TASKS, how many there are, is not set"
            self.problems.append(f"SLURM_PROCID says task {task} of srun, and {how_many}")
        return Launch(0, self.number("LOCAL_RANK", default=0), size, 1, self.attempt())


def first_host(nodes: str) -> str:
    # the first host of a list in Slurm's notation, ``gpu[003-007,12],login1``; empty if there is none
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def tasks_per_host(text: str) -> list[int]:
    # the numbers of tasks in Slurm's notation, ``2(x3),1``; empty if the text is not in it
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
