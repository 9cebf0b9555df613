"""Runs on a device that is not there: deep models by shallow ones, the GPU's branch, and what is left behind."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_sp.config.schema import BatchConfig, Config, KernelConfig, ModelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.planner import fake_run
from megatron_sp.planner.fake_device import fake_device

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_layer_freq": "[0,1]*5"}


def config_of(parallel: Mapping[str, Any], kernels: Mapping[str, Any], model: Mapping[str, Any], samples: int) -> Config:
    shape = {"num_layers": 10, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 500,
             "attention_dropout": 0.0, "hidden_dropout": 0.0}  # fmt: skip
    return Config(
        ModelConfig(**{**shape, **model}), ParallelConfig(**parallel), KernelConfig(**kernels),
        BatchConfig(micro_batch_size=1, global_batch_size=samples), precision=PrecisionConfig(bf16=True),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "kernels", "model", "world_size", "samples"),
    [
        ({"zero_stage": 3}, {}, {}, 2, 8), ({"zero_stage": 1}, FULL | {"recompute_num_layers": 2}, {"num_layers": 13}, 2, 2),
        ({"sequence_parallel_size": 2, "sp_overlap_mode": "chunked"}, {"offload_activations": True}, {}, 2, 2),
        ({"expert_model_parallel_size": 2}, {}, EXPERTS, 2, 2),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}, {}, {"num_layers": 12}, 2, 6),
    ],
    ids=str,
)  # fmt: skip
def test_a_deep_model_is_what_shallow_ones_say(
    parallel: Mapping[str, Any], kernels: Mapping[str, Any], model: Mapping[str, Any], world_size: int, samples: int
) -> None:
    config = config_of(parallel, kernels, model, samples)
    deep = fake_run.predict(copy.deepcopy(config), world_size, "cuda")
    runs = [fake_run.run_rank(config, world_size, "cuda", rank) for rank in fake_run.ranks_to_run(config, world_size)]
    assert deep.memory.peak == pytest.approx(max(run.peak for run in runs), rel=1e-3)
    assert deep.traffic.num_bytes == pytest.approx(max(sum(b for _, b in run.sent().values()) for run in runs), rel=1e-3)
    assert deep.launches == pytest.approx(runs[0].totals()["launches"], rel=0.02)


def test_the_branch_of_a_gpu() -> None:
    """Offloads take memory from the device and put it on the host; plain torch has temporaries that Triton's kernels have not."""
    model = {"num_layers": 3, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 4096, "vocab_size": 32000}

    def found(parallel: dict[str, Any], kernels: dict[str, Any]) -> Any:
        return fake_run.predict(config_of({"zero_stage": 1} | parallel, kernels, model, 2), 2, "cuda").memory

    plain, moved, states = found({}, {}), found({}, {"offload_activations": True}), found({"offload_optimizer": True}, {})
    assert found({}, {"fused_kernels": "torch"}).peak > plain.peak > moved.peak and plain.host == plain.optimizer_host == 0 < moved.host
    of_optimizer = sum(line.num_bytes for line in plain.stays if line.name in ("master weights", "optimizer state"))
    assert plain.resident - states.resident == pytest.approx(of_optimizer, rel=0.01) and states.optimizer_host >= of_optimizer


def test_nothing_is_left_behind() -> None:
    before = dict(vars(torch.cuda)), torch.Tensor.tolist, dist.all_reduce, "device" in vars(torch.Tensor)
    with fake_device("cuda", 4, 3) as device:
        assert torch.empty(1000, device="cuda").is_cuda and device.live == 4000 and dist.get_rank() == 3
    assert before == (dict(vars(torch.cuda)), torch.Tensor.tolist, dist.all_reduce, "device" in vars(torch.Tensor))
    assert not dist.is_initialized() and torch.empty(1, device="meta").device.type == "meta"
