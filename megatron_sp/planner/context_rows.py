"""Rows and bytes that context parallelism of a layout sends under a given mask: the planner's table, and its part of --picture.

The mask is that of the model's flags (causal or bidirectional, length, window) and, with ``--documents``, of one packed
row. From it follows the plan by which a run exchanges (``parallel/context_plan.py``); nothing here is estimated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_sp.config.schema import Config
from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.heads import OverlapMode, plan_heads
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.planner.context_picture import context_matrix
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.format import format_bytes


def mask_of_row(config: Config, documents: Sequence[int] | None) -> RowMask:
    """Return the mask of the rows of a run.

    Args:
        documents: lengths of the documents of a packed row; for BERT one, the real tokens of the row. None: a row of one
            document without padding.
    Raises:
        ConfigError: the documents are not those of a row of this length.
    """
    model = config.model
    s, bert = model.seq_length, model.is_bert
    assert s is not None
    if documents is None:
        return RowMask(s, not bert, model.window_size)
    given, total = f"--documents {_few(documents)}", sum(documents)
    if bert:
        if len(documents) > 1 or total > s:
            raise ConfigError(
                f"{given}: a row of BERT has one text, and padding up to seq_length ({s}) behind it: give one number of at most {s}"
            )
        return RowMask(s, False, lengths=(total,))
    if total != s:
        change = f"add one of {s - total}" if total < s else f"leave {total - s} tokens out"
        raise ConfigError(
            f"{given} add up to {total} tokens, and a row has seq_length ({s}): {change}, or give --seq-length {total}"
        )
    return RowMask(s, True, model.window_size, documents=(tuple(accumulate(documents)),))


def _few(documents: Sequence[int]) -> str:
    return ",".join(map(str, documents if len(documents) <= 6 else [*documents[:3], "...", documents[-1]]))


@dataclass(frozen=True)
class ContextRows:
    """Plan of a layout, and the bytes of a layer that follow from it.

    Attributes:
        plan: who sends which rows to whom.
        batch: sequences of a micro-batch.
        row_bytes: bytes that a row of one sequence has on the GPU with most key/value heads: keys and values of all of them.
        keep_kv: backward has the keys and values that forward received.
    """

    plan: ContextPlan
    batch: int
    row_bytes: int
    keep_kv: bool

    @classmethod
    def of(cls, config: Config, mask: RowMask) -> ContextRows:
        """Return the plan of a configuration's layout."""
        parallel = config.parallel
        plan = plan_context(mask, cut_row(mask, parallel.context_parallel_size, parallel.cp_chunks))
        return cls(plan, config.batch.micro_batch_size, _row_bytes(config), parallel.cp_keep_kv)

    def received(self) -> list[int]:
        """Return for each cp rank the bytes of keys and values that it receives in the forward pass of a layer."""
        return [self.plan.num_received(i, self.batch) * self.row_bytes for i in range(self.plan.cp_size)]

    def _round_trip(self) -> list[int]:
        """Return for each cp rank the bytes that it receives in the backward pass: keys and values again, and gradients of its own."""
        sent = [sum(self.plan.rows_sent(i, self.batch)) * self.row_bytes for i in range(self.plan.cp_size)]
        return sent if self.keep_kv else [a + b for a, b in zip(self.received(), sent, strict=True)]

    def text(self) -> str:
        """Return the table of rows, bytes of a layer, the share of a ring and the balance."""
        forward, backward = self.received(), self._round_trip()
        what = "gradients of its own" if self.keep_kv else "keys and values again, and gradients of its own"
        lines = [
            f"context parallelism of layout 1, {context_matrix(self.plan, self.batch).rstrip()}",
            f"bytes a layer that a GPU receives, mean (most): forward {_mean_and_most(forward)}, {self.plan.ring_share:.1%} of what a ring"
            " that brings every row to every rank sends",
            f"  backward {_mean_and_most(backward)}: {what}",
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        plan, ranks = self.plan, range(self.plan.cp_size)
        return {
            "runs": plan.runs, "rows": [[plan.num_rows(i, j, self.batch) for j in ranks] for i in ranks],
            "areas": [plan.area(i) for i in ranks], "balance": plan.balance,
            "ring_share": plan.ring_share, "worst_ring_share": plan.worst_ring_share,
            "layer_bytes_forward": self.received(), "layer_bytes_backward": self._round_trip(),
        }  # fmt: skip


def _row_bytes(config: Config) -> int:
    """Return the bytes of a position's keys and values on sp rank 0, which has most heads; what several chunks use travels for each."""
    model, parallel, precision = config.model, config.parallel, config.precision
    assert model.num_attention_heads
    n, g, tp = model.num_attention_heads, model.num_groups, parallel.tensor_model_parallel_size
    queries, groups = (n // g, g // tp) if g % tp == 0 else (n // tp, 1)
    mode: OverlapMode = (
        "chunked" if parallel.overlap_mode == "chunked" and not model.norms_all_heads else "none"
    )  # the other modes have one chunk, too
    chunks = plan_heads(
        queries, groups, parallel.sequence_parallel_size, mode, parallel.sp_head_chunks or 2, pairs=True
    )
    element = 2 if precision.bf16 or precision.fp16 else 8 if precision.fp64 else 4
    return sum(len(chunk.shares[0].uses) for chunk in chunks) * 2 * model.head_dim * element


def _mean_and_most(sizes: Sequence[int]) -> str:
    return f"{format_bytes(round(sum(sizes) / len(sizes)))} ({format_bytes(max(sizes))})"


def below(upper: str, lower: str) -> str:
    """Return two SVG documents as one, the second below the first and as wide.

    Args:
        upper, lower: the documents; both have a viewBox that begins at 0 0.
    """
    sizes = [
        [float(number) for number in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]] for svg in (upper, lower)
    ]
    width, top = sizes[0]
    height = width * sizes[1][1] / sizes[1][0]
    parts = []
    for svg, y, tall in ((upper, 0.0, top), (lower, top, height)):
        attributes, body = re.findall(r"<svg\b([^>]*)>(.*)</svg>", svg, re.DOTALL)[0]
        kept = " ".join(re.findall(r'\b(?:xmlns[\w:]*|viewBox|role|aria-label)="[^"]*"', attributes))
        parts.append(f'<svg {kept} x="0" y="{y:g}" width="{width:g}" height="{tall:g}">{body}</svg>')
    bottom = f"{top + height:g}"
    box = f'viewBox="0 0 {width:g} {bottom}" width="{width:g}pt" height="{bottom}pt"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([head, *parts, "</svg>", ""])
