"""Whole launch scripts of both dialects, what their words mean here, and what they are told."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.utils.errors import ConfigError

MEGATRON_LM_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 16 --train-iters 500000 --lr 0.00015 --lr-decay-style cosine --lr-decay-iters 320000
    --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --attention-softmax-in-fp32
    --initial-loss-scale 65536 --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --data-path /data/my-gpt2_text_document --tokenizer-type NullTokenizer --vocab-size 50257 --split 949,50,1
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save /runs/345m --load /runs/345m
    --tensorboard-dir /runs/345m/tb --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --distributed-backend nccl --use-mcore-models
    --ckpt-format torch_dist --auto-detect-ckpt-format --dist-ckpt-strictness log_all --timing-log-level 0 --no-rope-fusion
    --exit-duration-in-mins 230 --distributed-timeout-minutes 60 --manual-gc --manual-gc-interval 50
"""

MEGATRON_LM_LLAMA = """
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
    --normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention
    --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --norm-epsilon 1e-5
    --tokenizer-type SentencePieceTokenizer --tokenizer-model /tok/llama.model --data-path 0.3 /d/a 0.7 /d/b --split 99990,8,2
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-samples 1000000 --lr-decay-samples 900000 --lr-decay-style cosine
    --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-samples 50000 --clip-grad 1.0 --bf16 --adam-beta1 0.9 --adam-beta2 0.95
    --overlap-grad-reduce --overlap-param-gather --accumulate-allreduce-grads-in-fp32 --attention-backend fused
    --recompute-activations --log-throughput --log-num-zeros-in-grad --log-params-norm --no-load-optim --no-load-rng --async-save
    --save /runs/llama --load /ckpt/llama --save-interval 500 --finetune --exit-on-missing-checkpoint --rampup-batch-size 64 64 97656
    --use-checkpoint-opt_param-scheduler --wandb-project llama --wandb-exp-name base --eval-interval 100 --eval-iters 32
    --exit-signal-handler
"""

MEGATRON_DEEPSPEED = """
    --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 1 --init-method-std 0.014
    --lr-decay-tokens 300000000000 --lr-warmup-tokens 3000000000 --micro-batch-size 4 --exit-duration-in-mins 30000000
    --global-batch-size 256 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --train-tokens 300000000000 --train-samples 439453125 --lr 2.0e-4 --min-lr 1.0e-6
    --lr-decay-style cosine --split 949,50,1 --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 10000
    --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 --load /ckpt/1b --save /ckpt/1b
    --no-async-tensor-model-parallel-allreduce --tensorboard-queue-size 1 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
    --log-validation-ppl-to-tensorboard --tensorboard-dir /tb --checkpoint-activations --use-rotary-position-embeddings
    --rotary-percent 0.25 --num-key-value-heads 16 --layernorm-epsilon 1e-5 --normalization layernorm --no-query-key-layer-scaling
    --data-path /data/pile_text_document --data-impl mmap --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /tok/t.model
    --deepspeed --deepspeed_config DS_CONFIG --zero-stage 0 --pipeline-model-parallel-size 1 --no-pipeline-parallel
    --deepspeed-activation-checkpointing --local_rank=0 --ds-sequence-parallel-size 1 --profile pt --profile_steps 2,3
"""

DS_CONFIG = """{
  "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
  "zero_optimization": {"stage": 0, "elastic_checkpoint": true},
  "gradient_clipping": 1.0, "prescale_gradients": true, "wall_clock_breakdown": false,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11},
  "bf16": {"enabled": false}
}"""


def config(script: str, world_size: int = 4):  # type: ignore[no-untyped-def]
    return config_from_args(shlex.split(script), world_size=world_size)


