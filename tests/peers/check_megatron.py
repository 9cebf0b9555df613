"""The converter against Megatron-core itself: what its GPT computes and saves, and what it loads of ours.

Not part of the test run, for it needs megatron-core. On CPUs, with one and two tensor-parallel processes:

    PYTHONPATH=. python tests/peers/check_megatron.py

Each model below is built with random weights and saved in both of Megatron's ways, a file for each rank and a
torch_dist folder. Both are converted; our model must compute the same logits. Then the run is converted back, to one
and to two ranks, in both ways, and Megatron's own loaders must take that, every name and shape, and compute the same
logits again. Those with experts are saved and loaded by one and two shares of them, too. Prints a line for each and
ends with 1 if one differs.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the ranks: Megatron misses its GPU libraries

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import functional as F

from megatron_sp.commands.cli import main as megatron_sp
from megatron_sp.convert.formats.native import Native
from megatron_sp.convert.model import Options
from megatron_sp.convert.reference import NEXT, Rows
from megatron_sp.convert.verify import side_of

STEP, LAYERS, HIDDEN, HEADS, FFN, POSITIONS, VOCAB, PADDED = 3, 3, 48, 4, 80, 24, 59, 64
LIMIT = 2e-5  # relative to the largest logit, fp32
LLAMA = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope"}
UNTIED = {"untie_embeddings_and_output_weights": True}
MODELS: dict[str, dict[str, Any]] = {
    "fused GELU, tied": {},
    "exact GELU, untied": {"bias_gelu_fusion": False, **UNTIED},
    "GELU without biases": {"add_bias_linear": False},  # which cannot be fused, and so is exact
    "Llama": {**LLAMA, **UNTIED, "num_query_groups": 2, "rotary_base": 500000},
    "Llama 3.1's rotary scaling": {**LLAMA, "num_query_groups": 2, "use_rope_scaling": True, "rope_scaling_factor": 4.0},
    "biases of queries, wide heads": {**LLAMA, **UNTIED, "add_qkv_bias": True, "kv_channels": 20},
    "half of the channels rotated": {"position_embedding_type": "rope", "rotary_percent": 0.5, "qk_layernorm": True},
    "stretched positions": {**LLAMA, "swiglu": False, "squared_relu": True, "rotary_seq_len_interpolation_factor": 2},
}  # fmt: skip
MIXTRAL = {
    **LLAMA, **UNTIED, "num_query_groups": 2, "num_experts": 4, "moe_ffn_hidden_size": 40, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "global_aux_loss",
}  # fmt: skip
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": MIXTRAL,
    "Qwen3": {**MIXTRAL, "qk_layernorm": True, "kv_channels": 20, "moe_router_topk": 3, "moe_router_pre_softmax": True},
    "DeepSeek's router": {
        **MIXTRAL, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 24, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 2,
        "moe_router_group_topk": 1, "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "experts without a gate": {**MIXTRAL, "swiglu": False, "squared_relu": True, "bias_gelu_fusion": False},
}  # fmt: skip
ALL = {**MODELS, **WITH_EXPERTS}
EXPERTS = {
    "num_experts": None, "moe_router_topk": 2, "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None,
    "moe_layer_freq": 1, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip


class Ranks(NamedTuple):
    """A layout."""

    tp: int
    ep: int


def arguments(name: str, ranks: Ranks) -> Namespace:
    """As Megatron-LM keeps them in its checkpoints."""
    values: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "kv_channels": HIDDEN // HEADS, "ffn_hidden_size": FFN,
        "num_query_groups": 1, "seq_length": POSITIONS, "max_position_embeddings": POSITIONS, "normalization": "LayerNorm",
        "norm_epsilon": 1e-5, "position_embedding_type": "learned_absolute", "rotary_base": 10000, "rotary_percent": 1.0,
        "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "swiglu": False,
        "squared_relu": False, "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False, "bias_gelu_fusion": True,
        "untie_embeddings_and_output_weights": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "vocab_size": VOCAB,
        "padded_vocab_size": PADDED, "make_vocab_size_divisible_by": 16, "tensor_model_parallel_size": ranks.tp,
        "pipeline_model_parallel_size": 1, "expert_model_parallel_size": ranks.ep,
        "use_mcore_models": True, "transformer_impl": "local", "iteration": STEP, "consumed_train_samples": 12, **EXPERTS,
        **ALL[name],
    }  # fmt: skip
    return Namespace(**values, group_query_attention="num_query_groups" in ALL[name])


def model_of(a: Namespace, seed: int) -> GPTModel:
    """As Megatron-LM's builder has it, with weights and biases that all make a difference."""
    activation = F.silu if a.swiglu else squared_relu if a.squared_relu else F.gelu
    config = TransformerConfig(
        num_layers=a.num_layers, hidden_size=a.hidden_size, num_attention_heads=a.num_attention_heads, kv_channels=a.kv_channels,
        num_query_groups=a.num_query_groups if a.group_query_attention else None, ffn_hidden_size=a.ffn_hidden_size,
        normalization=a.normalization, layernorm_epsilon=a.norm_epsilon, add_bias_linear=a.add_bias_linear, add_qkv_bias=a.add_qkv_bias,
        gated_linear_unit=a.swiglu, activation_func=activation, bias_activation_fusion=a.bias_gelu_fusion and a.add_bias_linear,
        qk_layernorm=a.qk_layernorm, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, masked_softmax_fusion=False,
        apply_rope_fusion=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=a.tensor_model_parallel_size, pipeline_dtype=torch.float32, **_experts(a),
    )  # fmt: skip
    torch.manual_seed(seed)
    spec = get_gpt_layer_local_spec(qk_layernorm=a.qk_layernorm, normalization=a.normalization)
    if a.num_experts is not None:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=a.normalization)
    model = GPTModel(
        config, spec, a.padded_vocab_size, POSITIONS,
        parallel_output=False, share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
        position_embedding_type=a.position_embedding_type, rotary_percent=a.rotary_percent, rotary_base=a.rotary_base,
        seq_len_interpolation_factor=a.rotary_seq_len_interpolation_factor, rope_scaling=a.use_rope_scaling,
        rope_scaling_factor=a.rope_scaling_factor,
    )  # fmt: skip
    tp_rank, ep_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    with torch.no_grad():
        for number, (name, p) in enumerate([*model.named_parameters(), *biases]):
            cut = getattr(p, "tensor_model_parallel", False)
            part = (1 + tp_rank if cut else 0) + (4 * ep_rank if ".mlp.experts." in name else 0)
            draw = torch.Generator().manual_seed(10_000 * seed + 10 * number + part)
            p.copy_(torch.randn(p.shape, generator=draw) * (0.2 if p.dim() > 1 else 0.1) + ("norm" in name and name.endswith("weight")))
    return model.eval()


