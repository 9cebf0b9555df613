"""What the tests of single ops share: gradients by name, and a main-gradient buffer that shows every element nobody wrote."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from megatron_sp.ops import allocator
from megatron_sp.ops.attention_pieces import AttentionPiece as Piece
from megatron_sp.ops.attention_pieces import Stage, halves, stage_of
from megatron_sp.ops.partial_attention import Columns, Partial, PieceKernel, Rows, attend, attend_backward
from megatron_sp.parallel.context_plan import cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask

Inputs = dict[str, Tensor]


def leaves(frozen: tuple[str, ...] = (), **tensors: Tensor) -> Inputs:
    """Copies that require gradients (with the strides of the originals), except those named in ``frozen``."""
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(name not in frozen)
    return made


def gradients(fn: Callable[[Inputs], Tensor], inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor | None]:
    """``{"out": fn(inputs), name: gradient or None, ...}`` from one backward pass with ``grad_out``."""
    for tensor in inputs.values():
        tensor.grad = None
    out = fn(inputs)
    out.backward(grad_out)
    return {"out": out.detach(), **{name: tensor.grad for name, tensor in inputs.items()}}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers, always the same, on the CPU whatever torch's default device is."""
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


@pytest.fixture(params=["one block", "blocks"])
def in_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Small operands go through in one block, as usual, or as large ones do: in many, with results in the arena."""
    stage_of.cache_clear()  # stages keep their calls
    if request.param == "blocks":
        monkeypatch.setattr(allocator, "_MIN_BYTES", 1)
    yield request.param == "blocks"
    stage_of.cache_clear()


def pairs_of(pieces: tuple[Piece, ...], s: int, window: int | None, sequences: int = 1) -> Tensor:
    """int [sequences, s, s]: in how many pieces each pair is, by the definition of the kinds."""
    found = torch.zeros(sequences, s, s, dtype=torch.int64)
    for piece in pieces:
        a = torch.arange(piece.q_stop - piece.q_start)[:, None]
        distance = a + piece.offset - torch.arange(piece.k_stop - piece.k_start)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if piece.kind != "full":
            seen = distance >= 0
        if piece.kind == "band" and window is not None:
            seen &= distance < window
        found[piece.sequence, piece.q_start : piece.q_stop, piece.k_start : piece.k_stop] += seen
    return found


def message(kv: Tensor, b: int, alike: bool) -> Rows:
    """Rows of keys as a message has them: for sequences that differ one after another, each of its own length."""
    if alike:
        return Rows.interleaved(kv, 1)
    return Rows(torch.cat(list(kv.unflatten(1, (b, -1)).unbind(1))), tuple(len(kv) * i for i in range(b)), 1)


def by_stages(kernel: PieceKernel, stages: list[tuple[Stage, Rows]], q: Tensor, d_out: Tensor, columns: Columns) -> dict[str, Tensor]:
    """Out, lse and gradients of attention to the keys of all stages; backward in halves of each stage."""
    so_far, found = Partial(q, columns, d_out.shape[3]), {}
    for stage, rows in stages:
        attend(kernel, stage, q, rows, so_far, columns)
    out, d_q = so_far.out.to(q.dtype), torch.zeros(q.shape, dtype=so_far.out.dtype, device=q.device)
    for number, (stage, rows) in enumerate(stages):
        d_kv = Rows(torch.zeros_like(rows.x, dtype=so_far.out.dtype), rows.starts, rows.stride)
        for half in halves(stage.pieces, stage.window):
            attend_backward(kernel, Stage(half, stage.window), (q, out, so_far.lse, d_out), rows, d_q, d_kv, columns)
        found[f"kv {number}"] = d_kv.x
    return {"out": out, "lse": so_far.lse[so_far.lse > -torch.inf], "q": d_q, **found}


def of_a_rank(
    kernel: PieceKernel, mask: RowMask, r: int, d: int, dtype: torch.dtype, device: str = "cpu", d_v: int | None = None
) -> dict[str, Tensor]:  # fmt: skip
    """Output and gradients of one of three ranks of context parallelism, of two sequences, on values that bf16 has."""
    d_v = d_v or d
    plan, rank = plan_context(mask, cut_row(mask, 3, 2)), 1
    columns, length = Columns(2, plan.alike), plan.lengths[rank]
    q, d_out = (randn(length, 4, r, width, seed=seed).bfloat16().to(device, dtype) for seed, width in enumerate((d, d_v)))
    stages = []
    for source in range(3):
        rows = [sum(y - x for x, y in runs) for runs in plan.rows(rank, source)]
        kv = randn(length if source == rank else max([1, *rows]), 4, d + d_v, seed=2 + source).bfloat16().to(device, dtype)
        keys = Rows.interleaved(kv, columns.sequences) if source == rank else message(kv, 2, plan.alike)
        stages.append((Stage(plan.pieces(rank, source), plan.mask.window), keys))
    return {name: x.double().cpu() for name, x in by_stages(kernel, stages, q, d_out, columns).items()}


class PoisonedSink:
    """Holds one buffer for each parameter, filled with NaN: a first write that adds instead of overwriting stays NaN.

    Args:
        params: held by the main_grad; others are left to autograd.
        dtype: of the buffers; None: that of each parameter.
    """

    def __init__(self, *params: Tensor, dtype: torch.dtype | None = None) -> None:
        self.views = {id(p): torch.full(p.shape, float("nan"), dtype=dtype or p.dtype) for p in params}
        self.claims: list[bool] = []
        self._written: set[int] = set()
        self.ahead: set[int] = set()
        self.kept: list[Callable[[], object]] | None = None  # a list: gradients are put off

    @property
    def defers(self) -> bool:
        return self.kept is not None

    @property
    def held(self) -> Container[int]:
        return self.views

    def later(self, param: Tensor, write: Callable[[], object]) -> bool:
        if self.kept is None or id(param) not in self.views:
            return False
        self.kept.append(write)
        return True

    @torch.no_grad()
    def catch_up(self) -> None:
        kept, self.kept = self.kept or [], None
        for write in kept:
            write()

    def reserve(self, param: Tensor) -> tuple[Tensor, bool] | None:
        if id(param) not in self.views:
            return None
        assert id(param) not in self.ahead, "reserved ahead and not settled"
        fresh = id(param) not in self._written
        self._written.add(id(param))
        self.claims.append(fresh)
        return self.views[id(param)], fresh

    def reserve_ahead(self, param: Tensor) -> Tensor | None:
        if id(param) not in self.views or id(param) in self._written:
            return None
        self._written.add(id(param))
        self.ahead.add(id(param))
        return self.views[id(param)]

    def put_sums(self, sums: Sequence[tuple[Tensor, tuple[Tensor, bool]]]) -> None:
        from megatron_sp.ops.kernels import biases

        biases.finish(sums)

    def finish(self, param: Tensor) -> None:
        self.ahead.remove(id(param))

    def of(self, param: Tensor) -> Tensor:
        assert id(param) not in self.ahead, "reserved ahead and not settled"
        return self.views[id(param)]
