"""The converter against DeepSpeed itself: what its engine saves, what its own tools make of that, and what it loads of ours.

Not part of the test run, for it needs DeepSpeed. On CPUs, with two processes:

    DS_ACCELERATOR=cpu PYTHONPATH=. python tests/peers/check_deepspeed.py

A model of Megatron's names is trained for three steps under each way of saving. Then every weight that the converter
reads must be bit for bit what DeepSpeed's zero_to_fp32 makes of the same files, and the moments what the ranks had; the
folder that ds_to_universal makes must read the same; and an engine must load what the converter writes, weights and
moments. Prints a line for each, ends with 1 if one differs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_sp.convert.formats.deepspeed import MegatronDeepSpeed
from megatron_sp.convert.model import Model, Options

HIDDEN, HEADS, LAYERS, VOCAB, POSITIONS, FFN, STEPS = 24, 4, 3, 37, 16, 20, 3
KINDS = ("exp_avg", "exp_avg_sq")
MODES: dict[str, dict[str, Any]] = {
    "zero 1, fp32": {"stage": 1}, "zero 1, bf16": {"stage": 1, "bf16": True}, "zero 2, bf16": {"stage": 2, "bf16": True},
    "zero 2, round robin": {"stage": 2, "bf16": True, "round_robin_gradients": True},
    "zero 2, aligned": {"stage": 2, "bf16": True, "parameter_alignment": True},
    "zero 2, elastic": {"stage": 2, "elastic_checkpoint": True}, "zero 3, fp32": {"stage": 3},
    "zero 3, small groups": {"stage": 3, "bf16": True, "sub_group_size": 900},
    "bf16 optimizer": {"stage": 1, "bf16": True, "accumulate": "fp32"},
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = nn.LayerNorm(HIDDEN), Attention()
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.self_attention.query_key_value(self.input_layernorm(x)).chunk(3, dim=-1)
        x = x + self.self_attention.dense(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp.dense_4h_to_h(F.gelu(self.mlp.dense_h_to_4h(self.post_attention_layernorm(x))))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.final_layernorm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder, self.output_layer = Embedding(), Encoder(), nn.Linear(HIDDEN, VOCAB, bias=False)


class Gpt(nn.Module):
    """Megatron's names around a small model."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = LanguageModel()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Dicts in dicts, as Megatron's models take them."""
        flat = dict(state_dict)
        while nested := [name for name, value in flat.items() if isinstance(value, dict)]:
            for name in nested:
                flat |= {f"{name}.{key}": value for key, value in flat.pop(name).items()}
        return super().load_state_dict(flat, strict, assign)

    def forward(self, tokens: Tensor) -> Tensor:
        m = self.language_model
        x = m.embedding.word_embeddings(tokens) + m.embedding.position_embeddings.weight[: tokens.shape[1]]
        for layer in m.encoder.layers:
            x = layer(x)
        logits = m.output_layer(m.encoder.final_layernorm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def arguments() -> Namespace:
    return Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN, seq_length=POSITIONS,
        max_position_embeddings=POSITIONS, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, swiglu=False,
        add_bias_linear=True, untie_embeddings_and_output_weights=True, make_vocab_size_divisible_by=1, num_experts=[1],
    )  # fmt: skip


def engine_of(mode: dict[str, Any], **more: Any) -> Any:
    """A DeepSpeed engine around the model."""
    torch.manual_seed(0)
    model = Gpt()
    decayed = [[p for p in model.parameters() if (p.ndim > 1) == which] for which in (True, False)]
    zero = {key: value for key, value in mode.items() if key not in ("bf16", "accumulate")}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": mode.get("bf16", False)}, **more,
    }  # fmt: skip
    if "accumulate" in mode:
        config["data_types"] = {"grad_accum_dtype": mode["accumulate"]}
    optimizer = torch.optim.AdamW([{"params": decayed[0]}, {"params": decayed[1], "weight_decay": 0.0}], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(0, VOCAB, (2, POSITIONS), generator=generator)))
        engine.step()


def state_of(engine: Any) -> dict[str, Tensor]:
    """fp32 weights and moments as the engine gives them; collective."""
    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # it was set with the first group, when the second had no state yet
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(p)
        found |= {f"{kind}.{name}": safe_get_full_optimizer_state(p, kind) for kind in KINDS}
    return {name: t.detach().float().clone() for name, t in found.items()}


def start(rank: int, world_size: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, auto_mpi_discovery=False)


def save(rank: int, world_size: int, store: str, folder: str, mode: dict[str, Any]) -> None:
    """One of the processes."""
    start(rank, world_size, store)
    engine = engine_of(mode)
    train(engine, rank)
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(folder, client_state={"args": arguments(), "checkpoint_version": 3.0, "iteration": STEPS, **info})
    state = state_of(engine)
    if rank == 0:
        torch.serialization.save(state, Path(folder) / "state")


def load(rank: int, world_size: int, store: str, folder: str, mode: dict[str, Any], universal: bool) -> None:
    """An engine takes what is there; rank 0 keeps what it then has."""
    start(rank, world_size, store)
    engine = engine_of(mode, **({"checkpoint": {"load_universal": True}} if universal else {}))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None, f"{folder} was not loaded"
    state = state_of(engine)
    if rank == 0:
        torch.serialization.save(state, Path(folder) / "loaded")


def spawn(function: Any, world_size: int, *args: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, (world_size, f"{folder}/store", *args), world_size)


def ours(name: str) -> str:
    """Of a name in the model above, ours; moments too."""
    kind, _, rest = name.partition(".")
    if kind in KINDS:
        return f"optimizer.{kind}.{ours(rest)}"
    name = name.removeprefix("language_model.").replace("encoder.", "decoder.").replace("query_key_value", "linear_qkv")
    name = name.replace("attention.dense", "attention.linear_proj").replace("post_attention_layernorm", "pre_mlp_layernorm")
    return name.replace("dense_h_to_4h", "linear_fc1").replace("dense_4h_to_h", "linear_fc2")


def read(folder: Path, *, optimizer: bool = True) -> Model:
    return MegatronDeepSpeed().read(folder, Options(qkv_layout="interleaved", vocab_size=VOCAB, optimizer=optimizer, dtype=torch.float32))


def differing(model: Model, expected: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not the same bits, or that only one side has."""
    there = set(model.store.tensors())
    wrong = sorted(there ^ {ours(name) for name in expected})
    return wrong + [name for name, t in expected.items() if ours(name) in there and not torch.equal(model.store.read(ours(name)), t)]


