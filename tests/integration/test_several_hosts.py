"""scripts/launch.sh on several hosts: two network namespaces with a cable between them, each with its own launcher.

Where namespaces cannot be made (no root, no iproute2), the same two launchers run on the loopback address, so that
everything but the cable is tested. ``ip netns list`` shows nothing of ours afterwards; a leftover of a test that was
killed is removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.paths import ROOT
from support.training import MOCK, TINY, assert_same_run, records, saved_steps, status, train
from support.waiting import NEVER_MINUTES, PATIENCE_S, wait_until

from megatron_sp.utils.host import is_running

pytestmark = pytest.mark.torchrun
SP2 = ("--sequence-parallel-size", "2", "--sp-overlap-mode", "chunked")
FOREIGN = ("TORCHELASTIC", "MASTER_", "RANK", "LOCAL_", "WORLD_", "NODE_RANK", "NNODES", "NPROC", "GLOO_", "SLURM_")


class Host:
    """Somewhere to start commands."""

    def __init__(self, address: str, *inside: str) -> None:
        self.address = address  # where the other host finds it
        self.inside = inside  # the words before a command that is to run there


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=PATIENCE_S)


def cut_cable(hosts: list[Host]) -> None:
    """For ever, and silently, as when a switch dies: each host goes on sending to a card that nobody has."""
    for here, there in (hosts, hosts[::-1]):
        done = ip("-n", here.inside[-1], *f"neigh replace {there.address} lladdr 02:00:00:00:00:99 dev mspwire nud permanent".split())
        assert done.returncode == 0, done.stderr


def remove_leftovers() -> None:
    for name, pid in re.findall(r"^(msp(\d+)[ab])\b", ip("netns", "list").stdout, flags=re.MULTILINE):
        if int(pid) == os.getpid() or not Path(f"/proc/{pid}").exists():
            ip("netns", "del", name)


@contextlib.contextmanager
def namespaces() -> Iterator[list[Host] | None]:
    """Two hosts with a cable between them; None where they cannot be made."""
    if shutil.which("ip") is None:
        yield None
        return
    a, b = (f"msp{os.getpid()}{side}" for side in "ab")
    remove_leftovers()
    try:
        made = all(
            ip(*words.split()).returncode == 0
            for words in (
                f"netns add {a}", f"netns add {b}", f"link add mspwire netns {a} type veth peer name mspwire netns {b}",
                *(f"-n {ns} {rest}" for ns, host in ((a, 1), (b, 2)) for rest in (
                    f"addr add 10.77.0.{host}/24 dev mspwire", "link set mspwire up", "link set lo up")),
            )
        )  # fmt: skip
        yield [Host(f"10.77.0.{i}", "ip", "netns", "exec", ns) for i, ns in ((1, a), (2, b))] if made else None
    finally:
        remove_leftovers()  # the cable goes with its ends


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    with namespaces() as made:
        yield made or [Host("127.0.0.1"), Host("127.0.0.1")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**variables: object) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    return {**kept, "PYTHON": sys.executable, **{k: str(v) for k, v in variables.items()}}


def start(host: Host, output: Path, *flags: object, cwd: Path, **variables: object) -> subprocess.Popen[str]:
    words = [*host.inside, "bash", str(ROOT / "scripts/launch.sh"), "1", str(ROOT / "pretrain_gpt.py"), *TINY, *MOCK, *map(str, flags)]
    with open(output, "w") as file:
        return subprocess.Popen(
            words, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment(**variables)
        )


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float = PATIENCE_S) -> list[int]:
    """Exit codes; nothing is left running."""
    deadline = time.monotonic() + timeout_s
    try:
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in processes]
    finally:
        for p in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()


class Job:
    """The same command on both hosts."""

    def __init__(self, hosts: list[Host], tmp_path: Path, *flags: object, **variables: object) -> None:
        self._hosts, self._folder, self._flags = hosts, tmp_path, flags
        self._variables: dict[str, object] = {"NNODES": 2, "MASTER_ADDR": hosts[0].address, "MASTER_PORT": free_port(), **variables}
        self._outputs: list[Path] = []
        self.processes = [self._start(i) for i in range(2)]  # the launcher of each host

    def _start(self, i: int) -> subprocess.Popen[str]:
        self._outputs.append(self._folder / f"host{i}-{len(self._outputs)}.txt")
        return start(self._hosts[i], self._outputs[-1], *self._flags, cwd=self._folder, **self._variables, NODE_RANK=i)

    def lose(self, i: int) -> None:
        """A host loses power: all its processes are gone, without a word."""
        for pid in processes_of(self.processes[i].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[i].wait()

    def start_again(self, i: int) -> None:
        self.processes[i] = self._start(i)

    @property
    def said(self) -> str:
        return "\n".join(f"--- {f.name}\n{f.read_text()}" for f in self._outputs)


def processes_of(launcher: int) -> list[int]:
    """A launcher, what it has started, what those have started, and so on."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [launcher]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def steps(run: Path) -> int:
    return len(records(run)) if (run / "metrics.jsonl").exists() else 0


