"""Megatron's names of our parameters, and their shares on its tensor and pipeline parallel ranks.

Source: Megatron-LM's checkpointing.py :: fix_query_key_value_ordering, and the sources of the layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, Shape, View
from megatron_sp.convert.families.family import ALL, Sizes

# Our names are those of Megatron-core with separate norms (its "local" layers). Files may use others: those of core
# with Transformer Engine, where a norm belongs to the linear layer after it; and legacy names, in nested dicts of
# Megatron-LM until 2024 and Megatron-DeepSpeed, in two or three spellings. In a file, layers are numbered from the
# first of its pipeline stage.
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
IGNORED = {  # regular expressions of names that are not weights, each with the reason
    r".*_extra_state\d*": "Transformer Engine's own state for 8-bit numbers",
    r".*(inv_freq|rotary_pos_emb.*)": "rotary frequencies, which are worked out",
    r".*(attention\.(masked_)?bias|attention_mask)": "the causal mask, which is not a weight",
}
_OLD = {
    "linear_qkv": "query_key_value", "linear_proj": "dense", "pre_mlp_": "post_attention_",
    "linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h",
}  # fmt: skip
_LINEAR = re.compile(r"(.+\.(?:linear_qkv|linear_proj|linear_fc1|linear_fc2))\.weight0?")
_EXPERT_TENSOR = re.compile(r"(.+\.mlp\.experts\.)(\d+)\.(linear_fc[12])\.(weight|bias)")


def extra_states(names: Iterable[str]) -> list[str]:
    """Return the keys of Transformer Engine's FP8 states, which loaders expect."""
    return [f"{match[1]}._extra_state" for name in names if (match := _LINEAR.fullmatch(name))]


def canonical(name: str, stack: str) -> str:
    """Return our name of a parameter, or an unknown name as it is."""
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
    # ``tied_head``: a stage's copy of the embedding; ``separate_norm``: experts follow the block's second norm, which
    # is then no part of a linear layer
    if expert := _EXPERT_TENSOR.fullmatch(name):
        before, number, linear, kind = expert.groups()
        is_local = names == "core-local"
        return f"{before}local_experts.{number}.{linear}.{kind}" if is_local else f"{before}{linear}.{kind}{number}"
    if names != "legacy":
        if names == "core":
            name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if names == "core" and not separate_norm:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        return name.replace("lm_head.layernorm.", "lm_head.layer_norm.")
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
_IN_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.(.+)")


def position(name: str, names: Names) -> tuple[int, ...]:
    """Return a key to sort the parameters of a stage by."""
    top, is_bias = _index(_TOP["legacy" if names == "legacy" else "core"], name), int(name.endswith("bias"))
    layer = _IN_LAYER.fullmatch(name)
    if layer is None and name.startswith("embedding."):
        return (top, _index(_TABLES, name.removeprefix("embedding.")))
    if layer is None:
        return (top, 1, 0 if ".dense." in name else 1, is_bias)
    inside, known, is_second = layer[2], _INNER[names], int("linear_fc2" in layer[2])
    where: tuple[int, ...] = (_index(known, inside),)
    if expert := _EXPERT_NAME.fullmatch(inside):  # grouped: the first layers of all experts before the second ones
        number = int(expert[1])
        where = (len(known) + 1, *((number, is_second) if names == "core-local" else (is_second, number)))
    elif inside.startswith("mlp.shared_experts."):
        where = (len(known) + 2, is_second)
    return (top, 0, int(layer[1]), *where, is_bias)


