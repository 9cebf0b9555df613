"""Functions between a layer that is split by its outputs and one that is split by its inputs: which may stand there, and which may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_sp.schedule import Mesh, schedule
from megatron_sp.schedule.core.placements import NotFollowed, PlacementError

B, S, H, WIDE = 3, 5, 8, 12
Between = Callable[[Any, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.up, self.gate, self.down = nn.Linear(H, H), nn.Linear(H, WIDE), nn.Linear(H, 1), nn.Linear(WIDE, H)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.down(self.between(self, self.up(x), x))  # type: ignore[no-any-return]


def check(between: Between) -> None:
    s = schedule(Model(between), Mesh.sizes(tp=2))
    s["up"].column()
    s["down"].row()
    s.check({"x": torch.zeros(B, S, H)})


def shifted(h: Tensor, y: Tensor, *, view: bool = False) -> Tensor:
    """Written into zeros."""
    z = torch.zeros(h.shape)
    if view:
        z[:, 1:].copy_(y[:, :-1])
    else:
        z[:, 1:] = y[:, :-1]
    return z + h


def twice_seen(h: Tensor) -> Tensor:
    z = torch.zeros(h.shape)
    first, again = z[:, 1:], z[:, 1:]
    first.copy_(h[:, 1:])
    return again * h[:, 1:]


RIGHT: list[Between] = [
    lambda m, h, x: twice_seen(h),
    lambda m, h, x: h.repeat(2, 1, 1)[:B].tile((1, 1)),
    lambda m, h, x: h.sort(1)[0] + h.topk(S, 1)[0] + h.cumprod(1) + h.norm(dim=1, keepdim=True) + F.normalize(h, dim=1),
    lambda m, h, x: torch.var_mean(h, 1, keepdim=True)[1] + torch.fft.fft(h, dim=1).real + h.diff(dim=1, prepend=h[:, :1]),
    lambda m, h, x: h.index_select(1, torch.arange(S)) + h[:, [1, 0, 2, 3, 4]] + h.gather(1, torch.zeros_like(h, dtype=torch.long)),
    lambda m, h, x: h.permute(0, 2, 1)[torch.arange(B), :, torch.tensor([1, 0, 2])][:, None] + h[torch.arange(B), torch.tensor([1, 0, 2])],
    lambda m, h, x: h[torch.tensor([True, False, True])] * torch.einsum("...h,...h->...h", h, h)[:2],
    lambda m, h, x: shifted(h, h, view=True),
    lambda m, h, x: shifted(h, h) + torch.zeros_like(h).index_add(0, torch.tensor([0, 1, 1]), h) + h.new_zeros(h.shape),
    lambda m, h, x: (
        F.pad(h, (0, 0, 1, -1)) + F.avg_pool1d(h.mT, 1).mT + torch.hypot(h, h) + F.batch_norm(h.mT, None, None, training=True).mT
    ),
    lambda m, h, x: torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(1), torch.ones(1))).flatten(
        -2
    ),
]


@pytest.mark.parametrize("between", RIGHT)
def test_what_each_rank_may_do_by_itself(between: Between) -> None:
    check(between)


WRONG: list[tuple[Between, str]] = [
    (lambda m, h, x: h.sort(-1)[0], r"sort runs over that dim.*E3"),
    (lambda m, h, x: h / h.norm(dim=-1, keepdim=True), r"norm runs over that dim.*E3"),
    (lambda m, h, x: torch.cat([F.glu(h, -1)] * 2, -1), r"glu: .*blocks=2.*E8"),
    (lambda m, h, x: h.index_select(-1, torch.tensor([0])).expand_as(h), r"index_select: what an index names is on some rank.*E10"),
    (lambda m, h, x: h.gather(-1, torch.zeros_like(h, dtype=torch.long)), r"gather: what an index names is on some rank.*E10"),
    (lambda m, h, x: F.pad(h, (1, -1)), r"padded along a cut dim.*E10"),
    (lambda m, h, x: shifted(h, m.gate(x)), r"whole and used alike by all ranks.*E6"),
    (lambda m, h, x: h * m.gate(x).repeat(1, 1, h.shape[-1]), r"repeat: .*whole and used alike by all ranks.*E6"),
    (lambda m, h, x: torch.einsum("...h,...->...h", h, m.gate(x)[..., 0]), r"einsum: .*whole and used alike by all ranks.*E6"),
    (lambda m, h, x: torch.hypot(h, m.gate(x)), r"hypot: .*whole and used alike by all ranks.*E6"),
]


@pytest.mark.parametrize(("between", "words"), WRONG)
def test_what_each_rank_may_not_do_by_itself(between: Between, words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        check(between)


@pytest.mark.parametrize(
    "between",
    [
        lambda m, h, x: torch.vmap(lambda t: t.softmax(-1))(h),  # dims are others inside
    ],
)
def test_what_cannot_be_seen_is_asked_about(between: Between) -> None:
    with pytest.raises(NotFollowed, match=r"verify\(\) can tell"):
        check(between)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.deep, self.last = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.Conv2d(8, 4, 1),
        )
        self.groups = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(self.groups(self.deep(self.norm(self.first(x)))), 2))  # type: ignore[no-any-return]


def test_convolutions_by_channels() -> None:
    def made(*, norm: bool = True, row: bool = True) -> None:
        s = schedule(Pictures(), Mesh.sizes(tp=2))
        s["first"].column()
        s["{deep,groups}"].column()
        if norm:
            s["norm"].column()
        if row:
            s["last"].row()
        s.check({"x": torch.zeros(2, 3, 12, 12)})

    made()
    with pytest.raises(PlacementError, match=r"norm \(BatchNorm2d\): batch_norm"):
        made(norm=False)
    with pytest.raises(PlacementError, match=r"last \(Conv2d\): conv2d"):
        made(row=False)


class Scores(nn.Module):
    """Bloom's way: scores [b * n, s, s] are added to what is said by name; a loss over times that a GPU-less copy has no numbers for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q = self.q(x).view(1, S, -1, 2).transpose(1, 2).flatten(0, 1)
        p = bias.baddbmm(batch1=q, batch2=q.mT).softmax(-1)
        y = self.o((p @ q).unflatten(0, (1, -1)).transpose(1, 2).flatten(2))
        return F.ctc_loss(y.log_softmax(-1), torch.ones(S, 2, dtype=torch.long), torch.tensor([1]), torch.tensor([1]))


