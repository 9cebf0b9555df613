"""One training step on one GPU in bf16: ours, Hugging Face's GPT-2 or Llama (plain, and with compiled blocks on request), and bare matmul.

    python benchmarks/gpu/step.py [--shape 124M|350M|1.3B|llama-1B] [--cuda-graphs on] [--compile] [--json docs/benchmarks/gpu_step.json]

Ours trains as it always does in bf16: bf16 parameters and activations, fp32 gradients, master weights and AdamW state, Triton's
kernels where they can be used; with --cuda-graphs on also as captured steps, by the step of a run (``training/step.py``).
The peer does the usual thing: fp32 parameters under bf16 autocast, fused AdamW; with --compile also with each of its
blocks under torch.compile. Both draw their weights on the device. Where transformers is not installed only ours and the
matrix products run. Contenders take turns in one process, each with its peak of allocated memory;
times are between two synchronised points. MFU is model FLOP/s (both conventions, see megatron_sp/estimate/flops.py)
over the data sheet's dense bf16 peak, if the GPU is known; the share of the matmul rate measured in the same run stands
beside it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common import Stats, print_table, write_json
from gpu.device_weights import drawn_on

SHAPES = {
    "124M": {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50304, "batch": 16, "seq_length": 1024},
    "350M": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50304, "batch": 16, "seq_length": 1024},
    "1.3B": {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "vocab_size": 50304, "batch": 8, "seq_length": 2048},
    "llama-1B": {
        "num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192, "vocab_size": 32000, "batch": 2,
        "seq_length": 8192,
    },
    "smoke": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 128, "batch": 2, "seq_length": 16},
    "smoke-llama": {
        "num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 128, "batch": 2,
        "seq_length": 16,
    },
}  # fmt: skip
"""Those with ``num_kv_heads`` are Llamas: RMSNorm, SwiGLU, rotary embedding, no biases, a table of its own for the output."""
LEARNING_RATE, WEIGHT_DECAY, CLIP, SEED = 1e-4, 0.1, 1.0, 1234

Step = Callable[[Any, int], Any]


class Parts(NamedTuple):
    """A training step in three parts; called, it is a ``Step``."""

    forward: Callable[[Any], Any]
    backward: Callable[[Any], None]
    update: Callable[[], None]

    def __call__(self, tokens: Any, _: int) -> Any:
        loss = self.forward(tokens)
        self.backward(loss)
        self.update()
        return loss.detach()


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ours(NamedTuple):
    """Our model, what trains it, and the name of its attention kernel."""

    model: Any
    weights: Any
    gradients: Any
    optimizer: Any
    groups: Any
    kernel: Any


def make_ours(shape: dict[str, int], device: Any, dtype: Any = None, layout: Any = None) -> Ours:
    """Our model; ``dtype``: of the parameters, bf16 unless said otherwise; ``layout``: of a rank."""
    import torch

    from megatron_sp.comm.groups import ParallelGroups, init_process_group
    from megatron_sp.config.schema import KernelConfig, OptimizerConfig
    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.ops.attention_choice import activate, choose_kernel
    from megatron_sp.optim.flat import FlatUnit
    from megatron_sp.optim.gradients import FlatGradients
    from megatron_sp.optim.optimizer import FlatOptimizer
    from megatron_sp.optim.weights import WholeWeights
    from megatron_sp.parallel.layers import attach_main_grad
    from megatron_sp.utils.launch import Launch

    dtype = dtype or torch.bfloat16
    init_process_group(Launch(0, 0, 1, 1, 0), device, "auto", timedelta(minutes=10))
    groups = ParallelGroups.create(device)
    kernel = choose_kernel("auto", device.type, dtype, 0.0).name
    activate(kernel)  # the choice tried each, and put torch's own back
    with drawn_on(device):
        model = GPTModel(model_config(shape), KernelConfig(), seed=SEED, dtype=dtype, layout=layout).to(device)
    names = {id(p): n for n, p in model.named_parameters()}
    units = [FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()]) for u in model.units()]
    gradients = FlatGradients(units, groups.dp_cp_sp)
    optimizer = FlatOptimizer(units, OptimizerConfig(lr=LEARNING_RATE, clip_grad=CLIP))
    attach_main_grad(model, gradients)
    return Ours(model, WholeWeights(units), gradients, optimizer, groups, kernel)


def build_ours(shape: dict[str, int], device: Any, dtype: Any = None, layout: Any = None) -> tuple[Parts, str]:
    """Our step and the name of its attention kernel (``make_ours``)."""
    import torch

    from megatron_sp.ops.attention import AttentionMask
    from megatron_sp.optim.weights import UnitWork
    from megatron_sp.parallel.forward_context import ForwardContext

    model, weights, gradients, optimizer, _, kernel = make_ours(shape, device, dtype, layout)
    events = UnitWork(weights, gradients)
    loss_mask = torch.ones(shape["batch"], shape["seq_length"], device=device)
    loss_mask[:, -1] = 0.0

    def forward(tokens: Any) -> Any:
        gradients.start_step()
        gradients.last_micro_batch()
        loss_sum, _token_losses = model(
            tokens, tokens.roll(-1, dims=1), loss_mask, ForwardContext(AttentionMask(), kernel=kernel), events
        )
        return loss_sum / loss_mask.sum()

    def backward(loss: Any) -> None:
        loss.backward()
        gradients.finish_step()

    def update() -> None:
        optimizer.step(LEARNING_RATE, WEIGHT_DECAY, optimizer.grad_norm().item())

    return Parts(forward, backward, update), kernel


def build_captured(shape: dict[str, int], device: Any, maker: Callable[[], Any] | None = None) -> Step:
    """Our step, captured from its second call on; ``maker``: makes what captures (``cuda_graphs.GraphMaker``), instead of CUDA graphs."""
    import torch

    from megatron_sp.ops.cuda_graphs import CudaGraphs
    from megatron_sp.optim.optimizer import LossScaler
    from megatron_sp.tasks.gpt import GPT
    from megatron_sp.training.graphs import StepGraphs
    from megatron_sp.training.step import StepOptions, StepParts, TrainStep

    ours = make_ours(shape, device)
    scaler = LossScaler(enabled=False, fixed=None, initial=1.0, minimum=1.0, window=1, hysteresis=1)
    parts = StepParts(ours.model, ours.weights, ours.gradients, ours.optimizer, scaler)
    step = TrainStep(parts, GPT.loss, ours.groups, StepOptions(SEED, False, ours.kernel))
    step.graphs = StepGraphs(
        step, maker or (lambda: CudaGraphs(device)), mode="on", warmup=1, is_eager=lambda _: False,
        tell=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    loss_mask = torch.ones(shape["batch"], shape["seq_length"], device=device)
    loss_mask[:, -1] = 0.0

    def run(tokens: Any, index: int) -> Any:
        batch = {"tokens": tokens, "labels": tokens.roll(-1, dims=1), "loss_mask": loss_mask}
        return torch.tensor(step.run([batch], index + 1, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY).losses[0])

    return run


def use_fused_kernels(device: Any) -> str:
    """Compute with Triton's kernels where a run would; return whose they are."""
    import torch

    from megatron_sp.ops.fused_kernels import KernelUse, choose_fused_kernels
    from megatron_sp.ops.kernels.launch import use_triton
    from megatron_sp.ops.norm import NormSpec

    chosen = choose_fused_kernels("auto", KernelUse(device, torch.bfloat16, norm=NormSpec("LayerNorm", 1e-5)))
    use_triton(chosen.elementwise is not None and chosen.elementwise.name == "triton")
    return chosen.describe()


