"""Write a run's report as one HTML page: curves, time, interruptions, memory, communication, configuration.

    megatron-sp report runs/mine
    megatron-sp report runs/mine --compare runs/other runs/third --output compare.html

The page is self-contained: it can be opened from a disk, mailed, or kept as an artifact. Works while a run is in
progress, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_sp.report.page import write_page
from megatron_sp.utils.command_parser import documented_parser
from megatron_sp.utils.errors import ReportedError
from megatron_sp.utils.format import format_bytes


def parse(argv: list[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = documented_parser(prog, __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run (what --save named)")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN",
        help="other runs to compare it with",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: RUN/report.html")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Write the report page; return the exit code."""
    options = parse(argv, prog)
    output: Path = options.output or options.run / "report.html"
    try:
        runs = write_page([options.run, *options.compare], output)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for run in runs:
        for note in run.notes:
            print(f"note: {note}", file=sys.stderr)
        if not run.records:
            print(f"note: {run.folder} has no record yet; its page says so", file=sys.stderr)
    print(f"{output} ({format_bytes(output.stat().st_size)})")
    return 0
