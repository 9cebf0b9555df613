"""Models of transformers for which there is no preset: by transformers' own plan, or by a few lines; and dropout, which is off in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.preset_models import LLAMA, SIZES, B, S, V, batch_of, make, transformers
from support.ranks import run_ranks
from test_schedule_families import mesh
from torch import Tensor

from megatron_sp.schedule import schedule
from megatron_sp.schedule.presets import auto, from_hf_plan
from megatron_sp.utils.errors import ConfigError, NumericsError


def model_of(family: str, head: str = "ForCausalLM", **sizes: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**sizes))


def embeddings_with_a_forward_of_their_own() -> None:
    """Gemma scales what it has looked up."""
    s = from_hf_plan(model_of("Gemma", **LLAMA, head_dim=6), mesh())
    assert any(d.do == "vocab_parallel" for d in s.directives)
    s.verify(batch_of("llama"))


def dropout_is_off() -> None:
    s = auto(make("bert", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3), mesh())
    rates = {name: m.p for name, m in s.model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert str(s.verify(batch_of("bert"))).endswith(", dropout off")
    assert rates == {name: m.p for name, m in s.model.named_modules() if isinstance(m, torch.nn.Dropout)} and 0.3 in rates.values()
    assert s.model.config.hidden_dropout_prob == 0.3


def experts() -> None:
    s = schedule(model_of("Mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=2), mesh())
    inside = s["model.layers.*.mlp.experts"].sync("fwd_pre", "copy", arg="hidden_states").sync("fwd_pre", "copy", arg="top_k_weights")
    inside.shard("gate_up_proj", 1, blocks=2).shard("down_proj", 2).sync("fwd_post", "all_reduce")
    s.verify(batch_of("llama"))
    assert s.model.config._experts_implementation != "eager"


def plans_with_more_than_layers() -> None:
    """Experts in one tensor, DeepSeek's latent keys, norms with a weight for each head, activations that learn."""
    latent = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
    some = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    for model in (
        model_of("Mixtral", **LLAMA, num_local_experts=4, num_experts_per_tok=2),
        model_of("DeepseekV3", **{**LLAMA, "num_key_value_heads": 4}, **latent, **some),
        model_of("Cohere", **LLAMA, use_qk_norm=True),
        model_of("Apertus", **LLAMA),
    ):
        s = from_hf_plan(model, mesh())
        s.verify(batch_of("llama"))


def own_heads(alibi: Tensor, group: Any) -> Tensor:
    return alibi.unflatten(0, (-1, 4)).chunk(group.size(), 1)[group.rank()].flatten(0, 1)


def slopes_of_heads() -> None:
    """alibi, as docs/reference/schedule_presets.md has it."""
    s = schedule(model_of("Mpt", d_model=24, n_heads=4, n_layers=1, vocab_size=V, max_seq_len=16), mesh())
    s["transformer.blocks.*.attn.Wqkv"].column(blocks=3, heads=4)
    s["transformer.blocks.*.attn"].set("n_heads", divide="tp").set("hidden_size", divide="tp")
    s["transformer.blocks.*.attn"].sync("fwd_pre", "scatter", arg="position_bias", axis=0)
    s["transformer.blocks.*.attn.out_proj"].row()
    s.verify(batch_of("gpt2"))
    s = schedule(model_of("Bloom", hidden_size=24, n_head=4, n_layer=1, vocab_size=V, pad_token_id=0), mesh())
    s["transformer.h.*.self_attention.query_key_value"].column(blocks=1, heads=4)
    s["transformer.h.*.self_attention"].set("num_heads", divide="tp")
    s["transformer.h.*.self_attention"].sync("fwd_pre", own_heads, arg="alibi", layouts="I->S(0)")
    s["transformer.h.*.self_attention.dense"].row()
    s.verify(batch_of("gpt2"))


def what_fails_is_told() -> None:
    s = schedule(make("gpt2"), mesh())
    s["transformer.h.*.attn.c_attn"].column(blocks=3)  # whoever says heads= has attributes that count them follow
    s["transformer.h.*.attn.c_proj"].row()
    failure = r"transformer.h.0.attn \(GPT2Attention\) fails in the split model, and not in the whole one: ValueError"
    message = rf"{failure}.*\n.*c_attn is \[3, 8, 36\] of \[3, 8, 72\].*split_size = 24.*divide='tp'"
    with pytest.raises(ConfigError, match=message):
        s.verify(batch_of("gpt2"))


