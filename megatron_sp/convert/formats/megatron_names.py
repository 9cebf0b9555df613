"""Translation between Megatron's parameter names, old and new, and ours.

Ours are those of Megatron-core with separate norms (its "local" layers). Files may use other names: those of core with
Transformer Engine, where a norm belongs to the linear layer after it; and legacy names, in nested dicts of Megatron-LM
until 2024 and Megatron-DeepSpeed, in two or three spellings. In a file, layers are numbered from the first of its
pipeline stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Names = Literal["core", "core-local", "legacy"]

_LEGACY_RULES = (
    (r"language_model\.embedding\.(?P<rest>.+)", r"embedding.\g<rest>"),
    (r"language_model\.(encoder|transformer)\.(?P<rest>.+)", r"STACK.\g<rest>"),
    (r"language_model\.(?P<rest>(output_layer|pooler)\..+)", r"\g<rest>"),
    (r"word_embeddings_for_head\.weight", r"output_layer.weight"),
    (r"lm_head\.bias", r"output_layer.bias"),
)
_LAYER_RULES = (
    (r"(self_)?attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"(self_)?attention\.dense\.", "self_attention.linear_proj."),
    (r"attention\.([qk]_layernorm)\.", r"self_attention.\1."),
    (r"input_norm\.", "input_layernorm."),
    (r"post_attention_(layer)?norm\.", "pre_mlp_layernorm."),
    (r"mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.experts\.local_experts\.(\d+)\.", r"mlp.experts.\1."),  # one after another
    (r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.\3.\1.\2"),  # grouped
    (r"mlp\.experts\.experts\.", "mlp.experts."),  # whole, of distributed checkpoints
)
_IGNORED = {
    r".*_extra_state\d*": "Transformer Engine's own state for 8-bit numbers",
    r".*(inv_freq|rotary_pos_emb.*)": "rotary frequencies, which are worked out",
    r".*(attention\.(masked_)?bias|attention_mask)": "the causal mask, which is not a weight",
}


def ignored() -> dict[str, str]:
    """Return regular expressions of names that are not weights, each with the reason."""
    return dict(_IGNORED)


_OLD = {
    "linear_qkv": "query_key_value", "linear_proj": "dense", "pre_mlp_": "post_attention_",
    "linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h",
}  # fmt: skip
_LINEAR = re.compile(r"(.+\.(?:linear_qkv|linear_proj|linear_fc1|linear_fc2))\.weight0?")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(\d+)\.(linear_fc[12])\.(weight|bias)")


def extra_states(names: Iterable[str]) -> list[str]:
    """Return the key of Transformer Engine's FP8 state for each linear layer of the blocks, which loaders expect."""
    return [f"{match[1]}._extra_state" for name in names if (match := _LINEAR.fullmatch(name))]


def is_legacy(name: str) -> bool:
    """Return whether a name is one of Megatron-LM before its core."""
    return name.startswith(("language_model.", "word_embeddings_for_head."))


def canonical(name: str, stack: str) -> str:
    """Return our name of a parameter, with the layer's number in its file; unknown names are returned unchanged."""
    for pattern, ours in _LEGACY_RULES:
        if re.fullmatch(pattern, name):
            name = re.sub(pattern, ours, name).replace("STACK", stack, 1)
            break
    name = re.sub(r"^lm_head\.(layer_norm|norm)\.", "lm_head.layernorm.", name)
    name = re.sub(rf"^{stack}\.final_norm\.", f"{stack}.final_layernorm.", name)
    layer = re.fullmatch(rf"({stack}\.layers\.\d+\.)(.+)", name)
    if layer is None:
        return name
    rest = layer[2]
    for pattern, ours in _LAYER_RULES:
        if re.match(pattern, rest):
            return layer[1] + re.sub(pattern, ours, rest, count=1)
    return name


def written(name: str, names: Names, *, tied_head: bool = False, separate_norm: bool = False) -> str:
    """Return the name of a parameter of ours in a file."""
    if expert := _EXPERT.fullmatch(name):
        before, number, linear, kind = expert.groups()
        is_local = names == "core-local"
        return f"{before}local_experts.{number}.{linear}.{kind}" if is_local else f"{before}{linear}.{kind}{number}"
    if names == "core-local":
        return name.replace("lm_head.layernorm.", "lm_head.layer_norm.")
    if names == "core":
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if not separate_norm:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        return name.replace("lm_head.layernorm.", "lm_head.layer_norm.")
    return _legacy(name, tied_head)


def _legacy(name: str, tied_head: bool) -> str:
    if name == "output_layer.bias":
        return "lm_head.bias"
    if tied_head:
        return "word_embeddings_for_head.weight"
    if name.startswith(("embedding.", "output_layer.", "pooler.")):
        return f"language_model.{name}"
    stack = re.fullmatch(r"(?:decoder|encoder)\.(.+)", name)
    if stack is None:
        return name
    rest = stack[1]
    for new, old in _OLD.items():
        rest = rest.replace(new, old)
    return f"language_model.encoder.{rest}"


# The order in which Megatron's modules register their parameters, by which its optimizers number them: files list them
# so, and a writer must. Source: the constructors of megatron-core's SelfAttention, MLP, TransformerLayer, GPTModel and
# BertModel, and of legacy ParallelTransformerLayer.
_TOP = {
    "core": ("embedding.", "decoder.", "encoder.", "lm_head.", "output_layer.", "binary_head.", "pooler."),
    "legacy": ("embedding.", "decoder.", "encoder.", "pooler.", "output_layer.weight", "output_layer.bias", "lm_head.",
        "binary_head."),
}  # fmt: skip
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
_EXPERT_NAME = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_TABLES = ("word_embeddings.", "position_embeddings.", "tokentype_embeddings.")
LAST = (len(_TOP["legacy"]) + 1,)  # larger than everything that ``position`` returns
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.(.+)")


def position(name: str, names: Names) -> tuple[int, ...]:
    """Return a key to sort the parameters of a stage by."""
    top = _index(_TOP["legacy" if names == "legacy" else "core"], name)
    last = (1 if name.endswith("bias") else 0,)
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        expert, rest = _EXPERT_NAME.fullmatch(layer[2]), len(_INNER[names])
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
