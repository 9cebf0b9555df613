"""Recomputation and unit boundaries: gradients still land in the main_grad, and each unit is announced once, complete."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support import tiny
from support.errors import FP64, assert_law, law_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.config.schema import ModelConfig
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.parallel.forward_context import unit_boundary
from megatron_sp.parallel.recompute import recompute


@pytest.mark.parametrize("how", tiny.RECOMPUTE)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_every_unit_but_the_first_is_announced_once_with_complete_gradients(how: str, dropout: float) -> None:
    """The gradient buffer at the callback is compared with that after backward."""
    model, batches = (
        tiny.make_model(tiny.shape(hidden_dropout=dropout), **tiny.RECOMPUTE[how]),
        [tiny.make_batch(seed=seed) for seed in (0, 1, 2)],
    )
    gradients = tiny.flatten(model)
    gradients.start_step()
    for batch in batches:
        announced: list[tuple[int, Tensor]] = []
        tiny.loss_of(model, batch, lambda unit, log=announced: log.append((unit, gradients.units[unit].grads.clone()))).backward()
        assert [unit for unit, _ in announced] == [4, 3, 2, 1]  # head, blocks; the embedding is the end of backward itself
        for unit, at_callback in announced:
            assert torch.equal(at_callback, gradients.units[unit].grads), f"unit {unit} was announced before it was complete"
            assert at_callback.any()
        assert all(p.grad is None for p in model.parameters()), "a gradient went past the main_grad"


def test_a_tied_table_is_complete_only_after_the_embedding() -> None:
    """So the head's part in it must not be announced with the head: it is in the first unit."""
    model, batch = tiny.make_model(tiny.BASE), tiny.make_batch()
    gradients = tiny.flatten(model)
    gradients.start_step()
    seen: list[Tensor] = []
    tiny.loss_of(model, batch, lambda unit: seen.append(gradients.units[0].grads.clone())).backward()
    assert not torch.equal(seen[-1], gradients.units[0].grads)


def test_without_a_callback_there_is_no_boundary_in_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    assert unit_boundary(x, None, (1,)) is x
    assert unit_boundary(torch.ones(2), tiny.Announce(lambda unit: pytest.fail("no gradient flows here")), (1,)).requires_grad is False


def test_a_boundary_is_the_identity_both_ways() -> None:
    x, grad = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    calls: list[int] = []
    y = unit_boundary(x, tiny.Announce(calls.append), (7,))
    y.backward(grad)
    assert torch.equal(y, x) and torch.equal(x.grad, grad) and calls == [7]  # type: ignore[arg-type]


def test_the_function_runs_twice_and_keeps_nothing() -> None:
    calls: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return x.sin().cos()

    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = recompute(fn, x)
    # the input at most; torch 2.11 puts an empty tensor beside it
    assert len(calls) == 1 and sum(t.numel() for t in kept) <= x.numel() and all(t is x for t in kept if t.numel())
    y.sum().backward()
    want = x.detach().requires_grad_()
    fn(want).sum().backward()
    assert calls == [False, True, True]
    assert law_error(x.grad, want.grad) <= FP64  # type: ignore[arg-type]


@pytest.mark.parametrize("draws_random", [False, True])
def test_torchs_random_state_is_repeated_only_when_asked(draws_random: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(0)
    y = recompute(fn, x.exp(), draws_random=draws_random)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) == draws_random  # type: ignore[arg-type]


def test_no_recomputation_without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation of a model that trains with recomputation."""
    model = tiny.make_model(tiny.BASE, **tiny.RECOMPUTE["uniform 2"])
    monkeypatch.setattr("megatron_sp.models.language_model.recompute", lambda *a, **k: pytest.fail("recompute was called"))
    with torch.no_grad():
        tiny.loss_of(model, tiny.make_batch())


def test_a_external_layer_is_complete_at_the_boundary_too() -> None:
    """Its gradient comes through autograd's accumulation into p.grad, which must have happened when the boundary fires."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    grads: dict[int, dict[str, Tensor | None]] = {}
    x = torch.randn(4, 6, requires_grad=True)
    for i, layer in enumerate(layers):
        announce = tiny.Announce(lambda unit: grads.update({unit: {n: p.grad.clone() for n, p in layers[unit].named_parameters()}}))
        x = x + layer(unit_boundary(x, announce, (i,))).tanh()
    x.square().sum().backward()
    assert sorted(grads) == [0, 1, 2]
    for i, at_callback in grads.items():
        assert_law(at_callback, {n: p.grad for n, p in layers[i].named_parameters()}, 0.0)


class Kernels(TorchDispatchMode):
    """Counts the calls of torch's attention kernel for the CPU, forward and backward."""

    forward = backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.forward += name == "_scaled_dot_product_flash_attention_for_cpu"
        self.backward += name == "_scaled_dot_product_flash_attention_for_cpu_backward"
        return func(*args, **(kwargs or {}))


MODELS: dict[str, dict[str, Any]] = {
    "dense": {}, "window": {"window_size": 3}, "no attention dropout": {"hidden_dropout": 0.3}, "QK norm": {"qk_layernorm": True},
    "grouped, rotary": {"group_query_attention": True, "num_query_groups": 2, "position_embedding_type": "rope"},
}  # fmt: skip


