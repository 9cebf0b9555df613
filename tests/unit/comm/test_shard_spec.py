"""Where a rank's part of a parameter lies: over all ranks every element of the whole is there, and is counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny

from megatron_sp.comm.shard_spec import ShardSpec, Sum
from megatron_sp.config.schema import KernelConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.tensor_parallel import TensorParallel


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def counted_views(spec: ShardSpec, local: torch.Tensor) -> list[torch.Tensor]:
    """The parts of ``local`` that its rank counts in the gradient norm."""
    if not spec.shape:
        return [local] if spec.counted else []
    return [local.narrow(spec.dim, start, length) for start, length in spec.counted]


def models(tp: int, seq: bool, **overrides: Any) -> list[GPTModel]:
    config = tiny.shape(
        num_layers=1, num_attention_heads=8, kv_channels=2, ffn_hidden_size=24 * tp, qk_layernorm=True,
        untie_embeddings_and_output_weights=True, make_vocab_size_divisible_by=4, **overrides,
    )  # fmt: skip
    made = []
    for rank in range(tp):
        layout = ParallelContext(tp=TensorParallel(tiny.Rank(rank, tp), seq and tp > 1))  # type: ignore[arg-type]
        made.append(GPTModel(config, KernelConfig(), seed=5, dtype=torch.float64, layout=layout))
    return made


GRID = [(tp, g, seq) for tp in (1, 2, 4, 8) for g in (1, 4, 8) for seq in (False, True)]


@pytest.mark.parametrize(("tp", "g", "seq"), GRID)
@pytest.mark.parametrize("llama", [False, True])
def test_every_parameter_of_a_model_is_tiled_and_counted_once(tp: int, g: int, seq: bool, llama: bool) -> None:
    more = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True} if llama else {}
    ranks = models(tp, seq, group_query_attention=True, num_query_groups=g, **more)
    specs = [shard_specs(model) for model in ranks]
    names = [name for name, _ in ranks[0].named_parameters()]
    assert all(sorted(s) == sorted(names) for s in specs)
    for name in names:
        of_rank = [s[name] for s in specs]
        shape = of_rank[0].shape
        assert all(s.shape == shape for s in of_rank)
        whole, held, counted = numbered(shape), torch.zeros(shape), torch.zeros(shape)
        for spec, model in zip(of_rank, ranks, strict=True):
            param = dict(model.named_parameters())[name]
            local = torch.full(param.shape, -1.0, dtype=torch.float64)
            taken = spec.take(whole)
            local.narrow(spec.dim, 0, taken.shape[spec.dim]).copy_(taken)
            for offsets, view in spec.pieces(local):  # what a piece says of its place is true
                place = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
                assert torch.equal(view, whole[place])
                held[place] += 1
            for view in counted_views(spec, local):
                real = view[view >= 0]  # rows of padding are zero: counting them adds nothing
                counted.view(-1)[real.long()] += 1
        assert (held >= 1).all(), f"{name}: some rank must hold each element"
        assert (counted == 1).all(), f"{name}: each element is counted once"
        if any(s.sums for s in of_rank):
            check_sums(name, of_rank, whole)
        else:
            assert (held == 1).all() or (held == tp).all(), f"{name}: held by some ranks and nowhere summed"


def check_sums(name: str, specs: list[ShardSpec], whole: torch.Tensor) -> None:
    """Equal slots mean equal rows, different slots different ones; what is held by several ranks is in a slot on each of them."""
    slots: dict[int, torch.Tensor] = {}
    summed, held = torch.zeros(whole.shape), torch.zeros(whole.shape)
    for spec in specs:
        local = spec.take(whole)
        held.view(-1)[local.flatten().long()] += 1
        for s in spec.sums:
            rows = local.narrow(spec.dim, s.start, s.length)
            assert 0 <= s.slot < s.num_slots
            assert torch.equal(slots.setdefault(s.slot, rows), rows), f"{name}: slot {s.slot} names different rows on different ranks"
            summed.view(-1)[rows.flatten().long()] += 1
    seen = torch.cat([rows.flatten() for rows in slots.values()])
    assert len(seen.unique()) == len(seen), f"{name}: two slots share rows"
    assert torch.equal(summed[held > 1], held[held > 1]), f"{name}: a replica's gradient is not summed"


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 4), ()])
def test_a_whole_parameter_is_counted_by_the_first_rank(tp: int, summed: bool, shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for rank in range(tp):
        spec = ShardSpec.whole(shape, rank, tp, summed=summed)
        assert torch.equal(spec.take(whole), whole)
        ((offsets, view),) = spec.pieces(whole)
        assert offsets == (0,) * len(shape) and view.shape == whole.shape
        assert sum(v.numel() for v in counted_views(spec, whole)) == (whole.numel() if rank == 0 else 0)
        assert spec.sums == ((Sum(0, shape[0] if shape else 1, 0, 1),) if summed and tp > 1 else ())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("runs", [((0, 3),), ((2, 2), (5, 1)), ((4, 2), (0, 1)), ((1, 0), (3, 2)), ((0, 0),)])
def test_take_and_pieces_are_inverse(dim: int, runs: tuple[tuple[int, int], ...]) -> None:
    shape = (6, 6)
    whole, spec = numbered(shape), ShardSpec.split(shape, dim, runs)
    local = spec.take(whole)
    assert local.shape[dim] == sum(length for _, length in runs)
    back = torch.full(shape, -1.0, dtype=torch.float64)
    for offsets, view in spec.pieces(local):
        back[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))] = view
    inside = torch.zeros(6, dtype=torch.bool)
    for start, length in runs:
        inside[start : start + length] = True
    kept = inside[:, None].expand(shape) if dim == 0 else inside.expand(shape)
    assert torch.equal(back[kept], whole[kept]) and (back[~kept] == -1).all()
    assert sum(v.numel() for v in counted_views(spec, local)) == local.numel()


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(2, 3\) is not \(3, 2\)"):
        ShardSpec.whole((3, 2), 0, 1).take(torch.zeros(2, 3))
