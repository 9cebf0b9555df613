"""Rules of layouts for every spelling of a call: numpy's words, numbers by place, no batch, results that are whole numbers."""

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
AXIS: dict[str, Any] = {"axis": -1}  # of which types of torch.cat do not know
OfShares = Callable[[Tensor, Tensor], Tensor]
OfSums = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """``of_shares`` gets what is split and what is whole and has no gradient, ``of_sums`` partial sums."""

    def __init__(self, of_shares: OfShares, of_sums: OfSums) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, WIDE), nn.Linear(WIDE, H, bias=False)
        self.end = nn.Identity()
        self.of_shares, self.of_sums = of_shares, of_sums

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.of_sums(self.down(self.of_shares(self.up(x), x))))  # type: ignore[no-any-return]


def check(of_shares: OfShares = lambda h, x: h, of_sums: OfSums = lambda y: y) -> None:
    s = schedule(Model(of_shares, of_sums), Mesh.sizes(tp=2))
    s["up"].column()
    s["down"].shard("weight", 1)
    s["end"].sync("fwd_pre", "all_reduce")
    s.check({"x": torch.zeros(B, S, H)})


def wide(x: Tensor) -> Tensor:
    return F.pad(x, (0, WIDE - H))


@pytest.mark.parametrize(
    "of_shares",
    [
        lambda h, x: h - h.mean(axis=1, keepdims=True) + h.softmax(axis=1),
        lambda h, x: h * h.var(1, True)[:, None],  # True is unbiased here, not keepdim
        lambda h, x: h * torch.quantile(h, torch.tensor([0.1, 0.2]), 1)[0][:, None],
        lambda h, x: h + h.permute(0, 2, 1)[0, :, torch.tensor([1, 0, 2, 3, 4])].T,  # the number picks first
        lambda h, x: torch.max(x[..., :1], h),
        lambda h, x: F.avg_pool1d(h[0].T, 3, 1, 1).T[None] + h,
        lambda h, x: F.dropout1d(h.transpose(1, 2)).transpose(1, 2) + F.dropout1d(h[0].T).T,  # whole channels are cut
        lambda h, x: F.dropout1d(h, 0.0) + F.dropout2d(h[..., None], training=False).squeeze(-1),
        lambda h, x: h * torch.embedding(x[0], (h > 0).long(), -1, False).sum(-1),
    ],
)
def test_spellings_of_what_each_rank_may_do(of_shares: OfShares) -> None:
    check(of_shares)


def test_what_may_be_done_to_partial_sums() -> None:
    check(of_sums=lambda y: F.interpolate(F.avg_pool1d(F.pad(y, (0, 0, 1, 1)), 3, 1, 1), 8, mode="linear")[:, 1:-1].to(torch.float64) / 2)


