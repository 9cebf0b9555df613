"""Captured steps without a GPU: tapes in place of graphs give the bits of eager steps, and the rules of when to capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.tape import Tape, Tapes
from support.tiny import BASE, Batch, make_batch
from torch import Tensor

from megatron_sp.comm.groups import SINGLE_RANK, ParallelGroups
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config, KernelConfig, LoggingConfig, OptimizerConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training import graphs
from megatron_sp.training.graphs import StepGraphs, Trial, decide, digest, is_profiled, kinds, require_captured, shape_of
from megatron_sp.training.parts import Origin
from megatron_sp.training.run import use_graphs
from megatron_sp.training.sharding import build_sharded
from megatron_sp.training.step import StepOptions, StepParts, StepResult, TrainStep, evaluate_batches
from megatron_sp.utils.errors import ConfigError

ALONE = cast(
    "ParallelGroups",
    SimpleNamespace(
        rank=0, world=SINGLE_RANK, tp_rank=0, dp_rank=0, dp_size=1, is_first_of_replica=True, cp=SINGLE_RANK, pp=SINGLE_RANK,
        control=None,
    ),
)  # fmt: skip


SOUND = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 --train-iters 10 --lr 1e-3"
    " --attention-dropout 0"
)


def make_step(dtype: torch.dtype = torch.float64, dropout: float = 0.0, kernel: Any = "reference", **optimizer: Any) -> TrainStep:
    shape = replace(BASE, hidden_dropout=dropout, attention_dropout=dropout)

    def build(config: Config, layout: ParallelContext, on_unit: Any = None) -> GPTModel:
        return GPTModel(shape, KernelConfig(), seed=5, dtype=dtype, layout=layout, on_unit=on_unit)

    sharded = build_sharded(build, Config(), ParallelContext(), None, torch.device("cpu"))
    config = OptimizerConfig(**{"adam_eps": 1e-3, "clip_grad": 0.05, **optimizer})
    names = [name for name, _ in sharded.model.named_parameters() if "embedding" in name]
    scaler = LossScaler(enabled=dtype == torch.float32, fixed=None, initial=8.0, minimum=1.0, window=2, hysteresis=1)
    parts = StepParts(
        sharded.model, sharded.weights, sharded.gradients, FlatOptimizer(sharded.units, config, decoupled=names), scaler
    )  # fmt: skip
    return TrainStep(parts, GPT.loss, ALONE, StepOptions(7, dropout > 0, kernel if dropout else "sdpa"))


def capture(step: TrainStep, **more: Any) -> list[str]:
    """Let a step be captured after one eager step; return what it tells."""
    told: list[str] = []
    given: dict[str, Any] = {"mode": "on", "warmup": 1, "is_eager": lambda _: False, "tell": told.append}
    step.graphs = StepGraphs(step, Tapes, **(given | more))
    return told


def batches(number: int, count: int, size: int = 3) -> list[Batch]:
    return [make_batch(seed=10 * number + i, mask=0.3 + 0.1 * i, size=size) for i in range(count)]


def as_floats(batch: Batch) -> Batch:
    return {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}


def take(step: TrainStep, number: int, given: list[Batch], **more: Any) -> StepResult:
    given = [as_floats(batch) for batch in given] if next(step.model.parameters()).dtype == torch.float32 else given
    lr = 0.1 / number
    decoupled = {"decoupled_lr": lr / 3} if step.optimizer.config.decoupled_lr is not None else {}
    return step.run([dict(batch) for batch in given], number, **({"lr": lr, "weight_decay": 0.1} | decoupled | more))


def state(step: TrainStep) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    for i, (unit, moments) in enumerate(zip(step.optimizer.units, step.optimizer.states, strict=True)):
        found |= {f"master {i}": unit.master.clone(), f"first {i}": moments.exp_avg.clone(), f"gradients {i}": unit.grad_shard.clone()}
    return found


def assert_alike(step: TrainStep, other: TrainStep) -> None:
    want, got = state(other), state(step)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert step.optimizer.num_updates == other.optimizer.num_updates and step.scaler.state() == other.scaler.state()


@pytest.fixture
def captures() -> Iterator[Callable[[], int]]:
    """Return how many graphs have been captured in this test."""
    before = Tapes.num_captured
    yield lambda: Tapes.num_captured - before


NUM_GRAPHS = {1: 3, 2: 4, 3: 5, 4: 5}  # kinds of micro-batches, the norm, the update
MADE: dict[str, dict[str, Any]] = {
    "plain": {}, "dropout": {"dropout": 0.2}, "dropout that a kernel draws": {"dropout": 0.2, "kernel": "sdpa"},
    "fp32 with a loss scale": {"dtype": torch.float32}, "two rates": {"decoupled_lr": 0.5}, "no clipping": {"clip_grad": 0.0},
    "SGD": {"optimizer": "sgd"},
}  # fmt: skip


@pytest.mark.often("plain-1", "plain-4", "dropout that a kernel draws-3", "fp32 with a loss scale-3", "two rates-3", "SGD-3")
@pytest.mark.parametrize(("name", "count"), [*(("plain", count) for count in NUM_GRAPHS), *((name, 3) for name in MADE if name != "plain")])
def test_captured_steps_have_the_bits_of_eager_ones(name: str, count: int, captures: Callable[[], int]) -> None:
    step, other = make_step(**MADE[name]), make_step(**MADE[name])
    told = capture(step)
    for number in range(1, 6):
        got, want = take(step, number, batches(number, count)), take(other, number, batches(number, count))
        assert got == want and want.updated
    assert_alike(step, other)
    assert captures() == NUM_GRAPHS[count] and told == ["captured steps: used from step 2 on (--cuda-graphs on)"]


def bad(number: int, count: int) -> list[Batch]:
    """Batches whose loss is not finite."""
    made = batches(number, count)
    made[-1]["loss_mask"][0, 0] = float("inf")
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_that_is_skipped(dtype: torch.dtype) -> None:
    step, other = make_step(dtype), make_step(dtype)
    capture(step)
    for number in range(1, 7):
        given = bad(number, 2) if number in (3, 5) else batches(number, 2)
        got, want = take(step, number, given), take(other, number, given)
        assert (got.updated, got.overflow, str(got.grad_norm)) == (want.updated, want.overflow, str(want.grad_norm))
        assert got.updated is (number not in (3, 5))
    assert_alike(step, other)


def test_the_scale_of_the_loss_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update divides by it, so it shows where there is none."""
    monkeypatch.setattr(FlatOptimizer, "_update_all", lambda *_: None)
    step, other = make_step(torch.float32), make_step(torch.float32)
    capture(step)
    for number in range(1, 6):
        assert take(step, number, batches(number, 2)) == take(other, number, batches(number, 2))
        assert_alike(step, other)
    assert step.scaler.scale == 32.0


