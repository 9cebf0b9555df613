"""Sums, products, norms, losses and pictures: more of ``support/schedule_rule_cases.py``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from support.schedule_rule_cases import each, of

# over some dims

_OVER = (
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, 1),
    lambda c, f, x: f(x, dim=-1),
    lambda c, f, x: f(x, 0, keepdim=True),
    lambda c, f, x: f(x, -2, True),
    lambda c, f, x: f(x, axis=1),
    lambda c, f, x: f(x, axis=-1, keepdims=True),
)
_SEVERAL = (
    lambda c, f, x: f(x, (0, 1)),
    lambda c, f, x: f(x, dim=(-1, 0), keepdim=True),
    lambda c, f, x: f(x, axis=(1, 2)),
    lambda c, f, x: f(x, [1], True),
    lambda c, f, x: f(x, None),
)
each(
    "sum mean amax amin max min argmax argmin all any prod std var logsumexp nansum nanmean count_nonzero median nanmedian aminmax"
    " var_mean std_mean",
    "b s h",
    *_OVER,
    b=2,
    s=2,
    h=2,
)
each("sum mean amax amin all any std var logsumexp nansum nanmean count_nonzero var_mean std_mean", "b s h", *_SEVERAL, b=2, s=2, h=2)
each("sum mean amax nansum nanmean any", "b s h", lambda c, f, x: f(x, ()), lambda c, f, x: f(x, dim=()))
each("sum mean max argmax", "h", lambda c, f, x: f(x), lambda c, f, x: f(x, 0), lambda c, f, x: f(x, -1, True))
each(
    "sum mean",
    "b s h",
    lambda c, f, x: f(x, dtype=torch.float32),
    lambda c, f, x: f(x, 1, False),
    lambda c, f, x: f(x, 2, dtype=torch.float64),
)
each("sum count_nonzero any all", "m: b s", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=0))
each("sum", "i: b s", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, 0, dtype=torch.float64))
each(
    "std var std_mean var_mean",
    "b s h",
    lambda c, f, x: f(x, True),
    lambda c, f, x: f(x, False),
    lambda c, f, x: f(x, 1, False),
    lambda c, f, x: f(x, 1, correction=0),
    lambda c, f, x: f(x, 1, unbiased=True, keepdim=True),
    b=2,
    s=2,
    h=2,
)
each("max min", "s h; s h", lambda c, f, x, y: f(x, y), lambda c, f, x, y: f(x, other=y))
each(
    "norm",
    "b s h",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, 2, 1),
    lambda c, f, x: f(x, dim=-1),
    lambda c, f, x: f(x, p=1, dim=1, keepdim=True),
    lambda c, f, x: f(x, 2, (0, 1)),
    lambda c, f, x: f(x, dim=0),
    lambda c, f, x: f(x, float("inf")),
    lambda c, f, x: f(x, 1),
)
each(
    "linalg_norm linalg_vector_norm",
    "b s h",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, dim=1),
    lambda c, f, x: f(x, 2, -1, True),
    lambda c, f, x: f(x, ord=1, dim=0, keepdim=True),
    lambda c, f, x: f(x, dim=(0, 2)),
)
each(
    "quantile nanquantile",
    "b s h",
    lambda c, f, x: f(x, 0.3),
    lambda c, f, x: f(x, 0.3, 1),
    lambda c, f, x: f(x, q=0.5, dim=-1, keepdim=True),
    lambda c, f, x: f(x, torch.tensor([0.1, 0.6], dtype=x.dtype), 1),
    lambda c, f, x: f(x, torch.tensor([0.1, 0.6], dtype=x.dtype), dim=0, keepdim=True),
    lambda c, f, x: f(x, torch.tensor(0.5, dtype=x.dtype), 1),
)
each(
    "softmax log_softmax softmin",
    "b s h",
    lambda c, f, x: f(x, 1),
    lambda c, f, x: f(x, dim=-1),
    lambda c, f, x: f(x, -3),
    lambda c, f, x: f(x, axis=2),
    lambda c, f, x: f(x, dim=1, dtype=torch.float32),
)
each("softmax log_softmax", "h", lambda c, f, x: f(x, 0))
each(
    "cumsum logcumsumexp cumprod cummax cummin",
    "b s h",
    lambda c, f, x: f(x, 1),
    lambda c, f, x: f(x, dim=-1),
    lambda c, f, x: f(x, -3),
    lambda c, f, x: f(x, axis=2),
)
each("cumsum cumprod", "b s h", lambda c, f, x: f(x, 1, dtype=torch.float64))
each(
    "sort argsort",
    "b s h",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, 1),
    lambda c, f, x: f(x, dim=0, descending=True),
    lambda c, f, x: f(x, 1, True),
    lambda c, f, x: f(x, stable=True, dim=1),
    lambda c, f, x: f(x, stable=True),
)
each(
    "topk",
    "b s h",
    lambda c, f, x: f(x, 2),
    lambda c, f, x: f(x, 1, 1),
    lambda c, f, x: f(x, k=1, dim=0),
    lambda c, f, x: f(x, x.shape[1], 1),
    lambda c, f, x: f(x, 1, -1, False),
    h=2,
    s=2,
)
each(
    "kthvalue",
    "b s h",
    lambda c, f, x: f(x, 1),
    lambda c, f, x: f(x, 1, 1),
    lambda c, f, x: f(x, k=1, dim=0, keepdim=True),
    lambda c, f, x: f(x, x.shape[1], 1),
)
each("mode", "i: b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=0, keepdim=True))
each(
    "diff",
    "b s h",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, 1, 1),
    lambda c, f, x: f(x, dim=0),
    lambda c, f, x: f(x, n=2, dim=1),
    b=3,
    s=3,
    h=3,
)
each("diff", "b s h; b 1 h", lambda c, f, x, y: f(x, dim=1, prepend=y), lambda c, f, x, y: f(x, 1, 1, y, y), b=2, s=2, h=2)
each(
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft",
    "b s h",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, dim=1),
    lambda c, f, x: f(x, None, 0),
    lambda c, f, x: f(x, 4, 1),
    lambda c, f, x: f(x, n=x.shape[-1], dim=1),
    b=2,
    s=2,
    h=2,
)
each(
    "normalize",
    "b s h",
    lambda c, f, x: f(x),
    lambda c, f, x: f(x, 1.0, -1),
    lambda c, f, x: f(x, p=2.0, dim=0),
    lambda c, f, x: f(x, dim=(1, 2)),
)
each(
    "layer_norm",
    "b s h; h; h",
    lambda c, f, x, w, b: f(x, (c.h,), w, b),
    lambda c, f, x, w, b: f(x, x.shape[-1:], weight=w, bias=b),
    lambda c, f, x, w, b: f(x, [c.h], w),
    lambda c, f, x, w, b: f(x, (c.h,), None, b),
    h=2,
)
each(
    "rms_norm",
    "b s h; h",
    lambda c, f, x, w: f(x, (c.h,), w),
    lambda c, f, x, w: f(x, [x.shape[-1]], weight=w, eps=1e-5),
    lambda c, f, x, w: f(x, (c.h,)),
)
each(
    "layer_norm rms_norm",
    "b s h; s h",
    lambda c, f, x, w: f(x, (c.s, c.h), w),
    lambda c, f, x, w: f(x, normalized_shape=(c.s, c.h)),
    s=2,
    h=2,
)


# products

each("linear", "b s k; n k; n", lambda c, f, x, w, b: f(x, w, b), lambda c, f, x, w, b: f(x, w, bias=b))
each("linear", "b s k; n k", lambda c, f, x, w: f(x, w), lambda c, f, x, w: f(x, weight=w, bias=None))
each("linear", "k; n k; n", lambda c, f, x, w, b: f(x, w, b))
each("linear", "b k; k", lambda c, f, x, w: f(x, w))
each("linear", "b k; k k; k", lambda c, f, x, w, b: f(x, w, b))
each("matmul rmatmul", "b s k; k n", lambda c, f, x, y: f(x, y) if "rmatmul" not in str(f) else f(y, x))
each("matmul", "b s k; b k n", lambda c, f, x, y: f(x, y))
each("matmul", "b a s k; b 1 k n", lambda c, f, x, y: f(x, y), first=True)
each("matmul", "b s k; a b k n", lambda c, f, x, y: f(x, y), first=True)
each("matmul", "b a s k; k s", lambda c, f, x, y: f(x, y), first=True)
for _shapes in ("k; k", "b k; k", "k; k n", "b s k; k", "k; b k n"):
    each("matmul", _shapes, lambda c, f, x, y: f(x, y), first=True)
each("mm", "s k; k n", lambda c, f, x, y: f(x, y))
each("mm", "k k; k k", lambda c, f, x, y: f(x, y))
of("mm", "s k; k n", lambda c, x, y: torch.mm(x, y), lambda c, x, y: torch.mm(x, mat2=y))
each("bmm", "b s k; b k n", lambda c, f, x, y: f(x, y))
each(
    "addmm",
    "n; s k; k n",
    lambda c, f, b, x, y: f(b, x, y),
    lambda c, f, b, x, y: f(b, x, y, beta=2, alpha=3),
    lambda c, f, b, x, y: f(b, x, y, alpha=x.shape[-1]),
)
each("addmm", "s n; s k; k n", lambda c, f, b, x, y: f(b, x, y), lambda c, f, b, x, y: f(b, mat1=x, mat2=y))
each("addmm", "s 1; s k; k n", lambda c, f, b, x, y: f(b, x, y))
each("addmm", "1; s k; k n", lambda c, f, b, x, y: f(b, x, y), first=True)
each("baddbmm", "b s n; b s k; b k n", lambda c, f, a, x, y: f(a, x, y), lambda c, f, a, x, y: f(a, x, y, beta=0.5))
each("baddbmm", "b 1 n; b s k; b k n", lambda c, f, a, x, y: f(a, x, y))
each("baddbmm", "s n; b s k; b k n", lambda c, f, a, x, y: f(a, x, y), first=True)
for _equation, _shapes in (
    ("bsk,kn->bsn", "b s k; k n"),
    ("bsk,btk->bst", "b s k; b t k"),
    ("bnsd,bntd->bnst", "b n s d; b n t d"),
    ("...k,kn->...n", "b s k; k n"),
    ("bk,bk->b", "b k; b k"),
    ("bsk, bsk", "b s k; b s k"),
    ("bk,nk", "b k; n k"),
    ("...d,...d->...", "b s d; b s d"),
    ("b...d,d->b...", "b s t d; d"),
    ("bs,b->sb", "b s; b"),
    ("ij,jk", "i j; j k"),
):
    each("einsum", _shapes, lambda c, f, x, y, e=_equation: f(e, x, y), first=True)
each(
    "einsum",
    "b k; k n; n",
    lambda c, f, x, y, z: f("bk,kn,n->bn", x, y, z),
    lambda c, f, x, y, z: f("bk,kn,n->b", x, y, z),
    lambda c, f, x, y, z: f("bk,kn,n->bn", [x, y, z]),
)
each(
    "einsum", "k k", lambda c, f, x: f("kk->k", x), lambda c, f, x: f("kk", x), lambda c, f, x: f("ij->ji", x), lambda c, f, x: f("ij->", x)
)
each("einsum", "b s k; k n", lambda c, f, x, y: f(x, [0, 1, 2], y, [2, 3], [0, 1, 3]), lambda c, f, x, y: f(x, [..., 2], y, [2, 3]))
each("einsum", "b s; b 1", lambda c, f, x, y: f("bs,bs->bs", x, y), first=True)
each(
    "scaled_dot_product_attention",
    "b n s d; b n t d; b n t e",
    lambda c, f, q, k, v: f(q, k, v),
    lambda c, f, q, k, v: f(q, k, value=v, scale=0.5),
    lambda c, f, q, k, v: f(q, k, v, is_causal=True),
    lambda c, f, q, k, v: f(q, k, v, scale=1 / q.shape[1]),
)
for _mask in ("b n s t", "b 1 s t", "1 n s t", "s t", "n s t", "n 1 t", "m: b 1 s t", "m: n s t"):
    each("scaled_dot_product_attention", f"b n s d; b n t d; b n t d; {_mask}", lambda c, f, q, k, v, m: f(q, k, v, m))
each("scaled_dot_product_attention", "n s d; n t d; n t d; s t", lambda c, f, q, k, v, m: f(q, k, v, attn_mask=m))
each(
    "scaled_dot_product_attention",
    "b g*n s d; b n t d; b n t d",
    lambda c, f, q, k, v: f(q, k, v, enable_gqa=True),
    lambda c, f, q, k, v: f(q, k.repeat_interleave(c.g, 1), v.repeat_interleave(c.g, 1)),
)
each(
    "scaled_dot_product_attention",
    "b n*g s d; b n t d; b n t d",
    lambda c, f, q, k, v: f(q, k, v, enable_gqa=True),
    lambda c, f, q, k, v: f(q, k.repeat_interleave(c.g, 1), v.repeat_interleave(c.g, 1)),
    lambda c, f, q, k, v: f(q, k[:, :, None].expand(-1, -1, c.g, -1, -1).reshape(c.b, -1, c.t, c.d), v.repeat_interleave(c.g, 1)),
)
each("scaled_dot_product_attention", "b 1 s d; b n t d; b n t d", lambda c, f, q, k, v: f(q, k, v))
each(
    "embedding",
    "i<v: b s; v h",
    lambda c, f, i, w: f(i, w) if f is F.embedding else f(w, i),
    lambda c, f, i, w: f(i, weight=w) if f is F.embedding else f(weight=w, indices=i),
    lambda c, f, i, w: f(i, w, 0) if f is F.embedding else f(w, i, 0),
    lambda c, f, i, w: f(i, w, None, 0.5) if f is F.embedding else f(w, i, -1, False),
    lambda c, f, i, w: f(i, w, scale_grad_by_freq=True) if f is F.embedding else f(w, i, scale_grad_by_freq=True),
)
each("cosine_similarity", "b s h; b s h", lambda c, f, x, y: f(x, y), lambda c, f, x, y: f(x, y, -1), lambda c, f, x, y: f(x, y, dim=0))
each("cosine_similarity", "s h; h", lambda c, f, x, y: f(x, y, -1), lambda c, f, x, y: f(x, y, 0), lambda c, f, x, y: f(x, y, dim=1))


# losses

_REDUCED = (lambda c, f, x, y: f(x, y), lambda c, f, x, y: f(x, y, reduction="sum"), lambda c, f, x, y: f(x, y, reduction="none"))
each("mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits", "+: b h; +: b h", *_REDUCED)
each(
    "mse_loss l1_loss smooth_l1_loss huber_loss",
    "b h; h",
    lambda c, f, x, y: f(x, y.expand_as(x), reduction="sum"),
    lambda c, f, x, y: f(x, y.expand_as(x)),
)
each(
    "kl_div",
    "+: b h; +: b h",
    lambda c, f, x, y: f(x, y, reduction="batchmean"),
    lambda c, f, x, y: f(x, y, log_target=True, reduction="sum"),
    lambda c, f, x, y: f(x, y, reduction="batchmean", log_target=True),
)
each("kl_div mse_loss", "+: b s h; +: b s h", lambda c, f, x, y: f(x, y, None, None, "sum"), lambda c, f, x, y: f(x, y, reduction="none"))
each(
    "mse_loss huber_loss",
    "b h; b h; +: b h",
    lambda c, f, x, y, w: f(x, y, reduction="sum", weight=w),
    lambda c, f, x, y, w: f(x, y, weight=w),
)
each("huber_loss", "b h; b h", lambda c, f, x, y: f(x, y, "sum", 0.5), lambda c, f, x, y: f(x, y, delta=2.0))
each(
    "smooth_l1_loss", "b h; b h", lambda c, f, x, y: f(x, y, beta=0.5, reduction="sum"), lambda c, f, x, y: f(x, y, None, None, "none", 2.0)
)
each(
    "binary_cross_entropy binary_cross_entropy_with_logits",
    "+: b h; +: b h; +: h",
    lambda c, f, x, y, w: f(x, y, w),
    lambda c, f, x, y, w: f(x, y, weight=w, reduction="sum"),
)
each(
    "binary_cross_entropy_with_logits",
    "+: b h; +: b h; +: h",
    lambda c, f, x, y, w: f(x, y, pos_weight=w, reduction="none"),
    lambda c, f, x, y, w: f(x, y, pos_weight=w, reduction="sum"),
)
each(
    "cross_entropy nll_loss",
    "b v; i<v: b",
    *_REDUCED,
    lambda c, f, x, y: f(x, y, None, None, -100, None, "sum"),
    lambda c, f, x, y: f(x, y, ignore_index=0, reduction="sum"),
    lambda c, f, x, y: f(x, y, reduction="none", ignore_index=0),
)
each(
    "cross_entropy",
    "b v; i<v: b",
    lambda c, f, x, y: f(x, y, label_smoothing=0.1, reduction="sum"),
    lambda c, f, x, y: f(x, y, reduction="none", label_smoothing=1 / (1 + x.shape[0])),
)
each("cross_entropy nll_loss", "b v s; i<v: b s", *_REDUCED)
each("cross_entropy nll_loss", "v; i<v: ", *_REDUCED)
each("cross_entropy", "b v; +: b v", *_REDUCED)
each("cross_entropy", "b v s; +: b v s", *_REDUCED)
each(
    "cross_entropy nll_loss",
    "b v; i<v: b; +: v",
    lambda c, f, x, y, w: f(x, y, w),
    lambda c, f, x, y, w: f(x, y, weight=w, reduction="sum"),
    lambda c, f, x, y, w: f(x, y, weight=w, reduction="none"),
)
each(
    "ctc_loss",
    "t b v; i<u: b u",
    lambda c, f, x, y: f(x.log_softmax(-1), y, torch.full((y.shape[0],), x.shape[0]), torch.full((y.shape[0],), y.shape[1])),
    t=6,
    v=7,
    u=2,
)


# [b, c, ...]

for _n, _space in ((1, "u"), (2, "u v"), (3, "u v w")):
    _conv, _back = f"conv{_n}d", f"conv_transpose{_n}d"
    _kernel = " ".join(["t"] * _n)
    _least = {letter: 3 for letter in _space.split()} | {"t": 1}
    each(
        _conv,
        f"b c {_space}; o c {_kernel}; o",
        lambda c, f, x, w, b: f(x, w, b, padding=c.t - 1),
        lambda c, f, x, w, b: f(x, w, bias=b, stride=2, padding=c.t),
        first=_n > 1,
        **_least,
    )
    each(_conv, f"b c {_space}; o c {_kernel}", lambda c, f, x, w: f(x, w, padding=c.t - 1), first=True, **_least)
    each(
        _back,
        f"b c {_space}; c o {_kernel}; o",
        lambda c, f, x, w, b: f(x, w, b),
        lambda c, f, x, w, b: f(x, w, bias=b, stride=2),
        first=_n > 1,
        **_least,
    )
    each(
        _conv,
        f"b g*m {_space}; g*o m {_kernel}; g*o",
        lambda c, f, x, w, b: f(x, w, b, 1, c.t - 1, 1, c.g),
        lambda c, f, x, w, b: f(x, w, bias=b, padding=c.t - 1, groups=c.g),
        first=True,
        **_least,
    )
    each(
        _conv,
        f"b g {_space}; g 1 {_kernel}",
        lambda c, f, x, w: f(x, w, padding=c.t - 1, groups=c.g),
        lambda c, f, x, w: f(x, w, padding=c.t - 1, groups=x.shape[1]),
        first=True,
        **_least,
    )
    each(
        _back,
        f"b g*m {_space}; g*m o {_kernel}",
        lambda c, f, x, w: f(x, w, None, 1, 0, 0, c.g),
        lambda c, f, x, w: f(x, w, groups=c.g),
        first=True,
        **_least,
    )
    each(_back, f"b g*m {_space}; g*m 1 {_kernel}; g", lambda c, f, x, w, b: f(x, w, b, groups=c.g), first=True, **_least)
each("conv1d", "c u; o c t", lambda c, f, x, w: f(x, w, padding=c.t - 1), first=True)
each(
    "conv1d",
    "b c u; o c t; o",
    lambda c, f, x, w, b: f(x, w, b, padding="same"),
    lambda c, f, x, w, b: f(x, w, b, padding=c.t, dilation=x.shape[2]),
    first=True,
)
each(
    "batch_norm",
    "b c u; c; +: c; c; c",
    lambda c, f, x, m, v, w, b: f(x, m, v, w, b, False) if f is F.batch_norm else f(x, w, b, m, v, False, 0.1, 1e-5, False),
    lambda c, f, x, m, v, w, b: (
        f(x, m.detach(), v.detach(), w, b, True, 0.1) if f is F.batch_norm else f(x, w, b, m.detach(), v.detach(), True, 0.1, 1e-5, False)
    ),
    b=2,
)
each(
    "batch_norm",
    "b c; c; +: c",
    lambda c, f, x, m, v: f(x, m, v) if f is F.batch_norm else f(x, None, None, m, v, False, 0.1, 1e-5, False),
    lambda c, f, x, m, v: f(x, None, None, training=True) if f is F.batch_norm else f(x, None, None, None, None, True, 0.1, 1e-5, False),
    b=2,
)
each(
    "instance_norm",
    "b c u; c; c",
    lambda c, f, x, w, b: f(x, weight=w, bias=b) if f is F.instance_norm else f(x, w, b, None, None, True, 0.1, 1e-5, False),
    lambda c, f, x, w, b: f(x) if f is F.instance_norm else f(x, None, None, None, None, True, 0.1, 1e-5, False),
    u=2,
)
each(
    "instance_norm",
    "b c u; c; +: c",
    lambda c, f, x, m, v: f(x, m, v, use_input_stats=False) if f is F.instance_norm else f(x, None, None, m, v, False, 0.1, 1e-5, False),
    u=2,
)
each(
    "group_norm",
    "b g*m u; g*m; g*m",
    lambda c, f, x, w, b: f(x, c.g, w, b),
    lambda c, f, x, w, b: f(x, num_groups=c.g, weight=w) if f is F.group_norm else f(x, c.g, w),
    lambda c, f, x, w, b: f(x, c.g),
    u=2,
)
for _n, _space in ((1, "b c u"), (2, "b c u v"), (3, "b c u v w"), (1, "c u"), (2, "c u v")):
    _wide = {letter: 3 for letter in "uvw"}
    each(
        f"avg_pool{_n}d max_pool{_n}d",
        _space,
        lambda c, f, x: f(x, 2),
        lambda c, f, x: f(x, kernel_size=3, stride=1, padding=1),
        lambda c, f, x: f(x, 1),
        first=len(_space) == 3,
        **{k: v for k, v in _wide.items() if k in _space},
    )
    each(f"adaptive_avg_pool{_n}d", _space, lambda c, f, x: f(x, 2), lambda c, f, x: f(x, 1), first=len(_space) == 3)
    if _n < 3:
        each(f"adaptive_max_pool{_n}d", _space, lambda c, f, x: f(x, 2), lambda c, f, x: f(x, output_size=1), first=len(_space) == 3)
each(
    "max_pool1d max_pool2d",
    "b c u v",
    lambda c, f, x: f(x.flatten(2), 2, return_indices=True) if "1d" in f.__name__ else f(x, 2, return_indices=True),
    first=True,
    u=3,
    v=3,
)
each(
    "interpolate",
    "b c u",
    lambda c, f, x: f(x, 4),
    lambda c, f, x: f(x, scale_factor=2, mode="linear"),
    lambda c, f, x: f(x, size=3, mode="nearest"),
    lambda c, f, x: f(x, x.shape[1]),
)
each(
    "interpolate",
    "b c u v",
    lambda c, f, x: f(x, (4, 3), mode="bilinear"),
    lambda c, f, x: f(x, scale_factor=2, mode="bicubic"),
    lambda c, f, x: f(x, (2, 2), mode="area"),
)
