"""Early exchanges: refused where a module does something to q, k or v that they would leave out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.schedule import Mesh, schedule
from megatron_sp.schedule.apply.hf_attention import OpTrace
from megatron_sp.utils.errors import ConfigError

Change = Callable[[Tensor], Tensor]


def turned(x: Tensor) -> Tensor:
    return x * torch.ones(6) + torch.cat([-x[..., 3:], x[..., :3]], -1) * torch.zeros(6)


def passes(module: Change, own: Change) -> None:
    """A module does the one to its queries, and the early exchange the other; keys and values stay as they are."""
    k, v = torch.ones(2, 4, 6), torch.ones(2, 4, 6)
    with OpTrace("blocks.0.attention", "plan.yaml:3") as passage:
        passage.sent("q", own(passage.begin(torch.ones(2, 4, 2, 6))))
        q = module(passage.begin(torch.ones(2, 4, 6)))
        passage.begin(k), passage.begin(v)
    passage.require(q, k, v)


def test_shapes_may_change_and_all_heads_are_rotated_as_one_is() -> None:
    passes(lambda x: x.view(2, 4, 1, 6).transpose(1, 2), lambda x: x)
    passes(lambda x: turned(x.view(2, 4, 1, 6).transpose(1, 2)).contiguous(), turned)


@pytest.mark.parametrize(
    "module, own, said",
    [
        (lambda x: x * 0.5, lambda x: x, "does this to its queries, and no exchange may start before that: mul 0.5"),
        (lambda x: x.clamp(-8, 8), lambda x: x, "clamp -8 8"),
        (lambda x: x.clamp_(-8, 8), lambda x: x, "clamp -8 8"),
        (lambda x: turned(x) * 2, turned, "mul 2"),
        (lambda x: torch.cat([turned(x), x], -1)[..., :6], turned, "cat"),
        (lambda x: x * nn.Parameter(torch.ones(6)), lambda x: x, "mul a parameter"),
        (lambda x: x, turned, "does not rotate its queries, though it is given angles"),
        (lambda x: torch.ones(2, 4, 6), lambda x: x, "does what cannot be followed to its queries"),
    ],
)
def test_what_else_is_done_is_refused(module: Change, own: Change, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        passes(module, own)
    assert said in str(caught.value) and "blocks.0.attention" in str(caught.value) and "(plan.yaml:3)" in str(caught.value)


def refused(model: nn.Module, said: str) -> None:
    s = schedule(model, Mesh.of(ParallelGroups.create(torch.device("cpu"), sp_size=2))).ulysses(overlap_qkv=True)
    with pytest.raises(ConfigError, match=said):
        s.apply()


def of_families() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    from support.preset_models import LLAMA, make

    refused(make("opt"), r"model\.decoder\.layers\.0\.self_attn does this to its queries.*: mul 0\.4082; leave overlap_qkv out \(test_sch")
    plain = {**LLAMA, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}
    smol = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**{**plain, "num_hidden_layers": 4}))
    refused(smol, r"model\.layers\.3\.self_attn does not rotate its queries")
    phi = transformers.PhiForCausalLM(transformers.PhiConfig(**plain))
    refused(phi, r"it is not known how model\.layers\.0\.self_attn \(PhiAttention\) rotates its heads")


@pytest.mark.long
def test_families_that_scale_rotate_in_some_layers_or_a_part_of_each_head(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")
    run_ranks(of_families, 2, tmp_path)
