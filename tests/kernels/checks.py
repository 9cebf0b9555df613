"""Triton's kernels against their plain forms: under the interpreter (``test_interpreted.py``), or on a GPU (``tests/gpu``).

The interpreter cuts bf16 results off where a GPU rounds them, so bf16 may differ by a unit in the last place. Each check
launches at most some 200 programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support import tiny
from torch import Tensor

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.config.schema import KernelConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.attention import split_qkv
from megatron_sp.ops.custom_backward import gradients_of
from megatron_sp.ops.dropout import DropoutKeys, dropped, hash_dropout, keep_mask
from megatron_sp.ops.kernels import activations, biases, dropout, launch, norms, rotary
from megatron_sp.ops.kernels.launch import Launch, is_fused, using_triton
from megatron_sp.ops.main_grad import put_column_sum
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_backward, norm_forward, norm_gradients
from megatron_sp.ops.rotary import apply_rotary, rotary_tables, rotate_
from megatron_sp.optim.flat import FlatUnit, squared_norm
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.parallel import lm_head
from megatron_sp.parallel.linear import multiply
from megatron_sp.parallel.lm_head import lm_head_loss
from megatron_sp.parallel.tensor_parallel import NO_TP

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.1e-3, torch.bfloat16: 1.6e-2}  # of the largest value: about one unit in the last place


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, always the same."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(launch.DEVICE, dtype)


def require_close(
    got: Sequence[Tensor | None], want: Sequence[Tensor | None], dtype: torch.dtype, tolerance: float | None = None,
    terms: dict[int, float] | None = None,
) -> None:  # fmt: skip
    """Compare results in shape, dtype and value; ``terms``: what the terms of a result reach that cancel, by its place."""
    tolerance = tolerance or _TOLERANCE[dtype]
    assert len(got) == len(want)
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g is None) == (w is None), f"result {index}: {g} is not {w}"
        if g is None or w is None:
            continue
        assert g.shape == w.shape and g.dtype == w.dtype, f"result {index}: {g.dtype} {g.shape} is not {w.dtype} {w.shape}"
        largest = max(float(w.double().abs().max()), (terms or {}).get(index, 0.0), 1e-30)
        difference = float((g.double() - w.double()).abs().max()) / largest
        assert difference <= tolerance, f"result {index} differs by {difference:.3g} of its largest value, or of its terms"


def count_launches() -> list[str]:
    """Return a list that gets the name of each kernel that is launched from now on."""
    names: list[str] = []

    def run(launched: Launch) -> None:
        names.append(launched.name)
        launch._run(launched)

    launch.launcher = run
    return names


def norm(kind: str, dtype_name: str, rows: int, width: int, zero_centered: bool, has_add: bool, needs: str) -> None:
    """Compare forward and backward of a norm; ``needs`` has a letter for each gradient: x, w, b."""
    dtype, centered = DTYPES[dtype_name], kind == "LayerNorm"
    spec = NormSpec(kind, 1e-5, zero_centered)  # type: ignore[arg-type]
    x, grad, add = (randn(rows, width, seed=i, dtype=dtype) for i in range(3))
    x = x + 3 if centered else x  # a mean that is not small
    weight, shift = (randn(width, seed=3 + i, dtype=dtype) for i in range(2))
    bias = shift if centered else None
    need = ("x" in needs, "w" in needs, "b" in needs and centered)
    results = []
    for yes in (True, False):
        with using_triton(yes):
            names = count_launches()
            y, stats = norm_forward(x, weight, bias, spec)
            grad_x, *of_params = norm_backward(grad, x, weight, bias, stats, spec, need, add if has_add else None)
            # torch's RMSNorm on a GPU gives the gradient of a 16-bit weight in 16 bits
            results.append([y, grad_x, *(None if g is None else g.float() for g in of_params)])
            assert bool(names) == yes
    require_close(*results, dtype, terms={1: norm_terms(x, grad, weight, spec)})


def norm_terms(x: Tensor, grad: Tensor, weight: Tensor, spec: NormSpec) -> float:
    """Return the largest g * rstd of a norm's backward, dx = rstd * (g - n * mean(g * n)), which two terms may cancel.

    In a row of one element n is 1 but for eps, so of RMSNorm's g only g * eps / (x^2 + eps) is left, and rounding of n is 1e-2 of that.
    """
    wide = x.double() - (x.double().mean(-1, keepdim=True) if spec.kind == "LayerNorm" else 0.0)
    rstd = (wide.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    return float((grad.double() * (weight.double() + spec.zero_centered) * rstd).abs().max())


def norm_of_few_programs(kind: str, rows: int, width: int) -> None:
    """Each program has several rows, or tiles of rows."""
    most = norms._MOST_PROGRAMS, norms._MOST_WIDE_PROGRAMS
    norms._MOST_PROGRAMS = norms._MOST_WIDE_PROGRAMS = 3
    try:
        norm(kind, "fp32", rows, width, False, True, "xwb")
    finally:
        norms._MOST_PROGRAMS, norms._MOST_WIDE_PROGRAMS = most


def norm_of_strided(dtype_name: str) -> None:
    """Norms of heads: views of the packed projection, and gradients that are not contiguous."""
    dtype = DTYPES[dtype_name]
    packed = randn(5, 6, 4, 32, dtype=dtype)
    x, weight = packed[:, :, :2], randn(32, seed=1, dtype=dtype)
    grad = randn(6, 5, 2, 32, seed=2, dtype=dtype).transpose(0, 1)
    spec = NormSpec("RMSNorm", 1e-6)
    results = []
    for yes in (True, False):
        with using_triton(yes):
            y, stats = norm_forward(x, weight, None, spec)
            grad_x, of_weight, _ = norm_backward(grad, x, weight, None, stats, spec, (True, True, False))
            assert of_weight is not None
            results.append([y, grad_x, of_weight.float()])
    require_close(*results, dtype)


def norm_repeats() -> None:
    """Equal to the last bit, also with fewer rows than programs, and with rows that are not a multiple of a tile's."""
    x, weight = randn(37, 96), randn(96, seed=1)
    with using_triton():
        made = [norms.forward(x, weight, None, 1e-5, centered=False, zero_centered=False) for _ in range(2)]
        back = [norms.backward(x, x, weight, stats, (True, True, False), None, zero_centered=False) for _, stats in made]
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(back[0][0], back[1][0]) and torch.equal(back[0][1], back[1][1])


