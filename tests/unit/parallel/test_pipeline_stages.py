"""Layers are dealt to stages so that the slowest is as fast as it can be."""

from __future__ import annotations

import itertools

import pytest

from megatron_sp.config.schema import ModelConfig, ParallelConfig
from megatron_sp.estimate.layout import layers_of_stages
from megatron_sp.parallel.pipeline_stages import cut_model, deal_layers, deal_unlike_layers, whole_model


def test_stages_by_hand() -> None:
    stages = cut_model((2, 1, 3))
    assert [(s.start, s.stop, len(s), s.is_first, s.is_last) for s in stages] == [
        (0, 2, 2, True, False), (2, 3, 1, False, False), (3, 6, 3, False, True),
    ]  # fmt: skip
    whole = whole_model(5)
    assert whole.is_first and whole.is_last and len(whole) == 5
    assert deal_layers(8, 4) == (2, 2, 2, 2) and deal_layers(10, 4) == (2, 3, 3, 2) and deal_layers(9, 1) == (9,)
    assert deal_layers(8, 4, head=2.0) == (2, 3, 2, 1) and deal_layers(8, 4, embedding=1.0, head=1.0) == (1, 3, 3, 1)
    assert deal_layers(8, 4, first=1) == (1, 3, 2, 2) and deal_layers(8, 3, first=1, last=3) == (1, 4, 3)


def test_no_dealing_has_a_faster_slowest_stage() -> None:
    for layers, stages, head in itertools.product(range(2, 9), range(2, 5), (0.0, 0.7, 2.5)):
        if layers < stages:
            with pytest.raises(ValueError, match=f"{layers} layers cannot be dealt to {stages} stages of at least one"):
                deal_layers(layers, stages, head=head)
            continue
        dealt = deal_layers(layers, stages, head=head)
        assert sum(dealt) == layers and min(dealt) >= 1

        def slowest(counts: tuple[int, ...], head: float = head) -> float:
            return max(*counts[:-1], counts[-1] + head)

        others = (c for c in itertools.product(range(1, layers + 1), repeat=stages) if sum(c) == layers)
        assert slowest(dealt) == pytest.approx(min(map(slowest, others)))


def test_no_dealing_of_unlike_layers_has_a_faster_slowest_stage() -> None:
    for layers, stages, head in itertools.product(range(3, 8), range(1, 4), (0.0, 2.5)):
        costs = [0.5 if layer % 3 else 1.75 for layer in range(layers)]
        dealt = deal_unlike_layers(costs, stages, head=head)
        assert sum(dealt) == layers and min(dealt) >= 1

        def slowest(counts: tuple[int, ...], costs: list[float] = costs, head: float = head) -> float:
            stages = cut_model(counts)
            return max(sum(costs[s.start : s.stop]) + head * s.is_last for s in stages)

        others = (c for c in itertools.product(range(1, layers + 1), repeat=stages) if sum(c) == layers)
        assert slowest(dealt) == pytest.approx(min(map(slowest, others)))
    with pytest.raises(ValueError, match="2 layers cannot be dealt to 3 stages of at least one"):
        deal_unlike_layers([1.0, 2.0], 3)


def test_layers_with_experts_are_dealt_by_their_products() -> None:
    """Layers without experts have a fraction of the products of the others."""
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    uneven = model(6, num_experts=4, ffn_hidden_size=64, moe_ffn_hidden_size=4096, moe_layer_freq="[0,0,0,1,1,1]")
    assert layers_of_stages(uneven, parallel) == (4, 2)
    assert layers_of_stages(model(6, num_experts=4), parallel) == layers_of_stages(model(6), parallel)


def model(layers: int, **more: object) -> ModelConfig:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 100}
    return ModelConfig(num_layers=layers, **shape, **more)  # type: ignore[arg-type]


def test_layers_of_ranks_that_are_given_are_those_of_all_their_stages() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=3, decoder_first_pipeline_num_layers=2, num_virtual_stages_per_pipeline_rank=2)
    assert layers_of_stages(model(10), parallel) == (1, 2, 2, 1, 2, 2)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=5)
    assert layers_of_stages(model(7), parallel) == (2, 5)
