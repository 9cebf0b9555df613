"""One GPT block under tensor parallelism, forward and backward: ours against torch's DTensor, with and without sequence parallel.

    python benchmarks/tp_block.py [--links 1 loopback] [--json docs/benchmarks/tp_block.json]

Two ranks with one core each in one process group, on two "hosts" or over loopback. The peer is the same block written
with nn.Linear and nn.LayerNorm and made parallel by torch (ColwiseParallel, RowwiseParallel, SequenceParallel); same
weights, same attention kernel, same activation. All take turns within each round; medians, and ratios within a round.
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

SHAPE = {"seq_length": 512, "batch": 4, "hidden_size": 512, "num_heads": 8}
SMOKE = {"seq_length": 32, "batch": 2, "hidden_size": 32, "num_heads": 4}
TARGETS = {"loopback": 0.97, "1": 0.88}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", nargs="+", default=["1", "loopback"], help="Gbit/s of a link between two hosts, or loopback"
    )
    parser.add_argument("--rounds", type=int, default=25, help="measured rounds (default: 25)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return worker(json.loads(options.worker))
    shape = SMOKE if options.smoke else SHAPE
    everything: dict[str, Any] = {"shape": shape, "rounds": options.rounds, "links": {}}
    versions: dict[str, str] = {}
    for link in options.links:
        task = {"shape": shape, "rounds": options.rounds, "warmup": options.warmup}
        try:
            raw = run_workers(link, str(Path(__file__).resolve()), sys.executable, task, child_environment(1))
        except (HostsError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        versions, seconds = raw["versions"], raw["seconds"]
        results: dict[str, Stats] = {f"{name}_seconds": Stats.of(values) for name, values in seconds.items()}
        rows = []
        for kind in ("plain", "seq"):
            results[f"{kind}_ratio"] = ratios(seconds[f"ours {kind}"], seconds[f"dtensor {kind}"])
            ours, theirs = (results[f"{who} {kind}_seconds"].text("ms", 1e3, 1) for who in ("ours", "dtensor"))
            rows.append(
                [
                    f"tp {RANKS}, {'sequence parallel' if kind == 'seq' else 'plain'}",
                    ours,
                    theirs,
                    results[f"{kind}_ratio"].text(""),
                ]
            )
        title = "loopback" if link == "loopback" else f"two hosts, {link} Gbit/s"
        target = f", target {TARGETS[link]:.2f}" if link in TARGETS else ""
        print_table(f"GPT block, tensor parallel, {title}", ["", "ours", "DTensor", f"ratio{target}"], rows)
        print(f"load average {load_average():.1f}; the benchmark itself makes 2", file=sys.stderr)
        everything["links"][link] = {**{k: v.as_dict() for k, v in results.items()}, "raw": raw}
    write_json(options.json, "tp_block", everything, versions)
    return 0


def worker(task: dict[str, Any]) -> int:
    """Every contender in turn."""
    import torch

    with answering(task) as answer:
        answer["seconds"] = in_turn(task, build(task["shape"]))
        answer["versions"] = {"torch": str(torch.__version__)}
    return 0


def build(shape: dict[str, int]) -> dict[str, Callable[[], None]]:
    """The contenders; they are seen to compute the same before anything is timed."""
    import torch
    import torch.distributed as dist

    s, b, h = (shape[k] for k in ("seq_length", "batch", "hidden_size"))
    torch.manual_seed(1)
    x, grad = torch.randn(s, b, h), torch.randn(s, b, h)
    rank = dist.get_rank()
    contenders: dict[str, Callable[[], None]] = {}
    for kind in ("plain", "seq"):
        mine = slice(rank * s // RANKS, (rank + 1) * s // RANKS) if kind == "seq" else slice(None)
        ours, theirs = Ours(shape, kind == "seq"), Theirs(shape, kind == "seq")
        theirs.take(ours)
        got, want = ours.once(x[mine], grad[mine]), theirs.once(x[mine], grad[mine])
        for a, c in zip(got, want, strict=True):
            error = float((a - c).abs().max() / c.abs().max())
            assert error < 1e-4, f"{kind}: the two do not compute the same: {error}"
        contenders[f"ours {kind}"] = lambda ours=ours, x=x[mine], g=grad[mine]: ours.once(x, g)  # type: ignore[misc]
        contenders[f"dtensor {kind}"] = lambda theirs=theirs, x=x[mine], g=grad[mine]: theirs.once(x, g)  # type: ignore[misc]
    return contenders


class Ours:
    """Our block."""

    def __init__(self, shape: dict[str, int], seq: bool) -> None:
        import torch
        import torch.distributed as dist

        from megatron_sp.config.schema import ModelConfig
        from megatron_sp.models.transformer import TransformerBlock
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.parallel.forward_context import ForwardContext
        from megatron_sp.parallel.parallel_context import ParallelContext
        from megatron_sp.parallel.tensor_parallel import TensorParallel

        config = ModelConfig(
            num_layers=1, hidden_size=shape["hidden_size"], num_attention_heads=shape["num_heads"], seq_length=shape["seq_length"],
            vocab_size=8, attention_dropout=0.0, hidden_dropout=0.0,
        )  # fmt: skip
        assert dist.group.WORLD is not None
        self.layout = ParallelContext(tp=TensorParallel(dist.group.WORLD, seq))
        self.block = TransformerBlock(config, 0, "block", 7, torch.float32, self.layout)
        self.whole = TransformerBlock(config, 0, "block", 7, torch.float32, ParallelContext())
        self.ctx = ForwardContext(AttentionMask(), length=shape["seq_length"])

    def once(self, x: Any, grad: Any) -> list[Any]:
        x = x.detach().requires_grad_()
        for param in self.block.parameters():
            param.grad = None
        y = self.block(x, self.ctx)
        y.backward(grad)
        return [y.detach(), x.grad]


class Theirs:
    """The block in torch's modules, batch first, made parallel by torch."""

    def __init__(self, shape: dict[str, int], seq: bool) -> None:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        from megatron_sp.ops.attention import AttentionMask, core_attention

        h, d = shape["hidden_size"], shape["hidden_size"] // shape["num_heads"]

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))

            def forward(self, x: Any) -> Any:  # [b, s, h]
                b, s, _ = x.shape
                q, k, v = (
                    layer(x).view(b, s, -1, d).transpose(0, 1).reshape(s, -1, 1, d)
                    for layer in (self.q, self.k, self.v)
                )
                out = core_attention(q, k, v, AttentionMask(), kernel="sdpa")
                return self.o(out.view(s, b, -1).transpose(0, 1))

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm1, self.attention, self.norm2 = nn.LayerNorm(h), Attention(), nn.LayerNorm(h)
                self.fc1, self.fc2, self.act = nn.Linear(h, 4 * h), nn.Linear(4 * h, h), nn.GELU(approximate="tanh")

            def forward(self, x: Any) -> Any:
                x = x + self.attention(self.norm1(x))
                return x + self.fc2(self.act(self.fc1(self.norm2(x))))

        mesh = init_device_mesh("cpu", (RANKS,))
        self.block = Block()
        self.seq = seq
        back = RowwiseParallel(output_layouts=Shard(1)) if seq else RowwiseParallel()
        plan: dict[str, Any] = {
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(), "attention.o": back,
            "fc1": ColwiseParallel(input_layouts=Shard(1)) if seq else ColwiseParallel(), "fc2": back,
        }  # fmt: skip
        if seq:
            plan |= {
                "norm1": SequenceParallel(use_local_output=True), "norm2": SequenceParallel(use_local_output=True),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True),
            }  # fmt: skip
            plan["attention.q"] = plan["attention.k"] = plan["attention.v"] = ColwiseParallel()
        parallelize_module(self.block, mesh, plan)
        assert isinstance(self.block, torch.nn.Module)

    def take(self, ours: Ours) -> None:
        """The weights of ours, q, k and v taken out of the fused one."""
        import torch
        from torch.distributed.tensor import DTensor, distribute_tensor

        whole, mine = ours.whole, self.block
        qkv = whole.self_attention.linear_qkv
        n, d = whole.self_attention.num_groups, whole.self_attention.head_dim
        pairs: list[tuple[Any, Any]] = [
            (mine.norm1, whole.input_layernorm), (mine.norm2, whole.pre_mlp_layernorm),
            (mine.attention.o, whole.self_attention.linear_proj), (mine.fc1, whole.mlp.linear_fc1), (mine.fc2, whole.mlp.linear_fc2),
        ]  # fmt: skip
        values = {id(p): q.data for a, w in pairs for p, q in ((a.weight, w.weight), (a.bias, w.bias))}
        for i, layer in enumerate((mine.attention.q, mine.attention.k, mine.attention.v)):
            values[id(layer.weight)] = qkv.weight.data.view(n, 3, d, -1)[:, i].reshape(n * d, -1)
            values[id(layer.bias)] = qkv.bias.data.view(n, 3, d)[:, i].reshape(-1)
        for param in mine.parameters():
            value = values[id(param)].contiguous()
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            with torch.no_grad():
                param.copy_(value)

    def once(self, x: Any, grad: Any) -> list[Any]:
        x = x.detach().transpose(0, 1).contiguous().requires_grad_()
        for param in self.block.parameters():
            param.grad = None
        y = self.block(x)
        y.backward(grad.transpose(0, 1))
        return [y.detach().transpose(0, 1), x.grad.transpose(0, 1)]


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
