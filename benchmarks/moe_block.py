"""A mixture of experts, forward and backward: beside transformers' on one process, beside a plain exchange and transformers' on two.

    benchmarks/setup_peers.sh experts
    .venv-peers/bin/python benchmarks/moe_block.py [--cells one 2:1 2:loopback 4:loopback] [--json docs/benchmarks/moe_block.json]

one: a process, 2048 tokens, hidden size 512, 16 experts of width 256, the best 4 of each token (OLMoE's routing), fp32; against
transformers' OlmoeSparseMoeBlock with its experts in a loop (eager) and in grouped products (grouped_mm). Norm and residual are left out
on both sides.

RANKS:LINK: 8192 tokens over all ranks, hidden size 1024, 16 experts of width 512, the best 4; each rank has a core of its own (four
ranks share two). Against

    plain          a copy of a token for each choice, sorted by expert; synchronous all_to_alls of the copies and back; torch's autograd
    transformers   its expert parallelism: all_to_all, with tokens of its own on each rank, and all_reduce, with all tokens on every rank
                   and the results of its experts summed over the ranks

All take turns within each round, ratios are taken within a round, medians are over rounds.

    exposed   time in a forward and a backward pass that a rank is blocked in exchanges, in an all_to_all or in a wait for one
    bytes     that rank 0 sends in exchanges of rows, and what the routing says that it must
    peak      largest bytes of live storages in a forward and a backward pass, gradients included
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, child_environment, load_average, print_table, ratios, write_json
from hosts import HostsError, answering, in_turn, run_workers

ONE = {"tokens": 2048, "hidden": 512, "width": 256, "experts": 16, "k": 4}
SEVERAL = {"tokens": 8192, "hidden": 1024, "width": 512, "experts": 16, "k": 4}
SMOKE = {"tokens": 64, "hidden": 32, "width": 16, "experts": 8, "k": 2}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["one", "2:1"], metavar="one|RANKS:LINK")
    parser.add_argument("--chunks", type=int, default=2, help="--moe-chunks of ours (default: 2)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of the single process (default: 1)")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return worker(json.loads(options.worker))
    everything: dict[str, Any] = {"rounds": options.rounds, "cells": {}}
    versions: dict[str, str] = {}
    for cell in options.cells:
        ranks, _, link = ("1", "", "loopback") if cell == "one" else cell.partition(":")
        shape = SMOKE if options.smoke else ONE if cell == "one" else SEVERAL
        task = {
            "shape": shape,
            "rounds": options.rounds,
            "warmup": options.warmup,
            "chunks": options.chunks,
            "one": cell == "one",
        }
        threads = options.threads if cell == "one" else 1
        try:
            raw = run_workers(
                link, str(Path(__file__).resolve()), sys.executable, task, child_environment(threads), int(ranks)
            )
        except (HostsError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        versions = raw.pop("versions")
        everything["cells"][cell] = {"shape": shape, **report(cell, raw), "load_average": load_average()}
    write_json(options.json, "moe_block", everything, versions)
    return 0


def report(cell: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Print the table of a cell; return its figures."""
    seconds, exposed, peaks, sent = raw["seconds"], raw["exposed"], raw["peaks"], raw["bytes"]
    rows, found = [], dict[str, Any]()
    for name, values in seconds.items():
        of = ratios(seconds["ours"], values)
        row: dict[str, Any] = {
            "seconds": Stats.of(values).as_dict(),
            "ours_of_it": of.as_dict(),
            "peak_bytes": peaks[name],
        }
        texts = [
            Stats.of(values).text("ms", 1e3, 0),
            of.text("", digits=2),
            f"{peaks[name] / 2**20:.0f}",
            f"{peaks['ours'] / peaks[name]:.2f}",
        ]
        if name in exposed:
            waited = ratios(exposed["ours"], exposed[name])
            row |= {
                "exposed_seconds": Stats.of(exposed[name]).as_dict(),
                "ours_exposed_of_it": waited.as_dict(),
                **sent.get(name, {}),
            }
            texts += [Stats.of(exposed[name]).text("ms", 1e3, 0), waited.text("", digits=2)]
            texts += [
                f"{sent[name]['bytes'] / 2**20:.1f} ({sent[name]['expected'] / 2**20:.1f})" if name in sent else ""
            ]
        found[name] = row
        rows.append([name, *texts])
    header = [
        "",
        "forward and backward",
        "ours of it",
        "peak, MiB",
        "ours of it",
        "exposed",
        "ours of it",
        "sent, MiB (expected)",
    ]
    print_table(f"A mixture of experts: {cell}", header, [row + [""] * (len(header) - len(row)) for row in rows],
                [f"left out: {name}: {why}" for name, why in raw["left_out"].items()])  # fmt: skip
    return {"contenders": found, "left_out": raw["left_out"]}


