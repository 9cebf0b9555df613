"""The files of a Megatron checkpoint: folders, the model in them as one store, whether they belong together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile, attributes_of, require_dtype
from megatron_sp.convert.copies import Store, TensorInfo
from megatron_sp.convert.formats.megatron_layout import Shard, canonical
from megatron_sp.convert.model import require_inside
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import is_count, read_small_file

TRACKER, MODEL, DISTRIBUTED = "latest_checkpointed_iteration.txt", "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"iter_(\d{7,})")


class RankFolder(NamedTuple):
    """Folder of one rank of tp x pp, with experts of tp x pp x ep."""

    tp_rank: int
    pp_rank: int
    path: Path
    ep_rank: int = 0


def iteration_folder(path: Path, step: int | None) -> Path | None:
    """Return the folder of one iteration: ``path`` itself, its parent or a child; None: there is none."""
    if _RANK.fullmatch(path.name) and (path / MODEL).exists():
        return path.parent
    if rank_folders(path) or (path / ".metadata").exists() or (path / "metadata.json").exists():
        return path
    matches = ((_ITERATION.fullmatch(child.name), child) for child in path.iterdir() if child.is_dir())
    iterations = {int(match[1]): child for match, child in matches if match}
    if (path / "release").is_dir():
        iterations.setdefault(0, path / "release")
    if not iterations:
        return None
    wanted = step
    if wanted is None and not (path / TRACKER).exists():
        wanted = max(iterations)
    elif wanted is None:
        text = read_small_file(path / TRACKER, 1000).decode("utf-8", "replace").strip()
        if text != "release" and not re.fullmatch(r"[0-9]{1,12}", text):
            raise CheckpointError(f"{path / TRACKER} must hold the number of an iteration or the word release, found"
                                  f" {text[:60]!r}")  # fmt: skip
        wanted = 0 if text == "release" else int(text)
    if wanted not in iterations:
        has = ", ".join(child.name for _, child in sorted(iterations.items())[-5:])
        raise CheckpointError(f"{path} has no iteration {wanted}: it has {has}; give one with --step")
    require_inside(iterations[wanted], path)
    return iterations[wanted]


def rank_folders(path: Path) -> list[RankFolder]:
    """Return the rank folders of one iteration: every tp rank of every stage, and of every share of the experts.

    A single number after that of the tp rank is taken for that of the stage; without stages it is that of the share,
    which only the arguments in the files tell.
    """
    if not path.is_dir():
        return []
    folders: dict[tuple[int, int, int], Path] = {}
    for child in sorted(path.iterdir()):
        match = _RANK.fullmatch(child.name)
        if match is None or not (child / MODEL).exists():
            continue
        require_inside(child, path)
        folders[int(match[1]), int(match[2] or 0), int(match[3] or 0)] = child
    if not folders:
        return []
    tp, pp, ep = (1 + max(key[axis] for key in folders) for axis in range(3))
    if len(folders) != tp * pp * ep:  # a name may claim any number of ranks: only the first missing ones are listed
        every = ((t, p, e) for p in range(pp) for t in range(tp) for e in range(ep))
        missing = (rank_name(t, p, pp, e, ep) for t, p, e in every if (t, p, e) not in folders)
        sizes, axes = (f"{tp} x {pp}", "tp x pp") if ep == 1 else (f"{tp} x {pp} x {ep}", "tp x pp x ep")
        raise CheckpointError(f"{path} has folders of {len(folders)} ranks, and {sizes} are expected ({axes}):"
                              f" {', '.join(islice(missing, 8))} missing. Copy all of them to one place")  # fmt: skip
    return [RankFolder(t, p, folders[t, p, e], e) for p in range(pp) for e in range(ep) for t in range(tp)]


def rank_name(tp_rank: int, pp_rank: int, pp: int, ep_rank: int = 0, ep: int = 1) -> str:
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "") + (f"_{ep_rank:03d}" if ep > 1 else "")


# Every process of Megatron writes its global rank into its file (args.rank). However ranks are mapped to tensor,
# pipeline and data parallelism, the global rank increases along each of them, and so with the numbers in the names.
# Settings of the model and counters are the same on all ranks; where stages have no weight in common, nothing else
# distinguishes the files of two runs.
WAY_OUT = "files were renamed, or copied from another rank: copy them anew"
_COUNTERS = ("iteration", "global_steps", "global_samples", "skipped_steps", "checkpoint_version")
_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_key_value_heads",
    "kv_channels", "seq_length", "max_position_embeddings", "padded_vocab_size", "make_vocab_size_divisible_by",
    "position_embedding_type", "rotary_base", "rope_theta", "rotary_percent", "norm_epsilon", "layernorm_epsilon",
    "swiglu", "add_bias_linear", "untie_embeddings_and_output_weights", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "consumed_train_samples", "seed",
)  # fmt: skip


class Written(NamedTuple):
    """The process and the run that wrote a rank's file."""

    path: Path
    rank: int | None  # global rank that wrote it; None: not stated
    said: Mapping[str, Any]  # values that must be the same in all files, by name

    @classmethod
    def of(cls, path: Path, tree: Mapping[Any, Any]) -> Written:
        args = attributes_of(tree.get("args"))
        entries = {name: tree[name] for name in _COUNTERS if name in tree}
        entries |= {name: args[name] for name in _ARGUMENTS if name in args}
        plain = {name: value for name, value in entries.items() if isinstance(value, int | float | str | None)}
        rank = args.get("rank")
        return cls(path, rank if is_count(rank) else None, plain)


