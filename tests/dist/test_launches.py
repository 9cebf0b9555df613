"""How many products an attention block starts: eight small ones, one for each rank, leave a GPU half empty."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import Case, Sharded, batch_of, context
from support.ranks import run_ranks
from support.tiny import make_model, shape
from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _products(case: Case, forward: int, backward: int) -> None:
    """``forward`` and ``backward``: batched products of each layer before exchanges, with all destinations in one."""
    config = shape(**{"seq_length": case.seq, "num_layers": 2, "disable_bias_linear": True, **case.model})
    sharded = Sharded(case, make_model(config))
    batch = batch_of(case, config, 0)
    with Count() as count:
        loss, _ = sharded.model(batch["tokens"], batch["labels"], batch["loss_mask"], context(config, batch))
    assert count.found["bmm"] == 2 * forward
    with Count() as count:
        loss.backward()
    assert count.found["bmm"] == 2 * backward


@pytest.mark.parametrize(
    "case, forward, backward",
    [
        (Case(sp=2), 1, 1),
        (Case(sp=4, model={"num_attention_heads": 8}), 1, 1),
        (Case(sp=2, mode="split-qkv"), 3, 1),
        (Case(sp=2, mode="chunked"), 2, 2),
        (Case(sp=3), 0, 0),  # uneven heads: a product for each destination
        (Case(), 0, 0),
    ],
    ids=str,
)
def test_all_destinations_are_one_batched_product(case: Case, forward: int, backward: int, tmp_path: Path) -> None:
    run_ranks(_products, case.world, tmp_path, case, forward, backward)


def test_the_count_sees_a_batched_product() -> None:
    with Count() as count:
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert count.found["bmm"] == 1
