"""Failure of one rank raised on all ranks at once, with one message, instead of a hang.

Whatever may fail on some ranks only (a file missing on one host, a full disk) runs inside ``all_ranks_agree``. At its
end every rank learns whether all succeeded; if not, all raise the error of the lowest rank that failed. A bug of ours
(any other exception) is handled the same way: it keeps its type and traceback where it happened, and the others need
not wait for a timeout.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_sp.comm.groups import Group
from megatron_sp.comm.objects import gather_json
from megatron_sp.utils.errors import ReportedError


class RemoteError(ReportedError):
    """Failure of another rank, with its message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def all_ranks_agree(group: Group) -> Iterator[None]:
    """Context manager that makes a block fail on all ranks of ``group`` (which must support CPU tensors) if it fails on any. Collective.

    Raises:
        ReportedError: this rank's own error if it is the lowest rank that failed, else a ``RemoteError`` with that
            rank's message.
        Exception: an exception that is not a ReportedError keeps its type and traceback on the rank that raised it.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # reported to the other ranks first, raised again below
        failure = error
    reports = gather_json(None if failure is None else _describe(failure), group)
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    if failure is not None and (failed[0] == group.rank() or not isinstance(failure, ReportedError)):
        raise failure
    message, exit_code = reports[failed[0]]
    raise RemoteError(message, exit_code) from failure


def _describe(error: Exception) -> tuple[str, int]:
    if isinstance(error, ReportedError):
        return str(error), error.exit_code
    return "".join(traceback.format_exception(error)), 1
