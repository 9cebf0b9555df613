"""check() over dp: ranks have rows of their own, so exchanges between them mix examples, and only few are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.schedule_toys import B, H, Toy, batch, write
from torch import Tensor, nn

from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.core.placements import PlacementError


class Contrast(nn.Module):
    """Each row is to be like its own second view, and unlike those of all other rows, on whatever rank they are."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.all_rows, self.head = nn.Linear(H, 8), nn.Identity(), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.tower(x), self.all_rows(self.tower(y))
        return (a @ b.t()).logsumexp(-1).mean()


def rows() -> dict[str, Tensor]:
    return {"x": torch.zeros(B, H), "y": torch.zeros(B, H)}


def over_dp(on: str, mode: str, op: Any, model: nn.Module | None = None, **more: Any) -> Schedule:
    s = schedule(model or Toy(), Mesh.sizes(tp=2, dp=2))
    if model is None:
        write(s)
    s[on].sync(mode, op, over="dp", **more)
    return s


@pytest.mark.parametrize(
    "on, mode, op, more, code",
    [
        ("norm", "fwd_pre", "copy", {}, "E10"),
        ("norm", "bwd_post", "all_reduce", {}, "E10"),
        ("blocks.0", "fwd_post", "all_reduce", {}, "E10"),
        ("blocks.0.mlp", "fwd_pre", "scatter", {"axis": 0}, "E10"),
        ("blocks.0.mlp", "fwd_pre", "all_gather", {"axis": 0}, "E"),
        ("norm", "fwd_post", "all_gather", {"axis": 1}, "E10"),
        ("embed", "fwd_post", "reduce_scatter", {"axis": 0}, "E10"),
        ("head", "fwd_post", "all_gather", {"axis": 0}, "E"),
    ],
)
def test_what_mixes_the_rows_of_ranks_is_refused(on: str, mode: str, op: str, more: dict[str, Any], code: str) -> None:
    s = over_dp(on, mode, op, **more)
    with pytest.raises(PlacementError) as caught:
        s.check(batch())
    text = str(caught.value)
    assert on.removesuffix(".mlp") in text and f"{s.directives[-1].where}" in text and code in text, text


@pytest.mark.parametrize("guess, verified", [(False, False), (True, False), (False, True)])
def test_apply_looks_too(guess: bool, verified: bool) -> None:
    """What each rank computes of its own batch comes back mixed with others' rows, which verify(), with one batch for all, cannot see."""
    s = over_dp("blocks.0.mlp", "fwd_pre", "scatter", axis=0)
    s["blocks.0.mlp"].sync("fwd_post", "all_gather", axis=0, grad="slice", over="dp")
    with pytest.raises(PlacementError, match="rows of different ranks have nothing to do with each other"):
        s._verified = list(s.directives) if verified else None
        s.apply(batch(), guess=guess)


def test_rows_of_all_ranks_may_be_gathered_and_the_adjoint_is_worked_out() -> None:
    s = over_dp("all_rows", "fwd_post", "all_gather", Contrast(), axis=0)
    report = s.check(rows())
    assert report.warnings == [] and report.derived == {0: "reduce_scatter"}


def test_an_adjoint_that_leaves_gradients_to_nobody_is_refused() -> None:
    s = over_dp("all_rows", "fwd_post", "all_gather", Contrast(), axis=0, grad="slice")
    with pytest.raises(PlacementError, match="E6"):
        s.check(rows())


def test_what_it_does_not_know_of_rows_is_a_warning() -> None:
    class Sorted(Toy):
        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            return super().forward(ids[torch.argsort(ids[:, 0])])

    s = schedule(Sorted(), Mesh.sizes(tp=2, dp=2))
    write(s)
    s["norm"].sync("fwd_post", lambda x, group: x, over="dp", layouts="S(0)->S(0)")
    report = s.check(batch())
    assert len(report.warnings) == 1 and report.warnings[0].startswith(
        "norm: what sync does over dp was not followed (test_schedule_check_dp.py:"
    )
