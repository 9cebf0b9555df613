"""docs/benchmarks/gpu.md, from a report; or, without one, that no GPU run has been recorded."""

from __future__ import annotations

import re

from first_light.report import Report
from first_light.tables import results, tables, undone, verdict_of

_HEAD = """# Figures of a GPU

Made by `tools/dev/make_gpu_page.py` (`make docs`) from the file gpu.json beside this page, which is the `report.json` of a
[first light](../how-to/first_light.md) (`bash scripts/first_light.sh`), or what matters of several put together; a test compares.
"""
_NONE = """
**No GPU run has been recorded.** The CUDA branch has been executed on a device that is not there
([design 009](../design/009-fake-device.md)), and its computations on CPUs: nothing here says how fast it is, or that its kernels are right.

To record one, on a machine with a GPU:

```
bash scripts/first_light.sh                           # an hour; --minutes 10 for what tells most
cp first_light/report.json docs/benchmarks/gpu.json
make docs
```
"""


def gpu_page(report: Report | None) -> str:
    """Return the text of the page.

    Args:
        report: of a GPU; None: there is none.
    Raises:
        ValueError: the report is one of a CPU.
    """
    if report is None:
        return _HEAD + _NONE
    if report.machine.get("device") != "cuda":
        raise ValueError("this report is of a trial on a CPU: only one of a GPU belongs on the page")
    lines = [_HEAD, f"**{plain(report.machine.get('gpu', 'a GPU'))}**", ""]
    lines += [f"- {plain(name)}: {plain(value)}" for name, value in report.machine.items() if name != "gpu"]
    lines += [f"- {plain(call['date'])}: {code(call['command'])}" for call in report.calls]
    left = undone(report)
    lines += ["", f"Not measured: {', '.join(left)}."] if left else []
    for name, title, result in results(report):
        revision = f", revision {plain(result.revision)}" if result.revision else ""
        remark = f": {plain(result.message)}" if result.message else ""
        lines += [
            "",
            f"## {plain(title)}",
            "",
            f"{plain(name)}: {verdict_of(result)}{remark}, {result.seconds:.0f} s{revision}.",
        ]
        for made in tables(result.records):
            lines += [
                "",
                f"### {plain(made.title)}",
                "",
                _row(made.head),
                "|" + "---|" * len(made.head),
                *map(_row, made.rows),
            ]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(plain(cell) for cell in cells) + " |"


def plain(text: str) -> str:
    """Return text that is neither markup nor a link in Markdown, in one line."""
    text = re.sub(r"\s+", " ", text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", text)
    return re.sub(r"(?i)\b(https?|www)([:.])", r"\1&#8203;\2", text)


def code(text: str) -> str:
    """Return text as inline code, in one line."""
    return "`" + re.sub(r"\s+", " ", text).replace("`", "'") + "`"
