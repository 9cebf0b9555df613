"""Schedules of models that nobody has heard of: torch's encoder, and one with lists in lists, convolutions, and layers fused by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from support.schedule_masks import recorded
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.utils.errors import ConfigError


def mesh() -> Mesh:
    return Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=dist.get_world_size()))


class Tagger(nn.Module):
    """torch's encoder layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(24, 4, 20, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(21, 24)
        self.places = nn.Parameter(torch.randn(8, 24))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tags = nn.Linear(24, 6)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.tags(self.encoder(self.words(ids) + self.places, src_key_padding_mask=~mask))  # type: ignore[no-any-return]


def write_tagger(s: Schedule) -> None:
    s["words"].column(gather=True)  # by features, for once
    s["encoder.layers.*.linear1"].column()
    s["encoder.layers.*.linear2"].row()
    s["tags"].column(gather=True)


class Attention(nn.Module):
    """Four query heads and two of keys and values in one projection, [s, b, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.sizes = nn.Linear(24, 48), nn.Linear(24, 24, bias=False), [24, 12, 12]

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        q, k, v = (t.unflatten(-1, (-1, 6)).permute(1, 2, 0, 3) for t in self.qkv(x).split(self.sizes, -1))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)
        return self.out(y), {"length": x.shape[0]}


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"first": nn.RMSNorm(24), "second": nn.LayerNorm(24)})
        self.attention, self.gate_up, self.down = Attention(), nn.Linear(24, 32), nn.Linear(16, 24)

    def forward(self, *, state: Tensor) -> Tensor:
        state = state + self.attention(self.norms["first"](state))[0]
        gate, up = self.gate_up(self.norms["second"](state)).chunk(2, -1)
        return state + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 24, 2, stride=2))
        self.stages = nn.ModuleList([nn.ModuleList([Stage() for _ in range(n)]) for n in (2, 1)])
        self.norm = nn.RMSNorm(24)
        self.head = nn.ParameterDict({"weight": torch.randn(24, 5)})

    def forward(self, images: Tensor) -> dict[str, Any]:
        x = self.stem(images).flatten(2).permute(2, 0, 1)  # [s, b, h]
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(state=x)
        x = self.norm(x)
        return {"logits": (x.mean(0) @ self.head["weight"], x[0])}


def write_pictures(s: Schedule, seq: bool, recompute: bool) -> None:
    enter, leave = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    s["stem.1"].column()
    s["stem.3"].row("all_reduce")
    grad = "reduce_scatter" if seq else None  # said: what a convolution does to shares is not known to a dry run
    blocks = s["stages.*.*"]
    attention = blocks["attention"].sync("fwd_pre", enter, grad=grad).set("sizes", lambda sizes: [n // s.mesh.tp.size() for n in sizes])
    attention["qkv"].column(input="prepared", blocks=[24, 12, 12], heads=2)
    attention["out"].row(leave)
    blocks["gate_up"].sync("fwd_pre", enter, grad=grad).column(input="prepared", blocks=2)
    blocks["down"].row(leave)
    if seq:
        s.sequence("stages.0.0", "norm", arg="state", inside="stages.*.*")
    if recompute:
        blocks.checkpoint("keep_gathered")


def images() -> dict[str, Tensor]:
    return {"images": torch.randn(3, 3, 8, 6, generator=torch.Generator().manual_seed(2))}


def others() -> None:
    m = mesh()
    s = schedule(Tagger(), m)
    write_tagger(s)
    ids = torch.randint(21, (3, 8), generator=torch.Generator().manual_seed(1))
    s.verify({"ids": ids, "mask": torch.arange(8) < torch.tensor([[8], [5], [3]])})
    for seq in (False, True):
        for recompute in (False, True):
            s = schedule(Pictures(), m, seq_dim=0)
            write_pictures(s, seq, recompute)
            s.verify(images())
            s.apply()
            assert s.applied is not None
            whole = s.applied.full_state_dict()
            assert all(torch.equal(whole[name], t) for name, t in Pictures().state_dict().items())


def test_any_model_can_be_split(tmp_path: Path) -> None:
    run_ranks(others, 2, tmp_path)


# random numbers


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.inner, self.down, self.outer = nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 32), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(self.up(x))))  # type: ignore[no-any-return]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.split = nn.Dropout(0.5), Dropped()

    def forward(self, x: Tensor) -> Tensor:
        return self.split(self.before(x))  # type: ignore[no-any-return]


def on_all_ranks(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def random_numbers() -> None:
    s = schedule(Around(), mesh())
    s["split.up"].column()
    s["split.down"].row()
    s["split"].rng("tp").checkpoint()
    s["split.outer"].rng("same")
    s["before"].rng("same")
    model = s.apply(verify=False)
    masks: list[Tensor] = []
    x = torch.ones(4, 6)
    torch.manual_seed(3)
    F.dropout(x), torch.randint(2**63 - 1, ())
    one_draw = torch.get_rng_state()
    torch.manual_seed(3)
    model(x)
    assert torch.equal(torch.get_rng_state(), one_draw), "more than the seed was drawn from the generator that ranks share"
    model.get_submodule("split.inner").register_forward_hook(lambda m, args, y: masks.append((y != 0).detach()))
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        for _ in range(2):
            y = model(x)
            one, other = on_all_ranks(y.detach())
            assert torch.equal(one, other) and (y == 0).any()
            y.square().sum().backward()
        one, other = on_all_ranks(torch.get_rng_state())
        assert torch.equal(one, other), "outside, the ranks' generators went apart"
    first, again, second, again2, third, _, _fourth, *rest = masks
    one, other = on_all_ranks(first.byte())
    assert not torch.equal(one, other), "the same dropout on different parts"
    assert torch.equal(first, again) and torch.equal(second, again2), "recomputed otherwise"
    assert not torch.equal(first, second), "the same dropout twice"
    assert torch.equal(first, third) and not torch.equal(first, rest[1]), "not of the seed"
    model.eval()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model(x)
    assert torch.equal(torch.get_rng_state(), before)
    recomputed_inside()


def recomputed_inside() -> None:
    """Only what is the same on all ranks is recomputed, inside of what differs: torch's own state does not tell its numbers."""
    s = schedule(Around(), mesh())
    s["split.up"].column()
    s["split.down"].row()
    s["split"].rng("tp")
    s["split.outer"].rng("same").checkpoint()
    s["before"].rng("same")
    with recorded() as masks:
        s.apply(verify=False)(torch.ones(4, 6)).square().sum().backward()
    _, _, outer, again = masks
    assert torch.equal(outer, again)
    one, other = on_all_ranks(again)
    assert torch.equal(one, other)


