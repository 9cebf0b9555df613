"""What went wrong in public implementations of Ulysses and of chunked losses, one test for each, in the situation in which it did.

The names carry the number of the report or repair (DeepSpeed's unless said otherwise); each docstring's sentence is
what happened there, the test is that ours does not do it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import reference, tiny
from support.errors import FP64, assert_law, law_error
from support.late_network import late_network
from support.layouts import Case, Sharded, batch_of, check, context, want_of
from support.ranks import run_ranks
from support.tagged_heads import check_tags
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.ops.norm import NormInFront, NormSpec
from megatron_sp.parallel.attention_block import attention_block
from megatron_sp.parallel.attention_core import Core
from megatron_sp.parallel.heads import Sections, plan_heads
from megatron_sp.parallel.lm_head import lm_head_loss
from megatron_sp.parallel.parallel_context import SequenceParallel
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel
from megatron_sp.parallel.ulysses import AttentionPlan

MODES: list[tuple[Any, int]] = [("none", 1), ("split-qkv", 1), ("chunked", 2)]
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
ROPE = {"position_embedding_type": "rope"}


def test_5664_heads_are_not_mixed_on_the_way_back(tmp_path: Path) -> None:
    """The second exchange transposed the wrong dims: shapes fitted, heads and positions were mixed, models did not converge."""
    run_ranks(_tags_of_equal_dims, 4, tmp_path)


def _tags_of_equal_dims() -> None:
    # every dim equal to the number of ranks: no shape can give a mistake away
    for mode, chunks in MODES:
        check_tags(dist.group.WORLD, queries_per_group=1, groups=4, s=4, b=4, d=4, mode=mode, num_chunks=chunks)
        check_tags(dist.group.WORLD, queries_per_group=1, groups=16, s=16, b=4, d=4, mode=mode, num_chunks=chunks)


@pytest.mark.parametrize(("mode", "chunks"), MODES)
def test_5823_each_sample_of_a_batch_gets_its_own_gradients(mode: Any, chunks: int, tmp_path: Path) -> None:
    """Batches of more than one sample came out wrong."""
    run_ranks(_samples_apart, 2, tmp_path, mode, chunks)


def _samples_apart(mode: Any, chunks: int) -> None:
    case = Case(sp=2, mode=mode, chunks=chunks, batch=3, model=GROUPED)
    check(case)
    config = tiny.shape(**{"seq_length": case.seq, **case.model})
    sharded = Sharded(case, tiny.make_model(config))
    together = sharded.step(), {n: g.clone() for n, g in sharded.grads().items()}
    batch = batch_of(case, config, 0)
    alone: dict[str, Tensor] = {}
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        one = {name: t[i : i + 1] for name, t in batch.items()}
        sharded.gradients.start_step()
        sharded.gradients.last_micro_batch()
        mine, _ = sharded.model(one["tokens"], one["labels"], one["loss_mask"], context(config, one), sharded.events)
        mine.backward()
        sharded.gradients.finish_step()
        dist.all_reduce(part := mine.detach().clone())
        loss += part
        alone = {n: alone.get(n, 0.0) + g for n, g in sharded.grads().items()}
    assert_law({"loss": together[0], **together[1]}, {"loss": loss, **alone}, FP64)


@pytest.mark.parametrize(("mode", "chunks"), MODES)
@pytest.mark.parametrize("sp", [2, 4])
def test_5691_8342_gradients_of_queries_and_keys_are_in_order_with_overlap(mode: Any, chunks: int, sp: int, tmp_path: Path) -> None:
    """With overlap on, dq and dk were used as they had arrived, without the permutation, so dW_q and dW_k were wrong and dW_v was right."""
    run_ranks(_weights_of_q_k_v, sp, tmp_path, mode, chunks)


def _weights_of_q_k_v(mode: Any, chunks: int) -> None:
    sp = dist.get_world_size()
    gradients: dict[bool, dict[str, Tensor]] = {}
    for overlap in (True, False):
        case = Case(sp=sp, mode=mode, chunks=chunks, overlap=overlap, batch=3)
        config = tiny.shape(**{"seq_length": case.seq})
        whole = tiny.make_model(config)
        sharded = Sharded(case, whole)
        sharded.step()
        gradients[overlap] = {n: g.clone() for n, g in sharded.grads().items()}
        want = want_of(case, whole)
        d, g = config.head_dim, config.num_groups
        for layer in range(tiny.LAYERS):
            for what in ("weight", "bias"):
                name = f"decoder.layers.{layer}.self_attention.linear_qkv.{what}"
                got, true = (t.reshape(g, -1, d, *t.shape[1:]) for t in (gradients[overlap][name], want[name]))
                for part, index in (("q", slice(0, -2)), ("k", -2), ("v", -1)):
                    if (what, part) != ("bias", "k"):  # zero in exact arithmetic
                        assert law_error(got[:, index], true[:, index]) <= FP64, f"layer {layer}: d{what} of {part}"
    assert all(torch.equal(gradients[True][n], g) for n, g in gradients[False].items()), "overlap changed bits"


@pytest.mark.parametrize(("heads", "sp"), [(4, 4), (6, 3), (12, 4), (6, 4), (7, 4), (5, 2)])
def test_6797_local_heads_need_not_divide_again(heads: int, sp: int, tmp_path: Path) -> None:
    """The way for uneven heads was chosen for the second exchange by the local number of heads, which may be no multiple of the ranks."""
    run_ranks(_second_exchange, sp, tmp_path, heads)


def _second_exchange(heads: int) -> None:
    for mode, chunks in MODES:
        for b in (1, 3):
            check_tags(dist.group.WORLD, queries_per_group=1, groups=heads, s=9, b=b, d=5, mode=mode, num_chunks=chunks)


@pytest.mark.parametrize(("mode", "chunks"), MODES)
def test_6750_sequence_first_shapes_survive_the_second_exchange(mode: Any, chunks: int, tmp_path: Path) -> None:
    """[4, 2, 8, 3] (sequence first) came back from the second exchange as [2, 16, 2, 3], and backward raised."""
    run_ranks(_sequence_first, 2, tmp_path, mode, chunks)


def region(x: Tensor, w_qkv: Tensor, w_proj: Tensor, r: int, d: int, plan: AttentionPlan) -> Tensor:
    """The attention region with a causal attention, normed by RMS with weights of one."""
    norm = NormInFront(NormSpec("RMSNorm", 1e-5), torch.ones(x.shape[-1], dtype=x.dtype), None)
    return attention_block(x, norm, (w_qkv, None), (w_proj, None), _Causal(r, d), plan)[0]


class _Causal(Core):
    """Causal attention on heads of one query each (r = 1, so that rows are q, k, v for each head)."""

    parameters = ()

    def __init__(self, r: int, d: int) -> None:
        assert r == 1
        self.d = d

    def prepare(self, recv_buffers: dict[str, Tensor], share: Any) -> tuple[Tensor, Tensor, Tensor]:
        s, b = next(iter(recv_buffers.values())).shape[:2]
        if "qkv" in recv_buffers:
            heads = recv_buffers["qkv"].reshape(s, b, -1, 3, self.d)
            q, k, v = heads.unbind(3)
        else:
            q, k, v = (recv_buffers[part].reshape(s, b, -1, self.d) for part in "qkv")
        return tuple(t.reshape(s, -1, 1, self.d) for t in (q, k, v))  # type: ignore[return-value]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Any, kept: Any) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


def _region_inputs(n: int, d: int, s: int, b: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = ((s, b, h), (3 * n * d, h), (h, n * d))
    x, w_qkv, w_proj = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return x, w_qkv, w_proj


def _dense(x: Tensor, w_qkv: Tensor, w_proj: Tensor, n: int, d: int) -> Tensor:
    """The region by plain formulas."""
    s, b, _ = x.shape
    normed = reference.norm(x, torch.ones(x.shape[-1], dtype=x.dtype), None, 1e-5)
    q, k, v = (normed @ w_qkv.t()).view(s, b, n, 3, d).permute(3, 1, 2, 0, 4)  # each [b, n, s, d]
    scores = (q @ k.transpose(-1, -2) / d**0.5).masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
    return x + (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(s, b, n * d) @ w_proj.t()


def _sequence_first(mode: Any, chunks: int) -> None:
    n, d, s, b, h = 8, 3, 8, 2, 7  # a rank holds [4, 2, 8, 3]
    rank, group = dist.get_rank(), dist.group.WORLD
    x_all, w_qkv, w_proj = (t.requires_grad_() for t in _region_inputs(n, d, s, b, h))
    want = _dense(x_all, w_qkv, w_proj, n, d)
    want.sin().sum().backward()
    x = x_all.detach()[4 * rank : 4 * rank + 4].clone().requires_grad_()
    wq, wp = (t.detach().clone().requires_grad_() for t in (w_qkv, w_proj))
    plan = AttentionPlan(tuple(plan_heads(Sections.in_groups(1, n, d), 2, mode, chunks)), d, s, NO_TP, SequenceParallel(group, True))
    out = region(x, wq, wp, 1, d, plan)
    assert out.shape == (4, 2, h)
    out.sin().sum().backward()
    assert wq.grad is not None and wp.grad is not None and x_all.grad is not None
    dist.all_reduce(wq.grad)
    dist.all_reduce(wp.grad)
    part = slice(4 * rank, 4 * rank + 4)
    assert_law(
        {"out": out, "x": x.grad, "w_qkv": wq.grad, "w_proj": wp.grad},
        {"out": want[part], "x": x_all.grad[part], "w_qkv": w_qkv.grad, "w_proj": w_proj.grad}, FP64,
    )  # fmt: skip


def test_8316_two_models_of_other_heads_in_one_process(tmp_path: Path) -> None:
    """The number of key heads was global to the process, so a second model, or a tensor-parallel one, changed how the first dealt them."""
    run_ranks(_two_models, 4, tmp_path)


def _two_models() -> None:
    cases = [
        Case(sp=4, mode="chunked", model={"num_attention_heads": 12, "kv_channels": 2}),
        Case(sp=4, mode="split-qkv", model={"num_attention_heads": 6, "kv_channels": 4, **GROUPED}),
        Case(tp=2, sp=2, mode="none", model={"group_query_attention": True, "num_query_groups": 1}),
    ]
    wholes = [tiny.make_model(tiny.shape(**{"seq_length": case.seq, **case.model})) for case in cases]
    models = [Sharded(case, whole) for case, whole in zip(cases, wholes, strict=True)]
    losses = []
    for m, case in zip(models, cases, strict=True):  # all forward passes, then all backward passes, the first model's first
        m.gradients.start_step()
        m.gradients.last_micro_batch()
        batch = batch_of(case, m.model.config, 0)
        ctx = context(m.model.config, batch)
        losses.append(m.model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx, m.events)[0])
    for m, case, whole, loss in zip(models, cases, wholes, losses, strict=True):
        loss.backward()
        m.gradients.finish_step()
        want = want_of(case, whole)
        del want["loss"]
        assert_law(m.grads(), {n: m.part(n, t) for n, t in want.items()}, FP64)


@pytest.mark.parametrize(("tp", "sp", "dp"), [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_7672_7809_ranks_of_a_group_are_not_ranks_of_the_world(tp: int, sp: int, dp: int, tmp_path: Path) -> None:
    """The backward of a gathered loss took its part by the rank in the world, which is outside of a group smaller than the world."""
    run_ranks(_small_groups, 4, tmp_path, tp, sp, dp)


def _small_groups(tp: int, sp: int, dp: int) -> None:
    check(Case(tp=tp, sp=sp, dp=dp, tp_seq=tp > 1, ragged=True, mode="chunked" if sp > 1 else "none", seq=7))
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=sp)
    group = groups.sp if sp > 1 else groups.tp
    check_tags(group, queries_per_group=2, groups=2, s=5, b=2, d=2, mode="none")
    gather = TensorParallel(group, seq=True)
    mine = torch.full((2,), float(dist.get_rank()))
    members = dist.get_process_group_ranks(group)
    assert gather.enter_async(mine).wait().tolist() == [float(r) for r in members for _ in range(2)]
    part = gather.leave_async(torch.arange(2.0 * len(members))).wait()
    assert part.tolist() == [len(members) * (2.0 * group.rank() + i) for i in range(2)]


def _head(chunk: int | None, scales: tuple[float, ...], mask: Tensor, seq: bool) -> None:
    """The head's loss times several later factors, against dense cross entropy; vocabulary over all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    vocab, h, (s, b) = 10, 6, mask.shape
    g = torch.Generator().manual_seed(4)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in ((s, b, h), (vocab, h)))
    labels = torch.randint(0, vocab, (s, b), generator=g)
    want = (F.cross_entropy((x @ w.t()).flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()).sum()
    for scale in scales:
        want = want * scale
    want.backward()
    tp = TensorParallel(dist.group.WORLD, seq)
    part = slice(rank * s // size, (rank + 1) * s // size) if seq else slice(0, s)
    rows = slice(rank * vocab // size, (rank + 1) * vocab // size)
    mine, table = (t.detach().clone().requires_grad_() for t in (x.detach()[part], w.detach()[rows]))
    got, *_ = lm_head_loss(mine, table, labels, mask, vocab_size=vocab, chunk_tokens=chunk, tp=tp)
    for scale in scales:
        got = got * scale
    got.backward()
    assert x.grad is not None and w.grad is not None and mine.grad is not None and table.grad is not None
    assert_law({"loss": got, "x": mine.grad, "w": table.grad}, {"loss": want, "x": x.grad[part], "w": w.grad[rows]}, FP64)
    for found, true in ((mine.grad, x.grad[part]), (table.grad, w.grad[rows])):
        assert float(found.norm() / true.norm()) == pytest.approx(1.0, rel=1e-12)


def _tiled_loss() -> None:
    s, b = 8, 3
    mask = torch.zeros(s, b, dtype=torch.float64)
    mask[0], mask[5, 1], mask[7] = 1.0, 0.25, 3.0  # some tiles without a loss token, others with many
    for seq in (False, True):
        for chunk in (1, 2, 5, 7, 16, 23, 24, None):
            _head(chunk, (), mask, seq)


@pytest.mark.parametrize("tp", [1, 2])
def test_8587_a_loss_in_tiles_has_the_gradient_of_the_whole(tp: int, tmp_path: Path) -> None:
    """Tiles were averaged one by one: with tiles of unequal numbers of loss tokens the gradient was 0.375 to 1.5 times the true one."""
    run_ranks(_tiled_loss, tp, tmp_path)


def _scaled_later() -> None:
    mask = torch.rand(8, 3, dtype=torch.float64)
    for seq in (False, True):
        for scales in ((1 / 16,), (1 / 16, 4.0, 1 / 3), (0.0078125, 65536.0)):
            for chunk in (5, None):
                _head(chunk, scales, mask, seq)


@pytest.mark.parametrize("tp", [1, 2])
def test_tiled_fused_logits_loss_honours_any_later_scaling(tp: int, tmp_path: Path) -> None:
    """The head's weight gradient, found in the forward pass, ignored what the loss was multiplied with later: off by exactly 1/scale."""
    run_ranks(_scaled_later, tp, tmp_path)


def _scaled_with_sink(scale: float) -> None:
    case = Case(tp=2, model={"untie_embeddings_and_output_weights": True}, micro_batches=2)
    config = tiny.shape(**{"seq_length": case.seq, **case.model})
    whole = tiny.make_model(config)
    m = Sharded(case, whole)
    m.gradients.start_step()
    for i in range(2):  # the first gradient is written ahead into the main gradient, the second added from a buffer
        batch = batch_of(case, config, i)
        loss = m.model(batch["tokens"], batch["labels"], batch["loss_mask"], context(config, batch), m.events)[0] * scale
        if i == 1:
            m.gradients.last_micro_batch()
        loss.backward()
    m.gradients.finish_step()
    want = {n: m.part(n, t * scale) for n, t in want_of(case, whole).items() if n != "loss"}
    assert_law(m.grads(), want, FP64)


@pytest.mark.parametrize("scale", [1 / 16, 1024.0])
def test_tiled_fused_logits_loss_honours_scaling_with_accumulation(scale: float, tmp_path: Path) -> None:
    """The same with gradient accumulation, or a loss scale."""
    run_ranks(_scaled_with_sink, 2, tmp_path, scale)


@pytest.mark.parametrize(("mode", "chunks"), MODES)
def test_megatron_415_every_exchange_waits_for_its_projection_and_is_waited_for(mode: Any, chunks: int, tmp_path: Path) -> None:
    """The mark that a projection was done got lost in a rearrangement: queries and keys were exchanged before they had been computed."""
    run_ranks(_late, 2, tmp_path, Case(sp=2, mode=mode, chunks=chunks, batch=2, model=ROPE))


def _late(case: Case) -> None:
    with late_network() as network:
        check(case)
    # each block exchanges at least once each way in forward, and again in backward
    exchanges = [work for work in network.started if work.name == "all_to_all"]
    assert len(exchanges) >= 4 * tiny.LAYERS


@pytest.mark.parametrize("overlap", [True, False])
def test_megatron_415_grouped_queries_and_tensor_parallelism_with_split_qkv(overlap: bool, tmp_path: Path) -> None:
    """Keys and values were viewed with the number of query heads, split-qkv refused to run without overlap, and tp did not work at all."""
    case = Case(tp=2, sp=2, mode="split-qkv", overlap=overlap, model={**GROUPED, "num_attention_heads": 8, "kv_channels": 2})
    run_ranks(check, 4, tmp_path, case)


@pytest.mark.parametrize(("mode", "chunks"), MODES)
def test_leaf_and_frozen_inputs_go_through(mode: Any, chunks: int, tmp_path: Path) -> None:
    """Backward hooks were put on the nodes after q and k, which do not exist for leaves and for inputs without gradient: it crashed."""
    run_ranks(_leaf_and_frozen, 2, tmp_path, mode, chunks)


def _leaf_and_frozen(mode: Any, chunks: int) -> None:
    n, d, s, b, h = 3, 4, 7, 2, 5  # uneven heads, a padded length
    rank, group, local = dist.get_rank(), dist.group.WORLD, 4
    start, inside = rank * local, min(local, s - rank * local)
    x_all, w_qkv, w_proj = (t.requires_grad_() for t in _region_inputs(n, d, s, b, h))
    want = _dense(x_all, w_qkv, w_proj, n, d)
    want.sin().sum().backward()
    true = {"x": x_all.grad, "w_qkv": w_qkv.grad, "w_proj": w_proj.grad}
    plan = AttentionPlan(tuple(plan_heads(Sections.in_groups(1, n, d), 2, mode, chunks)), d, s, NO_TP, SequenceParallel(group, True))
    for trained in ({"x"}, {"w_qkv"}, {"w_proj"}, {"x", "w_proj"}, {"w_qkv", "w_proj"}, set[str]()):
        padded = F.pad(x_all.detach(), (0, 0, 0, 0, 0, 2 * local - s))[start : start + local]
        mine = {"x": padded, "w_qkv": w_qkv.detach(), "w_proj": w_proj.detach()}
        mine = {name: t.clone().requires_grad_(name in trained) for name, t in mine.items()}
        with late_network():
            out = region(mine["x"], mine["w_qkv"], mine["w_proj"], 1, d, plan)
            assert out.requires_grad == bool(trained)
            if trained:
                out[:inside].sin().sum().backward()
        assert law_error(out[:inside], want[start : start + inside]) <= FP64
        with torch.no_grad():
            again = region(mine["x"], mine["w_qkv"], mine["w_proj"], 1, d, plan)
        assert torch.equal(again, out)
        for name, tensor in mine.items():
            assert (tensor.grad is not None) == (name in trained)
            if tensor.grad is None:
                continue
            if name == "x":
                assert law_error(tensor.grad[:inside], true["x"][start : start + inside]) <= FP64  # type: ignore[index]
            else:
                dist.all_reduce(tensor.grad)
                assert law_error(tensor.grad, true[name]) <= FP64  # type: ignore[arg-type]
