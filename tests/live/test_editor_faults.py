"""Faults during editing give a diagnostic at the right line or an answer, and no partial edit."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from editor_client import BRIEFLY, PATIENCE_S, Editor, Session, started
from live_workloads import TRAIN
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from raw_sockets import exchange

_MODEL = "import torch\n\n\ndef skyline_model_provider():\n    return torch.nn.Linear(2, 2)\n"
_INPUT = "\n\ndef skyline_input_provider(batch_size=4):\n    return (torch.ones(batch_size, 2),)\n"
_STEP = (
    "\n\ndef skyline_iteration_provider(model):\n    return lambda x: model(x).sum().backward()\n"
)
_BARE = _INPUT.replace("(torch.ones(batch_size, 2),)", "torch.ones(batch_size, 2)")
_RAISES = "        raise ValueError('no')\n        return self.second"
_LOOPS = "        while True: __import__('time').sleep(0.1)\n        return self.second"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A server whose analysis has started; edits need none of its results."""
    folder = tmp_path_factory.mktemp("faults")
    # As started by the client that VS Code extensions share.
    found = started(folder / "train.py", TRAIN, "--timeout", "10s", "--stdio")
    yield found
    found.end()


@pytest.mark.parametrize(
    ("text", "says", "at"),
    [
        (_MODEL + _STEP, "skyline_input_provider is not defined", "import torch"),
        pytest.param(
            _MODEL + _INPUT.replace("=4", "=4, more=1") + _STEP,
            "exactly one, batch_size",
            "def skyline_input_provider",
            marks=pytest.mark.full,
        ),
        pytest.param(
            _MODEL + _BARE + _STEP,
            "bare tensor",
            "def skyline_input_provider",
            marks=pytest.mark.full,
        ),
        (TRAIN.replace("        return self.second", _RAISES), "ValueError: no", "raise"),
        (TRAIN.replace("        return self.second", _LOOPS), "did not answer", "while True"),
    ],
    ids=["no provider", "its arguments", "what it returns", "exception", "endless loop"],
)
def test_a_user_error_is_marked_at_its_line(
    session: Session, tmp_path: Path, text: str, says: str, at: str
) -> None:
    path = tmp_path / "other.py"
    path.write_text(text)
    function = "skyline_model_provider" if "skyline" in text else "make_workload"
    editor = session.editor
    assert session.do(editor.run("slipstream.analyse", f"{path}:{function}"))
    session.do(editor.until(lambda: bool(editor.diagnostics.get(path.as_uri()))))
    (mark,) = editor.diagnostics[path.as_uri()]
    assert says in mark.message
    assert at in text.split("\n")[mark.range.start.line]
    assert mark.severity == types.DiagnosticSeverity.Error


def test_typing_during_an_edit_wins(session: Session) -> None:
    editor = session.editor

    async def both() -> None:
        future = asyncio.ensure_future(
            editor.run("slipstream.apply", editor.uri, "fused_optimizer")
        )
        await asyncio.sleep(0)
        editor.type(types.Range(types.Position(0, 0), types.Position(0, 0)), "# typed\n")
        with pytest.raises(JsonRpcException):
            await future

    before = editor.text
    session.do(both())
    assert editor.text == "# typed\n" + before
    editor.type(types.Range(types.Position(0, 0), types.Position(1, 0)), "")


def test_a_file_that_changes_on_disk_meanwhile_is_left_to_the_editor(session: Session) -> None:
    """The edit applies to the open text; concurrent changes on disk are not overwritten."""
    editor = session.editor
    before = editor.text
    elsewhere = before.replace("batch_size=16", "batch_size=99").encode()
    editor.path.write_bytes(elsewhere)
    session.do(editor.run("slipstream.setBatchSize", editor.uri, 48))
    assert editor.text == before.replace("batch_size=16", "batch_size=48")
    assert editor.path.read_bytes() == elsewhere
    session.do(editor.run("slipstream.undo", editor.uri))
    assert editor.text == before
    editor.save()


def test_edits_after_a_form_feed_are_at_the_editors_positions(session: Session) -> None:
    editor = session.editor
    before = editor.text
    top = types.Range(types.Position(0, 0), types.Position(0, 0))
    editor.type(top, "#\x0c\u2028\n")
    line = session.line("class Net")
    editor.type(types.Range(types.Position(line, 0), types.Position(line, 0)), "# typed\n")
    session.do(editor.run("slipstream.setBatchSize", editor.uri, 48))
    assert editor.text == "#\x0c\u2028\n" + before.replace(
        "class Net", "# typed\nclass Net"
    ).replace("batch_size=16", "batch_size=48")
    session.do(editor.run("slipstream.undo", editor.uri))
    editor.type(types.Range(types.Position(line, 0), types.Position(line + 1, 0)), "")
    editor.type(types.Range(types.Position(0, 0), types.Position(1, 0)), "")
    assert editor.text == before


