"""--delay-wgrad: the same bits, with the gradients of the MLP's weights computed while attention's last exchange is under way."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.layouts import Case, Sharded, alone, by_axes, run_cases
from support.ranks import run_ranks
from torch import nn

from megatron_sp.comm.collectives import Handle
from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.parallel.exchange_group import ExchangeGroup

LLAMA = {
    "position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
FULL, DROP = {"recompute_granularity": "full"}, {"hidden_dropout": 0.2}
SIX, EIGHT_HEADS = {"num_layers": 6}, {"num_attention_heads": 8}
POST, PARALLEL = {"norm_placement": "post"}, {"use_parallel_residual": True}
CHUNKED = {"sp": 2, "mode": "chunked", "delay": True}
CASES = [
    Case(sp=2, mode="split-qkv", delay=True, steps=2), Case(sp=2, delay=True, overlap=False),
    *(Case(**CHUNKED, zero=zero, micro_batches=2, model=LLAMA, kernels=FULL, steps=2) for zero in (0, 2, 3)),
    Case(**CHUNKED, model=PARALLEL | DROP), Case(**CHUNKED, bert=True, model=POST | DROP),
    *(Case(**CHUNKED, kernels=kernels) for kernels in ({"mlp_chunks": 3}, {"offload_activations": True}, {"recompute_qkv": True})),
    *(Case(tp=2, tp_seq=seq, **CHUNKED, model=EIGHT_HEADS, micro_batches=2, zero=1) for seq in (False, True)),
    Case(cp=2, delay=True, steps=2), Case(cp=2, delay=True, model=LLAMA, packed=True, zero=3, micro_batches=2, kernels=FULL),
    Case(cp=3, delay=True, seq=7, kernels={"mlp_chunks": 2}), Case(cp=2, tp=2, tp_seq=True, delay=True),
    Case(cp=2, **CHUNKED, model=EIGHT_HEADS, micro_batches=2),
    *(Case(pp=2, **CHUNKED, schedule=kind, micro_batches=3, zero=zero, model=SIX) for kind, zero in (("interleaved", 2), ("zb1p", 2))),
    Case(pp=2, **CHUNKED, schedule="slices", slices=2, micro_batches=2, model=SIX, zero=2),
]  # fmt: skip


@pytest.mark.parametrize("cases", by_axes(CASES))
def test_layouts_have_the_gradients_of_one_process(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


def _bits(cases: list[Case]) -> None:
    for case in cases:
        found = []
        for delay in (True, False):
            sharded = Sharded(replace(case, delay=delay), alone(case).whole)
            loss = sharded.step()
            found.append({n: hashlib.sha256(g.numpy().tobytes()).hexdigest() for n, g in {"loss": loss, **sharded.grads()}.items()})
        assert found[0] == found[1], f"{case}: {[name for name in found[0] if found[0][name] != found[1][name]]}"


@pytest.mark.parametrize("cases", by_axes([case for case in CASES if case.world == 2]))
def test_it_changes_no_bit(cases: list[Case], tmp_path: Path) -> None:
    for case in cases:
        alone(case)
    run_ranks(_bits, 2, tmp_path, cases)


class _Events:
    """Exchanges of a backward pass as they are started and waited for, and gradients of the MLPs' weights as they are computed."""

    def __init__(self, sharded: Sharded, patch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        names = {id(p): n for n, p in sharded.model.named_parameters() if ".mlp." in n and n.endswith("weight")}
        reserve, exchange = FlatGradients.reserve, ExchangeGroup.exchange_async

        def logged_reserve(gradients: FlatGradients, param: torch.Tensor) -> Any:
            if id(param) in names:
                self.found.append(names[id(param)].split(".")[-2].removeprefix("linear_"))
            return reserve(gradients, param)

        def logged_exchange(group: ExchangeGroup, name: str, *rest: Any) -> Handle:
            handle = exchange(group, name, *rest)
            if name.startswith("d ") and group.size > 1:
                self.found.append(f"send {name}")
                wait = handle.wait

                def logged_wait() -> torch.Tensor:
                    self.found.append(f"wait {name}")
                    return wait()

                handle.wait = logged_wait  # type: ignore[method-assign]
            return handle

        patch.setattr(FlatGradients, "reserve", logged_reserve)
        patch.setattr(ExchangeGroup, "exchange_async", logged_exchange)


ORDERS = [
    (Case(sp=2, mode="split-qkv", delay=True), "send d out, wait d out, send d v, send d k, send d q, fc2, fc1, wait d v, wait d k,"
                                               " wait d q"),
    (Case(sp=2, mode="split-qkv"), "fc2, fc1, send d out, wait d out, send d v, send d k, send d q, wait d v, wait d k, wait d q"),
    (Case(**CHUNKED), "send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc2, fc1, wait d qkv, wait d qkv"),
    (Case(**CHUNKED, kernels=FULL), "send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc2, fc1, wait d qkv,"
                                    " wait d qkv"),
    (Case(**CHUNKED, kernels={"mlp_chunks": 3}), "send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc1, fc2,"
                                                " wait d qkv, wait d qkv"),
    (Case(cp=2, delay=True), "send d kv, fc2, fc1, wait d kv"),
    (Case(cp=3, delay=True), "send d kv, send d kv, wait d kv, fc2, fc1, wait d kv"),
    (Case(cp=2, sp=2, mode="split-qkv", delay=True), "send d out, wait d out, send d kv, wait d kv, send d kv, send d q, fc2, fc1,"
                                                     " wait d kv, wait d q"),
    (Case(tp=2, **CHUNKED, model=EIGHT_HEADS), "fc1, send d out, send d out, wait d out, send d qkv, wait d out, send d qkv, fc2,"
                                               " wait d qkv, wait d qkv"),
]  # fmt: skip


def _order(case: Case, expected: str) -> None:
    sharded = Sharded(case, alone(case).whole)
    with pytest.MonkeyPatch.context() as patch:
        events = _Events(sharded, patch)
        sharded.step()
    assert ", ".join(events.found) == ", ".join([expected] * tiny.LAYERS)


@pytest.mark.parametrize("case, expected", ORDERS, ids=str)
def test_weights_are_computed_between_the_last_send_and_its_wait(case: Case, expected: str, tmp_path: Path) -> None:
    alone(case)
    run_ranks(_order, case.world, tmp_path, case, expected)


def gradients_of(layer: nn.Linear, **options: Any) -> FlatGradients:
    gradients = FlatGradients([FlatUnit("0", layer.named_parameters())], SINGLE_RANK, delayed=[layer.weight], **options)
    gradients.start_step()
    return gradients


@pytest.mark.parametrize("end", ["unit_done", "finish_micro_batch", "cover"])
def test_what_no_exchange_has_covered_is_written_at_the_end_of_its_unit(end: str) -> None:
    layer, written = nn.Linear(2, 3), list[str]()
    gradients = gradients_of(layer)
    assert gradients.later(layer.weight, lambda: written.append(str(torch.is_grad_enabled())))
    assert not gradients.later(layer.bias, lambda: written.append("bias")), "it is not delayed"
    assert not gradients.later(nn.Parameter(torch.zeros(1)), lambda: written.append("unknown"))
    assert written == []
    gradients.unit_done(0) if end == "unit_done" else getattr(gradients, end)()
    assert written == ["False"]
    gradients.cover()
    assert written == ["False"], "once"


def test_a_step_that_was_cut_short_leaves_nothing_behind() -> None:
    layer, written = nn.Linear(2, 3), list[str]()
    gradients = gradients_of(layer)
    gradients.later(layer.weight, lambda: written.append("of the last step"))
    gradients.start_step()
    gradients.cover()
    assert written == []


def test_gradients_that_a_pipeline_puts_off_are_not_delayed() -> None:
    layer, written = nn.Linear(2, 3), list[str]()
    gradients = gradients_of(layer)
    gradients.put_off("W", [0])
    gradients.later(layer.weight, lambda: written.append("W"))
    gradients.cover()
    gradients.unit_done(0)
    assert written == []
    gradients.put_off(None)
    gradients.catch_up("W")
    assert written == ["W"]
