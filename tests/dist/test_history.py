"""What went wrong in public implementations of Ulysses and of chunked losses, where the equality grid does not have the situation.

The names carry the number of the report or repair (DeepSpeed's unless said otherwise); each docstring's sentence is
what happened there, the test is that ours does not do it. Of the grid's layouts are: heads that are mixed on the way back
(5664), samples of a batch (5823), dq and dk as they arrive (5691), uneven heads (6797), sequence-first shapes (6750), groups
smaller than the world (7672, 7809), grouped queries with tensor parallelism and split-qkv (Megatron 415).
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
from support.layouts import Case, Sharded, batch_of, context, want_of
from support.ranks import run_ranks
from torch import Tensor

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


@pytest.mark.often("chunked-2")
@pytest.mark.parametrize(("mode", "chunks"), MODES)
def test_8342_overlap_changes_no_bit(mode: Any, chunks: int, tmp_path: Path) -> None:
    """With overlap on, dq and dk were used as they had arrived, without the permutation."""
    run_ranks(_with_and_without_overlap, 2, tmp_path, mode, chunks)


def _with_and_without_overlap(mode: Any, chunks: int) -> None:
    gradients = []
    for overlap in (True, False):
        case = Case(sp=2, mode=mode, chunks=chunks, overlap=overlap, batch=3)
        sharded = Sharded(case, tiny.make_model(tiny.shape(seq_length=case.seq)))
        sharded.step()
        gradients.append({name: grad.clone() for name, grad in sharded.grads().items()})
    assert all(torch.equal(gradients[0][name], grad) for name, grad in gradients[1].items())


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
    with late_network():
        got, *_ = lm_head_loss(mine, table, labels, mask, vocab_size=vocab, chunk_tokens=chunk, tp=tp)
        for scale in scales:
            got = got * scale
        got.backward()
    assert x.grad is not None and w.grad is not None and mine.grad is not None and table.grad is not None
    assert_law({"loss": got, "x": mine.grad, "w": table.grad}, {"loss": want, "x": x.grad[part], "w": w.grad[rows]}, FP64)


def _losses_in_tiles() -> None:
    mask = torch.zeros(8, 3, dtype=torch.float64)
    mask[0], mask[5, 1], mask[7] = 1.0, 0.25, 3.0  # some tiles without a loss token, others with many
    for seq in (False, True):
        for chunk in (1, 2, 5, 7, 16, 23, 24, None):
            _head(chunk, (), mask, seq)
        for scales in ((1 / 16,), (1 / 16, 4.0, 1 / 3), (0.0078125, 65536.0)):
            _head(5, scales, mask, seq)


def test_8587_a_loss_in_tiles_has_the_gradient_of_the_whole_whatever_it_is_multiplied_with(tmp_path: Path) -> None:
    """Tiles were averaged one by one: with unequal numbers of loss tokens the gradient was 0.375 to 1.5 times the true one.

    TiledFusedLogitsLoss, which finds the head's weight gradient in the forward pass, ignored what the loss was multiplied
    with later: off by exactly 1/scale. One process is tests/unit/parallel/test_lm_head.py.
    """
    run_ranks(_losses_in_tiles, 2, tmp_path)


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


@pytest.mark.often("0.0625")
@pytest.mark.parametrize("scale", [1 / 16, 1024.0])
def test_tiled_fused_logits_loss_honours_scaling_with_accumulation(scale: float, tmp_path: Path) -> None:
    """The same with gradient accumulation, or a loss scale."""
    run_ranks(_scaled_with_sink, 2, tmp_path, scale)


class _Causal(Core):
    """Causal attention on heads of one query each, so that rows are q, k, v for each head."""

    parameters = ()

    def __init__(self, d: int) -> None:
        self.d = d

    def prepare(self, recv_buffers: dict[str, Tensor], share: Any) -> tuple[Tensor, Tensor, Tensor]:
        s, b = next(iter(recv_buffers.values())).shape[:2]
        if "qkv" in recv_buffers:
            q, k, v = recv_buffers["qkv"].reshape(s, b, -1, 3, self.d).unbind(3)
        else:
            q, k, v = (recv_buffers[part].reshape(s, b, -1, self.d) for part in "qkv")
        return tuple(t.reshape(s, -1, 1, self.d) for t in (q, k, v))  # type: ignore[return-value]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Any, kept: Any) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


def _dense(x: Tensor, w_qkv: Tensor, w_proj: Tensor, n: int, d: int) -> Tensor:
    """The attention region by plain formulas, normed by RMS with weights of one."""
    s, b, _ = x.shape
    normed = reference.norm(x, torch.ones(x.shape[-1], dtype=x.dtype), None, 1e-5)
    q, k, v = (normed @ w_qkv.t()).view(s, b, n, 3, d).permute(3, 1, 2, 0, 4)  # each [b, n, s, d]
    scores = (q @ k.transpose(-1, -2) / d**0.5).masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
    return x + (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(s, b, n * d) @ w_proj.t()


@pytest.mark.often("split-qkv-1")
@pytest.mark.parametrize(("mode", "chunks"), MODES)
def test_leaf_and_frozen_inputs_go_through(mode: Any, chunks: int, tmp_path: Path) -> None:
    """Backward hooks were put on the nodes after q and k, which do not exist for leaves and for inputs without gradient: it crashed."""
    run_ranks(_leaf_and_frozen, 2, tmp_path, mode, chunks)


def _leaf_and_frozen(mode: Any, chunks: int) -> None:
    n, d, s, b, h = 3, 4, 7, 2, 5  # uneven heads, a padded length
    rank, group, local = dist.get_rank(), dist.group.WORLD, 4
    start, inside = rank * local, min(local, s - rank * local)
    g = torch.Generator().manual_seed(3)
    shapes = {"x": (s, b, h), "w_qkv": (3 * n * d, h), "w_proj": (h, n * d)}
    whole = {name: torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}
    want = _dense(*whole.values(), n, d)
    want.sin().sum().backward()
    norm = NormInFront(NormSpec("RMSNorm", 1e-5), torch.ones(h, dtype=torch.float64), None)
    plan = AttentionPlan(tuple(plan_heads(Sections.in_groups(1, n, d), 2, mode, chunks)), d, s, NO_TP, SequenceParallel(group, True))

    def region(x: Tensor, w_qkv: Tensor, w_proj: Tensor) -> Tensor:
        return attention_block(x, norm, (w_qkv, None), (w_proj, None), _Causal(d), plan)[0]

    for trained in ({"x"}, {"w_qkv"}, {"w_proj"}, {"x", "w_proj"}, {"w_qkv", "w_proj"}, set[str]()):
        mine = {name: t.detach() for name, t in whole.items()}
        mine["x"] = F.pad(mine["x"], (0, 0, 0, 0, 0, 2 * local - s))[start : start + local]
        mine = {name: t.clone().requires_grad_(name in trained) for name, t in mine.items()}
        with late_network():
            out = region(**mine)
            assert out.requires_grad == bool(trained)
            if trained:
                out[:inside].sin().sum().backward()
        assert law_error(out[:inside], want[start : start + inside]) <= FP64
        with torch.no_grad():
            assert torch.equal(region(**mine), out)
        for name, tensor in mine.items():
            true = whole[name].grad
            assert true is not None and (tensor.grad is not None) == (name in trained)
            if tensor.grad is None:
                continue
            if name == "x":
                assert law_error(tensor.grad[:inside], true[start : start + inside]) <= FP64
            else:
                dist.all_reduce(tensor.grad)
                assert law_error(tensor.grad, true) <= FP64
