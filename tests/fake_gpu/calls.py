"""What each rank calls of NCCL, and whether the calls of all ranks fit: without running the ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A collective, as one rank has called it.

    Attributes:
        ranks: of its communicator.
        name: operation.
        sizes: numbers of elements, equal on all ranks; of an all-to-all, what goes to each rank.
        received: of an all-to-all, what comes from each rank.
        dtype: of its tensors.
        where: place in the package.
        after: how many calls of other communicators must be complete on this rank before this one starts.
    """

    ranks: Ranks
    name: str
    sizes: tuple[int, ...]
    received: tuple[int, ...]
    dtype: str
    where: str
    after: tuple[tuple[Ranks, int], ...] = ()


def disagreements(calls: Sequence[Sequence[Call]], communicators: Sequence[Sequence[Ranks]]) -> list[str]:
    """Compare what all ranks call; return a line for each group whose ranks do not agree.

    Args:
        calls: of each rank of the job, in its order.
        communicators: of each rank, in the order in which it creates them.
    """
    groups = sorted({call.ranks for of_rank in calls for call in of_rank})
    found = [line for group in groups if (line := _first_difference(group, calls))]
    for one in groups:
        for other in groups:
            shared = [rank for rank in one if rank in other and {one, other} <= set(communicators[rank])]
            orders = {communicators[rank].index(one) < communicators[rank].index(other) for rank in shared}
            if one < other and len(orders) > 1:
                found.append(f"ranks {shared} create the communicators {list(one)} and {list(other)} in different orders")
    return found or _deadlock(calls)


def _first_difference(group: Ranks, calls: Sequence[Sequence[Call]]) -> str:
    lists = {rank: [call for call in calls[rank] if call.ranks == group] for rank in group}
    for i in range(max(len(own) for own in lists.values())):
        if line := _difference(group, {rank: own[i] if i < len(own) else None for rank, own in lists.items()}):
            return f"call {i} of ranks {list(group)}: {line}"
    return ""


def _difference(group: Ranks, calls: dict[int, Call | None]) -> str:
    there = {rank: call for rank, call in calls.items() if call is not None}
    first = next(iter(there.values()))
    if missing := [rank for rank, call in calls.items() if call is None]:
        return f"{first.name} at {first.where} is not called by ranks {missing}"
    if len({(call.name, call.dtype) for call in there.values()}) > 1:
        return "; ".join(f"rank {rank}: {call.name} of {call.dtype} at {call.where}" for rank, call in there.items())
    if first.name == "all_to_all":
        return _difference_of_counts(group, there)
    if len({call.sizes for call in there.values()}) > 1:
        return "; ".join(f"rank {rank}: {call.name} of {call.sizes} elements at {call.where}" for rank, call in there.items())
    return ""


def _difference_of_counts(group: Ranks, calls: dict[int, Call]) -> str:
    for i, source in enumerate(group):
        for j, target in enumerate(group):
            sent, expected = calls[source].sizes[j], calls[target].received[i]
            if sent != expected:
                where = calls[source].where
                return f"all_to_all at {where}: rank {source} sends {sent} elements to rank {target}, which expects {expected}"
    return ""


def _deadlock(calls: Sequence[Sequence[Call]]) -> list[str]:
    """A collective starts when all its ranks have come to it: on each, after what its stream waits for and after the one before it."""
    waits_for: dict[tuple[Ranks, int], set[tuple[Ranks, int]]] = {}
    places: dict[tuple[Ranks, int], str] = {}
    for of_rank in calls:
        numbers: dict[Ranks, int] = {}
        for call in of_rank:
            number = numbers[call.ranks] = numbers.get(call.ranks, 0) + 1
            node = (call.ranks, number)
            places[node] = f"{call.name} of ranks {list(call.ranks)} at {call.where}"
            earlier = waits_for.setdefault(node, set())
            if number > 1:
                earlier.add((call.ranks, number - 1))
            earlier.update((ranks, count) for ranks, count in call.after if count)
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        return ["these wait for each other: " + "; ".join(places[node] for node in error.args[1][:-1])]
    return []
