"""Every exchange and its adjoint: <A x, y> = <x, A^T y>, tags that come back to their places, and no use of a result before its wait()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.errors import FP64, assert_law, law_error
from support.late_network import late_network
from support.layouts import Case, check
from support.ranks import run_ranks
from support.tagged_heads import check_tags
from torch import Tensor

from megatron_sp.comm.collectives import all_gather_async, all_reduce_async, all_to_all_async, reduce_scatter_async
from megatron_sp.comm.groups import Group, ParallelGroups
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.norm import NormInFront, NormSpec
from megatron_sp.parallel import attention_block as block_module
from megatron_sp.parallel.attention_block import attention_block
from megatron_sp.parallel.attention_core import Core
from megatron_sp.parallel.heads import Sections, Share, key_of_each_query, plan_heads
from megatron_sp.parallel.linear import column_linear, embedding, row_linear
from megatron_sp.parallel.lm_head import lm_head_loss
from megatron_sp.parallel.parallel_context import NO_SP, SequenceParallel
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.parallel.ulysses import AttentionPlan

S, B, H = 12, 3, 5


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(*shape: int, seed: int) -> Tensor:
    """Another tensor on each rank."""
    return randn(*shape, seed=1000 * seed + dist.get_rank())


def total(x: Tensor, group: Group | None = None) -> float:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return float(x)


def assert_adjoint(ax_y: float, x_aty: float) -> None:
    assert abs(ax_y - x_aty) <= 1e-11 * max(abs(ax_y), 1.0), f"<A x, y> = {ax_y}, <x, A^T y> = {x_aty}"


# tensor parallel


def _enter_and_leave(seq: bool) -> None:
    size = dist.get_world_size()
    with late_network():
        tp = TensorParallel(dist.group.WORLD, seq)
        if seq:
            x, y = own(S // size, B, H, seed=1), own(S, B, H, seed=2)
        else:  # what goes in is the same on every rank, one vector and not several
            x, y = randn(S, B, H, seed=1), own(S, B, H, seed=2)
        ax, aty = tp.enter_async(x.clone()).wait(), tp.leave_async(y.clone()).wait()
        assert not ax.isnan().any() and not aty.isnan().any()
        here = (x * aty).sum()
        assert_adjoint(total((ax * y).sum()), total(here) if seq else float(here))


def _linear(seq: bool) -> None:
    """Column- and row-parallel layers are linear in x, and in W."""
    size, rank = dist.get_world_size(), dist.get_rank()
    tp = TensorParallel(dist.group.WORLD, seq)
    make: Any = own if seq else (lambda *shape, seed: randn(*shape, seed=seed))
    with late_network():
        y = own(S, B, 7, seed=3)
        for z in (make(S // tp.parts, B, H, seed=9), None):  # what arrives at the residual branch, if it is used
            x, w = make(S // tp.parts, B, H, seed=1).requires_grad_(), own(7, H, seed=2).requires_grad_()
            ax, again = column_linear(x, w, tp=tp)
            torch.autograd.backward([ax] if z is None else [ax, again], [y] if z is None else [y, z])
            assert x.grad is not None and w.grad is not None
            ax_y, replicas = total((ax * y).sum()), 1 if seq else size
            branch = 0.0 if z is None else total((x * z).sum() / replicas)
            assert_adjoint(ax_y + branch, total((x * x.grad).sum() / replicas))
            assert_adjoint(ax_y, total((w * w.grad).sum()))
        x, w = own(S, B, 7, seed=4).requires_grad_(), own(H, 7, seed=5).requires_grad_()
        y = make(S // tp.parts, B, H, seed=6)
        ax = row_linear(x, w, tp=tp)
        ax.backward(y)
        assert x.grad is not None and w.grad is not None
        ax_y = total((ax * y).sum() / (1 if seq else size))
        assert_adjoint(ax_y, total((x * x.grad).sum()))
        assert_adjoint(ax_y, total((w * w.grad).sum()))
        ids = torch.randint(0, 4 * size, (S, B), generator=torch.Generator().manual_seed(7))
        w = own(4, H, seed=8).requires_grad_()
        ax = embedding(ids, w, tp=tp)
        ax.backward(y)
        assert w.grad is not None
        assert_adjoint(total((ax * y).sum() / (1 if seq else size)), total((w * w.grad).sum()))
        whole = torch.cat([randn(4, H, seed=8000 + r) for r in range(size)])[ids]
        assert torch.equal(ax.detach(), whole[rank * S // size : (rank + 1) * S // size] if seq else whole)


def _lm_head(seq: bool) -> None:
    """Its way in and the reduction of the gradient on its way out, against the dense formula; vocabulary of 11 in parts of 3 or more."""
    size, rank, vocab = dist.get_world_size(), dist.get_rank(), 11
    rows = -(-vocab // size)
    x, w = randn(S, B, H, seed=1).requires_grad_(), randn(vocab, H, seed=2).requires_grad_()
    labels = torch.randint(0, vocab, (S, B), generator=torch.Generator().manual_seed(3))
    mask = randn(S, B, seed=4).abs()
    want = (F.cross_entropy((x @ w.t()).flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()).sum()
    (want * 0.25).backward()
    assert x.grad is not None and w.grad is not None
    tp = TensorParallel(dist.group.WORLD, seq)
    part = slice(rank * S // size, (rank + 1) * S // size) if seq else slice(0, S)
    with late_network():
        mine = x.detach()[part].clone().requires_grad_()
        table = F.pad(w.detach(), (0, 0, 0, rows * size - vocab))[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        loss, *_ = lm_head_loss(mine, table, labels, mask, vocab_size=vocab, chunk_tokens=5, tp=tp)
        (loss * 0.25).backward()
    w_grad = F.pad(w.grad, (0, 0, 0, rows * size - vocab))[rank * rows : (rank + 1) * rows]
    assert_law({"loss": loss, "x": mine.grad, "w": table.grad}, {"loss": want, "x": x.grad[part], "w": w_grad}, FP64)


@pytest.mark.parametrize("seq", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensor_parallel_exchanges_are_adjoint(size: int, seq: bool, tmp_path: Path) -> None:
    run_ranks(_all_of_tp, size, tmp_path, seq)


def _all_of_tp(seq: bool) -> None:
    _enter_and_leave(seq)
    _linear(seq)
    _lm_head(seq)


# Ulysses


def _exchange_pairs() -> None:
    """All-to-alls with the counts of every message, and with the counts swapped."""
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    tokens = 6
    with late_network():
        for r, g, mode, chunks in ((1, 7, "none", 1), (3, 2, "split-qkv", 1), (4, 1, "chunked", 2), (2, 4, "chunked", 3)):
            for chunk in plan_heads(Sections.in_groups(r, g, 1), size, mode, chunks):  # type: ignore[arg-type]
                for message in chunk.fresh.heads:
                    to = [tokens * width for width in message.widths]
                    mine = [to[rank]] * size
                    x, y = own(sum(to), seed=1), own(sum(mine), seed=2)
                    ax = all_to_all_async(x, to, torch.empty(sum(mine), dtype=x.dtype), mine, group).wait()
                    aty = all_to_all_async(y, mine, torch.empty(sum(to), dtype=x.dtype), to, group).wait()
                    assert_adjoint(total((ax * y).sum()), total((x * aty).sum()))


class LinearCore(Core):
    """An "attention" that is linear in q, k and v: a running sum over positions, another weight for each head; ``scale`` is a parameter."""

    def __init__(self, r: int, d: int, *, fused: bool) -> None:
        self.r, self.d, self.fused = r, d, fused
        self.scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        self.parameters = [self.scale]

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q, k, v = self._heads(recv_buffers, share)
        return q * self.scale, k, v

    def _heads(self, recv_buffers: dict[str, Tensor], share: Share) -> tuple[Tensor, Tensor | None, Tensor | None]:
        s, b = next(iter(recv_buffers.values())).shape[:2]
        queries, keys = len(share.queries), len(share.keys)
        if "q" in recv_buffers and "k" not in recv_buffers:  # made again
            pairs = recv_buffers.get("kv")
            q = recv_buffers["q"].reshape(s, b, -1, self.d)
            return (q, None, None) if pairs is None else (q, *pairs.reshape(s, b, -1, 2, self.d).unbind(3))
        if not self.fused:
            q, k, v = (recv_buffers[part].reshape(s, b, -1, self.d) for part in "qkv")
            return q, k, v
        heads = recv_buffers["qkv"].reshape(s, b, queries + 2 * keys, self.d)
        served = [sum(q // self.r == k for q in share.queries) for k in share.keys]
        if keys and len(set(served)) == 1:
            by_group = heads.view(s, b, keys, served[0] + 2, self.d)
            return by_group[:, :, :, :-2].reshape(s, b, queries, self.d), by_group[:, :, :, -2], by_group[:, :, :, -1]
        if not keys:
            return heads, None, None
        return heads[:, :, :queries], heads[:, :, queries : queries + keys], heads[:, :, queries + keys :]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        places = torch.tensor(key_of_each_query(share, self.r))
        weight = 1 + torch.tensor(list(share.queries), dtype=q.dtype)[:, None]
        return q * weight + 0.3 * k[:, :, places].cumsum(0) + v[:, :, places].cumsum(0) / weight


def _linear_norm(patch: pytest.MonkeyPatch) -> None:
    """The norm before the region is not linear: leave it out."""
    patch.setattr(block_module, "normed_by", lambda x, *_: (x, ()))

    def gradients(norm: Any, grad: Tensor, x: Tensor, stats: Any, need: Any, passed: Tensor | None, **_: Any) -> tuple[Tensor, None, None]:
        return grad if passed is None else grad + passed, None, None

    patch.setattr(block_module, "norm_gradients", gradients)


def _region(tp_size: int, seq: bool, mode: Any, chunks: int, r: int, g: int, s: int) -> None:
    """The attention region between norm and residual, linear in x, in W_qkv and in W_proj; equal to the same on one process."""
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=tp_size, sp_size=dist.get_world_size() // tp_size)
    tp, sp = TensorParallel(groups.tp, seq), SequenceParallel(groups.sp, overlap=True)
    d, b, n = 3, 2, r * g * tp_size
    core = LinearCore(r, d, fused=mode != "split-qkv")
    norm = NormInFront(NormSpec("RMSNorm", 1e-5), torch.ones(H, dtype=torch.float64), None)
    parts = sp.size * tp.parts
    padded = -(-s // parts) * parts
    x_all = F.pad(randn(s, b, H, seed=1), (0, 0, 0, 0, 0, padded - s))
    w_qkv, w_proj = randn(tp_size * g * (r + 2) * d, H, seed=2), randn(H, n * d, seed=3)
    y_all = F.pad(randn(s, b, H, seed=4), (0, 0, 0, 0, 0, padded - s))
    # leaves: this rank's positions and weights
    place = sp.rank * tp.parts + (tp.rank if seq else 0)
    cut = slice(place * padded // parts, (place + 1) * padded // parts)
    rows, columns = (slice(tp.rank * k // tp_size, (tp.rank + 1) * k // tp_size) for k in (len(w_qkv), n * d))
    with pytest.MonkeyPatch.context() as patch, late_network():
        _linear_norm(patch)
        x, wq, wp = (t.clone().requires_grad_() for t in (x_all[cut], w_qkv[rows], w_proj[:, columns]))
        plan = AttentionPlan(tuple(plan_heads(Sections.in_groups(r, g, d), sp.size, mode, chunks)), d, s, tp, sp, add_input=False)
        out, _ = attention_block(x, norm, (wq, None), (wp, None), core, plan)
        y = y_all[cut]
        out.backward(y)
        assert x.grad is not None and wq.grad is not None and wp.grad is not None
        replicas = 1 if seq else tp_size  # what every tp rank holds is one vector
        ax_y = total((out * y).sum()) / replicas
        assert_adjoint(ax_y, total((x * x.grad).sum()) / replicas)
        assert_adjoint(ax_y, total((wq * wq.grad).sum()))
        assert_adjoint(ax_y, total((wp * wp.grad).sum()))
        # one process: all tp ranks' groups side by side
        dense = AttentionPlan(tuple(plan_heads(Sections.in_groups(r, g, d), 1, "none")), d, s, NO_TP, NO_SP, add_input=False)
        fused = LinearCore(r, d, fused=True)
        whole = torch.zeros(s, b, H, dtype=torch.float64)
        for t in range(tp_size):
            a, c = (slice(t * k // tp_size, (t + 1) * k // tp_size) for k in (len(w_qkv), n * d))
            whole += attention_block(x_all[:s], norm, (w_qkv[a], None), (w_proj[:, c].contiguous(), None), fused, dense)[0]
        assert law_error(out[: max(0, s - cut.start)], whole[cut]) <= FP64
        whole.backward(y_all[:s])
        assert core.scale.grad is not None and fused.scale.grad is not None
        assert_adjoint(float(fused.scale.grad), total(core.scale.grad))


def _regions(sp: int) -> None:
    for mode, chunks in (("none", 1), ("split-qkv", 1), ("chunked", 2), ("chunked", 3)):
        for r, g in ((1, 4), (4, 1), (3, 2)):
            _region(1, False, mode, chunks, r, g, 2 * sp + 1)


def _regions_with_tp(seq: bool) -> None:
    for mode, chunks in (("none", 1), ("split-qkv", 1), ("chunked", 2)):
        _region(2, seq, mode, chunks, 3, 1, 9)


@pytest.mark.parametrize("sp", [1, 2, 3, 4])
def test_the_exchange_and_the_attention_region_are_adjoint(sp: int, tmp_path: Path) -> None:
    run_ranks(_ulysses, sp, tmp_path)


def _ulysses() -> None:
    _exchange_pairs()
    _regions(dist.get_world_size())


@pytest.mark.parametrize("seq", [False, True])
def test_the_attention_region_is_adjoint_with_tensor_parallelism(seq: bool, tmp_path: Path) -> None:
    run_ranks(_regions_with_tp, 4, tmp_path, seq)


def _round_trips() -> None:
    size = dist.get_world_size()
    shapes = [(1, 7), (4, 1), (2, 2), (3, 2), (5, 3), (2, 5)]  # (queries of a group, groups)
    modes: list[tuple[Any, int]] = [("none", 1), ("split-qkv", 1), ("chunked", 2), ("chunked", 3), ("chunked", 9)]
    with late_network():
        for number, (r, g) in enumerate(shapes):
            for s in (2 * size + 1, 1 if number < 2 else 2 * size):
                for mode, count in modes:
                    check_tags(
                        dist.group.WORLD, queries_per_group=r, groups=g, s=s, b=1 + number % 3, d=2, mode=mode, num_chunks=count,
                        overlap=(number + count) % 4 != 0,
                    )  # fmt: skip


@pytest.mark.parametrize("sp", [1, 2, 3, 4])
def test_every_element_arrives_where_the_plan_says_and_comes_back(sp: int, tmp_path: Path) -> None:
    run_ranks(_round_trips, sp, tmp_path)


# the whole model under a network that is late


ROPE = {"position_embedding_type": "rope"}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
LLAMA = {
    **ROPE,
    **GROUPED,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
MULTI_QUERY = {"group_query_attention": True, "num_query_groups": 1}
LATE = [
    Case(tp=2, tp_seq=True, seq=7, model={"hidden_dropout": 0.2}, kernels={"lm_head_chunk_tokens": 5}, micro_batches=2),
    Case(tp=2, dp=2, model={**MULTI_QUERY, "qk_layernorm": True}, micro_batches=2),
    *(Case(sp=4, mode=mode, seq=7, model={"num_attention_heads": 6, "kv_channels": 4, **GROUPED, **ROPE})
      for mode in ("none", "split-qkv", "chunked")),
    Case(sp=3, mode="chunked", chunks=3, model={"num_attention_heads": 6, "kv_channels": 4, **MULTI_QUERY, "qk_layernorm": True}),
    Case(tp=2, sp=2, tp_seq=True, seq=9, mode="chunked", model={**LLAMA, "num_attention_heads": 8},
         kernels={"recompute_granularity": "full"}),
    Case(tp=2, sp=2, tp_seq=False, seq=8, mode="split-qkv", model={"hidden_dropout": 0.2}, kernels={"recompute_granularity": "selective"}),
    Case(tp=2, sp=1, tp_seq=False, mode="none"),
]  # fmt: skip


def check_late(case: Case) -> None:
    with late_network() as network:
        check(case)
    assert network.started


@pytest.mark.parametrize("case", LATE, ids=str)
def test_nothing_is_used_before_it_is_there(case: Case, tmp_path: Path) -> None:
    run_ranks(check_late, case.world, tmp_path, case)


def _mistakes() -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    with pytest.raises(AssertionError, match="was never called on"), late_network():
        all_gather_async(torch.ones(2), group)
    for start in (all_gather_async, all_reduce_async, reduce_scatter_async):
        with late_network():
            x = torch.ones(size, 2)
            handle = start(x, group)
            if start is not reduce_scatter_async:  # its result is made in wait()
                assert handle._result.isnan().all()
            if start is not all_reduce_async:
                x.fill_(3.0)
                with pytest.raises(AssertionError, match=r"the operand of .* was written to"):
                    handle.wait()
            else:
                x[0] = 1.0
                with pytest.raises(AssertionError, match="the result of all_reduce was written to"):
                    handle.wait()


def test_the_late_network_catches_what_it_claims_to(tmp_path: Path) -> None:
    run_ranks(_mistakes, 2, tmp_path)


@pytest.mark.parametrize("tp_seq", [False, True])
def test_no_chunk_of_an_mlp_is_used_before_it_is_there(tp_seq: bool, tmp_path: Path) -> None:
    run_ranks(_late_mlp, 2, tmp_path, Case(tp=2, tp_seq=tp_seq, model={"hidden_dropout": 0.2}, kernels={"mlp_chunks": 3}))


def _late_mlp(case: Case) -> None:
    with late_network():
        check(case)
