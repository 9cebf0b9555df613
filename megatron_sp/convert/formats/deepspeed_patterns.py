"""Entries of DeepSpeed's universal checkpoints that describe how the shares of tensor parallel ranks form a parameter.

Source: deepspeed 0.19.8, checkpoint/constants.py, checkpoint/ds_to_universal.py :: merge_tp_slices.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.torch_files import Object
from megatron_sp.convert.families.parts import Sizes
from megatron_sp.convert.formats.megatron_shards import Cut, QkvOrder

_VERSION = 0.2  # version of the entries; 0.4 requires the widths of uneven shards, and there are none here
_VOCABULARY = re.compile(r"language_model\.embedding\.word_embeddings\.weight|language_model\.output_layer\.weight|lm_head\.bias")
_ROWS = re.compile(r".*(dense_4h_to_h|attention\.dense)\.weight")
_QKV = re.compile(r".*\.query_key_value\.(weight|bias)")
_FC1 = re.compile(r".*\.dense_h_to_4h\.(weight|bias)")


def parameter_entry(config: ModelConfig, order: QkvOrder, name: str) -> dict[str, Any]:
    """Return the entries beside the tensor in the file of a parameter."""
    if _VOCABULARY.fullmatch(name):
        return {"cat_dim": 0, "vocab_tensor": True}
    if _ROWS.fullmatch(name):
        return {"cat_dim": 1}
    if _FC1.fullmatch(name) and config.swiglu:
        return {"cat_dim": 0, "param_n_sub_params": 2}
    if _QKV.fullmatch(name) and order == "flat":
        state = _three_blocks(config, name)
        return {"sub_param_shape": Object("deepspeed.checkpoint.universal_checkpoint.SubparamShape", state=state)}
    return {"cat_dim": 0} if _QKV.fullmatch(name) or _FC1.fullmatch(name) else {}


def _three_blocks(config: ModelConfig, name: str) -> dict[str, Any]:
    """Describe [Q | K | V], each of which is split on its own."""
    s = Sizes.of(config)
    rows = (s.n * s.d, s.g * s.d, s.g * s.d)
    shape: tuple[Any, ...] = (rows, s.h) if name.endswith("weight") else (rows,)
    return {"patterns": [_pattern(name)], "shape": shape, "partition_dim": 0}


def universal_info(cut: Cut, names: list[str]) -> dict[str, Any]:
    """Return ``universal_checkpoint_info`` of the model states, which ds_to_universal.py reads.

    Args:
        names: names of the parameters.
    """
    config = cut.config
    entries = {name: parameter_entry(config, cut.qkv, name) for name in names}
    blocks = {_pattern(n): _three_blocks(config, n) for n, entry in entries.items() if "sub_param_shape" in entry}
    return {
        "universal_checkpoint_version": _VERSION, "original_vocab_size": config.vocab_size, "padded_vocab_size": cut.padded_vocab_size,
        "vocabulary_parameter_patterns": _patterns(n for n, e in entries.items() if "vocab_tensor" in e),
        "tp_replicated_parameter_patterns": _patterns(n for n, e in entries.items() if not e),
        "parameter_with_row_parallelism_patterns": _patterns(n for n, e in entries.items() if e.get("cat_dim") == 1),
        "parameter_with_2_sub_params_cat_dim_0": _patterns(n for n, e in entries.items() if "param_n_sub_params" in e),
        "parameter_with_sub_params": list(blocks.values()),
    }  # fmt: skip


def _patterns(names: Any) -> list[str]:
    return list(dict.fromkeys(_pattern(name) for name in names))


def _pattern(name: str) -> str:
    """Return a regular expression for the same parameter of every layer."""
    return re.sub(r"layers\\\.\d+", r"layers\\.\\d+", re.escape(name)) + "$"
