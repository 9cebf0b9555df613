"""Flat buffers: where things lie, what stays zero, and gradients from every side."""

from __future__ import annotations

import math

import pytest
import torch
from support import tiny
from support.errors import FP64, assert_law, law_error
from support.tiny import Alone
from torch import Tensor, nn

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.optim.flat import FlatUnit, Zero, refresh_params, squared_norm
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.parallel.linear import row_linear as linear

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Odd(nn.Module):
    """Parameters of awkward sizes, decayed and not in turn, one of them frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.full((), 1.5, dtype=dtype))
        self.matrix = nn.Parameter(torch.arange(15, dtype=dtype).view(3, 5))
        self.bias = nn.Parameter(torch.arange(7, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)
        self.one = nn.Parameter(torch.full((1, 1), 2.5, dtype=dtype))
        self.cube = nn.Parameter(torch.arange(12, dtype=dtype).view(3, 2, 2))


class Second(Alone):
    """The second rank of two."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def padding(unit: FlatUnit) -> Tensor:
    """Which elements of the buffers belong to nobody."""
    free = torch.ones(unit.params.numel(), dtype=torch.bool)
    for slot in unit.slots:
        free[slot.start : slot.start + slot.param.numel()] = False
    return free


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout(dtype: torch.dtype) -> None:
    module = Odd(dtype)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    unit = FlatUnit("odd", module.named_parameters())
    assert [s.name for s in unit.slots] == ["matrix", "one", "cube", "scalar", "bias"]  # decayed first, each kind in its order
    assert [s.decayed for s in unit.slots] == [True, True, True, False, False]
    assert all(s.start * dtype.itemsize % 16 == 0 for s in unit.slots)
    assert unit.num_decayed == unit.slots[3].start
    assert all(b.start >= a.start + a.param.numel() for a, b in zip(unit.slots, unit.slots[1:], strict=False))
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        inside = p.untyped_storage().data_ptr() == unit.params.untyped_storage().data_ptr()
        assert inside == (name != "frozen")
    assert unit.params.dtype == dtype and unit.params.data_ptr() % 16 == 0
    assert unit.grads.dtype == unit.master.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    assert (unit.master.data_ptr() == unit.params.data_ptr()) == (dtype.itemsize > 2)
    assert padding(unit).any() and not unit.params[padding(unit)].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_and_parameters_are_refreshed_from_each_other(dtype: torch.dtype) -> None:
    module = Odd(dtype)
    unit = FlatUnit("odd", module.named_parameters())
    unit.master.add_(1 / 3)
    refresh_params([unit])
    assert torch.equal(module.bias, (torch.arange(7, dtype=torch.float32) + 1 / 3).to(dtype))
    module.bias.data.fill_(7.0)
    unit.refresh_master()
    assert (unit.slots[4].view(unit.master) == 7).all()


@pytest.mark.parametrize("params", [[], [("frozen", nn.Parameter(torch.ones(2, 3), requires_grad=False))]])
def test_a_unit_with_nothing_to_train(params: list[tuple[str, nn.Parameter]]) -> None:
    unit = FlatUnit("frozen", params)
    assert unit.grads.numel() == unit.params.numel() == unit.num_decayed == 0 and not unit.slots
    gradients = FlatGradients([unit, FlatUnit("odd", Odd().named_parameters())], Alone())  # type: ignore[arg-type]
    gradients.start_step()
    gradients.last_micro_batch()
    gradients.unit_done(0)
    gradients.finish_step()


def test_mixed_dtypes_in_a_unit_are_refused_by_name() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)])
    with pytest.raises(AssertionError, match=r"1\.weight is torch\.float64, the unit torch\.float32"):
        FlatUnit("mixed", module.named_parameters())