# a rank


def worker(task: dict[str, Any]) -> int:
    """Every contender in turn."""
    import torch
    import transformers

    with answering(task) as answer:
        if task["one"]:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        makers: dict[str, Callable[[], Any]] = {"ours": lambda: Ours(task)}
        if task["one"]:
            makers |= {f"transformers, {kind}": lambda kind=kind: Block(task, kind) for kind in ("eager", "grouped_mm")}
        else:
            makers["plain"] = lambda: Plain(task)
            makers |= {
                f"transformers, {way}": lambda way=way: Parallel(task, way) for way in ("all_to_all", "all_reduce")
            }
        contenders, left_out = made(makers)
        alike(contenders)
        peaks = {name: peak_of(contender.once) for name, contender in contenders.items()}
        answer["left_out"], answer["peaks"] = left_out, peaks
        answer["bytes"] = {name: each.traffic() for name, each in contenders.items() if hasattr(each, "traffic")}
        waits: dict[str, list[float]] = {name: [] for name, each in contenders.items() if hasattr(each, "waited")}

        def timed(name: str, contender: Any) -> Callable[[], Any]:
            def once() -> Any:
                if name in waits:
                    contender.waited = 0.0
                made = contender.once()
                if name in waits:
                    waits[name].append(contender.waited)
                return made

            return once

        answer["seconds"] = in_turn(task, {name: timed(name, contender) for name, contender in contenders.items()})
        answer["exposed"] = {name: values[-task["rounds"] :] for name, values in waits.items()}
        answer["versions"] = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    return 0


