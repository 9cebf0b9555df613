"""Picture of the plan (--picture): memory of a GPU by kind for the best layouts, its capacity, and tokens/s."""

# In an SVG who sends which rows to whom stands below, if the best layout has context parallelism.

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sp.ops import availability
from megatron_sp.planner.context_rows import below
from megatron_sp.planner.hardware import GIB
from megatron_sp.planner.report import KINDS, memory_by_kind
from megatron_sp.planner.search import Candidate
from megatron_sp.utils.errors import ConfigError, DiskError
from megatron_sp.utils.files import require_place, write_output

# Okabe and Ito's colours, which colour-blind readers can tell apart
_COLOURS = {
    "parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73", "activations": "#56B4E9",
    "reserve": "#C9C9C9",
}  # fmt: skip


def check_picture(path: Path, context: bool = False) -> None:
    """Check, before the search, that the picture can be drawn and written; ``context``: all layouts have cp > 1.

    Raises:
        ConfigError: matplotlib or the folder is missing, or the file type is not supported.
    """
    if not (context and is_svg(path)) and not availability.find("matplotlib").available:  # the part of cp needs none
        way = "pip install -e '.[plot]', or leave it out: the text has the bars as well"
        raise ConfigError(f"--picture needs matplotlib: {way}")
    require_place(path, "--picture")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--picture {path}: the name must end in .png, .svg or .pdf")


def is_svg(path: Path) -> bool:
    """Return whether the picture is an SVG document."""
    return path.suffix.lower() == ".svg"


def draw(best: Sequence[Candidate], path: Path, title: str, context: str = "") -> None:
    """Write the picture, in an SVG with ``context``, another one, below; without matplotlib that is the whole picture.

    Raises:
        DiskError: the file cannot be written.
    """
    try:
        if context and not availability.find("matplotlib").available:
            write_output(path, context)
            return
        picture = _bars(best, path, title)
        write_output(path, below(picture.decode("utf-8"), context) if context else picture)
    except OSError as error:
        raise DiskError(f"--picture {path} cannot be written: {error.strerror or error}") from None


def _bars(best: Sequence[Candidate], path: Path, title: str) -> bytes:
    package = availability.load("matplotlib")
    # not pyplot, which needs a display and has global state
    figures = importlib.import_module(f"{package.__name__}.figure")
    figure = figures.Figure(figsize=(12, 1.9 + 0.55 * len(best)), layout="constrained")
    figure.suptitle(title, fontsize=11, fontweight="bold")
    memory, speed = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    places = range(len(best))
    _memory(memory, best)
    speed.barh(places, [c.tokens_per_second / c.machine.gpus for c in best], color="#882255", height=0.65)
    for place, candidate in zip(places, best, strict=True):
        of_gpu = candidate.tokens_per_second / candidate.machine.gpus
        speed.text(of_gpu, place, f" MFU {candidate.mfu:.0%}", va="center", fontsize=8)
    speed.margins(x=0.22)
    speed.set_xlabel("predicted tokens/s for each GPU")
    memory.set_yticks(places, [c.layout.words(c.machine.gpus) for c in best], fontsize=8)
    memory.invert_yaxis()
    for axes in (memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    return picture.getvalue()


def _memory(axes: Any, best: Sequence[Candidate]) -> None:
    left = [0.0] * len(best)
    for kind in KINDS:
        sizes = [memory_by_kind(candidate)[kind] / GIB for candidate in best]
        axes.barh(range(len(best)), sizes, left=left, color=_COLOURS[kind], label=kind, height=0.65)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    have = best[0].machine.memory_bytes / GIB
    axes.axvline(have, color="#CC0000", linewidth=1.5)
    style = {"textcoords": "offset points", "fontsize": 8, "color": "#CC0000", "rotation": 90, "ha": "right"}
    axes.annotate(f"{have:.1f} GiB", (have, 0), (-3, 3), **style)
    axes.set_xlim(0, 1.05 * have)
    axes.set_xlabel("GiB of a GPU at the worst moment")
    axes.legend(fontsize=8, ncols=len(KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
