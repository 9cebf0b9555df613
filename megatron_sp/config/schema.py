"""Configuration of a run: plain dataclasses, one per group of flags.

Each field is one command-line flag with Megatron's name (``num_layers`` is ``--num-layers``); help text, unit and aliases
are in the field's metadata, so ``--help``, YAML files, ``docs/reference/flags.md`` and the configuration stored in checkpoints
are all derived from here. This module imports neither torch nor numpy: a mistyped flag is reported before either
is loaded. The rules between fields are in ``config/rules.py``; they are checked on every rank before the first collective.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_sp.config.field_kinds import field_kinds
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.flag_field import flag

ActivationName = Literal["gelu_tanh", "gelu", "relu", "squared_relu", "swiglu", "geglu_tanh", "geglu"]
"""What stands between the linear layers of an MLP; ``ops/activation.py`` computes it."""


@dataclass
class ModelConfig:
    """Shape of the model."""

    model_family: Literal["gpt", "bert"] = flag("gpt", "what is trained; pretrain_gpt.py and pretrain_bert.py say so themselves")
    num_layers: int | None = flag(None, "transformer blocks (required)", low=1, high=4096)
    hidden_size: int | None = flag(None, "width of the residual stream (required)", low=1, high=2**20)
    num_attention_heads: int | None = flag(None, "query heads (required)", low=1, high=2**16)
    seq_length: int | None = flag(None, "training sequence length (required)", unit="tokens", low=1, high=2**25)
    max_position_embeddings: int | None = flag(
        None,
        "longest sequence the model can ever see; sizes the learned position table (default: seq-length)",
        unit="tokens",
        low=1,
        high=2**27,
    )
    ffn_hidden_size: int | None = flag(
        None,
        "width of the MLP, of one half with --swiglu or --geglu (default: 4*hidden-size; with these 8/3*hidden-size rounded down to 64s)",
        low=1,
        high=2**24,
    )
    kv_channels: int | None = flag(None, "width of one head (default: hidden-size / num-attention-heads)", low=1, high=2**16)
    group_query_attention: bool = flag(False, "use --num-query-groups (implied when that is given)")
    num_query_groups: int | None = flag(
        None,
        "key/value heads, each shared by heads/groups query heads (default: num-attention-heads)",
        aliases=("num-key-value-heads",),
        low=1,
        high=2**16,
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = flag("learned_absolute", "learned table, rotary, or none")
    rotary_base: float = flag(10000.0, "theta of the rotary frequencies", aliases=("rotary-position-embeddings-theta", "rope-theta"))
    rotary_percent: float = flag(1.0, "share of each head that is rotated, in (0, 1]")
    rotary_seq_len_interpolation_factor: float = flag(
        1.0, "divide all positions by this before they turn anything, for sequences so many times longer than those of pretraining"
    )
    use_rope_scaling: bool = flag(
        False, "stretch the slow rotary frequencies for longer sequences, as Llama 3.1 and later do; see the --rope-scaling flags"
    )
    rope_scaling_factor: float = flag(8.0, "--use-rope-scaling: frequencies that are too slow for the original length are divided by this")
    rope_scaling_low_freq_factor: float = flag(
        1.0, "--use-rope-scaling: too slow are those that turn less often than this over the original length"
    )
    rope_scaling_high_freq_factor: float = flag(
        4.0, "--use-rope-scaling: those that turn more often than this over it stay as they are; in between it goes over evenly"
    )
    rope_scaling_original_length: int = flag(
        8192,
        "--use-rope-scaling: sequence length of pretraining",
        unit="tokens",
        aliases=("rope-scaling-original-max-position-embeddings",),
        low=1,
        high=2**27,
    )
    window_size: int | None = flag(
        None,
        "a token attends to itself and the N - 1 tokens before it (Mistral's sliding window); Megatron's N-1,0 is understood (default: to"
        " all before it)",
        unit="tokens",
        low=1,
        high=2**27,
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "kind of norm")
    norm_epsilon: float = flag(1e-5, "added to the variance in every norm", aliases=("layernorm-epsilon",))
    apply_layernorm_1p: bool = flag(False, "store norm weights as (weight - 1), so weight decay pulls them to 1")
    norm_placement: Literal["pre", "post"] = flag(
        "pre",
        "pre: norms in front of attention and MLP, and one behind the last block (Megatron); post: behind them, on the residual stream, and"
        " one behind the embedding (the original BERT, Hugging Face's BertModel); BERT only",
    )
    qk_layernorm: bool = flag(False, "norm on every query and key head")
    use_parallel_residual: bool = flag(
        False,
        "attention and MLP work on the same input, x + attention(norm(x)) + mlp(norm(x)), each with a norm of its own (GPT-NeoX, Pythia)",
    )
    swiglu: bool = flag(False, "gated SiLU MLP")
    geglu: bool = flag(False, "gated GELU MLP (--gelu-approximate says which)")
    relu: bool = flag(False, "ReLU MLP")
    squared_relu: bool = flag(False, "squared ReLU MLP")
    gelu_approximate: Literal["tanh", "none"] = flag("tanh", "GELU as tanh approximation (GPT-2, Megatron's fused kernel) or exact erf")
    bert_head_activation: Literal["gelu_tanh", "gelu", "relu"] | None = flag(
        None, "BERT: activation of the head for masked tokens; gelu is the exact one (default: GELU as --gelu-approximate says)"
    )
    disable_bias_linear: bool = flag(False, "no biases in the linear layers")
    add_qkv_bias: bool = flag(False, "keep the bias of the QKV projection even with --disable-bias-linear")
    add_proj_bias: bool = flag(False, "keep the bias of attention's output projection even with --disable-bias-linear")
    add_mlp_bias: bool = flag(False, "keep the biases of the MLP even with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer its own weight")
    attention_dropout: float = flag(0.1, "dropout on attention probabilities, in [0, 1)", low=0)
    hidden_dropout: float = flag(0.1, "dropout on embeddings and block outputs, in [0, 1)", low=0)
    init_method_std: float = flag(
        0.02, "standard deviation of the initial weights; output projections use it divided by sqrt(2*num-layers)", low=0
    )
    make_vocab_size_divisible_by: int = flag(
        128, "rows of the embedding in memory are padded to a multiple of this times tp (never in a checkpoint)", low=1, high=2**20
    )
    vocab_size: int | None = flag(None, "entries of the vocabulary (default: the tokenizer's)", unit="tokens", low=1, high=2**31 - 1)
    num_tokentypes: int | None = flag(
        None, "BERT: kinds of segments, each with an embedding of its own (default: 2, with --bert-no-binary-head none)", low=0, high=2**16
    )
    bert_no_binary_head: bool = flag(
        False, "BERT: one segment in each sample, no sentence-order task, no pooler: masked tokens alone are trained"
    )

    @property
    def is_bert(self) -> bool:
        return self.model_family == "bert"

    @property
    def has_order_head(self) -> bool:
        """True if the model has BERT's sentence-order head, which predicts whether the two segments are in the order of the text."""
        return self.is_bert and not self.bert_no_binary_head

    @property
    def token_types(self) -> int:
        """Number of rows of the token-type (segment) embedding table; 0: there is none."""
        if not self.is_bert:
            return 0
        return (2 if self.has_order_head else 0) if self.num_tokentypes is None else self.num_tokentypes

    @property
    def num_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or _required(self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return self.kv_channels or _required(self.hidden_size) // _required(self.num_attention_heads)

    @property
    def ffn_size(self) -> int:
        """Width of the MLP (of one half if it is gated)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        hidden = _required(self.hidden_size)
        return int(8 * hidden / 3 / 64) * 64 if self.is_gated else 4 * hidden

    @property
    def rope_scaling(self) -> tuple[float, ...]:
        """(factor, low, high, original length) of --use-rope-scaling; empty without it."""
        if not self.use_rope_scaling:
            return ()
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        return self.rope_scaling_factor, low, high, self.rope_scaling_original_length

    @property
    def is_gated(self) -> bool:
        """True if the MLP is gated: its first linear layer has double width, and one half of its output gates the other."""
        return self.swiglu or self.geglu

    @property
    def activation(self) -> ActivationName:
        """Activation of the MLP."""
        tanh = self.gelu_approximate == "tanh"
        if self.swiglu:
            return "swiglu"
        if self.geglu:
            return "geglu_tanh" if tanh else "geglu"
        if self.relu or self.squared_relu:
            return "relu" if self.relu else "squared_relu"
        return "gelu_tanh" if tanh else "gelu"

    @property
    def head_activation(self) -> ActivationName:
        """Activation of BERT's masked-token head."""
        return self.bert_head_activation or ("gelu_tanh" if self.gelu_approximate == "tanh" else "gelu")

    @property
    def qkv_bias(self) -> bool:
        """True if the QKV projection has a bias."""
        return not self.disable_bias_linear or self.add_qkv_bias

    @property
    def proj_bias(self) -> bool:
        """True if attention's output projection has a bias."""
        return not self.disable_bias_linear or self.add_proj_bias

    @property
    def mlp_bias(self) -> bool:
        """True if both linear layers of the MLP have a bias."""
        return not self.disable_bias_linear or self.add_mlp_bias

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings or _required(self.seq_length)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of each head."""
        return int(self.head_dim * self.rotary_percent)


@dataclass
class ParallelConfig:
    """Layout of the ranks: processes = tp * sp * dp."""

    tensor_model_parallel_size: int = flag(
        1,
        "tp: ranks that split the weights of every layer, each with its share of the heads; for models too large for one device; keep them"
        " within one host, they talk most",
        unit="ranks",
        aliases=("tp-size",),
        low=1,
        high=2**16,
    )
    sequence_parallel: bool = flag(
        False,
        "with tp > 1: between the split layers cut the activations along the sequence, over the same ranks; less memory, the same result"
        " (Megatron's name; --sequence-parallel-size is something else)",
    )
    sequence_parallel_size: int = flag(
        1,
        "sp: ranks that hold a piece of every sequence each, and trade it for a share of the heads around attention (Ulysses); for long"
        " sequences; at most num-attention-heads / tp",
        unit="ranks",
        aliases=("ds-sequence-parallel-size", "sp-size"),
        low=1,
        high=2**16,
    )
    sp_overlap_mode: Literal["none", "split-qkv", "chunked", "auto"] | None = flag(
        None,
        "how the exchanges of sp > 1 run under computation; none: they do not; split-qkv: q, k and v one after another; chunked: the heads"
        " in parts (see --sp-head-chunks); auto: time all of them at the start, take the fastest (default: none)",
    )
    sp_overlap_comm: bool = flag(
        False, "with sp > 1: run exchanges under computation, as --sp-overlap-mode auto; with --split-qkv-linear as split-qkv"
    )
    split_qkv_linear: bool = flag(
        False, "with sp > 1: project q, k and v one after another, each with its own exchange; add --sp-overlap-comm to run them under it"
    )
    sp_head_chunks: int | None = flag(
        None,
        "--sp-overlap-mode chunked with each rank's query heads in N parts: more of them hide more, but each works less well (default: 2)",
        unit="chunks",
        low=1,
        high=2**16,
    )
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (only 1 is supported)", unit="ranks", low=1, high=2**16)
    context_parallel_size: int = flag(
        1, "ring attention degree (only 1 is supported; see --sequence-parallel-size)", unit="ranks", low=1, high=2**16
    )
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag("auto", "collective backend: nccl on GPUs, gloo on CPU")
    distributed_timeout_minutes: float = flag(
        10.0, "a collective that takes longer ends the job with exit code 7", unit="minutes", high=525_600
    )
    verify_parallelism: bool = flag(
        False, "compare one step of this layout with one process: loss, gradient norm, every gradient; exit 0, or 5 if they differ"
    )
    verify_dtype: Literal["fp64", "fp32"] | None = flag(None, "number format of --verify-parallelism (default: fp64, on GPUs fp32)")
    overlap_grad_reduce: bool = flag(
        True, "reduce each block's gradients under the rest of the backward pass; --no-overlap-grad-reduce: after all of it"
    )
    zero_stage: int = flag(
        0,
        "what the ranks of dp x sp share instead of each having all of it; 1: optimizer state and master weights; 2: gradients too; 3:"
        " parameters too (ZeRO)",
        low=0,
    )
    use_distributed_optimizer: bool = flag(False, "same as --zero-stage 1")
    overlap_param_gather: bool = flag(
        True,
        "with --zero-stage 1 or more: gather parameters under computation, a block ahead; --no-overlap-param-gather: wait for each",
    )
    grad_reduce_in_bf16: bool = flag(False, "gradients travel between ranks in bf16: half the bytes (default: as they are, in fp32)")
    zero3_keep_units: int = flag(
        0,
        "with --zero-stage 3: keep so many more blocks whole than the two that are needed, so that fewer are gathered",
        unit="blocks",
        low=0,
        high=10_000,
    )
    zero3_gather_once: bool = flag(
        False, "with --zero-stage 3: gather each block once per step, whatever the accumulation; takes memory for all parameters"
    )
    zero3_fetch: Literal["all_gather", "all_reduce"] = flag(
        "all_gather", "with --zero-stage 3: what makes a block whole; all_reduce moves twice the bytes"
    )
    stage3_use_all_reduce_for_fetch_params: bool = flag(False, "same as --zero3-fetch all_reduce (DeepSpeed's name)")
    offload_optimizer: bool = flag(
        False,
        "keep master weights and the optimizer's state in host memory and update there; with 16-bit parameters this moves 12 bytes for each"
        " parameter of a rank's share (--zero-stage) from the GPU to the host",
        aliases=("cpu-optimizer", "optimizer-cpu-offload"),
    )
    check_collectives: bool = flag(False, "compare operation, shape and type across ranks before every collective; slow, to find bugs")

    def dp_size(self, world_size: int) -> int:
        """Return the data-parallel size, world_size / (tp * sp)."""
        return world_size // (self.tensor_model_parallel_size * self.sequence_parallel_size)

    @property
    def overlap_mode(self) -> str:
        """Mode of the Ulysses exchanges that results from the four flags."""
        if self.sp_overlap_mode is not None:
            return self.sp_overlap_mode
        if self.sp_head_chunks is not None:
            return "chunked"
        if self.split_qkv_linear:
            return "split-qkv"
        return "auto" if self.sp_overlap_comm else "none"

    @property
    def overlaps_exchanges(self) -> bool:
        """True if exchanges overlap with computation: always except in mode "none" and with --split-qkv-linear alone."""
        return self.overlap_mode != "none" and not (self.split_qkv_linear and self.sp_overlap_mode is None and not self.sp_overlap_comm)


@dataclass
class KernelConfig:
    """Kernels, recomputation and devices."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where to train; auto: cuda if there is a GPU")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto", "flash: flash-attn; fused: torch SDPA; unfused/local: plain reference; auto: the fastest found"
    )
    use_flash_attn: bool = flag(False, "same as --attention-backend flash", aliases=("use-flash-attn-v2",))
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "full: keep only block inputs; selective: recompute the attention core"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "uniform: all blocks; block: the first --recompute-num-layers (full only)"
    )
    recompute_num_layers: int | None = flag(
        None, "blocks per recompute chunk (uniform) or blocks to recompute (block)", unit="blocks", low=1, high=10_000
    )
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")
    lm_head_chunk_tokens: int | None = flag(
        None,
        "tokens per chunk of the LM head and its loss (default: on a CPU about 50 MiB of logits and at most 512 tokens, on a GPU 512 MiB)",
        unit="tokens",
        low=1,
        high=2**31,
    )
    mlp_chunks: int = flag(
        1,
        "compute each MLP over N pieces of the positions: its wide activation exists for one piece at a time, for a product of fc1 more in"
        " backward; for long sequences",
        unit="pieces",
        low=1,
        high=2**25,
    )
    offload_activations: bool = flag(
        False,
        "keep what each block saves for backward in host memory, and fetch it a block ahead; with --recompute-granularity full that is the"
        " blocks' inputs; for sequences that do not fit on a GPU otherwise",
    )
    num_threads: int | None = flag(
        None,
        "intra-op CPU threads per process (default: the host's cores divided by its processes; OMP_NUM_THREADS for one process alone)",
        low=1,
        high=1024,
    )
    deterministic_mode: bool = flag(False, "only deterministic GPU kernels; slower")


