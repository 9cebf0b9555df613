"""Rank 0's work of an eight-GPU Ulysses run, on one GPU: the whole model's forward and backward, exchanges replaced by copies.

    python benchmarks/gpu/ulysses_replay.py [--shapes 1B-64K 7B-16K] [--json docs/benchmarks/gpu_ulysses_replay.json]

sp=8, bf16, one micro-batch of one sequence: rank 0's s/8 positions of everything but the attention, all s positions of
its n/8 heads in it. Each exchange is a copy of the same size on the device, on a stream of high priority, ordered by
events as NCCL's would be: what overlaps overlaps, and what waits waits. A copy at HBM speed is faster than a link, so
the times say what the computation costs around the exchanges, not what the exchanges cost. Values are those of no real
model, the work is: kernels do not look at values.

    none, split-qkv, chunked xG   our modes, the main_grad and fp32 gradients as in training
    no exchange                   ours without the copies: what would arrive lies there already, normal numbers, drawn anew before each
                                  micro-batch (zeros let a GPU run up to a fifth faster); they take the memory of all exchanges
    deepspeed                     the same model with the attention of DeepSpeed's DistributedAttention around the same kernel, where
                                  deepspeed is installed; its QKV projection as in Megatron-DeepSpeed, one product and three slices

Contenders take turns in one process; a figure is the median of GPU time between two events around one micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common import Stats, print_table, write_json
from gpu.device_weights import drawn_on

SP = 8
SHAPES = {
    "1B-64K": {
        "num_layers": 24,
        "hidden_size": 2048,
        "num_heads": 16,
        "seq_length": 65536,
        "vocab_size": 50304,
        "goal_ms": 445,
    },
    "7B-16K": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "seq_length": 16384,
        "vocab_size": 50304,
        "goal_ms": 185,
    },
    "smoke": {"num_layers": 2, "hidden_size": 64, "num_heads": 16, "seq_length": 64, "vocab_size": 128, "goal_ms": 0},
}
MODES: dict[str, tuple[Any, int, bool]] = {
    "none": ("none", 1, False),
    "split-qkv": ("split-qkv", 1, True),
    "chunked x2": ("chunked", 2, True),
    "chunked x4": ("chunked", 4, True),
}
SEED = 1


class ReplayGroup:
    """The sp group of a world that is not there: rank 0 of ``size``."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class CopyEngine:
    """Stands for the exchanges: copies what would be received from what would be sent, on a stream of its own.

    Args:
        device: of the tensors; on a CPU the copy is made at once.
        copies: False: nothing moves, what arrives is a tensor of normal numbers, one for each exchange of a micro-batch.
    """

    def __init__(self, device: Any, copies: bool = True) -> None:
        import torch

        self.copies, self.num_exchanges, self.num_bytes = copies, 0, 0
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._arrived: list[Any] = []

    def start_micro_batch(self) -> None:
        """Begin to count exchanges."""
        self.num_exchanges = self.num_bytes = 0

    def draw(self) -> None:
        """Draw what arrives anew, where nothing moves: a micro-batch writes into it."""
        for arrived in self._arrived:
            arrived.normal_()

    def start(self, send: Any, receive: Any) -> Any:
        """Begin; returns an object with ``wait()`` that makes the current stream wait, as a collective's."""
        import torch

        self.num_exchanges += 1
        self.num_bytes += receive.numel() * receive.element_size()
        count = min(send.numel(), receive.numel())
        if not self.copies:
            return _Done()
        if self.stream is None:
            receive.view(-1)[:count].copy_(send.reshape(-1)[:count])
            return _Done()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            receive.view(-1)[:count].copy_(send.view(-1)[:count])
            event = torch.cuda.Event()
            event.record()
        return _Copy(event)

    def all_to_all_async(self, send: Any, send_counts: Any, receive: Any, receive_counts: Any, group: Any) -> Any:
        """In place of ``comm.collectives.all_to_all_async``."""
        import torch

        from megatron_sp.comm.collectives import Handle

        if not self.copies:
            if self.num_exchanges == len(self._arrived):
                self._arrived.append(torch.randn_like(receive))
            receive = self._arrived[self.num_exchanges]
        return Handle(self.start(send, receive), receive, "copy", operand=send)

    def all_to_all_single(self, output: Any, input: Any, *_: Any, async_op: bool = False, **__: Any) -> Any:
        """In place of ``torch.distributed.all_to_all_single``."""
        work = self.start(input, output)
        return work if async_op else work.wait()


