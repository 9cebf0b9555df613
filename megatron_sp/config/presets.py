"""Published models by name: the shape flags of each ``--preset``, and the resulting number of parameters.

A preset defines the model: its shape, positions, norm, activation, dropout, vocabulary and usual sequence length, but
no batch sizes, learning rates or layouts. It is a set of defaults: values from a --config file or the command line
override it. Two of its values are replaced automatically: the vocabulary by that of a given tokenizer, and the length
of a learned position table by a longer --seq-length.

Comments in the table explain deviations from the papers. Llama's scaled rotary frequencies (3.1 and later) are not
included: these presets have the unscaled ones of pretraining at 8,192 tokens (for the others use --use-rope-scaling).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_sp.utils.errors import ConfigError

Family = Literal["gpt", "bert"]
PROGRAMS: dict[str, str] = {"gpt": "pretrain_gpt.py", "bert": "pretrain_bert.py"}
"""The program that trains a family."""


@dataclass(frozen=True)
class Preset:
    """A published model."""

    family: Family  # model family, whose program trains it
    flags: dict[str, Any]  # fields of ``ModelConfig`` and their values
    # parameters of the whole model, without vocabulary padding; for BERT with pooler, binary head and masked-word head
    num_params: int
    source: str  # publication of the shape and the number of parameters


def _shape(layers: int, hidden: int, heads: int, seq_length: int, vocab_size: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": seq_length,
        "vocab_size": vocab_size,
    }  # fmt: skip


def _classic(layers: int, hidden: int, heads: int, seq_length: int, vocab_size: int, dropout: float) -> dict[str, Any]:
    # flags of GPT-2's block, shared by GPT-3 and BERT: pre-LayerNorm, biases, GELU, learned positions, tied head
    return {
        **_shape(layers, hidden, heads, seq_length, vocab_size), "max_position_embeddings": seq_length,
        "position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "norm_epsilon": 1e-5,
        "attention_dropout": dropout, "hidden_dropout": dropout,
    }  # fmt: skip


def _gpt2(layers: int, hidden: int, heads: int, num_params: int) -> Preset:
    flags = {**_classic(layers, hidden, heads, 1024, 50257, dropout=0.1), "gelu_approximate": "tanh"}
    return Preset("gpt", flags, num_params, "Radford et al. 2019, released weights")


def _gpt3(layers: int, hidden: int, heads: int, num_params: int) -> Preset:
    """GPT-3 preset, with dense attention in all layers (the paper alternates it with banded sparse) and without dropout
    (unstated).
    """
    flags = {**_classic(layers, hidden, heads, 2048, 50257, dropout=0.0), "gelu_approximate": "tanh"}
    return Preset("gpt", flags, num_params, "Brown et al. 2020, arXiv:2005.14165, table 2.1")


@dataclass(frozen=True)
class _Llama:
    """Properties that the sizes of one Llama release share; all have rotary positions, RMSNorm, SwiGLU and no biases."""

    source: str
    seq_length: int  # tokens of a training sequence
    vocab_size: int
    theta: float  # base of the rotary frequencies
    tied: bool = False  # the output layer is the embedding
    window_size: int | None = None  # sliding window, if there is one

    def of(self, layers: int, hidden: int, heads: int, groups: int, ffn: int, num_params: int) -> Preset:
        flags = {
            **_shape(layers, hidden, heads, self.seq_length, self.vocab_size),
            "num_query_groups": None if groups == heads else groups,
            "ffn_hidden_size": ffn, "position_embedding_type": "rope", "rotary_base": self.theta,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-5, "swiglu": True, "disable_bias_linear": True,
            "untie_embeddings_and_output_weights": not self.tied,
            "attention_dropout": 0.0, "hidden_dropout": 0.0,
            **({"window_size": self.window_size} if self.window_size else {}),
        }  # fmt: skip
        return Preset("gpt", flags, num_params, self.source)


_LLAMA2 = _Llama("Touvron et al. 2023, arXiv:2307.09288, released weights", 4096, 32000, 10000.0)
_LLAMA3 = _Llama("Grattafiori et al. 2024, arXiv:2407.21783, table 3, released weights", 8192, 128256, 500000.0)
_LLAMA32 = replace(_LLAMA3, source="Llama 3.2 1B, model card and released weights", tied=True)
# the first version, with the sliding window that later ones dropped; trained at twice the window's length
_MISTRAL = _Llama(
    "Jiang et al. 2023, arXiv:2310.06825, table 1, released weights", 8192, 32000, 10000.0, window_size=4096
)


def _pythia(layers: int, hidden: int, heads: int, num_params: int, vocab_size: int = 50304) -> Preset:
    """Pythia preset with GPT-NeoX's block: parallel attention and MLP, a quarter of each head rotated, exact GELU.

    The vocabulary is that of the released weights: the tokenizer's, padded to a multiple of 128 times their
    tensor-parallel size.
    """
    flags = {
        **_shape(layers, hidden, heads, 2048, vocab_size), "position_embedding_type": "rope", "rotary_base": 10000.0,
        "rotary_percent": 0.25, "use_parallel_residual": True, "normalization": "LayerNorm", "norm_epsilon": 1e-5,
        "gelu_approximate": "none", "untie_embeddings_and_output_weights": True, "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }  # fmt: skip
    return Preset("gpt", flags, num_params, "Biderman et al. 2023, arXiv:2304.01373, table 1, released weights")


def _experts(
    llama: _Llama, sizes: tuple[int, int, int, int], ffn: int, num_params: int, *, experts: int, top_k: int, aux_coeff: float, **more: Any
) -> Preset:  # fmt: skip
    """Preset of a Llama with experts in all layers, and the coefficient of their balance loss, over sequences unless
    said.
    """
    preset = llama.of(*sizes, ffn, num_params)
    chosen = {"num_experts": experts, "moe_router_topk": top_k, "moe_aux_loss_coeff": aux_coeff}
    return replace(preset, flags=preset.flags | chosen | more)


_MIXTRAL = _Llama("Jiang et al. 2024, arXiv:2401.04088, table 1, released weights", 32768, 32000, 1e6)
# the length of most of its pretraining; the last stage has 32,768
_QWEN3 = _Llama("Yang et al. 2025, arXiv:2505.09388, table 2, released weights", 4096, 151936, 1e6)
_OLMOE = _Llama("Muennighoff et al. 2024, arXiv:2409.02060, released weights", 4096, 50304, 10000.0)


def _bert(layers: int, hidden: int, heads: int, num_params: int, source: str) -> Preset:
    """BERT preset as Megatron trains it: pre-norm blocks and a final norm, tanh GELU in the blocks, the exact one in
    the head.
    """
    return Preset("bert", _classic(layers, hidden, heads, 512, 30522, dropout=0.1), num_params, source)


def _original_bert(layers: int, hidden: int, heads: int, num_params: int) -> Preset:
    """Original BERT preset, as published and in Hugging Face's BertForPreTraining: post-norm, norm after the embedding,
    exact GELU.
    """
    flags = _classic(layers, hidden, heads, 512, 30522, dropout=0.1)
    flags |= {"norm_placement": "post", "norm_epsilon": 1e-12, "gelu_approximate": "none"}
    return Preset("bert", flags, num_params, "Devlin et al. 2018, arXiv:1810.04805, released weights")


_MEGATRON_BERT = "arXiv:1909.08053"

PRESETS: dict[str, Preset] = {
    "gpt2-124m": _gpt2(12, 768, 12, 124_439_808),
    "gpt2-355m": _gpt2(24, 1024, 16, 354_823_168),
    "gpt2-774m": _gpt2(36, 1280, 20, 774_030_080),
    "gpt2-1.5b": _gpt2(48, 1600, 25, 1_557_611_200),
    "gpt-125m": _gpt3(12, 768, 12, 125_226_240),
    "gpt-350m": _gpt3(24, 1024, 16, 355_871_744),
    "gpt-760m": _gpt3(24, 1536, 16, 760_300_032),
    # the paper's 24 heads of 128 are not 2048 wide: 16 heads of 128
    "gpt-1.3b": _gpt3(24, 2048, 16, 1_315_723_264),
    "gpt-2.7b": _gpt3(32, 2560, 32, 2_651_553_280),
    "gpt-6.7b": _gpt3(32, 4096, 32, 6_658_404_352),
    # the paper says 5140, which is not 40 heads of 128: 5120
    "gpt-13b": _gpt3(40, 5120, 40, 12_853_386_240),
    "gpt-175b": _gpt3(96, 12288, 96, 174_604_259_328),
    "llama2-7b": _LLAMA2.of(32, 4096, 32, 32, 11008, 6_738_415_616),
    "llama2-13b": _LLAMA2.of(40, 5120, 40, 40, 13824, 13_015_864_320),
    "llama2-70b": _LLAMA2.of(80, 8192, 64, 8, 28672, 68_976_648_192),
    "llama-1b": _LLAMA32.of(16, 2048, 32, 8, 8192, 1_235_814_400),
    "llama3-8b": _LLAMA3.of(32, 4096, 32, 8, 14336, 8_030_261_248),
    "llama3-70b": _LLAMA3.of(80, 8192, 64, 8, 28672, 70_553_706_496),
    "mistral-7b": _MISTRAL.of(32, 4096, 32, 8, 14336, 7_241_732_096),
    "mixtral-8x7b": _experts(_MIXTRAL, (32, 4096, 32, 8), 14336, 46_702_792_704, experts=8, top_k=2, aux_coeff=0.02),
    # its dense width of 6144 is that of no layer
    "qwen3-30b-a3b": _experts(
        _QWEN3,
        (48, 2048, 32, 4),
        6144,
        30_532_122_624,
        experts=128,
        top_k=8,
        aux_coeff=0.001,
        moe_router_load_balancing_type="global_aux_loss",
        moe_ffn_hidden_size=768,
        kv_channels=128,
        qk_layernorm=True,
        norm_epsilon=1e-6,
    ),
    "olmoe-1b-7b": _experts(
        _OLMOE,
        (16, 2048, 16, 16),
        1024,
        6_919_161_856,
        experts=64,
        top_k=8,
        aux_coeff=0.01,
        moe_z_loss_coeff=0.001,
        moe_router_pre_softmax=True,
        qk_layernorm=True,
        qk_layernorm_scope="all",
    ),
    "pythia-70m": _pythia(6, 512, 8, 70_426_624),
    "pythia-160m": _pythia(12, 768, 12, 162_322_944),
    "pythia-1.4b": _pythia(24, 2048, 16, 1_414_647_808),
    "pythia-6.9b": _pythia(32, 4096, 32, 6_857_302_016, vocab_size=50432),
    "bert-base": _bert(12, 768, 12, 110_106_428, f"Devlin et al. 2018, arXiv:1810.04805; norms as in {_MEGATRON_BERT}"),
    "bert-large": _bert(
        24, 1024, 16, 336_226_108, f"Devlin et al. 2018, arXiv:1810.04805; norms as in {_MEGATRON_BERT}"
    ),
    "bert-base-hf": _original_bert(12, 768, 12, 110_106_428),
    "bert-large-hf": _original_bert(24, 1024, 16, 336_226_108),
    "bert-1.3b": _bert(24, 2048, 32, 1_280_595_772, f"Shoeybi et al. 2019, {_MEGATRON_BERT}, BERT of 1.3 billion"),
}
"""The presets, by the name that ``--preset`` takes."""


def preset_named(name: str, family: str | None = None) -> Preset:
    """Return the preset of this name (case-insensitive; _ is taken for -).

    Args:
        family: family that the calling program can train; None: any.
    Raises:
        ConfigError: there is no such preset (the message has the nearest names), or it is of the other family.
    """
    preset = PRESETS.get(name.lower().replace("_", "-"))
    if preset is None:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), PRESETS, n=3, cutoff=0.6)
        choice = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"'{name[:40]}' is not a preset: {choice}`megatron-sp presets` lists them")
    if family is not None and preset.family != family:
        raise ConfigError(
            f"{name.lower()} is a {preset.family.upper()} model, and this program trains {family.upper()}: start it"
            f" with {PROGRAMS[preset.family]}, or take a preset of {family.upper()} (`megatron-sp presets` lists"
            " them)"
        )
    return preset
