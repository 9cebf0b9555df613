"""Models with experts in every layout: loss, its terms and every gradient of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.layouts import Case, by_axes, run_cases

EXPERTS: dict[str, Any] = {"num_experts": 6, "moe_ffn_hidden_size": 5, "moe_router_topk": 2}
SHARED = {"moe_shared_expert_intermediate_size": 4}
SEQUENCE = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
GLOBAL = {**SEQUENCE, "moe_router_load_balancing_type": "global_aux_loss"}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5}
LLAMA = {
    "position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
OLMOE = {**LLAMA, "qk_layernorm": True, "qk_layernorm_scope": "all", "moe_router_pre_softmax": True}
ONE_KEY, TWO_KEYS = {**OLMOE, "num_query_groups": 1}, {**OLMOE, "num_query_groups": 2}
FULL = {"recompute_granularity": "full"}


def case(ep: int = 1, model: dict[str, Any] | None = None, **more: Any) -> Case:
    return Case(ep=ep, model={**EXPERTS, **(model or {})}, **more)


CASES = [
    case(), case(model=SHARED | SEQUENCE, micro_batches=2), case(model=GLOBAL, micro_batches=2, kernels=FULL),
    case(dp=2, model=GLOBAL), case(2, dp=2, model=SHARED | SEQUENCE), case(2, dp=2, ep_chunks=3, model=LLAMA | SEQUENCE, micro_batches=2),
    case(3, dp=3, model=SIGMOID | GLOBAL, micro_batches=2, steps=3), case(2, sp=2, model=SEQUENCE, seq=7),
    case(2, cp=2, model=SEQUENCE | SHARED),
    case(2, cp=2, sp=2, model=SEQUENCE), case(4, dp=4, model={"num_experts": 8, **GLOBAL}), case(2, dp=4, zero=1, steps=2, model=SEQUENCE),
    *(case(2, dp=2, zero=zero, micro_batches=2, model=SHARED | SEQUENCE, steps=2) for zero in (1, 2, 3)),
    case(2, dp=4, zero=3, micro_batches=2, kernels=FULL, model=LLAMA | GLOBAL),
    case(tp=2, model=SHARED | SEQUENCE), case(2, tp=2, dp=2, model=SHARED | SEQUENCE, steps=2),
    case(2, tp=2, tp_seq=True, model=SHARED | SEQUENCE, steps=2),
    case(4, tp=2, tp_seq=True, sp=2, ep_chunks=2, model={"num_experts": 8, **GLOBAL}),
    case(1, tp=2, tp_seq=True, model=SHARED | GLOBAL, micro_batches=2, zero=2),
    case(2, dp=2, model={"moe_router_topk": 1, "moe_layer_freq": "[1,0,1]"}), case(2, dp=2, model={"hidden_dropout": 0.2, **SHARED}),
    case(2, dp=2, model={"use_parallel_residual": True, **SEQUENCE}), case(2, dp=2, model={"moe_router_pre_softmax": True}, kernels=FULL),
    case(2, dp=2, model=SIGMOID | SEQUENCE | {"moe_router_topk": 1}, skew=100.0, zero=2, micro_batches=2),  # one expert takes all
    case(3, dp=3, model=SIGMOID | GLOBAL | {"moe_router_topk": 1}, skew=100.0, ep_chunks=2),
    case(4, dp=4, model={"num_experts": 8, "moe_router_topk": 1, **SEQUENCE}, seq=1, batch=1, ep_chunks=3, zero=1),  # fewer tokens
    case(2, sp=4, model={"moe_router_topk": 6, **GLOBAL}, seq=5, batch=1),  # ranks without a position
    case(2, cp=2, tp=2, tp_seq=True, model={"num_experts": 4, **SHARED, **SEQUENCE}, seq=3, batch=1),
    *(
        case(pp=2, schedule=kind, micro_batches=3, model=SHARED | SEQUENCE | {"num_layers": 4}, zero=zero)
        for kind, zero in (("1f1b", 0), ("interleaved", 1), ("zb1p", 2), ("zbv", 3))
    ),
    case(2, pp=2, dp=2, schedule="zb1p", micro_batches=2, model=GLOBAL | {"num_layers": 4}, kernels=FULL),
    case(pp=2, schedule="slices", slices=2, micro_batches=2, model=SEQUENCE),
    # a stage without experts
    *(case(2, pp=2, dp=2, model=GLOBAL | {"num_layers": 2, "moe_layer_freq": has}) for has in ("[1,0]", "[0,1]")),
    case(model=OLMOE), case(tp=2, sp=2, model=TWO_KEYS, mode="chunked", chunks=2), case(tp=4, model=ONE_KEY), case(sp=4, model=ONE_KEY),
    case(tp=2, tp_seq=True, sp=2, model=ONE_KEY, mode="split-qkv", kernels=FULL), case(2, dp=2, zero=3, model=TWO_KEYS, steps=2),
    case(2, cp=2, sp=2, model=TWO_KEYS | {"apply_layernorm_1p": True}), case(sp=3, model=ONE_KEY, seq=7, kernels={"recompute_qkv": True}),
]  # fmt: skip


@pytest.mark.parametrize("cases", by_axes(CASES))
def test_layouts_have_the_gradients_of_one_process(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)
