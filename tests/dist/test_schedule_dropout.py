"""Dropout of split models: the same on all ranks where they have the same, different on shares, and again so in recomputation.

The masks of all ranks are put together and given to the whole model, which must then have the same loss and gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.schedule_masks import of_all_ranks, recorded, replayed
from test_schedule import SIZES, V, batch, schedule_bert, schedule_gpt2, schedule_llama
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.verify.copies import Float64Mode

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

RATE = 0.2
WRITERS = {"bert": schedule_bert, "gpt2": schedule_gpt2, "llama": schedule_llama}


def dropping(name: str) -> Any:
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(**SIZES, vocab_size=V, hidden_dropout_prob=RATE, attention_probs_dropout_prob=RATE)
    elif name == "gpt2":
        rates = {"attn_pdrop": RATE, "resid_pdrop": RATE, "embd_pdrop": RATE}
        config = transformers.GPT2Config(n_layer=2, n_embd=24, n_head=4, n_positions=16, vocab_size=V, **rates)
    else:
        config = transformers.LlamaConfig(**SIZES, vocab_size=V, num_key_value_heads=2, attention_dropout=RATE)
    config._attn_implementation = "eager"
    kind = {"bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[name]
    return getattr(transformers, kind)(config).double()


def scheduled(model: nn.Module, name: str, tp: int, *, seq: bool, region: bool = False) -> Schedule:
    """Lines that say nothing of random numbers."""
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=dist.get_world_size() // tp)
    s = schedule(model, Mesh.of(groups))
    if tp > 1:
        WRITERS[name](s, seq)
    if groups.sp.size() > 1:
        s.ulysses(**({"enter": "bert.encoder.layer.0", "leave": "bert.encoder.layer.1"} if region else {}))
    return s


def step(model: nn.Module) -> Tensor:
    torch.manual_seed(7)
    with Float64Mode():
        loss: Tensor = model(**batch()).loss
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def same(cases: list[tuple[str, int, bool, str]]) -> None:
    for name, tp, seq, more in cases:
        s = scheduled(dropping(name), name, tp, seq=seq, region=more == "region")
        if more == "verified":
            s.verify(batch())
        if more == "recomputed":  # inside of what differs, where what ranks share is not torch's own state
            s["transformer.h.*.attn" if name == "gpt2" else "bert.encoder.layer.*"].checkpoint()
        s.model.eval()  # as from_pretrained leaves it
        s.apply().train()
        assert s.applied is not None
        with recorded() as masks:
            loss = step(s.model)
        s.applied.finish_backward()
        whole = dropping(name)
        if more == "recomputed":
            forward = 3 * len(whole.base_model.h if name == "gpt2" else whole.bert.encoder.layer) + 1
            assert len(masks) > forward
            masks = masks[:forward]
        with replayed(of_all_ranks(masks), tp, dist.get_world_size() // tp):
            expected = step(whole)
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
