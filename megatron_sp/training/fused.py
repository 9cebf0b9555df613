"""Choice of a run's fused kernels (--fused-kernels): refused before the first collective, and the same on all ranks."""

from __future__ import annotations

import torch
from torch import nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.object_collectives import all_ranks_agree, gather_json
from megatron_sp.config.schema import Config
from megatron_sp.ops.fused_kernels import FusedKernels, KernelUse, choose_fused_kernels
from megatron_sp.ops.kernels.launch import use_triton
from megatron_sp.ops.norm import NormSpec
from megatron_sp.parallel.layers import norm_spec_of, set_norm_kernel
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import Launch


def require_fused_kernels(config: Config, launch: Launch, device: torch.device) -> None:
    """Check --fused-kernels apex or triton before any rank waits for another; one process of each host reports what is missing there.

    Raises:
        ConfigError: they cannot be used on this rank.
    """
    if config.kernels.fused_kernels not in ("apex", "triton"):
        return
    model = config.model
    try:
        _choose(config, device, NormSpec(model.normalization, model.norm_epsilon, model.apply_layernorm_1p))
    except ConfigError as error:
        error.on_all_ranks = launch.rank == 0  # another rank's GPU or package may be the only one that lacks it
        raise


def expects_triton(config: Config, device: torch.device) -> bool:
    """Return whether this rank finds Triton's kernels usable for a model of ours, before there is one; the others may not."""
    model = config.model
    kernels = _choose(config, device, NormSpec(model.normalization, model.norm_epsilon, model.apply_layernorm_1p))
    return kernels.elementwise is not None and kernels.elementwise.name == "triton"


def use_fused_kernels(config: Config, model: nn.Module, groups: ParallelGroups) -> FusedKernels:
    """Choose the kernels, and set all but AdamW's, which are for the optimizer: that is not built yet. Collective.

    Raises:
        ConfigError: apex or triton was asked for and cannot be used.
    """
    with all_ranks_agree(groups.control):
        kernels = _choose(config, groups.device, norm_spec_of(model))
    kernels = kernels.agreed(gather_json([(kernel.name, kernel.reason) for kernel in kernels.chosen], groups.control))
    use_triton(kernels.elementwise is not None and kernels.elementwise.name == "triton")
    if kernels.norm is not None:
        set_norm_kernel(model, "apex" if kernels.norm.name == "apex" else "torch")
    return kernels


def _choose(config: Config, device: torch.device, norm: NormSpec | None) -> FusedKernels:
    dtype = getattr(torch, config.precision.params_dtype)
    use = KernelUse(
        device, dtype, adamw=config.optimizer.optimizer == "adam", offload=config.parallel.offload_optimizer, norm=norm,
        deterministic=config.kernels.deterministic_mode,
    )  # fmt: skip
    try:
        return choose_fused_kernels(config.kernels.fused_kernels, use)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
