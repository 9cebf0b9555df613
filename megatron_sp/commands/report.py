"""Command line of ``megatron-sp report``."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_sp.report.page import write_page
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.errors import EXIT_OK
from megatron_sp.utils.format import format_bytes

_DESCRIPTION = """\
Write a run's report as one HTML page: curves, time, interruptions, memory, communication, configuration.

    megatron-sp report runs/mine
    megatron-sp report runs/mine --compare runs/other runs/third --output compare.html

The page is self-contained: it can be opened from a disk, mailed, or kept as an artifact. Works while a run is in
progress, too.
"""


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Write the page of a command line; return the exit code. Raises ReportedError."""
    parser = documented_parser(prog, _DESCRIPTION)
    add = parser.add_argument
    # fmt: off
    add("run", type=Path, metavar="RUN", help="the folder of a run (what --save named)")
    add("--compare", type=Path, nargs="+", action="extend", default=[], metavar="RUN",
        help="other runs to compare it with")
    add("-o", "--output", type=Path, metavar="FILE", help="default: RUN/report.html")
    # fmt: on
    options = parser.parse_args(argv)
    output: Path = options.output or options.run / "report.html"
    for run in write_page([options.run, *options.compare], output):
        for note in run.notes:
            print(f"note: {note}", file=sys.stderr)
        if not run.records:
            print(f"note: {run.folder} has no record yet; its page says so", file=sys.stderr)
    print(f"{output} ({format_bytes(output.stat().st_size)})")
    return EXIT_OK
