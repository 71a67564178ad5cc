"""Checksums: recorded ones are compared, and nothing else is claimed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from slipstream import data


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/tinyshakespeare.txt").write_bytes(b"To be")
    _record(tmp_path, [("text/tinyshakespeare.txt", b"To be"), ("text/other.txt", b"-")])
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    return tmp_path


def _record(root: Path, files: list[tuple[str, bytes]]) -> None:
    lines = [
        {
            "path": path,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "source": "s",
            "licence": "l",
        }
        for path, content in files
    ]
    (root / "MANIFEST.json").write_text(json.dumps(lines), encoding="utf-8")


@pytest.mark.usefixtures("root")
def test_an_unchanged_file_matches_its_record() -> None:
    found = data.verify("tiny_shakespeare")
    assert (found.ok, found.files) == (True, 1)
    assert [file.path for file in data.recorded_files("tiny_shakespeare")] == [
        "text/tinyshakespeare.txt"
    ]


@pytest.mark.parametrize("content", [b"To bee", b"to be"])
def test_a_changed_file_is_found_by_size_or_content(root: Path, content: bytes) -> None:
    before = data.checksum("tiny_shakespeare")
    (root / "text/tinyshakespeare.txt").write_bytes(content)
    found = data.verify("tiny_shakespeare")
    assert found.ok is False
    assert found.changed == ("text/tinyshakespeare.txt",)
    assert data.checksum("tiny_shakespeare") != before


def test_a_missing_file_is_named(root: Path) -> None:
    (root / "text/tinyshakespeare.txt").unlink()
    found = data.verify("tiny_shakespeare")
    assert found.ok is False
    assert found.missing == ("text/tinyshakespeare.txt",)
    with pytest.raises(data.MissingDataError):
        data.checksum("tiny_shakespeare")


def test_without_a_record_nothing_is_claimed(root: Path) -> None:
    (root / "MANIFEST.json").unlink()
    assert data.verify("tiny_shakespeare").ok is None
    assert data.recorded_files("tiny_shakespeare") == ()
    # A set that is neither present nor recorded is missing, not unverified.
    with pytest.raises(data.MissingDataError):
        data.verify("sst")


@pytest.mark.parametrize(
    "manifest",
    ["{", "[1]", '{"a": 1}', '[{"path": "x"}]', "[" * 100_000,
     '[{"path": "../x", "bytes": 1, "sha256": "", "source": "", "licence": ""}]',
     '[{"path": "/x", "bytes": 1, "sha256": "", "source": "", "licence": ""}]'],
)  # fmt: skip
def test_a_damaged_manifest_is_refused(root: Path, manifest: str) -> None:
    (root / "MANIFEST.json").write_text(manifest, encoding="utf-8")
    with pytest.raises(data.CorruptDataError):
        data.verify("tiny_shakespeare")


def test_a_checksum_does_not_depend_on_the_place(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = data.checksum("tiny_shakespeare")
    other = tmp_path_factory.mktemp("elsewhere")
    (other / "text").mkdir()
    (other / "text/tinyshakespeare.txt").write_bytes(b"To be")
    monkeypatch.setenv("SLIPSTREAM_DATA", str(other))
    assert data.checksum("tiny_shakespeare") == here
