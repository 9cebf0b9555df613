"""verify() on wrong schedules, one for each kind of mistake: the message names the module, what is wrong there, and the line to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.schedule_mutants import mutants
from support.schedule_toys import B, D, H, S, Toy, batch, write
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.verify.verify import verify
from megatron_sp.utils.errors import ConfigError

HERE = "test_schedule_diagnosis.py:"
Case = tuple[Callable[[Mesh], tuple[Schedule, dict[str, Any]]], tuple[str, ...]]


def toy(seq: bool = False, **options: Any) -> Callable[[Mesh], tuple[Schedule, dict[str, Any]]]:
    return lambda mesh: (write(schedule(Toy(layers=2, **options), mesh), seq), batch())


def changed(change: Callable[[Schedule], Any], seq: bool = False, **options: Any) -> Callable[[Mesh], tuple[Schedule, dict[str, Any]]]:
    def make(mesh: Mesh) -> tuple[Schedule, dict[str, Any]]:
        s, data = toy(seq, **options)(mesh)
        change(s)
        return s, data

    return make


def without(s: Schedule, on: str, do: str) -> Schedule:
    kept = [d for d in s.directives if (d.on, d.do) != (on, do)]
    assert len(kept) == len(s.directives) - 1
    s.directives = kept
    return s


class Late(nn.Module):
    """An activation between a layer and the end of the module, where a sum comes too late."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act, self.out = nn.Linear(H, 8, bias=False), nn.Linear(8, H, bias=False), nn.GELU(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.down(self.up(x))))  # type: ignore[no-any-return]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.width = nn.Linear(H, 3 * H), nn.Linear(H, H), H

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(self.width, -1)
        return self.o(q * k * v)  # type: ignore[no-any-return]


class OneKey(nn.Module):
    """One key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(H, H), nn.Linear(H, D), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, D)).transpose(1, 2)
        return self.o((q * self.k(x)[:, None]).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Inside(nn.Module):
    """A norm of each head, which every rank has whole and uses on its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.norm, self.o = nn.Linear(H, H), nn.Linear(H, H), nn.LayerNorm(D), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.q(self.first(x)).unflatten(-1, (-1, D))).flatten(2))  # type: ignore[no-any-return]


