"""Checkpoints between ranks: any layout reads what any other wrote, and all ranks agree on what went wrong."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.ranks import run_ranks
from support.waiting import PATIENCE_S
from torch import Tensor

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece, Rect
from megatron_sp.comm.object_collectives import broadcast_json, gather_json
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.faults import FaultPlan

SHAPES = {"a.weight": (9, 8), "b.weight": (4, 6, 5), "b.bias": (13,), "scalar": (), "one": (1,), "empty": (0, 3)}
BF16 = ("a.weight", "scalar")


def full_tensors() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn(shape).to(torch.bfloat16 if name in BF16 else torch.float32) for name, shape in SHAPES.items()}


def cut(shape: tuple[int, ...], times: int, rng: random.Random) -> list[Rect]:
    rects = [Rect((0,) * len(shape), shape)]
    for _ in range(times):
        rect = rects.pop(rng.randrange(len(rects)))
        dims = [dim for dim, size in enumerate(rect.sizes) if size > 1]
        if not dims:
            rects.append(rect)
            continue
        dim = rng.choice(dims)
        at = rng.randrange(1, rect.sizes[dim])
        for start, size in ((0, at), (at, rect.sizes[dim] - at)):
            offsets, sizes = list(rect.offsets), list(rect.sizes)
            offsets[dim] += start
            sizes[dim] = size
            rects.append(Rect(tuple(offsets), tuple(sizes)))
    return rects


def layout(rank: int, world_size: int, seed: str, fill: dict[str, Tensor] | None) -> dict[str, GlobalTensor]:
    """This rank's share in a random layout (the same draw on every rank); contents of ``fill``, or ones to be overwritten.

    Some tensors are replicated, the others are cut into several random rectangles for each rank; some are not
    contiguous.
    """
    rng = random.Random(seed)
    result = {}
    for name, full in full_tensors().items():
        replicated = rng.random() < 0.3
        pieces = []
        for rect in cut(SHAPES[name], 0 if replicated else rng.randrange(3 * world_size + 2), rng):
            owner = rng.randrange(world_size)
            turned = rng.random() < 0.3
            if replicated or owner == rank:
                tensor = torch.ones(rect.sizes, dtype=full.dtype)
                if turned and tensor.dim() == 2:
                    tensor = torch.ones(rect.sizes[::-1], dtype=full.dtype).t()
                if fill is not None:
                    tensor.copy_(fill[name][slices(rect)])
                pieces.append(Piece(rect.offsets, tensor))
        result[name] = GlobalTensor(SHAPES[name], full.dtype, pieces)
    return result


def slices(rect: Rect) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(rect.offsets, rect.sizes, strict=True))


def here(run: Path | None, **options: Any) -> Checkpointer:
    return Checkpointer(run, rank=dist.get_rank(), world_size=dist.get_world_size(), group=dist.group.WORLD, **options)


def write_layouts(run: Path, seeds: list[str]) -> None:
    for step, seed in enumerate(seeds):
        tensors = layout(dist.get_rank(), dist.get_world_size(), seed, full_tensors())
        report = here(run, keep_last=100, max_file_bytes=300).save(step, tensors, {"seed": seed})
        assert report.saved, report.reason


def read_layouts(run: Path, count: int, seed: str) -> None:
    checkpointer = here(None)
    for step in range(count):
        step_dir = checkpointer.find(run, ckpt_step=step)
        tensors = layout(dist.get_rank(), dist.get_world_size(), f"{seed} {step}", None)
        checkpointer.load(step_dir, tensors)
        for name, full in full_tensors().items():
            for piece in tensors[name].pieces:
                assert torch.equal(piece.tensor, full[slices(piece.rect)]), (name, piece.rect)


@pytest.mark.often("2")
@pytest.mark.parametrize("writers", [3, 2, 1])
def test_any_layout_reads_any_other(writers: int, tmp_path: Path) -> None:
    seeds = [f"written by {writers}, {i}" for i in range(6)]
    run_ranks(write_layouts, writers, tmp_path, tmp_path / "run", seeds)
    for readers in (3, 2, 1):
        run_ranks(read_layouts, readers, tmp_path, tmp_path / "run", len(seeds), f"read by {readers}")


def save_rows_with_replica(run: Path) -> None:
    rank = dist.get_rank()
    full = full_tensors()
    tensors = {
        "rows": GlobalTensor((4, 8), torch.float32, [Piece((2 * rank, 0), torch.full((2, 8), float(rank)))]),
        **{f"copy{i}": GlobalTensor.whole(full["b.weight"]) for i in range(6)},
    }
    report = here(run).save(1, tensors, {"rank": rank})
    assert report.path is not None
    assert gather_json(report.num_bytes, dist.group.WORLD) == [report.num_bytes] * 2
    sizes = [sum(f.stat().st_size for f in report.path.glob(f"rank{r:05d}-*")) for r in range(2)]
    assert abs(sizes[0] - sizes[1]) < 500
    assert sum(sizes) < 6 * 480 + 4 * 32 + 2 * 2500  # each replica once
    assert here(None).read_state(report.path)["rank"] == 0


def test_replicas_are_written_once_between_the_ranks(tmp_path: Path) -> None:
    run_ranks(save_rows_with_replica, 2, tmp_path, tmp_path / "run")


def save_twice_then_another_layout(run: Path) -> None:
    """The plan is kept while nothing changes, and made anew when one rank alone changes."""
    rank = dist.get_rank()
    checkpointer = here(run)
    for step, cuts in enumerate(([0, 2, 4], [0, 2, 4], [0, 1, 4])):
        rows = slice(cuts[rank], cuts[rank + 1])
        full = torch.arange(12.0).reshape(4, 3) + step
        checkpointer.save(step, {"w": GlobalTensor((4, 3), torch.float32, [Piece((cuts[rank], 0), full[rows])])}, {})
        found = torch.zeros(4, 3)
        checkpointer.load(run / "checkpoints" / f"step-{step:06d}", {"w": GlobalTensor.whole(found)})
        assert torch.equal(found, full)


def test_the_plan_follows_the_layout(tmp_path: Path) -> None:
    run_ranks(save_twice_then_another_layout, 2, tmp_path, tmp_path / "run")


def everyone_sees(text: str, call: Callable[[], Any], kind: type[Exception] = CheckpointError, same: bool = True) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), str(error)
        seen = gather_json(str(error), dist.group.WORLD)
        assert not same or len(set(seen)) == 1, seen
    else:
        raise AssertionError("nothing was raised")


def agree_on_errors(run: Path) -> None:
    rank = dist.get_rank()
    tensors = layout(rank, 2, "agree", full_tensors())
    checkpointer = here(run)
    checkpointer.save(1, tensors, {})
    checkpointer.save(2, tensors, {})
    everyone_sees("there is no", lambda: checkpointer.find(run / "absent"))
    step_dir = run / "checkpoints" / "step-000002"
    wanted = layout(rank, 2, "agree", None)
    if rank == 1:  # only one rank's model differs
        wanted["b.bias"] = GlobalTensor.whole(torch.zeros(14))
    everyone_sees("rank 1: ", lambda: checkpointer.load(step_dir, wanted))
    if rank == 1:
        wanted["b.bias"].pieces = [Piece((3,), torch.zeros(14))]
    everyone_sees("reaches outside", lambda: checkpointer.load(step_dir, wanted), (CheckpointError, ValueError)[rank], same=False)
    if rank == 0:
        name = max(path.name for path in step_dir.glob("*.safetensors"))
        data = bytearray((step_dir / name).read_bytes())
        data[-1] ^= 1
        (step_dir / name).write_bytes(data)
    dist.barrier()
    everyone_sees("its contents have changed", lambda: here(None).find(run))
    assert here(None).find(run, fallback=True).name == "step-000001"
    wrong = layout(rank, 2, "agree", full_tensors())
    if rank == 0:
        wrong["a.weight"].pieces = []
    everyone_sees("cannot be saved", lambda: checkpointer.save(3, wrong, {}), ValueError)
    assert not (run / "checkpoints" / "step-000003").exists()


def test_all_ranks_agree_on_errors(tmp_path: Path) -> None:
    run_ranks(agree_on_errors, 2, tmp_path, tmp_path / "run")


def wanting_different_tensors(run: Path) -> None:
    """A pipeline: each rank asks for its own tensors; together they want all."""
    names = ["a.weight", "b.weight"] if dist.get_rank() == 0 else ["b.bias", "scalar", "one", "empty"]
    found = {name: torch.ones_like(full_tensors()[name]) for name in names}
    checkpointer = here(None)
    checkpointer.load(checkpointer.find(run, ckpt_step=0), {name: GlobalTensor.whole(t) for name, t in found.items()})
    assert all(torch.equal(found[name], full_tensors()[name]) for name in names)


def test_ranks_may_want_different_tensors(tmp_path: Path) -> None:
    run_ranks(write_layouts, 1, tmp_path, tmp_path / "run", ["x"])
    run_ranks(wanting_different_tensors, 2, tmp_path, tmp_path / "run")


def one_rank_runs_out_of_space(run: Path) -> None:
    import resource

    rank = dist.get_rank()
    checkpointer = here(run)
    tensors = {"w": GlobalTensor((2, 50_000), torch.float32, [Piece((rank, 0), torch.zeros(1, 50_000))])}
    assert checkpointer.save(1, tensors, {}).saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    report = checkpointer.save(2, tensors, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not report.saved and report.reason.startswith("rank 1: File too large"), report.reason
    dist.barrier()
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-000001"]
    dist.barrier()
    assert checkpointer.save(2, tensors, {}).saved
    assert checkpointer.find(run).name == "step-000002"


def test_a_full_disk_on_one_rank_is_one_answer_for_all(tmp_path: Path) -> None:
    run_ranks(one_rank_runs_out_of_space, 2, tmp_path, tmp_path / "run")


# A rank killed while saving


def save_until_killed(rank: int, store: Path, run: Path, plan_text: str) -> None:
    torch.set_num_threads(1)
    os.environ["MEGATRON_SP_FAULT"] = plan_text
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S))
    checkpointer = here(run, faults=FaultPlan.from_env(True, rank))
    for step in range(1, 5):
        checkpointer.save(step, layout(rank, 2, "killed", full_tensors()), {})


@pytest.mark.often("save.begin-1", "save.shard-0", "save.manifest-0", "save.rename-0", "save.prune-1")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", ["save.begin", "save.shard", "save.manifest", "save.rename", "save.prune"])
def test_a_rank_killed_at_any_point_of_a_save(point: str, victim: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    context = mp.get_context("fork")
    plan = f"kill:rank={victim}:at={point}:step=4"
    children = [context.Process(target=save_until_killed, args=(rank, tmp_path / "store", run, plan)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE_S)
    assert children[victim].exitcode == -signal.SIGKILL
    assert children[1 - victim].exitcode not in (None, 0)  # it ended too, with an error, and soon
    run_ranks(go_on_after_a_kill, 2, tmp_path, run, point, victim)


def go_on_after_a_kill(run: Path, point: str, victim: int) -> None:
    checkpointer = here(run)
    before = checkpointer.find(run)
    left = list((run / "checkpoints").glob("*.part-*"))
    dist.barrier()
    notes = checkpointer.prepare()
    assert len(notes) == len(left) and not list((run / "checkpoints").glob("*.part-*"))
    committed = point == "save.prune" and victim == 0
    allowed = {"step-000004"} if committed else {"step-000003"}
    if victim == 1 and point in ("save.manifest", "save.rename", "save.prune"):
        allowed = {"step-000003", "step-000004"}  # rank 0 was committing meanwhile
    assert before.name in allowed and checkpointer.find(run) == before
    tensors = layout(dist.get_rank(), 2, "after", None)
    checkpointer.load(before, tensors)
    full = full_tensors()
    assert all(torch.equal(p.tensor, full[name][slices(p.rect)]) for name, t in tensors.items() for p in t.pieces)
    assert checkpointer.save(5, layout(dist.get_rank(), 2, "after", full), {}).saved


# JSON between ranks


def exchange(long: int) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    value = {"rank": rank, "text": "é" * (rank * long), "none": None, "pair": (1, 2.5)}
    expected = [{"rank": r, "text": "é" * (r * long), "none": None, "pair": [1, 2.5]} for r in range(3)]
    assert gather_json(value, group) == expected
    assert broadcast_json(value, group) == expected[0]
    assert broadcast_json(value if rank == 2 else object(), group, src=2) == expected[2]
    pair = dist.new_group([1, 2])
    if rank:
        assert gather_json(rank, pair) == [1, 2]
        assert broadcast_json(rank, pair, src=1) == 2


def test_json_between_ranks(tmp_path: Path) -> None:
    run_ranks(exchange, 3, tmp_path, 1000)
    assert gather_json((1, "x"), None) == [[1, "x"]]
    assert broadcast_json({"a": (1,)}, None) == {"a": [1]}
