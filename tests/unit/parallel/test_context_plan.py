"""The plan of context parallelism, against a brute-force mask that knows nothing of runs, spans or pieces."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.heads import deal
from megatron_sp.parallel.row_mask import RowMask, Run, Runs, merge_runs
from megatron_sp.parallel.sequence_slices import cut_into_slices

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


def positions(runs: Runs) -> list[int]:
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
                if piece.kind == "full":
                    full.update((n, q) for q in here[0])
                elif piece.kind == "band":
                    assert here[1][-1] - here[1][0] == len(here[1]) - 1, "keys of a band are consecutive"
                if piece.kind != "diagonal" or plan.mask.window is not None:
                    assert here[0][-1] - here[0][0] == len(here[0]) - 1, "queries of a piece are consecutive"
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
        plan.require_all_pairs(i)
    assert found == Counter(allowed)


def check_slices(given: RowMask, slices: tuple[Run, ...], c: int, k: int | None, b: int, **mask: object) -> None:
    """The plans of all slices of a row have all its pairs, and each has what a slice needs."""
    s, window = given.length, mask["window"]
    allowed = {(n, q, key) for n in range(b) for q in range(s) for key in range(s) if sees(n, q, key, **mask)}  # type: ignore[arg-type]
    found: Counter[Pair] = Counter()
    so_far: list[Runs] = [()] * c
    for part in slices:
        runs = cut_row(given, c, k, part)
        assert sorted(p for share in runs for p in positions(share)) == list(range(*part))
        so_far = [merge_runs((*before, *share)) for before, share in zip(so_far, runs, strict=True)]
        plan = plan_context(given, runs, tuple(so_far))
        for i, j in itertools.product(range(c), range(c)):
            mine, theirs, used = positions(plan.runs[i]), positions(plan.keys[j]), [set[int]() for _ in range(plan.mask.sequences)]
            for piece in plan.pieces(i, j):
                keys = theirs if i == j else positions(plan.rows(i, j)[max(piece.sequence, 0)])
                pairs = list(pairs_of(piece, mine, keys, window, b))  # type: ignore[arg-type]
                found.update(pairs)
                used[max(piece.sequence, 0)] |= {key for _, _, key in pairs}
            assert [set(positions(rows)) for rows in plan.rows(i, j)] == used
            assert [[theirs[row] for row in positions(rows)] for rows in plan.local_rows(i, j)] == [sorted(keys) for keys in used]
        for i in range(c):
            assert plan.num_received(i, b) == sum(plan.num_rows(i, j, b) for j in range(c))
            plan.require_all_pairs(i)
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


@pytest.mark.parametrize("s", [2, 3, 7, pytest.param(11, marks=pytest.mark.long)])
def test_slices_of_a_row_have_all_its_pairs(s: int) -> None:
    chance = random.Random(s)
    for c, k, n in itertools.product((1, 2, 3), (None, 1, 2), (1, 2, 3, 5)):
        for b, mask in masks(chance, s):
            if mask["causal"] and n <= s:
                ends = [0, *sorted(chance.sample(range(1, s), n - 1)), s]
                given = RowMask(s, **mask)  # type: ignore[arg-type]
                for slices in (tuple(itertools.pairwise(ends)), cut_into_slices(given, n, chance.choice((0.0, 2.0, 100.0)))):
                    check_slices(given, slices, c, k, b, **mask)


def test_slices_take_the_same_time() -> None:
    for documents in (None, (tuple(range(64, 1025, 64)),), ((512, 1024),)):
        mask = RowMask(1024, documents=documents)
        for n, cost in itertools.product((2, 3, 4, 8), (0.0, 100.0, 1e6)):
            plans = [plan_context(mask, (((a, b),),), (((0, b),),)) for a, b in cut_into_slices(mask, n, cost)]
            times = [plan.area(0) + cost * plan.lengths[0] for plan in plans]
            assert max(times) - min(times) <= 2 * (1024 + cost), "to a position at each end"
    assert cut_into_slices(RowMask(1024), 4, 0.0) == ((0, 512), (512, 724), (724, 887), (887, 1024))
    assert cut_into_slices(RowMask(8), 4, 1e9) == ((0, 2), (2, 4), (4, 6), (6, 8))
    for n, mask in ((0, RowMask(8)), (9, RowMask(8)), (2, RowMask(8, causal=False))):
        with pytest.raises(ValueError, match=r"cannot be cut into|see keys of later slices"):
            cut_into_slices(mask, n, 1.0)


def test_every_allowed_pair_is_in_one_piece_and_no_other_pair_is() -> None:
    check_all([1, 2, 5, 11], 0, 1, (None, 1, 2, 3))


@pytest.mark.long
@pytest.mark.parametrize("s", range(1, 25))
def test_every_allowed_pair_is_in_one_piece_for_every_length(s: int) -> None:
    check_all([s], s, 3, (None, 1, 2, 3, 5, 8))


@pytest.mark.parametrize("s", [7, 13, 18, pytest.param(24, marks=pytest.mark.long), pytest.param(31, marks=pytest.mark.long)])
def test_every_allowed_pair_is_in_one_piece_however_the_row_is_cut(s: int) -> None:
    """Positions dealt at random, in runs of any length: a plan does not depend on chunks."""
    chance = random.Random(s)
    for c in (2, 3, 4):
        for b, mask in masks(chance, s):
            owners = [chance.randrange(c)]
            while len(owners) < s:
                owners.append(owners[-1] if chance.random() < 0.6 else chance.randrange(c))
            runs: list[list[tuple[int, int]]] = [[] for _ in range(c)]
            for owner, group in itertools.groupby(range(s), key=owners.__getitem__):
                of_run = list(group)
                runs[owner].append((of_run[0], of_run[-1] + 1))
            given = RowMask(s, **mask)  # type: ignore[arg-type]
            check(plan_context(given, tuple(map(tuple, runs))), given, b, **mask)


def test_windows_that_end_in_several_runs_and_at_their_edges() -> None:
    runs = (((2, 4), (6, 12)), ((0, 2), (4, 6)))
    for window in range(1, 12):
        mask = RowMask(12, window=window)
        check(plan_context(mask, runs), mask, 1, causal=True, window=window, documents=None, lengths=None)
    # of the queries 6 to 11, the last sees back to 12 - window: all keys, but the first run, not even all of the second
    for window, kinds in ((11, ["full", "band", "full"]), (8, ["full", "band", "full"]), (7, ["full", "band", "band"])):
        assert [piece.kind for piece in plan_context(RowMask(12, window=window), runs).pieces(0, 1)] == kinds
    edge = (((0, 3), (5, 8)), ((3, 5),))
    assert [plan_context(RowMask(8, window=w), edge).pieces(0, 1)[0].kind for w in (4, 5, 6)] == ["band", "full", "full"]


# ---- how the row is cut


def test_a_causal_row_is_dealt_as_a_zigzag() -> None:
    for c in range(2, 9):
        for s in (2 * c, 64 * c, 1000):
            chunks = deal(s, 2 * c)
            expected = [sorted((chunks[i], chunks[2 * c - 1 - i]), key=lambda r: r.start) for i in range(c)]
            for chosen in (None, 2):
                runs = cut_row(RowMask(s), c, chosen)
                assert [positions(share) for share in runs] == [[p for chunk in pair for p in chunk] for pair in expected], (c, s, chosen)


def test_what_is_even_or_near_is_cut_contiguously() -> None:
    masks = [RowMask(1 << 16, causal=False), RowMask(1 << 13, causal=False, lengths=(100, 8000, 8192, 0)), RowMask(1000, causal=False)]
    masks += [RowMask(1 << 16, window=window) for window in (1024, 4096, 1 << 14)]
    for mask, c in itertools.product(masks, (1, 2, 3, 4, 8, 32)):
        assert cut_row(mask, c) == tuple(((chunk.start, chunk.stop),) for chunk in deal(mask.length, c))


@pytest.mark.parametrize("k", [None, 1, 2, 3, 4, 8])
def test_shares_are_even_and_empty_only_in_rows_shorter_than_the_ranks(k: int | None) -> None:
    chance = random.Random(2)
    for s, c in itertools.product((1, 2, 3, 5, 6, 7, 11, 16, 23, 29), range(1, 8)):
        for mask in (RowMask(s), RowMask(s, documents=(random_ends(chance, s),)), RowMask(s, lengths=(chance.randint(0, s),))):
            lengths = plan_context(mask, cut_row(mask, c, k)).lengths
            assert sum(lengths) == s and max(lengths) - min(lengths) <= (k or 16)
            assert (min(lengths) == 0) == (s < c), (mask, c)


def log_normal_ends(chance: random.Random, s: int, median: float) -> tuple[int, ...]:
    ends = [0]
    while ends[-1] < s:
        ends.append(min(s, ends[-1] + max(16, min(int(median * chance.lognormvariate(0, 1.3)), s // 4))))
    return tuple(ends[1:])


def test_documents_are_dealt_evenly_and_kept_together() -> None:
    """Balance within 2 % with 8 chunks, and on average 60 % of the rows that dealing by area alone sends."""
    chance = random.Random(0)
    shares = []
    for s, c, b, causal, window in ((1 << 16, 4, 1, True, None), (1 << 16, 8, 1, True, None), (1 << 16, 8, 3, True, None),
                                    (1 << 16, 8, 1, False, None), (1 << 16, 8, 1, True, 4096)):  # fmt: skip
        for _ in range(3):
            mask = RowMask(s, causal, window, tuple(log_normal_ends(chance, s, 1500) for _ in range(b)))
            plan, scattered = (plan_context(mask, runs) for runs in (cut_row(mask, c, 8), by_area_alone(mask, c, 8)))
            assert plan.balance <= 1.02, (mask, plan.balance)
            assert plan.ring_share < scattered.ring_share
            shares.append(plan.ring_share / scattered.ring_share)
    assert sum(shares) / len(shares) < 0.6


def by_area_alone(mask: RowMask, c: int, k: int) -> tuple[Runs, ...]:
    """The longest-processing-time rule and nothing else."""
    alone = plan_context(mask, tuple(((chunk.start, chunk.stop),) for chunk in deal(mask.length, c * k)))
    found: list[tuple[int, list[int]]] = [(0, []) for _ in range(c)]
    for chunk in sorted(range(c * k), key=lambda chunk: -alone.area(chunk)):
        rank = min((rank for rank in range(c) if len(found[rank][1]) < k), key=lambda rank: found[rank][0])
        found[rank] = found[rank][0] + alone.area(chunk), [*found[rank][1], chunk]
    return tuple(merge_runs(alone.runs[chunk][0] for chunk in chunks) for _, chunks in found)


def chunks_chosen(mask: RowMask, c: int) -> list[int]:
    """Numbers of chunks with which the row is cut as it is without one."""
    return [k for k in (1, 2, 4, 8, 16) if cut_row(mask, c, k) == cut_row(mask, c)]


def test_the_number_of_chunks_is_the_fewest_with_which_nobody_waits() -> None:
    """Against the definition, by pairs and rows of the plan."""
    chance = random.Random(4)
    chosen = Counter[int]()
    masks = [RowMask(s, window=window) for s in (1 << 14, 1 << 16) for window in (None, 3 << 13)]
    masks += [RowMask(s, documents=(log_normal_ends(chance, s, median),)) for s in (1 << 14, 1 << 18) for median in (300, 2000)]
    masks += [RowMask(s, documents=(random_ends(chance, s),)) for s in range(5, 40)]
    masks.append(RowMask(1 << 18, documents=(log_normal_ends(random.Random(28), 1 << 18, 2000),)))  # 16 chunks for two ranks
    for mask, c in itertools.product(masks, (2, 4, 8)):
        times, largest = {}, {}
        for k in (1, 2, 4, 8, 16) if mask.documents else (1, 2, 4, 8):
            if c * k > max(c, mask.length):
                continue
            plan = plan_context(mask, cut_row(mask, c, k))
            received = [sum(plan.num_rows(i, j, mask.sequences) for j in range(c)) for i in range(c)]
            times[k] = max(max(plan.area(i), 1024 * received[i]) for i in range(c))
            largest[k] = max(plan.area(i) for i in range(c))
        mean = sum(plan.area(i) for i in range(c)) / c
        fast = [k for k in times if times[k] <= 1.02 * min(times.values())]
        even = [k for k in fast if largest[k] <= min(largest[k] for k in fast) + 0.02 * mean]
        expected = min([k for k in times if times[k] <= 1.02 * mean] or even)
        assert expected in chunks_chosen(mask, c), (mask, c, times)
        chosen[expected] += 1
    assert set(chosen) == {1, 2, 4, 8, 16}


def test_many_ranks_get_fewer_chunks_each() -> None:
    """512 in all, so that dealing stays a matter of milliseconds."""
    mask = RowMask(1 << 20, documents=(log_normal_ends(random.Random(0), 1 << 20, 60000),))
    balance = {k: plan_context(mask, cut_row(mask, 128, k)).balance for k in (4, 8)}
    assert cut_row(mask, 128) == cut_row(mask, 128, 4) and balance[8] < balance[4] - 0.05


def test_all_sequences_of_a_micro_batch_are_cut_alike_by_the_sum_of_their_areas() -> None:
    a, b = (512, *range(520, 1025, 8)), (*range(8, 512, 8), 512, 1024)  # one has its pairs in the first half, the other in the second
    of_each = [cut_row(RowMask(1024, documents=(ends,)), 2, 2) for ends in (a, b)]
    together = RowMask(1024, documents=(a, b))
    runs = cut_row(together, 2, 2)
    plan = plan_context(together, runs)
    assert runs not in of_each and plan.balance <= 1.02
    assert plan.area(0) == sum(plan_context(RowMask(1024, documents=(ends,)), runs).area(0) for ends in (a, b))


# ---- what travels


def test_a_zigzag_sends_what_causal_attention_needs() -> None:
    """All of L_j to ranks before j, whose last chunks come later, in one run; the first chunk alone to ranks after it."""
    mask = RowMask(48)
    plan = plan_context(mask, cut_row(mask, 4))
    for i, j in itertools.permutations(range(4), 2):
        assert plan.local_rows(i, j) == (((0, 12 if j > i else 6),),)
        parts = 1 if j > i or i == 3 else 2  # rank 3's two chunks are one run
        assert [piece.kind for piece in plan.pieces(i, j)] == ["full"] * parts
    assert [sum(plan.rows_received(i, 5)) for i in range(4)] == [5 * n for n in (36, 30, 24, 18)]
    assert plan.rows_sent(0, 1) == (6, 6, 6) and plan.rows_sent(3, 1) == (12, 12, 12) and plan.rows_sent(1, 1) == (6, 6, 12)
    assert plan.rows_received(1, 1) == (6, 12, 12)  # of ranks 0, 3, 2
    assert plan.ring_share == 0.75 and plan.worst_ring_share == 1.0


@pytest.mark.parametrize("mask", [RowMask(12), RowMask(12, window=5), RowMask(12, causal=False), RowMask(12, documents=((5, 12),))])
def test_a_plan_that_leaves_pairs_out_is_refused(mask: RowMask) -> None:
    """However it came to that, a rank never attends to its own positions alone without a word."""
    for lost in ((1, 0), (1, 1)):
        plan = ContextPlan(mask, cut_row(mask, 2, 1))
        assert plan.pieces(*lost), "there is something to lose"
        plan._pieces[lost] = plan.pieces(*lost)[1:]
        plan.require_all_pairs(0)
        words = rf"has \d+ pairs of queries and keys for cp rank 1 of 2, and the mask allows {plan.area(1)}"
        with pytest.raises(RuntimeError, match=words):
            plan.require_all_pairs(1)


def test_a_window_sends_the_rows_before_each_run_and_nothing_else() -> None:
    mask = RowMask(80, window=7)
    plan = plan_context(mask, cut_row(mask, 4, 1))
    for i, j in itertools.permutations(range(4), 2):
        assert plan.rows(i, j) == ((((20 * i - 6, 20 * i),) if j == i - 1 else ()),)
    assert plan.ring_share == pytest.approx(6 * 3 / (3 * 80)) and plan.worst_ring_share == pytest.approx(6 / 60)
    assert plan.pieces(2, 1) == (Piece(-1, 0, 6, 0, 6, "band", 6),)
    assert plan.pieces(2, 2) == (Piece(-1, 0, 20, 0, 20, "band", 0),)
    assert plan_context(RowMask(80, window=20), cut_row(mask, 4, 1)).pieces(2, 2) == (Piece(-1, 0, 20, 0, 20, "diagonal", 0),)


def test_a_full_piece_takes_several_chunks_of_the_message() -> None:
    runs = (((4, 6), (10, 12)), ((0, 4), (6, 10)))
    plan = plan_context(RowMask(12), runs)
    assert plan.rows(0, 1) == (((0, 4), (6, 10)),) and plan.local_rows(0, 1) == (((0, 8),),)
    assert plan.pieces(0, 1) == (Piece(-1, 0, 2, 0, 4, "full", 0), Piece(-1, 2, 4, 0, 8, "full", 0))


def test_closed_form_of_the_rows_received() -> None:
    chance = random.Random(6)
    for s, c, k in itertools.product((5, 24, 40), (1, 2, 3, 4), (None, 1, 3)):
        for b, mask in masks(chance, s):
            plan = plan_context(given := RowMask(s, **mask), cut_row(given, c, k))  # type: ignore[arg-type]
            received = [sum(plan.rows_received(i, b)) for i in range(c)]
            assert [plan.num_received(i, b) for i in range(c)] == received
            assert sum(received) == sum(sum(plan.rows_sent(i, b)) for i in range(c))
            ring = b * s * (c - 1)
            assert plan.ring_share == pytest.approx(sum(received) / ring if ring else 0)
            assert plan.worst_ring_share == pytest.approx(c * max(received) / ring if ring else 0)


def test_a_million_tokens_take_no_list_of_positions() -> None:
    """Closed forms: the same as a sum over documents, at a length where nothing can be enumerated."""
    s, c = 1 << 20, 8
    ends = tuple(range(1000, s, 1000)) + (s,)
    mask = RowMask(s, documents=(ends,))
    plan = plan_context(mask, cut_row(mask, c))
    sizes = [b - a for a, b in zip((0, *ends), ends, strict=False)]
    assert sum(plan.area(i) for i in range(c)) == sum(n * (n + 1) // 2 for n in sizes)
    assert plan.balance <= 1.02 and plan.ring_share < 0.01
    for i in range(c):
        plan.require_all_pairs(i)


# ---- masks and runs


def test_masks_that_mean_the_same_are_equal() -> None:
    assert merge_runs([(4, 6), (0, 2), (2, 3), (5, 5), (1, 3)]) == ((0, 3), (4, 6)) and merge_runs([(3, 3)]) == ()
    assert RowMask(8, window=8) == RowMask(8, window=99) == RowMask(8, documents=((8,), (8,))) == RowMask(8, lengths=(8, 9)) == RowMask(8)
    assert RowMask(8, window=7) != RowMask(8) and RowMask(8, lengths=(8, 7)) != RowMask(8) and RowMask(8, causal=False) != RowMask(8)
    assert RowMask(8, documents=((3, 8), (3, 8))) == RowMask(8, documents=((3, 8),))
    assert RowMask(8, documents=((3, 8), (3, 8))).sequences == 1 and RowMask(8, documents=((3, 8), (8,))).sequences == 2
    assert RowMask(8, lengths=(3, 4, 3)).sequences == 3 and hash(RowMask(8, lengths=(3, 3))) == hash(RowMask(8, lengths=(3,)))
    plan = plan_context(RowMask(8, lengths=(3, 4)), cut_row(RowMask(8, lengths=(3, 4)), 2))
    assert plan_context(RowMask(8, lengths=(3, 4)), plan.runs) is plan


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"length": 0}, "a row has at least one position, not 0"),
        ({"window": 0}, "window is 0: a query sees at least itself"),
        ({"window": 3, "causal": False}, "a window (3) is for causal attention"),
        ({"documents": ((3, 8),), "lengths": (3,)}, "documents and lengths cannot be combined"),
        ({"documents": ()}, "an entry for each sequence"),
        ({"lengths": ()}, "an entry for each sequence"),
        ({"documents": ((8,), ())}, "ends of documents of sequence 1 must rise from at least 1 to the row's length 8: []"),
        ({"documents": ((3, 7),)}, "of sequence 0 must rise from at least 1 to the row's length 8: [3, 7]"),
        ({"documents": ((0, 8),)}, "must rise"),
        ({"documents": ((3, 3, 8),)}, "must rise"),
        ({"documents": ((1, 2, 3, 4, 5, 6, 7, 7, 8),)}, "[1, 2, 3, 4, ... 8]"),
        ({"lengths": (3, -1)}, "sequence 1 has -1 real keys"),
    ],
)
def test_what_is_no_mask_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        RowMask(**{"length": 8, **given})  # type: ignore[arg-type]


def test_what_is_no_cut_is_refused() -> None:
    for c, k in ((0, None), (2, 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            cut_row(RowMask(8), c, k)
    for runs in ((((4, 8), (0, 4)),), (((0, 4), (4, 8)),), (((0, 3), (3, 3), (4, 8)),)):
        with pytest.raises(ValueError, match="in order, not empty, and apart"):
            plan_context(RowMask(8), runs)
    for runs in ((), (((0, 7),),), (((0, 4),), ((5, 8),)), (((0, 4),), ((3, 8),)), (((1, 8),),), (((0, 9),),)):
        with pytest.raises(ValueError, match="must cover the 8 positions of the row, each once"):
            plan_context(RowMask(8), runs)
    for runs, keys in (((((2, 5),),), (((0, 6),),)), ((((2, 5),),), (((0, 2),), ((3, 5),)))):
        with pytest.raises(ValueError, match="must cover the positions 0 to 5 of the row, each once"):
            plan_context(RowMask(8), runs, keys)


def test_a_batch_of_another_size_is_refused() -> None:
    mask = RowMask(8, lengths=(3, 4))
    plan = plan_context(mask, cut_row(mask, 2))
    for ask in (lambda: plan.num_rows(0, 1, 3), lambda: plan.num_received(0, 1), lambda: plan.rows_sent(1, 4)):
        with pytest.raises(ValueError, match=r"the mask describes 2 sequences, and [134] are asked for"):
            ask()
