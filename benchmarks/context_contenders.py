"""What ``context_block.py`` compares: attention of a rank's share of a row, ours and the peers', and the block around it.

Here are neither times nor bytes. Whatever a contender's own order of the positions is, ``positions`` names it, so that all
are given the same row and compared with the same result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

OURS = {2: {"cp 2": (1, 2), "sp 2": (2, 1)}, 4: {"cp 4": (1, 4), "sp 4": (4, 1), "sp 2 x cp 2": (2, 2)}}  # (sp, cp)
RING, USP = "ring-flash-attention", "USP"
PEERS = {
    2: {RING: (1, 2), "USP 1 x 2": (1, 2), "USP 2 x 1": (2, 1)},
    4: {RING: (1, 4), "USP 2 x 2": (2, 2)},
}  # (Ulysses, ring)


def packed_row(length: int) -> tuple[int, ...]:
    """Ends of the documents of a packed row: those of a row of 64K (``context_plan.py``), scaled down.

    Lengths are multiples of 8, which the peers' zigzag over four ranks needs of each document.
    """
    chance, ends = random.Random(0), [0]
    while ends[-1] < length:
        tokens = chance.lognormvariate(math.log(1500 * length / 65536), 1.4)
        ends.append(min(length, ends[-1] + max(8, 8 * round(min(tokens, length / 4) / 8))))
    return tuple(ends[1:])


class Contender:
    """Attention of a rank's share of the positions.

    Attributes:
        positions: int64 [t], this rank's positions of the row, in the order of its rows.
    """

    positions: Any

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Return attention [t, n, d] of q, k, v [t, n, d]."""
        raise NotImplementedError

    def inputs(self, q: Any, k: Any, v: Any) -> list[Any]:
        """Return the leaves of ``run``, from q, k, v [t, n, d]."""
        return [x.clone().requires_grad_() for x in (q, k, v)]

    def run(self, leaves: list[Any], grad: Any) -> list[Any]:
        """Return out and the gradients of q, k and v, each [t, n, d]."""
        for leaf in leaves:
            leaf.grad = None
        out = self.attend(*leaves)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def planned_bytes(self) -> list[int] | None:
        """Bytes that each rank sends by the plan; None: there is none."""
        return None


