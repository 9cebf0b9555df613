"""Small models of the families that have presets, from configurations, with the batches they take. Imported before ranks are forked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_sp.schedule import Mesh, Schedule
from megatron_sp.schedule.presets import auto

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

V, S, B = 37, 8, 3
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 20, "max_position_embeddings": 16,
    "vocab_size": V,
}  # fmt: skip
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
LLAMA = {**SIZES, "num_key_value_heads": 2, "attention_dropout": 0.0, "pad_token_id": 0}
GPT2 = {
    "n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 16, "vocab_size": V, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}  # fmt: skip
GPT_NEOX = {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}
OPT = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_dim": 20, "max_position_embeddings": 16, "vocab_size": V,
    "word_embed_proj_dim": 24, "dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4, "vocab_size": V, "dropout_rate": 0.0, "pad_token_id": 0}
VIT = {**{k: v for k, v in SIZES.items() if k not in ("max_position_embeddings", "vocab_size")}, "image_size": 12, "patch_size": 4}
FALCON = {
    **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_hidden_size": 20, "bias": True, "num_kv_heads": 2,
    "new_decoder_architecture": True,
}  # fmt: skip
ONE_BY_ONE = {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
MODERNBERT = {**SIZES, **ENDS, "local_attention": 4, "layer_types": ["full_attention", "sliding_attention"]}
WHISPER = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "num_mel_bins": 5, "max_source_positions": 12, "max_target_positions": 16,
    "vocab_size": V, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
TEXT = {**SIZES, "projection_dim": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGES = {**{k: v for k, v in SIZES.items() if k not in ("max_position_embeddings", "vocab_size")}, "image_size": 15, "patch_size": 5}
IMAGES |= {"hidden_size": 16, "projection_dim": 10, "num_hidden_layers": 2}  # 9 patches and the class: 10 tokens
CLIP = {"text_config": TEXT, "vision_config": IMAGES, "projection_dim": 10}

#: name -> (family, head, configuration); names with a dash are variants
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForMaskedLM", BERT), "roberta": ("Roberta", "ForMaskedLM", BERT),
    "gpt2": ("GPT2", "LMHeadModel", GPT2), "gpt_neox": ("GPTNeoX", "ForCausalLM", GPT_NEOX),
    "llama": ("Llama", "ForCausalLM", LLAMA), "mistral": ("Mistral", "ForCausalLM", {**LLAMA, "sliding_window": 4}),
    "qwen2": ("Qwen2", "ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "ForCausalLM", {**LLAMA, "head_dim": 8}), "opt": ("OPT", "ForCausalLM", OPT),
    "t5": ("T5", "EncoderModel", {**T5, "feed_forward_proj": "gated-gelu"}),
    "vit": ("ViT", "ForImageClassification", {**VIT, "image_size": (12, 20)}),  # 3 * 5 patches and the class: 16 tokens
    "falcon": ("Falcon", "ForCausalLM", FALCON), "modernbert": ("ModernBert", "ForMaskedLM", MODERNBERT),
    "whisper": ("Whisper", "ForConditionalGeneration", WHISPER), "clip": ("CLIP", "Model", CLIP),
    "bert-model": ("Bert", "Model", BERT), "bert-classifier": ("Bert", "ForSequenceClassification", BERT),
    "roberta-classifier": ("Roberta", "ForSequenceClassification", BERT), "gpt2-model": ("GPT2", "Model", GPT2),
    "gpt2-classifier": ("GPT2", "ForSequenceClassification", {**GPT2, "pad_token_id": 0}),
    "gpt_neox-serial": ("GPTNeoX", "ForCausalLM", {**GPT_NEOX, "use_parallel_residual": False}),
    "llama-model": ("Llama", "Model", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-classifier": ("Llama", "ForSequenceClassification", LLAMA),
    "qwen3-classifier": ("Qwen3", "ForSequenceClassification", LLAMA),
    "opt-after": ("OPT", "ForCausalLM", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 10}),
    "opt-model": ("OPT", "Model", OPT), "t5-relu": ("T5", "EncoderModel", T5),
    "t5-decoder": ("T5", "ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "vit-model": ("ViT", "Model", {**VIT, "image_size": (12, 20)}),
    "falcon-serial": ("Falcon", "ForCausalLM", {**FALCON, **ONE_BY_ONE}),
    "falcon-model": ("Falcon", "Model", {**FALCON, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}),
    "modernbert-classifier": ("ModernBert", "ForSequenceClassification", MODERNBERT),
    "whisper-classifier": ("Whisper", "ForAudioClassification", WHISPER), "clip-text": ("CLIPText", "Model", TEXT),
    "clip-images": ("CLIPVision", "Model", {**IMAGES, "image_size": 15}),
}  # fmt: skip
FAMILIES = [name for name in MODELS if "-" not in name]


def covers(name: str, *, sp: int = 1, tp: int = 1, seq: bool = False) -> bool:
    """Whether the preset does not refuse a layout, for what stands against it: a bias for each head, two sequences, too few heads."""
    if sp > 1 and (name == "clip" or name.startswith(("t5", "falcon", "whisper"))):
        return False
    return not ((tp > 2 and name in _TWO_HEADS) or (seq and tp > 2 and name in ("clip", "clip-images")))


_TWO_HEADS = ("falcon", "whisper")


def make(name: str, **changes: Any) -> Any:
    """The same model on every rank."""
    family, head, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**{**sizes, **changes}))


def batch_of(name: str) -> dict[str, Any]:
    """Sequences of different lengths, padded; the loss leaves padding out."""
    g = torch.Generator().manual_seed(1)
    family, head, _ = MODELS[name]
    if family == "ViT":
        images: dict[str, Any] = {"pixel_values": torch.randn(B, 3, 12, 20, generator=g)}
        return images | ({"labels": torch.tensor([0, 1, 1])} if "Classification" in head else {})
    if family == "Whisper":
        sound: dict[str, Any] = {"input_features": torch.randn(B, 5, 24, generator=g)}
        if "Classification" in head:
            return sound | {"labels": torch.tensor([0, 1, 1])}
    if name == "clip-images":
        return {"pixel_values": torch.randn(B, 3, 15, 15, generator=g)}
    ids = torch.randint(1, V, (B, S), generator=g)
    if family == "Whisper":
        return sound | {"labels": ids}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": torch.randn(B, 3, 15, 15, generator=g), "return_loss": True}
    mask = (torch.arange(S) < torch.tensor([S, 5, 3])[:, None]).long()
    batch: dict[str, Any] = {"input_ids": ids * mask, "attention_mask": mask}
    if "Classification" in head:
        return batch | {"labels": torch.tensor([0, 1, 1])}
    return batch if head.endswith("Model") and head != "LMHeadModel" else batch | {"labels": torch.where(mask.bool(), ids, -100)}


def plain(name: str, mesh: Mesh, *, seq: bool = False, **changes: Any) -> Schedule:
    """The lines of a preset over tp, and none about random numbers or sequences over sp and cp."""
    s = auto(make(name, **changes), mesh, seq=seq, ulysses=False, context=False)
    s.directives = [d for d in s.directives if d.do != "rng"]
    return s
