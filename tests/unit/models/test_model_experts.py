"""A GPT with experts: its units, initial weights, and when the gradients of experts are complete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import tiny

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.models.experts import StackedLinear
from megatron_sp.models.gpt import GPTModel
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.parallel.layers import WeightInit, shard_specs
from megatron_sp.parallel.parallel_context import NO_EP

SHAPE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 6, "moe_shared_expert_intermediate_size": 4}


def build(**model: Any) -> GPTModel:
    return GPTModel(tiny.shape(**SHAPE, **model), KernelConfig(), seed=5, dtype=torch.float64)


def test_experts_are_units_of_their_own() -> None:
    model = build(moe_layer_freq="[1,0,1]")
    names = [unit.name for unit in model.units()]
    assert names == [
        "embedding", "decoder.layers.0", "decoder.layers.0.mlp.experts", "decoder.layers.1", "decoder.layers.2",
        "decoder.layers.2.mlp.experts", "head",
    ]  # fmt: skip
    found = [id(p) for unit in model.units() for p in unit.module.parameters()]
    assert sorted(found) == sorted(id(p) for p in model.parameters()), "every parameter is in one unit"
    assert model.units_together() == [(1, 2), (4, 5)]
    assert model.unit_order(backward=True) == [0, 1, 2, 3, 4, 5, 6, 0, 4, 5, 3, 1, 2]


def test_biases_move_towards_an_even_load() -> None:
    model = build(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    router, load = model.decoder.layers[0].mlp.router, torch.tensor([5.0, 0.0, 1.0, 2.0])
    for skip, moved in (
        (torch.tensor(True), [0.0, 0.0, 0.0, 0.0]),
        (None, [-0.5, 0.5, 0.5, 0.0]),
        (torch.tensor(False), [-1.0, 1.0, 1.0, 0.0]),
    ):
        router.update_bias(load, 0.5, skip)
        assert router.expert_bias.tolist() == moved


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full"}])
def test_experts_are_complete_before_their_block(recompute: dict[str, Any], parallel: bool) -> None:
    """So their gradients are reduced while those of attention are computed."""
    config = tiny.shape(**SHAPE, use_parallel_residual=parallel)
    model = GPTModel(config, KernelConfig(**recompute), seed=5, dtype=torch.float64)
    names, done = [unit.name for unit in model.units()], list[str]()
    tiny.loss_of(model, tiny.make_batch(config), lambda unit: done.append(names[unit])).backward()
    layers = [name for name in done if name.startswith("decoder")]
    assert layers == [f"decoder.layers.{i}{part}" for i in (2, 1, 0) for part in (".mlp.experts", "")]


def test_initial_weights_follow_from_the_number_of_an_expert() -> None:
    whole = dict(build().named_parameters())
    for rank in range(2):
        ep = replace(NO_EP, group=tiny.Rank(rank, 2))  # type: ignore[arg-type]
        part = StackedLinear(4, (6, 14), WeightInit("decoder.layers.1.mlp.experts.linear_fc1", 0.3, 5, torch.float64), bias=True, ep=ep)
        name = "decoder.layers.1.mlp.experts.linear_fc1.weight"
        assert torch.equal(part.weight, whole[name][2 * rank : 2 * rank + 2])
        assert torch.equal(part.shard_specs()["weight"].take(whole[name]), part.weight)
    assert not torch.equal(whole[name][0], whole[name][1])


def test_stacked_biases_have_no_weight_decay() -> None:
    model = build()
    specs = shard_specs(model)
    names = {id(p): n for n, p in model.named_parameters()}
    for unit in model.units():
        flat = FlatUnit(unit.name, [(names[id(p)], p) for p in unit.module.parameters()], specs)
        for slot in flat.slots:
            assert slot.decayed == (slot.name.endswith("weight") and "layernorm" not in slot.name), slot.name


def test_a_dense_model_is_as_it_was() -> None:
    """Nothing of experts changes names or values of a model without any."""
    dense = GPTModel(tiny.BASE, KernelConfig(), seed=5, dtype=torch.float64)
    some = build(moe_layer_freq="[0,1,0]")
    for name, param in dense.named_parameters():
        if not name.startswith("decoder.layers.1.mlp"):
            assert torch.equal(param, dict(some.named_parameters())[name]), name
    assert isinstance(tiny.BASE, ModelConfig) and not tiny.BASE.has_experts
