"""The same weights give the same loss and the same gradients in Hugging Face's classes: fp64, every parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from support.convert_models import Tensors
from support.errors import FP64, assert_law
from torch import Tensor, nn

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.convert.copies import Correspondence, Gathered
from megatron_sp.convert.families import FAMILIES
from megatron_sp.convert.formats.hugging_face import renamed
from megatron_sp.convert.model import parameter_shapes
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.gpt import GPTModel
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

B, S, V, H, F, LAYERS, HEADS, GROUPS = 3, 11, 37, 24, 20, 2, 4, 2
D = H // HEADS
SIZES = {
    "num_layers": LAYERS, "hidden_size": H, "num_attention_heads": HEADS, "ffn_hidden_size": F, "seq_length": S, "vocab_size": V,
    "max_position_embeddings": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.2,
    "make_vocab_size_divisible_by": 8,
}  # fmt: skip
LENGTHS = torch.tensor([S, 7, 3])


def by_our_names(theirs: Any, shape: ModelConfig, of: str, num_classes: int = 0) -> dict[str, Tensor]:
    """Their weights ("data") or gradients ("grad"), as the converter maps them."""
    family, tensors = FAMILIES[theirs.config.model_type], {name: getattr(p, of) for name, p in theirs.named_parameters()}
    correspondence = Correspondence.of(parameter_shapes(shape, num_classes), family.copies(shape, num_classes))
    store = Gathered(correspondence, renamed(Tensors({n: t for n, t in tensors.items() if t is not None}), family)[0])
    return {name: store.read(name) for name in correspondence.ours}


def give_noise(model: nn.Module) -> None:
    """Biases and norms that are not at zero and one, where mistakes would not show."""
    g = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.ndim == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=g, dtype=p.dtype)


def copy_into(model: LanguageModel, weights: dict[str, Tensor]) -> None:
    """Ours from theirs, by our names; the rows of padding stay."""
    ours = dict(model.named_parameters())
    assert ours.keys() == weights.keys()
    for name, p in ours.items():
        assert p.shape[1:] == weights[name].shape[1:], name
        p.data[: weights[name].shape[0]] = weights[name].detach()


def assert_same(model: LanguageModel, loss: Tensor, theirs: dict[str, Tensor], their_loss: Tensor) -> None:
    grads = {n: p.grad[: theirs[n].shape[0]] for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == theirs.keys()
    assert_law({"loss": loss.detach(), **grads}, {"loss": their_loss.detach(), **theirs}, FP64)


def their_bert(task: str, post: bool, **more: Any) -> Any:
    """Their class for a task, in fp64, with weights that hide nothing."""
    kind = "Bert" if post else "MegatronBert"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=V, hidden_size=H, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=F, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-12, attn_implementation="eager",
        initializer_range=0.2, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}{task}")(config).double()
    give_noise(model)
    return model


ACTIVATIONS = {
    "gelu": {"gelu_approximate": "none"}, "gelu_new": {"gelu_approximate": "tanh"}, "relu": {"relu": True, "bert_head_activation": "relu"},
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("post", [True, False], ids=["BertForPreTraining", "MegatronBertForPreTraining"])
def test_bert(post: bool, activation: str) -> None:
    torch.manual_seed(0)
    theirs = their_bert("ForPreTraining", post, hidden_act=activation)
    more: dict[str, Any] = ACTIVATIONS[activation]
    shape = ModelConfig(**SIZES, model_family="bert", norm_placement="post" if post else "pre", norm_epsilon=1e-12, **more)
    ours = BertModel(shape, KernelConfig(), seed=1, dtype=torch.float64)
    copy_into(ours, by_our_names(theirs, shape, "data"))
    g = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(1, V, (B, S), generator=g) for _ in range(2))  # theirs gives the row of token 0, padding, no gradient
    types, order = torch.randint(0, 2, (B, S), generator=g), torch.tensor([0, 1, 1])
    real = torch.arange(S) < LENGTHS[:, None]
    masked = (torch.rand(B, S, generator=g) < 0.4) & real
    their_loss = theirs(
        tokens, attention_mask=real.long(), token_type_ids=types, labels=torch.where(masked, labels, -100), next_sentence_label=order
    ).loss
    their_loss.backward()
    made = ours(tokens, types, labels, masked.double(), order, ForwardContext(AttentionMask(causal=False, key_lengths=LENGTHS)))
    assert made.order is not None
    loss = made.masked / masked.sum() + made.order / B
    loss.backward()
    assert_same(ours, loss, by_our_names(theirs, shape, "grad"), their_loss)


@pytest.mark.parametrize("post", [True, False], ids=["BertForSequenceClassification", "MegatronBertForSequenceClassification"])
def test_classifier(post: bool) -> None:
    torch.manual_seed(0)
    theirs = their_bert("ForSequenceClassification", post, num_labels=4)
    shape = ModelConfig(**SIZES, model_family="bert", norm_placement="post" if post else "pre", norm_epsilon=1e-12, gelu_approximate="none")  # type: ignore[arg-type]
    ours = BertClassifier(shape, KernelConfig(), num_classes=4, seed=1, dtype=torch.float64)
    copy_into(ours, by_our_names(theirs, shape, "data", 4))
    g = torch.Generator().manual_seed(1)
    tokens, types = torch.randint(1, V, (B, S), generator=g), torch.randint(0, 2, (B, S), generator=g)
    label, real = torch.tensor([3, 0, 2]), torch.arange(S) < LENGTHS[:, None]
    answer = theirs(tokens, attention_mask=real.long(), token_type_ids=types, labels=label)
    answer.loss.backward()
    context = ForwardContext(AttentionMask(causal=False, key_lengths=LENGTHS))
    made = ours(tokens, types, label, torch.ones(B, dtype=torch.float64), context)
    loss = made.sum / B
    loss.backward()
    assert_same(ours, loss, by_our_names(theirs, shape, "grad", 4), answer.loss)
    assert made.logits is not None and int(made.hits) == int((answer.logits.argmax(1) == label).sum())
    assert_law({"logits": made.logits}, {"logits": answer.logits.detach()}, FP64)


def widen(model: Any) -> None:
    """Their RMSNorm and rotary tables compute in fp32 whatever the weights are: here in fp64, the frequencies by their own code."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    def tables(frequencies: Tensor, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = partial(tables, frequencies_of(module))


