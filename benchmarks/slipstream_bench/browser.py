"""A real browser without a window, to measure and test the page in."""

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
"""Rules of axe-core that the page must keep."""


def missing() -> str | None:
    """What is not here that a browser needs, or None."""
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
        """Load the report at `path` anew and wait until it is drawn.

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
        """What the body of a function returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """As `run`; the script calls its last argument with the result, some time."""
        self.driver.set_script_timeout(60)
        return self.driver.execute_async_script(script, *arguments)

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        self.driver.save_screenshot(str(path))

    def requests(self) -> list[str]:
        """What the page asked for since it was opened, itself aside."""
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
        """What the page complained of on its console since it was opened."""
        return [
            str(entry["message"])
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def violations(self, axe: Path, rules: Sequence[str] = WCAG) -> list[str]:
        """Rules of axe-core that what is shown breaks, each with the first place it does."""
        if not self.run("return !!window.axe"):
            self.run(axe.read_text(encoding="utf-8"))
        found = self.wait(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {runOnly: {type: 'tag', values: arguments[0]}})"
            ".then(r => done(r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 160)"
            " + ' ' + (v.nodes[0].any[0]?.message ?? ''))), e => done([String(e)]));",
            list(rules),
        )
        return [str(one) for one in found]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, closed when the block ends.

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
        # Named here, so that nothing is looked for, or fetched.
        started = webdriver.Chrome(options=options, service=Service(driver))
    except WebDriverException as error:
        raise SlipstreamError(f"the browser does not start: {error.msg}", where=binary) from error
    try:
        yield Browser(started)
    finally:
        started.quit()


def axe_core() -> Path | None:
    """axe-core's script in a clone whose ``page/`` is installed, or None."""
    found = Path(__file__).parents[2] / "page" / "node_modules" / "axe-core" / "axe.min.js"
    return found if found.exists() else None


def _first(names: Sequence[str]) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)
