"""Which rank of how many this process is, by the variables of torchrun, mpirun and srun."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_sp.utils import launch as launch_module
from megatron_sp.utils.errors import EXIT_CONFIG, ConfigError
from megatron_sp.utils.launch import Launch, first_host, is_first_rank, launched_processes, let_first_rank_speak, tasks_per_host

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a1", "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-15168@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ALLOCATION = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_NNODES": "3"}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {
    **ALLOCATION, "SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_TASKS_PER_NODE": "3,2",
}  # fmt: skip
ALONE = Launch(0, 0, 1, 1, 0)


def place(env: dict[str, str]) -> tuple[object, ...]:
    found = Launch.from_env(env)
    return (found.rank, found.local_rank, found.world_size, found.local_world_size, found.attempt, found.address, found.launcher)


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in env.items() if name not in names}


def test_each_launchers_variables() -> None:
    assert place({}) == (0, 0, 1, 1, 0, None, "")
    assert place(TORCHRUN) == (5, 1, 8, 4, 2, ("a1", 29400), "torchrun")
    assert place(OPEN_MPI) == (3, 3, 4, 4, 0, ("127.0.0.1", 26169), "mpirun")
    assert place(MPICH) == (1, 1, 2, 2, 0, ("127.0.0.1", 29500), "mpirun")
    assert place(STEP) == (4, 1, 5, 2, 0, ("gpu08", 21234), "srun")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({**OPEN_MPI, **TORCHRUN}, (5, 1, 8, 4, "a1", "torchrun")),  # mpirun or srun starts a torchrun on each host
        ({**STEP, **TORCHRUN}, (5, 1, 8, 4, "a1", "torchrun")),
        ({**STEP, **OPEN_MPI}, (3, 3, 4, 4, "127.0.0.1", "mpirun")),  # mpirun starts its daemons with srun
        ({**STEP, "PMI_RANK": "4", "PMI_SIZE": "5"}, (4, 1, 5, 2, "gpu08", "srun")),  # srun --mpi=pmi2
        ({**MPICH, "MASTER_ADDR": "b2"}, (1, 1, 2, 2, "b2", "mpirun")),
        ({**without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_SIZE": "4"}, (5, 1, 8, 4, "a1", "torchrun")),  # deepspeed's launcher
        ({**STEP, **without(TORCHRUN, "LOCAL_WORLD_SIZE"), "WORLD_SIZE": "6"}, (5, 1, 6, 2, "a1", "torchrun")),  # RANK=$SLURM_PROCID
        (without(STEP, "SLURM_STEP_TASKS_PER_NODE"), (4, 1, 5, 3, "gpu08", "srun")),
        ({**STEP, "WORLD_SIZE": "5"}, (4, 1, 5, 2, "gpu08", "srun")),
    ],
)
def test_which_of_several_launchers_counts(env: dict[str, str], expected: tuple[object, ...]) -> None:
    found = Launch.from_env(env)
    assert found.address is not None
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.address[0], found.launcher) == expected


@pytest.mark.parametrize(
    "env",
    [
        ALLOCATION,  # a shell of salloc
        BATCH,  # the script of sbatch
        {**BATCH, "SLURM_STEP_ID": "4294967290"},  # salloc's shell on a node of the job
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "http"},  # nobody is met
        {"WORLD_SIZE": "1"},
        {"MASTER_ADDR": "elsewhere"},
    ],
)
def test_one_process_waits_for_nobody(env: dict[str, str]) -> None:
    assert Launch.from_env(env) == ALONE and Launch.from_env(env).address is None
    assert launched_processes(env) == 1


def test_parallel_steps_of_a_job_meet_at_different_ports() -> None:
    ports = [Launch.from_env({**STEP, "SLURM_STEP_ID": str(step)}).address for step in range(5)]
    assert len(set(ports)) == 5
    assert place({**STEP, "MASTER_PORT": "7000"})[5] == ("gpu08", 7000)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR, the address of the first host, is not set. A launcher sets all"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, r"MASTER_PORT \(70000\) must be a port, 1 to 65535"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE is empty"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, r"WORLD_SIZE \(0\) must be at least 1"),
        (without(TORCHRUN, "WORLD_SIZE"), "clear: WORLD_SIZE is not set"),
        ({**TORCHRUN, "RANK": "8"}, r"RANK \(8\) must be at least 0 and less than WORLD_SIZE \(8\)"),
        ({**TORCHRUN, "RANK": "-1"}, r"RANK \(-1\) must be at least 0 and less than"),
        ({**TORCHRUN, "RANK": ""}, "RANK is empty"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, r"LOCAL_RANK \(4\) must be at least 0 and less than LOCAL_WORLD_SIZE \(4\)"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE \(9\) must be at most WORLD_SIZE \(8\)"),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is 'x'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE says 2 processes, and RANK, which of them this one is, is not set"),
        (without(TORCHRUN, "LOCAL_RANK", "MASTER_PORT"), "LOCAL_RANK is not set; MASTER_PORT is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "MASTER_ADDR, .* Give mpirun what is missing"),
        (without(MPICH, "MPI_LOCALRANKID"), "MPI_LOCALRANKID is not set"),
        ({**MPICH, "WORLD_SIZE": "16"}, r"WORLD_SIZE \(16\) is not PMI_SIZE \(2\)"),
        ({**STEP, "SLURM_PROCID": "5"}, r"SLURM_PROCID \(5\) must be at least 0 and less than SLURM_STEP_NUM_TASKS \(5\)"),
        (without(STEP, "SLURM_LOCALID"), "SLURM_LOCALID is not set. Start it with srun"),
        ({**BATCH, "SLURM_PROCID": "1"}, "SLURM_PROCID says task 1 of srun, and SLURM_STEP_NUM_TASKS"),
    ],
)
def test_what_is_missing_or_wrong_is_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Launch.from_env(env)
    assert caught.value.exit_code == EXIT_CONFIG and not caught.value.on_all_ranks, "the variables are those of one rank"


def test_a_terminal_of_srun_is_not_taken_for_all_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ConfigError, match="this shell is one of the 5 tasks of `srun --pty`"):
        Launch.from_env(STEP)
    assert Launch.from_env({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == ALONE


def test_the_number_of_processes_that_a_configuration_is_for() -> None:
    """WORLD_SIZE may stand alone: launch.sh and the scripts ask for the configuration of a job before they start it."""
    assert launched_processes({}) == launched_processes(BATCH) == 1
    assert (launched_processes({"WORLD_SIZE": "16"}), launched_processes(OPEN_MPI), launched_processes(STEP)) == (16, 4, 5)
    assert launched_processes({**STEP, "WORLD_SIZE": "40"}) == 40
    for env, words in (({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"), ({"RANK": "0"}, "WORLD_SIZE is not set")):
        with pytest.raises(ConfigError, match=words):
            launched_processes(env)


@pytest.mark.parametrize(("env", "speaks"), [({}, 1), (TORCHRUN, 0), (MPICH, 0), (STEP, 0), (BATCH, 1), ({"RANK": "x"}, 1)])
def test_who_speaks(env: dict[str, str], speaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *MPICH, *STEP, *OPEN_MPI):
        monkeypatch.delenv(name, raising=False)
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    assert is_first_rank() == bool(speaks)


def test_rank_0_speaks_before_torchrun_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """When another rank ends first, torchrun kills rank 0 before it has told the reason."""
    waits: list[float] = []
    monkeypatch.setattr(launch_module.time, "sleep", waits.append)
    for rank, torchrun, waited in (("0", "id", 0), ("1", "id", 1), ("1", None, 0)):
        waits.clear()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", torchrun)
        let_first_rank_speak()
        assert len(waits) == waited


def test_slurms_lists() -> None:
    hosts = {"a": "a", "a,b": "a", "a[3-4],b": "a3", "gpu[003,005-7]": "gpu003", "r[1-2]n[05-06]": "r1n05", "a.b[1].c,d": "a.b1.c", "": ""}
    assert {text: first_host(text) for text in hosts} == hosts
    assert [tasks_per_host(text) for text in ("2(x3),1", "4", "", "many")] == [[2, 2, 2, 1], [4], [], []]
