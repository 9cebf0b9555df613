"""Elementwise chains of a training step, each in several forms: torch's, compiled, of other libraries.

A ``Chain`` has a plain function of its inputs, which says what is right and is what torch.compile gets, and a table of
forms. Those of ours go through the public functions of ``megatron_sp.ops`` and are held to one choice of
--fused-kernels; kernels that this machine has not are *not there*.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from first_light.fused import KERNELS, require, using
from first_light.records import NotThereError
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout, keep_mask
from megatron_sp.ops.norm import NormSpec, norm_backward, norm_forward
from megatron_sp.ops.rotary import apply_rotary, rotary_tables
from megatron_sp.parallel.lm_head import lm_head_loss

Tensors = list[Tensor | None]


def _nothing() -> None:
    pass


EPS, RATE = 1e-5, 0.1


@dataclass(frozen=True)
class Calls:
    """A form, ready to be called: both halves return tensors in the order of the plain function's output and inputs.

    ``before_forward`` and ``before_backward`` fill what they change in place; that is not timed.
    """

    forward: Callable[[], Tensors]
    backward: Callable[[], Tensors]
    before_forward: Callable[[], object] = _nothing
    before_backward: Callable[[], object] = _nothing


Form = Callable[[], Calls]


@dataclass(frozen=True)
class Chain:
    """A chain of elementwise operations.

    Attributes:
        name: with its shape.
        plain: the function, of ``inputs``, differentiable.
        inputs: those that have a gradient.
        grad: of the output.
        num_bytes: that (forward, backward) must at least read and write.
        forms: by name; a form that cannot be made raises NotThereError.
        dropped: bool, on the CPU: where the first input's gradient must be zero, and nowhere else.
        add: to be added to the first input's gradient, as a block does with the residual's.
        liger: Liger's function for it, with what follows the inputs.
    """

    name: str
    plain: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    grad: Tensor
    num_bytes: tuple[float, float]
    forms: dict[str, Form]
    dropped: Tensor | None = None
    add: Tensor | None = None
    liger: tuple[Any, ...] = ()

    def by_autograd(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor] | None = None, grad: Tensor | None = None
    ) -> Calls:
        """Return the halves of a differentiable function of the inputs, by default of the chain's own."""
        leaves = tuple(x.detach().requires_grad_() for x in inputs or self.inputs)
        grad = self.grad if grad is None else grad
        made: list[Tensor] = [function(*leaves)]

        def forward() -> Tensors:
            made[0] = function(*leaves)
            return [made[0].detach()]

        def backward() -> Tensors:
            first, *others = torch.autograd.grad(made[0], leaves, grad, retain_graph=True)
            return [first if self.add is None else first + self.add.to(first.dtype), *others]

        return Calls(forward, backward)


def ours(kernel: str, draw: Draw, make: Callable[[str], Calls], norm: NormSpec | None = None) -> Calls:
    """Return what ``make`` does of a kernel's name, held to that kernel.

    Raises:
        NotThereError: this machine has no such kernels.
    """
    if kernel != "torch":
        require(kernel, draw.device, draw.dtype, norm)
    with using(kernel):
        made = make(kernel)

    def held(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with using(kernel):
                return call()

        return run

    return Calls(*(held(getattr(made, name)) for name in ("forward", "backward", "before_forward", "before_backward")))


def forms_of(
    draw: Draw, make: Callable[[str], Calls], kernels: Sequence[str] = ("torch", "triton"), norm: NormSpec | None = None
) -> dict[str, Form]:
    """Return the table of a chain's forms that go through our own functions."""
    return {kernel: partial(ours, kernel, draw, make, norm) for kernel in kernels}


def compiled(chain: Chain, backend: str) -> Calls:
    """Return the plain function by torch.compile."""
    torch._dynamo.reset()  # one shape is one compilation
    return chain.by_autograd(torch.compile(chain.plain, dynamic=False, backend=backend))


def of_liger(chain: Chain) -> Calls:
    """Return a function of Liger's ``transformers.functional``, where it is installed."""
    try:
        functions = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        raise NotThereError(f"Liger is not installed ({error})") from None
    name, *more = chain.liger
    return chain.by_autograd(lambda *x: getattr(functions, name)(*x, *more))


@dataclass(frozen=True)
class Shape:
    """Sizes of the chains: t tokens (b = 1), h, f and heads as in a model, v entries of the vocabulary."""

    label: str
    tokens: int
    hidden: int
    ffn: int
    heads: int
    vocab: int


def chains(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], Chain]]:
    """Yield what makes each chain; their operands exist one chain at a time."""
    makers: tuple[Callable[[Shape, Draw], Chain], ...] = (
        partial(_norm, "RMSNorm"), partial(_norm, "LayerNorm"), _dropout, partial(_gated, "swiglu"), partial(_gated, "geglu_tanh"), _rotary,
        _head,
    )  # fmt: skip
    for maker in makers:
        yield partial(maker, shape, Draw(device, dtype))


