"""Write docs/benchmarks/gpu.md from docs/benchmarks/gpu.json, a report of ``scripts/first_light.sh``: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from first_light.markdown import gpu_page  # noqa: E402
from first_light.report import read_report  # noqa: E402

from megatron_sp.utils.entry_point import run_program  # noqa: E402
from megatron_sp.utils.errors import ConfigError  # noqa: E402
from megatron_sp.utils.files import write_output  # noqa: E402

PAGE, REPORT = ROOT / "docs/benchmarks/gpu.md", ROOT / "docs/benchmarks/gpu.json"


def page(report: Path = REPORT) -> str:
    """Return the whole text of docs/benchmarks/gpu.md; without a report it says so.

    Raises:
        ConfigError: the report is damaged, of another version, or of a CPU.
    """
    try:
        return gpu_page(read_report(report) if report.exists() else None)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{report}: {error}") from None


def main() -> int:
    """Write the page."""
    write_output(PAGE, page())
    print(f"written to {PAGE}")
    return 0


if __name__ == "__main__":
    run_program(main)
