"""Who may talk to the server: a page of ours, on this machine, that was given this session's key.

Any web page that a browser shows may send requests to 127.0.0.1. Three things keep it out: the
name it asks for (`Host`), or another's name would do that leads here; the page that asks
(`Origin`); and a key that is in the address the server prints, and then in a cookie that only
pages of this server are sent with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from slipstream import loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

NO_KEY = "This page needs its key"
_NO_KEY_TEXT = (
    "It was opened without the key of this session, or with that of a session which has ended. "
    "Open the address that slipstream live printed when it started."
)
FOREIGN = "Another page asked for this"
_FOREIGN_TEXT = (
    "Only pages of this server, under the address that slipstream live printed, may talk to it."
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:34em;margin:18vh auto;padding:0 1.5em;"
    "color:#1b1c20;background:#fff}h1{font-size:1.3em}"
    "@media(prefers-color-scheme:dark){body{color:#ececf0;background:#16171a}}"
)


class Guard:
    """An ASGI application in front of `app` that lets only our own pages through.

    Args:
        port: that is listened on.
        key: of this session.
    """

    def __init__(self, app: App, port: int, key: str) -> None:
        self._app = app
        self._key = key
        self._cookie = f"slipstream_{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not self._is_ours(scope, headers):
            await _refuse(scope, send, FOREIGN, _FOREIGN_TEXT)
            return
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        # A page inside another one, as an editor shows it, is sent no cookie; it keeps the key.
        framed = headers.get("sec-fetch-dest") == "iframe" or scope["type"] == "websocket"
        if given and self._fits(given) and (framed or scope["path"] != "/"):
            await self._app(scope, receive, send)
        elif given and self._fits(given):
            # From here on the key is in no address, no history and no log.
            cookie = f"{self._cookie}={self._key}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, b"", [("location", scope["path"]), ("set-cookie", cookie)])
        elif self._fits(self._in_cookie(headers.get("cookie", ""))):
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, send, NO_KEY, _NO_KEY_TEXT)

    def _is_ours(self, scope: Scope, headers: dict[str, str]) -> bool:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            return False
        if origin is None:
            # Browsers always say where a WebSocket comes from, and for a page that is opened not.
            return bool(scope["type"] == "http" and scope["method"] in ("GET", "HEAD"))
        return origin == f"http://{host}"

    def _in_cookie(self, text: str) -> str:
        try:
            morsel = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel is not None else ""

    def _fits(self, key: str) -> bool:
        return loopback.same_key(key, self._key)


def say(title: str, text: str) -> bytes:
    """A page that says one thing."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(text)}</p></html>"
    ).encode()


async def _refuse(scope: Scope, send: Send, title: str, text: str) -> None:
    if scope["type"] == "websocket":
        # Before it is accepted: the browser is told 403, and no more.
        await send({"type": "websocket.close", "code": 1008})
        return
    await _answer(send, 403, say(title, text), [])


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
    fixed = [
        ("content-type", "text/html; charset=utf-8"),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
        ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:"),
    ]
    every = [(name.encode(), value.encode("latin-1")) for name, value in (*fixed, *headers)]
    await send({"type": "http.response.start", "status": status, "headers": every})
    await send({"type": "http.response.body", "body": body})