def further_than_before(run: Path) -> bool:
    """The second attempt has taken a step that the first one had not.

    The log is read once: the first attempt may write one more step after its other host is gone, between any two looks
    at it.
    """
    log = records(run, "start", "train")
    starts = [i for i, record in enumerate(log) if record["kind"] == "start"]
    return len(starts) == 2 and log[-1]["kind"] == "train" and log[-1]["step"] > max(r["step"] for r in log[1 : starts[1]])


def test_two_hosts_train_as_one_and_stop_together(tmp_path: Path, two_hosts: list[Host]) -> None:
    """One rank on each, a sequence cut over both: the losses of the run on one host, to the last bit.

    SIGTERM to one, as from a scheduler that takes a host away: all agree on the step, save it, and both shells see 75.
    """
    run, flags = tmp_path / "apart", (*SP2, "--distributed-timeout-minutes", NEVER_MINUTES, "--train-iters", 100_000)
    job = Job(two_hosts, tmp_path, *flags, "--save", run)
    try:
        wait_until(lambda: steps(run) >= 3)
        job.processes[1].send_signal(signal.SIGTERM)
    finally:
        codes = finish(job.processes)
    said = job.said
    assert codes == [75, 75], said
    assert f"host 1 of 2 ({two_hosts[1].address})" in said
    assert status(run)["status"] == "preempted" and saved_steps(run) == [records(run)[-1]["step"]]
    train(tmp_path, *flags, "--exit-interval", 3, "--save", tmp_path / "together", ranks=2).expect(0)
    apart, together = ([(r["step"], r["loss_hex"], r["grad_norm_hex"]) for r in records(of)] for of in (run, tmp_path / "together"))
    assert apart[:3] == together and len(together) == 3


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_dies_and_returns_is_taken_back(tmp_path: Path, two_hosts: list[Host], victim: int) -> None:
    """By the same command and without a word of a resume; the run is, bit for bit, the one that was left in peace.

    Host 0 keeps torchrun's rendezvous: when it has died, the other one's launcher waits for it.
    """
    run, clean = tmp_path / "run", tmp_path / "clean"
    flags = (*SP2, "--distributed-timeout-minutes", NEVER_MINUTES, "--save-interval", 10)
    job = Job(two_hosts, tmp_path, *flags, "--train-iters", 100_000, "--save", run, RESTARTS=2, JOIN_TIMEOUT=int(PATIENCE_S))
    try:
        wait_until(lambda: steps(run) >= 15)
        job.lose(victim)
        job.start_again(victim)
        wait_until(lambda: further_than_before(run))
        job.processes[victim].send_signal(signal.SIGTERM)
    finally:
        codes = finish(job.processes)
    assert codes == [75, 75], job.said
    last = records(run)[-1]["step"]
    assert [r["attempt"] for r in records(run, "start")] == [0, 1] and saved_steps(run)[-1] == last
    train(tmp_path, *flags, "--train-iters", 100_000, "--exit-interval", last, "--save", clean, ranks=2).expect(0)
    assert_same_run(run, clean)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_does_not_return_ends_the_job(tmp_path: Path, two_hosts: list[Host], lost: int) -> None:
    """The launcher and every rank of the other host, by themselves."""
    run = tmp_path / "run"
    flags = (*SP2, "--distributed-timeout-minutes", NEVER_MINUTES, "--save-interval", 10, "--train-iters", 100_000, "--save", run)
    job = Job(two_hosts, tmp_path, *flags, RESTARTS=3, JOIN_TIMEOUT=60, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=10)
    try:
        wait_until(lambda: steps(run) >= 15)
        there = [pid for process in job.processes for pid in processes_of(process.pid)]
        job.lose(lost)
        wait_until(lambda: job.processes[1 - lost].poll() is not None, 0.1)
    finally:
        codes = finish(job.processes)
    assert codes[1 - lost] == 7, job.said
    assert not any(is_running(pid) for pid in there), "no orphan is left"
    assert status(run)["exit_code"] == 7 and saved_steps(run)


