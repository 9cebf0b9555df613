"""Pretrain an unmodified BERT of transformers on masked tokens: its own class, its own parameter names, this project's training.

    torchrun --nproc-per-node 2 examples/train_hf_bert.py --num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
        --bert-no-binary-head --sequence-parallel-size 2 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --train-iters 50 \\
        --data-path runs/quickstart/corpus_text_sentence --vocab-file runs/quickstart/vocab.txt --save runs/hf-bert

The shape comes from the flags, or with ``--model FOLDER`` from a local config.json (and its weights, if they are
there). All flags are those of ``pretrain_bert.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_sp.commands.schedule.train import parse_external

if __name__ == "__main__":
    CONFIG, FOLDER = parse_external(description="Pretrain an unmodified BERT of transformers.", family="bert")

import transformers

from megatron_sp.tasks.external_task import ATTENTION, external_task
from megatron_sp.tasks.external_weights import ModelFolder
from megatron_sp.training.loop import Task, pretrain

if TYPE_CHECKING:
    from torch import nn

    from megatron_sp.config.schema import Config
    from megatron_sp.schedule import Schedule


def build(config: Config) -> nn.Module:
    """A BERT with random weights, as the flags say."""
    model = config.model
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=model.vocab_size, hidden_size=model.hidden_size, num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads, intermediate_size=model.ffn_size,
            max_position_embeddings=model.max_positions, layer_norm_eps=model.norm_epsilon, initializer_range=model.init_method_std,
            hidden_dropout_prob=model.hidden_dropout, attention_probs_dropout_prob=model.attention_dropout, pad_token_id=0,
            attn_implementation=ATTENTION[config.kernels.attention_backend],
        )
    )  # fmt: skip


def write(s: Schedule, seq: bool) -> None:
    """How its layers are split over tp; ``seq``: activations between them are cut along the sequence."""
    enter, leave = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    blocks = "bert.encoder.layer"
    s[f"{blocks}.*.attention.self"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.*.attention.self.{{query,key,value}}"].column(input="prepared")
    s[f"{blocks}.*.attention.output.dense"].row(leave)
    s[f"{blocks}.*.intermediate"].sync("fwd_pre", enter)
    s[f"{blocks}.*.intermediate.dense"].column(input="prepared")
    s[f"{blocks}.*.output.dense"].row(leave)
    s["bert.embeddings.word_embeddings"].vocab_parallel()
    s["cls.predictions.decoder"].vocab_parallel()
    if seq:
        s.sequence(f"{blocks}.0", f"{blocks}.{len(s[f'{blocks}.*']) - 1}")


def bert_task(folder: str | None = None) -> Task:
    """The task; ``folder``: of a config.json and perhaps weights."""
    build_it = build if folder is None else ModelFolder(folder, "AutoModelForMaskedLM")
    return external_task("train_hf_bert", build_it, write, causal=False)


if __name__ == "__main__":
    pretrain(CONFIG, bert_task(FOLDER))
