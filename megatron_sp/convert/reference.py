"""Megatron's GPT and BERT computed from its files alone, in plain torch, as the reference for conversions.

Nothing here uses the conversion's lists of tensors, or our model and its ops. A block is computed as tensor-parallel
ranks would: each slice is split into its own heads, in the row order of its checkpoint version; outputs of row-parallel
layers are summed over the ranks. The weights of one block are in memory at a time.

Letters: b sequences, s positions, h hidden, n query heads, g key/value heads, d channels of a head, f width of the MLP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from megatron_sp.convert.archive.dist_folder import MAX_METADATA_BYTES, DistFolder
from megatron_sp.convert.archive.torch_files import Object, TensorRecord, TorchFile, attributes_of
from megatron_sp.utils.errors import CheckpointError

Cast = Callable[[Tensor], Tensor]
NEXT, MASKED, ORDER, CLASSES = "next-token logits", "masked-token logits", "order logits", "class logits"
OUTPUTS = (NEXT, MASKED, ORDER, CLASSES)  # [b, s, v], [b, s, v], [b, 2] and [b, classes]
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.*)")
_NUMBERED = re.compile(r"model(\d*)")
# Each part of a block: its names in core, and in older files.
_NAMES = {
    "qkv": ("self_attention.linear_qkv", "self_attention.query_key_value", "attention.query_key_value"),
    "out": ("self_attention.linear_proj", "self_attention.dense", "attention.dense"),
    "up": ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    "down": ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    "first": ("input_layernorm", "self_attention.linear_qkv.layer_norm"),
    "second": ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm", "post_attention_layernorm"),
    "query norm": ("self_attention.q_layernorm",),
    "key norm": ("self_attention.k_layernorm",),
}
_STACKS = ("decoder.", "encoder.", "language_model.encoder.", "language_model.transformer.")
_WORDS = ("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight")
_HEAD = ("output_layer.weight", "language_model.output_layer.weight")
_ORDERS = ("interleaved", "flat", "v0", "v1")
_GIVEN = {  # settings of --set that this reference computes, by the names of Megatron's arguments
    "num_attention_heads", "kv_channels", "hidden_size", "norm_epsilon", "normalization", "swiglu", "squared_relu",
    "gelu_approximate", "position_embedding_type", "max_position_embeddings", "rotary_base", "rotary_percent",
    "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor", "rope_scaling_original_length", "apply_layernorm_1p",
    "untie_embeddings_and_output_weights", "window_size",
}  # fmt: skip
_BY_SHAPE = {  # settings that follow from the tensors, or that do not change the logits
    "num_layers", "ffn_hidden_size", "num_query_groups", "qk_layernorm", "disable_bias_linear", "add_qkv_bias",
    "add_proj_bias", "add_mlp_bias", "num_tokentypes", "bert_no_binary_head", "seq_length",
    "make_vocab_size_divisible_by", "vocab_size", "model_family", "attention_dropout", "hidden_dropout",
    "init_method_std",
}  # fmt: skip


class Rows(NamedTuple):
    """Sequences on which models are compared."""

    tokens: Tensor  # int64 [b, s], right-padded
    lengths: list[int]
    types: Tensor  # int64 [b, s], segment ids, for BERT


class Unsupported(Exception):
    """Checkpoint that the reference does not compute; the message gives the reason."""


Pair = tuple[Tensor, Tensor | None]  # weight and bias, of a linear layer (weight [out, in]) or of a norm
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "squared_relu": lambda x: F.relu(x) ** 2, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}  # fmt: skip


class Rotary:
    """Rotary position embedding, by Megatron's arguments."""

    def __init__(self, args: Mapping[str, Any], head_dim: int) -> None:
        def number(name: str, usual: float) -> float:
            return float(args.get(name) or usual)

        dim = int(head_dim * number("rotary_percent", 1.0))  # the first channels of each head turn
        theta = float(args.get("rotary_base") or args.get("rope_theta") or 10000.0)
        speeds = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
        if args.get("use_rope_scaling"):  # Llama 3.1: low frequencies are divided, high ones kept, others interpolated
            low, high = number("rope_scaling_low_freq_factor", 1.0), number("rope_scaling_high_freq_factor", 4.0)
            turns = number("rope_scaling_original_length", 8192) * speeds / (2 * math.pi)
            share = ((turns - low) / (high - low)).clamp(0, 1)
            speeds = share * speeds + (1 - share) * speeds / number("rope_scaling_factor", 8.0)
        self.speeds = speeds / number("rotary_seq_len_interpolation_factor", 1.0)
        self.neighbours = bool(args.get("rotary_interleaved"))  # channels 2 i and 2 i + 1 turn, not i and i + dim/2

    def __call__(self, x: Tensor) -> Tensor:  # [b, s, n, d]
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), self.speeds).to(x.dtype)
        half = angles.shape[1]
        cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        turning, rest = x[..., : 2 * half], x[..., 2 * half :]
        first, second = (turning[..., ::2], turning[..., 1::2]) if self.neighbours else turning.split(half, dim=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, dim=-1).flatten(-2) if self.neighbours else torch.cat(pair, dim=-1)
        return torch.cat([turned, rest], dim=-1)


