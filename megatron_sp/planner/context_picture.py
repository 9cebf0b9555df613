"""Picture of context parallelism's plan: who has which positions of a row, and who sends which of them to whom.

``context_svg`` draws a lane for each rank along the row: the positions it has, and, thinner, those whose keys and values
it receives, in the colour of the rank that sends them. ``context_matrix`` says the same in numbers, as plain text.
"""

from __future__ import annotations

from megatron_sp.parallel.context_plan import ContextPlan
from megatron_sp.parallel.row_mask import Runs
from megatron_sp.utils.markup import svg

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
            str(i), f"{plan.lengths[i]:,}", *("." if j == i else f"{plan.num_rows(i, j, batch):,}" for j in ranks), f"{received:,}",
            f"{received / of_ring:.0%}" if of_ring else "-", f"{plan.area(i) / mean:.3f}" if mean else "-", f"{pieces:,}",
        ])  # fmt: skip
    sent = [f"{sum(plan.rows_sent(j, batch)):,}" for j in ranks]
    total = f"{sum(plan.num_received(i, batch) for i in ranks):,}"
    lines.append(["sends", "", *sent, total, f"{plan.ring_share:.0%}" if of_ring else "-", "", ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
    of = f"{batch:,} {'sequence' if batch == 1 else 'sequences'} of {plan.mask.length:,} positions"
    return f"rows of keys and values that travel, {of}\n{table}\nlargest share of pairs / mean: {plan.balance:.3f}\n"


def context_svg(plan: ContextPlan, sequence: int = 0) -> str:
    """Return the picture of one sequence of the micro-batch as an SVG document.

    Args:
        sequence: which one, if they differ.
    Raises:
        ValueError: there is no such sequence.
    """
    if not 0 <= sequence < plan.mask.sequences:
        raise ValueError(f"the mask describes {plan.mask.sequences} sequences: there is no sequence {sequence}")
    c, s = plan.cp_size, plan.mask.length
    width, height = _LEFT + _WIDTH + _RIGHT, _TOP + c * _LANE + 20
    title = f"{s:,} positions on {c} {'rank' if c == 1 else 'ranks'}: {_mask_in_words(plan, sequence)}"
    key = "wide: positions of the rank; narrow: keys and values that it receives, in the colour of their owner"
    parts = _ends_of_documents(plan, sequence)
    mean = sum(plan.area(i) for i in range(c)) / c
    for i in range(c):
        top = _TOP + i * _LANE
        parts.append(f'<text class="text" x="16" y="{top + 17}">rank {i}</text>')
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="26"/>')
        for j in range(c):
            parts += (
                _bars(plan.rows(i, j)[sequence], s, top + 8, 10, j) if j != i else _bars(plan.runs[i], s, top, 26, i)
            )
        received = sum(b - a for j in range(c) if j != i for a, b in plan.rows(i, j)[sequence])
        share = f"{plan.area(i) / mean:.2f} of the mean's pairs" if mean else "no pairs"
        parts.append(
            f'<text class="text" x="{_LEFT + _WIDTH + 10}" y="{top + 17}">receives {received:,} rows; {share}</text>'
        )
    return svg(width, height, title, key, parts)


def _mask_in_words(plan: ContextPlan, sequence: int) -> str:
    mask = plan.mask
    words = ["causal" if mask.causal else "bidirectional"]
    if mask.window is not None:
        words.append(f"window {mask.window:,}")
    if mask.documents is not None:
        words.append(f"{len(mask.documents[sequence]):,} documents")
    if mask.lengths is not None:
        words.append(f"{mask.lengths[sequence]:,} real keys")
    if not plan.alike:
        words.append(f"sequence {sequence} of {mask.sequences}")
    return ", ".join(words)


def _ends_of_documents(plan: ContextPlan, sequence: int) -> list[str]:
    """Draw a tick above the lanes at each end of a document, and of the real keys."""
    mask = plan.mask
    ends = (
        mask.documents[sequence]
        if mask.documents is not None
        else (mask.lengths[sequence],)
        if mask.lengths is not None
        else ()
    )
    places = sorted({round(_LEFT + _WIDTH * end / mask.length, 1) for end in ends})
    return [f'<path class="tick" d="{" ".join(f"M{x:g} {_TOP - 16}v10" for x in places)}"/>'] if places else []


def _bars(runs: Runs, length: int, top: int, height: int, owner: int) -> list[str]:
    colour = (
        _COLOURS[owner] if owner < len(_COLOURS) else f"hsl({owner * 137.5 % 360:g} 60% 50%)"
    )  # steps of the golden angle differ
    bars = ((_LEFT + _WIDTH * start / length, _WIDTH * (stop - start) / length) for start, stop in runs)
    return [f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}"/>' for x, width in bars]
