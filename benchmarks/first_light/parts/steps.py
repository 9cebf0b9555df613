"""Two training steps of each family and mode on the device, against the same flags in fp32 on the CPU.

Weights, data and dropout masks do not depend on the device, so losses, gradient norms and every gradient must agree: in
fp32 to its rounding (matrix products not in TF32), in 16 bits to a few times what the CPU's own 16 bits are off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from first_light.records import Context, Verdict
from first_light.steps_of import Steps, cosine, law_error, take_steps

LLAMA = """--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
           --num-query-groups 2"""
# each token chooses all four experts: a choice that rounding changes would not be an error
EXPERTS = f"""{LLAMA} --num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 32
              --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"""
FAMILIES: dict[str, tuple[Literal["gpt", "bert"], str]] = {
    "GPT": ("gpt", ""), "Llama": ("gpt", LLAMA), "experts": ("gpt", EXPERTS), "BERT": ("bert", ""),
}  # fmt: skip
_GPTS = ("GPT", "Llama", "experts")
_DENSE = ("GPT", "Llama", "BERT")
_HEADS = "--num-attention-heads 4 --micro-batch-size 2 --global-batch-size 4"
_TINY = f"--num-layers 2 --hidden-size 32 --seq-length 32 --vocab-size 60 {_HEADS}"
_FULL = f"--num-layers 3 --hidden-size 256 --seq-length 256 --vocab-size 1000 {_HEADS}"
_REST = """--mock-data --train-iters 2 --lr 1e-2 --lr-decay-style constant --optimizer sgd --eval-iters 0 --log-interval 1 --no-progress-bar
           --initial-loss-scale 1024"""
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"


@dataclass(frozen=True)
class Mode:
    """One way to take a step.

    Attributes:
        maths: flags that the reference has too.
        how: flags that change nothing but speed, memory and rounding.
        families: those that know it.
    """

    maths: str = _NO_DROPOUT
    how: str = ""
    families: tuple[str, ...] = tuple(FAMILIES)


_FULLY = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MODES = {
    "fp32": Mode(), "bf16": Mode(how="--bf16"), "fp16": Mode(how="--fp16"),
    "fp32, kernels of torch": Mode(how="--fused-kernels torch"), "bf16, kernels of torch": Mode(how="--bf16 --fused-kernels torch"),
    "hidden dropout": Mode("--attention-dropout 0 --hidden-dropout 0.1"),
    "recompute selective": Mode(how="--bf16 --recompute-granularity selective"), "recompute full": Mode(how=f"--bf16 {_FULLY}"),
    "MLP in chunks": Mode(how="--bf16 --mlp-chunks 4", families=_DENSE),
    "experts in chunks": Mode(how="--bf16 --moe-chunks 2", families=("experts",)),
    "two of four experts, fp32": Mode(f"{_NO_DROPOUT} --moe-router-topk 2", families=("experts",)),
    "activations on the host": Mode(how="--bf16 --offload-activations"),
    "optimizer on the host": Mode(how="--bf16 --offload-optimizer"),
    "window": Mode(f"{_NO_DROPOUT} --window-size 8", "--bf16", _GPTS),
    "window, fp32": Mode(f"{_NO_DROPOUT} --window-size 8", "", ("GPT",)),
    "documents": Mode(f"{_NO_DROPOUT} --reset-attention-mask --reset-position-ids", "--bf16", _GPTS),
    "ZeRO 1": Mode(how="--bf16 --zero-stage 1"), "ZeRO 2": Mode(how="--bf16 --zero-stage 2"), "ZeRO 3": Mode(how="--bf16 --zero-stage 3"),
    "ZeRO 3, fp32": Mode(how="--zero-stage 3", families=("GPT",)),
    "attention not fused": Mode(how="--bf16 --attention-backend unfused"),
}  # fmt: skip
# largest errors of (a loss in nats, the gradient norm, a gradient, 1 - the cosine of all gradients), by dtype. fp32: five times
# the project's law, since another device adds in another order. 16 bits: so many times what the CPU's own 16 bits give, which
# depends on the model (a loss after a step of SGD follows every rounding of it), and at least some roundings of 2^-9 or 2^-12.
FP32_TOLERANCE = (5e-5, 5e-5, 5e-5, 1e-4)
TIMES_OF_THE_CPU = 3
FLOORS = {"bf16": (2**-9, 2**-8, 2**-6, 1e-4), "fp16": (2**-12, 2**-11, 2**-9, 1e-6)}
_NAMES = ("loss error", "norm error", "gradient error")


def run(context: Context) -> None:
    """Record each family and mode. On a trial the modes go round the families, since it is about whether they run."""
    references: dict[tuple[str, str, str], Steps] = {}
    for index, (name, mode) in enumerate(MODES.items()):
        families = mode.families if not context.tiny else (mode.families[index % len(mode.families)],)
        for family in families:
            context.attempt(
                "steps against the CPU",
                f"{family}, {name}",
                lambda f=family, m=mode: compare(context, f, m, references),
            )  # type: ignore[misc]
            if context.device == "cuda":
                torch.cuda.empty_cache()


def compare(context: Context, family: str, mode: Mode, references: dict[tuple[str, str, str], Steps]) -> dict[str, Any]:
    """Return the errors of one mode; ``references`` keeps the CPU's steps, in fp32 and in 16 bits."""
    task, shape = FAMILIES[family]
    base = f"{_TINY if context.tiny else _FULL} {_REST} {shape} {mode.maths}".split()

    def of_the_cpu(dtype: str) -> Steps:
        key = (family, mode.maths, dtype)
        if key not in references:
            references[key] = take_steps(task, base if dtype == "fp32" else [*base, f"--{dtype}"], "cpu")
        return references[key]

    dtype, want = dtype_of(mode.how), of_the_cpu("fp32")
    own = None if dtype == "fp32" else errors(of_the_cpu(dtype), want, dtype)
    return errors(take_steps(task, [*base, *mode.how.split()], context.device), want, dtype, own)