def attention_mask(lengths: list[int], s: int, *, causal: bool, window: int | None) -> Tensor:
    """Return the attention mask, bool [b, 1, s, s], True = attend."""
    query, key = torch.arange(s)[:, None], torch.arange(s)[None, :]
    seen = key <= query if causal else torch.ones(s, s, dtype=torch.bool)
    if window is not None:
        seen = seen & (key > query - window)
    ends = torch.tensor(lengths)[:, None, None]
    return ((seen & (key < ends)) | ((query >= ends) & (key == 0)))[:, None]  # padding attends to key 0: no NaN


class Part:
    """The tensors of one part of the model on one rank, by flattened names."""

    def __init__(self, file: TorchFile, tree: Any, cast: Cast) -> None:
        self.names: Mapping[str, Any] = dict(_flat(tree, ""))
        self.cast, self.path = cast, file.path

    def get(self, *names: str) -> Tensor:
        if (tensor := self.get_if(*names)) is None:
            raise CheckpointError(f"{self.path} has no tensor {' or '.join(names)}, which its model needs")
        return tensor

    def get_if(self, *names: str) -> Tensor | None:  # the first of them that exists
        known = next((name for name in names if name in self.names), None)
        return None if known is None else self.cast(self.names[known].read())

    def layers(self) -> int:
        return len({match[1] for name in self.names if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", name))})


def _flat(tree: Any, prefix: str) -> Iterable[tuple[str, TensorRecord]]:
    if isinstance(tree, TensorRecord):
        yield prefix[:-1], tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}{name}.")


class DistPart(Part):
    """The whole tensors of a torch.distributed.checkpoint folder, with those of all layers stacked or not."""

    def __init__(self, folder: DistFolder, cast: Cast) -> None:
        self.path, self.folder, self.cast = folder.path, folder, cast
        self.names = {name: tensor for name, tensor in folder.tensors.items() if not name.startswith("optimizer.")}

    def get_if(self, *names: str) -> Tensor | None:
        for name in names:
            if name in self.names:
                return self.cast(self.folder.read(name))
            layer = _LAYER.fullmatch(name)
            if layer is None or layer[1] + layer[3] not in self.names:
                continue
            return self.cast(self.folder.read(layer[1] + layer[3], int(layer[2])))
        return None

    def layers(self) -> int:
        numbered = {match[2] for name in self.names if (match := _LAYER.fullmatch(name))}
        return len(numbered) or max((t.shape[0] for name, t in self.names.items() if ".layers." in name), default=0)


class Megatron:
    """A Megatron model, computed from its parts.

    ``parts[t]`` are those of tp rank t in the order of the layers; ``tree`` has what is stored beside the weights;
    ``given`` are settings of --set, which override the arguments in the files.
    """

    def __init__(
        self, parts: Sequence[Sequence[Part]], tree: Mapping[str, Any], qkv_layout: str | None, vocab_size: int,
        given: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.parts, self.tp, self.vocab_size, first = parts, len(parts), vocab_size, parts[0][0]
        saved = tree.get("args")
        values = saved if isinstance(saved, dict) else attributes_of(saved)
        a = {str(name): None if isinstance(value, Object) else value for name, value in values.items()}
        if unknown := sorted(set(given) - _GIVEN - _BY_SHAPE):
            raise Unsupported(f"--set {', '.join(name.replace('_', '-') for name in unknown)} is not computed by it")
        a |= {name: value for name, value in given.items() if name in _GIVEN}
        if "position_embedding_type" in given:
            a["use_rotary_position_embeddings"] = False
        if given.get("window_size") is not None:
            a["window_size"] = (given["window_size"] - 1, 0)
        if a.get("num_attention_heads") is None:
            raise Unsupported("the files do not hold the arguments of the training, and no --set num-attention-heads=N"
                              " stands for them")  # fmt: skip
        if a.get("num_experts") not in (None, 0, 1, [1]):
            raise Unsupported("it does not compute experts")
        self.args = a
        version, stated = float(tree.get("checkpoint_version", 0) or 0), tree.get("qkv_layout")
        by_version = "v0" if version < 1 else "v1" if version < 2 else "interleaved"
        self._is_core = any(name.startswith(("decoder.", "encoder.")) for name in first.names)
        self.order = qkv_layout or (stated if stated in _ORDERS else by_version)
        if self._is_core:
            self.order = "interleaved"
        table = first.get(*_WORDS)
        self.dtype = table.dtype  # of the weights
        hidden = int(a.get("hidden_size") or table.shape[1])
        heads = int(a["num_attention_heads"])  # type: ignore[arg-type]
        self.heads, self.head_dim = heads // self.tp, int(a.get("kv_channels") or hidden // heads)
        self.eps = float(a.get("norm_epsilon") or a.get("layernorm_epsilon") or 1e-5)
        self._plus_one = bool(a.get("apply_layernorm_1p") or a.get("layernorm_zero_centered_gamma"))
        self._is_bert = any("lm_head.dense" in name for name in parts[0][-1].names)
        has_bias = self._pair(first, 0, "first")[1] is not None
        normalization = a.get("normalization") or ("LayerNorm" if has_bias else "RMSNorm")
        self.rms = str(normalization).lower() == "rmsnorm"  # Megatron-DeepSpeed spells it in lower case

        (up, _), (down, _) = self._pair(first, 0, "up"), self._pair(first, 0, "down")
        self.gated = bool(a.get("swiglu", up.shape[0] == 2 * down.shape[1]))
        has_qkv_bias = self._pair(first, 0, "qkv")[1] is not None
        fused = bool(a.get("bias_gelu_fusion", True)) and bool(a.get("add_bias_linear", has_qkv_bias))
        tanh = fused or (not self._is_core and bool(a.get("openai_gelu", False)))
        tanh = a.get("gelu_approximate", "tanh" if tanh else "none") == "tanh"
        unit = "squared_relu" if a.get("squared_relu") else "gelu_tanh" if tanh else "gelu"
        self.activation = _ACTIVATIONS["silu" if self.gated else unit]

        is_rotary = a.get("position_embedding_type") == "rope" or bool(a.get("use_rotary_position_embeddings", False))
        self.rotary = Rotary(a, self.head_dim) if is_rotary else None
        window = a.get("window_size")
        self.window = window[0] + 1 if isinstance(window, (tuple, list)) and window[0] >= 0 else None

    def run(self, rows: Rows) -> Iterator[tuple[str, Tensor]]:
        """Yield hidden states [b, s, h] after the embedding and each block, then each output, all with their names."""
        x = self._embed(rows.tokens, rows.types)
        yield "embedding", x
        mask = attention_mask(rows.lengths, x.shape[1], causal=not self._is_bert, window=self.window)
        for layer in range(sum(part.layers() for part in self.parts[0])):
            x = self._block(x, layer, mask)
            yield f"layer {layer}", x
        yield from self._outputs(x)

    def _embed(self, tokens: Tensor, types: Tensor) -> Tensor:
        x = self._words()[tokens]
        for kind, index in (("position", slice(tokens.shape[1])), ("tokentype", types)):
            name = f"embedding.{kind}_embeddings.weight"
            more = self.parts[0][0].get_if(name, f"language_model.{name}")
            x = x if more is None else x + more[index]
        return x

    def _words(self) -> Tensor:
        return torch.cat([parts[0].get(*_WORDS) for parts in self.parts])  # ranks have consecutive rows

    def _block(self, x: Tensor, layer: int, mask: Tensor) -> Tensor:
        # [b, s, h] -> [b, s, h]: the sum of what the ranks compute, and the biases of row-parallel layers once
        places = [self._place(rank, layer) for rank in range(self.tp)]
        for name, norm, compute in (("out", "first", self._attention), ("down", "second", self._mlp)):
            y, bias = self._norm(x, *self._pair(*places[0], norm)), self._pair(*places[0], name)[1]
            x = sum((compute(y, *place, mask) for place in places), x if bias is None else x + bias)
        return x

    def _attention(self, x: Tensor, part: Part, layer: int, mask: Tensor) -> Tensor:
        weight, bias = self._pair(part, layer, "qkv")
        weights, biases = self._split(weight), (None, None, None) if bias is None else self._split(bias)
        rows = (F.linear(x, *pair) for pair in zip(weights, biases, strict=True))
        q, k, v = (rearrange(row, "b s (n d) -> b s n d", d=self.head_dim) for row in rows)
        if self._find(part, layer, "query norm", "weight") is not None:
            q = self._norm(q, *self._pair(part, layer, "query norm"))
            k = self._norm(k, *self._pair(part, layer, "key norm"))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [b, n, s, d], keys and values [b, g, s, d]
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return F.linear(rearrange(y, "b n s d -> b s (n d)"), self._pair(part, layer, "out")[0])

    def _mlp(self, x: Tensor, part: Part, layer: int, _mask: Tensor) -> Tensor:
        wide = F.linear(x, *self._pair(part, layer, "up"))
        gate, up = wide.chunk(2, dim=-1) if self.gated else (wide, 1)
        return F.linear(self.activation(gate) * up, self._pair(part, layer, "down")[0])

    def _place(self, rank: int, layer: int) -> tuple[Part, int]:
        for part in self.parts[rank]:
            if layer < part.layers():
                return part, layer
            layer -= part.layers()
        raise AssertionError(f"layer {layer} is after the last")

    def _find(self, part: Part, layer: int, which: str, kind: str) -> Tensor | None:
        # Transformer Engine keeps a norm in the linear layer after it, as layer_norm_weight
        ends = [f"{name}{'_' if name.endswith('.layer_norm') else '.'}{kind}" for name in _NAMES[which]]
        return part.get_if(*(f"{stack}layers.{layer}.{end}" for stack in _STACKS for end in ends))

    def _pair(self, part: Part, layer: int, which: str) -> Pair:
        weight = self._find(part, layer, which, "weight")
        if weight is None:
            raise CheckpointError(f"{part.path}: layer {layer} has no {' or '.join(_NAMES[which])}")
        return weight, self._find(part, layer, which, "bias")

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight + 1 if self._plus_one else weight
        if not self.rms:
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)
        y = F.rms_norm(x, weight.shape, weight, self.eps)
        return y if bias is None else y + bias

    def _split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, d = self.heads, self.head_dim
        g = (fused.shape[0] // d - n) // 2
        if self.order == "flat":
            q, k, v = fused.split([n * d, g * d, g * d])
        elif self.order == "v0":
            q, k, v = rearrange(fused, "(qkv n) ... -> qkv n ...", qkv=3)
        elif self.order == "v1":
            q, k, v = rearrange(fused, "(n d qkv) ... -> qkv (n d) ...", n=n, qkv=3)
        else:  # a group's queries, its key, its value
            groups = rearrange(fused, "(g heads d) ... -> heads g d ...", g=g, d=d)
            q = rearrange(groups[:-2], "r g d ... -> (g r d) ...")
            k, v = (rearrange(rows, "g d ... -> (g d) ...") for rows in groups[-2:])
        return q, k, v

    def _outputs(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        last, lasts = self.parts[0][-1], [parts[-1] for parts in self.parts]
        weight = last.get_if(*(f"{stack}final_layernorm.weight" for stack in _STACKS))
        bias = last.get_if(*(f"{stack}final_layernorm.bias" for stack in _STACKS))
        x = self._norm(x, weight, bias)  # type: ignore[arg-type]
        if not self._is_bert:
            is_untied = self.args.get("untie_embeddings_and_output_weights", any(name in last.names for name in _HEAD))
            head = torch.cat([part.get(*_HEAD) for part in lasts]) if is_untied else self._words()
            yield NEXT, F.linear(x, head)[..., : self.vocab_size]
            return
        y = F.linear(x, last.get("lm_head.dense.weight"), last.get("lm_head.dense.bias"))
        y = _ACTIVATIONS["gelu_tanh" if not self._is_core and self.args.get("openai_gelu") else "gelu"](y)
        scales = (last.get(f"lm_head.layer_norm.{end}", f"lm_head.layernorm.{end}") for end in ("weight", "bias"))
        y = self._norm(y, *scales)
        biases = torch.cat([part.get("output_layer.bias", "lm_head.bias") for part in lasts])
        yield MASKED, F.linear(y, self._words(), biases)[..., : self.vocab_size]
        if (order := last.get_if("binary_head.weight")) is not None:
            names = ("pooler.dense.{}", "language_model.pooler.dense.{}")
            weight, bias = (last.get(*(name.format(kind) for name in names)) for kind in ("weight", "bias"))
            yield ORDER, F.linear(torch.tanh(F.linear(x[:, 0], weight, bias)), order, last.get_if("binary_head.bias"))


def open_folder(
    folder: Path, cast: Cast, qkv_layout: str | None, vocab_size: int, given: Mapping[str, Any] | None = None,
    max_metadata_mb: int = MAX_METADATA_BYTES >> 20,
) -> Megatron:  # fmt: skip
    """Return the model of an iteration, each of whose tensors is passed through ``cast``.

    Read are mp_rank_XX[_XXX] folders with model_optim_rng.pt, DeepSpeed's mp_rank_XX_model_states.pt, and distributed
    checkpoints. Raises Unsupported for all others.
    """
    if (folder / ".metadata").is_file():
        dist = DistFolder(folder, max_metadata_bytes=max_metadata_mb << 20)
        if not (folder / "common.pt").is_file():
            raise Unsupported("the folder has no common.pt")
        tree = TorchFile(folder / "common.pt").tree
        common = tree if isinstance(tree, dict) else {}
        return Megatron([[DistPart(dist, cast)]], common, qkv_layout, vocab_size, given or {})
    paths = {}
    for path in sorted(folder.iterdir()):
        if re.fullmatch(r"mp_rank_\d+_\d+_\d+", path.name):
            raise Unsupported("it does not compute experts")
        match = _RANK.fullmatch(path.name.removesuffix("_model_states.pt"))
        file = path / "model_optim_rng.pt" if path.is_dir() else path
        if match is not None and file.is_file():
            paths[int(match[1]), int(match[2] or 0)] = file
    if not paths:
        raise Unsupported("there are no mp_rank files with whole slices of the model")
    files = {place: TorchFile(path) for place, path in paths.items()}
    if not all(isinstance(file.tree, dict) for file in files.values()):
        raise Unsupported("a file does not hold names")
    elsewhere = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "layer_01-model_00-model_states.pt")
    if any((folder / name).exists() for name in elsewhere):
        raise Unsupported("the weights are in other files than those of the mp ranks")
    tp, pp, parts = 1 + max(t for t, _ in files), 1 + max(p for _, p in files), []
    for rank in range(tp):
        # in the order of the layers: the first chunk of every stage, then the second, ...
        chunks: list[tuple[int, int, Part]] = []
        for stage in range(pp):
            opened = files[rank, stage]
            trees = {match: tree for key, tree in opened.tree.items() if (match := _NUMBERED.fullmatch(str(key)))}
            for match, tree in trees.items():
                chunks.append((int(match[1] or 0), stage, Part(opened, tree, cast)))
            if not trees:
                chunks.append((0, stage, Part(opened, opened.tree.get("module"), cast)))
        parts.append([part for _, _, part in sorted(chunks, key=lambda entry: entry[:2])])
    return Megatron(parts, files[0, 0].tree, qkv_layout, vocab_size, given or {})
