"""When a flag has an effect: conditions that the fields of ``schema_*.py`` name with ``only=``.

A field whose condition does not hold is not read by the run; ``config/concessions.py`` names it in one line if it was
set. What --help and docs/reference/flags.md say in front of its meaning ("with --num-experts: ...") comes from here,
too. Where a flag without its condition is an error instead, the rule is in ``config/rules*.py`` and there is nothing
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_sp.utils.flag_field import Condition

if TYPE_CHECKING:
    from megatron_sp.config.schema import Config

_GELUS = ("gelu", "geglu")


def _uses_gelu(config: Config) -> bool:
    model = config.model
    return model.activation.startswith(_GELUS) or (model.is_bert and model.head_activation.startswith(_GELUS))


def tokenizers(*kinds: str) -> Condition:
    """Return the condition of a file that some kinds of tokenizer read."""
    return Condition(
        f"--tokenizer-type {' or '.join(kinds)}", lambda config: config.data.tokenizer_type in (None, *kinds)
    )


EXPERTS = Condition("--num-experts", lambda config: config.model.has_experts, of_model=True)
EXPERT_BIAS = Condition(
    "--moe-router-enable-expert-bias", lambda config: config.model.moe_router_enable_expert_bias, of_model=True
)
BALANCE = Condition(
    "--moe-aux-loss-coeff",
    lambda config: config.model.moe_aux_loss_coeff != 0 or config.model.moe_router_load_balancing_type == "none",
    of_model=True,
)
QK_NORM = Condition("--qk-layernorm", lambda config: config.model.qk_layernorm, of_model=True)
ROTARY = Condition(
    "--position-embedding-type rope", lambda config: config.model.position_embedding_type == "rope", of_model=True
)
ROPE_SCALING = Condition("--use-rope-scaling", lambda config: config.model.use_rope_scaling, of_model=True)
NO_BIASES = Condition("--disable-bias-linear", lambda config: config.model.disable_bias_linear, of_model=True)
GELU = Condition("a GELU", _uses_gelu, of_model=True)

TENSOR_PARALLEL = Condition(
    "--tensor-model-parallel-size above 1",
    lambda config: config.parallel.tensor_model_parallel_size > 1,
    "it cuts activations over the tensor-parallel ranks and --tensor-model-parallel-size is 1: off; Ulysses is --sequence-parallel-size N",
)
EXPERT_PARALLEL = Condition(
    "--expert-model-parallel-size above 1", lambda config: config.parallel.expert_model_parallel_size > 1
)
EXCHANGES = Condition(
    "--sequence-parallel-size or --context-parallel-size above 1",
    lambda config: config.parallel.sequence_parallel_size > 1 or config.parallel.context_parallel_size > 1,
)
NCCL = Condition(
    "GPUs",
    lambda config: config.parallel.distributed_backend != "gloo" and config.kernels.device != "cpu",
    "the ranks talk over gloo, not NCCL",
)
GRAPHS = Condition(
    "a GPU, unless --cuda-graphs off",
    lambda config: config.kernels.cuda_graphs != "off" and config.kernels.device != "cpu",
    "steps are captured on GPUs, and not with --cuda-graphs off",
)
PACKED = Condition(
    "--reset-attention-mask or --bert-pack-sequences",
    lambda config: config.data.reset_attention_mask or config.data.bert_pack_sequences,
)
SHARDED = Condition("--zero-stage 1 or more", lambda config: config.parallel.zero_stage > 0)
RECOMPUTES = Condition("--recompute-granularity", lambda config: config.kernels.recompute_granularity is not None)
RECOMPUTES_BLOCKS = Condition(
    "--recompute-granularity full", lambda config: config.kernels.recompute_granularity == "full"
)
VERIFIES = Condition("--verify-parallelism", lambda config: config.parallel.verify_parallelism)

VALIDATES = Condition("--eval-iters above 0", lambda config: config.batch.eval_iters > 0)
ADAM = Condition("--optimizer adam", lambda config: config.optimizer.optimizer == "adam")
SGD = Condition("--optimizer sgd", lambda config: config.optimizer.optimizer == "sgd")
# these five are in the schedule that a checkpoint of any version is compared with: their values stay
WSD = Condition("--lr-decay-style WSD", lambda config: config.optimizer.lr_decay_style == "WSD", keeps=True)
DECAY = Condition(
    "a --lr-decay-style that decays", lambda config: config.optimizer.lr_decay_style != "constant", keeps=True
)
HORIZON = Condition(
    "a --lr-decay-style that decays or --lr-warmup-fraction",
    lambda config: config.optimizer.lr_decay_style != "constant" or config.optimizer.lr_warmup_fraction is not None,
    keeps=True,
)
ONE_DECAY = Condition(
    "no --start-weight-decay and --end-weight-decay",
    lambda config: config.optimizer.start_weight_decay is None or config.optimizer.end_weight_decay is None,
    "--start-weight-decay and --end-weight-decay say what it is",
    keeps=True,
)
WARMUP = Condition(
    "a warm-up",
    lambda config: bool(
        config.optimizer.lr_warmup_fraction or config.optimizer.lr_warmup_iters or config.optimizer.lr_warmup_samples
        or config.optimizer.lr_warmup_tokens
    ),
    keeps=True,
)  # fmt: skip
FP16 = Condition("--fp16", lambda config: config.precision.fp16)
DYNAMIC_SCALE = Condition("a dynamic loss scale", lambda config: config.precision.loss_scale is None)

SPLITS = Condition("--data-path", lambda config: bool(config.data.data_path))
FILES = Condition("files of tokens", lambda config: not config.data.mock_data)
SAVES = Condition("--save", lambda config: config.checkpoint.save is not None)
LOADS = Condition(
    "--load or --auto-resume", lambda config: config.checkpoint.load is not None or config.checkpoint.auto_resume
)
WITH_STATE = Condition("no --finetune", lambda config: not config.checkpoint.finetune, "--finetune loads weights alone")
PROFILES = Condition("--profile", lambda config: config.logging.profile)
TENSORBOARD = Condition("--tensorboard-dir", lambda config: config.logging.tensorboard_dir is not None)
WANDB = Condition("--wandb-project", lambda config: config.logging.wandb_project is not None)