class _Done:
    def wait(self) -> None:
        pass

    def get_future(self) -> Any:
        """For a recorder's clock, which asks a collective when it has ended."""
        raise RuntimeError("a copy has no future")


class _Copy:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().wait_event(self.event)


@contextmanager
def exchanges_by(engine: CopyEngine) -> Iterator[None]:
    """Our layers' exchanges go through ``engine``."""
    from megatron_sp.parallel import all_to_all

    real = all_to_all.all_to_all_async
    all_to_all.all_to_all_async = engine.all_to_all_async  # type: ignore[assignment]
    try:
        yield
    finally:
        all_to_all.all_to_all_async = real


class Replay:
    """One contender: the model of rank 0 with flat fp32 gradients, ready for micro-batches.

    Args:
        recorder: a ``comm.recorder.Recorder`` of the micro-batches, each of which is a step for it.
    """

    def __init__(
        self, shape: dict[str, int], device: Any, mode: tuple[Any, int, bool], *, copies: bool = True, deepspeed: bool = False,
        recorder: Any = None,
    ) -> None:  # fmt: skip
        import torch

        from megatron_sp.comm.groups import SINGLE_RANK
        from megatron_sp.config.schema import KernelConfig, ModelConfig
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.ops.attention_choice import activate, choose_kernel
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.parallel.layers import attach_main_grad
        from megatron_sp.parallel.parallel_context import ParallelContext, SequenceParallel

        config = ModelConfig(
            num_layers=shape["num_layers"], hidden_size=shape["hidden_size"], num_attention_heads=shape["num_heads"],
            seq_length=shape["seq_length"], vocab_size=shape["vocab_size"], attention_dropout=0.0, hidden_dropout=0.0,
        )  # fmt: skip
        name, chunks, overlap = mode
        sp = SequenceParallel(ReplayGroup(SP), overlap)  # type: ignore[arg-type]
        layout = ParallelContext(sp=sp, mode=name, num_chunks=chunks, recorder=recorder).in_layer(None)
        self.recorder = recorder
        self.engine = CopyEngine(device, copies)
        self.kernel = choose_kernel("auto", device.type, torch.bfloat16, 0.0).name
        activate(self.kernel)  # the choice tried each, and put torch's own back
        with drawn_on(device):
            self.model = GPTModel(config, KernelConfig(), seed=SEED, dtype=torch.bfloat16, layout=layout).to(device)
        if deepspeed:
            for layer in self.model.decoder.layers:
                layer.self_attention = DeepSpeedAttention(layer.self_attention, self.engine, self.kernel)
        names = {id(p): n for n, p in self.model.named_parameters()}
        units = [FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()]) for u in self.model.units()]
        for unit in units:
            unit.master = unit.params  # no optimizer step is measured
        self.gradients = FlatGradients(units, SINGLE_RANK)
        attach_main_grad(self.model, self.gradients)
        self.tokens = torch.randint(0, shape["vocab_size"], (1, shape["seq_length"]), device=device)
        self.loss_mask = torch.ones(1, shape["seq_length"], device=device)
        self.gradients.start_step()

    def once(self) -> float | Any:
        """Forward and backward of a micro-batch, adding to the gradients of those before; the loss."""
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.parallel.forward_context import ForwardContext

        self.engine.start_micro_batch()
        if self.recorder is not None:
            self.recorder.start_step()
        with exchanges_by(self.engine):
            ctx = ForwardContext(AttentionMask(), kernel=self.kernel)
            loss, _ = self.model(self.tokens, self.tokens, self.loss_mask, ctx)
            if self.recorder is not None:
                self.recorder.enter("backward")
            (loss / self.tokens.numel()).backward()
        if self.recorder is not None:
            self.recorder.end_step()
        return loss.detach()


