"""Access to the server of the live page: only its own pages, with the key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_workloads import TRAIN
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Origin

from raw_sockets import exchange
from slipstream.live import Analyst
from slipstream.live.guard import FOREIGN, NO_KEY, Guard
from slipstream.live.server import Live, serving

PORT, KEY = 8377, "a-key-of-this-session"
HOST = f"127.0.0.1:{PORT}"
COOKIE = f"slipstream_{PORT}={KEY}"


def ask(
    *, kind: str = "http", path: str = "/", query: str = "", method: str = "GET", **headers: str
) -> tuple[str, dict[str, str], str]:
    """Return "passed" or the guard's response, with its headers and body."""
    sent: list[dict[str, Any]] = []
    passed: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read before it is known who sends it")

    scope = {
        "type": kind, "path": path, "method": method, "query_string": query.encode(),
        "headers": [(name.replace("_", "-").encode(), value.encode())
                    for name, value in headers.items()],
    }  # fmt: skip
    asyncio.run(Guard(app, PORT, KEY)(scope, receive, send))
    if passed:
        return "passed", {}, ""
    first = sent[0]
    answered = {k.decode(): v.decode() for k, v in first.get("headers", [])}
    return str(first.get("status", first["type"])), answered, sent[-1].get("body", b"").decode()


def test_the_key_of_the_address_becomes_a_cookie_and_is_removed() -> None:
    status, headers, _ = ask(query=f"key={KEY}", host=HOST)
    assert status == "303"
    assert headers["location"] == "/"
    assert headers["set-cookie"] == f"{COOKIE}; Path=/; HttpOnly; SameSite=Strict"
    assert ask(host=HOST, cookie=COOKIE)[0] == "passed"


@pytest.mark.parametrize("cookie", ["", "slipstream_8377=another", "slipstream_1=" + KEY, ";;="])
def test_without_the_key_a_page_explains_it(cookie: str) -> None:
    status, headers, body = ask(host=HOST, cookie=cookie)
    assert status == "403"
    assert NO_KEY in body
    assert "slipstream live" in body
    assert headers["cache-control"] == "no-store"


def test_a_wrong_key_in_the_address_is_refused() -> None:
    assert ask(query="key=guessed", host=HOST)[0] == "403"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1:1"},
        {"host": HOST, "origin": "http://evil.example"},
        {"host": HOST, "origin": "null"},
        {"host": HOST, "origin": "http://127.0.0.1:1"},
        {"host": HOST, "origin": f"https://{HOST}"},
        {},
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_another_origin_is_refused_even_with_the_cookie(kind: str, headers: dict[str, str]) -> None:
    status, _, body = ask(kind=kind, cookie=COOKIE, **headers)
    if kind == "websocket":
        assert status == "websocket.close"
    else:
        assert status == "403"
        assert FOREIGN in body


def test_a_socket_must_have_an_origin() -> None:
    same = {"host": HOST, "cookie": COOKIE}
    assert ask(kind="websocket", **same)[0] == "websocket.close"
    assert ask(kind="websocket", origin=f"http://{HOST}", **same)[0] == "passed"
    assert ask(method="POST", **same)[0] == "403"