def frequencies_of(rotary: Any) -> Tensor:
    """Radians per position, fp64."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    make = rotary.compute_default_rope_parameters if rotary.rope_type == "default" else ROPE_INIT_FUNCTIONS[rotary.rope_type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        found, attention_factor = make(rotary.config)
    assert attention_factor == 1.0 and found.dtype == torch.float64
    return cast("Tensor", found)


LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "num_query_groups": GROUPS,
    "group_query_attention": True, "untie_embeddings_and_output_weights": True, "rotary_base": 5000.0,
}  # fmt: skip
NEOX = {
    "position_embedding_type": "rope", "rotary_percent": 0.25, "rotary_base": 5000.0, "gelu_approximate": "none", "kv_channels": 8,
    "num_attention_heads": 3, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
TIED = {"untie_embeddings_and_output_weights": False}


def their_llama(kind: str = "Llama", rope: dict[str, Any] | None = None, **more: Any) -> Any:
    config = {
        "vocab_size": V, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
        "intermediate_size": F, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "attn_implementation": "sdpa",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, **(rope or {})}, "initializer_range": 0.2,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))


def their_gpt2(**more: Any) -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=V, n_embd=H, n_layer=LAYERS, n_head=HEADS, n_inner=F, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, attn_implementation="eager", initializer_range=0.2, **more,
    ))  # fmt: skip


def their_neox(**more: Any) -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=V, hidden_size=H, num_hidden_layers=LAYERS, num_attention_heads=3, intermediate_size=F, max_position_embeddings=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}, attn_implementation="sdpa",
        initializer_range=0.2, **more,
    ))  # fmt: skip


def scores_by_layer(tensors: dict[str, Tensor], power: int) -> dict[str, Tensor]:
    """Scores that are not divided by sqrt(d), but by the layer's number: as factors of the queries.

    ``power``: 1 for weights; -1 for gradients, which are with respect to the scaled ones.
    """
    for i in range(LAYERS):
        for kind in ("weight", "bias"):
            rows = tensors[f"decoder.layers.{i}.self_attention.linear_qkv.{kind}"].view(HEADS, 3, D, -1)
            rows[:, 0] *= (D**0.5 / (i + 1)) ** power
    return tensors


class Case(NamedTuple):
    """One of their classes with a configuration, ours that equals it, and what differs in the weights."""

    make: Callable[[], Any]
    ours: dict[str, Any]
    fold: Callable[[dict[str, Tensor], int], dict[str, Tensor]] = lambda tensors, power: tensors


CASES = {
    "gpt2": Case(their_gpt2, {}),
    "gpt2, relu, untied": Case(
        partial(their_gpt2, activation_function="relu", tie_word_embeddings=False),
        {"relu": True, "untie_embeddings_and_output_weights": True},
    ),
    "gpt2, gelu, scores by layer": Case(
        partial(their_gpt2, activation_function="gelu", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True),
        {"gelu_approximate": "none"}, scores_by_layer,
    ),
    "llama": Case(their_llama, LLAMA),
    "llama, tied, llama3 frequencies": Case(
        partial(their_llama, rope={"rope_type": "llama3", **LLAMA3}, tie_word_embeddings=True),
        LLAMA | TIED | {"use_rope_scaling": True, "rope_scaling_original_length": 64},
    ),
    "llama, biases in attention, wide heads": Case(
        partial(their_llama, attention_bias=True, head_dim=10), LLAMA | {"kv_channels": 10, "add_qkv_bias": True, "add_proj_bias": True}
    ),
    "llama, biases in the MLP, gated GELU, linear frequencies": Case(
        partial(their_llama, mlp_bias=True, hidden_act="gelu_pytorch_tanh", rope={"rope_type": "linear", "factor": 4.0}),
        LLAMA | {"add_mlp_bias": True, "swiglu": False, "geglu": True, "rotary_seq_len_interpolation_factor": 4.0},
    ),
    "mistral, window": Case(partial(their_llama, "Mistral", sliding_window=4), LLAMA | {"window_size": 4}),
    "mistral, no window, narrow heads": Case(partial(their_llama, "Mistral", sliding_window=None, head_dim=2), LLAMA | {"kv_channels": 2}),
    "neox": Case(their_neox, NEOX | {"use_parallel_residual": True}),
    "neox, sequential, tied": Case(partial(their_neox, use_parallel_residual=False, tie_word_embeddings=True), NEOX | TIED),
    "neox, no biases in attention": Case(
        partial(their_neox, attention_bias=False),
        NEOX | {"use_parallel_residual": True, "disable_bias_linear": True, "add_mlp_bias": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gpt(case: str) -> None:
    torch.manual_seed(0)
    make, fields, fold = CASES[case]
    theirs = make()
    widen(theirs)
    theirs = theirs.double()
    give_noise(theirs)
    shape = ModelConfig(**SIZES | fields)
    ours = GPTModel(shape, KernelConfig(), seed=1, dtype=torch.float64)
    copy_into(ours, fold(by_our_names(theirs, shape, "data"), 1))
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(1))
    logits = theirs(tokens[:, :-1]).logits
    their_loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    their_loss.backward()
    total, _ = ours(tokens[:, :-1], tokens[:, 1:], torch.ones(B, S, dtype=torch.float64), ForwardContext(AttentionMask()))
    loss = total / (B * S)
    loss.backward()
    assert_same(ours, loss, fold(by_our_names(theirs, shape, "grad"), -1), their_loss)
