"""Nothing that users could reach is lost: held against a record of the house before it moved."""

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
# What was renamed or moved, old to new; the same list stands in CHANGELOG.md. None: it was only of
# use inside the package and is gone.
RENAMED: dict[str, str | None] = {
    "slipstream.data.generators": "slipstream_bench.generators",
    "slipstream.cluster.Netlab": "slipstream.ranks.Netlab",
    "slipstream.cluster.calibrate": "slipstream.ranks.calibrate",
    "slipstream.cluster.measured_here": "slipstream.ranks.measured_here",
    "slipstream.graph.Standstill": "slipstream.graph.ExposedStretch",
    "slipstream.graph.standstill_by_module": "slipstream.graph.exposed_by_module",
    "slipstream.graph.standstills": "slipstream.graph.exposed_stretches",
    "slipstream.cluster.why_no_netlab": "slipstream.ranks.why_no_netlab",
    "slipstream.workload.kept_files": "slipstream.workload.file_backups",
}
# Keys of --json that were renamed.
RENAMED_KEYS: dict[str, str] = {
    "[].ratio": "[].speedup",
    "[].interval": "[].speedup_interval",
    ".predictions[].ratio": ".predictions[].speedup",
    ".predictions[].interval": ".predictions[].speedup_interval",
    ".claims[].ratio": ".claims[].speedup",
    ".claims[].low": ".claims[].speedup_interval",
    ".claims[].high": ".claims[].speedup_interval",
    ".rows[].ratio": ".rows[].speedup",
    ".rows[].low": ".rows[].speedup_interval",
    ".rows[].high": ".rows[].speedup_interval",
    ".rows[].within": ".rows[].inside",
    ".rows[].predicted.ratio": ".rows[].predicted_speedup",
    ".rows[].predicted.low": ".rows[].predicted_speedup_interval",
    ".rows[].predicted.high": ".rows[].predicted_speedup_interval",
    ".shown_before": ".rows[].predicted_speedup",
}


def resolves(name: str) -> bool:
    """Whether ``package.module.name`` can be imported."""
    module, _, last = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), last)
    except ModuleNotFoundError:
        return False


def now(name: str) -> str | None:
    """What `name` is called today: itself, unless it or what it is in was renamed."""
    if name in RENAMED:
        return RENAMED[name]
    module, _, last = name.rpartition(".")
    home = RENAMED.get(module, module)
    return None if home is None else f"{home}.{last}"


@pytest.mark.parametrize("module", BEFORE["names"])
def test_public_names_are_there_or_on_the_list(module: str) -> None:
    today = {f"{module}.{name}": now(f"{module}.{name}") for name in BEFORE["names"][module]}
    assert {old: new for old, new in today.items() if new and not resolves(new)} == {}


def test_the_list_of_what_was_renamed_is_in_the_changelog() -> None:
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text("utf-8")
    assert [old for old in (*RENAMED, *RENAMED_KEYS) if f"`{old}`" not in text] == []


def test_what_is_on_the_list_was_there_before() -> None:
    listed = {f"{module}.{name}" for module, inner in BEFORE["names"].items() for name in inner}
    assert set(RENAMED) <= listed | set(BEFORE["names"])


def test_commands_and_their_options_are_there() -> None:
    today = public_face.commands()
    lost = {
        command: sorted(set(options) - set(today.get(command, ())))
        for command, options in BEFORE["commands"].items()
    }
    assert {command: options for command, options in lost.items() if options} == {}


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
        lost = {key for key in before if RENAMED_KEYS.get(key, key) not in keys}
        assert {key for key in lost if not any(key.startswith(one) for one in unseen)} == set(), (
            command
        )