def test_megatron_lm_345m() -> None:
    c = config(MEGATRON_LM_345M)
    assert (c.model.num_layers, c.model.head_dim, c.model.ffn_size, c.model.max_positions) == (24, 64, 4096, 1024)
    assert (c.optimizer.lr, c.optimizer.min_lr, c.optimizer.lr_warmup_fraction) == (1.5e-4, 1e-5, 0.01)
    assert c.precision.initial_loss_scale == 65536
    assert c.data.split == "949,50,1" and c.parallel.distributed_timeout_minutes == 60
    ignored = [note.split(" ")[0] for note in c.ignored_flags]
    assert ignored == shlex.split(
        """--attention-softmax-in-fp32 --transformer-impl --no-gradient-accumulation-fusion --no-masked-softmax-fusion
        --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --use-mcore-models --ckpt-format
        --auto-detect-ckpt-format --dist-ckpt-strictness --timing-log-level --no-rope-fusion --manual-gc --manual-gc-interval"""
    )


def test_megatron_lm_llama() -> None:
    c = config(MEGATRON_LM_LLAMA, world_size=8)
    assert (c.model.position_embedding_type, c.model.num_groups, c.model.ffn_size, c.model.rotary_base) == ("rope", 8, 14336, 1e6)
    assert c.data.data_path == ("0.3", "/d/a", "0.7", "/d/b") and c.batch.rampup_batch_size == (64, 64, 97656)
    assert (c.kernels.attention_backend, c.kernels.recompute_granularity) == ("fused", "selective")
    assert c.checkpoint.finetune and c.optimizer.use_checkpoint_opt_param_scheduler and not c.batch.no_exit_signal_handler


def test_megatron_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(DS_CONFIG)
    c = config(MEGATRON_DEEPSPEED.replace("DS_CONFIG", str(tmp_path / "ds_config.json")), world_size=8)
    assert c.precision.fp16 and (c.precision.initial_loss_scale, c.precision.loss_scale_window, c.parallel.zero_stage) == (2048.0, 500, 0)
    assert [n for n in c.ignored_flags if n.startswith("ds_config.json")] == [
        "ds_config.json: steps_per_print, zero_optimization.elastic_checkpoint, prescale_gradients, wall_clock_breakdown"
        " (DeepSpeed's own tuning, without a meaning here)"
    ]
    assert c.batch.train_samples == 146484375 and c.batch.train_iters is None  # 300e9 tokens / 2048, less than --train-samples
    assert (c.optimizer.lr_decay_samples, c.optimizer.lr_warmup_samples) == (146484375, 1464844)
    assert (c.model.position_embedding_type, c.model.rotary_percent, c.model.num_groups) == ("rope", 0.25, 16)
    assert c.model.normalization == "LayerNorm"
    assert (c.kernels.recompute_granularity, c.kernels.recompute_num_layers) == ("full", 1)
    assert (c.logging.profile, c.logging.profile_step_start, c.logging.profile_step_end) == (True, 2, 3)
    assert c.data.tokenizer_type == "SentencePieceTokenizer" and c.optimizer.override_opt_param_scheduler


def test_a_script_that_asks_for_more_than_there_is_hears_all_of_it_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config(MEGATRON_LM_345M + " --multi-latent-attention --num-experts 8 --moe-input-jitter-eps 0.1 --fp8-format hybrid")
    text = str(caught.value)
    assert text.startswith("3 things are wrong:") and "by their router's scores alone" in text
    with pytest.raises(
        ConfigError, match=r"each stage needs a layer, and num_layers \(24\) is less than pipeline_model_parallel_size \(32\)"
    ):
        config(MEGATRON_LM_345M + " --pipeline-model-parallel-size 32")


