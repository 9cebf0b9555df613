"""A model that a schedule in Slapo's spelling has split, against the whole one, in fp64: the result and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_sp.schedule.slapo import SlapoSchedule, build, create_schedule


def weighted(y: Tensor) -> Tensor:
    """A loss in which no two elements weigh the same."""
    return (y * torch.linspace(-1, 1.7, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def compare(model: nn.Module, x: Tensor, write: Callable[[SlapoSchedule], None]) -> nn.Module:
    """Result, gradient of the input and of all parameters of the split model, against the whole one, in fp64."""
    model = model.double()
    whole = copy.deepcopy(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sch = create_schedule(model)
    write(sch)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), "changed before build()"
    split, optimizer = build(sch, init_weights=False)
    assert split is model and optimizer is None
    results = []
    for each in (whole, split):
        given = x.clone().requires_grad_(x.is_floating_point())
        y = each(given)
        weighted(y).backward()
        results.append((y.detach(), given.grad))
    applied = sch.schedule.applied
    assert applied is not None
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-11, atol=1e-12)
    if results[0][1] is not None:
        torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-11, atol=1e-12)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in split.named_parameters():
        assert p.grad is not None and expected[name] is not None, name
        torch.testing.assert_close(applied.whole(name, p.grad), expected[name], rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    after = applied.full_state_dict()
    for name, t in whole.state_dict().items():
        torch.testing.assert_close(after[name], t, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return split


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def lines(text: str) -> Callable[[SlapoSchedule], None]:
    """Lines of a table, such as "up column; down row; down fwd_post all_reduce".

    After the module: column (weight and bias by outputs, with the sum of the input's gradient), cut (without it), row (weight by
    inputs), part (both are used on a share of the positions), or what ``sync`` takes: mode, operation, axis.
    """

    def write(sch: SlapoSchedule) -> None:
        for line in text.split(";"):
            name, word, *more = line.split()
            if word in ("column", "cut"):
                sch[name].shard(["weight", "bias"], axis=0)
            if word == "column":
                sch[name].sync("bwd_post", "all_reduce")
            elif word == "row":
                sch[name].shard("weight", axis=1)
            elif word == "part":
                for parameter in ("weight", "bias"):
                    sch[name].annotate(parameter, "replicated_param", True)
            elif word != "cut":
                sch[name].sync(word, *more[:1], **({"axis": int(more[1])} if more[1:] else {}))

    return write
