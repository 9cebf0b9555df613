"""The run report in a real browser: it draws, answers to pointer and keys, says no error, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.run_logs import LogWriter, evil_run
from support.waiting import PATIENCE_S

from megatron_sp.report.page import write_page

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")]

# Tells facts through the console. Events are handled at once, so nothing has to be waited for.
DRIVER = """
const fact = (name, value) => console.log("FACT" + JSON.stringify([name, value]));
const figure = document.querySelector('figure[data-key="loss"]'), canvas = figure.querySelector(".canvas");
const ticks = () => [...figure.querySelectorAll("text.tick")].map((t) => t.textContent);
const box = canvas.getBoundingClientRect();
const event = (kind, x, more) => new PointerEvent(kind, { clientX: box.left + x, clientY: box.top + 80, pointerType: "mouse", button: 0,
  pointerId: 1, bubbles: true, ...more });
Element.prototype.setPointerCapture = () => {};  // there is no such pointer
const tips = () => [...document.querySelectorAll(".tip")].filter((t) => !t.hidden).map((t) => t.innerText);
const paths = () => figure.querySelectorAll("path.line").length;
fact("ready", document.documentElement.className);
fact("pwned", window.pwned ?? "no");
fact("drawn", [...document.querySelectorAll("figure")].map((f) => f.querySelectorAll("path.line, path.points").length));
const frame = (element) => { const b = element.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; };
fact("frames", [...document.querySelectorAll(".canvas")].map(frame));
fact("wider than the window", document.documentElement.scrollWidth > innerWidth);
fact("ticks", ticks());
const collisions = () => [...document.querySelectorAll("figure")].flatMap((f) => {
  const texts = [...f.querySelectorAll("text")].map((t) => [`${f.dataset.key}: ${t.textContent}`, t.getBoundingClientRect()]);
  return texts.flatMap(([name, a], i) => texts.slice(i + 1).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3,
  ).map(([other]) => [name, other]));
});
const atWidth = (width) => {
  document.body.style.width = width;
  dispatchEvent(new Event("afterprint"));  // which draws
  return [collisions(), document.querySelectorAll("text").length];
};
fact("collisions", ["400px", "1000px", "1600px", ""].map(atWidth));
fact("titles", [...document.querySelectorAll("figure")].map((f) => [...f.querySelectorAll(".axis-title")].map((t) => t.textContent)));
fact("levels", [...document.querySelectorAll(".level-text")].map((t) => t.textContent));
fact("folded", [...document.querySelectorAll("details.values")].map((d) => d.open));
canvas.dispatchEvent(event("pointermove", box.width / 2));
fact("tips", tips());
fact("crosses", document.querySelectorAll(".cross").length);
canvas.dispatchEvent(event("pointerleave", 0));
fact("tips after", tips());
figure.querySelector("button.log").click();
fact("log ticks", ticks());
figure.querySelector("button.log").click();
fact("again", ticks());
canvas.dispatchEvent(event("pointerdown", 62 + (box.width - 76) * 0.5));
canvas.dispatchEvent(event("pointerup", 62 + (box.width - 76) * 0.75));
fact("zoomed", ticks());
fact("reset", document.getElementById("reset").hidden);
canvas.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
fact("whole", ticks());
const axis = document.getElementById("axis");
for (const value of ["tokens", "time", "step"]) {
  axis.value = value;
  axis.dispatchEvent(new Event("change"));
  fact(value, ticks());
  fact(`title of ${value}`, figure.querySelectorAll(".axis-title")[1].textContent);
}
const before = figure.querySelector("path.line:not(.faint)").getAttribute("d"), slider = document.getElementById("smoothing");
slider.value = 8;
slider.dispatchEvent(new Event("input"));
fact("smoother", figure.querySelector("path.line:not(.faint)").getAttribute("d") !== before);
slider.value = 0;
slider.dispatchEvent(new Event("input"));
fact("unsmoothed", [paths(), document.querySelector("output").textContent]);
figure.querySelector(".legend button").click();
fact("hidden", [paths(), figure.querySelector(".legend button").getAttribute("aria-pressed")]);
figure.querySelector(".legend button").click();
canvas.focus();
for (const key of ["ArrowRight", "ArrowLeft", "ArrowLeft"]) canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
fact("by keys", tips());
const rows = () => [...document.querySelectorAll("#config-table tbody tr")].filter((r) => !r.hidden).length;
dispatchEvent(new Event("beforeprint"));
fact("paper", figure.querySelector("svg").getAttribute("viewBox"));
dispatchEvent(new Event("afterprint"));
fact("screen", figure.querySelector("svg").getAttribute("viewBox") !== "0 0 1000 366");
const few = rows();
document.getElementById("config-show").value = "all";
document.getElementById("config-show").dispatchEvent(new Event("change"));
const all = rows();
document.getElementById("config-filter").value = "--hidden-size";
document.getElementById("config-filter").dispatchEvent(new Event("input"));
fact("rows", [few, all, rows()]);
"""

PROBE = """
const fact = (name, value) => console.log("FACT" + JSON.stringify([name, value]));
fact("seen", [window.pwned ?? "no", document.images.length, document.scripts.length, document.querySelectorAll("[onerror]").length]);
const b = document.querySelector(".canvas").getBoundingClientRect();
fact("frame", [b.x, b.y, b.width, b.height]);
fact("wide", document.documentElement.scrollWidth > innerWidth);
"""


@dataclass
class Seen:
    """What the browser did with a page."""

    dom: str
    console: list[str]
    facts: dict[str, Any]
    picture: Path


def look(page: Path, driver: str = "", *, size: tuple[int, int] = (1200, 1500), dark: bool = False) -> Seen:
    """Open a page from the disk.

    Args:
        driver: a script of ours after that of the page, which the page's policy is then told to allow.
    """
    text = page.read_text()
    if driver:
        digest = base64.b64encode(hashlib.sha256(driver.encode()).digest()).decode()
        text = text.replace(html.escape("script-src '"), html.escape(f"script-src 'sha256-{digest}' '"), 1)
        page.write_text(text.replace("</html>", f"<script>{driver}</script></html>"))
    picture, errors = page.with_suffix(".png"), page.with_suffix(".err")
    command = [
        str(BROWSER), "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        f"--user-data-dir={page.parent / 'profile'}",
        "--enable-logging=stderr", "--virtual-time-budget=3000", f"--window-size={size[0]},{size[1]}", "--dump-dom",
        f"--screenshot={picture}", *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *(["--blink-settings=preferredColorScheme=0"] if dark else []), page.as_uri(),
    ]  # fmt: skip
    with (
        open(errors, "w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True) as run,
    ):
        try:
            dom, _ = run.communicate(timeout=PATIENCE_S)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    console = [line for line in errors.read_text().splitlines() if "CONSOLE" in line]
    facts = dict(json.loads(found) for found in re.findall(r'"FACT(\[.*\])", source', "\n".join(console)))
    return Seen(dom, [line for line in console if "FACT[" not in line], facts, picture)


def colours(picture: Path, frame: list[float]) -> int:
    """Distinct colours within a frame [x, y, width, height] of a screenshot."""
    image = pytest.importorskip("matplotlib.image").imread(picture)
    x, y, width, height = (round(v) for v in frame)
    part = image[y : y + height, x : x + width]
    assert part.size, f"{frame} is outside of the picture"
    return len({bytes(pixel) for pixel in (255 * part.reshape(-1, part.shape[-1])).astype("uint8")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """300 steps, interrupted at 200 and resumed from 150, with validations."""
    from megatron_sp.config.schema import Config

    config = Config()
    config.model.num_layers = 2
    log = LogWriter(tmp_path / "run")
    log.start(0, config=config.to_dict())
    for step in range(1, 201):
        log.steps(step, step, loss=2 + 8 / step + 0.3 * (step % 5))
    log.write("prediction", 200, predicted_bytes=2**29, before_model_bytes=2**29)  # as much as is measured: on the curve
    log.start(150, config=config.to_dict())
    for step in range(151, 301):
        log.steps(step, step, loss=2 + 8 / step + 0.3 * (step % 5))
        if step % 50 == 0:
            log.write("valid", step, loss=2.5, perplexity=12.2, seconds=1.0)
    log.status("done")
    return log.folder


def test_the_page_draws_and_answers(folder: Path, tmp_path: Path) -> None:
    write_page([folder], tmp_path / "page.html")
    seen = look(tmp_path / "page.html", DRIVER)
    facts = seen.facts
    assert seen.console == [] and facts["ready"] == "ready" and not facts["wider than the window"]
    assert facts["drawn"] == [3, 1, 2, 2, 2, 2, 1], "the lines and, of what is noisy, their means; of the loss the validation too"
    shown = [frame for frame in facts["frames"] if frame[1] + frame[3] < 1500]
    assert len(shown) >= 3 and all(colours(seen.picture, frame) > 12 for frame in shown)
    assert [found for found, _ in facts["collisions"]] == [[], [], [], []], "no text lies on another"
    assert all(count > 60 for _, count in facts["collisions"]) and facts["levels"] == ["predicted: 1.0 GiB"]
    assert facts["titles"][:3] == [["loss (nats)", "step"], ["learning rate", "step"], ["gradient norm (L2)", "step"]]
    assert facts["titles"][-1] == ["memory (GiB)", "step"] and facts["folded"] == [False] * 7
    assert "300" in facts["ticks"] and facts["again"] == facts["whole"] == facts["step"] == facts["ticks"]
    assert len(facts["tips"]) == 1 and re.search(r"step 1[45]\d\ntraining\n\d\.\d{4}", facts["tips"][0]) and facts["tips after"] == []
    assert facts["crosses"] == 7, "in all charts at once"
    assert facts["log ticks"] != facts["ticks"] and "10" in facts["log ticks"]
    steps = [int(t) for t in facts["zoomed"] if t.isdigit() and int(t) > 20]
    assert steps and min(steps) >= 150 and max(steps) <= 226 and facts["reset"] is False
    assert any(t.endswith(" k") for t in facts["tokens"]) and facts["time"] not in (facts["tokens"], facts["step"])
    assert (facts["title of tokens"], facts["title of time"]) == ("tokens", "training time (min)")
    assert facts["smoother"] and facts["unsmoothed"] == [1, "off"] and facts["hidden"] == [0, "false"]
    assert facts["by keys"][0].startswith("step 298\n"), "to the last step, and two back"
    assert facts["paper"] == "0 0 1000 366" and facts["screen"], "paper has a width of its own"
    few, every, one = facts["rows"]
    assert 2 <= few < 10 and every > 100 and one == 2, "with the name of their group"


def test_a_malicious_run_in_the_dark_on_a_narrow_screen(tmp_path: Path) -> None:
    folder = evil_run(tmp_path / "<img src=x onerror=window.pwned=1>")
    write_page([folder, folder], tmp_path / "page.html")
    seen = look(tmp_path / "page.html", PROBE, size=(500, 2600), dark=True)
    assert seen.facts["seen"] == ["no", 0, 3, 0], "data, the page's script, and this one"
    assert seen.console == [] and not seen.facts["wide"] and 'class="ready"' in seen.dom
    assert colours(seen.picture, seen.facts["frame"]) > 8
    image = pytest.importorskip("matplotlib.image").imread(seen.picture)
    assert image[2, 2, :3].mean() < 0.2, "a dark page where dark is preferred"
