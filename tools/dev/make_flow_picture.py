"""Draw docs/images/data_flow.svg: the way of a batch, a parameter and a checkpoint through the folders (``make docs``).

A lane is two rows of boxes, the first from left to right, the second back. A box names a file of the package and says
in two lines what happens there. The picture has its own background, so it is legible on light and dark pages; it
follows the reader's color scheme.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/images/data_flow.svg"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN, TITLE = 184, 92, 22, 34, 22, 40
COLUMNS = 5


class Box(NamedTuple):
    """A file of the package and what happens there, in two lines."""

    file: str
    first: str
    second: str


class Lane(NamedTuple):
    """One of the three ways.

    Attributes:
        back: boxes of the second row, in the order of the flow: from the right.
        loop: the last box leads up to the one above it.
    """

    name: str
    title: str
    there: tuple[Box, ...]
    back: tuple[Box, ...]
    loop: bool = False


LANES = (
    Lane("batch", "A batch: from text to a loss", (
        Box("data/preprocess.py", "text to token ids:", "PREFIX.bin, PREFIX.idx"),
        Box("data/gpt_dataset.py", "sample i: tokens, labels", "and loss mask, each [s]"),
        Box("data/loader.py", "consumed samples to the", "ids of this dp rank"),
        Box("data/loader.py", "micro-batches [b, s],", "read ahead by a thread"),
        Box("training/loop.py", "all micro-batches of", "a step, on the device"),
    ), (
        Box("training/step.py", "loss tokens of all;", "forward and backward"),
        Box("models/language_model.py", "this rank's positions:", "[b, s] to [s/sp, b, h]"),
        Box("models/transformer.py", "x + attention(norm(x)),", "x + mlp(norm(x))"),
        Box("parallel/ulysses.py", "positions to heads;", "[s/sp, n] to [s, n/sp]"),
        Box("parallel/lm_head.py", "sum of losses; logits", "in pieces, never whole"),
    )),
    Lane("parameter", "A parameter: from its first value through every step", (
        Box("training/sharding.py", "drawn by seed, name;", "tp part, dp_cp_sp range"),
        Box("optim/flat.py", "a flat buffer per unit;", "a rank keeps its shard"),
        Box("optim/weights.py", "all_gather before use", "(ZeRO 3) or after update"),
        Box("parallel/layers.py", "views of the buffer,", "used by the forward pass"),
        Box("parallel/linear.py", "backward: dx, and", "dW = grad_out.T @ x"),
    ), (
        Box("ops/main_grad.py", "dW straight into the", "unit's gradient buffer"),
        Box("optim/gradients.py", "when a unit is done, its", "sum runs under the rest"),
        Box("comm/collectives.py", "all_reduce over dp_cp_sp", "ZeRO: reduce_scatter"),
        Box("optim/optimizer.py", "norm, clip and unscale;", "AdamW on the shard"),
    ), loop=True),
    Lane("checkpoint", "A checkpoint: saved in one layout, loaded in another", (
        Box("training/saves.py", "when: every n steps, on", "a signal, at the end"),
        Box("training/train_state.py", "names, global tensors:", "this rank's rectangles"),
        Box("checkpoint/pieces.py", "who writes what; what", "several have, one writes"),
        Box("checkpoint/background.py", "a copy in host memory,", "and training goes on"),
        Box("checkpoint/safetensors_file.py", "safetensors files,", "hashed as written"),
    ), (
        Box("checkpoint/commit.py", "manifest, one rename:", "complete, or not there"),
        Box("checkpoint/find.py", "step folders of --load,", "the newest first"),
        Box("checkpoint/manifest.py", "sizes, and SHA-256", "of every byte"),
        Box("checkpoint/load.py", "from any rectangles into", "those of this layout"),
        Box("training/run.py", "optimizer and counters:", "on with the next sample"),
    )),
)  # fmt: skip

STYLE = """
  .page { fill: #ffffff } .title { font: 600 17px sans-serif; fill: #1b1f24 } .box { fill: #f6f8fa; stroke-width: 1.4 }
  .folder { font: 12px monospace; fill: #57606a } .file { font: 600 13.5px monospace; fill: #1b1f24 }
  .text { font: 13px sans-serif; fill: #32383f } .arrow { fill: none; stroke-width: 1.8 }
  .batch { stroke: #0a69c9 } .parameter { stroke: #b35900 } .checkpoint { stroke: #1a7f37 }
  .head-batch { fill: #0a69c9 } .head-parameter { fill: #b35900 } .head-checkpoint { fill: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .title, .file { fill: #f0f3f6 } .box { fill: #161b22 } .folder { fill: #9ea7b3 } .text { fill: #d0d7de }
    .batch { stroke: #6cb6ff } .parameter { stroke: #f0a04b } .checkpoint { stroke: #57c46c }
    .head-batch { fill: #6cb6ff } .head-parameter { fill: #f0a04b } .head-checkpoint { fill: #57c46c }
  }
"""


def picture() -> str:
    """The whole picture as SVG."""
    lane_height = TITLE + 2 * HEIGHT + GAP_Y + MARGIN
    width, height = 2 * MARGIN + COLUMNS * WIDTH + (COLUMNS - 1) * GAP_X, MARGIN + len(LANES) * lane_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{_spoken()}">',
        f"<style>{STYLE}</style>",
        *(_arrow_head(lane.name) for lane in LANES),
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>',
    ]
    for number, lane in enumerate(LANES):
        parts += _lane(lane, MARGIN + number * lane_height)
    return "\n".join([*parts, "</svg>", ""])


def _spoken() -> str:
    ways = (f"{lane.title}: {', '.join(box.file for box in (*lane.there, *lane.back))}" for lane in LANES)
    return escape(". ".join(ways), quote=True)


def _arrow_head(name: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="head-{name}" d="M0 0 L8 4 L0 8 z"/></marker>'
    )


def _lane(lane: Lane, top: int) -> list[str]:
    rows = top + TITLE, top + TITLE + HEIGHT + GAP_Y
    parts = [f'<text class="title" x="{MARGIN}" y="{top + 24}">{escape(lane.title)}</text>']
    for column, box in enumerate(lane.there):
        parts += _box(box, lane.name, _left(column), rows[0])
        if column:
            parts.append(
                _arrow(
                    lane.name, _left(column) - GAP_X, rows[0] + HEIGHT // 2, _left(column) - 1, rows[0] + HEIGHT // 2
                )
            )
    for number, box in enumerate(lane.back):
        left = _left(COLUMNS - 1 - number)
        parts += _box(box, lane.name, left, rows[1])
        if number:
            parts.append(
                _arrow(lane.name, left + WIDTH + GAP_X, rows[1] + HEIGHT // 2, left + WIDTH + 1, rows[1] + HEIGHT // 2)
            )
    turn = _left(COLUMNS - 1) + WIDTH // 2
    parts.append(_arrow(lane.name, turn, rows[0] + HEIGHT, turn, rows[1] - 1))
    if lane.loop:
        turn = _left(COLUMNS - len(lane.back)) + WIDTH // 2
        parts.append(_arrow(lane.name, turn, rows[1], turn, rows[0] + HEIGHT + 1))
    return parts


def _left(column: int) -> int:
    return MARGIN + column * (WIDTH + GAP_X)


def _box(box: Box, name: str, x: int, y: int) -> list[str]:
    folder, _, file = box.file.rpartition("/")
    lines = (("folder", 20, f"{folder}/"), ("file", 37, file), ("text", 60, box.first), ("text", 78, box.second))
    return [
        f'<rect class="box {name}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        *(f'<text class="{kind}" x="{x + 11}" y="{y + down}">{escape(text)}</text>' for kind, down, text in lines),
    ]


def _arrow(name: str, x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<path class="arrow {name}" d="M{x1} {y1} L{x2} {y2}" marker-end="url(#{name})"/>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
