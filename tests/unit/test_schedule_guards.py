"""What a split model refuses because it would work, and do something else; and what stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megatron_sp.schedule import Mesh, schedule
from megatron_sp.utils.errors import ConfigError


class Model(nn.Module):
    """With the methods of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def save_pretrained(self, folder: str, **more: Any) -> str:
        return folder

    def resize_token_embeddings(self, rows: int) -> int:
        return rows


def split(model: nn.Module, tp: int = 2) -> nn.Module:
    s = schedule(model, Mesh.sizes(tp=tp))
    s["up"].column()
    s["down"].row()
    return s.apply()


def test_shares_are_neither_split_again_nor_copied() -> None:
    model = nn.ModuleDict({"inner": Model()})
    split(model.get_submodule("inner"))
    with pytest.raises(ConfigError, match=r"ModuleDict has been split by another schedule already.*E15"):
        schedule(model, Mesh.sizes(tp=2)).apply()
    for part in (model, model.get_submodule("inner.up")):
        with pytest.raises(ConfigError, match="has been split, and cannot be copied: copy it before apply"):
            copy.deepcopy(part)


def test_shares_are_not_saved_as_if_they_were_the_model() -> None:
    model: Any = split(Model())
    with pytest.raises(ConfigError, match="save_pretrained of a model of which this rank has a share: call save_pretrained of the sch"):
        model.save_pretrained("there")
    with pytest.raises(ConfigError, match=r"resize_token_embeddings of a model of which .*: do it before apply"):
        model.resize_token_embeddings(3)
    whole: Any = split(Model(), tp=1)
    assert whole.save_pretrained("there") == "there" and whole.resize_token_embeddings(3) == 3


def test_hooks_of_a_split_parameter_go_on() -> None:
    model, seen = Model(), list[Any]()
    handles = [
        model.up.weight.register_hook(lambda grad: seen.append(grad.shape)),
        model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("after")),
    ]
    model.down.bias.register_hook(lambda grad: seen.append("bias"))
    split(model)
    for _ in range(2):
        model.up.weight.square().sum().backward()  # type: ignore[no-untyped-call]
        model.down.bias.sum().backward()
        for handle in handles:
            handle.remove()
    assert seen == [torch.Size([4, 4]), "after", "bias", "bias"]