def dtype_of(flags: str) -> str:
    """Return bf16, fp16 or fp32."""
    return next((name for name in ("bf16", "fp16") if f"--{name}" in flags.split()), "fp32")


def errors(got: Steps, want: Steps, dtype: str, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the errors of some steps, and whether they are within the tolerance.

    Args:
        got, want: steps, and those in fp32 on the CPU.
        dtype: of ``got``.
        own: this function's result for the CPU's steps in that dtype; None: they have no errors.
    """
    pairs = [(g, w) for step in zip(got.losses, want.losses, strict=True) for g, w in zip(*step, strict=True)]
    loss = max((_error(g, w, max(1.0, abs(w))) for g, w in pairs), default=float("inf"))
    norm = max(
        (_error(g, w, abs(w)) for g, w in zip(got.grad_norms, want.grad_norms, strict=True)), default=float("inf")
    )
    gradient, name = law_error(got.grads, want.grads)
    same = cosine(got.grads, want.grads)
    good = all(
        error <= most for error, most in zip((loss, norm, gradient, 1 - same), tolerance(dtype, own), strict=True)
    )
    verdict: Verdict = "ok" if good else "wrong"
    values = {
        "loss": got.losses[0][0] if got.losses else None,
        **dict(zip(_NAMES, (loss, norm, gradient), strict=True)),
    }
    of_the_cpu = f"; the CPU's {dtype}: {', '.join(f'{error} {own[error]:.2g}' for error in _NAMES)}" if own else ""
    return {
        "verdict": verdict,
        "message": f"worst gradient: {name}{of_the_cpu}",
        "dtype": dtype,
        **values,
        "cosine": same,
    }


def tolerance(dtype: str, own: dict[str, Any] | None) -> tuple[float, ...]:
    """Return the largest errors that are called right; arguments are those of ``errors``."""
    if dtype == "fp32":
        return FP32_TOLERANCE
    found = [*(own[error] for error in _NAMES), 1 - own["cosine"]] if own else [0.0] * 4
    return tuple(max(floor, TIMES_OF_THE_CPU * error) for floor, error in zip(FLOORS[dtype], found, strict=True))


def _error(got: float, want: float, size: float) -> float:
    error = abs(got - want) / max(size, 1e-30)
    return error if error == error else float("inf")