def contenders(task: dict[str, Any], mask: str, length: int) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders by name, and why others are left out. Collective."""
    ends = packed_row(length) if mask == "documents" else None
    window = length // 8 if mask == "window" else None
    found: dict[str, Contender] = {}
    left_out: dict[str, str] = {}
    for name, (sp, cp) in OURS[task["ranks"]].items():
        found[name] = Ours(task, length, ends, window, sp, cp)
    for name, (ulysses, ring) in PEERS[task["ranks"]].items() if task["peer"] else ():
        if name == RING:
            found[name] = Ring(task, length, ends, window)
        elif ends is not None:
            left_out[name] = "its layer takes no documents"
        elif ring == 1:
            left_out[name] = "with one rank in the ring its backward sends to itself, which gloo refuses"
        else:
            found[name] = Usp(task, length, window, ulysses, ring)
    return found, left_out


class Ours(Contender):
    """Context parallelism planned from the mask, Ulysses, or both."""

    def __init__(
        self, task: dict[str, Any], length: int, ends: tuple[int, ...] | None, window: int | None, sp: int, cp: int
    ) -> None:
        import torch

        from megatron_sp.comm.groups import ParallelGroups
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.parallel.context_plan import plan_context
        from megatron_sp.parallel.forward_context import ForwardContext
        from megatron_sp.parallel.parallel_context import ParallelContext
        from megatron_sp.parallel.row_mask import RowMask

        groups = ParallelGroups.create(torch.device("cpu"), sp_size=sp, cp_size=cp)
        mode, chunks = ("chunked", 2) if sp > 1 else ("none", 1)
        self.layout = ParallelContext.of(
            groups, mode=mode, num_chunks=chunks, overlap=True, cp_stages_ahead=task["stages_ahead"]
        )  # type: ignore[arg-type]
        documents = None if ends is None else (ends,)
        row = RowMask(length, window=window, documents=documents)
        cut = self.layout.cut(row)
        assert cut.padded == cut.length, f"{length} positions leave padding: errors and bytes would count it"
        self.positions = cut.take(torch.arange(length))[cut.tp_seq_slice]
        self.plan = plan_context(row, cut.shares) if cp > 1 else None
        self.window, self.sp, self.shape = window, sp, task["shape"]
        self.ctx = ForwardContext(AttentionMask(documents=documents), "sdpa", cut.length, cut.whole, self.plan)

    def inputs(self, q: Any, k: Any, v: Any) -> list[Any]:
        import torch

        return [q.clone().requires_grad_(), torch.stack((k, v), 2).requires_grad_()]

    def run(self, leaves: list[Any], grad: Any) -> list[Any]:
        from megatron_sp.ops.gpu_partial_attention import piece_kernel
        from megatron_sp.parallel.context_parallel import context_attention

        assert self.plan is not None
        q, kv = leaves
        q.grad = kv.grad = None
        out = context_attention(q[:, :, None], kv, self.plan, self.layout.cp, piece_kernel("sdpa", q), batch=1).out[
            :, :, 0
        ]
        out.backward(grad)
        return [out.detach(), q.grad, *kv.grad.unbind(2)]

    def planned_bytes(self) -> list[int] | None:
        if self.plan is None or self.sp > 1:
            return None
        row = 2 * self.shape["num_heads"] * self.shape["head_dim"] * 2  # k and v, bf16
        size = self.plan.cp_size
        sent = [[self.plan.num_rows(i, j, 1) if i != j else 0 for i in range(size)] for j in range(size)]  # from j to i
        return [row * (2 * sum(sent[j]) + sum(sent[i][j] for i in range(size))) for j in range(size)]


class Ring(Contender):
    """ring-flash-attention's zigzag, for documents its varlen zigzag."""

    def __init__(self, task: dict[str, Any], length: int, ends: tuple[int, ...] | None, window: int | None) -> None:
        import torch
        import torch.distributed as dist
        from ring_flash_attn import zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_varlen_func

        self.group, size, rank = dist.group.WORLD, task["ranks"], task["rank"]
        self.window = (-1, -1) if window is None else (window - 1, 0)
        ends = ends or (length,)
        starts = (0, *ends[:-1])
        of_documents = [torch.arange(start, end).chunk(2 * size) for start, end in zip(starts, ends, strict=True)]
        self.positions = torch.cat([parts[part] for parts in of_documents for part in (rank, 2 * size - 1 - rank)])
        self.packed = len(ends) > 1
        self.ends = torch.tensor([0, *ends], dtype=torch.int32) // size
        self.longest = max(end - start for start, end in zip(starts, ends, strict=True)) // size
        self.plain, self.varlen = zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_varlen_func

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        how = {"causal": True, "window_size": self.window, "group": self.group}
        if self.packed:
            return self.varlen(q, k, v, self.ends, self.longest, **how)
        return self.plain(q[None], k[None], v[None], **how)[0]


class Usp(Contender):
    """yunchang's LongContextAttention, zigzag in the ring."""

    def __init__(self, task: dict[str, Any], length: int, window: int | None, ulysses: int, ring: int) -> None:
        import torch
        from yunchang import LongContextAttention, set_seq_parallel_pg, zigzag_extract_local

        set_seq_parallel_pg(ulysses, ring, task["rank"], task["ranks"])  # the layer keeps its groups
        self.window = (-1, -1) if window is None else (window - 1, 0)
        self.layer = LongContextAttention(ring_impl_type="zigzag")
        self.positions = zigzag_extract_local(
            torch.arange(length)[None], task["rank"], task["ranks"], rd=ring, ud=ulysses
        )[0]

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return self.layer(q[None], k[None], v[None], causal=True, window_size=self.window)[0]


