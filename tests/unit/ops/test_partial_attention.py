"""Attention in pieces: any cut of the pairs gives what all of them at once give, forward and backward."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest
import torch
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import in_blocks, pairs_of, randn
from torch import Tensor

from megatron_sp.ops import availability, gpu_partial_attention, tiled_attention
from megatron_sp.ops.attention import AttentionMask, core_attention
from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.ops.attention_pieces import Stage, batches_of, cut, each_key_once, halves, tiles_of
from megatron_sp.ops.gpu_kernels import CUDNN, PackageFlash, TorchFlash
from megatron_sp.ops.gpu_partial_attention import DensePieces, FlashPieces, piece_kernel
from megatron_sp.ops.partial_attention import Columns, Partial, PieceKernel, Rows, attend, attend_backward, merge_, wide_dtype
from megatron_sp.ops.tiled_attention import CPUFlash, Reference

__all__ = ["in_blocks"]
D = 4
KERNELS: list[PieceKernel] = [CPUFlash(), Reference()]


@pytest.fixture(params=["batches", "alone"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles go in batches, or each is large enough for a call of its own."""
    if request.param == "alone":
        monkeypatch.setattr(tiled_attention, "_BATCHED_BYTES", 0)


def dense(q: Tensor, kv: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Out and lse by all scores; ``seen``: bool [b, s, s]."""
    d = q.shape[-1]
    k, v = kv.flatten(2)[..., :d], kv.flatten(2)[..., d:]
    scores = torch.einsum("qmrd,kmd->mrqk", q, k) / math.sqrt(d)
    hidden = ~seen.repeat_interleave(q.shape[1] // len(seen), 0)[:, None]
    lse = torch.logsumexp(scores.masked_fill(hidden, -torch.inf), dim=-1)
    probs = torch.softmax(scores.masked_fill(hidden, torch.finfo(q.dtype).min), dim=-1).masked_fill(hidden, 0.0)
    return torch.einsum("mrqk,kmd->qmrd", probs, v), lse.permute(2, 0, 1)


def by_pieces(
    kernel: PieceKernel, stages: list[Stage], q: Tensor, kv: Tensor, d_out: Tensor, columns: Columns, row_keys: Tensor | None = None
) -> dict[str, Tensor]:
    """Out, lse and gradients with the keys of all stages in one tensor."""
    rows, so_far = Rows.interleaved(kv, columns.sequences), Partial(q, columns, d_out.shape[3])
    for stage in stages:
        attend(kernel, stage, q, rows, so_far, columns, row_keys)
    wide = wide_dtype(q.dtype)
    d_q, d_kv = torch.zeros(q.shape, dtype=wide), torch.zeros(kv.shape, dtype=wide)
    out = so_far.out.to(q.dtype)
    for stage in stages:
        into = Rows.interleaved(d_kv, columns.sequences)
        attend_backward(kernel, stage, (q, out, so_far.lse, d_out), rows, d_q, into, columns, row_keys)
    return {"out": out, "lse": so_far.lse, "q": d_q, "kv": d_kv}


def in_full(q: Tensor, kv: Tensor, d_out: Tensor, seen: Tensor) -> dict[str, Tensor]:
    q, kv = q.clone().requires_grad_(), kv.clone().requires_grad_()
    out, lse = dense(q, kv, seen)
    out.backward(d_out)
    assert q.grad is not None and kv.grad is not None
    return {"out": out.detach(), "lse": lse.detach(), "q": q.grad, "kv": kv.grad}


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = FP64) -> None:
    assert torch.equal(found["lse"] == -torch.inf, want["lse"] == -torch.inf)
    there = want["lse"] > -torch.inf
    for x in (found, want):
        x["lse"] = x["lse"][there]
    assert_law(found, want, tolerance)


S = 23
# diagonals of three lengths, one twice; full ones that see the same keys; bands; queries 17 to 19 see nothing, keys 14 to 16 nobody
MIXED: tuple[Piece, ...] = (
    Piece(0, 0, 5, 0, 5, "diagonal"), Piece(0, 5, 9, 5, 9, "diagonal"), Piece(0, 9, 14, 9, 14, "diagonal"),
    Piece(0, 5, 9, 0, 5, "full"), Piece(0, 9, 14, 0, 9, "full"), Piece(0, 20, 23, 0, 4, "full"),
    Piece(0, 14, 17, 10, 13, "band", 3), Piece(0, 20, 23, 17, 23, "band", 3),
)  # fmt: skip
MIXED_WINDOW = 4


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS, ids=["cpu flash", "reference"])
def test_pieces_of_all_kinds_add_up(kernel: PieceKernel, r: int, sizes: None, in_blocks: bool) -> None:
    q, kv, d_out = randn(S, 3, r, D), randn(S, 3, 2, D, seed=1), randn(S, 3, r, D, seed=2)
    pairs = pairs_of(MIXED, S, MIXED_WINDOW)
    assert pairs.max() == 1
    columns = Columns(1, True)
    for stages in ([Stage(MIXED, MIXED_WINDOW)], [Stage((piece,), MIXED_WINDOW) for piece in reversed(MIXED)]):
        found = by_pieces(kernel, stages, q, kv, d_out, columns)
        assert_same(found, in_full(q, kv, d_out, pairs.bool()))
        assert (found["out"][17:20] == 0).all() and (found["q"][17:20] == 0).all() and (found["kv"][14:17] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=["cpu flash", "reference"])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("counts, d_v", [(None, D), (None, 3), ((2, 2, 1, 3), D), ((2, 2, 1, 3), 9)])
def test_sequences_differ_heads_are_uneven_and_values_of_another_width(
    kernel: PieceKernel, alike: bool, counts: tuple[int, ...] | None, d_v: int, sizes: None
) -> None:
    b, groups = 2, 3 if counts is None else len(counts)
    m, r = (b * groups, 2) if counts is None else (b * sum(counts), 1)
    q, kv, d_out = randn(S, m, r, D), randn(S, b * groups, D + d_v, seed=1), randn(S, m, r, d_v, seed=2)
    if alike:
        pieces: tuple[Piece, ...] = tuple(Piece(-1, *piece[1:]) for piece in MIXED)  # type: ignore[index]
        seen = pairs_of(pieces, S, MIXED_WINDOW).expand(b, -1, -1).bool()
    else:
        pieces = (*MIXED, Piece(1, 0, S, 3, 7, "full"), Piece(1, 7, 15, 7, 15, "diagonal"))
        seen = pairs_of(pieces, S, MIXED_WINDOW, b).bool()
    found = by_pieces(kernel, [Stage(pieces, MIXED_WINDOW)], q, kv, d_out, Columns(b, alike, counts))
    full = kv if counts is None else kv.view(S, b, groups, -1).repeat_interleave(torch.tensor(counts), dim=2).flatten(1, 2)
    want = in_full(q, full, d_out, seen)
    if counts is not None:
        by_key = want["kv"].view(S, b, sum(counts), -1).split(counts, dim=2)
        want["kv"] = torch.stack([part.sum(2) for part in by_key], dim=2).flatten(1, 2)
    assert_same(found, want)


@pytest.mark.parametrize("kernel", KERNELS, ids=["cpu flash", "reference"])
def test_large_pieces_and_windows(kernel: PieceKernel, in_blocks: bool) -> None:
    s, window = 700, 300
    q, kv, d_out = randn(s, 2, 1, D), randn(s, 2, 2, D, seed=1), randn(s, 2, 1, D, seed=2)
    causal: tuple[Piece, ...] = (
        Piece(-1, 0, 400, 0, 400, "diagonal"),
        Piece(-1, 400, s, 0, 400, "full"),
        Piece(-1, 400, s, 400, s, "diagonal"),
    )
    bands: tuple[Piece, ...] = (Piece(-1, 0, s, 0, s, "band"),)
    for pieces in (causal, bands):
        seen = pairs_of(pieces, s, window).bool()
        found = by_pieces(kernel, [Stage(pieces, window)], q, kv, d_out, Columns(1, True))
        assert_same(found, in_full(q, kv, d_out, seen))


def test_every_band_is_cut_into_tiles_in_which_every_query_sees_a_key_and_no_key_is_in_vain() -> None:
    rng = Random(0)
    for _ in range(300):
        queries, keys, window = rng.randint(1, 400), rng.randint(1, 400), rng.randint(1, 300)
        offset = rng.randint(-queries + 1, keys + window - 2)
        rows = [a for a in range(queries) if max(0, a + offset - window + 1) <= min(keys - 1, a + offset)]
        seen = [b for b in range(keys) if any(0 <= a + offset - b < window for a in rows)]
        # as a plan trims it
        piece = Piece(0, rows[0], rows[-1] + 1, seen[0], seen[-1] + 1, "band", offset + rows[0] - seen[0])
        pairs = pairs_of((piece,), 400, window)
        tiles = tiles_of((piece,), window)
        parts = tuple(Piece(0, t.start, t.start + t.queries, t.first_key, t.first_key + t.keys, t.kind, t.offset) for t in tiles)
        assert torch.equal(pairs_of(parts, 400, window), pairs)
        assert all(t.queries <= 256 and t.keys <= window + t.queries for t in tiles)
        for part in parts:
            mine = pairs_of((part,), 400, window)[0, part.q_start : part.q_stop, part.k_start : part.k_stop]
            assert mine.any(0).all() and mine.any(1).all()
            assert part.kind == ("full" if mine.all() else "band")


def test_small_tiles_share_calls_and_no_query_is_twice_in_one() -> None:
    documents: tuple[Piece, ...] = tuple(Piece(0, 3 * i, 3 * i + 3, 3 * i, 3 * i + 3, "diagonal") for i in range(50))
    assert [len(batch) for batch in batches_of(tiles_of(documents, None))] == [50]
    lengths: tuple[Piece, ...] = tuple(Piece(0, 0, n, 0, n, "diagonal") for n in (100, 90, 70, 60, 8, 1, 5))
    assert [[t.queries for t in batch] for batch in batches_of(tiles_of(lengths, None))] == [[100, 90], [70, 60], [8, 5, 1]]
    bands: tuple[Piece, ...] = (Piece(0, 0, 10, 0, 5, "band", 7), Piece(0, 5, 15, 5, 10, "band", 7), Piece(1, 5, 15, 5, 10, "band", 7))
    assert [len(batch) for batch in batches_of(tiles_of(bands, 10))] == [1, 2]


# the merge


def test_the_merge_stands_gaps_of_200_and_rows_without_keys() -> None:
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        values, inf = [-200.0, -100.0, -3.0, 0.0, 2.0, 100.0, 200.0], torch.inf
        lse, more_lse = (x.flatten() for x in torch.meshgrid(*[torch.tensor([-inf, *values], dtype=dtype)] * 2, indexing="ij"))
        out, more = randn(len(lse), D, dtype=dtype), randn(len(lse), D, dtype=dtype, seed=1)
        out[lse == -inf], more[more_lse == -inf] = 0.0, 0.0
        both = torch.stack([lse, more_lse]).double()
        total = torch.logsumexp(both, 0)
        weights = torch.exp(both - total.masked_fill(total == -inf, 0.0))
        want = weights[0, :, None] * out.double() + weights[1, :, None] * more.double()
        merge_(out, lse, more, more_lse)
        assert torch.equal(lse == -inf, total == -inf)
        there = total > -inf
        torch.testing.assert_close(lse[there].double(), total[there], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
        assert (out[~there] == 0).all()


def test_rows_of_one_piece_have_the_bits_of_one_call() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, kv = randn(S, 2, 3, D, dtype=dtype), randn(S, 2, 2, D, dtype=dtype, seed=1)
        for kernel, name in zip(KERNELS, ("sdpa", "reference"), strict=True):
            so_far, columns = Partial(q, Columns(1, True)), Columns(1, True)
            for piece in (Piece(-1, 0, 11, 0, 11, "diagonal"), Piece(-1, 11, S, 0, 11, "full"), Piece(-1, 11, S, 11, S, "diagonal")):
                attend(kernel, Stage((piece,)), q, Rows.interleaved(kv, 1), so_far, columns)
            alone = core_attention(q[:11], kv[:11, :, :1], kv[:11, :, 1:], AttentionMask(), kernel=name)  # type: ignore[arg-type]
            assert torch.equal(so_far.out.to(dtype)[:11], alone)


def test_in_16_bits_the_error_is_that_of_one_call() -> None:
    """Against fp64, summed over fp32 accumulators; a sum in 16 bits would double it."""
    s, m, r, d, n = 512, 2, 2, 32, 16
    full = randn(s, m, r, d), randn(s, m, 2, d, seed=1), randn(s, m, r, d, seed=2)
    half = [x.bfloat16() for x in full]
    want = in_full(*(x.double() for x in half), torch.ones(s, s, dtype=torch.bool).tril()[None])
    edges = [s * i // n for i in range(n + 1)]
    chunks = list(pairwise(edges))
    stages = [Stage((Piece(-1, a, b, a, b, "diagonal"),)) for a, b in chunks]
    stages += [Stage((Piece(-1, b, s, a, b, "full"),)) for a, b in chunks if b < s]
    found = by_pieces(CPUFlash(), stages, *half, Columns(1, True))
    q, k, v = half[0].requires_grad_(), half[1][:, :, :1].clone().requires_grad_(), half[1][:, :, 1:].clone().requires_grad_()
    out = core_attention(q, k, v, AttentionMask(), kernel="sdpa")
    out.backward(half[2])
    assert q.grad is not None and k.grad is not None and v.grad is not None
    once = {"out": out.detach(), "q": q.grad, "kv": torch.cat([k.grad, v.grad], dim=2)}
    for name, x in once.items():
        mine = found[name].bfloat16().double()
        assert law_error(mine, want[name]) <= 1.1 * law_error(x.double(), want[name]), name


def test_the_queries_of_a_key_are_summed_before_anything_is_rounded() -> None:
    s, r = 32, 3
    q, kv, d_out = (x.bfloat16() for x in (randn(s, 1, r, 16), randn(s, 1, 2, 16, seed=1), randn(s, 1, r, 16, seed=2)))
    pieces: tuple[Piece, ...] = (Piece(-1, 0, s, 0, s, "diagonal"),)
    together = by_pieces(CPUFlash(), [Stage(pieces)], q, kv, d_out, Columns(1, True))["kv"]
    apart = [
        by_pieces(CPUFlash(), [Stage(pieces)], q[:, :, i : i + 1], kv, d_out[:, :, i : i + 1], Columns(1, True))["kv"] for i in range(r)
    ]
    torch.testing.assert_close(together, apart[0] + apart[1] + apart[2], rtol=1e-6, atol=1e-6)


# dropout


def test_dropout_by_hash_is_that_of_one_call() -> None:
    """Keys are numbered by their position in their document, whatever the order of the pieces and the gaps between their keys."""
    s, m, r, rate = 20, 2, 2, 0.4
    ends = (6, 20)
    q, kv, d_out = randn(s, m, r, D), randn(s, m, 2, D, seed=1), randn(s, m, r, D, seed=2)
    row_keys = torch.randint(-(2**31), 2**31 - 1, (m, r, s), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    operands = [x.clone().requires_grad_() for x in (q, kv[:, :, :1], kv[:, :, 1:])]
    mask = AttentionMask(documents=(ends,))
    out = core_attention(*operands, mask, kernel="reference", dropout=rate, dropout_rows=row_keys)
    out.backward(d_out)
    of_q, of_k, of_v = (x.grad for x in operands)
    assert of_q is not None and of_k is not None and of_v is not None
    want = {"out": out.detach(), "q": of_q, "kv": torch.cat([of_k, of_v], dim=2)}
    # the keys in another order: 12 to 19, then 0 to 11
    order = torch.cat([torch.arange(12, s), torch.arange(12)])
    runs = (((12, s), (0, 12)),)
    pieces: tuple[Piece, ...] = (
        Piece(-1, 0, 6, 8, 14, "diagonal"), Piece(-1, 6, 12, 14, 20, "diagonal"), Piece(-1, 12, s, 14, 20, "full"),
        Piece(-1, 12, s, 0, 8, "diagonal"),
    )  # fmt: skip
    stages = [Stage(pieces, key_runs=runs, documents=(ends,))]
    found = by_pieces(Reference(rate), stages, q, kv[order], d_out, Columns(1, True), row_keys.permute(2, 0, 1))
    found["kv"] = torch.empty_like(kv).index_copy(0, order, found["kv"])
    assert_law({name: found[name] for name in want}, want, FP64)
    assert law_error(by_pieces(Reference(), stages, q, kv[order], d_out, Columns(1, True))["out"], want["out"]) > 0.1
    # a piece with keys of several runs
    full: tuple[Piece, ...] = (Piece(-1, 0, s, 0, s, "full"),)
    operands = [x.detach().requires_grad_() for x in operands]
    out = core_attention(*operands, AttentionMask(False), kernel="reference", dropout=rate, dropout_rows=row_keys)
    found = by_pieces(Reference(rate), [Stage(full, key_runs=runs)], q, kv[order], d_out, Columns(1, True), row_keys.permute(2, 0, 1))
    assert_law({"out": found["out"]}, {"out": out}, FP64)


def test_dropout_wants_its_keys() -> None:
    q, kv = randn(4, 1, 1, D), randn(4, 1, 2, D)
    with pytest.raises(RuntimeError, match="attention dropout needs the tokens' dropout keys"):
        stage, columns = Stage((Piece(-1, 0, 4, 0, 4, "full"),)), Columns(1, True)
        attend(Reference(0.1), stage, q, Rows.interleaved(kv, 1), Partial(q, columns), columns)


# halves


def test_halves_are_halves_and_nothing_is_lost() -> None:
    rng = Random(1)
    for _ in range(200):
        window, s, pieces = rng.choice([None, 3, 9]), 60, list[Piece]()
        at = 0
        while at < s:
            n = rng.randint(1, 30)
            stop = min(s, at + n)
            if window is not None:
                pieces.append(Piece(-1, at, stop, at, stop, "band"))
            else:
                pieces.append(Piece(-1, at, stop, at, stop, "diagonal"))
                if at:
                    pieces.append(Piece(-1, at, stop, 0, rng.randint(1, at), "full"))
            at = stop
        first, second = halves(tuple(pieces), window)
        assert torch.equal(pairs_of(first + second, s, window), pairs_of(tuple(pieces), s, window))
        work = [int(pairs_of(half, s, window).sum()) for half in (first, second)]
        longest = max(int(pairs_of((piece,), s, window)[0].sum(1).max()) for piece in pieces)
        assert abs(work[0] - work[1]) <= max(2 * longest, sum(work) / 4)
    one: tuple[Piece, ...] = (Piece(0, 0, 1, 0, 5, "full"),)
    assert halves(one, None) == (one, ()) and halves((), None) == ((), ())


@pytest.mark.parametrize("kind", ["full", "diagonal", "band"])
def test_a_piece_is_cut_between_two_queries(kind: str) -> None:
    piece = Piece(0, 2, 12, 3, 13, kind)  # type: ignore[arg-type]
    for row in range(1, 10):
        upper, lower = cut(piece, row)
        assert torch.equal(pairs_of((*upper, *lower), 13, 4), pairs_of((piece,), 13, 4))
        assert all(part.q_stop <= 2 + row for part in upper) and all(part.q_start >= 2 + row for part in lower)


def test_which_gradients_are_no_sums() -> None:
    a, b, c = Piece(0, 0, 4, 0, 4, "full"), Piece(0, 4, 6, 4, 6, "diagonal"), Piece(0, 8, 9, 3, 5, "full")
    assert each_key_once(Stage((a, b))) and each_key_once(Stage((b,))) and each_key_once(Stage(()))
    assert not each_key_once(Stage((a, c))) and not each_key_once(Stage((b, c)))
    assert each_key_once(Stage((a, Piece(1, 8, 9, 3, 5, "full"))))
    assert not each_key_once(Stage((Piece(0, 0, 4, 0, 4, "band"),), 2))  # tiles of queries see the same keys


# which kernel


def test_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 1, 1)
    assert isinstance(piece_kernel("sdpa", x), CPUFlash) and piece_kernel("reference", x, 0.25) == Reference(0.25)
    with pytest.raises(ValueError, match=r"attention dropout \(0.25\) in the kernel sdpa under context parallelism would depend on"):
        piece_kernel("sdpa", x, 0.25)
    monkeypatch.setattr(availability, "GPU", "meta")
    with pytest.raises(ValueError, match="no kernel for context parallelism on meta takes float32 and heads 1 wide"):
        piece_kernel("sdpa", x.to("meta"))
    monkeypatch.setattr(gpu_partial_attention, "torch_has_varlen", lambda x, v: x.dtype == torch.bfloat16)
    x = x.to("meta", torch.bfloat16)
    assert piece_kernel("flash3", x) == FlashPieces(PackageFlash("flash3"))
    for takes in (CUDNN(True, True), CUDNN(True, False)):
        monkeypatch.setattr(gpu_partial_attention, "takes_cudnn", lambda *_, takes=takes: takes)
        assert piece_kernel("cudnn", x) == DensePieces(takes.groups)
    monkeypatch.setattr(gpu_partial_attention, "takes_cudnn", lambda *_: None)
    for name in ("sdpa", "cudnn"):
        kernel = piece_kernel(name, x)
        assert isinstance(kernel, FlashPieces) and isinstance(kernel.kernel, TorchFlash)


def test_fp32_is_as_exact_as_one_call() -> None:
    q, kv, d_out = (x.float() for x in (randn(S, 2, 3, D), randn(S, 2, 2, D, seed=1), randn(S, 2, 3, D, seed=2)))
    seen = pairs_of(MIXED, S, MIXED_WINDOW).bool()
    want = in_full(q.double(), kv.double(), d_out.double(), seen)
    found = by_pieces(CPUFlash(), [Stage(MIXED, MIXED_WINDOW)], q, kv, d_out, Columns(1, True))
    assert found["q"].dtype == found["lse"].dtype == torch.float32
    assert_same(found, want, FP32)
