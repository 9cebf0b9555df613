"""The plan of a Ulysses exchange, over all small numbers of heads, groups, ranks, modes and chunks."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from megatron_sp.parallel.heads import HeadChunk, Message, Sections, deal, is_uniform, key_of_each_query, plan_heads

MODES: list[tuple[Any, int]] = [("none", 1), ("split-qkv", 1), *(("chunked", count) for count in (1, 2, 3, 5, 9))]
SIZES = [(r, g, sp) for r, g, sp in itertools.product((1, 2, 3, 7), (1, 2, 3, 8), (1, 2, 3, 4, 6, 8)) if r * g >= sp]


@cache
def plans() -> list[tuple[int, int, int, Any, int, list[HeadChunk]]]:
    return [
        (r, g, sp, mode, count, plan_heads(Sections.in_groups(r, g, 1), sp, mode, count)) for r, g, sp in SIZES for mode, count in MODES
    ]


def rows_of(messages: tuple[Message, ...], rank: int) -> list[int]:
    """Rows of a weight whose heads are one wide."""
    return [start for message in messages for start, _ in message.heads[rank]]


def heads_of(chunks: list[HeadChunk], rank: int) -> list[int]:
    return [q for chunk in chunks for q in chunk.shares[rank].queries]


def test_dealing_is_contiguous_and_the_first_get_more() -> None:
    for count, parts in itertools.product(range(12), range(1, 9)):
        dealt = deal(count, parts)
        assert [x for run in dealt for x in run] == list(range(count)) and len(dealt) == parts
        sizes = [len(run) for run in dealt]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_every_query_head_is_worked_on_exactly_once_in_order() -> None:
    for r, g, sp, _, _, chunks in plans():
        assert [q for rank in range(sp) for q in heads_of(chunks, rank)] == list(range(r * g))
        sizes = [len(heads_of(chunks, rank)) for rank in range(sp)]
        assert sizes == [len(run) for run in deal(r * g, sp)]


def test_every_rank_gets_the_keys_it_uses_once_and_before_it_uses_them() -> None:
    for r, _, sp, _, _, chunks in plans():
        for rank in range(sp):
            had: list[int] = []
            for chunk in chunks:
                share = chunk.shares[rank]
                had += share.keys
                assert sorted({q // r for q in share.queries}) == list(share.uses)
                assert set(share.uses) <= set(had), "a follower came before its leader"
                assert not share.keys or share.keys == share.uses, "a chunk brings either all keys it uses or none"
                assert share.keys or len(share.uses) <= 1, "a follower is part of one group"
                assert all(r_place in range(len(share.uses)) for r_place in key_of_each_query(share, r))
                assert [share.uses[i] for i in key_of_each_query(share, r)] == [q // r for q in share.queries]
            assert had == sorted({q // r for q in heads_of(chunks, rank)})


def test_heads_made_again_from_the_last_chunk_on_come_with_the_keys_that_they_use() -> None:
    for r, _, sp, _, _, chunks in plans():
        for rank in range(sp):
            had: set[int] = set()
            for chunk in reversed(chunks):
                rows = rows_of(chunk.remade.heads, rank)
                queries = [(q // r) * (r + 2) + q % r for q in chunk.shares[rank].queries]
                keys = {row // (r + 2) for row in rows if row % (r + 2) == r}
                assert sorted(row for row in rows if row % (r + 2) < r) == queries
                assert keys == {row // (r + 2) for row in rows if row % (r + 2) == r + 1} and not keys & had
                had |= keys
                assert set(chunk.shares[rank].uses) <= had, "queries came before their keys"
                back = rows_of(chunk.remade.gradients, rank)
                assert sorted(back) == sorted(rows_of(chunk.fresh.heads, rank))
            assert had == {q // r for q in heads_of(chunks, rank)}
        if all(share.keys == share.uses for chunk in chunks for share in chunk.shares):
            assert all(chunk.remade == chunk.fresh for chunk in chunks)
        else:
            assert all(message.part in ("q", "kv") for chunk in chunks for message in (*chunk.remade.heads, *chunk.remade.gradients))
        assert all(any(m.heads) for chunk in chunks for m in (*chunk.remade.heads, *chunk.remade.gradients)), (
            "a message that carries nothing"
        )


def test_messages_carry_the_rows_of_the_shares() -> None:
    for r, _, sp, mode, _, chunks in plans():
        for chunk in chunks:
            assert [m.part for m in chunk.fresh.heads] == (["q", "k", "v"] if mode == "split-qkv" else ["qkv"])
            assert all(len(m.heads) == sp for m in chunk.fresh.heads)
            for rank, share in enumerate(chunk.shares):
                queries = [(q // r) * (r + 2) + q % r for q in share.queries]
                keys, values = ([k * (r + 2) + r + i for k in share.keys] for i in (0, 1))
                if mode == "split-qkv":
                    assert [rows_of((m,), rank) for m in chunk.fresh.heads] == [queries, keys, values]
                    continue
                rows = rows_of(chunk.fresh.heads, rank)
                assert sorted(rows) == sorted([*queries, *keys, *values])
                if share.keys and is_uniform(share, r):
                    each = len(queries) // len(keys)
                    groups = [rows[i * (each + 2) : (i + 1) * (each + 2)] for i in range(len(keys))]
                    assert [(g[:-2], g[-2], g[-1]) for g in groups] == [
                        (queries[i * each : (i + 1) * each], keys[i], values[i]) for i in range(len(keys))
                    ]
                else:
                    assert rows == [*queries, *keys, *values]


def test_uniform_means_equally_many_queries_for_each_key() -> None:
    for r, _, sp, _, _, chunks in plans():
        for chunk in chunks:
            for rank in range(sp):
                share = chunk.shares[rank]
                served = {sum(q // r == k for q in share.queries) for k in share.uses}
                assert is_uniform(share, r) == (len(served) <= 1)


def test_where_groups_divide_evenly_the_fused_weight_is_sent_as_it_stands() -> None:
    for r, g, sp in SIZES:
        if g % sp == 0:
            (message,) = plan_heads(Sections.in_groups(r, g, 3, 5), sp, "none")[0].fresh.heads
            assert message.rows == [slice(0, g * (3 * r + 3 + 5))] and sum(message.widths) == message.rows[0].stop


def test_all_ranks_have_as_many_chunks_as_asked_for_where_there_are_heads_for_them() -> None:
    for r, g, sp, mode, count, chunks in plans():
        most = -(-r * g // sp)  # of the ranks' numbers of query heads
        assert len(chunks) == 1 if mode != "chunked" else len(chunks) <= min(count, most)
        assert all(len(chunk.shares) == sp for chunk in chunks)
        if mode == "chunked" and g == 1 and r % sp == 0:  # one group: its queries can be cut at will
            assert len(chunks) == min(count, r // sp)
        if mode == "chunked" and r == 1:
            assert len(chunks) == min(count, most)


@pytest.mark.parametrize(("r", "g", "sp"), [(1, 1, 2), (1, 3, 4), (3, 1, 4)])
def test_fewer_query_heads_than_ranks_is_an_error(r: int, g: int, sp: int) -> None:
    with pytest.raises(ValueError, match=f"{r * g} query heads cannot be dealt out to {sp} ranks"):
        plan_heads(Sections.in_groups(r, g, 1), sp, "none")


@pytest.mark.parametrize("rows", [(), (3,), (0, 1, 2), (2, 1, 0), (0, 1, 4, 5, 2, 3), (1, 1)])
def test_runs_name_the_same_rows_with_no_run_to_join(rows: tuple[int, ...]) -> None:
    runs = Message("q", (tuple((row, row + 1) for row in rows),)).rows
    assert [row for run in runs for row in range(run.start, run.stop)] == list(rows)
    assert all(a.stop != b.start for a, b in itertools.pairwise(runs))


def test_heads_of_two_widths_have_rows_of_their_own() -> None:
    """Two groups of three queries and a key two wide, and a value three wide: eleven rows each."""
    sections = Sections.in_groups(3, 2, 2, 3)
    assert sections.q.first_rows == (0, 2, 4, 11, 13, 15) and sections.queries_per_group == 3
    assert sections.k.rows(range(2)) == [(6, 8), (17, 19)] and sections.v.rows(range(2)) == [(8, 11), (19, 22)]
    q, k, v = plan_heads(sections, 2, "split-qkv")[0].fresh.heads
    assert (q.widths, k.widths, v.widths) == ([6, 6], [2, 2], [3, 3]) and v.of_rank == [[slice(8, 11)], [slice(19, 22)]]
    assert (q.stride, k.stride, v.stride) == ((0, 6, 11), (6, 2, 11), (8, 3, 11))
    (pairs,) = [m for m in plan_heads(sections, 1, "none", pairs=True)[0].fresh.heads if m.part == "kv"]
    assert pairs.rows == [slice(6, 11), slice(17, 22)]
