"""Comparison of the split model with the whole one: outputs, loss and every parameter's gradient, in fp64, on the user's own batch.

Both are copies; the schedule's own model does not change. The error is max|a - b| / (max|b| + 1e-3 * rms of all
gradients), as elsewhere in this project. Forward results alone, which are all that Slapo's verifier compares, prove
little: a schedule that lacks the sum of an input's gradient passes such a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import AXES, Mesh
from megatron_sp.schedule.core.records import tensors_of
from megatron_sp.schedule.verify.copies import Float64Mode, WithoutDropout, deterministic_copy, drops
from megatron_sp.schedule.verify.derive import measuring
from megatron_sp.schedule.verify.diagnosis import Diagnosis, Trace
from megatron_sp.utils.errors import ConfigError, ReportedError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}  # a step of bfloat16 is 8e-3
LossOf = Callable[[Any], Tensor]


_HARD_CODED = "if sizes do not fit, the module has a hard-coded size of the whole model: divide it, .set('<attribute>', divide='tp') (E11)"


class DoesNotRun(ConfigError):
    """Error of a split model where the whole one runs; ``failure`` describes where and how it fails, without advice."""

    def __init__(self, failure: str, advice: str) -> None:
        super().__init__(f"{failure}\n{advice}")
        self.failure = failure


@dataclass
class Comparison:
    """Comparison of one tensor."""

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
    first: str | None = None  # the first module whose result differs, or None
    # True if the model has dropout, which was off in both passes, as shares draw different numbers
    without_dropout: bool = False
    why: str = ""  # what is wrong where, and what to write instead; "" if all agree, or it is not known
    # measured adjoint of each all_gather that gives none, by the index of its line
    adjoints: dict[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if all comparisons agree."""
        return all(row.error <= self.tolerance for row in self.rows)

    def __str__(self) -> str:
        bad = [row for row in self.rows if not row.error <= self.tolerance]
        if not bad:
            off = ", dropout off" if self.without_dropout else ""
            return f"equal: {len(self.rows)} comparisons, the largest error {self.rows[0].error if self.rows else 0.0:.1e}{off}"
        lines = [f"  {row}" for row in bad[:12]] + ([self.why] if self.why else [])
        first = f"; the first module that differs is {self.first}" if self.first else ""
        return (
            f"{len(bad)} of {len(self.rows)} comparisons differ by more than {self.tolerance:.0e}{first}:\n"
            + "\n".join(lines)
        )


def verify(
    model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any], *,
    dtype: torch.dtype = torch.float64, loss: LossOf | None = None, whole: nn.Module | None = None,
) -> Verdict:  # fmt: skip
    """Compare one forward and backward pass, without checking the lines. Collective over all ranks, with the same batch on each.

    Args:
        batch: keyword arguments of the model; floating-point tensors are converted to ``dtype``. Gradients of those
            that require one are compared.
        loss: function of the model's result (default: its ``loss``, or else a fixed weighted sum of all its tensors).
        whole: model to compare with, if not ``model`` itself; only parameters that both have are compared.
    Raises:
        ConfigError: ``apply`` rejects the lines.
        DoesNotRun: the split model fails.
    """
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    loss = loss or default_loss
    unchanged = whole is None
    whole, split = (deterministic_copy(each, dtype) for each in (model if whole is None else whole, model))
    # copies: modules that lines bring would be split here, and again when the schedule is applied
    own, adjoints = measuring(
        replace(d, args={**d.args, "new": deterministic_copy(d.args["new"], dtype)})
        if d.do == "replace" and isinstance(d.args["new"], nn.Module)
        else d
        for d in directives
    )
    applied = apply(split, own, mesh, seq_dim, rules=False)
    # on a GPU a recomputation runs in a thread of the device, which no mode reaches, so casts to float32 may stay
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    tolerance = TOLERANCE.get(dtype, 1e-2) if on_cpu else max(TOLERANCE.get(dtype, 1e-2), TOLERANCE[torch.float32])
    diagnosis = Diagnosis(whole, applied, directives, 1e3 * tolerance)
    with Float64Mode() if dtype is torch.float64 else nullcontext(), WithoutDropout():
        expected = _run(whole, batch, loss)
        run_split = partial(_run, split, batch, loss, applied.complete, mesh.dp.size())
        found = _run_or_explain(run_split, partial(_run, whole, batch, loss), diagnosis)
        applied.finish_backward()
        verdict = Verdict(tolerance=tolerance, without_dropout=drops(model))
        for name, tensor in expected.outputs.items():
            made = found.outputs.get(name)
            verdict.rows.append(Comparison(name, "output", _worst(made, tensor, 0.0, mesh), _shapes(made, tensor)))
        verdict.rows.append(Comparison("loss", "loss", _worst(found.loss, expected.loss, 0.0, mesh)))
        verdict.rows += _input_gradients(expected.inputs, found.inputs, mesh)
        verdict.rows += _gradients(whole, applied, mesh, unchanged)
        verdict.rows.sort(key=lambda row: -row.error if row.error == row.error else float("-inf"))
        verdict.adjoints = {i: adjoint.decided(directives[i]) for i, adjoint in adjoints.items()}
        if not verdict.ok:
            verdict.why = _explain(verdict, diagnosis, partial(_run, whole, batch, loss), run_split)
            verdict.first = diagnosis.first or None
    return verdict


