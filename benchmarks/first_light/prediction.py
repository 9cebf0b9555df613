"""What the planner and the memory form say of a step on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from first_light.records import NotThereError
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.estimate.memory_plan import CUBLAS_VARIABLE, MemoryPlan, cublas_workspaces
from megatron_sp.planner.calibrate import measure_machine
from megatron_sp.planner.fake_run import step_time
from megatron_sp.planner.hardware import GPUS, LINKS, Gpu
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.timeline import StepTime


def config_of(shape: dict[str, int], flags: str = "", world_size: int = 1) -> Config:
    """Return the configuration of a bf16 run of a shape of ``benchmarks/gpu``.

    Args:
        shape: num_layers, hidden_size, num_heads, seq_length, vocab_size, and batch (1 if it has none).
        flags: more of the command line.
        world_size: ranks.
    """
    words = (
        f"--num-layers {shape['num_layers']} --hidden-size {shape['hidden_size']} --num-attention-heads {shape['num_heads']} --seq-length"
        f" {shape['seq_length']} --vocab-size {shape['vocab_size']} --micro-batch-size {shape.get('batch', 1)} --bf16 --mock-data --lr 1e-4"
        f" --train-iters 1 --attention-dropout 0 --hidden-dropout 0 {flags}"
    )
    return config_from_args(words.split(), world_size=world_size)


def gpu_of(name: str, memory_bytes: int) -> Gpu:
    """Return the planner's entry for a GPU of that name. Raises NotThereError if it has none."""
    squeezed = name.lower().replace(" ", "").replace("-", "")
    fitting = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in squeezed]
    if not fitting:
        raise NotThereError(f"the planner does not know {name}")
    return min(fitting, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def machine_of(device: str, config: Config, gpus: int = 1) -> Machine:
    """Return the machine that a plan is made for: of several GPUs of this kind; a CPU is measured.

    Raises:
        NotThereError: the planner does not know this GPU.
    """
    if device == "cpu":
        return replace(measure_machine(1, config, rounds=2), gpus=gpus)
    gpu = gpu_of(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1])
    return Machine(gpu, gpus, 1, LINKS[gpu.link], None, gpus, gpu.memory_bytes)


def with_workspaces(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan of tensors with what cuBLAS works in on this GPU."""
    line = cublas_workspaces(torch.cuda.get_device_capability(), os.environ.get(CUBLAS_VARIABLE, ""))
    return replace(plan, stays=(*plan.stays, line))


def predict(config: Config, machine: Machine) -> StepTime:
    """Return the planner's time of a step."""
    return step_time(config, machine)


def against(measured_ms: float, predicted_ms: float) -> dict[str, Any]:
    """Return the values of a comparison; whether a machine is as fast as predicted is no verdict."""
    return {
        "measured_ms": measured_ms,
        "predicted_ms": predicted_ms,
        "measured / predicted": measured_ms / max(predicted_ms, 1e-9),
    }
