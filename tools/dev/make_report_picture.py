"""Take the picture of a run report that stands in the README and in docs/how-to/report.md.

    python tools/dev/make_report_picture.py runs/mine [--output docs/images/report.png]

Needs Chromium (Debian: apt-get install chromium) and Pillow, which matplotlib brings.
The picture shows the top of the page with the pointer on the loss.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from megatron_sp.report.page import write_page

OUTPUT = Path(__file__).resolve().parents[2] / "docs/images/report.png"
WIDTH, HEIGHT = 1280, 1440
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
POINT = """
const canvas = document.querySelector('figure[data-key="loss"] .canvas'), box = canvas.getBoundingClientRect();
const place = { clientX: box.left + 0.62 * box.width, clientY: box.top + 40 };
canvas.dispatchEvent(new PointerEvent("pointermove", { ...place, pointerType: "mouse" }));
"""


def page_that_points(run: Path, folder: Path) -> Path:
    """Write the page with a script that moves the pointer, which the page's policy is told to allow."""
    page = folder / "report.html"
    write_page([run], page)
    digest = base64.b64encode(hashlib.sha256(POINT.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace(
        html.escape("script-src '"), html.escape(f"script-src 'sha256-{digest}' '"), 1
    )
    page.write_text(text.replace("</html>", f"<script>{POINT}</script></html>"), encoding="utf-8")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE")
    options = parser.parse_args()
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        parser.error(f"none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        page = page_that_points(options.run, Path(folder))
        command = [
            browser, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", f"--user-data-dir={folder}/profile",
            "--virtual-time-budget=3000", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={options.output.resolve()}", page.as_uri(),
        ]  # fmt: skip
        subprocess.run([*command, *(["--no-sandbox"] if os.geteuid() == 0 else [])], check=True, capture_output=True)
    with Image.open(options.output) as picture:  # a palette is enough, and a third of the size
        picture.convert("RGB").quantize(256).save(options.output, optimize=True)
    print(f"{options.output} shows {options.run}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
