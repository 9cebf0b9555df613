"""A step never makes the host wait for the device: no op whose result's size, or whose operand, has to cross between the two.

On a GPU each of those would stop the host until everything launched so far has run, and break the capture of a CUDA
graph; tests/gpu has torch itself watch. Here, on the CPU, the ops are recognised by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import Case, Sharded, context
from support.ranks import run_ranks
from support.tiny import make_model, shape
from torch.utils._python_dispatch import TorchDispatchMode

GROUPED = {"group_query_attention": True, "num_query_groups": 2}
# torch.tensor(list) is lift_fresh; x[mask] is index with a mask
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "_unique2", "unique_dim", "bincount", "equal"}


class Watch(TorchDispatchMode):
    """Notes ops for which the host of a GPU would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in WAITS or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_what_it_is_for() -> None:
    x = torch.arange(4.0)
    with Watch() as watch:
        x[x > 1]
        torch.tensor([1, 2])
        x.sum().item()
        x.nonzero()
    assert watch.found == ["index", "lift_fresh", "_local_scalar_dense", "nonzero"]


def _step(case: Case) -> None:
    sharded = Sharded(case, make_model(shape(**{"seq_length": case.seq, **case.model}), dtype=case.dtype))
    batch = sharded.batch(0)
    sharded.gradients.start_step()
    sharded.gradients.last_micro_batch()
    ctx = context(sharded.model.config, batch)
    with Watch() as watch:
        loss, _ = sharded.model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx, sharded.events)
        loss.backward()
    assert not watch.found, f"the host would wait for the device: {watch.found}"
    sharded.gradients.finish_step()


CASES = [
    Case(model={"hidden_dropout": 0.2}),
    Case(tp=2, model={"hidden_dropout": 0.2}),
    Case(tp=2, tp_seq=True, model={**GROUPED, "position_embedding_type": "rope", "qk_layernorm": True}),
    Case(sp=2, mode="chunked", kernels={"recompute_granularity": "full"}),
    Case(sp=2, mode="split-qkv", padding=True, seq=9, model=GROUPED),
    # ranks whose queries use two key heads unevenly
    Case(sp=3, model={"num_attention_heads": 8, "kv_channels": 4, "position_embedding_type": "rope", **GROUPED}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_waits_for_the_device(case: Case, tmp_path: Path) -> None:
    run_ranks(_step, case.world, tmp_path, case)
