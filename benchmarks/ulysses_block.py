"""One attention block under Ulysses, forward and backward: our modes against DeepSpeed's DistributedAttention, on two "hosts".

    python benchmarks/ulysses_block.py [--links 1 2 loopback] [--json docs/benchmarks/ulysses_block.json]

Norm, QKV projection, exchange, causal attention, exchange, output projection, residual; two ranks with one core each,
in one process group. All contenders take turns within each round, so that what slows the machine hits neighbours;
figures are medians over rounds, ratios are taken within a round. DeepSpeed runs in the same processes on the same
weights with the same attention kernel, batch first (its sequence-first return is broken), its exchanges synchronous as
it does them on a CPU.

    T_compute     our block with exchanges that return at once
    T_exchanges   the eight exchanges (q, k, v, out, and their gradients) one after another, nothing else
    hidden        1 - (T - T_compute) / T_exchanges
    control       eight exchanges of the same sizes, each under a plain matrix product long enough to cover it: what can be hidden at all
    auto          the mode that --sp-overlap-mode auto takes on this link, its median over that of the fastest
    copies        elements moved without arithmetic in a forward and a backward pass, outside attention kernels, in units of s/P * b * h
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import REPOSITORY, Stats, child_environment, load_average, print_table, ratios, write_json
from hosts import RANKS, HostsError, answering, in_turn, run_workers

SHAPE = {"seq_length": 4096, "batch": 1, "hidden_size": 1024, "num_heads": 16}
SMOKE = {"seq_length": 64, "batch": 1, "hidden_size": 32, "num_heads": 4}
MODES: dict[str, tuple[str, int, bool]] = {
    "none": ("none", 1, False),
    "split-qkv": ("split-qkv", 1, True),
    "chunked x2": ("chunked", 2, True),
    "chunked x4": ("chunked", 4, True),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", nargs="+", default=["1", "2", "loopback"], help="Gbit/s of a link between two hosts, or loopback"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (default: 15)")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--peer-python",
        default=str(REPOSITORY / ".venv-peers" / "bin" / "python"),
        help="an interpreter with DeepSpeed",
    )
    parser.add_argument("--no-peer", action="store_true", help="without DeepSpeed, in this interpreter")
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# the parent


def measure(options: argparse.Namespace, shape: dict[str, int], link: str) -> dict[str, Any]:
    """All rounds on one kind of link; raises RuntimeError if a rank fails."""
    interpreter = sys.executable if options.no_peer else options.peer_python
    environment = child_environment(1) | {"DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    task = {"shape": shape, "rounds": options.rounds, "warmup": options.warmup, "peer": not options.no_peer}
    return run_workers(link, str(Path(__file__).resolve()), interpreter, task, environment)


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians, ratios against DeepSpeed, hidden shares."""
    seconds: dict[str, list[float]] = raw["seconds"]
    results: dict[str, Any] = {f"{name}_seconds": Stats.of(values) for name, values in seconds.items()}
    exchanges, compute = seconds["exchanges"], seconds["compute"]
    for name in [*MODES, "deepspeed"]:
        if name not in seconds:
            continue
        results[f"{name}_hidden"] = Stats.of(
            1 - (t - c) / e for t, c, e in zip(seconds[name], compute, exchanges, strict=True)
        )
        if "deepspeed" in seconds:
            results[f"{name}_of_deepspeed"] = ratios(seconds[name], seconds["deepspeed"])
    results["control_hidden"] = Stats.of(
        1 - (t - c) / e for t, c, e in zip(seconds["control"], seconds["control products"], exchanges, strict=True)
    )
    results["copies"] = raw["copies"]
    fastest = min(results[f"{name}_seconds"].median for name in MODES)
    results["auto"], results["auto_of_fastest"] = raw["auto"], results[f"{raw['auto']}_seconds"].median / fastest
    return results


def report(link: str, results: dict[str, Any]) -> None:
    title = "loopback" if link == "loopback" else f"two hosts, {link} Gbit/s"
    control = results["control_hidden"].median
    rows = []
    for name in ["compute", "exchanges", *MODES, "deepspeed", "control products", "control"]:
        if f"{name}_seconds" not in results:
            continue
        hidden, ratio = results.get(f"{name}_hidden"), results.get(f"{name}_of_deepspeed")
        rows.append([
            name, results[f"{name}_seconds"].text("s"), hidden.text("", digits=2) if hidden else "",
            f"{hidden.median / control:.2f}" if hidden and name in MODES and name != "none" else "",
            ratio.text("") if ratio else "", _copies(results["copies"].get(name)),
        ])  # fmt: skip
    notes = [
        f"control hides {results['control_hidden'].text('', digits=2)}; copies: number of copies of s/P * b * h or more, and their sum",
        f"auto takes {results['auto']}: {results['auto_of_fastest']:.3f} of the fastest mode",
    ]
    print_table(
        f"Attention block, {title}",
        ["", "median (min-max)", "hidden", "of control", "of DeepSpeed", "copies"],
        rows,
        notes,
    )


