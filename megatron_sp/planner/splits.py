"""Why positions are split as they are: Ulysses (sp), context parallelism (cp) around it, or one of them alone.

Ulysses sends 2n + 2g heads of each position there and back, whatever the length; cp sends keys and values, 2g heads, of
all positions that others see. Attention grows with the square of the length and the exchange does not, so over a link
of B bytes/s keys and values hide under attention from a length on:

    s* = e (c - 1) f F / (r B)

with e bytes an element, f the share of the rows that the worst rank of c sends, F FLOP/s of attention forward, r query
heads for each key; half of it for bidirectional attention. With a window both grow less, rows not at all and pairs with
the length, so there is such a length, too: all are computed from the rows and pairs of the mask's plan. Heads, width,
tp and sp drop out.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sp.config.schema import Config
from megatron_sp.estimate.layout import context_plan
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.search import Candidate
from megatron_sp.utils.format import format_count


def share_of_attention(config: Config, machine: Machine) -> float:
    """Return the time in which keys and values travel, forward, relative to attention's, of a configuration with cp > 1."""
    model, parallel = config.model, config.parallel
    tp, sp, cp = parallel.tensor_model_parallel_size, parallel.sequence_parallel_size, parallel.context_parallel_size
    assert model.num_attention_heads
    plan = context_plan(model, parallel)
    most_sent = max(sum(plan.rows_sent(rank, 1)) for rank in range(cp))
    element = {"float64": 8, "float32": 4}.get(config.precision.params_dtype, 2)
    ranks = tp * sp
    heads_of_key = -(-model.num_attention_heads // ranks) / -(-model.num_groups // ranks)
    num_bytes = 2 * element * most_sent / heads_of_key  # of a query head, an element of its width
    bandwidth = machine.rate("all_to_all", "cp", cp, tp, sp)
    return num_bytes / bandwidth * machine.gpu.attention_forward_tflops * 1e12 / (4 * max(map(plan.area, range(cp))))


def why_this_split(best: Candidate, others: Sequence[Candidate]) -> list[str]:
    """Return a sentence about the sizes of sp and cp, and one with the other splits of as many ranks; none if both are 1.

    Args:
        others: the fastest of each choice of tp, sp and cp.
    """
    layout, machine = best.layout, best.machine
    ranks = layout.sp * layout.cp
    if ranks == 1:
        return []
    model = best.config.model
    assert model.seq_length
    tried = (
        layout if layout.cp > 1 else type(layout)(**{**vars(layout), "sp": 1, "mode": "none", "chunks": 0, "cp": ranks})
    )
    config = best.config if layout.cp > 1 else tried.apply(best.config)
    share = share_of_attention(config, machine)
    link = machine.link_of("cp", tried.cp, layout.tp, tried.sp).name
    length = format_count(round(share * model.seq_length))  # the share falls as the length grows, with a window, too
    from_on = f"from {length} tokens on, and there are {format_count(model.seq_length)}"
    hides = f"over {link} keys and values of cp {tried.cp} hide under attention {from_on}"
    if layout.cp == 1:
        said = f"Ulysses alone (sp {layout.sp}), whose bytes do not grow with the ranks; {hides}"
    elif layout.sp == 1:
        said = f"cp alone (cp {layout.cp}): {hides}"
    else:
        inside = machine.link_of("sp", layout.sp, layout.tp).name
        said = f"both: Ulysses (sp {layout.sp}) over {inside}, where bytes are cheap, and cp {layout.cp} around it, since {hides}"
    beside = [
        c for c in others if (c.layout.tp, c.layout.pp) == (layout.tp, layout.pp) and c.layout.axes != layout.axes
    ]
    same = [c for c in beside if c.layout.sp * c.layout.cp == ranks]
    lines = [f"sp and cp: {said}"]
    if same:
        words = (
            f"sp {c.layout.sp} x cp {c.layout.cp} {best.tokens_per_second / c.tokens_per_second:.2f}" for c in same
        )
        lines.append(f"  other splits of {ranks} ranks, in time of the first: {', '.join(words)}")
    return lines
