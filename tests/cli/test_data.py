"""`slipstream data`: lists, details and verification, for people and for programs."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream import data
from slipstream.cli.data import app
from slipstream.errors import UnknownNameError

RUNNER = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one small, recorded set."""
    content = b"To be"
    (tmp_path / "text").mkdir()
    (tmp_path / "text/tinyshakespeare.txt").write_bytes(content)
    line = {
        "path": "text/tinyshakespeare.txt",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "source": "s",
        "licence": "l",
    }
    (tmp_path / "MANIFEST.json").write_text(json.dumps([line]), encoding="utf-8")
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    monkeypatch.setattr("slipstream.data._find.DEBIAN", tmp_path / "debian")
    return tmp_path


def test_help_loads_nothing_heavy() -> None:
    check = (
        "import sys, slipstream.cli.data; "
        "sys.exit(bool({'torch', 'numpy', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.usefixtures("folder")
def test_ls_lists_every_set_and_which_are_present() -> None:
    shown = RUNNER.invoke(app, ["ls"]).stdout
    assert all(entry.name in shown for entry in data.manifest())
    listed = json.loads(RUNNER.invoke(app, ["ls", "--json"]).stdout)
    assert [line["name"] for line in listed] == [entry.name for entry in data.manifest()]
    assert {line["name"] for line in listed if line["here"]} == set(data.available())
    here = json.loads(RUNNER.invoke(app, ["ls", "--here", "--json"]).stdout)
    assert [line["name"] for line in here] == data.available()


@pytest.mark.usefixtures("folder")
def test_show_gives_licence_shapes_and_checksum() -> None:
    shown = json.loads(RUNNER.invoke(app, ["show", "tiny_shakespeare", "--json"]).stdout)
    assert shown["here"] is True
    assert shown["checksum"] == data.checksum("tiny_shakespeare")
    assert shown["fields"]["train"] == "To b"
    assert shown["recorded_files"][0]["size_bytes"] == 5
    assert "public domain" in RUNNER.invoke(app, ["show", "tiny_shakespeare"]).stdout


@pytest.mark.usefixtures("folder")
def test_show_of_an_absent_set_explains_how_to_get_it() -> None:
    result = RUNNER.invoke(app, ["show", "fashion_mnist"])
    assert result.exit_code == 0
    assert "apt-get install dataset-fashion-mnist" in result.stdout


def test_show_of_an_unknown_set_suggests_one() -> None:
    with pytest.raises(UnknownNameError, match="digits"):
        RUNNER.invoke(app, ["show", "digit"], catch_exceptions=False, standalone_mode=False)


def test_verify_exits_with_1_if_a_file_differs(folder: Path) -> None:
    good = RUNNER.invoke(app, ["verify", "tiny_shakespeare", "--json"])
    assert good.exit_code == 0
    assert json.loads(good.stdout)[0]["ok"] is True
    (folder / "text/tinyshakespeare.txt").write_bytes(b"to be")
    bad = RUNNER.invoke(app, ["verify", "tiny_shakespeare"])
    assert bad.exit_code == 1
    assert "DIFFERS" in bad.stdout
    assert re.search(r"\bchanged\b.*\btext/tinyshakespeare\.txt\b", bad.stdout)


@pytest.mark.usefixtures("folder")
def test_verify_without_a_name_checks_all_present_sets() -> None:
    result = RUNNER.invoke(app, ["verify", "--json"])
    assert result.exit_code == 0
    assert [line["name"] for line in json.loads(result.stdout)] == data.available()
