"""Exchange of small Python values as JSON, where torch uses pickle; one rank's failure raised on all.

``group=None`` is one process.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sp.comm.groups import Group, announced
from megatron_sp.utils.errors import ReportedError


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank. Collective."""
    encoded = _encode(value)
    if group is None:
        return [_decode(encoded)]
    if group.size() > 1:
        group = announced(group, "gather_json")
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([encoded.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: encoded.numel()] = encoded
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_decode(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None, src: int = 0) -> Any:
    """Return the value of the group's rank ``src`` on every rank. Collective."""
    if group is None:
        return _decode(_encode(value))
    if group.size() > 1:
        group = announced(group, f"broadcast_json from {src}")
    is_source = dist.get_rank(group) == src
    data = _encode(value) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, group=group, group_src=src)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=src)
    return _decode(data)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode("utf-8")), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


class RemoteError(ReportedError):
    """Another rank failed; its message and exit code."""


@contextmanager
def all_ranks_agree(group: Group) -> Iterator[None]:
    """Make a block fail on all ranks if it fails on any. Collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # reported to the other ranks first, raised again below
        failure = error
    report = None
    if isinstance(failure, ReportedError):
        report = str(failure), failure.exit_code
    elif failure is not None:
        report = "".join(traceback.format_exception(failure)), 1
    reports = gather_json(report, group)
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    # the lowest rank that failed speaks for all; a bug of ours keeps its type and traceback where it was raised
    if failure is not None and (failed[0] == group.rank() or not isinstance(failure, ReportedError)):
        raise failure
    message, exit_code = reports[failed[0]]
    remote = RemoteError(message)
    remote.exit_code = exit_code
    raise remote from failure
