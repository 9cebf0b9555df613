"""Two training steps of each family and mode on the device, against the same flags in fp32 on the CPU.

Weights, data and dropout masks do not depend on the device, so losses, gradient norms and every gradient must agree: in
fp32 to its rounding (matrix products not in TF32), in 16 bits as far as three layers of roundings allow.
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
_TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 60 --micro-batch-size 2 --global-batch-size 4"
_FULL = (
    "--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 1000 --micro-batch-size 2 --global-batch-size 4"
)
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
# largest errors of (a loss in nats, the gradient norm, a gradient), least cosine of all gradients, by dtype. fp32: five times
# the project's law, since another device adds in another order. 16 bits: five times what the CPU's own 16 bits give.
TOLERANCES = {"fp32": (5e-5, 5e-5, 5e-5, 0.9999), "bf16": (2e-2, 5e-2, 6e-2, 0.998), "fp16": (1e-2, 1e-2, 1e-2, 0.9999)}


def run(context: Context) -> None:
    """Record each family and mode. On a trial the modes go round the families, since it is about whether they run."""
    references: dict[tuple[str, str], Steps] = {}
    for index, (name, mode) in enumerate(MODES.items()):
        families = mode.families if not context.tiny else (mode.families[index % len(mode.families)],)
        for family in families:
            context.attempt("steps against the CPU", f"{family}, {name}", lambda f=family, m=mode: compare(context, f, m, references))  # type: ignore[misc]
            if context.device == "cuda":
                torch.cuda.empty_cache()


def compare(context: Context, family: str, mode: Mode, references: dict[tuple[str, str], Steps]) -> dict[str, Any]:
    """Return the errors of one mode; ``references`` keeps the CPU's steps."""
    task, shape = FAMILIES[family]
    base = f"{_TINY if context.tiny else _FULL} {_REST} {shape} {mode.maths}".split()
    key = (family, mode.maths)
    if key not in references:
        references[key] = take_steps(task, base, "cpu")
    return errors(take_steps(task, [*base, *mode.how.split()], context.device), references[key], dtype_of(mode.how))


def dtype_of(flags: str) -> str:
    """Return bf16, fp16 or fp32."""
    return next((name for name in ("bf16", "fp16") if f"--{name}" in flags.split()), "fp32")


def errors(got: Steps, want: Steps, dtype: str) -> dict[str, Any]:
    """Return the errors of some steps, and whether they are within the tolerance of the dtype."""
    pairs = [(g, w) for step in zip(got.losses, want.losses, strict=True) for g, w in zip(*step, strict=True)]
    loss = max((_error(g, w, max(1.0, abs(w))) for g, w in pairs), default=float("inf"))
    norm = max((_error(g, w, abs(w)) for g, w in zip(got.grad_norms, want.grad_norms, strict=True)), default=float("inf"))
    gradient, name = law_error(got.grads, want.grads)
    same = cosine(got.grads, want.grads)
    most = TOLERANCES[dtype]
    good = loss <= most[0] and norm <= most[1] and gradient <= most[2] and same >= most[3]
    verdict: Verdict = "ok" if good else "wrong"
    values = {"loss": got.losses[0][0] if got.losses else None, "loss error": loss, "norm error": norm, "gradient error": gradient}
    return {"verdict": verdict, "message": f"worst gradient: {name}", "dtype": dtype, **values, "cosine": same}


def _error(got: float, want: float, size: float) -> float:
    error = abs(got - want) / max(size, 1e-30)
    return error if error == error else float("inf")
