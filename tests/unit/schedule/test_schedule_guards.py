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


class Buffered(Model):
    """With a buffer that no state dict has, and a weight of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 8, bias=False)
        self.twin.weight = self.up.weight
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def test_an_activation_of_all_models_is_nobodys() -> None:
    """transformers has one instance of some; with the first split model the next ones could not be split or copied."""
    one, two = Model(), Model()
    one.act = two.act = nn.GELU()
    split(one)
    copy.deepcopy(two)
    split(two)


def test_a_model_that_was_split_without_its_weights_is_filled() -> None:
    """load_full() was nothing but a copy into the meta device."""
    whole = Buffered()
    with torch.device("meta"):
        empty = Buffered()
    made, expected = (schedule(m, Mesh.sizes(tp=2)) for m in (empty, copy.deepcopy(whole)))
    for s in (made, expected):
        s["up"].column()
        s["twin"].column()
        s["down"].row()
        s.apply()
    assert made.applied is not None
    with pytest.raises(
        ConfigError, match=r"angles is a buffer on the meta device, and no state has it.*init_empty_weights\(\) leaves them"
    ):
        made.applied.load_full(whole.state_dict())
    empty.angles = whole.angles
    made.applied.load_full(whole.state_dict())
    found, right = dict(empty.named_parameters()), dict(expected.model.named_parameters())
    assert found.keys() == right.keys() and all(torch.equal(p, right[name]) for name, p in found.items())
    assert empty.twin.weight is empty.up.weight and empty.up.weight.shape == (4, 4)
    assert empty.up.weight.untyped_storage().nbytes() == 4 * 4 * 4, "this rank's part alone is held"
    x = torch.ones(2, 4)
    assert torch.equal(empty.up(x), expected.model.get_submodule("up")(x))