def norm_of_what_is_not_finite() -> None:
    """NaN and infinity do not disappear, and stay in their row."""
    for value in (float("nan"), float("inf")):
        x = randn(4, 48)
        x[1, 5] = value
        with using_triton():
            y, stats = norm_forward(x, torch.ones(48), None, NormSpec("RMSNorm", 1e-5))
            grad_x, _, _ = norm_backward(x, x, torch.ones(48), None, stats, NormSpec("RMSNorm", 1e-5), (True, True, False))
        assert not y[1].isfinite().all() and y[[0, 2, 3]].isfinite().all()
        assert grad_x is not None and not grad_x[1].isfinite().all() and grad_x[[0, 2, 3]].isfinite().all()


def _row_keys(tokens: int, batch: int, site: int = 1) -> Tensor:
    return DropoutKeys.create(7, 3, torch.arange(batch), torch.arange(tokens)).row_keys(2, site)


def dropout_mask(tokens: int, width: int, rate: float, first_channel: int) -> None:
    """The mask is ``keep_mask`` bit for bit, by keys of rows and of tokens, and the keys are equal, by a step on the device, too."""
    keys, x = _row_keys(tokens, 2), torch.ones(tokens, 2, width)
    want = keep_mask(keys, width, rate, first_channel)
    for step in (3, torch.tensor(3)):
        with using_triton():
            names = count_launches()
            made = DropoutKeys.create(7, step, torch.arange(2), torch.arange(tokens))
            assert torch.equal(made.row_keys(2, 1), keys)
            of_tokens, site = made.rows(2, 1)
            assert site is not None
            assert torch.equal(dropped(x, rate, of_tokens, site=site, first_channel=first_channel) != 0, want)
            assert torch.equal(dropped(x, rate, keys, first_channel=first_channel) != 0, want)
            assert names == ["token_keys_kernel", "dropout_kernel", "dropout_kernel"]
    assert torch.equal(dropped(x, rate, of_tokens, site=site, first_channel=first_channel) != 0, want), "the plain form takes both, too"