def require_one_save(files: Mapping[tuple[int, int], Written]) -> None:
    """Refuse files of several runs or steps, and files that were written by other ranks than their names state."""
    first = next(iter(files.values()))
    for file in files.values():
        for name, value in first.said.items():
            other = file.said.get(name, value)
            if other != value and value == value:  # NaN differs from itself
                raise CheckpointError(f"{file.path}: {name} is {str(other)[:60]}, and {str(value)[:60]} in"
                                      f" {first.path}: these are files of different checkpoints")  # fmt: skip
    if len({file.rank for file in files.values()} - {None}) != len(files):
        return  # absent, or written by one process for all ranks, as conversion tools do
    for (a, b), file in files.items():
        for before in (files.get((a - 1, b)), files.get((a, b - 1))):
            if before is not None and (before.rank or 0) > (file.rank or 0):
                raise CheckpointError(f"{before.path} was written by the global rank {before.rank}, and {file.path} by"
                                      f" {file.rank}: they must be in the order of their names; {WAY_OUT}")  # fmt: skip


_MAX_DEPTH = 12
_LEGACY = ("language_model.", "word_embeddings_for_head.")
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")


class Stored(NamedTuple):
    """Location of a tensor."""

    record: TensorRecord
    shown: str  # the name in the file


class RankFile(NamedTuple):
    """The file model_optim_rng.pt of one rank."""

    rank: RankFolder
    file: TorchFile
    tree: dict[str, Any]


@dataclass
class ModelChunk:
    """One model chunk of a rank; a rank has several with virtual pipeline stages."""

    rank: RankFolder
    number: int
    prefix: str  # prefix of its tensors' names in the store
    tensors: dict[str, Stored] = field(default_factory=dict)  # by our names, in the order of the file

    def num_layers(self) -> int:
        numbers = {int(match[1]) for name in self.tensors if (match := _LAYER.match(name))}
        if numbers != set(range(len(numbers))):
            raise CheckpointError(f"{self.rank.path / MODEL} has the layers {sorted(numbers)[:20]}: some before them"
                                  " are missing")  # fmt: skip
        return len(numbers)


class RankFiles(Store):
    """Tensors of the ranks by name."""

    def __init__(self) -> None:
        super().__init__({}, self._checked)
        self.stored: dict[str, Stored] = {}
        #: compared before a tensor is read: a weight and its copy in fp32
        self.checks: dict[str, tuple[str, Stored]] = {}

    def add(self, name: str, stored: Stored) -> None:
        assert name not in self.stored
        self.stored[name] = stored

    def tensors(self) -> Mapping[str, TensorInfo]:
        described = {}
        for name, (record, shown) in self.stored.items():
            described[name] = TensorInfo(record.shape, require_dtype(record.dtype, shown))
        return described

    def _checked(self, name: str) -> Tensor:
        if name in self.checks:
            weight, main = self.checks[name]
            own, rounded = self.stored[weight].record.read(), main.record.read()
            if not bool((rounded.to(own.dtype) == own).logical_or(own != own).all()):
                raise CheckpointError(f"{main.record.file.path}: what should be the optimizer's copy of"
                                      f" {self.stored[weight].shown} is not that weight: it is in an order that is not"
                                      " known here, or of another step. Give --no-optimizer to convert the weights"
                                      " alone")  # fmt: skip
        return self.stored[name].record.read().contiguous()