def _deepspeed_attention_class() -> Any:
    """Built when it is asked for: ``nn.Module`` needs torch."""
    import torch
    import torch.nn.functional as F
    from deepspeed.sequence.layer import DistributedAttention

    from megatron_sp.ops.attention import AttentionMask, core_attention

    class Attention(torch.nn.Module):
        """DistributedAttention between the projections of one of our layers; gradients go through autograd."""

        def __init__(self, ours: Any, engine: CopyEngine, kernel: Any) -> None:
            super().__init__()
            self.linear_qkv, self.linear_proj, self.engine = ours.linear_qkv, ours.linear_proj, engine
            self.n, self.d = ours.queries_per_group * ours.num_groups, ours.head_dim

            def local(q: Any, k: Any, v: Any, *_: Any) -> Any:  # [b, s, n/P, d]
                b = q.shape[0]
                q, k, v = (t.transpose(0, 1).flatten(1, 2)[:, :, None] for t in (q, k, v))
                out = core_attention(q, k, v, AttentionMask(), kernel=kernel)
                return out.reshape(out.shape[0], b, -1, out.shape[-1]).transpose(0, 1)

            self.attention = DistributedAttention(local, ReplayGroup(SP), scatter_idx=2, gather_idx=1)

        def draws_random(self, ctx: Any) -> bool:
            return False

        def forward(self, x: Any, ctx: Any, norm: Any, dropout: Any) -> Any:
            qkv = F.linear(
                F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.spec.eps),
                self.linear_qkv.weight,
                self.linear_qkv.bias,
            )
            qkv = qkv.view(*x.shape[:2], self.n, 3, self.d).transpose(0, 1)  # [b, s/P, n, 3, d]
            q, k, v = (t.contiguous() for t in qkv.unbind(3))
            out = self.attention(q, k, v, 0)
            return F.linear(out.transpose(0, 1).reshape(x.shape), self.linear_proj.weight, self.linear_proj.bias) + x

    return Attention


def DeepSpeedAttention(ours: Any, engine: CopyEngine, kernel: Any) -> Any:
    """The attention of a layer by DeepSpeed, its exchanges through ``engine``."""
    import deepspeed.comm

    deepspeed.comm.all_to_all_single = engine.all_to_all_single
    deepspeed.comm.get_world_size = lambda group=None: group.size() if group is not None else 1
    deepspeed.comm.get_rank = lambda group=None: 0
    return _deepspeed_attention_class()(ours, engine, kernel)


