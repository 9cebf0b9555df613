"""Whole trainings whose steps are captured, on CPUs and gloo with tapes in place of graphs: the bits of an eager run in every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tape import Tapes
from support.training import assert_same_run, records, state, train

from megatron_sp.training import graphs
from megatron_sp.training import run as parts

ON, AUTO = ("--cuda-graphs", "on", "--cuda-graph-warmup-steps", 1), ("--cuda-graph-warmup-steps", 2)
USED = "captured steps: used from step"


class OnGPU:
    """Groups that say that they are on a GPU, so that steps are captured."""

    def __init__(self, groups: Any) -> None:
        self._groups, self.device = groups, torch.device("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._groups, name)


def with_tapes(then: Callable[[int], None] = lambda _: None) -> Callable[[int], None]:
    """Let a CPU's steps be captured."""

    def setup(rank: int) -> None:
        import megatron_sp.ops.cuda_graphs as cuda_graphs

        plain = parts.use_graphs
        graphs.why_not_captured = lambda *_, **__: []  # type: ignore[assignment]
        cuda_graphs.CudaGraphs = lambda _: Tapes()  # type: ignore[assignment, misc]
        parts.use_graphs = lambda context, *rest: plain(dataclasses.replace(context, groups=OnGPU(context.groups)), *rest)
        import megatron_sp.config.rules_kernels as rules_kernels
        from megatron_sp.config import fields

        graphs.require_captured = lambda *_, **__: None  # type: ignore[assignment]
        object.__setattr__(fields.When.GRAPHS, "holds", lambda _: True)
        rules_kernels.obstacles = lambda _: []  # type: ignore[assignment]
        then(rank)

    return setup


def in_no_time(_: int) -> None:
    """Let everything that is compared take the same time."""
    graphs.time = SimpleNamespace(perf_counter=lambda: 0.0)  # type: ignore[assignment]


LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "one": (1, ("--micro-batch-size", 1)),
    "tp and its sequence, dp, stage 1": (4, ("--tp-size", 2, "--sequence-parallel", "--zero-stage", 1, "--micro-batch-size", 1)),
    "sp chunked, stage 2": (
        2, ("--sp-size", 2, "--sp-overlap-mode", "chunked", "--sp-overlap-comm", "--zero-stage", 2, "--micro-batch-size", 1),
    ),
    "stage 3": (2, ("--zero-stage", 3, "--micro-batch-size", 1, "--recompute-granularity", "full", "--attention-dropout", 0)),
    "cp": (2, ("--cp-size", 2, "--attention-dropout", 0)),
}  # fmt: skip


@pytest.mark.often("stage 3")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_bits_of_an_eager_run(tmp_path: Path, name: str) -> None:
    """With validations and saves in between."""
    ranks, flags = LAYOUTS[name]
    flags = (*flags, "--eval-iters", 1, "--eval-interval", 2, "--save-interval", 2, "--attention-backend", "unfused")
    eager, captured = tmp_path / "eager", tmp_path / "captured"
    train(tmp_path, *flags, "--save", eager, ranks=ranks).expect(0)
    train(tmp_path, *flags, *ON, "--save", captured, ranks=ranks, setup=with_tapes()).expect(0, f"{USED} 2 on (--cuda-graphs on)")
    assert_same_run(captured, eager)
    assert [r["loss"] for r in records(captured, "valid")] == [r["loss"] for r in records(eager, "valid")]


def test_a_run_that_is_stopped_and_goes_on_keeps_its_choice(tmp_path: Path) -> None:
    """A batch that grows, graphs anew for each size; stopped in between by --exit-interval."""
    flags = ("--train-iters", 8, "--global-batch-size", 8, "--rampup-batch-size", 4, 4, 12, "--save-interval", 4)
    eager, captured = tmp_path / "eager", tmp_path / "captured"
    train(tmp_path, *flags, "--save", eager).expect(0)
    first, again = (*flags, *AUTO, "--save", captured, "--exit-interval", 5), (*flags, *AUTO, "--save", captured, "--auto-resume")
    train(tmp_path, *first, setup=with_tapes(in_no_time)).expect(0, f"{USED} 3 on (the bits of an eager step; a step takes")
    train(tmp_path, *again, setup=with_tapes()).expect(0, f"{USED} 8 on (as before the resume)")
    assert_same_run(captured, eager)
    assert state(captured, 5)["layout"]["cuda_graphs"] is state(captured)["layout"]["cuda_graphs"] is True


@pytest.mark.long
def test_all_ranks_make_one_choice(tmp_path: Path) -> None:
    """A capture fails on one rank, that of the update, in which no collectives are: no rank uses its own."""

    def broken(rank: int) -> None:
        plain = Tapes.capture

        def capture(self: Tapes, record: Callable[[], None]) -> Any:
            tape = plain(self, record)
            if rank == 1 and Tapes.num_captured == 3:
                raise RuntimeError("no graph today")
            return tape

        Tapes.capture = capture  # type: ignore[method-assign]

    eager, captured = tmp_path / "eager", tmp_path / "captured"
    train(tmp_path, "--save", eager, ranks=2).expect(0)
    text = "captured steps: not used, rank 1: the capture failed: RuntimeError: no graph today"
    train(tmp_path, *AUTO, "--save", captured, ranks=2, setup=with_tapes(broken)).expect(0, text)
    assert_same_run(captured, eager)
    train(tmp_path, *ON, ranks=2, setup=with_tapes(broken)).expect(2, "--cuda-graphs on cannot be: rank 1: the capture failed")


def test_on_without_a_gpu_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "--cuda-graphs", "on", ranks=2).expect(2, "--cuda-graphs on cannot be: --device cpu has no graphs; use a GPU")