def test_graphs_are_made_anew_for_each_shape(captures: Callable[[], int]) -> None:
    """A batch that grows, sequences that grow, and back; each shape has its own warm-up."""
    step, other = make_step(), make_step()
    capture(step)
    sizes = [(1, 3), (1, 3), (2, 3), (2, 3), (2, 3), (2, 2), (2, 2), (1, 3), (1, 3)]
    for number, (count, size) in enumerate(sizes, 1):
        given = batches(number, count, size)
        assert take(step, number, given) == take(other, number, given)
    assert_alike(step, other)
    assert captures() == 3 + 4 + 4 + 3


def test_the_number_of_middle_micro_batches_is_no_shape() -> None:
    number = torch.zeros(4)
    same = [shape_of(batches(1, count), number) for count in (3, 7)]
    assert same[0] == same[1] != shape_of(batches(1, 2), number)
    assert shape_of(batches(1, 3), torch.zeros(5)) != same[0], "the digests of samples are part of the totals"
    assert kinds(1) == [(True, True)] and kinds(3) == [(True, False), (False, False), (False, True)]


def test_eager_steps_and_evaluations_between_replays(captures: Callable[[], int]) -> None:
    step, other = make_step(), make_step()
    capture(step, is_eager=lambda number: number in (4, 5))
    for number in range(1, 9):
        assert take(step, number, batches(number, 2)) == take(other, number, batches(number, 2))
        for each in (step, other) if number == 6 else ():
            evaluate_batches(each.model, GPT.loss, batches(99, 1), "sdpa", ALONE, each.weights)
    assert_alike(step, other)
    assert captures() == 4, "the graphs are kept"


