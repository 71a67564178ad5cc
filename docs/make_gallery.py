"""Make the screenshots in ``docs/gallery``: a real session with an example, in a real browser.

    .venv/bin/python docs/make_gallery.py

Needs Chromium and its driver. The figures in them are measured on this machine.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from slipstream.live import Analyst
from slipstream.live.server import serving
from slipstream_bench.browser import Browser, browser

ROOT = Path(__file__).parents[1]
GALLERY = Path(__file__).parent / "gallery"
TECHNIQUES = ["amp:bf16", "checkpointing", "accumulation:2", "fused_optimizer:fused"]
LIMIT_S = 600.0


def main() -> None:
    """Run a session: analyse, drag, save, measure."""
    GALLERY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "language_model.py"
        shutil.copy(ROOT / "examples" / path.name, path)
        with (
            Analyst(f"{path}:make_workload", threads=1, techniques=TECHNIQUES) as analyst,
            serving(analyst, 0) as live,
            browser() as page,
        ):
            size = {"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": False}
            page.command("Emulation.setDeviceMetricsOverride", **size)
            page.driver.get(live.address)
            analyst.wait(analyst.watch(), timeout_s=LIMIT_S)
            until(page, "return !!document.querySelector('.badge.ready')")
            take(page, "live")
            page.run("document.getElementById('tab-timeline').click()")
            take(page, "timeline")
            page.run("document.getElementById('tab-live').click()")
            bar = page.driver.find_element("id", "bar-batch")
            while int(bar.get_attribute("aria-valuetext").replace(",", "")) < 16:
                bar.send_keys("\ue014")
            bar.send_keys("\ue007")
            until(page, "return !!document.getElementById('save')")
            take(page, "drag")
            before = analyst.latest.number
            page.driver.find_element("id", "save").click()
            analyst.wait(before + 1, state="recorded", timeout_s=LIMIT_S)
            until(page, "return document.getElementById('held')?.innerText.includes('interval.')")
            take(page, "predicted_and_measured")


def until(page: Browser, script: str) -> None:
    """Wait until `script` returns true."""
    end = time.monotonic() + LIMIT_S
    while not page.run(script):
        if time.monotonic() > end:
            sys.exit(f"not within {LIMIT_S:g} s: {script}")
        time.sleep(0.1)


def take(page: Browser, name: str) -> None:
    """Save a screenshot as ``docs/gallery/NAME.png``, in 128 colours."""
    from PIL import Image

    time.sleep(0.5)
    path = GALLERY / f"{name}.png"
    page.screenshot(path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