class OurBlock:
    """A layer's attention."""

    def __init__(self, ours: Ours, weights: list[Any]) -> None:
        import torch

        from megatron_sp.config.schema import ModelConfig
        from megatron_sp.models.attention import SelfAttention
        from megatron_sp.parallel.layers import Norm

        heads, h = ours.shape["num_heads"], ours.shape["num_heads"] * ours.shape["head_dim"]
        config = ModelConfig(
            num_layers=1, hidden_size=h, num_attention_heads=heads, seq_length=ours.ctx.whole_length, vocab_size=8, attention_dropout=0.0,
            hidden_dropout=0.0, window_size=ours.window,
        )  # fmt: skip
        self.attention = SelfAttention(config, 0, "block", 0, torch.bfloat16, ours.layout)
        self.norm, self.ctx = Norm(config, h, torch.bfloat16, ours.layout), ours.ctx
        qkv, proj = self.attention.linear_qkv, self.attention.linear_proj
        params = [qkv.weight, qkv.bias, proj.weight, proj.bias, self.norm.weight, self.norm.bias]
        for param, value in zip(params, weights, strict=True):
            param.data.copy_(value)
        self.params = [qkv.weight, proj.weight]

    def run(self, x: Any, grad: Any) -> list[Any]:
        """Return y and the gradients of x, of the QKV and of the projection's weight; x [t, h]."""
        x = x.detach()[:, None].requires_grad_()
        for param in self.params:
            param.grad = None
        y, _ = self.attention(x, self.ctx, self.norm.in_front(), None)
        y.backward(grad[:, None])
        return [y.detach()[:, 0], x.grad[:, 0], *(param.grad for param in self.params)]


class PlainBlock:
    """The same around another attention, as plain PyTorch has it; weights in our order, each head's query, key and value side by side."""

    def __init__(self, attend: Callable[[Any, Any, Any], Any], weights: list[Any], num_heads: int) -> None:
        import torch

        self.attend, self.num_heads = attend, num_heads
        self.weights = [torch.nn.Parameter(w.clone()) for w in weights]

    def run(self, x: Any, grad: Any) -> list[Any]:
        """See ``OurBlock.run``."""
        import torch.nn.functional as F

        x = x.detach().requires_grad_()
        for weight in self.weights:
            weight.grad = None
        w_qkv, b_qkv, w_proj, b_proj, w_norm, b_norm = self.weights
        qkv = F.linear(F.layer_norm(x, x.shape[-1:], w_norm, b_norm), w_qkv, b_qkv)
        q, k, v = (part.contiguous() for part in qkv.view(x.shape[0], self.num_heads, 3, -1).unbind(2))
        y = F.linear(self.attend(q, k, v).reshape(x.shape), w_proj, b_proj) + x
        y.backward(grad)
        return [y.detach(), x.grad, w_qkv.grad, w_proj.grad]


def block_of(task: dict[str, Any], contender: Contender, weights: list[Any]) -> OurBlock | PlainBlock:
    """Return a block around a contender's attention."""
    if isinstance(contender, Ours):
        return OurBlock(contender, weights)
    return PlainBlock(contender.attend, weights, task["shape"]["num_heads"])


# inputs


def random_weights(shape: dict[str, int]) -> list[Any]:
    """Return [QKV weight, bias, projection weight, bias, norm weight, bias] in bf16, the same on all ranks."""
    import torch

    h = shape["num_heads"] * shape["head_dim"]
    generator = torch.Generator().manual_seed(2)
    qkv, proj = (torch.randn(*size, generator=generator) * 0.05 for size in ((3 * h, h), (h, h)))
    return [x.bfloat16() for x in (qkv, torch.zeros(3 * h), proj, torch.zeros(h), torch.ones(h), torch.zeros(h))]


def random_rows(shape: dict[str, int], length: int, count: int) -> list[Any]:
    """Return ``count`` tensors [s, n, d] in bf16, the same on all ranks."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(length, shape["num_heads"], shape["head_dim"], generator=generator).bfloat16() for _ in range(count)
    ]