@pytest.mark.long
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_network_that_stays_cut_ends_the_job_on_both_hosts(tmp_path: Path, two_hosts: list[Host], restarts: int) -> None:
    """Both hosts live and neither hears from the other: ranks and launchers end by themselves, and say why."""
    if not two_hosts[0].inside:
        pytest.skip("no network namespaces here: there is no cable to cut")
    run = tmp_path / "run"
    flags = (*SP2, "--distributed-timeout-minutes", 0.5, "--save-interval", 10, "--train-iters", 100_000, "--save", run)
    job = Job(two_hosts, tmp_path, *flags, RESTARTS=restarts, JOIN_TIMEOUT=60, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=10)
    try:
        wait_until(lambda: steps(run) >= 15)
        there = [pid for process in job.processes for pid in processes_of(process.pid)]
        cut_cable(two_hosts)
        wait_until(lambda: all(process.poll() is not None for process in job.processes), 0.1)
    finally:
        codes = finish(job.processes)
    assert codes == [7, 7], job.said
    assert "host 0 or the connection to it was lost" in job.said
    assert not any(is_running(pid) for pid in there), "no orphan is left"
    assert status(run)["exit_code"] == 7 and saved_steps(run)


def slurm(tmp_path: Path) -> dict[str, object]:
    """Variables of a job on two hosts: sbatch's part; srun's and scontrol's are played by two small programs. What they start is real."""
    (tmp_path / "bin").mkdir()
    fakes = {
        "srun": '[ -z "$FAKE_CODE" ] || exit "$FAKE_CODE"; export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2\n'
        'for i in 0 1; do SLURM_NODEID=$i "${@:$SKIP}" >"$LOGS/node$i.txt" 2>&1 & done\n'
        "code=0; for job in $(jobs -p); do wait $job || code=$?; done; exit $code",
        "scontrol": 'case "$1" in show) echo localhost; echo elsewhere ;; *) echo "$@" >>"$LOGS/scontrol.txt" ;; esac',
    }
    for name, body in fakes.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    text = (ROOT / "scripts/slurm.sbatch").read_text()
    (srun,) = re.findall(r"^srun (.*?)bash -c", text, flags=re.MULTILINE)
    assert "--ntasks-per-node=1" in text and "--kill-on-bad-exit" in srun
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "LOGS": tmp_path, "SKIP": len(srun.split()) + 1, "NPROC_PER_NODE": 1,
        "SLURM_JOB_ID": os.getpid(), "SLURM_NNODES": 2, "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_SUBMIT_DIR": ROOT,
    }  # fmt: skip


@pytest.mark.long
def test_the_slurm_template(tmp_path: Path) -> None:
    variables = slurm(tmp_path)
    flags = (*TINY, *MOCK, *SP2, "--train-iters", 3, "--exit-interval", 2, "--save", tmp_path / "run")
    command = ["bash", str(ROOT / "scripts/slurm.sbatch"), "pretrain_gpt.py", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**variables))
    said = done.stdout + done.stderr + "".join(f.read_text() for f in tmp_path.glob("*.txt"))
    assert done.returncode == 0, said
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2] and not (tmp_path / "scontrol.txt").exists()
    preempted = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**variables, FAKE_CODE=75))
    assert preempted.returncode == 75 and (tmp_path / "scontrol.txt").read_text() == f"requeue {os.getpid()}\n", preempted.stderr


