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
    sizes = dict.fromkeys(KINDS, 0) | {"reserve": candidate.reserve}
    for name, num_bytes in (*candidate.memory.stays, *candidate.memory.worst.lines):
        kind = "activations"
        if name.startswith(("parameters", "buffers for whole")):
            kind = "parameters"
        elif name in ("master weights", "optimizer state"):
            kind = "optimizer"
        elif name.startswith("gradients"):
            kind = "gradients"
        sizes[kind] += num_bytes
    return sizes


def as_dict(found: Findings, base: Config, machine: Machine, extra: Sequence[str], top: int) -> dict[str, Any]:
    """Return the plan for JSON, in bytes, seconds and plain numbers."""
    best = found.best_of_each()
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
        "why": why_this_split(best[0], best),
        "best": [_candidate_dict(candidate, extra) for candidate in best[:top]],
        "rejected": [rejected._asdict() for rejected in found.rejected],
    }  # fmt: skip


def _candidate_dict(candidate: Candidate, extra: Sequence[str]) -> dict[str, Any]:
    time = candidate.time
    exchanges = [
        {"kind": e.flow.kind, "op": e.flow.op, "group": e.flow.group, "ranks": e.flow.ranks, "bytes": e.flow.num_bytes,
         "link": e.link, "seconds": e.seconds, "hidden": e.hidden} for e in time.exchanges
    ]  # fmt: skip
    names = ("products", "attention", "memory", "update", "host", "overlap", "copies", "exposed", "bubble")
    seconds = {
        "step": time.seconds,
        **{name: getattr(time, name) for name in names},
        "of_it_recomputed": time.recompute,
    }
    return {
        "layout": {**asdict(candidate.layout), "dp": candidate.layout.dp(candidate.machine.gpus)},
        "flags": flags(candidate, extra),
        "tokens_per_second": candidate.tokens_per_second, "mfu": candidate.mfu, "bound": time.bound, "seconds": seconds,
        "memory": memory_by_kind(candidate), "needs": candidate.needs, "exchanges": exchanges,
    }  # fmt: skip


def flags(candidate: Candidate, extra: Sequence[str]) -> str:
    """Return the flags for pretrain_gpt.py; ``extra``: flags that the planner assumed."""
    return " ".join([*candidate.layout.flags(), *extra])


def text(found: Findings, base: Config, machine: Machine, extra: Sequence[str], top: int) -> str:
    """Return the plan as text."""
    every = found.best_of_each()
    best, unit, have = every[:top], "process" if machine.is_cpu else "GPU", machine.memory_bytes / GIB
    kinds = ", ".join(f"{_LETTERS[kind]} {kind}" for kind in KINDS)
    lines = [
        *_head(base, machine, extra, found), *_table(best, unit), *_remarks(found, best),
        *why_this_split(best[0], every), "", *_detail(best[0], extra, unit), "", f"memory of a {unit} ({kinds}):",
    ]  # fmt: skip
    for number, candidate in enumerate(best, 1):
        bar, so_far = "", 0
        for kind, num_bytes in memory_by_kind(candidate).items():
            so_far += num_bytes
            bar += _LETTERS[kind] * (round(BAR * so_far / machine.memory_bytes) - len(bar))
        lines.append(f"  {number} [{bar:.<{BAR}}] {candidate.needs / GIB:.1f} of {have:.1f} GiB")
    if len(best) > 1:
        lines += ["", "flags of the others:"]
        lines += [f"  {number} {flags(c, extra)}" for number, c in enumerate(best[1:], 2)]
    if found.rejected:
        lines += ["", "not possible:", *(f"  {rejected.who}: {rejected.why}" for rejected in found.rejected)]
    return "\n".join(lines)


def _remarks(found: Findings, best: Sequence[Candidate]) -> list[str]:
    # about a faster layout that leaves under 5 % of the memory, or if all do, and an MFU that cannot be
    first, gpu, lines = found.candidates[0], best[0].machine.gpu, []
    tight = [c for c in found.candidates if c.is_tight and c.tokens_per_second > first.tokens_per_second]
    if first.is_tight:
        lines.append(
            "tight: every layout leaves under 5 % of the memory; a little more of anything, and it does not fit"
        )
    elif tight:
        left = [(c.machine.memory_bytes - c.needs) / GIB for c in (tight[0], first)]
        faster, instead = tight[0].tokens_per_second / first.tokens_per_second - 1, " ".join(tight[0].layout.flags())
        lines.append(
            f"tight: {faster:.1%} faster than 1, with {left[0]:.1f} GiB left instead of {left[1]:.1f}: {instead}"
        )
    if max(c.mfu for c in best) > 1:
        lines.append(
            f"MFU above 100 %: the peak of {gpu.name} that it is a share of ({gpu.peak_tflops:g} TFLOP/s) was measured"
            " too low, on a busy machine for instance; compare tokens/s"
        )
    return lines


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


def _table(best: Sequence[Candidate], unit: str) -> list[str]:
    rows = [["", "layout", "tokens/s", f"per {unit}", "MFU", "step", "memory", "most of the time"]]
    for number, c in enumerate(best, 1):
        rows.append([
            str(number), c.layout.words(c.machine.gpus), f"{c.tokens_per_second:,.0f}",
            f"{c.tokens_per_second / c.machine.gpus:,.0f}", f"{c.mfu:.1%}", f"{c.time.seconds:.3g} s",
            f"{c.needs / GIB:.1f} GiB" + (" (tight)" if c.is_tight else ""), c.time.bound,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def _detail(best: Candidate, extra: Sequence[str], unit: str) -> list[str]:
    time, worst = best.time, best.memory.worst
    of_kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in memory_by_kind(best).items() if size)
    lines = [
        f"1 in detail: {best.layout.words(best.machine.gpus)}",
        f"  flags: {flags(best, extra)}",
        f"  memory of a {unit}: {of_kinds}; worst in {worst.phase}, {worst.name}",
        f"  step {time.seconds:.3g} s: products {time.products:.3g}, attention {time.attention:.3g}, norms and the like"
        f" {time.memory:.3g}, update {time.update:.3g}, exposed communication {time.exposed:.3g}, slowed by"
        f" communication {time.overlap:.3g}, waiting for Python {time.host:.3g}"
        + (f", copies to host memory and back {time.copies:.3g}" if time.copies else "")
        + (f", bubble of the pipeline {time.bubble:.3g}" if time.bubble else "")
        + (f"; {time.recompute:.3g} of it recomputed" if time.recompute else ""),
    ]
    for flow, link, seconds, hidden in sorted(time.exchanges, key=lambda exchange: -exchange.flow.num_bytes):
        if flow.num_bytes >= 2**20:
            lines.append(
                f"  {format_bytes(flow.num_bytes):>10} {flow.op} over {link}, {flow.ranks} ranks ({flow.group}):"
                f" {flow.kind}; {seconds:.3g} s, {hidden / max(seconds, 1e-12):.0%} hidden"
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
