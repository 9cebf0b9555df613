"""Distribution of heads over sp ranks: the plan of a Ulysses exchange, in plain numbers.

A tp rank's fused QKV weight has one row block for each head, in group order (r queries, key, value, for each of g
key/value groups). Its n query heads are distributed over P sp ranks in contiguous runs, ceil(n/P) on the first ranks; a
rank gets the key/value heads that its queries use, so these are sent unexpanded, and to several ranks if they share one
(arXiv:2309.14509).

A plan is a list of chunks, which pass through projection, exchange, attention and the exchange back one after another,
and for each chunk the messages that carry its q, k and v:

    none        one chunk, one message
    split-qkv   one chunk, three messages: q, k, v (with context parallelism two in every mode: q, k and v)
    chunked     G chunks of the rank's query heads, one message each; if a group is split into several chunks, its first chunk
                carries the key and value for all of them
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

OverlapMode = Literal["none", "split-qkv", "chunked"]
Part = Literal["qkv", "q", "k", "v", "kv"]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Share:
    """Heads that one sp rank processes in one chunk, numbered within the tp rank."""

    queries: range  # query heads; may be empty
    keys: range  # key/value heads sent with this chunk
    uses: range  # key/value heads that its queries use; differs from ``keys`` if an earlier chunk carried them


@dataclass(frozen=True)
class Message:
    """One exchange of projected heads."""

    part: Part  # what it carries; "qkv" is all of the chunk, "kv" its keys and values, one pair after another
    # for each destination, head rows of the fused weight in the order in which they are sent
    rows: tuple[tuple[int, ...], ...]

    def table(self, head_dim: int) -> MessageTable:
        """Return the message in rows and columns of tensors; made once."""
        tables: dict[int, MessageTable] = self.__dict__.setdefault("_tables", {})
        if head_dim not in tables:
            of_rank = [_slices(heads, head_dim) for heads in self.rows]
            every = _slices(tuple(head for heads in self.rows for head in heads), head_dim)
            tables[head_dim] = MessageTable(
                every, of_rank, [len(heads) * head_dim for heads in self.rows], _equally_far_apart(of_rank)
            )
        return tables[head_dim]


class MessageTable(NamedTuple):
    """A message in rows and columns of tensors."""

    rows: list[slice]  # rows of the weight, for all destinations one after another
    of_rank: list[list[slice]]
    widths: list[int]
    # of two or more ranks with one run each, equally long and far apart: (first row, rows of a run, from run to run);
    # else None
    apart: tuple[int, int, int] | None


@dataclass(frozen=True)
class HeadChunk:
    """One chunk of the pipeline."""

    shares: tuple[Share, ...]  # the shares of all ranks
    messages: tuple[Message, ...]
    # the messages where backward makes them again, from the last chunk to the first: the group's *last* chunk then
    # carries its key and value
    again: tuple[Message, ...] = ()
    # the messages of their gradients in that case; those of a group's key and value go with its first chunk
    back: tuple[Message, ...] = ()


def deal(count: int, parts: int) -> list[range]:
    """Split range(count) into ``parts`` contiguous runs whose lengths differ by at most one, longer ones first."""
    least, longer = divmod(count, parts)
    starts = [i * least + min(i, longer) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def plan_heads(
    queries_per_group: int, num_groups: int, sp_size: int, mode: OverlapMode, num_chunks: int = 1, *, pairs: bool = False
) -> list[HeadChunk]:  # fmt: skip
    """Return the plan for one tp rank's heads.

    Args:
        num_groups: g, key/value heads of the tp rank.
        mode: how exchanges are split.
        num_chunks: G, for "chunked"; limited to a rank's number of query heads.
        pairs: keys and values have a message of their own, pair by pair: what arrives is what context parallelism sends
            on.
    Raises:
        ValueError: there are fewer query heads than ranks.
    """
    r, n = queries_per_group, queries_per_group * num_groups
    if n < sp_size:
        raise ValueError(f"{n} query heads cannot be dealt out to {sp_size} ranks")
    per_rank = deal(n, sp_size)
    shares = [_cut(mine, r, num_chunks if mode == "chunked" else 1) for mine in per_rank]
    length = max(len(s) for s in shares)
    nothing = Share(range(0), range(0), range(0))
    shares = [s + [nothing] * (length - len(s)) for s in shares]
    parts: tuple[Part, ...] = ("q", "kv") if pairs else ("q", "k", "v") if mode == "split-qkv" else ("qkv",)
    last = [[_not_used_later(s, index) for index in range(length)] for s in shares]
    splits_groups = any(share.keys != share.uses for s in shares for share in s)
    chunks = []
    for index in range(length):
        of_all = tuple(s[index] for s in shares)
        messages = again = back = _messages(of_all, parts, r)
        if splits_groups:
            back = _messages(of_all, ("q", "kv"), r)
            again = _messages(
                tuple(replace(s[index], keys=keys[index]) for s, keys in zip(shares, last, strict=True)), ("q", "kv"), r
            )
        chunks.append(HeadChunk(of_all, messages, again, back))
    return chunks


def _messages(shares: tuple[Share, ...], parts: tuple[Part, ...], r: int) -> tuple[Message, ...]:
    made = (Message(part, tuple(_rows(share, part, r) for share in shares)) for part in parts)
    return tuple(message for message in made if any(message.rows))


def _not_used_later(shares: list[Share], index: int) -> range:
    # the key/value heads that a rank's chunk uses for the last time: all, or none
    uses = shares[index].uses
    return range(0) if any(uses == later.uses for later in shares[index + 1 :]) else uses


def is_uniform(share: Share, queries_per_group: int) -> bool:
    """Return whether all key/value heads that the share uses serve equally many of its queries, so that rows are in group order."""
    known: dict[int, bool] = share.__dict__.setdefault("_uniform", {})  # every layer of every step asks
    if queries_per_group not in known:
        known[queries_per_group] = len(set(_queries_of(share, queries_per_group))) <= 1
    return known[queries_per_group]


def key_of_each_query(share: Share, queries_per_group: int) -> list[int]:
    """Return, for each query of the share, the index of its key/value head in ``share.uses``."""
    return [q // queries_per_group - share.uses.start for q in share.queries]


def _cut(queries: range, r: int, num_chunks: int) -> list[Share]:
    # split a rank's queries into chunks: of whole groups if there are enough groups, else of parts of a group
    keys = range(queries.start // r, (queries.stop - 1) // r + 1)
    groups = [range(max(queries.start, k * r), min(queries.stop, (k + 1) * r)) for k in keys]
    if num_chunks <= len(groups):
        made = []
        for some in deal(len(groups), num_chunks):
            mine = keys[some.start : some.stop]
            made.append(Share(range(groups[some.start].start, groups[some.stop - 1].stop), mine, mine))
        return made
    made = []
    for key, group, pieces in zip(keys, groups, (len(p) for p in deal(num_chunks, len(groups))), strict=True):
        for index, part in enumerate(deal(len(group), min(pieces, len(group)))):
            mine = range(key, key + 1)
            heads = range(group.start + part.start, group.start + part.stop)
            made.append(Share(heads, mine if index == 0 else range(0), mine))
    return made


def _queries_of(share: Share, r: int) -> list[int]:
    # how many of the share's queries each key/value head in ``share.uses`` serves
    counts = [0] * len(share.uses)
    for place in key_of_each_query(share, r):
        counts[place] += 1
    return counts


def _rows(share: Share, part: str, r: int) -> tuple[int, ...]:
    queries = [(q // r) * (r + 2) + q % r for q in share.queries]
    keys = [k * (r + 2) + r for k in share.keys]
    values = [k * (r + 2) + r + 1 for k in share.keys]
    if part == "q":
        return tuple(queries)
    if part == "k":
        return tuple(keys)
    if part == "v":
        return tuple(values)
    if part == "kv":
        return tuple(row for pair in zip(keys, values, strict=True) for row in pair)
    if not share.keys or not is_uniform(share, r):
        return (*queries, *keys, *values)
    each = len(queries) // len(keys)
    in_groups = [[*queries[i * each : (i + 1) * each], k, v] for i, (k, v) in enumerate(zip(keys, values, strict=True))]
    return tuple(row for group in in_groups for row in group)


def _slices(heads: tuple[int, ...], head_dim: int) -> list[slice]:
    return [slice(run.start * head_dim, run.stop * head_dim) for run in runs_of(heads)]


def _equally_far_apart(of_rank: list[list[slice]]) -> tuple[int, int, int] | None:
    if len(of_rank) < 2 or any(len(runs) != 1 for runs in of_rank):
        return None
    starts, widths = [runs[0].start for runs in of_rank], {runs[0].stop - runs[0].start for runs in of_rank}
    steps = {b - a for a, b in pairwise(starts)}
    return (starts[0], widths.pop(), steps.pop()) if len(steps) == len(widths) == 1 and min(steps) > 0 else None


def runs_of(rows: tuple[int, ...]) -> Slices:
    made: list[slice] = []
    for row in rows:
        if made and made[-1].stop == row:
            made[-1] = slice(made[-1].start, row + 1)
        else:
            made.append(slice(row, row + 1))
    return tuple(made)
