"""No exchange's result is used before its wait(): whole steps on a network that delivers there, with memory full of NaN until then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.late_network import late_network
from support.layouts import Case, check
from support.ranks import run_ranks

from megatron_sp.comm.collectives import all_gather_async, all_reduce_async, reduce_scatter_async

ROPE = {"position_embedding_type": "rope"}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
LLAMA = ROPE | GROUPED | {
    "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MULTI_QUERY = {"group_query_attention": True, "num_query_groups": 1}
LATE = [
    Case(tp=2, tp_seq=True, seq=7, model={"hidden_dropout": 0.2}, kernels={"lm_head_chunk_tokens": 5}, micro_batches=2),
    Case(tp=2, dp=2, model={**MULTI_QUERY, "qk_layernorm": True}, micro_batches=2),
    *(Case(sp=4, mode=mode, seq=7, model={"num_attention_heads": 6, "kv_channels": 4, **GROUPED, **ROPE})
      for mode in ("none", "split-qkv", "chunked")),
    Case(sp=3, mode="chunked", chunks=3, model={"num_attention_heads": 6, "kv_channels": 4, **MULTI_QUERY, "qk_layernorm": True}),
    Case(tp=2, sp=2, tp_seq=True, seq=9, mode="chunked", model={**LLAMA, "num_attention_heads": 8},
         kernels={"recompute_granularity": "full"}),
    Case(tp=2, sp=2, tp_seq=False, seq=8, mode="split-qkv", model={"hidden_dropout": 0.2}, kernels={"recompute_granularity": "selective"}),
    Case(tp=2, sp=1, tp_seq=False, mode="none"),
    *(Case(tp=2, tp_seq=seq, model={"hidden_dropout": 0.2}, kernels={"mlp_chunks": 3}) for seq in (False, True)),
    Case(sp=2, mode="chunked", kernels={"offload_activations": True}),
    Case(tp=2, tp_seq=True, kernels={"offload_activations": True, "recompute_granularity": "full"}),
]  # fmt: skip


def check_late(cases: list[Case]) -> None:
    for case in cases:
        with late_network() as network:
            check(case)
        assert network.started, case


@pytest.mark.parametrize("world", [2, 3, 4])
def test_nothing_is_used_before_it_is_there(world: int, tmp_path: Path) -> None:
    run_ranks(check_late, world, tmp_path, [case for case in LATE if case.world == world])


def _mistakes() -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    with pytest.raises(AssertionError, match="was never called on"), late_network():
        all_gather_async(torch.ones(2), group)
    for start in (all_gather_async, all_reduce_async, reduce_scatter_async):
        with late_network():
            x = torch.ones(size, 2)
            handle = start(x, group)
            if start is not reduce_scatter_async:  # its result is made in wait()
                assert handle._result.isnan().all()
            if start is not all_reduce_async:
                x.fill_(3.0)
                with pytest.raises(AssertionError, match=r"the operand of .* was written to"):
                    handle.wait()
            else:
                x[0] = 1.0
                with pytest.raises(AssertionError, match="the result of all_reduce was written to"):
                    handle.wait()


def test_the_late_network_catches_what_it_claims_to(tmp_path: Path) -> None:
    run_ranks(_mistakes, 2, tmp_path)