def measure(build: Callable[[], Replay], device: Any, warmup: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each micro-batch, peak memory, loss, exchanges of one contender, which is gone from the device afterwards."""
    import torch

    replay = build()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times, loss = [], None
    for index in range(warmup + rounds):
        replay.engine.draw()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            loss = replay.once()
            end.record()
            end.synchronize()
            spent = start.elapsed_time(end)
        else:
            began = time.perf_counter()
            loss = replay.once()
            spent = 1e3 * (time.perf_counter() - began)
        if index >= warmup:
            times.append(spent)
    return {
        "ms": times, "loss": float(loss), "kernel": replay.kernel,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "exchanges": replay.engine.num_exchanges, "exchanged_bytes": replay.engine.num_bytes,
    }  # fmt: skip


def contenders(shape: dict[str, int], device: Any, *, peer: bool) -> dict[str, Callable[[], Replay]]:
    heads = shape["num_heads"] // SP
    found: dict[str, Callable[[], Replay]] = {}
    for name, mode in MODES.items():
        if mode[1] <= heads:
            found[name] = lambda mode=mode: Replay(shape, device, mode)
    found["no exchange"] = lambda: Replay(shape, device, MODES["none"], copies=False)
    if peer:
        found["deepspeed"] = lambda: Replay(shape, device, MODES["none"], deepspeed=True)
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(s for s in SHAPES if s != "smoke"), default=["1B-64K", "7B-16K"]
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contenders alone")
    parser.add_argument("--visits", type=int, default=2, help="how often the contenders take turns (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measured micro-batches of each visit (default: 5)")
    parser.add_argument("--warmup", type=int, default=2, help="micro-batches before them (default: 2)")
    parser.add_argument("--no-peer", action="store_true", help="without DeepSpeed")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny shape, on the CPU where there is no GPU: does it run at all?"
    )
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(argv)
    if options.smoke:
        options.shapes, options.visits, options.rounds, options.warmup = ["smoke"], 1, 2, 1
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    if not torch.cuda.is_available() and not options.smoke:
        print(
            "torch sees no GPU here (`megatron-sp doctor` says why); --smoke runs a tiny shape on the CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    peer = not options.no_peer and importlib.util.find_spec("deepspeed") is not None
    if not peer and not options.no_peer:
        print("note: deepspeed is not installed here: ours alone", file=sys.stderr)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    everything: dict[str, Any] = {"sp": SP}
    for label in options.shapes:
        shape = SHAPES[label]
        builders = contenders(shape, device, peer=peer)
        chosen = {n: b for n, b in builders.items() if options.only is None or n in options.only}
        if not chosen:
            print(f"--only {' '.join(options.only)} names none of: {', '.join(builders)}", file=sys.stderr)
            return 2
        raw: dict[str, list[dict[str, Any]]] = {n: [] for n in chosen}
        for visit in range(options.visits):
            for n, build in chosen.items():
                raw[n].append(measure(build, device, options.warmup, options.rounds))
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                spent = Stats.of(raw[n][-1]["ms"]).text("ms", digits=1)
                print(f"{label} visit {visit + 1}/{options.visits}: {n} {spent}", file=sys.stderr)
        everything[label] = report(label, shape, raw, name)
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "gpu": name}
    if peer:
        versions["deepspeed"] = importlib.import_module("deepspeed").__version__
    write_json(options.json, "gpu_ulysses_replay", everything, versions)
    return 0


def report(label: str, shape: dict[str, int], raw: dict[str, list[dict[str, Any]]], device_name: str) -> dict[str, Any]:
    """Print the table of one shape; returns what goes into the file."""
    results: dict[str, Any] = {"shape": shape}
    rows = []
    baseline = Stats.of(t for v in raw["deepspeed"] for t in v["ms"]).median if "deepspeed" in raw else None
    for name, visits in raw.items():
        ms = Stats.of(t for visit in visits for t in visit["ms"])
        last = visits[-1]
        peak = max(v["peak_bytes"] for v in visits)
        results[name] = {
            "ms": ms.as_dict(),
            "peak_bytes": peak,
            **{k: last[k] for k in ("loss", "kernel", "exchanges", "exchanged_bytes")},
        }
        tokens = shape["seq_length"] // SP / ms.median * 1e3
        rows.append([
            name, ms.text("ms", digits=1), f"{tokens:,.0f}", f"{peak / 2**30:.1f} GiB", f"{last['exchanges']}",
            f"{last['exchanged_bytes'] / 2**20:.0f} MiB", "" if baseline is None else f"{ms.median / baseline:.3f}",
        ])  # fmt: skip
    goal = f", goal {shape['goal_ms']} ms" if shape["goal_ms"] else ""
    title = f"Rank 0 of sp={SP}, {label}, one micro-batch forward and backward on {device_name}{goal}"
    header = ["", "median (min-max)", "tokens/s/GPU", "peak memory", "exchanges", "received", "of DeepSpeed"]
    kernels = sorted({v["kernel"] for visits in raw.values() for v in visits})
    print_table(title, header, rows, [f"attention kernel: {', '.join(kernels)}"])
    return results


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
