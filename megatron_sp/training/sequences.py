"""Sequences that a rank reads: --balance-rows, and the check that ranks which share sequences read the same ones."""

# A cp rank plans by its own mask what others send to it. Ranks with different masks would wait for rows that nobody
# sends, or compute with the wrong ones; so would stages of a pipeline with different lengths or documents. So with
# several cp or pp ranks each step begins with a comparison of a few bytes on the host; the device is not waited for.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import Config
from megatron_sp.data.dataset import Dataset, RowDataset
from megatron_sp.parallel.forward_context import MicroBatch
from megatron_sp.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_sp.parallel.load_balancing import RowDealer

_ROWS_LOOKED_AT = 8  # for the warning of --balance-rows
_READ_BY_THE_HOST = ("documents", "length")
_NOBODY = -(2**62)


def require_same_sequences(micro_batches: Sequence[MicroBatch], groups: ParallelGroups) -> None:
    """Raise DataError on every rank if ranks of a replica have read different sequences. Collective."""
    if groups.cp.size() == groups.pp.size() == 1:
        return
    digest = hashlib.sha256()
    for batch in micro_batches:
        digest.update(str(tuple(batch["tokens"].shape)).encode())
        for name in _READ_BY_THE_HOST:
            digest.update(f"{name}: ".encode() + (batch[name].cpu().numpy().tobytes() if name in batch else b"none"))
    own_digest = int.from_bytes(digest.digest()[:7], "little")
    digests = torch.full((groups.dp_size, 2), _NOBODY, dtype=torch.int64)
    digests[groups.dp_rank] = torch.tensor([own_digest, -own_digest])  # largest, and smallest with another sign
    all_reduce(digests, groups.control, "max")
    differ = [i for i, (largest, smallest) in enumerate(digests.tolist()) if largest not in (-smallest, _NOBODY)]
    if differ:
        ranks, pipelined = groups.cp.size() * groups.sp.size() * groups.tp.size(), groups.pp.size() > 1
        firsts = [(stage * groups.dp_size + differ[0]) * ranks for stage in range(groups.pp.size())]
        which = ", ".join(f"{first} to {first + ranks - 1}" if ranks > 1 else f"{first}" for first in firsts)
        sizes = f"pp {groups.pp.size()} * " if pipelined else ""
        sizes += f"cp {groups.cp.size()} * sp {groups.sp.size()} * tp {groups.tp.size()}"
        raise DataError(
            f"ranks {which} ({sizes} = {groups.pp.size() * ranks}) share each sequence, and have read sequences of"
            " different lengths or documents: see that all hosts have the same data files and flags"
        )


def row_dealer(config: Config, dataset: Dataset, dp_size: int) -> RowDealer | None:
    """Return what deals the rows of ``dataset`` by their attention; None: by index. Raises ConfigError."""
    if not config.parallel.balance_rows:
        return None
    if not isinstance(dataset, RowDataset):
        raise ConfigError(
            "--balance-rows needs rows of packed documents whose lengths an index says, and this task's data have none:"
            " leave it out"
        )
    from megatron_sp.parallel.load_balancing import RowDealer

    model = config.model
    return RowDealer(
        dataset.document_lengths, config.batch.micro_batch_size, dp_size, not model.is_bert, model.window_size
    )


def warning_about_documents(config: Config, dataset: Dataset | None) -> str | None:
    """Return a warning if --balance-rows goes by other lengths than attention sees."""
    if not config.parallel.balance_rows or not isinstance(dataset, RowDataset):
        return None
    count = min(_ROWS_LOOKED_AT, len(dataset))
    wrong = 0
    for i in range(count):
        documents = dataset[i]["documents"]  # the number of each token's, int64 [s]
        starts = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
        lengths = np.diff(starts, append=documents.size)
        wrong += not np.array_equal(lengths, dataset.document_lengths(i))
    if not wrong:
        return None
    return (
        f"--balance-rows takes documents to end where those of the data files do, and in {wrong} of {count} rows looked"
        " at the tokens that end documents are elsewhere: the ranks' work may stay uneven. megatron-sp preprocess"
        " --append-eod puts one at each end"
    )
