"""docs/flags.md is what the dataclasses say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megatron_sp.config import GROUPS
from megatron_sp.utils.field_kinds import field_kinds

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_flag_docs", ROOT / "tools" / "make_flag_docs.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == tool.page(), "run: make docs"


def test_every_flag_and_alias_is_on_it() -> None:
    text = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    for cls in GROUPS.values():
        for name in field_kinds(cls):
            flag = name.replace("_", "-")
            assert f"`--{flag}`" in text or f"`--no-{flag}`" in text
            assert all(f"`--{alias}`" in text for alias in cls.__dataclass_fields__[name].metadata["aliases"])
