"""Layers are dealt to stages so that the slowest is as fast as it can be."""

from __future__ import annotations

import itertools

import pytest

from megatron_sp.config.schema import KernelConfig, ModelConfig, ParallelConfig
from megatron_sp.estimate.pipeline_states import states_of
from megatron_sp.estimate.stages import RankShare, layers_of_stages, shares_of
from megatron_sp.parallel.pipeline_orders import plan_pipeline
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
    return ModelConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=100,
        **more,  # type: ignore[arg-type]
    )


def test_layers_of_ranks_that_are_given_are_those_of_all_their_stages() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=3, decoder_first_pipeline_num_layers=2, num_virtual_stages_per_pipeline_rank=2)
    assert layers_of_stages(model(10), parallel) == (1, 2, 2, 1, 2, 2)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=5)
    assert layers_of_stages(model(7), parallel) == (2, 5)


def most(share: RankShare, kind: str, what: str) -> int:
    """The most of something that a rank holds while it computes actions of a kind, of all its stages together."""
    return max(sum(getattr(state, what)) for state in share.states if state.kind == kind)


def test_what_each_rank_has() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=4)
    shares = shares_of(model(8), KernelConfig(), parallel, 8)
    assert [(s.has_embedding, s.has_head, most(s, "B", "alive"), most(s, "B", "waiting"), s.puts_off) for s in shares] == [
        (True, False, 3, 0, False), (False, False, 2, 0, False), (False, False, 1, 0, False), (False, True, 0, 0, False),
    ]  # fmt: skip
    assert shares[1].stage(0) == RankShare(2, False, False, is_stage=True)
    parallel = ParallelConfig(pipeline_model_parallel_size=4, pipeline_schedule="zbv")
    shares = shares_of(model(8), KernelConfig(), parallel, 8)
    assert (shares[0].has_embedding, shares[0].has_head, shares[3].turns, shares[0].turns) == (True, True, "both", "")
    assert (shares[0].stage(0).has_embedding, shares[0].stage(0).has_head, shares[0].stage(1).has_head) == (True, False, True)
    assert [shares[3].stage(index).turns for index in range(2)] == ["below", "above"]
    assert all(s.stages == 2 and s.puts_off and most(s, "B", "waiting") > 0 and most(s, "F", "alive") < 8 for s in shares)
    alone = shares_of(model(8), KernelConfig(), ParallelConfig(), 3)[0]
    assert (alone.stages, alone.is_cut, alone.states) == (1, False, ())


def test_states_by_hand() -> None:
    """F0:0 F0:1 B0:0 W0:0 F0:2 ...: what is alive, sent, received one action ahead, and what has gradients."""
    plan = plan_pipeline("1f1b", 2, 1, 3)
    found = [(state.kind, state.alive[0], state.messages[0], len(state.begun), state.is_last) for state in states_of(plan, 0, 1)]
    # the second F before any B: its receive is posted; B0:0 knows that the first output has arrived, and the second is on its way
    assert found == [("F", 1, 2, 0, False), ("B", 1, 1, 0, False), ("F", 1, 2, 2, False), ("B", 1, 1, 2, False), ("B", 0, 0, 2, True)]
    put_off = states_of(plan_pipeline("zb1p", 2, 1, 3), 1, 1)
    found = [(state.kind, state.waiting[0]) for state in put_off]
    assert found == [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("W", 2), ("F", 1), ("B", 1), ("W", 2), ("W", 1)]