@dataclass
class Opened:
    """All files of a checkpoint."""

    files: list[RankFile]
    args: dict[str, Any]  # arguments of rank 0; empty if there are none
    chunks: list[ModelChunk]
    tp: int  # numbers of ranks that the files are of
    pp: int
    ep: int  # ranks that share the experts
    is_legacy: bool  # the names are those of Megatron-LM before its core

    def shards(self) -> list[Shard]:
        """Return the layers of each chunk; virtual stages are interleaved over the ranks and may differ in number."""
        by_key = {(c.number, c.rank.pp_rank, c.rank.ep_rank, c.rank.tp_rank): c for c in self.chunks}
        rounds = 1 + max(chunk.number for chunk in self.chunks)
        stages = list(itertools.product(range(rounds), range(self.pp)))
        shards, first = [], 0
        for stage in stages:
            group = [by_key.get((*stage, ep, tp)) for ep in range(self.ep) for tp in range(self.tp)]
            counts = [chunk.num_layers() if chunk else None for chunk in group]
            if len(set(counts)) != 1 or counts[0] is None:
                shown = ", ".join(str("none" if count is None else count) for count in counts)
                raise CheckpointError(f"the tp ranks of stage {stage[1]} have {shown} layers: they must have the same"
                                      " ones")  # fmt: skip
            ends = stage == stages[0], stage == stages[-1]
            for chunk in group:
                assert chunk is not None
                shards.append(Shard(chunk.prefix, chunk.rank.tp_rank, first, counts[0], *ends, chunk.rank.ep_rank))
            first += counts[0]
        return shards


def open_ranks(folders: list[RankFolder]) -> Opened:
    """Open the files of all ranks without reading tensors."""
    files = []
    for rank in folders:
        opened = TorchFile(rank.path / MODEL)
        if not isinstance(opened.tree, dict):
            raise CheckpointError(f"{opened.path} holds a {type(opened.tree).__name__}, not the dict that Megatron"
                                  " writes")  # fmt: skip
        files.append(RankFile(rank, opened, opened.tree))
    args = attributes_of(files[0].tree.get("args"))
    ep, pp = args.get("expert_model_parallel_size"), args.get("pipeline_model_parallel_size")
    if isinstance(ep, int) and ep > 1 and not (isinstance(pp, int) and pp > 1):
        # without stages the second number of a folder's name is that of the share of the experts
        ranks = [rank if rank.ep_rank else rank._replace(pp_rank=0, ep_rank=rank.pp_rank) for rank, *_ in files]
        files = [file._replace(rank=rank) for file, rank in zip(files, ranks, strict=True)]
    for ep_rank in sorted({file.rank.ep_rank for file in files}):
        of_share = [f for f in files if f.rank.ep_rank == ep_rank]
        require_one_save({(f.rank.pp_rank, f.rank.tp_rank): Written.of(f.file.path, f.tree) for f in of_share})
    of_shares = [f for f in files if f.rank.pp_rank == f.rank.tp_rank == 0]
    require_one_save({(f.rank.ep_rank, 0): Written.of(f.file.path, f.tree) for f in of_shares})
    flat = []
    for file in files:
        tree, path = file.tree, file.file.path
        keys = ["model"] if "model" in tree else [f"model{i}" for i in range(len(tree)) if f"model{i}" in tree]
        if not keys:
            has = ", ".join(str(key)[:40] for key in list(tree)[:10])
            raise CheckpointError(f"{path} has no model in it, but {has or 'nothing'}: is it one of Megatron's?")
        for key in keys:
            if not isinstance(tree[key], dict):
                raise CheckpointError(f"{path}: the model must be a dict of tensors, found a"
                                      f" {type(tree[key]).__name__}")  # fmt: skip
            flat.append((file, key, flattened(path, tree[key])))
    stack = "encoder" if any("lm_head.dense.weight" in tensors for *_, tensors in flat) else "decoder"
    chunks = []
    for file, key, tensors in flat:
        prefix = f"{file.rank.path.name}/" + ("" if key == "model" else f"{key}/")
        chunk = ModelChunk(file.rank, int(key.removeprefix("model") or 0), prefix)
        for name, record in tensors.items():
            ours = canonical(name, stack)
            if ours in chunk.tensors:
                other = chunk.tensors[ours].shown.rsplit(":", 1)[-1]
                raise CheckpointError(f"{file.file.path}: {name[:200]} and {other} are the same parameter under two"
                                      " names")  # fmt: skip
            chunk.tensors[ours] = Stored(record, f"{prefix}:{name}")
        chunks.append(chunk)
    is_legacy = any(name.startswith(_LEGACY) for *_, tensors in flat for name in tensors)
    tp, pp, ep = (1 + max(getattr(file.rank, f"{axis}_rank") for file in files) for axis in ("tp", "pp", "ep"))
    return Opened(files, args, chunks, tp, pp, ep, is_legacy)


def flattened(path: Path, tree: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> dict[str, TensorRecord]:
    """Return the tensors in nested dicts by their names, joined with dots; what is no tensor is left out."""
    tensors: dict[str, TensorRecord] = {}
    for key, value in tree.items():
        name, inside = f"{prefix}{key}", dict[str, TensorRecord]()
        if isinstance(value, TensorRecord):
            inside = {name: value}
        elif isinstance(value, dict) and depth < _MAX_DEPTH:
            inside = flattened(path, value, f"{name}.", depth + 1)
        if twice := next(iter(inside.keys() & tensors.keys()), None):
            raise CheckpointError(f"{path} has two tensors that are called {twice[:200]}")
        tensors |= inside
    return tensors
