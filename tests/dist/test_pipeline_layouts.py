"""Pipelines give the one-process loss and gradients, in every schedule, whatever else divides the model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import Case, Sharded, alone, by_axes, run_cases
from support.ranks import run_ranks

from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.parallel.pipeline_plan import PipelineKind

LLAMA = {
    "position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
UNTIED = {"untie_embeddings_and_output_weights": True}
SIX, EIGHT = {"num_layers": 6}, {"num_layers": 8}
FULL = {"recompute_granularity": "full"}
DROP = {"hidden_dropout": 0.2}
OWN_RATE: dict[str, Any] = {"steps": 2, "table_lr": 0.2}
KINDS: list[PipelineKind] = ["1f1b", "interleaved", "zb1p", "zbv"]
CASES = [
    *(Case(pp=2, schedule=kind, micro_batches=m, model=SIX, steps=2) for kind in KINDS for m in (1, 3, 4)),
    *(Case(pp=2, schedule=kind, micro_batches=3, model=EIGHT | UNTIED, zero=zero, **OWN_RATE) for kind in KINDS for zero in (1, 2, 3)),
    *(Case(pp=2, schedule=kind, micro_batches=3, model=SIX, zero=zero, steps=1) for kind in KINDS for zero in (1, 2, 3)),
    *(Case(pp=2, schedule=kind, micro_batches=3, model=SIX | DROP, bert=True, zero=zero) for kind in KINDS for zero in (0, 2)),
    *(Case(pp=2, schedule=kind, micro_batches=3, model=SIX | {"norm_placement": "post"}, bert=True, zero=3) for kind in KINDS),
    *(Case(pp=2, schedule=kind, micro_batches=3, model=SIX | LLAMA, kernels=FULL, zero=3) for kind in KINDS),
    *(Case(pp=2, schedule=kind, micro_batches=2, model=SIX, kernels=FULL | {"recompute_num_layers": 2}) for kind in KINDS),
    *(Case(pp=2, schedule=kind, micro_batches=3, model=SIX, kernels={"offload_activations": True, "mlp_chunks": 3}) for kind in KINDS),
    *(Case(pp=2, schedule=kind, micro_batches=3, model=SIX, kernels={"recompute_qkv": True}, packed=True) for kind in KINDS),
    Case(pp=2, layers=(1, 5), micro_batches=3, model=SIX), Case(pp=2, schedule="zb1p", layers=(1, 3, 1, 1), micro_batches=3, model=SIX),
    *(Case(pp=3, schedule=kind, micro_batches=m, model=SIX, zero=1) for kind in KINDS for m in (2, 5)),
    *(Case(pp=4, schedule=kind, micro_batches=5, model=EIGHT, seq=7) for kind in KINDS),
    *(Case(pp=2, dp=2, schedule=kind, micro_batches=3, model=SIX, zero=zero, **OWN_RATE) for kind in KINDS for zero in (0, 1, 2, 3)),
    *(Case(pp=2, tp=2, tp_seq=seq, schedule=kind, micro_batches=3, model=SIX | more, steps=1) for kind in KINDS for seq, more in
      ((False, {}), (True, LLAMA))),
    *(Case(pp=2, sp=2, schedule=kind, mode=mode, micro_batches=3, model=SIX | DROP) for kind in KINDS for mode in ("split-qkv", "chunked")),
    *(Case(pp=2, cp=2, schedule=kind, micro_batches=3, model=SIX | LLAMA, packed=packed) for kind in KINDS for packed in (False, True)),
]  # fmt: skip
ROPE, FRESH = {"position_embedding_type": "rope"}, {"recompute_granularity": "full", "recompute_attention": "full"}
SLICED = {"pp": 2, "schedule": "slices", "micro_batches": 3}
SLICES = [
    *(Case(**SLICED, slices=n, model=SIX, seq=s, steps=2) for n, s in ((1, 8), (2, 7), (5, 8), (8, 8))),
    *(Case(**SLICED, slices=3, model=SIX | more, zero=zero, steps=2) for zero in (1, 2, 3) for more in ({}, UNTIED | LLAMA)),
    *(Case(**SLICED, slices=3, model=SIX | LLAMA | DROP, kernels=each, packed=True) for each in (FULL, FRESH)),
    *(Case(**SLICED, slices=3, model=SIX | DROP | {"attention_dropout": 0.2}, kernels=each) for each in (
        {"recompute_qkv": True}, {"offload_activations": True, "mlp_chunks": 3}, {"recompute_granularity": "selective"})),
    *(Case(**SLICED, slices=3, model=SIX | LLAMA | {"window_size": 3}, packed=packed) for packed in (False, True)),
    Case(**SLICED, slices=3, model=SIX | ROPE, dtype=torch.float32),
    Case(**SLICED, dp=2, slices=2, model=SIX, zero=3, steps=2),
    *(Case(**SLICED, slices=3, tp=2, tp_seq=seq, model=SIX, kernels={"mlp_chunks": 2}) for seq in (False, True)),
    *(Case(**SLICED, slices=3, sp=2, mode=mode, model=SIX | LLAMA, packed=True, kernels=kernels) for mode, kernels in (
        ("split-qkv", {}), ("chunked", {"recompute_granularity": "full", "recompute_attention": "none"}))),
    *(Case(**SLICED, slices=n, cp=2, model=SIX | more, packed=packed) for n, packed, more in (
        (2, False, {}), (3, True, LLAMA), (3, False, {"window_size": 3, "attention_dropout": 0.2}))),
    Case(**SLICED, slices=3, cp=2, model=SIX | LLAMA, kernels=FULL, zero=3), Case(**SLICED, slices=2, cp=3, model=SIX),
    Case(**SLICED, slices=2, cp=2, sp=2, mode="chunked", model=SIX | LLAMA),
    *(Case(pp=4, schedule="slices", slices=n, micro_batches=m, model=EIGHT, zero=m % 2) for n, m in ((3, 1), (2, 2), (2, 5))),
    Case(pp=3, schedule="slices", slices=4, layers=(1, 4, 1), micro_batches=2, model=SIX),
]  # fmt: skip
OFTEN = [case for number, case in enumerate(CASES) if (number + number // len(KINDS)) % 2 == 0]  # two schedules of each line, in turn


@pytest.mark.parametrize("cases", by_axes(OFTEN))
def test_a_pipeline_is_one_process(tmp_path: Path, cases: list[Case]) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("cases", by_axes([case for case in CASES if case not in OFTEN]))
def test_the_other_pipelines_are_one_process(tmp_path: Path, cases: list[Case]) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.parametrize("cases", by_axes(SLICES[::2]))
def test_slices_are_one_process(tmp_path: Path, cases: list[Case]) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("cases", by_axes(SLICES[1::2]))
def test_the_other_slices_are_one_process(tmp_path: Path, cases: list[Case]) -> None:
    run_cases(cases, tmp_path)


def _bits(cases: list[Case]) -> None:
    """The gradients of all cases, in bits those of the first."""
    known: dict[str, str] = {}
    for number, case in enumerate(cases):
        sharded = Sharded(case, alone(case).whole)
        loss = sharded.step()
        bits = {name: hashlib.sha256(grad.numpy().tobytes()).hexdigest() for name, grad in {"loss": loss, **sharded.grads()}.items()}
        found = {name: grad for grads in gather_json(bits, sharded.groups.control) for name, grad in grads.items()}
        if number == 0:
            known = found
        assert found.keys() == known.keys()
        different = [name for name, grad in found.items() if grad != known[name]]
        if case.schedule == "zbv":  # a tied table's sums are of both of its uses there, in the order in which they come
            different = [name for name in different if name != "embedding.word_embeddings.weight"]
        assert not different, f"{case}: {different}"


@pytest.mark.parametrize(("more", "zero"), [
    ({}, 0), (LLAMA, 2),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (({}, 2), (UNTIED | DROP, 0), (UNTIED | DROP, 2), (LLAMA, 0))),
])  # fmt: skip
def test_all_schedules_have_the_bits_of_1f1b(tmp_path: Path, more: dict[str, Any], zero: int) -> None:
    kernels: list[dict[str, Any]] = [{}, FULL, {"mlp_chunks": 2}]
    for of_kernels in kernels:
        cases = [Case(pp=2, schedule=kind, micro_batches=5, model=EIGHT | more, zero=zero, kernels=of_kernels) for kind in KINDS]
        run_ranks(_bits, 2, tmp_path, cases)
