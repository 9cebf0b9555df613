"""Choice of the kernel that computes attention in pieces."""

from __future__ import annotations

from torch import Tensor

from megatron_sp.ops.attention import torch_has_varlen
from megatron_sp.ops.gpu_pieces import TorchFlash
from megatron_sp.ops.pieces import PieceKernel
from megatron_sp.ops.tile_pieces import CPUFlash, Reference


def piece_kernel(name: str, x: Tensor, dropout: float = 0.0) -> PieceKernel:
    """Return the kernel for pieces that computes as the attention kernel ``name`` does (``ops/attention.py``) on tensors like x.

    Raises:
        ValueError: there is none.
    """
    if name == "reference":
        return Reference(dropout)
    if dropout > 0:
        raise ValueError(
            f"attention dropout ({dropout}) in the kernel {name} under context parallelism would depend on the layout: use the reference"
            " kernel (--attention-backend unfused), whose dropout is by hash, or --attention-dropout 0"
        )
    if x.device.type == "cpu":
        return CPUFlash()
    if torch_has_varlen(x):
        return TorchFlash()
    raise ValueError(
        f"no kernel for context parallelism on {x.device.type} takes {str(x.dtype).removeprefix('torch.')} and heads {x.shape[-1]} wide:"
        " torch's flash kernel takes bf16 and fp16 and widths up to 256 that are multiples of 8, from compute capability 8.0 on; or use the"
        " reference kernel (--attention-backend unfused)"
    )
