"""The live page in an editor: served by the same process, in a frame of another page."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from editor_client import PATIENCE_S, started
from live_workloads import TRAIN

from slipstream_bench.browser import browser, missing

Require = Callable[[str, bool, str], None]


def test_the_page_of_the_open_file_is_drawn_in_a_frame(tmp_path: Path, require: Require) -> None:
    """The frame gets no cookies, and another page surrounds it, as in an editor."""
    reason = missing()
    require("chromium", reason is None, reason or "")
    session = started(tmp_path / "train.py", TRAIN)
    editor = session.editor
    found = session.do(editor.run("slipstream.page", editor.uri, False))
    address = found["address"]
    assert urlsplit(address).hostname == "127.0.0.1"
    assert editor.messages == []
    assert session.do(editor.run("slipstream.page", editor.uri)) == found, "it is the same"
    session.do(editor.until(lambda: bool(editor.messages)))
    assert address in editor.messages[-1], "this editor opens no addresses, so it gets the text"
    outer = tmp_path / "panel.html"
    outer.write_text(f'<iframe src="{address}" width="1200" height="700"></iframe>')
    with browser() as shown:
        shown.driver.get(outer.as_uri())
        shown.driver.switch_to.frame(0)
        end = time.monotonic() + PATIENCE_S
        while "batch size" not in shown.run("return document.body.innerText").lower():
            assert time.monotonic() < end, shown.run("return document.body.innerText")
            time.sleep(0.1)
    session.end()
