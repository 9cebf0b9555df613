"""The models of step_vs_hf.py: our configuration, Hugging Face's class with our initial weights, and a batch, for each family.

Hugging Face's classes run at their best plain setting: SDPA, no key/value cache. Our initial weights are drawn tensor
by tensor by name, so that neither process ever holds two models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEED = 1234
INIT_STD = 0.02
EPSILON = 1e-5
MASKED = 0.15  # share of BERT's tokens that are guessed
Shape = dict[str, int]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        title: for the table.
        shape: the measured one.
        config: fields of our ModelConfig beside the sizes.
        peer: makes Hugging Face's model of a shape and dropout, its weights still its own.
        names: for a peer model's parameters our names and how ours become theirs.
    """

    title: str
    shape: Shape
    config: dict[str, Any]
    peer: Callable[[Shape, float], Any]
    names: Callable[[Shape], dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]]]


def batch(family: str, shape: Shape, step: int) -> Batch:
    """Of one step, the same in every contender."""
    g = torch.Generator().manual_seed(SEED + step)
    size = (shape["batch"], shape["seq_length"])
    tokens = torch.randint(1, shape["vocab_size"], size, generator=g)
    if family != "bert":
        return {"tokens": tokens}
    labels, masked = torch.randint(1, shape["vocab_size"], size, generator=g), torch.rand(size, generator=g) < MASKED
    return {"tokens": tokens, "labels": labels, "masked": masked, "types": (torch.arange(size[1]) > size[1] // 2).long().expand(size),
            "order": torch.randint(0, 2, size[:1], generator=g)}  # fmt: skip


def our_loss(family: str, model: Any, batch: Batch, ctx: Any, events: Any) -> Tensor:
    if family == "bert":
        mask = batch["masked"].float()
        made = model(batch["tokens"], batch["types"], batch["labels"], mask, batch["order"], ctx, events)
        loss: Tensor = made.masked / mask.sum() + made.order / len(mask)
        return loss
    tokens = batch["tokens"]
    mask = torch.ones(tokens.shape)
    mask[:, -1] = 0.0  # the last token has no successor
    total: Tensor = model(tokens, tokens.roll(-1, dims=1), mask, ctx, events)[0]
    return total / mask.sum()


def peer_loss(family: str, model: Any, batch: Batch) -> Tensor:
    if family == "bert":
        labels = torch.where(batch["masked"], batch["labels"], -100)
        loss: Tensor = model(
            batch["tokens"], token_type_ids=batch["types"], labels=labels, next_sentence_label=batch["order"]
        ).loss
        return loss
    loss = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    return loss


def take_our_weights(model: Any, family: str, shape: Shape) -> None:
    """Fill Hugging Face's model with what ours starts from."""
    from megatron_sp.parallel.layers import draw_normal, output_std

    small = output_std(INIT_STD, shape["num_layers"])
    wanted = FAMILIES[family].names(shape)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name not in wanted:
                scales = name.endswith("weight") and ("norm" in name.lower() or ".ln" in name)
                param.fill_(1.0 if scales else 0.0)
                continue
            ours, dims, convert = wanted[name]
            std = small if ours.endswith(("linear_proj", "linear_fc2")) else INIT_STD
            param.copy_(convert(draw_normal(dims, std, SEED, f"{ours}.weight")))


def _gpt2(shape: Shape, dropout: float) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=shape["seq_length"], n_embd=shape["hidden_size"], n_layer=shape["num_layers"],
        n_head=shape["num_heads"], resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, layer_norm_epsilon=EPSILON,
        activation_function="gelu_pytorch_tanh", use_cache=False, attn_implementation="sdpa",
    ))  # fmt: skip


