"""Random models of newer families: their logits and every gradient are those of transformers, and files go there and back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert_transformers import assert_same_bits_there_and_back, assert_same_gradients, llama_fields, made, saved

from megatron_sp.commands.cli import main
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_OK

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

WORDS = 41


def base(draw: random.Random) -> dict[str, Any]:
    return {**llama_fields(draw), "vocab_size": WORDS, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def window(draw: random.Random) -> dict[str, Any]:
    return {"sliding_window": draw.choice([None, 5])}


def part(draw: random.Random, fields: dict[str, Any], shares: list[float]) -> dict[str, Any]:
    return {"rope_parameters": {**fields["rope_parameters"], "partial_rotary_factor": draw.choice(shares)}}


def whole_heads(fields: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_size": fields["head_dim"] * fields["num_attention_heads"]}


def biases(draw: random.Random, *names: str) -> dict[str, Any]:
    return {name: draw.random() < 0.5 for name in names}


def experts(draw: random.Random, **more: Any) -> dict[str, Any]:
    groups = draw.choice([{"n_group": 1, "topk_group": 1}, {"n_group": 3, "topk_group": 2}])
    return {
        "num_hidden_layers": 3, "n_routed_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 7,
        "n_shared_experts": draw.choice([1, 2]), "routed_scaling_factor": draw.choice([1.0, 2.5]), "norm_topk_prob": True, **groups, **more,
    }  # fmt: skip


def fields(name: str, draw: random.Random) -> dict[str, Any]:
    """What differs from Llama's in a random configuration."""
    shape = {**base(draw), "head_dim": draw.choice([4, 8])}
    shape["hidden_size"] *= 2  # a norm of few channels makes more of roundings
    own: dict[str, Any] = {}
    if name == "Qwen3":
        own = {**biases(draw, "attention_bias"), "use_sliding_window": draw.random() < 0.5, "sliding_window": 5, "max_window_layers": 0}
    elif name == "SeedOss":
        own = {**biases(draw, "attention_bias", "attention_out_bias", "mlp_bias"), "attention_dropout": 0.0, "residual_dropout": 0.0}
    elif name == "Arcee":
        own = biases(draw, "attention_bias", "mlp_bias")
    elif name == "Ernie4_5":
        own = biases(draw, "use_bias")
    elif name == "Phi3":
        own = {**window(draw), **whole_heads(shape), **part(draw, shape, [0.5, 1.0])}
        shape.pop("head_dim")
    elif name == "Starcoder2":
        own = {**window(draw), **biases(draw, "use_bias"), **whole_heads(shape), "norm_epsilon": draw.choice([1e-5, 1e-3])}
        shape.pop("head_dim"), shape.pop("rms_norm_eps")
    elif name == "Nemotron":
        own = {**biases(draw, "attention_bias", "mlp_bias"), **part(draw, shape, [0.5, 1.0]), "norm_eps": draw.choice([1e-5, 1e-3])}
        shape.pop("rms_norm_eps")
    elif name == "Glm4Moe":
        own = {**experts(draw, first_k_dense_replace=draw.choice([0, 1, 2])), **biases(draw, "attention_bias", "use_qk_norm")}
        own |= part(draw, shape, [0.5, 1.0])
    elif name == "Dots1":
        own = {**experts(draw, first_k_dense_replace=draw.choice([0, 1])), **biases(draw, "attention_bias")}
    elif name == "SolarOpen":
        own = {**experts(draw), **biases(draw, "attention_bias")}
        shape.pop("intermediate_size")
    elif name == "MiniMaxM2":
        own = {"num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": draw.choice([2, 5]), **part(draw, shape, [0.5, 1.0])}
    elif name == "HYV3":
        own = {"num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "num_shared_experts": 2,
               "mlp_layer_types": draw.choice([None, ["sparse", "dense", "sparse"]]), "router_scaling_factor": draw.choice([1.0, 2.8]),
               "enable_moe_fp32_combine": False, **biases(draw, "attention_bias")}  # fmt: skip
    return {**shape, **own}


NAMES = ("Qwen3", "SeedOss", "Arcee", "Ernie4_5", "Phi3", "Starcoder2", "Nemotron", "Glm4Moe", "Dots1", "SolarOpen", "MiniMaxM2", "HYV3")


def maker(name: str) -> Any:
    def make(draw: random.Random) -> Any:
        net = made(name, **fields(name, draw))
        with torch.no_grad():
            for own, tensor in [*net.named_parameters(), *net.named_buffers()]:
                if "norm" in own or "bias" in own:  # which begin as ones and zeros
                    tensor.add_(torch.randn(tensor.shape).to(tensor) * 0.3)
        return net

    return make


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "seed", [5, 9, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 21) if seed not in (5, 9))]
)  # 5 and 9: several key heads, each with several queries
def test_logits_and_every_gradient_are_those_of_transformers(tmp_path: Path, name: str, seed: int) -> None:
    folder = saved(maker(name), seed, tmp_path / "theirs", torch.float64)
    assert_same_gradients(folder, getattr(transformers, f"{name}ForCausalLM"), seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 24) if seed != 11)])
def test_random_configurations_there_and_back(tmp_path: Path, name: str, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert_same_bits_there_and_back(saved(maker(name), seed, tmp_path / "theirs"), tmp_path, "float32", capsys)


@pytest.mark.parametrize(("name", "config", "words"), [
    ("Qwen3", {"layer_types": ["sliding_attention"] * 9}, "layer_types has 9 entries"),
    ("Qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "rope_type is 'yarn'"),
    ("Arcee", {"hidden_act": "silu"}, "hidden_act is 'silu': only relu2 can be converted"),
    ("Phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type is 'longrope'"),
    ("Nemotron", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only relu2"),
    ("Glm4Moe", {"norm_topk_prob": False}, "norm_topk_prob is 'False', which leaves the weights of experts as they are"),
    ("Glm4Moe", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "moe_router_topk is 1, whose weight is 1 there"),
    ("Glm4Moe", {"n_group": 3, "topk_group": 1}, "4 experts of 2 groups can be converted"),
    ("Glm4Moe", {"first_k_dense_replace": 3}, "leaves no layer with experts"),
    ("Dots1", {"norm_topk_prob": False}, "norm_topk_prob is false"),
    ("Dots1", {"layer_types": ["sliding_attention"] * 3}, "only 'full_attention' can be converted"),
    ("MiniMaxM2", {"router_jitter_noise": 0.1}, "router_jitter_noise is '0.1'"),
    ("HYV3", {"mlp_layer_types": ["dense", "moe", "sparse"]}, "mlp_layer_types must give each of 3 layers 'dense' or 'sparse'"),
])  # fmt: skip
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, config: dict[str, Any], words: str) -> None:
    folder = saved(maker(name), 1, tmp_path / "theirs")
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | config))
    code = main(["convert", "--input", str(folder), "--to", "megatron_sp", "--output", str(tmp_path / "run")])
    assert code == EXIT_CHECKPOINT and words in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(maker("Glm4Moe"), 1, tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    save_file(tensors | {f"model.layers.{layers}.eh_proj.weight": torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    words = ["convert", "--input", str(folder), "--to", "megatron_sp", "--output", str(tmp_path / "run")]
    assert main(words) == EXIT_OK and "a layer of multi-token prediction" in capsys.readouterr().err
