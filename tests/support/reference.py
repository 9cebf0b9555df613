"""GPT once more, independent of the package's: plain formulas, one process, unfused, gradients by autograd alone.

It reads like a textbook on purpose: [b, s, h] throughout, attention one head at a time, logits and softmax of the whole
sequence. The tests hold ``megatron_sp`` to it. Only conventions are shared, not maths: names and shapes of the weights,
and which elements dropout keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.models.attention import SITE_ATTENTION, SITE_ATTENTION_OUTPUT, SITE_EMBEDDING, SITE_MLP_OUTPUT
from megatron_sp.models.experts import routing_of
from megatron_sp.ops.attention import head_row_keys
from megatron_sp.ops.dropout import DropoutKeys, keep_mask
from support import plain_experts

Weights = Mapping[str, Tensor]


def activation(name: str, u: Tensor) -> Tensor:
    """gelu_tanh, gelu, relu, squared_relu, or gated ([gate | up]) swiglu, geglu_tanh, geglu."""
    if "glu" in name:
        gate, up = u[..., : u.shape[-1] // 2], u[..., u.shape[-1] // 2 :]
        return (gate / (1 + torch.exp(-gate)) if name == "swiglu" else activation("gelu" + name[5:], gate)) * up
    if name == "relu":
        return torch.where(u > 0, u, 0.0)
    if name == "squared_relu":
        return torch.where(u > 0, u, 0.0) ** 2
    if name == "gelu":
        return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """LayerNorm with a bias, RMSNorm without."""
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    scaled = normed * (1 + weight if zero_centered else weight)
    return scaled if bias is None else scaled + bias


Llama3 = tuple[float, float, float, int]
"""Of Llama 3.1's stretch: factor, low and high frequency factor, original length."""


def frequency(i: int, rotated: int, base: float, stretch: float | Llama3 = 1.0) -> float:
    """Of plane i; ``stretch``: all positions are divided by it, or Llama 3.1's formulas, in wavelengths as published."""
    plain = base ** (-2 * i / rotated)
    if not isinstance(stretch, tuple):
        return plain / stretch
    factor, low, high, length = stretch
    wavelength = 2 * math.pi / plain
    if wavelength < length / high:
        return plain
    if wavelength > length / low:
        return plain / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * plain / factor + smooth * plain


def rotate(x: Tensor, positions: Tensor, rotated: int, base: float, stretch: float | Llama3 = 1.0) -> Tensor:
    """Rotary embedding of one head, x [..., s, d]: channels (i, i + rotated/2) are a plane that turns by position * frequency."""
    half = rotated // 2
    angles = positions.double()[:, None] * torch.tensor([frequency(i, rotated, base, stretch) for i in range(half)], dtype=torch.float64)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, rate: float = 0.0, window: int | None = None) -> Tensor:
    """Causal attention of one head: q, k, v [b, s, d]; ``keep`` [b, s, s] is the dropout mask; ``window`` keys, its own included."""
    s = q.shape[1]
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    distance = torch.arange(s)[:, None] - torch.arange(s)[None, :]
    hidden = (distance < 0) | (distance >= (window or s))
    probs = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return (probs if keep is None else probs * keep / (1 - rate)) @ v