def build_peer(shape: dict[str, int], device: Any, *, compiled: bool, autocast: bool = True) -> Parts:
    """The peer's step; ``compiled``: each of its blocks by itself, one graph for all of them."""
    import torch

    with torch.device(device):
        model, blocks = _peer(shape)
    model.train()
    if compiled:
        for block in blocks:
            block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")  # a trial needs no compiler
    parameters = list(model.parameters())
    decayed, plain = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        fused=True,
    )

    def forward(tokens: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            return model(input_ids=tokens, labels=tokens).loss

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Parts(forward, lambda loss: loss.backward(), update)


def _peer(shape: dict[str, int]) -> tuple[Any, Any]:
    """The peer's model on torch's default device, and its blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if "num_kv_heads" in shape:
        llama = LlamaForCausalLM(LlamaConfig(
            vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], intermediate_size=shape["ffn_size"],
            num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"], num_key_value_heads=shape["num_kv_heads"],
            max_position_embeddings=shape["seq_length"], attention_dropout=0.0, use_cache=False, attn_implementation="sdpa",
        ))  # fmt: skip
        return llama, llama.model.layers
    gpt = GPT2LMHeadModel(GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=shape["seq_length"], n_embd=shape["hidden_size"], n_layer=shape["num_layers"],
        n_head=shape["num_heads"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
        use_cache=False, attn_implementation="sdpa",
    ))  # fmt: skip
    return gpt, gpt.transformer.h


def model_config(shape: dict[str, int]) -> Any:
    from megatron_sp.config.schema import ModelConfig

    llama: dict[str, Any] = {}
    if "num_kv_heads" in shape:
        llama = {
            "group_query_attention": True, "num_query_groups": shape["num_kv_heads"], "ffn_hidden_size": shape["ffn_size"], "swiglu": True,
            "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True,
            "untie_embeddings_and_output_weights": True,
        }  # fmt: skip
    return ModelConfig(
        num_layers=shape["num_layers"], hidden_size=shape["hidden_size"], num_attention_heads=shape["num_heads"],
        seq_length=shape["seq_length"], vocab_size=shape["vocab_size"], attention_dropout=0.0, hidden_dropout=0.0, **llama,
    )  # fmt: skip


def measure_step(
    build: Callable[[], Step], shape: dict[str, int], device: Any, warmup: int, rounds: int
) -> dict[str, Any]:
    """Times, peak memory and last loss of one contender, which is gone from the device afterwards."""
    import torch

    step = build()
    generator = torch.Generator().manual_seed(SEED)
    batches = [
        torch.randint(0, shape["vocab_size"], (shape["batch"], shape["seq_length"]), generator=generator).to(device)
        for _ in range(warmup + rounds)
    ]
    seconds, loss = [], float("nan")
    for index, tokens in enumerate(batches):
        if index == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        start = time.perf_counter()
        result = step(tokens, index)
        synchronize(device)
        if index >= warmup:
            seconds.append(time.perf_counter() - start)
        loss = result.item()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"seconds": seconds, "peak_bytes": peak, "last_loss": loss}


def matmul_rate(device: Any, size: int, rounds: int) -> Stats:
    """FLOP/s of one large bf16 product."""
    import torch

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    rates = []
    for _ in range(rounds + 3):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        rates.append(2.0 * size**3 / (time.perf_counter() - start))
    return Stats.of(rates[3:])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="124M", help="model and batch (default: 124M, 16 x 1024 tokens)"
    )
    parser.add_argument("--batch", type=int, help="sequences, instead of the shape's")
    parser.add_argument("--visits", type=int, default=2, help="how often the contenders take turns (default: 2)")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each visit (default: 10)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: 5)")
    parser.add_argument(
        "--cuda-graphs", choices=("on", "off"), default="off", help="on: also ours as captured steps, which needs a GPU"
    )
    parser.add_argument("--compile", action="store_true", help="also the peer with its blocks under torch.compile")
    parser.add_argument("--no-peer", action="store_true", help="ours and the matrix products alone")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny shape, on the CPU where there is no GPU: does it run at all?"
    )
    parser.add_argument("--json", help="write results there")
    options = parser.parse_args(argv)
    if options.smoke:
        options.shape = "smoke-llama" if "num_kv_heads" in SHAPES[options.shape] else "smoke"
        options.visits, options.rounds, options.warmup = 1, 2, 1
    if min(options.visits, options.rounds) < 1 or options.warmup < 0:
        parser.error("--visits and --rounds must be at least 1, --warmup at least 0")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    from megatron_sp.comm.groups import destroy_process_group
    from megatron_sp.estimate.flops import peak_tflops, step_flops_per_token

    if not torch.cuda.is_available() and not options.smoke:
        print(
            "torch sees no GPU here (`megatron-sp doctor` says why); --smoke runs a tiny shape on the CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = dict(SHAPES[options.shape])
    shape["batch"] = options.batch or shape["batch"]
    kernel = ""

    def ours() -> Step:
        nonlocal kernel
        destroy_process_group()
        step, kernel = build_ours(shape, device)
        return step

    def captured() -> Step:
        destroy_process_group()
        return build_captured(shape, device)

    fused = use_fused_kernels(device)
    contenders: dict[str, Callable[[], Step]] = {"ours": ours}
    if options.cuda_graphs == "on" and device.type == "cuda":
        contenders["ours, captured"] = captured
    elif options.cuda_graphs == "on":
        print("note: captured steps need a GPU: they are left out", file=sys.stderr)
    if importlib.util.find_spec("transformers") is None and not options.no_peer:
        print("note: transformers is not installed here: ours and the matrix products alone", file=sys.stderr)
    elif not options.no_peer:
        contenders["hf"] = lambda: build_peer(shape, device, compiled=False)
        if options.compile:
            contenders["hf, blocks compiled"] = lambda: build_peer(shape, device, compiled=True)
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    rates: list[float] = []
    for visit in range(options.visits):
        for name, build in contenders.items():
            raw[name].append(measure_step(build, shape, device, options.warmup, options.rounds))
            gc.collect()  # models hold reference cycles; the next contender's peak must not contain them
            if device.type == "cuda":
                torch.cuda.empty_cache()
            rates += matmul_rate(device, 64 if options.smoke else 8192, options.rounds).values
            print(
                f"visit {visit + 1}/{options.visits}: {name} {Stats.of(raw[name][-1]['seconds']).text('ms', 1e3, 1)}",
                file=sys.stderr,
            )
    destroy_process_group()
    per_token = step_flops_per_token(model_config(shape))
    tokens = shape["batch"] * shape["seq_length"]
    peak, peak_name = peak_tflops(None, device, torch.bfloat16)
    rate = Stats.of(rates)
    results: dict[str, Any] = {
        "shape": shape,
        "kernel": kernel,
        "matmul_rate": rate.as_dict(),
        "peak": [peak, peak_name],
    }
    rows = []
    for name, visits in raw.items():
        seconds = Stats.of(s for visit in visits for s in visit["seconds"])
        peak_bytes, loss = max(v["peak_bytes"] for v in visits), visits[-1]["last_loss"]
        flops = [f * tokens / seconds.median for f in per_token]  # causal, full
        mfu = [f / (peak * 1e12) if peak else None for f in flops]
        results[name] = {"seconds": seconds.as_dict(), "peak_bytes": peak_bytes, "last_loss": loss, "flops_causal": flops[0],
                         "flops_full": flops[1], "mfu_causal": mfu[0], "mfu_full": mfu[1]}  # fmt: skip
        rows.append([
            name, seconds.text("ms", 1e3, 1), f"{tokens / seconds.median:,.0f}", f"{peak_bytes / 2**30:.2f} GiB",
            f"{flops[0] / 1e12:.0f} / {flops[1] / 1e12:.0f}", " / ".join("?" if m is None else f"{100 * m:.1f} %" for m in mfu),
            f"{flops[0] / rate.median:.2f} / {flops[1] / rate.median:.2f}", f"{loss:.4f}",
        ])  # fmt: skip
    of_ours = [name for name in raw if name.startswith("ours")]
    ratios = {
        f"{name} / {peer}": results[name]["seconds"]["median"] / results[peer]["seconds"]["median"]
        for name in of_ours for peer in raw if peer not in of_ours or (peer == "ours" and name != "ours")
    }  # fmt: skip
    results["time_ratios"] = ratios
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    header = [
        "",
        "step",
        "tokens/s",
        "peak memory",
        "TFLOP/s causal / full",
        "MFU causal / full",
        "of matmul rate",
        "last loss",
    ]
    notes = [
        f"matmul rate {rate.text('TFLOP/s', 1e-12, 0)}, peak {peak:g} TFLOP/s ({peak_name}), our attention kernel: {kernel}",
        f"our fused kernels: {fused}",
    ]
    notes += [f"time ratio {pair}: {ratio:.3f}" for pair, ratio in ratios.items()]
    title = f"One training step in bf16 on {name}, {shape['batch']} x {shape['seq_length']} tokens, {options.shape}"
    print_table(title, header, rows, notes)
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "gpu": name}
    write_json(options.json, "gpu_step", results, versions)
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
