"""What Slapo's schedules let through, or broke on (its issues and pull requests up to its last commit): none of it happens here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.schedule_toys import H, Toy, V, batch, toy, write
from torch import nn

import megatron_sp.schedule
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.parallel import mappings
from megatron_sp.schedule import Mesh, schedule
from megatron_sp.schedule.core.kinds import find_kind
from megatron_sp.schedule.verify.verify import verify
from megatron_sp.utils.errors import ConfigError, NumericsError


def on_two_ranks() -> None:
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size())
    mesh = Mesh.of(groups)
    every_word_of_a_split_table(mesh)
    gradients_are_compared(mesh)
    nothing_is_changed_in_place(mesh)


def every_word_of_a_split_table(mesh: Mesh) -> None:
    """P1: the first word of each rank's share, and all words of the second rank, are looked up like the others."""
    table = nn.Embedding(V, H, padding_idx=5)
    whole = table(torch.arange(V))
    s = schedule(nn.Sequential(table), mesh)
    s["0"].vocab_parallel()
    s.verify({"input": torch.arange(V)[None]})
    assert torch.equal(s.apply()(torch.arange(V)), whole)


def gradients_are_compared(mesh: Mesh) -> None:
    """P2: without the sum of the input's gradient the forward pass is right, and nothing else."""
    s = write(schedule(Toy(), mesh), seq=False)
    s.directives = [d for d in s.directives if d.do != "sync"]
    verdict = verify(s.model, s.directives, mesh, 1, batch())
    errors = {kind: max(row.error for row in verdict.rows if row.kind == kind) for kind in ("output", "loss", "gradient")}
    assert errors["output"] < 1e-12 and errors["loss"] < 1e-12 and errors["gradient"] > 1e-3
    with pytest.raises(NumericsError, match=r"sum to the reference.*E6"):
        s.verify(batch())


def nothing_is_changed_in_place(mesh: Mesh) -> None:
    """P6: neither what goes into an exchange nor the gradient that comes back; and each has a gradient."""
    exchanges = {
        "copy_to": (), "reduce_from": (), "gather_from": (0, "reduce_scatter"), "scatter_to": (0,), "reduce_scatter_to": (0,),
        "all_to_all": (0, 1),
    }  # fmt: skip
    for name, more in exchanges.items():
        x = torch.arange(16.0).reshape(4, 4).requires_grad_()
        kept = x.detach().clone()
        y = getattr(mappings, name)(x, mesh.tp, *more)
        gradient = torch.ones_like(y)
        (back,) = torch.autograd.grad(y, x, gradient)
        assert back.shape == x.shape
        assert torch.equal(x.detach(), kept) and torch.equal(gradient, torch.ones_like(y)), name


def test_p1_p2_p6(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)


def test_p3_splitting_twice_is_refused_in_any_spelling() -> None:
    for tensor, axis in (("weight", 0), ("weight", -2), ("bias", 0), ("bias", -1)):
        s = toy(seq=False)
        s["blocks.0.mlp.up"].shard(tensor, axis)
        with pytest.raises(ConfigError, match=rf"blocks\.0\.mlp\.up\.{tensor} is split twice.*E10"):
            s.check()


def test_p4_conv1d_is_known_without_asking_transformers() -> None:
    """By its name, so no import can quietly fail; and its bias is added once."""
    conv = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})
    kind = find_kind(conv())
    assert kind is not None and kind.out_dims["weight"] == 1 and kind.in_dims["weight"] == 0 and kind.product is not None


def sources() -> dict[Path, ast.Module]:
    folder = Path(megatron_sp.schedule.__file__).parent
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_p5_no_tracer() -> None:
    names = {name for tree in sources().values() for name in imported(tree)}
    assert not [name for name in names if "fx" in name.split(".") or "_dynamo" in name]


def test_p7_names_stay() -> None:
    s = toy(seq=True, tied=True)
    s["embed"].vocab_parallel()
    s["head"].vocab_parallel()
    names = list(s.model.state_dict())
    assert list(s.apply().state_dict()) == names
    assert s.model.head.weight is s.model.embed.weight


def test_p10_torch_and_what_every_installation_has_are_enough() -> None:
    """Other packages are asked for inside of functions, where somebody uses them."""
    for path, tree in sources().items():
        top = {name.partition(".")[0] for node in tree.body for name in imported(node)}
        assert top <= {"__future__", "megatron_sp", "torch", "yaml", "einops"} | set(sys.stdlib_module_names), (path, top)
