"""Flags of the model: its shape, positions, norms, activation, experts and weights, and what follows from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_sp.config.fields import POSITIONS, When, flag
from megatron_sp.utils.errors import ConfigError

ActivationName = Literal["gelu_tanh", "gelu", "relu", "squared_relu", "swiglu", "geglu_tanh", "geglu"]
"""What stands between the linear layers of an MLP; ``ops/activation.py`` computes it."""
HeadActivation = Literal["gelu_tanh", "gelu", "relu"]
MOST_LAYERS = 4096
"""Layers of the longest pattern."""
ROUTER_BIAS = ".router.expert_bias"
"""Ends the names of biases of routers in a checkpoint; they are no parameters."""
_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*([0-9]{1,4}))?")


@dataclass
class ExpertConfig:
    """The experts of a model; ``ModelConfig`` has these fields, too."""

    # fmt: off
    num_experts: int | None = flag(None, "experts in place of the MLP, of which each token takes --moe-router-topk;"
        " none is ever full (default: dense MLPs)", unit="experts", low=0, high=2**16)
    moe_router_topk: int = flag(2,
        "experts of each token", aliases=("topk",), unit="experts", low=1, high=2**10, only=When.EXPERTS)
    moe_ffn_hidden_size: int | None = flag(None,
        "width of an expert (default: --ffn-hidden-size)", low=1, high=2**24, only=When.EXPERTS)
    moe_shared_expert_intermediate_size: int | None = flag(None,
        "width of one more expert that all tokens take (default: none)", low=0, high=2**24, only=When.EXPERTS)
    moe_layer_freq: str = flag("1", "which layers have them; N: layers 0, N, 2 N, ...; or a pattern of all layers such"
        " as [0]+[1]*23 (Megatron's)", only=When.EXPERTS)
    moe_router_score_function: Literal["softmax", "sigmoid"] = flag("softmax",
        "scores from the router's logits", only=When.EXPERTS)
    moe_router_pre_softmax: bool = flag(False, "softmax over all experts, then the best of them; without it over the"
        " chosen ones, whose weights sum to 1", only=When.EXPERTS)
    moe_router_topk_scaling_factor: float | None = flag(None,
        "factor of the weights of the chosen experts", low=0, only=When.EXPERTS)
    moe_router_num_groups: int | None = flag(None, "groups of experts, of which each token chooses"
        " --moe-router-group-topk before it chooses experts there", unit="groups", low=1, high=2**16, only=When.EXPERTS)
    moe_router_group_topk: int | None = flag(None,
        "groups of each token", unit="groups", low=1, high=2**10, only=When.EXPERTS)
    moe_router_dtype: Literal["fp32", "fp64"] = flag("fp32",
        "number format of the router; of an fp64 model fp64", only=When.EXPERTS)
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] | None = flag(None,
        "what the loss that keeps the load even is about; seq_aux_loss: each sequence; global_aux_loss: the global"
        " batch; aux_loss: Megatron's, over what a rank has in a micro-batch, is taken as seq_aux_loss, which does not"
        " depend on the layout (default: seq_aux_loss with a --moe-aux-loss-coeff, else none)",
        only=(When.EXPERTS, When.BALANCE))
    moe_aux_loss_coeff: float = flag(0.0,
        "coefficient of that loss", aliases=("moe-loss-coeff",), low=0, only=When.EXPERTS)
    moe_z_loss_coeff: float | None = flag(None,
        "coefficient of a loss that keeps the router's logits small", low=0, only=When.EXPERTS)
    moe_router_enable_expert_bias: bool = flag(False, "with sigmoids a bias of each expert, added when experts are"
        " chosen, is raised after a step in which it had less than the mean load and lowered after one with more; keeps"
        " the load even without a loss (DeepSeek-V3)", only=When.EXPERTS)
    moe_router_bias_update_rate: float = flag(1e-3, "by how much", low=0, only=(When.EXPERTS, When.EXPERT_BIAS))
    # fmt: on

    @property
    def has_experts(self) -> bool:
        """True if there are layers with experts."""
        return bool(self.num_experts)

    @property
    def balance_kind(self) -> Literal["none", "sequence", "global"]:
        """Group of tokens that the balance loss is about."""
        kind = self.moe_router_load_balancing_type
        if not self.has_experts or not self.moe_aux_loss_coeff or kind == "none":
            return "none"
        return "global" if kind == "global_aux_loss" else "sequence"

    @property
    def shared_expert_size(self) -> int:
        """Width of the shared expert; 0: there is none."""
        return (self.moe_shared_expert_intermediate_size or 0) if self.has_experts else 0

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the numbers of the layers with experts, in order. Raises ConfigError."""
        if not self.has_experts:
            return ()
        return tuple(layer for layer, has in enumerate(layer_pattern(self.moe_layer_freq, num_layers)) if has)


