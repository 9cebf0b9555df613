"""What a Megatron checkpoint's tensors say about the model by their names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_sp.convert.formats.megatron_shards import HEAD, WORDS
from megatron_sp.utils.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")


@dataclass
class Facts:
    """Of a whole model; None: no tensor tells.

    Attributes:
        is_bert: it has a head for masked tokens.
        num_layers: of the whole model.
        padded_vocab_size: rows of the embedding over all tp ranks.
        ffn_size: width of the MLP; of one half where it is gated.
        qkv_rows: of the fused projection over all tp ranks.
        has_head: an output layer's weight that is not the embedding's copy (not known with several stages, where both look alike).
    """

    is_bert: bool
    num_layers: int
    hidden_size: int
    padded_vocab_size: int
    ffn_size: int
    is_gated: bool
    qkv_rows: int
    positions: int | None
    token_types: int
    has_head: bool
    has_order_head: bool
    has_bias: bool
    has_qkv_bias: bool
    has_norm_bias: bool
    head_dim: int | None  # from norms of queries and keys
    attention_width: int  # columns of the output projection: heads * head_dim
    names: frozenset[str] = field(default_factory=frozenset)


def facts_of(first: Shapes, last: Shapes, *, tp: int, num_layers: int) -> Facts:
    """Work them out.

    Args:
        first, last: tensors of the first and of the last pipeline stage of tp rank 0, by our names; the same if there is one stage.
        num_layers: over all stages.
    Raises:
        KeyError: the name of a tensor without which it is no transformer.
        CheckpointError: a weight that is no table.
    """
    everything = {**last, **first}
    layer = next((name for name in first if _LAYER.match(name)), None)
    if layer is None:
        raise KeyError("decoder.layers.0.self_attention.linear_qkv.weight")
    prefix = layer[: _LAYER.match(layer).end()]  # type: ignore[union-attr]
    words, fc1, fc2 = (_table(first, name) for name in (WORDS, f"{prefix}mlp.linear_fc1.weight", f"{prefix}mlp.linear_fc2.weight"))
    qkv, proj = (_table(first, f"{prefix}self_attention.{name}.weight") for name in ("linear_qkv", "linear_proj"))
    positions, types = first.get("embedding.position_embeddings.weight"), first.get("embedding.tokentype_embeddings.weight")
    q_norm = first.get(f"{prefix}self_attention.q_layernorm.weight")
    return Facts(
        is_bert="lm_head.dense.weight" in last, num_layers=num_layers, hidden_size=words[1], padded_vocab_size=words[0] * tp,
        ffn_size=fc2[1] * tp, is_gated=fc1[0] == 2 * fc2[1], qkv_rows=qkv[0] * tp,
        positions=positions[0] if positions else None, token_types=types[0] if types else 0, has_head=HEAD in last,
        has_order_head="binary_head.weight" in last, has_bias=f"{prefix}self_attention.linear_proj.bias" in first,
        has_qkv_bias=f"{prefix}self_attention.linear_qkv.bias" in first, has_norm_bias=f"{prefix}input_layernorm.bias" in first,
        head_dim=q_norm[0] if q_norm else None, attention_width=proj[1] * tp,
        names=frozenset(everything),
    )  # fmt: skip


def _table(shapes: Shapes, name: str) -> tuple[int, ...]:
    shape = shapes[name]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{name} is {list(shape)[:8]}, and must be a table with rows and columns: it is damaged, or of no model")
    return shape
