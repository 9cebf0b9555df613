"""Choice of the kernel that computes attention in pieces, and an example by which it is tried."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.attention import AttentionMask, torch_has_varlen
from megatron_sp.ops.attention_pieces import AttentionPiece, Stage
from megatron_sp.ops.flash_packages import FLASH_NAMES
from megatron_sp.ops.gpu_kernels import PackageFlash, TorchFlash, takes_cudnn
from megatron_sp.ops.gpu_partial_attention import DensePieces, FlashPieces
from megatron_sp.ops.partial_attention import Columns, Partial, PieceKernel, Rows, attend, attend_backward
from megatron_sp.ops.tiled_attention import CPUFlash, Reference


def piece_kernel(name: str, x: Tensor, dropout: float = 0.0, *, v: Tensor | None = None) -> PieceKernel:
    """Return the kernel for pieces that computes as the attention kernel ``name`` does, for x [s, m, r, d] and v.

    Raises ValueError if there is none.
    """
    if name == "reference":
        return Reference(dropout)
    if dropout > 0:
        raise ValueError(
            f"attention dropout ({dropout}) in the kernel {name} under context parallelism would depend on the layout: use the reference"
            " kernel (--attention-backend unfused), whose dropout is by hash, or --attention-dropout 0"
        )
    if x.device.type != availability.GPU:
        return CPUFlash()
    if name in FLASH_NAMES:
        return FlashPieces(PackageFlash(name))
    if name == "cudnn" and (found := takes_cudnn(x, x[:, :, :1], x[:, :, :1] if v is None else v, True)) is not None:
        return DensePieces(found.groups)
    if torch_has_varlen(x, v):
        return FlashPieces(TorchFlash())
    raise ValueError(
        f"no kernel for context parallelism on {x.device.type} takes {str(x.dtype).removeprefix('torch.')} and heads {x.shape[-1]} wide:"
        " torch's flash kernel takes bf16 and fp16 and widths up to 256 that are multiples of 8, from compute capability 8.0 on; or use the"
        " reference kernel (--attention-backend unfused)"
    )


def example_in_pieces(name: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: AttentionMask) -> list[Tensor]:
    """Return output and gradients of q, k and v of attention whose keys come in two parts."""
    kernel, columns, kv = piece_kernel(name, q, v=v), Columns(1, True), torch.cat((k, v), 3).flatten(2)
    so_far = Partial(q, columns, v.shape[3])
    middle, s = len(q) // 2, len(q)
    stages = [
        (Stage(tuple(_pieces(mask, s, start, stop)), mask.window), Rows.interleaved(kv[start:stop], 1))
        for start, stop in ((0, middle), (middle, s))
    ]  # fmt: skip
    for stage, rows in stages:
        attend(kernel, stage, q, rows, so_far, columns)
    out, d_q, d_kv = (
        so_far.out.to(q.dtype),
        torch.zeros_like(q, dtype=so_far.out.dtype),
        torch.zeros_like(kv, dtype=so_far.out.dtype),
    )
    for (stage, rows), into in zip(stages, (d_kv[:middle], d_kv[middle:]), strict=True):
        attend_backward(kernel, stage, (q, out, so_far.lse, grad), rows, d_q, Rows.interleaved(into, 1), columns)
    of_k, of_v = d_kv[:, :, None].split_with_sizes((k.shape[3], v.shape[3]), 3)
    return [out, d_q, of_k, of_v]


def _pieces(mask: AttentionMask, s: int, start: int, stop: int) -> Iterator[AttentionPiece]:
    ends = (0, *(mask.documents[0] if mask.documents else (s,)))
    for begin, end in pairwise(ends):
        first, last = max(begin, start), min(end, stop)
        if first >= last:
            continue
        if not mask.causal:
            yield AttentionPiece(-1, begin, end, first - start, last - start, "full")
            continue
        yield AttentionPiece(
            -1, first, last, first - start, last - start, "diagonal" if mask.window is None else "band"
        )
        if mask.window is None:
            if last < end:
                yield AttentionPiece(-1, last, end, first - start, last - start, "full")
        elif (reach := min(end, last + mask.window - 1)) > last:
            seen = max(first, last - mask.window + 1)
            yield AttentionPiece(-1, last, reach, seen - start, last - start, "band", last - seen)