def _explain(
    verdict: Verdict, diagnosis: Diagnosis, run_whole: Callable[[], object], run_split: Callable[[], object]
) -> str:
    whole, split, applied = Trace(), Trace(), diagnosis.applied
    wanted = {name: p.grad.clone() for name, p in diagnosis.whole.named_parameters() if p.grad is not None}
    local = {name: grad.clone() for name, grad in applied.gradients().items()}
    with whole.of(diagnosis.whole):
        run_whole()
    with split.of(applied.model):
        run_split()
    if why := diagnosis.explain(whole, split):
        return why
    row = next((row for row in verdict.rows if row.kind == "gradient" and not row.error <= verdict.tolerance), None)
    if row is None or (expected := wanted.get(row.name)) is None:
        return ""
    grad = local.get(row.name)
    made = (
        torch.zeros_like(expected)
        if grad is None
        else applied.whole(row.name, grad)
        if row.name in applied.splits
        else grad
    )
    return diagnosis.explain_gradient(row.name, made, expected)


def _run_or_explain(run_split: Callable[[], _Pass], run_whole: Callable[[], object], diagnosis: Diagnosis) -> _Pass:
    split, model = Trace(), diagnosis.applied.model
    try:
        return run_split()
    except (ReportedError, KeyboardInterrupt):
        raise
    except Exception as error:
        paths = {id(module): path for path, module in model.named_modules()}
        frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
        inside = [paths[id(x)] for f in frames for x in (f.get("self"), f.get("module")) if id(x) in paths]
        failed = inside[-1] if inside else None
        whole = Trace()
        with whole.of(diagnosis.whole):
            run_whole()
        with split.of(model), suppress(Exception):
            run_split()
        name = (
            "the backward pass"
            if failed is None
            else f"{failed or 'the model'} ({type(model.get_submodule(failed)).__name__})"
        )
        why = "" if failed is None else diagnosis.explain_failure(failed, whole, split)
        raise DoesNotRun(
            f"{name} fails in the split model, and not in the whole one: {type(error).__name__}: {error}",
            why or _HARD_CODED,
        ) from error


def default_loss(result: Any) -> Tensor:
    """Return the loss of a model's result: its own, or a sum of its tensors with another weight for each element of a tensor."""
    own = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [t for t in tensors_of(result).values() if t.is_floating_point()]
    if not tensors:
        raise ConfigError("the model's result has no tensor of floating point numbers: give loss=, a function of it")
    return torch.stack([(t * _weights(t)).sum() for t in tensors]).sum()


def _weights(t: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, max(1, t.numel()), dtype=t.dtype, device=t.device).reshape(t.shape)


@dataclass
class _Pass:
    outputs: dict[str, Tensor]
    loss: Tensor
    inputs: dict[str, Tensor]


def _run(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: LossOf,
    complete: Callable[[Any], Any] | None = None,
    parts: int = 1,
) -> _Pass:
    # dp ranks have the same batch, and their gradients are summed, so each contributes 1/parts
    batch = {
        k: v.detach().clone().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v
        for k, v in batch.items()
    }
    result = model(**batch)
    result = result if complete is None else complete(result)
    value = loss(result)
    torch.autograd.backward(
        get_gradient_edge(value),
        torch.ones_like(value) / parts,
        # backward() of a tensor would recompute outside of the mode
    )
    outputs = {k: t.detach() for k, t in tensors_of(result).items() if t.is_floating_point()}
    gradients = {
        k: torch.zeros_like(v) if v.grad is None else v.grad
        for k, v in batch.items()
        if isinstance(v, Tensor) and v.requires_grad
    }
    return _Pass(outputs, value.detach(), gradients)


def _input_gradients(whole: dict[str, Tensor], split: dict[str, Tensor], mesh: Mesh) -> list[Comparison]:
    # compare input gradients, summed over dp, cp and sp: each rank has the gradients of its positions or its part
    for grad in split.values():
        for group in mesh.replicas:
            all_reduce(grad, group)
    return [Comparison(name, "input gradient", _worst(split[name], grad, 0.0, mesh)) for name, grad in whole.items()]


def _gradients(whole: nn.Module, applied: Applied, mesh: Mesh, unchanged: bool) -> list[Comparison]:
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    squares = sum(float(g.square().sum()) for g in expected.values())
    scale = (squares / max(1, sum(g.numel() for g in expected.values()))) ** 0.5
    rows = []
    gradients = applied.gradients()
    for name, p in applied.model.named_parameters():
        other = not unchanged and shapes.get(name) != applied.specs[name].shape
        if other or (name not in expected and name not in gradients):
            continue
        found = applied.whole(name, gradients[name] if name in gradients else torch.zeros_like(p))
        rows.append(
            Comparison(name, "gradient", _worst(found, expected.get(name, torch.zeros_like(found)), scale, mesh))
        )
    return rows


def _shapes(found: Tensor | None, expected: Tensor) -> str:
    if found is None:
        return "missing"
    same = found.shape == expected.shape
    return "" if same else f"{list(found.shape)} on this rank, {list(expected.shape)} in the whole model"


def _worst(found: Tensor | None, expected: Tensor, scale: float, mesh: Mesh) -> float:
    if found is None or found.shape != expected.shape:
        error = float("inf")
    else:
        difference = (found - expected).abs().max() if found.numel() else expected.new_zeros(())
        reference = expected.abs().max() if expected.numel() else expected.new_zeros(())
        error = float(difference / (reference + 1e-3 * scale + 1e-300))
    error = float("inf") if error != error else error
    worst = torch.tensor(error, dtype=torch.float64, device=expected.device)
    for axis in AXES:
        all_reduce(worst, mesh.group(axis), "max")
    return float(worst)
