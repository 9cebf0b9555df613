"""Write the table of presets into docs/how-to/zoo.md: ``make docs``."""

from __future__ import annotations

from pathlib import Path

from megatron_sp.commands.cli import PRESET_COLUMNS, preset_rows

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/zoo.md"
BEGIN, END = "<!-- presets: made by tools/dev/make_zoo_docs.py -->", "<!-- presets: end -->"


def page(text: str) -> str:
    """The page with the table of today between its two marks."""
    before, rest = text.split(BEGIN)
    ruler = "|".join("---:" if 1 <= i < 8 else "---" for i in range(len(PRESET_COLUMNS)))  # numbers to the right
    rows = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in preset_rows()]
    table = "\n".join([f"| {' | '.join(PRESET_COLUMNS)} |", f"|{ruler}|", *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
