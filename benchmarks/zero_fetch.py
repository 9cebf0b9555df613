"""How to make a sharded unit whole (ZeRO stage 3): one all_gather into place, all_reduce, coalesced, parameter by parameter.

    python benchmarks/zero_fetch.py [--ranks 2 4] [--json docs/benchmarks/zero_fetch.json] [--plot docs/benchmarks/zero_fetch.png]

    flat             ours: a rank's part of a unit is one range; one all_gather into a buffer that stays, whose views are the parameters
    flat all_reduce  ours with --zero3-fetch all_reduce: the same buffer cleared, the own range copied in, one all_reduce
    all_reduce       DeepSpeed #5420: every parameter sharded by itself; a new cleared buffer, the own shards copied in, one all_reduce
    coalesced        DeepSpeed's default: the own shards in one new buffer, one all_gather, then for each parameter W narrows and a cat
    per parameter    DeepSpeed's allgather_sequential: one all_gather for each parameter, into its new buffer

The last three are DeepSpeed's own sequences of tensor operations without its bookkeeping (states, traces, streams). A
fetch is: start, wait, and let go again; fp32, ranks on gloo over loopback with one thread each. All ways take turns
within each round; medians over rounds.

    wall     seconds per fetch with the real collective
    host     CPU seconds per fetch with a collective that returns at once: what the host does itself. On a CPU that includes its copies,
             on a GPU only what it takes to launch them; at the smallest size both are close. Any number of ranks can be played this way.
    sent     bytes that a rank sends per byte of the unit, as the kernel counts them
    memory   peak of what a fetch needs beside the shards, per byte of the unit, buffers that stay included
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, child_environment, load_average, print_table, ratios, write_json
from hosts import HostsError, join, run_workers

WAYS = ("flat", "flat all_reduce", "all_reduce", "coalesced", "per parameter")
SIZES_KIB, PARAMS, FAKED = [64, 1024, 16384, 65536], [1, 16, 128], [2, 8, 64, 256]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-kib", nargs="+", type=int, default=SIZES_KIB, help="bytes of a unit")
    parser.add_argument("--params", nargs="+", type=int, default=PARAMS, help="parameters of a unit, all of one size")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="processes that really communicate")
    parser.add_argument("--faked", nargs="+", type=int, default=FAKED, help="ranks for the host time")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (default: 15)")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="two small units: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--plot", metavar="FILE", help="a picture (needs matplotlib, extra `plot`)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.smoke:
        options.sizes_kib, options.params, options.faked = [16, 64], [1, 3], [2, 8]
    for name in ("sizes_kib", "params", "ranks", "faked", "rounds"):
        if min(values if isinstance(values := getattr(options, name), list) else [values]) < (
            2 if name in ("ranks", "faked") else 1
        ):
            parser.error(f"--{name.replace('_', '-')}: too small")
    if max(options.params) * 4 > min(options.sizes_kib) * 1024:
        parser.error(f"--params {max(options.params)}: a unit of {min(options.sizes_kib)} KiB has fewer elements")
    return options


# the parent


def main(argv: list[str] | None = None) -> int:
    if argv is None and sys.argv[1:2] == ["--worker"]:
        return worker(json.loads(sys.argv[2]))
    options = parse(argv)
    if options.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            print("--plot needs matplotlib: pip install -e '.[plot]'", file=sys.stderr)
            return 2
    cells = [(size * 1024, params) for size in options.sizes_kib for params in options.params]
    results: dict[str, Any] = {
        "rounds": options.rounds,
        "host": host_times(cells, sorted({*options.faked, *options.ranks}), options.rounds),
    }
    results["memory"] = memory(max(cells)[0], max(options.params), max(options.ranks))
    results["wall"] = []
    versions: dict[str, str] = {}
    for ranks in options.ranks:
        task = {"cells": cells, "rounds": options.rounds, "warmup": options.warmup}
        try:
            raw = run_workers(
                "loopback", str(Path(__file__).resolve()), sys.executable, task, child_environment(1), ranks
            )
        except (HostsError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        versions = raw["versions"]
        results["wall"] += [{"ranks": ranks, **cell} for cell in raw["cells"]]
        report_wall(ranks, results)
        print(f"load average {load_average():.1f}; the benchmark itself makes {ranks}", file=sys.stderr)
    report_host(results, options)
    write_json(options.json, "zero_fetch", results, versions)
    if options.plot:
        plot(results, options, options.plot)
        print(f"drawn into {options.plot}")
    return 0


def report_wall(ranks: int, results: dict[str, Any]) -> None:
    cells = [cell for cell in results["wall"] if cell["ranks"] == ranks]
    rows = []
    for cell in cells:
        times = [Stats.of(cell["seconds"][way]).text("", 1e3, 2) for way in WAYS]
        rows.append([f"{_size(cell['bytes'])}, {cell['params']}", *times])
    print_table(f"Wall time of a fetch, ms, {ranks} ranks, loopback", ["unit, parameters", *WAYS], rows)
    largest = max(cells, key=lambda cell: (cell["bytes"], cell["params"]))
    sent = [largest["sent"][way] for way in WAYS]
    lines = [
        ["wall time of flat's, all sizes", *(f"{_typical(cells, way):.2f}" for way in WAYS)],
        ["bytes sent / bytes of the unit", *("" if s is None else f"{s / largest['bytes']:.2f}" for s in sent)],
        ["memory / bytes of the unit", *(f"{results['memory'][way]:.2f}" for way in WAYS)],
    ]
    print_table(f"{ranks} ranks; bytes of the largest unit", ["", *WAYS], lines)


def _typical(cells: list[dict[str, Any]], way: str) -> float:
    """Median over sizes of the median ratio to flat within a round."""
    return Stats.of(ratios(cell["seconds"][way], cell["seconds"]["flat"]).median for cell in cells).median


def report_host(results: dict[str, Any], options: argparse.Namespace) -> None:
    sizes = {min(options.sizes_kib) * 1024, max(options.sizes_kib) * 1024}
    rows = [
        [
            f"{_size(cell['bytes'])}, {cell['params']}, {cell['ranks']}",
            *(f"{Stats.of(cell['seconds'][way]).median * 1e6:.0f}" for way in WAYS),
        ]
        for cell in results["host"]
        if cell["bytes"] in sizes
    ]  # fmt: skip
    print_table("Host time of a fetch, us, no communication", ["unit, parameters, ranks", *WAYS], rows)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def plot(results: dict[str, Any], options: argparse.Namespace, path: str) -> None:
    """Wall time against size, for each number of ranks, and host time against ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    middle = sorted(options.params)[len(options.params) // 2]
    most, least = max(options.params), min(options.sizes_kib) * 1024
    figure, axes = plt.subplots(
        1, len(options.ranks) + 1, figsize=(4.2 * (len(options.ranks) + 1), 3.6), layout="constrained"
    )
    for axis, ranks in zip(axes, options.ranks, strict=False):
        cells = [cell for cell in results["wall"] if cell["ranks"] == ranks and cell["params"] == middle]
        _lines(axis, cells, [cell["bytes"] / 2**20 for cell in cells], 1e3)
        axis.set(title=f"wall time, {ranks} ranks, {middle} parameters", xlabel="unit, MiB", ylabel="ms")
    cells = [cell for cell in results["host"] if cell["params"] == most and cell["bytes"] == least]
    _lines(axes[-1], cells, [cell["ranks"] for cell in cells], 1e6)
    axes[-1].set(title=f"host time, {most} parameters, {_size(least)}", xlabel="ranks (faked)", ylabel="us")
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _lines(axis: Any, cells: list[dict[str, Any]], x: list[float], scale: float) -> None:
    for way in WAYS:
        axis.plot(
            x, [Stats.of(cell["seconds"][way]).median * scale for cell in cells], marker="o", markersize=3, label=way
        )


# what is measured without communication


class FakeGroup:
    """The first of so many ranks, for those who only ask how many."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@contextmanager
def no_communication() -> Iterator[None]:
    """Collectives of the ways return at once with whatever is in their buffers."""
    import megatron_sp.optim.weights as weights
    from megatron_sp.comm.collectives import done

    def nothing(x: Any, group: Any, out: Any = None) -> Any:
        return done(x if out is None else out)

    gather, reduce = weights.all_gather_async, weights.all_reduce_async
    weights.all_gather_async = weights.all_reduce_async = nothing  # type: ignore[assignment]
    try:
        yield
    finally:
        weights.all_gather_async, weights.all_reduce_async = gather, reduce


def host_times(cells: list[tuple[int, int]], ranks: list[int], rounds: int) -> list[dict[str, Any]]:
    """Seconds of each way for each unit and number of ranks."""
    import torch

    torch.set_num_threads(1)
    found = []
    with no_communication():
        for size, params in cells:
            for number in ranks:
                ways = make_ways(FakeGroup(number), values_of(size, params))
                seconds: dict[str, list[float]] = {name: [] for name in ways}
                for index in range(rounds + 1):
                    for name, way in ways.items():
                        spent = fetch_repeatedly(way, repeats(size), time.thread_time)
                        if index > 0:
                            seconds[name].append(spent)
                found.append({"bytes": size, "params": params, "ranks": number, "seconds": seconds})
    return found


def memory(size: int, params: int, ranks: int) -> dict[str, float]:
    """Peak bytes of a fetch beside the shards, per byte of the unit."""
    from storages import StorageCount

    found = {}
    with no_communication():
        for name, kind in kinds().items():
            with StorageCount() as count:
                way = kind(FakeGroup(ranks), values_of(size, params))
                count.reset_peak()
                way.fetch()
                found[name] = (count.peak - way.shard_bytes) / size
                way.release()
    return found


def repeats(size: int) -> int:
    """Fetches in a turn: enough that a clock can tell."""
    return max(1, min(20, (8 << 20) // size))


def fetch_repeatedly(way: Any, number: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per fetch."""
    began = clock()
    for _ in range(number):
        way.fetch()
        way.release()
    return (clock() - began) / number


# a rank


def worker(task: dict[str, Any]) -> int:
    """Every way in turn, for every unit; rank 0 prints one line of JSON."""
    import torch
    import torch.distributed as dist
    from wire import bytes_sent

    sys.stdout, out = sys.stderr, sys.stdout
    join(task)
    found = []
    for size, params in task["cells"]:
        values, number = values_of(size, params), repeats(size)
        ways = make_ways(dist.group.WORLD, values)
        for name, way in ways.items():
            way.fetch()
            assert all(torch.equal(a.data, b) for a, b in zip(way.params, values, strict=True)), (
                f"{name} does not bring the parameters"
            )
            way.release()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        sent: dict[str, int | None] = {}
        for index in range(task["warmup"] + task["rounds"]):
            for name, way in ways.items():
                dist.barrier()
                before = bytes_sent()
                spent = fetch_repeatedly(way, number)
                after = bytes_sent()
                sent[name] = None if before is None or after is None else (after - before) // number
                if index >= task["warmup"]:
                    seconds[name].append(spent)
        found.append({"bytes": size, "params": params, "seconds": seconds, "sent": sent})
    if task["rank"] == 0:
        print(json.dumps({"cells": found, "versions": {"torch": str(torch.__version__)}}), file=out, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


# the ways


def values_of(size: int, params: int) -> list[Any]:
    """The parameters of a unit, the same on every rank: matrices of about a 64th of their length, which ranks need not divide."""
    import torch

    generator = torch.Generator().manual_seed(params)
    numel = size // 4 // params
    shape = (numel // 64, 64) if numel % 64 == 0 else (numel,)
    return [torch.randn(shape, generator=generator) for _ in range(params)]


def kinds() -> dict[str, Any]:
    return {
        "flat": Flat, "flat all_reduce": FlatAllReduce, "all_reduce": AllReduce, "coalesced": Coalesced, "per parameter": PerParameter,
    }  # fmt: skip


def make_ways(group: Any, values: list[Any]) -> dict[str, Any]:
    return {name: kind(group, values) for name, kind in kinds().items()}


class Flat:
    """``WholeWeights`` at stage 3 with one unit, as in a run."""

    how: Any = "all_gather"

    def __init__(self, group: Any, values: list[Any]) -> None:
        import torch

        from megatron_sp.optim.flat import FlatUnit, Zero
        from megatron_sp.optim.residency import Pool
        from megatron_sp.optim.weights import WholeWeights

        self.params = [torch.nn.Parameter(value.clone()) for value in values]
        unit = FlatUnit("unit", ((str(i), p) for i, p in enumerate(self.params)), zero=Zero(3, group))
        self.weights = WholeWeights([unit], pools=[Pool((0,), 1)], order=[0], fetch=self.how)
        self.shard_bytes = unit.local_params.nbytes

    def fetch(self) -> None:
        self.weights.start_step(1)
        self.weights.need(0)

    def release(self) -> None:
        self.weights.forget()


class FlatAllReduce(Flat):
    how = "all_reduce"


class Sharded:
    """Parameters of which each is cut into equal shards by itself, the last one padded: how DeepSpeed keeps them."""

    def __init__(self, group: Any, values: list[Any]) -> None:
        import torch

        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.params = [torch.nn.Parameter(torch.empty(0)) for _ in values]
        self.shapes = [value.shape for value in values]
        self.shards = []
        for value in values:
            each = -(-value.numel() // self.ranks)
            padded = torch.zeros(each * self.ranks)
            padded[: value.numel()] = value.flatten()
            self.shards.append(padded[self.rank * each : (self.rank + 1) * each].clone())
        self.shard_bytes = sum(shard.nbytes for shard in self.shards)

    def fetch(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        import torch

        for param in self.params:
            param.data = torch.empty(0)


class AllReduce(Sharded):
    def fetch(self) -> None:
        import torch

        from megatron_sp.optim import weights

        flat = torch.zeros(sum(shard.numel() for shard in self.shards) * self.ranks)
        start = 0
        for param, shape, shard in zip(self.params, self.shapes, self.shards, strict=True):
            param.data = flat.narrow(0, start, shape.numel()).view(shape)
            flat.narrow(0, start + shard.numel() * self.rank, shard.numel()).copy_(shard)
            start += shard.numel() * self.ranks
        weights.all_reduce_async(flat, self.group).wait()


class Coalesced(Sharded):
    def fetch(self) -> None:
        import torch

        from megatron_sp.optim import weights

        part = sum(shard.numel() for shard in self.shards)
        flat = torch.empty(part * self.ranks)
        parts = [flat.narrow(0, part * rank, part) for rank in range(self.ranks)]
        torch.cat(self.shards, out=parts[self.rank])
        weights.all_gather_async(parts[self.rank], self.group, out=flat).wait()
        offset = 0
        for param, shape, shard in zip(self.params, self.shapes, self.shards, strict=True):
            pieces = []
            for rank in range(self.ranks):
                start = rank * shard.numel()
                if start < shape.numel():
                    pieces.append(parts[rank].narrow(0, offset, min(shape.numel() - start, shard.numel())))
            param.data = torch.cat(pieces).view(shape)
            offset += shard.numel()


class PerParameter(Sharded):
    def fetch(self) -> None:
        import torch

        from megatron_sp.optim import weights

        handles = []
        for param, shape, shard in zip(self.params, self.shapes, self.shards, strict=True):
            whole = torch.empty(shard.numel() * self.ranks)
            handles.append(weights.all_gather_async(shard, self.group, out=whole))
            param.data = whole.narrow(0, 0, shape.numel()).view(shape)
        for handle in handles:
            handle.wait()


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