def universal(step: Path, target: Path) -> None:
    """By their own tool."""
    ds_to_universal.main(Namespace(
        input_folder=str(step), output_folder=str(target), num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=False,
        inject_missing_state=False,
    ))  # fmt: skip


def check(name: str, mode: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """What differs, by what was compared."""
    spawn(save, 2, str(folder), mode)
    state = torch.serialization.load(folder / "state", weights_only=True)
    if "round robin" in name:  # where a parameter's moments are, DeepSpeed itself does not know then: it looks in the model's order
        return {"zero_to_fp32, weights": differing(read(folder, optimizer=False), consolidated(folder))}
    found = {"engine": differing(read(folder), state)}
    if name != "bf16 optimizer" and "elastic" not in name:
        moments = {n: t for n, t in state.items() if n.startswith(KINDS)}
        found["zero_to_fp32"] = differing(read(folder), {**consolidated(folder), **moments})
    if "elastic" not in name:
        step = folder / f"global_step{STEPS}"
        universal(step, folder / "universal" / step.name)
        found["ds_to_universal"] = differing(read(folder / "universal" / step.name), state)
    return found


def consolidated(folder: Path) -> dict[str, Tensor]:
    """By DeepSpeed's own tool."""
    return {n: t for n, t in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items() if t.is_floating_point()}


def check_written(folder: Path, source: Path) -> dict[str, list[str]]:
    """Engines load what the converter writes."""
    found = {}
    model = read(source)
    for layout, mode, world_size in (
        ("zero1", {"stage": 1}, 1),
        ("universal", {"stage": 1}, 2),
        ("universal", {"stage": 2, "bf16": True}, 2),
    ):
        target = folder / f"{layout}-{mode['stage']}"
        options = Options(deepspeed_layout=layout, deepspeed_qkv_layout="interleaved", vocab_size=VOCAB)  # type: ignore[arg-type]
        model.config.make_vocab_size_divisible_by = 1
        MegatronDeepSpeed().write(model, target, options, lambda num_bytes: None)
        spawn(load, world_size, str(target), mode, layout == "universal")
        loaded = torch.serialization.load(target / "loaded", weights_only=True)
        found[f"{layout}, loaded by stage {mode['stage']} on {world_size}"] = differing(model, loaded)
    return found


def main(chosen: list[str]) -> int:
    """Args: names of MODES, and "written"; all by default."""
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        for i, (name, mode) in enumerate(MODES.items()):
            if not chosen or name in chosen:
                failed += tell(name, check(name, mode, Path(root) / str(i)))
        if not chosen or "written" in chosen:
            spawn(save, 2, str(Path(root) / "source"), MODES["zero 1, fp32"])
            failed += tell("written", check_written(Path(root) / "written", Path(root) / "source"))
    return 1 if failed else 0


def tell(name: str, results: dict[str, list[str]]) -> int:
    for what, wrong in results.items():
        same = "the same bits" if not wrong else f"DIFFERS: {wrong[:3]}, {len(wrong)} in all"
        print(f"{name}: {what}".ljust(56), same, flush=True)
    return sum(map(bool, results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
