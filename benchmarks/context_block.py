"""Attention across context-parallel ranks, forward and backward in bf16, against ring-flash-attention and USP, and against Ulysses.

    python benchmarks/context_block.py [--ranks 2 4] [--links 1 2] [--rounds 15] [--json docs/benchmarks/context_block.json]
    python benchmarks/context_block.py --links loopback --rounds 0          bytes and errors alone, which no load changes

On two "hosts" (network namespaces, one core each; four ranks share cores and link), for three masks: causal, packed
documents, sliding window. Two levels: attention alone, which is all that the peers have, and a block's attention (norm, QKV,
attention, projection, residual), in which ours are the package's own layers, Ulysses and both together among them. The
peers' flash_attn is benchmarks/flash_attn_cpu.py: the kernel that ours use, too.

    bytes         what a rank's TCP connections sent in one forward and backward pass (benchmarks/wire.py); beside it what the
                  interface of a host sent, with the headers
    errors        |x - x64| / |x64| of out, dq, dk, dv over all ranks, x64 from dense fp64 attention of the same bf16 inputs;
                  beside them those of one kernel call over the whole sequence. Who is wrong by more than 5 % is not raced
    compute       a contender with exchanges that return at once
    exchanges     its exchanges one after another, nothing else
    hidden        1 - (T - compute) / exchanges
    control       the same exchanges, each under its share of plain matrix products that take as long as compute: what can be
                  hidden at all

All contenders take turns within each round; figures are medians over rounds, ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import REPOSITORY, Stats, child_environment, load_average, print_table, ratios, write_json
from context_contenders import (
    PEERS,
    RING,
    Contender,
    Ours,
    PlainBlock,
    block_of,
    contenders,
    packed_row,
    random_rows,
    random_weights,
)
from hosts import HostsError, answering, in_turn, run_workers
from wire import bytes_sent

SHAPE = {"seq_length": 4096, "num_heads": 16, "head_dim": 64, "check_length": 2048}
SMOKE = {"seq_length": 128, "num_heads": 4, "head_dim": 8, "check_length": 64}
MASKS = ("causal", "documents", "window")
LEVELS = ("attention", "block")
BYTES_BAR = {"causal": 0.5, "documents": 0.3, "window": 0.12}  # cp 4 of ring-flash-attention
TIME_BAR = {"causal": 0.9, "documents": 0.6}  # cp 2 of the best peer
HIDDEN_BAR = {"causal": 0.95}  # cp 2 of the control; other masks exchange too little to tell from noise
WRONG = 0.05


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=[2, 4])
    parser.add_argument(
        "--links", nargs="+", default=["1", "2"], help="Gbit/s of a link between two hosts, or loopback"
    )
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument(
        "--rounds", type=int, default=15, help="measured rounds (default: 15); 0: bytes and errors alone"
    )
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--peer-python",
        default=str(REPOSITORY / ".venv-peers" / "bin" / "python"),
        help="an interpreter with the peers",
    )
    parser.add_argument("--no-peer", action="store_true", help="without the peers, in this interpreter")
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--stages-ahead", type=int, default=1, help="--cp-stages-ahead of ours")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# the parent


def measure(options: argparse.Namespace, shape: dict[str, int], ranks: int, link: str) -> dict[str, Any]:
    """All masks on one kind of link; raises RuntimeError if a rank fails."""
    interpreter = sys.executable if options.no_peer else options.peer_python
    task = {
        "shape": shape, "rounds": options.rounds, "warmup": options.warmup, "peer": not options.no_peer, "masks": options.masks,
        "levels": options.levels, "stages_ahead": options.stages_ahead,
    }  # fmt: skip
    return run_workers(link, str(Path(__file__).resolve()), interpreter, task, child_environment(1), ranks)


def summarise(ranks: int, mask: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Ratios of ours to the peers, hidden shares, and the bars."""
    ours, wrong = f"cp {ranks}", raw["wrong"]
    results: dict[str, Any] = {"bytes": {}, "seconds": {}, "hidden": {}, "bars": {}}
    for name, sent in raw["bytes"].items():
        results["bytes"][name] = {"mean": fmean(sent), "worst": max(sent)}
    if RING in results["bytes"]:
        of_ring = results["bytes"][ours]["mean"] / results["bytes"][RING]["mean"]
        results["bars"]["bytes of ring-flash-attention"] = {
            "found": of_ring,
            "bar": BYTES_BAR[mask] if ranks == 4 else None,
        }
    for level, seconds in raw["seconds"].items():
        results["seconds"][level] = {name: Stats.of(values) for name, values in seconds.items()}
        for name in (*raw["bytes"], "control"):
            if f"{name}, exchanges" in seconds:
                alone = seconds["control, products" if name == "control" else f"{name}, compute"]
                values = zip(seconds[name], alone, seconds[f"{name}, exchanges"], strict=True)
                results["hidden"][f"{level}, {name}"] = Stats.of(1 - (t - c) / e for t, c, e in values)
        racing = [name for name in seconds if name in PEERS[ranks] and name not in wrong]
        if racing:
            best = min(racing, key=lambda name: results["seconds"][level][name].median)
            bar = TIME_BAR.get(mask) if (ranks, level) == (2, "attention") else None
            of_best = ratios(seconds[ours], seconds[best])
            results["bars"][f"{level}, time of {best}"] = {
                "found": of_best.median,
                "low": of_best.low,
                "high": of_best.high,
                "bar": bar,
            }
    hidden = results["hidden"]
    if "attention, control" in hidden:
        share = hidden[f"attention, {ours}"].median / hidden["attention, control"].median
        results["bars"]["hidden of the control"] = {"found": share, "bar": HIDDEN_BAR.get(mask) if ranks == 2 else None}
    return results


