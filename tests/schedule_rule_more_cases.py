"""Sums, products, norms, losses, indices and pictures: more of ``schedule_rule_cases.py``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from schedule_rule_cases import each, of
from torch import Tensor

# over some dims

_OVER = (
    lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=-1), lambda c, f, x: f(x, 0, keepdim=True), lambda c, f, x: f(x, -2, True),
    lambda c, f, x: f(x, axis=1), lambda c, f, x: f(x, axis=-1, keepdims=True),
)  # fmt: skip
_SEVERAL = (
    lambda c, f, x: f(x, (0, 1)), lambda c, f, x: f(x, dim=(-1, 0), keepdim=True), lambda c, f, x: f(x, axis=(1, 2)), lambda c, f, x: f(x, [1], True),
    lambda c, f, x: f(x, None),
)  # fmt: skip
each("sum mean amax amin max min argmax argmin all any prod std var logsumexp nansum nanmean count_nonzero median nanmedian aminmax var_mean std_mean", "b s h", *_OVER, b=2, s=2, h=2)
each("sum mean amax amin all any std var logsumexp nansum nanmean count_nonzero var_mean std_mean", "b s h", *_SEVERAL, b=2, s=2, h=2)
each("sum mean amax nansum nanmean any", "b s h", lambda c, f, x: f(x, ()), lambda c, f, x: f(x, dim=()))
each("sum mean max argmax", "h", lambda c, f, x: f(x), lambda c, f, x: f(x, 0), lambda c, f, x: f(x, -1, True))
each("sum mean", "b s h", lambda c, f, x: f(x, dtype=torch.float32), lambda c, f, x: f(x, 1, False), lambda c, f, x: f(x, 2, dtype=torch.float64))
each("sum count_nonzero any all", "m: b s", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=0))
each("sum", "i: b s", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, 0, dtype=torch.float64))
each("std var std_mean var_mean", "b s h", lambda c, f, x: f(x, True), lambda c, f, x: f(x, False), lambda c, f, x: f(x, 1, False), lambda c, f, x: f(x, 1, correction=0), lambda c, f, x: f(x, 1, unbiased=True, keepdim=True), b=2, s=2, h=2)
each("max min", "s h; s h", lambda c, f, x, y: f(x, y), lambda c, f, x, y: f(x, other=y))
each(
    "norm", "b s h",
    lambda c, f, x: f(x), lambda c, f, x: f(x, 2, 1), lambda c, f, x: f(x, dim=-1), lambda c, f, x: f(x, p=1, dim=1, keepdim=True), lambda c, f, x: f(x, 2, (0, 1)), lambda c, f, x: f(x, dim=0),
    lambda c, f, x: f(x, "fro"), lambda c, f, x: f(x, 1),
)  # fmt: skip
each("linalg_norm linalg_vector_norm", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, dim=1), lambda c, f, x: f(x, 2, -1, True), lambda c, f, x: f(x, ord=1, dim=0, keepdim=True), lambda c, f, x: f(x, dim=(0, 2)))
each("quantile nanquantile", "b s h", lambda c, f, x: f(x, 0.3), lambda c, f, x: f(x, 0.3, 1), lambda c, f, x: f(x, q=0.5, dim=-1, keepdim=True), lambda c, f, x: f(x, torch.tensor([0.1, 0.6], dtype=x.dtype), 1), lambda c, f, x: f(x, torch.tensor([0.1, 0.6], dtype=x.dtype), dim=0, keepdim=True), lambda c, f, x: f(x, torch.tensor(0.5, dtype=x.dtype), 1))
each("softmax log_softmax softmin", "b s h", lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=-1), lambda c, f, x: f(x, -3), lambda c, f, x: f(x, axis=2), lambda c, f, x: f(x, dim=1, dtype=torch.float32))
each("softmax log_softmax", "h", lambda c, f, x: f(x, 0))
each("cumsum logcumsumexp cumprod cummax cummin", "b s h", lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=-1), lambda c, f, x: f(x, -3), lambda c, f, x: f(x, axis=2))
each("cumsum cumprod", "b s h", lambda c, f, x: f(x, 1, dtype=torch.float64))
each("sort argsort", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=0, descending=True), lambda c, f, x: f(x, 1, True), lambda c, f, x: f(x, stable=True, dim=1), lambda c, f, x: f(x, stable=True))
each("topk", "b s h", lambda c, f, x: f(x, 2), lambda c, f, x: f(x, 1, 1), lambda c, f, x: f(x, k=1, dim=0), lambda c, f, x: f(x, x.shape[1], 1), lambda c, f, x: f(x, 1, -1, False), h=2, s=2)
each("kthvalue", "b s h", lambda c, f, x: f(x, 1), lambda c, f, x: f(x, 1, 1), lambda c, f, x: f(x, k=1, dim=0, keepdim=True), lambda c, f, x: f(x, x.shape[1], 1))
each("mode", "i: b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1), lambda c, f, x: f(x, dim=0, keepdim=True))
each("diff", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1, 1), lambda c, f, x: f(x, dim=0), lambda c, f, x: f(x, n=2, dim=1), b=3, s=3, h=3)
each("diff", "b s h; b 1 h", lambda c, f, x, y: f(x, dim=1, prepend=y), lambda c, f, x, y: f(x, 1, 1, y, y), b=2, s=2, h=2)
each("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, dim=1), lambda c, f, x: f(x, None, 0), lambda c, f, x: f(x, 4, 1), lambda c, f, x: f(x, n=x.shape[-1], dim=1), b=2, s=2, h=2)
each("normalize", "b s h", lambda c, f, x: f(x), lambda c, f, x: f(x, 1.0, -1), lambda c, f, x: f(x, p=2.0, dim=0), lambda c, f, x: f(x, dim=(1, 2)))
each("layer_norm", "b s h; h; h", lambda c, f, x, w, b: f(x, (c.h,), w, b), lambda c, f, x, w, b: f(x, x.shape[-1:], weight=w, bias=b), lambda c, f, x, w, b: f(x, [c.h], w), lambda c, f, x, w, b: f(x, (c.h,), None, b), h=2)
each("rms_norm", "b s h; h", lambda c, f, x, w: f(x, (c.h,), w), lambda c, f, x, w: f(x, [x.shape[-1]], weight=w, eps=1e-5), lambda c, f, x, w: f(x, (c.h,)))
each("layer_norm rms_norm", "b s h; s h", lambda c, f, x, w: f(x, (c.s, c.h), w), lambda c, f, x, w: f(x, normalized_shape=(c.s, c.h)), s=2, h=2)


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
each("addmm", "n; s k; k n", lambda c, f, b, x, y: f(b, x, y), lambda c, f, b, x, y: f(b, x, y, beta=2, alpha=3), lambda c, f, b, x, y: f(b, x, y, alpha=x.shape[-1]))
each("addmm", "s n; s k; k n", lambda c, f, b, x, y: f(b, x, y), lambda c, f, b, x, y: f(b, mat1=x, mat2=y))
each("addmm", "s 1; s k; k n", lambda c, f, b, x, y: f(b, x, y))
each("addmm", "1; s k; k n", lambda c, f, b, x, y: f(b, x, y), first=True)
each("baddbmm", "b s n; b s k; b k n", lambda c, f, a, x, y: f(a, x, y), lambda c, f, a, x, y: f(a, x, y, beta=0.5))
each("baddbmm", "b 1 n; b s k; b k n", lambda c, f, a, x, y: f(a, x, y))
each("baddbmm", "s n; b s k; b k n", lambda c, f, a, x, y: f(a, x, y), first=True)
for _equation, _shapes in (
    ("bsk,kn->bsn", "b s k; k n"), ("bsk,btk->bst", "b s k; b t k"), ("bnsd,bntd->bnst", "b n s d; b n t d"), ("...k,kn->...n", "b s k; k n"), ("bk,bk->b", "b k; b k"),
    ("bsk, bsk", "b s k; b s k"), ("bk,nk", "b k; n k"), ("...d,...d->...", "b s d; b s d"), ("b...d,d->b...", "b s t d; d"), ("bs,b->sb", "b s; b"), ("ij,jk", "i j; j k"),
):  # fmt: skip
    each("einsum", _shapes, lambda c, f, x, y, e=_equation: f(e, x, y), first=True)
each("einsum", "b k; k n; n", lambda c, f, x, y, z: f("bk,kn,n->bn", x, y, z), lambda c, f, x, y, z: f("bk,kn,n->b", x, y, z), lambda c, f, x, y, z: f("bk,kn,n->bn", [x, y, z]))
each("einsum", "k k", lambda c, f, x: f("kk->k", x), lambda c, f, x: f("kk", x), lambda c, f, x: f("ij->ji", x), lambda c, f, x: f("ij->", x))
each("einsum", "b s; b 1", lambda c, f, x, y: f("bs,bs->bs", x, y), first=True)
each(
    "scaled_dot_product_attention", "b n s d; b n t d; b n t e",
    lambda c, f, q, k, v: f(q, k, v), lambda c, f, q, k, v: f(q, k, value=v, scale=0.5), lambda c, f, q, k, v: f(q, k, v, is_causal=True), lambda c, f, q, k, v: f(q, k, v, scale=1 / q.shape[1]),
)  # fmt: skip
for _mask in ("b n s t", "b 1 s t", "1 n s t", "s t", "n s t", "n 1 t", "m: b 1 s t", "m: n s t"):
    each("scaled_dot_product_attention", f"b n s d; b n t d; b n t d; {_mask}", lambda c, f, q, k, v, m: f(q, k, v, m))
each("scaled_dot_product_attention", "n s d; n t d; n t d; s t", lambda c, f, q, k, v, m: f(q, k, v, attn_mask=m))
each("scaled_dot_product_attention", "b g*n s d; b n t d; b n t d", lambda c, f, q, k, v: f(q, k, v, enable_gqa=True), lambda c, f, q, k, v: f(q, k.repeat_interleave(c.g, 1), v.repeat_interleave(c.g, 1)))
each("scaled_dot_product_attention", "b n*g s d; b n t d; b n t d", lambda c, f, q, k, v: f(q, k, v, enable_gqa=True), lambda c, f, q, k, v: f(q, k.repeat_interleave(c.g, 1), v.repeat_interleave(c.g, 1)), lambda c, f, q, k, v: f(q, k[:, :, None].expand(-1, -1, c.g, -1, -1).reshape(c.b, -1, c.t, c.d), v.repeat_interleave(c.g, 1)))
each("scaled_dot_product_attention", "b 1 s d; b n t d; b n t d", lambda c, f, q, k, v: f(q, k, v))
each("embedding", "i<v: b s; v h", lambda c, f, i, w: f(i, w) if f is F.embedding else f(w, i), lambda c, f, i, w: f(i, weight=w) if f is F.embedding else f(weight=w, indices=i), lambda c, f, i, w: f(i, w, 0) if f is F.embedding else f(w, i, 0))
each("cosine_similarity", "b s h; b s h", lambda c, f, x, y: f(x, y), lambda c, f, x, y: f(x, y, -1), lambda c, f, x, y: f(x, y, dim=0))
each("cosine_similarity", "s h; h", lambda c, f, x, y: f(x, y, -1), lambda c, f, x, y: f(x, y, 0), lambda c, f, x, y: f(x, y, dim=1))


# losses

_REDUCED = (lambda c, f, x, y: f(x, y), lambda c, f, x, y: f(x, y, reduction="sum"), lambda c, f, x, y: f(x, y, reduction="none"))
each("mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits", "+: b h; +: b h", *_REDUCED)
each("mse_loss l1_loss smooth_l1_loss huber_loss", "b h; h", lambda c, f, x, y: f(x, y.expand_as(x), reduction="sum"), lambda c, f, x, y: f(x, y.expand_as(x)))
each("kl_div", "+: b h; +: b h", lambda c, f, x, y: f(x, y, reduction="batchmean"), lambda c, f, x, y: f(x, y, log_target=True, reduction="sum"), lambda c, f, x, y: f(x, y, reduction="batchmean", log_target=True))
each("kl_div mse_loss", "+: b s h; +: b s h", lambda c, f, x, y: f(x, y, None, None, "sum"), lambda c, f, x, y: f(x, y, reduction="none"))
each("mse_loss huber_loss", "b h; b h; +: b h", lambda c, f, x, y, w: f(x, y, reduction="sum", weight=w), lambda c, f, x, y, w: f(x, y, weight=w))
each("huber_loss", "b h; b h", lambda c, f, x, y: f(x, y, "sum", 0.5), lambda c, f, x, y: f(x, y, delta=2.0))
each("smooth_l1_loss", "b h; b h", lambda c, f, x, y: f(x, y, beta=0.5, reduction="sum"), lambda c, f, x, y: f(x, y, None, None, "none", 2.0))
each("binary_cross_entropy binary_cross_entropy_with_logits", "+: b h; +: b h; +: h", lambda c, f, x, y, w: f(x, y, w), lambda c, f, x, y, w: f(x, y, weight=w, reduction="sum"))
each("binary_cross_entropy_with_logits", "+: b h; +: b h; +: h", lambda c, f, x, y, w: f(x, y, pos_weight=w, reduction="none"), lambda c, f, x, y, w: f(x, y, pos_weight=w, reduction="sum"))
each("cross_entropy nll_loss", "b v; i<v: b", *_REDUCED, lambda c, f, x, y: f(x, y, None, None, -100, None, "sum"), lambda c, f, x, y: f(x, y, ignore_index=0, reduction="sum"), lambda c, f, x, y: f(x, y, reduction="none", ignore_index=0))
each("cross_entropy", "b v; i<v: b", lambda c, f, x, y: f(x, y, label_smoothing=0.1, reduction="sum"), lambda c, f, x, y: f(x, y, reduction="none", label_smoothing=1 / (1 + x.shape[0])))
each("cross_entropy nll_loss", "b v s; i<v: b s", *_REDUCED)
each("cross_entropy nll_loss", "v; i<v: ", *_REDUCED)
each("cross_entropy", "b v; +: b v", *_REDUCED)
each("cross_entropy", "b v s; +: b v s", *_REDUCED)
each("cross_entropy nll_loss", "b v; i<v: b; +: v", lambda c, f, x, y, w: f(x, y, w), lambda c, f, x, y, w: f(x, y, weight=w, reduction="sum"), lambda c, f, x, y, w: f(x, y, weight=w, reduction="none"))
each("ctc_loss", "t b v; i<u: b u", lambda c, f, x, y: f(x.log_softmax(-1), y, torch.full((y.shape[0],), x.shape[0]), torch.full((y.shape[0],), y.shape[1])), t=6, v=7, u=2)


# rows that an index names

each("index_select", "b s h; i<s: k", lambda c, f, x, i: f(x, 1, i), lambda c, f, x, i: f(x, dim=-2, index=i))
each("index_select", "h; i<h: k", lambda c, f, x, i: f(x, 0, i))
each("gather", "b s h; i<s: b k h", lambda c, f, x, i: f(x, 1, i), lambda c, f, x, i: f(x, dim=-2, index=i))
each("gather", "b h; i<h: b k", lambda c, f, x, i: f(x, 1, i), lambda c, f, x, i: f(x, -1, i))
each("gather", "b h; i<h: b h", lambda c, f, x, i: f(x, -1, i))
each("gather", "b s h; i<h: b s 1", lambda c, f, x, i: f(x, -1, i))
each("take_along_dim", "b s h; i<s: b k h", lambda c, f, x, i: f(x, i, 1), lambda c, f, x, i: f(x, indices=i, dim=-2))
each("take_along_dim", "b s h; i<s: b k 1", lambda c, f, x, i: f(x, i, dim=1))
each("take_along_dim", "1 s h; i<s: b k 1", lambda c, f, x, i: f(x, i, 1))
each("take_along_dim", "b h; i<h: b k", lambda c, f, x, i: f(x, i, 1))
each("take_along_dim", "s h; i<s: k", lambda c, f, x, i: f(x, i))
each("scatter", "b s h; i<s: b s h; b s h", lambda c, f, x, i, y: f(x, 1, i, y), lambda c, f, x, i, y: f(x, dim=-2, index=i, src=y))
each("scatter", "b h; i<h: b 1", lambda c, f, x, i: f(x, 1, i, 2.0), lambda c, f, x, i: f(x, -1, i, value=2.0), lambda c, f, x, i: f(x, -1, i, x.shape[0]))
each("scatter", "s h; i<s: 1 h", lambda c, f, x, i: f(x, 0, i, 2.0), lambda c, f, x, i: f(x, 0, i, 1.0, reduce="add"))
each("scatter_add", "b s h; i<s: b s h; b s h", lambda c, f, x, i, y: f(x, 1, i, y), lambda c, f, x, i, y: f(x, dim=-2, index=i, src=y))
each("scatter_add", "b h; i<h: b k; b k", lambda c, f, x, i, y: f(x, -1, i, y))
each("index_add index_copy", "b s h; i<s: 1; b 1 h", lambda c, f, x, i, y: f(x, 1, i, y), lambda c, f, x, i, y: f(x, dim=-2, index=i, source=y))
each("index_add", "s h; i<s: k; k h", lambda c, f, x, i, y: f(x, 0, i, y), lambda c, f, x, i, y: f(x, 0, i, y, alpha=2), lambda c, f, x, i, y: f(torch.zeros_like(x), 0, i, y), lambda c, f, x, i, y: f(x, 0, i, y, alpha=y.shape[-1]))
of("index_add", "s h; i<s: k; k h", lambda c, x, i, y: torch.zeros(c.s, c.h, dtype=y.dtype).index_add(0, i, y), lambda c, x, i, y: torch.zeros(c.s, y.shape[1], dtype=y.dtype).index_add_(0, i, y))
each("index_copy", "h; i<h: 1; 1", lambda c, f, x, i, y: f(x, 0, i, y))

_INDICES = (
    lambda c, x: x[0], lambda c, x: x[:, 0], lambda c, x: x[..., 0], lambda c, x: x[..., -1:], lambda c, x: x[:, :, ::2], lambda c, x: x[:, :-1], lambda c, x: x[None], lambda c, x: x[:, None, 0],
    lambda c, x: x[..., None], lambda c, x: x[..., None, :], lambda c, x: x[:, 1:, ..., None], lambda c, x: x[:, :, : c.h], lambda c, x: x[:, : c.s], lambda c, x: x[..., : x.shape[-1]], lambda c, x: x[...],
    lambda c, x: x[:, [0, 0]], lambda c, x: x[..., [0]], lambda c, x: x[[0], :, 0], lambda c, x: x[torch.tensor([0, 0])], lambda c, x: x[:, torch.tensor(0)], lambda c, x: x[torch.tensor([0]), :, torch.tensor([0, 0])],
    lambda c, x: x[0, :, [0]], lambda c, x: x[:, torch.tensor([[0, 0]])], lambda c, x: x[None, :, [0]], lambda c, x: x[[0], None, :, [0]], lambda c, x: x[torch.arange(x.shape[0]), 0], lambda c, x: x[torch.arange(x.shape[0])],
    lambda c, x: x[:, torch.arange(c.s)], lambda c, x: x[torch.ones(c.b, dtype=torch.bool)], lambda c, x: x[:, torch.ones(c.s, dtype=torch.bool)], lambda c, x: x[:, 0:1, 0], lambda c, x: x[(slice(None), slice(None), 0)],
    lambda c, x: x[x.shape[0] - 1], lambda c, x: x[:, :, x.shape[2] - 1 :], lambda c, x: x[:, :, torch.arange(x.shape[2] - 1, -1, -1)], lambda c, x: x[torch.ones(c.b, c.s, dtype=torch.bool)], lambda c, x: x[:, True],
    lambda c, x: x[0:1], lambda c, x: x[..., 0:0], lambda c, x: x[-1, ..., 0], lambda c, x: x[:, :, None, [0]], lambda c, x: x[0, [0]],
)  # fmt: skip
of("getitem", "b s h", *_INDICES)
of("getitem", "b s h; i<s: k", lambda c, x, i: x[:, i], lambda c, x, i: x[:, i, 0], lambda c, x, i: x[0, i], lambda c, x, i: x[..., i, :], lambda c, x, i: x[:, i, None])
of("getitem", "b s h; i<b: k; i<s: k", lambda c, x, i, j: x[i, j], lambda c, x, i, j: x[i, :, j * 0], lambda c, x, i, j: x[i, None, j])
of("getitem", "v h; i<v: b s", lambda c, x, i: x[i], lambda c, x, i: x[i, 0], lambda c, x, i: x[i][..., 0])
of("getitem", "b s h; m: b s", lambda c, x, m: x[m], lambda c, x, m: x[m, 0])
of("getitem", "b s; m: b s", lambda c, x, m: x[m], lambda c, x, m: x[m].sum())
of("getitem", "b s; i<s: b", lambda c, x, i: x[torch.arange(c.b), i], lambda c, x, i: x[torch.arange(x.shape[0]), i])


def put(x: Tensor, index: object, value: object) -> Tensor:
    x[index] = value  # type: ignore[index, assignment]
    return x


_PLACES = (
    lambda c: 0, lambda c: slice(1, None), lambda c: (slice(None), 0), lambda c: (..., 0), lambda c: (..., slice(0, 1)), lambda c: slice(None), lambda c: ..., lambda c: (slice(None), slice(0, 1)),
    lambda c: torch.tensor([0]), lambda c: (slice(None), [0]), lambda c: (torch.tensor([0]), slice(None), torch.tensor([0])), lambda c: (slice(None), None), lambda c: torch.ones(c.b, dtype=torch.bool),
    lambda c: (..., [0]), lambda c: (slice(None), slice(None), slice(None, None, 2)),
)  # fmt: skip
for _at in _PLACES:
    of("setitem", "b s h", lambda c, x, at=_at: put(x, at(c), 1.0), lambda c, x, at=_at: put(torch.zeros_like(x), at(c), 1.0), lambda c, x, at=_at: put(torch.zeros_like(x), at(c), x[at(c)]))
    of("setitem", "b s h; b s h", lambda c, x, y, at=_at: put(x, at(c), y[at(c)]), lambda c, x, y, at=_at: put(torch.zeros(x.shape, dtype=x.dtype), at(c), y[at(c)]))
    of("setitem", "b s h; 1", lambda c, x, y, at=_at: put(x, at(c), y), lambda c, x, y, at=_at: put(torch.zeros_like(x), at(c), y))
of("setitem", "b s h; h", lambda c, x, y: put(x, (slice(None), 0), y), lambda c, x, y: put(x, ..., y), lambda c, x, y: put(torch.zeros(c.b, c.s, c.h, dtype=y.dtype), (slice(None), 0), y), lambda c, x, y: put(torch.zeros(x.shape, dtype=y.dtype), (0, 0), y))
of("setitem", "b s h; b h", lambda c, x, y: put(x, (slice(None), 0), y), lambda c, x, y: put(torch.zeros(c.b, c.s, c.h, dtype=y.dtype), (slice(None), 0), y), lambda c, x, y: put(torch.zeros(x.shape, dtype=y.dtype), (slice(None), 0), y))
of("setitem", "b s h; m: b s h", lambda c, x, m: put(x, m, 0.0), lambda c, x, m: put(torch.zeros_like(x), m, 1.0))
of("setitem", "b s h; m: b s", lambda c, x, m: put(x, m, 0.0), lambda c, x, m: put(torch.zeros_like(x), m, 1.0), lambda c, x, m: put(x, m, x[m] * 2))
of("setitem", "b s h; i<s: k", lambda c, x, i: put(x, (slice(None), i), 0.0), lambda c, x, i: put(torch.zeros_like(x), (slice(None), i), 1.0))


# written through a view

of(
    "getitem", "b s h; b s h",
    lambda c, x, y: written(x, x[:, :1], y[:, :1]), lambda c, x, y: written(x, x[..., 0], y[..., 0]), lambda c, x, y: written(z := torch.zeros(y.shape, dtype=y.dtype), z[:, 1:], y[:, 1:]),
    lambda c, x, y: written(z := torch.zeros_like(y), z[0], y[0]), lambda c, x, y: written(z := torch.zeros_like(x), z.view(-1), y.flatten()), lambda c, x, y: written(z := torch.zeros_like(x), z.transpose(0, 1), y.transpose(0, 1)),
)  # fmt: skip


def written(base: Tensor, view: Tensor, value: Tensor) -> Tensor:
    view.copy_(value)
    return base


of("fill", "b s h", lambda c, x: filled(x, lambda z: z[0].fill_(1.0)), lambda c, x: filled(x, lambda z: z[..., 0].fill_(1.0)), lambda c, x: filled(x, lambda z: z.select(-1, 0).zero_()), lambda c, x: filled(x, lambda z: z.narrow(1, 0, 1).fill_(2.0)), lambda c, x: filled(x, lambda z: z.fill_(3.0)))


def filled(x: Tensor, write: object) -> Tensor:
    z = torch.zeros(x.shape, dtype=x.dtype)
    write(z)  # type: ignore[operator]
    return x + z


# filled with one value, of a share's size

for _name in ("zeros", "ones", "empty"):
    of(_name, "s h", lambda c, x, n=_name: x + getattr(torch, n)(x.shape) * 0.0 if n == "empty" else x + getattr(torch, n)(x.shape), lambda c, x, n=_name: getattr(torch, n)(c.s, c.h) * 0 + x if n != "empty" else x)
of("full", "s h", lambda c, x: x + torch.full(x.shape, 2.0), lambda c, x: x * torch.full((c.h,), 2.0), lambda c, x: x + torch.full(x.shape, x.shape[-1]), lambda c, x: x * torch.full((x.shape[-1],), 3.0).sum(), lambda c, x: x * torch.full((x.shape[0], 1), 3.0).cumsum(0))
each("new_zeros new_ones", "s h", lambda c, f, x: f(x, x.shape) + x, lambda c, f, x: f(x, (c.s, c.h)) + x, lambda c, f, x: f(x, x.shape[-1]), lambda c, f, x: f(x, (x.shape[-1],)).sum() * x, lambda c, f, x: f(x, 3))
each("new_full", "s h", lambda c, f, x: f(x, x.shape, 2.0) + x, lambda c, f, x: f(x, (3,), 2.0), lambda c, f, x: f(x, x.shape, x.shape[-1]) + x)
each("new_empty", "s h", lambda c, f, x: f(x, x.shape), lambda c, f, x: f(x, (3, c.h)), random=True)
of("zeros_like", "s h", lambda c, x: torch.zeros_like(x) + x, lambda c, x: torch.ones_like(x).sum(-1), lambda c, x: torch.ones_like(x).cumsum(-1), lambda c, x: torch.ones_like(x[:, :1]).sum(0))
of("ones_like", "s h", lambda c, x: torch.ones_like(x).triu(), lambda c, x: x.masked_fill(torch.ones_like(x, dtype=torch.bool).tril(), 0.0), lambda c, x: torch.ones_like(x).mean(), lambda c, x: torch.nn.functional.normalize(torch.ones_like(x), dim=0))


# [b, c, ...]

for _n, _space in ((1, "u"), (2, "u v"), (3, "u v w")):
    _conv, _back = f"conv{_n}d", f"conv_transpose{_n}d"
    _kernel = " ".join(["t"] * _n)
    _least = {letter: 3 for letter in _space.split()} | {"t": 1}
    each(_conv, f"b c {_space}; o c {_kernel}; o", lambda c, f, x, w, b: f(x, w, b, padding=c.t - 1), lambda c, f, x, w, b: f(x, w, bias=b, stride=2, padding=c.t), first=_n > 1, **_least)
    each(_conv, f"b c {_space}; o c {_kernel}", lambda c, f, x, w: f(x, w, padding=c.t - 1), first=True, **_least)
    each(_back, f"b c {_space}; c o {_kernel}; o", lambda c, f, x, w, b: f(x, w, b), lambda c, f, x, w, b: f(x, w, bias=b, stride=2), first=_n > 1, **_least)
    each(_conv, f"b g*m {_space}; g*o m {_kernel}; g*o", lambda c, f, x, w, b: f(x, w, b, 1, c.t - 1, 1, c.g), lambda c, f, x, w, b: f(x, w, bias=b, padding=c.t - 1, groups=c.g), first=True, **_least)
    each(_conv, f"b g {_space}; g 1 {_kernel}", lambda c, f, x, w: f(x, w, padding=c.t - 1, groups=c.g), lambda c, f, x, w: f(x, w, padding=c.t - 1, groups=x.shape[1]), first=True, **_least)
    each(_back, f"b g*m {_space}; g*m o {_kernel}", lambda c, f, x, w: f(x, w, None, 1, 0, 0, c.g), lambda c, f, x, w: f(x, w, groups=c.g), first=True, **_least)
    each(_back, f"b g*m {_space}; g*m 1 {_kernel}; g", lambda c, f, x, w, b: f(x, w, b, groups=c.g), first=True, **_least)
each("conv1d", "c u; o c t", lambda c, f, x, w: f(x, w, padding=c.t - 1), first=True)
each("conv1d", "b c u; o c t; o", lambda c, f, x, w, b: f(x, w, b, padding="same"), lambda c, f, x, w, b: f(x, w, b, padding=c.t, dilation=x.shape[2]), first=True)
each("batch_norm", "b c u; c; +: c; c; c", lambda c, f, x, m, v, w, b: f(x, m, v, w, b, False) if f is F.batch_norm else f(x, w, b, m, v, False, 0.1, 1e-5, False), lambda c, f, x, m, v, w, b: f(x, m.detach(), v.detach(), w, b, True, 0.1) if f is F.batch_norm else f(x, w, b, m.detach(), v.detach(), True, 0.1, 1e-5, False), b=2)
each("batch_norm", "b c; c; +: c", lambda c, f, x, m, v: f(x, m, v) if f is F.batch_norm else f(x, None, None, m, v, False, 0.1, 1e-5, False), lambda c, f, x, m, v: f(x, None, None, training=True) if f is F.batch_norm else f(x, None, None, None, None, True, 0.1, 1e-5, False), b=2)
each("instance_norm", "b c u; c; c", lambda c, f, x, w, b: f(x, weight=w, bias=b) if f is F.instance_norm else f(x, w, b, None, None, True, 0.1, 1e-5, False), lambda c, f, x, w, b: f(x) if f is F.instance_norm else f(x, None, None, None, None, True, 0.1, 1e-5, False), u=2)
each("instance_norm", "b c u; c; +: c", lambda c, f, x, m, v: f(x, m, v, use_input_stats=False) if f is F.instance_norm else f(x, None, None, m, v, False, 0.1, 1e-5, False), u=2)
each("group_norm", "b g*m u; g*m; g*m", lambda c, f, x, w, b: f(x, c.g, w, b), lambda c, f, x, w, b: f(x, num_groups=c.g, weight=w) if f is F.group_norm else f(x, c.g, w), lambda c, f, x, w, b: f(x, c.g), u=2)
for _n, _space in ((1, "b c u"), (2, "b c u v"), (3, "b c u v w"), (1, "c u"), (2, "c u v")):
    _wide = {letter: 3 for letter in "uvw"}
    each(f"avg_pool{_n}d max_pool{_n}d", _space, lambda c, f, x: f(x, 2), lambda c, f, x: f(x, kernel_size=3, stride=1, padding=1), lambda c, f, x: f(x, 1), first=len(_space) == 3, **{k: v for k, v in _wide.items() if k in _space})
    each(f"adaptive_avg_pool{_n}d", _space, lambda c, f, x: f(x, 2), lambda c, f, x: f(x, 1), first=len(_space) == 3)
    if _n < 3:
        each(f"adaptive_max_pool{_n}d", _space, lambda c, f, x: f(x, 2), lambda c, f, x: f(x, output_size=1), first=len(_space) == 3)
each("max_pool1d max_pool2d", "b c u v", lambda c, f, x: f(x.flatten(2), 2, return_indices=True) if "1d" in f.__name__ else f(x, 2, return_indices=True), first=True, u=3, v=3)
each("interpolate", "b c u", lambda c, f, x: f(x, 4), lambda c, f, x: f(x, scale_factor=2, mode="linear"), lambda c, f, x: f(x, size=3, mode="nearest"), lambda c, f, x: f(x, x.shape[1]))
each("interpolate", "b c u v", lambda c, f, x: f(x, (4, 3), mode="bilinear"), lambda c, f, x: f(x, scale_factor=2, mode="bicubic"), lambda c, f, x: f(x, (2, 2), mode="area"))
