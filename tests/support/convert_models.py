"""Small models with random weights for tests of conversion: as a ``Model``, and as a run on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.checkpoint.stream import NativeReader
from megatron_sp.commands.cli import main
from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import TensorInfo
from megatron_sp.convert.formats.native import Native
from megatron_sp.convert.model import KINDS, Model, Options, parameter_shapes

SIZES: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 20, "seq_length": 16, "vocab_size": 37,
}  # fmt: skip
GPT2: dict[str, Any] = {**SIZES, "max_position_embeddings": 16}
LLAMA: dict[str, Any] = {
    **SIZES, "num_query_groups": 2, "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "norm_epsilon": 1e-6, "rotary_base": 5000.0,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
NEOX: dict[str, Any] = {
    **SIZES, "position_embedding_type": "rope", "rotary_percent": 0.4, "use_parallel_residual": True, "gelu_approximate": "none",
    "untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "kv_channels": 6,
}  # fmt: skip
LLAMA3 = {
    "use_rope_scaling": True, "rope_scaling_factor": 4.0, "rope_scaling_low_freq_factor": 1.0, "rope_scaling_high_freq_factor": 3.0,
    "rope_scaling_original_length": 8,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **LLAMA, "num_experts": 5, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.02, "moe_router_load_balancing_type": "global_aux_loss",
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **MIXTRAL, "qk_layernorm": True, "kv_channels": 8, "moe_ffn_hidden_size": 12, "moe_router_topk": 3, "moe_router_pre_softmax": True,
}  # fmt: skip
OLMOE: dict[str, Any] = {**MIXTRAL, "qk_layernorm": True, "qk_layernorm_scope": "all", "moe_router_pre_softmax": True}
BERT: dict[str, Any] = {**SIZES, "model_family": "bert", "max_position_embeddings": 16, "norm_epsilon": 1e-12, "gelu_approximate": "tanh"}
MODELS: dict[str, tuple[dict[str, Any], int]] = {  # the shape, and the classes of a classifier
    "gpt2": (GPT2, 0),
    "gpt2-untied": ({**GPT2, "untie_embeddings_and_output_weights": True, "gelu_approximate": "none", "vocab_size": 131}, 0),
    "llama": (LLAMA, 0),
    "llama-tied": ({**LLAMA, "untie_embeddings_and_output_weights": False, "vocab_size": 1}, 0),
    "llama-one-group": ({**LLAMA, "num_query_groups": 1, "kv_channels": 10}, 0),
    "llama-heads": ({**LLAMA, "num_query_groups": 4}, 0),
    "llama-3": ({**LLAMA, **LLAMA3}, 0),
    "llama-biases": ({**LLAMA, "add_qkv_bias": True, "add_proj_bias": True, "add_mlp_bias": True}, 0),
    "llama-linear": ({**LLAMA, "rotary_seq_len_interpolation_factor": 2.0, "add_qkv_bias": True, "add_proj_bias": True}, 0),
    "mistral": ({**LLAMA, "window_size": 5}, 0),
    "qwen2": ({**LLAMA, "add_qkv_bias": True}, 0),
    "qwen2-window": ({**LLAMA, "add_qkv_bias": True, "window_size": 5}, 0),
    "neox": (NEOX, 0),
    "neox-tied": ({**NEOX, "untie_embeddings_and_output_weights": False, "use_parallel_residual": False, "relu": True}, 0),
    "neox-few-biases": ({**NEOX, "disable_bias_linear": True, "add_mlp_bias": True, **LLAMA3}, 0),
    "mixtral": (MIXTRAL, 0),
    "mixtral-window": ({**MIXTRAL, "window_size": 5, "moe_router_topk": 1}, 0),
    "qwen3-moe": (QWEN3, 0),
    "qwen3-moe-some": ({**QWEN3, "moe_layer_freq": "[0]*1+[1]*2", "add_qkv_bias": True, "add_proj_bias": True}, 0),
    "qwen3-moe-one": ({**QWEN3, "moe_layer_freq": "[1,0]+[0]", "moe_router_pre_softmax": False, "window_size": 5}, 0),
    "olmoe": (OLMOE, 0),
    "olmoe-heads": ({**OLMOE, "num_query_groups": 4, "moe_router_topk": 5, "moe_router_pre_softmax": False}, 0),
    "gpt2-relu": ({**GPT2, "relu": True}, 0),
    "bert": ({**BERT, "norm_placement": "post"}, 0),
    "bert-one-segment": ({**BERT, "norm_placement": "post", "bert_no_binary_head": True, "num_tokentypes": 2}, 0),
    "bert-classifier": ({**BERT, "norm_placement": "post"}, 5),
    "megatron-bert": (BERT, 0),
}


class Tensors:
    """A ``TensorStore`` in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.contents = dict(tensors)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.contents.items()}

    def read(self, name: str) -> Tensor:
        return self.contents[name].clone()


def random_model(name: str, dtype: torch.dtype = torch.float32, *, optimizer: bool = False, seed: int = 0) -> Model:
    """One of ``MODELS``; no two numbers of it are alike (but for chance), norms included."""
    fields, num_classes = MODELS[name]
    config = ModelConfig(**fields)
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], wanted: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(wanted)

    tensors = {n: draw(shape, dtype) for n, shape in parameter_shapes(config, num_classes).items()}
    if optimizer:
        kinds = KINDS if dtype.itemsize == 2 else KINDS[1:]
        tensors |= {f"optimizer.{kind}.{n}": draw(tuple(t.shape), torch.float32) for kind in kinds for n, t in list(tensors.items())}
    return Model(config, Tensors(tensors), step=7 if optimizer else 0, consumed_samples=70 if optimizer else 0, num_classes=num_classes)


def contents(model: Model) -> dict[str, Tensor]:
    """Every tensor, read one by one."""
    return {name: model.store.read(name) for name in model.store.tensors()}


def write_run(model: Model, path: Path) -> Path:
    """The model as a run."""
    Native().write(model, path, Options(output=path), lambda num_bytes: None)
    return path


def stored(run: Path) -> dict[str, Tensor]:
    """The tensors of a run's only checkpoint."""
    (folder,) = (run / "checkpoints").glob("step-*")
    reader = NativeReader(folder)
    return {name: reader.read(name) for name in reader.tensors()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(
            found[name].view(torch.uint8) if tensor.ndim else found[name], tensor.view(torch.uint8) if tensor.ndim else tensor
        ), name


def run(*words: Any) -> int:
    """``megatron-sp convert`` with these words; returns its exit code."""
    return main(["convert", *map(str, words)])
