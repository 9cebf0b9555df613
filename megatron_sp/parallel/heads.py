"""Distribution of heads over sp ranks: the plan of a Ulysses exchange, in plain numbers (arXiv:2309.14509).

The query heads of a tp rank are distributed over P sp ranks in contiguous runs, ceil(n/P) on the first ranks; a rank
gets the key/value heads that its queries use, so these are sent unexpanded, and to several ranks if they share one.

    none        one chunk, one message
    split-qkv   one chunk, three messages: q, k, v (with context parallelism two in every mode: q, k and v)
    chunked     G chunks of the rank's query heads, one message each; if a group is split into several chunks, its first
                chunk carries the key and value for all of them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

OverlapMode = Literal["none", "split-qkv", "chunked"]
Part = Literal["qkv", "q", "k", "v", "kv"]
Run = tuple[int, int]


class Section(NamedTuple):
    """Heads of one kind, and the rows of the projection's weight that make each of them."""

    width: int  # rows of a head
    first_rows: tuple[int, ...]  # of each head

    def rows(self, heads: range) -> list[Run]:
        return [(self.first_rows[head], self.first_rows[head] + self.width) for head in heads]


class Sections(NamedTuple):
    """Heads that a projection makes on one tp rank; queries and keys are of one width, values may be of another."""

    q: Section
    k: Section
    v: Section

    @classmethod
    def in_groups(cls, queries_per_group: int, num_groups: int, width: int, v_width: int | None = None) -> Sections:
        """Return those of a weight in group order, rows [g, r * d + d + d_v]: queries, key, value of each group."""
        r, of_group = queries_per_group, (queries_per_group + 1) * width + (v_width or width)
        firsts = [group * of_group for group in range(num_groups)]
        queries = tuple(first + place * width for first in firsts for place in range(r))
        keys, values = (tuple(first + at * width for first in firsts) for at in (r, r + 1))
        return cls(Section(width, queries), Section(width, keys), Section(v_width or width, values))

    @property
    def queries_per_group(self) -> int:
        return len(self.q.first_rows) // len(self.k.first_rows)


@dataclass(frozen=True)
class Share:
    """Heads that one sp rank processes in one chunk, numbered within the tp rank."""

    queries: range  # query heads; may be empty
    keys: range  # key/value heads sent with this chunk
    uses: range  # key/value heads that its queries use; differs from ``keys`` if an earlier chunk carried them


@dataclass(frozen=True)
class Message:
    # one exchange of projected heads

    part: Part  # what it carries; "qkv" is all of the chunk, "kv" its keys and values, one pair after another
    # for each destination the rows of each of its heads, in the order in which they are sent
    heads: tuple[tuple[Run, ...], ...]

    # rows of the weight, for each destination and for all, one after another; every layer of every step asks for these

    @cached_property
    def of_rank(self) -> list[list[slice]]:
        return [_joined(heads) for heads in self.heads]

    @cached_property
    def rows(self) -> list[slice]:
        return _joined(tuple(run for heads in self.heads for run in heads))

    @cached_property
    def widths(self) -> list[int]:
        return [sum(stop - start for start, stop in heads) for heads in self.heads]

    @cached_property
    def stride(self) -> tuple[int, int, int] | None:
        if len(self.of_rank) < 2 or any(len(runs) != 1 for runs in self.of_rank):
            return None
        starts = [runs[0].start for runs in self.of_rank]
        steps = {b - a for a, b in pairwise(starts)}
        is_even = len(steps) == len(set(self.widths)) == 1 and min(steps) > 0
        return (starts[0], self.widths[0], steps.pop()) if is_even else None


class ChunkMessages(NamedTuple):
    # that bring a chunk's heads, and that take their gradients back

    heads: tuple[Message, ...]
    gradients: tuple[Message, ...]


@dataclass(frozen=True)
class HeadChunk:
    # A group split over several chunks has its key and value sent once, with the chunk that comes first: in forward
    # its first one, and where backward makes heads again, from the last chunk to the first, its last one. Their
    # gradients are complete after the group's first chunk, with which they go back
    shares: tuple[Share, ...]  # the shares of all ranks
    fresh: ChunkMessages  # heads are kept from the forward pass to the backward pass
    remade: ChunkMessages  # backward projects and sends them again