def hash_dropout_and_residual(dtype_name: str, tokens: int, width: int, has_residual: bool) -> None:
    """Compare forward and backward."""
    dtype = DTYPES[dtype_name]
    x, residual, grad = (randn(tokens, 2, width, seed=i, dtype=dtype) for i in range(3))
    results = []
    for yes in (True, False):
        with using_triton(yes):
            leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()][: 1 + has_residual]
            keys, site = DropoutKeys.create(7, 3, torch.arange(2), torch.arange(tokens)).rows(2, 1)
            names = count_launches()
            out = hash_dropout(leaves[0], 0.3, keys, site=site, residual=leaves[1] if has_residual else None)
            results.append([out.detach(), *gradients_of(leaves, [out], [grad])])
            assert names == (["dropout_kernel"] * 2 if yes else [])
    require_close(*results, dtype)


def dropout_of_broadcast_keys() -> None:
    """Keys that broadcast, and an input that is not contiguous."""
    keys, x = _row_keys(5, 2)[:, None], randn(2, 5, 3, 40).permute(1, 2, 0, 3)
    with using_triton():
        got = hash_dropout(x, 0.5, keys)
    assert torch.equal(got, hash_dropout(x, 0.5, keys))
    assert dropout.dropout(randn(4, 8), torch.zeros(4, dtype=torch.int32), -(2**31), 1.0).shape == (4, 8)  # nothing is dropped


def activation(name: str, dtype_name: str, rows: int, width: int) -> None:
    """Compare an activation, its backward, and the output that backward makes."""
    dtype, act = DTYPES[dtype_name], Activation(name)  # type: ignore[arg-type]
    u = randn(rows, 3, act.width_factor * width, dtype=dtype) * 3
    grad = randn(rows, 3, width, seed=1, dtype=dtype)
    results = []
    for yes in (True, False):
        with using_triton(yes):
            assert is_fused(u) == yes and not is_fused(u.double()), "fp64 is not computed in fp32"
            results.append([act.forward(u), act.backward_(grad.clone(), u)])
    # the plain form rounds the activated gate before it is multiplied
    require_close(*results, torch.bfloat16 if dtype == torch.bfloat16 else dtype)
    with using_triton():
        assert act.makes_output_in_backward(u) == (act.width_factor == 2)
        if act.width_factor == 2:
            memory = grad.clone()
            grad_u, out = act.backward_with_output_(memory, u)
            assert out.data_ptr() == memory.data_ptr(), "the output takes the memory of the gradient"
            assert torch.equal(grad_u, results[0][1]) and torch.equal(out, results[0][0])


def activation_of_extremes(name: str) -> None:
    """Large numbers of both signs, zeros, infinities and NaN are as in torch."""
    act = Activation(name)  # type: ignore[arg-type]
    values = torch.tensor([0.0, -0.0, 1e-30, 30.0, -30.0, 200.0, -200.0, 1e4, -1e4, float("nan")])
    u = torch.cat([values, torch.ones(10)] if act.width_factor == 2 else [values])[None]
    grad = torch.ones(1, 10)
    want = act.forward(u), act.backward_(grad.clone(), u)
    out = activations.forward(u, name, gated=act.width_factor == 2)
    back, _ = activations.backward_(grad.clone(), u, name, gated=act.width_factor == 2)
    for g, w in ((out, want[0]), (back, want[1])):
        assert torch.allclose(g, w, rtol=1e-5, atol=1e-6, equal_nan=True), f"{g} is not {w}"


