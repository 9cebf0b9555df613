"""Published models by name: the shape flags of each ``--preset``, and the resulting number of parameters.

A preset is a set of defaults for the model. Two of its values are replaced automatically: the vocabulary by that of a
given tokenizer, and the length of a learned position table by a longer --seq-length.

Llama's scaled rotary frequencies (3.1 and later) are not included: for these use --use-rope-scaling.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from megatron_sp.utils.errors import ConfigError

Family = Literal["gpt", "bert"]
_Flags = dict[str, Any]
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


def _release(source: str, sizes: dict[str, Any], *, family: Family = "gpt", **shared: Any) -> dict[str, Preset]:
    # the sizes of one release by name, each (layers, hidden size, heads, parameters, further flags if any); ``shared``:
    # flags that all of them have
    presets = {}
    for name, (layers, hidden, heads, num_params, *more) in sizes.items():
        shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
        presets[name] = Preset(family, {**shape, **shared, **dict(*more)}, num_params, source)
    return presets


# fmt: off
# flags of GPT-2's block, shared by GPT-3 and BERT: pre-LayerNorm, biases, GELU, learned positions, tied head
_CLASSIC: _Flags = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "norm_epsilon": 1e-5}
_NO_DROPOUT: _Flags = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_DROPOUT: _Flags = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
# rotary positions, RMSNorm, SwiGLU and no biases
_LLAMA: _Flags = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "norm_epsilon": 1e-5, "swiglu": True,
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True, **_NO_DROPOUT,
}
_GPT2: _Flags = {**_CLASSIC, "seq_length": 1024, "max_position_embeddings": 1024, "vocab_size": 50257, **_DROPOUT}
# dense attention in all layers (the paper alternates it with banded sparse), and without dropout (unstated)
_GPT3: _Flags = {**_CLASSIC, "seq_length": 2048, "max_position_embeddings": 2048, "vocab_size": 50257, **_NO_DROPOUT}
_LLAMA3: _Flags = {**_LLAMA, "seq_length": 8192, "vocab_size": 128256, "rotary_base": 500000.0}
# Megatron's: pre-norm blocks and a final norm, tanh GELU in the blocks, the exact one in the head
_BERT: _Flags = {**_CLASSIC, "seq_length": 512, "max_position_embeddings": 512, "vocab_size": 30522, **_DROPOUT}
# as published and in Hugging Face's BertForPreTraining: post-norm, norm after the embedding, exact GELU
_ORIGINAL_BERT: _Flags = {**_BERT, "norm_placement": "post", "norm_epsilon": 1e-12, "gelu_approximate": "none"}
# LayerNorm stored as (weight - 1), squared ReLU, half of each head rotated, no biases
_NEMOTRON: _Flags = {
    "position_embedding_type": "rope", "rotary_base": 10000.0, "rotary_percent": 0.5, "normalization": "LayerNorm",
    "apply_layernorm_1p": True, "norm_epsilon": 1e-5, "squared_relu": True, "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, **_NO_DROPOUT,
}
_SHOEYBI = "arXiv:1909.08053"


def _gqa(groups: int | None, ffn: int, **more: Any) -> _Flags:
    return {"num_query_groups": groups, "ffn_hidden_size": ffn, **more}


def _experts(experts: int, top_k: int, aux_coeff: float, **more: Any) -> _Flags:
    # experts in all layers, and the coefficient of their balance loss, over sequences unless said
    return {"num_experts": experts, "moe_router_topk": top_k, "moe_aux_loss_coeff": aux_coeff, **more}


def _sigmoid(
    experts: int, top_k: int, shared: int, width: int, layers: int, dense: int, factor: float | None = None
) -> _Flags:
    # as in DeepSeek-V3: sigmoid scores, a bias for the choice, ``shared`` experts for all tokens, dense first layers
    return {
        "num_experts": experts, "moe_router_topk": top_k, "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width or None, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": factor,
        "moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}" if dense else "1",
    }


PRESETS: dict[str, Preset] = {
    **_release("Radford et al. 2019, released weights", {
        "gpt2-124m": (12, 768, 12, 124_439_808), "gpt2-355m": (24, 1024, 16, 354_823_168),
        "gpt2-774m": (36, 1280, 20, 774_030_080), "gpt2-1.5b": (48, 1600, 25, 1_557_611_200),
    }, **_GPT2, gelu_approximate="tanh"),
    **_release("Brown et al. 2020, arXiv:2005.14165, table 2.1", {
        "gpt-125m": (12, 768, 12, 125_226_240), "gpt-350m": (24, 1024, 16, 355_871_744),
        "gpt-760m": (24, 1536, 16, 760_300_032),
        # the paper's 24 heads of 128 are not 2048 wide: 16 heads of 128
        "gpt-1.3b": (24, 2048, 16, 1_315_723_264),
        "gpt-2.7b": (32, 2560, 32, 2_651_553_280), "gpt-6.7b": (32, 4096, 32, 6_658_404_352),
        # the paper says 5140, which is not 40 heads of 128: 5120
        "gpt-13b": (40, 5120, 40, 12_853_386_240), "gpt-175b": (96, 12288, 96, 174_604_259_328),
    }, **_GPT3, gelu_approximate="tanh"),
    **_release("Touvron et al. 2023, arXiv:2307.09288, released weights", {
        "llama2-7b": (32, 4096, 32, 6_738_415_616, _gqa(None, 11008)),
        "llama2-13b": (40, 5120, 40, 13_015_864_320, _gqa(None, 13824)),
        "llama2-70b": (80, 8192, 64, 68_976_648_192, _gqa(8, 28672)),
    }, **_LLAMA, seq_length=4096, vocab_size=32000, rotary_base=10000.0),
    **_release("Llama 3.2 1B, model card and released weights", {
        "llama-1b": (16, 2048, 32, 1_235_814_400, _gqa(8, 8192, untie_embeddings_and_output_weights=False)),
    }, **_LLAMA3),
    **_release("Grattafiori et al. 2024, arXiv:2407.21783, table 3, released weights", {
        "llama3-8b": (32, 4096, 32, 8_030_261_248, _gqa(8, 14336)),
        "llama3-70b": (80, 8192, 64, 70_553_706_496, _gqa(8, 28672)),
    }, **_LLAMA3),
    # the first version, with the sliding window that later ones dropped; trained at twice the window's length
    **_release("Jiang et al. 2023, arXiv:2310.06825, table 1, released weights", {
        "mistral-7b": (32, 4096, 32, 7_241_732_096, _gqa(8, 14336, window_size=4096)),
    }, **_LLAMA, seq_length=8192, vocab_size=32000, rotary_base=10000.0),
    **_release("Jiang et al. 2024, arXiv:2401.04088, table 1, released weights", {
        "mixtral-8x7b": (32, 4096, 32, 46_702_792_704, _gqa(8, 14336, **_experts(8, 2, 0.02))),
    }, **_LLAMA, seq_length=32768, vocab_size=32000, rotary_base=1e6),
    # the length of most of its pretraining; the last stage has 32,768. Its dense width of 6144 is that of no layer
    **_release("Yang et al. 2025, arXiv:2505.09388, table 2, released weights", {
        "qwen3-30b-a3b": (48, 2048, 32, 30_532_122_624, _gqa(4, 6144, **_experts(
            128, 8, 0.001, moe_router_load_balancing_type="global_aux_loss", moe_ffn_hidden_size=768, kv_channels=128,
            qk_layernorm=True, norm_epsilon=1e-6))),
    }, **_LLAMA, seq_length=4096, vocab_size=151936, rotary_base=1e6),
    # the dense ones; small ones have tied heads. Pretrained at 4,096 tokens, then at 32,768
    **_release("Yang et al. 2025, arXiv:2505.09388, table 1, released weights", {
        "qwen3-0.6b": (28, 1024, 16, 596_049_920, _gqa(8, 3072, untie_embeddings_and_output_weights=False)),
        "qwen3-1.7b": (28, 2048, 16, 1_720_574_976, _gqa(8, 6144, untie_embeddings_and_output_weights=False)),
        "qwen3-4b": (36, 2560, 32, 4_022_468_096, _gqa(8, 9728, untie_embeddings_and_output_weights=False)),
        "qwen3-8b": (36, 4096, 32, 8_190_735_360, _gqa(8, 12288)),
        "qwen3-14b": (40, 5120, 40, 14_768_307_200, _gqa(8, 17408)),
        "qwen3-32b": (64, 5120, 64, 32_762_123_264, _gqa(8, 25600)),
    }, **{**_LLAMA, "norm_epsilon": 1e-6}, seq_length=4096, vocab_size=151936, rotary_base=1e6, kv_channels=128,
        qk_layernorm=True),
    **_release("ByteDance Seed 2025, Seed-OSS 36B, released weights", {
        "seed-oss-36b": (64, 5120, 80, 36_151_104_512, _gqa(8, 27648)),
    }, **{**_LLAMA, "norm_epsilon": 1e-6}, seq_length=8192, vocab_size=155136, rotary_base=1e7, kv_channels=128,
        add_qkv_bias=True),
    **_release("Abdin et al. 2024, arXiv:2404.14219, released weights", {
        "phi3-mini": (32, 3072, 32, 3_821_079_552, _gqa(None, 8192)),
        "phi3-medium": (40, 5120, 40, 13_960_238_080, _gqa(10, 17920)),
    }, **_LLAMA, seq_length=4096, vocab_size=32064, rotary_base=10000.0, window_size=2047),
    **_release("Abdin et al. 2024, arXiv:2412.08905, released weights", {
        "phi4-14b": (40, 5120, 40, 14_659_507_200, _gqa(10, 17920)),
    }, **_LLAMA, seq_length=4096, vocab_size=100352, rotary_base=250000.0),
    **_release("Lozhkov et al. 2024, arXiv:2402.19173, table 6, released weights", {
        "starcoder2-3b": (30, 3072, 24, 3_030_371_328, _gqa(2, 12288, rotary_base=999999.4420358813)),
        "starcoder2-7b": (32, 4608, 36, 7_173_923_840, _gqa(4, 18432, rotary_base=1e6)),
        "starcoder2-15b": (40, 6144, 48, 15_957_889_024, _gqa(4, 24576, rotary_base=1e5,
            untie_embeddings_and_output_weights=True)),
    }, **_CLASSIC | {"position_embedding_type": "rope"}, **_NO_DROPOUT, seq_length=4096, vocab_size=49152,
        window_size=4096, gelu_approximate="tanh"),
    **_release("Muralidharan et al. 2024, arXiv:2407.14679, released weights", {
        "minitron-4b": (32, 3072, 24, 4_190_509_056, _gqa(8, 9216, kv_channels=128)),
    }, **_NEMOTRON, seq_length=4096, vocab_size=256000),
    **_release("Nvidia 2024, arXiv:2406.11704, table 1, released weights", {
        "nemotron4-340b": (96, 18432, 96, 341_029_195_776, _gqa(8, 73728)),
    }, **_NEMOTRON, seq_length=4096, vocab_size=256000),
    **_release("Baidu 2025, ERNIE 4.5, released weights", {
        "ernie4.5-0.3b": (18, 1024, 16, 360_748_032, _gqa(2, 3072)),
    }, **{**_LLAMA, "untie_embeddings_and_output_weights": False}, seq_length=8192, vocab_size=103424,
        rotary_base=500000.0, kv_channels=128),
    # without multi-token prediction
    **_release("GLM-4.5 Team 2025, arXiv:2508.06471, table 1, released weights", {
        "glm4.5-air": (46, 4096, 96, 106_852_245_504, _gqa(8, 10944, **_sigmoid(128, 8, 1, 1408, 46, 1))),
        "glm4.5": (92, 5120, 96, 352_797_814_784, _gqa(
            8, 12288, qk_layernorm=True, **_sigmoid(160, 8, 1, 1536, 92, 3, 2.5))),
    }, **_LLAMA, seq_length=4096, vocab_size=151552, rotary_base=1e6, rotary_percent=0.5, kv_channels=128,
        add_qkv_bias=True),
    **_release("rednote-hilab 2025, arXiv:2506.05767, released weights", {
        "dots.llm1": (62, 4096, 32, 142_774_373_888, _gqa(
            None, 10944, qk_layernorm=True, **_sigmoid(128, 6, 2, 1408, 62, 1, 2.5))),
    }, **{**_LLAMA, "norm_epsilon": 1e-5}, seq_length=8192, vocab_size=152064, rotary_base=1e7),
    **_release("MiniMax 2025, MiniMax-M2, released weights", {
        "minimax-m2": (62, 3072, 48, 228_689_748_992, _gqa(8, 1536, qk_layernorm=True, qk_layernorm_scope="all",
                                              **_sigmoid(256, 8, 0, 1536, 62, 0))),
    }, **{**_LLAMA, "norm_epsilon": 1e-6}, seq_length=8192, vocab_size=200064, rotary_base=5e6, rotary_percent=0.5,
        kv_channels=128),
    **_release("Upstage 2025, Solar-Open 100B, released weights", {
        "solar-open-100b": (48, 4096, 64, 102_651_793_408, _gqa(8, 1280, **_sigmoid(128, 8, 1, 1280, 48, 0))),
    }, **_LLAMA, seq_length=8192, vocab_size=196608, rotary_base=1e6, kv_channels=128),
    **_release("Muennighoff et al. 2024, arXiv:2409.02060, released weights", {
        "olmoe-1b-7b": (16, 2048, 16, 6_919_161_856, _gqa(None, 1024, **_experts(
            64, 8, 0.01, moe_z_loss_coeff=0.001, moe_router_pre_softmax=True, qk_layernorm=True,
            qk_layernorm_scope="all"))),
    }, **_LLAMA, seq_length=4096, vocab_size=50304, rotary_base=10000.0),
    # GPT-NeoX's block: parallel attention and MLP, a quarter of each head rotated, exact GELU. The vocabulary is of
    # the released weights: the tokenizer's, padded to a multiple of 128 times their tensor-parallel size
    **_release("Biderman et al. 2023, arXiv:2304.01373, table 1, released weights", {
        "pythia-70m": (6, 512, 8, 70_426_624), "pythia-160m": (12, 768, 12, 162_322_944),
        "pythia-1.4b": (24, 2048, 16, 1_414_647_808),
        "pythia-6.9b": (32, 4096, 32, 6_857_302_016, {"vocab_size": 50432}),
    }, seq_length=2048, vocab_size=50304, position_embedding_type="rope", rotary_base=10000.0, rotary_percent=0.25,
        use_parallel_residual=True, normalization="LayerNorm", norm_epsilon=1e-5, gelu_approximate="none",
        untie_embeddings_and_output_weights=True, **_NO_DROPOUT),
    **_release(f"Devlin et al. 2018, arXiv:1810.04805; norms as in {_SHOEYBI}", {
        "bert-base": (12, 768, 12, 110_106_428), "bert-large": (24, 1024, 16, 336_226_108),
    }, family="bert", **_BERT),
    **_release("Devlin et al. 2018, arXiv:1810.04805, released weights", {
        "bert-base-hf": (12, 768, 12, 110_106_428), "bert-large-hf": (24, 1024, 16, 336_226_108),
    }, family="bert", **_ORIGINAL_BERT),
    **_release(f"Shoeybi et al. 2019, {_SHOEYBI}, BERT of 1.3 billion", {
        "bert-1.3b": (24, 2048, 32, 1_280_595_772),
    }, family="bert", **_BERT),
}
# fmt: on
"""The presets, by the name that ``--preset`` takes."""


def preset_named(name: str, family: str | None = None) -> Preset:
    """Return the preset of this name, of the family that the program trains; raises ConfigError."""
    preset = PRESETS.get(name.lower().replace("_", "-"))
    if preset is None:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), PRESETS, n=3, cutoff=0.6)
        choice = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"'{name[:40]}' is not a preset: {choice}`megatron-sp presets` lists them")
    if family is not None and preset.family != family:
        way = f"{PROGRAMS[preset.family]}, or take a preset of {family.upper()} (`megatron-sp presets` lists them)"
        what = f"a {preset.family.upper()} model, and this program trains {family.upper()}"
        raise ConfigError(f"{name.lower()} is {what}: start it with {way}")
    return preset
