"""Pretrain an unmodified Llama of transformers: its own class, its own parameter names, this project's training.

    torchrun --nproc-per-node 2 examples/train_hf_llama.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \\
        --sequence-parallel-size 2 --zero-stage 1 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --train-iters 50 \\
        --data-path runs/quickstart/corpus_text_document --tokenizer-model runs/quickstart/tokenizer.model --save runs/hf-llama

The shape comes from the flags, or with ``--model FOLDER`` from a local config.json (and its weights, if they are
there). All flags are those of ``pretrain_gpt.py``; tp, tp with sequence parallel, sp and ZeRO can be changed from one
start to the next (``--auto-resume``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_sp.commands.schedule.train import parse_external

if __name__ == "__main__":
    CONFIG, FOLDER = parse_external(description="Pretrain an unmodified Llama of transformers.", family="gpt")

import transformers

from megatron_sp.tasks.external_task import ATTENTION, external_task
from megatron_sp.tasks.external_weights import ModelFolder
from megatron_sp.training.loop import Task, pretrain

if TYPE_CHECKING:
    from torch import nn

    from megatron_sp.config.schema import Config
    from megatron_sp.schedule import Schedule


def build(config: Config) -> nn.Module:
    """A Llama with random weights, as the flags say."""
    model = config.model
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=model.vocab_size, hidden_size=model.hidden_size, num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads, num_key_value_heads=model.num_groups, intermediate_size=model.ffn_size,
            max_position_embeddings=model.max_positions, rms_norm_eps=model.norm_epsilon, attention_dropout=model.attention_dropout,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base}, initializer_range=model.init_method_std,
            tie_word_embeddings=not model.untie_embeddings_and_output_weights, pad_token_id=None,
            attn_implementation=ATTENTION[config.kernels.attention_backend],
        )
    )  # fmt: skip


def write(s: Schedule, seq: bool) -> None:
    """How its layers are split over tp; ``seq``: activations between them are cut along the sequence."""
    enter, leave = ("all_gather", "reduce_scatter") if seq else ("copy", "all_reduce")
    s["model.layers.*.self_attn"].sync("fwd_pre", enter, arg="hidden_states")
    s["model.layers.*.self_attn.{q,k,v}_proj"].column(input="prepared")
    s["model.layers.*.self_attn.o_proj"].row(leave)
    s["model.layers.*.mlp"].sync("fwd_pre", enter)
    s["model.layers.*.mlp.{gate,up}_proj"].column(input="prepared")
    s["model.layers.*.mlp.down_proj"].row(leave)
    s["model.embed_tokens"].vocab_parallel()
    s["lm_head"].vocab_parallel()
    if seq:
        s.sequence("model.layers.0", "model.norm")


def llama_task(folder: str | None = None) -> Task:
    """The task; ``folder``: of a config.json and perhaps weights."""
    return external_task(
        "train_hf_llama", build if folder is None else ModelFolder(folder, "AutoModelForCausalLM"), write
    )


if __name__ == "__main__":
    pretrain(CONFIG, llama_task(FOLDER))
