"""The tensors of a ``torch_dist`` folder under our names: one for each block, though blocks are stored stacked.

Keys are those of core with Transformer Engine. Blocks that are all alike are stacked in one tensor along the first dim,
without a number in the key; a block is read from it without the others. Adam's state has keys that contain that of the
parameter:

    optimizer.state.{exp_avg,exp_avg_sq,fp32_param,param}.<key>      like the parameter, or each rank's share of it as one row:
                                                                     [parts along each dim, elements of a part]
Source: megatron-core 0.16.1, dist_checkpointing/strategies/torch.py, distrib_optimizer.py :: sharded_param_state_*.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.convert.archive.dist_folder import DistFolder, StoredChunk
from megatron_sp.convert.archive.torch_files import DTYPES, TensorRecord, TorchFile
from megatron_sp.convert.copies import Copy, TensorInfo, View
from megatron_sp.convert.formats.megatron_names import canonical
from megatron_sp.utils.errors import CheckpointError

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master", "param": "master"}
_MAX_BLOCKS = 1 << 12  # names are made for each block before it is known to exist
_MAX_NAMES = 100_000  # names of all blocks: a hundred layers have some 5,000, with the optimizer's
_MAX_SHARES = 1 << 14  # shards of one tensor
_STACKED = re.compile(r"((?:decoder|encoder)\.layers\.)(?!\d+\.)(.+)")


class Source(NamedTuple):
    """A tensor of the folder, or one block of it."""

    key: str
    block: int | None


class DistStore:
    """Tensors by our names, and ``kind.name`` for the optimizer's (a ``TensorStore``); unknown tensors keep their key.

    Raises:
        CheckpointError: two keys are the same parameter, or there are more blocks than in any model.
    """

    def __init__(self, folder: DistFolder) -> None:
        self._folder = folder
        self.sources: dict[str, Source] = {}
        stack = "encoder" if "lm_head.dense.weight" in folder.tensors else "decoder"
        for key, tensor in folder.tensors.items():
            state = _STATE.fullmatch(key)
            prefix, bare = (f"{_KINDS[state[1]]}.", state[2]) if state else ("", key)
            stacked = _STACKED.fullmatch(bare)
            if stacked is None or not tensor.shape:
                self._add(prefix + canonical(bare, stack), Source(key, None))
                continue
            if tensor.shape[0] > _MAX_BLOCKS:
                raise CheckpointError(
                    f"{folder.path}: {key[:200]} has {tensor.shape[0]:,} blocks, more than the {_MAX_BLOCKS:,} that are read"
                )
            if len(self.sources) + tensor.shape[0] > _MAX_NAMES:
                raise CheckpointError(f"{folder.path} has more than {_MAX_NAMES:,} blocks of tensors: it is of no model")
            for i in range(tensor.shape[0]):
                self._add(prefix + canonical(f"{stacked[1]}{i}.{stacked[2]}", stack), Source(key, i))
        self._tensors = {name: self._info(source) for name, source in self.sources.items()}

    def _add(self, name: str, source: Source) -> None:
        if name in self.sources:
            raise CheckpointError(f"{self._folder.path}: {source.key[:200]} and {self.sources[name].key[:200]} are the same parameter")
        self.sources[name] = source

    def _info(self, source: Source) -> TensorInfo:
        tensor = self._folder.tensors[source.key]
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f"{self._folder.path}: {source.key[:200]} is of {tensor.dtype}, which cannot be converted")
        return TensorInfo(tensor.shape if source.block is None else tensor.shape[1:], tensor.dtype)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def shown(self) -> dict[str, str]:
        """Return the keys in the folder by our names; with the number of the block if it is stacked."""
        return {name: s.key if s.block is None else f"{s.key}[{s.block}]" for name, s in self.sources.items()}

    def read(self, name: str) -> Tensor:
        source, info = self.sources[name], self._tensors[name]
        if source.block is None:
            return self._folder.read(source.key)
        made = torch.empty(info.shape, dtype=info.dtype)
        for chunk in self._folder.tensors[source.key].chunks:
            offsets, sizes = chunk.rect
            if offsets[0] <= source.block < offsets[0] + sizes[0]:
                part = self._read_block(source.key, chunk, source.block - offsets[0])
                made[tuple(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True))] = part
        return made

    def _read_block(self, key: str, chunk: StoredChunk, number: int) -> Tensor:
        """Read one block of a chunk, and nothing else of it."""
        place = chunk.place
        file = TorchFile(self._folder.path / place.file, (place.offset, place.length))
        record = file.tree
        wanted = (chunk.rect.sizes, self._folder.tensors[key].dtype)
        if not isinstance(record, TensorRecord) or (record.shape, record.dtype) != wanted:
            raise CheckpointError(f"{file.path}: the chunk of {key[:200]} at byte {place.offset} is not what .metadata says: it is damaged")
        offset = record.offset + number * record.stride[0]
        return file.read(replace(record, offset=offset, shape=record.shape[1:], stride=record.stride[1:]))


def state_kinds(store: DistStore, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the kinds of the optimizer's tensors that exist for any parameter."""
    names = store.tensors()
    return tuple(kind for kind in ("master", "exp_avg", "exp_avg_sq") if any(f"{kind}.{name}" in names for name in shapes))


