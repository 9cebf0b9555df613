"""Kernels of a GPU whose output and log of sums are kept: packages and torch's, played on the CPU, against the plain form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.flash_stand_in import (
    FLASH2,
    FLASH3,
    FLASH4,
    UNDER_FLASH2,
    UNDER_FLASH4,
    Install,
    backward_of,
    calls,
    forward_of,
    install_flash,
    lse_backward,
    lse_forward,
)  # fmt: skip
from support.op_checks import randn
from torch import Tensor

from megatron_sp.ops import attention as attention_module
from megatron_sp.ops import flash_packages, gpu_kernels
from megatron_sp.ops.attention import AttentionMask, KernelName, core_attention, why_repeated
from megatron_sp.ops.attention_kernels import KeptTensors, LseKernel
from megatron_sp.ops.attention_pieces import pieces_of_documents
from megatron_sp.ops.flash_packages import FLASH_NAMES, FlashName, Lengths, Pairs, lse_lack
from megatron_sp.ops.gpu_kernels import CUDNN, Dense, FlashKernel, PackageFlash, Packed, TorchFlash, takes_cudnn

__all__ = ["install_flash"]
ALL = {"flash2": FLASH2, "flash3": FLASH3, "flash4": FLASH4}
S, M, D = 20, 4, 16
CPU = torch.device("cpu")
MASKS = {
    "causal": AttentionMask(), "all": AttentionMask(False), "window": AttentionMask(window=5),
    "documents": AttentionMask(documents=((7, 20), (20,))), "documents, window": AttentionMask(documents=((7, 20), (1, 20)), window=5),
    "documents, all": AttentionMask(False, documents=((7, 20), (20,))), "one sequence of documents": AttentionMask(documents=((3, 4, 20),)),
    "padding": AttentionMask(False, torch.tensor([20, 20, 7, 7]), lengths=(20, 20, 7, 7)),
    "padding, an empty sequence": AttentionMask(False, torch.tensor([0, 0, 7, 7]), lengths=(0, 0, 7, 7)),
}  # fmt: skip
TOLERANCE = 0.03  # bf16, of the largest element


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flash kernel and cuDNN's, which a build for the CPU lacks; by their schemas."""

    def sides(*of_window: int | None) -> list[int | None]:
        return [None if side == -1 else side for side in of_window]

    def flash_forward(
        q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        return_debug_mask: bool, *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dropout_p == 0.0 and return_debug_mask is False and q.shape[-1] == k.shape[-1] == v.shape[-1]
        calls.append(("torch forward" if cum_seq_q is None else "torch packed forward", False))
        spans = _spans(cum_seq_q, cum_seq_k, max_q, max_k, q, k)
        found = lse_forward(q, k, v, spans, is_causal, *sides(window_size_left, window_size_right), scale, torch.inf)
        return *found, torch.empty(2), torch.empty(0), torch.empty(0)

    def flash_backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
        max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
        window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert dropout_p == 0.0 and rng_state.shape == (2,) and rng_state.dtype == unused.dtype == torch.uint64
        calls.append(("torch backward" if cum_seq_q is None else "torch packed backward", torch.are_deterministic_algorithms_enabled()))
        spans = _spans(cum_seq_q, cum_seq_k, max_q, max_k, q, k)
        return lse_backward(grad_out, q, k, v, out, logsumexp, spans, is_causal, *sides(window_size_left, window_size_right), scale)

    def cudnn_forward(
        q: Tensor, k: Tensor, v: Tensor, attn_bias: None, compute_log_sumexp: bool, dropout_p: float, is_causal: bool,
        return_debug_mask: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0 and not return_debug_mask
        calls.append((f"cudnn forward, {k.shape[1]} of {q.shape[1]}", False))
        allowed = _top_left(q, k, is_causal)
        out, lse = forward_of(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), allowed, torch.nan, scale)
        return out.transpose(1, 2), lse[..., None], None, None, q.shape[2], k.shape[2], torch.empty(()), torch.empty(()), None

    def cudnn_backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor,
        attn_bias: None, cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert attn_bias is cum_seq_q is cum_seq_k is None and (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
        assert logsumexp.shape == (*q.shape[:3], 1) and logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
        assert philox_seed.shape == philox_offset.shape == ()
        calls.append((f"cudnn backward, {k.shape[1]} of {q.shape[1]}", False))
        rows = [t.transpose(1, 2) for t in (grad_out, q, k, v, out)]
        return tuple(t.transpose(1, 2) for t in backward_of(*rows, logsumexp[..., 0], _top_left(q, k, is_causal), scale))  # type: ignore[arg-type]

    for name, stand_in in {
        "_flash_attention_forward": flash_forward, "_flash_attention_backward": flash_backward,
        "_scaled_dot_product_cudnn_attention": cudnn_forward, "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.ops.aten, name, stand_in)
    monkeypatch.setattr(attention_module, "torch_has_varlen", lambda *_: True)
    monkeypatch.setattr(attention_module, "_HAS_CPU_FLASH", False)
    monkeypatch.setattr(
        torch.backends.cuda, "can_use_cudnn_attention", lambda params: params.enable_gqa or params.key.shape[1] == params.query.shape[1]
    )
    calls.clear()


def _spans(ends_q: Tensor | None, ends_k: Tensor | None, max_q: int, max_k: int, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    from support.flash_stand_in import _spans

    if ends_q is None:
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
    return _spans(ends_q, ends_k, max_q, max_k, q)


def _top_left(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return allowed.tril() if causal else allowed


def operands(r: int, s_k: int = S) -> list[Tensor]:
    return [randn(n, M, heads, D, seed=i).bfloat16() for i, (n, heads) in enumerate(((S, r), (s_k, 1), (s_k, 1)))]


def close(got: list[Tensor], want: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for mine, other in zip(got, want, strict=True):
        assert mine.shape == other.shape
        assert float((mine.double() - other.double()).abs().max()) <= tolerance * float(other.double().abs().max())


def two_passes(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[list[Tensor], list[str]]:
    """The output and the gradients of a second pass, with what a first one without gradients has kept; and the calls of the second."""
    kept = KeptTensors()
    with torch.no_grad():
        first = attend(*inputs, kept)
    saved = kept.release()
    assert saved and all(t.grad_fn is None for t in saved)
    kept.restore(saved)
    del calls[:]
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves, kept)
    assert torch.equal(out, first) and out.is_contiguous()
    with pytest.raises(RuntimeError, match="has kept nothing"):
        kept.take("attention")
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)], [name for name, _ in calls]


def plain(mask: AttentionMask, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    out = core_attention(*leaves, mask, kernel="reference")
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def backward_name(kernel: KernelName, mask: str, r: int) -> str:
    """The kernel that computes a mask's backward: torch's flash kernel does what cuDNN cannot."""
    packed = " packed" if "documents" in mask else ""
    if kernel == "cudnn" and not packed and mask != "window":
        return f"cudnn backward, 1 of {r}"
    return f"{'torch' if kernel in ('sdpa', 'cudnn') else kernel}{packed} backward"


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", [*FLASH_NAMES, "sdpa", "cudnn"])
def test_the_second_pass_takes_what_the_first_has_kept(install_flash: Install, torchs: None, kernel: KernelName, mask: str, r: int) -> None:
    """Results and gradients are the plain ones, and the second pass calls the backward kernel alone: for each sequence with keys."""
    install_flash(**ALL)
    inputs, grad = operands(r), randn(S, M, r, D, seed=4).bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor, kept: KeptTensors) -> Tensor:
        return core_attention(q, k, v, MASKS[mask], kernel=kernel, kept=kept)

    got, called = two_passes(attend, inputs, grad)
    close(got, plain(MASKS[mask], inputs, grad))
    sequences = sum(length > 0 for length in MASKS[mask].lengths or (1,))
    assert called == [backward_name(kernel, mask, r)] * sequences


KERNELS: dict[str, Callable[[bool], FlashKernel]] = {
    "torch": lambda _: TorchFlash(), **{name: (lambda _, name=name: PackageFlash(name)) for name in FLASH_NAMES}  # type: ignore[misc]
}  # fmt: skip


@pytest.mark.parametrize("s_k", [S, 7, 33])
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("name", ["torch", *FLASH_NAMES, "cudnn"])
def test_backward_takes_any_output_and_lse(install_flash: Install, torchs: None, name: str, r: int, s_k: int) -> None:
    """Keys in two parts: with the output and lse over both, the gradients of each part are those of attention to all of them."""
    install_flash(**ALL)
    kernel: LseKernel = CUDNN(False, groups=r > 1) if name == "cudnn" else Dense(KERNELS[name](False), False)
    q, k, v = (t.float() for t in operands(r, S + s_k))
    grad = randn(S, M, r, D, seed=4).bfloat16()
    want = plain(AttentionMask(False), [q.bfloat16(), k.bfloat16(), v.bfloat16()], grad)
    q, k, v = (t.bfloat16() for t in (q, k, v))
    parts = slice(0, S), slice(S, S + s_k)
    results = [kernel.forward(q, k[part], v[part]) for part in parts]
    assert all(lse.shape == (M, r, S) and lse.dtype == torch.float32 for _, lse in results)
    lse = torch.logaddexp(results[0][1], results[1][1])
    out = sum(out.float() * (mine - lse).exp().permute(2, 0, 1)[..., None] for out, mine in results)
    found = [kernel.backward(grad, q, k[part], v[part], out.bfloat16(), lse) for part in parts]
    got = [out, found[0].q.float() + found[1].q.float(), torch.cat([f.k for f in found]), torch.cat([f.v for f in found])]
    close(got, want)


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 4)])
@pytest.mark.parametrize("name", ["torch", *FLASH_NAMES])
def test_packed_sequences_have_lengths_of_their_own_for_queries_and_keys(
    install_flash: Install, torchs: None, name: str, causal: bool, window: int | None
) -> None:
    """lse is [heads, tokens]; the causal mask ends at the last query and key of each sequence."""
    install_flash(**ALL)
    lengths_q, lengths_k, heads, groups = (3, 5, 2), (4, 9, 2), 6, 2
    q, k, v = (
        randn(sum(n), h, D, seed=i).bfloat16() for i, (n, h) in enumerate(((lengths_q, heads), (lengths_k, groups), (lengths_k, groups)))
    )
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lengths_q, lengths_k)]
    pairs = Pairs(causal, window, Lengths(ends[0], ends[1], 5, 9))
    kernel, grad = KERNELS[name](False), randn(*q.shape, seed=5).bfloat16()
    out, lse = kernel.forward(q, k, v, pairs)
    assert lse.shape == (heads, sum(lengths_q))
    grads = kernel.backward(grad, q, k, v, out, lse, pairs, lambda: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)))
    want, at_q, at_k = [], 0, 0
    for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
        # [tokens, (g r), d] -> [s, m = g, r, d]
        mine = [q[at_q : at_q + n_q].unflatten(1, (groups, -1)), k[at_k : at_k + n_k, :, None], v[at_k : at_k + n_k, :, None]]
        mask = AttentionMask(causal, window=window)
        want.append(plain(mask, mine, grad[at_q : at_q + n_q].unflatten(1, (groups, -1))))
        at_q, at_k = at_q + n_q, at_k + n_k
    close([out, *grads], [torch.cat(parts).flatten(1, 2) for parts in zip(*want, strict=True)])