def test_a_weight_decay_that_changes_leaves_the_update_to_the_host() -> None:
    step, other = make_step(), make_step()
    capture(step)
    for number in range(1, 6):
        decay = {"weight_decay": 0.1 * max(0, number - 3)}
        assert take(step, number, batches(number, 2), **decay) == take(other, number, batches(number, 2), **decay)
    assert_alike(step, other)


def test_an_update_by_the_host(monkeypatch: pytest.MonkeyPatch, captures: Callable[[], int]) -> None:
    monkeypatch.setattr(FlatOptimizer, "updates_on_device", False)
    step, other = make_step(), make_step()
    capture(step)
    for number in range(1, 5):
        assert take(step, number, batches(number, 2)) == take(other, number, batches(number, 2))
    assert_alike(step, other)
    assert captures() == 3, "first, last, norm"


def test_a_save_may_wait_between_the_norm_and_the_update() -> None:
    step, seen = make_step(), list[Tensor]()
    capture(step)
    step.before_update = lambda: seen.append(step.optimizer.units[0].master.clone())
    for number in range(1, 4):
        before = step.optimizer.units[0].master.clone()
        take(step, number, batches(number, 2))
        assert torch.equal(seen[-1], before) and not torch.equal(step.optimizer.units[0].master, before)


# the choice


class Clock:
    """A clock in which the passes of a step take so long; a tape is told from an eager step by the number of captures."""

    def __init__(self, eager_s: float, replay_s: float) -> None:
        self.now, self._captured = 0.0, Tapes.num_captured
        self._times = eager_s, replay_s

    def perf_counter(self) -> float:
        self.now += self._times[Tapes.num_captured > self._captured] / 2
        return self.now


@pytest.mark.parametrize(("eager_s", "replay_s", "used"), [(1.0, 1.0, True), (1.0, 2.0, False)])
def test_auto_keeps_the_faster(monkeypatch: pytest.MonkeyPatch, eager_s: float, replay_s: float, used: bool) -> None:
    step, other = (make_step(dropout=0.2, kernel="sdpa") for _ in range(2))  # whose kernel draws from torch's generator
    choices: list[bool] = []
    monkeypatch.setattr(graphs, "time", Clock(eager_s, replay_s))
    told = capture(step, mode="auto", decided=choices.append)
    for number in range(1, 5):
        assert take(step, number, batches(number, 3)) == take(other, number, batches(number, 3)), "a trial leaves nothing behind"
    assert_alike(step, other)
    times = f"a step takes {500 * replay_s:.3g} ms, eagerly {500 * eager_s:.3g}"
    assert told == [
        f"captured steps: used from step 2 on (the bits of an eager step; {times})" if used
        else f"captured steps: not used, slower: {times}"
    ] and choices == [used]  # fmt: skip


