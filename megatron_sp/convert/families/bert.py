"""BERT with post-norm (``Bert...``) or pre-norm (``MegatronBert...``) blocks, for pretraining or with a classifier."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Copy, View
from megatron_sp.convert.families.family import BOTH, HIDDEN_ACT, SIZES, Entry, Family, Settings, Sizes, Tensors

from megatron_sp.convert.families.family import blocks, of_layer_norm, same, separate_qkv, set_activation  # isort: skip
from megatron_sp.utils.errors import CheckpointError

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
_HEAD = {
    "lm_head.dense": "cls.predictions.transform.dense", "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
}  # fmt: skip
_ORDER = "cls.seq_relationship.weight"  # of the head that tells the order of two segments


class Bert(Family):
    """The original BERT (post-norm); ``MegatronBert`` overrides what differs."""

    model_type, prefix, placement, name = "bert", "bert.", "post", "Bert"
    entries = (
        *SIZES, Entry("max_position_embeddings", "max_position_embeddings"),
        Entry("layer_norm_eps", "norm_epsilon", 1e-12, float),
        Entry("attention_probs_dropout_prob", "attention_dropout", 0.1, float),
        Entry("hidden_dropout_prob", "hidden_dropout", 0.1, float),
    )  # fmt: skip

    ignored: Mapping[str, str] = {
        r"bert\.embeddings\.position_ids": "the numbers from 0, which are no weights",
        r"bert\.embeddings\.token_type_embeddings\.weight": "zeros for the only kind of segment",
        r"bert\.pooler\.dense\.(weight|bias)": "a pooler without a head after it",
    }

    def complete(self, config: ModelConfig, settings: Settings, tensors: Tensors) -> None:
        settings.require("position_embedding_type", "absolute", "is another kind of positions")
        settings.require("is_decoder", False, "attends to the past alone")
        settings.require("add_cross_attention", False, "attends to another model")
        settings.require("tie_word_embeddings", True, "gives the output layer a table of its own")
        classifies = "classifier.weight" in tensors and "bert.pooler.dense.weight" in tensors
        num_types = settings.count("type_vocab_size", 2)
        # without the embedding some files of the model are missing, which is told elsewhere
        if not classifies and "bert.embeddings.word_embeddings.weight" in tensors:
            if not any(name.startswith("cls.predictions.") for name in tensors):
                tasks = (f"{self.name}For{task}" for task in ("PreTraining", "MaskedLM", "SequenceClassification"))
                stated = str(settings.document.get("architectures"))[:100]
                raise CheckpointError(f"{settings.where}: architectures is {stated}, and the files have neither the"
                                      " head for masked tokens (cls.predictions) nor a classifier after the pooler:"
                                      f" only {', '.join(tasks)} can be converted. Load it as one of these in"
                                      " transformers, which draws the missing head, and save that")  # fmt: skip
            if _ORDER in tensors and num_types == 1:
                raise CheckpointError(f"{settings.where}: type_vocab_size is 1, and the files have a head for the order"
                                      " of two segments (cls.seq_relationship): save the model as"
                                      f" {self.name}ForMaskedLM, without that head")  # fmt: skip
        config.model_family = "bert"
        config.norm_placement = "post" if self.placement == "post" else "pre"
        config.seq_length, config.num_tokentypes = config.max_position_embeddings, num_types
        num_classes = next(iter(tensors.get("classifier.weight", ())), 0)
        # a classifier's files lack the head for the order of segments, which with one segment there is none of
        config.bert_no_binary_head = _ORDER not in tensors and (not num_classes or num_types == 1)
        set_activation(config, settings, "hidden_act", "gelu")
        if config.relu:
            config.bert_head_activation = "relu"

    def own_entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "type_vocab_size": config.token_types or 1, "hidden_act": HIDDEN_ACT[config.activation],
            "position_embedding_type": "absolute",
        }  # fmt: skip

    def wanted(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "model_family": "bert", "norm_placement": self.placement, "position_embedding_type": "learned_absolute",
            "swiglu": False, "disable_bias_linear": False, **of_layer_norm(config),
            "head_activation": config.activation,
        }  # fmt: skip

    def fits(self, config: ModelConfig) -> str | None:
        problem = super().fits(config)
        if problem is None or config.head_activation == config.activation:
            return problem
        return f"{problem} (there blocks and head have one activation, as a run with --gelu-approximate none has)"

    def architecture(self, *, classifies: bool, has_order: bool) -> str:
        task = "SequenceClassification" if classifies else "PreTraining" if has_order else "MaskedLM"
        return f"{self.name}For{task}"

    def renamed(self, name: str) -> str:
        old = _OLD_NORM.fullmatch(name)
        return f"{old[1]}.{'weight' if old[2] == 'gamma' else 'bias'}" if old else name

    def copies(self, config: ModelConfig, num_classes: int) -> Iterable[Copy]:
        s = Sizes.of(config)
        yield from same("embedding.word_embeddings", "bert.embeddings.word_embeddings")
        yield from same("embedding.position_embeddings", "bert.embeddings.position_embeddings")
        if config.token_types:
            yield from same("embedding.tokentype_embeddings", "bert.embeddings.token_type_embeddings")
        yield from same(*_NORM[self.placement], BOTH)
        for i, ours in blocks(config):
            theirs = f"bert.encoder.layer.{i}."
            query, key, value = (f"{theirs}attention.self.{part}" for part in ("query", "key", "value"))
            yield from separate_qkv(f"{ours}self_attention.linear_qkv", (query, key, value), s, BOTH)
            for a, b in _LAYER[self.placement].items():
                yield from same(f"{ours}{a}", f"{theirs}{b}", BOTH)
        pooler = same("pooler.dense", "bert.pooler.dense", BOTH)
        if num_classes:
            yield from (*pooler, *same("classification_head", "classifier", BOTH))
            return
        for a, b in _HEAD.items():
            yield from same(a, b, BOTH)
        yield Copy(View("output_layer.bias"), View("cls.predictions.bias"))
        if config.has_order_head:
            yield from (*pooler, *same("binary_head", "cls.seq_relationship", BOTH))


class MegatronBert(Bert):
    """transformers' MegatronBert: BERT with norms before the layers."""

    model_type, placement, name = "megatron-bert", "pre", "MegatronBert"
