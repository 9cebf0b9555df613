"""LM head and loss in chunks: equal to softmax cross entropy of the whole, and never as large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import PoisonedSink, leaves, randn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sp.parallel import lm_head
from megatron_sp.parallel.lm_head import default_chunk_tokens, lm_head_logits, lm_head_loss

S, B, H, VOCAB, ROWS = 8, 3, 5, 13, 16
CHUNKS = (1, 5, 23, 24, 25, None)


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Labels, and loss masks that are weights, with zeros among them."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, VOCAB, (S, B), generator=generator)
    mask = torch.rand(S, B, generator=generator, dtype=torch.float64) * (torch.rand(S, B, generator=generator) > 0.3)
    return {"x": randn(S, B, H, dtype=dtype), "weight": randn(ROWS, H, dtype=dtype), "labels": labels, "mask": mask}


def naive(x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logits = (x @ weight.t())[..., :VOCAB]
    safe = torch.where(mask == 0, 0, labels)
    return (F.cross_entropy(logits.flatten(0, 1), safe.flatten(), reduction="none") * mask.flatten()).sum()


def run(b: dict[str, Tensor], scale: float = 1.0, chunk: int | None = None, plain: bool = False, **kwargs: Any) -> dict[str, Tensor | None]:
    i = leaves(x=b["x"], weight=b["weight"])
    if plain:
        loss = naive(i["x"], i["weight"], b["labels"], b["mask"])
    else:
        loss, *_ = lm_head_loss(i["x"], i["weight"], b["labels"], b["mask"], vocab_size=VOCAB, chunk_tokens=chunk, **kwargs)
    (loss * scale).backward()
    return {"loss": loss.detach(), "x": i["x"].grad, "weight": i["weight"].grad}


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("scale", [1.0, -1 / 24])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, FP64), (torch.float32, FP32)])
def test_is_cross_entropy_for_any_chunk_and_later_scaling(chunk: int | None, scale: float, dtype: torch.dtype, tolerance: float) -> None:
    got = run(batch(dtype), scale, chunk)
    assert_law(got, run(batch(), scale, plain=True), tolerance)
    assert not got["weight"][VOCAB:].any()  # type: ignore[index]


@pytest.mark.parametrize("bad", [-100, -1, VOCAB, ROWS, 2**40])
def test_labels_of_masked_tokens_may_be_anything(bad: int) -> None:
    b = batch()
    b["labels"] = torch.where(b["mask"] == 0, bad, b["labels"])
    assert int((b["labels"] == bad).sum()) > 3
    assert_law(run(b, chunk=5), run(batch(), plain=True), FP64)


def test_padding_rows_get_no_probability_whatever_they_hold() -> None:
    b = batch()
    b["weight"][VOCAB:] = 1e4
    assert_law(run(b, chunk=5), run(b, plain=True), FP64)


def test_a_vocabulary_without_padding_rows() -> None:
    b = batch()
    b["weight"] = b["weight"][:VOCAB].contiguous()
    assert_law(run(b, chunk=5), run(b, plain=True), FP64)


def test_the_main_grad_gets_the_scaled_gradient_and_micro_batches_add_up() -> None:
    b, want = batch(), run(batch(), plain=True)["weight"]
    i = leaves(x=b["x"], weight=b["weight"])
    main_grad = PoisonedSink(i["weight"])
    for scale, total in ((3.7, 3.7), (-1.2, 2.5), (0.0, 2.5)):
        loss, *_ = lm_head_loss(i["x"], i["weight"], b["labels"], b["mask"], vocab_size=VOCAB, chunk_tokens=7, main_grad=main_grad)
        (loss * scale).backward()
        assert i["weight"].grad is None
        assert law_error(main_grad.of(i["weight"]), want * total) <= FP64  # type: ignore[operator]


def test_the_returned_losses_of_tokens_are_unweighted_and_detached() -> None:
    b = batch()
    _, token_loss, _ = lm_head_loss(b["x"].requires_grad_(), b["weight"], b["labels"], b["mask"], vocab_size=VOCAB, chunk_tokens=5)
    logits = b["x"].detach() @ b["weight"][:VOCAB].t()
    want = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none").view(S, B)
    assert not token_loss.requires_grad
    assert law_error(token_loss, want) <= FP64


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("x", "weight")])
def test_frozen_inputs(frozen: tuple[str, ...]) -> None:
    b = batch()
    i = leaves(frozen, x=b["x"], weight=b["weight"])
    loss, *_ = lm_head_loss(i["x"], i["weight"], b["labels"], b["mask"], vocab_size=VOCAB, chunk_tokens=5)
    want = run(b, plain=True)
    assert law_error(loss, want["loss"]) <= FP64  # type: ignore[arg-type]
    assert loss.requires_grad == (len(frozen) < 2)
    if loss.requires_grad:
        loss.backward()
    assert_law({k: v.grad for k, v in i.items()}, {k: None if k in frozen else want[k] for k in i}, FP64)


def test_without_autograd_no_gradient_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation must not pay for two more GEMMs and a buffer as large as the weight."""
    b = batch()
    monkeypatch.setattr(lm_head, "put_product", lambda *a, **k: pytest.fail("a weight gradient was computed"))
    with torch.no_grad():
        loss, *_ = lm_head_loss(b["x"].requires_grad_(), b["weight"].requires_grad_(), b["labels"], b["mask"], vocab_size=VOCAB)
    assert not loss.requires_grad


