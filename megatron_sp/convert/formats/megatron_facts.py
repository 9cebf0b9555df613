"""The model of a Megatron checkpoint by the names and shapes of its tensors, and the size of its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats.megatron_shards import HEAD, WORDS
from megatron_sp.convert.options import Options
from megatron_sp.convert.tokenizers import MAX_BYTES, find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.strict_json import parse_object, read_small_file

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")
_ROUTER = re.compile(r"(?:decoder|encoder)\.layers\.\d+\.mlp\.router\.weight")


@dataclass
class Facts:
    """Facts about a whole model; None: the tensors do not determine it."""

    is_bert: bool  # it has a head for masked tokens
    num_layers: int  # number of layers of the whole model
    hidden_size: int
    padded_vocab_size: int  # rows of the embedding over all tp ranks
    ffn_size: int | None  # width of the MLP; that of one half if it is gated; None: all layers have experts
    is_gated: bool
    qkv_rows: int  # rows of the fused projection over all tp ranks
    positions: int | None
    token_types: int
    has_head: bool  # it has a weight of an output layer (with several stages this may be a copy of the embedding)
    has_order_head: bool
    has_bias: bool
    has_qkv_bias: bool
    has_norm_bias: bool
    head_dim: int | None  # from the norms of queries and keys
    attention_width: int  # columns of the output projection: heads * head_dim
    num_experts: int = 0  # experts of a layer, their width, and that of the shared one; 0: there are none
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    has_expert_bias: bool = False
    names: frozenset[str] = field(default_factory=frozenset)


def facts_of(where: Path, first: Shapes, last: Shapes, *, tp: int, num_layers: int) -> Facts:
    """Derive the facts from the shapes of the tensors."""
    try:
        return _derived(first, last, tp, num_layers)
    except KeyError as error:
        has = ", ".join(name[:80] for name in list(first)[:5])
        raise CheckpointError(f"{where} has no {error.args[0]}, but {has or 'no tensors'}: it is neither a GPT nor a"
                              " BERT") from None  # fmt: skip


def _derived(first: Shapes, last: Shapes, tp: int, num_layers: int) -> Facts:
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
    positions = first.get("embedding.position_embeddings.weight")
    types = first.get("embedding.tokentype_embeddings.weight")
    q_norm = first.get(f"{prefix}self_attention.q_layernorm.weight")
    return Facts(
        is_bert="lm_head.dense.weight" in last, num_layers=num_layers, hidden_size=words[1],
        padded_vocab_size=words[0] * tp, ffn_size=None if dense is None else dense[1][1] * tp,
        is_gated=fc1[0] == 2 * fc2[1], qkv_rows=qkv[0] * tp, positions=positions[0] if positions else None,
        token_types=types[0] if types else 0, has_head=HEAD in last, has_order_head="binary_head.weight" in last,
        has_bias=f"{prefix}self_attention.linear_proj.bias" in first,
        has_qkv_bias=f"{prefix}self_attention.linear_qkv.bias" in first,
        has_norm_bias=f"{prefix}input_layernorm.bias" in first, head_dim=q_norm[0] if q_norm else None,
        attention_width=proj[1] * tp, names=frozenset(everything), num_experts=router[0],
        expert_ffn_size=0 if expert is None else expert[1][1] * tp,
        shared_ffn_size=0 if shared is None else shared[1][1] * tp,
        has_expert_bias=any(name.endswith(".mlp.router.expert_bias") for name in everything),
    )  # fmt: skip


def _mlp(shapes: Shapes, inside: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    pattern = re.compile(rf"((?:decoder|encoder)\.layers\.\d+\.mlp\.{inside})linear_fc1\.weight")
    name = next((name for name in shapes if pattern.fullmatch(name)), None)
    if name is None:
        return None
    pair = {key: shapes[key] for key in (name, name.replace("linear_fc1", "linear_fc2"))}  # KeyError: half is missing
    if inside.startswith("experts") and all(len(shape) == 3 for shape in pair.values()):
        pair = {key: shape[1:] for key, shape in pair.items()}  # stacked
    first, second = (_table(pair, key) for key in pair)
    return first, second


def _table(shapes: Shapes, name: str) -> tuple[int, ...]:
    shape = shapes[name]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{name} is {list(shape)[:8]}, and must be a table with rows and columns: it is damaged,"
                              " or of no model")  # fmt: skip
    return shape


_MAX_VALUES = 4_000_000  # a large vocabulary has some 250,000 words, and twice as many merges of three values each


def padded_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Return the number of rows of the table over all tp ranks."""
    unit = divisible_by * tp
    return (vocab_size + unit - 1) // unit * unit


def true_size(settings: Settings, padded: int, tp: int, options: Options) -> int:
    """Return the entries of the vocabulary: those of --vocab-size or --tokenizer, else those in the arguments."""
    if options.vocab_size is not None:
        return _fitting(options.vocab_size, padded, "--vocab-size")
    if options.tokenizer is not None and (counted := tokenizer_size(options.tokenizer)) is not None:
        return _fitting(counted, padded, f"--tokenizer {options.tokenizer}: its size")
    divisible_by = settings.count("make_vocab_size_divisible_by", None)
    stated = settings.count("vocab_size", None)
    if stated is not None:
        stated += settings.get("tokenizer_type", str, "") == "NullTokenizer"  # its end-of-text token is not counted
        fits = stated <= padded if divisible_by is None else padded_size(stated, divisible_by, tp) == padded
        if fits:
            return int(stated)
    if divisible_by is not None and divisible_by * tp == 1:
        return padded
    raise ConfigError(f"{settings.where} has {padded} rows of the vocabulary, of which the last may only fill it up,"
                      " and does not say how many are real: give --vocab-size N (the tokenizer's size), or --tokenizer"
                      f" PATH, or --vocab-size {padded} to keep all")  # fmt: skip


def _fitting(size: int, padded: int, what: str) -> int:
    if size > padded:
        raise ConfigError(f"{what} ({size}) must be at most the {padded} rows that the vocabulary has in the"
                          " checkpoint")  # fmt: skip
    return size


def tokenizer_size(path: Path) -> int | None:
    """Return the number of entries in a tokenizer's files, or None if they do not specify it."""
    files = find_files(path)
    for name, count in _COUNTS.items():
        if name in files:
            try:
                return count(files[name])
            except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise CheckpointError(f"{files[name]} cannot be read as a tokenizer: {str(error)[:200]}") from None
    return None


def _of_json(path: Path) -> int:
    document = _document(path)
    words, added = document["model"]["vocab"], document.get("added_tokens") or []
    ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
    return int(max([*ids, *(token["id"] for token in added)])) + 1


def _of_sentencepiece(path: Path) -> int:
    import sentencepiece

    return int(sentencepiece.SentencePieceProcessor(model_proto=read_small_file(path, MAX_BYTES)).get_piece_size())


def _document(path: Path) -> dict[str, Any]:
    return parse_object(read_small_file(path, MAX_BYTES), str(path), _MAX_VALUES)


_COUNTS: dict[str, Callable[[Path], int]] = {
    "tokenizer.json": _of_json,
    "vocab.json": lambda path: int(max(_document(path).values())) + 1,
    "vocab.txt": lambda path: len(read_small_file(path, MAX_BYTES).decode("utf-8").splitlines()),
    "tokenizer.model": _of_sentencepiece,
}  # fmt: skip
