"""``slipstream report``: a file, a line about it, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_a_report_of_a_recording_is_written_next_to_it(slipstream: Any, recorded: Any) -> None:
    run = slipstream(
        "report", recorded.path, "--technique", "fused_optimizer:fused", "-o", "run.html", "--json"
    )
    assert run.returncode == 0, run.stderr
    payload = json.loads(run.stdout)
    page = slipstream.folder / "run.html"
    assert payload["file"] == "run.html"
    assert payload["bytes"] == page.stat().st_size
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "fused_optimizer:fused" in text
    assert not list(slipstream.folder.glob(".run.html*"))


def test_a_workload_is_recorded_first_and_shared_without_its_folder(slipstream: Any) -> None:
    run = slipstream(
        "report", "train.py:make_workload", "--set", "batch_size=4", "--steps", 2,
        "--no-what-if", "--redact",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    text = (slipstream.folder / "report.html").read_text(encoding="utf-8")
    assert "train.py:make_workload" in text
    assert str(slipstream.folder) not in text


def test_errors_are_reported_in_words(slipstream: Any, recorded: Any) -> None:
    (slipstream.folder / "torn.slipgraph").write_bytes(recorded.path.read_bytes()[:2000])
    for arguments, words in (
        (("report", "none.slipgraph"), "none.slipgraph"),
        (("report", "torn.slipgraph"), "torn.slipgraph"),
        (("report", recorded.path, "-o", "run.txt"), ".html"),
        (("report", recorded.path, "--technique", "amq", "-o", "r.html"), "amp"),
        (("report", recorded.path, "-t", "amp", "--no-what-if", "-o", "r.html"), "--no-what-if"),
        (("report", recorded.path, "--no-what-if", "-o", "none/r.html"), "mkdir -p none"),
    ):
        run = slipstream.briefly(*arguments)
        assert run.returncode in (1, 2), arguments
        assert words in run.stderr
        assert "Traceback" not in run.stderr
    assert not list(Path(slipstream.folder).glob("*.html"))
