"""Comparison of the split model with the whole one in fp64: outputs, loss and every parameter's gradient.

Both are copies, and run on the user's own batch. The error is max|a - b| / (max|b| + 1e-3 * rms of all gradients).
Forward results alone prove little: a schedule that lacks the sum of an input's gradient passes such a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.schedule.apply.apply import Applied, apply, for_copies
from megatron_sp.schedule.core.directives import AXES, Directive, Mesh
from megatron_sp.schedule.core.hooks import tensors_of
from megatron_sp.schedule.verify.copies import Float64Mode, WithoutDropout, deterministic_copy, drops
from megatron_sp.schedule.verify.derive import measuring
from megatron_sp.schedule.verify.diagnosis import Diagnosis, Trace
from megatron_sp.utils.errors import ConfigError, ReportedError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}  # a step of bfloat16 is 8e-3
LossOf = Callable[[Any], Tensor]
Run = Callable[[], object]
_HARD_CODED = (
    "if sizes do not fit, the module has a hard-coded size of the whole model: divide it, .set('<attribute>',"
    " divide='tp') (E11)"
)


class DoesNotRun(ConfigError):
    """The split model fails where the whole one runs; ``failure``: where, without advice."""

    def __init__(self, failure: str, advice: str) -> None:
        super().__init__(f"{failure}\n{advice}")
        self.failure = failure


@dataclass
class Comparison:
    name: str
    kind: str  # output, loss, input gradient, gradient
    error: float
    shapes: str = ""  # where they differ

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.shapes or f'{self.error:.1e}'}"


@dataclass
class Verdict:
    """Result of a verification; the same on every rank."""

    rows: list[Comparison] = field(default_factory=list)  # all comparisons, the worst first
    tolerance: float = 1e-10
    first: str | None = None  # the first module whose result differs
    without_dropout: bool = False  # the model has dropout, which was off in both passes: shares draw other numbers
    why: str = ""  # what is wrong where, and what to write instead; "" if all agree, or it is not known
    adjoints: dict[int, str] = field(default_factory=dict)  # measured ones of open all_gathers, by index of the line

    @property
    def ok(self) -> bool:
        return all(row.error <= self.tolerance for row in self.rows)

    def __str__(self) -> str:
        wrong = [row for row in self.rows if not row.error <= self.tolerance]
        if not wrong:
            off, largest = ", dropout off" if self.without_dropout else "", self.rows[0].error if self.rows else 0.0
            return f"equal: {len(self.rows)} comparisons, the largest error {largest:.1e}{off}"
        first = f"; the first module that differs is {self.first}" if self.first else ""
        head = f"{len(wrong)} of {len(self.rows)} comparisons differ by more than {self.tolerance:.0e}{first}:"
        return "\n".join([head, *(f"  {row}" for row in wrong[:12]), *([self.why] if self.why else [])])


# outputs and loss of a forward pass, and the gradients of the inputs that require one
_Pass = tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]


def verify(
    model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any], *,
    dtype: torch.dtype = torch.float64, loss: LossOf | None = None, whole: nn.Module | None = None,
) -> Verdict:  # fmt: skip
    """Compare one forward and backward pass, without checking the lines. Collective, with the same batch on all ranks.

    Args:
        batch: keyword arguments of the model; floating-point tensors are converted to ``dtype``.
        whole: model to compare with, if not ``model`` itself; only parameters that both have are compared.
    Raises:
        ConfigError: ``apply`` rejects the lines.
        DoesNotRun: the split model fails.
    """
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    loss, is_same_model = loss or default_loss, whole is None
    whole, split = (deterministic_copy(each, dtype) for each in (model if whole is None else whole, model))
    lines, adjoints = measuring(directives)
    lines = for_copies(lines, lambda module: deterministic_copy(module, dtype))
    applied = apply(split, lines, mesh, seq_dim, rules=False)
    # on a GPU a recomputation runs in a thread of the device, which no mode reaches, so casts to float32 may stay
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    tolerance = TOLERANCE.get(dtype, 1e-2) if on_cpu else max(TOLERANCE.get(dtype, 1e-2), TOLERANCE[torch.float32])
    diagnosis = Diagnosis(whole, applied, directives, 1e3 * tolerance)
    verdict = Verdict(tolerance=tolerance, without_dropout=drops(model))
    run_whole = partial(_run, whole, batch, loss)
    run_split = partial(_run, split, batch, loss, applied.complete, mesh.dp.size())
    with Float64Mode() if dtype is torch.float64 else nullcontext(), WithoutDropout():
        expected, expected_loss, expected_grads = run_whole()
        try:
            outputs, split_loss, input_grads = run_split()
        except (ReportedError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise _explained_failure(error, diagnosis, run_whole, run_split) from error
        applied.finish_backward()
        for grad in input_grads.values():  # each rank has the gradients of its positions or its part
            for group in mesh.replicas:
                all_reduce(grad, group)
        for name, tensor in expected.items():
            local, shapes = outputs.get(name), ""
            if local is None:
                shapes = "missing"
            elif local.shape != tensor.shape:
                shapes = f"{list(local.shape)} on this rank, {list(tensor.shape)} in the whole model"
            verdict.rows.append(Comparison(name, "output", _worst(local, tensor, 0.0, mesh), shapes))
        verdict.rows.append(Comparison("loss", "loss", _worst(split_loss, expected_loss, 0.0, mesh)))
        for name, grad in expected_grads.items():
            verdict.rows.append(Comparison(name, "input gradient", _worst(input_grads[name], grad, 0.0, mesh)))
        verdict.rows += _compare_gradients(whole, applied, mesh, is_same_model)
        verdict.rows.sort(key=lambda row: -row.error if row.error == row.error else float("-inf"))
        verdict.adjoints = {i: adjoint.decided(directives[i]) for i, adjoint in adjoints.items()}
        if not verdict.ok:
            verdict.why = _explain(verdict, diagnosis, run_whole, run_split)
            for line in (line for line in directives if line.args.get("overlap_qkv")):
                knows = "is for modules that rotate queries and keys before their attention, and do nothing else"
                verdict.why += f"\noverlap_qkv {knows}: leave overlap_qkv out if these do more ({line.where})"
            verdict.first = diagnosis.first or None
    return verdict


def default_loss(result: Any) -> Tensor:
    """Return a model's own loss, or a weighted sum of all elements of its result."""
    own = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(own, Tensor):
        return own
    sums = []
    for t in tensors_of(result).values():
        if t.is_floating_point():
            weights = torch.linspace(0.5, 1.5, max(1, t.numel()), dtype=t.dtype, device=t.device)
            sums.append((t * weights.reshape(t.shape)).sum())
    if not sums:
        raise ConfigError("the model's result has no tensor of floating point numbers: give loss=, a function of it")
    return torch.stack(sums).sum()