@dataclass
class ModelConfig(ExpertConfig):
    """Shape of the model."""

    # fmt: off
    model_family: Literal["gpt", "bert"] = flag("gpt",
        "what is trained; pretrain_gpt.py and pretrain_bert.py say so themselves")
    num_layers: int | None = flag(None, "transformer blocks (required)", low=1, high=4096)
    hidden_size: int | None = flag(None, "width of the residual stream (required)", low=1, high=2**20)
    num_attention_heads: int | None = flag(None, "query heads (required)", low=1, high=2**16)
    seq_length: int | None = flag(None, "training sequence length (required)", unit="tokens", low=1, high=2**25)
    max_position_embeddings: int | None = flag(None,
        "longest sequence the model can ever see; sizes the learned position table (default: seq-length)", **POSITIONS)
    ffn_hidden_size: int | None = flag(None, "width of the MLP, of one half with --swiglu or --geglu (default:"
        " 4*hidden-size; with these 8/3*hidden-size rounded down to 64s)", low=1, high=2**24)
    kv_channels: int | None = flag(None,
        "width of one head (default: hidden-size / num-attention-heads)", low=1, high=2**16)
    group_query_attention: bool = flag(False,
        "query heads share key/value heads, --num-query-groups of them or one; implied when that is given")
    num_query_groups: int | None = flag(None, "key/value heads, each shared by heads/groups query heads (default:"
        " num-attention-heads; 1 with --group-query-attention)", aliases=("num-key-value-heads",), low=1, high=2**16)
    # positions
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = flag("learned_absolute",
        "learned table, rotary, or none")
    rotary_base: float = flag(10000.0,
        "theta of the rotary frequencies", aliases=("rotary-position-embeddings-theta", "rope-theta"), only=When.ROTARY)
    rotary_percent: float = flag(1.0, "share of each head that is rotated, in (0, 1]", only=When.ROTARY)
    rotary_seq_len_interpolation_factor: float = flag(1.0, "divide all positions by this before they turn anything, for"
        " sequences so many times longer than those of pretraining")
    use_rope_scaling: bool = flag(False, "stretch the slow rotary frequencies for longer sequences, as Llama 3.1 and"
        " later do; see the --rope-scaling flags")
    rope_scaling_factor: float = flag(8.0,
        "frequencies that are too slow for the original length are divided by this", only=When.ROPE_SCALING)
    rope_scaling_low_freq_factor: float = flag(1.0,
        "too slow are those that turn less often than this over the original length", only=When.ROPE_SCALING)
    rope_scaling_high_freq_factor: float = flag(4.0, "those that turn more often than this over it stay as they are; in"
        " between it goes over evenly", only=When.ROPE_SCALING)
    rope_scaling_original_length: int = flag(8192, "sequence length of pretraining",
        aliases=("rope-scaling-original-max-position-embeddings",), **POSITIONS, only=When.ROPE_SCALING)
    window_size: int | None = flag(None, "a token attends to itself and the N - 1 tokens before it (Mistral's sliding"
        " window); Megatron's N-1,0 is understood (default: to all before it)", **POSITIONS)
    # norms
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "kind of norm")
    norm_epsilon: float = flag(1e-5, "added to the variance in every norm", aliases=("layernorm-epsilon",))
    apply_layernorm_1p: bool = flag(False, "store norm weights as (weight - 1), so weight decay pulls them to 1")
    norm_placement: Literal["pre", "post"] = flag("pre", "pre: norms before attention and MLP, and one after the last"
        " block (Megatron); post: after them, on the residual stream, and one after the embedding (the original BERT,"
        " Hugging Face's BertModel); BERT only")
    qk_layernorm: bool = flag(False, "norm on every query and key head")
    qk_layernorm_scope: Literal["head", "all"] = flag("head", "with RMSNorm over each head, or over all heads of a"
        " token together, each channel with a weight of its own (OLMoE), which sums two numbers for each token over tp"
        " and sp ranks in each pass and sends all heads in one chunk", only=When.QK_NORM)
    use_parallel_residual: bool = flag(False, "attention and MLP work on the same input, x + attention(norm(x)) +"
        " mlp(norm(x)), each with a norm of its own (GPT-NeoX, Pythia)")
    # activation and biases
    swiglu: bool = flag(False, "gated SiLU MLP")
    geglu: bool = flag(False, "gated GELU MLP (--gelu-approximate says which)")
    relu: bool = flag(False, "ReLU MLP")
    squared_relu: bool = flag(False, "squared ReLU MLP")
    gelu_approximate: Literal["tanh", "none"] | None = flag(None, "GELU as tanh approximation or exact erf (default: as"
        " in Megatron, tanh where the MLP has biases, since its kernel of bias and GELU is that, and exact without"
        " them)", only=When.GELU)
    bert_head_activation: Literal["gelu_tanh", "gelu", "relu"] | None = flag(None,
        "BERT: activation of the head for masked tokens; gelu is the exact one (default: as in Megatron gelu, unless"
        " --gelu-approximate is given, which then holds here, too)")
    disable_bias_linear: bool = flag(False, "no biases in the linear layers")
    add_qkv_bias: bool = flag(False, "keep the bias of the QKV projection", only=When.NO_BIASES)
    add_proj_bias: bool = flag(False, "keep the bias of attention's output projection", only=When.NO_BIASES)
    add_mlp_bias: bool = flag(False, "keep the biases of the MLP", only=When.NO_BIASES)
    untie_embeddings_and_output_weights: bool = flag(False, "give the output layer its own weight")
    # training and initial weights
    attention_dropout: float = flag(0.1, "dropout on attention probabilities, in [0, 1)", low=0)
    hidden_dropout: float = flag(0.1, "dropout on embeddings and block outputs, in [0, 1)", low=0)
    init_method_std: float = flag(0.02,
        "standard deviation of the initial weights; output projections use it divided by sqrt(2*num-layers)", low=0)
    # vocabulary
    make_vocab_size_divisible_by: int = flag(128, "rows of the embedding in memory are padded to a multiple of this"
        " times tp (never in a checkpoint)", low=1, high=2**20)
    vocab_size: int | None = flag(None, "entries of the vocabulary (default: the tokenizer's); of --tokenizer-type"
        " NullTokenizer without --eod-id one more, which ends documents", unit="tokens", low=1, high=2**31 - 1)
    # BERT's inputs
    num_tokentypes: int | None = flag(None, "BERT: kinds of segments, each with an embedding of its own (default: 2,"
        " with --bert-no-binary-head none)", low=0, high=2**16)
    bert_no_binary_head: bool = flag(False,
        "BERT: one segment in each sample, no sentence-order task, no pooler: masked tokens alone are trained")
    # fmt: on

    @property
    def is_bert(self) -> bool:
        """True for BERT, False for GPT."""
        return self.model_family == "bert"

    @property
    def has_order_head(self) -> bool:
        """True if the model has BERT's head that predicts whether the two segments are in the order of the text."""
        return self.is_bert and not self.bert_no_binary_head

    @property
    def token_types(self) -> int:
        """Rows of the token-type (segment) embedding table; 0: there is none."""
        if not self.is_bert:
            return 0
        return (2 if self.has_order_head else 0) if self.num_tokentypes is None else self.num_tokentypes

    @property
    def num_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or _required(self.num_attention_heads)

    @property
    def norms_all_heads(self) -> bool:
        """True if queries and keys are normed over all heads of a token together."""
        return self.qk_layernorm and self.qk_layernorm_scope == "all"

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.kv_channels or _required(self.hidden_size) // _required(self.num_attention_heads)

    @property
    def knows_head_dim(self) -> bool:
        """True if the flags say how wide a head is."""
        is_whole = self.hidden_size and self.num_attention_heads and not self.hidden_size % self.num_attention_heads
        return bool(self.kv_channels or is_whole)

    @property
    def ffn_size(self) -> int:
        """Width of the MLP (of one half if it is gated)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        hidden = _required(self.hidden_size)
        return int(8 * hidden / 3 / 64) * 64 if self.is_gated else 4 * hidden

    @property
    def expert_ffn_size(self) -> int:
        """Width of an expert (of one half if it is gated)."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def rope_scaling(self) -> tuple[float, ...]:
        """(factor, low, high, original length) of --use-rope-scaling; empty without it."""
        if not self.use_rope_scaling:
            return ()
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        return self.rope_scaling_factor, low, high, self.rope_scaling_original_length

    @property
    def is_gated(self) -> bool:
        """True if the MLP's first linear layer has double width, and one half of its output gates the other."""
        return self.swiglu or self.geglu

    @property
    def has_tanh_gelu(self) -> bool:
        """True if the MLP's GELU is the tanh approximation."""
        if self.gelu_approximate is None:  # as in Megatron: its fused kernel of bias and GELU, and of gates, is tanh
            return self.mlp_bias or self.geglu
        return self.gelu_approximate == "tanh"

    @property
    def activation(self) -> ActivationName:
        """Activation of the MLP."""
        tanh = self.has_tanh_gelu
        if self.swiglu:
            return "swiglu"
        if self.geglu:
            return "geglu_tanh" if tanh else "geglu"
        if self.relu or self.squared_relu:
            return "relu" if self.relu else "squared_relu"
        return "gelu_tanh" if tanh else "gelu"

    @property
    def head_activation(self) -> HeadActivation:
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
        """Positions of the model."""
        return self.max_position_embeddings or _required(self.seq_length)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of each head."""
        return int(self.head_dim * self.rotary_percent)


def is_expert_bias(name: str) -> bool:
    """Return whether a tensor is the bias of a router, which is no parameter."""
    return name.endswith(ROUTER_BIAS)


def layer_pattern(text: str, num_layers: int) -> list[bool]:
    """Return which layers have experts: every N-th from the first on, or terms such as [0,1]*4 joined by +."""
    plain = re.sub(r"[\s()]", "", text)
    if plain.isascii() and plain.isdigit() and 1 <= int(plain[:6]) <= MOST_LAYERS:
        return [layer % int(plain) == 0 for layer in range(num_layers)]
    layers: list[bool] = []
    for term in plain.split("+"):
        match = _TERM.fullmatch(term)
        if match is None or len(layers) > MOST_LAYERS:
            way = "write 2 for every second layer, or terms such as [0]+[1]*23, 1 for a layer with experts"
            raise ConfigError(f"--moe-layer-freq {text[:60]!r} is neither a number of layers nor a pattern: {way}")
        layers += [digit == "1" for digit in match[1].split(",")] * int(match[2] or 1)
    if len(layers) != num_layers:
        counts = f"a pattern of {len(layers)} layers, and num_layers is {num_layers}"
        raise ConfigError(f"--moe-layer-freq {text[:60]!r} is {counts}: give each a 0 or 1")
    return layers


def _required(value: int | None) -> int:
    if value is None:
        flags = "--num-layers, --hidden-size, --num-attention-heads and --seq-length"
        raise ConfigError(f"the model's shape is incomplete: give {flags}")
    return value
