"""Ops of a step as a GPU would meet them, recognised by name on the CPU: none makes the host wait, and products are few and large.

An op whose result's size, or whose operand, has to cross between the two would stop the host until everything launched so
far has run, and break the capture of a CUDA graph; tests/gpu has torch itself watch. Eight small products, one for each
rank, leave a GPU half empty.
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
    """Notes ops for which the host of a GPU would wait, and counts batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in WAITS or by_mask:
            self.found.append(name)
        self.products += name == "bmm"
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_what_it_is_for() -> None:
    x = torch.arange(4.0)
    with Watch() as watch:
        x[x > 1]
        torch.tensor([1, 2])
        x.sum().item()
        x.nonzero()
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert watch.found == ["index", "lift_fresh", "_local_scalar_dense", "nonzero"] and watch.products == 1


def _step(case: Case, forward: int, backward: int) -> None:
    """``forward`` and ``backward``: batched products of each layer before exchanges, with all destinations in one."""
    config = shape(**{"seq_length": case.seq, "num_layers": 2, **case.model})
    sharded = Sharded(case, make_model(config, dtype=case.dtype))
    batch = sharded.batch(0)
    sharded.gradients.start_step()
    sharded.gradients.last_micro_batch()
    ctx = context(config, batch)
    with Watch() as first:
        loss, _ = sharded.model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx, sharded.events)
    with Watch() as second:
        loss.backward()
    assert not first.found + second.found, f"the host would wait for the device: {first.found + second.found}"
    if forward >= 0:
        assert (first.products, second.products) == (2 * forward, 2 * backward)
    sharded.gradients.finish_step()


PLAIN = {"disable_bias_linear": True}


@pytest.mark.parametrize("case, forward, backward", [
    (Case(model={"hidden_dropout": 0.2}), 0, 0), (Case(tp=2, model={"hidden_dropout": 0.2}), -1, -1),
    (Case(tp=2, tp_seq=True, model={**GROUPED, "position_embedding_type": "rope", "qk_layernorm": True}), -1, -1),
    (Case(sp=2, model=PLAIN), 1, 1), (Case(sp=4, model={"num_attention_heads": 8, **PLAIN}), 1, 1),
    (Case(sp=2, mode="split-qkv", model=PLAIN), 3, 1), (Case(sp=2, mode="chunked", model=PLAIN), 2, 2),
    (Case(sp=2, mode="chunked", kernels={"recompute_granularity": "full"}), -1, -1),
    (Case(sp=2, mode="split-qkv", padding=True, seq=9, model=GROUPED), -1, -1),
    (Case(sp=3, model=PLAIN), 0, 0),  # uneven heads: a product for each destination
    # ranks whose queries use two key heads unevenly
    (Case(sp=3, model={"num_attention_heads": 8, "kv_channels": 4, "position_embedding_type": "rope", **GROUPED}), -1, -1),
], ids=str)  # fmt: skip
def test_no_step_waits_for_the_device_and_all_destinations_are_one_product(case: Case, forward: int, backward: int, tmp_path: Path) -> None:
    run_ranks(_step, case.world, tmp_path, case, forward, backward)