def rotation(dtype_name: str, heads: int, rotated: int, head_dim: int, rotated_dim: int, by_sequence: bool) -> None:
    """Compare the rotation in place and back; what is not rotated keeps its bits."""
    dtype, s, b, groups = DTYPES[dtype_name], 5, 2, 3
    positions = torch.arange(s)[:, None] + torch.tensor([[0, 100]]) if by_sequence else torch.arange(s)
    cos, sin = rotary_tables(positions, rotated_dim, 10_000.0)
    x = randn(s, b, groups * heads * head_dim, dtype=dtype)
    results = []
    for yes in (True, False):
        with using_triton(yes):
            leaf = x.clone().requires_grad_()
            out = apply_rotary(leaf.clone(), cos, sin, head_dim, heads=heads, rotated=rotated)
            (grad,) = gradients_of([leaf], [out], [randn(*x.shape, seed=1, dtype=dtype)])
            results.append([out.detach(), grad])
    require_close(*results, dtype)
    apart = [r.view(s, b * groups, heads, head_dim) for r in (results[0][0], x)]
    assert torch.equal(apart[0][..., rotated_dim:], apart[1][..., rotated_dim:])
    assert torch.equal(apart[0][:, :, rotated:], apart[1][:, :, rotated:])


def packing(dtype_name: str, queries: int, head_dim: int, rotated_dim: int, by_sequence: bool) -> None:
    """Compare the packed gradient of split_qkv; gradients come as attention kernels hand them out, transposed."""
    dtype, s, b, groups = DTYPES[dtype_name], 4, 2, 3
    positions = torch.arange(s)[:, None] + torch.tensor([[3, 50]]) if by_sequence else torch.arange(s)
    tables = rotary_tables(positions, rotated_dim, 10_000.0) if rotated_dim else None
    qkv = randn(s, b, groups * (queries + 2) * head_dim, dtype=dtype)
    shapes = [(b * groups, n, s, head_dim) for n in (queries, 1, 1)]
    grads = [randn(*shape, seed=i, dtype=dtype).permute(2, 0, 1, 3) for i, shape in enumerate(shapes)]
    grads[2] = grads[2].contiguous()  # kernels differ in the layout of what they return
    if queries > 1:
        grads[0] = grads[0].contiguous()
    results = []
    for yes in (True, False):
        with using_triton(yes):
            leaf = qkv.clone().requires_grad_()
            names = count_launches()
            heads = split_qkv(leaf.clone(), queries, head_dim, tables)
            results.append([*(h.detach().clone() for h in heads), *gradients_of([leaf], heads, grads)])
            assert not yes or names[-1] == "pack_kernel"
    require_close(*results, dtype)


def rotation_leaves_the_rest() -> None:
    """A view in the middle of a tensor is rotated, and nothing beside it is written."""
    x = randn(4, 3, 5, 16)
    cos, sin = rotary_tables(torch.arange(4), 8, 10_000.0)
    want, got = x.clone(), x.clone()
    rotate_(want[:, :, 1:3], cos, sin, back=True)
    with using_triton():
        rotate_(got[:, :, 1:3], cos, sin, back=True)
    assert torch.allclose(got, want, atol=1e-6) and torch.equal(got[:, :, 3:], x[:, :, 3:]) and torch.equal(got[:, :, 0], x[:, :, 0])


def cross_entropy(dtype_name: str, tokens: int, rows: int, vocab_size: int, chunk: int) -> None:
    """Compare the LM head's loss and gradients; some tokens do not count, one of them has a label of no meaning."""
    dtype = DTYPES[dtype_name]
    x, weight, bias = randn(tokens, 1, 16, dtype=dtype), randn(rows, 16, seed=1, dtype=dtype), randn(rows, seed=2, dtype=dtype)
    labels = torch.randint(0, vocab_size, (tokens, 1), generator=torch.Generator().manual_seed(5), device="cpu").to(launch.DEVICE)
    mask = torch.linspace(0.5, 1.5, tokens)[:, None]
    mask[0], labels[0] = 0.0, -100
    results = []
    for yes in (True, False):
        with using_triton(yes):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
            names = count_launches()
            loss = lm_head_loss(*leaves[:2], labels, mask, vocab_size=vocab_size, bias=leaves[2], chunk_tokens=chunk)
            grads = gradients_of(leaves, [loss.sum], [torch.tensor(0.25)])
            results.append([loss.sum.detach(), loss.tokens, *grads])
            assert (names[:2] == ["cross_entropy_statistics_kernel", "cross_entropy_gradient_kernel"]) == yes
            logits = x[:, 0].float() @ weight[:vocab_size].float().t() + bias[:vocab_size]
            assert torch.equal(loss.hits[:, 0], logits.argmax(1) == labels[:, 0].clamp(0))
    require_close(*results, dtype)


