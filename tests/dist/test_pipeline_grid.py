"""Pairwise grid of layouts with a pipeline: any two values of two axes that can meet do, with the gradients of one process."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.layouts import Case, by_axes, run_cases
from support.pairwise import pairwise

from megatron_sp.parallel.pipeline_stages import deal_layers

SEED = int(os.environ.get("MEGATRON_SP_LAYOUTS_SEED", "0"))
LLAMA = {
    "position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
FULL = {"recompute_granularity": "full"}
AXES: dict[str, list[Any]] = {
    "pp": [2, 3, 4],
    "tp": [(1, False), (2, False), (2, True)],  # with tp_seq
    "sp": [(1, "none"), (2, "none"), (2, "split-qkv"), (2, "chunked")],
    "cp": [1, 2],
    "dp": [1, 2],
    "schedule": [("1f1b", 1, 1), ("interleaved", 2, 1), ("interleaved", 3, 1), ("zb1p", 1, 1), ("zb1p", 2, 1), ("zbv", 2, 1),
                 ("slices", 1, 2), ("slices", 1, 3)],  # with stages of a rank, and slices
    "layers": ["one each", "one more", "uneven"],
    "micro_batches": [1, 2, 3, 5],
    "zero": [0, 1, 2, 3],
    "family": ["gpt, tied", "gpt, untied", "llama", "window", "parallel residual", "bert", "bert, post-norm"],
    "kernels": [{}, FULL, FULL | {"recompute_num_layers": 2}, FULL | {"recompute_attention": "full"},
                {"recompute_granularity": "selective"},
                {"recompute_qkv": True}, {"offload_activations": True}, {"offload_activations": True, **FULL}, {"mlp_chunks": 2}],
    "dropout": [0.0, 0.2],
    "packed": [False, True],
    "seq": [8, 7],
    "batch": [1, 2],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt, tied": {}, "gpt, untied": {"untie_embeddings_and_output_weights": True}, "llama": LLAMA, "window": LLAMA | {"window_size": 3},
    "parallel residual": {"use_parallel_residual": True, "position_embedding_type": "rope"}, "bert": {},
    "bert, post-norm": {"norm_placement": "post"},
}  # fmt: skip


def case_of(choice: dict[str, Any]) -> Case | None:
    """The case of one value from each axis; None where they cannot meet."""
    pp, (tp, tp_seq), (sp, mode), cp, dp = (choice[axis] for axis in ("pp", "tp", "sp", "cp", "dp"))
    (kind, v, slices), family = choice["schedule"], choice["family"]
    bert = family.startswith("bert")
    if (slices > 1 and bert) or pp * tp * sp * cp * dp > 8:
        return None
    num_layers = pp * v + {"one each": 0, "one more": 1, "uneven": 2}[choice["layers"]]
    layers = (1,) * (pp * v - 1) + (3,) if choice["layers"] == "uneven" else deal_layers(num_layers, pp * v)
    drop = {"hidden_dropout": choice["dropout"], "attention_dropout": choice["dropout"] / 2}
    return Case(
        pp=pp, tp=tp, tp_seq=tp_seq, sp=sp, cp=cp, dp=dp, schedule=kind, layers=layers, slices=slices, mode=mode,
        micro_batches=choice["micro_batches"], zero=choice["zero"], model={"num_layers": num_layers, **FAMILIES[family], **drop},
        kernels=choice["kernels"], packed=choice["packed"], seq=choice["seq"], batch=choice["batch"], bert=bert, steps=1,
    )  # fmt: skip


@cache
def grid() -> list[Case]:
    """The cases."""
    return pairwise(AXES, case_of, SEED)


OFTEN = [case for number, case in enumerate(grid()) if case.world <= 4 and number % 4 == 0]


@pytest.mark.parametrize("cases", by_axes(OFTEN))
def test_pipelines_pairwise(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("cases", by_axes([case for case in grid() if case not in OFTEN]))
def test_the_other_pipelines_pairwise(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)