def shapes_are_told() -> None:
    s = schedule(make("llama"), mesh())
    s["lm_head"].sync("fwd_post", "scatter", axis=1)
    with pytest.raises(NumericsError, match=r"output logits: \[3, 4, \d+\] on this rank, \[3, 8, \d+\] in the whole model"):
        s.verify({"input_ids": batch_of("llama")["input_ids"]})


def test_models_without_a_preset(tmp_path: Path) -> None:
    for family in ("Gemma", "Mixtral", "DeepseekV3", "Cohere", "Apertus", "Mpt", "Bloom"):
        getattr(transformers, f"{family}ForCausalLM")
    make("bert"), make("gpt2"), make("llama")
    run_ranks(all_of_them, 2, tmp_path)


def all_of_them() -> None:
    embeddings_with_a_forward_of_their_own()
    dropout_is_off()
    experts()
    plans_with_more_than_layers()
    slopes_of_heads()
    what_fails_is_told()
    shapes_are_told()


# several families by hand


def llama_like(s: Any) -> None:
    s["model.layers.*.self_attn.q_proj"].column(heads=4)
    s["model.layers.*.self_attn.{k,v}_proj"].column(heads=2)
    s["model.layers.*.self_attn.o_proj"].row()
    s["model.layers.*.mlp.{gate,up}_proj"].column()
    s["model.layers.*.mlp.down_proj"].row()
    s["{model.embed_tokens,lm_head}"].vocab_parallel()


def with_norms(s: Any) -> None:
    llama_like(s)
    s["model.layers.*.self_attn.{q,k}_norm"].sum_gradients()


def bart(s: Any) -> None:
    attention = "model.{encoder,decoder}.layers.*.{self_attn,encoder_attn}"
    s[attention].set("num_heads", divide="tp")
    s[f"{attention}.{{q,k,v}}_proj"].column(heads=4)
    s[f"{attention}.out_proj"].row()
    s["model.{encoder,decoder}.layers.*.fc1"].column()
    s["model.{encoder,decoder}.layers.*.fc2"].row()
    s["{model.shared,model.encoder.embed_tokens,model.decoder.embed_tokens,lm_head}"].vocab_parallel()


def gptj(s: Any) -> None:
    s["transformer.h.*.attn"].set("num_attention_heads", divide="tp")
    s["transformer.h.*.attn.{q,k,v}_proj"].column(heads=4)
    s["transformer.h.*.attn.out_proj"].row()
    s["transformer.h.*.mlp.fc_in"].column()
    s["transformer.h.*.mlp.fc_out"].row()


def albert(s: Any) -> None:
    layer = "albert.encoder.albert_layer_groups.*.albert_layers.*"  # one, run through several times
    s[f"{layer}.attention.{{query,key,value}}"].column(heads=4)
    s[f"{layer}.attention.dense"].row()
    s[f"{layer}.ffn"].column()
    s[f"{layer}.ffn_output"].row()


_GPTJ: dict[str, Any] = {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 16, "vocab_size": V, "rotary_dim": 4}
_BART: dict[str, Any] = {
    "vocab_size": V, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
BY_HAND: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "Gemma2": (llama_like, "ForCausalLM", {**LLAMA, "head_dim": 6, "sliding_window": 4}),
    "Gemma3": (with_norms, "ForCausalLM", {**LLAMA, "head_dim": 6, "sliding_window": 4}),
    "Cohere2": (llama_like, "ForCausalLM", {**LLAMA, "sliding_window": 4}),
    "Granite": (llama_like, "ForCausalLM", {**LLAMA, "logits_scaling": 2.0}),
    "Bart": (bart, "ForConditionalGeneration", _BART),
    "GPTJ": (gptj, "ForCausalLM", _GPTJ),
    "Albert": (albert, "ForMaskedLM", {**SIZES, "embedding_size": 12, "pad_token_id": 0}),
}


def by_hand(name: str) -> None:
    write, head, sizes = BY_HAND[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")(**sizes)
    s = schedule(getattr(transformers, f"{name}{head}")(config), mesh())
    write(s)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (B, S), generator=g)
    s.verify({"input_ids": ids, "labels": ids})


@pytest.mark.long
@pytest.mark.parametrize("name", BY_HAND)
def test_lines_by_hand_change_nothing(tmp_path: Path, name: str) -> None:
    run_ranks(by_hand, 2, tmp_path, name)
