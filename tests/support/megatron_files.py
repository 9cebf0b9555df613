"""Checkpoints as Megatron writes them, made without the converter: loops over heads, and tables of names written out.

The tests read what is made here, and compare what the converter writes with it, file by file and bit by bit.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, serialization

from megatron_sp.config.schema import ModelConfig

Tree = dict[str, Any]


def _with_ends(parts: dict[str, str]) -> list[tuple[str, str]]:
    ends = ("weight", "bias")
    return [(f"{ours}.{end}", f"{name}{'' if name[-1] in '_/' else '.'}{end}") for ours, name in parts.items() for end in ends]


_NORMS = {f"self_attention.{which}_layernorm": f"self_attention.{which}_layernorm" for which in "qk"}
# (part of our name, name in the file), in the order in which Megatron's modules register them
LAYER = {
    "core": _with_ends({
        "self_attention.linear_proj": "self_attention.linear_proj", "input_layernorm": "self_attention.linear_qkv.layer_norm_",
        "self_attention.linear_qkv": "self_attention.linear_qkv", **_NORMS, "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
        "mlp.linear_fc1": "mlp.linear_fc1", "mlp.linear_fc2": "mlp.linear_fc2",
    }),
    "core-local": _with_ends({name: name for name in (
        "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", *_NORMS, "pre_mlp_layernorm", "mlp.linear_fc1",
        "mlp.linear_fc2",
    )}),
    "legacy": _with_ends({
        "input_layernorm": "input_layernorm", "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense", **_NORMS, "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }),
}  # fmt: skip
HEADS = {
    "core": _with_ends({
        "lm_head.dense": "lm_head.dense", "lm_head.layernorm": "lm_head.layer_norm", "output_layer": "output_layer",
        "binary_head": "binary_head", "pooler.dense": "pooler.dense",
    }),
    "legacy": [
        *_with_ends({"pooler.dense": "language_model/pooler/dense"}), ("output_layer.weight", "language_model/output_layer/weight"),
        ("output_layer.bias", "lm_head/bias"),
        *_with_ends({"lm_head.dense": "lm_head/dense", "lm_head.layernorm": "lm_head/layernorm", "binary_head": "binary_head/"}),
    ],
}  # fmt: skip
OLD = {"language_model/encoder": "language_model/transformer", "self_attention.": "attention."}


@dataclass
class Kind:
    """One way of writing.

    Attributes:
        version: checkpoint_version; None: not there.
        order: of the rows of q, k and v, where it is not that of the version.
        chunks: virtual pipeline stages of each rank.
        filler: what is in rows that only pad the vocabulary.
        old: legacy names of 2020.
    """

    names: str = "core"
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    version: float | None = 3.0
    order: str | None = None
    divisible_by: int = 128
    old: bool = False
    filler: float = 0.0

    @property
    def row_order(self) -> str:
        return self.order or {None: "v0", 0: "v0", 1.0: "v1", 2.0: "interleaved", 3.0: "interleaved"}[self.version]


def rank_name(t: int, p: int, pp: int) -> str:
    return f"mp_rank_{t:02}_{p:03}" if pp > 1 else f"mp_rank_{t:02}"


def qkv_share(full: Tensor, c: ModelConfig, kind: Kind, t: int) -> Tensor:
    """A rank's rows of a fused projection, head by head."""
    n, g, d = c.num_attention_heads or 0, c.num_groups, c.head_dim
    r = n // g
    queries, keys, values = {}, {}, {}
    for group in range(g):
        first = group * (r + 2) * d
        for i in range(r):
            queries[group * r + i] = full[first + i * d : first + (i + 1) * d]
        keys[group] = full[first + r * d : first + (r + 1) * d]
        values[group] = full[first + (r + 1) * d : first + (r + 2) * d]
    mine = range(t * g // kind.tp, (t + 1) * g // kind.tp)
    rows: list[Tensor] = []
    if kind.row_order == "interleaved":
        for group in mine:
            rows += [queries[group * r + i] for i in range(r)] + [keys[group], values[group]]
    elif kind.row_order in ("flat", "v0"):
        rows += [queries[group * r + i] for group in mine for i in range(r)]
        rows += [keys[group] for group in mine] + [values[group] for group in mine]
    else:
        for head in mine:
            for channel in range(d):
                rows += [one[head][channel : channel + 1] for one in (queries, keys, values)]
    return torch.cat(rows)


def share(name: str, full: Tensor, c: ModelConfig, kind: Kind, t: int) -> Tensor:
    """What a tp rank has of a parameter."""
    if "linear_qkv" in name:
        return qkv_share(full, c, kind, t)
    if "linear_fc1" in name and c.swiglu:
        gate, up = full[: len(full) // 2], full[len(full) // 2 :]
        return torch.cat([gate.chunk(kind.tp)[t], up.chunk(kind.tp)[t]])
    if "linear_fc1" in name:
        return full.chunk(kind.tp)[t]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return full.chunk(kind.tp, dim=1)[t]
    if "word_embeddings" in name or "output_layer" in name:
        rows = padded_rows(len(full), kind)
        padded = torch.full((rows, *full.shape[1:]), kind.filler, dtype=full.dtype)
        padded[: len(full)] = full
        return padded[t * rows // kind.tp : (t + 1) * rows // kind.tp]
    return full


def padded_rows(vocab_size: int, kind: Kind) -> int:
    rows = vocab_size
    while rows % (kind.divisible_by * kind.tp):
        rows += 1
    return rows


def parts(c: ModelConfig, tensors: dict[str, Tensor], kind: Kind, p: int, chunk: int) -> Iterator[tuple[str, str]]:
    """(Our name, name in the file with / between dicts) of what a stage has, in order."""
    legacy = kind.names == "legacy"
    stack, theirs = (
        ("encoder" if c.is_bert else "decoder"),
        ("language_model/encoder/" if legacy else ("encoder." if c.is_bert else "decoder.")),
    )
    each = (c.num_layers or 0) // kind.pp // kind.chunks
    is_first, is_last = (p, chunk) == (0, 0), (p, chunk) == (kind.pp - 1, kind.chunks - 1)
    if is_first:
        for table in ("word_embeddings", "position_embeddings", "tokentype_embeddings"):
            yield f"embedding.{table}.weight", f"language_model/embedding/{table}/weight" if legacy else f"embedding.{table}.weight"
    for i in range(each):
        number = (chunk * kind.pp + p) * each + i
        for ours, name in LAYER[kind.names]:
            yield f"{stack}.layers.{number}.{ours}", f"{theirs}layers.{i}.{name}"
    if not is_last:
        return
    for end in ("weight", "bias"):
        yield f"{stack}.final_layernorm.{end}", f"{theirs}final_layernorm.{end}"
    tied = c.is_bert or not c.untie_embeddings_and_output_weights
    for ours, name in HEADS["legacy" if legacy else "core"]:
        if ours == "output_layer.weight" and tied and not is_first and not legacy:
            yield "embedding.word_embeddings.weight", name
        if ours != "output_layer.weight" or not tied:
            yield ours, name
    if legacy and tied and not is_first:
        yield "embedding.word_embeddings.weight", "word_embeddings_for_head/weight"


def model_tree(c: ModelConfig, tensors: dict[str, Tensor], kind: Kind, t: int, p: int, chunk: int) -> Tree:
    tree: Tree = {}
    for ours, name in parts(c, tensors, kind, p, chunk):
        if ours not in tensors:
            continue
        if kind.old:
            for new, old in OLD.items():
                name = name.replace(new, old)
        *folders, last = name.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = share(ours, tensors[ours], c, kind, t).clone()
    return tree


def arguments(c: ModelConfig, kind: Kind, **more: Any) -> Namespace:
    """What Megatron's arguments say of a model."""
    values = {
        "num_layers": c.num_layers, "hidden_size": c.hidden_size, "num_attention_heads": c.num_attention_heads, "kv_channels": c.head_dim,
        "ffn_hidden_size": c.ffn_size, "group_query_attention": c.num_groups != c.num_attention_heads,
        "num_query_groups": c.num_groups if c.num_groups != c.num_attention_heads else 1, "seq_length": c.seq_length,
        "max_position_embeddings": c.max_positions, "position_embedding_type": c.position_embedding_type, "rotary_base": int(c.rotary_base),
        "rotary_percent": c.rotary_percent, "normalization": c.normalization, "norm_epsilon": c.norm_epsilon, "swiglu": c.swiglu,
        "squared_relu": c.squared_relu, "add_bias_linear": not c.disable_bias_linear, "add_qkv_bias": c.add_qkv_bias,
        "apply_layernorm_1p": c.apply_layernorm_1p, "qk_layernorm": c.qk_layernorm,
        "bias_gelu_fusion": c.has_tanh_gelu and not c.disable_bias_linear,
        "openai_gelu": False, "untie_embeddings_and_output_weights": c.untie_embeddings_and_output_weights,
        "make_vocab_size_divisible_by": kind.divisible_by, "padded_vocab_size": padded_rows(c.vocab_size or 0, kind),
        "vocab_size": c.vocab_size,
        "tensor_model_parallel_size": kind.tp, "pipeline_model_parallel_size": kind.pp, "attention_dropout": c.attention_dropout,
        "hidden_dropout": c.hidden_dropout, "consumed_train_samples": 640, "data_parallel_size": 1, "num_experts": None,
    }  # fmt: skip
    return Namespace(**{**values, **more})


def rank_trees(c: ModelConfig, tensors: dict[str, Tensor], kind: Kind, **args: Any) -> dict[str, Tree]:
    """What is saved by every rank, by the name of its folder."""
    found = {}
    for p in range(kind.pp):
        for t in range(kind.tp):
            tree: Tree = {"args": arguments(c, kind, **{"rank": p * kind.tp + t, **args}), "iteration": 10}
            if kind.version is not None:
                tree["checkpoint_version"] = kind.version
            models = [model_tree(c, tensors, kind, t, p, chunk) for chunk in range(kind.chunks)]
            tree |= {"model": models[0]} if kind.chunks == 1 else {f"model{i}": one for i, one in enumerate(models)}
            found[rank_name(t, p, kind.pp)] = tree
    return found


def write_file(tree: Tree, path: Path) -> None:
    serialization.save(tree, path)


def read_file(path: Path) -> Tree:
    """By torch's own safe loader, which is told of the one class that Megatron's files have."""
    with serialization.safe_globals([Namespace]):
        found: Tree = serialization.load(path, weights_only=True)
    return found


def save(path: Path, trees: dict[str, Tree], iteration: str = "iter_0000010") -> Path:
    """Write them as Megatron does; returns ``path``."""
    for name, tree in trees.items():
        folder = path / iteration / name
        folder.mkdir(parents=True)
        write_file(tree, folder / "model_optim_rng.pt")
    (path / "latest_checkpointed_iteration.txt").write_text(iteration.removeprefix("iter_").lstrip("0"))
    return path


def load(path: Path) -> dict[str, Tree]:
    """What lies in the folders of ranks."""
    files = sorted(path.glob("*/mp_rank_*/model_optim_rng.pt"))
    return {file.parent.name: read_file(file) for file in files}


def flat(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Tensors in nested dicts, by names with /."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
    return found


def is_decayed(name: str, tensor: Tensor) -> bool:
    return tensor.ndim > 1 and not name.endswith("bias")


def registered(tree: Tree) -> dict[str, Tensor]:
    """A rank's parameters in the order of its modules: a legacy BERT has the copy of its embedding before its heads."""
    found = flat(tree)
    head = "word_embeddings_for_head/weight"
    if head not in found:
        return found
    before = {name: t for name, t in found.items() if name.startswith("language_model")}
    return {**before, head: found[head], **found}


def plain_optimizer(models: list[Tree], of: dict[str, list[Tree]]) -> Tree:
    """The state of Float16OptimizerWithFloat16Params: ``of`` has trees like those of the models for master, exp_avg and exp_avg_sq."""
    weights = {(i, name): t for i, tree in enumerate(models) for name, t in registered(tree).items()}
    kinds = {kind: {(i, name): t for i, tree in enumerate(trees) for name, t in registered(tree).items()} for kind, trees in of.items()}
    groups = [[key for key, t in weights.items() if is_decayed(key[1], t) == decayed] for decayed in (True, False)]
    order = [key for group in groups for key in group]
    state = {i: {kind: kinds[kind][key] for kind in ("exp_avg", "exp_avg_sq")} for i, key in enumerate(order)}
    numbers = [[order.index(key) for key in group] for group in groups]
    inner = {"state": state, "param_groups": [{"params": one, "wd_mult": 1.0 - i, "step": 10} for i, one in enumerate(numbers)]}
    return {"optimizer": inner, "fp32_from_fp16_params": [[kinds["master"][key] for key in group] for group in groups]}


def distributed_optimizer(of: dict[str, list[Tree]], shared: bool, *, align: int = 64, bucket: int | None = None) -> Tree:
    """distrib_optim.pt: each buffer as megatron-core 0.16.1 fills it, gathered without the padding between its buckets."""
    names = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    tree: Tree = {"buckets_coalesced": True}
    for number in range(len(of["exp_avg"])):
        rows = {}
        for kind, theirs in names.items():
            finished: list[Tensor] = []
            current: list[Tensor] = []
            for name, tensor in reversed(registered(of[kind][number]).items()):
                filled = sum(len(one) for one in current)
                current.append(torch.zeros(-filled % align))
                alone = shared and ("word_embeddings" in name or name == "output_layer.weight")
                if alone and len(current) > 1:
                    finished, current = finished + current, []
                current.append(tensor.float().reshape(-1))
                if alone or (bucket is not None and sum(len(one) for one in current) >= bucket):
                    finished, current = finished + current, []
            rows[theirs] = torch.cat(finished + current)
        tree[number] = {(torch.bfloat16, torch.float32): {**rows, "numel_unpadded": len(rows["param"])}}
    return tree