def test_auto_times_updates_and_the_gathers_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timed step begins with an update that is left out and tells of each unit: a gather under the passes counts, as one before."""
    step, other = make_step(), make_step()
    events: list[str] = []
    refresh, passes, replay = step.weights.refresh, step.passes, Tape.replay
    monkeypatch.setattr(step.weights, "refresh", lambda unit: (events.append("gather"), refresh(unit)))
    monkeypatch.setattr(step, "passes", lambda *given: (events.append("passes"), passes(*given))[1])
    monkeypatch.setattr(Tape, "replay", lambda tape: (events.append("replay"), replay(tape)))
    monkeypatch.setattr(graphs, "time", Clock(2.0, 1.0))
    capture(step, mode="auto")
    for number in (1, 2):
        events.clear()
        assert take(step, number, batches(number, 1)) == take(other, number, batches(number, 1))
    eager = [*["gather"] * len(step.weights.units), "passes"] * 4
    assert events[: 1 + len(eager)] == ["passes", *eager], "once for nothing, and three times"
    assert events.count("replay") == 2 + 2 + 4 * 3 + 3, "compared; once more, four times with the update before; the step"
    assert_alike(step, other)


def test_auto_uses_no_replay_with_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of the host that has got into a graph: the mask of the batch that was captured."""
    step, other = make_step(), make_step()
    told = capture(step, mode="auto", warmup=2)
    record, wrong = graphs.CapturedStep._record_micro_batch, {"now": True}

    def sums(model: Any, batch: Batch, *rest: Any) -> list[Tensor]:
        return [term * float(wrong["now"]) for term in GPT.loss.sums(model, batch, *rest)]

    def recorded(self: Any, kind: Any) -> None:
        wrong["now"] = False
        record(self, kind)
        wrong["now"] = True

    step.loss = replace(GPT.loss, sums=sums)
    monkeypatch.setattr(graphs.CapturedStep, "_record_micro_batch", recorded)
    for number in range(1, 5):
        assert take(step, number, batches(number, 2)) == take(other, number, batches(number, 2))
    (line,) = told
    assert line.startswith("captured steps: not used, a replay has other bits than an eager step: loss or norm, the gradients of ")


def reading_host(model: Any, batch: Batch, *rest: Any) -> list[Tensor]:
    """A loss that reads a number of the device."""
    return [term * (float(batch["loss_mask"].sum()) > 0) for term in GPT.loss.sums(model, batch, *rest)]


def test_a_capture_that_fails() -> None:
    step, other = make_step(), make_step()
    told = capture(step, mode="auto")
    step.loss = replace(GPT.loss, sums=reading_host)
    for number in range(1, 5):
        assert take(step, number, batches(number, 2)) == take(other, number, batches(number, 2))
    assert_alike(step, other)
    assert told == [
        "captured steps: not used, the capture failed: RuntimeError: the host reads a number in a captured region"
    ]  # fmt: skip


def test_with_on_a_capture_that_fails_is_an_error() -> None:
    step = make_step()
    capture(step)
    step.loss = replace(GPT.loss, sums=reading_host)
    take(step, 1, batches(1, 2))
    with pytest.raises(ConfigError) as caught:
        take(step, 2, batches(2, 2))
    assert str(caught.value) == (
        "--cuda-graphs on cannot be: the capture failed: RuntimeError: the host reads a number in a captured region;"
        " use --cuda-graphs auto or off"
    )


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_keeps_the_choice(kept: bool, captures: Callable[[], int]) -> None:
    step, choices = make_step(), list[bool]()
    told = capture(step, mode="auto", kept=kept, decided=choices.append)
    for number in range(1, 4):
        take(step, number, batches(number, 1))
    assert choices == [kept] and captures() == 3 * kept, "no trial"
    assert told == ["captured steps: used from step 2 on (as before the resume)"] * kept