@pytest.mark.parametrize("d_v", [8, 24])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
@pytest.mark.parametrize("kernel", [*FLASH_NAMES, "sdpa"])
def test_values_of_another_width_go_in_padded(install_flash: Install, torchs: None, kernel: KernelName, mask: str, d_v: int) -> None:
    install_flash(**ALL)
    q, k, _ = operands(3)
    inputs, grad = [q, k, randn(S, M, 1, d_v, seed=2).bfloat16()], randn(S, M, 3, d_v, seed=4).bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor, kept: KeptTensors) -> Tensor:
        return core_attention(q, k, v, MASKS[mask], kernel=kernel, kept=kept)

    got, called = two_passes(attend, inputs, grad)
    assert called == [backward_name(kernel, mask, 3)]
    close(got, plain(MASKS[mask], inputs, grad))
    if kernel != "sdpa":  # torch's forward without kept results asks for no scale, and its stand-in wants one
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = core_attention(*leaves, MASKS[mask], kernel=kernel)
        close([out.detach(), *torch.autograd.grad(out, leaves, grad)], plain(MASKS[mask], inputs, grad))


def test_gradients_of_packages_are_written_where_they_are_packed(install_flash: Install) -> None:
    """Versions 2 and 3 write into views of one tensor in the layout of the fused QKV; version 4 makes its own."""
    install_flash(**ALL)
    qkv = randn(S, M, 3 + 2, D).bfloat16()
    q, k, v = qkv[:, :, :3], qkv[:, :, 3:4], qkv[:, :, 4:]
    for name in FLASH_NAMES:
        kernel = Dense(PackageFlash(name), True)
        out, lse = kernel.forward(q, k, v)
        grads = kernel.backward(out, q, k, v, out, lse)
        bases = {g._base is not None and g._base.shape == qkv.shape for g in grads}
        assert bases == {name != "flash4"}


