"""BERT on one process: hits, masked positions alone or all of them, gradients of what nobody asked for, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny
from support.errors import FP64, assert_law
from torch import Tensor

from megatron_sp.models.bert import BertLoss, BertModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext

LENGTHS = torch.tensor([tiny.S, 5, 2])


def make(**overrides: Any) -> tuple[BertModel, dict[str, Tensor]]:
    model: BertModel = tiny.make_model(tiny.shape(model_family="bert", **overrides))
    batch = tiny.make_batch(model.config)
    g = torch.Generator().manual_seed(8)
    batch["loss_mask"] *= torch.arange(tiny.S) < LENGTHS[:, None]
    return model, batch | {"types": torch.randint(0, 2, (tiny.B, tiny.S), generator=g), "order": torch.tensor([0, 1, 1])}


def context() -> ForwardContext:
    return ForwardContext(AttentionMask(causal=False, key_lengths=LENGTHS))


def run(model: BertModel, batch: dict[str, Tensor]) -> BertLoss:
    made: BertLoss = model(batch["tokens"], batch["types"], batch["labels"], batch["loss_mask"], batch.get("order"), context())
    return made


def grads_of(model: BertModel, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    made = run(model, batch)
    (made.masked if made.order is None else made.masked + 2 * made.order).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return {"masked": made.masked.detach(), "hits": made.masked_hits, **found}


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_all_positions_or_the_masked_ones_alone(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is what a CPU does, the first what a GPU does."""
    model, batch = make(norm_placement=placement)
    alone = grads_of(model, batch)
    monkeypatch.setattr(BertModel, "selects_on", ())
    assert_law(grads_of(model, batch), alone, FP64)


@pytest.mark.parametrize(("words", "in_mlp", "in_head"), [
    ({}, "tanh", "none"), ({"disable_bias_linear": True}, "none", "none"), ({"gelu_approximate": "tanh"}, "tanh", "tanh"),
    ({"gelu_approximate": "none"}, "none", "none"),
])  # fmt: skip
@torch.no_grad()
def test_gelu_is_megatrons(words: dict[str, Any], in_mlp: str, in_head: str) -> None:
    """In the MLP as its kernel of bias and GELU has it, in the head exact; torch computes both."""
    model, _ = make(norm_epsilon=1e-5, **words)
    x = torch.randn(tiny.S, tiny.B, model.config.hidden_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mlp, head = model.stack.layers[0].mlp, model.lm_head
    gelu = torch.nn.functional.gelu
    wide = gelu(torch.nn.functional.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias), approximate=in_mlp)
    want = torch.nn.functional.linear(wide, mlp.linear_fc2.weight, mlp.linear_fc2.bias)
    torch.testing.assert_close(mlp(x, None, None), x + want, rtol=1e-12, atol=1e-13)
    dense = gelu(torch.nn.functional.linear(x, head.dense.weight, head.dense.bias), approximate=in_head)
    torch.testing.assert_close(head(x), head.layernorm(dense), rtol=1e-12, atol=1e-13)


@torch.no_grad()
def test_loss_and_hits_are_those_of_the_predictions() -> None:
    model, batch = make()
    batch["labels"][0] = model.predictions(model.hidden(batch["tokens"], context(), types=batch["types"]))[:, 0].argmax(-1)  # all hits
    made = run(model, batch)
    hidden = model.hidden(batch["tokens"], context(), types=batch["types"])
    logits, weights = model.predictions(hidden).transpose(0, 1), batch["loss_mask"]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view(tiny.B, tiny.S)
    hits = (logits.argmax(-1) == batch["labels"]).double()
    assert 0 < (hits * weights).sum() < weights.sum()
    torch.testing.assert_close(made.masked, (losses * weights).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(made.masked_hits, (hits * weights).sum(), rtol=1e-12, atol=0)
    assert model.binary_head is not None and made.order is not None and made.order_hits is not None
    orders = model.binary_head(model.pooled(hidden))
    torch.testing.assert_close(made.order, torch.nn.functional.cross_entropy(orders, batch["order"], reduction="sum"), rtol=1e-12, atol=0)
    assert int(made.order_hits) == int((orders.argmax(1) == batch["order"]).sum())


def test_without_a_masked_token_the_loss_is_zero_and_so_are_the_gradients_of_its_head() -> None:
    model, batch = make()
    batch["loss_mask"].zero_()
    made = run(model, batch)
    assert made.masked == 0 and made.masked_hits == 0 and made.order is not None
    (made.masked + made.order).backward()
    assert not model.lm_head.dense.weight.grad.any() and not model.output_layer.bias.grad.any()  # type: ignore[union-attr]
    assert model.pooler is not None and model.pooler.dense.weight.grad.any()  # type: ignore[union-attr]


def test_without_the_binary_head_there_is_neither_pooler_nor_table_of_segments() -> None:
    model, batch = make(bert_no_binary_head=True)
    names = {n.split(".")[0] for n, _ in model.named_parameters()}
    assert names == {"embedding", "encoder", "lm_head", "output_layer"} and model.embedding.tokentype_embeddings is None
    made = run(model, batch)
    assert made.order is None and made.order_hits is None
    with pytest.raises(ValueError, match="--bert-no-binary-head"):
        model.pooled(torch.zeros(tiny.S, tiny.B, 14, dtype=torch.float64))


def test_what_is_padding_changes_nothing() -> None:
    model, batch = make()
    before = grads_of(model, batch)
    batch["tokens"] = torch.where(torch.arange(tiny.S) < LENGTHS[:, None], batch["tokens"], 3)
    after = grads_of(model, batch)
    assert_law({"masked": after["masked"]}, {"masked": before["masked"]}, FP64)


def test_the_order_head_wants_to_know_the_order() -> None:
    model, batch = make()
    del batch["order"]
    with pytest.raises(ValueError, match="needs the order of each sequence"):
        run(model, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_16_bit_is_near_fp64(dtype: torch.dtype, placement: str) -> None:
    wide, batch = make(norm_placement=placement, init_method_std=0.1)
    narrow: BertModel = tiny.make_model(wide.config, dtype=dtype)
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        q.data.copy_(p.data)
    want, got = grads_of(wide, batch), grads_of(narrow, batch)
    want.pop("hits"), got.pop("hits")
    assert_law({n: None if t is None else t.double() for n, t in got.items()}, want, 0.1)
