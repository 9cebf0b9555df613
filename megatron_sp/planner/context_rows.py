"""Rows and bytes that context parallelism sends under a mask: the planner's table, and part of --picture."""

# The mask is that of the model's flags (causal or bidirectional, length, window) and, with ``--documents``, of one
# packed row. From it follows the plan by which a run exchanges (``parallel/context_plan.py``); nothing here is
# estimated.
#
# ``context_svg`` draws a lane for each rank along the row: the positions it has, and, thinner, those whose keys and
# values it receives, in the colour of the rank that sends them. ``context_matrix`` has the same in numbers.

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_sp.config.schema import Config
from megatron_sp.estimate.layout import row_mask_of
from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.heads import OverlapMode, Sections, plan_heads
from megatron_sp.parallel.row_mask import RowMask, Runs
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.format import format_bytes
from megatron_sp.utils.markup import svg


def mask_of_row(config: Config, documents: Sequence[int] | None) -> RowMask:
    """Return the mask of the rows of a run, with ``documents`` of these lengths (BERT: one, the real tokens of a row).

    Raises:
        ConfigError: the documents are not those of a row of this length.
    """
    s, bert = config.model.seq_length, config.model.is_bert
    assert s is not None
    if documents is None:
        return row_mask_of(config.model)
    few = documents if len(documents) <= 6 else [*documents[:3], "...", documents[-1]]
    given, total = f"--documents {','.join(map(str, few))}", sum(documents)
    if bert:
        if len(documents) > 1 or total > s:
            raise ConfigError(
                f"{given}: a row of BERT has one text, and padding up to seq_length ({s}) behind it: give one number of"
                f" at most {s}"
            )
        return RowMask(s, False, lengths=(total,))
    if total != s:
        change = f"add one of {s - total}" if total < s else f"leave {total - s} tokens out"
        of_row = f"a row has seq_length ({s}): {change}, or give --seq-length {total}"
        raise ConfigError(f"{given} add up to {total} tokens, and {of_row}")
    return RowMask(s, True, config.model.window_size, documents=(tuple(accumulate(documents)),))


