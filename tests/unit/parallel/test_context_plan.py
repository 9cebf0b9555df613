"""The plan of context parallelism, against a brute-force mask that knows nothing of runs, spans or pieces."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from megatron_sp.parallel.context_plan import ContextPlan, Piece, RowMask, cut_row, plan_context

Pair = tuple[int, int, int]  # sequence, position of the query, position of the key


def sees(sequence: int, q: int, k: int, causal: bool, window: int | None, documents: object, lengths: object) -> bool:
    """The mask, from its definition."""
    if documents is not None:
        ends = documents[sequence]  # type: ignore[index]
        if sum(end <= q for end in ends) != sum(end <= k for end in ends):
            return False
    if lengths is not None and k >= lengths[sequence]:  # type: ignore[index]
        return False
    return (not causal or k <= q) and (window is None or q - k < window)


def pairs_of(piece: Piece, q_positions: list[int], k_positions: list[int], window: int | None, distinct: int) -> Iterator[Pair]:
    """The pairs of a piece as a kernel would see them: by rows, with the shape that its kind means and no global position."""
    assert 0 <= piece.q_start < piece.q_stop <= len(q_positions) and 0 <= piece.k_start < piece.k_stop <= len(k_positions)
    rows, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
    for a, b in itertools.product(range(rows), range(keys)):
        if piece.kind == "diagonal":
            assert rows == keys
            seen = b <= a
        elif piece.kind == "band":
            assert window is not None
            seen = 0 <= piece.offset + a - b < window
        else:
            seen = True
        if seen:
            for sequence in range(distinct) if piece.sequence == -1 else [piece.sequence]:
                yield sequence, q_positions[piece.q_start + a], k_positions[piece.k_start + b]


def positions(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [p for start, stop in runs for p in range(start, stop)]


def check(plan: ContextPlan, given: RowMask, b: int, **mask: object) -> None:
    """Everything that is promised of a plan, for a mask as it was given."""
    s, c, window = given.length, plan.cp_size, mask["window"]
    allowed = {(n, q, k) for n in range(b) for q in range(s) for k in range(s) if sees(n, q, k, **mask)}  # type: ignore[arg-type]
    distinct = plan.mask.sequences
    assert distinct in (1, b) and plan.alike == (distinct == 1)
    assert sorted(p for i in range(c) for p in positions(plan.runs[i])) == list(range(s))
    assert plan.lengths == tuple(len(positions(runs)) for runs in plan.runs)
    found: Counter[Pair] = Counter()
    for i in range(c):
        mine = positions(plan.runs[i])
        assert mine == sorted(mine)
        areas = 0
        for j in range(c):
            rows, local, pieces = plan.rows(i, j), plan.local_rows(i, j), plan.pieces(i, j)
            assert len(rows) == len(local) == distinct
            theirs, used, full = positions(plan.runs[j]), [set[int]() for _ in range(distinct)], Counter[tuple[int, int]]()
            for n in range(distinct):
                assert positions(rows[n]) == sorted(set(positions(rows[n]))) == [theirs[row] for row in positions(local[n])]
                assert all(a[1] < b[0] for runs in (rows[n], local[n]) for a, b in itertools.pairwise(runs))
            for piece in pieces:
                n = max(piece.sequence, 0)
                assert (piece.sequence == -1) == plan.alike and n < distinct
                keys = mine if i == j else positions(rows[n])
                pairs = list(pairs_of(piece, mine, keys, window, b))  # type: ignore[arg-type]
                found.update(pairs)
                assert {q for _, q, _ in pairs} == set(mine[piece.q_start : piece.q_stop]), "a row without a key"
                assert {k for _, _, k in pairs} == set(keys[piece.k_start : piece.k_stop]), "a key without a query"
                used[n] |= {k for _, _, k in pairs}
                here = mine[piece.q_start : piece.q_stop], keys[piece.k_start : piece.k_stop]
                assert here[0][-1] - here[0][0] == len(here[0]) - 1, "queries of a piece are consecutive"
                if piece.kind == "full":
                    full.update((n, q) for q in here[0])
                else:
                    assert here[1][-1] - here[1][0] == len(here[1]) - 1, "keys of a diagonal or a band are consecutive"
                assert piece.offset == (here[0][0] - here[1][0] if piece.kind == "band" else 0)
                assert piece.kind != "diagonal" or here[0] == here[1]
                areas += len({pair for pair in pairs if pair[0] == (0 if piece.sequence == -1 else piece.sequence)})
            assert [set(positions(rows[n])) for n in range(distinct)] == used
            assert set(full.values()) <= {1}, "a query in two full pieces of a stage"
            places = [(n, p.q_start, p.k_start) for p in pieces for n in [p.sequence]]
            assert places == sorted(places), "the order of pieces"
            travelling = sum(map(len, used)) * (b if plan.alike else 1)
            assert plan.num_rows(i, j, b) == (0 if i == j else travelling)
        assert plan.area(i) == areas
    assert found == Counter(allowed)


def random_ends(chance: random.Random, s: int) -> tuple[int, ...]:
    return (*sorted(chance.sample(range(1, s), chance.randint(0, min(s - 1, chance.choice((2, 5, s)))))), s)


def masks(chance: random.Random, s: int) -> Iterator[tuple[int, dict[str, object]]]:
    """One mask of every sort for a row of s positions, with the number of sequences."""
    plain: dict[str, object] = {"causal": True, "window": None, "documents": None, "lengths": None}
    yield 2, plain
    yield 1, {**plain, "causal": False}
    yield 1, {**plain, "window": chance.randint(1, s + 2)}
    for b, causal in ((1, True), (2, False), (3, True)):
        documents = tuple(random_ends(chance, s) for _ in range(b))
        yield b, {**plain, "causal": causal, "documents": documents}
        yield b, {**plain, "causal": causal, "lengths": tuple(chance.choice((0, s, chance.randint(0, s + 1))) for _ in range(b))}
        if causal:
            yield b, {**plain, "documents": documents, "window": chance.randint(1, s)}
            yield b, {**plain, "lengths": tuple(chance.randint(0, s) for _ in range(b)), "window": chance.randint(1, s)}


def check_all(lengths: range | list[int], seed: int, rounds: int, chunks: tuple[int | None, ...]) -> None:
    chance = random.Random(seed)
    for s, c, k in itertools.product(lengths, range(1, 5), chunks):
        for _ in range(rounds):
            for b, mask in masks(chance, s):
                given = RowMask(s, **mask)  # type: ignore[arg-type]
                plan = plan_context(given, cut_row(given, c, k))
                check(plan, given, b, **mask)


def test_every_allowed_pair_is_in_one_piece_and_no_other_pair_is() -> None:
    check_all([1, 2, 3, 5, 8, 11], 0, 1, (None, 1, 2, 3))


@pytest.mark.long
@pytest.mark.parametrize("s", range(1, 25))
def test_every_allowed_pair_is_in_one_piece_for_every_length(s: int) -> None:
    check_all([s], s, 4, (None, 1, 2, 3, 4, 8))
