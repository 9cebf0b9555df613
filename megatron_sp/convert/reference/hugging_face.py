"""Models from Hugging Face folders, by their own names and layouts: those of the families that the conversion knows.

Tensors are read with the safetensors library when a block needs them. config.json is parsed here independently, so that
a setting misread by the conversion shows up as a difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors import safe_open
from torch import Tensor

from megatron_sp.convert.reference.computed import CLASSES, MASKED, NEXT, ORDER
from megatron_sp.convert.reference.maths import Linear, Rotary, Scale, activate, norm
from megatron_sp.convert.reference.model import Block, Foreign, Mixture, Shape, Shard
from megatron_sp.utils.errors import CheckpointError

Cast = Callable[[Tensor], Tensor]
ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu", "gelu_python": "gelu",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip


class Files:
    """The tensors of a folder, by name, each read on request.

    Args:
        folder: contains model.safetensors, or several files and their index.
        cast: applied to each tensor.
        prefix: prefix of all names but those of heads; checkpoints of a bare model lack it.
    """

    def __init__(self, folder: Path, cast: Cast, prefix: str) -> None:
        self.folder, self.cast, self.prefix = folder, cast, prefix
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                self._where = dict.fromkeys(file.keys(), "model.safetensors")

    def find(self, name: str) -> str | None:
        """Return the name in the files, which may lack the prefix or use the old gamma and beta for norms, or None."""
        short = name.removeprefix(self.prefix)
        for known in (name, short, _old(name), _old(short)):
            if known in self._where:
                return known
        return None

    def get(self, name: str) -> Tensor:
        """Read a tensor. Raises CheckpointError: it is missing."""
        known = self.find(name)
        if known is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}, which its model needs")
        with safe_open(self.folder / self._where[known], "pt") as file:
            return self.cast(file.get_tensor(known))

    def get_if(self, name: str) -> Tensor | None:
        """Return a tensor, or None if there is no such name."""
        return None if self.find(name) is None else self.get(name)

    def linear(self, name: str) -> Linear:
        """Weight and bias of a linear layer."""
        return Linear(self.get(f"{name}.weight"), self.get_if(f"{name}.bias"))

    def scale(self, name: str) -> Scale:
        """Weight and bias of a norm."""
        return Scale(self.get(f"{name}.weight"), self.get_if(f"{name}.bias"))


def _old(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def open_folder(folder: Path, cast: Cast) -> Foreign:
    """Return the model of a folder.

    Raises:
        CheckpointError: its model_type or rope_type is not supported.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config.get("model_type")
    made: Any = {
        "gpt2": GPT2, "llama": Llama, "mistral": Llama, "qwen2": Llama, "gpt_neox": NeoX, "mixtral": Mixtral,
        "qwen3_moe": Qwen3Moe, "olmoe": Olmoe, "bert": Bert, "megatron-bert": Bert,
    }.get(kind)  # fmt: skip
    if made is None:
        raise CheckpointError(f"{folder / 'config.json'}: model_type is {str(kind)[:100]!r}: the reference does not compute it")
    model: Foreign = made(config, folder, cast)
    return model