def test_two_names_of_a_workload_are_one_analysis(session: Session) -> None:
    """The lens above a function uses its full name, the command line the name as typed."""
    editor = session.editor
    assert session.do(editor.run("slipstream.analyse", f"{editor.path}:make_workload")) is True
    other = editor.path.parent / ".." / editor.path.parent.name / editor.path.name
    assert session.do(editor.run("slipstream.analyse", f"{other}:make_workload")) is True
    lenses = session.do(editor.lenses())
    assert len(lenses[session.line("def make_workload")]) <= 3


@dataclass
class TcpServer:
    """`slipstream lsp --tcp 0`, and a workload that leaves a mark when it runs."""

    process: subprocess.Popen[str]
    port: int
    key: str
    workload: Path
    mark: Path


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpServer]:
    folder = tmp_path_factory.mktemp("tcp")
    mark, workload = folder / "mark", folder / "train.py"
    workload.write_text(f"open({str(mark)!r}, 'w').close()\n{TRAIN}")
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "lsp", "--tcp", "0", *BRIEFLY],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=folder,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        match = re.search(r'127\.0\.0\.1:(\d+).*"key": "(.*)"', process.stderr.readline())
        assert match
        assert len(match[2]) == len(KEY)
        yield TcpServer(process, int(match[1]), match[2], workload, mark)
    finally:
        process.kill()
        process.communicate()


def request(method: str, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


def framed(body: bytes, *headers: bytes) -> bytes:
    lines = (*headers, b"Content-Length: %d" % len(body), b"", body)
    return b"\r\n".join(lines)


# As long as the server's key, which it replaces.
KEY, WORKLOAD = "K" * 32, "train.py:make_workload"
ANALYSE = request("workspace/executeCommand", command="slipstream.analyse", arguments=[WORKLOAD])
HTTP = (b"POST / HTTP/1.1", b"Host: 127.0.0.1", b"Origin: http://evil.example")
ATTACKS = {
    "a web page's POST": framed(ANALYSE, *HTTP),
    "a web page's POST with the right key": framed(
        request("initialize", initializationOptions={"key": KEY}), *HTTP
    ),
    "a GET": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "another header first": framed(ANALYSE, b"Host: 127.0.0.1"),
    "a command before initialize": framed(ANALYSE),
    "initialize without options": framed(request("initialize")),
    "no key": framed(request("initialize", initializationOptions={"target": WORKLOAD})),
    "a wrong key": framed(request("initialize", initializationOptions={"key": "guessed"})),
    "a key that is no text": framed(request("initialize", initializationOptions={"key": [1]})),
    "a key that is no Unicode": framed(
        request("initialize", initializationOptions={"key": "\ud800"})
    ),
    "a wrong key, then a command": framed(
        request("initialize", initializationOptions={"key": "guessed"})
    ) + framed(ANALYSE),
    "a notification": framed(b'{"jsonrpc": "2.0", "method": "initialized"}'),
    "a batch": framed(b"[" + request("initialize") + b"]"),
    "no JSON": framed(b"{]"),
    "deep JSON": framed(b"[" * 500_000),
    "a number of 5,000 digits": framed(b"1" * 5_000),
    "a length of 400 digits": b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}",
    "9 MB announced": b"Content-Length: 9000000\r\n\r\n{}",
    "a negative length": b"Content-Length: -1\r\n\r\n{}",
    "an endless header": b"Content-Type: " + b"a" * 100_000,
    "half a message": b"Content-Length: 100\r\n\r\n{",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_clients_without_the_key_are_refused_and_nothing_runs(tcp: TcpServer, name: str) -> None:
    sent = ATTACKS[name].replace(KEY.encode(), tcp.key.encode())
    answer = exchange(tcp.port, sent, then_close=name in ("half a message", "nothing"))
    assert answer == b"" or b'"error"' in answer
    assert not tcp.mark.exists()


def test_silent_connections_block_no_editor_and_a_second_editor_is_refused(
    tcp: TcpServer,
) -> None:
    silent = [socket.create_connection(("127.0.0.1", tcp.port)) for _ in range(70)]
    session = Session(tcp.workload, tcp.workload.read_text())
    session.do(session.editor.client.start_tcp("127.0.0.1", tcp.port))
    session.do(session.editor.initialize({"key": tcp.key}))
    session.editor.open()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", tcp.port), timeout=PATIENCE_S)
    assert session.do(session.editor.lenses())
    assert not tcp.mark.exists()
    for connection in silent:
        connection.close()
    session.end()
    assert tcp.process.wait(PATIENCE_S) == 0
    assert tcp.process.stdout is not None
    assert tcp.process.stdout.read() == ""


@pytest.mark.full
def test_two_editors_with_separate_servers_share_a_file(tmp_path: Path) -> None:
    first = started(tmp_path / "train.py", TRAIN)
    second = Editor(first.editor.path)
    first.do(second.start(f"{second.path}:make_workload", *BRIEFLY))
    second.open()
    first.do(first.editor.run("slipstream.setBatchSize", first.editor.uri, 48))
    assert second.text == TRAIN
    first.do(second.run("slipstream.setBatchSize", second.uri, 8))
    assert "batch_size=48" in first.editor.text
    assert "batch_size=8" in second.text
    first.do(first.editor.run("slipstream.undo", first.editor.uri))
    assert first.editor.text == TRAIN
    first.do(second.leave())
    first.end()
