"""Slapo's spelling beyond its documentation: early versions, reshards, Verify, registered methods, empty models, hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.slapo_parity import compare, data, lines, weighted
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import world_group
from megatron_sp.parallel.mappings import all_to_all
from megatron_sp.schedule import slapo
from megatron_sp.schedule.slapo import Primitive, ShardMethod, SlapoSchedule, Verify, build, create_schedule, init_empty_weights
from megatron_sp.utils.errors import ConfigError, NumericsError

H, FF = 6, 10


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, FF), nn.Linear(FF, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Normed(nn.Module):
    """Convolutions with what is normal per channel between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.last, self.bn_last = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn_last(self.last(self.bn(self.conv(x)).relu()))


class Gain(nn.Module):
    """A class that nobody knows, which keeps its size in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.gain = width, nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.width
        return x * self.gain


RIGHT = lines("up column; down row; down fwd_post all_reduce")


def early_versions() -> None:
    for written in ("up cut; up backward; down row; down forward", "up cut; up both"):  # of three dims, the last is gathered
        compare(Mlp(), data(3, 4, H), lines(written))

    def channels(sch: SlapoSchedule) -> None:
        sch["conv"].shard(["weight", "bias"], axis=0)
        sch["conv"].sync()
        sch["bn"].shard(["weight", "bias", "running_mean", "running_var"], axis=0)
        sch["last"].shard("weight", axis=1)
        sch["last"].sync("forward")

    compare(Normed(), data(2, 3, 4, 4), channels)

    def gathered(sch: SlapoSchedule) -> None:
        sch["conv"].shard(["weight", "bias"], axis=0)
        sch["conv"].sync()
        sch["bn"].shard(["weight", "bias", "running_mean", "running_var"], axis=0)
        sch["bn"].sync("both")  # its input is a share: there is nothing to sum

    compare(Normed(), data(2, 3, 4, 4), gathered)

    def summed(sch: SlapoSchedule) -> None:
        gathered(sch)
        sch["bn"].sync("bwd_post", "all_reduce")

    with pytest.warns(UserWarning, match="bn is split by channels.*left out"):
        compare(Normed(), data(2, 3, 4, 4), summed)

    def packed(sch: SlapoSchedule, blocks: int | None = 1) -> None:
        sch["0"].shard(["weight", "bias"], axis=0, blocks=blocks)
        sch["0"].sync("both")

    compare(nn.Sequential(nn.Linear(H, 3 * H)), data(2, H), packed)
    compare(nn.Sequential(nn.Linear(H, 3 * H)), data(2, H), lambda sch: packed(sch, None))
    sch = create_schedule(Mlp())
    sch["down"].shard("weight", axis=1)
    with pytest.raises(ConfigError, match="use forward"):
        sch["down"].sync("both")


def reshards() -> None:
    for written in (
        "up column; up fwd_post RS->SR; down fwd_post SR->RR; down part",
        "up column; up fwd_post RS->SR; up fwd_post SR->RS; up fwd_post RS->RS; down row; down fwd_post all_reduce",
        "up column; up fwd_post RS->RR; down column; down fwd_post RS->RR",
        "up fwd_post RR->RS; down row; down fwd_post all_reduce",
        "up fw_pre RR->SR; down fw_post SR->RR; up part; down part",
    ):
        compare(Mlp(), data(4, 8, H), lines(written))


def verified() -> None:
    x, model = data(2, 4, H).float().requires_grad_(), Mlp()
    before = copy.deepcopy(model.state_dict())
    sch = create_schedule(model)
    with Verify(sch, [x]) as proof:
        RIGHT(sch)
    assert proof.verdict is not None and proof.verdict.ok
    assert {row.kind for row in proof.verdict.rows} == {"output", "loss", "input gradient", "gradient"}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), "only copies were split"
    build(sch)
    with pytest.raises(ConfigError, match="inside of Verify"), Verify(again := create_schedule(Mlp()), {"x": x}):
        build(again)

    def differs(write: Callable[[SlapoSchedule], Any], *words: str, **more: Any) -> None:
        sch = create_schedule(Mlp())
        with pytest.raises((NumericsError, ConfigError)) as error, Verify(sch, x, **more):
            write(sch)
        assert all(word in str(error.value) for word in words), str(error.value)

    differs(
        lines("up cut; up fwd_post all_gather -1"),
        "input gradient x",
        "the gradients of its input x on the ranks of tp sum to the reference",
        "E6",
    )
    differs(lambda s: s["down"].replace(nn.Linear(FF, H, bias=False)), "output result")
    differs(lambda s: (s["down"].sync("fwd_pre", "RR->SR"), s["down"].sync("fwd_post", "SR->RR")), "['down'].annotate('weight'")
    differs(
        lambda s: s["up"].replace(nn.Linear(H, FF, bias=False)),
        "loss",
        loss_fn=nn.functional.mse_loss,
        example_outputs=torch.zeros(2, 4, H).double(),
    )
    with Verify(create_schedule(Mlp()), x, enable=False) as off:
        off.sch["down"].replace(nn.Linear(FF, H))
    with Verify(create_schedule(Mlp())["down"], None, topology=object(), enable=False) as off:  # type: ignore[arg-type]
        """Whatever it would refuse."""
    with Verify(create_schedule(Mlp()), x, enable=False) as off:
        build(off.sch)
    with Verify(create_schedule(nn.Sequential(Mlp(), nn.Dropout(0.5))), x, eval_mode=False):
        """The same numbers are dropped in both."""
    with init_empty_weights():
        empty = create_schedule(Mlp())
    with Verify(empty, x):
        RIGHT(empty)
    assert empty.mod.up.weight.device.type == "meta"  # type: ignore[union-attr]


@contextmanager
def registered() -> Iterator[list[Any]]:
    """What a user registers, taken back at the end."""
    calls: list[Any] = []

    @slapo.register_shard_method(Gain)
    class _Method(ShardMethod):
        @staticmethod
        def preproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
            calls.append(("before", sch.mod.width, sharded_size))  # type: ignore[union-attr]

        @staticmethod
        def postproc(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> None:
            calls.append((sch.path, param_name, sharded_size, axis))
            sch.mod.width = sharded_size  # type: ignore[assignment]

        @staticmethod
        def infer_output_type(sch: SlapoSchedule, param_name: str, sharded_size: int, axis: int) -> tuple[str, int]:
            return "partition", -1

    @slapo.register_primitive()
    class _Freeze(Primitive):
        @staticmethod
        def name() -> str:
            return "freeze"

        @staticmethod
        def apply(sch: SlapoSchedule, value: bool = True) -> None:
            sch.metadata.primitives["freeze"].append(sch.path)
            for p in sch.mod.parameters():
                p.requires_grad_(not value)

        @staticmethod
        def init_metadata() -> list[str]:
            return []

    try:
        yield calls
    finally:
        del slapo._METHODS[Gain], slapo.PRIMITIVES["freeze"]


def what_users_add() -> None:
    with registered() as calls:

        def write(sch: SlapoSchedule) -> None:
            lines("0 column")(sch)
            sch["1"].shard("gain", axis=0)
            sch["1"].sync("forward")

        model = compare(nn.Sequential(nn.Linear(H, FF), Gain(FF), nn.Linear(FF, H)), data(2, 3, H), write)
        assert calls == [("before", FF, FF // 2), ("1", "gain", FF // 2, 0)] and model[1].width == FF // 2  # type: ignore[index]
        sch = create_schedule(Mlp())
        sch["up"].freeze()
        assert (
            sch.metadata.primitives["freeze"] == ["up"] and not sch["up"].mod.weight.requires_grad and "freeze" in slapo.list_primitives()
        )
        for wrong in (lambda: slapo.register_shard_method(Gain)(ShardMethod), lambda: slapo.register_shard_method(nn.Linear)(ShardMethod)):
            with pytest.raises(ConfigError, match="already"):
                wrong()
        assert slapo.register_shard_method(None)(ShardMethod) is ShardMethod


def replaced_at_once() -> None:
    """Lines speak of what is inside of a module that was put there, and its hooks are the old one's."""
    seen: list[str] = []

    model = nn.Sequential(nn.Linear(H, H), nn.Identity()).double()
    model[1].register_forward_hook(lambda m, i, o: seen.append(type(m).__name__))
    sch = create_schedule(model)
    sch["1"].replace(Mlp().double())
    whole = copy.deepcopy(sch.mod)
    RIGHT(sch["1"])
    split, _ = build(sch)
    x = data(2, 3, H)
    torch.testing.assert_close(split(x), whole(x))
    assert seen == ["Mlp", "Mlp"]
    root = create_schedule(nn.Identity())
    root.replace(Mlp())
    lines("up column; up fwd_post all_gather -1")(root)
    assert isinstance(build(root)[0], Mlp)