def refuse_buffers(folder: DistFolder) -> None:
    """Check that the optimizer's state names its parameters. Raises CheckpointError: it is stored in buffers of ranks, which do not."""
    for key in (*folder.tensors, *folder.objects):
        if re.match(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(gbuf_idx|param_state$|per_bucket)", key):
            raise CheckpointError(
                f"{folder.path}: the optimizer's state is in buffers of ranks (dp_reshardable, {key[:100]}), which do not"
                " name parameters: save it in Megatron with --dist-ckpt-optim-fully-reshardable, or give --no-optimizer to convert the"
                " weights alone"
            )


def unflattened(copy: Copy, ours: tuple[int, ...], stored: tuple[int, ...]) -> Iterator[Copy]:
    """Yield the equivalent of a copy for a tensor stored as rows of the ranks' shares, [parts along each dim, elements of a part].

    Args:
        copy: between a tensor of ours and one of theirs in its unflattened shape.
        ours: this unflattened shape, including padding.
        stored: shape in the folder.
    """
    parts, dims = stored[:-1], len(ours)
    sizes = tuple(size // count for size, count in zip(ours, parts, strict=True))
    for at in _corners(parts):
        first = tuple(i * size for i, size in zip(at, sizes, strict=True))
        inside = _inside(copy, ours, first, sizes)
        if inside is not None:
            mine, theirs = inside
            yield Copy(mine, View(copy.theirs.name, (*parts, *sizes), (*at, *theirs), stored=stored), copy.replica)
    assert dims == len(parts)


def _corners(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return (tuple(int(i) for i in index) for index in torch.cartesian_prod(*(torch.arange(n) for n in parts)).view(-1, len(parts)))


def _inside(
    copy: Copy, whole: tuple[int, ...], first: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[View, tuple[slice, ...]] | None:  # fmt: skip
    """Return the intersection of a copied region of rows with a part: the view of ours, and the slices in the part."""
    low, high = _rows(copy.theirs, whole[0])
    mine_low, _ = _rows(copy.ours, whole[0])
    start, end = max(low, first[0]), min(high, first[0] + sizes[0])
    if start >= end:
        return None
    rows = slice(mine_low + start - low, mine_low + end - low)
    rest = tuple(slice(f, f + s) for f, s in zip(first[1:], sizes[1:], strict=True))
    return View(copy.ours.name, None, (rows, *rest)), (slice(start - first[0], end - first[0]), *(slice(0, s) for s in sizes[1:]))


def _rows(view: View, count: int) -> tuple[int, int]:
    assert view.shape is None and view.order is None
    if not view.index:
        return 0, count
    rows = view.index[0]
    assert isinstance(rows, slice)
    return rows.start or 0, count if rows.stop is None else rows.stop


def is_flattened(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether ``stored`` is the shape of a tensor of shape ``wanted`` that is stored as rows of shares."""
    if (
        len(stored) != len(wanted) + 1
        or math.prod(stored[:-1]) > _MAX_SHARES
        or not all(n and size % n == 0 for n, size in zip(stored, wanted, strict=False))
    ):
        return False
    return stored[-1] == math.prod(size // n for n, size in zip(stored, wanted, strict=False))
