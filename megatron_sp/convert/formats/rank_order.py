"""Check by the run's arguments in each file that files of ranks belong to the ranks in their names, and to one save.

Every process of Megatron writes its global rank into its file (``args.rank``). However ranks are mapped to tensor,
pipeline and data parallelism, the global rank increases along each of them, and so with the numbers in the names.
Settings of the model and counters are the same on all ranks; where stages have no weight in common, nothing else
distinguishes the files of two runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.convert.archive.torch_files import Object
from megatron_sp.utils.errors import CheckpointError

WAY_OUT = "files were renamed, or copied from another rank: copy them anew"
_COUNTERS = ("iteration", "global_steps", "global_samples", "skipped_steps")
_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_key_value_heads", "kv_channels",
    "seq_length", "max_position_embeddings", "padded_vocab_size", "make_vocab_size_divisible_by", "position_embedding_type",
    "rotary_base", "rope_theta", "rotary_percent", "norm_epsilon", "layernorm_epsilon", "swiglu", "add_bias_linear",
    "untie_embeddings_and_output_weights", "tensor_model_parallel_size", "pipeline_model_parallel_size", "consumed_train_samples", "seed",
)  # fmt: skip


class Written(NamedTuple):
    """Identification of a rank's file.

    Attributes:
        rank: global rank that wrote it; None: not stated.
        said: values that must be the same in all files, by name.
    """

    path: Path
    rank: int | None
    said: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path, tree: Mapping[Any, Any]) -> Written:
        """Extract the identification from the contents of a file."""
        args = tree.get("args")
        there = args.attributes if isinstance(args, Object) else {}
        said = {name: tree[name] for name in _COUNTERS if name in tree} | {name: there[name] for name in _ARGUMENTS if name in there}
        rank = there.get("rank")
        is_rank = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
        return cls(path, rank if is_rank else None, {k: v for k, v in said.items() if isinstance(v, int | float | str | None)})


def require_one_save(files: Mapping[tuple[int, int], Written]) -> None:
    """Refuse files of several runs or steps, and files that were written by other ranks than their names state.

    Args:
        files: files by two numbers in the name, such as stage and tensor parallel rank.
    Raises:
        CheckpointError: the message names two of the files.
    """
    first = next(iter(files.values()))
    for file in files.values():
        for name, value in first.said.items():
            other = file.said.get(name, value)
            if other != value and value == value:  # NaN differs from itself
                raise CheckpointError(f"{file.path}: {name} is {str(other)[:60]}, and {str(value)[:60]} in {first.path}: these are files of"
                                      " different checkpoints")  # fmt: skip
    _require_order(files)


def _require_order(files: Mapping[tuple[int, int], Written]) -> None:
    if len({file.rank for file in files.values()} - {None}) != len(files):
        return  # absent, or written by one process for all ranks, as conversion tools do
    for (a, b), file in files.items():
        for before in (files.get((a - 1, b)), files.get((a, b - 1))):
            if before is not None and (before.rank or 0) > (file.rank or 0):
                raise CheckpointError(f"{before.path} was written by the global rank {before.rank}, and {file.path} by {file.rank}: they"
                                      f" must be in the order of their names; {WAY_OUT}")  # fmt: skip