def registered(listed: list[str]) -> list[str]:
    """Return the parameters listed in a file in the order in which modules register them."""
    # the order of the file, except that a legacy BERT registers its copy of the embedding before its heads
    head = "word_embeddings_for_head.weight"
    if head not in listed:
        return listed
    rest = [name for name in listed if name != head]
    at = next((i for i, name in enumerate(rest) if name.startswith(("lm_head.", "binary_head."))), len(rest))
    return [*rest[:at], head, *rest[at:]]


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether Megatron applies weight decay."""
    return len(shape) > 1 and not name.endswith(".bias")


def _index(prefixes: tuple[str, ...], name: str) -> int:
    return next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))


# Column-parallel layers and vocabularies are split along dim 0, row-parallel ones along dim 1, everything else is
# replicated. Two kinds of shares are not contiguous: [gate | up] of a gated MLP is split within each half, and the rows
# of the fused projection have had four orders:
#
#     interleaved   [g, n/g + 2, d]     version 2.0 and later: ours, so a rank's share is a slice
#     v0            [3, n, d]           within a rank
#     v1            [n, d, 3]           within a rank
#     flat          [n d | g d | g d]   within a rank; Megatron-DeepSpeed since December 2024
#
# With --rotary-interleaved the channels 2 i and 2 i + 1 of a query or key turn together, where ours are i and i + n/2:
# the same model with a head's first n channels in another order, in the projection and in the norms of heads.
QkvOrder = Literal["interleaved", "flat", "v0", "v1"]
WORDS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

_VOCABULARY = re.compile(r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)")
_COLUMNS = re.compile(r".*\.self_attention\.linear_proj\.weight|.*\.mlp\.(shared_experts\.)?linear_fc2\.weight")
_QKV = re.compile(r".*\.self_attention\.linear_qkv\.(weight|bias)")
_HEAD_NORM = re.compile(r".*\.self_attention\.[qk]_layernorm\.(weight|bias)")
_FC1 = re.compile(r".*\.mlp\.(shared_experts\.)?linear_fc1\.(weight|bias)")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))")
_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)(\..+)")


class Shard(NamedTuple):
    """One part of a model in the files of one rank."""

    prefix: str  # prefix of its tensors' names
    tp_rank: int  # tp rank whose share of each tensor it has
    first_layer: int
    num_layers: int
    is_first: bool  # it has the embedding, or the modules after the last block
    is_last: bool
    ep_rank: int = 0


Regions = Iterator[tuple[View, View]]  # pairs (region of ours, region of theirs)


@dataclass(frozen=True)
class Cut:
    """Description of how the tensors of a model are split over tp ranks."""

    config: ModelConfig
    tp: int  # number of ranks that share each tensor
    qkv: QkvOrder  # row order of the fused projections
    padded_vocab_size: int  # rows of the vocabulary in the files
    # number of ranks that share the experts, which have a tensor each; 0: experts are whole, in one tensor as ours
    ep: int = 1
    neighbours: int = 0  # channels of each head that are rotated by pairs of neighbours; 0: there are no such pairs

    def is_replicated(self, name: str) -> bool:
        """Return whether every rank has a tensor in full."""
        expert = _EXPERT.fullmatch(name)
        is_cut_expert = expert is not None and expert[2] != "linear_fc2.bias"
        return not is_cut_expert and not any(kind.fullmatch(name) for kind in (_VOCABULARY, _COLUMNS, _QKV, _FC1))

    def is_cut_along_columns(self, name: str) -> bool:
        return _COLUMNS.fullmatch(name) is not None

    def regions(self, name: str, shape: Shape, place: Shard, ours: str, theirs: str) -> Regions:
        """Yield the pairs that make up a rank's share of a parameter, whose tensors have the last two names."""
        rank, expert = place.tp_rank, _EXPERT.fullmatch(theirs)
        if expert is not None and self.ep:
            per_rank = shape[0] // self.ep
            for number in range(per_rank):
                number_of_all, file = place.ep_rank * per_rank + number, View(f"{expert[1]}{number}.{expert[2]}")
                if expert[2] == "linear_fc2.bias":
                    yield View(ours, None, (number_of_all,)), file
                elif expert[2] == "linear_fc2.weight":
                    yield View(ours, None, (number_of_all, ALL, self._share(shape[2], rank))), file
                elif self.config.swiglu:
                    for rows_of_half, half in self._halves(shape[1:], rank, file.name):
                        yield View(ours, None, (number_of_all, rows_of_half)), half
                else:
                    yield View(ours, None, (number_of_all, self._share(shape[1], rank))), file
        elif _VOCABULARY.fullmatch(name):
            rows, count = self.padded_vocab_size // self.tp, self.rows_of(shape[0], rank)
            first = min(rank * rows, shape[0])
            region = View(theirs, None, (slice(0, count),), stored=(rows, *shape[1:]))
            yield View(ours, None, (slice(first, first + count),)), region
        elif _QKV.fullmatch(name) and (self.qkv != "interleaved" or self.neighbours):
            yield from self._fused(ours, shape, theirs, rank)
        elif _HEAD_NORM.fullmatch(name) and self.neighbours:
            for here, there in self._channels(shape[0]):
                yield View(ours, None, (here,)), View(theirs, None, (there,), stored=shape)
        elif _FC1.fullmatch(name) and self.config.swiglu:
            for rows_of_half, half in self._halves(shape, rank, theirs):
                yield View(ours, None, (rows_of_half,)), half
        elif self.is_cut_along_columns(name):
            yield View(ours, None, (ALL, self._share(shape[1], rank))), View(theirs)
        elif self.is_replicated(name):
            yield View(ours), View(theirs)
        else:
            yield View(ours, None, (self._share(shape[0], rank),)), View(theirs)

    def rows_of(self, vocab_size: int, rank: int) -> int:
        """Return the rows of a rank's share of the vocabulary without padding."""
        rows = self.padded_vocab_size // self.tp
        return max(0, min(rows, vocab_size - rank * rows))

    def _share(self, size: int, rank: int) -> slice:
        width = size // self.tp
        return slice(rank * width, (rank + 1) * width)

    def _halves(self, shape: Shape, rank: int, theirs: str) -> Iterator[tuple[slice, View]]:
        # of [gate | up], each of which is cut on its own: our rows, and where a rank has them
        rows, stored = shape[0] // 2 // self.tp, (shape[0] // self.tp, *shape[1:])
        for half in range(2):
            first = half * shape[0] // 2 + rank * rows
            region = View(theirs, None, (slice(half * rows, (half + 1) * rows),), stored=stored)
            yield slice(first, first + rows), region

    def _channels(self, width: int) -> Iterator[tuple[slice, slice]]:
        # of a head: ours, and theirs in pairs of neighbours
        n = self.neighbours
        yield slice(0, n // 2), slice(0, n, 2)
        yield slice(n // 2, n), slice(1, n, 2)
        if n < width:
            yield slice(n, width), slice(n, width)

    def _fused(self, ours: str, shape: Shape, theirs: str, rank: int) -> Regions:
        s, rest = Sizes.of(self.config), shape[1:]
        groups, stored = s.g // self.tp, (shape[0] // self.tp, *rest)
        full, own = (s.g, s.r + 2, s.d, *rest), slice(rank * groups, (rank + 1) * groups)
        if self.qkv == "interleaved":  # with channels in pairs of neighbours
            inner, turning = (groups, s.r + 2, s.d, *rest), slice(0, s.r + 1)  # queries and key
            for here, there in self._channels(s.d):
                yield View(ours, full, (own, turning, here)), View(theirs, inner, (ALL, turning, there), stored=stored)
            yield View(ours, full, (own, s.r + 1)), View(theirs, inner, (ALL, s.r + 1), stored=stored)
        elif self.qkv == "flat":
            inner = (groups * (s.r + 2), s.d, *rest)
            for j in range(groups):
                group = rank * groups + j
                queries = View(theirs, inner, (slice(j * s.r, (j + 1) * s.r),), stored=stored)
                yield View(ours, full, (group, slice(0, s.r))), queries
                for part in range(2):
                    row = groups * s.r + part * groups + j
                    yield View(ours, full, (group, s.r + part)), View(theirs, inner, (row,), stored=stored)
        else:
            for part in range(3):  # one query head for each key and value: these versions had no grouped queries
                v0 = View(theirs, (3, groups, s.d, *rest), (part,), stored=stored)
                v1 = View(theirs, (groups, s.d, 3, *rest), (ALL, ALL, part), stored=stored)
                yield View(ours, full, (own, part)), v0 if self.qkv == "v0" else v1


def shard_copies(
    cut: Cut, shapes: Mapping[str, Shape], places: list[Shard], *, kind: str = "", ours: str = "",
    tied_heads: Collection[str] = (),
) -> tuple[list[Copy], dict[str, int]]:  # fmt: skip
    """Return the copies between our tensors and those of all places, and the number of padding elements by name.

    Args:
        kind, ours: what precedes the names in the files and ours, for tensors of the optimizer.
        tied_heads: prefixes of the places that have a copy of the embedding for the output layer.
    """
    copies: list[Copy] = []
    filled: dict[str, int] = {}
    for place in places:
        entries = []  # our name, the name in the place, whether another place before this one has the same share
        for name in shapes:
            layer, local = _LAYER.fullmatch(name), name
            is_here = place.is_first if name.startswith("embedding.") else place.is_last
            if layer is not None:  # numbered from the first layer of the place
                number = int(layer[2]) - place.first_layer
                is_here, local = 0 <= number < place.num_layers, f"{layer[1]}{number}{layer[3]}"
            expert = _EXPERT.fullmatch(name)
            is_replica = place.ep_rank > 0 or (place.tp_rank > 0 and cut.is_replicated(name))
            if expert is not None:
                is_replica = place.tp_rank > 0 and expert[2] == "linear_fc2.bias"
            if is_here:
                entries.append((name, local, is_replica))
        if place.prefix in tied_heads:
            entries.append((WORDS, HEAD, True))
        for name, local, is_replica in entries:
            theirs, shape = f"{place.prefix}{kind}{local}", shapes[name]
            copies += [Copy(a, b, is_replica) for a, b in cut.regions(name, shape, place, ours + name, theirs)]
            padding = cut.padded_vocab_size // cut.tp - cut.rows_of(shape[0], place.tp_rank) if shape else 0
            if padding and _VOCABULARY.fullmatch(name):
                filled[theirs] = padding * math.prod(shape[1:])
    return copies, filled