def test_a_parameter_without_a_gradient_in_this_step_gets_zero() -> None:
    """And not what the step before left there."""
    module = Odd()
    unit = FlatUnit("odd", module.named_parameters())
    gradients = FlatGradients([unit], Alone())  # type: ignore[arg-type]
    unit.grads.fill_(float("nan"))
    unit.grads[padding(unit)] = 0
    gradients.start_step()
    module.matrix.sum().backward()
    gradients.finish_step()
    got = {s.name: s.view(unit.grads) for s in unit.slots}
    assert (got.pop("matrix") == 1).all()
    assert all(not g.any() for g in got.values())
    assert not unit.grads[padding(unit)].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_external_layers_come_through_autograd(dtype: torch.dtype) -> None:
    """Beside one of ours, over several micro-batches and steps; 16-bit ones add up in fp32."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"ours": nn.Linear(4, 4), "foreign": nn.Linear(4, 4)}).to(dtype)
    unit = FlatUnit("both", module.named_parameters())
    gradients = FlatGradients([unit], Alone())  # type: ignore[arg-type]
    for step in range(2):
        gradients.start_step()
        want = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in module.named_parameters()}
        for i in range(30):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + i)).to(dtype)
            linear(module["foreign"](x), module["ours"].weight, module["ours"].bias, main_grad=gradients).sum().backward()
            exact = torch.autograd.functional.vjp(
                lambda *w, x=x: _two(x.double(), w), tuple(p.double() for p in module.parameters()), torch.ones((), dtype=torch.float64)
            )[1]
            want = {n: total + g for (n, total), g in zip(want.items(), exact, strict=True)}
        gradients.finish_step()
        assert module["foreign"].weight.grad is None
        # 30 gradients of 16 bits in a 16-bit running sum would be off by several epsilons of the sum
        tolerance = {torch.float64: FP64, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
        assert_law({s.name: s.view(unit.grads) for s in unit.slots}, want, tolerance)


def _two(x: Tensor, w: tuple[Tensor, ...]) -> Tensor:
    ours_weight, ours_bias, foreign_weight, foreign_bias = w
    return ((x @ foreign_weight.t() + foreign_bias) @ ours_weight.t() + ours_bias).sum()


def test_a_parameter_used_by_both_kinds_of_layers() -> None:
    module = nn.Linear(4, 4, dtype=torch.float64)
    unit = FlatUnit("shared", module.named_parameters())
    gradients = FlatGradients([unit], Alone())  # type: ignore[arg-type]
    x = torch.randn(3, 4, dtype=torch.float64)
    gradients.start_step()
    (linear(x, module.weight, module.bias, main_grad=gradients).sum() + 2 * module(x).sum()).backward()
    gradients.finish_step()
    assert law_error(unit.slots[0].view(unit.grads), 3 * x.sum(0).expand(4, 4)) <= FP64


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_overwrites_the_step_before(overlap: bool) -> None:
    model, batches = tiny.make_model(tiny.BASE), [tiny.make_batch(seed=seed) for seed in (0, 1, 2)]
    gradients = tiny.flatten(model, overlap=overlap)
    for unit in gradients.units:
        unit.grads[~padding(unit)] = float("nan")
    for some in (batches[:1], batches[1:]):
        assert_law(tiny.run_step(model, gradients, some), tiny.reference_step(model, some), FP64)
    assert all(not unit.grads[padding(unit)].any() for unit in gradients.units)


def test_units_are_reduced_from_the_callback_on_the_last_micro_batch_only() -> None:
    model, batches = tiny.make_model(tiny.BASE), [tiny.make_batch(seed=seed) for seed in (0, 1)]
    gradients = tiny.flatten(model)
    reduced: list[int] = []
    reduce = gradients._reduce
    gradients._reduce = lambda index: (reduced.append(index), reduce(index))[1]  # type: ignore[method-assign]
    gradients.start_step()
    tiny.loss_of(model, batches[0], gradients.unit_done).backward()
    assert reduced == []
    loss = tiny.loss_of(model, batches[1], gradients.unit_done)
    gradients.last_micro_batch()
    loss.backward()
    assert reduced == [4, 3, 2, 1]
    gradients.finish_step()
    assert reduced == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_2_and_3_reduce_in_every_micro_batch_from_the_callback(stage: int) -> None:
    """Under the rest of the backward pass, and not after it."""
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    units = [FlatUnit(str(i), layer.named_parameters(), zero=Zero(stage)) for i, layer in enumerate(module)]
    gradients = FlatGradients(units, SINGLE_RANK)
    gradients.start_step()
    for _ in range(2):
        gradients.unit_done(1)
        assert gradients._reduced == {1}
        gradients.finish_micro_batch()


def test_stage_3_takes_parameters_away_when_a_unit_is_built() -> None:
    """Frozen ones too: what is left is this rank's range."""
    module = Odd()
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    unit = FlatUnit("odd", module.named_parameters(), zero=Zero(3, Second()))  # type: ignore[arg-type]
    assert all(p.numel() == 0 for p in module.parameters())
    assert unit.frozen is not None and unit.local_frozen is not None and unit.params is None
    assert unit.local_params.untyped_storage().nbytes() == 4 * unit.numel // 2 == 4 * unit.local_params.numel()
    assert unit.local_frozen.numel() == unit.frozen.numel // 2
    whole = torch.cat([torch.zeros_like(unit.local_params), unit.local_params])
    slot = unit.slots[-1]
    assert torch.equal(slot.view(whole), values[slot.name]), "the second rank has the second half"