def _copies(found: list[float] | None) -> str:
    return "" if found is None else f"{found[0]:.0f} ({found[1]:.1f})"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return worker(json.loads(options.worker))
    shape = dict(SMOKE if options.smoke else SHAPE)
    shape |= {name: getattr(options, name) for name in ("seq_length", "batch") if getattr(options, name)}
    if not options.no_peer and not Path(options.peer_python).exists():
        print(
            f"{options.peer_python} does not exist: run benchmarks/setup_peers.sh deepspeed, or use --no-peer",
            file=sys.stderr,
        )
        return 2
    everything: dict[str, Any] = {"shape": shape, "rounds": options.rounds, "links": {}}
    versions: dict[str, str] = {}
    for link in options.links:
        try:
            raw = measure(options, shape, link)
        except (HostsError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        versions = raw["versions"]
        results = summarise(raw)
        report(link, results)
        print(f"load average {load_average():.1f}; the benchmark itself makes 2", file=sys.stderr)
        plain = {k: v.as_dict() if isinstance(v, Stats) else v for k, v in results.items()}
        everything["links"][link] = {**plain, "raw": raw}
    write_json(options.json, "ulysses_block", everything, versions)
    return 0


# a rank


def worker(task: dict[str, Any]) -> int:
    """Every contender in turn."""
    import torch

    with answering(task) as answer:
        answer["auto"] = choice_of_auto(task["shape"])
        contenders, answer["copies"] = build(task, task["shape"])
        answer["seconds"], answer["versions"] = in_turn(task, contenders), {"torch": str(torch.__version__)}
        if task["peer"]:
            import deepspeed

            answer["versions"]["deepspeed"] = deepspeed.__version__
    return 0


def choice_of_auto(shape: dict[str, int]) -> str:
    """What training would choose on this link. Collective."""
    import torch

    from megatron_sp.comm.groups import ParallelGroups
    from megatron_sp.config.schema import BatchConfig, Config, ParallelConfig
    from megatron_sp.training.probe import choose_overlap, words_for

    config = Config(
        model=model_config(shape),
        parallel=ParallelConfig(sequence_parallel_size=RANKS),
        batch=BatchConfig(shape["batch"]),
    )
    groups = ParallelGroups.create(torch.device("cpu"), sp_size=RANKS)
    mode, chunks, line = choose_overlap(config, groups, torch.float32)
    if groups.rank == 0:
        print(line, file=sys.stderr)
    return words_for((mode, chunks))


def model_config(shape: dict[str, int]) -> Any:
    from megatron_sp.config.schema import ModelConfig

    return ModelConfig(
        num_layers=1, hidden_size=shape["hidden_size"], num_attention_heads=shape["num_heads"], seq_length=shape["seq_length"],
        vocab_size=8, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip


def build(task: dict[str, Any], shape: dict[str, int]) -> tuple[dict[str, Callable[[], None]], dict[str, list[float]]]:
    """The contenders as functions, and the copies that each makes."""
    import torch
    import torch.distributed as dist

    s, b, h = (shape[k] for k in ("seq_length", "batch", "hidden_size"))
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(1)
    weights = [
        torch.randn(3 * h, h) * 0.02,
        torch.zeros(3 * h),
        torch.randn(h, h) * 0.02,
        torch.zeros(h),
        torch.ones(h),
        torch.zeros(h),
    ]
    x, grad = torch.randn(s // RANKS, b, h), torch.randn(s // RANKS, b, h)
    blocks: dict[str, Any] = {name: OurBlock(group, shape, weights, *mode) for name, mode in MODES.items()}
    blocks = {"compute": OurBlock(group, shape, weights, *MODES["none"], exchanges=False)} | blocks
    if task["peer"]:
        blocks["deepspeed"] = DeepSpeedBlock(group, shape, weights)
    outs = {name: block.once(x, grad) for name, block in blocks.items()}
    for name, out in outs.items():
        if name != "compute":
            for got, want in zip(out, outs["none"], strict=True):
                error = float((got - want).abs().max() / want.abs().max())
                assert error < 1e-4, f"{name} does not compute what none does: {error}"
    copies = {
        name: count_copies(lambda block=block: block.once(x, grad), s // RANKS * b * h)
        for name, block in blocks.items()
    }
    contenders: dict[str, Callable[[], None]] = {
        name: (lambda block=block: block.once(x, grad)) for name, block in blocks.items()
    }
    contenders |= control(group, s // RANKS * b * h)
    return contenders, copies


class OurBlock:
    """A layer's attention in one mode; ``exchanges`` False returns from each exchange at once, with whatever is in the buffer."""

    def __init__(
        self,
        group: Any,
        shape: dict[str, int],
        weights: list[Any],
        mode: Any,
        chunks: int,
        overlap: bool,
        exchanges: bool = True,
    ) -> None:
        import torch

        from megatron_sp.models.attention import SelfAttention
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.parallel.forward_context import ForwardContext
        from megatron_sp.parallel.layers import Norm
        from megatron_sp.parallel.parallel_context import ParallelContext, SequenceParallel

        config = model_config(shape)
        layout = ParallelContext(sp=SequenceParallel(group, overlap), mode=mode, num_chunks=chunks)
        self.attention = SelfAttention(config, 0, "block", 0, torch.float32, layout)
        self.norm = Norm(config, shape["hidden_size"], torch.float32, layout)
        self.exchanges = exchanges
        qkv, proj = self.attention.linear_qkv, self.attention.linear_proj
        params = [qkv.weight, qkv.bias, proj.weight, proj.bias, self.norm.weight, self.norm.bias]
        for param, value in zip(params, weights, strict=True):
            param.data.copy_(value)
        self.params = [qkv.weight, proj.weight]
        self.ctx = ForwardContext(AttentionMask(), length=shape["seq_length"])

    def once(self, x: Any, grad: Any) -> list[Any]:
        from megatron_sp.comm.collectives import Handle
        from megatron_sp.parallel import all_to_all

        real = all_to_all.all_to_all_async
        if not self.exchanges:
            all_to_all.all_to_all_async = lambda send, a, receive, c, group: Handle(None, receive, "nothing")  # type: ignore[assignment]
        try:
            x = x.detach().requires_grad_()
            for param in self.params:
                param.grad = None
            y, _ = self.attention(x, self.ctx, self.norm.in_front(), None)
            y.backward(grad)
        finally:
            all_to_all.all_to_all_async = real
        return [y.detach(), x.grad, *(p.grad for p in self.params)]


class DeepSpeedBlock:
    """DistributedAttention around the same kernel, with the QKV projection as Megatron-DeepSpeed has it: one product, three slices.

    The fused weight's rows are those of ours, in group order, so that both compute the same.
    """

    def __init__(self, group: Any, shape: dict[str, int], weights: list[Any]) -> None:
        import deepspeed
        import torch
        from deepspeed.sequence.layer import DistributedAttention

        from megatron_sp.ops.attention import AttentionMask, core_attention

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False)
        self.n, self.h = shape["num_heads"], shape["hidden_size"]
        self.params = [torch.nn.Parameter(w.clone()) for w in weights]

        def local(q: Any, k: Any, v: Any, *_: Any) -> Any:  # [b, s, n/P, d]
            q, k, v = (t.transpose(0, 1).flatten(1, 2)[:, :, None] for t in (q, k, v))
            out = core_attention(q, k, v, AttentionMask(), kernel="sdpa")
            return out.view(out.shape[0], shape["batch"], -1, out.shape[-1]).transpose(0, 1)

        self.attention = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)

    def once(self, x: Any, grad: Any) -> list[Any]:
        import torch
        import torch.nn.functional as F

        x = x.detach().requires_grad_()
        for param in self.params:
            param.grad = None
        w_qkv, b_qkv, w_proj, b_proj, w_norm, b_norm = self.params
        qkv = F.linear(F.layer_norm(x, (self.h,), w_norm, b_norm), w_qkv, b_qkv)
        qkv = qkv.view(*x.shape[:2], self.n, 3, self.h // self.n).transpose(0, 1)  # [b, s/P, n, 3, d]
        q, k, v = (t.contiguous() for t in qkv.unbind(3))
        out = self.attention(q, k, v, 0)  # batch is dim 0
        y = F.linear(out.transpose(0, 1).reshape(x.shape), w_proj, b_proj) + x
        y.backward(grad)
        assert isinstance(y, torch.Tensor)
        return [y.detach(), x.grad, w_qkv.grad, w_proj.grad]


def control(group: Any, elements: int) -> dict[str, Callable[[], None]]:
    """Exchanges alone, products alone, and each exchange under a product that is long enough."""
    import torch
    import torch.distributed as dist

    send, receive = torch.randn(elements), torch.empty(elements)

    def exchange() -> Any:
        return dist.all_to_all_single(receive, send, group=group, async_op=True)

    def exchanges() -> None:
        for _ in range(8):
            exchange().wait()

    exchanges()
    wanted = 1.3 * _seconds(exchanges) / 8  # longer than the exchange, which slows the product down a little
    size = torch.tensor([_side_of_product(wanted)])
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    a = torch.randn(int(size), int(size))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(8):
            torch.mm(a, a, out=out)

    def both() -> None:
        for _ in range(8):
            work = exchange()
            torch.mm(a, a, out=out)
            work.wait()

    return {"exchanges": exchanges, "control products": products, "control": both}


def _side_of_product(seconds: float) -> int:
    """Of a square matrix whose product with itself takes at least so long."""
    import torch

    side = 64
    while True:
        a = torch.randn(side, side)
        if _seconds(lambda a=a: a @ a) >= seconds:  # type: ignore[misc]
            return side
        side = int(side * 1.25)


def _seconds(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def count_copies(run: Callable[[], Any], unit: int) -> list[float]:
    """[copies of at least ``unit`` elements, elements moved by them in units] in one forward and backward pass."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.number, self.elements = 0, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            moves = name in ("copy_", "clone", "cat", "_to_copy", "contiguous", "index_select") and isinstance(
                result, torch.Tensor
            )
            if moves and result.numel() >= unit:
                self.number += 1
                self.elements += result.numel()
            return result

    with Counter() as counter:
        run()
    return [counter.number, counter.elements / unit]


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
