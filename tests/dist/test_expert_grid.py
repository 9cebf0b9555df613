"""Pairwise grid of layouts with experts: any two values of two axes that can meet do, with the gradients of one process."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.layouts import Case, by_axes, run_cases
from support.pairwise import pairwise

SEED = int(os.environ.get("MEGATRON_SP_LAYOUTS_SEED", "0"))
NUM_EXPERTS = 12
LLAMA = {
    "position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
FULL = {"recompute_granularity": "full"}
SIGMOID = {"moe_router_score_function": "sigmoid"}
AUX, Z = {"moe_aux_loss_coeff": 0.5}, {"moe_z_loss_coeff": 0.1}
GLOBAL = AUX | {"moe_router_load_balancing_type": "global_aux_loss"}
AXES: dict[str, list[Any]] = {
    "ep": [1, 2, 3, 4],
    "chunks": [1, 2, 3],
    "dp": [1, 2, 3, 4],
    "tp": [(1, False), (2, False), (2, True)],  # with tp_seq
    "sp": [(1, "none"), (2, "none"), (2, "split-qkv"), (2, "chunked"), (3, "none")],
    "cp": [1, 2],
    "pp": [(1, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved", 1), (2, "zb1p", 1), (2, "zbv", 1), (2, "slices", 2)],
    "k": [1, 2, 5, 12],
    "scores": [{}, {"moe_router_pre_softmax": True}, SIGMOID, SIGMOID | {"moe_router_topk_scaling_factor": 2.5}],
    "bias": ["none", "loss-free", "one takes all"],
    "groups": [{}, {"moe_router_num_groups": 3, "moe_router_group_topk": 2}, {"moe_router_num_groups": 4, "moe_router_group_topk": 1}],
    "terms": [{}, AUX, GLOBAL, Z, AUX | Z, GLOBAL | Z],
    "shared": [{}, {"moe_shared_expert_intermediate_size": 4}],
    "frequency": ["1", "2", "[0,1,1,0]", "[0,0,1,1]"],
    "micro_batches": [1, 2, 3],
    "zero": [0, 1, 2, 3],
    "family": ["gpt", "llama", "one scale", "all heads", "parallel residual"],
    "kernels": [{}, FULL, FULL | {"recompute_num_layers": 2}, {"recompute_granularity": "selective"}, {"recompute_qkv": True},
                {"offload_activations": True}, {"offload_activations": True, **FULL}, {"mlp_chunks": 2}],
    "dropout": [0.0, 0.2],
    "packed": [False, True],
    "seq": [8, 7, 1],
    "batch": [1, 2],
    "steps": [1, 3],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {}, "llama": LLAMA, "one scale": LLAMA | {"apply_layernorm_1p": True},
    "all heads": LLAMA | {"qk_layernorm": True, "qk_layernorm_scope": "all"},
    "parallel residual": {"use_parallel_residual": True},
}  # fmt: skip


def case_of(choice: dict[str, Any]) -> Case | None:
    """The case of one value from each axis; None where they cannot meet."""
    ep, dp, (tp, tp_seq), (sp, mode), cp = (choice[axis] for axis in ("ep", "dp", "tp", "sp", "cp"))
    (pp, kind, slices), groups, k, bias = choice["pp"], choice["groups"], choice["k"], choice["bias"]
    others = dp * sp * cp * (tp if tp_seq else 1)
    if pp * tp * sp * cp * dp > 8 or others % ep or (ep == 1 and choice["chunks"] > 1):
        return None
    if groups and k > groups["moe_router_group_topk"] * NUM_EXPERTS // groups["moe_router_num_groups"]:
        return None
    if tp * sp > 4 or choice["seq"] < slices:  # heads, and positions of a slice
        return None
    if bias != "none" and choice["scores"].get("moe_router_score_function") != "sigmoid":
        return None
    if choice["packed"] and choice["dropout"]:  # the plain reference has no dropout in documents
        return None
    drop = {"hidden_dropout": choice["dropout"], "attention_dropout": choice["dropout"] / 2}
    model = {
        "num_experts": NUM_EXPERTS, "moe_ffn_hidden_size": 5, "moe_router_topk": k, "num_layers": 4, "moe_layer_freq": choice["frequency"],
        "moe_router_enable_expert_bias": bias != "none", **choice["scores"], **groups, **choice["terms"], **choice["shared"],
        **FAMILIES[choice["family"]], **drop,
    }  # fmt: skip
    return Case(
        ep=ep, ep_chunks=choice["chunks"], dp=dp, tp=tp, tp_seq=tp_seq, sp=sp, cp=cp, pp=pp, schedule=kind, slices=slices, mode=mode,
        skew=100.0 if bias == "one takes all" else 0.0, micro_batches=choice["micro_batches"], zero=choice["zero"], model=model,
        kernels=choice["kernels"], packed=choice["packed"], seq=choice["seq"], batch=choice["batch"], steps=choice["steps"],
    )  # fmt: skip


@cache
def grid() -> list[Case]:
    """The cases."""
    return pairwise(AXES, case_of, SEED)


OFTEN = [case for number, case in enumerate(grid()) if case.world <= 4 and number % 24 == 0]


@pytest.mark.parametrize("cases", by_axes(OFTEN))
def test_experts_pairwise(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("cases", by_axes([case for case in grid() if case not in OFTEN]))
def test_other_experts_pairwise(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)
