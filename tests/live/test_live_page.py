"""The live page in a real browser, with a real server and real analyses.

One browser, and one server whose analyst records a small step, are shared by these tests; each
begins with the original file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from live_workloads import LIMIT_S, TRAIN

from slipstream.child.fork_server import ForkServer
from slipstream.live import Analysis, Analyst
from slipstream.live.server import Live, serving
from slipstream_bench.browser import Browser, axe_core, browser, missing

Require = Callable[[str, bool, str], None]
# The last is a panel next to the code.
SIZES = ((1280, 720), (1920, 1080), (440, 900))
TEXT = "return document.body.innerText"
VALUE = "return document.getElementById('bar-{}').getAttribute('aria-valuetext')"
# Texts that overlap, or are cut off by their box without a scroll bar.
OVERLAPS = """
const boxes = [...document.querySelectorAll('.live h2, .live .row .label, .live .row .track, ' +
  '.live .row .value, .live button, .live select, header h1, header .badge, header button, ' +
  'nav button, aside h2')].filter(e => e.offsetParent && !e.closest('.lines'))
  .map(e => [e, e.getBoundingClientRect()]);
const found = [];
for (const [a, p] of boxes) {
  if (a.innerText && a.scrollWidth > a.clientWidth + 1 && !a.closest('.badge'))
    found.push('cut: ' + a.innerText);
  for (const [b, q] of boxes) {
    if (a === b || a.contains(b) || b.contains(a)) continue;
    const w = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (w > 1 && h > 1) found.push(a.innerText + ' / ' + b.innerText);
  }
}
for (const box of [document.documentElement, document.querySelector('main')])
  if (box.scrollWidth > box.clientWidth + 1) found.push(box.tagName + ' scrolls sideways');