@pytest.mark.parametrize(("words", "groups", "told"), [
    ("--num-query-groups 4", 4, "--num-query-groups 4 (these are the key/value heads, with or without --group-query-attention"),
    ("--group-query-attention --num-query-groups 4", 4, ""), ("--num-query-groups 16", 16, ""), ("--num-key-value-heads 4", 4, ""),
    ("--group-query-attention", 1, "--group-query-attention (without --num-query-groups it is one key/value head"),
    ("--no-group-query-attention --num-query-groups 1", 16, "--num-query-groups (without --group-query-attention: each query head"),
    ("--attention-head-type multiquery", 1, ""),
    ("--attention-head-type multihead", 16, "--attention-head-type (asks for what happens anyway)"),
])  # fmt: skip
def test_key_value_heads(words: str, groups: int, told: str) -> None:
    """Megatron ignores --num-query-groups without the other flag, and has one group where that stands alone."""
    c = config(f"{MEGATRON_LM_345M} {words}")
    assert c.model.num_groups == groups
    notes = [note for note in c.remarks if "query" in note or "head-type" in note]
    assert len(notes) == bool(told) and all(told in note for note in notes), notes


@pytest.mark.parametrize(("words", "activation", "width"), [
    ("--glu-activation swiglu", "swiglu", 4096), ("--glu_activation=geglu", "geglu", 4096), ("--swiglu", "swiglu", 2688),
    ("--glu-activation swiglu --ffn-hidden-size 640", "swiglu", 640),
    ("--glu-activation geglu --openai-gelu", "geglu_tanh", 4096),
])  # fmt: skip
def test_gates_of_the_forks(words: str, activation: str, width: int) -> None:
    """Each half of such a gate is as wide as an MLP without one, where Megatron narrows it."""
    model = config(f"{MEGATRON_LM_345M} {words}").model
    assert (model.activation, model.ffn_size) == (activation, width)


@pytest.mark.parametrize("words", [
    "--spec local",
    "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_with_transformer_engine_spec", "--rope-type rope",
    "--rotary-interleaved", "--padded-vocab-size 50304", "--defer-embedding-wgrad-compute --wgrad-deferral-limit 2",
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--megatron-fsdp-version 2",
])  # fmt: skip
def test_names_that_change_nothing(words: str) -> None:
    c, plain = config(f"{MEGATRON_LM_345M} {words}"), config(MEGATRON_LM_345M)
    assert c == plain
    assert [note.split()[0] for note in set(c.ignored_flags) - set(plain.ignored_flags)] and "not supported" not in str(c.ignored_flags)


@pytest.mark.parametrize(("theirs", "ours"), [("nccl2", "nccl"), ("hccl", "auto")])
def test_collective_backends_of_other_programs(theirs: str, ours: str) -> None:
    assert config(f"{MEGATRON_LM_345M} --device cuda --distributed-backend {theirs}").parallel.distributed_backend == ours


BF16 = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 9 --mock-data --lr 1 --train-iters 1 --bf16 "


@pytest.mark.parametrize(("flags", "backend", "line"), [
    ("--use-flash-attn", "flash", ""), ("--use-flash-attn-triton --device cuda", "flash", ""),
    ("--use-flash-attn --attention-backend flash", "flash", ""),
    ("--use-flash-attn --attention-backend fused", "fused", "--use-flash-attn (--attention-backend fused says it more exactly)"),
    ("--attention-backend auto --use-flash-attn", "auto", "--use-flash-attn (--attention-backend auto says it more exactly)"),
    ("--use-flash-attn --device cpu", "auto", "--use-flash-attn (there is no GPU in this run: attention is torch's)"),
    ("--use-flash-attn --device cpu --attention-backend unfused", "unfused", "--use-flash-attn (--attention-backend unfused says"),
])  # fmt: skip
def test_what_use_flash_attn_means(flags: str, backend: str, line: str) -> None:
    config = config_from_args((BF16 + flags).split())
    assert config.kernels.attention_backend == backend
    notes = [note for note in config.ignored_flags if "flash" in note]
    assert len(notes) == bool(line) and all(note.startswith(line) for note in notes)


def test_a_named_kernel_is_demanded() -> None:
    with pytest.raises(ConfigError, match="--attention-backend flash needs a GPU, but --device cpu was given"):
        config_from_args((BF16 + "--use-flash-attn --attention-backend flash --device cpu").split())
