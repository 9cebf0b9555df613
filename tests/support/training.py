"""Run the real training program in forked children, and compare what two runs left behind.

A case costs a third of a second: the children inherit the imported program. All cases are attempts on one store, as
those of a job are under torchrun.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # imported here so that no child does it again
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.waiting import PATIENCE_S

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config import rules as _  # noqa: F401 - as above
from megatron_sp.config.flags.settings import targets
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.tasks.bert import bert_task
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training.loop import pretrain
from megatron_sp.utils.faults import FAULT_VARIABLE

TINY = (
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--lr", "1e-2",
    "--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "0", "--num-threads", "1", "--device", "cpu",
    "--peak-tflops", "1", "--micro-batch-size", "2", "--global-batch-size", "4",
)  # fmt: skip
MOCK = ("--mock-data", "--vocab-size", "60")
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
KILLED = -signal.SIGKILL


targets()  # the table of all flags is kept: made here, once, and not in every child

Program = Callable[[list[str]], None]


def gpt(words: list[str]) -> None:
    """``pretrain_gpt.py``."""
    pretrain(parse_config(words, prog="pretrain_gpt.py"), GPT)


def bert(words: list[str]) -> None:
    """``pretrain_bert.py``."""
    config = parse_config(words, prog="pretrain_bert.py", family="bert")
    pretrain(config, bert_task(config))


@dataclass
class Outcome:
    """How the ranks of one run ended."""

    codes: list[int]  # negative for a signal, like subprocess's
    texts: list[str]  # what each rank wrote to standard output and standard error

    @property
    def text(self) -> str:
        return "\n".join(
            f"--- rank {rank}, code {code}\n{text}" for rank, (code, text) in enumerate(zip(self.codes, self.texts, strict=True))
        )

    def expect(self, code: int, *parts: str) -> Outcome:
        """Every rank ended with ``code``, and all ``parts`` were said; returns itself."""
        assert self.codes == [code] * len(self.codes), self.text
        missing = [part for part in parts if part not in self.text]
        assert not missing, f"not said: {missing}\n{self.text}"
        return self


def train(
    tmp_path: Path, *flags: object, ranks: int = 1, fault: str = "", attempt: int = 0, setup: Callable[[int], None] | None = None,
    during: Callable[[list[int]], None] | None = None, data: Sequence[object] = MOCK,
    program: Program | None = None,
) -> Outcome:  # fmt: skip
    """Train the tiny model on ``ranks`` forked processes, for six steps if the flags do not say how many.

    Args:
        tmp_path: for the output of the ranks.
        flags: after those of ``TINY``; later ones win.
        fault: the fault plan (enables fault injection).
        attempt: torchrun's restart count.
        setup: called with the rank in each child before the program.
        during: called here with the children's pids while they run.
        data: flags of data and tokenizer.
        program: what is run with the words of the command line; None: ``pretrain_gpt.py``.
    """
    length = () if "--train-samples" in flags or "--train-iters" in flags else ("--train-iters", 6)
    words = [str(word) for word in (*TINY, *length, *data, *flags)] + (["--enable-fault-injection"] if fault else [])
    environment = _store_address() | {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": str(attempt), FAULT_VARIABLE: fault,
    }  # fmt: skip
    tmp_path.mkdir(parents=True, exist_ok=True)
    files = [tmp_path / f"rank{rank}-{time.monotonic_ns()}.txt" for rank in range(ranks)]
    pids = [_fork(rank, words, environment, files[rank], setup, tmp_path, program or gpt) for rank in range(ranks)]
    codes: dict[int, int] = {}
    try:
        if during is not None:
            during(pids)
        began = time.monotonic()
        while len(codes) < ranks and time.monotonic() - began < PATIENCE_S:
            _reap(pids, codes)
            time.sleep(0.003)
    finally:
        late = [rank for rank in range(ranks) if rank not in codes]
        for rank in late:
            os.kill(pids[rank], signal.SIGUSR2)  # where is it?
        time.sleep(0.5 * bool(late))
        for rank in late:
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
    outcome = Outcome([codes.get(r, KILLED) for r in range(ranks)], [f.read_text() for f in files])
    assert not late, f"ranks {late} had not ended after {PATIENCE_S} s\n{outcome.text}"
    return outcome


def _reap(pids: list[int], codes: dict[int, int]) -> None:
    for rank, pid in enumerate(pids):
        if rank not in codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)


@cache
def _store_port() -> int:
    """The launcher's store, in a process of its own that ends with this one, like torchrun's agent.

    Not in this one: ranks forked while it serves would share its epoll instance, and once in a thousand starts one is
    never answered.
    """
    ours, theirs = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))
            os.write(theirs, str(store.port).encode())
            os.close(theirs)
            while os.getppid() == parent:
                time.sleep(0.5)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        return int(pipe.read(16) or b"0")


def _store_address() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_store_port()), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _fork(
    rank: int, words: list[str], environment: dict[str, str], output: Path, setup: Callable[[int], None] | None, cwd: Path,
    program: Program,
) -> int:  # fmt: skip
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        logging.root.handlers.clear()  # pytest's, which would swallow warnings
        faulthandler.register(signal.SIGUSR2, sys.stderr, all_threads=True)
        os.chdir(cwd)
        torch.set_num_threads(1)  # OpenMP with more threads hangs after a fork
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        if not environment[FAULT_VARIABLE]:
            del os.environ[FAULT_VARIABLE]
        if setup is not None:
            setup(rank)
        program(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def time_is_over(seconds: float) -> None:
    """From now on a collective of this process waits so long only: to be called when nobody else is still on his way."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def run_once(
    factory: pytest.TempPathFactory, layouts: Mapping[str, tuple[int, tuple[object, ...]]], *flags: object, program: Program = gpt
) -> Callable[[str], Path]:
    """Runs that several tests look at, each made when it is asked for first: a layout's, by its name, with a checkpoint after step 3."""

    @cache
    def run_of(name: str) -> Path:
        folder, (ranks, its_own) = factory.mktemp("run"), layouts[name]
        train(folder, *its_own, "--save", folder / "run", "--save-interval", 3, *flags, ranks=ranks, program=program).expect(0)
        return folder / "run"

    return run_of


