"""Hooks of the documentation site (``mkdocs.yml``, ``make docs-site``), so that no list of pages or modules has to be kept by hand.

- The navigation is that of ``docs/index.md``: its headings, and the pages under each in the order of its links.
- The API reference has a page for each folder of the package, made from the sources; a module, or a name that other
  modules import, without a docstring ends the build.
- A link from a page to a file or folder of the repository outside of ``docs/`` leads to a copy of it in the site, so
  that the same link works on GitHub, in the site, and without a network. Markdown files (README.md) are pages of their
  own.
- Headings get GitHub's anchors.
"""

from __future__ import annotations

import ast
import functools
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from house_figures import undocumented  # noqa: E402

PACKAGE, DOCS, API, COPIES = "megatron_sp", "docs", "reference/api", "repository"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".sbatch": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
}


# ------------------------------------------------------------------------------------------------ what mkdocs calls
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set GitHub's anchors and the navigation."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_anchor
    config.nav = navigation((ROOT / DOCS / "index.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the API reference, and copies of what the pages link to outside of ``docs/``."""
    if missing := undocumented(ROOT / PACKAGE):
        raise PluginError("without a docstring: " + ", ".join(missing))
    for uri, text in api_pages().items():
        files.append(File.generated(config, uri, content=text))
    waiting = [
        (f"{DOCS}/{file.src_uri}", file.content_string)
        for file in files.documentation_pages()
        if file.generated_by is None
    ]
    known: set[str] = set()
    while waiting:
        origin, text = waiting.pop()
        for target in sorted(outside(origin, text) - known):
            known.add(target)
            content = copy_of(target)
            files.append(File.generated(config, copy_uri(target), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            if target.endswith(".md"):
                waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of ``docs/`` to the copies."""
    uri = page.file.src_uri
    if uri.startswith(API):
        return markdown
    origin = uri.removeprefix(f"{COPIES}/").removesuffix(".md") if uri.startswith(COPIES) else f"{DOCS}/{uri}"
    return redirected(markdown, origin, uri) if origin.endswith(".md") else markdown


# ------------------------------------------------------------------------------------------------ navigation and anchors
def github_anchor(heading: str, separator: str = "-") -> str:
    """Name a heading as GitHub does: ``## A b, c`` is ``#a-b-c``."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def navigation(index: str) -> list[Any]:
    """Read sections and the order of their pages from the index."""
    nav: list[Any] = ["index.md"]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        pages = [path for path, _ in LINK.findall(text) if path.endswith(".md") and not path.startswith("..")]
        nav.append({title.strip(): list(dict.fromkeys(pages))})
    for entry in nav:
        if isinstance(entry, dict) and "Reference" in entry:
            entry["Reference"].append({"API": list(api_pages())})
    return nav


# ------------------------------------------------------------------------------------------------ the API reference
def first_line(path: Path) -> str:
    """First line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def folders() -> Iterator[Path]:
    """Each folder of the package with Python files, parents first."""
    for path in sorted((ROOT / PACKAGE).rglob("__init__.py")):
        yield path.parent


@functools.cache
def api_pages() -> dict[str, str]:
    """Text of each page of the API reference, by its place in the site; the first is the overview."""
    pages, rows = {}, ["| folder | |", "|---|---|"]
    for folder in folders():
        name = folder.relative_to(ROOT).as_posix().replace("/", ".")
        sentence = first_line(folder / "__init__.py")
        rows.append(f"| [`{name}`]({name}.md) | {sentence} |")
        modules = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
        text = [f"# {name}", "", sentence, ""]
        if modules:
            text += ["| module | |", "|---|---|"]
            text += [f"| [`{path.stem}`][{name}.{path.stem}] | {first_line(path)} |" for path in modules]
        text += ["", *(f"::: {name}.{path.stem}\n" for path in modules)]
        pages[f"{API}/{name}.md"] = "\n".join(text)
    return {
        f"{API}/index.md": "\n".join(
            ["# API", "", "Made from the docstrings: a page for each folder of the package.", "", *rows, ""]
        ),
        **pages,
    }


# ------------------------------------------------------------------------------------------------ links out of docs/
def outside(origin: str, markdown: str) -> set[str]:
    """Paths in the repository, not under ``docs/``, that a page links to."""
    targets = {
        posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        for path, _ in LINK.findall(without_code(markdown))
    }
    return {target for target in targets if not f"{target}/".startswith(f"{DOCS}/") and (ROOT / target).exists()}


def without_code(markdown: str) -> str:
    """Leave out fenced code."""
    return re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)


def copy_uri(target: str) -> str:
    """Place in the site of a file or folder of the repository."""
    return f"{COPIES}/{target}.md"


def copy_of(target: str) -> str:
    """Page with the contents of a file, or the names in a folder; Markdown as it is."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(
            f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir() if not p.name.startswith((".", "__"))
        )
        return f"# {target}/\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def redirected(markdown: str, origin: str, uri: str) -> str:
    """Rewrite the links of a page for its place in the site.

    Args:
        origin: the page's path in the repository.
        uri: its place in the site.
    """

    def place(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[1]))
        if f"{target}/".startswith(f"{DOCS}/"):
            there = target.removeprefix(f"{DOCS}/")
        elif (ROOT / target).exists():
            there = copy_uri(target)
        else:
            return match[0]  # mkdocs says that it leads nowhere
        return posixpath.relpath(there, posixpath.dirname(uri) or ".") + (match[2] or "")

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(place, part) for number, part in enumerate(parts))
