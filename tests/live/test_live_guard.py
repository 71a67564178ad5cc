"""Who may talk to the server of the live page: nobody but its own pages, with the key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipstream.live.guard import FOREIGN, NO_KEY, Guard

PORT, KEY = 8377, "a-key-of-this-session"
HOST = f"127.0.0.1:{PORT}"
COOKIE = f"slipstream_{PORT}={KEY}"


def ask(
    *, kind: str = "http", path: str = "/", query: str = "", method: str = "GET", **headers: str
) -> tuple[str, dict[str, str], str]:
    """("passed" or what the guard did, its headers, its body)."""
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


def test_the_key_of_the_address_becomes_a_cookie_and_leaves_the_address() -> None:
    status, headers, _ = ask(query=f"key={KEY}", host=HOST)
    assert status == "303"
    assert headers["location"] == "/"
    assert headers["set-cookie"] == f"{COOKIE}; Path=/; HttpOnly; SameSite=Strict"
    assert ask(host=HOST, cookie=COOKIE)[0] == "passed"


@pytest.mark.parametrize("cookie", ["", "slipstream_8377=another", "slipstream_1=" + KEY, ";;="])
def test_without_the_key_there_is_a_page_that_says_so(cookie: str) -> None:
    status, headers, body = ask(host=HOST, cookie=cookie)
    assert status == "403"
    assert NO_KEY in body
    assert "slipstream live" in body
    assert headers["cache-control"] == "no-store"


def test_a_wrong_key_in_the_address_is_none() -> None:
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
def test_another_page_is_refused_even_with_the_cookie(kind: str, headers: dict[str, str]) -> None:
    status, _, body = ask(kind=kind, cookie=COOKIE, **headers)
    if kind == "websocket":
        assert status == "websocket.close"
    else:
        assert status == "403"
        assert FOREIGN in body


def test_a_socket_must_say_where_it_comes_from() -> None:
    same = {"host": HOST, "cookie": COOKIE}
    assert ask(kind="websocket", **same)[0] == "websocket.close"
    assert ask(kind="websocket", origin=f"http://{HOST}", **same)[0] == "passed"
    assert ask(method="POST", **same)[0] == "403"


def test_a_page_inside_an_editor_keeps_the_key_since_it_is_sent_no_cookie() -> None:
    framed = {"host": HOST, "sec_fetch_dest": "iframe"}
    assert ask(query=f"key={KEY}", **framed)[0] == "passed"
    assert ask(path="/alive", query=f"key={KEY}", host=HOST)[0] == "passed"
    socket = {"host": HOST, "origin": f"http://{HOST}"}
    assert ask(kind="websocket", path="/live", query=f"key={KEY}", **socket)[0] == "passed"
    assert ask(kind="websocket", path="/live", query="key=no", **socket)[0] == "websocket.close"