def empty_models() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.bn, self.middle = nn.Embedding(FF, H), nn.BatchNorm1d(4), nn.Linear(H, H)
            self.head = nn.Linear(H, FF, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.middle(self.bn(self.wte(ids))))

    with init_empty_weights(include_buffers=True):
        model = Tied()
    assert model.wte.weight.device.type == model.bn.running_mean.device.type == "meta" and model.head.weight is model.wte.weight  # type: ignore[union-attr]
    sch = create_schedule(model)
    assert list(sch.metadata.tie_weights) == [model.wte.weight] and sch.metadata.base_params["bn.weight"] == (4,)
    sch["wte"].shard("weight", axis=0)
    sch["wte"].sync("fwd_post", "all_reduce")
    column_of_words = sch["head"]
    column_of_words.shard("weight", axis=0)
    column_of_words.sync("bwd_post", "all_reduce")
    column_of_words.sync("fwd_post", "all_gather", axis=-1)
    torch.manual_seed(world_group().rank())  # rank 0's draws are everybody's
    built, _ = build(sch)
    assert built(torch.arange(8).view(2, 4)).std() > 0.01
    drawn = built.middle.weight.detach()  # type: ignore[union-attr]
    assert torch.equal(2 * drawn, all_reduce(drawn.clone(), world_group()))
    assert built.wte.weight.orig_shape == (FF, H) and built.wte.weight is built.head.weight  # type: ignore[union-attr]
    with init_empty_weights():
        own = nn.Sequential(Gain(H))
    with pytest.raises(ConfigError, match=r"0\.gain have no contents"):
        build(create_schedule(own))
    with init_empty_weights():
        own = nn.Sequential(Gain(H))
    paths: list[str] = []

    def by_path(module: nn.Module, path: str) -> None:
        paths.append(path)
        nn.init.constant_(module.gain, 3.0)  # type: ignore[arg-type]

    assert build(create_schedule(own), init_weights=by_path)[0][0].gain[0] == 3.0 and paths[0] == "0"  # type: ignore[index]
    transposed = nn.Linear(4, 6)
    transposed.weight = nn.Parameter(torch.randn(4, 6).t())  # each rank has drawn its own
    same = build(create_schedule(transposed))[0].weight.detach()
    assert torch.equal(2 * same, all_reduce(same.clone(memory_format=torch.contiguous_format), world_group()))
    with init_empty_weights(enable=False):
        assert nn.Linear(1, 1).weight.device.type == "cpu"