def _calls(config: ModelConfig, how: dict[str, Any], mask: AttentionMask | None = None) -> tuple[int, int, dict[str, Tensor | None]]:
    """Calls of the kernel in a step, forward and backward, and the loss and every gradient."""
    model, batches = tiny.make_model(config, **how), [tiny.make_batch(seed=seed) for seed in (0, 1)]
    gradients = tiny.flatten(model)
    kernels = Kernels()
    with kernels:
        got = tiny.run_step(model, gradients, batches, **({} if mask is None else {"mask": mask}))
    return kernels.forward, kernels.backward, got


@pytest.mark.parametrize("how", ["uniform 1", "uniform 2", "block 2"])
@pytest.mark.parametrize("model", MODELS)
def test_attention_is_computed_once_and_every_bit_is_the_same(how: str, model: str) -> None:
    config, options = tiny.shape(**MODELS[model]), tiny.RECOMPUTE[how]
    plain = _calls(config, {})
    kept = _calls(config, options)
    again = _calls(config, {**options, "recompute_attention": "full"})
    assert kept[:2] == plain[:2], "as many calls of the kernel as without recomputation"
    recomputed = 2 if how == "block 2" else tiny.LAYERS
    assert again[0] == plain[0] + plain[0] // tiny.LAYERS * recomputed and again[1] == plain[1]
    for other in (again[2], plain[2]):
        assert_law(kept[2], other, 0.0)


@pytest.mark.parametrize("model", MODELS)
def test_queries_keys_and_values_are_made_again_alone(model: str) -> None:
    config = tiny.shape(**MODELS[model])
    plain, remade = _calls(config, {}), _calls(config, {"recompute_qkv": True})
    assert remade[:2] == plain[:2]
    assert_law(remade[2], plain[2], 0.0)


@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(documents=((3, 8), (8,), (2, 4, 8))),
        AttentionMask(causal=False, key_lengths=torch.tensor([5, 0, 8]), lengths=(5, 0, 8)),
    ],
    ids=["documents", "padding"],
)
def test_attention_in_segments_is_computed_once(mask: AttentionMask) -> None:
    plain, kept = _calls(tiny.BASE, {}, mask), _calls(tiny.BASE, tiny.RECOMPUTE["full"], mask)
    assert kept[:2] == plain[:2] and kept[0] > 0
    assert_law(kept[2], plain[2], 0.0)


def test_the_plain_form_is_repeated() -> None:
    """It gives no log of its sums, and so nothing of it can be kept."""
    config = tiny.shape(attention_dropout=0.2, hidden_dropout=0.1)
    plain, again = _calls(config, {}), _calls(config, tiny.RECOMPUTE["full"])
    assert plain[:2] == again[:2] == (0, 0)
    assert_law(again[2], plain[2], 0.0)


def test_what_is_kept_is_saved_by_the_recomputation() -> None:
    """So hooks on saved tensors see it: --offload-activations moves it."""
    model, batch = tiny.make_model(tiny.BASE, **tiny.RECOMPUTE["full"]), tiny.make_batch()
    gradients = tiny.flatten(model)
    gradients.start_step()
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        loss = tiny.loss_of(model, batch, gradients.unit_done)
    heads, d = tiny.BASE.num_attention_heads, tiny.BASE.kv_channels
    assert heads and d
    out, lse = torch.Size([tiny.S, tiny.B * heads, 1, d]), torch.Size([tiny.B * heads, 1, tiny.S])
    assert saved.count(out) == saved.count(lse) == tiny.LAYERS
    gradients.last_micro_batch()
    loss.backward()
    gradients.finish_step()


class _Look(torch.autograd.Function):
    """Identity that looks, in backward, which tensors are still there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[weakref.ref[Tensor]], alive: list[bool]) -> Tensor:
        ctx.seen, ctx.alive = seen, alive
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        gc.collect()
        ctx.alive.extend(ref() is not None for ref in ctx.seen)
        return grad, None, None


def test_kept_tensors_are_freed_when_the_second_pass_has_used_them() -> None:
    """Not only at the end of its backward: the recomputation lets go of what it has saved."""
    seen: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    kept = KeptTensors()

    def fn(x: Tensor) -> Tensor:
        x = _Look.apply(x, seen, alive)
        if not kept.replays:
            kept.keep("a tensor", torch.full((3,), 2.0))
            return x * 2
        (tensor,) = kept.take("a tensor")
        seen.append(weakref.ref(tensor))
        return x * tensor

    x = torch.ones(3, requires_grad=True)
    recompute(fn, x, kept=kept).sum().backward()
    assert alive == [False] and x.grad is not None and x.grad.tolist() == [2.0] * 3


def test_two_passes_that_differ_are_noticed() -> None:
    kept = KeptTensors()
    kept.keep("attention", torch.ones(1))
    kept.restore(kept.release())
    with pytest.raises(RuntimeError, match="asks for received where the forward pass has kept attention"):
        kept.take("received")
    with pytest.raises(RuntimeError, match="has kept nothing"):
        kept.take("attention")
