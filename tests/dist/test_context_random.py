"""Random layouts with context parallelism against one process: what nobody thought of putting together."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.layouts import Case, run_cases

SEED = int(os.environ.get("MEGATRON_SP_LAYOUTS_SEED", "1"))
FULL = {"recompute_granularity": "full"}
KERNELS: list[dict[str, Any]] = [
    {}, {}, FULL, {**FULL, "recompute_num_layers": 2}, {"recompute_granularity": "selective"}, {"recompute_qkv": True},
    *({**FULL, "recompute_attention": again} for again in ("exchange", "full")),
    {"offload_activations": True}, {"offload_activations": True, **FULL},
]  # fmt: skip
GATED = {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True}


def random_case(random: Random) -> Case:
    """A layout of up to six ranks, a model and a batch."""
    while True:
        cp, sp, tp, dp = random.choice([2, 2, 3, 4]), random.choice([1, 1, 2, 3]), random.choice([1, 1, 2]), random.choice([1, 1, 2])
        heads = random.choice([4, 6, 8])
        groups = random.choice([g for g in (1, 2, 3, 4, 6, 8) if heads % g == 0])
        if cp * sp * tp * dp <= 6 and heads // tp >= sp and (groups % tp == 0 or tp % groups == 0):
            break
    maybe = lambda share, values: values if random.random() < share else {}
    bert = random.random() < 0.25
    packed, padding = random.random() < 0.3, random.random() < 0.15
    padding = padding and not (packed or bert)
    model = {
        "num_attention_heads": heads, "num_query_groups": groups, "group_query_attention": True, "kv_channels": random.choice([4, 6]),
        "ffn_hidden_size": 12, **maybe(0.25, {"qk_layernorm": True}), **maybe(0.3, {"hidden_dropout": 0.2}),
        **maybe(0.2, {"attention_dropout": 0.15}),
    }  # fmt: skip
    if bert:
        model |= maybe(0.4, {"norm_placement": "post"})
    else:
        model |= maybe(0.6, {"position_embedding_type": "rope"}) | maybe(0.3, GATED) | maybe(0.2, {"use_parallel_residual": True})
        model |= {} if padding else maybe(0.3, {"window_size": random.choice([1, 2, 3, 5])})
    return Case(
        tp=tp, tp_seq=tp == 2 and random.random() < 0.5, sp=sp, cp=cp, dp=dp, cp_chunks=random.choice([None, None, 1, 2, 3, 5]),
        mode=random.choice(["none", "split-qkv", "chunked"] if sp > 1 else ["none", "chunked"]), chunks=random.choice([2, 3, 4]),
        overlap=random.random() < 0.8, seq=random.randint(1, 13), batch=random.choice([1, 2, 3]), micro_batches=random.choice([1, 1, 2]),
        model=model, kernels=random.choice(KERNELS) | maybe(0.2, {"mlp_chunks": 2}), bert=bert, packed=packed, padding=padding,
        ragged=not bert and not padding and random.random() < 0.3, zero=random.choice([0, 0, 1, 2, 3]), steps=random.choice([1, 2]),
    )  # fmt: skip


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.long if n >= 4 else ()) for n in range(60)])
def test_a_random_layout_equals_one_process(number: int, tmp_path: Path) -> None:
    run_cases([random_case(Random(f"{SEED}/{number}"))], tmp_path)