def cross_entropy_of_extremes() -> None:
    """Huge logits do not overflow, ties are hits, NaN is not lost, padding does not count."""
    logits = torch.tensor([[1e4, -1e4, 0.0, 9e9], [5.0, 5.0, 1.0, 9e9], [float("nan"), 0.0, 1.0, 9e9], [-1e30, -1e30, -1e30, 9e9]])
    labels, weight = torch.tensor([1, 0, 1, 2]), torch.tensor([1.0, 0.5, 1.0, 2.0])[:, None]
    options = lm_head._Options(0, 3, 3, 4, NO_TP, None, train=True)
    plain = logits.masked_fill(torch.arange(4) == 3, float("-inf"))
    found = [(torch.empty(4), torch.empty(4, dtype=torch.bool)) for _ in range(2)]
    fused = lm_head._FusedChunk(logits.clone(), labels, options, found[0])
    chunk = lm_head._Chunk(plain.clone(), labels, options, found[1])
    assert torch.allclose(found[0][0], found[1][0], equal_nan=True), f"{found[0][0]} is not {found[1][0]}"
    assert found[0][1].tolist() == [False, True, False, True] and found[0][0][2].isnan()
    grad, factor = chunk.grad_of_logits_(weight, torch.float32)
    grads = [fused.grad_of_logits_(weight, torch.float32)[0], grad * factor]
    assert torch.allclose(grads[0][:, :3], grads[1][:, :3], equal_nan=True) and not grads[0][:, 3].any()


def packing_of_long_strides() -> None:
    """Offsets beyond 32 bits, as the gradients of attention kernels have them: the sequence is not their outermost dim."""
    heads, apart = 3, 2**30
    storage = torch.empty((heads - 1) * apart + 64, dtype=torch.float16, device=launch.DEVICE)  # pages that are not touched take no memory
    grad_q = storage.as_strided((1, heads, 1, 16), (16, apart, 16, 1)).copy_(randn(1, heads, 1, 16))
    grad_k = randn(1, heads, 1, 16, seed=1, dtype=torch.float16)
    with using_triton():
        packed = rotary.pack(grad_q, grad_k, grad_k, None)
    assert torch.equal(packed[:, :, :1], grad_q) and torch.equal(packed[:, :, 1:2], grad_k)


def relu_cuts_infinite_gradients_off() -> None:
    """As torch's: a gradient that overflowed in fp16 is no reason to skip a step where it does not count."""
    u, grad = torch.tensor([[-1.0, 2.0]]), torch.tensor([[float("inf"), 1.0]])
    with using_triton():
        assert Activation("relu").backward_(grad, u).tolist() == [[0.0, 1.0]]


MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "disable_bias_linear": True, "num_query_groups": 2,
    },
    "gpt, dropout": {"hidden_dropout": 0.2},
    "llama, dropout, 1p, QK norm": {
        "normalization": "RMSNorm", "apply_layernorm_1p": True, "qk_layernorm": True, "position_embedding_type": "rope",
        "rotary_percent": 0.5, "hidden_dropout": 0.2, "geglu": True,
    },
    "parallel residual, squared ReLU": {"use_parallel_residual": True, "squared_relu": True, "hidden_dropout": 0.1},
    "post-norm": {"norm_placement": "post", "hidden_dropout": 0.1, "attention_dropout": 0.1},
}  # fmt: skip


