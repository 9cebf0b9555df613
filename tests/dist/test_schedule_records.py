"""hidden_states and attentions of split models: shares on each rank, made whole by complete(), with the gradients of the whole model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.preset_models import B, S, batch_of, plain
from support.ranks import run_ranks
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, Schedule
from megatron_sp.utils.errors import ConfigError

ASKED = {"output_hidden_states": True, "output_attentions": True}


def of_records(result: Any) -> Tensor:
    """A loss in which all that was recorded counts, and no two elements alike."""
    kept = [t for t in (*result.hidden_states, *result.attentions)]
    return result.loss + sum((t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in kept)  # type: ignore[no-any-return]


def made(name: str, tp: int, *, seq: bool, region: str = "") -> Schedule:
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=dist.get_world_size() // tp)
    s = plain(name, Mesh.of(groups), seq=seq, attn_implementation="eager")
    if groups.sp.size() > 1:
        s.ulysses(**({"enter": f"{region}.0", "leave": f"{region}.1"} if region else {}))
    return s


def whole(cases: list[tuple[str, int, bool, str]]) -> None:
    for name, tp, seq, region in cases:
        given = {**batch_of(name), **ASKED}
        s = made(name, tp, seq=seq, region=region)
        try:
            s.verify(given, loss=of_records)
        except Exception as error:
            raise AssertionError(f"{(name, tp, seq, region)}: {error}") from error
        s.apply()
        assert s.applied is not None
        result = s.model(**given)
        cut = S // (dist.get_world_size() // tp) // (tp if seq else 1)
        heads = 4 // dist.get_world_size()
        assert list(result.attentions[0].shape) == [B, heads, S, S]
        assert result.hidden_states[1 if region else 0].shape[1] == cut or not seq
        result = s.applied.complete(result)
        assert {tuple(t.shape) for t in result.hidden_states} == {(B, S, 24)}
        assert {tuple(t.shape) for t in result.attentions} == {(B, 4, S, S)}


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(whole, 2, tmp_path, [("llama", 2, True, ""), ("gpt2", 1, False, ""), ("bert", 1, False, "bert.encoder.layer")])


@pytest.mark.long
def test_more_on_two_ranks(tmp_path: Path) -> None:
    cases = [("llama", 2, False, ""), ("bert", 2, True, ""), ("gpt2", 2, True, ""), ("bert", 1, False, "")]
    run_ranks(whole, 2, tmp_path, cases)


@pytest.mark.long
def test_on_four_ranks(tmp_path: Path) -> None:
    cases = [("gpt2", 2, True, ""), ("bert", 2, False, ""), ("bert", 2, True, "bert.encoder.layer")]
    run_ranks(whole, 4, tmp_path, cases)


def test_a_plain_tuple_of_shares_is_refused() -> None:
    s = plain("llama", Mesh.sizes(tp=2), seq=True)
    s.apply(verify=False)
    assert s.applied is not None
    s.applied.region.positions = S
    records = (torch.zeros(B, S // 2, 24), torch.zeros(B, S // 2, 24))
    for result in ((torch.zeros(()), records), (torch.zeros(()), (torch.zeros(B, 2, S, S),))):
        with pytest.raises(ConfigError, match=r"result 1 is a plain tuple of records.*return_dict=True"):
            s.applied.complete(result)
    s.applied.complete((torch.zeros(B, S // 2, 24), (torch.zeros(B, S, 24),)))  # not a record; whole
