"""The VS Code extension uses commands that the server has, and contains no foreign files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slipstream.live.editor import make_server

FOLDER = Path(__file__).parents[2] / "editors" / "vscode"


def test_it_uses_commands_that_the_server_has() -> None:
    def none(target: str) -> None:
        raise AssertionError(target)

    server = make_server(none)  # type: ignore[arg-type]
    commands = set(server.protocol.fm.commands)
    text = (FOLDER / "src" / "extension.ts").read_text()
    requested = set(re.findall(r'ask(?:<[^(]*>)?\("([^"]+)"', text))
    assert "slipstream.page" in requested
    assert requested <= commands
    registered = set(re.findall(r'\["(slipstream\.[A-Za-z]+)", ', text))
    package = json.loads((FOLDER / "package.json").read_text())
    assert registered == {command["command"] for command in package["contributes"]["commands"]}
    assert not registered & commands, "the client registers the server's commands itself"


def test_the_lock_names_no_registry() -> None:
    lock = json.loads((FOLDER / "package-lock.json").read_text())
    package = json.loads((FOLDER / "package.json").read_text())
    assert not any("resolved" in entry for entry in lock["packages"].values())
    assert lock["packages"][""]["dependencies"] == package["dependencies"]
    assert lock["packages"][""]["devDependencies"] == package["devDependencies"]


def test_it_runs_nothing_in_an_untrusted_workspace() -> None:
    package = json.loads((FOLDER / "package.json").read_text())
    assert package["capabilities"]["untrustedWorkspaces"]["supported"] is False
