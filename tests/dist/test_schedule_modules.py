"""Plain modules of torch, and of a user, that no preset knows: split on two ranks, result and gradients against the whole one, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.slapo_parity import compare, data
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from megatron_sp.schedule import Kind, register_shardable
from megatron_sp.schedule.core import kinds
from megatron_sp.schedule.slapo import SlapoSchedule, build, create_schedule
from megatron_sp.utils.errors import ConfigError

H, FF = 6, 8
Write = Callable[[SlapoSchedule], object]


def pair(sch: SlapoSchedule) -> None:
    """The first by its outputs, the last by its inputs."""
    s, last = sch.schedule, list(sch.child)[-1]
    s["0"].column()
    s[last].row()


def columns(sch: SlapoSchedule) -> None:
    sch.schedule["0"].column(gather=True)


def shares(*names: str) -> Write:
    """The first by its outputs, the second, of which each channel is by itself, along; then all are gathered."""

    def write(sch: SlapoSchedule) -> None:
        sch.schedule["0"].column()
        sch["1"].shard(list(names), axis=0)
        sch["1"].sync("fwd_post", "all_gather", axis=1)

    return write


def channels() -> None:
    for make, size in ((nn.ConvTranspose1d, (5,)), (nn.ConvTranspose2d, (3, 4)), (nn.ConvTranspose3d, (2, 3, 2))):
        model = nn.Sequential(make(4, H, 2), nn.Tanh(), make(H, 2, 3, stride=2, output_padding=1))
        split = compare(model, data(2, 4, *size), pair)
        assert (split[0].out_channels, split[2].in_channels, split[0].weight.shape[1]) == (3, 3, 3)  # type: ignore[index,union-attr]
        compare(make(4, H, 3), data(2, 4, *size), lambda sch: sch.schedule[""].column(gather=True))
    x = data(3, 4, 7)
    compare(nn.Conv1d(4, 12, 1), x, lambda sch: sch.schedule[""].column(gather=True))  # three times as many, and nothing packed
    norm = "weight", "bias"
    split = compare(nn.Sequential(nn.Conv1d(4, FF, 1), nn.GroupNorm(4, FF)), x, shares(*norm))
    assert (split[1].num_groups, split[1].num_channels) == (2, 4)  # type: ignore[index]
    compare(nn.Sequential(nn.Conv1d(4, FF, 1), nn.InstanceNorm1d(FF, affine=True)), x, shares(*norm))
    split = compare(nn.Sequential(nn.Conv1d(4, FF, 1), nn.Conv1d(FF, 2 * FF, 3, groups=4)), x, shares(*norm))
    assert (split[1].groups, split[1].in_channels, split[1].out_channels) == (2, 4, 8)  # type: ignore[index]

    def told_to_copy(sch: SlapoSchedule) -> None:
        sch.schedule["0"].column()
        sch.schedule["1"].column(gather=True)  # there is nothing to sum before it

    compare(nn.Sequential(nn.Conv1d(4, FF, 1), nn.BatchNorm1d(FF)), x, told_to_copy)
    both = compare(nn.Sequential(nn.Linear(4, FF), nn.BatchNorm1d(FF)), data(5, 4), told_to_copy)
    assert both[1].num_features == FF // 2  # type: ignore[index]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(2, 4, FF)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x[..., :2], x[..., 2:])


def several_inputs() -> None:
    compare(TwoInputs(), data(3, H), lambda sch: sch.schedule["mix"].column(gather=True))

    def by_hand(sch: SlapoSchedule) -> None:
        sch["mix"].shard(["weight", "bias"], axis=0)
        for place in (0, 1):
            sch["mix"].sync("bwd_post", "all_reduce", arg=place)
        sch["mix"].sync("fwd_post", "all_gather", axis=-1)

    compare(TwoInputs(), data(3, H), by_hand)


def tables() -> None:
    ids = torch.tensor([[0, 4, 5, 9], [1, 5, 0, 8], [9, 9, 2, 7]])

    def words(op: str, axis: int | None = None) -> Write:
        def write(sch: SlapoSchedule) -> None:
            sch["0"].shard("weight", axis=0)
            sch["0"].sync("fwd_post", op, **({} if axis is None else {"axis": axis}))
            if axis is not None:
                sch["1"].sync("fwd_post", "all_gather", axis=axis)

        return write

    for op, axis in (("all_reduce", None), ("reduce_scatter", 1)):
        compare(nn.Sequential(nn.Embedding(10, H, padding_idx=5), nn.Identity()), ids, words(op, axis))

    def features(sch: SlapoSchedule) -> None:
        sch["0"].shard("weight", axis=1)
        sch["0"].sync("fwd_post", "all_gather", axis=-1)

    compare(nn.Sequential(nn.EmbeddingBag(10, H)), ids, features)
    compare(nn.Sequential(nn.Embedding(10, H, scale_grad_by_freq=True)), ids, features)

    def hooks_then_sum(sch: SlapoSchedule) -> None:
        """What a hook of the user's own leaves at zero is summed after it, by name or by hand."""
        first, kept = 5 * sch.rank, list[Tensor]()
        sch["0"].shard("weight", axis=0)

        def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            kept[:] = [(inputs[0] < first) | (inputs[0] >= first + 5)]
            return (inputs[0] - first).masked_fill(kept[0], 0)

        sch["0"].sync("fwd_pre", before)
        sch["0"].sync("fwd_post", lambda _module, _inputs, output: output.masked_fill(kept[0][..., None], 0.0))
        sch["0"].sync("fwd_post", "all_reduce")

    compare(nn.Sequential(nn.Embedding(10, H)), ids, hooks_then_sum)