# What a run left behind


def records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of these kinds in metrics.jsonl, of training steps if none is named.

    NaN and infinity in the file are errors. A line that is being written is not there yet.
    """

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    return [r for r in (json.loads(line, parse_constant=refuse) for line in lines) if r["kind"] in (kinds or ("train",))]


def trace(run: Path) -> dict[int, tuple[str, str, str]]:
    """Loss and gradient norm as hex and the digest of the sample ids of every logged step; one taken twice must agree."""
    steps: dict[int, tuple[str, str, str]] = {}
    for r in records(run):
        entry = (r["loss_hex"], r["grad_norm_hex"], r["samples_sha"])
        assert steps.setdefault(r["step"], entry) == entry, f"step {r['step']} differs when taken again"
    return steps


def status(run: Path) -> dict[str, Any]:
    record = json.loads((run / "run_status.json").read_text())
    assert isinstance(record, dict)
    return record


def saved_steps(run: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdigit())


def tensors(run: Path, step: int | None = None) -> dict[str, Tensor]:
    """Every tensor of a checkpoint (the newest by default), verified."""
    reader = Checkpointer(None)
    folder = reader.find(run, step)
    result = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in reader.tensor_shapes(folder).items()}
    reader.load(folder, {name: GlobalTensor.whole(t) for name, t in result.items()})
    return result


def state(run: Path, step: int | None = None) -> dict[str, Any]:
    reader = Checkpointer(None)
    return reader.read_state(reader.find(run, step))


def assert_same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Equal names, types and bits."""
    assert got.keys() == want.keys()
    wrong = [name for name, t in want.items() if t.dtype != got[name].dtype or not torch.equal(got[name], t)]
    assert not wrong, f"differ: {wrong}"


def assert_same_run(got: Path, want: Path) -> None:
    """The same steps, with the same bits in the log and in the last checkpoint."""
    assert trace(got) == trace(want)
    assert_same_tensors(tensors(got), tensors(want))


def copy_run(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def write_data(prefix: Path, num_documents: int = 60, vocab_size: int = 60, seed: int = 0, longest: int = 90) -> Path:
    """A data set of documents of random lengths; the last id ends each of them."""
    rng = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(num_documents):
            tokens = rng.integers(0, vocab_size - 1, int(rng.integers(5, longest)))
            writer.add_document(np.append(tokens, vocab_size - 1))
    return prefix
