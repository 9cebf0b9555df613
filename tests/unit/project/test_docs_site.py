"""The documentation site: navigation from the index, links out of docs/, anchors, a page for each folder, nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re

import pytest
from support.paths import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
_SPEC = importlib.util.spec_from_file_location("docs_site", ROOT / "tools/dev/docs_site.py")
assert _SPEC is not None and _SPEC.loader is not None
site = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(site)

INDEX = """# Documentation

## Tutorials

- [One](tutorials/one.md), [its end](tutorials/one.md#end) and [a paper](https://arxiv.org/abs/1909.08053)

## Reference

- [Two](reference/two.md); [the first page](../README.md)
"""


def test_navigation_follows_the_index() -> None:
    home, tutorials, reference = site.navigation(INDEX)
    assert home == "index.md" and tutorials == {"Tutorials": ["tutorials/one.md"]}
    assert reference["Reference"][0] == "reference/two.md"
    api = reference["Reference"][1]["API"]
    assert api[0] == "reference/api/index.md" and "reference/api/megatron_sp.parallel.md" in api


@pytest.mark.parametrize("heading, anchor", [
    ("How often: `--save-interval auto`", "how-often---save-interval-auto"), ("L0, a_b & c", "l0-a_b--c"), (" Ränge ", "ränge"),
])  # fmt: skip
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert site.github_anchor(heading) == anchor


@pytest.mark.parametrize("link, there", [
    ("../../README.md#choose-a-layout", "../repository/README.md.md#choose-a-layout"),
    ("../../scripts/launch.sh", "../repository/scripts/launch.sh.md"),
    ("../../scripts", "../repository/scripts.md"),
    ("../how-to/zoo.md", "../how-to/zoo.md"),
    ("../images/report.png", "../images/report.png"),
    ("../../megatron_sp/no_such_file.py", "../../megatron_sp/no_such_file.py"),  # left for mkdocs to refuse
])  # fmt: skip
def test_links_out_of_docs_lead_to_copies(link: str, there: str) -> None:
    page = "docs/tutorials/bert.md"
    assert site.redirected(f"[text]({link}) and more", page, "tutorials/bert.md") == f"[text]({there}) and more"
    code = f"```python\n[text]({link})\n```\n"
    assert site.redirected(code, page, "tutorials/bert.md") == code


def test_links_of_a_copied_page_start_where_it_lies() -> None:
    assert site.outside("README.md", "[a](CONTRIBUTING.md) [b](docs/index.md) [c](https://pytorch.org) [d](#here)") == {"CONTRIBUTING.md"}
    assert site.redirected("[b](docs/index.md#reference)", "README.md", "repository/README.md.md") == "[b](../index.md#reference)"


def test_a_copy_shows_a_file_and_the_names_in_a_folder() -> None:
    assert site.copy_of("scripts/launch.sh").startswith("# scripts/launch.sh\n\n````bash\n#!/usr/bin/env bash\n")
    assert "- `launch.sh`\n" in site.copy_of("scripts")


def test_each_folder_of_the_package_has_a_page_that_names_each_module() -> None:
    pages = site.api_pages()
    package = ROOT / "megatron_sp"
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not path.name.startswith("_"):
            page = pages[f"reference/api/{name.rpartition('.')[0]}.md"]
            assert f"\n::: {name}\n" in page and re.search(rf"\| \[`{path.stem}`\]\[{re.escape(name)}\] \| .+ \|\n", page), name


def test_the_build_is_strict_and_fetches_nothing() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^strict: true$", settings, re.MULTILINE) and re.search(r"^  font: false\b", settings, re.MULTILINE)
    assert "://" not in settings and "unpkg" not in settings
    assert re.search(r"^  polyfills: \[assets/iframe-worker.js\]", settings, re.MULTILINE), (
        "else the plugin offline names one from elsewhere"
    )
    assert re.search(r"^  - offline\b", settings, re.MULTILINE) and "content.code.copy" in settings
    assert len(re.findall(r"\b(omitted_files|not_found|absolute_links|anchors|unrecognized_links): warn\b", settings)) == 7
