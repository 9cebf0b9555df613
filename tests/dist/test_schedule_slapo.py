"""Slapo's spelling, on two ranks: what its documentation shows, with the result and all gradients compared with the whole model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from support.slapo_parity import compare, data, lines
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.parallel.mappings import reduce_from
from megatron_sp.schedule import PathError
from megatron_sp.schedule.slapo import SlapoSchedule, Verify, build, create_schedule, list_primitives
from megatron_sp.utils.errors import ConfigError

B, S, H, FF = 3, 4, 6, 10


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear1, self.act, self.linear2, self.dropout = nn.Linear(H, FF), nn.GELU(), nn.Linear(FF, H, bias=bias), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear2(self.act(self.linear1(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out_proj, self.resid_dropout = (*(nn.Linear(H, H) for _ in range(4)), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 3)).transpose(1, 2) for p in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.resid_dropout(self.out_proj(o))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.last = nn.LayerNorm(H), Attention(), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.attention(self.norm(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.middle, self.head = nn.Embedding(FF, H), nn.Linear(H, H), nn.Linear(H, FF, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.wte(ids))))


def column(sch: SlapoSchedule, name: str) -> None:
    sch[name].shard(["weight", "bias"], axis=0)
    sch[name].sync(mode="bwd_post", sync_op_or_fn="all_reduce")


def recipes() -> None:
    """Column and gather; column into row; reduce_scatter, then all_gather; all in every position of the batch."""

    gather = lines("linear1 column; linear1 fwd_post all_gather -1")
    reduce = lines("linear2 fwd_post all_reduce; linear2 row; linear1 column")  # before shard: the bias is added once all the same
    model = compare(Mlp(), data(B, S, H), gather)
    assert isinstance(model.linear1, nn.Linear) and model.linear1.weight.shape == (FF // 2, H) and model.linear1.out_features == FF // 2
    model = compare(Mlp(), data(B, S, H), reduce)
    assert isinstance(model.linear2, nn.Linear) and model.linear2.weight.shape == (H, FF // 2) and model.linear2.in_features == FF // 2
    compare(Mlp(bias=False), data(B, S, H), reduce)
    for axis in (0, 2, -2):

        def scatter(sch: SlapoSchedule, axis: int = axis) -> None:
            column(sch, "linear1")
            sch["linear2"].shard("weight", axis=-1)
            sch["linear2"].sync(mode="fwd_post", sync_op_or_fn="reduce_scatter", axis=axis)
            sch["dropout"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=axis, tensor_parallel_output_grad=False)

        compare(Mlp(), data(4, 4, H), scatter)


def sequence_parallel() -> None:
    columns = "attention.q column; attention.k column; attention.v column; attention.out_proj row; "
    scatter = "attention.out_proj fwd_post reduce_scatter 1; attention.resid_dropout fwd_post all_gather 1"
    compare(Block(), data(B, S, H), lines(columns + scatter))

    class Around(nn.Module):  # what lies between scatter and gather works on a share of the positions
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.norm = nn.Linear(H, H), Block(), nn.LayerNorm(H)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.block(self.first(x)))

    def region(sch: SlapoSchedule) -> None:
        lines("first fwd_post scatter 1; block.attention fwd_pre all_gather 1; block.attention.out_proj row")(sch)
        for name in ("q", "k", "v"):
            sch["block"]["attention"][name].shard(["weight", "bias"], axis=0)
        lines("block.attention.out_proj fwd_post reduce_scatter 1; block.norm part; block.last part; norm part")(sch)
        sch["norm"].sync(mode="fwd_post", sync_op_or_fn="all_gather", axis=1, tensor_parallel_output_grad=False)

    compare(Around(), data(B, S, H), region)


def embeddings() -> None:
    ids = torch.tensor([[0, 4, 5, 9], [1, 5, 0, 8], [9, 9, 2, 7]])  # the first and last word of each rank's share

    def head(sch: SlapoSchedule) -> None:
        sch["head"].shard("weight", axis=0)
        lines("head bwd_post all_reduce; head fwd_post all_gather -1")(sch)

    def own(sch: SlapoSchedule) -> None:
        sch["wte"].shard("weight", axis=0)
        sch["wte"].sync(mode="fwd_post", sync_op_or_fn="all_reduce")
        head(sch)

    model = compare(Tied(), ids, own)
    assert isinstance(model.wte, nn.Embedding) and isinstance(model.head, nn.Linear) and model.wte.weight is model.head.weight


def functions() -> None:
    """Hooks of all three kinds."""

    def write(sch: SlapoSchedule) -> None:
        group = sch.group

        def sum_of_gradients(_module: nn.Module, grad_inputs: tuple[Tensor], _grad_outputs: tuple[Tensor]) -> tuple[Tensor]:
            return (all_reduce(grad_inputs[0].clone(), group),)

        sch["linear1"].shard(["weight", "bias"], axis=0)
        sch["linear1"].sync(mode="bwd_post", sync_op_or_fn=sum_of_gradients)
        sch["linear2"].shard("weight", axis=1)
        sch["linear2"].sync(mode="fwd_post", sync_op_or_fn=lambda _module, _inputs, output: reduce_from(output, group))

    compare(Mlp(bias=False), data(B, S, H), write)


def other_primitives() -> None:
    def write(sch: SlapoSchedule) -> None:
        sch["attention"].checkpoint()
        lines("q column; k column; v column; out_proj row; out_proj fwd_post all_reduce")(sch["attention"])
        sch["attention"].fork_rng()

    model = compare(Block(), data(B, S, H), write)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Block().named_parameters()]
    sch = create_schedule(Block())
    sch["norm"].replace(nn.Identity())
    sch.replace_all(nn.Linear, lambda path, old, bias: nn.Linear(old.in_features, old.out_features, bias=bias), bias=False)
    assert isinstance(sch["norm"].mod, nn.Identity) and sch["attention.q"].mod.bias is None, "replaced at once, as there"
    model, _ = build(sch)
    assert isinstance(model.norm, nn.Identity) and model.last.bias is None and model.attention.q.bias is None  # type: ignore[union-attr]
    torch.manual_seed(dist.get_rank())
    model, _ = build(create_schedule(Mlp()), init_weights=lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    same = model.linear1.weight.detach().clone()  # type: ignore[union-attr]
    assert torch.equal(all_reduce(same.clone(), create_schedule(model).group), 2 * same), "rank 0's weights are everybody's"


def every() -> None:
    for case in (recipes, sequence_parallel, embeddings, functions, other_primitives, mistakes):
        torch.manual_seed(0)
        case()


def test_what_slapo_shows_computes_what_the_whole_model_does(tmp_path: Path) -> None:
    run_ranks(every, 2, tmp_path)


def mistakes() -> None:
    def without_bias(sch: SlapoSchedule) -> None:
        sch["linear1"].shard("weight", axis=0)
        sch["linear1"].sync(mode="bwd_post", sync_op_or_fn="all_reduce")

    def half_a_pair(sch: SlapoSchedule) -> None:
        sch["head"].shard("weight", axis=0)
        sch["head"].sync(mode="bwd_post", sync_op_or_fn="all_reduce")

    cases: list[tuple[nn.Module, Callable[[SlapoSchedule], Any], tuple[str, ...]]] = [
        (Mlp(), lambda sch: [sch["linear1"].shard("weight", axis=axis) for axis in (0, 1)], ("linear1.weight", "twice", "slapo.py:")),
        (Mlp(), without_bias, ("linear1.bias", "E4")),
        (Tied(), half_a_pair, ("wte.weight", "head.weight", "tied")),
    ]
    for model, write, words in cases:
        sch = create_schedule(model)
        write(sch)
        with pytest.raises(ConfigError) as error:
            build(sch)
        assert all(word in str(error.value) for word in words), str(error.value)
    sch = create_schedule(Mlp())
    column(sch, "linear1")
    x = torch.zeros(2, 4, H)
    with pytest.raises(ConfigError, match=r"linear2 \(Linear\) fails .*\n.* is \[2, 4, .*split it too \(.row\(\)\)"), Verify(sch, [x]):
        pass


def test_names_are_looked_up() -> None:
    sch = create_schedule(Block())
    assert sch.world_size == 1 and sch.rank == 0 and sch.group.size() == 1
    leaf = sch["attention"]["out_proj"]
    assert leaf.mod is sch["attention.out_proj"].mod is sch.mod.attention.out_proj  # type: ignore[union-attr]
    assert (leaf.name, leaf.path, leaf.parent.path if leaf.parent else None) == ("out_proj", "attention.out_proj", "attention")
    assert "attention.out_proj" in sch and "out_proj" in sch["attention"] and "out_proj" not in sch
    assert [name for name, _ in sch["attention"].named_schedules()] == ["", "q", "k", "v", "out_proj", "resid_dropout"]
    assert all(each.mod is sch.mod.get_submodule(name) for name, each in sch.named_schedules())
    assert list(sch.child) == ["norm", "attention", "last"]
    part = create_schedule(leaf.mod, "out_proj", "attention.out_proj", sch["attention"])
    assert part.path == leaf.path and part.schedule is sch.schedule
    with pytest.raises(PathError, match="did you mean out_proj"):
        sch["attention.out_pro"]
    with pytest.raises(ConfigError, match="takes them all"):
        sch["attention.*"]
    with pytest.raises(ConfigError, match="another module"):
        create_schedule(nn.Linear(1, 1), "q", "attention.q", sch)
    assert list_primitives() == list(list_primitives(name_only=False)) and "shard" in list_primitives()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda s: s.trace(), "nothing is traced here"),
        (lambda s: s["linear1"].decompose(), "added after the sum anyway"),
        (lambda s: s.fuse(None, compiler="TorchScript"), "torch.compile"),
        (lambda s: s.find("linear.*"), "no graph to search"),
        (lambda s: s["linear1"].cut_pipeline_stage(), "pipeline stages"),
        (lambda s: s["linear1"].sync(mode="forward", sync_op_or_fn="all_reduce"), "forward: fwd_post"),
        (lambda s: s["linear1"].sync("fwd_post", "XR->RS"), "or one of RR->RR"),
        (lambda s: s["linear1"].sync("bwd_post", "SR->RS"), "goes the other way by itself"),
        (lambda s: s["linear1"].sync("fwd_post", "SR->RS", axis=1), "say which dims"),
        (lambda s: s["linear1"].sync("forward"), "write .shard() of its weight first"),
        (lambda s: (s["linear1"].shard("wieght", 0), s["linear1"].sync("forward")), "write .shard() of its weight first"),
        (lambda s: s["linear1"].sync("fwd_post"), "name the op at 'fwd_post'"),
        (lambda s: s.fuse(None, name="fused"), "torch.compile"),
        (lambda s: s["linear1"].sync("fwd_post", "all_gather", dim=1), "does not know dim, only axis"),
        (lambda s: s["linear1"].sync("fwd_post", "all_reduce", tensor_parallel_output_grad=True), "not of all_reduce"),
        (lambda s: s["linear1"].sync("fwd_post", lambda m, i, o: o, axis=1), "no meaning beside a hook"),
        (lambda s: s["linear1"].replace(lambda x: x, target_ops=[1]), "takes a module for a module"),
        (lambda s: s.checkpoint([1]), "takes a whole module"),
        (lambda s: build(s, target="deepspeed"), "knows no target='deepspeed'"),
        (lambda s: build(s["linear1"]), "not of linear1"),
    ],
)
def test_what_is_refused_says_what_to_do(write: Callable[[SlapoSchedule], Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        write(create_schedule(Mlp()))
    assert words in str(error.value)