class Layer(nn.Module):
    """A linear layer of somebody, whose weight has a name of its own."""

    def __init__(self, inputs: int, outputs: int, *, scale: bool = False) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))
        self.scale = nn.Parameter(torch.randn(outputs)) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.kernel + self.bias
        return y if self.scale is None else y * self.scale


class Activated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


def taught() -> None:
    register_shardable(Layer, Kind({"kernel": 1, "bias": 0, "scale": 0}, {"kernel": 0}, product=lambda m, x: x @ m.kernel))  # type: ignore[arg-type,return-value,operator]
    try:
        x = data(2, 3, H)
        compare(nn.Sequential(Layer(H, FF), nn.Tanh(), Layer(FF, H)), x, pair)
        compare(nn.Sequential(Layer(H, FF, scale=True), nn.Tanh()), x, columns)

        def by_hand(sch: SlapoSchedule) -> None:
            sch["0"].shard("kernel", axis=1)
            sch["0"].shard("bias", axis=0)
            sch["0"].sync("bwd_post", "all_reduce")
            sch["2"].shard("kernel", axis=0)
            sch["2"].sync("fwd_post", "all_reduce")

        compare(nn.Sequential(Layer(H, FF), nn.Tanh(), Layer(FF, H)), x, by_hand)
        compare(nn.Sequential(Activated(H, FF), nn.Linear(FF, H)), x, pair)
        compare(nn.Sequential(Activated(H, FF)), x, columns)
    finally:
        del kinds._KINDS[Layer]


class Shared(nn.Module):
    """One layer under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H)
        self.again, self.last = self.first, self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.tanh(self.middle(self.norm(self.first(x))))))


class ByName(nn.Module):
    """Calls its layers with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.words = nn.Linear(H, FF), nn.Linear(FF, H), nn.Embedding(10, H)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(input=torch.tanh(self.up(input=self.words(input=ids))))


def names_of_inputs() -> None:
    def write(sch: SlapoSchedule) -> None:
        sch.schedule["words"].vocab_parallel()
        sch["up"].sync("bwd_post", "all_reduce")
        sch["up"].shard(["weight", "bias"], axis=0)
        sch.schedule["down"].row()

    compare(ByName(), torch.tensor([[1, 2, 3], [9, 0, 5]]), write)
    sch = create_schedule(nn.ConvTranspose1d(4, 2, 3))
    sch.schedule[""].row()
    with pytest.raises(ConfigError, match="a ConvTranspose1d that is split takes its input alone, not output_size"):
        build(sch)[0](data(1, 2, 5).float(), output_size=[7])


def several_names() -> None:
    x = data(2, 4, H)
    for name in ("first", "again", "{first,again}"):
        compare(Shared(), x, lambda sch, n=name: sch.schedule[n].column(gather=True))

        def by_hand(sch: SlapoSchedule, name: str = name) -> None:
            line = sch.schedule[name].shard("weight", 0).shard("bias", 0)
            line.sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)

        compare(Shared(), x, by_hand)

    def positions(sch: SlapoSchedule) -> None:
        sch.sync("fwd_pre", "scatter", axis=1)
        sch.sync("fwd_post", "all_gather", axis=1)
        for path in ("again", "middle", "last"):  # second names
            for parameter in ("weight", "bias"):
                sch[path].annotate(parameter, "replicated_param", True)

    compare(Shared(), x, positions)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.ParameterList(nn.Parameter(torch.randn(H, FF)) for _ in range(2)), nn.Parameter(torch.randn(FF, H))
        self.register_buffer("mask", torch.arange(float(FF)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.into[0]) * self.mask + x @ self.into[1]) @ self.out


def parameters() -> None:
    def lists(sch: SlapoSchedule) -> None:
        sch["into"].shard(["0", "1"], axis=1)
        sch.shard("out", axis=0)
        sch.shard("mask", axis=0)
        sch.sync("bwd_post", "all_reduce")
        sch.sync("fwd_post", "all_reduce")

    compare(Lists(), data(2, 3, H), lists)

    def parts(sch: SlapoSchedule) -> None:
        sch["0.parametrizations.weight"].shard(["original0", "original1"], axis=0)
        sch["0"].shard("bias", axis=0)
        sch["0"].sync("bwd_post", "all_reduce")
        sch["0"].sync("fwd_post", "all_gather", axis=-1)

    compare(nn.Sequential(parametrizations.weight_norm(nn.Linear(H, FF))), data(2, 3, H), parts)


def without_gradients() -> None:
    """Torch's encoder hands its weights to one kernel when nobody wants gradients, unless it is kept from that."""
    layer = nn.TransformerEncoderLayer(H, 2, FF, dropout=0.0, batch_first=True)
    x = data(3, 4, H)
    missing = torch.tensor([[False] * 4, [False, False, True, True], [False, False, False, True]])
    for model, where in ((copy.deepcopy(layer), ""), (nn.TransformerEncoder(layer, 2), "layers.*.")):
        model = model.double().eval()
        whole = copy.deepcopy(model)
        sch = create_schedule(model)
        sch.schedule[f"{where}linear1"].column()
        sch.schedule[f"{where}linear2"].row()
        split, _ = build(sch)
        with torch.no_grad():
            found, expected = (m(x, src_key_padding_mask=missing)[~missing] for m in (split, whole))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


CASES = [channels, several_inputs, names_of_inputs, tables, taught, several_names, parameters, without_gradients]


def every() -> None:
    for case in CASES:
        torch.manual_seed(0)
        case()


def test_modules_that_nobody_has_described(tmp_path: Path) -> None:
    run_ranks(every, 2, tmp_path)
