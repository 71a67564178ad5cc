"""``slipstream live``: an address that opens, analyses in children, and Ctrl-C, which ends them."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from typing import Any

import pytest

_LIMIT_S = 600.0
# Endless; writes a file once it runs.
_STEP = """\
import pathlib, time
from train import make_workload as made

def make_workload():
    pathlib.Path("reached").touch()
    while True:
        time.sleep(0.01)
"""


def test_it_serves_with_the_key_only_and_ends_with_its_children(slipstream: Any) -> None:
    (slipstream.folder / "loop.py").write_text(_STEP)
    process = slipstream.start(
        "live", "loop.py:make_workload", "--no-browser", "--no-what-if", "--no-batches",
        "--port", 0, "--json",
    )  # fmt: skip
    text = ""
    while not text.rstrip().endswith("}"):
        line = process.stdout.readline()
        assert line, process.communicate()
        text += line
    address = json.loads(text)["address"]
    assert address.startswith("http://127.0.0.1:")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with opener.open(address, timeout=_LIMIT_S) as answer:
        assert b"page.js" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address.partition("?")[0], timeout=_LIMIT_S)
    end = time.monotonic() + _LIMIT_S
    while not (slipstream.folder / "reached").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_a_recording_and_a_missing_file_are_refused(slipstream: Any) -> None:
    for code, target, remedy in (
        (2, "run.slipgraph", "advise"),
        (1, "nothing.py", "train.py"),
        (2, "train.py:make_workloads", " make_workload?"),
    ):
        assert remedy in slipstream.refused(code, "live", target, "--no-browser").remedy


def test_an_unknown_technique_is_refused_before_anything_runs(slipstream: Any) -> None:
    for verb in ("live", "lsp"):
        error = slipstream.refused(2, verb, "train.py:make_workload", "-t", "fused_optimizer+anp")
        assert "'anp'" in error.what
        assert " amp " in error.remedy