return found;
"""

_AGAIN_S = 5.0
RAISES = "        raise ValueError('no')\n        return self.second"
_PROPOSED = "return !!document.getElementById('save')"


class Page:
    """A browser on a live page, and its analyst."""

    def __init__(self, shown: Browser, live: Live, path: Path) -> None:
        self.shown, self.live, self.path = shown, live, path

    @property
    def analyst(self) -> Analyst:
        return self.live.analyst

    def open(self, address: str | None = None, size: tuple[int, int] = SIZES[0]) -> None:
        width, height = size
        self.shown.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.shown.driver.get("about:blank")
        self.shown.driver.get(address or self.live.address)

    def until(self, script: str, holds: Callable[[Any], bool] = bool) -> Any:
        end = time.monotonic() + LIMIT_S
        while not holds(found := self.shown.run(script)):
            assert time.monotonic() < end, f"{script}: {found}\n{self.shown.run(TEXT)}"
            time.sleep(0.05)
        return found

    def act(self, do: Callable[[], object], script: str) -> None:
        """Repeat an action until it shows, because the page may be redrawn meanwhile."""
        from selenium.common.exceptions import WebDriverException

        end = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(WebDriverException):
                do()
            again = time.monotonic() + _AGAIN_S
            while time.monotonic() < again:
                if self.shown.run(script):
                    return
                time.sleep(0.05)
            assert time.monotonic() < end, f"{script}\n{self.shown.run(TEXT)}"

    def ready(self) -> Analysis:
        """Wait until all results of the unchanged file are shown."""
        found = self.analyst.wait(self.analyst.analyse(), timeout_s=LIMIT_S)
        self.until("return !!document.querySelector('.badge.ready')")
        self.until("return !!document.querySelector('.track:not(.fixed)')")
        return found

    def click(self, what: str) -> None:
        self.until(f"return !!document.getElementById('{what}')")
        self.shown.driver.find_element("id", what).click()

    def drag(self, bar: str, share: float) -> None:
        """Drag a bar, and release it at this share of its track."""
        from selenium.webdriver.common.action_chains import ActionChains

        track = self.shown.driver.find_element("id", f"bar-{bar}")
        chain = ActionChains(self.shown.driver).move_to_element(track).click_and_hold()
        by = int((share - 0.5) * track.size["width"])
        chain.move_by_offset(by, 0).release().perform()


@pytest.fixture(scope="module")
def shown(require: Require) -> Iterator[Browser]:
    reason = missing()
    require("chromium", reason is None, reason or "")
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def session(
    shown: Browser, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("live") / "train.py"
    path.write_text(TRAIN)
    with ExitStack() as stack:
        analyst = Analyst(
            f"{path}:make_workload", threads=1, steps=3, timeout_s=LIMIT_S,
            techniques=None, batch_budget_s=0.05, server=server,
        )  # fmt: skip
        stack.enter_context(analyst)
        live = stack.enter_context(serving(analyst, 0))
        analyst.watch()
        yield Page(shown, live, path)


@pytest.fixture
def page(session: Page) -> Page:
    if session.path.read_text() != TRAIN:
        session.path.write_text(TRAIN)
    session.open()
    session.ready()
    return session


def test_without_the_key_a_clear_page_has_no_data(session: Page) -> None:
    session.shown.command("Network.clearBrowserCookies")
    session.open(f"http://127.0.0.1:{session.live.port}/")
    assert "needs its key" in session.shown.run(TEXT)
    session.open()
    assert session.live.key not in session.shown.run("return location.href")
    session.until("return !!document.querySelector('.badge')")


@pytest.mark.parametrize("size", SIZES, ids=["small", "large", "panel"])
def test_nothing_overlaps_or_is_cut_off(
    page: Page, size: tuple[int, int], require: Require
) -> None:
    page.open(size=size)
    page.ready()
    assert page.shown.run(OVERLAPS) == []
    axe = axe_core()
    require("chromium", axe is not None, "axe-core is not installed: npm ci in page/")
    assert axe is not None
    # The policy admits no script, not even a test's: axe runs through DevTools.
    page.shown.command("Page.setBypassCSP", enabled=True)
    page.open(size=size)
    page.ready()
    assert page.shown.violations(axe) == []
    page.shown.command("Page.setBypassCSP", enabled=False)


def test_a_line_is_hovered_chosen_and_found_on_the_timeline(page: Page) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    costs = page.analyst.latest.costs
    assert costs is not None
    line = next(cost for cost in costs.lines if cost.path == str(page.path) and cost.total_ns > 0)
    driver = page.shown.driver

    def row() -> Any:
        return driver.find_element("css selector", f"tr[data-line='{line.line}']")

    def hover() -> None:
        away = driver.find_element("tag name", "h1")
        ActionChains(driver).move_to_element(away).move_to_element(row()).perform()

    page.act(
        hover,
        f"return document.getElementById('line-detail').innerText.includes('Line {line.line}:')",
    )
    page.act(
        lambda: row().find_element("tag name", "button").click(),
        "return location.hash === '#timeline'",
    )
    page.until(
        "return document.getElementById('search').value", lambda v: v.endswith(f":{line.line}")
    )
    page.until(
        "return document.getElementById('view').innerText", lambda text: "0 of 0" not in text
    )


def test_a_switch_simulates_a_new_combination(page: Page) -> None:
    switch = "[...document.querySelectorAll('.switch')].find(s => s.innerText.includes('{}'))"
    name, parts = "accumulation:4", []
    for part in (name, "batch_size:x2"):
        page.until(f"return !!{switch.format(part)}")
        page.shown.run(f"{switch.format(part)}.querySelector('input').click()")
        parts.append(part)
        found = page.analyst.simulate("+".join(parts))
        shown = page.until(
            "return document.querySelector('.outcome').innerText",
            lambda text: not text.startswith("simulating") and "baseline" not in text,
        )
        if "reason" in found:
            assert found["reason"] in shown
        else:
            assert f"{found['speedup']:.2f}x" in shown


def test_an_unsimulated_technique_can_be_switched_on(page: Page, server: ForkServer) -> None:
    path = page.path.parent / "some.py"
    path.write_text(TRAIN)
    first, other = "accumulation:4", "accumulation:2"
    with (
        Analyst(
            f"{path}:make_workload", threads=1, steps=1, techniques=(other,), batches=False,
            server=server,
        ) as analyst,
        serving(analyst, 0) as live,
    ):  # fmt: skip
        analyst.watch()
        page.open(live.address)
        page.until("return !!document.querySelector('.badge.ready')")
        switches = "return [...document.querySelectorAll('.switch .mono')].map(s => s.innerText)"
        shown = page.until(switches)
        assert shown[0] == other
        assert first in shown
        page.shown.run(
            "[...document.querySelectorAll('.switch')].find(s => s.innerText.includes("
            "arguments[0])).querySelector('input').click()",
            first,
        )
        # After one step on a busy machine any verdict is possible.
        verdict = page.until("return document.querySelector('.outcome .verdict')?.innerText")
        assert re.match("(not )?worth it|inconclusive", verdict), verdict


def test_another_device_can_be_chosen(page: Page) -> None:
    page.until("return !!document.getElementById('device')")
    page.shown.run(
        "const chosen = document.getElementById('device'); chosen.value = 'h100-sxm';"
        "chosen.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    shown = page.until(
        "return document.getElementById('on-device').innerText",
        lambda text: "predicting" not in text and "Measured here" not in text,
    )
    found = page.analyst.on_device("h100-sxm")
    assert (found["reason"] or found["about"]) in shown


def test_a_cluster_is_chosen_and_its_answer_disappears_with_the_text(page: Page) -> None:
    def choose(what: str, value: str) -> str:
        page.until(f"return !!document.getElementById('{what}')")
        page.shown.run(
            "const chosen = document.getElementById(arguments[0]); chosen.value = arguments[1];"
            "chosen.dispatchEvent(new Event('change', {bubbles: true}))",
            what,
            value,
        )
        script = "return document.getElementById('there').innerText"
        return str(page.until(script, lambda text: "samples per second" in text))

    choose("cluster", "ethernet-1g")
    choose("workers", "4")
    for how in ("ddp", "ddp+sharded_update"):
        shown = choose("spread", how)
        found = page.analyst.simulate(how, "ethernet-1g", 4)
        assert f"{found['speedup']:.2f}x the samples" in shown
        assert "4 workers" in shown
    # It has eight devices, so more cannot be chosen.
    devices = "return [...document.querySelectorAll('#workers option')].map(one => one.value)"
    assert page.shown.run(devices) == ["2", "4", "8"]
    page.path.write_text(TRAIN.replace("lr=0.1", "lr=0.2"))
    page.until(TEXT, lambda text: "samples per second with" not in text)


def test_a_dragged_size_is_saved_measured_and_undone_exactly(page: Page) -> None:
    before = page.path.read_bytes()
    page.act(lambda: page.drag("batch", 0.6), _PROPOSED)
    shown = page.shown.run(VALUE.format("batch"))
    assert shown != "16"
    # Dragging writes nothing.
    assert page.path.read_bytes() == before
    number = page.analyst.latest.number
    page.click("save")
    page.until("return !!document.getElementById('held')")
    assert page.path.read_bytes() == before.replace(
        b"batch_size=16", b"batch_size=%s" % shown.encode()
    )
    found = page.analyst.wait(number + 1, state="recorded", timeout_s=LIMIT_S)
    assert found.costs is not None
    assert str(found.costs.samples) == shown
    assert found.expected is not None
    assert found.expected["samples"] == found.costs.samples
    held = page.until(
        "return document.getElementById('held').innerText", lambda t: "interval." in t
    )
    assert "predicted" in held
    assert "measured" in held
    assert page.shown.run(OVERLAPS) == []
    page.click("undo")
    page.until(VALUE.format("batch"), lambda value: value == "16")
    assert page.path.read_bytes() == before
    assert page.shown.run("return document.getElementById('undo').disabled")


NUMBER = "batch_size=16"
PLACES = {
    "annotated": TRAIN.replace(NUMBER, "batch_size: int = 16"),
    "constant": TRAIN.replace(NUMBER, "batch_size=SIZE").replace(
        "class Net", "SIZE: int = 16  # of the sweep\n\n\nclass Net"
    ),
    "split over lines": TRAIN.replace(
        "(batch_size=16, width=32)",
        "(\n    *,\n    batch_size  =\n    16,  # samples\n    width=32,\n)",
    ),
    "decorated": TRAIN.replace(
        "def make_workload",
        "import functools\n\n\n@functools.lru_cache(maxsize=16)\ndef make_workload",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_a_size_is_edited_at_its_literal(place: str, page: Page) -> None:
    before = PLACES[place]
    page.path.write_text(before)
    page.ready()
    page.act(lambda: page.drag("batch", 0.6), _PROPOSED)
    value = page.shown.run(VALUE.format("batch"))
    assert page.path.read_text() == before
    page.click("save")
    page.until("return !!document.getElementById('held')")
    # One token differs: the sixteen that is the batch size.
    head, _, tail = before.rpartition("16")
    assert page.path.read_text() == head + value + tail
    page.until("return !document.getElementById('undo').disabled")
    page.click("undo")
    page.until("return null", lambda nothing: page.path.read_text() == before)


def test_the_keyboard_does_the_same(page: Page) -> None:
    bar = page.shown.driver.find_element("id", "bar-rate")
    page.act(lambda: bar.send_keys("\ue014", "\ue007"), _PROPOSED)  # right arrow, enter
    page.act(lambda: bar.send_keys("\ue00c"), "return !document.getElementById('save')")  # escape
    assert page.path.read_text() == TRAIN
    assert page.shown.run(VALUE.format("batch")) == "16"


def test_a_file_that_changed_during_a_drag_is_not_edited(page: Page) -> None:
    page.act(lambda: page.drag("memory", 0.7), _PROPOSED)
    digest = page.shown.run("return null") or "0" * 64
    answer = page.shown.wait(
        "const done = arguments[arguments.length - 1];"
        "const socket = new WebSocket('ws://' + location.host + '/live');"
        "socket.onopen = () => socket.send(JSON.stringify("
        "{id: 7, do: 'save', batch: 64, digest: arguments[0]}));"
        "socket.onmessage = (m) => { const found = JSON.parse(m.data);"
        "if (found.id === 7) { socket.close(); done(found); } };",
        digest,
    )
    assert re.search(rf"'{page.path.name}'.*\bchanged\b", answer["error"]["what"])
    assert page.path.read_text() == TRAIN
    page.path.write_text(TRAIN + "# by another hand\n")
    # The new text is analysed, and the value dragged on the old one is gone.
    page.until("return !document.getElementById('save')")
    page.ready()
    assert page.path.read_text() == TRAIN + "# by another hand\n"


def test_a_technique_is_written_into_the_file_and_undone(page: Page) -> None:
    page.path.write_text(TRAIN.replace("lr=0.1", "lr=0.1, momentum=0.9"))
    before = page.path.read_bytes()
    page.ready()
    name = "fused_optimizer:fused"
    found = page.analyst.simulate(name)
    assert "reason" not in found
    with_it = page.shown.wait(
        "const done = arguments[arguments.length - 1];"
        "const socket = new WebSocket('ws://' + location.host + '/live');"
        "const send = (id, rest) => socket.send(JSON.stringify({id, ...rest}));"
        f"const technique = '{name}';"
        "socket.onopen = () => send(1, {do: 'preview', technique});"
        "socket.onmessage = (m) => { const found = JSON.parse(m.data);"
        "if (found.id === 1) send(2, {do: 'save', technique, digest: found.result.digest});"
        "if (found.id === 2) { socket.close(); done(found); } };"
    )
    assert "error" not in with_it
    assert b"fused=True" in page.path.read_bytes()
    # The other page sees it as well: two clients, one session.
    page.until("return !!document.getElementById('held')")
    page.click("undo")
    page.until("return null", lambda nothing: page.path.read_bytes() == before)
    page.until("return document.getElementById('undo').disabled")


def test_a_fault_while_typing_is_shown_and_the_numbers_stay(page: Page) -> None:
    page.path.write_text(TRAIN.replace("self.second(hidden)", "self.second(hidden"))
    page.until(
        "return document.getElementById('problem')?.innerText ?? ''",
        lambda text: "train.py:13" in text,
    )
    assert page.shown.run("return !!document.getElementById('bar-step')")
    page.path.write_text(TRAIN)
    page.until("return !document.getElementById('problem')")


def test_a_first_text_that_fails_is_reported_in_every_view(page: Page, server: ForkServer) -> None:
    path = page.path.parent / "broken.py"
    path.write_text("def make_workload(:\n")
    with (
        Analyst(f"{path}:make_workload", techniques=None, batches=False, server=server) as analyst,
        serving(analyst, 0) as live,
    ):
        analyst.watch()
        page.open(live.address)
        for view in ("live", "timeline", "whatifs"):
            page.shown.run("location.hash = arguments[0]", view)
            page.until(
                "return document.getElementById('view').innerText",
                lambda text: "broken.py:1" in text,
            )
        page.shown.run("location.hash = 'live'")
        path.write_text(TRAIN)
        note = "return document.getElementById('bars-note')?.innerText ?? ''"
        page.until(note, lambda text: "--no-batches" in text)


def test_after_a_failed_step_no_sizes_are_pending(page: Page) -> None:
    page.path.write_text(TRAIN.replace("        return self.second", RAISES))
    # A half-written text may have been read and reported before.
    page.until(
        "return document.getElementById('problem')?.innerText ?? ''",
        lambda text: "ValueError: no" in text,
    )
    note = page.shown.run("return document.getElementById('bars-note').innerText")
    assert re.search(r"^Read-only:.* not be analysed", note)
    page.path.write_text(TRAIN)
    page.ready()


def test_an_uncertain_batch_size_is_read_only_with_the_reason(page: Page) -> None:
    page.path.write_text(TRAIN.replace("batch_size=16", "batch_size=4 * 4"))
    # If read while half written, it is read-only for another reason at first.
    page.until(
        "return document.getElementById('bars-note').innerText",
        lambda t: bool(re.search(r"^Read-only.*'4\b.*\b4'.*\bnot a plain number", t)),
    )
    assert (
        page.shown.run("return document.getElementById('bar-batch').getAttribute('aria-readonly')")
        == "true"
    )
    page.drag("batch", 0.9)
    assert not page.shown.run("return !!document.getElementById('save')")


SOCKET = """
const done = arguments[arguments.length - 1];
const socket = new WebSocket(`ws://127.0.0.1:${arguments[0]}/live`);
socket.onopen = () => done('open');
socket.onclose = (event) => done(`closed ${event.wasClean}`);
"""


def test_another_origin_gets_nothing_even_in_the_same_browser(page: Page) -> None:
    # It has the cookie of the session, like any page in this browser.
    assert page.shown.wait(SOCKET, page.live.port) == "open"
    page.shown.driver.get("data:text/html,<title>another</title>")
    assert page.shown.wait(SOCKET, page.live.port) == "closed false"


def test_of_two_concurrent_saves_one_is_refused(page: Page) -> None:
    before = page.path.read_bytes()
    answers = page.shown.wait(
        "const done = arguments[arguments.length - 1]; const found = [];"
        "const clients = [24, 40].map((batch) => {"
        "const one = new WebSocket('ws://' + location.host + '/live');"
        "one.onmessage = (m) => { const said = JSON.parse(m.data);"
        "if (said.type !== 'answer') return;"
        "found.push([batch, said]); one.close(); if (found.length === 2) done(found); };"
        "return new Promise((open) => (one.onopen = () => open([one, batch]))); });"
        "Promise.all(clients).then((all) => all.forEach(([one, batch]) =>"
        "one.send(JSON.stringify({id: 1, do: 'save', batch, digest: arguments[0]}))));",
        hashlib.sha256(before).hexdigest(),
    )
    saved = [batch for batch, answer in answers if "result" in answer]
    refused = [answer["error"]["what"] for _, answer in answers if "error" in answer]
    assert len(saved) == len(refused) == 1, answers
    assert re.search(rf"'{page.path.name}'.*\bchanged\b", refused[0])
    assert page.path.read_bytes() == before.replace(b"=16", b"=%d" % saved[0])
    page.until("return !document.getElementById('undo').disabled")
    page.click("undo")
    page.until("return null", lambda nothing: page.path.read_bytes() == before)


def test_a_stale_tab_reports_that_its_session_ended(page: Page, server: ForkServer) -> None:
    path = page.path.parent / "other.py"
    path.write_text(TRAIN)
    analyst = Analyst(
        f"{path}:make_workload", steps=1, techniques=None, batches=False, server=server
    )
    with analyst:
        with serving(analyst, 0) as live:
            port = live.port
            page.open(live.address)
            page.until("return !!document.querySelector('.badge')")
        page.until("return document.querySelector('.badge').innerText", lambda t: "lost" in t)
        with serving(analyst, port) as again:
            assert again.key != live.key
            page.until(TEXT, lambda text: "session has ended" in text)


def test_an_invalid_message_gets_an_error_and_the_server_stays_up(page: Page) -> None:
    answers = page.shown.wait(
        "const done = arguments[arguments.length - 1]; const found = [];"
        "const socket = new WebSocket('ws://' + location.host + '/live');"
        "const asked = arguments[0];"
        "const send = (one, id) => socket.send(JSON.stringify({id, ...one}));"
        "socket.onopen = () => asked.forEach(send);"
        "socket.onmessage = (m) => { const one = JSON.parse(m.data);"
        "if (one.type === 'answer') found.push(one);"
        "if (found.length === asked.length) { socket.close(); done(found); } };",
        [{"do": "rm"}, {}, {"do": "save"}, {"do": "save", "batch": -1, "digest": "x"},
         {"do": "preview", "batch": "4"}, {"do": "simulate", "technique": "no:such"}],
    )  # fmt: skip
    assert all(answer["error"]["what"] for answer in answers), json.dumps(answers)
    assert page.path.read_text() == TRAIN
    page.ready()
