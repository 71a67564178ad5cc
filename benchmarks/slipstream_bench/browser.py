"""A headless browser that measures and tests the page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import MissingExtraError, SlipstreamError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_DRIVER = "chromedriver"
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--force-device-scale-factor=1",
)
WCAG = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")
"""Rules of axe-core that the page must follow."""


def missing() -> str | None:
    """Return what a browser needs and this machine lacks, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (the extra [dev] has it)"
    for names in (_BROWSERS, (_DRIVER,)):
        if _first(names) is None:
            return f"{names[0]} is not installed"
    return None


class Browser:
    """Chromium with one page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self,
        path: Path,
        *,
        view: str = "overview",
        size: tuple[int, int] = (1280, 720),
        dark: bool = False,
    ) -> None:
        """Load the report at `path` in a blank page and wait until it is drawn.

        Raises:
            SlipstreamError: it is not drawn within 20 seconds.
        """
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.driver.get("about:blank")
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(f"{path.resolve().as_uri()}#{view}")
        try:
            WebDriverWait(self.driver, 20, poll_frequency=0.05).until(
                lambda driver: driver.execute_script(
                    "return !!document.querySelector('#view, .empty h1')"
                )
            )
        except TimeoutException as error:
            raise SlipstreamError("the report is not drawn", where=str(path)) from error

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page and return its result."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Run an asynchronous script, which passes its result to its last argument, a callback."""
        self.driver.set_script_timeout(60)
        return self.driver.execute_async_script(script, *arguments)

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of the DevTools protocol and return its result."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def screenshot(self, path: Path) -> None:
        """Save what the window shows as a PNG."""
        self.driver.save_screenshot(str(path))

    def requests(self) -> list[str]:
        """Return URLs that the page has requested since it was opened, except its own."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] != "Network.requestWillBeSent":
                continue
            url = str(message["params"]["request"]["url"])
            itself = message["params"].get("type") == "Document"
            if not itself and not url.startswith("data:"):
                found.append(url)
        return found

    def errors(self) -> list[str]:
        """Return warnings and errors on the page's console since it was opened."""
        return [
            str(entry["message"])
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def violations(self, axe: Path, rules: Sequence[str] = WCAG) -> list[str]:
        """Return axe-core's rules that the current view violates, each with the first element."""
        if not self.run("return !!window.axe"):
            self.run(axe.read_text(encoding="utf-8"))
        found = self.wait(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {runOnly: {type: 'tag', values: arguments[0]}})"
            ".then(r => done(r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 160)"
            " + ' ' + (v.nodes[0].any[0]?.message ?? ''))), e => done([String(e)]));",
            list(rules),
        )
        return [str(violation) for violation in found]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and close it when the block ends.

    Raises:
        MissingExtraError: selenium is not installed.
        SlipstreamError: Chromium or its driver is not installed, or does not start.
    """
    try:
        from selenium import webdriver
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise MissingExtraError("driving a browser", "selenium", "dev") from error
    binary, driver = _first(_BROWSERS), _first((_DRIVER,))
    if binary is None or driver is None:
        raise SlipstreamError(
            str(missing()), remedy="on Debian: apt-get install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in _OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        # Both are named, so that Selenium neither searches for nor downloads them.
        started = webdriver.Chrome(options=options, service=Service(driver))
    except WebDriverException as error:
        raise SlipstreamError(f"the browser does not start: {error.msg}", where=binary) from error
    try:
        yield Browser(started)
    finally:
        started.quit()


def axe_core() -> Path | None:
    """Return axe-core's script in a clone with an installed ``page/``, or None."""
    found = Path(__file__).parents[2] / "page" / "node_modules" / "axe-core" / "axe.min.js"
    return found if found.exists() else None


def _first(names: Sequence[str]) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)