def test_all_tokens_masked() -> None:
    b = batch()
    b["mask"], b["labels"] = torch.zeros(S, B), torch.full((S, B), -100)
    got = run(b, 3.7, 5)
    assert got["loss"] == 0 and not got["x"].any() and not got["weight"].any()  # type: ignore[union-attr]


def test_a_masked_token_without_a_finite_loss_leaves_the_sum_finite() -> None:
    """A padding token may hold anything finite; here its own loss overflows to infinity."""
    b = batch(torch.float32)
    b["mask"][2, 1], b["labels"][2, 1] = 0.0, 0
    b["x"][2, 1], b["weight"][0], b["weight"][1] = 3e19, -1e19, 1e19
    assert torch.isfinite(run(b, chunk=5)["loss"]).all()  # type: ignore[arg-type]


def test_a_nan_reaches_the_loss_and_the_gradients() -> None:
    b = batch()
    b["mask"][2, 1] = 1.0
    b["x"][2, 1, 0] = float("nan")
    got = run(b, chunk=5)
    assert all(torch.isnan(t).any() for t in got.values() if t is not None)
    assert torch.isfinite(got["x"]).all(-1).sum() == S * B - 1  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, B), (S, 0), (1, 1)])
def test_few_or_no_tokens(shape: tuple[int, int]) -> None:
    b = {"x": randn(*shape, H), "weight": randn(ROWS, H), "labels": torch.ones(shape, dtype=torch.int64), "mask": torch.ones(shape)}
    want = run(b, plain=True)
    junk = [torch.full((ROWS, H), float("nan"), dtype=torch.float64) for _ in range(8)]
    del junk  # what empty() hands out next
    assert_law(run(b), want, FP64)


def test_strides_do_not_matter() -> None:
    b = batch()
    odd = {"x": randn(B, H, S).permute(2, 0, 1), "weight": randn(H, ROWS).t()}
    odd |= {name: b[name].t().contiguous().t() for name in ("labels", "mask")}
    assert_law(run(odd, chunk=5), run(odd, plain=True), FP64)


def test_backward_twice_through_a_retained_graph() -> None:
    b = batch()
    i = leaves(x=b["x"], weight=b["weight"])
    loss, *_ = lm_head_loss(i["x"], i["weight"], b["labels"], b["mask"], vocab_size=VOCAB, chunk_tokens=5)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    want = run(b, 3.0, plain=True)
    assert_law({k: v.grad for k, v in i.items()}, {k: want[k] for k in i}, FP64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Logits and their gradients are rounded to 16 bits (2 roundings each, of numbers around 4 and 1); the loss is summed in fp32."""
    b = batch(dtype)
    got, want = run(b, chunk=5), run({k: v.double() if v.is_floating_point() else v for k, v in b.items()}, plain=True)
    assert got["loss"].dtype == torch.float32  # type: ignore[union-attr]
    assert_law(got, want, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1 / 3), (torch.bfloat16, 1 / 1000), (torch.float16, 2.0**17)])
def test_half_precision_rounds_a_later_scale_only_once(dtype: torch.dtype, scale: float) -> None:
    """1/tokens in bf16 is off by up to 0.4 %, for every gradient below the head; a loss scale above 65504 is infinite in fp16."""
    b = batch(dtype)
    b["x"] *= 0.01
    b["weight"] *= 0.01
    unscaled, scaled = run(b)["x"].double(), run(b, scale)["x"].double()  # type: ignore[union-attr]
    ratio = float((scaled * unscaled).sum() / (unscaled * unscaled).sum())
    assert ratio == pytest.approx(scale, rel=torch.finfo(dtype).eps / 10)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            self.numel = max(self.numel, t.numel() if isinstance(t, Tensor) else 0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_a_sequence_never_exist(dtype: torch.dtype) -> None:
    tokens, vocab, chunk = 64, 96, 8
    x, weight = randn(tokens, 1, H, dtype=dtype).requires_grad_(), randn(vocab, H, dtype=dtype).requires_grad_()
    with LargestTensor() as seen:
        loss, *_ = lm_head_loss(
            x, weight, torch.ones(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1), vocab_size=90, chunk_tokens=chunk
        )
        loss.backward()
    assert seen.numel == chunk * vocab


def test_default_chunks_take_about_50_mib_and_at_most_512_tokens() -> None:
    for rows in (30592, 50304, 256000):
        chunk = default_chunk_tokens(rows)
        assert chunk % 64 == 0 and 32 * 2**20 < chunk * rows * 4 <= max(64 * 2**20, 128 * rows * 4)
    assert default_chunk_tokens(8192) == default_chunk_tokens(10) == 512 and default_chunk_tokens(10**7) == 128
    assert default_chunk_tokens(8192, "cuda") > 512


def test_logits_for_generation_leave_padding_out() -> None:
    x, weight = randn(2, H, dtype=torch.bfloat16), randn(ROWS, H, dtype=torch.bfloat16)
    logits = lm_head_logits(x, weight, VOCAB)
    assert logits.shape == (2, VOCAB) and logits.dtype == torch.float32
    assert law_error(logits, x.double() @ weight[:VOCAB].double().t()) <= torch.finfo(torch.bfloat16).eps