def deal(count: int, parts: int) -> list[range]:
    """Split range(count) into ``parts`` contiguous runs whose lengths differ by at most one, longer ones first."""
    least, longer = divmod(count, parts)
    starts = [i * least + min(i, longer) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def plan_heads(
    sections: Sections, sp_size: int, mode: OverlapMode, num_chunks: int = 1, *, pairs: bool = False
) -> list[HeadChunk]:
    """Return the plan for one tp rank's heads. Raises ValueError if there are fewer query heads than ranks.

    ``num_chunks`` is for "chunked", limited to a rank's query heads; with ``pairs`` keys and values have a message of
    their own, pair by pair, as context parallelism sends them on.
    """
    r, n = sections.queries_per_group, len(sections.q.first_rows)
    if n < sp_size:
        raise ValueError(f"{n} query heads cannot be dealt out to {sp_size} ranks")
    shares = [_cut(queries, r, num_chunks if mode == "chunked" else 1) for queries in deal(n, sp_size)]
    length = max(map(len, shares))
    nothing = Share(range(0), range(0), range(0))
    by_chunk = list(zip(*(of_rank + [nothing] * (length - len(of_rank)) for of_rank in shares), strict=True))
    parts: tuple[Part, ...] = ("q", "kv") if pairs else ("q", "k", "v") if mode == "split-qkv" else ("qkv",)
    splits_groups = any(share.keys != share.uses for of_all in by_chunk for share in of_all)
    chunks = []
    for index, of_all in enumerate(by_chunk):
        messages = _messages(sections, of_all, parts)
        remade = fresh = ChunkMessages(messages, messages)
        if splits_groups:  # queries apart: their gradients are complete earlier than those of the group's key and value
            # the last chunk of a rank that uses a group's key and value, all of them or none, carries them
            later = [{shares[rank].uses for shares in by_chunk[index + 1 :]} for rank in range(sp_size)]
            last = tuple(
                replace(s, keys=range(0) if s.uses in uses else s.uses) for s, uses in zip(of_all, later, strict=True)
            )
            remade = ChunkMessages(_messages(sections, last, ("q", "kv")), _messages(sections, of_all, ("q", "kv")))
        chunks.append(HeadChunk(of_all, fresh, remade))
    return chunks


def is_uniform(share: Share, queries_per_group: int) -> bool:
    """Return whether all key/value heads of a share serve equally many queries: heads are then in group order."""
    known: dict[int, bool] = share.__dict__.setdefault("_uniform", {})  # every layer of every step asks
    if queries_per_group not in known:
        places = key_of_each_query(share, queries_per_group)
        known[queries_per_group] = len({places.count(key) for key in range(len(share.uses))}) <= 1
    return known[queries_per_group]


def key_of_each_query(share: Share, queries_per_group: int) -> list[int]:
    """Return, for each query of the share, the index of its key/value head in ``share.uses``."""
    return [q // queries_per_group - share.uses.start for q in share.queries]


def _cut(queries: range, r: int, num_chunks: int) -> list[Share]:
    # split a rank's queries into chunks: of whole groups if there are enough groups, else of parts of a group
    keys = range(queries.start // r, (queries.stop - 1) // r + 1)
    groups = [range(max(queries.start, k * r), min(queries.stop, (k + 1) * r)) for k in keys]
    shares = []
    if num_chunks <= len(groups):
        for some in deal(len(groups), num_chunks):
            of_chunk = keys[some.start : some.stop]
            shares.append(Share(range(groups[some.start].start, groups[some.stop - 1].stop), of_chunk, of_chunk))
        return shares
    for key, group, of_group in zip(keys, groups, deal(num_chunks, len(groups)), strict=True):
        for index, places in enumerate(deal(len(group), min(len(of_group), len(group)))):
            heads = range(group.start + places.start, group.start + places.stop)
            shares.append(Share(heads, range(key, key + (index == 0)), range(key, key + 1)))
    return shares


def _messages(sections: Sections, shares: tuple[Share, ...], parts: tuple[Part, ...]) -> tuple[Message, ...]:
    messages = (Message(part, tuple(tuple(_rows(sections, share, part)) for share in shares)) for part in parts)
    return tuple(message for message in messages if any(message.heads))


def _rows(sections: Sections, share: Share, part: Part) -> list[Run]:
    queries, keys, values = sections.q.rows(share.queries), sections.k.rows(share.keys), sections.v.rows(share.keys)
    if part == "q":
        return queries
    if part == "k":
        return keys
    if part == "v":
        return values
    if part == "kv":
        return [row for pair in zip(keys, values, strict=True) for row in pair]
    if not share.keys or not is_uniform(share, sections.queries_per_group):
        return [*queries, *keys, *values]
    each, found = len(queries) // len(keys), list[Run]()
    for group, (key, value) in enumerate(zip(keys, values, strict=True)):
        found += [*queries[group * each : (group + 1) * each], key, value]
    return found


def _joined(runs: tuple[Run, ...]) -> list[slice]:
    joined: list[slice] = []
    for start, stop in runs:
        if joined and joined[-1].stop == start:
            joined[-1] = slice(joined[-1].start, stop)
        else:
            joined.append(slice(start, stop))
    return joined
