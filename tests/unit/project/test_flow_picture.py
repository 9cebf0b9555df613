"""The picture of how data flows is what its script draws, names files that exist, and the page walks through the same files."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET

from support.paths import ROOT

_SPEC = importlib.util.spec_from_file_location("make_flow_picture", ROOT / "tools/dev/make_flow_picture.py")
assert _SPEC is not None and _SPEC.loader is not None
drawing = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(drawing)
BOXES = [[*lane.there, *lane.back] for lane in drawing.LANES]


def test_the_picture_is_current() -> None:
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.picture(), "run: make docs"


def test_the_picture_is_self_contained_svg() -> None:
    text = drawing.picture()
    ET.fromstring(text)
    assert "prefers-color-scheme: dark" in text and not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|<image", text)


def test_each_box_names_a_file_and_its_text_fits() -> None:
    for box in (box for boxes in BOXES for box in boxes):
        assert (ROOT / "megatron_sp" / box.file).is_file(), box.file
        assert max(map(len, box[1:])) <= 24 and len(box.file.rpartition("/")[2]) <= 20, box


def test_the_page_follows_the_arrows() -> None:
    page = (ROOT / "docs/explanation/data_flow.md").read_text(encoding="utf-8")
    for section, boxes in zip(page.split("\n## ")[1:], BOXES, strict=True):
        assert re.findall(r"^\d+\. \[([\w/]+\.py)\]", section, flags=re.MULTILINE) == [box.file for box in boxes]