def _qkv(shape: Shape, part: int) -> Callable[[Tensor], Tensor]:
    """Rows of one of queries, keys, values from rows [g, n/g + 2, d]."""
    n, g, d = (
        shape["num_heads"],
        shape.get("num_groups", shape["num_heads"]),
        shape["hidden_size"] // shape["num_heads"],
    )

    def take(fused: Tensor) -> Tensor:
        by_group = fused.view(g, n // g + 2, d, -1)
        return (by_group[:, : n // g] if part == 0 else by_group[:, part - 3 :][:, :1]).reshape(-1, fused.shape[-1])

    return take


def _all_qkv(shape: Shape) -> Callable[[Tensor], Tensor]:
    return lambda fused: torch.cat([_qkv(shape, part)(fused) for part in range(3)]).t()


def _rows(shape: Shape) -> tuple[int, int]:
    """(rows of the fused projection, width of the MLP)."""
    n, g, d = (
        shape["num_heads"],
        shape.get("num_groups", shape["num_heads"]),
        shape["hidden_size"] // shape["num_heads"],
    )
    return (n + 2 * g) * d, shape.get("ffn", 4 * shape["hidden_size"])


def _same(x: Tensor) -> Tensor:
    return x


def _turned(x: Tensor) -> Tensor:
    return x.t()


def _gpt2_names(shape: Shape) -> dict[str, Any]:
    h, (rows, ffn) = shape["hidden_size"], _rows(shape)
    found: dict[str, Any] = {
        "transformer.wte.weight": ("embedding.word_embeddings", (shape["vocab_size"], h), _same),
        "transformer.wpe.weight": ("embedding.position_embeddings", (shape["seq_length"], h), _same),
    }
    for i in range(shape["num_layers"]):
        here, there = f"decoder.layers.{i}", f"transformer.h.{i}"
        found |= {
            f"{there}.attn.c_attn.weight": (f"{here}.self_attention.linear_qkv", (rows, h), _all_qkv(shape)),
            f"{there}.attn.c_proj.weight": (f"{here}.self_attention.linear_proj", (h, h), _turned),
            f"{there}.mlp.c_fc.weight": (f"{here}.mlp.linear_fc1", (ffn, h), _turned),
            f"{there}.mlp.c_proj.weight": (f"{here}.mlp.linear_fc2", (h, ffn), _turned),
        }
    return found


def _bert(shape: Shape, dropout: float) -> Any:
    from transformers import BertConfig, BertForPreTraining

    return BertForPreTraining(BertConfig(
        vocab_size=shape["vocab_size"], max_position_embeddings=shape["seq_length"], hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"], intermediate_size=4 * shape["hidden_size"],
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, layer_norm_eps=EPSILON, hidden_act="gelu",
        attn_implementation="sdpa",
    ))  # fmt: skip


def _bert_names(shape: Shape) -> dict[str, Any]:
    h, (rows, ffn) = shape["hidden_size"], _rows(shape)
    found: dict[str, Any] = {
        "bert.embeddings.word_embeddings.weight": ("embedding.word_embeddings", (shape["vocab_size"], h), _same),
        "bert.embeddings.position_embeddings.weight": ("embedding.position_embeddings", (shape["seq_length"], h), _same),
        "bert.embeddings.token_type_embeddings.weight": ("embedding.tokentype_embeddings", (2, h), _same),
        "cls.predictions.transform.dense.weight": ("lm_head.dense", (h, h), _same),
        "bert.pooler.dense.weight": ("pooler.dense", (h, h), _same), "cls.seq_relationship.weight": ("binary_head", (2, h), _same),
    }  # fmt: skip
    for i in range(shape["num_layers"]):
        here, there = f"encoder.layers.{i}", f"bert.encoder.layer.{i}"
        for part, name in enumerate(("query", "key", "value")):
            found[f"{there}.attention.self.{name}.weight"] = (
                f"{here}.self_attention.linear_qkv",
                (rows, h),
                _qkv(shape, part),
            )
        found |= {
            f"{there}.attention.output.dense.weight": (f"{here}.self_attention.linear_proj", (h, h), _same),
            f"{there}.intermediate.dense.weight": (f"{here}.mlp.linear_fc1", (ffn, h), _same),
            f"{there}.output.dense.weight": (f"{here}.mlp.linear_fc2", (h, ffn), _same),
        }
    return found


def _llama(shape: Shape, dropout: float) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=shape["vocab_size"], max_position_embeddings=shape["seq_length"], hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"], num_key_value_heads=shape["num_groups"],
        intermediate_size=shape["ffn"], rms_norm_eps=EPSILON, attention_dropout=dropout, tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa",
    ))  # fmt: skip


def _llama_names(shape: Shape) -> dict[str, Any]:
    h, (rows, ffn) = shape["hidden_size"], _rows(shape)
    found: dict[str, Any] = {
        "model.embed_tokens.weight": ("embedding.word_embeddings", (shape["vocab_size"], h), _same),
        "lm_head.weight": ("output_layer", (shape["vocab_size"], h), _same),
    }
    for i in range(shape["num_layers"]):
        here, there = f"decoder.layers.{i}", f"model.layers.{i}"
        for part, name in enumerate("qkv"):
            found[f"{there}.self_attn.{name}_proj.weight"] = (
                f"{here}.self_attention.linear_qkv",
                (rows, h),
                _qkv(shape, part),
            )
        for half, name in enumerate(("gate", "up")):
            found[f"{there}.mlp.{name}_proj.weight"] = (
                f"{here}.mlp.linear_fc1",
                (2 * ffn, h),
                lambda x, half=half: x.chunk(2)[half],
            )
        found |= {
            f"{there}.self_attn.o_proj.weight": (f"{here}.self_attention.linear_proj", (h, h), _same),
            f"{there}.mlp.down_proj.weight": (f"{here}.mlp.linear_fc2", (h, ffn), _same),
        }
    return found


FAMILIES = {
    "gpt2": Family(
        "GPT-2 124M", {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50304, "batch": 4, "seq_length": 512}, {},
        _gpt2, _gpt2_names,
    ),
    "bert": Family(
        "BERT", {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "vocab_size": 30592, "batch": 4, "seq_length": 512},
        {"model_family": "bert", "norm_placement": "post", "gelu_approximate": "none"}, _bert, _bert_names,
    ),
    "llama": Family(
        "Llama shape",
        {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "num_groups": 4, "ffn": 1408, "vocab_size": 32000, "batch": 4,
         "seq_length": 512},
        {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True,
         "group_query_attention": True, "untie_embeddings_and_output_weights": True}, _llama, _llama_names,
    ),
}  # fmt: skip
