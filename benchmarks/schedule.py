"""A scheduled Hugging Face Llama against what one would use instead: our own model, torch's parallelize_module, the model as it is.

    python benchmarks/schedule.py [--links 1 loopback] [--rounds 15] [--json docs/benchmarks/schedule.json]

Blocks alone (``LlamaModel``: no output layer), forward and backward, fp32, SDPA, tp = 2: two ranks with one core each
in one process group, on two "hosts" or over loopback. Contenders take turns within each round; medians, and ratios
within a round.

    scheduled / ours        the same blocks in this package (``GPTModel.hidden``), with the same weights
    scheduled / DTensor     the same LlamaModel under ColwiseParallel and RowwiseParallel
    alone: scheduled / as it is   each rank by itself, a schedule on a mesh of one against the unmodified model
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, child_environment, load_average, print_table, ratios, write_json
from hosts import HostsError, answering, in_turn, run_workers

SHAPE = {"layers": 4, "seq_length": 512, "batch": 4, "hidden_size": 512, "ffn": 1408, "heads": 8, "groups": 4}
SMOKE = {"layers": 1, "seq_length": 16, "batch": 2, "hidden_size": 32, "ffn": 48, "heads": 4, "groups": 2}
PAIRS = (
    ("scheduled", "ours", 1.15),
    ("scheduled", "DTensor", 0.97),
    ("scheduled seq", "ours seq", 1.15),
    ("alone scheduled", "alone", 1.02),
)
ON_A_LINK = {("scheduled", "DTensor"): 0.88}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--links", nargs="+", default=["1", "loopback"], help="Gbit/s of a link between two hosts, or loopback"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (default: 15)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return worker(json.loads(options.worker))
    try:
        versions = {name: version(name) for name in ("torch", "transformers")}
    except ImportError:
        print("transformers is needed: bash scripts/setup_env.sh dev", file=sys.stderr)
        return 2
    shape = SMOKE if options.smoke else SHAPE
    everything: dict[str, Any] = {"shape": shape, "rounds": options.rounds, "links": {}}
    for link in options.links:
        task = {"shape": shape, "rounds": options.rounds, "warmup": options.warmup}
        try:
            raw = run_workers(link, str(Path(__file__).resolve()), sys.executable, task, child_environment(1))
        except (HostsError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        seconds = raw["seconds"]
        results = {f"{name} seconds": Stats.of(values) for name, values in seconds.items()}
        rows = []
        for first, second, target in PAIRS:
            goal = target if link == "loopback" else ON_A_LINK.get((first, second), target)
            results[f"{first} / {second}"] = ratio = ratios(seconds[first], seconds[second])
            texts = (results[f"{name} seconds"].text("ms", 1e3, 1) for name in (first, second))
            rows.append([f"{first} / {second}", *texts, ratio.text(""), f"{goal:.2f}"])
        title = "loopback" if link == "loopback" else f"two hosts, {link} Gbit/s"
        print_table(f"Llama blocks, tp 2, {title}", ["", "first", "second", "ratio", "target"], rows)
        print(f"load average {load_average():.1f}; the benchmark itself makes 2", file=sys.stderr)
        everything["links"][link] = {name: stats.as_dict() for name, stats in results.items()}
    write_json(options.json, "schedule", everything, versions)
    return 0


def worker(task: dict[str, Any]) -> int:
    """Every contender in turn."""
    with answering(task) as answer:
        answer["seconds"] = in_turn(task, build(task["shape"]))
    return 0


def build(shape: dict[str, int]) -> dict[str, Callable[[], Any]]:
    """The contenders; those with tp are seen to compute the same before anything is timed."""
    import torch
    import torch.distributed as dist

    from megatron_sp.schedule import Mesh

    assert dist.group.WORLD is not None
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (shape["batch"], shape["seq_length"]), generator=generator)
    grad = torch.randn(shape["batch"], shape["seq_length"], shape["hidden_size"], generator=generator)
    mesh = Mesh(tp=dist.group.WORLD)
    models: dict[str, Callable[[], Any]] = {
        "scheduled": scheduled(shape, mesh, seq=False), "ours": ours(shape, seq=False), "DTensor": by_torch(shape),
        "scheduled seq": scheduled(shape, mesh, seq=True), "ours seq": ours(shape, seq=True),
        "alone scheduled": scheduled(shape, Mesh(), seq=False), "alone": Theirs(llama(shape)),
    }  # type: ignore[dict-item]  # fmt: skip
    want = models["alone"](tokens, grad)  # type: ignore[call-arg]
    for name, model in models.items():
        got = model(tokens, grad)  # type: ignore[call-arg]
        if name == "ours seq":
            continue  # it has its own positions alone
        error = float((got - want).abs().max() / want.abs().max())
        assert error < 1e-4, f"{name} does not compute the same: {error}"
    return {name: (lambda model=model: model(tokens, grad)) for name, model in models.items()}


def llama(shape: dict[str, int]) -> Any:
    """The unmodified model; the same weights each time."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(3)
    return LlamaModel(LlamaConfig(
        num_hidden_layers=shape["layers"], hidden_size=shape["hidden_size"], intermediate_size=shape["ffn"], vocab_size=64,
        num_attention_heads=shape["heads"], num_key_value_heads=shape["groups"], max_position_embeddings=shape["seq_length"],
        attn_implementation="sdpa", use_cache=False,
    ))  # fmt: skip


