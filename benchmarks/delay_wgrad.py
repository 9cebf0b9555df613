"""Blocks with --delay-wgrad beside the same blocks without, forward and backward, on two "hosts".

    python benchmarks/delay_wgrad.py [--links 0.4 1] [--json docs/benchmarks/delay_wgrad.json]

Whole transformer blocks (attention and MLP), gradients in flat buffers, two ranks with one core each. Each cell is a shape
and a way to exchange; both contenders take turns within each round, ratios are taken within a round.

    compute    the blocks with exchanges that return at once, whatever is in the buffers
    exposed    (T - T_compute) / T_compute: what of the exchanges is waited for
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, child_environment, load_average, print_table, ratios, write_json
from hosts import RANKS, HostsError, answering, in_turn, run_workers

# sequence, batch, hidden size, heads; how heads or keys are exchanged, in how many chunks
CELLS: dict[str, tuple[tuple[int, int, int, int], str, int]] = {
    "sp, a head on each rank, split-qkv, s 2048": ((2048, 1, 512, 2), "split-qkv", 1),
    "sp, a head on each rank, split-qkv, s 4096": ((4096, 1, 512, 2), "split-qkv", 1),
    "sp, 8 heads, 2 chunks, s 1024": ((1024, 2, 512, 8), "chunked", 2),
    "sp, 8 heads, 4 chunks, s 1024": ((1024, 2, 512, 8), "chunked", 4),
    "cp, 8 heads, s 1024": ((1024, 2, 512, 8), "cp", 1),
}
SMOKE = (64, 1, 32, 4)
LAYERS = 3


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", nargs="+", default=["0.4", "1"], help="Gbit/s of a link between two hosts, or loopback"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (default: 15)")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return worker(json.loads(options.worker))
    everything: dict[str, Any] = {"rounds": options.rounds, "links": {}}
    versions: dict[str, str] = {}
    for link in options.links:
        rows, found = [], {}
        for name, (shape, way, chunks) in CELLS.items():
            task = {"shape": SMOKE if options.smoke else shape, "way": way, "chunks": chunks}
            task |= {"rounds": options.rounds, "warmup": options.warmup}
            try:
                raw = run_workers(link, str(Path(__file__).resolve()), sys.executable, task, child_environment(1))
            except (HostsError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 1
            versions, seconds = raw["versions"], raw["seconds"]
            exposed = {
                each: Stats.of(r - 1 for r in ratios(seconds[each], seconds["compute"]).values)
                for each in ("plain", "delayed")
            }
            ratio = ratios(seconds["delayed"], seconds["plain"])
            of = {each: Stats.of(values) for each, values in seconds.items()}
            rows.append([name, *(of[each].text("s") for each in ("compute", "plain", "delayed")),
                         *(each.text("", digits=2) for each in exposed.values()), ratio.text("")])  # fmt: skip
            found[name] = {
                **{f"{each}_seconds": stats.as_dict() for each, stats in of.items()},
                **{f"{each}_exposed": stats.as_dict() for each, stats in exposed.items()}, "ratio": ratio.as_dict(),
            }  # fmt: skip
        title = "loopback" if link == "loopback" else f"two hosts, {link} Gbit/s"
        columns = ["", "compute", "without", "--delay-wgrad", "exposed", "exposed", "ratio"]
        print_table(f"{LAYERS} blocks, {title}", columns, rows, ["ratio: with --delay-wgrad, of without"])
        print(f"load average {load_average():.1f}; the benchmark itself makes 2", file=sys.stderr)
        everything["links"][link] = found
    write_json(options.json, "delay_wgrad", everything, versions)
    return 0


# a rank


def worker(task: dict[str, Any]) -> int:
    """Every contender in turn."""
    import torch

    with answering(task) as answer:
        contenders = {
            "plain": Blocks(task).once, "delayed": Blocks(task, delays=True).once, "compute": Blocks(task, exchanges=False).once,
        }  # fmt: skip
        assert_alike(contenders)
        answer["seconds"], answer["versions"] = in_turn(task, contenders), {"torch": str(torch.__version__)}
    return 0


def assert_alike(contenders: dict[str, Callable[[], Any]]) -> None:
    """Delayed gradients are those that are not, to the bit."""
    import torch

    plain, delayed = contenders["plain"](), contenders["delayed"]()
    assert all(torch.equal(a, b) for a, b in zip(plain, delayed, strict=True)), "--delay-wgrad changes gradients"


class Blocks:
    """Blocks of a GPT, with their gradients in flat buffers.

    Args:
        task: shape, way, chunks.
        delays: --delay-wgrad.
        exchanges: False: they return at once, with whatever is in the buffer.
    """

    def __init__(self, task: dict[str, Any], *, delays: bool = False, exchanges: bool = True) -> None:
        import torch
        from torch import nn

        from megatron_sp.comm.groups import SINGLE_RANK, ParallelGroups
        from megatron_sp.config.schema import ModelConfig
        from megatron_sp.models.transformer import TransformerBlock, delayed_weights
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.parallel.context_plan import plan_context
        from megatron_sp.parallel.forward_context import ForwardContext
        from megatron_sp.parallel.layers import attach_main_grad
        from megatron_sp.parallel.parallel_context import ParallelContext
        from megatron_sp.parallel.row_mask import RowMask

        (s, b, h, heads), self.exchanges = task["shape"], exchanges
        is_cp = task["way"] == "cp"
        groups = ParallelGroups.create(torch.device("cpu"), **({"cp_size": RANKS} if is_cp else {"sp_size": RANKS}))
        layout = ParallelContext.of(
            groups, mode="none" if is_cp else task["way"], num_chunks=task["chunks"], overlap=not is_cp
        )
        config = ModelConfig(
            num_layers=LAYERS, hidden_size=h, num_attention_heads=heads, seq_length=s, vocab_size=8, attention_dropout=0.0,
            hidden_dropout=0.0,
        )  # fmt: skip
        self.model = nn.ModuleList(
            TransformerBlock(config, i, f"decoder.layers.{i}", 1, torch.float32, layout) for i in range(LAYERS)
        )
        units = [FlatUnit(str(i), block.named_parameters()) for i, block in enumerate(self.model)]
        self.gradients = FlatGradients(
            units, SINGLE_RANK, delayed=delayed_weights(self.model, layout.tp) if delays else ()
        )
        attach_main_grad(self.model, self.gradients)
        row = RowMask(s)
        cut = layout.cut(row)
        plan = plan_context(row, cut.shares) if is_cp else None
        self.ctx = ForwardContext(AttentionMask(), "sdpa", cut.length, cut.whole, plan)
        generator = torch.Generator().manual_seed(groups.rank)
        self.x, self.grad = (torch.randn(s // RANKS, b, h, generator=generator) for _ in range(2))

    def once(self) -> list[Any]:
        """A forward and a backward pass; the gradients of all parameters."""
        from megatron_sp.comm.collectives import Handle
        from megatron_sp.parallel import all_to_all

        real = all_to_all.all_to_all_async
        if not self.exchanges:
            all_to_all.all_to_all_async = lambda send, a, receive, c, group: Handle(None, receive, "nothing")  # type: ignore[assignment]
        try:
            self.gradients.start_step()
            y = self.x.detach().requires_grad_()
            for block in self.model:
                y = block(y, self.ctx)
            y.backward(self.grad)
            self.gradients.cover()
        finally:
            all_to_all.all_to_all_async = real
        return [unit.grads for unit in self.gradients.units]


if __name__ == "__main__":
    sys.exit(main())