def whole_model(name: str, dtype_name: str, mlp_chunks: int, granularity: str | None) -> None:
    """Loss and every gradient of a model with Triton's kernels are those without."""
    dtype = DTYPES[dtype_name]
    config = tiny.shape(num_layers=1, **MODELS[name])
    kernels = KernelConfig(mlp_chunks=mlp_chunks, recompute_granularity=granularity)  # type: ignore[arg-type]
    with torch.device("cpu"):  # where generators of the CPU draw, whatever the default device is
        batch = tiny.make_batch(config)
    batch = {key: t.to(launch.DEVICE) for key, t in batch.items()}
    results: list[list[Tensor | None]] = []
    for yes in (True, False):
        with torch.device("cpu"):
            model = GPTModel(config, kernels, seed=5, dtype=dtype)
        model.to(launch.DEVICE)
        with using_triton(yes):
            names = count_launches()
            loss = tiny.loss_of(model, batch, mlp_chunks=mlp_chunks)
            loss.backward()
        assert bool(names) == yes
        assert not yes or {n.split("_")[0] for n in names} >= {"norm", "activation", "cross"}
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    require_close(*results, dtype, tolerance=4 * _TOLERANCE[dtype])


def grouped_weight_gradients(
    dtype_name: str, counts: Sequence[int], width_out: int, width_in: int, gathers: bool, fresh: bool, pad: int
) -> None:  # fmt: skip
    """Weight gradients of experts against products in fp64; ``pad``: rows of x and grad lie that much apart."""
    from megatron_sp.ops.kernels import grouped

    dtype, n, experts = DTYPES[dtype_name], sum(counts), len(counts)
    grad = randn(n, width_out + pad, dtype=dtype)[:, :width_out]
    rows = torch.randperm(2 * n, generator=torch.Generator().manual_seed(2), device="cpu")[:n].to(launch.DEVICE) if gathers else None
    x = randn(2 * n if gathers else n, width_in + pad, seed=1, dtype=dtype)[:, :width_in]
    out = torch.full((experts, width_out, width_in), float("nan"), device=launch.DEVICE) if fresh else randn(experts, width_out, width_in)
    want = torch.zeros(experts, width_out, width_in, dtype=torch.float64, device=launch.DEVICE) if fresh else out.double()
    ends, taken = torch.tensor(counts).cumsum(0).to(launch.DEVICE, torch.int32), x if rows is None else x[rows]
    for expert, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        mine = slice(end - count, end)
        want[expert] += grad[mine].double().t() @ taken[mine].double()
    before = out.clone()
    grouped.weight_grads(out, grad, x, ends, rows, fresh=fresh)
    assert all(torch.equal(out[e], before[e]) for e in range(experts) if not counts[e] and not fresh), "untouched without rows"
    # tensor cores round sums of products less exactly than fp32 does
    require_close([out.double()], [want], torch.float64, tolerance=2e-6 if launch.DEVICE == "cpu" else 1e-4)


def grouped_weight_gradients_of_an_expert_alone() -> None:
    """The bits of an expert's gradient are its rows': not those of the experts beside it, nor of where its rows lie."""
    from megatron_sp.ops.kernels import grouped

    counts, (width_out, width_in) = (70, 5, 0, 131), (40, 48)
    grad, x = randn(206, width_out, dtype=torch.bfloat16), randn(206, width_in, seed=1, dtype=torch.bfloat16)
    x[:70] = float("nan")  # of another expert
    ends = torch.tensor(counts).cumsum(0).to(launch.DEVICE, torch.int32)
    out = torch.empty(4, width_out, width_in, device=launch.DEVICE)
    grouped.weight_grads(out, grad, x, ends, None, fresh=True)
    alone = torch.empty(1, width_out, width_in, device=launch.DEVICE)
    end = torch.tensor([131], dtype=torch.int32, device=launch.DEVICE)
    grouped.weight_grads(alone, grad[75:], x[75:], end, None, fresh=True)
    assert torch.equal(out[3], alone[0]) and out[0].isnan().any() and out[1].isfinite().all() and not out[2].any()