def functions_for_hooks() -> None:
    """Each function against what it means on the whole tensor, with the gradient of the input."""
    group = world_group()
    size, rank = group.size(), group.rank()
    whole = data(3, 8)
    mine = whole.chunk(size, 1)[rank]

    def gradient(x: Tensor, function: Callable[[Tensor], Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
        given, back = x.clone().requires_grad_(), weights.clone()
        y = function(given)
        (grad,) = torch.autograd.grad(y, given, back)
        assert torch.equal(given, x) and torch.equal(back, weights), "nothing is changed in place"
        return y.detach(), grad

    ranks = torch.stack([(rank_ + 1) * whole for rank_ in range(size)]).sum(0)
    own = (rank + 1) * whole
    w = data(8, 3).t() + 1
    for differ, expected in ((True, size * w), (False, w)):
        y, grad = gradient(mine, lambda x, d=differ: slapo.all_gather_forward_output(x, 1, None, tensor_parallel_output_grad=d), w)
        assert torch.equal(y, whole)
        torch.testing.assert_close(grad, expected.chunk(size, 1)[rank])
    part = w.chunk(size, 1)[rank]
    y, grad = gradient(own, lambda x: slapo.reduce_scatter_forward_output(x, 1, None), part)
    torch.testing.assert_close(y, ranks.chunk(size, 1)[rank])
    assert torch.equal(grad, w)
    y, grad = gradient(whole, lambda x: slapo.scatter_forward_output(x, dim=1), part)
    assert torch.equal(y, mine) and torch.equal(grad, w)
    y, grad = gradient(own, lambda x: slapo.reduce_forward_output(x, None), w)
    torch.testing.assert_close(y, ranks)
    assert torch.equal(grad, w)
    y, grad = gradient(whole, lambda x: slapo.reduce_backward_grad(x, None), (rank + 1) * w)
    assert torch.equal(y, whole)
    torch.testing.assert_close(grad, w * sum(range(1, size + 1)))
    rows = data(8, 8)
    gradient(rows, lambda x: all_to_all(x, group, 0, 1), torch.ones(8 // size, 8 * size, dtype=rows.dtype))


def random_numbers() -> None:
    group = world_group()
    assert slapo.set_random_seed(5, dp_rank=2, pp_rank=1, tp_rank=group.rank()) == 125

    def forward(x: Tensor) -> Tensor:
        with slapo.get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(x, 0.5)
        return y * torch.rand(8, 8)

    found = []
    for function in (forward, lambda x: slapo.checkpoint(forward, x)):
        slapo.set_random_seed(7)
        x = torch.ones(8, 8, requires_grad=True)
        y = function(x)
        weighted(y).backward()
        found.append((y.detach(), x.grad, torch.rand(())))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    kept, after = (found[0][0] != 0).float(), found[0][2]
    assert not torch.equal(all_reduce(kept.clone(), group), group.size() * kept), "each rank has a mask of its own"
    torch.testing.assert_close(all_reduce(after.clone(), group), group.size() * after)


CASES = [
    early_versions, reshards, verified, what_users_add, replaced_at_once, empty_models, functions_for_hooks, random_numbers,
]  # fmt: skip


def every(names: list[str]) -> None:
    for case in CASES:
        if case.__name__ in names:
            torch.manual_seed(0)
            case()


def test_the_rest_of_slapo_on_two_ranks(tmp_path: Path) -> None:
    nn.Linear(1, 1, device="meta")  # what torch imports for that is imported once, before the fork
    run_ranks(every, 2, tmp_path, [case.__name__ for case in CASES])


@pytest.mark.long
def test_on_four_ranks(tmp_path: Path) -> None:
    run_ranks(every, 4, tmp_path, ["functions_for_hooks", "random_numbers"])
