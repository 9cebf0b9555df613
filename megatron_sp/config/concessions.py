"""Leniency like Megatron's: flags that have no effect in this run are dropped, with one line for each.

Launch scripts are written once and used for many runs, so they contain flags without effect in this one:
``--sequence-parallel`` with one tensor-parallel rank, ``--save-interval`` without ``--save``. Only flags that do not
change the result are dropped; a flag whose request cannot be met, such as ``--finetune`` without ``--load``, is still
an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_sp.config.schema import Config
from megatron_sp.config.schema_data import SENTENCEPIECE

MOST_CTAS = 64
"""NCCL's own limit."""
NCCL_ON_CPU = "--distributed-backend nccl (there is no GPU in this run: the ranks talk over gloo)"
"""The line about a backend that the machine cannot have; ``training/setup.py`` says it where it is found out at the start."""


def drop_nccl(config: Config, why: str) -> list[str]:
    """Reset the flags about NCCL's communicators, which have no effect without it; return a line for each that was given."""
    parallel, given = config.parallel, list[str]()
    for name, off in (("nccl_sp_ctas", None), ("nccl_dp_ctas", None), ("nccl_cta_policy", "default")):
        value = getattr(parallel, name)
        if value != off and not (isinstance(value, int) and not 1 <= value <= MOST_CTAS):  # wrong numbers are kept, for the rules to reject
            given.append(f"--{name.replace('_', '-')} ({why})")
            setattr(parallel, name, off)
    return given


def settle_source(config: Config) -> Iterator[str]:
    """Drop --use-checkpoint-args where there is no checkpoint and the other flags say what the model is; idempotent."""
    checkpoint = config.checkpoint
    if checkpoint.use_checkpoint_args and checkpoint.load is None and not checkpoint.auto_resume and has_shape(config):
        checkpoint.use_checkpoint_args = False
        yield "--use-checkpoint-args (without --load there is no checkpoint; the model is what the other flags say)"


def drop_flash(config: Config) -> list[str]:
    """Take back what --use-flash-attn has asked for where there is no GPU; a kernel that --attention-backend names stays for the rules.

    Half of all scripts have the flag, for speed on the machine that they were written for.
    """
    kernels = config.kernels
    if not kernels.use_flash_attn:
        return []
    kernels.use_flash_attn = False
    if ("kernels", "attention_backend") in config.given:
        return []
    kernels.attention_backend = "auto"
    return ["--use-flash-attn (there is no GPU in this run: attention is torch's)"]


def concede(config: Config) -> list[str]:
    """Reset the flags in ``config`` that have no effect; idempotent.

    Returns:
        One line for each flag that was dropped: the flag, with the reason in brackets.
    """
    _zeros_that_mean_off(config)
    return [*_attention(config), *_layout(config), *_checkpoints(config), *_tokenizer(config), *_rest(config)]


def _zeros_that_mean_off(config: Config) -> None:
    """Normalize Megatron's values for "never": 0 for an interval, -1 for validation batches."""
    batch, checkpoint = config.batch, config.checkpoint
    batch.exit_interval, batch.eval_interval = batch.exit_interval or None, batch.eval_interval or None
    checkpoint.save_interval = checkpoint.save_interval or None
    if batch.eval_iters == -1:
        batch.eval_iters = 0


def _attention(config: Config) -> Iterator[str]:
    """Let --use-flash-attn mean --attention-backend flash, unless that names another kernel."""
    kernels = config.kernels
    if kernels.use_flash_attn and (kernels.attention_backend != "auto" or ("kernels", "attention_backend") in config.given):
        if kernels.attention_backend != "flash":
            kernels.use_flash_attn = False
            yield f"--use-flash-attn (--attention-backend {kernels.attention_backend} says it more exactly)"
    elif kernels.use_flash_attn:
        kernels.attention_backend = "flash"
    if kernels.device == "cpu":
        yield from drop_flash(config)


def _layout(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        parallel.sequence_parallel = False
        yield (
            "--sequence-parallel (it cuts activations over the tensor-parallel ranks and --tensor-model-parallel-size is 1: off; Ulysses is"
            " --sequence-parallel-size N)"
        )
    if parallel.distributed_backend == "nccl" and config.kernels.device == "cpu":
        parallel.distributed_backend = "gloo"
        yield NCCL_ON_CPU
    if parallel.distributed_backend == "gloo" or config.kernels.device == "cpu":
        yield from drop_nccl(config, "the ranks talk over gloo, not NCCL")
    if parallel.sequence_parallel_size == parallel.context_parallel_size == 1 and 1 <= (parallel.nccl_sp_ctas or 0) <= MOST_CTAS:
        parallel.nccl_sp_ctas = None
        yield "--nccl-sp-ctas (--sequence-parallel-size and --context-parallel-size are 1: there are no exchanges)"
    if parallel.balance_rows and not (config.data.reset_attention_mask or config.data.bert_pack_sequences):
        parallel.balance_rows = False
        yield "--balance-rows (it is for packed documents: there is neither --reset-attention-mask nor, for BERT, --bert-pack-sequences)"


def _checkpoints(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        for name, off in (("save_interval", None), ("keep_every", None), ("no_save_optim", False)):
            value = getattr(checkpoint, name)
            if value and (isinstance(value, str) or value > 0):  # negative numbers are kept, for the rules to reject
                setattr(checkpoint, name, off)
                yield f"--{name.replace('_', '-')} (without --save no checkpoint is written)"
    if checkpoint.load is None and not checkpoint.auto_resume:
        if checkpoint.no_load_optim:
            checkpoint.no_load_optim = False
            yield "--no-load-optim (without --load nothing is loaded)"
        if checkpoint.exit_on_missing_checkpoint:
            checkpoint.exit_on_missing_checkpoint = False
            yield "--exit-on-missing-checkpoint (without --load none is looked for)"


def has_shape(config: Config) -> bool:
    """Return whether the flags define the model's shape without a checkpoint."""
    model = config.model
    return None not in (model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length)


def _tokenizer(config: Config) -> Iterator[str]:
    """Drop tokenizer files that the chosen type of tokenizer does not read."""
    data = config.data
    readers = {
        "tokenizer_model": (*SENTENCEPIECE, "HuggingFaceTokenizer"), "merge_file": ("GPT2BPETokenizer",),
        "vocab_file": ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"),
    }  # fmt: skip
    for name, kinds in readers.items():
        if getattr(data, name) is not None and data.tokenizer_type is not None and data.tokenizer_type not in kinds:
            setattr(data, name, None)
            yield f"--{name.replace('_', '-')} (--tokenizer-type {data.tokenizer_type} does not read it)"


def _rest(config: Config) -> Iterator[str]:
    precision, logging = config.precision, config.logging
    if precision.loss_scale is not None and not precision.fp16:
        precision.loss_scale = None
        yield f"--loss-scale (it is for --fp16; {precision.params_dtype} needs no scaling)"
    if logging.wandb_exp_name and not logging.wandb_project:
        logging.wandb_exp_name = None
        yield "--wandb-exp-name (without --wandb-project nothing goes to W&B)"
