"""MLPs of experts, the products of each expert one after another and those of all as one: what they compute, and which is faster.

The shapes are those of a rank that has all experts of a layer. Right is what fp64 computes one after another; gradients of the weights
are added up in fp32, in memory that is there already, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from first_light.measure import Stopwatch, error_of
from first_light.records import Context, NotThereError
from megatron_sp.ops import expert_mlp
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.expert_mlp import Choices, ExpertGrads, ExpertWeights, is_grouped, runs_grouped, sum_dtype
from megatron_sp.ops.routing import RoutingSpec, count_chosen, route


class Shape(NamedTuple):
    """Sizes of a layer with gated experts: tokens, h, experts E, k of a token, f."""

    tokens: int
    hidden: int
    experts: int
    k: int
    ffn: int


SHAPES = {
    "OLMoE-1B-7B": Shape(4096, 2048, 64, 8, 1024), "Qwen3-30B-A3B": Shape(4096, 2048, 128, 8, 768),
    "Mixtral 8x7B": Shape(4096, 4096, 8, 2, 14336), "Mixtral 8x7B, 32K tokens": Shape(32768, 4096, 8, 2, 14336),
}  # fmt: skip
_TINY = {"tiny": Shape(48, 64, 6, 2, 16)}
_CHECKED = Shape(384, 256, 16, 4, 128)
FORMS = {"one after another": False, "as one": True}
DTYPES = {torch.bfloat16: 0.03, torch.float32: 3e-5}
"""Tolerances: a few roundings, of sums of some hundred terms in fp32."""


def run(context: Context) -> None:
    """Record errors, and times in bf16."""
    device = context.torch_device
    torch.manual_seed(1)
    for dtype, tolerance in DTYPES.items():
        row = str(dtype).removeprefix("torch.")
        for name, grouped in FORMS.items():
            context.attempt(
                "what they compute", f"{row}: {name}", lambda d=dtype, g=grouped, t=tolerance: check(device, d, g, t)
            )  # type: ignore[misc]
    watch = Stopwatch(device, 3 if context.tiny else 15, 2**20 if context.tiny else 2**30)
    for label, shape in (_TINY if context.tiny else SHAPES).items():
        try:
            time_forms(context, label, Layer(shape, device, torch.bfloat16), watch)
        except Exception as error:  # too little memory, say
            context.fail("how fast", label, error)


def check(device: torch.device, dtype: torch.dtype, grouped: bool, tolerance: float) -> dict[str, Any]:
    """Return the errors of a form against fp64 on the CPU.

    Raises:
        NotThereError: torch's grouped product does not run here.
    """
    layer = Layer(_CHECKED, device, dtype)
    _require(layer, grouped)
    got, want = layer.results(grouped), layer.wide().results(False)
    output, gradients = error_of(got[:1], want[:1]), error_of(got[1:], want[1:])
    return {
        "verdict": "ok" if max(output, gradients) <= tolerance else "wrong",
        "output error": output,
        "gradient error": gradients,
    }


def time_forms(context: Context, label: str, layer: Layer, watch: Stopwatch) -> None:
    """Record milliseconds and the rate of both passes of each form; the form that a run takes is named."""
    forms = {name: grouped for name, grouped in FORMS.items() if not grouped or runs_grouped(layer.x.device)}
    taken = is_grouped(layer.x, layer.params)
    wide = layer.forward(False)
    for way, products in (("forward", 1), ("backward", 2)):
        calls: dict[str, Callable[[], Any]] = {
            name: (lambda g=grouped: layer.forward(g))
            if way == "forward"
            else (lambda g=grouped: layer.backward(wide, g))  # type: ignore[misc]
            for name, grouped in forms.items()
        }
        for name, ms in watch.ms(calls).items():
            rate = products * layer.flops / max(ms.median, 1e-9) / 1e9
            values = {"median_ms": ms.median, "min_ms": ms.low, "max_ms": ms.high, "rate_tflops": rate}
            context.record(
                f"how fast: {way}", f"{label}: {name}", message="a run's choice" * (forms[name] == taken), **values
            )


def _require(layer: Layer, grouped: bool) -> None:
    if grouped and layer.x.is_cuda and not runs_grouped(layer.x.device):
        raise NotThereError("torch._grouped_mm does not run on this device")
    if grouped and layer.x.dtype != torch.bfloat16:
        raise NotThereError("torch._grouped_mm is for bf16 on a GPU")


@dataclass
class _Sums:
    """A ``MainGrad`` that holds fp32 sums of some parameters; what is in them is overwritten."""

    views: dict[int, Tensor]
    defers = False

    @property
    def held(self) -> Container[int]:
        return self.views

    def reserve(self, param: Tensor) -> tuple[Tensor, bool] | None:
        return self.views[id(param)], True

    def reserve_ahead(self, param: Tensor) -> Tensor | None:
        return None

    def put_sums(self, sums: Sequence[tuple[Tensor, tuple[Tensor, bool]]]) -> None:
        from megatron_sp.ops.kernels import biases

        biases.finish(sums)

    def finish(self, param: Tensor) -> None:
        pass

    def later(self, param: Tensor, write: Callable[[], object]) -> bool:
        return False

    def cover(self) -> None:
        pass


class Layer:
    """Rows, choices and weights of a layer, drawn on the device."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        def draw(*sizes: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*sizes, device=device, dtype=dtype).mul_(scale)

        tokens, h, experts, k, f = shape
        self.x, self.grad = draw(tokens, h), draw(tokens, h)
        self.params = ExpertWeights(
            draw(experts, 2 * f, h, scale=h**-0.5), None, draw(experts, h, f, scale=f**-0.5), None
        )
        # loads that are uneven as those of a young router
        logits = draw(tokens, experts).float() + draw(experts, scale=0.5).float()
        routed = route(logits, RoutingSpec(experts, k))
        numbers = routed.chosen.flatten()
        places = numbers.sort(stable=True).indices
        counts = count_chosen(routed.chosen, experts)[0].tolist()
        self.choices = Choices(places // k, places, counts, routed.weights.flatten()[places], k)
        self.activation = Activation("swiglu")
        self.flops = 6.0 * tokens * k * h * f
        self._sums = self._new_sums()

    def _new_sums(self) -> _Sums:
        wide = sum_dtype(self.x.dtype)
        return _Sums(
            {id(p): torch.zeros(p.shape, dtype=wide, device=p.device) for p in (self.params.w1, self.params.w2)}
        )

    def wide(self) -> Layer:
        """Return the same layer in fp64 on the CPU."""
        made = object.__new__(Layer)
        made.x, made.grad = (t.cpu().double() for t in (self.x, self.grad))
        made.params = ExpertWeights(*(None if p is None else p.cpu().double() for p in self.params))  # type: ignore[arg-type]
        old = self.choices
        made.choices = Choices(old.rows.cpu(), old.places.cpu(), old.counts, old.weights.cpu().double(), old.per_row)
        made.activation, made.flops = self.activation, self.flops
        made._sums = made._new_sums()
        return made

    def forward(self, grouped: bool, out: Tensor | None = None) -> Tensor:
        """Return the inputs of the activation; the results are added to ``out``."""
        out = self._zeros() if out is None else out
        return expert_mlp.experts_forward(self.x, self.choices, self.params, self.activation, out, grouped=grouped)

    def backward(self, wide: Tensor, grouped: bool) -> list[Tensor]:
        """Return the gradients of x and of the choices' weights; those of the parameters are in the sums."""
        grad_x = self._zeros()
        grads = ExpertGrads(self.params, (True, False, True, False), self._sums)
        args = (self.grad, self.x, wide, self.choices, self.params, self.activation, grads, grad_x)
        of_weights = expert_mlp.experts_backward(*args, grouped=grouped)
        grads.results()
        return [grad_x, of_weights]

    def results(self, grouped: bool) -> list[Tensor | None]:
        """Return the results and every gradient."""
        out = self._zeros()
        wide = self.forward(grouped, out)
        return [out, *self.backward(wide, grouped), *self._sums.views.values()]

    def _zeros(self) -> Tensor:
        return torch.zeros(self.x.shape, dtype=sum_dtype(self.x.dtype), device=self.x.device)