def test_the_choice_is_that_of_all_ranks() -> None:
    assert decide([Trial("", 2.0, 1.0), Trial("", 1.9, 1.9)]) == (
        True, "the bits of an eager step; a step takes 1.9e+03 ms, eagerly 2e+03",
    )  # fmt: skip
    assert not decide([Trial("", 2.0, 1.0), Trial("", 1.0, 2.1)])[0], "the slowest rank's times"
    assert decide([Trial("", 2.0, 1.0), Trial("a reason")]) == (False, "rank 1: a reason")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_digest_is_of_bits_and_places(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(1, 40).to(dtype)
    swapped, other, zero = x.clone(), x.clone(), torch.zeros(39, dtype=dtype)
    swapped[3], swapped[4] = x[4], x[3]
    other[38] = 39.5 if dtype != torch.bfloat16 else 39.25
    assert len({int(digest(each)) for each in (x, swapped, other, zero, -zero)}) == 5
    assert int(digest(x)) == int(digest(x.clone()))
    monkeypatch.setattr(graphs, "_CHUNK", 4)
    assert int(digest(x)) != int(digest(torch.cat([x[4:8], x[:4], x[8:]]))), "pieces that change places"


@pytest.mark.parametrize(("begun", "profiled"), [(0, [10, 11, 12, 13]), (11, [11, 12, 13, 14]), (12, [])])
def test_profiled_steps_run_eagerly(begun: int, profiled: list[int]) -> None:
    logging = LoggingConfig(profile=True, profile_step_start=10, profile_step_end=12)
    assert [step for step in range(1, 30) if is_profiled(logging, begun, step)] == profiled
    assert not is_profiled(LoggingConfig(), 0, 11)


# where a run begins


def run_with(record: dict[str, Any], *flags: str, stored: dict[str, Any] | None = None, device: str = "cuda") -> tuple[Any, list[str]]:
    """Begin a run; return its captured steps, and what it says. ``stored``: layout of the checkpoint that it resumes."""
    told: list[str] = []
    groups = SimpleNamespace(
        device=torch.device(device), world_size=1, dp_size=1, pp=SINGLE_RANK, cp=SINGLE_RANK, sp=SINGLE_RANK, tp=SINGLE_RANK
    )
    config = config_from_args([*SOUND.split(), *flags])
    context = SimpleNamespace(
        config=config, groups=groups, console=SimpleNamespace(line=told.append), task=SimpleNamespace(is_own=True)
    )  # fmt: skip
    origin = None if stored is None else Origin(Path(), {"layout": stored}, True, True, False, False)
    step = make_step()
    use_graphs(cast("Any", context), cast("Any", origin), cast("Any", SimpleNamespace(record=record)), step, 0)
    return step.graphs, told


LAYOUT = {"world_size": 1, "pp": 1, "dp": 1, "cp": 1, "sp": 1, "tp": 1, "tp_seq": False, "ep": 1}


def test_a_run_begins_with_what_its_flags_say() -> None:
    assert run_with({}, "--cuda-graphs", "off") == (None, []) == run_with({}, device="cpu"), "nobody expects a graph on a CPU"
    record: dict[str, Any] = {}
    captured, told = run_with(record)
    assert captured is not None and told == [] and record == {}, "nothing is decided yet"
    assert run_with(record, "--cuda-graphs", "on")[1] == [] and record == {"cuda_graphs": True}
    captured, told = run_with({}, "--offload-optimizer", "--check-collectives")
    assert captured is None and [line.split(" (")[0] for line in told] == [
        "captured steps: not used, --offload-optimizer copies to memory of the host, which is handed out anew in every step",
        "captured steps: not used, --check-collectives compares ranks on the host before each collective",
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_a_resume_finds_the_choice_in_a_checkpoint_of_its_layout(kept: bool) -> None:
    record: dict[str, Any] = {}
    run_with(record, stored={**LAYOUT, "cuda_graphs": kept, "attention": "sdpa"})
    assert record == {"cuda_graphs": kept}
    for other in ({**LAYOUT, "dp": 2, "cuda_graphs": kept}, LAYOUT, {**LAYOUT, "cuda_graphs": "yes"}):
        record.clear()
        run_with(record, stored=other)
        assert record == {}, "another layout, or a checkpoint without a choice"


def test_on_is_refused_before_anything_is_started() -> None:
    config = config_from_args([*SOUND.split(), "--cuda-graphs", "on"])
    with pytest.raises(ConfigError) as caught:
        require_captured(config, is_own=False)
    assert "torch sees no GPU" in str(caught.value) and "a model from elsewhere" in str(caught.value)
    config.kernels.cuda_graphs = "auto"
    require_captured(config, is_own=False)
