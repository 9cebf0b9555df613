"""Links between the pages: every file and every heading that is linked to is there, and the index names every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT, project_files

PAGES = project_files("*.md")


def anchors(page: Path) -> set[str]:
    """Headings as GitHub and MkDocs name them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}: {sorted(anchors(target))}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if not re.match("CHANGELOG|LOG|mutants", p.name)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_that_pages_name_exist(page: Path) -> None:
    """Paths in code, of files and of tests, are those of the repository or of the package."""
    named = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|sh|sbatch|md|json|yml))\b[^`]*`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "megatron_sp", ROOT / "docs"))] == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", index)}
    assert {page for page in PAGES if page.parent != ROOT and page.name != "index.md"} <= linked
