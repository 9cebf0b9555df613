"""Charts of a page and their curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_sp.report.chart import Chart
from megatron_sp.report.curves import Curve, curve
from megatron_sp.report.html import show
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import History, Record, accuracies, number

_POINTS = 24_000  # of all curves together: what keeps the page well below a megabyte
_VALIDATION_CHARTS = 8
_OF_EVERY_VALIDATION = ("kind", "time", "step", "loss", "loss_hex", "perplexity", "seconds", "minutes")
_KNOTS = 300  # of the map from steps to tokens and to time


def charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Return all charts that have data, and always that of the loss.

    Args:
        runs: the run of the page, then those it is compared with.
    """
    several = len(runs) > 1
    buckets = max(100, min(1000, _POINTS // (20 * len(runs))))

    def one(key: str, title: str, axis: str, kind: str, field: str, **more: Any) -> Chart:
        curves = [_series(run.history, index, "train", field, run.name if several else title, buckets) for index, run in enumerate(runs)]
        return Chart(key, title, axis, kind, [c for c in curves if _holds_values(c)], **more)

    loss = Chart("loss", "Loss", "loss", "loss", _loss_curves(runs, buckets), unit="nats", wide=True, note=_loss_note(runs))
    levels, predicted = _memory_levels(runs)
    found = [
        one("lr", "Learning rate", "learning rate", "plain", "lr", from_zero=True, noisy=False),
        one("grad_norm", "Gradient norm", "gradient norm", "plain", "grad_norm", from_zero=True, unit="L2"),
        one("tokens_per_s", "Throughput", "throughput", "si", "tokens_per_s", from_zero=True, unit="tokens/s"),
        one("mfu", "MFU", "share of the peak", "percent", "mfu", from_zero=True, note=_peak_note(runs)),
        one("step_s", "Time of a step", "time", "seconds", "step_s", from_zero=True),
        one(
            "memory", "Peak memory of rank 0", "memory", "bytes", "memory_bytes", from_zero=True, noisy=False, levels=levels, note=predicted
        ),
        one("loss_scale", "Loss scale", "loss scale", "si", "loss_scale", from_zero=True, noisy=False),
        one(
            "global_batch_size",
            "Global batch size",
            "batch size",
            "count",
            "global_batch_size",
            from_zero=True,
            noisy=False,
            unit="sequences",
        ),
        one("expert_load_max", "Largest load of an expert", "of the mean load", "plain", "expert_load_max", from_zero=True),
        one("experts_idle", "Experts without a token", "experts", "count", "experts_idle", from_zero=True, noisy=False),
        one("expert_entropy", "Entropy of the loads", "of that of even loads", "percent", "expert_entropy"),
        one("balance_loss", "Balance loss", "loss", "loss", "balance_loss"),
        one("z_loss", "z loss", "loss", "loss", "z_loss"),
        one("params_norm", "Norm of the parameters", "norm", "plain", "params_norm", unit="L2"),
        one("num_zeros_in_grad", "Zeros in the gradients", "zeros", "si", "num_zeros_in_grad", from_zero=True, unit="elements"),
    ]
    constant = ("loss_scale", "global_batch_size")  # worth a chart only when they change
    kept = [c for c in found if c.curves and not (c.key in constant and all(v.low == v.high for v in c.curves))]
    return [loss, *_validation_charts(runs, buckets), *kept]


def _validation_charts(runs: Sequence[RunFiles], buckets: int) -> list[Chart]:
    """Return the charts of validation metrics besides the loss: further terms (BERT's order loss), accuracy."""
    records = [r for run in runs for r in run.history.valid.values()]
    names = dict.fromkeys(str(key) for r in records for key in r if key not in _OF_EVERY_VALIDATION)
    found = []
    for place, name in enumerate(names):
        curves = [_series(run.history, index, "valid", name, run.name, buckets // 4) for index, run in enumerate(runs)]
        words, kind = name.replace("_", " "), "percent" if accuracies({name: None}) else "loss"
        unit = "nats" if name.endswith("loss") else ""
        found.append(Chart(f"valid-{place}", f"Validation: {words}", words, kind, [c for c in curves if _holds_values(c)], unit=unit))
    return [c for c in found if c.curves][:_VALIDATION_CHARTS]


def _holds_values(c: Curve) -> bool:
    return math.isfinite(c.last) or any(text != "nan" for _, text in c.bad)


def _series(history: History, index: int, kind: str, field: str, label: str, buckets: int) -> Curve:
    x, y = history.series(kind, field)
    return curve(label, index, "line" if kind == "train" else "points", x, y, buckets)


def _loss_curves(runs: Sequence[RunFiles], buckets: int) -> list[Curve]:
    """Return the curves of training loss, undone steps and validation loss; with several runs each run has its colour."""
    curves = []
    for index, run in enumerate(runs):
        before = f"{run.name}: " if len(runs) > 1 else ""
        curves.append(_series(run.history, index, "train", "loss", f"{before}training", buckets))
        curves.append(_undone(run.history, index, f"{before}discarded by interruptions", buckets // 2))
        valid = _series(run.history, index, "valid", "loss", f"{before}validation", buckets // 4)
        valid.look = valid.look if len(runs) > 1 else 1
        curves.append(valid)
    return [c for c in curves if c.count]


def _undone(history: History, index: int, label: str, buckets: int) -> Curve:
    """Return one curve with a separate line for each part that a resume discarded."""
    parts = [curve(label, index, "undone", [float(r["step"]) for r in records], [number(r.get("loss")) for r in records],
                   max(buckets // len(history.undone), 4)) for records in history.undone]  # fmt: skip
    whole = Curve(label, index, "undone", count=sum(part.count for part in parts))
    for part in parts:
        whole.x += [*part.x, part.x[-1]]
        whole.y += [*part.y, math.nan]
    drawn = [v for v in whole.y if math.isfinite(v)]
    if drawn:
        whole.low, whole.high, whole.last = min(drawn), max(drawn), drawn[-1]
    return whole


def _loss_note(runs: Sequence[RunFiles]) -> str:
    parts = []
    if any(run.history.resumed for run in runs):
        parts.append("Dotted lines: training resumed from a checkpoint.")
    if any(run.history.undone for run in runs):
        parts.append("Grey: steps discarded by an interruption; where grey lies on the line, the repeated steps had the same loss.")
    return " ".join(parts)


def _peak_note(runs: Sequence[RunFiles]) -> str:
    names = {str(r["peak"]) for run in runs for r in run.train[-1:] if r.get("peak")}
    return f"Relative to the peak of one device: {', '.join(sorted(names))}." if names else ""


def _memory_levels(runs: Sequence[RunFiles]) -> tuple[list[tuple[float, str]], str]:
    """Return the predicted memory as a level of the chart, and a sentence about it; neither when runs are compared."""
    last = next(reversed(runs[0].of_kind("prediction")), None) if len(runs) == 1 else None
    if last is None:
        return [], ""
    before, predicted = number(last.get("before_model_bytes")), number(last.get("predicted_bytes"))
    if before > 0:
        words = (
            f"{show(predicted, 'bytes')} for tensors, above the {show(before, 'bytes')} that the program held before the model was built"
        )
        return [(before + predicted, f"predicted: {show(before + predicted, 'bytes')}")], f"Predicted: {words}."
    return [(predicted, f"predicted: {show(predicted, 'bytes')}")], f"Predicted: {show(predicted, 'bytes')} for tensors."


def axis_map(run: RunFiles) -> dict[str, list[float]]:
    """Return a thinned-out table of steps, tokens and minutes, with which the page's script converts between the axes."""
    records = [r for r in run.train if math.isfinite(number(r.get("consumed_tokens")))]
    every = max(1, math.ceil(len(records) / _KNOTS))
    knots = records[::every] + (records[-1:] if records and (len(records) - 1) % every else [])
    what: dict[str, Callable[[Record], float]] = {
        "step": lambda r: float(r["step"]),
        "tokens": lambda r: number(r["consumed_tokens"]),
        "time": lambda r: round(float(r["minutes"]), 4),
    }
    return {name: [of(r) for r in knots] for name, of in what.items()}
