"""Draw the curves of one or several runs: training and validation loss, learning rate, gradient norm, speed.

    megatron-sp plot runs/quickstart/gpt
    megatron-sp plot runs/a runs/b -o compare.svg --x tokens

Reads metrics.jsonl. Where a run was resumed, the steps of the old process beyond the checkpoint are omitted (the new
one took them again), and a dotted line marks the place. Without matplotlib the curves are drawn as text.
"""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

from megatron_sp.report.charts import sparkline
from megatron_sp.report.run_history import SMOOTHED_FROM, History, number, read_history, smoothed
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.errors import EXIT_OK, ConfigError, DiskError
from megatron_sp.utils.files import write_output

FORMATS = (".png", ".svg", ".pdf")
X_LABELS = {"step": "step", "tokens": "tokens", "time": "training time (minutes)"}
PANELS = (("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_s", "tokens/s"))
# Okabe and Ito's colours, which colour-blind readers can tell apart; validation takes the second when there is one run
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#8A8A8A"
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY}
STYLE |= {"svg.fonttype": "none"}  # letters stay letters, which can be searched


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Draw the runs of a command line; return the exit code. Raises ReportedError."""
    parser = documented_parser(prog, __doc__)
    add = parser.add_argument
    # fmt: off
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or metrics.jsonl files")
    add("-o", "--output", type=Path, metavar="FILE",
        help=f"{', '.join(FORMATS)} (default: RUN/loss.png; of several runs loss.png)")
    add("--x", choices=tuple(X_LABELS), default="step", help="horizontal axis (default: step)")
    add("--title", help="default: the run's name")
    add("--text", action="store_true", help="draw text even where matplotlib is installed")
    # fmt: on
    options = parser.parse_args(argv)
    first: Path = options.runs[0]
    folder = first if first.is_dir() else first.absolute().parent
    output: Path = options.output or (folder / "loss.png" if len(options.runs) == 1 else Path("loss.png"))
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"-o {output}: the name must end in one of {', '.join(FORMATS)}")
    runs = [read_history(path) for path in options.runs]
    for run in runs:
        for note in run.notes:
            print(f"note: {note}", file=sys.stderr)
        print(summary(run))
    if not options.text:
        try:
            draw(runs, options.x, output, options.title)
            print(f"drawn to {output}")
            return EXIT_OK
        except ImportError:
            print("note: no picture without matplotlib; `pip install matplotlib` gets it", file=sys.stderr)
    for run in runs:
        for kind, key, label in (
            ("train", "loss", "train loss"), ("valid", "loss", "valid loss"), *(("train", k, t) for k, t in PANELS),
        ):  # fmt: skip
            values = [value for value in run.series(kind, key, "step")[1] if math.isfinite(value)]
            if values:
                print(f"  {label:14s} {sparkline(values)}  {values[0]:.4g} to {values[-1]:.4g}")
    return EXIT_OK


def summary(run: History) -> str:
    # the run's last step and losses, in a line
    parts = [f"{run.name}: step {max([*run.train, *run.valid])}"]
    if run.train:
        last = list(run.train.values())[-1]
        parts.append(f"train loss {number(last.get('loss')):.4f}")
    if run.valid:
        last = list(run.valid.values())[-1]
        parts.append(f"validation loss {number(last.get('loss')):.4f}")
        if "perplexity" in last:  # a classifier has none
            parts.append(f"perplexity {number(last['perplexity']):.2f}")
    if run.resumed:
        parts.append(f"resumed at step {', '.join(map(str, run.resumed))}")
    return ", ".join(parts)


def draw(runs: list[History], axis: str, output: Path, title: str | None) -> None:
    # draw with matplotlib; ImportError: there is none
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(9, 6.4), layout="constrained")
        grid = figure.add_gridspec(2, len(PANELS), height_ratios=(3, 1))
        main = figure.add_subplot(grid[0, :])
        panels = [figure.add_subplot(grid[1, i], sharex=main) for i in range(len(PANELS))]
        for index, run in enumerate(runs):
            colour = COLOURS[index % len(COLOURS)]
            _draw_loss(main, run, axis, colour, COLOURS[1] if len(runs) == 1 else colour)
            for panel, (key, _) in zip(panels, PANELS, strict=True):
                panel.plot(*run.series("train", key, axis), color=colour, linewidth=0.9)
            label = "resumed" if index == 0 else None  # in the legend once
            for step in run.resumed:
                record = run.train.get(step) or run.valid.get(step)
                if not record:  # nothing was logged at this step: the time of the last record before it
                    minutes = [r["minutes"] for s, r in {**run.train, **run.valid}.items() if s <= step]
                    record = {"step": step, "minutes": max(minutes, default=0.0)}
                look: dict[str, Any] = {"linewidth": 0.9, "linestyle": ":", "zorder": 0}
                look["color"] = colour if len(runs) > 1 else GREY
                for axes in (main, *panels):
                    axes.axvline(run.x_of(record, axis), **look, label=label)
                    label = None
        _decorate(main, panels, axis, title or (f"{runs[0].name}" if len(runs) == 1 else "loss"))
        try:
            picture = io.BytesIO()  # drawn in memory first: a failure leaves no half of a file
            figure.savefig(picture, dpi=160, format=output.suffix[1:].lower())
            write_output(output, picture.getvalue())
        except OSError as error:
            raise DiskError(f"{output} cannot be written: {error.strerror}; choose another -o") from None
        finally:
            pyplot.close(figure)


def _draw_loss(axes: Any, run: History, axis: str, colour: str, valid_colour: str) -> None:
    x, y = run.series("train", "loss", axis)
    if len(y) >= SMOOTHED_FROM:
        axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(x, smoothed(y), color=colour, linewidth=1.3, label=f"{run.name}: train (running mean)")
    elif x:
        axes.plot(x, y, color=colour, linewidth=0.7, label=f"{run.name}: train")
    if run.valid:
        last = list(run.valid.values())[-1]
        label = f"{run.name}: validation, last {number(last.get('loss')):.3f}"
        label += f" (perplexity {number(last['perplexity']):.4g})" if "perplexity" in last else ""
        marks = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.8}
        line = {"color": valid_colour, "linewidth": 1.0, "linestyle": (0, (4, 2)), "zorder": 3}
        axes.plot(*run.series("valid", "loss", axis), **line, **marks, label=label)


def _decorate(main: Any, panels: list[Any], axis: str, title: str) -> None:
    main.set_title(title, loc="left", fontweight="bold")
    main.set_ylabel("loss (nats per token)")
    main.set_xlabel(X_LABELS[axis])
    if main.get_legend_handles_labels()[0]:
        main.legend(frameon=False, loc="upper right")
    for panel, (_, label) in zip(panels, PANELS, strict=True):
        panel.set_title(label, loc="left", fontsize=8.5, color="#444444")
        panel.set_ylim(bottom=0)
        panel.tick_params(labelsize=7.5)
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes in (main, *panels):
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(color=GREY)
        axes.margins(x=0.01)
        if axis == "tokens":
            axes.xaxis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    # 3200000 -> 3.2M
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