def experts_with_one_launch(dtype_name: str, bias: bool, again: bool) -> None:
    """Gradients of all experts' weights in one launch for each weight are those of one product after another."""
    from support import expert_rows

    dtype, results = DTYPES[dtype_name], []
    if launch.DEVICE != "cpu" and dtype != torch.bfloat16:
        return  # torch's grouped product on a GPU, which makes the other products, is for bf16
    for yes in (True, False):
        with using_triton(yes):
            names = count_launches()
            results.append(expert_rows.run(dtype, bias=bias, grouped=True, device=launch.DEVICE, times=2 if again else 1))
        assert names.count("grouped_weight_kernel") == (2 * (1 + again) if yes and dtype != torch.float32 else 0), names
    first, second = (list(each.values()) for each in results)
    assert not results[0]["w1"][2].any(), "an expert without rows has a gradient of zero"
    require_close(first, second, dtype, tolerance=2 * _TOLERANCE[dtype])


def column_sums(dtype_name: str, to_name: str, rows: int, width: int, fresh: bool, pad: int) -> None:
    """Sums over rows, written or added, against fp64; ``pad``: rows lie that much apart."""
    x = randn(rows, width + pad, dtype=DTYPES[dtype_name])[:, :width]
    to = torch.full((width,), float("nan"), device=launch.DEVICE) if fresh else randn(width, seed=1)
    to = to.to(DTYPES[to_name])
    want = x.double().sum(0) + (0 if fresh else to.double())
    biases.put_column_sums(x, (to, fresh))
    require_close([to], [want.to(to.dtype)], to.dtype)


