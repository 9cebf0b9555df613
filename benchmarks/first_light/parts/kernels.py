"""Numerics and timings of the elementwise chains, in the forms of ``kernel_forms``; and AdamW.

What is right is the plain function in fp64 on the CPU, of operands rounded to the chain's dtype. GB/s count what a
chain must at least read and write, so a form that moves more shows as slower. On a GPU the L2 cache is cold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from first_light.fused import require
from first_light.measure import Stopwatch, error_of
from first_light.parts.kernel_forms import Calls, Chain, Form, Shape, Tensors, chains, others
from first_light.records import Context, NotThereError, Verdict
from megatron_sp.ops.adamw import AdamStep, adamw_

SHAPES = (
    Shape("7B, 4K tokens", 4096, 4096, 11008, 32, 32000),
    Shape("1B, 64K tokens, sp 8", 8192, 2048, 8192, 16, 50304),
)
_TINY = (Shape("tiny", 48, 64, 96, 4, 100),)
DTYPES = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 3e-5}
"""Tolerances of output and gradients: a few roundings, of sums of some thousand terms in fp32."""
_CHECKED_TOKENS = 256  # the reference is computed on the CPU, on a smaller shape


def run(context: Context) -> None:
    """Record our own forms."""
    _run(context, lambda chain: chain.forms)
    adamw(context)


def run_others(context: Context) -> None:
    """Record the forms of other libraries beside ours of torch."""
    backend = "aot_eager" if context.tiny else "inductor"  # a trial needs no compiler
    _run(context, lambda chain: {**others(chain, backend), "torch": chain.forms["torch"]})


def _run(context: Context, forms_of: Callable[[Chain], dict[str, Form]]) -> None:
    device = context.torch_device
    watch = Stopwatch(device, 3 if context.tiny else 25, 2**20 if context.tiny else 2**30)
    for shape in _TINY if context.tiny else SHAPES:
        small = Shape(
            shape.label,
            min(shape.tokens, _CHECKED_TOKENS),
            *[getattr(shape, n) for n in ("hidden", "ffn", "heads", "vocab")],
        )
        for dtype, tolerance in DTYPES.items():
            for make in chains(small, device, dtype):
                check(context, make(), forms_of, f", {str(dtype).removeprefix('torch.')}", tolerance)
        for make in chains(shape, device, torch.bfloat16):
            time_forms(context, make(), forms_of, watch)


def check(
    context: Context, chain: Chain, forms_of: Callable[[Chain], dict[str, Form]], dtype: str, tolerance: float
) -> None:
    """Record the error of each form's output and gradients."""
    want = reference(chain)
    for name, make in forms_of(chain).items():
        row = f"{chain.name}{dtype}: {name}"
        context.attempt("what they compute", row, lambda make=make: errors(chain, make(), want, tolerance))  # type: ignore[misc]


def errors(chain: Chain, calls: Calls, want: Tensors, tolerance: float) -> dict[str, Any]:
    """Return the errors of a form's output and gradients, and whether they are within the tolerance."""
    calls.before_forward()
    out = [None if t is None else t.clone() for t in calls.forward()]
    calls.before_backward()
    got = [*out, *calls.backward()]
    output, gradients = error_of(got[:1], want[:1]), error_of(got[1:], want[1:])
    verdict: Verdict = "ok" if max(output, gradients) <= tolerance else "wrong"
    values: dict[str, Any] = {"output error": output, "gradient error": gradients}
    if chain.dropped is not None and got[1] is not None:
        differ = int(((got[1].cpu() == 0) != chain.dropped).sum())
        values["mask"] = "the CPU's" if differ == 0 else f"{differ} of {chain.dropped.numel()} differ from the CPU's"
        verdict = verdict if differ == 0 else "wrong"
    return {"verdict": verdict, **values}


def reference(chain: Chain) -> Tensors:
    """Return the plain function's output and gradients in fp64, on the device: its tables stay where they are."""
    wide = [x.double() for x in chain.inputs]
    calls = chain.by_autograd(chain.plain, wide, chain.grad.double())
    return [*calls.forward(), *calls.backward()]


def time_forms(context: Context, chain: Chain, forms_of: Callable[[Chain], dict[str, Form]], watch: Stopwatch) -> None:
    """Record milliseconds and GB/s of each form that is there; what is not has been recorded by ``check``."""
    ready: dict[str, Calls] = {}
    for name, make in forms_of(chain).items():
        try:
            made = make()
            for call in (made.before_forward, made.forward, made.before_backward, made.backward):
                call()
            ready[name] = made
        except NotThereError:
            continue  # ``check`` has said why
        except Exception as error:  # too little memory for the large shape, say
            context.fail("how fast: forward", f"{chain.name}: {name}", error)
    for way, moved in zip(("forward", "backward"), chain.num_bytes, strict=True):
        before = {name: getattr(calls, f"before_{way}") for name, calls in ready.items()}
        times = watch.ms({name: getattr(calls, way) for name, calls in ready.items()}, before)
        for name, ms in times.items():
            values = {
                "median_ms": ms.median,
                "min_ms": ms.low,
                "max_ms": ms.high,
                "rate_gbs": moved / max(ms.median, 1e-9) / 1e6,
            }
            context.record(f"how fast: {way}", f"{chain.name}: {name}", **values)


def adamw(context: Context) -> None:
    """Record AdamW on a flat fp32 tensor: 28 bytes for each element."""
    device = context.torch_device
    watch = Stopwatch(device, 3 if context.tiny else 15, 2**20 if context.tiny else 2**30)
    step = AdamStep(count=10, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    count = 2**10 if context.tiny else 2**27
    for name in ("torch", "apex"):

        def measure(name: Any = name) -> dict[str, Any]:
            require(name, device, torch.float32, adamw=True)
            small = [torch.rand(1000, device=device) for _ in range(4)]
            want = _adamw_by_hand([t.double() for t in small], step)
            adamw_(*([t] for t in small), step, name)
            error = error_of([small[0], small[2], small[3]], list(want))
            state = [torch.rand(count, device=device) for _ in range(4)]
            ms = watch.ms({name: lambda: adamw_(*([t] for t in state), step, name)})[name].median
            return {
                "verdict": "ok" if error < 1e-5 else "wrong",
                "error": error,
                "median_ms": ms,
                "rate_gbs": 28 * count / max(ms, 1e-9) / 1e6,
            }

        context.attempt("AdamW", f"{count:,} elements: {name}", measure)


def _adamw_by_hand(tensors: list[Tensor], step: AdamStep) -> list[Tensor]:
    """Return (parameters, averages) after a step (arXiv:1711.05101), of parameters, gradients and averages in fp64."""
    params, grads, average, square = tensors
    average = step.beta1 * average + (1 - step.beta1) * grads
    square = step.beta2 * square + (1 - step.beta2) * grads.square()
    up = average / (1 - step.beta1**step.count) / ((square / (1 - step.beta2**step.count)).sqrt() + step.eps)
    return [params * (1 - step.lr * step.weight_decay) - step.lr * up, average, square]
