"""Activations in host memory as a mechanism: what moves, what stays, when it is where, and what becomes of host memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support import tiny
from support.errors import FP64, assert_law
from torch import Tensor

from megatron_sp.ops import allocator
from megatron_sp.parallel import offload as offload_module
from megatron_sp.parallel.offload import ActivationOffload

CPU = torch.device("cpu")


class Recorded(offload_module._Moved):
    """Notes which block starts or ends a move."""

    log: list[tuple[str, int]]
    count: int

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number, Recorded.count = Recorded.count, Recorded.count + 1

    def _note(self, name: str) -> None:
        Recorded.log.append((name, self.number))

    def start_out(self) -> None:
        self._note("out")
        super().start_out()

    def finish_out(self) -> None:
        self._note("gone")
        super().finish_out()
        assert all(storage.nbytes() == 0 for storage in self.storages)

    def start_in(self) -> None:
        self._note("in")
        super().start_in()

    def finish_in(self) -> None:
        self._note("there")
        super().finish_in()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    Recorded.log, Recorded.count = [], 0
    monkeypatch.setattr(offload_module, "_Moved", Recorded)
    return Recorded.log


@pytest.mark.parametrize("how", ["none", "full"])
def test_one_block_on_its_way_at_a_time(how: str, log: list[tuple[str, int]]) -> None:
    model = tiny.make_model(tiny.shape(num_layers=4), **tiny.RECOMPUTE[how], offload_activations=True)
    loss = tiny.loss_of(model, tiny.make_batch())
    assert log == [("out", 0), ("gone", 0), ("out", 1), ("gone", 1), ("out", 2), ("gone", 2)], "the last block stays"
    log.clear()
    loss.backward()
    assert log == [("in", 2), ("there", 2), ("in", 1), ("there", 1), ("in", 0), ("there", 0)]


def test_without_autograd_nothing_moves(log: list[tuple[str, int]]) -> None:
    model = tiny.make_model(tiny.BASE, offload_activations=True)
    with torch.no_grad():
        tiny.loss_of(model, tiny.make_batch())
    assert log == []


@pytest.mark.parametrize("large", [False, True], ids=["emptied", "of the arena"])
def test_two_passes_at_once_and_one_without_a_backward(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory belongs to a pass, is used again, and comes back from a pass that is dropped."""
    if large:  # memory of the arena cannot be emptied
        monkeypatch.setattr(allocator, "_MIN_BYTES", 1)
    batches = [tiny.make_batch(seed=seed) for seed in range(3)]
    plain, model = (tiny.make_model(tiny.BASE, **kernels) for kernels in ({}, {"offload_activations": True}))
    for batch in batches[:2]:
        tiny.loss_of(plain, batch).backward()
    losses = [tiny.loss_of(model, batch) for batch in batches]
    pool = model._offload
    assert pool is not None and not any(pool._free.values())
    total = pool.num_bytes
    losses[1].backward()
    losses[0].backward()
    got = {n: p.grad for n, p in model.named_parameters()}
    assert_law(got, {n: p.grad for n, p in plain.named_parameters()}, FP64)
    assert _free(pool) * 3 == total * 2
    losses.clear()
    gc.collect()
    assert _free(pool) == total
    tiny.loss_of(model, batches[0]).backward()
    assert pool.num_bytes == total


def _free(pool: ActivationOffload) -> int:
    return sum(buffer.numel() for buffers in pool._free.values() for buffer in buffers)


def test_what_is_saved_twice_moves_once_and_shared_tensors_and_parameters_stay() -> None:
    pool, shared = ActivationOffload(CPU), torch.full((5,), 2.0, dtype=torch.float64)
    flat = torch.nn.Parameter(torch.arange(1.0, 11.0, dtype=torch.float64))
    run = pool.forward_pass([shared])
    kept: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        wide = x.exp()  # saves its result
        kept.append(wide[1:])
        return (wide * wide * shared * flat[:5]).sum() + x

    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    y = run.run(block, x * 1.0, lambda: [flat], last=False)
    z = run.run(lambda t: t * 3.0, y, tuple, last=True)
    assert kept[0].untyped_storage().nbytes() == 0 and shared.sum() == 10 and flat.sum() == 55
    z.sum().backward()
    want = x.detach().clone().requires_grad_()
    (block(want * 1.0) * 3.0).sum().backward()
    assert torch.equal(x.grad, want.grad)  # type: ignore[arg-type]
    assert torch.equal(kept[0], x.detach().exp()[1:]), "a view that nobody saved has its numbers again"


def test_what_a_block_saved_is_gone_with_its_backward() -> None:
    """The hooks must not keep what they have seen."""
    pool, sizes = ActivationOffload(CPU), list[int]()
    run, x = pool.forward_pass(()), torch.ones(1000, requires_grad=True)

    def spy(t: Tensor) -> Tensor:
        t.register_hook(lambda grad: sizes.append(sum(s() is not None for s in alive)) or None)
        return t

    alive: list[Any] = []

    def block(x: Tensor) -> Tensor:
        a = spy(x.exp()).sin()
        b = a.cos()
        alive.append(weakref.ref(a.untyped_storage()))
        return b * 2

    y = run.run(block, x * 1.0, tuple, last=False)
    run.run(lambda t: t * 3.0, y, tuple, last=True).sum().backward()
    assert sizes == [0], "cos saved it, and is done; exp, which saved something too, is still to come"
