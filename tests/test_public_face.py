"""Compare public names, commands and JSON keys with their record, apart from listed renames."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import public_face
from slipstream.cli._main import _command
from slipstream.durations import Durations

BEFORE: dict[str, Any] = json.loads(public_face.RECORD.read_text("utf-8"))
RENAMES: dict[str, dict[str, Any]] = json.loads(public_face.RENAMES.read_text("utf-8"))
# Old name to new. None: it was only used inside the package and is gone.
RENAMED: dict[str, str | None] = RENAMES["names"]
RENAMED_KEYS: dict[str, str] = RENAMES["keys"]
# By command, old option to new, each as its names.
RENAMED_OPTIONS: dict[str, dict[str, str]] = RENAMES["options"]


def resolves(name: str) -> bool:
    """Whether ``package.module.name`` can be imported."""
    module, _, last = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), last)
    except ModuleNotFoundError:
        return False


def now(name: str) -> str | None:
    """Return the present name of `name`, which it or its module may have been renamed to."""
    if name in RENAMED:
        return RENAMED[name]
    module, _, last = name.rpartition(".")
    home = RENAMED.get(module, module)
    return None if home is None else f"{home}.{last}"


def current_key(key: str) -> str:
    """Return `key` with its longest renamed beginning replaced."""
    for end in sorted(
        {len(key), *(at for at, char in enumerate(key) if char in ".[")}, reverse=True
    ):
        if key[:end] in RENAMED_KEYS:
            return RENAMED_KEYS[key[:end]] + key[end:]
    return key


@pytest.mark.parametrize("module", BEFORE["names"])
def test_public_names_are_there_or_renamed(module: str) -> None:
    today = {f"{module}.{name}": now(f"{module}.{name}") for name in BEFORE["names"][module]}
    assert {old: new for old, new in today.items() if new and not resolves(new)} == {}


def test_renamed_names_are_in_the_record() -> None:
    listed = {f"{module}.{name}" for module, inner in BEFORE["names"].items() for name in inner}
    assert set(RENAMED) <= listed | set(BEFORE["names"])


def test_commands_and_their_options_are_there() -> None:
    today = public_face.commands()
    lost = {}
    for command, options in BEFORE["commands"].items():
        renamed = RENAMED_OPTIONS.get(command, {})
        expected = {renamed.get(option, option) for option in options}
        lost[command] = sorted(expected - set(today.get(command, ())))
    assert {command: options for command, options in lost.items() if options} == {}


def test_renamed_options_have_only_their_new_names() -> None:
    today = public_face.commands()
    for command, renamed in RENAMED_OPTIONS.items():
        assert set(renamed.values()) <= set(today[command]), command
        assert not set(renamed) & set(today[command]), command


def test_keys_of_json_are_there(
    tmp_path: Path,
    forked_children: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("SLIPSTREAM_STORE", raising=False)
    # Timing hundreds of operators takes minutes; what is not timed is taken as assumed.
    monkeypatch.setattr(Durations, "measure", lambda *ignored, **how: None)

    def reader(arguments: Sequence[str]) -> str:
        code = _command(list(arguments))
        shown = capsys.readouterr()
        assert code in (0, 1), shown.err
        return shown.out

    today = public_face.answers(tmp_path, reader)
    for command, before in BEFORE["json"].items():
        keys = public_face.keys_of(today[command])
        unseen = public_face.empty_in(today[command])
        lost = {key for key in map(current_key, before) if key not in keys}
        assert {
            key for key in lost if not any(key.startswith(prefix) for prefix in unseen)
        } == set(), command
