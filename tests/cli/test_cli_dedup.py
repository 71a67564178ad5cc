"""``slipstream dedup``: its output, its files and its errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    words = " ".join(f"word{n}" for n in range(40))
    documents = [words, words + " end", "something else altogether", words.upper(), "nothing"]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def test_near_duplicates_are_counted_and_removed(slipstream: Any, corpus: Path) -> None:
    target = corpus.with_name("kept.jsonl")
    run = slipstream("dedup", str(corpus), "-o", str(target), "--json")
    assert run.returncode == 0, run.stderr
    payload = json.loads(run.stdout)
    assert payload["group"] == [0, 0, 2, 0, 4]
    assert (payload["kept"], payload["removed"], payload["identical"]) == (3, 2, 1)
    lines = corpus.read_text().splitlines()
    assert target.read_text().splitlines() == [lines[0], lines[2], lines[4]]
    text = slipstream("dedup", str(corpus), "--threshold", "1").stdout
    assert "near-duplicate pairs" in text


def test_errors_have_no_traceback(slipstream: Any, corpus: Path) -> None:
    run = slipstream("dedup", str(corpus), "--field", "body")
    assert run.returncode == 1
    assert "has no 'body'" in run.stderr
    assert f"{corpus}:1" in run.stderr
    run = slipstream("dedup", str(corpus), "--threshold", "3")
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


def test_ctrl_c_leaves_no_partial_file(tmp_path: Path) -> None:
    corpus = tmp_path / "long.jsonl"
    # Far more than is read before the signal, which is sent at the first line of progress.
    line = json.dumps({"text": " ".join(f"word{n}" for n in range(300))}) + "\n"
    corpus.write_text(line * 50_000)
    target = tmp_path / "kept.jsonl"
    target.write_text("unchanged")
    command = [sys.executable, "-m", "slipstream", "dedup", str(corpus), "-o", str(target)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    assert "documents read" in run.stderr.readline()
    run.send_signal(signal.SIGINT)
    assert run.wait(600) == 130
    assert target.read_text() == "unchanged"
    assert {path.name for path in tmp_path.iterdir()} == {"long.jsonl", "kept.jsonl"}
