"""BERT with post-norm (``Bert...``) or pre-norm (``MegatronBert...``) blocks, for pretraining or with a classifier."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, View
from megatron_sp.convert.families.family import (
    ACTIVATIONS,
    BIAS,
    WEIGHT,
    Family,
    Settings,
    Sizes,
    Tensors,
    blocks,
    misfit,
    same,
    separate_qkv,
    set_activation,
    word_of,
)
from megatron_sp.utils.errors import CheckpointError

_BOTH = (WEIGHT, BIAS)
_OLD_NORM = re.compile(r"(.*LayerNorm)\.(gamma|beta)")


# by norm placement: the names that differ, inside a block and outside of the blocks
_LAYER = {
    "post": {
        "self_attention.linear_proj": "attention.output.dense",
        "post_attention_layernorm": "attention.output.LayerNorm", "mlp.linear_fc1": "intermediate.dense",
        "mlp.linear_fc2": "output.dense", "post_mlp_layernorm": "output.LayerNorm",
    },
    "pre": {
        "input_layernorm": "attention.ln", "self_attention.linear_proj": "attention.output.dense",
        "pre_mlp_layernorm": "ln", "mlp.linear_fc1": "intermediate.dense", "mlp.linear_fc2": "output.dense",
    },
}  # fmt: skip
_NORM = {
    "post": ("embedding.layernorm", "bert.embeddings.LayerNorm"),
    "pre": ("encoder.final_layernorm", "bert.encoder.ln"),
}


class Bert(Family):
    """The original BERT (post-norm); ``MegatronBert`` overrides what differs."""

    model_type, prefix, placement, name = "bert", "bert.", "post", "Bert"

    def config(self, settings: Settings, tensors: Tensors) -> ModelConfig:
        settings.require("position_embedding_type", "absolute", "is another kind of positions")
        settings.require("is_decoder", False, "attends to the past alone")
        settings.require("add_cross_attention", False, "attends to another model")
        settings.require("tie_word_embeddings", True, "gives the output layer a table of its own")
        self._require_head(settings, tensors)
        positions = settings.count("max_position_embeddings")
        # with one segment there is no order
        has_no_order = not self.num_classes(tensors) or settings.count("type_vocab_size", 2) == 1
        config = ModelConfig(
            model_family="bert", norm_placement="post" if self.placement == "post" else "pre",
            num_layers=settings.count("num_hidden_layers"), hidden_size=settings.count("hidden_size"),
            num_attention_heads=settings.count("num_attention_heads"),
            ffn_hidden_size=settings.count("intermediate_size"), seq_length=positions,
            max_position_embeddings=positions, vocab_size=settings.count("vocab_size"),
            num_tokentypes=settings.count("type_vocab_size", 2),
            norm_epsilon=settings.get("layer_norm_eps", float, 1e-12),
            bert_no_binary_head="cls.seq_relationship.weight" not in tensors and has_no_order,
            attention_dropout=settings.get("attention_probs_dropout_prob", float, 0.1),
            hidden_dropout=settings.get("hidden_dropout_prob", float, 0.1),
            init_method_std=settings.get("initializer_range", float, 0.02),
        )  # fmt: skip
        set_activation(config, settings.choice("hidden_act", ACTIVATIONS, "gelu"))
        if config.relu:
            config.bert_head_activation = "relu"
        return config

    def _require_head(self, settings: Settings, tensors: Tensors) -> None:
        if "bert.embeddings.word_embeddings.weight" not in tensors:  # some files of the model are missing
            return
        classifies = "classifier.weight" in tensors and "bert.pooler.dense.weight" in tensors
        if not classifies and not any(name.startswith("cls.predictions.") for name in tensors):
            tasks = ", ".join(f"{self.name}For{task}" for task in ("PreTraining", "MaskedLM", "SequenceClassification"))
            stated = str(settings.document.get("architectures"))[:100]
            raise CheckpointError(f"{settings.where}: architectures is {stated}, and the files have neither the head"
                                  " for masked tokens (cls.predictions) nor a classifier after the pooler: only"
                                  f" {tasks} can be converted. Load it as one of these in transformers, which draws the"
                                  " missing head, and save that")  # fmt: skip
        if not classifies and "cls.seq_relationship.weight" in tensors and settings.count("type_vocab_size", 2) == 1:
            raise CheckpointError(f"{settings.where}: type_vocab_size is 1, and the files have a head for the order of"
                                  f" two segments (cls.seq_relationship): save the model as {self.name}ForMaskedLM,"
                                  " without that head")  # fmt: skip

    def renamed(self, name: str) -> str:
        old = _OLD_NORM.fullmatch(name)
        return f"{old[1]}.{'weight' if old[2] == 'gamma' else 'bias'}" if old else name

    def num_classes(self, tensors: Tensors) -> int:
        return next(iter(tensors.get("classifier.weight", ())), 0)

    def architecture(self, config: ModelConfig, num_classes: int) -> str:
        task = "SequenceClassification" if num_classes else "PreTraining" if config.has_order_head else "MaskedLM"
        return f"{self.name}For{task}"

    def ignored(self, config: ModelConfig) -> Mapping[str, str]:
        patterns = {r"bert\.embeddings\.position_ids": "the numbers from 0, which are no weights"}
        if not config.token_types:
            patterns[r"bert\.embeddings\.token_type_embeddings\.weight"] = "zeros for the only kind of segment"
        if not config.has_order_head:
            patterns[r"bert\.pooler\.dense\.(weight|bias)"] = "a pooler without a head after it"
        return patterns

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        s = Sizes.of(config)
        yield from same("embedding.word_embeddings", "bert.embeddings.word_embeddings")
        yield from same("embedding.position_embeddings", "bert.embeddings.position_embeddings")
        if config.token_types:
            yield from same("embedding.tokentype_embeddings", "bert.embeddings.token_type_embeddings")
        yield from same(*_NORM[self.placement], _BOTH)
        for i, ours in blocks(config):
            theirs = f"bert.encoder.layer.{i}."
            attention = f"{theirs}attention.self."
            qkv = (f"{attention}query", f"{attention}key", f"{attention}value")
            yield from separate_qkv(f"{ours}self_attention.linear_qkv", qkv, s, _BOTH)
            for a, b in _LAYER[self.placement].items():
                yield from same(f"{ours}{a}", f"{theirs}{b}", _BOTH)
        if num_classes:
            yield from same("pooler.dense", "bert.pooler.dense", _BOTH)
            yield from same("classification_head", "classifier", _BOTH)
            return
        yield from same("lm_head.dense", "cls.predictions.transform.dense", _BOTH)
        yield from same("lm_head.layernorm", "cls.predictions.transform.LayerNorm", _BOTH)
        yield Copy(View("output_layer.bias"), View("cls.predictions.bias"))
        if config.has_order_head:
            yield from same("pooler.dense", "bert.pooler.dense", _BOTH)
            yield from same("binary_head", "cls.seq_relationship", _BOTH)

    def fits(self, config: ModelConfig) -> str | None:
        assert config.num_attention_heads
        problem = misfit(
            config, model_family="bert", norm_placement=self.placement, position_embedding_type="learned_absolute",
            normalization="LayerNorm", swiglu=False, relu=config.relu, squared_relu=False, disable_bias_linear=False,
            qk_layernorm=False, apply_layernorm_1p=False, num_groups=config.num_attention_heads,
            head_activation=config.activation, head_dim=(config.hidden_size or 0) // config.num_attention_heads,
        )  # fmt: skip
        if problem is None or config.head_activation == config.activation:
            return problem
        return f"{problem} (there blocks and head have one activation, as a run with --gelu-approximate none has)"

    def document(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads, "intermediate_size": config.ffn_size,
            "max_position_embeddings": config.max_positions, "vocab_size": config.vocab_size,
            "type_vocab_size": config.token_types or 1, "hidden_act": word_of(config.activation),
            "layer_norm_eps": config.norm_epsilon, "attention_probs_dropout_prob": config.attention_dropout,
            "hidden_dropout_prob": config.hidden_dropout, "initializer_range": config.init_method_std,
            "position_embedding_type": "absolute",
        }  # fmt: skip


class MegatronBert(Bert):
    """transformers' MegatronBert: BERT with norms before the layers."""

    model_type, placement, name = "megatron-bert", "pre", "MegatronBert"
