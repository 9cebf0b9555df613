"""Layers that treat each channel by itself, split by a schedule: what the dry run says of their results is held against numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.schedule_rule_oracle import close, taken
from torch import Tensor, nn

from megatron_sp.schedule import Mesh, schedule
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.check.dry_run import placements_of
from megatron_sp.schedule.check.follower import Axis, Follower
from megatron_sp.schedule.check.meta_copy import meta_copy
from megatron_sp.schedule.core.placements import Placement, PlacementError

CHANNELS, RANKS = 16, 2
LAYERS: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS), 1),
    (lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1, groups=8), 1),
    (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=4, bias=False), 2),
    (lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS), 3),
    (lambda: nn.ConvTranspose1d(CHANNELS, CHANNELS, 3, groups=CHANNELS), 1),
    (lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, groups=8), 2),
    (lambda: nn.ConvTranspose3d(CHANNELS, CHANNELS, 3, groups=CHANNELS), 3),
    (lambda: nn.BatchNorm1d(CHANNELS), 1),
    (lambda: nn.BatchNorm2d(CHANNELS).eval(), 2),
    (lambda: nn.BatchNorm3d(CHANNELS, track_running_stats=False), 3),
    (lambda: nn.GroupNorm(8, CHANNELS), 1),
    (lambda: nn.GroupNorm(CHANNELS, CHANNELS), 2),
    (lambda: nn.InstanceNorm1d(CHANNELS, affine=True), 1),
    (lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True), 2),
    (lambda: nn.PReLU(CHANNELS), 2),
]
BLOCKS: list[Any] = [None, 2, 4, (4, 12)]
CUTS = [
    Placement("S", 1),
    Placement("S", 1, 2),
    Placement("S", 1, 4),
    Placement("S", 1, blocks=(2, 6)),
    Placement("S", 0),
    Placement("S", 2),
    Placement("R"),
    Placement("P"),
]


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("made", "dims"), LAYERS)
def test_layers_by_channel(made: Callable[[], nn.Module], dims: int) -> None:
    torch.manual_seed(0)
    model = Around(made()).double()
    for p in model.parameters():
        nn.init.normal_(p)
    x = torch.randn(4, CHANNELS, *[4] * dims, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)
    proven = 0
    for blocks in BLOCKS:
        s = schedule(copy.deepcopy(model), Mesh.sizes(tp=RANKS))
        for name, tensor in (*model.layer.named_parameters(), *model.layer.named_buffers()):
            if tensor.ndim:
                s["layer"].shard(name, 0, blocks=blocks)
        for cut in CUTS:
            try:
                claim = claimed(model, s.directives, x, cut)
            except PlacementError:
                continue
            proven += 1
            for rank in range(RANKS):
                mine = copy.deepcopy(model)
                apply(mine, s.directives, Mesh.sizes(tp=RANKS, tp_rank=rank), 1)
                words = f"blocks={blocks}, of {cut}: claims {claim}"
                assert close(taken(expected, claim, RANKS, rank), mine(taken(x, cut, RANKS, rank)).detach()), words
    assert proven >= 2  # cut as the layer is


def claimed(model: nn.Module, directives: list[Any], x: Tensor, cut: Placement) -> Placement:
    """Raises PlacementError: the dry run refuses."""
    mesh, whole = Mesh.sizes(tp=RANKS), meta_copy(model)
    record = Follower(whole)
    with record.inside():
        whole(x.to("meta"))
    split = meta_copy(model)
    applied = apply(split, directives, mesh, 1)
    follower = Follower(split, Axis("tp", mesh.tp), {}, record.record, placements_of(applied, directives))
    share = taken(x, cut, RANKS, 0).to("meta").requires_grad_()
    follower.known[share] = cut
    with follower.inside():
        result = split(share)
    return follower.look(result).placement
