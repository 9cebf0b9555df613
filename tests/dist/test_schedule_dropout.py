"""Dropout of split models: the same on all ranks where they have the same, different on shares, and again so in recomputation.

The masks of all ranks are put together and given to the whole model, which must then have the same loss and gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.preset_models import batch_of, make, plain
from support.ranks import run_ranks
from support.schedule_masks import of_all_ranks, recorded, replayed
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule
from megatron_sp.schedule.verify.copies import Float64Mode

RATE = 0.2
RATES = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"), "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "llama": ("attention_dropout",),
}  # fmt: skip


def changes(name: str) -> dict[str, Any]:
    return {"attn_implementation": "eager", **dict.fromkeys(RATES[name], RATE)}


def scheduled(name: str, tp: int, *, seq: bool, region: bool = False) -> Schedule:
    """Lines that say nothing of random numbers."""
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=dist.get_world_size() // tp)
    s = plain(name, Mesh.of(groups), seq=seq, **changes(name))
    s.model.double()
    if groups.sp.size() > 1:
        s.ulysses(**({"enter": "bert.encoder.layer.0", "leave": "bert.encoder.layer.1"} if region else {}))
    return s


def step(name: str, model: nn.Module) -> Tensor:
    torch.manual_seed(7)
    with Float64Mode():
        loss: Tensor = model(**batch_of(name)).loss
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def same(cases: list[tuple[str, int, bool, str]]) -> None:
    for name, tp, seq, more in cases:
        s = scheduled(name, tp, seq=seq, region=more == "region")
        if more == "verified":
            s.verify(batch_of(name))
        if more == "recomputed":  # inside of what differs, where what ranks share is not torch's own state
            s["transformer.h.*.attn" if name == "gpt2" else "bert.encoder.layer.*"].checkpoint()
        s.model.eval()  # as from_pretrained leaves it
        s.apply().train()
        assert s.applied is not None
        with recorded() as masks:
            loss = step(name, s.model)
        s.applied.finish_backward()
        whole = make(name, **changes(name)).double()
        if more == "recomputed":
            forward = 3 * len(whole.base_model.h if name == "gpt2" else whole.bert.encoder.layer) + 1
            assert len(masks) > forward
            masks = masks[:forward]
        with replayed(of_all_ranks(masks), tp, dist.get_world_size() // tp):
            expected = step(name, whole)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0, msg=lambda m, case=(name, tp, seq, more): f"{case}: {m}")
        wanted = {n: p.grad for n, p in whole.named_parameters()}
        for n, grad in s.applied.gradients().items():
            torch.testing.assert_close(
                s.applied.whole(n, grad), wanted[n], rtol=1e-8, atol=1e-10, msg=lambda m, case=(name, tp, seq, more, n): f"{case}: {m}"
            )


TWO = [
    ("bert", 2, True, ""), ("bert", 1, False, "region"), ("gpt2", 2, False, "recomputed"), ("llama", 1, False, ""),
]  # fmt: skip
MORE = [
    ("bert", 2, False, ""), ("bert", 2, False, "verified"), ("bert", 2, True, "verified"), ("bert", 2, True, "recomputed"),
    ("bert", 1, False, ""), ("gpt2", 2, False, ""), ("gpt2", 2, True, ""), ("gpt2", 1, False, ""), ("llama", 2, True, ""),
]  # fmt: skip
FOUR = [("bert", 2, True, ""), ("bert", 2, False, "region"), ("gpt2", 2, False, ""), ("llama", 2, False, "")]


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(same, 2, tmp_path, TWO)


@pytest.mark.long
def test_more_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(same, 2, tmp_path, MORE)


@pytest.mark.long
def test_on_four_ranks(tmp_path: Path) -> None:
    run_ranks(same, 4, tmp_path, FOUR)