def others(chain: Chain, backend: str) -> dict[str, Form]:
    """Return the forms of other libraries: the plain function itself and compiled, and Liger's."""
    made: dict[str, Form] = {
        "eager": lambda: chain.by_autograd(chain.plain),
        "compiled": lambda: compiled(chain, backend),
    }
    if chain.liger:
        made["Liger"] = lambda: of_liger(chain)
    return made


class Draw:
    """Random operands."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype).mul_(scale)


def _bytes(x: Tensor) -> float:
    return float(x.numel() * x.element_size())


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _norm(kind: str, shape: Shape, draw: Draw) -> Chain:
    """Norm; its backward pass adds the residual's gradient."""
    x, add, grad = (draw(shape.tokens, 1, shape.hidden) for _ in range(3))
    weight, shift = 1 + draw(shape.hidden, scale=0.1), draw(shape.hidden)
    bias = shift if kind == "LayerNorm" else None
    spec = NormSpec(kind, EPS)  # type: ignore[arg-type]
    params = (weight,) if bias is None else (weight, bias)

    def make(kernel: str) -> Calls:
        chosen = replace(spec, kernel="apex" if kernel == "apex" else "torch")
        stats = norm_forward(x, weight, bias, chosen)[1]
        return Calls(
            lambda: [norm_forward(x, weight, bias, chosen)[0]],
            lambda: list(norm_backward(grad, x, weight, bias, stats, chosen, (True, True, bias is not None), add))[
                : 1 + len(params)
            ],
        )

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wide, scale = _wide(x), _wide(weight)
        if bias is not None:
            return F.layer_norm(wide, wide.shape[-1:], scale, _wide(bias), EPS).to(x.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * scale).to(x.dtype)

    forms = forms_of(draw, make, KERNELS, spec)
    # 0.0: offset of the weight; "llama": rounds before the weight; False: not in place
    liger = ("liger_rms_norm", EPS, 0.0, "llama", False) if bias is None else ("liger_layer_norm", EPS)
    return Chain(
        f"{kind}, {shape.label}", plain, (x, *params), grad, (2 * _bytes(x), 4 * _bytes(x)), forms, add=add, liger=liger
    )


def _dropout(shape: Shape, draw: Draw) -> Chain:
    """Dropout by hash, and the residual."""
    x, residual, grad = (draw(shape.tokens, 1, shape.hidden) for _ in range(3))
    positions = torch.arange(shape.tokens, device=draw.device)
    keys = DropoutKeys.create(1, 2, torch.zeros(1, dtype=torch.int64, device=draw.device), positions).row_keys(3, 1)

    def plain(x: Tensor, residual: Tensor) -> Tensor:
        mask = keep_mask(keys, x.shape[-1], RATE)
        return (_wide(residual) + _wide(x) * mask * (1 / (1 - RATE))).to(x.dtype)

    chain = Chain(
        f"dropout + residual, {shape.label}",
        plain,
        (x, residual),
        grad,
        (3 * _bytes(x), 2 * _bytes(x)),
        {},
        dropped=~keep_mask(keys.cpu(), shape.hidden, RATE),
    )

    def make(_: str) -> Calls:
        return chain.by_autograd(lambda x, residual: hash_dropout(x, RATE, keys, residual=residual))

    chain.forms.update(forms_of(draw, make))
    return chain