@dataclass
class BatchConfig:
    """Batch size, length of the run, and when to stop."""

    micro_batch_size: int = flag(1, "sequences per forward pass and data-parallel rank", unit="sequences", low=1, high=2**20)
    global_batch_size: int | None = flag(
        None, "sequences per optimizer step (default: micro-batch-size * dp)", unit="sequences", low=1, high=2**31
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES", unit="sequences"
    )
    train_iters: int | None = flag(None, "optimizer steps of the whole run (this or --train-samples)", unit="steps", low=1, high=10**12)
    train_samples: int | None = flag(None, "sequences of the whole run (this or --train-iters)", unit="sequences", low=1)
    eval_interval: int | None = flag(
        None, "validate every so many steps (default and 0: only at the end)", unit="steps", low=0, high=10**12
    )
    eval_iters: int = flag(100, "global batches per validation and test pass; 0 or -1: none", unit="batches", low=-1, high=10**9)
    skip_train: bool = flag(False, "only validate and test what --load names")
    exit_interval: int | None = flag(None, "save and exit 0 when step % N == 0 (0: never)", unit="steps", low=0, high=10**12)
    exit_duration_in_mins: float | None = flag(
        None, "save and exit 0 after this long, agreed by all ranks", unit="minutes", low=0, high=1e9
    )
    no_exit_signal_handler: bool = flag(False, "die at once on SIGTERM instead of saving first (exit code 75)")
    seed: int = flag(1234, "of weights, dropout and sample order", low=0)


@dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: Literal["adam", "sgd"] = flag("adam", "adam means AdamW")
    lr: float | None = flag(None, "peak learning rate (required to train)", low=0, high=math.inf)
    min_lr: float = flag(0.0, "floor of the schedule", low=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the decay after warm-up"
    )
    lr_decay_iters: int | None = flag(None, "horizon of the decay, warm-up included (default: the run)", unit="steps", low=1, high=10**12)
    lr_decay_samples: int | None = flag(None, "the same, with --train-samples", unit="sequences", low=1)
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay horizon, in [0, 1)", low=0)
    lr_warmup_iters: int = flag(0, "linear warm-up", unit="steps", low=0, high=10**12)
    lr_warmup_samples: int = flag(0, "the same, with --train-samples", unit="sequences", low=0)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of warm-up", low=0)
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = flag("exponential", "shape of WSD's final decay")
    lr_wsd_decay_iters: int | None = flag(None, "length of WSD's final decay", unit="steps", low=1, high=10**12)
    lr_wsd_decay_samples: int | None = flag(None, "the same, with --train-samples", unit="sequences", low=1)
    weight_decay: float = flag(0.01, "decoupled decay of matrices; biases and norms are not decayed", low=0)
    start_weight_decay: float | None = flag(None, "first value of a ramped weight decay", low=0)
    end_weight_decay: float | None = flag(None, "last value of a ramped weight decay", low=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant", "ramp of the weight decay")
    clip_grad: float = flag(1.0, "global L2 norm to which gradients are clipped; 0: off", low=0)
    adam_beta1: float = flag(0.9, "Adam's first-moment decay", low=0)
    adam_beta2: float = flag(0.999, "Adam's second-moment decay", low=0)
    adam_eps: float = flag(1e-8, "Adam's epsilon", low=0)
    sgd_momentum: float = flag(0.9, "SGD's momentum", low=0)
    override_opt_param_scheduler: bool = flag(
        False, "on resume take the schedule from the command line", aliases=("override-opt_param-scheduler",)
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume take the schedule from the checkpoint", aliases=("use-checkpoint-opt_param-scheduler",)
    )


@dataclass
class PrecisionConfig:
    """Number formats."""

    bf16: bool = flag(False, "bf16 parameters and activations, fp32 master weights and gradients")
    fp16: bool = flag(False, "fp16 parameters and activations, fp32 master weights and gradients, loss scaling")
    fp64: bool = flag(False, "everything in fp64: for proofs, not for speed")
    loss_scale: float | None = flag(None, "fixed loss scale (fp16; default: dynamic)")
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "an overflow at this scale counts as a bad step")
    loss_scale_window: int = flag(1000, "good steps before the scale doubles", unit="steps", low=1, high=10**9)
    hysteresis: int = flag(2, "overflows before the scale halves", unit="steps", low=1, high=10**9)
    max_bad_steps: int = flag(10, "stop (exit code 5) after more than this many non-finite steps in a row", unit="steps", low=0, high=10**9)

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype of parameters and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float64" if self.fp64 else "float32"


WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")
"""Kinds of tokenizer that read --vocab-file."""


def default_type(data: DataConfig, vocab_size: int | None) -> Any:
    """Return the --tokenizer-type that other flags imply."""
    if data.tokenizer_model:
        return "HuggingFaceTokenizer" if data.tokenizer_model.endswith(".json") else "SentencePieceTokenizer"
    if data.merge_file:
        return "GPT2BPETokenizer"
    return "BertWordPieceLowerCase" if data.vocab_file else "NullTokenizer" if vocab_size else None


@dataclass
class DataConfig:
    """Data sets and tokenizer."""

    data_path: tuple[str, ...] = flag((), "prefix of a .bin/.idx pair, or WEIGHT PREFIX [WEIGHT PREFIX ...] for a blend", path=True)
    split: str = flag("969,30,1", "shares of --data-path for train, validation, test")
    train_data_path: tuple[str, ...] = flag((), "as --data-path, for training alone (replaces --split)", path=True)
    valid_data_path: tuple[str, ...] = flag((), "as --data-path, for validation alone", path=True)
    test_data_path: tuple[str, ...] = flag((), "as --data-path, for the test alone", path=True)
    data_cache_path: str | None = flag(None, "folder of the index cache (default: beside the data)", path=True)
    mock_data: bool = flag(False, "synthetic data, no files (needs --vocab-size or a tokenizer)")
    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase",
            "ByteTokenizer", "NullTokenizer",
        ] | None
    ) = flag(
        None,
        "kind of tokenizer (default: with --tokenizer-model HuggingFaceTokenizer if that ends in .json, else SentencePiece;"
        " GPT2BPETokenizer with --merge-file, BertWordPieceLowerCase with --vocab-file alone, else Null with --vocab-size)",
    )  # fmt: skip
    tokenizer_model: str | None = flag(
        None, "SentencePiece model file; of HuggingFaceTokenizer tokenizer.json, or the folder that holds it", path=True
    )
    eod_id: int | None = flag(
        None, "NullTokenizer: the id that ends a document (default: the last one)", aliases=("null-tokenizer-eod-id",), low=0
    )
    vocab_file: str | None = flag(
        None, "vocab.txt of BertWordPieceLowerCase and BertWordPieceCase, one piece per line; vocab.json of GPT2BPETokenizer", path=True
    )
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer", path=True)
    num_workers: int = flag(2, "0: read in the training thread; else read ahead in the background", unit="threads", low=0, high=1024)
    dataloader_type: Literal["single", "cyclic"] = flag("single", "single: in the data set's order; cyclic: reshuffled every epoch")
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    reset_position_ids: bool = flag(False, "positions start again behind each end-of-document token")
    reset_attention_mask: bool = flag(False, "tokens attend within their own document only")
    mask_prob: float = flag(0.15, "BERT: share of the tokens that have to be guessed, in (0, 1)")
    short_seq_prob: float = flag(0.1, "BERT: share of samples that are shorter than there is room, in [0, 1]", low=0)
    bert_pack_sequences: bool = flag(
        False, "BERT: several samples in one row, as many as fit, each attending to itself alone (needs --bert-no-binary-head)"
    )

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Weights in ``split`` for train, validation and test; missing ones are 0, and they are not normalized."""
        parts = [float(part) for part in self.split.replace("/", ",").split(",")]
        train, valid, test = (parts + [0.0, 0.0])[:3]
        return train, valid, test


@dataclass
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = flag(
        None, "run folder: checkpoints, metrics.jsonl, run_status.json (default: runs/NAME-TIME, without checkpoints)", path=True
    )
    load: str | None = flag(
        None,
        "a run, its checkpoints folder, or one step folder; absent is an error, except in a first run whose --save is the same folder:"
        " that starts afresh",
        path=True,
    )
    exit_on_missing_checkpoint: bool = flag(False, "nothing to load is an error in that first run, too (exit code 3)")
    auto_resume: bool = flag(False, "go on from the newest verified checkpoint under --save, or start afresh if there is none")
    save_interval: int | Literal["auto"] | None = flag(
        None, "save every so many steps, and always at the end (0: only then); auto: as often as loses least, by what a save is measured to"
        " cost", unit="steps", low=0, high=10**12,
    )  # fmt: skip
    mean_time_between_failures_hours: float | None = flag(
        None, "of the whole run, for --save-interval auto (default: 50,000 hours of one process, divided by their number)",
        unit="hours", low=0.001,
    )  # fmt: skip
    async_save: bool = flag(
        True, "copy what is saved to host memory, which is kept for it, and write while training goes on (--no-async-save: training waits)"
    )
    ckpt_step: int | None = flag(None, "load this step instead of the newest", unit="steps", low=0)
    resume_fallback: bool = flag(False, "if the newest checkpoint is damaged, take the newest sound one before it")
    finetune: bool = flag(False, "load weights only and start at step 0")
    no_load_optim: bool = flag(False, "do not load the optimizer's state")
    no_save_optim: bool = flag(False, "save weights only (such a checkpoint cannot resume exactly)")
    use_checkpoint_args: bool = flag(
        False, "take the model's shape and vocabulary from the checkpoint, and its tokenizer where no flag names one"
    )
    keep_last: int = flag(2, "verified checkpoints to keep, at least 2", unit="checkpoints", low=2, high=10**9)
    keep_every: int | None = flag(
        None, "also keep every checkpoint whose step is a multiple of this", unit="steps", aliases=("save-retain-interval",), low=1
    )
    accept_data_change: bool = flag(False, "resume although data, tokenizer, split, sequence length or seed changed")


@dataclass
class LoggingConfig:
    """Logs, metrics and profiling."""

    log_interval: int = flag(100, "one line and one metrics.jsonl record every so many steps", unit="steps", low=1, high=10**12)
    no_progress_bar: bool = flag(False, "plain lines even on a terminal")
    peak_tflops: str | None = flag(
        None, "peak for MFU: a number in TFLOP/s or a name such as h100-bf16 (default: by the GPU's name; measured on CPU)"
    )
    log_params_norm: bool = flag(False, "add the L2 norm of the parameters to each record")
    log_num_zeros_in_grad: bool = flag(False, "add the number of zeros in the gradients to each record")
    tensorboard_dir: str | None = flag(None, "write TensorBoard events there (needs the extra 'log')", path=True)
    tensorboard_queue_size: int = flag(1000, "events kept in memory before a write", low=1, high=10**6)
    wandb_project: str | None = flag(None, "log to this Weights & Biases project (needs the extra 'log')")
    wandb_exp_name: str | None = flag(None, "name of the W&B run")
    profile: bool = flag(False, "write a torch profiler trace into the run folder")
    profile_step_start: int = flag(10, "first profiled step", unit="steps", low=0, high=10**12)
    profile_step_end: int = flag(12, "step before which profiling stops", unit="steps", low=0, high=10**12)
    profile_ranks: tuple[int, ...] = flag((0,), "ranks that write a trace")
    report_overlap: int | None = flag(
        None,
        "after N steps (10 if no number is given) print how much of each layer's exchanges ran under computation, and draw the time line",
        unit="steps", low=1, alone=10, high=10_000)  # fmt: skip
    enable_fault_injection: bool = flag(False, "honour the variable MEGATRON_SP_FAULT (tests only)")


@dataclass
class Config:
    """Configuration of a whole run; every instance that reaches training has been checked by ``validate()``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    ignored_flags: tuple[str, ...] = field(default=(), compare=False)
    """Flags of the command line that have no meaning here, with the reason; the training loop lists them once."""
    preset: str | None = field(default=None, compare=False)
    """Name of the preset that the model's defaults came from."""
    preset_fields: frozenset[str] = field(default=frozenset(), compare=False)
    """Fields of ``model`` that have the preset's values, because nothing else was said of them."""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return a plain nested dict (tuples as lists), as stored in state.json and printed by --print-config."""
        return {
            group: {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(getattr(self, group)).items()}
            for group in GROUPS
        }

    @classmethod
    def from_dict(cls, data: Any) -> tuple[Config, list[str]]:
        """Restore a configuration written by ``to_dict``, possibly in another version of this package.

        Args:
            data: the parsed JSON, untrusted.
        Returns:
            The configuration, neither normalised nor validated, and one warning for every entry unknown to this version. Missing
            entries keep their defaults.
        Raises:
            ConfigError: an entry has the wrong type.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"a stored configuration must be an object of groups, got {type(data).__name__}")
        config, warnings = cls(), []
        for group, entries in data.items():
            if group not in GROUPS or not isinstance(entries, dict):
                warnings.append(f"the group '{group}' of the stored configuration is unknown to this version and left out")
                continue
            kinds = field_kinds(GROUPS[group])
            for name, value in entries.items():
                if name not in kinds:
                    warnings.append(f"'{group}.{name}' of the stored configuration is unknown to this version and left out")
                    continue
                try:
                    setattr(getattr(config, group), name, kinds[name].coerce(value))
                except ValueError as error:
                    raise ConfigError(f"'{group}.{name}' of the stored configuration: {error}") from None
        return config, warnings


GROUPS: dict[str, type] = {f.name: f.default_factory for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)}  # type: ignore[misc]
"""The groups of flags: name of the field in ``Config`` and its dataclass."""


def diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the differences, as ``{"group.field": (old value, new value)}`` in the order of the fields."""
    pairs = ((f"{group}.{name}", group, name) for group, cls in GROUPS.items() for name in field_kinds(cls))
    values = ((key, getattr(getattr(old, group), name), getattr(getattr(new, group), name)) for key, group, name in pairs)
    return {key: (a, b) for key, a, b in values if a != b}


def raise_all(errors: list[str]) -> None:
    """Raise one ConfigError that lists all of ``errors``, if there are any."""
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        raise ConfigError(f"{len(errors)} things are wrong:\n" + "\n".join(f"  {i}. {e}" for i, e in enumerate(errors, 1)))


def _required(value: int | None) -> int:
    if value is None:
        raise ConfigError("the model's shape is incomplete: give --num-layers, --hidden-size, --num-attention-heads and --seq-length")
    return value