def gpt_loss(
    config: ModelConfig, weights: Weights, tokens: Tensor, labels: Tensor, loss_mask: Tensor, dropout: DropoutKeys | None = None,
    routed: list[tuple[Tensor, list[list[int]]]] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(sum of loss_mask * cross entropy, loss of every token [b, s]); tokens, labels, loss_mask: [b, s].

    ``routed`` receives logits and choices of the tokens [b * s], for each layer with experts.
    """
    c, w = config, weights
    assert c.num_layers and c.vocab_size
    positions = torch.arange(tokens.shape[1])

    def drop(x: Tensor, layer: int, site: int) -> Tensor:
        if dropout is None or c.hidden_dropout == 0:
            return x
        keep = keep_mask(dropout.row_keys(layer, site), x.shape[-1], c.hidden_dropout)  # [s, b, h]
        return x * keep.transpose(0, 1) / (1 - c.hidden_dropout)

    def normed(x: Tensor, name: str) -> Tensor:
        return norm(x, w[f"{name}.weight"], w.get(f"{name}.bias"), c.norm_epsilon, c.apply_layernorm_1p)

    def project(x: Tensor, name: str) -> Tensor:
        y = torch.einsum("bsi,oi->bso", x, w[f"{name}.weight"])
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    x = w["embedding.word_embeddings.weight"][tokens]
    if c.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][positions]
    x = drop(x, -1, SITE_EMBEDDING)
    biased = not c.disable_bias_linear or c.add_mlp_bias
    tanh = c.gelu_approximate == "tanh" if c.gelu_approximate else biased or c.geglu
    kind = "swiglu" if c.swiglu else "squared_relu" if c.squared_relu else "relu" if c.relu else "geglu" if c.geglu else "gelu"
    kind += "_tanh" if tanh and kind in ("gelu", "geglu") else ""
    for layer in range(c.num_layers):
        name = f"decoder.layers.{layer}"
        qkv = project(normed(x, f"{name}.input_layernorm"), f"{name}.self_attention.linear_qkv")
        out = _heads(c, qkv, positions, lambda t, which, name=name: normed(t, f"{name}.self_attention.{which}_layernorm"), layer, dropout)
        y = x + drop(project(out, f"{name}.self_attention.linear_proj"), layer, SITE_ATTENTION_OUTPUT)
        a = normed(x if c.use_parallel_residual else y, f"{name}.pre_mlp_layernorm")
        if layer in c.expert_layers(c.num_layers):
            inside = {key.removeprefix(f"{name}.mlp."): t for key, t in w.items() if key.startswith(f"{name}.mlp.")}
            out, logits, choices = plain_experts.moe(a.flatten(0, 1), inside, routing_of(c), kind, inside.get("router.expert_bias"))
            out = out.view_as(a)
            if routed is not None:
                routed.append((logits, choices))
        else:
            out = project(activation(kind, project(a, f"{name}.mlp.linear_fc1")), f"{name}.mlp.linear_fc2")
        x = y + drop(out, layer, SITE_MLP_OUTPUT)
    x = normed(x, "decoder.final_layernorm")
    table = w.get("output_layer.weight", w["embedding.word_embeddings.weight"])[: c.vocab_size]
    logits = torch.einsum("bsh,vh->bsv", x, table)
    valid = labels.clamp(0, c.vocab_size - 1)  # where the mask is 0 a label may be anything
    token_loss = torch.logsumexp(logits, -1) - logits.gather(-1, valid[..., None])[..., 0]
    return (token_loss * loss_mask).sum(), token_loss.detach()


def _heads(c: ModelConfig, qkv: Tensor, positions: Tensor, qk_norm, layer: int, dropout: DropoutKeys | None) -> Tensor:  # type: ignore[no-untyped-def]
    """[b, s, g*(r+2)*d] -> [b, s, n*d], one head after another."""
    assert c.num_attention_heads
    b, s, _ = qkv.shape
    g, d = c.num_groups, c.head_dim
    r = c.num_attention_heads // g
    rows = qkv.reshape(b, s, g, r + 2, d)
    if wide := c.qk_layernorm and c.qk_layernorm_scope == "all":
        q_all = qk_norm(rows[:, :, :, :r].reshape(b, s, -1), "q").reshape(b, s, g, r, d)
        k_all = qk_norm(rows[:, :, :, r].reshape(b, s, -1), "k").reshape(b, s, g, 1, d)
        rows = torch.cat([q_all, k_all, rows[:, :, :, r + 1 :]], dim=3)
    normed = c.qk_layernorm and not wide
    keys = None
    if dropout is not None and c.attention_dropout > 0:
        keys = head_row_keys(dropout.row_keys(layer, SITE_ATTENTION), g, r).reshape(b, g, r, s)
    outs = []
    llama3 = c.rope_scaling_factor, c.rope_scaling_low_freq_factor, c.rope_scaling_high_freq_factor, c.rope_scaling_original_length
    turn = c.rotary_dim, c.rotary_base, llama3 if c.use_rope_scaling else c.rotary_seq_len_interpolation_factor
    for group in range(g):
        k, v = rows[:, :, group, r], rows[:, :, group, r + 1]
        k = qk_norm(k, "k") if normed else k
        k = rotate(k, positions, *turn) if c.position_embedding_type == "rope" else k
        for query in range(r):
            q = rows[:, :, group, query]
            q = qk_norm(q, "q") if normed else q
            q = rotate(q, positions, *turn) if c.position_embedding_type == "rope" else q
            keep = None if keys is None else keep_mask(keys[:, group, query], s, c.attention_dropout)
            outs.append(head(q, k, v, keep, c.attention_dropout, c.window_size))
    return torch.cat(outs, dim=-1)