class GPT2:
    """GPT-2: Conv1D weights are stored [in, out], and q, k, v are thirds of the columns."""

    def __init__(self, c: dict[str, Any], folder: Path, cast: Cast) -> None:
        self.files = Files(folder, cast, "transformer.")
        self.shape = Shape(
            c["n_layer"], c["n_embd"] // c["n_head"], c["vocab_size"], c["n_positions"], c.get("layer_norm_epsilon", 1e-5),
            ACTIVATIONS[c.get("activation_function", "gelu_new")],
        )  # fmt: skip
        self._tied = c.get("tie_word_embeddings", True)

    def embed(self, tokens: Tensor, types: Tensor) -> Tensor:
        return self.files.get("transformer.wte.weight")[tokens] + self.files.get("transformer.wpe.weight")[: tokens.shape[1]]

    def block(self, layer: int) -> Block:
        name, files = f"transformer.h.{layer}.", self.files

        def turned(part: str) -> Linear:
            return Linear(files.get(f"{name}{part}.weight").T, files.get(f"{name}{part}.bias"))

        qkv, out, up, down = (turned(part) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
        assert qkv.bias is not None
        q, k, v = (Linear(*pair) for pair in zip(qkv.weight.chunk(3), qkv.bias.chunk(3), strict=True))
        norms = files.scale(f"{name}ln_1"), files.scale(f"{name}ln_2")
        return Block(norms, [Shard(q, k, v, out.weight, up, down.weight)], out.bias, down.bias)

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        x = norm(x, self.files.scale("transformer.ln_f"), self.shape.eps, rms=False)
        return {NEXT: x @ self.files.get("transformer.wte.weight" if self._tied else "lm_head.weight").T}


class Llama:
    """Llama, Mistral and Qwen2: with a window where configured, and with all biases that are present."""

    def __init__(self, c: dict[str, Any], folder: Path, cast: Cast) -> None:
        self.files = Files(folder, cast, "model.")
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        self.shape = Shape(
            c["num_hidden_layers"], head_dim, c["vocab_size"], c.get("max_position_embeddings", 2048), c.get("rms_norm_eps", 1e-6),
            ACTIVATIONS[c.get("hidden_act", "silu")], rms=True, gated=True, rotary=_rotary(c, head_dim),
            window=c.get("sliding_window", 4096) if c["model_type"] == "mistral" or _slides(c) else None,
        )  # fmt: skip
        self._tied = c.get("tie_word_embeddings", False)

    def embed(self, tokens: Tensor, types: Tensor) -> Tensor:
        return self.files.get("model.embed_tokens.weight")[tokens]

    def block(self, layer: int) -> Block:
        name, files = f"model.layers.{layer}.", self.files
        q, k, v, out = (files.linear(f"{name}self_attn.{part}_proj") for part in "qkvo")
        norms = files.scale(f"{name}input_layernorm"), files.scale(f"{name}post_attention_layernorm")
        head_norms = None
        if files.find(f"{name}self_attn.q_norm.weight"):
            head_norms = files.scale(f"{name}self_attn.q_norm"), files.scale(f"{name}self_attn.k_norm")
        mixture = self.mixture(layer)
        if mixture is not None:
            unused = q.weight.new_empty(0, 0)
            return Block(norms, [Shard(q, k, v, out.weight, Linear(unused), unused)], out.bias, None, head_norms, mixture)
        gate, up, down = (files.linear(f"{name}mlp.{part}_proj") for part in ("gate", "up", "down"))
        return Block(norms, [Shard(q, k, v, out.weight, up, down.weight, gate)], out.bias, down.bias, head_norms)

    def mixture(self, layer: int) -> Mixture | None:
        """Read the experts of a layer; None: it has an MLP."""
        return None

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        x = norm(x, self.files.scale("model.norm"), self.shape.eps, rms=True)
        return {NEXT: x @ self.files.get("model.embed_tokens.weight" if self._tied else "lm_head.weight").T}


class Mixtral(Llama):
    """Mixtral: w1 is the gate, w3 the other half, w2 the way back; the weights of the chosen experts sum to 1."""

    def __init__(self, c: dict[str, Any], folder: Path, cast: Cast) -> None:
        super().__init__(c, folder, cast)
        theta = {"rope_theta": 1e6} if "rope_theta" not in c and "rope_parameters" not in c else {}
        self.shape = replace(self.shape, window=c.get("sliding_window"), rotary=_rotary({**theta, **c}, self.shape.head_dim))
        self._top_k, self._experts = c["num_experts_per_tok"], c.get("num_local_experts") or c["num_experts"]

    def mixture(self, layer: int) -> Mixture | None:
        return _experts(self.files, f"model.layers.{layer}.block_sparse_moe.", ("w3", "w2", "w1"), self._experts, self._top_k, True)


class Qwen3Moe(Llama):
    """Qwen3-MoE: norms on the heads, and an MLP in the layers that have a gate projection of their own."""

    def __init__(self, c: dict[str, Any], folder: Path, cast: Cast) -> None:
        super().__init__(c, folder, cast)
        self.shape = replace(self.shape, window=c.get("sliding_window", 4096) if c.get("use_sliding_window") else None)
        self._c, self._experts = c, c.get("num_experts") or c["num_local_experts"]

    def mixture(self, layer: int) -> Mixture | None:
        if layer in (self._c.get("mlp_only_layers") or ()) or (layer + 1) % (self._c.get("decoder_sparse_step") or 1):
            return None
        parts, norm_topk = ("up_proj", "down_proj", "gate_proj"), bool(self._c.get("norm_topk_prob"))
        return _experts(self.files, f"model.layers.{layer}.mlp.", parts, self._experts, self._c["num_experts_per_tok"], norm_topk)


class Olmoe(Qwen3Moe):
    """OLMoE: norms over all queries and over all keys of a token."""

    def __init__(self, c: dict[str, Any], folder: Path, cast: Cast) -> None:
        super().__init__(c, folder, cast)
        self.shape = replace(self.shape, wide_norms=True, eps=c.get("rms_norm_eps", 1e-5))


def _experts(files: Files, name: str, parts: tuple[str, str, str], count: int, top_k: int, sums_to_one: bool) -> Mixture:
    experts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for number in range(count):
        up, down, gate = (files.get(f"{name}experts.{number}.{part}.weight") for part in parts)
        experts.append((up, down, gate))
    return Mixture(files.get(f"{name}gate.weight"), experts, top_k, sums_to_one=sums_to_one)


def _slides(c: dict[str, Any]) -> bool:
    """Return whether a Qwen2 has windows, judged by its first layer: models that mix layers are refused by the conversion."""
    if c["model_type"] != "qwen2" or not c.get("use_sliding_window"):
        return False
    kinds = c.get("layer_types")
    return bool(kinds[0] == "sliding_attention" if kinds else c.get("max_window_layers", 28) <= 0)


class NeoX:
    """GPT-NeoX: rows of the fused projection are the query, key and value of each head in turn."""

    def __init__(self, c: dict[str, Any], folder: Path, cast: Cast) -> None:
        self.files = Files(folder, cast, "gpt_neox.")
        self._heads, head_dim = c["num_attention_heads"], c["hidden_size"] // c["num_attention_heads"]
        self.shape = Shape(
            c["num_hidden_layers"], head_dim, c["vocab_size"], c.get("max_position_embeddings", 2048), c.get("layer_norm_eps", 1e-5),
            ACTIVATIONS[c.get("hidden_act", "gelu")], "parallel" if c.get("use_parallel_residual", True) else "pre",
            rotary=_rotary(c, head_dim, c.get("rotary_pct", 0.25), "rotary_emb_base"),
        )  # fmt: skip
        self._tied = c.get("tie_word_embeddings", False)

    def embed(self, tokens: Tensor, types: Tensor) -> Tensor:
        return self.files.get("gpt_neox.embed_in.weight")[tokens]

    def block(self, layer: int) -> Block:
        name, files = f"gpt_neox.layers.{layer}.", self.files
        fused = files.linear(f"{name}attention.query_key_value")
        packed = "(n qkv d) ... -> qkv (n d) ..."
        weight = rearrange(fused.weight, packed, n=self._heads, qkv=3)
        bias = (None,) * 3 if fused.bias is None else rearrange(fused.bias, packed, n=self._heads, qkv=3)
        q, k, v = (Linear(weight[i], bias[i]) for i in range(3))
        out, up, down = (files.linear(f"{name}{part}") for part in ("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))
        norms = files.scale(f"{name}input_layernorm"), files.scale(f"{name}post_attention_layernorm")
        return Block(norms, [Shard(q, k, v, out.weight, up, down.weight)], out.bias, down.bias)

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        x = norm(x, self.files.scale("gpt_neox.final_layer_norm"), self.shape.eps, rms=False)
        return {NEXT: x @ self.files.get("gpt_neox.embed_in.weight" if self._tied else "embed_out.weight").T}


class Bert:
    """BERT (post-norm) and MegatronBERT (pre-norm, with a norm after the last block instead of after the embedding)."""

    def __init__(self, c: dict[str, Any], folder: Path, cast: Cast) -> None:
        self.files = Files(folder, cast, "bert.")
        self._post = c["model_type"] == "bert"
        self.shape = Shape(
            c["num_hidden_layers"], c["hidden_size"] // c["num_attention_heads"], c["vocab_size"], c["max_position_embeddings"],
            c.get("layer_norm_eps", 1e-12), ACTIVATIONS[c.get("hidden_act", "gelu")], "post" if self._post else "pre", causal=False,
        )  # fmt: skip

    def embed(self, tokens: Tensor, types: Tensor) -> Tensor:
        get = self.files.get
        x = get("bert.embeddings.word_embeddings.weight")[tokens] + get("bert.embeddings.token_type_embeddings.weight")[types]
        x = x + get("bert.embeddings.position_embeddings.weight")[: tokens.shape[1]]
        return norm(x, self.files.scale("bert.embeddings.LayerNorm"), self.shape.eps, rms=False) if self._post else x

    def block(self, layer: int) -> Block:
        name, files = f"bert.encoder.layer.{layer}.", self.files
        q, k, v = (files.linear(f"{name}attention.self.{part}") for part in ("query", "key", "value"))
        out, up, down = (files.linear(f"{name}{part}.dense") for part in ("attention.output", "intermediate", "output"))
        names = ("attention.output.LayerNorm", "output.LayerNorm") if self._post else ("attention.ln", "ln")
        first, second = (files.scale(f"{name}{part}") for part in names)
        return Block((first, second), [Shard(q, k, v, out.weight, up, down.weight)], out.bias, down.bias)

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        files, found = self.files, {}
        if not self._post:
            x = norm(x, files.scale("bert.encoder.ln"), self.shape.eps, rms=False)
        pooled = torch.tanh(files.linear("bert.pooler.dense")(x[:, 0])) if files.find("bert.pooler.dense.weight") else None
        if files.find("classifier.weight") and pooled is not None:
            return {CLASSES: files.linear("classifier")(pooled)}
        y = activate(self.shape.activation, files.linear("cls.predictions.transform.dense")(x))
        y = norm(y, files.scale("cls.predictions.transform.LayerNorm"), self.shape.eps, rms=False)
        found[MASKED] = y @ files.get("bert.embeddings.word_embeddings.weight").T + files.get("cls.predictions.bias")
        if files.find("cls.seq_relationship.weight") and pooled is not None:
            found[ORDER] = files.linear("cls.seq_relationship")(pooled)
        return found


def _rotary(c: dict[str, Any], head_dim: int, share: float = 1.0, base: str = "rope_theta") -> Rotary:
    """Read the rotary settings of config.json: rope_parameters or, in older files, rope_theta and rope_scaling."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or c.get(base) or 10000.0
    dim = int(head_dim * rope.get("partial_rotary_factor", share))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        length = rope.get("original_max_position_embeddings") or c["max_position_embeddings"]
        return Rotary(theta, dim, 1.0, (rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], length))
    if kind not in ("default", "linear"):
        raise CheckpointError(f"rope_type is {str(kind)[:100]!r}: the reference does not compute it")
    return Rotary(theta, dim, rope["factor"] if kind == "linear" else 1.0)
