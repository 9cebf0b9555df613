"""One rank's trouble becomes everybody's, at once and in one message, instead of a hang.

Whatever may fail on some ranks only (a file missing on one host, a full disk) runs inside ``all_ranks_agree``. After it every
rank knows whether all succeeded; if not, all raise the same error, that of the lowest rank that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_sp.comm.collectives import all_reduce, broadcast
from megatron_sp.comm.groups import Group
from megatron_sp.utils import errors

_LIMIT = 8192  # bytes of a message that travel


class RemoteError(errors.ReportedError):
    """Another rank's failure, with its message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def all_ranks_agree(group: Group) -> Iterator[None]:
    """Run a block on all ranks of ``group`` (a CPU-capable one); if it fails on any, it fails on all.

    Raises:
        ReportedError: this rank's own, where it failed here; else a ``RemoteError`` that carries the message of the lowest rank that failed.
    """
    failure: errors.ReportedError | None = None
    try:
        yield
    except errors.ReportedError as error:
        failure = error
    size, rank = group.size(), group.rank()
    first = torch.tensor([rank if failure is not None else size])
    all_reduce(first, group, "min")
    culprit = int(first)
    if culprit == size:
        return
    payload = torch.zeros(_LIMIT + 2, dtype=torch.int64)
    if rank == culprit and failure is not None:
        text = str(failure).encode()[:_LIMIT]
        payload[0], payload[1] = failure.exit_code, len(text)
        payload[2 : 2 + len(text)] = torch.tensor(list(text), dtype=torch.int64)
    broadcast(payload, group, culprit)
    if failure is not None and rank == culprit:
        raise failure
    text = bytes(payload[2 : 2 + int(payload[1])].tolist()).decode(errors="replace")
    raise RemoteError(text, int(payload[0]))