@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("kernel", [*FLASH_NAMES, "sdpa"])
def test_deterministic_mode_reaches_backward(install_flash: Install, torchs: None, kernel: KernelName, mask: str) -> None:
    install_flash(**ALL)
    inputs, grad = operands(1), randn(S, M, 1, D, seed=4).bfloat16()
    found = []
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            two_passes(lambda q, k, v, kept: core_attention(q, k, v, MASKS[mask], kernel=kernel, kept=kept), inputs, grad)
        finally:
            torch.use_deterministic_algorithms(False)
        found += [deterministic for _, deterministic in calls]
    assert found == [False, True]


def test_cudnn_is_given_what_sdpa_would_give_it(torchs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients in both passes, since it takes less then; keys once for each query where it knows no groups; else torch's kernel."""
    asked: list[Any] = []

    def knows_no_groups(params: Any) -> bool:
        asked.append(params)
        assert params.query.requires_grad and params.key.requires_grad and params.attn_mask is None and params.dropout == 0.0
        return bool(not params.enable_gqa and params.is_causal)

    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", knows_no_groups)
    inputs, grad = operands(3), randn(S, M, 3, D, seed=4).bfloat16()
    with torch.no_grad():
        assert takes_cudnn(*inputs, causal=True) == CUDNN(True, groups=False)
    assert takes_cudnn(*inputs, causal=False) is None and len(asked) == 4
    for causal, name in ((True, "cudnn backward, 3 of 3"), (False, "torch backward")):
        mask = AttentionMask(causal)
        got, called = two_passes(lambda q, k, v, kept, mask=mask: core_attention(q, k, v, mask, kernel="cudnn", kept=kept), inputs, grad)
        close(got, plain(mask, inputs, grad))
        assert called == [name]


# what is kept, and why not


@pytest.mark.parametrize(("kernel", "options", "words"), [
    ("reference", {}, "the plain form"), ("flash2", {"dropout": 0.1}, "dropout"), ("sdpa", {"dtype": torch.float32}, "float32"),
    ("sdpa", {"dtype": torch.float64}, "float64"), ("sdpa", {"head_dim": 264}, "heads 264 wide"),
    ("flash4", {"head_dim": 12}, "heads 12 wide"),
    ("cudnn", {}, ""), ("sdpa", {}, ""), ("sdpa-fa3", {}, ""),
])  # fmt: skip
def test_which_results_are_kept_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kernel: KernelName, options: dict[str, Any], words: str) -> None:
    monkeypatch.setattr(attention_module, "_has_flash", lambda _device: True)
    use = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "dropout": 0.0} | options
    assert words in why_repeated(kernel, **use) and bool(why_repeated(kernel, **use)) == bool(words)
    monkeypatch.setattr(attention_module, "_has_flash", lambda _device: False)
    if not words:
        assert why_repeated(kernel, **use) == "torch has no flash kernel on this GPU"


