"""The GPT model against the independent one of tests/support/reference.py, in fp64: loss and every gradient, for every shape of model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support import reference, tiny
from support.errors import FP32, FP64, assert_law, law_error
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.inference.decoder import KVCache, RowPass
from megatron_sp.parallel.layers import shard_specs

ROPE = {"position_embedding_type": "rope"}
LLAMA = ROPE | {
    "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
NEOX = ROPE | {
    "use_parallel_residual": True, "rotary_percent": 0.34, "gelu_approximate": "none", "untie_embeddings_and_output_weights": True,
}  # fmt: skip
# of three frequencies 1, 0.05 and 0.0022 the first stays, the second is between, the last is stretched
STRETCH = {"rotary_base": 10000.0, "use_rope_scaling": True, "rope_scaling_low_freq_factor": 0.5, "rope_scaling_original_length": 100}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 erf": {"gelu_approximate": "none"},
    "untied": {"untie_embeddings_and_output_weights": True},
    "no positions": {"position_embedding_type": "none"},
    "longer table": {"max_position_embeddings": 11},
    "rope": ROPE,
    "rope on a third": ROPE | {"rotary_percent": 0.34, "rotary_base": 50.0},
    "rms norm": {"normalization": "RMSNorm"},
    "layer norm 1p": {"apply_layernorm_1p": True},
    "rms norm 1p": {"normalization": "RMSNorm", "apply_layernorm_1p": True},
    "large epsilon": {"norm_epsilon": 0.1},
    "swiglu": {"swiglu": True},
    "squared relu": {"squared_relu": True},
    "no biases": {"disable_bias_linear": True},
    "only qkv bias": {"disable_bias_linear": True, "add_qkv_bias": True},
    "only mlp biases": {"disable_bias_linear": True, "add_mlp_bias": True},
    "attention biases, llama": LLAMA | {"add_qkv_bias": True, "add_proj_bias": True},
    "relu": {"relu": True},
    "geglu": {"geglu": True},
    "geglu erf": {"geglu": True, "gelu_approximate": "none"},
    "neox": NEOX,
    "neox, dropout": NEOX | {"hidden_dropout": 0.2},
    "parallel, tied rms norm": {"use_parallel_residual": True, "normalization": "RMSNorm", "attention_dropout": 0.2},
    "window": {"window_size": 3},
    "window of one": {"window_size": 1, "attention_dropout": 0.2},
    "window as long as the sequence": {"window_size": 8},
    "mistral": LLAMA | {"window_size": 5},
    "stretched": ROPE | {"rotary_seq_len_interpolation_factor": 2.5},
    "llama 3.1": LLAMA | STRETCH | {"untie_embeddings_and_output_weights": False},
    "grouped": {"num_query_groups": 2},
    "multi-query": {"num_query_groups": 1},
    "qk layer norm": {"qk_layernorm": True, "num_query_groups": 2},
    "qk rms norm, rope": ROPE | {"qk_layernorm": True, "normalization": "RMSNorm"},
    "qk norm 1p": ROPE | {"qk_layernorm": True, "apply_layernorm_1p": True, "num_query_groups": 1},
    "llama": LLAMA,
    "llama with everything": LLAMA | {"qk_layernorm": True, "add_qkv_bias": True, "apply_layernorm_1p": True, "rotary_percent": 0.67},
    "vocabulary without padding": {"vocab_size": 32},
    "tiny vocabulary": {"vocab_size": 2},
    "one layer": {"num_layers": 1},
    "hidden dropout": {"hidden_dropout": 0.2},
    "attention dropout": {"attention_dropout": 0.2, "num_query_groups": 2},
    "all dropout, llama": LLAMA | {"hidden_dropout": 0.3, "attention_dropout": 0.1},
}  # fmt: skip


def autograd_step(model: Any, batches: list[tiny.Batch], scale: float = 1.0) -> dict[str, Tensor | None]:
    """Without a main_grad, gradients through p.grad."""
    losses = [tiny.loss_of(model, batch) * scale for batch in batches]
    for loss in losses:
        loss.backward()
    return {"loss": torch.stack([loss.detach() for loss in losses]).sum(), **{n: p.grad for n, p in model.named_parameters()}}


@cache
def by_reference(name: str) -> tuple[ModelConfig, list[tiny.Batch], dict[str, Tensor | None]]:
    config = tiny.shape(**SHAPES[name])
    batches = [tiny.make_batch(config, seed=seed) for seed in (0, 1)]
    return config, batches, tiny.reference_step(tiny.make_model(config), batches, 0.37)


@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_are_the_references(name: str) -> None:
    config, batches, want = by_reference(name)
    assert_law(autograd_step(tiny.make_model(config), batches, 0.37), want, FP64)
    model = tiny.make_model(config)
    assert_law(tiny.run_step(model, tiny.flatten(model), batches, 0.37), want, FP64)


@pytest.mark.parametrize("name", ["gpt2", "all dropout, llama", "qk norm 1p", "neox, dropout", "mistral"])
@pytest.mark.parametrize("how", tiny.RECOMPUTE)
def test_recomputation_changes_nothing(name: str, how: str) -> None:
    config, batches, want = by_reference(name)
    model = tiny.make_model(config, **tiny.RECOMPUTE[how])
    assert_law(tiny.run_step(model, tiny.flatten(model), batches, 0.37), want, FP64)
    if name == "qk norm 1p":
        assert_law(autograd_step(tiny.make_model(config, **tiny.RECOMPUTE[how]), batches, 0.37), want, FP64)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
@pytest.mark.parametrize("chunk", [1, 5, 23, 24, 100, None])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_chunks_of_the_head_change_nothing(name: str, chunk: int | None, dtype: torch.dtype, tolerance: float) -> None:
    config, batches, want = by_reference(name)
    model = tiny.make_model(config, dtype, lm_head_chunk_tokens=chunk)
    assert_law(tiny.run_step(model, tiny.flatten(model), batches, 0.37), want, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.0125)])
@pytest.mark.parametrize("how", ["none", "full"])
def test_half_precision_is_near_with_fp32_gradients(dtype: torch.dtype, tolerance: float, how: str) -> None:
    """Three layers of 16-bit activations: about 13 roundings of epsilon each on the way there and back."""
    config = tiny.shape(**SHAPES["llama"])
    batches = [tiny.make_batch(config, seed=seed) for seed in (0, 1)]
    model = tiny.make_model(config, dtype, **tiny.RECOMPUTE[how])
    got = tiny.run_step(model, tiny.flatten(model), batches)
    assert all(g.dtype == torch.float32 for n, g in got.items() if n != "loss" and g is not None)
    assert_law(got, tiny.reference_step(model, batches), tolerance)


def test_labels_of_masked_tokens_and_tokens_behind_a_position_do_not_matter() -> None:
    batch = tiny.make_batch()
    model = tiny.make_model(tiny.BASE)
    want = autograd_step(model, [batch])
    changed = {k: v.clone() for k, v in batch.items()}
    changed["labels"][batch["loss_mask"] == 0] = -100
    assert_law(autograd_step(tiny.make_model(tiny.BASE), [changed]), want, FP64)
    changed["tokens"][:, -1] = (batch["tokens"][:, -1] + 1) % 37
    _, losses = model(*(changed[k] for k in ("tokens", "labels", "loss_mask")), tiny.context(tiny.BASE, batch))
    _, before = model(*(batch[k] for k in ("tokens", "labels", "loss_mask")), tiny.context(tiny.BASE, batch))
    seen = (batch["loss_mask"] != 0).t()
    assert torch.equal(losses[:-1][seen[:-1]], before[:-1][seen[:-1]])
    assert losses.shape == (tiny.S, tiny.B) and not losses.requires_grad


@pytest.mark.parametrize("mask", [0.0, 1.0])
def test_no_loss_token_and_all(mask: float) -> None:
    model, batch = tiny.make_model(tiny.BASE), tiny.make_batch(mask=mask)
    got = tiny.run_step(model, tiny.flatten(model), [batch])
    assert_law(got, tiny.reference_step(model, [batch]), FP64)
    assert (got["loss"] == 0) == (mask == 0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "untied"])
def test_padding_rows_of_the_vocabulary_are_zero_and_stay_so(name: str) -> None:
    config = tiny.shape(**SHAPES[name])
    model = tiny.make_model(config)
    got = tiny.run_step(model, tiny.flatten(model), [tiny.make_batch(config)])
    tables = {"embedding.word_embeddings.weight"} | ({"output_layer.weight"} if name != "gpt2" else set())
    assert {name for name, spec in shard_specs(model).items() if spec.shape != dict(model.named_parameters())[name].shape} == tables
    for table in tables:
        assert shard_specs(model)[table].shape == (37, 14) and dict(model.named_parameters())[table].shape == (48, 14)
        assert not dict(model.named_parameters())[table][37:].any()
        assert not got[table][37:].any()  # type: ignore[index]


@pytest.mark.parametrize("frozen, how", [
    *((frozen, "none") for frozen in ("mlp", "decoder.final_layernorm", "decoder.layers.0.", "position")),
    *((frozen, "uniform 2") for frozen in ("embedding.", "decoder.layers.1.", "linear_qkv.weight")), ("bias", "selective"),
])  # fmt: skip
def test_frozen_parameters(frozen: str, how: str) -> None:
    """Whole units among them; everything else is as before."""
    batches = [tiny.make_batch(seed=seed) for seed in (0, 1)]
    model = tiny.make_model(tiny.BASE, **tiny.RECOMPUTE[how])
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    assert any(not p.requires_grad for p in model.parameters())
    want = tiny.reference_step(model, batches)
    assert len(want) < len(list(model.parameters())) + 1
    assert_law(tiny.run_step(model, tiny.flatten(model), batches), want, FP64)


def test_units_hold_every_parameter_once_in_the_order_of_the_forward_pass() -> None:
    for name in ("gpt2", "llama"):
        model = tiny.make_model(tiny.shape(**SHAPES[name]))
        held = [id(p) for unit in model.units() for p in unit.module.parameters()]
        assert sorted(held) == sorted(id(p) for p in model.parameters()) and len(set(held)) == len(held)
        assert [u.name for u in model.units()] == ["embedding", *(f"decoder.layers.{i}" for i in range(3)), "head"]


def test_parameter_names_and_shapes_are_megatron_cores() -> None:
    model = tiny.make_model(tiny.shape(**LLAMA | {"qk_layernorm": True, "add_qkv_bias": True}))
    layer = "decoder.layers.1"
    assert {n: tuple(p.shape) for n, p in model.named_parameters() if "layers.0" not in n and "layers.2" not in n} == {
        "embedding.word_embeddings.weight": (48, 14), f"{layer}.input_layernorm.weight": (14,),
        f"{layer}.self_attention.linear_qkv.weight": (2 * (2 + 2) * 6, 14), f"{layer}.self_attention.linear_qkv.bias": (48,),
        f"{layer}.self_attention.linear_proj.weight": (14, 24), f"{layer}.self_attention.q_layernorm.weight": (6,),
        f"{layer}.self_attention.k_layernorm.weight": (6,), f"{layer}.pre_mlp_layernorm.weight": (14,),
        f"{layer}.mlp.linear_fc1.weight": (20, 14), f"{layer}.mlp.linear_fc2.weight": (14, 10),
        "decoder.final_layernorm.weight": (14,), "output_layer.weight": (48, 14),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama", "qk rms norm, rope", "longer table", "neox", "mistral", "window of one"])
@pytest.mark.parametrize("pieces", [[8], [1] * 8, [3, 4, 1]])
def test_a_cache_of_keys_gives_the_logits_of_the_whole_sequence(name: str, pieces: list[int]) -> None:
    config = tiny.shape(**SHAPES[name] | {"attention_dropout": 0.0})  # generation drops nothing
    model, batch = tiny.make_model(config), tiny.make_batch(config)
    with torch.no_grad():
        whole = model.logits(model.hidden(batch["tokens"], tiny.context(config, batch)))
        cache = KVCache(tiny.LAYERS, 1, tiny.S)
        parts, start = [], 0
        for length in pieces:
            ctx = tiny.context(config, batch, cache=RowPass(cache, 0, start))
            parts.append(model.logits(model.hidden(batch["tokens"][:, start : start + length], ctx)))
            start += length
    assert whole.shape == (tiny.S, tiny.B, 37)
    assert law_error(torch.cat(parts), whole) <= FP64


def test_logits_are_those_of_the_loss() -> None:
    model, batch = tiny.make_model(tiny.BASE), tiny.make_batch()
    with torch.no_grad():
        logits = model.logits(model.hidden(batch["tokens"], tiny.context(tiny.BASE, batch)))
        token_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].t().flatten(), reduction="none").view(
            tiny.S, tiny.B
        )
        weights = dict(model.named_parameters())
        _, want = reference.gpt_loss(tiny.BASE, weights, batch["tokens"], batch["labels"], batch["loss_mask"])
    assert law_error(token_loss, want.t()) <= FP64


def test_evaluation_has_no_dropout_and_no_graph() -> None:
    config = tiny.shape(hidden_dropout=0.2, attention_dropout=0.2)
    model, batch = tiny.make_model(config), tiny.make_batch(config)
    with torch.no_grad():
        loss = tiny.loss_of(model, batch, dropout=None)
    same = tiny.make_model(tiny.BASE)
    assert not loss.requires_grad
    assert law_error(loss, tiny.loss_of(same, batch)) <= FP64


@pytest.mark.parametrize("how", ["selective", "uniform 2"])
def test_recomputation_repeats_dropout_drawn_by_a_fused_kernel(how: str) -> None:
    """The one place where torch's generator is used; with another mask in recomputation gradients would be wrong without a trace."""
    config = tiny.shape(attention_dropout=0.5)
    grads = []
    for kernels in ({}, tiny.RECOMPUTE[how]):
        model, batch = tiny.make_model(config, **kernels), tiny.make_batch(config)
        torch.manual_seed(3)
        tiny.loss_of(model, batch, kernel="sdpa").backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert_law(grads[1], grads[0], FP64)