class Positions(nn.Module):
    """Positions that are counted on a share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rope, self.last = nn.Linear(H, H), nn.Module(), nn.Identity()
        self.rope.forward = lambda x: x * torch.arange(1, x.shape[1] + 1)[:, None]  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rope(self.first(x)))  # type: ignore[no-any-return]


def own(
    model: Callable[[], nn.Module], lines: Callable[[Schedule], Any], name: str = "x"
) -> Callable[[Mesh], tuple[Schedule, dict[str, Any]]]:
    def make(mesh: Mesh) -> tuple[Schedule, dict[str, Any]]:
        torch.manual_seed(0)
        s = schedule(model(), mesh)
        lines(s)
        return s, {name: torch.randn(B, S, H, generator=torch.Generator().manual_seed(1))}

    return make


def attention_and(s: Schedule, *more: tuple[str, dict[str, Any]]) -> None:
    s["q"].column()
    for path, args in more:
        s[path].sync(**args)
    s["o"].row()


def late(s: Schedule) -> None:
    s["up"].column()
    s["down"].shard("weight", 1)
    s[""].sync("fwd_post", "all_reduce")


def packed(s: Schedule) -> None:
    s[""].set("width", divide="tp")
    s["qkv"].column(blocks=1)
    s["o"].row()


def positions(s: Schedule) -> None:
    s.sequence("rope", "last", inside="rope")


SUM = "sum to the reference"
CASES: dict[str, Case] = {
    "no sum of an input's gradient": (
        changed(lambda s: without(s, "blocks.*.mlp", "sync")),
        ("blocks.1.mlp: the gradients of its input x on the ranks of tp " + SUM, "s['blocks.1.mlp'].sync('fwd_pre', 'copy')", "E6"),
    ),
    "of q, k and v": (
        changed(lambda s: without(s, "blocks.*.attention", "sync")),
        ("blocks.1.attention: the gradients of its input x", "s['blocks.1.attention'].sync('fwd_pre', 'copy')", "E6"),
    ),
    "summed twice, by a layer": (
        changed(lambda s: without(s, "blocks.*.mlp.up", "column")["blocks.*.mlp.up"].column()),
        ("blocks.1.mlp: the gradient of the input x is 2 times the reference", "sync copy at schedule_toys.py:", f"column at {HERE}", "E5"),
    ),
    "summed twice, by a sync": (
        changed(lambda s: s["blocks.0.mlp.up"].sync("fwd_pre", "copy")),
        ("blocks.0.mlp: the gradient of the input x is 2 times the reference", f"sync copy at {HERE}", "E5"),
    ),
    "summed around": (
        changed(lambda s: s["blocks.0.mlp"].sync("fwd_post", "all_reduce")),
        ("blocks.0.mlp: the output is 2 times the reference", f"sync all_reduce at {HERE}", "E5"),
    ),
    "a partial sum is used": (
        own(Late, late), ("down: the outputs of the ranks of tp " + SUM, ".sync('fwd_post', 'all_reduce')", ".row()", "E3"),
    ),
    "a partial sum leaves the model": (
        own(lambda: nn.Linear(H, 4, bias=False), lambda s: s[""].sync("fwd_pre", "scatter", axis=-1).shard("weight", 1), "input"),
        ("the model: the outputs of the ranks of tp " + SUM, "all_reduce", "E3"),
    ),
    "a parameter on shares of heads": (
        own(Inside, attention_and),
        ("norm.", "the ranks of tp use it on shares, and their gradients sum to the reference", "s['norm'].sum_gradients('", "E7"),
    ),
    "a parameter on shares of positions": (
        changed(lambda s: without(s, "blocks.0", "sequence").sequence("blocks.0", "norm", inside="blocks.*.mlp"), seq=True),
        ("blocks.", "their gradients sum to the reference", ".sum_gradients('", "E7"),
    ),
    "a parameter summed where it is complete": (
        changed(lambda s: s["norm"].sum_gradients()),
        ("norm.", "its gradient is 2 times the reference", f"lines at {HERE}", "leave that out", "E5"),
    ),
    "one key for all heads": (own(OneKey, attention_and), ("k: the gradients of its output", "s['k'].sync('fwd_post', 'copy')", "E6")),
    "a fused layer in one piece": (
        own(Packed, packed), ("o: its input is [3, 8, 8] of [3, 8, 16] on each rank", "a fused layer, qkv, with blocks=", "E8"),
    ),
    "cut in two ways": (
        changed(lambda s: without(s, "blocks.*.mlp.down", "row")["blocks.*.mlp.down"].row("reduce_scatter", axis=2), seq=True),
        ("blocks.0 (Block) fails in the split model", "blocks.0.mlp is [3, 8, 8] of [3, 8, 16]: cut both alike", "E10"),
    ),
    "outputs joined along another axis": (
        own(lambda: nn.Sequential(nn.Linear(H, H)), lambda s: s["0"].column().sync("fwd_post", "all_gather", axis=1), "input"),
        ("the first module that differs is 0", "output result: [3, 16, 8] on this rank, [3, 8, 16] in the whole model"),
    ),
    "cut twice": (
        changed(lambda s: without(s, "blocks.*.mlp", "sync")["blocks.*.mlp"].sync("fwd_pre", "scatter"), seq=True),
        ("blocks.0.mlp.up: its input is [3, 2, 16] of [3, 8, 16] on each rank", "cut twice", "E10"),
    ),
    "a share meets a whole layer": (
        changed(lambda s: without(s, "blocks.*.mlp.down", "row")),
        ("blocks.0.mlp.down (Linear) fails", "its input input is [3, 8, 10] of [3, 8, 20]", ".row()", "'all_gather', axis=-1", "E10"),
    ),
    "a whole tensor meets a row layer": (
        changed(lambda s: without(s, "blocks.*.mlp.up", "column")),
        ("blocks.0.mlp.down (Linear) fails", "its input input is whole, [3, 8, 20]", "row at schedule_toys.py:", ".column()", "E10"),
    ),
    "the other adjoint": (
        changed(lambda s: without(s, "blocks.*.mlp", "sync")["blocks.*.mlp"].sync("fwd_pre", "all_gather", grad="slice"), seq=True),
        ("blocks.1.mlp", "all_gather on blocks.*.mlp", HERE, "give it grad='reduce_scatter'", "E6"),
    ),
    "a hard-coded number of heads": (
        toy(written_down=True), ("blocks.0.attention.o: its input", "num_heads = 4", ".set('<attribute>', divide='tp')", "E11"),
    ),
    "positions counted on a share": (
        own(Positions, positions), ("rope: its output is [3, 4, 16] of [3, 8, 16]", "the places, of a share", "E11"),
    ),
}  # fmt: skip


def diagnose() -> None:
    mesh = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=2))
    wrong = []
    for name, (make, words) in CASES.items():
        s, data = make(mesh)
        try:
            verdict = verify(s.model, s.directives, mesh, s.seq_dim, data)
            said = f"{'EQUAL ' if verdict.ok else ''}{verdict.first} {verdict}"
        except ConfigError as error:
            said = str(error)
        if missing := [word for word in words if word not in said]:
            wrong.append(f"{name}: {missing} not in:\n{said}")
    assert not wrong, "\n\n".join(wrong)


def test_each_kind_of_mistake_is_named_with_its_remedy(tmp_path: Path) -> None:
    run_ranks(diagnose, 2, tmp_path)


RIGHT = {  # a gather before a norm whose gradients the region sums, a region that ends with the last block, a layer that sums itself
    # what the gather then cuts
    "moved: blocks.*.attention: sync(mode='fwd_pre', op='all_gather')",
    "leaves early: blocks.0: sequence(leave='norm')",
    "summed again: blocks.*.attention.{q,k,v}: column(input='prepared')",
    "summed again: blocks.*.mlp.up: column(input='prepared')",
}


def every_mutant(seq: bool, start: int, step: int) -> None:
    mesh = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=2))
    s = write(schedule(Toy(), mesh), seq)
    wrong = []
    for what, lines in list(mutants(s.directives, "blocks.*.norm1"))[start::step]:
        try:
            verdict = verify(s.model, lines, mesh, 1, batch())
            said = "" if verdict.ok else verdict.why or "?"
        except ConfigError as error:
            said = str(error)
        if bool(said) == (seq and what in RIGHT) or (said and "blocks.0" not in said):
            wrong.append(f"{what}: {said or 'equal'}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("seq", "start", "step"), [(False, 0, 3), (True, 1, 3), *(pytest.param(seq, 0, 1, marks=pytest.mark.long) for seq in (False, True))]
)
def test_each_line_that_is_left_out_doubled_moved_or_changed_is_named(tmp_path: Path, seq: bool, start: int, step: int) -> None:
    run_ranks(every_mutant, 2, tmp_path, seq, start, step)