BETA_BACKWARD = "def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0): ..."
BETA_WINDOW = "def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale, causal, deterministic, window_size_left=None): ..."
BETA = "def _flash_attn_fwd(q, k, v, softmax_scale=None, causal=False, window_size=None): ...\n"
LACKS = [
    ({}, "flash2", "flash-attn is not installed"), ({"flash2": FLASH2}, "flash2", ""), ({"flash3": FLASH3}, "flash3", ""),
    ({"flash4": FLASH4}, "flash4", ""),
    ({"flash3": FLASH3.replace("flash3_backward as _flash_attn_backward", "calls")}, "flash3", "FlashAttention 3 lacks a function"),
    ({"flash4": FLASH4, "under_flash4": UNDER_FLASH4.replace("as _flash_attn_bwd", "as bwd")},
     "flash4", "has no attribute '_flash_attn_bwd'"),
    ({"flash4": FLASH4, "under_flash4": BETA + BETA_BACKWARD},
     "flash4", "_flash_attn_bwd of FlashAttention 4 has no argument deterministic"),
    ({"flash4": FLASH4,
      "under_flash4": BETA + BETA_WINDOW},
     "flash4", "_flash_attn_bwd of FlashAttention 4 has no argument window_size"),
    ({"flash2": FLASH2, "under_flash2": UNDER_FLASH2 + "def _flash_attn_forward(q, k, v, softmax_scale, causal, window_size, sinks): ..."},
     "flash2", "_flash_attn_forward of FlashAttention 2 wants an argument sinks"),
]  # fmt: skip


