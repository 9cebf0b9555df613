"""ZeRO after schedules: gradients and weights after steps of one process, whatever is split and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.preset_models import make, plain
from support.ranks import run_ranks
from test_schedule_ulysses import hf_batch
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.schedule import Mesh

OPTIMIZER = OptimizerConfig(lr=0.05, adam_eps=1e-3, clip_grad=0.5)
Case = tuple[str, int, int, bool, int, bool]


def batches(count: int) -> list[dict[str, Tensor]]:
    made = [hf_batch(8), hf_batch(8)][:count]
    made[-1] = {name: t.flip(0) if name == "attention_mask" or count == 1 else t for name, t in made[-1].items()}
    made[-1]["attention_mask"] = made[0]["attention_mask"]
    return made


#: four blocks, so that with two buffers for them one gives way to another before its backward pass
CHANGES: dict[str, dict[str, Any]] = {"llama": {"num_hidden_layers": 4}}


def plain_steps(name: str, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of three steps of torch's own AdamW on the model as it is, and the weights after them."""
    model, norms = make(name, **CHANGES.get(name, {})).double(), []
    apart = [[p for p in model.parameters() if (p.ndim >= 2) == decayed] for decayed in (True, False)]
    groups = [{"params": apart[0], "weight_decay": OPTIMIZER.weight_decay}, {"params": apart[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, eps=OPTIMIZER.adam_eps)
    for _ in range(3):
        optimizer.zero_grad()
        for batch in batches(micro_batches):
            model(**batch).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)))
        optimizer.step()
    return norms, {name: t.detach() for name, t in model.state_dict().items()}


def steps_of(name: str, case: Case, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same, split and sharded."""
    _, tp, sp, seq, stage, recompute = case
    mesh = Mesh.of(ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=sp))
    s = plain(name, mesh, seq=seq, **CHANGES.get(name, {}))
    model: Any = s.model.double()
    if recompute:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # the older name warns
    s.ulysses()
    s.zero(stage, OPTIMIZER, micro_batches=micro_batches)
    s.apply()
    assert s.applied is not None and s.applied.zero is not None
    norms = []
    for _ in range(3):
        for batch in batches(micro_batches):  # all dp ranks have the same, so each counts for its share
            loss = model(**batch).loss / mesh.dp.size()
            s.applied.zero.weights.forget()  # as an evaluation in between does: blocks come back into other buffers
            s.applied.zero.backward(loss)
        norms.append(s.applied.zero.step())
    return norms, s.applied.full_state_dict()


def check(cases: list[Case], micro_batches: int) -> None:
    known: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    for case in cases:
        name = case[0]
        if name not in known:
            known[name] = plain_steps(name, micro_batches)
        norms, weights = steps_of(name, case, micro_batches)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(known[name][0]), rtol=1e-6, atol=0.0, msg=f"{case}: {norms}")
        for key, want in known[name][1].items():
            torch.testing.assert_close(weights[key], want, rtol=1e-6, atol=1e-7, msg=lambda m, case=case, key=key: f"{case} {key}: {m}")


TWO: list[Case] = [
    # model, tp, sp, tp_seq, stage, recompute
    ("llama", 1, 1, False, 3, False),
    ("llama", 2, 1, True, 1, False),
    ("llama", 1, 2, False, 3, True),
    ("gpt2", 1, 2, False, 3, False),
    ("bert", 1, 1, False, 2, False),
]
FOUR: list[Case] = [("llama", 2, 2, True, 3, False), ("bert", 2, 1, True, 3, True), ("gpt2", 2, 1, False, 1, False)]


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(check, 2, tmp_path, TWO, 2)


@pytest.mark.long
def test_on_four_ranks(tmp_path: Path) -> None:
    run_ranks(check, 4, tmp_path, FOUR, 1)