def test_scores_with_a_bias_for_each_head() -> None:
    def made(scatters: bool) -> None:
        s = schedule(Scores(), Mesh.sizes(tp=2))
        s["q"].column()
        s["o"].row()
        if scatters:
            s[""].sync("fwd_pre", "scatter", arg="bias", axis=0)
        s.check({"x": torch.zeros(1, S, H), "bias": torch.zeros(4, S, S)})

    made(True)
    with pytest.raises(PlacementError, match=r"baddbmm: sizes do not fit.*E10"):
        made(False)


class Sinks(nn.Module):
    """A number for each head, of which a rank may have one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.sinks, self.odd = nn.Linear(H, H), nn.Linear(H, H), nn.Parameter(torch.zeros(2)), 2

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        q = q * 2 if self.odd == 2 else q  # steps are no longer those of the whole model
        return self.o((q + self.sinks.view(1, -1, 1, 1)).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_share_of_one() -> None:
    s = schedule(Sinks(), Mesh.sizes(tp=2))
    s["q"].column()
    s["o"].row()
    s[""].shard("sinks", 0).set("odd", divide="tp")
    s.check({"x": torch.zeros(B, S, H)})


class Channels(nn.Module):
    """A convolution, something that treats each channel by itself, and a convolution over channels."""

    def __init__(self, by_channel: nn.Module, dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.middle, self.last = conv(3, 16, 1), by_channel, conv(16, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


BY_CHANNEL: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: nn.Conv1d(16, 16, 3, padding=1, groups=16), 1),
    (lambda: nn.Conv1d(16, 16, 3, padding=1, groups=8), 1),
    (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), 2),
    (lambda: nn.Conv3d(16, 16, 3, padding=1, groups=16), 3),
    (lambda: nn.ConvTranspose1d(16, 16, 3, groups=16), 1),
    (lambda: nn.ConvTranspose2d(16, 16, 3, groups=16), 2),
    (lambda: nn.ConvTranspose3d(16, 16, 3, groups=16), 3),
    (lambda: nn.BatchNorm1d(16), 1),
    (lambda: nn.BatchNorm2d(16).eval(), 2),
    (lambda: nn.GroupNorm(8, 16), 1),
    (lambda: nn.InstanceNorm1d(16, affine=True), 1),
    (lambda: nn.PReLU(16), 2),
]


@pytest.mark.parametrize(("made", "dims"), BY_CHANNEL)
@pytest.mark.parametrize(("first", "middle"), [(first, middle) for first in (None, 2, (4, 12)) for middle in (None, 2, (4, 12))])
def test_channels_meet_what_is_cut_as_they_are(made: Callable[[], nn.Module], dims: int, first: Any, middle: Any) -> None:
    model = Channels(made(), dims)
    s = schedule(model, Mesh.sizes(tp=2))
    s["first"].column(blocks=first)
    s["middle"].shard("weight", 0, blocks=middle)
    for name, tensor in (*model.middle.named_parameters(), *model.middle.named_buffers()):
        if name != "weight" and tensor.ndim:
            s["middle"].shard(name, 0, blocks=middle)
    s["last"].shard("weight", 1, blocks=first)
    s["last"].sync("fwd_post", "all_reduce")
    batch = {"x": torch.zeros(2, 3, *[4] * dims)}
    if first == middle:
        s.check(batch)
        return
    with pytest.raises(PlacementError, match=r"E10"):
        s.check(batch)
    with pytest.raises(PlacementError, match=r"E10"):
        s.apply(batch)