@pytest.mark.parametrize(("packages", "name", "reason"), LACKS)
def test_a_package_that_is_not_as_it_is_known_here(install_flash: Install, packages: dict[str, str], name: FlashName, reason: str) -> None:
    install_flash(**packages)
    assert reason in lse_lack(name) and bool(lse_lack(name)) == bool(reason)
    assert why_repeated(name, CPU, torch.bfloat16, 64, 0.0) == lse_lack(name)


@pytest.mark.parametrize(
    "result", ["out, lse[..., None]", "out, lse.double()", "out, None", "out[:, 1:], lse", "out, q, k, v, out, lse, None, None"]
)
def test_results_of_another_form_are_refused(install_flash: Install, result: str) -> None:
    """As of version 2 before 2.7, whose second result was q."""
    text = (
        UNDER_FLASH2
        + f"""
right = _flash_attn_forward
def _flash_attn_forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right):
    out, lse, *_ = right(q, k, v, 0.0, softmax_scale, causal, window_size_left, window_size_right, 0.0, None, False)
    return {result}
"""
    )
    install_flash(flash2=FLASH2, under_flash2=text)
    with pytest.raises(RuntimeError, match="FlashAttention 2 gives its results in another form than is known here"):
        Dense(PackageFlash("flash2"), True).forward(*operands(1))


def test_a_function_that_is_an_operator_of_torch() -> None:
    """Packages register their functions as operators, whose objects take anything: the function inside says what."""

    @torch.library.custom_op("megatron_sp_tests::forward_with_lse", mutates_args=())
    def function(q: Tensor, softmax_scale: float, causal: bool = False) -> Tensor:
        return q * softmax_scale

    assert list(flash_packages._parameters(function)) == ["q", "softmax_scale", "causal"]
    assert flash_packages._call(function, {"q": torch.ones(1), "softmax_scale": 3.0, "k": torch.ones(1)}) == 3.0


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("kernel", [
    Dense(TorchFlash(), True), Dense(TorchFlash(), True, 4),
    Packed(TorchFlash(), pieces_of_documents(((S,), (S,)), True), M // 2, True, 4),
    CUDNN(True, groups=True), CUDNN(False, groups=False),
], ids=["dense", "window", "packed", "cudnn", "cudnn, no groups"])  # fmt: skip
def test_the_operators_of_this_torch_take_these_arguments(kernel: LseKernel, r: int) -> None:
    """Their schemas and the shapes of their results, on tensors without contents."""
    qkv = torch.empty(S, M, r + 2, D, dtype=torch.bfloat16, device="meta")
    q, k, v = qkv[:, :, :r], qkv[:, :, r : r + 1], qkv[:, :, r + 1 :]
    out, lse = kernel.forward(q, k, v)
    assert out.shape == q.shape and out.is_contiguous() and lse.dtype == torch.float32
    assert lse.shape == ((M // 2 * r, 2 * S) if isinstance(kernel, Packed) else (M, r, S))
    grads = kernel.backward(out, q, k, v, out, lse)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_without_keeping_nothing_of_this_is_called(torchs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is not recomputed goes through SDPA, which saves the output itself."""
    monkeypatch.setattr(gpu_kernels.Dense, "forward", None)
    core_attention(*operands(1), AttentionMask(), kernel="sdpa")
