"""Facts about the model of a Megatron checkpoint, derived from the names and shapes of its tensors only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_sp.convert.formats.megatron_shards import HEAD, WORDS
from megatron_sp.utils.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")
_ROUTER = re.compile(r"(?:decoder|encoder)\.layers\.\d+\.mlp\.router\.weight")


@dataclass
class Facts:
    """Facts about a whole model; None: the tensors do not determine it.

    Attributes:
        is_bert: it has a head for masked tokens.
        num_layers: number of layers of the whole model.
        padded_vocab_size: rows of the embedding over all tp ranks.
        ffn_size: width of the MLP; that of one half if it is gated; None: all layers have experts.
        num_experts, expert_ffn_size, shared_ffn_size: experts of a layer, their width, and that of the shared one; 0: there are none.
        qkv_rows: rows of the fused projection over all tp ranks.
        has_head: it has a weight of an output layer (with several stages this may be a copy of the embedding).
    """

    is_bert: bool
    num_layers: int
    hidden_size: int
    padded_vocab_size: int
    ffn_size: int | None
    is_gated: bool
    qkv_rows: int
    positions: int | None
    token_types: int
    has_head: bool
    has_order_head: bool
    has_bias: bool
    has_qkv_bias: bool
    has_norm_bias: bool
    head_dim: int | None  # from the norms of queries and keys
    attention_width: int  # columns of the output projection: heads * head_dim
    num_experts: int = 0
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    has_expert_bias: bool = False
    names: frozenset[str] = field(default_factory=frozenset)


def facts_of(first: Shapes, last: Shapes, *, tp: int, num_layers: int) -> Facts:
    """Derive the facts from the shapes of the tensors.

    Args:
        first, last: tensors of the first and of the last pipeline stage of tp rank 0, by our names; the same if there
            is one stage.
        num_layers: number of layers of all stages.
    Raises:
        KeyError: a tensor that every transformer has is missing; contains its name.
        CheckpointError: a weight is not a matrix.
    """
    everything = {**last, **first}
    layer = next((name for name in first if _LAYER.match(name)), None)
    if layer is None:
        raise KeyError("decoder.layers.0.self_attention.linear_qkv.weight")
    prefix = layer[: _LAYER.match(layer).end()]  # type: ignore[union-attr]
    words = _table(first, WORDS)
    dense, shared, expert = (_mlp(everything, inside) for inside in ("", r"shared_experts\.", r"experts\.(0\.)?"))
    router = next((shape for name, shape in everything.items() if _ROUTER.fullmatch(name) and len(shape) == 2), (0, 0))
    fc1, fc2 = next((one for one in (dense, expert) if one is not None), (None, None))
    if fc1 is None or fc2 is None:
        raise KeyError(f"{prefix}mlp.linear_fc1.weight")
    qkv, proj = (_table(first, f"{prefix}self_attention.{name}.weight") for name in ("linear_qkv", "linear_proj"))
    positions, types = first.get("embedding.position_embeddings.weight"), first.get("embedding.tokentype_embeddings.weight")
    q_norm = first.get(f"{prefix}self_attention.q_layernorm.weight")
    return Facts(
        is_bert="lm_head.dense.weight" in last, num_layers=num_layers, hidden_size=words[1], padded_vocab_size=words[0] * tp,
        ffn_size=None if dense is None else dense[1][1] * tp, is_gated=fc1[0] == 2 * fc2[1], qkv_rows=qkv[0] * tp,
        positions=positions[0] if positions else None, token_types=types[0] if types else 0, has_head=HEAD in last,
        has_order_head="binary_head.weight" in last, has_bias=f"{prefix}self_attention.linear_proj.bias" in first,
        has_qkv_bias=f"{prefix}self_attention.linear_qkv.bias" in first, has_norm_bias=f"{prefix}input_layernorm.bias" in first,
        head_dim=q_norm[0] if q_norm else None, attention_width=proj[1] * tp,
        names=frozenset(everything), num_experts=router[0], expert_ffn_size=0 if expert is None else expert[1][1] * tp,
        shared_ffn_size=0 if shared is None else shared[1][1] * tp,
        has_expert_bias=any(name.endswith(".mlp.router.expert_bias") for name in everything),
    )  # fmt: skip


def _mlp(shapes: Shapes, inside: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes of the two weights of an MLP, or of an expert; None: no layer has one. Raises CheckpointError: one is no matrix."""
    pattern = re.compile(rf"((?:decoder|encoder)\.layers\.\d+\.mlp\.{inside})linear_fc1\.weight")
    name = next((name for name in shapes if pattern.fullmatch(name)), None)
    if name is None:
        return None
    pair = {key: shapes[key] for key in (name, name.replace("linear_fc1", "linear_fc2"))}  # KeyError: half of it is missing
    if inside.startswith("experts") and all(len(shape) == 3 for shape in pair.values()):
        pair = {key: shape[1:] for key, shape in pair.items()}  # stacked
    first, second = (_table(pair, key) for key in pair)
    return first, second


def _table(shapes: Shapes, name: str) -> tuple[int, ...]:
    shape = shapes[name]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{name} is {list(shape)[:8]}, and must be a table with rows and columns: it is damaged, or of no model")
    return shape
