"""Exchanges between ranks, for ``support/schedule_rule_oracle.py``: each runs on real ranks, with the adjoint that it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_sp.parallel import regions
from megatron_sp.schedule.apply.forwards import split_column, split_embedding, split_row
from megatron_sp.schedule.apply.ulysses import share_of_gradient, share_of_labels, weighed
from megatron_sp.schedule.core.sequences import Cut, repeated_heads, take_share
from megatron_sp.schedule.core.syncs import own_exchange
from support.schedule_rule_oracle import Case, Draw, Input, Sizes, Trial


def _cut(c: Sizes, length: int) -> Cut:
    return Cut(length, length, c.group.size(), c.group.rank())


def _labels(c: Sizes, logits: Tensor, mine: Tensor, labels: Tensor) -> Tensor:
    """The mean over a rank's labels, as ``ulysses(loss='next_token')`` weighs it."""
    return weighed(F.cross_entropy(logits, mine), share_of_labels(labels, _cut(c, labels.shape[1])), logits)


def _heads(c: Sizes, x: Tensor) -> Tensor:
    """Of fewer heads than ranks, each to all ranks that need it."""
    return regions.all_to_all(repeated_heads(x, 2, 1) if c.group.size() > 1 else x, c.group, 1, 0)


_MADE: list[tuple[str, str, Any]] = [
    ("copy_to", "s h", lambda c, x: regions.copy_to(x, c.group)),
    ("reduce_from", "s h", lambda c, x: regions.reduce_from(x, c.group)),
    *[
        ("gather_from", "s h", lambda c, x, d=d, g=g: regions.gather_from(x, c.group, d, g))
        for d in (0, -1)
        for g in ("slice", "reduce_scatter")
    ],
    ("gather_from", "b s h", lambda c, x: regions.gather_from(x, c.group, 1, "slice")),
    *[("scatter_to", "s h", lambda c, x, d=d: regions.scatter_to(x, c.group, d)) for d in (0, -1)],
    *[("reduce_scatter_to", "s h", lambda c, x, d=d: regions.reduce_scatter_to(x, c.group, d)) for d in (0, 1)],
    *[("all_to_all", "s b h", lambda c, x, d=d, e=e: regions.all_to_all(x, c.group, d, e)) for d, e in ((0, 2), (-1, 0), (1, 0))],
    ("take_share", "b s", lambda c, x: take_share(x, _cut(c, x.shape[1]), 1, None)),
    ("take_share", "s h", lambda c, x: take_share(x, _cut(c, x.shape[0]), 0, 0)),
    ("repeated_heads", "s 1 d", _heads),
    ("share_of_gradient", "s h", lambda c, x: share_of_gradient(x, c.group)),
    ("weighed", "b v s; i<v: b s; i<v: b s", _labels),
    ("share_of_labels", "i<v: b s; v", lambda c, x, y: share_of_labels(x, _cut(c, x.shape[1]))),
    ("own_exchange", "s h", lambda c, x: own_exchange(x, c.group, lambda t, g: regions.gather_from(t, g, 1, "reduce_scatter"), "S(1)->R")),
    ("own_exchange", "s h", lambda c, x: own_exchange(x, c.group, regions.reduce_from, "P->I")),
    ("own_exchange", "s h", lambda c, x: own_exchange(x, c.group, lambda t, g: regions.scatter_to(t, g, 0), "I->S(0)")),
    ("split_column", "b s k; n k; n", lambda c, x, w, b: split_column(x, w, b, c.group)),
    ("split_column", "b s k; n k; n", lambda c, x, w, b: split_column(x, w, b, None)),
    ("split_column", "b s k; n k", lambda c, x, w: split_column(x, w, None, c.group)),
    ("split_row", "b s k; n k; n", lambda c, x, w, b: split_row(x, w, b, c.group)),
    ("split_row", "s k; n k", lambda c, x, w: split_row(x, w, None, None)),
    ("split_embedding", "i<v: b s; v h", lambda c, i, w: split_embedding(i, w, c.group, None, c.v)),
]
EXCHANGES = [
    Case(rule, str(i), tuple(Input.of(t) for t in inputs.split(";")), call, even="st") for i, (rule, inputs, call) in enumerate(_MADE)
]


def trials(ranks: int) -> Iterator[Trial]:
    """All draws of each input, with the others as they usually are."""
    for case in EXCHANGES:
        usual: list[tuple[Draw, ...]] = [tuple(Draw("I" if x.differentiable else "N") for x in case.inputs)]
        for letter in case.letters:
            for style in ("", "outer", "blocks"):
                for rest in "IRN":
                    usual.append(tuple(next(iter(x.along(letter, style)), Draw(rest if x.differentiable else "N")) for x in case.inputs))
        seen = set()
        for draws in usual:
            for i, x in enumerate(case.inputs):
                for p in x.draws:
                    made = (*draws[:i], p, *draws[i + 1 :])
                    if p.letter != "A" and p.style != "copies" and made not in seen:
                        seen.add(made)
                        yield Trial(
                            case, made, ranks, "sp" if case.rule in ("take_share", "weighed", "share_of_labels", "repeated_heads") else "tp"
                        )
                        if case.rule.startswith(("split", "scatter")):
                            break
