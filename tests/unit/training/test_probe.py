"""How ranks are shared between sp and cp: what is tried, that the fastest is taken, alike on all ranks, and what a checkpoint may say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.training import probe
from megatron_sp.training.probe import choose_split, modes_to_try, split_from, splits

SHAPE = "--num-layers 1 --hidden-size 32 --seq-length 24 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 50"


def parse(flags: str, world_size: int = 4) -> Config:
    return config_from_args([*SHAPE.split(), *flags.split()], world_size=world_size)


@pytest.mark.parametrize("flags, world_size, wanted", [
    ("--num-attention-heads 4 --cp-size 4", 4, [(1, 4), (2, 2), (4, 1)]),
    ("--num-attention-heads 2 --cp-size 4", 4, [(1, 4), (2, 2)]),
    ("--num-attention-heads 4 --cp-size 4 --tp-size 2", 8, [(1, 4), (2, 2)]),
    ("--num-attention-heads 8 --cp-size 6", 6, [(1, 6), (2, 3), (3, 2), (6, 1)]),
    ("--num-attention-heads 4 --cp-size 4 --cp-keep-kv --cp-chunks 1", 4, [(1, 4), (2, 2), (4, 1)]),
    ("--num-attention-heads 4 --cp-size 4 --sp-head-chunks 2", 4, [(1, 4), (2, 2)]),
])  # fmt: skip
def test_all_sizes_that_break_no_rule_are_tried(flags: str, world_size: int, wanted: list[tuple[int, int]]) -> None:
    assert splits(parse(f"{flags} --cp-comm-type auto", world_size), world_size) == wanted


def test_modes_of_a_split() -> None:
    heads = "--num-attention-heads 8 --sp-size 2"
    assert modes_to_try(parse("--num-attention-heads 8")) == [("none", 1)]
    assert modes_to_try(parse(heads)) == [("none", 1)]
    assert modes_to_try(parse(f"{heads} --sp-head-chunks 4")) == [("chunked", 4)]
    assert modes_to_try(parse(f"{heads} --split-qkv-linear --sp-overlap-comm")) == [("split-qkv", 1)]
    assert modes_to_try(parse(f"{heads} --sp-overlap-comm")) == [("none", 1), ("split-qkv", 1), ("chunked", 2), ("chunked", 4)]
    one = "--num-attention-heads 2 --sp-size 2 --sp-overlap-mode chunked --sp-head-chunks 1"
    assert modes_to_try(parse(one)) == [("chunked", 1)], "what was asked for, with a single head, too"


def _chooses(fastest: tuple[int, int], tp: int) -> None:
    config = parse(f"--num-attention-heads 4 --cp-size 4 --cp-comm-type auto --sp-overlap-comm --tp-size {tp}", 4 * tp)
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=tp, cp_size=4)
    timed: list[tuple[int, int, str]] = []

    def run(timer: probe._Timer) -> float:
        real(timer)  # it must be able to run
        sizes = timer.groups.sp.size(), timer.groups.cp.size()
        timed.append((*sizes, timer.mode))
        return 1.0 if sizes == fastest and timer.mode == ("none" if fastest[0] == 1 else "split-qkv") else 2.0

    with pytest.MonkeyPatch.context() as patch:
        real = probe._Timer.run
        patch.setattr(probe._Timer, "run", run)
        sp, cp, line = choose_split(config, groups, torch.float32)
    assert (sp, cp) == fastest
    assert line.startswith(f"--cp-comm-type auto: sp {sp} x cp {cp} (attention of one block: sp 1 x cp 4 ")
    assert f"sp {sp} x cp {cp} 1000.0 ms" in line and line.count("2000.0 ms") == len({t[:2] for t in timed}) - 1
    assert {t[2] for t in timed if t[0] == 1} == {"none"} and {t[2] for t in timed if t[0] == 2} >= {"none", "split-qkv"}
    assert config.parallel.measures_split, "nothing is settled yet"
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=groups.cp)  # the groups of the run are as they were
    assert float(total) == 4


@pytest.mark.often("fastest1-1")
@pytest.mark.parametrize("fastest, tp", [((1, 4), 1), ((2, 2), 1), ((4, 1), 1), ((2, 2), 2)])
def test_the_fastest_is_taken_on_all_ranks(tmp_path: Path, fastest: tuple[int, int], tp: int) -> None:
    run_ranks(_chooses, 4 * tp, tmp_path, fastest, tp)


@pytest.mark.parametrize("stored, wanted", [
    ({"sp": 2, "cp": 2}, (2, 2)), ({"sp": 4}, (4, 1)), ({"sp": 4, "cp": 1, "more": 0}, (4, 1)), ({"sp": 2, "cp": 1}, None), ({}, None),
    ({"sp": -2, "cp": -2}, None), ({"sp": "4", "cp": 1}, None), ({"sp": True, "cp": 4}, None), ({"sp": 4.0, "cp": 1}, None), (None, None),
    ([2, 2], None), ({"sp": [4], "cp": 1}, None),
])  # fmt: skip
def test_what_a_checkpoint_says(stored: object, wanted: tuple[int, int] | None) -> None:
    assert split_from(stored, 4) == wanted
