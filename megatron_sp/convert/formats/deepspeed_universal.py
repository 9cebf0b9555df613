"""Entries of DeepSpeed's universal checkpoints that describe how the shares of tensor parallel ranks form a parameter.

Source: deepspeed 0.19.8, checkpoint/constants.py, checkpoint/ds_to_universal.py :: merge_tp_slices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.torch_files import Object, TensorRecord, TorchFile
from megatron_sp.convert.copies import TensorInfo
from megatron_sp.convert.families.family import Sizes
from megatron_sp.convert.formats.deepspeed_files import as_dict
from megatron_sp.convert.formats.deepspeed_zero import dtype_of, is_contiguous
from megatron_sp.convert.formats.megatron_shards import Cut, QkvOrder
from megatron_sp.utils.errors import CheckpointError

_VERSION = 0.2  # version of the entries; 0.4 requires the widths of uneven shards, and there are none here
_VOCABULARY = re.compile(
    r"language_model\.embedding\.word_embeddings\.weight|language_model\.output_layer\.weight|lm_head\.bias"
)
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
    s = Sizes.of(config)
    rows = (s.n * s.d, s.g * s.d, s.g * s.d)
    shape: tuple[Any, ...] = (rows, s.h) if name.endswith("weight") else (rows,)
    return {"patterns": [_pattern(name)], "shape": shape, "partition_dim": 0}


def universal_info(cut: Cut, names: list[str]) -> dict[str, Any]:
    """Return ``universal_checkpoint_info`` of the model states, which ds_to_universal.py reads."""
    config = cut.config
    entries = {name: parameter_entry(config, cut.qkv, name) for name in names}
    blocks = {_pattern(n): _three_blocks(config, n) for n, entry in entries.items() if "sub_param_shape" in entry}
    return {
        "universal_checkpoint_version": _VERSION, "original_vocab_size": config.vocab_size,
        "padded_vocab_size": cut.padded_vocab_size,
        "vocabulary_parameter_patterns": _patterns(n for n, e in entries.items() if "vocab_tensor" in e),
        "tp_replicated_parameter_patterns": _patterns(n for n, e in entries.items() if not e),
        "parameter_with_row_parallelism_patterns": _patterns(n for n, e in entries.items() if e.get("cat_dim") == 1),
        "parameter_with_2_sub_params_cat_dim_0": _patterns(n for n, e in entries.items() if "param_n_sub_params" in e),
        "parameter_with_sub_params": list(blocks.values()),
    }  # fmt: skip


def _patterns(names: Any) -> list[str]:
    return list(dict.fromkeys(_pattern(name) for name in names))


def _pattern(name: str) -> str:
    return re.sub(r"layers\\\.\d+", r"layers\\.\\d+", re.escape(name)) + "$"


# zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt contain {"param": tensor} and how the tensor parallel shares were
# merged: cat_dim, concatenated along it; with param_n_sub_params 2, gate and up each on their own; with
# sub_param_shape, each block of rows on its own; none of these, all were the same. vocab_tensor: padding rows were
# removed. From stage 3 the files contain bare tensors without a shape, which is then in the model states. Source:
# deepspeed 0.19.8, checkpoint/universal_checkpoint.py :: load_hp_checkpoint_state.
FILES = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
STEP = "step.pt"
_BLOCK = 4 << 20  # elements that are read at once


@dataclass(frozen=True)
class Share:
    """Share of a parameter on one tensor parallel rank."""

    record: TensorRecord  # record of the full tensor in its file, with shape [rows, ...]
    dim: int  # dim along which the parameter was split
    # (first, count) of the parts, in the order they had on the rank; elements beyond the end are padding
    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.record.shape:
            return ()
        sizes = list(self.record.shape)
        sizes[self.dim] = sum(count for _, count in self.ranges)
        return tuple(sizes)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, dtype_of(self.record))

    @property
    def num_stored(self) -> int:
        if self.dim or not self.record.shape:
            return math.prod(self.shape)
        rows = sum(max(0, min(count, self.record.shape[0] - first)) for first, count in self.ranges)
        return rows * math.prod(self.record.shape[1:])


class Shares:
    """Shares of parameters, by name (a ``TensorStore``)."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self.shares = shares

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: share.info for name, share in self.shares.items()}

    def read(self, name: str) -> Tensor:
        share = self.shares[name]
        record, result = share.record, torch.zeros(share.shape, dtype=share.info.dtype)
        size, position = record.shape[share.dim] if record.shape else 1, 0
        for first, count in share.ranges:
            stored = max(0, min(count, size - first))
            self._copy(share, first, stored, result.narrow(share.dim, position, stored) if record.shape else result)
            position += count
        return result

    def _copy(self, share: Share, first: int, count: int, to: Tensor) -> None:
        record = share.record
        if not record.shape:
            to.copy_(record.read())
            return
        from_row, num_rows = (first, count) if share.dim == 0 else (0, record.shape[0])
        at_once = max(1, _BLOCK // max(1, math.prod(record.shape[1:])))
        for row in range(0, num_rows, at_once):
            rows = min(at_once, num_rows - row)
            block = _rows(record, from_row + row, rows).read()
            to[row : row + rows] = block if share.dim == 0 else block.narrow(share.dim, first, count)


def _rows(record: TensorRecord, first: int, count: int) -> TensorRecord:
    return replace(record, offset=record.offset + first * record.stride[0], shape=(count, *record.shape[1:]))


def read_parameter(path: Path, shape: tuple[int, ...] | None, tp: int, vocab_rows: int | None) -> list[Share]:
    """Return the shares of all tensor parallel ranks in a file."""
    tree = TorchFile(path).tree
    if isinstance(tree, TensorRecord):
        return _bare(path, tree, shape, tp)
    tree = as_dict(tree, str(path))
    record = tree.get("param")
    if not isinstance(record, TensorRecord):
        raise CheckpointError(f"{path} has no tensor 'param', which files of universal checkpoints have: it is damaged")
    if tree.get("is_expert_param") or tree.get("ep_num_experts"):
        raise CheckpointError(f"{path} is of a mixture of experts, which cannot be converted: there is no such model"
                              " here")  # fmt: skip
    is_cut = any(name in tree for name in ("cat_dim", "sub_param_shape", "vocab_tensor"))
    if is_cut and (not record.shape or shape == ()):
        raise CheckpointError(f"{path} has one number that ranks are said to share: it is damaged")
    if not is_cut or (tp == 1 and not tree.get("vocab_tensor")):
        return [_whole(record)] * tp
    dim, parts = _parts(path, tree, record, shape, tp, vocab_rows)
    return [Share(record, dim, tuple((start + rank * each, each) for start, each in parts)) for rank in range(tp)]


def _whole(record: TensorRecord) -> Share:
    return Share(record, 0, ((0, record.shape[0] if record.shape else 1),))


def _bare(path: Path, record: TensorRecord, shape: tuple[int, ...] | None, tp: int) -> list[Share]:
    if tp != 1 or (shape is None and len(record.shape) == 1):
        raise CheckpointError(f"{path} is a tensor without a word on its shape: the model states beside it must have"
                              " param_shapes of one rank")  # fmt: skip
    shape = shape if shape is not None else record.shape
    if math.prod(shape) != math.prod(record.shape) or not is_contiguous(record):
        raise CheckpointError(f"{path} has {math.prod(record.shape):,} elements, {list(shape)} are"
                              f" {math.prod(shape):,}: it is damaged")  # fmt: skip
    return [_whole(record.part(0, tuple(shape)))]


def _parts(
    path: Path, tree: dict[Any, Any], record: TensorRecord, shape: tuple[int, ...] | None, tp: int,
    vocab_rows: int | None
) -> tuple[int, list[tuple[int, int]]]:  # fmt: skip
    # (dim, [(start, size)]): the start of each block along ``dim``, and the size of the part that each rank has of it
    if "sub_param_shape" in tree:
        return _blocks(path, tree["sub_param_shape"], record, tp)
    dim = tree.get("cat_dim")
    if tree.get("vocab_tensor"):
        rows = vocab_rows if vocab_rows is not None else -(-record.shape[0] // tp) * tp
        return 0, _even(path, [rows if shape is None else shape[0] * tp], tp)
    if not isinstance(dim, int) or not 0 <= dim < len(record.shape):
        raise CheckpointError(f"{path}: cat_dim is {str(dim)[:50]} of a tensor {list(record.shape)}: it is damaged")
    count = tree.get("param_n_sub_params", 1)
    if not isinstance(count, int) or not 1 <= count <= 64 or record.shape[dim] % count:
        raise CheckpointError(f"{path}: {str(count)[:50]} equal parts of {list(record.shape)} along dim {dim} are not"
                              " possible: it is damaged")  # fmt: skip
    return dim, _even(path, [record.shape[dim] // count] * count, tp)


def _even(path: Path, sizes: list[int], tp: int) -> list[tuple[int, int]]:
    if any(size % tp for size in sizes):
        raise CheckpointError(f"{path}: parts of {sizes} are not divided evenly by {tp} tensor parallel ranks: such a"
                              " layout is not known here")  # fmt: skip
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [(start, size // tp) for start, size in zip(starts, sizes, strict=True)]


def _blocks(path: Path, spec: Any, record: TensorRecord, tp: int) -> tuple[int, list[tuple[int, int]]]:
    # SubparamShape(patterns, shape, partition_dim): its shape contains the sizes of the blocks
    attributes = spec.attributes if isinstance(spec, Object) else {}
    dim, shape = attributes.get("partition_dim"), attributes.get("shape")
    if not isinstance(dim, int) or not isinstance(shape, tuple) or not 0 <= dim < min(len(shape), len(record.shape)):
        raise CheckpointError(f"{path}: sub_param_shape is {str(attributes)[:200]} of a tensor {list(record.shape)}: it"
                              " cannot be taken apart")  # fmt: skip
    sizes = [shape[dim]] if isinstance(shape[dim], int) else list(shape[dim]) if isinstance(shape[dim], tuple) else []
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sum(sizes) != record.shape[dim]:
        raise CheckpointError(f"{path}: sub_param_shape is {str(attributes)[:200]} of a tensor {list(record.shape)}: it"
                              " cannot be taken apart")  # fmt: skip
    return dim, _even(path, sizes, tp)


def parameters(folders: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    for name, folder in folders.items():
        if not (folder / FILES["master"]).exists():
            raise CheckpointError(f"{folder} has no {FILES['master']}: the checkpoint is incomplete")
        yield name, folder