def report(ranks: int, link: str, mask: str, raw: dict[str, Any], results: dict[str, Any]) -> None:
    title = f"{mask}, {ranks} ranks, " + ("loopback" if link == "loopback" else f"two hosts, {link} Gbit/s")
    rows = []
    for name, sent in results["bytes"].items():
        errors = raw["errors"].get(name)
        interface = f"{fmean(raw['interface'][name]) / 1e6:.3f}" if raw["interface"] else ""
        of_it = " ".join(f"{error:.1e}" for error in errors) if errors else ""
        rows.append(
            [
                name,
                *(f"{sent[which] / 1e6:.3f}" for which in ("mean", "worst")),
                interface,
                of_it,
                raw["wrong"].get(name, ""),
            ]
        )
    rows.append(["one kernel call", "", "", "", " ".join(f"{error:.1e}" for error in raw["errors"]["one call"]), ""])
    header = ["", "MB a rank", "worst rank", "interface", "errors: out dq dk dv", ""]
    print_table(title, header, rows, [f"{name}: {reason}" for name, reason in raw["left_out"].items()])
    for level, seconds in results["seconds"].items():
        rows = []
        for name, stats in seconds.items():
            hidden = results["hidden"].get(f"{level}, {name}")
            rows.append([name, stats.text("s"), hidden.text("", digits=2) if hidden else ""])
        print_table(f"{level}: {title}", ["", "median (min-max)", "hidden"], rows)
    for name, found in results["bars"].items():
        bar = "" if found["bar"] is None else f" (bar {found['bar']})"
        print(f"  {name}: {found['found']:.3f}{bar}")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return worker(json.loads(options.worker))
    shape = dict(SMOKE if options.smoke else SHAPE)
    if options.seq_length:
        shape["seq_length"] = options.seq_length
    if not options.no_peer and not Path(options.peer_python).exists():
        print(
            f"{options.peer_python} does not exist: run benchmarks/setup_peers.sh ring, or use --no-peer",
            file=sys.stderr,
        )
        return 2
    everything: dict[str, Any] = {"shape": shape, "rounds": options.rounds, "cells": {}}
    versions: dict[str, str] = {}
    for ranks in options.ranks:
        for link in options.links:
            try:
                answer = measure(options, shape, ranks, link)
            except (HostsError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 1
            versions = answer["versions"]
            for mask, raw in answer["masks"].items():
                results = summarise(ranks, mask, raw)
                report(ranks, link, mask, raw, results)
                found = {key: value for key, value in raw.items() if key != "seconds"}  # of which the medians are kept
                everything["cells"][f"{ranks}:{link}, {mask}"] = {**_plain(results), "raw": found}
            print(f"load average {load_average():.1f}; the benchmark itself makes {ranks}", file=sys.stderr)
    write_json(options.json, "context_block", everything, versions)
    return 0


def _plain(x: Any) -> Any:
    if isinstance(x, Stats):
        return x.as_dict()
    return {key: _plain(value) for key, value in x.items()} if isinstance(x, dict) else x


# a rank


def worker(task: dict[str, Any]) -> int:
    """Every mask, every contender."""
    import torch

    with answering(task) as answer:
        answer["versions"] = {"torch": str(torch.__version__)}
        if task["peer"]:
            from importlib.metadata import version

            import flash_attn_cpu

            flash_attn_cpu.install()
            answer["versions"] |= {name: version(name) for name in ("ring-flash-attn", "yunchang")}
        answer["masks"] = {mask: measure_mask(task, mask) for mask in task["masks"]}
    return 0


def measure_mask(task: dict[str, Any], mask: str) -> dict[str, Any]:
    """Errors at the length that is checked, then bytes and times at the real one. Collective."""
    small, _ = contenders(task, mask, task["shape"]["check_length"])
    errors, of_blocks = errors_of(task, small, mask), errors_of_blocks(task, small, mask)
    wrong = {name: f"wrong by {max(found):.1g}" for name, found in errors.items() if not max(found) < WRONG}
    for name, found in of_blocks.items():
        assert name in wrong or max(found) < WRONG, f"the block of {name} is wrong by {found}"
    built, left_out = contenders(task, mask, task["shape"]["seq_length"])
    raw: dict[str, Any] = {"errors": errors, "errors of blocks": of_blocks, "wrong": wrong, "left_out": left_out}
    raw |= {"bytes": {}, "interface": {}, "plan": {}, "seconds": {}}
    levels = {level: build(task, built, level) for level in LEVELS}
    for name, contender in built.items():
        raw["bytes"][name], interface = count_bytes(levels["block"][name])
        if interface is not None:
            raw["interface"][name] = interface
        planned = contender.planned_bytes()
        if planned is not None:
            raw["plan"][name] = planned
    for level in task["levels"] if task["rounds"] else ():
        runs = {name: run for name, run in levels[level].items() if name not in wrong}
        raw["seconds"][level] = in_turn(task, with_controls(runs, f"cp {task['ranks']}"))
    return raw


# what is computed, and whether it is right


def build(task: dict[str, Any], built: dict[str, Contender], level: str) -> dict[str, Callable[[], Any]]:
    """Return what each contender does in one forward and backward pass, on rows of this rank."""
    shape, weights = task["shape"], random_weights(task["shape"])
    q, k, v, grad = random_rows(shape, shape["seq_length"], 4)
    runs: dict[str, Callable[[], Any]] = {}
    for name, contender in built.items():
        at = contender.positions
        if level == "block":
            block, x, g = block_of(task, contender, weights), q.flatten(1)[at], grad.flatten(1)[at]
            runs[name] = lambda block=block, x=x, g=g: block.run(x, g)  # type: ignore[misc]
        elif not (isinstance(contender, Ours) and contender.sp > 1):  # whose exchanges are the block's
            leaves, g = contender.inputs(q[at], k[at], v[at]), grad[at]
            runs[name] = lambda contender=contender, leaves=leaves, g=g: contender.run(leaves, g)  # type: ignore[misc]
    return runs


def dense(q: Any, k: Any, v: Any, mask: str) -> Any:
    """Return attention [s, n, d] in the dtype of q, k, v, head by head."""
    import torch

    length = q.shape[0]
    at = torch.arange(length)
    distance = at[:, None] - at
    seen = distance >= 0
    if mask == "window":
        seen &= distance < length // 8
    if mask == "documents":
        document = torch.bucketize(at, torch.tensor(packed_row(length)), right=True)
        seen &= document[:, None] == document
    heads = [
        torch.softmax((q[:, i] @ k[:, i].t() / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf), -1) @ v[:, i]
        for i in range(q.shape[1])
    ]
    return torch.stack(heads, 1)


def errors_of(task: dict[str, Any], built: dict[str, Contender], mask: str) -> dict[str, list[float]]:
    """Return the errors of out, dq, dk and dv of each contender and of one kernel call. Collective."""
    from megatron_sp.ops.attention import AttentionMask, core_attention

    length = task["shape"]["check_length"]
    *rows, grad = random_rows(task["shape"], length, 4)
    exact = [x.double().requires_grad_() for x in rows]
    out = dense(*exact, mask)
    out.backward(grad.double())
    wanted = [out.detach(), *(x.grad for x in exact)]
    found = {}
    for name, contender in built.items():
        if isinstance(contender, Ours) and contender.sp > 1:
            continue
        at = contender.positions
        got = contender.run(contender.inputs(*(x[at] for x in rows)), grad[at])
        found[name] = [error_over_ranks(x, want[at]) for x, want in zip(got, wanted, strict=True)]
    leaves = [x[:, :, None].clone().requires_grad_() for x in rows]
    documents = (packed_row(length),) if mask == "documents" else None
    one_call = AttentionMask(documents=documents, window=length // 8 if mask == "window" else None)
    out = core_attention(*leaves, one_call, kernel="sdpa")
    out.backward(grad.reshape(out.shape))
    got = [out.detach(), *(x.grad for x in leaves)]
    found["one call"] = [error_over_ranks(x.reshape(want.shape), want) for x, want in zip(got, wanted, strict=True)]
    return found


def errors_of_blocks(task: dict[str, Any], built: dict[str, Contender], mask: str) -> dict[str, list[float]]:
    """Return the errors of y, dx and the gradients of both weights of each contender's block. Collective."""
    import torch
    import torch.distributed as dist

    shape, weights = task["shape"], random_weights(task["shape"])
    x, grad = (rows.flatten(1) for rows in random_rows(shape, shape["check_length"], 2))
    exact = PlainBlock(lambda q, k, v: dense(q, k, v, mask), [w.double() for w in weights], shape["num_heads"])
    y, dx, *of_weights = exact.run(x.double(), grad.double())
    found = {}
    for name, contender in built.items():
        at = contender.positions
        got_y, got_dx, *got = block_of(task, contender, weights).run(x[at], grad[at])
        found[name] = [error_over_ranks(got_y, y[at]), error_over_ranks(got_dx, dx[at])]
        for mine, want in zip(got, of_weights, strict=True):
            total = mine.double()
            dist.all_reduce(total)
            found[name].append(float(torch.linalg.vector_norm(total - want) / torch.linalg.vector_norm(want)))
    return found


def error_over_ranks(got: Any, want: Any) -> float:
    """Return |got - want| / |want| over the rows of all ranks. Collective."""
    import torch
    import torch.distributed as dist

    sums = torch.stack([(got.double() - want).square().sum(), want.square().sum()])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


# bytes


def count_bytes(run: Callable[[], Any]) -> tuple[list[int], list[int] | None]:
    """Return what each rank sends in one pass, barriers taken off, and what the interface of its host sends in all. Collective."""
    from megatron_sp.comm.groups import world_group
    from megatron_sp.comm.object_collectives import gather_json

    run()  # connections are made
    mine = [a - b for a, b in zip(_counted(run), _counted(lambda: None), strict=True)]
    sent, *interfaces = map(list, zip(*gather_json(mine, world_group()), strict=True))
    return sent, interfaces[0] if interfaces else None


def _counted(run: Callable[[], Any]) -> list[int]:
    """Return what this process sends, and what the interface does, if this is a host of ``hosts.py``."""
    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.1)  # what the barrier sends last is on its way
    before = _counters()
    run()
    dist.barrier()
    time.sleep(0.1)
    return [b - a for a, b in zip(before, _counters(), strict=True)]


def _counters() -> list[int]:
    sent, interface = bytes_sent(), Path("/sys/class/net/veth0/statistics/tx_bytes")
    if sent is None:
        raise RuntimeError(
            "this kernel does not count the bytes of a connection (tcp_info): bytes cannot be measured here"
        )
    return [sent, *([int(interface.read_text())] if interface.exists() else [])]


# exchanges without computation, computation without exchanges


Exchange = Callable[[], list[Any]]  # starts one that was seen, with buffers of its own; returns what to wait for


class _Done:
    def wait(self) -> None:
        """Return at once."""


@contextlib.contextmanager
def exchanges_by(seen: list[Exchange] | None) -> Iterator[None]:
    """Put what is exchanged by all_to_all_single and batch_isend_irecv, ours or others', into ``seen``; None: send nothing, receive 0."""
    import torch
    import torch.distributed as dist

    real, real_batch = dist.all_to_all_single, dist.batch_isend_irecv

    def all_to_all(output: Any, given: Any, *counts: Any, group: Any = None, async_op: bool = False) -> Any:
        if seen is None:
            output.zero_()
            return _Done() if async_op else None
        send, receive = torch.zeros_like(given), torch.zeros_like(output)
        seen.append(lambda: [real(receive, send, *counts, group=group, async_op=True)])
        return real(output, given, *counts, group=group, async_op=async_op)

    def batch(ops: list[Any]) -> list[Any]:
        if seen is not None:
            copies = [dist.P2POp(op.op, torch.zeros_like(op.tensor), op.peer, group=op.group) for op in ops]
            seen.append(lambda: real_batch(copies))
            return list(real_batch(ops))
        for op in ops:
            if op.op is dist.irecv:
                op.tensor.zero_()
        return []

    dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = real, real_batch


def with_controls(runs: dict[str, Callable[[], Any]], ours: str) -> dict[str, Callable[[], Any]]:
    """Return the contenders, each with its computation and its exchanges alone, and the control for ``ours``. Collective."""
    import torch
    import torch.distributed as dist

    found: dict[str, Callable[[], Any]] = {}
    for name, run in runs.items():
        seen: list[Exchange] = []
        with exchanges_by(seen):
            run()
        if name == ours:
            under = seen

        def compute(run: Callable[[], Any] = run) -> None:
            with exchanges_by(None):
                run()

        def exchanges(seen: list[Exchange] = seen) -> None:
            for exchange in seen:
                for work in exchange():
                    work.wait()

        found |= {name: run, f"{name}, compute": compute}
        if seen:
            found[f"{name}, exchanges"] = exchanges
    a = torch.randn(256, 256)
    out = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    times = torch.tensor(
        [min(_seconds(f) for _ in range(3)) for f in (found[f"{ours}, compute"], lambda: products(20))]
    )
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    each = max(1, round(float(times[0] / times[1]) * 20 / max(1, len(under))))  # for each exchange

    def alone() -> None:
        for _ in under:
            products(each)

    def both() -> None:
        for exchange in under:
            works = exchange()
            products(each)
            for work in works:
                work.wait()

    return (
        found | {"control": both, "control, products": alone, "control, exchanges": found[f"{ours}, exchanges"]}
        if under
        else found
    )


def _seconds(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