def _experts(a: Namespace) -> dict[str, Any]:
    """The arguments of a mixture, as far as Megatron's constructor computes something else by them."""
    if a.num_experts is None:
        return {}
    named = {name: getattr(a, name) for name in EXPERTS if name != "num_experts"}
    return {
        **named, "num_moe_experts": a.num_experts, "expert_model_parallel_size": a.expert_model_parallel_size,
        "moe_token_dispatcher_type": "allgather", "moe_router_dtype": "fp32",
    }  # fmt: skip


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(7))


def logits_of(model: GPTModel) -> Tensor:
    ids = tokens()
    mask = torch.triu(torch.ones(POSITIONS, POSITIONS, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        return model(ids, torch.arange(POSITIONS).expand_as(ids), mask)[..., :VOCAB].clone()


def start(rank: int, ranks: Ranks, store: str) -> None:
    """Megatron's groups, on CPUs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks.tp * ranks.ep)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 looks for it where Transformer Engine is missing, too
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *a, **k: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(ranks.tp, 1, expert_model_parallel_size=ranks.ep)


def iteration(folder: str, kind: str) -> Path:
    return Path(folder) / kind / f"iter_{STEP:07d}"


def rank_folder(ranks: Ranks) -> str:
    """As Megatron-LM names it."""
    share = f"_{parallel_state.get_expert_model_parallel_rank():03d}" if ranks.ep > 1 else ""
    return f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}{share}"


def save(rank: int, ranks: Ranks, store: str, name: str, folder: str) -> None:
    start(rank, ranks, store)
    a = arguments(name, ranks)
    model = model_of(a, seed=1)
    logits = logits_of(model)
    common = {"args": a, "checkpoint_version": 3.0, "iteration": STEP}
    file = iteration(folder, "megatron") / rank_folder(ranks) / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.serialization.save({"model": model.state_dict_for_save_checkpoint(), **common}, file)
    target = iteration(folder, "megatron-dist")
    if rank == 0:
        target.mkdir(parents=True)
        for kind in ("megatron", "megatron-dist"):
            (Path(folder) / kind / "latest_checkpointed_iteration.txt").write_text(str(STEP))
        torch.serialization.save(logits, Path(folder) / "logits")
    dist.barrier()
    dist_checkpointing.save({**model.sharded_state_dict(prefix=""), **common}, str(target))
    dist.barrier()


def load(rank: int, ranks: Ranks, store: str, name: str, kind: str, folder: str) -> None:
    """Every name and shape must fit; rank 0 keeps the logits."""
    start(rank, ranks, store)
    torch.serialization.add_safe_globals([Namespace])
    a = arguments(name, ranks)
    model = model_of(a, seed=2)
    if kind == "megatron":
        file = iteration(folder, ".") / rank_folder(ranks) / "model_optim_rng.pt"
        state = torch.serialization.load(file, weights_only=True)["model"]
    else:
        for layer in model.decoder.layers:
            if a.num_experts is not None and isinstance(layer.mlp, MoELayer):
                # its local layers would look for the norm of a mixture under the name that only a dense layer has with Transformer Engine
                layer.submodules_config.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        state = dist_checkpointing.load({**model.sharded_state_dict(prefix="")}, str(iteration(folder, ".")))
        state = {key: value for key, value in state.items() if key in model.state_dict()}
    model.load_state_dict(state, strict=True)
    logits = logits_of(model)
    if rank == 0:
        torch.serialization.save(logits, f"{folder}.logits")
    dist.barrier()


def spawn(function: Any, ranks: Ranks, *args: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, (ranks, f"{folder}/store", *args), ranks.tp * ranks.ep)


def convert(*words: Any) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = megatron_sp(["convert", *map(str, words)])
    assert code == 0, f"convert {words}: {said.getvalue()}"


def ours(run: Path) -> Tensor:
    """Logits of our model."""
    side = side_of("megatron_sp", run, Native().read(run, Options()), Options(), print)
    rows = Rows(tokens(), [POSITIONS] * 3, torch.zeros(3, POSITIONS, dtype=torch.int64))
    return next(t for name, t in side.compute(rows, lambda t: t) if name == NEXT)[..., :VOCAB]


def kept(path: Path) -> Tensor:
    found = torch.serialization.load(path, weights_only=True)
    assert isinstance(found, Tensor)
    return found


def tell(what: str, expected: Tensor, found: Tensor) -> int:
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    good = error <= LIMIT
    print(what.ljust(76), f"{error:.1e}", "" if good else "DIFFERS", flush=True)
    return not good


def check(name: str, ranks: Ranks, folder: Path) -> int:
    spawn(save, ranks, name, str(folder))
    expected, failed, said = kept(folder / "logits"), 0, f"{name}, tp {ranks.tp}" + (f", ep {ranks.ep}" if name in WITH_EXPERTS else "")
    for kind in ("megatron", "megatron-dist"):
        run = folder / f"from-{kind}"
        convert("--input", folder / kind, "--to", "megatron_sp", "--output", run)
        failed += tell(f"{said}: read from {kind}", expected, ours(run))
    shares = (1, 2) if name in WITH_EXPERTS else (1,)
    classic = [("megatron", Ranks(tp, ep)) for tp in (2, 1) for ep in shares]
    for kind, target in [*classic, *(("megatron-dist", Ranks(3 - ranks.tp, ep)) for ep in shares)]:
        back = folder / f"{kind}-{target.tp}-{target.ep}"
        layout = ["--target-tensor-parallel-size", target.tp, "--target-expert-parallel-size", target.ep, "--megatron-names", "core-local"]
        convert("--input", run, "--to", kind, "--output", back, *(layout if kind == "megatron" else []))
        spawn(load, target, name, kind, str(back))
        on = f"{target.tp} x {target.ep}" if name in WITH_EXPERTS else target.tp
        failed += tell(f"{said}: {kind} written by us, loaded on {on}", expected, kept(Path(f"{back}.logits")))
    return failed


def main(chosen: list[str]) -> int:
    """Args: names of models; all by default."""
    layouts = [(name, Ranks(tp, 1)) for name in ALL for tp in (1, 2)]
    layouts += [(name, Ranks(tp, 2)) for name in WITH_EXPERTS for tp in (1, 2)]
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        for i, (name, ranks) in enumerate(layouts):
            if not chosen or name in chosen:
                failed += check(name, ranks, Path(root) / str(i))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