def several_sums(widths: Sequence[int], fresh: Sequence[bool]) -> None:
    """Sums that are finished together, of other parts and widths, written or added."""
    parts = [randn(3 + 70 * (i % 2), width + i, seed=i)[:, :width] for i, width in enumerate(widths)]
    given = enumerate(zip(widths, fresh, strict=True))
    places = [torch.full((w,), float("nan")) if new else randn(w, seed=20 + i) for i, (w, new) in given]
    want = [x.double().sum(0) + (0 if new else to.double()) for x, to, new in zip(parts, places, fresh, strict=True)]
    names = count_launches()
    biases.finish([(x, (to, new)) for x, to, new in zip(parts, places, fresh, strict=True)])
    assert names == ["finish_kernel"] * -(-len(widths) // 8)
    require_close(places, [total.float() for total in want], torch.float32)


def sums_of_a_unit() -> None:
    """A main_grad finishes them when the unit is done, those of a parameter that gets more before that, and few rows at once."""
    params = [torch.nn.Parameter(torch.zeros(24, dtype=torch.bfloat16)) for _ in range(3)]
    gradients = FlatGradients([FlatUnit("unit", [(str(i), p) for i, p in enumerate(params)])], SINGLE_RANK)
    rows, few = [randn(300, 24, seed=i, dtype=torch.bfloat16) for i in range(3)], randn(5, 24, seed=9, dtype=torch.bfloat16)
    with using_triton():
        gradients.start_step()
        gradients.last_micro_batch()
        names = count_launches()
        for param, x in zip(params, rows, strict=True):
            put_column_sum(gradients, param, x)
        assert names == ["column_parts_kernel"] * 3
        changed = few.clone()
        put_column_sum(gradients, params[1], changed)
        changed.fill_(float("nan"))
        assert names[3:] == ["finish_kernel"] * 2
        put_column_sum(gradients, params[0], rows[2])
        gradients.unit_done(0)
        assert names[5:] == ["column_parts_kernel", "finish_kernel"]
        gradients.finish_step()
    want = [rows[0].double().sum(0) + rows[2].double().sum(0), rows[1].double().sum(0) + few.double().sum(0), rows[2].double().sum(0)]
    require_close([gradients.units[0].grad_of(id(p)) for p in params], [total.float() for total in want], torch.float32)


def squares_of_gradients(sizes: Sequence[int]) -> None:
    """Sums of squares over several tensors against fp64; NaN and infinity are not lost."""
    parts = [randn(size, seed=i) for i, size in enumerate(sizes)]
    with using_triton():
        names = count_launches()
        found = squared_norm(*parts)
        assert names == ["squares_kernel"] * -(-len(sizes) // 8)
        assert found.dtype == torch.float64
        require_close([found], [sum(part.double().square().sum() for part in parts)], torch.float64, tolerance=2e-7)
        for bad in (float("nan"), float("inf"), -float("inf")):
            parts[-1][-1] = bad
            assert not squared_norm(*parts).isfinite()
        names.clear()
        odd, even = randn(40)[1:], randn(16, seed=1)
        require_close([squared_norm(odd, even)], [odd.double().square().sum() + even.double().square().sum()], torch.float64, 2e-7)
        assert not names, "an odd address would narrow the others' accesses"


def bias_gradient(rows: int, fresh: bool, holds: bool) -> None:
    """Of an operation: into the buffer, without a copy, where there is one."""
    grad, bias, view = randn(rows, 40, dtype=torch.bfloat16), torch.zeros(40, dtype=torch.bfloat16), randn(40, seed=1)
    want = grad.double().sum(0) + (0 if fresh or not holds else view.double())

    class Buffer:
        defers = False

        def reserve(self, param: Tensor) -> tuple[Tensor, bool] | None:
            assert param is bias
            return (view, fresh) if holds else None

        put_sums = staticmethod(biases.finish)

    with using_triton():
        names = count_launches()
        found = put_column_sum(Buffer(), bias, grad)  # type: ignore[arg-type]
    assert (found is None) == holds and names == ["column_parts_kernel"] * (rows > 256) + ["finish_kernel"]
    require_close([view if found is None else found], [want.to(torch.float32 if holds else torch.bfloat16)], torch.bfloat16)


def norm_into_buffers(kind: str, rows: int, width: int, fresh: tuple[bool, bool], holds: tuple[bool, bool]) -> None:
    """Gradients of a norm's parameters go to the buffers that there are, written or added."""
    spec = NormSpec(kind, 1e-5)  # type: ignore[arg-type]
    x, grad = randn(rows, width) + 1, randn(rows, width, seed=1)
    weight, bias = randn(width, seed=2), randn(width, seed=3) if kind == "LayerNorm" else None
    need, results = (True, True, bias is not None), []
    for yes in (True, False):
        views = [randn(width, seed=4 + i) for i in range(2)]
        buffers = {id(p): (view, new) for p, view, new, has in zip((weight, bias), views, fresh, holds, strict=True) if has}

        class Buffer:
            defers = False

            def reserve(self, param: Tensor, buffers: Any = buffers) -> tuple[Tensor, bool] | None:
                return buffers.get(id(param))  # type: ignore[no-any-return]

            put_sums = staticmethod(biases.finish)

        with using_triton(yes):
            names = count_launches()
            _, stats = norm_forward(x, weight, bias, spec)
            found = norm_gradients(NormInFront(spec, weight, bias), grad, x, stats, need, None, main_grad=Buffer())  # type: ignore[arg-type]
        kept = {has for has, needed in zip(holds, need[1:], strict=True) if needed}
        assert len(names) == (2 + len(kept)) * yes  # sums that a buffer takes are put there apart
        results.append([*found, *views])
    require_close(*results, torch.float32)


def bias_and_residual(dtype_name: str, rows: int, width: int) -> None:
    """A product, a bias and a residual: rounded about as often as without the kernel, which runs once."""
    dtype, names = DTYPES[dtype_name], count_launches()
    a, weight, bias, residual = (
        randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(rows, 8), (width, 8), (width,), (rows, width)])
    )
    out = torch.empty(rows, width, dtype=dtype)
    before = residual.clone()
    with using_triton():
        multiply(a, weight, bias, residual, out=out)
    want = a.double() @ weight.double().t() + bias.double() + residual.double()
    assert names == ["add_bias_kernel"] and torch.equal(residual, before)
    require_close([out], [want.to(dtype)], dtype)
