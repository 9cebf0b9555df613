"""What is refused without a run: each mistake is refused; the message names the module, the line and the way out."""

from __future__ import annotations

import pytest
import torch
from support.schedule_toys import toy, write
from torch import nn

from megatron_sp.schedule import Mesh, PathError, Schedule, schedule
from megatron_sp.utils.errors import ConfigError

HERE = "test_schedule_rules.py:"


def refused(s: Schedule, *words: str) -> str:
    """The message of check(); it has these words."""
    with pytest.raises(ConfigError) as error:
        s.check()
    text = str(error.value)
    assert all(word in text for word in words), text
    return text


def without(s: Schedule, on: str, do: str) -> Schedule:
    """Less one line, to be written otherwise."""
    kept = [d for d in s.directives if (d.on, d.do) != (on, do)]
    assert len(kept) == len(s.directives) - 1
    s.directives = kept
    return s


def test_one_rank_needs_nothing() -> None:
    assert toy(1, seq=False).check().startswith("the lines fit")


def test_e1_paths_and_parameters() -> None:
    with pytest.raises(PathError, match=r"no 'attentoin'.*did you mean attention\?"):
        toy()["blocks.*.attentoin"]
    s = toy(seq=False)
    s["blocks.0.mlp.up"].shard("weihgt", 0)
    refused(s, "blocks.0.mlp.up has no parameter 'weihgt'", "did you mean weight?", HERE, "E1")


def test_e2_axes_and_heads() -> None:
    refused(toy(3, seq=False), "blocks.0.attention.q.weight: axis 0 (16) must be a multiple of tp (3): tp 2, 4, 8, 16 would work")
    s = toy(8, seq=False)
    s.model.blocks[0].attention.num_attention_heads = 4  # type: ignore[union-attr,index]
    refused(s, "blocks.0.attention.q: num_attention_heads (4) must be multiples of tp (8): tp 2, 4 would work", "schedule_toys.py:", "E2")


def test_e2_key_and_value_heads() -> None:
    s = toy(4, seq=False)
    attention = s.model.blocks[0].attention  # type: ignore[union-attr,index]
    attention.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2})()  # type: ignore[union-attr]
    refused(s, "num_attention_heads (4), num_key_value_heads (2) must be multiples of tp (4): tp 2 would work", "E2")


def test_e3_the_sum_behind_a_bias() -> None:
    s = schedule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), Mesh.sizes(tp=2))
    s["0"].column()
    s["1"].shard("weight", 1)
    s[""].sync("fwd_post", "all_reduce")
    refused(s, "1 is split along its inputs, so each of the tp (2) ranks would add its bias", "E3")


def test_e4_a_bias_that_is_not_split_along() -> None:
    s = without(toy(seq=False), "blocks.*.mlp.up", "column")
    s["blocks.*.mlp.up"].shard("weight", 0)
    refused(s, "blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias is not", HERE, '.shard("bias", axis=0)', "E4")


def test_e9_tied_parameters() -> None:
    s = toy(seq=False, tied=True)
    s["embed"].vocab_parallel()
    refused(s, "embed.weight and head.weight are one tied parameter", "E9")
    s["head"].vocab_parallel()
    s.check()


def test_e10_split_twice_and_otherwise() -> None:
    s = toy(seq=False)
    s["blocks.0.mlp.up"].shard("weight", -2)
    refused(s, "blocks.0.mlp.up.weight is split twice, in the same way: at", HERE, "E10")
    s = toy(seq=False)
    s["blocks.0.mlp.down"].shard("weight", 0)
    s["blocks.0.mlp.down"].sync("fwd_pre", "copy")
    refused(s, "blocks.0.mlp.down.weight is split twice, along 1 and along 0: at", HERE, "E10")


def test_e13_inputs_and_outputs_that_are_not_there() -> None:
    s = without(toy(seq=False), "blocks.*.mlp", "sync")
    s["blocks.*.mlp"].sync("fwd_pre", "copy", arg="hidden_states")
    refused(s, "blocks.0.mlp has no input 'hidden_states': Mlp.forward takes x", HERE, "E13")


def test_e15_order() -> None:
    s = toy(1, seq=False)
    s.apply()
    for late in (lambda: s["norm"].sum_gradients(), lambda: s.check(), s.apply):
        with pytest.raises(ConfigError, match=r"apply\(\)"):
            late()
    s = toy(seq=False)
    s.model.blocks[0].mlp._compiled_call_impl = print  # type: ignore[union-attr,index]  # as module.compile() leaves it
    refused(s, "column on blocks.0.mlp.up: blocks.0.mlp is compiled already (schedule_toys.py:", "apply(), torch.compile, ZeRO", "E15")


def test_a_model_without_weights_is_enough() -> None:
    with torch.device("meta"):
        s = toy(seq=None)
        s.model.to_empty(device="meta")
    write(s, seq=True).check()
    assert all(p.is_meta for p in s.model.parameters())
