"""Context parallelism: attention over the positions of several ranks equals one process, and only what is needed travels."""

from __future__ import annotations

import weakref
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.errors import FP64, assert_law
from support.late_network import late_network
from support.op_checks import randn
from support.ranks import run_ranks
from support.sent_bytes import Wire
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.attention import AttentionMask, core_attention, fold_mask
from megatron_sp.ops.attention_pieces import Stage, halves
from megatron_sp.ops.partial_attention import BackwardInputs, Columns, Partial, Rows, attend, attend_backward, wide_dtype
from megatron_sp.ops.tiled_attention import CPUFlash, Reference
from megatron_sp.parallel import all_to_all, context_parallel
from megatron_sp.parallel.context_parallel import ContextAttention, _Message, context_attention
from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.parallel_context import NO_CP, ContextParallel
from megatron_sp.parallel.row_mask import RowMask

D = 4


class Case(NamedTuple):
    """A mask with its sequences and heads; ``counts``: queries of each key/value head, or r = 1 or 3 for two of them."""

    mask: RowMask
    b: int = 1
    r: int = 1
    counts: tuple[int, ...] | None = None
    chunks: int | None = None
    kernel: Any = CPUFlash()
    cp: dict[str, Any] = {}

    @property
    def groups(self) -> int:
        return 2 if self.counts is None else len(self.counts)

    def tensors(self, dtype: torch.dtype = torch.float64, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
        """q, kv and the gradient of the output, of the whole row."""
        m, r = (self.b * 2, self.r) if self.counts is None else (self.b * sum(self.counts), 1)
        s = self.mask.length
        q, d_out = randn(s, m, r, d, dtype=dtype), randn(s, m, r, d, dtype=dtype, seed=2)
        return q, randn(s, self.b * self.groups, 2, d, dtype=dtype, seed=1), d_out

    def plan(self, size: int) -> ContextPlan:
        return plan_context(self.mask, cut_row(self.mask, size, self.chunks))


def allowed_pairs(mask: RowMask, b: int) -> Tensor:
    """bool [b, s, s], by the definition of the mask, position by position."""
    s = mask.length
    at = torch.arange(s)
    found = torch.ones(b, s, s, dtype=torch.bool)
    if mask.causal:
        found &= at <= at[:, None]
    if mask.window is not None:
        found &= at > at[:, None] - mask.window
    for sequence in range(b):
        if mask.documents is not None:
            document = torch.bucketize(at, torch.tensor(mask.documents[sequence % len(mask.documents)]), right=True)
            found[sequence] &= document == document[:, None]
        if mask.lengths is not None:
            found[sequence] &= at < mask.lengths[sequence % len(mask.lengths)]
    return found


def dense(q: Tensor, kv: Tensor, allowed: Tensor, counts: tuple[int, ...] | None = None) -> Tensor:
    """Attention by all scores; 0 for queries without keys."""
    b = len(allowed)
    s, m, _, d = q.shape
    if counts is not None:
        kv = kv.view(s, b, len(counts), 2, d).repeat_interleave(torch.tensor(counts), dim=2).flatten(1, 2)
    scores = torch.einsum("qmrd,kmd->mrqk", q, kv[:, :, 0]) / d**0.5
    hidden = ~allowed.repeat_interleave(m // b, 0)[:, None]
    probs = torch.softmax(scores.masked_fill(hidden, -1e300), dim=-1).masked_fill(hidden, 0.0)
    return torch.einsum("mrqk,kmd->qmrd", probs, kv[:, :, 1])


def wanted(case: Case, q: Tensor, kv: Tensor, d_out: Tensor) -> dict[str, Tensor]:
    q, kv = q.clone().requires_grad_(), kv.clone().requires_grad_()
    out = dense(q, kv, allowed_pairs(case.mask, case.b), case.counts)
    out.backward(d_out)
    assert q.grad is not None and kv.grad is not None
    return {"out": out.detach(), "q": q.grad, "kv": kv.grad}


def positions(plan: ContextPlan, rank: int) -> Tensor:
    """The positions of a rank, as an index."""
    return torch.cat([torch.arange(*run) for run in plan.runs[rank]] or [torch.arange(0)])


def cp_of(case: Case) -> ContextParallel:
    return ContextParallel(dist.group.WORLD, **case.cp)  # type: ignore[arg-type]


Computed = tuple[dict[str, Tensor], ContextAttention]


def computed(case: Case, tensors: tuple[Tensor, ...], **more: Any) -> Computed:
    """This rank's output and gradients."""
    cp = cp_of(case)
    plan = case.plan(cp.size)
    q, kv, d_out = (x[positions(plan, cp.rank)].clone() for x in tensors)
    q, kv = q.requires_grad_(), kv.requires_grad_()
    found = context_attention(q, kv, plan, cp, case.kernel, batch=case.b, counts=case.counts, **more)
    found.out.backward(d_out)
    assert q.grad is not None and kv.grad is not None
    return {"out": found.out.detach(), "q": q.grad, "kv": kv.grad}, found


def sent_rows(plan: ContextPlan, rank: int, b: int) -> tuple[int, int]:
    """Rows that leave a rank: of its own keys and values, and gradients of those of others."""
    others = [r for r in range(plan.cp_size) if r != rank]
    return sum(plan.num_rows(r, rank, b) for r in others), sum(plan.num_rows(rank, r, b) for r in others)


def check(case: Case, tolerance: float = FP64) -> None:
    """Output and gradients of this rank's positions, bytes on the wire, and the same bits once more."""
    tensors, cp = case.tensors(), cp_of(case)
    want, plan = wanted(case, *tensors), case.plan(cp.size)
    mine = positions(plan, cp.rank)
    with Wire(cp.size) as wire:
        found, _ = computed(case, tensors)
    largest = max(x.abs().max().item() for x in want.values())
    for name, x in found.items():
        # against the whole: a rank's own part may be all zeros, or nothing. Where a query sees one key alone, the gradients of both are
        # differences of equal sums, zero or what some processors leave of them
        error = (x - want[name][mine]).abs().max().item() if x.numel() else 0.0
        assert error <= tolerance * max(want[name].abs().max().item(), 1e-3 * largest), (case, cp.rank, name, error)
    of_kv, of_gradients = sent_rows(plan, cp.rank, case.b)
    element = tensors[1].element_size() * case.groups * 2 * D
    times = 1 if cp.keep_kv else 2
    assert wire.num_bytes["alltoall_base_"] == (times * of_kv + of_gradients) * element
    assert wire.calls["alltoall_base_"] == (times + 1) * len(shifts_of(plan, case.b)), "a shift that nobody needs does not take place"
    again, _ = computed(case, tensors)
    assert all(torch.equal(found[name], again[name]) for name in found), case


def check_all(cases: list[Case]) -> None:
    for case in cases:
        check(case)


def masks_of(s: int, b: int, seed: int = 0) -> list[RowMask]:
    """Every kind of mask for a row of s positions, different for each of b sequences and alike."""
    rng = Random(seed + 31 * s + b)

    def ends() -> tuple[int, ...]:
        return tuple(sorted({*(rng.randint(1, s) for _ in range(1 + s // 7)), s}))

    window = 1 + s // 5
    found = [RowMask(s), RowMask(s, window=window), RowMask(s, causal=False), RowMask(s, documents=(ends(),)), RowMask(s, window=1)]
    found += [RowMask(s, documents=(ends(),), window=window), RowMask(s, causal=False, documents=(ends(),))]
    if b > 1:
        each = tuple(ends() for _ in range(b))
        found += [RowMask(s, documents=each), RowMask(s, documents=each, window=window), RowMask(s, causal=False, documents=each)]
    lengths = tuple([max(0, s - 3), 0, s // 2][:b] if b > 1 else [s // 3])
    return [*found, RowMask(s, causal=False, lengths=lengths), RowMask(s, lengths=lengths), RowMask(s, causal=False, lengths=(0,) * b)]


HEADS: list[dict[str, Any]] = [{"r": 1}, {"r": 3}, {"counts": (1, 3, 3, 2)}]


def grid(size: int) -> list[Case]:
    found = []
    for s in (1, size - 1, size, 7 * size + 3, 61):
        for b in (1, 2):
            for mask in masks_of(s, b):
                found += [Case(mask, b, chunks=chunks, **heads) for heads in HEADS for chunks in (None, 1, 3)]
    return found


FEW = 3


def cheap(size: int) -> list[Case]:
    """Every mask at least once, with different heads, chunks and options; a length that nothing divides."""
    options: list[dict[str, Any]] = [{}, {"stages_ahead": 2}, {"keep_kv": True}, {"overlap": False}, {"stages_ahead": 9}]
    found = []
    for number, (b, mask) in enumerate([*((1, mask) for mask in masks_of(29, 1, size)), *((2, mask) for mask in masks_of(29, 2, size))]):
        found.append(Case(mask, b, chunks=(None, 2, 1, 3)[number % 4], cp=options[number % 5], **HEADS[number % 3]))
        if number % 4 == 0:
            found.append(Case(mask, b, kernel=Reference(), **HEADS[(number + 1) % 3]))
    for b in (1, 2):
        found += [Case(mask, b, **HEADS[b]) for mask in masks_of(size - 1, b)[:: 1 if size == 2 else FEW]]
    return found


def some(size: int) -> list[Case]:
    """Each case on one number of ranks; a few on one rank."""
    return cheap(2)[:4] if size == 1 else cheap(size)[size - 2 :: 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_equals_one_process_and_sends_what_the_plan_says(size: int, tmp_path: Path) -> None:
    run_ranks(check_all, size, tmp_path, some(size))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_mask_with_all_heads_and_lengths(size: int, tmp_path: Path) -> None:
    run_ranks(check_all, size, tmp_path, [*grid(size), *cheap(size)])


# order


DOCUMENTS = ((5, 6, 17, 29), (20, 29))
ORDERED = [
    Case(RowMask(29), chunks=2), Case(RowMask(29, documents=DOCUMENTS), 2, 3, chunks=3, cp={"stages_ahead": 2}),
    Case(RowMask(29, documents=DOCUMENTS, window=5), 2, counts=(1, 2), chunks=1, cp={"keep_kv": True}),
    Case(RowMask(29, causal=False, lengths=(21, 0)), 2, chunks=1), Case(RowMask(2)),
]  # fmt: skip


def _late() -> None:
    with late_network() as network:
        for case in ORDERED:
            check(case)
    assert network.started


def test_nothing_is_used_before_it_is_there(tmp_path: Path) -> None:
    run_ranks(_late, 3, tmp_path)


class _LoggedKernel(CPUFlash):
    """Notes which stage is computed."""

    def __init__(self, log: list[str], names: dict[tuple[Any, ...], str], halves_have: int) -> None:
        self.log, self.names, self.halves_have = log, names, halves_have

    def forward(self, stage: Stage, *args: Any) -> None:
        self.log.append(self.names.get((stage.pieces, stage.key_runs), "part of own"))
        super().forward(stage, *args)

    def backward(self, stage: Stage, inputs: BackwardInputs, *args: Any) -> None:
        name = self.names.get((stage.pieces, stage.key_runs), "part of own")
        self.log.append("one head of own" if (name, inputs.q.x.shape[1]) == ("own", self.halves_have) else name)
        super().backward(stage, inputs, *args)


def _schedule(case: Case, part: str) -> None:
    """``part``: what is computed first and last of a rank's own in backward."""
    group, rank = dist.group.WORLD, dist.get_rank()
    plan, log = case.plan(4), list[str]()
    names: dict[tuple[Any, ...], str] = {(plan.pieces(rank, rank), (plan.runs[rank],)): "own"}
    names |= {(plan.pieces(rank, (rank - t) % 4), plan.rows(rank, (rank - t) % 4)): f"stage {t}" for t in range(1, 4)}
    assert len(names) == 4

    class Logged(ContextParallel):
        def exchange_async(self, name: str, send: Tensor, send_counts: list[int], receive_counts: list[int]) -> Handle:
            log.append(f"start {name} {send_counts.index(max(send_counts)) - rank & 3}")
            handle = super().exchange_async(name, send, send_counts, receive_counts)
            finish, label = handle.wait, f"wait {log[-1][6:]}"
            handle.wait = lambda: (log.append(label), finish())[1]  # type: ignore[assignment, method-assign, misc]
            return handle

    for ahead, forward, backward in (
        (1, "start kv 1|own|start kv 2|wait kv 1|stage 1|start kv 3|wait kv 2|stage 2|wait kv 3|stage 3",
         f"start kv 1|{part} of own|start kv 2|wait kv 1|stage 1|start d kv 3|start kv 3|wait kv 2|stage 2|start d kv 2|wait d kv 3|"
         f"wait kv 3|stage 3|start d kv 1|wait d kv 2|{part} of own|wait d kv 1"),
        (3, "start kv 1|start kv 2|start kv 3|own|wait kv 1|stage 1|wait kv 2|stage 2|wait kv 3|stage 3", None),
    ):  # fmt: skip
        q, kv, d_out = (x[positions(plan, rank)].clone().requires_grad_() for x in case.tensors())
        log.clear()
        cp = Logged(group, stages_ahead=ahead)  # type: ignore[arg-type]
        out = context_attention(q, kv, plan, cp, _LoggedKernel(log, names, case.groups // 2), batch=1, counts=case.counts).out
        assert log == forward.split("|")
        log.clear()
        out.backward(d_out)
        if backward is not None:
            assert log == backward.split("|")


@pytest.mark.parametrize("case, part", [
    (Case(RowMask(40), chunks=2), "one head"), (Case(RowMask(40), counts=(1,), chunks=2), "part"),
])  # fmt: skip
def test_exchanges_travel_under_the_pieces_before_and_after_them(tmp_path: Path, case: Case, part: str) -> None:
    run_ranks(_schedule, 4, tmp_path, case, part)


def _memory() -> None:
    """Buffers alive at any time: of keys and values those in use and those under way; of gradients what is made, sent and received."""
    case, rank = Case(RowMask(40, causal=False), chunks=1), dist.get_rank()  # messages of one size, none of them packed
    plan, alive, most = case.plan(4), list[Any](), [0]
    stage = case.groups * 2 * D * 10

    def counted(shape: Any, **more: Any) -> Tensor:
        made = fresh(shape, **more)
        if len(shape) == 1:
            assert made.numel() == stage
            alive.append(weakref.ref(made))
            most[0] = max(most[0], sum(x() is not None for x in alive))
        return made

    # gloo's own threads hold what they send for a while; those of this network hold copies
    with late_network(), pytest.MonkeyPatch.context() as patch:
        fresh = context_parallel.empty
        for module in (context_parallel, all_to_all):
            patch.setattr(module, "empty", counted)
        for ahead, forward, backward in ((1, 2, 5), (2, 3, 5)):
            q, kv, d_out = (x[positions(plan, rank)].clone().requires_grad_() for x in case.tensors())
            out = context_attention(q, kv, plan, ContextParallel(dist.group.WORLD, stages_ahead=ahead), CPUFlash(), batch=1).out
            assert most[0] == forward, most
            alive.clear()
            out.backward(d_out)
            assert most[0] == backward, most
            assert not any(x() is not None for x in alive)
            most[0] = 0
            alive.clear()


def test_buffers_live_no_longer_than_they_are_needed(tmp_path: Path) -> None:
    run_ranks(_memory, 4, tmp_path)


def _simulated(case: Case, tensors: tuple[Tensor, ...], size: int, owner: int) -> dict[str, Tensor]:
    """What a rank should have, bit for bit: all ranks' stages in one process, and the sums in the order of the plan."""
    plan, columns = case.plan(size), Columns(case.b, case.plan(size).alike, case.counts)
    at = [positions(plan, rank) for rank in range(size)]
    wide, dtype = wide_dtype(tensors[1].dtype), tensors[1].dtype
    found: list[tuple[Tensor, ...]] = []

    def stage_of(i: int, j: int, pieces: Any = None) -> tuple[Stage, Tensor]:
        """The stage, and the keys that it addresses, of sequences that are alike."""
        index = at[i] if i == j else torch.cat([torch.arange(*run) for run in plan.rows(i, j)[0]] or [torch.arange(0)])
        return Stage(plan.pieces(i, j) if pieces is None else pieces, plan.mask.window), index

    def gradients(i: int, j: int, d_q: Tensor, d_kv: Tensor | None = None, pieces: Any = None, half: int | None = None) -> Tensor:
        stage, index = stage_of(i, j, pieces)
        d_kv = torch.zeros(tensors[1][index].shape, dtype=wide) if d_kv is None else d_kv
        keys = Rows.interleaved(tensors[1][index], 1)
        attend_backward(case.kernel, stage, (*found[i], tensors[2][at[i]]), keys, d_q, Rows.interleaved(d_kv, 1), columns, half=half)
        return d_kv

    assert plan.alike
    for i in range(size):
        so_far = Partial(tensors[0][at[i]], columns)
        for t in range(size):
            stage, index = stage_of(i, (i - t) % size)
            attend(case.kernel, stage, tensors[0][at[i]], Rows.interleaved(tensors[1][index], 1), so_far, columns)
        found.append((tensors[0][at[i]], so_far.out.to(dtype), so_far.lse))
    d_q = torch.zeros(tensors[0][at[owner]].shape, dtype=wide)
    shifts, own = shifts_of(plan, case.b), plan.pieces(owner, owner)
    of_pieces = halves(own, plan.mask.window) if shifts else (own, ())
    total = torch.zeros(tensors[1][at[owner]].shape, dtype=wide)
    first, second = ((of_pieces[0], None), (of_pieces[1], None)) if total.shape[1] == 1 or not shifts else ((own, 0), (own, 1))
    gradients(owner, owner, d_q, total, *first)
    for t in shifts:
        gradients(owner, (owner - t) % size, d_q)
        if t == shifts[-1]:
            gradients(owner, owner, d_q, total, *second)
        other, at_part = (owner + t) % size, 0
        part = gradients(other, owner, torch.zeros(tensors[0][at[other]].shape, dtype=wide)).to(dtype).to(wide)
        for start, stop in plan.local_rows(other, owner)[0]:
            total[start:stop] += part[at_part : at_part + stop - start]
            at_part += stop - start
    return {"out": found[owner][1], "q": d_q.to(dtype), "kv": total.to(dtype)}


def _sums() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for mask, b, r, chunks in (
        (RowMask(67), 2, 3, 2),
        (RowMask(67, causal=False), 1, 1, 1),
        (RowMask(67, documents=((9, 50, 67),)), 1, 2, 4),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            case = Case(mask, b, r, chunks=chunks)
            tensors = case.tensors(dtype, d=16)
            found, want = computed(case, tensors)[0], _simulated(case, tensors, size, rank)
            for name, x in found.items():
                assert x.dtype == dtype and torch.equal(x, want[name]), (case, name)


def test_partial_gradients_are_rounded_once_and_added_in_the_order_of_the_plan(tmp_path: Path) -> None:
    run_ranks(_sums, 4, tmp_path)


# what is kept, and what is not sent


class _NoForward(CPUFlash):
    def forward(self, *_: Any) -> None:
        raise AssertionError("computed a second time")


def _kept() -> None:
    for case in (*ORDERED, ORDERED[2]._replace(cp={}), Case(RowMask(29), chunks=2, cp={"keep_kv": True})):
        tensors, cp = case.tensors(), cp_of(case)
        want, first = computed(case, tensors)
        plan = case.plan(cp.size)
        with torch.no_grad():
            q, kv = (x[positions(plan, cp.rank)].clone() for x in tensors[:2])
            first = context_attention(q, kv, plan, cp, case.kernel, batch=case.b, counts=case.counts)
        assert not first.out.requires_grad and len(first.received) == (len(shifts_of(plan, case.b)) if cp.keep_kv else 0)
        q.requires_grad_(), kv.requires_grad_()
        with Wire(cp.size) as wire:
            again = context_attention(q, kv, plan, cp, _NoForward(), batch=case.b, counts=case.counts, kept=first)
        assert not wire.calls and again.out.requires_grad and not again.lse.requires_grad and not first.out.requires_grad
        with Wire(cp.size) as wire:
            again.out.backward(tensors[2][positions(plan, cp.rank)])
        found = {"out": again.out, "q": q.grad, "kv": kv.grad}
        assert all(torch.equal(found[name], want[name]) for name in want)  # type: ignore[arg-type]
        of_kv, of_gradients = sent_rows(plan, cp.rank, case.b)
        assert wire.num_bytes["alltoall_base_"] == (of_gradients + (0 if cp.keep_kv else of_kv)) * case.groups * 2 * D * 8


def shifts_of(plan: ContextPlan, b: int) -> list[int]:
    """The shifts in which anything travels."""
    size = plan.cp_size
    return [t for t in range(1, size) if any(plan.num_rows((j + t) % size, j, b) for j in range(size))]


def test_a_kept_result_is_neither_computed_nor_exchanged_again(tmp_path: Path) -> None:
    run_ranks(_kept, 3, tmp_path)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


def _unused() -> None:
    """A rank whose output nobody uses still does its part for the others."""
    case, cp = Case(RowMask(20), chunks=1), ContextParallel(dist.group.WORLD)
    plan = case.plan(2)
    tensors = case.tensors()
    tensors[2][positions(plan, 1)] = 0.0
    want, mine = wanted(case, *tensors), positions(plan, cp.rank)
    q, kv, d_out = (x[mine].clone() for x in tensors)
    out = context_attention(q.requires_grad_(), kv.requires_grad_(), plan, cp, case.kernel, batch=1).out
    (_NoGradient.apply(out) if cp.rank else out).backward(d_out)
    assert q.grad is not None and kv.grad is not None
    assert_law({"q": q.grad, "kv": kv.grad}, {name: want[name][mine] for name in ("q", "kv")}, FP64)


def test_an_output_without_a_gradient(tmp_path: Path) -> None:
    run_ranks(_unused, 2, tmp_path)


@pytest.mark.parametrize(
    "runs",
    [
        (((0, 3),),), (((2, 5), (7, 8)),), (((0, 3),), ((0, 3),)), (((2, 5), (7, 8)), ((2, 5), (7, 8))), (((0, 3), (5, 6)), ((4, 8),)),
        (((0, 3),), ()), ((), ()), ((),),
    ],
)  # fmt: skip
@pytest.mark.parametrize("b", [2])
def test_a_message_is_a_view_where_it_is_one_run_and_a_copy_elsewhere(runs: Any, b: int) -> None:
    columns = Columns(b, len(runs) == 1)
    message, kv = _Message(runs, columns), randn(9, 2 * b, 2, D)
    flat = message.pack(kv)
    one = len(set(runs)) == 1 and len(runs[0]) == 1
    assert flat.numel() == message.numel(kv) and (flat.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()) == one
    rows = message.rows(flat, kv)
    every = Rows.interleaved(kv, columns.sequences)
    for sequence, of_sequence in enumerate(runs):
        at = 0
        for start, stop in of_sequence:
            taken = rows.x[rows.slice(sequence, at, stop - start)]
            assert torch.equal(taken, every.x[every.slice(sequence, start, stop - start)])
            at += stop - start
    total = torch.ones_like(kv)
    for part, rows_of_run in message.parts(flat, total):
        rows_of_run.add_(part)
    needed = torch.zeros(9, columns.sequences, dtype=torch.bool)
    for sequence, of_sequence in enumerate(runs):
        for start, stop in of_sequence:
            needed[start:stop, sequence] = True
    needed = needed.repeat_interleave(2 * b // columns.sequences, 1)[..., None, None]
    assert torch.equal(total, torch.ones_like(kv) + kv * needed)


# dropout


def _dropout() -> None:
    """Hidden by hash, it is that of one process, whose documents count their keys from their own beginning."""
    rate, s, b, r = 0.3, 31, 2, 3
    row_keys = torch.randint(-(2**31), 2**31 - 1, (2 * b, r, s), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for mask in (
        RowMask(s), RowMask(s, window=7), RowMask(s, documents=((4, 18, s), (11, s)), window=9), RowMask(s, documents=((9, s),)),
        RowMask(s, causal=False, lengths=(20, 5)),
    ):  # fmt: skip
        case = Case(mask, b, r, kernel=Reference(rate), chunks=3)
        tensors = case.tensors()
        q, k, v = (x.clone().requires_grad_() for x in (tensors[0], tensors[1][:, :, :1], tensors[1][:, :, 1:]))
        lengths = None if mask.lengths is None else torch.tensor(mask.lengths)
        documents = None if mask.documents is None else tuple(mask.documents[i % len(mask.documents)] for i in range(b))
        whole = fold_mask(AttentionMask(mask.causal, lengths, documents, window=mask.window), 2)
        out = core_attention(q, k, v, whole, kernel="reference", dropout=rate, dropout_rows=row_keys)
        out.backward(tensors[2])
        assert q.grad is not None and k.grad is not None and v.grad is not None
        mine = positions(case.plan(3), dist.get_rank())
        found, _ = computed(case, tensors, row_keys=row_keys.permute(2, 0, 1)[mine])
        want = {"out": out.detach(), "q": q.grad, "kv": torch.cat([k.grad, v.grad], 2)}
        assert_law(found, {name: x[mine] for name, x in want.items()}, FP64)


def test_attention_dropout_is_that_of_one_process(tmp_path: Path) -> None:
    run_ranks(_dropout, 3, tmp_path)


# misuse


@pytest.mark.parametrize(
    "change, message",
    [
        ({"plan": plan_context(RowMask(8), cut_row(RowMask(8), 2))}, "the plan is for 2 ranks, and the cp group has 1"),
        ({"q": randn(7, 2, 1, D)}, "cp rank 0 has queries of 7 positions and keys of 8, and the plan gives it 8"),
        ({"kv": randn(8, 4, 2, D)}, r"queries \(8, 2, 1, 4\) and keys and values \(8, 4, 2, 4\) do not fit together for 1 sequences"),
        ({"counts": (1, 2)}, r"with \(1, 2\) queries for each key"),
        ({"plan": plan_context(RowMask(8, lengths=(3, 4)), (((0, 8),),))}, "the mask describes 2 sequences, and there are 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_sent(change: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"q": randn(8, 2, 1, D), "kv": randn(8, 2, 2, D), "plan": plan_context(RowMask(8), cut_row(RowMask(8), 1))}
    context_attention(**right, cp=NO_CP, kernel=CPUFlash(), batch=1)
    with pytest.raises(ValueError, match=message):
        context_attention(**(right | change), cp=NO_CP, kernel=CPUFlash(), batch=1)
