"""What is refused without a run, with the module, the values, the line and the way out; and sizes and heads that follow a split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.schedule_toys import N, Toy, batch, toy, write
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from megatron_sp.schedule import Kind, Mesh, PathError, Schedule, register_shardable, schedule
from megatron_sp.schedule.core import kinds
from megatron_sp.schedule.core.directives import expand
from megatron_sp.utils.errors import ConfigError

HERE = r"test_schedule_refusals\.py:"
Lines = Callable[[Schedule], Any]


def without(s: Schedule, on: str, do: str) -> Schedule:
    """Less one line, to be written otherwise."""
    kept = [d for d in s.directives if (d.on, d.do) != (on, do)]
    assert len(kept) == len(s.directives) - 1
    s.directives = kept
    return s


def counting(s: Schedule, **counts: int) -> None:
    attention: Any = s.model.get_submodule("blocks.0.attention")
    attention.config = type("Config", (), counts)()


TOYS: dict[str, tuple[Schedule, Lines, str]] = {
    "E1": (
        toy(seq=False),
        lambda s: s["blocks.0.mlp.up"].shard("weihgt", 0),
        rf"blocks\.0\.mlp\.up has no parameter 'weihgt'.*did you mean weight\?.*{HERE}.*E1",
    ),
    "E2, an axis": (
        toy(3, seq=False), lambda s: None, r"attention\.q\.weight: axis 0 \(16\) must be a multiple of tp \(3\): tp 2, 4, 8, 16 would",
    ),
    "E2, heads": (
        toy(8, seq=False),
        lambda s: counting(s, num_attention_heads=4),
        r"0\.attention\.q: num_attention_heads \(4\) must be multiples of tp \(8\): tp 2, 4 would work \(schedule_toys\.py:.*E2",
    ),
    "E2, key/value heads": (
        toy(4, seq=False),
        lambda s: counting(s, num_attention_heads=4, num_key_value_heads=2),
        r"num_attention_heads \(4\), num_key_value_heads \(2\) must be multiples of tp \(4\): tp 2 would work.*E2",
    ),
    "E4": (
        without(toy(seq=False), "blocks.*.mlp.up", "column"),
        lambda s: s["blocks.*.mlp.up"].shard("weight", 0),
        rf'blocks\.0\.mlp\.up\.weight .* blocks\.0\.mlp\.up\.bias is not .*{HERE}.*\.shard\("bias", axis=0\).*E4',
    ),
    "E9": (
        toy(seq=False, tied=True), lambda s: s["embed"].vocab_parallel(), r"embed\.weight and head\.weight are one tied parameter.*E9",
    ),
    "E10": (
        toy(seq=False),
        lambda s: s["blocks.0.mlp.down"].shard("weight", 0),
        rf"blocks\.0\.mlp\.down\.weight is split twice, along 1 and along 0: at .*{HERE}.*E10",
    ),
    "E13": (
        without(toy(seq=False), "blocks.*.mlp", "sync"),
        lambda s: s["blocks.*.mlp"].sync("fwd_pre", "copy", arg="hidden_states"),
        rf"blocks\.0\.mlp has no input 'hidden_states': Mlp\.forward takes x .*{HERE}.*E13",
    ),
    "E15": (
        toy(seq=False),
        lambda s: setattr(s.model.get_submodule("blocks.0.mlp"), "_compiled_call_impl", print),  # as module.compile() leaves it
        r"column on blocks\.0\.mlp\.up: blocks\.0\.mlp is compiled already \(schedule_toys\.py:.*apply\(\), torch\.compile, ZeRO.*E15",
    ),
    "no such mode": (
        toy(seq=False), lambda s: s["norm"].sync("fwd_pots", "all_reduce"), rf"norm: mode 'fwd_pots' is not known, only fwd_pre.*{HERE}",
    ),
    "no such operation": (
        toy(seq=False), lambda s: s["norm"].sync("fwd_post", "all_recude"), r"'all_recude' is not known, only all_gather",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensor", "axis"), [("weight", -2), ("bias", -1)])
def test_splitting_twice_is_refused_in_any_spelling(tensor: str, axis: int) -> None:
    s = toy(seq=False)
    s["blocks.0.mlp.up"].shard(tensor, axis)
    with pytest.raises(ConfigError, match=rf"blocks\.0\.mlp\.up\.{tensor} is split twice.*E10"):
        s.check()


@pytest.mark.parametrize("case", TOYS)
def test_lines_that_are_refused(case: str) -> None:
    s, change, message = TOYS[case]
    change(s)
    for ask in (s.check, s.apply):
        with pytest.raises(ConfigError, match=message):
            ask()


def test_lines_that_are_not() -> None:
    assert toy(1, seq=False).check().startswith("the lines fit")
    tied = toy(seq=False, tied=True)
    tied["{embed,head}"].vocab_parallel()
    tied.check()
    with torch.device("meta"):
        s = toy(seq=None)
        s.model.to_empty(device="meta")
    write(s, seq=True).check()
    assert all(p.is_meta for p in s.model.parameters()), "a model without weights is enough"


def test_paths_and_order() -> None:
    with pytest.raises(PathError, match=r"no 'attentoin'.*did you mean attention\?"):
        toy()["blocks.*.attentoin"]
    s = toy(1, seq=False)
    s.apply()
    for late in (lambda: s["norm"].sum_gradients(), lambda: s.check(), s.apply):
        with pytest.raises(ConfigError, match=r"apply\(\)"):
            late()


# modules


def block() -> nn.ModuleDict:
    return nn.ModuleDict({"q": nn.Linear(1, 1), "k": nn.Linear(1, 1), "mlp": nn.ModuleDict({"up": nn.Linear(1, 1)})})


def tree() -> nn.Module:
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([block(), block()]), "words": nn.Linear(1, 1)}), "head": block()})


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("", [""]),
        ("model.layers.*.{q,k}", ["model.layers.0.q", "model.layers.0.k", "model.layers.1.q", "model.layers.1.k"]),
        ("{model.words,head}", ["model.words", "head"]),
        ("{model.layers.*.q,head.{q,k}}", None),  # a brace in a brace
        ("model.{layers.1,words}", ["model.layers.1", "model.words"]),
        ("{model.layers.*,head}.mlp.u?", ["model.layers.0.mlp.up", "model.layers.1.mlp.up", "head.mlp.up"]),
        ("**.{up,words}", ["model.layers.0.mlp.up", "model.layers.1.mlp.up", "model.words", "head.mlp.up"]),
        ("model..words", None),
        ("model.words.", None),
    ],
)  # fmt: skip
def test_what_a_glob_names(glob: str, paths: list[str] | None) -> None:
    if paths is None:
        with pytest.raises(PathError, match="names no module"):
            expand(tree(), glob)
    else:
        assert expand(tree(), glob) == paths


def test_a_brace_of_nothing_is_told_with_what_is_there() -> None:
    with pytest.raises(PathError, match=r"no '\{model.wrods,haed\}', the model has model, head"):
        expand(tree(), "{model.wrods,haed}")


class Activated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))


class SomeRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def patched() -> nn.Linear:
    module = nn.Linear(4, 4)
    module.forward = lambda x: x  # type: ignore[method-assign,assignment]
    return module


def shard(axis: int, tensor: str = "weight") -> Lines:
    return lambda s: s["0"].shard(tensor, axis)


def split(how: str, **args: Any) -> Lines:
    return lambda s: getattr(s["0"], how)(**args)


LINEAR = lambda: nn.Linear(4, 4)
NORM = "a norm looks at all its features"
MODULES: list[tuple[Callable[[], nn.Module], Lines, str]] = [
    (lambda: nn.Conv2d(4, 4, 4), shard(2), r"0.weight: axis 2 of a Conv2d cannot be split, only 0 \(outputs\) and 1 \(inputs\)"),
    (lambda: nn.EmbeddingBag(4, 4), shard(0), r"axis 0 of a EmbeddingBag cannot be split, only 1 \(outputs\)"),
    (lambda: nn.Bilinear(4, 4, 4), shard(-1), r"axis -1 of a Bilinear cannot be split, only 0 \(outputs\)"),
    (lambda: nn.LayerNorm(4), shard(0), NORM),
    (lambda: nn.LayerNorm(4), split("column"), f"0 is a LayerNorm, .*{NORM}"),
    (lambda: nn.RMSNorm(4), split("row"), f"0 is a RMSNorm, .*{NORM}"),
    (SomeRMSNorm, split("column"), f"0 is a SomeRMSNorm, .*{NORM}"),
    (lambda: nn.MultiheadAttention(4, 2), shard(0, "in_proj_weight"), "q, k and v in one parameter"),
    (lambda: nn.MultiheadAttention(4, 2), split("row"), "it has q, k and v in one parameter"),
    (lambda: nn.MultiheadAttention(4, 2).out_proj, split("column"), "a part of nn.MultiheadAttention, which never calls it"),
    (lambda: nn.LSTM(4, 4), shard(0, "weight_hh_l0"), "its gates are in one matrix"),
    (lambda: nn.GRU(4, 4), split("row"), "its gates are in one matrix"),
    (lambda: nn.PReLU(4), split("column"), "teach it with megatron_sp.schedule.register_shardable"),
    (lambda: nn.GroupNorm(3, 12), shard(0), r"0.weight: num_groups \(3\) must be a multiple of tp \(2\)"),
    (lambda: nn.Conv1d(6, 6, 1, groups=3), shard(0), r"0.weight: groups \(3\) must be a multiple of tp \(2\)"),
    (lambda: nn.Embedding(4, 4, max_norm=1.0), shard(1), "cannot be split along axis 1 with max_norm=1.0"),
    (lambda: nn.Embedding(4, 4, sparse=True, scale_grad_by_freq=True), shard(0), "with scale_grad_by_freq and sparse: leave the table"),
    (
        lambda: nn.Embedding(4, 4),
        lambda s: s["0"].shard("weight", 0).sync("fwd_post", "all_gather", axis=0),
        "all_gather .* would repeat them: use all_reduce, or split axis 1",
    ),
    (
        LINEAR,
        lambda s: s["0"].shard("weight", 1).shard("bias", 0).sync("fwd_post", "all_reduce"),
        "0.bias is split along its outputs and 0.weight is not",
    ),
    (
        LINEAR,
        lambda s: s["0"].shard("weight", 1) and s[""].sync("fwd_post", "all_reduce"),
        r"0 is split along its inputs, so each of the tp \(2\) ranks would add its bias.*E3",
    ),
    (lambda: Activated(4, 4), split("row"), "is a Activated with a forward of its own"),
    (patched, split("row"), "is a Linear with a forward of its own"),
    (lambda: Activated(4, 4), split("vocab_parallel"), "is a Activated with a forward of its own"),
    (lambda: nn.Conv1d(4, 4, 1), split("vocab_parallel"), "vocab_parallel is for an embedding, or the layer over the vocab"),
    (Scaled, split("row"), "is a Scaled with scale beside weight and bias, which has no place after the sum"),
    (lambda: nn.LazyLinear(4), split("column"), "0.weight has no shape before the model has run"),
    (
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        split("column"),
        "weight is computed by _WeightNorm: shard what it is computed from, in 0.parametrizations.weight",
    ),
    (LINEAR, lambda s: s[""].replace(nn.Identity()), "begin the schedule of the other model instead"),
    (LINEAR, lambda s: s[""].shard("0.weight", 0), "the model has no parameter '0.weight'"),
    (lambda: nn.Linear(4, 6), split("column", heads=3), r"0.weight: heads \(3\) must be a multiple of tp \(2\)"),
    (lambda: nn.Linear(4, 6), split("column", heads=4, replicas=True), r"0.weight: axis 0 \(6\) must be a multiple of heads \(4\)"),
    (
        lambda: nn.Linear(4, 6),
        split("column", heads=1, replicas=True, gather=True),
        r"0: gather joins every rank's heads, and here several ranks have",
    ),
]


@pytest.mark.parametrize(("make", "lines", "message"), MODULES, ids=[str(i) for i in range(len(MODULES))])
def test_modules_that_cannot_be_split_so(make: Callable[[], nn.Module], lines: Lines, message: str) -> None:
    register_shardable(Scaled, Kind({"weight": 1, "scale": 0}, {"weight": 0}, product=lambda m, x: x @ m.weight))  # type: ignore[arg-type,return-value,operator]
    model = nn.Sequential(make())
    before = {name: tuple(p.shape) for name, p in model.named_parameters()} if "Lazy" not in type(model[0]).__name__ else {}
    s = schedule(model, Mesh.sizes(tp=2))
    lines(s)
    try:
        with pytest.raises(ConfigError, match=message):
            s.apply(verify=False)
    finally:
        del kinds._KINDS[Scaled]
    assert all(tuple(p.shape) == before[name] for name, p in model.named_parameters() if before), "nothing has changed"


def test_an_axis_that_a_tensor_has_not() -> None:
    s = schedule(nn.Sequential(nn.Linear(4, 4)), Mesh.sizes(tp=2))
    s["0"].sync("fwd_pre", "scatter", axis=5)
    with pytest.raises(ConfigError, match=r"scatter at 0: axis 5 of \[2, 4\] does not exist"):
        s.apply()(torch.zeros(2, 4))


def test_dtypes_that_one_buffer_cannot_hold() -> None:
    """Refused with words, by all, before anything is touched: it was an assertion in the middle of apply()."""
    model = Toy()
    model.norm.to(torch.bfloat16)
    for ask in ("check", "verify", "apply"):
        s = schedule(model, Mesh.sizes(dp=2)).zero(1)
        with pytest.raises(ConfigError, match=r"embed.weight is float32 and norm.weight is bfloat16, .* model.to\(torch.float32\)"):
            getattr(s, ask)(batch())


# sizes and heads that follow


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear])
def test_sizes_follow_what_is_split(kind: type[nn.Module]) -> None:
    sizes = (4, 6) if kind is nn.Linear else (4, 6, 3)
    shape = kind(*sizes).weight.shape[2:]  # type: ignore[union-attr]
    for how, weight, bias, whole in (("column", (3, 4), (3,), "6"), ("row", (6, 2), (6,), "4")):
        s = schedule(nn.Sequential(kind(*sizes)), Mesh.sizes(tp=2))
        getattr(s["0"], how)()
        part = s.apply().get_submodule("0")
        assert part.weight.shape == (*weight, *shape) and part.bias.shape == bias and whole not in repr(part)


def test_fewer_heads_than_ranks() -> None:
    rows = {}
    for rank in range(4):
        s = schedule(nn.ModuleDict({"k": nn.Linear(3, 10)}), Mesh.sizes(tp=4, tp_rank=rank))
        s["k"].column(heads=2, replicas=True)
        s.apply()
        assert s.applied is not None
        spec = s.applied.specs["k.weight"]
        rows[rank] = (spec.runs, spec.sums[0].slot, spec.sums[0].num_slots, spec.counted)
    first, second = ((0, 5),), ((5, 5),)
    assert rows == {0: (first, 0, 2, first), 1: (first, 0, 2, ()), 2: (second, 1, 2, first), 3: (second, 1, 2, ())}


def attention(model: nn.Module, **column: int) -> Schedule:
    s = schedule(model, Mesh.sizes(tp=2))
    s["blocks.*.attention.{q,k,v}"].column(**column)  # type: ignore[arg-type]
    s["blocks.*.attention.o"].row()
    return s


def test_heads_that_a_line_divides_are_counted_before_it_does() -> None:
    """2 of 2 would be 1 of 2 after it, and was refused (E2)."""
    for ask in ("check", "apply"):
        model = Toy(written_down=True)
        model.blocks[0].attention.num_heads = model.blocks[0].attention.num_attention_heads = 2  # type: ignore[union-attr]
        s = attention(model)
        s["blocks.*.attention"].set("num_heads", divide="tp").set("num_attention_heads", divide="tp")
        getattr(s, ask)(batch())


def test_heads_follow_where_a_line_says_how_many() -> None:
    s = attention(Toy(written_down=True), heads=N)
    s.check()
    assert "set num_heads, divide tp" in s.show()
    assert s.apply(batch()).blocks[0].attention.num_heads == N // 2  # type: ignore[index, union-attr]
    assert s.applied is not None and "set num_heads, divide tp" in s.show()


def test_what_somebody_has_set_stays_so_and_so_do_other_numbers() -> None:
    s = attention(Toy(written_down=True), heads=N)
    s["blocks.*.attention"].set("num_heads", divide="tp")
    assert s.apply(batch()).blocks[0].attention.num_heads == N // 2  # type: ignore[index, union-attr]
    other = Toy()
    other.blocks[0].attention.num_heads = 3
    assert attention(other, heads=N).apply(batch()).blocks[0].attention.num_heads == 3  # type: ignore[index, union-attr]


def test_groups_that_a_line_divides_are_divided_once() -> None:
    s = schedule(nn.Sequential(nn.GroupNorm(4, 8)), Mesh.sizes(tp=2))
    s["0"].set("num_groups", divide="tp").shard("weight", 0).shard("bias", 0)
    norm = s.apply(verify=False)[0]  # type: ignore[index]
    assert (norm.num_groups, norm.num_channels) == (2, 4)