def _gated(name: Any, shape: Shape, draw: Draw) -> Chain:
    """A gated activation of [gate | up]."""
    u, grad = draw(shape.tokens, 1, 2 * shape.ffn), draw(shape.tokens, 1, shape.ffn)
    spare = torch.empty_like(grad)

    def make(_: str) -> Calls:
        activation = Activation(name)
        # the gradient's memory may be reused
        return Calls(
            lambda: [activation.forward(u)],
            lambda: [activation.backward_(spare, u)],
            before_backward=lambda: spare.copy_(grad),
        )

    def plain(u: Tensor) -> Tensor:
        gate, up = _wide(u).chunk(2, dim=-1)
        return ((F.silu(gate) if name == "swiglu" else F.gelu(gate, approximate="tanh")) * up).to(u.dtype)

    forms = forms_of(draw, make)
    moved = _bytes(grad)
    return Chain(f"{name}, {shape.label}", plain, (u,), grad, (3 * moved, 5 * moved), forms)


def _rotary(shape: Shape, draw: Draw) -> Chain:
    """Rotary positions of queries and keys inside packed q, k, v, in place."""
    d, n = shape.hidden // shape.heads, shape.heads
    qkv, grad = (draw(shape.tokens, 1, 3 * shape.hidden) for _ in range(2))
    cos, sin = rotary_tables(torch.arange(shape.tokens, device=draw.device), d, 1e4)
    spare, spare_grad, back = torch.empty_like(qkv), torch.empty_like(grad), -sin

    def make(_: str) -> Calls:
        turn = partial(apply_rotary, head_dim=d, heads=3, rotated=2)
        return Calls(
            lambda: [turn(spare, cos, sin)],
            lambda: [turn(spare_grad, cos, back)],
            lambda: spare.copy_(qkv),
            lambda: spare_grad.copy_(grad),
        )

    def plain(qkv: Tensor) -> Tensor:
        heads = _wide(qkv).view(shape.tokens, n, 3, d)
        first, second = heads[:, :, :2].chunk(2, dim=-1)
        c, s = (t.to(heads.dtype)[:, None, None] for t in (cos, sin))
        turned = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
        return torch.cat([turned, heads[:, :, 2:]], dim=2).view(qkv.shape).to(qkv.dtype)

    forms = forms_of(draw, make)
    moved = 2 * _bytes(qkv) * 2 / 3  # queries and keys, read and written
    return Chain(f"rotary in packed QKV, {shape.label}", plain, (qkv,), grad, (moved, moved), forms)


def _head(shape: Shape, draw: Draw) -> Chain:
    """LM head and cross entropy; its forward pass computes the gradients as well."""
    x, weight = draw(shape.tokens, 1, shape.hidden), draw(shape.vocab, shape.hidden, scale=shape.hidden**-0.5)
    labels = torch.arange(shape.tokens, device=draw.device)[:, None] * 7 % shape.vocab
    mask = torch.ones(shape.tokens, 1, device=draw.device)
    grad = torch.ones((), device=draw.device)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(_wide(x[:, 0] @ weight.t()), labels[:, 0], reduction="sum")

    moved = 3 * (_bytes(x) + _bytes(weight))
    chain = Chain(f"LM head and loss, {shape.label}", plain, (x, weight), grad, (moved, _bytes(x) + _bytes(weight)), {})

    def make(_: str) -> Calls:
        return chain.by_autograd(lambda x, weight: lm_head_loss(x, weight, labels, mask, vocab_size=shape.vocab).sum)

    chain.forms.update(forms_of(draw, make))
    return chain
