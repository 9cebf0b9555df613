"""Report of the planner: a table of the best layouts, the best one in detail, bars of memory, rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron_sp.config.schema import Config
from megatron_sp.estimate.flops import count_active_parameters, count_parameters, describe_parameters
from megatron_sp.estimate.layout import context_plan
from megatron_sp.planner.hardware import GIB
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.search import Candidate, Findings
from megatron_sp.utils.format import format_bytes, format_count

BAR = 50  # characters of the bar of a full GPU
KINDS = ("parameters", "gradients", "optimizer", "activations", "reserve")
_LETTERS = {"parameters": "P", "gradients": "G", "optimizer": "O", "activations": "A", "reserve": "r"}


def memory_by_kind(candidate: Candidate) -> dict[str, int]:
    """Return the bytes of a GPU at the peak, for each of ``KINDS``."""
    made = dict.fromkeys(KINDS, 0)
    memory = candidate.memory
    for line in (*memory.stays, *memory.worst.lines):
        made[_kind(line.name)] += line.num_bytes
    made["reserve"] = candidate.reserve
    return made


def _kind(name: str) -> str:
    if name.startswith(("parameters", "buffers for whole", "buffer for the head's parameters")):
        return "parameters"
    if name in ("master weights", "optimizer state"):
        return "optimizer"
    return "gradients" if name.startswith("gradients") and not name.startswith("gradients of") else "activations"


def bar(candidate: Candidate) -> str:
    """Return the memory of a GPU as a bar of letters, one letter for each kind."""
    have, text, so_far = candidate.machine.memory_bytes, "", 0
    for kind, num_bytes in memory_by_kind(candidate).items():
        so_far += num_bytes
        text += _LETTERS[kind] * (round(BAR * so_far / have) - len(text))
    return f"[{text:.<{BAR}}]"


def flags(candidate: Candidate, extra: Sequence[str]) -> str:
    """Return the flags for pretrain_gpt.py; ``extra``: flags that the planner assumed."""
    return " ".join([*candidate.layout.flags(), *extra])


def as_dict(found: Findings, base: Config, machine: Machine, extra: Sequence[str], top: int) -> dict[str, Any]:
    """Return the plan for JSON, in bytes, seconds and plain numbers."""
    return {
        "machine": {
            "gpu": machine.gpu.name, "gpus": machine.gpus, "nodes": machine.nodes, "inside": asdict(machine.inside),
            "between": asdict(machine.between) if machine.between else None, "cards": machine.cards,
            "rates": asdict(machine.gpu), "memory_bytes": machine.memory_bytes,
        },
        "parameters": count_parameters(base.model),
        **({"active_parameters": count_active_parameters(base.model)} if base.model.has_experts else {}),
        "global_batch_size": base.batch.global_batch_size,
        "seq_length": base.model.seq_length, "tried": found.tried, "fitting": len(found.fitting),
        "why": why_this_split(found.best_of_each()[0], found.best_of_each()),
        "best": [_candidate_dict(candidate, extra) for candidate in found.best_of_each()[:top]],
        "rejected": [asdict(each) for each in found.rejected],
    }  # fmt: skip


def _candidate_dict(candidate: Candidate, extra: Sequence[str]) -> dict[str, Any]:
    time = candidate.time
    exchanges = [
        {"kind": e.flow.kind, "op": e.flow.op, "group": e.flow.group, "ranks": e.flow.ranks, "bytes": e.flow.num_bytes,
         "link": e.link, "seconds": e.seconds, "hidden": e.hidden} for e in time.exchanges
    ]  # fmt: skip
    seconds = {
        "step": time.seconds, "products": time.products, "attention": time.attention, "memory": time.memory,
        "update": time.update, "host": time.host, "overlap": time.overlap, "copies": time.copies,
        "exposed": time.exposed, "bubble": time.bubble, "of_it_recomputed": time.recompute,
    }  # fmt: skip
    return {
        "layout": {**asdict(candidate.layout), "dp": candidate.layout.dp(candidate.machine.gpus)},
        "flags": flags(candidate, extra),
        "tokens_per_second": candidate.tokens_per_second, "mfu": candidate.mfu, "bound": time.bound, "seconds": seconds,
        "memory": memory_by_kind(candidate), "needs": candidate.needs, "exchanges": exchanges,
    }  # fmt: skip


def text(found: Findings, base: Config, machine: Machine, extra: Sequence[str], top: int) -> str:
    """Return the plan as text."""
    best = found.best_of_each()[:top]
    lines = [
        *_head(base, machine, extra, found), *_table(best), *_tighter(found), *_doubts(best),
        *why_this_split(best[0], found.best_of_each()), "", *_detail(best[0], extra), "",
        f"memory of a {_unit(machine)} (" + ", ".join(f"{_LETTERS[kind]} {kind}" for kind in KINDS) + "):",
        *(f"  {n} {bar(c)} {c.needs / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB" for n, c in enumerate(best, 1)),
        "", "flags of the others:", *(f"  {n} {flags(c, extra)}" for n, c in enumerate(best[1:], 2)),
    ]  # fmt: skip
    if len(best) == 1:
        lines = lines[:-2]
    rejected = [f"  {each.who}: {each.why}" for each in found.rejected]
    return "\n".join([*lines, *(["", "not possible:", *rejected] if rejected else [])])


def _tighter(found: Findings) -> list[str]:
    """Return a line about a faster layout that leaves under 5 % of the memory, or if all layouts do; else nothing."""
    best = found.candidates[0]
    tight = [c for c in found.candidates if c.is_tight and c.tokens_per_second > best.tokens_per_second]
    if best.is_tight:
        return ["tight: every layout leaves under 5 % of the memory; a little more of anything, and it does not fit"]
    if not tight:
        return []
    left = [(c.machine.memory_bytes - c.needs) / GIB for c in (tight[0], best)]
    faster, instead = tight[0].tokens_per_second / best.tokens_per_second - 1, " ".join(tight[0].layout.flags())
    return [f"tight: {faster:.1%} faster than 1, with {left[0]:.1f} GiB left instead of {left[1]:.1f}: {instead}"]


def _doubts(best: Sequence[Candidate]) -> list[str]:
    """Return a warning if a predicted MFU is above 100 %; else nothing."""
    if max(c.mfu for c in best) <= 1:
        return []
    gpu = best[0].machine.gpu
    return [
        f"MFU above 100 %: the peak of {gpu.name} that it is a share of ({gpu.peak_tflops:g} TFLOP/s) was measured too"
        " low, on a busy machine for instance; compare tokens/s"
    ]


def _unit(machine: Machine) -> str:
    return "process" if machine.is_cpu else "GPU"


def _head(base: Config, machine: Machine, extra: Sequence[str], found: Findings) -> list[str]:
    model, where = base.model, f"{machine.gpus} x {machine.gpu.name}"
    if machine.nodes > 1 and machine.between is not None:
        cards = f"{machine.cards} {'card' if machine.cards == 1 else 'cards'} of {machine.between.name}"
        where += f", {machine.nodes} nodes with {machine.per_node} each ({machine.inside.name} inside, {cards} a node)"
    else:
        where += f" ({machine.inside.name})"
    sizes = ", cp and pp" if any(c.layout.pp > 1 for c in found.candidates) else " and cp"
    said = [
        f"plan: {describe_parameters(model)}, {base.batch.global_batch_size} x {model.seq_length:,} tokens a step,"
        f" {base.precision.params_dtype}, on {where}",
        f"{found.tried:,} layouts looked at, {len(found.fitting):,} fit; the fastest for each tp, sp{sizes}:",
    ]
    return said + ([f"assumed, because nothing was given: {' '.join(extra)}"] if extra else [])


def _table(best: Sequence[Candidate]) -> list[str]:
    header = ["", "layout", "tokens/s", f"per {_unit(best[0].machine)}", "MFU", "step", "memory", "most of the time"]
    rows = [
        [
            str(number), c.layout.words(c.machine.gpus), f"{c.tokens_per_second:,.0f}",
            f"{c.tokens_per_second / c.machine.gpus:,.0f}", f"{c.mfu:.1%}", f"{c.time.seconds:.3g} s",
            f"{c.needs / GIB:.1f} GiB" + (" (tight)" if c.is_tight else ""), c.time.bound,
        ] for number, c in enumerate(best, 1)
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, *rows))
    return ["  ".join(cells).rstrip() for cells in padded]


def _detail(best: Candidate, extra: Sequence[str]) -> list[str]:
    time, kinds = best.time, memory_by_kind(best)
    of_kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.items() if size)
    worst = best.memory.worst
    lines = [
        f"1 in detail: {best.layout.words(best.machine.gpus)}",
        f"  flags: {flags(best, extra)}",
        f"  memory of a {_unit(best.machine)}: {of_kinds}; worst in {worst.phase}, {worst.name}",
        f"  step {time.seconds:.3g} s: products {time.products:.3g}, attention {time.attention:.3g}, norms and the like"
        f" {time.memory:.3g}, update {time.update:.3g}, exposed communication {time.exposed:.3g}, slowed by"
        f" communication {time.overlap:.3g}, waiting for Python {time.host:.3g}"
        + (f", copies to host memory and back {time.copies:.3g}" if time.copies else "")
        + (f", bubble of the pipeline {time.bubble:.3g}" if time.bubble else "")
        + (f"; {time.recompute:.3g} of it recomputed" if time.recompute else ""),
    ]
    for exchange in sorted(time.exchanges, key=lambda e: -e.flow.num_bytes):
        if exchange.flow.num_bytes < 2**20:
            continue
        flow, hidden = exchange.flow, exchange.hidden / max(exchange.seconds, 1e-12)
        lines.append(
            f"  {format_bytes(flow.num_bytes):>10} {flow.op} over {exchange.link}, {flow.ranks} ranks ({flow.group}):"
            f" {flow.kind}; {exchange.seconds:.3g} s, {hidden:.0%} hidden"
        )
    return lines


def share_of_attention(config: Config, machine: Machine) -> float:
    """Return the time in which keys and values travel over cp > 1, forward, relative to attention's.

    Ulysses sends 2n + 2g heads of each position there and back, whatever the length; cp sends keys and values, 2g
    heads, of all positions that others see. Attention grows with the square of the length and the exchange does not,
    so over a link of B bytes/s keys and values hide under attention from a length on:

        s* = e (c - 1) f F / (r B)

    with e bytes an element, f the share of the rows that the worst rank of c sends, F FLOP/s of attention forward, r
    query heads for each key; half of it for bidirectional attention. With a window both grow less, rows not at all and
    pairs with the length, so there is such a length, too: all are computed from the rows and pairs of the mask's plan.
    Heads, width, tp and sp drop out.
    """
    model, parallel = config.model, config.parallel
    tp, sp, cp = parallel.tensor_model_parallel_size, parallel.sequence_parallel_size, parallel.context_parallel_size
    assert model.num_attention_heads
    plan = context_plan(model, parallel)
    most_sent = max(sum(plan.rows_sent(rank, 1)) for rank in range(cp))
    element = {"float64": 8, "float32": 4}.get(config.precision.params_dtype, 2)
    heads_of_key = -(-model.num_attention_heads // (tp * sp)) / -(-model.num_groups // (tp * sp))
    num_bytes = 2 * element * most_sent / heads_of_key  # of a query head, an element of its width
    bandwidth = machine.rate("all_to_all", "cp", cp, tp, sp)
    return num_bytes / bandwidth * machine.gpu.attention_forward_tflops * 1e12 / (4 * max(map(plan.area, range(cp))))


def why_this_split(best: Candidate, others: Sequence[Candidate]) -> list[str]:
    """Return a sentence about the sizes of sp and cp, and one with other splits of as many ranks, if there are any."""
    layout, machine = best.layout, best.machine
    ranks = layout.sp * layout.cp
    if ranks == 1:
        return []
    model = best.config.model
    assert model.seq_length
    tried = layout if layout.cp > 1 else replace(layout, sp=1, mode="none", chunks=0, cp=ranks)
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
        ulysses = f"Ulysses (sp {layout.sp}) over {inside}, where bytes are cheap"
        said = f"both: {ulysses}, and cp {layout.cp} around it, since {hides}"
    lines, words = [f"sp and cp: {said}"], []
    for c in others:
        alike = (c.layout.tp, c.layout.pp, c.layout.sp * c.layout.cp) == (layout.tp, layout.pp, ranks)
        if alike and c.layout.axes != layout.axes:
            times = best.tokens_per_second / c.tokens_per_second
            words.append(f"sp {c.layout.sp} x cp {c.layout.cp} {times:.2f}")
    if words:
        lines.append(f"  other splits of {ranks} ranks, in time of the first: {', '.join(words)}")
    return lines
