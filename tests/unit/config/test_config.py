"""The configuration: every rule with its message, shorthands, and reading a stored one."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from typing import Any

import pytest

from megatron_sp.config.fields import MAX_COUNT, MAX_NUMBER, field_kinds
from megatron_sp.config.rules import normalize, validate, violations
from megatron_sp.config.rules_training import step_violation
from megatron_sp.config.schema import GROUPS, Config, diff
from megatron_sp.data.gpt_dataset import split_bounds
from megatron_sp.utils.errors import EXIT_CONFIG, ConfigError

GROUP_OF = {name: group for group, cls in GROUPS.items() for name in field_kinds(cls)}


def config(**fields: Any) -> Config:
    """A sound configuration with some fields replaced."""
    result = Config()
    values = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 100, "train_iters": 10,
        "lr": 1e-3, "mock_data": True, **fields,
    }  # fmt: skip
    for name, value in values.items():
        setattr(getattr(result, GROUP_OF[name]), name, value)
    return normalize(result)


def message(world_size: int = 1, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config(**fields), world_size)
    assert caught.value.exit_code == EXIT_CONFIG
    return str(caught.value)


def test_the_sound_configuration_is_sound() -> None:
    validate(config())
    validate(config(), 8)


def _steps(schedule: str, micro: int = 1) -> dict[str, Any]:
    return {"step_batch_size_schedule": (schedule,), "micro_batch_size": micro}


def _curriculum(words: tuple[str, ...] = ("fixed_linear", "8", "32", "9", "4"), **more: Any) -> dict[str, Any]:
    return {"seq_length_curriculum": words, **more}


def _groups(**texts: tuple[str, ...]) -> dict[str, Any]:
    return {"mock_data": False} | {f"{name}_weighted_split_paths": each for name, each in texts.items()}


ROPE = {"position_embedding_type": "rope"}
RULES: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 0}, "--num-layers (0) must be at least 1"),
    ({"hidden_size": -64}, "--hidden-size (-64) must be at least 1"), ({"lr": -0.1}, "--lr (-0.1) must be at least 0"),
    ({"keep_last": 1}, "--keep-last (1) must be at least 2"), ({"num_layers": None}, "--num-layers is required"),
    ({"num_layers": None, "seq_length": None}, "--num-layers, --seq-length are required"),
    ({"hidden_size": 66}, "hidden_size (66) must be a multiple of num_attention_heads (4): 66 = 16 * 4 + 2"),
    ({"hidden_size": 100, "num_attention_heads": 10, "num_query_groups": 4},
        "num_attention_heads (10) must be a multiple of num_query_groups (4): 10 = 2 * 4 + 2; use 1, 2, 5, 10"),
    ({"num_query_groups": 8}, "num_attention_heads (4) must be a multiple of num_query_groups (8): 4 = 0 * 8 + 4; use 1, 2, 4"),
    ({"max_position_embeddings": 16}, "max_position_embeddings (16) must be at least seq_length (32)"),
    ({"attention_dropout": 1.0}, "attention_dropout (1.0) must be in [0, 1)"),
    ({"hidden_dropout": 1.5}, "hidden_dropout (1.5) must be in [0, 1)"),
    ({"norm_epsilon": 0.0}, "norm_epsilon (0.0) must be above 0"),
    ({"swiglu": True, "squared_relu": True}, "--swiglu and --squared-relu exclude each other: give one activation"),
    ({"geglu": True, "relu": True, "swiglu": True}, "--swiglu and --geglu and --relu exclude each other"),
    ({"geglu": True, "hidden_size": 20}, "the MLP would have no width: with --geglu it is 8/3 * hidden_size (20), rounded down to a"
        " multiple of 64, and that is 0; give --ffn-hidden-size"),
    ({"window_size": 0}, "--window-size (0) must be at least 1"),
    ({"use_rope_scaling": True}, "--use-rope-scaling is about rotary positions: add --position-embedding-type rope, or leave it out"),
    ({"rotary_seq_len_interpolation_factor": 4.0}, "--rotary-seq-len-interpolation-factor 4 is about rotary positions"),
    ({**ROPE, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4.0},
        "--use-rope-scaling and --rotary-seq-len-interpolation-factor 4 are two ways to make the same sequences longer: give one"),
    ({**ROPE, "rotary_seq_len_interpolation_factor": 0.0}, "rotary_seq_len_interpolation_factor (0) must be above 0"),
    ({**ROPE, "rope_scaling_factor": -8.0}, "rope_scaling_factor (-8) must be above 0"),
    ({**ROPE, "rope_scaling_low_freq_factor": 0.0}, "rope_scaling_low_freq_factor (0) must be above 0"),
    ({**ROPE, "rope_scaling_high_freq_factor": 1.0},
        "rope_scaling_high_freq_factor (1) must be above rope_scaling_low_freq_factor (1): frequencies between the two are stretched"),
    ({"bert_head_activation": "gelu"}, "--bert-head-activation gelu is for BERT (pretrain_bert.py), and this is a GPT: leave it out"),
    ({"model_family": "bert", "use_parallel_residual": True}, "--use-parallel-residual is for GPT: here attention comes first"),
    ({"model_family": "bert", "window_size": 4}, "--window-size 4 is for GPT: BERT's tokens see all of their sequence"),
    ({"position_embedding_type": "rope", "rotary_percent": 0.0}, "rotary_percent (0.0) must be in (0, 1]"),
    ({"position_embedding_type": "rope", "rotary_percent": 1.1}, "rotary_percent (1.1) must be in (0, 1]"),
    ({"position_embedding_type": "rope", "rotary_percent": 0.6}, "int(head_dim 16 * rotary_percent 0.6) = 9"),
    ({"position_embedding_type": "rope", "kv_channels": 7}, "int(head_dim 7 * rotary_percent 1.0) = 7"),
    ({"position_embedding_type": "rope", "rotary_percent": 0.01}, "must be even and at least 2"),
    ({"position_embedding_type": "rope", "rotary_base": 0.0}, "rotary_base (0.0) must be above 0"),
    ({"pipeline_schedule": "zb1p"}, "--pipeline-schedule is about the stages of a pipeline, and with"),
    ({"distributed_timeout_minutes": 0.0}, "distributed_timeout_minutes (0.0) must be above 0"),
    ({"attention_backend": "flash", "device": "cpu", "bf16": True}, "--attention-backend flash needs a GPU"),
    ({"attention_backend": "flash"}, "flash-attn computes in bf16 and fp16 only, not float32"),
    ({"fused_kernels": "triton", "device": "cpu"}, "--fused-kernels triton needs a GPU, but --device cpu was given"),
    ({"fused_kernels": "triton", "fp64": True}, "triton computes in fp32, bf16 and fp16 only, not float64"),
    ({"fused_kernels": "apex", "device": "cpu"}, "--fused-kernels apex needs a GPU, but --device cpu was given"),
    ({"fused_kernels": "apex", "fp64": True}, "apex computes in fp32, bf16 and fp16 only, not float64"),
    ({"fused_kernels": "apex", "offload_optimizer": True}, "apex updates on the GPU, --offload-optimizer on the host"),
    ({"use_flash_attn": True, "bf16": True, "kv_channels": 512}, "flash-attn takes heads up to 256 wide, not 512"),
    ({"recompute_activations": True, "recompute_granularity": "full"}, "--recompute-activations means"),
    ({"recompute_granularity": "selective", "recompute_method": "block"}, "--recompute-method chooses whole blocks"),
    ({"recompute_granularity": "full", "recompute_method": "block"}, "needs --recompute-num-layers N"),
    ({"mlp_chunks": 65, "seq_length": 64}, "mlp_chunks (65) must be at most the positions of a rank (64 / 1, rounded up, = 64): use"
        " --mlp-chunks 64 or less"),
    ({"recompute_granularity": "full", "recompute_num_layers": 3}, "recompute_num_layers (3) must be at most num_layers (2)"),
    ({"global_batch_size": 7, "micro_batch_size": 2}, "(2 * 1 = 2): 7 = 3 * 2 + 1; use 6 or 8"),
    ({"eval_global_batch_size": 7, "micro_batch_size": 2},
        "eval_global_batch_size (7) must be a multiple of micro_batch_size * data-parallel size (2 * 1 = 2): 7 = 3 * 2 + 1; use 6 or 8"),
    ({"global_batch_size": 1, "micro_batch_size": 2}, "1 = 0 * 2 + 1; use 2"),
    ({"global_batch_size": 8, "rampup_batch_size": (2, 2)}, "takes three integers, START INCREMENT SAMPLES, got 2: 2 2"),
    ({"global_batch_size": 8, "rampup_batch_size": (0, 2, 9)}, "must be at least 1"),
    ({"rampup_batch_size": (2, 2, 9)}, "rampup_batch_size needs --global-batch-size"),
    ({"global_batch_size": 8, "rampup_batch_size": (8, 2, 9)}, "must start below global_batch_size (8)"),
    ({"global_batch_size": 8, "rampup_batch_size": (3, 2, 9)}, "(8 - 3) / 2 = 2.5"),
    ({"global_batch_size": 8, "micro_batch_size": 2, "rampup_batch_size": (3, 1, 9)},
        "START (3) must be a multiple of micro_batch_size * data-parallel size (2 * 1 = 2)"),
    ({"global_batch_size": 8, "micro_batch_size": 2, "rampup_batch_size": (2, 3, 9)},
        "INCREMENT (3) must be a multiple of micro_batch_size * data-parallel size (2 * 1 = 2)"),
    (_steps("0:8 1K:9", micro=2), "step_batch_size_schedule: 9 must be a multiple of micro_batch_size * data-parallel size (2 * 1 = 2)"),
    (_steps("0:9 1K:8", micro=2), "step_batch_size_schedule: 9 must be a multiple of micro_batch_size * data-parallel size (2 * 1 = 2)"),
    (_steps("0:8 1K:16") | {"global_batch_size": 8}, "global_batch_size (8) is not the last size of --step-batch-size-schedule (16)"),
    (_steps("0:8 1K:16") | {"rampup_batch_size": (2, 2, 9)}, "are two ways for a batch to grow: give one"),
    (_steps("16"), "step_batch_size_schedule: expected TOKENS:SIZE such as 2.4B:320, got '16'"), (_steps("0:8 1G:16"), "got '1G:16'"),
    (_steps(f"0:8 {'9' * 400}:16"), "expected TOKENS:SIZE such as 2.4B:320, got '9999"),
    (_steps("0:0"), "'0:0': expected at most 1e+18 tokens, and a whole number from 1 to 2147483648 as size"),
    (_steps("0:1.5"), "'0:1.5': expected"),
    (_steps("1K:8"), "the first size is that of 0 tokens: begin with 0:SIZE"),
    (_steps("0:8 1K:16 1000:8"), "two sizes begin at 1,000 tokens"),
    (_steps("0:8 33:16 40:8"), "33 and 40 tokens are the same sample of 32 tokens (1): its thresholds are in tokens"),
    (_curriculum(words=("fixed_linear", "8")), "seq_length_curriculum: expected fixed_linear SHORTEST LONGEST STEPS MULTIPLE"),
    (_curriculum(model_family="bert", vocab_file="v", tokenizer_type="BertWordPieceCase"), "those of BERT are whole"),
    (_curriculum(mlp_chunks=9), "mlp_chunks (9) must be at most the positions of a rank (8 of the first 8 tokens"),
    (_curriculum(lr_warmup_tokens=9), "--lr-warmup-tokens (9) needs --lr-decay-tokens"),
    (_curriculum(lr_decay_tokens=90, lr_warmup_iters=2), "--lr-warmup-iters cannot go with a learning rate that goes"),
    (_curriculum(lr_decay_tokens=90, lr_warmup_tokens=90), "lr_warmup_tokens (90) must be below the decay horizon (90"),
    (_curriculum(lr_decay_tokens=90, lr_warmup_tokens=9, lr_warmup_fraction=0.1),
        "give --lr-warmup-fraction (0.1) or --lr-warmup-tokens (9), not both"),
    (_curriculum(lr_decay_tokens=90, lr_decay_style="WSD", lr_wsd_decay_iters=2),
        "--lr-decay-style WSD has its final decay in steps or samples"),
    (_curriculum(train_iters=None, train_tokens=90, weight_decay_incr_style="linear", start_weight_decay=0.1, end_weight_decay=0.2),
        "--weight-decay-incr-style changes the weight decay over --train-samples or --train-iters"),
    ({"train_iters": None}, "the length of the run is missing"),
    ({"train_samples": 100}, "give --train-iters (10) or --train-samples (100), not both"),
    ({"skip_train": True}, "--skip-train validates a checkpoint and needs --load"),
    ({"skip_train": True, "load": "x", "eval_iters": 0}, "leaves nothing to do"),
    ({"seed": 2**32}, "seed (4294967296) must be at most 4294967295"),
    ({"exit_duration_in_mins": 0.0}, "exit_duration_in_mins (0) must be above 0"), ({"lr": None}, "--lr is required to train"),
    ({"min_lr": 0.1}, "min_lr (0.1) must be at most lr (0.001)"),
    ({"lr_warmup_init": 0.1}, "lr_warmup_init (0.1) must be at most lr (0.001)"),
    ({"decoupled_min_lr": 0.1}, "--decoupled-min-lr 0.1 is the floor of --decoupled-lr"),
    ({"decoupled_min_lr": 0.1, "decoupled_lr": 0.01}, "decoupled_min_lr (0.1) must be at most decoupled_lr (0.01)"),
    ({"min_lr": 1e-4, "decoupled_lr": 1e-5}, "min_lr (0.0001) must be at most decoupled_lr (1e-05)"),
    ({"lr_warmup_init": 1e-3, "decoupled_lr": 1e-5}, "lr_warmup_init (0.001) must be at most decoupled_lr (1e-05)"),
    ({"lr_decay_samples": 5}, "--lr-decay-samples cannot go with --train-iters"),
    ({"lr_warmup_samples": 5, "lr_decay_samples": 9}, "--lr-decay-samples, --lr-warmup-samples cannot go with"),
    ({"train_iters": None, "train_samples": 100, "lr_warmup_iters": 5},
        "--lr-warmup-iters cannot go with --train-samples: the schedule counts what the run counts; use the -samples forms"),
    ({"lr_warmup_iters": 10}, "lr_warmup_iters (10) must be below the decay horizon (10,"),
    ({"lr_warmup_iters": 5, "lr_decay_iters": 4}, "lr_warmup_iters (5) must be below the decay horizon (4,"),
    ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}, "give --lr-warmup-fraction (0.1) or --lr-warmup-iters (5)"),
    ({"lr_warmup_fraction": 1.0}, "lr_warmup_fraction (1.0) must be in [0, 1)"),
    ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_warmup_iters": 4}, "4 + 8 = 12 > 10 iters"),
    ({"adam_beta2": 1.0}, "adam_beta2 (1.0) must be in [0, 1)"),
    ({"sgd_momentum": 1.0}, "sgd_momentum (1.0) must be in [0, 1)"), ({"adam_eps": 0.0}, "adam_eps (0) must be above 0"),
    ({"weight_decay_incr_style": "linear"}, "linear needs --start-weight-decay and --end-weight-decay"),
    ({"start_weight_decay": 0.1, "end_weight_decay": 0.2}, "differ, but --weight-decay-incr-style is constant"),
    ({"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}, "exclude each other: who decides on resume?"),
    ({"bf16": True, "fp16": True}, "--bf16 and --fp16 exclude each other"),
    ({"model_family": "bert", "mask_prob": 0.0}, "mask_prob (0.0) must be in (0, 1)"),
    ({"model_family": "bert", "mask_prob": 1.0}, "mask_prob (1.0) must be in (0, 1)"),
    ({"model_family": "bert", "short_seq_prob": 1.5}, "short_seq_prob (1.5) must be in [0, 1]"),
    ({"model_family": "bert", "bert_pack_sequences": True}, "two segments of each: add --bert-no-binary-head, or leave it out"),
    ({"model_family": "bert", "eod_mask_loss": True}, "--eod-mask-loss is about documents in GPT's stream of tokens"),
    ({"model_family": "bert", "tokenizer_type": "ByteTokenizer", "vocab_size": None, "eod_id": 0},
        "--eod-id is about documents in GPT's stream of tokens"),
    ({"model_family": "bert", "reset_attention_mask": True}, "--reset-attention-mask is about documents in GPT's stream"),
    ({"mask_prob": 0.2}, "--mask-prob is for BERT (pretrain_bert.py), and this is a GPT"),
    ({"bert_pack_sequences": True}, "--bert-pack-sequences is for BERT (pretrain_bert.py)"),
    ({"tokenizer_type": "BertWordPieceCase"}, "--tokenizer-type BertWordPieceCase needs --vocab-file FILE"),
    ({"fp16": True, "loss_scale": 0.0}, "loss_scale (0.0) must be above 0"),
    ({"initial_loss_scale": 0.5}, "initial_loss_scale (0.5) must be at least min_loss_scale (1)"),
    ({"mock_data": False}, "there is no data"),
    ({"data_path": ("x",)}, "--mock-data and --data-path exclude each other"),
    ({"mock_data": False, "data_path": ("x",), "train_data_path": ("y",)}, "--data-path and --train-data-path exclude"),
    ({"mock_data": False, "valid_data_path": ("y",)}, "--valid-data-path needs --train-data-path too"),
    (_groups(train=("a: 1 0:1 x", "b: 1 0:1 y")), "train_weighted_split_paths has 2 groups (a, b): training takes one"),
    (_groups(valid=("a: 1 0:1 x",)), "--valid-weighted-split-paths needs --train-weighted-split-paths too"),
    (_groups(train=("a: 1 0:1 x",), valid=("v: 1 0:1 x", "v: 1 0:1 y")), "valid_weighted_split_paths: two groups have the name 'v'"),
    (_groups(train=("1 0:1 x",)), "expected WEIGHT BEGIN:END PREFIX between two commas, got '1 x'"),
    (_groups(train=("a",)), "expected \"NAME: WEIGHT BEGIN:END PREFIX, WEIGHT BEGIN:END PREFIX\" in quotes, got 'a'"),
    (_groups(train=("a: 1 0:1 x y",)), "between two commas, got '1 0:1 x y'"),
    (_groups(train=("a: 1 all x",)), "in numbers, such as 0.3 0:0.95 x, got '1 all x'"),
    (_groups(train=("a: 0 0:1 x",)), "'0' must be a weight above 0"),
    (_groups(train=("a: 1 0.5:0.5 x",)), "'0.5:0.5' must be BEGIN:END with 0 <= BEGIN < END <= 1"),
    (_groups(train=("a: 1 0:95 x",)), "'0:95' must be BEGIN:END"),
    (_groups(train=("a: 1 0:1 x",)) | {"data_path": ("x",)}, "--data-path and --train-weighted-split-paths exclude each other"),
    ({"full_validation": True}, "--full-validation is about files, and the tokens of --mock-data have no end"),
    ({"mock_data": False, "data_path": ("1", "x", "2", "y"), "full_validation": True},
        "--full-validation reads all data of a set once, and a blend by weights does not"),
    (_groups(train=("a: 1 0:1 x",), valid=("v: 1 0:1 x, 1 0:1 y",)) | {"full_validation": True},
        "--full-validation reads all data of a set once, and a blend by weights does not"),
    ({"multiple_validation_sets": True}, "--multiple-validation-sets is about the sets of --valid-data-path"),
    ({"mock_data": False, "train_data_path": ("x",), "valid_data_path": ("1", "y"), "multiple_validation_sets": True},
        "--valid-data-path has weights (1, ...), and with --multiple-validation-sets there is no blend"),
    ({"split": "a,b"}, "split ('a,b') must be up to three numbers joined by commas"), ({"split": "1,2,3,4"}, "has 4 numbers"),
    ({"split": "0,0,0"}, "whose sum is above 0"), ({"split": "-1,2,3"}, "must be numbers of at least 0"),
    ({"split": "nan,1,1"}, "must be numbers of at least 0"),
    ({"mock_data": False, "data_path": ("x",), "split": "0,1,1"}, "leaves nothing to train on"),
    ({"vocab_size": None}, "the vocabulary is unknown"),
    ({"tokenizer_type": "SentencePieceTokenizer"}, "SentencePieceTokenizer needs --tokenizer-model FILE"),
    ({"tokenizer_type": "NullTokenizer", "vocab_size": None}, "NullTokenizer needs --vocab-size"),
    ({"auto_resume": True}, "--auto-resume needs --save DIR"),
    ({"ckpt_step": 0}, "--ckpt-step needs --load DIR or --auto-resume"),
    ({"resume_fallback": True}, "--resume-fallback needs --load DIR or --auto-resume"),
    ({"finetune": True, "auto_resume": True, "save": "x"}, "--finetune needs --load DIR"),
    ({"use_checkpoint_args": True, "num_layers": None}, "--use-checkpoint-args needs --load DIR"),
    ({"auto_resume": True, "save": "x", "no_save_optim": True}, "drop --no-save-optim"),
    ({"profile": True, "profile_step_end": 10}, "profile_step_end (10) must be above profile_step_start (10)"),
    ({"profile": True, "profile_ranks": (0, 1)}, "profile_ranks names rank 1, but the ranks are 0 to 0"),
    ({"peak_tflops": "0"}, "peak_tflops (0) must be above 0"),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr_warmup_iters": 10},
        "lr_warmup_iters (10) must be below the decay horizon (10,"),
    ({"peak_tflops": "-3"}, "peak_tflops (-3) must be above 0"),
    ({"peak_tflops": "h100"}, "peak_tflops (h100) must be a number of TFLOP/s above 0, or one of a100-bf16"),
    ({"num_threads": 100000}, "--num-threads (100000) must be at most 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), RULES, ids=[expected[:60] for _, expected in RULES])
def test_each_rule_is_the_only_message(fields: dict[str, Any], expected: str) -> None:
    text = message(**fields)
    assert expected in text
    assert "\n" not in text  # nothing else is wrong


LAYOUTS: list[tuple[int, dict[str, Any], str]] = [
    (
        2, _curriculum(
            pipeline_model_parallel_size=2, pipeline_schedule="slices", pipeline_slices=9,
            attention_dropout=0.0,
        ),
        "pipeline_slices (9) must be at most the first length of --seq-length-curriculum (8): use --pipeline-slices 8 or less",
    ),
    (
        4, {"num_attention_heads": 10, "hidden_size": 100, "tensor_model_parallel_size": 4},
        "num_attention_heads (10) must be a multiple of tensor_model_parallel_size (4): 10 = 2 * 4 + 2; use --tp-size 1 or 2,"
        " or --num-attention-heads 4 or 20",
    ),
    (
        4, {"num_attention_heads": 10, "kv_channels": 8, "tensor_model_parallel_size": 4},
        "10 = 2 * 4 + 2; use --tp-size 1 or 2, or --num-attention-heads 4, 8 or 12",
    ),
    (
        8, {"sequence_parallel_size": 8},
        "query heads (4 / 1 = 4) are dealt out to the sequence-parallel ranks (sequence_parallel_size 8), and each needs"
        " one; use --sp-size 1, 2 or 4, or --num-attention-heads 8 or 16",
    ),
    (
        3,
        {
            "num_attention_heads": 6, "hidden_size": 60, "num_query_groups": 2,
            "tensor_model_parallel_size": 3,
        },
        "num_query_groups (2) must be a multiple of tensor_model_parallel_size (3), or divide it (then key/value heads are held by several"
        " ranks): 2 = 0 * 3 + 2; use --tp-size 1, or --num-query-groups 1, 3 or 6",
    ),
    (
        4, {"ffn_hidden_size": 30, "tensor_model_parallel_size": 4},
        "the width of the MLP (30) must be a multiple of tensor_model_parallel_size (4): 30 = 7 * 4 + 2; use --tp-size 1 or 2,"
        " or --ffn-hidden-size 24, 28 or 32",
    ),
    (
        3, {"sequence_parallel_size": 2},
        "the number of processes (3) must be a multiple of tensor_model_parallel_size * sequence_parallel_size (1 * 2 = 2): 3 = 1 * 2 + 1;"
        " use 2, 4 or 6 processes, or --sp-size 1 or 3",
    ),
    (
        1, {"tensor_model_parallel_size": 2}, "(2 * 1 = 2): 1 = 0 * 2 + 1; use 2, 4 or 6 processes, or --tp-size 1",
    ),
    (
        12,
        {
            "sequence_parallel_size": 4, "tensor_model_parallel_size": 2, "num_attention_heads": 8,
            "global_batch_size": 3,
        },
        "12 = 1 * 8 + 4; use 8 or 24 processes, or --tp-size 1, or --sp-size 2",  # not 16 or --sp-size 1: batches of 3
    ),
    (
        4, {"split_qkv_linear": True, "sp_overlap_comm": True},
        "--sp-overlap-comm and --split-qkv-linear are about the exchanges of Ulysses, and with sequence_parallel_size 1 there are none;"
        " use --sp-size 2 or 4; or leave the flag out",
    ),
    (1, {"sp_overlap_mode": "chunked"}, "--sp-overlap-mode chunked is about the exchanges of Ulysses, and with sequence_par"),
    (
        2, {"sequence_parallel_size": 2, "split_qkv_linear": True, "sp_head_chunks": 2},
        "--split-qkv-linear and --sp-head-chunks are two ways to cut the exchanges: give one",
    ),
    (
        2, {"sequence_parallel_size": 2, "sp_overlap_mode": "none", "sp_overlap_comm": True},
        "--sp-overlap-mode none and --sp-overlap-comm contradict each other",
    ),
    *((
        2, {"sequence_parallel_size": 2, "sp_overlap_mode": mode, "split_qkv_linear": True},
        f"--sp-overlap-mode {mode} and --split-qkv-linear contradict each other",
    ) for mode in ("none", "chunked", "auto")),
    *((
        2, {"sequence_parallel_size": 2, "sp_overlap_mode": mode, "sp_head_chunks": 2},
        f"--sp-overlap-mode {mode} and --sp-head-chunks contradict each other",
    ) for mode in ("none", "split-qkv")),
    (
        2, {"sequence_parallel_size": 2, "sp_head_chunks": 3},
        "sp_head_chunks (3) must be at most the query heads of a rank (4 / (1 * 2), rounded up, = 2): use --sp-head-chunks 2 or less",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("processes", "fields", "expected"), LAYOUTS, ids=[expected[:60] for *_, expected in LAYOUTS])
def test_each_rule_of_layouts_is_the_only_message(processes: int, fields: dict[str, Any], expected: str) -> None:
    text = message(processes, **fields)
    assert expected in text and "\n" not in text


@pytest.mark.parametrize(("processes", "fields"), [
    (3, {"num_attention_heads": 7, "hidden_size": 70, "sequence_parallel_size": 3}),  # uneven heads
    (4, {"num_query_groups": 1, "sequence_parallel_size": 4}),  # more ranks than key/value heads
    (4, {"num_query_groups": 2, "tensor_model_parallel_size": 4}),
    (8, {"seq_length": 1, "sequence_parallel_size": 4, "tensor_model_parallel_size": 1}),  # any length
    (4, {"sequence_parallel_size": 2, "sp_overlap_mode": "auto", "sp_head_chunks": 2}),
    (2, {"sequence_parallel_size": 2, "sp_overlap_mode": "chunked", "sp_overlap_comm": True}),
    (1, {"sp_overlap_mode": "none"}),
])  # fmt: skip
def test_sound_layouts(processes: int, fields: dict[str, Any]) -> None:
    validate(config(**fields), processes)


_FLAGS = {
    "--tp-size": "tensor_model_parallel_size", "--sp-size": "sequence_parallel_size",
    "--num-attention-heads": "num_attention_heads", "--num-query-groups": "num_query_groups",
    "--ffn-hidden-size": "ffn_hidden_size",
}  # fmt: skip
_VALUES = r"(\d+(?:, \d+)*(?: or \d+)?)"


def suggestions(text: str) -> list[tuple[str, int]]:
    """(flag or "processes", value) for everything a message recommends."""
    found = re.findall(rf"(--[a-z-]+) {_VALUES}", text) + [("processes", v) for v in re.findall(rf"(?:use|or) {_VALUES} processes", text)]
    return [(name, int(value)) for name, values in found for value in re.findall(r"\d+", values)]


def kinds(texts: list[str]) -> set[str]:
    """The rules behind messages, whatever the numbers."""
    return {re.sub(r"\d+(\.\d+)?", "N", text).split(":")[0].split("; use")[0] for text in texts}


def test_what_a_message_recommends_works() -> None:
    """Some layouts of a grid: with a recommended value the message is gone and no other has come."""
    tried: dict[str, int] = {}
    sizes = itertools.product((1, 2, 3, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4), (4, 7, 10, 12), (None, 1, 2, 4, 5), (None, 30, 36), (None, 8))
    for processes, tp, sp, heads, groups, ffn, width in random.Random(0).sample(list(sizes), 60):
        fields: dict[str, Any] = {
            "tensor_model_parallel_size": tp, "sequence_parallel_size": sp, "num_attention_heads": heads,
            "hidden_size": 840, "num_query_groups": groups, "ffn_hidden_size": ffn, "kv_channels": width,
            "position_embedding_type": "rope", "global_batch_size": 12,
        }  # fmt: skip
        texts = violations(config(**fields), processes)
        for text in texts:
            for name, value in suggestions(text):
                changed = fields if name == "processes" else {**fields, _FLAGS[name]: value}
                left = violations(config(**changed), value if name == "processes" else processes)
                assert kinds(left) <= kinds(texts) - kinds([text]), (processes, fields, text, name, value, left)
                tried[name] = tried.get(name, 0) + 1
    assert tried.keys() == {"processes", *_FLAGS} and min(tried.values()) > 3, tried


def test_every_lowest_value_is_allowed_and_the_next_lower_is_not() -> None:
    for cls in GROUPS.values():
        for name in field_kinds(cls):
            low = cls.__dataclass_fields__[name].metadata["low"]
            if low is not None:
                refused = f"--{name.replace('_', '-')} ({{}}) must be at least {low:g}"
                assert refused.format(low - 1) in message(**{name: low - 1})
                try:
                    validate(config(**{name: low}))
                except ConfigError as error:  # another rule may object, this one may not
                    assert refused.format(low) not in str(error)


def test_every_number_has_a_largest_value_and_the_next_higher_is_refused() -> None:
    """Far above what anybody trains; nothing after the rules has to be afraid of overflow, or of taking for ever."""
    for cls in GROUPS.values():
        for name, kind in field_kinds(cls).items():
            if kind.base in ("int", "float") and not kind.many:
                high = cls.__dataclass_fields__[name].metadata["high"]
                high = high if high is not None else MAX_COUNT if kind.base == "int" else MAX_NUMBER
                beyond = high + 1 if kind.base == "int" else 2.0 * high
                if beyond < math.inf:
                    text = message(**{name: beyond, "fp16": True, "save": "x"})  # else they are dropped
                    assert f"--{name.replace('_', '-')} (" in text and " must be at most " in text


@pytest.mark.parametrize(("path", "expected"), [
    ("/tmp/" + "a" * 300, "has a name of 300 bytes, and the longest have 200"), ("\u4e2d" * 100, "has a name of 300 bytes"),
    ("/x" * 3000, "has 6000 bytes, and paths have at most 3000"),
    ("a\0b", "a text with a zero byte in it cannot be a name"),
])  # fmt: skip
def test_paths_that_no_system_takes(path: str, expected: str) -> None:
    for name in ("save", "vocab_file", "tensorboard_dir"):
        text = message(**{name: path})
        assert expected in text and len(text) < 200
    assert expected in message(train_data_path=("x", path), mock_data=False)


def test_sizes_that_fit_one_process_may_not_fit_four() -> None:
    fields = {"global_batch_size": 6, "micro_batch_size": 2}
    validate(config(**fields), 3)
    assert "(2 * 4 = 8): 6 = 0 * 8 + 6; use 8" in message(world_size=4, **fields)


def test_no_processes() -> None:
    assert "the number of processes (0) must be at least 1" in message(world_size=0)


def test_several_mistakes_are_numbered_in_one_message() -> None:
    text = message(hidden_size=66, lr=None, bf16=True, fp16=True)
    assert text.startswith("3 things are wrong:\n  1. hidden_size")
    assert "\n  2. --lr is required" in text and "\n  3. --bf16 and --fp16" in text


def test_a_huge_number_of_heads_is_answered_at_once() -> None:
    text = message(num_attention_heads=2**16, hidden_size=2**16, num_query_groups=7)
    assert "must be a multiple of num_query_groups (7)" in text and len(text) < 500


@pytest.mark.parametrize("fields", [
    {"hidden_size": 66, "kv_channels": 16}, {"position_embedding_type": "rope", "rotary_percent": 0.5},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"global_batch_size": 16, "micro_batch_size": 2, "rampup_batch_size": (4, 4, 100)},
    {"train_iters": None, "train_samples": 100, "lr_warmup_samples": 50, "lr_decay_samples": 80},
    {"skip_train": True, "train_iters": None, "lr": None, "load": "x"},
    {"load": "x", "use_checkpoint_args": True, "num_layers": None, "hidden_size": None},
    {"save": "x", "auto_resume": True, "load": "y", "finetune": True}, {"split": "100"}, {"split": "969, 30, 1"}, {"split": "98/2/0"},
    {"mock_data": False, "train_data_path": ("x",), "valid_data_path": ("y",)}, {"vocab_size": None, "tokenizer_type": "ByteTokenizer"},
    {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr_warmup_iters": 5},
    {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.0}, {"peak_tflops": "h100-bf16"},
    {"peak_tflops": "0.5"}, {"lr": 0.0}, {"max_position_embeddings": 32},
    {"position_embedding_type": "rope", "rotary_percent": 0.125}, {"use_flash_attn": True, "bf16": True, "kv_channels": 256},
    {"global_batch_size": 4, "rampup_batch_size": (1, 1, 1)}, {"seed": 2**32 - 1},
    {"fp16": True, "initial_loss_scale": 2.0, "min_loss_scale": 2.0},
])  # fmt: skip
def test_unusual_but_sound(fields: dict[str, Any]) -> None:
    validate(config(**fields))


def test_shorthands() -> None:
    assert config(num_query_groups=2).model.group_query_attention
    assert config(use_flash_attn=True).kernels.attention_backend == "flash"
    assert config(recompute_activations=True).kernels.recompute_granularity == "selective"
    full = config(recompute_granularity="full").kernels
    assert (full.recompute_method, full.recompute_num_layers) == ("uniform", 1)
    assert config().data.tokenizer_type == "NullTokenizer"
    assert config(tokenizer_model="m").data.tokenizer_type == "SentencePieceTokenizer"
    assert config(vocab_file="v").data.tokenizer_type == "BertWordPieceLowerCase"
    assert config(vocab_size=None).data.tokenizer_type is None


def test_normalizing_twice_is_normalizing_once() -> None:
    once = config(recompute_granularity="full", num_query_groups=2, use_flash_attn=True)
    again, _ = Config.from_dict(once.to_dict())
    assert normalize(again) == once


def test_derived_sizes() -> None:
    assert config(geglu=True, hidden_size=768, num_attention_heads=12).model.ffn_size == 2048
    model = config(swiglu=True, hidden_size=768, num_attention_heads=12).model
    assert model.ffn_size == 2048 and model.head_dim == 64 and model.num_groups == 12 and model.max_positions == 32
    assert config().model.ffn_size == 256
    from_files = config(split="1/2", mock_data=False, data_path=("x",))
    assert split_bounds(from_files.data.split, 30) == [(0, 10), (10, 30), (30, 30)]
    with pytest.raises(ConfigError, match="shape is incomplete"):
        _ = Config().model.head_dim


def test_a_stored_configuration_comes_back_through_json() -> None:
    before = config(rampup_batch_size=(2, 2, 9), data_path=("a", "b"), profile_ranks=(0, 3))
    after, warnings = Config.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after == before and warnings == []
    assert isinstance(after.data.data_path, tuple) and isinstance(after.optimizer.lr, float)


def test_a_stored_configuration_of_another_version() -> None:
    stored: dict[str, Any] = {"model": {"num_layers": 3, "new_thing": 1}, "space": {}, "precision": 4}
    after, warnings = Config.from_dict(stored)
    assert after.model.num_layers == 3 and after.optimizer == Config().optimizer
    assert [w.split("'")[1] for w in warnings] == ["model.new_thing", "space", "precision"]


@pytest.mark.parametrize(("stored", "expected"), [
    ([], "an object of groups, got list"),
    ({"model": {"num_layers": "3"}}, "'model.num_layers' of the stored configuration: expected an integer, got str '3'"),
    ({"model": {"num_layers": True}}, "expected an integer, got bool True"),
    ({"model": {"num_layers": 3.0}}, "expected an integer, got float"),
    ({"model": {"swiglu": 1}}, "expected true or false, got int 1"),
    ({"model": {"init_method_std": None}}, "expected a number, got NoneType"),
    ({"model": {"init_method_std": math.nan}}, "expected a number, got float nan"),
    ({"model": {"normalization": "x" * 500}}, "expected one of LayerNorm, RMSNorm"),
    ({"data": {"data_path": "abc"}}, "expected one or more texts, got str"),
    ({"data": {"data_path": ["a", 1]}}, "got int 1"),
])  # fmt: skip
def test_a_stored_configuration_of_the_wrong_type(stored: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(stored)
    assert expected in str(caught.value) and len(str(caught.value)) < 250


def test_diff_names_what_changed() -> None:
    assert diff(config(), config()) == {}
    assert diff(config(), config(num_layers=3, lr=0.5)) == {"model.num_layers": (2, 3), "optimizer.lr": (1e-3, 0.5)}


def test_ignored_flags_do_not_make_a_difference() -> None:
    other = config()
    other.ignored_flags = ("--x",)
    assert other == config() and "ignored_flags" not in other.to_dict()


def test_settings_of_nccl_are_dropped_where_there_is_none() -> None:
    """They change no result; each is named with the reason. Numbers that NCCL would refuse stay for the rules."""
    from megatron_sp.config.rules import drop_unused

    given = {"nccl_sp_ctas": 8, "nccl_dp_ctas": 4, "nccl_cta_policy": "zero"}
    c = config(device="cpu", **given)
    said = [*c.ignored_flags, *drop_unused(c)]
    assert (c.parallel.nccl_sp_ctas, c.parallel.nccl_dp_ctas, c.parallel.nccl_cta_policy) == (None, None, "default")
    assert [line.partition(" ")[0] for line in said if "gloo" in line] == ["--nccl-sp-ctas", "--nccl-dp-ctas", "--nccl-cta-policy"]
    c = config(**given)
    said = [*c.ignored_flags, *drop_unused(c)]
    assert (c.parallel.nccl_sp_ctas, c.parallel.nccl_dp_ctas, c.parallel.nccl_cta_policy) == (None, 4, "zero")
    assert "--nccl-sp-ctas (without --sequence-parallel-size or --context-parallel-size above 1 it has no effect)" in said
    assert config(**given, context_parallel_size=2).parallel.nccl_sp_ctas == 8


def test_sizes_that_are_over_may_be_those_of_fewer_ranks() -> None:
    fields = _steps("0:2 1K:6 2K:8", micro=2) | {"load": "x"}
    resumed = config(**fields)
    validate(resumed, 4)
    assert resumed.batch.global_batch_size == 8
    assert step_violation(resumed.batch, 32, 4, 1000 // 32) == (
        "step_batch_size_schedule: 6 must be a multiple of micro_batch_size * data-parallel size (2 * 4 = 8), as every batch size is:"
        " 6 = 0 * 8 + 6"
    )
    assert step_violation(resumed.batch, 32, 4, 2000 // 32) is None
    assert step_violation(resumed.batch, 32, 1, 0) is None