class Theirs:
    """A LlamaModel as it is, or as something has made it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Any, grad: Any) -> Any:
        for parameter in self.model.parameters():
            parameter.grad = None
        y = self.model(input_ids=tokens).last_hidden_state
        y.backward(grad)
        return y.detach()


def scheduled(shape: dict[str, int], mesh: Any, *, seq: bool) -> Theirs:
    """Under a schedule."""
    from megatron_sp.schedule import schedule

    s = schedule(llama(shape), mesh)
    enter, leave = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    s["layers.*.self_attn"].sync("fwd_pre", enter, arg="hidden_states")
    s["layers.*.self_attn.{q,k,v}_proj"].column(input="prepared")
    s["layers.*.self_attn.o_proj"].row(leave)
    s["layers.*.mlp"].sync("fwd_pre", enter)
    s["layers.*.mlp.{gate,up}_proj"].column(input="prepared")
    s["layers.*.mlp.down_proj"].row(leave)
    if seq:
        s.sequence("layers.0", "norm")
    return Theirs(s.apply())


def by_torch(shape: dict[str, int]) -> Theirs:
    """Under parallelize_module."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = llama(shape)
    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {"layers.*.self_attn.o_proj": row, "layers.*.mlp.down_proj": row}
    plan |= {f"layers.*.self_attn.{part}_proj": column for part in "qkv"}
    plan |= {f"layers.*.mlp.{part}_proj": column for part in ("gate", "up")}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return Theirs(model)


def ours(shape: dict[str, int], *, seq: bool) -> Callable[[Any, Any], Any]:
    """The same blocks in this package, with the same weights."""
    import torch
    import torch.distributed as dist

    from megatron_sp.config.schema import KernelConfig, ModelConfig
    from megatron_sp.convert.copies import Correspondence, Gathered
    from megatron_sp.convert.families.decoders import Llama
    from megatron_sp.convert.model import parameter_shapes
    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.ops.attention import AttentionMask
    from megatron_sp.parallel.forward_context import ForwardContext
    from megatron_sp.parallel.layers import shard_specs
    from megatron_sp.parallel.parallel_context import ParallelContext
    from megatron_sp.parallel.tensor_parallel import TensorParallel

    config = ModelConfig(
        num_layers=shape["layers"], hidden_size=shape["hidden_size"], ffn_hidden_size=shape["ffn"], vocab_size=64,
        num_attention_heads=shape["heads"], num_query_groups=shape["groups"], seq_length=shape["seq_length"],
        position_embedding_type="rope", normalization="RMSNorm", norm_epsilon=1e-6, swiglu=True, disable_bias_linear=True,
        attention_dropout=0.0, hidden_dropout=0.0, make_vocab_size_divisible_by=1,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    layout = ParallelContext(tp=TensorParallel(dist.group.WORLD, seq))
    model = GPTModel(config, KernelConfig(), seed=1, dtype=torch.float32, layout=layout)
    theirs = {f"model.{name}": p.detach() for name, p in llama(shape).named_parameters()}
    weights = Gathered(Correspondence.of(parameter_shapes(config), Llama().copies(config, 0)), _Held(theirs))
    specs = shard_specs(model)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(specs[name].take(weights.read(name)))

    def run(tokens: Any, grad: Any) -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        y = model.hidden(tokens, ForwardContext(AttentionMask()))
        whole = grad.transpose(0, 1)
        rows = shape["seq_length"] // dist.get_world_size() if seq else shape["seq_length"]
        start = dist.get_rank() * rows if seq else 0
        y.backward(whole[start : start + rows])
        return y.detach().transpose(0, 1)

    return run


class _Held:
    """Tensors in memory (a ``TensorStore``)."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._held = tensors

    def tensors(self) -> dict[str, Any]:
        from megatron_sp.convert.copies import TensorInfo

        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._held.items()}

    def read(self, name: str) -> Any:
        return self._held[name]


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