@pytest.mark.long
def test_a_script_of_the_zoo_under_slurm(tmp_path: Path) -> None:
    """Each host gets the script, with what it must know of the others."""
    command = ["bash", str(ROOT / "scripts/slurm.sbatch"), "scripts/pretrain_llama_8b_128k.sh", "--global-batch-size", "16"]
    variables = {**slurm(tmp_path), "NPROC_PER_NODE": 8, "DRY_RUN": 1}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**variables))
    said = [(tmp_path / f"node{i}.txt").read_text() for i in range(2)]
    assert done.returncode == 0, done.stdout + done.stderr + "".join(said)
    assert all("16 GPUs of 2 hosts: tp 1, sp 8 (exchanges: chunked), dp 2, ZeRO stage 3" in text for text in said), said


@pytest.mark.parametrize("variables, message", [
    ({"NNODES": "two"}, "NNODES=two must be the number of hosts"), ({"NNODE": 2}, "NNODE is unknown: did you mean NNODES?"),
    ({"NNODES": 0}, "NNODES=0 must be the number of hosts, 1 or more"),
    ({"NNODES": 2}, "give each of them NODE_RANK=0..1, a different one on each host, and MASTER_ADDR, the address of host 0"),
    ({"NNODES": 2, "NODE_RANK": 1}, "give each of them MASTER_ADDR, the address of host 0"),
    ({"NNODES": 2, "NODE_RANK": 2, "MASTER_ADDR": "127.0.0.1"}, "NODE_RANK=2 must be between 0 and 1, for NNODES=2"),
    ({"NODE_RANK": 1}, "NODE_RANK=1 says that this is one of several hosts, but NNODES is not set"),
    ({"NNODES": 1, "NODE_RANK": 1, "MASTER_ADDR": "127.0.0.1"}, "but NNODES is 1"),
    ({"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "MASTER_PORT=http must be a port, 1 to 65535"),
    ({"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "JOIN_TIMEOUT": "1m"}, "JOIN_TIMEOUT=1m must be a number of seconds"),
    ({"NPROC_PER_NODE": 2}, "NPROC_PER_NODE=2 and the first argument (1) both say"),
    ({"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR=no-such-host.invalid cannot be looked up"),
    ({"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "192.0.2.7"}, "MASTER_ADDR=192.0.2.7"),
    ({"SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_NUM_TASKS": 2}, "srun starts this on 2 hosts, but NNODES is not set"),
    ({"SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NUM_TASKS": 8}, "srun starts this 8 times on 1 host(s)"),
], ids=lambda v: " ".join(f"{k}={x}" for k, x in v.items()) if isinstance(v, dict) else "")  # fmt: skip
def test_variables_that_cannot_work_are_answered_at_once(tmp_path: Path, variables: dict[str, object], message: str) -> None:
    process = start(Host("127.0.0.1"), tmp_path / "said.txt", "--train-iters", 2, cwd=tmp_path, **variables)
    assert finish([process]) == [2]
    said = (tmp_path / "said.txt").read_text()
    assert message in said and said.count("error:") == 1 and "Traceback" not in said, said


def test_a_port_in_use_and_a_master_that_does_not_come(tmp_path: Path) -> None:
    common: dict[str, object] = {"NNODES": 2, "MASTER_ADDR": "127.0.0.1", "JOIN_TIMEOUT": 1}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = start(Host(""), tmp_path / "said.txt", "--train-iters", 2, cwd=tmp_path, **common, NODE_RANK=0, MASTER_PORT=port)
        assert finish([process]) == [2]
    assert f"port {port} of this host is in use" in (tmp_path / "said.txt").read_text()
    process = start(Host(""), tmp_path / "said.txt", "--train-iters", 2, cwd=tmp_path, **common, NODE_RANK=1, MASTER_PORT=free_port())
    assert finish([process]) == [7]
    said = (tmp_path / "said.txt").read_text()
    assert "nobody answers at MASTER_ADDR:MASTER_PORT 127.0.0.1:" in said and "see that host 0 was started" in said


def test_nothing_is_left_behind() -> None:
    with namespaces():
        pass
    if shutil.which("ip") is not None:
        assert f"msp{os.getpid()}" not in ip("netns", "list").stdout
