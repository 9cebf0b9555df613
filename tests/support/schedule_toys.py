"""A small transformer in plain torch, and its schedule: what a test of schedules changes one line of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_sp.schedule import Mesh, Schedule, schedule

V, H, N, D, FF, S, B = 10, 16, 4, 4, 20, 8, 3


class Attention(nn.Module):
    def __init__(self, *, written_down: bool = False, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H, bias=bias) for _ in range(4))
        self.num_heads, self.written_down, self.p = N, written_down, dropout

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, -1) if self.written_down else (*x.shape[:2], -1, D)
        q, k, v = (m(x).view(shape).transpose(1, 2) for m in (self.q, self.k, self.v))
        p = F.dropout((q @ k.transpose(-1, -2) / D**0.5).softmax(-1), self.p, self.training)
        return self.o((p @ v).transpose(1, 2).reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, FF, bias=bias), nn.Linear(FF, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(H), Attention(**options)
        self.norm2, self.mlp = nn.LayerNorm(H), Mlp(bias=options.get("bias", True))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Toy(nn.Module):
    def __init__(self, *, tied: bool = False, layers: int = 1, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


def batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(B * S).reshape(B, S) % V}


def write(s: Schedule, seq: bool = False) -> Schedule:
    enter, leave = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    s["blocks.*.attention"].sync("fwd_pre", enter)
    s["blocks.*.attention.{q,k,v}"].column(input="prepared")
    s["blocks.*.attention.o"].row(leave)
    s["blocks.*.mlp"].sync("fwd_pre", enter)
    s["blocks.*.mlp.up"].column(input="prepared")
    s["blocks.*.mlp.down"].row(leave)
    if seq:
        s.sequence("blocks.0", "norm")
    return s


def toy(tp: int = 2, *, seq: bool | None = None, **options: Any) -> Schedule:
    """A schedule without a job; with its lines where ``seq`` is said."""
    s = schedule(Toy(**options), Mesh.sizes(tp=tp))
    return s if seq is None else write(s, seq)
