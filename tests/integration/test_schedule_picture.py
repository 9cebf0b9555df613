"""The picture of a schedule in a real browser, light and dark, narrow and wide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_run_page_browser import BROWSER, look
from torch import nn

from megatron_sp.schedule import Mesh, schedule

EVIL = "<img src=x onerror=window.pwned=1>"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.long)], ids=["light", "dark"])
def test_the_picture_is_drawn_and_nothing_in_it_acts(tmp_path: Path, dark: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8), type(EVIL, (nn.GELU,), {})(), nn.Linear(8, 4))
    s = schedule(model, Mesh.sizes(tp=4))
    s["0"].column()
    s["2"].row()
    s["1"].rng()
    s.picture(tmp_path / "page.html")
    seen = look(tmp_path / "page.html", size=(420, 900), dark=dark)
    assert seen.console == [], "nothing is refused, and nothing fails"
    assert seen.dom.count('class="own"') + seen.dom.count("class=own") == 3 and "backward all_reduce" in seen.dom and "<img" not in seen.dom
    image = pytest.importorskip("matplotlib.image").imread(seen.picture)
    assert (image[2, 2, :3].mean() < 0.2) == dark
    colours = {bytes(pixel) for pixel in (255 * image[:, :, :3].reshape(-1, 3)).astype("uint8")}
    own = (0x6F, 0xA8, 0xFF) if dark else (0x1D, 0x5F, 0xD1)
    assert bytes(own) in colours and len(colours) > 20
