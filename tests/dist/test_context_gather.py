"""What ranks with unequal shares of a sequence put together: all positions in order, the last one, and one answer for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import tiny
from support.ranks import run_ranks

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import KernelConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.gather import agreed, last_position, whole_sequence
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.training.microbatches import require_same_sequences
from megatron_sp.utils.errors import DataError

MASKS = [
    RowMask(1), RowMask(2, causal=False), RowMask(7), RowMask(16), RowMask(17, window=3), RowMask(17, documents=((2, 3, 17), (9, 17))),
    RowMask(13, causal=False, lengths=(13, 5)),
]  # fmt: skip


def _gathered(cp: int, sp: int) -> None:
    groups = ParallelGroups.create(torch.device("cpu"), cp_size=cp, sp_size=sp)
    for chunks in (None, 1, 3):
        layout = ParallelContext.of(groups, cp_chunks=chunks)
        for mask in MASKS:
            cut = layout.cut(mask)
            x = torch.arange(mask.length * 6).view(mask.length, 2, 3)  # rows name their position
            mine = cut.take(x)[cut.sp_slice]
            assert torch.equal(whole_sequence(mine, cut), x), mask
            assert torch.equal(last_position(mine, cut), x[-1]), mask
    assert agreed([dist.get_rank() + 5, 3], layout, groups.device) == [5, 3]


@pytest.mark.parametrize("cp, sp", [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_rows_come_back_in_order(cp: int, sp: int, tmp_path: Path) -> None:
    run_ranks(_gathered, cp * sp, tmp_path, cp, sp)


def _read(axis: str, words: str) -> None:
    """Four ranks, two of each replica: what they have read is compared within a replica."""
    groups = ParallelGroups.create(torch.device("cpu"), **{f"{axis}_size": 2})
    rank, tokens = (2 * groups.dp_rank + groups.pp_rank if axis == "pp" else groups.rank), torch.zeros(2, 8, dtype=torch.int64)
    documents, lengths = torch.tensor([[0] * 8, [0] * 3 + [1] * 5]), torch.tensor([8, 5])
    require_same_sequences([{"tokens": tokens, "length": lengths - groups.dp_rank}, {"tokens": tokens}], groups)
    for mine in (
        {"tokens": tokens, "length": lengths - int(rank == 3)}, {"tokens": tokens, **({"documents": documents} if rank != 2 else {})},
        {"tokens": tokens[:, : 7 + (rank < 3)]}, {"tokens": tokens, ("documents" if rank == 3 else "length"): documents},
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"ranks {words}\\) share each sequence, and have read sequences of"):
            require_same_sequences([{"tokens": tokens}, mine], groups)


@pytest.mark.parametrize(
    ("axis", "words"), [("cp", r"2 to 3 \(cp 2 \* sp 1 \* tp 1 = 2"), ("pp", r"1, 3 \(pp 2 \* cp 1 \* sp 1 \* tp 1 = 2")]
)
def test_what_ranks_have_read_is_compared(tmp_path: Path, axis: str, words: str) -> None:
    run_ranks(_read, 4, tmp_path, axis, words)


def _scored() -> None:
    """A model's logits and scores on four ranks are those of one."""
    groups = ParallelGroups.create(torch.device("cpu"), cp_size=2, sp_size=2)
    config = tiny.shape(position_embedding_type="rope")
    whole, part = (
        GPTModel(config, KernelConfig(), seed=5, dtype=torch.float64, layout=layout)
        for layout in (None, ParallelContext.of(groups, cp_chunks=2))
    )
    for length in (1, 3, 13):
        tokens, labels = (torch.randint(0, 37, (2, length), generator=torch.Generator().manual_seed(i)) for i in range(2))
        ctx = ForwardContext(AttentionMask(documents=((length // 2, length), (length,)) if length > 1 else None))
        for got, want in zip(part.score(tokens, labels, ctx), whole.score(tokens, labels, ctx), strict=True):
            assert torch.allclose(got.double(), want.double(), rtol=0, atol=1e-10)
        assert torch.allclose(part.all_logits(tokens, ctx), whole.all_logits(tokens, ctx), rtol=0, atol=1e-10)
        assert torch.allclose(part.next_logits(tokens, ctx), whole.next_logits(tokens, ctx), rtol=0, atol=1e-10)


def test_scores_and_logits(tmp_path: Path) -> None:
    run_ranks(_scored, 4, tmp_path)
