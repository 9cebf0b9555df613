"""The order of parameters in Megatron's modules, by which its optimizers number them.

Files list them in the order in which modules register them, so a reader takes it from the file; a writer needs it.
Source: the constructors of megatron-core's SelfAttention, MLP, TransformerLayer, GPTModel and BertModel, and of legacy
ParallelTransformerLayer.
"""

from __future__ import annotations

import re

from megatron_sp.convert.formats.megatron_names import Names

_TOP = {
    "core": ("embedding.", "decoder.", "encoder.", "lm_head.", "output_layer.", "binary_head.", "pooler."),
    "legacy": ("embedding.", "decoder.", "encoder.", "pooler.", "output_layer.weight", "output_layer.bias", "lm_head.", "binary_head."),
}
_ATTENTION = ("linear_proj.", "linear_qkv.", "q_layernorm.", "k_layernorm.")
_INNER = {
    "core": (
        "self_attention.linear_proj.", "input_layernorm.", "self_attention.linear_qkv.", "self_attention.q_layernorm.",
        "self_attention.k_layernorm.", "pre_mlp_layernorm.", "mlp.linear_fc1.", "mlp.linear_fc2.",
    ),
    "core-local": ("input_layernorm.", *(f"self_attention.{part}" for part in _ATTENTION), "pre_mlp_layernorm.",
        "mlp.linear_fc1.", "mlp.linear_fc2."),
    "legacy": (
        "input_layernorm.", "self_attention.linear_qkv.", "self_attention.linear_proj.", "self_attention.q_layernorm.",
        "self_attention.k_layernorm.", "pre_mlp_layernorm.", "mlp.linear_fc1.", "mlp.linear_fc2.",
    ),
}  # fmt: skip
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_TABLES = ("word_embeddings.", "position_embeddings.", "tokentype_embeddings.")
LAST = (len(_TOP["legacy"]) + 1,)  # larger than everything that ``position`` returns
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.(.+)")


def position(name: str, names: Names) -> tuple[int, ...]:
    """Return a key to sort the parameters of a stage by.

    Args:
        name: as returned by ``megatron_names.canonical``.
    """
    top = _index(_TOP["legacy" if names == "legacy" else "core"], name)
    last = (1 if name.endswith("bias") else 0,)
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        expert, rest = _EXPERT.fullmatch(layer[2]), len(_INNER[names])
        if expert is not None:  # grouped: the first layers of all experts come before the second ones
            second, number = int("linear_fc2" in layer[2]), int(expert[1])
            where = (number, second) if names == "core-local" else (second, number)
            return (top, 0, int(layer[1]), rest + 1, *where, *last)
        if layer[2].startswith("mlp.shared_experts."):
            return (top, 0, int(layer[1]), rest + 2, int("linear_fc2" in layer[2]), *last)
        return (top, 0, int(layer[1]), _index(_INNER[names], layer[2]), *last)
    if name.startswith("embedding."):
        return (top, _index(_TABLES, name.removeprefix("embedding.")))
    return (top, 1, 0 if ".dense." in name else 1, *last)


def registered(listed: list[str]) -> list[str]:
    """Return the parameters listed in a file in the order in which modules register them.

    It is the order of the file, except that a legacy BERT registers its copy of the embedding before its heads.

    Args:
        listed: names in the file, without those of states.
    """
    head = "word_embeddings_for_head.weight"
    if head not in listed:
        return listed
    rest = [name for name in listed if name != head]
    at = next((i for i, name in enumerate(rest) if name.startswith(("lm_head.", "binary_head."))), len(rest))
    return [*rest[:at], head, *rest[at:]]


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether weight decay is applied, by Megatron's rule for its two groups of parameters."""
    return len(shape) > 1 and not name.endswith(".bias")


def _index(prefixes: tuple[str, ...], name: str) -> int:
    return next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))