def _run(
    model: nn.Module, batch: Mapping[str, Any], loss: LossOf, complete: Callable[[Any], Any] | None = None,
    parts: int = 1,
) -> _Pass:  # fmt: skip
    # dp ranks have the same batch, and their gradients are summed, so each contributes 1/parts
    needing = {k: v.detach().clone().requires_grad_() for k, v in batch.items() if getattr(v, "requires_grad", False)}
    result = model(**{**batch, **needing})
    result = result if complete is None else complete(result)
    value = loss(result)
    # backward() of a tensor would recompute outside of the mode
    torch.autograd.backward(get_gradient_edge(value), torch.ones_like(value) / parts)
    outputs = {k: t.detach() for k, t in tensors_of(result).items() if t.is_floating_point()}
    gradients = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in needing.items()}
    return outputs, value.detach(), gradients


def _compare_gradients(whole: nn.Module, applied: Applied, mesh: Mesh, is_same_model: bool) -> list[Comparison]:
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    squares = sum(float(g.square().sum()) for g in expected.values())
    scale = (squares / max(1, sum(g.numel() for g in expected.values()))) ** 0.5
    rows, gradients = [], applied.gradients()
    for name, p in applied.model.named_parameters():
        is_other = not is_same_model and shapes.get(name) != applied.specs[name].shape
        if is_other or (name not in expected and name not in gradients):
            continue
        gradient = applied.whole(name, gradients[name] if name in gradients else torch.zeros_like(p))
        reference = expected.get(name, torch.zeros_like(gradient))
        rows.append(Comparison(name, "gradient", _worst(gradient, reference, scale, mesh)))
    return rows


def _worst(local: Tensor | None, expected: Tensor, scale: float, mesh: Mesh) -> float:
    # the largest error on any rank
    error = float("inf")
    if local is not None and local.shape == expected.shape:
        zero = expected.new_zeros(())
        difference = (local - expected).abs().max() if local.numel() else zero
        largest = expected.abs().max() if expected.numel() else zero
        error = float(difference / (largest + 1e-3 * scale + 1e-300))
    worst = torch.tensor(error if error == error else float("inf"), dtype=torch.float64, device=expected.device)
    for axis in AXES:
        all_reduce(worst, mesh.group(axis), "max")
    return float(worst)


def _explain(verdict: Verdict, diagnosis: Diagnosis, run_whole: Run, run_split: Run) -> str:
    whole, split, applied = Trace(), Trace(), diagnosis.applied
    expected = {name: p.grad.clone() for name, p in diagnosis.whole.named_parameters() if p.grad is not None}
    local = {name: grad.clone() for name, grad in applied.gradients().items()}
    with whole.of(diagnosis.whole):
        run_whole()
    with split.of(applied.model):
        run_split()
    if why := diagnosis.explain(whole, split):
        return why
    wrong = [row for row in verdict.rows if row.kind == "gradient" and not row.error <= verdict.tolerance]
    if not wrong or wrong[0].name not in expected:
        return ""
    name = wrong[0].name
    grad = local.get(name)
    if grad is None:
        grad = torch.zeros_like(expected[name])
    elif name in applied.splits:
        grad = applied.whole(name, grad)
    return diagnosis.explain_gradient(name, grad, expected[name])


def _explained_failure(error: Exception, diagnosis: Diagnosis, run_whole: Run, run_split: Run) -> DoesNotRun:
    whole, split, model = Trace(), Trace(), diagnosis.applied.model
    paths = {id(module): path for path, module in model.named_modules()}
    frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
    inside = [paths[id(x)] for f in frames for x in (f.get("self"), f.get("module")) if id(x) in paths]
    with whole.of(diagnosis.whole):
        run_whole()
    with split.of(model), suppress(Exception):
        run_split()
    place, why = "the backward pass", ""
    if inside:
        place = f"{inside[-1] or 'the model'} ({type(model.get_submodule(inside[-1])).__name__})"
        why = diagnosis.explain_failure(inside[-1], whole, split)
    what = f"{place} fails in the split model, and not in the whole one: {type(error).__name__}: {error}"
    return DoesNotRun(what, why or _HARD_CODED)