def test_dropout_differs_inside_of_what_is_split_and_nowhere_else(tmp_path: Path) -> None:
    run_ranks(random_numbers, 2, tmp_path)


# recomputation, notes


def counted() -> None:
    import megatron_sp.parallel.mappings as mappings

    calls, original = {"gathers": 0, "blocks": 0}, mappings.all_gather_async

    def gather(*args: Any) -> Any:
        calls["gathers"] += 1
        return original(*args)

    mappings.all_gather_async = gather  # type: ignore[assignment]  # in this process only
    found = {}
    for policy in (None, "full", "keep_gathered"):
        s = schedule(Pictures(), mesh(), seq_dim=0)
        write_pictures(s, True, False)
        if policy is not None:
            s["stages.*.*"].checkpoint(policy)
        s["norm"].annotate("weight", "decays", False)
        model = s.apply(verify=False)
        assert model.norm.weight.decays is False  # type: ignore[union-attr]
        model.get_submodule("stages.0.0.attention.qkv").register_forward_hook(lambda *_: calls.update(blocks=calls["blocks"] + 1))
        calls.update(gathers=0, blocks=0)
        result = model(**images())
        before = calls["gathers"]
        torch.cat([t.flatten() for t in result["logits"]]).square().sum().backward()
        found[policy] = (calls["blocks"], before, calls["gathers"] - before)
    # three blocks with two gathers each, and one where the region ends; backward gathers after two reduce-scatters,
    # and where it begins
    assert found == {None: (1, 7, 7), "full": (2, 7, 13), "keep_gathered": (2, 7, 7)}
    s = schedule(Pictures(), mesh(), seq_dim=0)
    s["norm"].checkpoint("most")
    with pytest.raises(ConfigError, match=r"norm: checkpoint knows the policies full, keep_gathered, not 'most'"):
        s.apply()


def test_recomputation_runs_blocks_twice_and_gathers_as_told(tmp_path: Path) -> None:
    run_ranks(counted, 2, tmp_path)