def test_a_page_in_an_editor_keeps_the_key_because_it_gets_no_cookie() -> None:
    framed = {"host": HOST, "sec_fetch_dest": "iframe"}
    assert ask(query=f"key={KEY}", **framed)[0] == "passed"
    assert ask(path="/alive", query=f"key={KEY}", host=HOST)[0] == "passed"
    socket = {"host": HOST, "origin": f"http://{HOST}"}
    assert ask(kind="websocket", path="/live", query=f"key={KEY}", **socket)[0] == "passed"
    assert ask(kind="websocket", path="/live", query="key=no", **socket)[0] == "websocket.close"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server for a workload that is never analysed."""
    path = tmp_path_factory.mktemp("guarded") / "train.py"
    path.write_text(TRAIN)
    with Analyst(f"{path}:make_workload") as analyst, serving(analyst, 0) as found:
        yield found


CHUNK = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
# By name: the request line, headers next to the right host and cookie, and the status. The value of
# a header replaces the right one; ``PORT`` is replaced with the server's.
REQUESTS: dict[str, tuple[str, dict[str, str], int]] = {
    "another host": ("GET / HTTP/1.1", {"Host": "evil.example"}, 403),
    "no host": ("GET / HTTP/1.1", {"Host": ""}, 400),
    "HTTP/1.0 without a host": ("GET / HTTP/1.0", {"Host": ""}, 403),
    "two hosts": ("GET / HTTP/1.1", {"Host": "127.0.0.1:PORT\r\nHost: evil.example"}, 400),
    "no key": ("GET / HTTP/1.1", {"Cookie": ""}, 403),
    "a guessed key": ("GET /alive?key=guessed HTTP/1.1", {"Cookie": ""}, 403),
    "a damaged cookie": ("GET / HTTP/1.1", {"Cookie": "slipstream_PORT=\x01;" * 50}, 403),
    "a foreign page": ("POST / HTTP/1.1", {"Origin": "http://evil.example"}, 403),
    "a POST of our page": ("POST / HTTP/1.1", {"Origin": "http://127.0.0.1:PORT"}, 405),
    "40 MiB in chunks": (
        "POST / HTTP/1.1",
        {"Origin": "http://evil.example", "Transfer-Encoding": "chunked"}, 403,
    ),
    "a number of 5,000 digits": (f"GET /document/{'9' * 5000}/a/document.json HTTP/1.1", {}, 404),
    "a way up": ("GET /document/1/../../../document.json HTTP/1.1", {}, 404),
    "an encoded way up": ("GET /document/1/..%2f..%2f/document.json HTTP/1.1", {}, 404),
    "another file": ("GET /document/0/first/graph.slipgraph HTTP/1.1", {}, 404),
    "a WebSocket of a foreign page": ("GET /live HTTP/1.1", {
        "Origin": "http://evil.example", "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }, 403),
    "a header of 1 MB": ("GET / HTTP/1.1", {"X": "a" * 1_000_000}, 400),
    "no HTTP": ("\x16\x03\x01", {}, 400),
}  # fmt: skip


def answered(live: Live, line: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    fields = {
        "Host": "127.0.0.1:PORT", "Cookie": f"slipstream_PORT={live.key}", "Connection": "close",
        **headers,
    }  # fmt: skip
    head = "\r\n".join([line, *(f"{name}: {value}" for name, value in fields.items() if value)])
    sent = head.replace("PORT", str(live.port)).encode("latin-1") + b"\r\n\r\n" + body
    return exchange(live.port, sent)


@pytest.mark.parametrize("name", REQUESTS)
def test_an_invalid_request_is_refused(
    live: Live, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    line, headers, status = REQUESTS[name]
    chunked = "Transfer-Encoding" in headers
    answer = answered(live, line, headers, CHUNK * 40 + b"0\r\n\r\n" if chunked else b"")
    assert answer.startswith(b"HTTP/1.1 %d " % status) or (chunked and not answer)
    assert answered(live, "GET /alive HTTP/1.1", {}).endswith(b"yes")
    assert not any(record.exc_info for record in caplog.records)


# By name: the message, and the status that ends the connection; 0 for an answer with an error.
MESSAGES: dict[str, tuple[str | bytes, int]] = {
    "no JSON": ("{]", 1003),
    "a list": ("[]", 1003),
    "a number": ("5", 1003),
    "bytes": (b"\xff\xfe", 1003),
    "deep JSON": ("[" * 100_000, 1003),
    "a number of 5,000 digits": ("1" * 5000, 1003),
    "more than 1 MiB": ('{"do": "' + "a" * (1 << 20) + '"}', 1009),
    "no wish": ("{}", 0),
    "an unknown wish": ('{"do": "run"}', 0),
    "a wish that is a list": ('{"do": [1]}', 0),
    "a wish that is no Unicode": ('{"do": "\\ud800"}', 0),
    "infinitely many workers": ('{"do": "simulate", "technique": "ddp", "workers": Infinity}', 0),
    "workers that are no number": ('{"do": "simulate", "technique": "ddp", "workers": NaN}', 0),
    "a cluster that is an object": (
        '{"do": "simulate", "technique": "ddp", "cluster": {"a": 1}}',
        0,
    ),
    "no technique": ('{"do": "simulate"}', 0),
    "an infinite batch": ('{"do": "preview", "batch": Infinity}', 0),
    "a batch that is true": ('{"do": "preview", "batch": true}', 0),
    "an edit without a digest": ('{"do": "save", "batch": 5}', 0),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_an_invalid_message_gets_an_error_or_ends_the_connection(
    live: Live, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(
        f"ws://127.0.0.1:{live.port}/live?key={live.key}",
        origin=Origin(f"http://127.0.0.1:{live.port}"),
    ) as websocket:
        message, code = MESSAGES[name]
        websocket.send(message)
        try:
            while (answer := json.loads(websocket.recv(60)))["type"] != "answer":
                pass
        except ConnectionClosed as closed:
            answer = {"error": None, "code": closed.rcvd and closed.rcvd.code}
    assert "error" in answer
    assert answer.get("code", 0) == code
    assert answered(live, "GET /alive HTTP/1.1", {}).endswith(b"yes")
    assert not any(record.exc_info for record in caplog.records)
