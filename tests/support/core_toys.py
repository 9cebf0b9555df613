"""A transformer whose attention is a module that gets q, k and v: what ``ulysses(core=...)`` is for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V = 37


class Core(nn.Module):
    """Attention on [b, s, n, d], with fewer key/value heads."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
        to = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}[self.layout]
        heads = [x.permute(to) for x in (query, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        back = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}[self.layout]
        return y.permute(back) if self.layout == "bhsd" else y.permute(back).flatten(-2)


class Block(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.core, self.layout, self.qkv, self.out = Core(layout), layout, nn.Linear(24, 48), nn.Linear(24, 24)
        self.widths = [24, 12, 12]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 6)) for t in self.qkv(x).split(self.widths, -1))
        if self.layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = self.core(q, v=v, k=k)
        return x + self.out(y.transpose(1, 2).flatten(-2) if self.layout == "bhsd" else y)


class Toy(nn.Module):
    """Positions that come from outside, two blocks, and a mean over the sequence at the end."""

    def __init__(self, layout: str = "bshd", pools: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout, self.pools = layout, pools
        self.idle = nn.Identity()
        self.words, self.places = nn.Embedding(V, 24), nn.Embedding(16, 24)
        self.blocks, self.norm, self.head = nn.ModuleList(Block(layout) for _ in range(2)), nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        at = torch.arange(ids.shape[0 if self.layout == "sbhd" else 1]) if at is None else at
        x = self.words(ids) + (self.places(at)[:, None] if self.layout == "sbhd" else self.places(at))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        y: Tensor = self.head(x.mean(0 if self.layout == "sbhd" else 1) if self.pools else x)
        return y