@pytest.mark.parametrize(
    ("of_shares", "words"),
    [
        (lambda h, x: torch.cat([h, h], **AXIS).sum(-1, keepdim=True) + h, "cat: joined along the cut dim.*E10"),
        (lambda h, x: torch.concat([h, h], -1).sum(-1, keepdim=True) + h, "concat: joined along the cut dim.*E10"),
        (lambda h, x: h * wide(x).gather(1, (h > 0).long()), "gather: ranks would pick from the same rows.*E10"),
        (
            lambda h, x: torch.zeros(B, S, WIDE).scatter_add(-1, (h > 0).long(), h).sum(-1, keepdim=True) + h,
            "scatter_add: .*shares of all ranks.*E10",
        ),
        (lambda h, x: F.avg_pool1d(h[0], 3, 1, 1)[None].expand(B, -1, -1), "pool1d: a window reaches.*E10"),
        (lambda h, x: F.dropout1d(h), "dropout1d: a channel is dropped as a whole.*E10"),
        (lambda h, x: F.dropout3d(h[..., None]).squeeze(-1), "dropout3d: a channel is dropped as a whole.*E10"),
        (lambda h, x: h * F.embedding((h > 0).long(), x[0], scale_grad_by_freq=True).sum(-1), "embedding: max_norm and.*E10"),
        (lambda h, x: h * F.embedding((h > 0).long(), x[0].clone(), None, 1.0).sum(-1), "embedding: max_norm and.*E10"),
        (lambda h, x: h * torch.embedding(x[0], (h > 0).long(), -1, True).sum(-1), "embedding: max_norm and.*E10"),
    ],
)
def test_spellings_of_what_no_rank_may_do_by_itself(of_shares: OfShares, words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        check(of_shares)


def filled(h: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    z = torch.zeros(h.shape)
    write(z)
    return h + z


@pytest.mark.parametrize(
    "of_shares",
    [
        lambda h, x: filled(h, lambda z: z.__setitem__((..., 0), 1.0)),
        lambda h, x: filled(h, lambda z: z.__setitem__((..., slice(2)), torch.ones(2))),
        lambda h, x: filled(h, lambda z: z[..., 0].fill_(1.0)),
        lambda h, x: filled(h, lambda z: z.narrow(-1, 0, 2).add_(1.0)),
        lambda h, x: filled(torch.zeros(B, S, WIDE), lambda z: z.select(-1, 0).fill_(1.0))[..., : h.shape[-1]] + h,
        lambda h, x: filled(torch.zeros(B, S, WIDE), lambda z: z.__setitem__((..., 0), 1.0))[..., : h.shape[-1]] + h,
        lambda h, x: h / torch.ones(h.shape).sum(-1, keepdim=True),  # each rank counts its own
    ],
)
def test_what_was_filled_with_one_value_may_not_tell_ranks_apart(of_shares: OfShares) -> None:
    with pytest.raises(PlacementError, match=r"\(E(10|3|11)\)"):
        check(of_shares)


def test_what_was_filled_with_one_value_may_be_filled_alike_on_all_ranks() -> None:
    check(lambda h, x: filled(h, lambda z: z.__setitem__((slice(None), 0), 1.0)))
    check(lambda h, x: filled(h, lambda z: z[:, 1:].add_(h[:, 1:])))


def test_random_numbers_for_shares_are_those_of_dropout() -> None:
    s = schedule(Model(lambda h, x: h + torch.randn_like(h), lambda y: y), Mesh.sizes(tp=2))
    s["up"].column()
    s["down"].row()
    assert "E14" in str(s.check({"x": torch.zeros(B, S, H)}))


@pytest.mark.parametrize(
    "of_shares",
    [
        lambda h, x: F.unfold(h.mT[:, None], 3, padding=1).sum(1).unflatten(-1, (-1, S)).mT,  # windows reach over the ends of shares
        lambda h, x: F.group_norm(h.mT, 3).mT,
    ],
)
def test_functions_that_share_a_name_are_asked_about(of_shares: OfShares) -> None:
    with pytest.raises(NotFollowed, match="it is not known what this does"):
        check(of_shares)


@pytest.mark.parametrize(
    "of_sums",
    [
        lambda y: F.max_pool1d(y, 3, 1, 1),
        lambda y: F.adaptive_max_pool1d(y, H),
        lambda y: F.pad(y, (0, 1), value=1.0)[..., :-1],
        lambda y: torch.count_nonzero(y, -1),
        lambda y: y.nansum(-1),
        lambda y: y.to(torch.int),
        lambda y: y.type_as(torch.ones(1, dtype=torch.long)),
        lambda y: torch.div(y, 2, rounding_mode="floor"),
    ],
)
def test_what_is_no_sum_of_parts(of_sums: OfSums) -> None:
    with pytest.raises(PlacementError, match=r"is a partial sum on each rank.*E3"):
        check(of_sums=of_sums)


@pytest.mark.parametrize(
    "of_shares, numbers",
    [
        (lambda h, x: h / h.shape[-1], "6 where the whole model has 12"),
        (lambda h, x: h * h[0, 0].numel() ** -0.5, "0.408248 where the whole model has 0.288675"),
        (lambda h, x: 2 * h + torch.add(h, h, alpha=h.size(2)), "6 where the whole model has 12"),
    ],
)
def test_numbers_that_are_made_of_a_size_of_a_share(of_shares: OfShares, numbers: str) -> None:
    with pytest.raises(PlacementError, match=rf"computes with {numbers}: .*E11"):
        check(of_shares)


class Groups(nn.Module):
    """Norms with a number of groups that is written down: half as many channels would be in each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.shift = nn.Conv1d(2, 8, 1), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(self.up(x), 2, self.scale, self.shift)


def test_a_number_of_groups_that_is_written_down() -> None:
    s = schedule(Groups(), Mesh.sizes(tp=2))
    s["up"].column()
    s[""].shard("scale", 0)
    s[""].shard("shift", 0)
    with pytest.raises(NotFollowed, match="group_norm: it is not known"):
        s.check({"x": torch.zeros(B, 2, 5)})


class Keys(nn.Module):
    """Two heads, for four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.k(x).unflatten(-1, (-1, 4)).sum(2)  # type: ignore[no-any-return]


def test_a_sum_over_heads_that_several_ranks_have() -> None:
    s = schedule(Keys(), Mesh.sizes(tp=4))
    s["k"].column(heads=2, replicas=True)
    s[""].sync("fwd_post", "all_reduce")
    with pytest.raises(PlacementError, match=r"sum: 2 ranks each have the same share .* count each 2 times.*E10"):
        s.check({"x": torch.zeros(2, 3, 16)})