def made(makers: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Make the contenders; who fails on a rank is left out on all, with the reason. Collective."""
    import torch
    import torch.distributed as dist

    contenders, left_out = dict[str, Any](), dict[str, str]()
    for name, make in makers.items():
        reason, contender = "", None
        try:
            contender = make()
            contender.once()
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).strip() or 'without a message').splitlines()[0][:300]}"
            print(f"{name}: {reason}", file=sys.stderr, flush=True)
        failed = torch.tensor(float(bool(reason)))
        if dist.get_world_size() > 1:
            dist.all_reduce(failed)
        if failed:
            left_out[name] = reason or "failed on another rank"
        else:
            contenders[name] = contender
    return contenders, left_out


def alike(contenders: dict[str, Any]) -> None:
    """All compute the same, to fp32 rounding: output, gradient of the input and of the router."""
    import torch

    results = {name: contender.once() for name, contender in contenders.items() if "all_reduce" not in name}
    want = next(iter(results.values()))
    for name, got in results.items():
        for a, b in zip(got, want, strict=True):
            error = float((a - b).abs().max() / b.abs().max())
            assert error < 1e-4, f"{name} computes something else: {error:.1e}"
    torch.manual_seed(0)


def peak_of(once: Callable[[], Any]) -> int:
    from storages import StorageCount

    with StorageCount() as count:
        once()
        count.reset_peak()
        once()
    return int(count.peak)


def weights_of(task: dict[str, Any]) -> dict[str, Any]:
    """The whole layer's weights, and this rank's tokens and output gradient."""
    import torch

    shape, ranks, rank = task["shape"], task["ranks"], task["rank"]
    h, f, e, generator = shape["hidden"], shape["width"], shape["experts"], torch.Generator().manual_seed(1)
    made = {
        "router": torch.randn(e, h, generator=generator) / h**0.5, "w1": torch.randn(e, 2 * f, h, generator=generator) / h**0.5,
        "w2": torch.randn(e, h, f, generator=generator) / f**0.5,
    }  # fmt: skip
    own = shape["tokens"] // ranks
    generator.manual_seed(2)
    for name in ("x", "grad"):
        whole = torch.randn(shape["tokens"], h, generator=generator)
        made[f"all_{name}"], made[name] = whole, whole[rank * own : (rank + 1) * own].clone()
    return made


class Ours:
    """Our layer, its gradients in a flat buffer."""

    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        from torch import nn

        from megatron_sp.comm.groups import SINGLE_RANK, ParallelGroups
        from megatron_sp.ops.activation import Activation
        from megatron_sp.ops.routing import RoutingSpec
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.parallel.experts import ExpertPlan
        from megatron_sp.parallel.parallel_context import NO_EP, ExpertParallel

        ranks, shape, given = task["ranks"], task["shape"], weights_of(task)
        ep = NO_EP
        if ranks > 1:
            ep = ExpertParallel.create(ParallelGroups.create(torch.device("cpu")), ranks, chunks=task["chunks"])
        own = shape["experts"] // ranks
        mine = slice(task["rank"] * own, (task["rank"] + 1) * own)
        self.parameters = {
            name: nn.Parameter(given[name] if name == "router" else given[name][mine].clone())
            for name in ("router", "w1", "w2")
        }
        unit = FlatUnit("experts", self.parameters.items())
        self.gradients, self.unit = FlatGradients([unit], SINGLE_RANK), unit
        routing = RoutingSpec(shape["experts"], shape["k"], pre_softmax=True)
        self.plan = ExpertPlan(routing, Activation("swiglu"), ep)
        self.x, self.grad, self.waited, self.shape, self.ranks = (
            given["x"][:, None],
            given["grad"][:, None],
            0.0,
            shape,
            ranks,
        )
        self.sent = 0

    def once(self) -> tuple[Any, Any, Any]:
        from megatron_sp.ops.expert_mlp import ExpertWeights
        from megatron_sp.parallel import all_to_all
        from megatron_sp.parallel.experts import Router, expert_mlp

        real, self.sent = all_to_all.all_to_all_async, 0

        def counted(send: Any, send_counts: Any, *rest: Any) -> Any:
            if send.dtype.is_floating_point:
                self.sent += (sum(send_counts) - send_counts[self.plan.ep.rank]) * send.element_size()
            return TimedHandle(self, real(send, send_counts, *rest))

        all_to_all.all_to_all_async = counted
        try:
            self.gradients.start_step()
            x, p = self.x.detach().requires_grad_(), self.parameters
            experts = ExpertWeights(p["w1"], None, p["w2"], None)
            y, _ = expert_mlp(
                x, None, Router(p["router"]), experts, self.plan, add_input=False, main_grad=self.gradients
            )
            y.backward(self.grad)
        finally:
            all_to_all.all_to_all_async = real
        return (
            y.detach()[:, 0],
            x.grad[:, 0],
            next(slot.view(self.unit.grads) for slot in self.unit.slots if slot.name == "router"),
        )

    def traffic(self) -> dict[str, int]:
        """Bytes of rows that were sent, and what the routing says that must be."""
        import torch

        from megatron_sp.ops.routing import choose
        from megatron_sp.parallel.expert_exchange import RowFormat

        chosen = choose(self.x[:, 0] @ self.parameters["router"].t(), self.plan.routing)
        own, h, k = self.shape["experts"] // self.ranks, self.shape["hidden"], self.shape["k"]
        goes = torch.zeros(len(chosen), self.ranks, dtype=torch.bool).scatter_(1, chosen // own, True)
        goes[:, self.plan.ep.rank] = False
        form = RowFormat(h, k, torch.float32, torch.float32)
        counts = torch.tensor([float(goes.sum())])
        received = counts.clone()
        if self.ranks > 1:  # results and gradients of rows go back for rows that came
            import torch.distributed as dist

            to = goes.sum(0)
            came = torch.empty_like(to)
            dist.all_to_all_single(came, to)
            received = came.sum().float()
        there = int(counts) * 4 * (form.elements(numbers=True) + h)
        back = int(received) * 4 * (h + form.elements(numbers=False))
        return {"bytes": self.sent, "expected": there + back}


class TimedHandle:
    """A handle whose wait adds to its owner's time."""

    def __init__(self, owner: Any, handle: Any) -> None:
        self._owner, self._handle = owner, handle

    def recorded(self, flight: Any) -> TimedHandle:
        return self

    def wait(self) -> Any:
        began = time.perf_counter()
        found = self._handle.wait()
        self._owner.waited += time.perf_counter() - began
        return found


class Plain:
    """What a reader of the papers writes first: copies sorted by expert, synchronous exchanges, autograd."""

    def __init__(self, task: dict[str, Any]) -> None:
        from torch import nn

        ranks, shape, given = task["ranks"], task["shape"], weights_of(task)
        own = shape["experts"] // ranks
        mine = slice(task["rank"] * own, (task["rank"] + 1) * own)
        self.router, self.w1, self.w2 = (
            nn.Parameter(given[name] if name == "router" else given[name][mine].clone())
            for name in ("router", "w1", "w2")
        )
        self.x, self.grad, self.k, self.own, self.ranks, self.rank = (
            given["x"],
            given["grad"],
            shape["k"],
            own,
            ranks,
            task["rank"],
        )
        self.waited, self.sent = 0.0, 0

    def _exchange(self, rows: Any, to: list[int], coming: list[int]) -> Any:
        import torch
        import torch.distributed as dist

        owner = self

        class Exchange(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rows: Any) -> Any:
                return owner._all_to_all(rows, to, coming)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
                return owner._all_to_all(grad.contiguous(), coming, to)

        assert dist.is_initialized()
        return Exchange.apply(rows)

    def _all_to_all(self, rows: Any, to: list[int], coming: list[int]) -> Any:
        import torch.distributed as dist

        received = rows.new_empty(sum(coming), rows.shape[1])
        began = time.perf_counter()
        dist.all_to_all_single(received, rows, coming, to)
        self.waited += time.perf_counter() - began
        self.sent += (sum(to) - to[self.rank]) * rows.shape[1] * rows.element_size()
        return received

    def once(self) -> tuple[Any, Any, Any]:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F

        self.sent = 0
        for p in (self.router, self.w1, self.w2):
            p.grad = None
        x = self.x.detach().requires_grad_()
        weights, chosen = torch.softmax(x @ self.router.t(), 1).topk(self.k, 1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.own * self.ranks).view(self.ranks, self.own)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts)
        to, coming = counts.sum(1).tolist(), came.sum(1).tolist()
        rows = self._exchange(x[order // self.k], to, coming)
        experts = torch.arange(self.own).repeat(self.ranks).repeat_interleave(came.flatten())
        by_expert = experts.argsort(stable=True)
        parts = []
        for expert, part in enumerate(rows[by_expert].split(came.sum(0).tolist())):
            gate, up = (part @ self.w1[expert].t()).chunk(2, 1)
            parts.append((F.silu(gate) * up) @ self.w2[expert].t())
        results = torch.empty_like(rows).index_copy(0, by_expert, torch.cat(parts))
        back = self._exchange(results, coming, to)
        back = torch.zeros_like(back).index_copy(0, order, back).view(len(x), self.k, -1)
        y = (back * weights[:, :, None]).sum(1)
        y.backward(self.grad)
        return y.detach(), x.grad, self.router.grad

    def traffic(self) -> dict[str, int]:
        """Bytes of rows that were sent; nothing says what they must be but that."""
        return {"bytes": self.sent, "expected": self.sent}


class Block:
    """transformers' OLMoE block on one process."""

    def __init__(self, task: dict[str, Any], kind: str) -> None:
        import torch
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

        given = weights_of(task)
        config = olmoe(OlmoeConfig, task)
        config._experts_implementation = kind
        self.block = OlmoeSparseMoeBlock(config)
        with torch.no_grad():
            self.block.gate.weight.copy_(given["router"])
            self.block.experts.gate_up_proj.copy_(given["w1"])
            self.block.experts.down_proj.copy_(given["w2"])
        self.x, self.grad = given["x"][None], given["grad"][None]

    def once(self) -> tuple[Any, Any, Any]:
        self.block.zero_grad(set_to_none=True)
        x = self.x.detach().requires_grad_()
        y = self.block(x)
        y.backward(self.grad)
        return y.detach()[0], x.grad[0], self.block.gate.weight.grad


def olmoe(config_class: Any, task: dict[str, Any]) -> Any:
    shape = task["shape"]
    return config_class(
        vocab_size=64, hidden_size=shape["hidden"], intermediate_size=shape["width"], num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, num_experts=shape["experts"], num_experts_per_tok=shape["k"], norm_topk_prob=False, pad_token_id=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


class Parallel:
    """transformers' expert parallelism: a model of one layer, of which the block alone is run."""

    def __init__(self, task: dict[str, Any], way: str) -> None:
        import torch
        import torch.distributed as dist
        from transformers import OlmoeConfig, OlmoeForCausalLM
        from transformers.distributed import DistributedConfig

        given, ranks = weights_of(task), task["ranks"]
        os.environ |= {"RANK": str(task["rank"]), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(task["rank"])}
        os.environ |= {"MASTER_ADDR": task["address"], "MASTER_PORT": str(task["port"])}
        folder = Path(tempfile.gettempdir()) / f"moe_block_{task['port']}_{way}"
        if task["rank"] == 0:
            model = OlmoeForCausalLM(olmoe(OlmoeConfig, task))
            block = model.model.layers[0].mlp
            with torch.no_grad():
                block.gate.weight.copy_(given["router"])
                block.experts.gate_up_proj.copy_(given["w1"])
                block.experts.down_proj.copy_(given["w2"])
            model.save_pretrained(folder)
        dist.barrier()
        sizes = {"fsdp_size": ranks} if way == "all_to_all" else {"tp_size": ranks, "tp_plan": {}}
        config = DistributedConfig(ep_size=ranks, ep_implementation=way, **sizes)
        sharded = OlmoeForCausalLM.from_pretrained(str(folder), distributed_config=config, dtype=torch.float32)
        for module in sharded.modules():
            if hasattr(module, "unshard"):  # FSDP gathers what the block needs when the layer around it is called
                module.unshard()
        self.block = sharded.model.layers[0].mlp
        every = "all_" if way == "all_reduce" else ""
        self.x, self.grad = given[f"{every}x"][None], given[f"{every}grad"][None]

    def once(self) -> tuple[Any, Any, Any]:
        self.block.zero_grad(set_to_none=True)
        x = self.x.detach().requires_grad_()
        y = self.block(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(self.grad)
        router = self.block.gate.weight.grad
        return y.detach()[0], x.grad[0], router.full_tensor() if hasattr(router, "full_tensor") else router


if __name__ == "__main__":
    sys.exit(main())