@dataclass(frozen=True)
class ContextRows:
    """Plan of a layout, and the bytes of a layer that follow from it."""

    plan: ContextPlan  # who sends which rows to whom
    batch: int  # sequences of a micro-batch
    row_bytes: int  # keys and values of a position, on the GPU with most key/value heads
    keep_kv: bool  # backward has the keys and values that forward received

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
        """Return for each cp rank the bytes that it receives in backward: keys and values again, and gradients."""
        sent = [sum(self.plan.rows_sent(i, self.batch)) * self.row_bytes for i in range(self.plan.cp_size)]
        return sent if self.keep_kv else [a + b for a, b in zip(self.received(), sent, strict=True)]

    def text(self) -> str:
        """Return the table of rows, bytes of a layer, the share of a ring and the balance."""
        forward, backward = (
            f"{format_bytes(round(sum(sizes) / len(sizes)))} ({format_bytes(max(sizes))})"
            for sizes in (self.received(), self._round_trip())
        )
        what = "gradients of its own" if self.keep_kv else "keys and values again, and gradients of its own"
        return (
            f"context parallelism of layout 1, {context_matrix(self.plan, self.batch).rstrip()}\n"
            f"bytes a layer that a GPU receives, mean (most): forward {forward},"
            f" {self.plan.ring_share:.1%} of what a ring that brings every row to every rank sends\n"
            f"  backward {backward}: {what}"
        )

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
    # of a position's keys and values on sp rank 0, which has most heads; each chunk sends its own
    model, parallel, precision = config.model, config.parallel, config.precision
    assert model.num_attention_heads
    n, g, tp = model.num_attention_heads, model.num_groups, parallel.tensor_model_parallel_size
    queries, groups = (n // g, g // tp) if g % tp == 0 else (n // tp, 1)
    is_chunked = parallel.overlap_mode == "chunked" and not model.norms_all_heads
    mode: OverlapMode = "chunked" if is_chunked else "none"  # the other modes have one chunk, too
    sp, of_chunks = parallel.sequence_parallel_size, parallel.sp_head_chunks or 2
    sections = Sections.in_groups(queries, groups, model.head_dim)
    chunks = plan_heads(sections, sp, mode, of_chunks, pairs=True)
    element = 2 if precision.bf16 or precision.fp16 else 8 if precision.fp64 else 4
    return sum(len(chunk.shares[0].uses) for chunk in chunks) * 2 * model.head_dim * element


def below(upper: str, lower: str) -> str:
    """Return two SVG documents, whose viewBox begins at 0 0, as one: the second below the first and as wide."""
    boxes = [re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', document)[0] for document in (upper, lower)]
    (width, top), (of_lower, height) = (map(float, box) for box in boxes)
    height *= width / of_lower
    parts = []
    for document, y, tall in ((upper, 0.0, top), (lower, top, height)):
        attributes, body = re.findall(r"<svg\b([^>]*)>(.*)</svg>", document, re.DOTALL)[0]
        kept = " ".join(re.findall(r'\b(?:xmlns[\w:]*|viewBox|role|aria-label)="[^"]*"', attributes))
        parts.append(f'<svg {kept} x="0" y="{y:g}" width="{width:g}" height="{tall:g}">{body}</svg>')
    bottom = f"{top + height:g}"
    box = f'viewBox="0 0 {width:g} {bottom}" width="{width:g}pt" height="{bottom}pt"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([head, *parts, "</svg>", ""])


# picture and table of a plan

# Okabe and Ito's colours, which colour-blind readers can tell apart
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#882255")
_LEFT, _WIDTH, _RIGHT, _LANE, _TOP = 74, 840, 300, 34, 92  # pixels


def context_matrix(plan: ContextPlan, batch: int) -> str:
    """Return a table of the rows of keys and values that each rank receives from each other, for ``batch`` sequences.

    Raises:
        ValueError: the mask describes another number of sequences.
    """
    ranks = range(plan.cp_size)
    of_ring = batch * plan.mask.length * (plan.cp_size - 1) / plan.cp_size
    mean = sum(plan.area(i) for i in ranks) / plan.cp_size
    lines = [["rank", "has", *(f"from {j}" for j in ranks), "receives", "of a ring", "pairs/mean", "pieces"]]
    for i in ranks:
        received = sum(plan.rows_received(i, batch))
        pieces = sum(len(plan.pieces(i, j)) for j in ranks)
        lines.append([
            str(i), f"{plan.lengths[i]:,}", *("." if j == i else f"{plan.num_rows(i, j, batch):,}" for j in ranks),
            f"{received:,}", f"{received / of_ring:.0%}" if of_ring else "-",
            f"{plan.area(i) / mean:.3f}" if mean else "-", f"{pieces:,}",
        ])  # fmt: skip
    sent = [f"{sum(plan.rows_sent(j, batch)):,}" for j in ranks]
    total = f"{sum(plan.num_received(i, batch) for i in ranks):,}"
    lines.append(["sends", "", *sent, total, f"{plan.ring_share:.0%}" if of_ring else "-", "", ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    table = "\n".join("  ".join(cells).rstrip() for cells in padded)
    of = f"{batch:,} {'sequence' if batch == 1 else 'sequences'} of {plan.mask.length:,} positions"
    return f"rows of keys and values that travel, {of}\n{table}\nlargest share of pairs / mean: {plan.balance:.3f}\n"


def context_svg(plan: ContextPlan, sequence: int = 0) -> str:
    """Return the picture of one sequence of the micro-batch as an SVG document.

    Raises:
        ValueError: there is no such sequence.
    """
    mask, c, s = plan.mask, plan.cp_size, plan.mask.length
    if not 0 <= sequence < mask.sequences:
        raise ValueError(f"the mask describes {mask.sequences} sequences: there is no sequence {sequence}")
    words = ["causal" if mask.causal else "bidirectional"]
    ends: tuple[int, ...] = ()
    if mask.window is not None:
        words.append(f"window {mask.window:,}")
    if mask.lengths is not None:
        ends = (mask.lengths[sequence],)
    if mask.documents is not None:
        ends = mask.documents[sequence]
        words.append(f"{len(ends):,} documents")
    if mask.lengths is not None:
        words.append(f"{mask.lengths[sequence]:,} real keys")
    if not plan.alike:
        words.append(f"sequence {sequence} of {mask.sequences}")
    title = f"{s:,} positions on {c} {'rank' if c == 1 else 'ranks'}: {', '.join(words)}"
    key = "wide: positions of the rank; narrow: keys and values that it receives, in the colour of their owner"
    # a tick above the lanes at each end of a document, and of the real keys
    places = sorted({round(_LEFT + _WIDTH * end / s, 1) for end in ends})
    ticks = " ".join(f"M{x:g} {_TOP - 16}v10" for x in places)
    parts = [f'<path class="tick" d="{ticks}"/>'] if places else []
    mean = sum(map(plan.area, range(c))) / c
    for i in range(c):
        top, received = _TOP + i * _LANE, 0
        parts.append(f'<text class="text" x="16" y="{top + 17}">rank {i}</text>')
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="26"/>')
        for j in range(c):
            if j == i:
                parts += _bars(plan.runs[i], s, top, 26, i)
                continue
            runs = plan.rows(i, j)[sequence]
            received += sum(stop - start for start, stop in runs)
            parts += _bars(runs, s, top + 8, 10, j)
        share = f"{plan.area(i) / mean:.2f} of the mean's pairs" if mean else "no pairs"
        place = f'x="{_LEFT + _WIDTH + 10}" y="{top + 17}"'
        parts.append(f'<text class="text" {place}>receives {received:,} rows; {share}</text>')
    return svg(_LEFT + _WIDTH + _RIGHT, _TOP + c * _LANE + 20, title, key, parts)


def _bars(runs: Runs, length: int, top: int, height: int, owner: int) -> list[str]:
    golden = f"hsl({owner * 137.5 % 360:g} 60% 50%)"  # steps of the golden angle differ
    colour = _COLOURS[owner] if owner < len(_COLOURS) else golden
    bars = ((_LEFT + _WIDTH * start / length, _WIDTH * (stop - start) / length) for start, stop in runs)
    return [f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}"/>' for x, width in bars]
