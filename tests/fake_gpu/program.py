"""The real programs on the fake device, each as one rank of a job, and what the checker found.

``python -m fake_gpu.program`` (with tests/ on the path) reads cases from standard input, one JSON object a line, and
answers each with a line of JSON; a process is forked for every case, after everything has been imported once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import itertools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fake_gpu.build import load

if TYPE_CHECKING:
    from torch import Tensor

    from fake_gpu.device import Device, Tally

LIBRARY = load()  # before torch


@dataclass
class Case:
    """One rank of a job.

    Attributes:
        flags: of the program.
        world_size, rank: which rank of how many.
        program: pretrain, or one of ``programs.PROGRAMS``.
        family: of the model that is pretrained, gpt or bert.
        broadcasts: what the host of rank 0 has sent to all (``Outcome.broadcasts``); for other ranks.
        gathered: what the host of each rank has gathered in a run before (``Outcome.gathered``); empty if there was none.
        skips_first: the norm of the first step's gradients is NaN, so it is skipped.
        large: the model is large: initial weights are not drawn, and the host gets no contents of large tensors.
        drop: one of ``Outcome.sites``, which this run leaves out.
        counts: choices of each expert, and rows, that each rank with experts sends to each other; empty: one.
        square_from: ``Outcome.squares`` has tensors with so many rows and columns; 0: none.
    """

    flags: list[str]
    world_size: int = 1
    rank: int = 0
    program: str = "pretrain"
    family: str = "gpt"
    broadcasts: list[list[int]] = field(default_factory=list)
    gathered: list[list[list[int]]] = field(default_factory=list)
    skips_first: bool = False
    large: bool = False
    drop: str = ""
    square_from: int = 0
    counts: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    """What one rank did.

    Attributes:
        error: traceback, if the program failed.
        output: what it said.
        problems: of the checker (``memory.Problem``), as text, with their numbers.
        steps: of each training step: launches, bytes by operator, the places where the host waited, and the bytes on the
            device after it.
        calls, communicators: of NCCL (``nccl.Nccl``).
        broadcasts, gathered: contents of what its host has sent to all others, and of its parts of gathers, in order.
        host_waits, launches: places where the host waited after the last step, or in a program without steps; operators, and how often.
        sites: where the package waits for something, keeps memory until then or pins host memory, and how often.
        passed: lines of the package with such a call, as ``file:line``.
        peak: bytes on the device at most.
        squares: tensors with at least ``Case.square_from`` rows and columns that operations have made: where, and how
            many.
        reserved, expandable: bytes that the caching allocator takes for them, with segments and with expandable ones.
        held: of the peak, by place, the largest first.
    """

    error: str = ""
    output: str = ""
    problems: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    communicators: list[Any] = field(default_factory=list)
    broadcasts: list[list[int]] = field(default_factory=list)
    gathered: list[list[int]] = field(default_factory=list)
    host_waits: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    peak: int = 0
    reserved: int = 0
    expandable: int = 0
    held: dict[str, int] = field(default_factory=dict)
    num_accesses: int = 0
    squares: dict[str, int] = field(default_factory=dict)


def run(case: Case) -> Outcome:
    """Run a case in this process, which is of no other use afterwards."""
    from fake_gpu import kernels, modules, nccl, programs, stand_ins
    from fake_gpu.allocator import Allocator, held_at_peak
    from fake_gpu.device import Device

    os.environ.update(WORLD_SIZE=str(case.world_size), RANK=str(case.rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="nowhere", MASTER_PORT="1")  # nobody is called
    if case.program not in ("pretrain", "snippet"):
        programs.prepare()
    outcome = Outcome()
    device = Device(LIBRARY, _values_of(case, outcome))
    stand_ins.install(device)
    calls = nccl.install(device, case.broadcasts, case.gathered)
    modules.install(device)
    kernels.install(device)
    if case.large:
        modules.install_large(device)
    _watch_steps(device, outcome)
    _count_time()
    device.dropped, device.square_from = case.drop, case.square_from
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            with device:
                code = _train(case) if case.program == "pretrain" else programs.PROGRAMS[case.program](case.flags)
            if code:
                outcome.error = f"exit code {code}"
        except BaseException:
            outcome.error = traceback.format_exc()
    device.is_watching = False
    outcome.output = said.getvalue()
    outcome.problems = {str(problem): count for problem, count in device.memory.problems.items()}
    outcome.calls, outcome.communicators = [asdict(call) for call in calls.calls], calls.communicators
    outcome.host_waits, outcome.launches, outcome.sites = _summary(device.tally)["host_waits"], dict(device.tally.launches), device.sites
    outcome.passed, outcome.squares = sorted(device.passed), dict(device.squares)
    outcome.broadcasts, outcome.gathered = calls.broadcasts, calls.gathered
    outcome.peak, outcome.num_accesses = device.memory.peak, device.memory.num_accesses
    outcome.held = dict(list(held_at_peak(device.memory.history).items())[:40])
    outcome.reserved = Allocator().run(device.memory.history).peak_reserved
    outcome.expandable = Allocator(expandable=True).run(device.memory.history).peak_reserved
    return outcome


def _train(case: Case) -> int:
    from megatron_sp.commands.pretrain import parse_config
    from megatron_sp.data import gpt_dataset
    from megatron_sp.tasks.bert import bert_task
    from megatron_sp.tasks.gpt import GPT
    from megatron_sp.training.loop import _pretrain
    from megatron_sp.training.setup import RunStatus
    from megatron_sp.utils.launch import Launch

    gpt_dataset._EOD_PROBABILITY = 1 / 8  # so that short sequences have several documents
    config = parse_config([*case.flags, "--device", "cuda"], prog="pretrain", family=case.family)
    launch = Launch.from_env()
    return _pretrain(config, GPT if case.family == "gpt" else bert_task(config), launch, RunStatus(launch.rank))


def _values_of(case: Case, outcome: Outcome) -> Callable[[Tensor], Tensor]:
    """Return what the host reads: ones, and of a step that no rank wants to stop."""
    import torch

    from fake_gpu.device import place

    num_terms = {"gpt": 1, "bert": 2}[case.family]

    def values(tensor: Tensor) -> Tensor:
        if place(1).startswith("ops/fused_kernels.py"):  # examples: what two kernels differ by
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        ones = torch.ones(tensor.shape, dtype=tensor.dtype)
        if case.counts and place(1).startswith("parallel/expert_exchange.py"):  # Counts: [..., own experts + 1]
            ones[..., :-1], ones[..., -1] = case.counts[0], case.counts[1]
        if tensor.dtype == torch.float64 and tensor.dim() == 1 and place(1).startswith("training/step.py"):
            # TrainStep.run: [norm of the gradients, sum of each term, count of each term, ranks that want to stop,
            # digests of samples]
            ones[1 + 2 * num_terms] = 0.0
            if case.skips_first and not outcome.steps:
                ones[0] = float("nan")
        return ones

    return values


def _watch_steps(device: Device, outcome: Outcome) -> None:
    """Note what each training step does."""
    from fake_gpu.device import Tally
    from megatron_sp.training.step import TrainStep

    original = TrainStep.run

    def run_step(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        if not outcome.steps:
            device.tally = Tally()  # what came before the first step is not of a step
        result = original(self, *args, **kwargs)
        outcome.steps.append({**_summary(device.tally), "allocated": device.memory.num_bytes})
        device.tally = Tally()  # the next one begins with its batches
        return result

    TrainStep.run = run_step  # type: ignore[method-assign]


def _count_time() -> None:
    """Let what is timed at the start take the same time on every rank, so that all choose alike: ranks run one after another here."""
    from types import SimpleNamespace

    from megatron_sp.training import graphs, kernel_selection, probe

    ticks = itertools.count()
    clock = lambda: float(next(ticks)) * 1e-3
    for module in (probe, kernel_selection, graphs):
        module.time = SimpleNamespace(perf_counter=clock, monotonic=clock)  # type: ignore[attr-defined]


def _summary(tally: Tally) -> dict[str, Any]:
    return {
        "launches": dict(tally.launches), "bytes": dict(tally.num_bytes),
        "host_waits": {f"{w} at {at}": n for (w, at), n in tally.host_waits.items()},
        "files": [(file, op, count, tally.by_file[file, op]) for (file, op), count in tally.launches_by_file.items()],
    }  # fmt: skip


_MODULES = (
    "torch._dynamo", "torch._inductor", "torch._meta_registrations", "torch._prims", "torch._refs", "torch.distributed.device_mesh",
    "megatron_sp.ops.kernels.activations", "megatron_sp.ops.kernels.cross_entropy", "megatron_sp.ops.kernels.dropout",
    "megatron_sp.ops.kernels.norms", "megatron_sp.ops.kernels.rotary", "fake_gpu.kernels", "fake_gpu.modules", "fake_gpu.nccl",
    "fake_gpu.stand_ins", "megatron_sp.commands.pretrain", "megatron_sp.tasks.bert", "megatron_sp.tasks.gpt", "megatron_sp.training.loop",
)  # fmt: skip


def _import_everything() -> None:
    """Import what every case needs, before the forks; nothing of it may start a thread."""
    for name in _MODULES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def answer(line: str) -> str:
    """Run the case of a line in a child process and return the line that answers it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(300)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = json.dumps(asdict(run(Case(**json.loads(line)))))
        with os.fdopen(writing, "w") as out:
            out.write(text)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps(asdict(Outcome(error=f"the process ended with status {status}")))


def main() -> None:
    """Answer cases until there are no more."""
    _import_everything()
    for line in sys.stdin:
        print(answer(line), flush=True)


if __name__ == "__main__":
    main()