def test_misuse_is_found() -> None:
    gradients = FlatGradients([FlatUnit("odd", Odd().named_parameters())], Alone())  # type: ignore[arg-type]
    gradients.start_step()
    gradients.last_micro_batch()
    gradients.unit_done(0)
    with pytest.raises(AssertionError, match="completed twice"):
        gradients.unit_done(0)
    with pytest.raises(AssertionError, match=r"finish_step\(\) was not called"):
        gradients.start_step()


def test_squared_norm_of_many_few_large_small_and_bad_numbers() -> None:
    for numel in (0, 1, 1000, 4095, 4096, 4097, 200_000):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 3
        assert float(squared_norm(x)) == pytest.approx(float(x.double().square().sum()), rel=2e-7)
        assert squared_norm(x).dtype == torch.float64
    assert float(squared_norm(torch.full((7_000_000,), 1e17))) == pytest.approx(7e40, rel=1e-5)  # the sum is beyond fp32's largest number
    assert float(squared_norm(torch.full((70_000,), 1e-17))) == pytest.approx(7e-30, rel=1e-5)
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 4096):
            x = torch.zeros(4097)
            x[place] = bad
            assert not math.isfinite(float(squared_norm(x)))


def test_gradients_take_no_memory_between_steps_and_a_claim_ahead_must_be_settled() -> None:
    unit = FlatUnit("unit", [("w", nn.Parameter(torch.ones(3, 5))), ("b", nn.Parameter(torch.ones(5)))])
    weight = unit.slots[0].param
    main_grad = FlatGradients([unit], Alone())  # type: ignore[arg-type]
    main_grad.start_step()
    assert unit._grads is None
    view = main_grad.reserve_ahead(weight)
    assert view is not None and main_grad.reserve_ahead(weight) is None, "there is a gradient in it already"
    with pytest.raises(AssertionError, match="not settled"):
        main_grad.reserve(weight)
    view.fill_(2.0)
    main_grad.finish(weight)
    reserved = main_grad.reserve(weight)
    assert reserved is not None and not reserved[1] and torch.equal(reserved[0], torch.full((3, 5), 2.0))
    reserved[0].add_(1.0)
    main_grad.finish_step()
    assert torch.equal(unit.grads, torch.tensor([3.0] * 15 + [0.0] * 17)), "padding and what got no gradient are zero"
    main_grad.start_step()
    assert unit._grads is None


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_in_two_units_is_refused(stage: int) -> None:
    shared = nn.Parameter(torch.ones(3, 3))
    units = [FlatUnit(unit, [(f"{unit}.weight", shared)], zero=Zero(stage)) for unit in ("first", "second")]
    with pytest.raises(ValueError, match=r"second\.weight is in two units, first and second"):
        FlatGradients(units, SINGLE_RANK)
