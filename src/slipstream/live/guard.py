"""Access control of the live server: only its own page, with the key of this session.

Any web page in a browser can send requests to 127.0.0.1. Three checks reject them: the `Host`
header, against DNS names that resolve to this machine; the `Origin` header, against other pages;
and a key, first in the printed address and then in a cookie that only this server's pages send.
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
    """ASGI middleware that passes only requests of the server's own pages to `app`.

    Args:
        port: port of the server.
        key: key of this session.
    """

    def __init__(self, app: App, port: int, key: str) -> None:
        self._app = app
        self._key = key
        self._cookie = f"slipstream_{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject the request, or pass it to the application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not self._is_own(scope, headers):
            await _refuse(scope, send, FOREIGN, _FOREIGN_TEXT)
            return
        key = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        # A page embedded in another one, as in an editor, gets no cookie and keeps the key.
        framed = headers.get("sec-fetch-dest") == "iframe" or scope["type"] == "websocket"
        if key and self._is_valid(key) and (framed or scope["path"] != "/"):
            await self._app(scope, receive, send)
        elif key and self._is_valid(key):
            # The redirect keeps the key out of the address bar, the history and logs.
            cookie = f"{self._cookie}={self._key}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, b"", [("location", scope["path"]), ("set-cookie", cookie)])
        elif self._is_valid(self._cookie_key(headers.get("cookie", ""))):
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, send, NO_KEY, _NO_KEY_TEXT)

    def _is_own(self, scope: Scope, headers: dict[str, str]) -> bool:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            return False
        if origin is None:
            # Browsers send Origin for every WebSocket, but not when a page is opened.
            return bool(scope["type"] == "http" and scope["method"] in ("GET", "HEAD"))
        return origin == f"http://{host}"

    def _cookie_key(self, text: str) -> str:
        try:
            morsel = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel is not None else ""

    def _is_valid(self, key: str) -> bool:
        return loopback.same_key(key, self._key)


def say(title: str, text: str) -> bytes:
    """Return an HTML page with a title and one paragraph."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(text)}</p></html>"
    ).encode()


async def _refuse(scope: Scope, send: Send, title: str, text: str) -> None:
    if scope["type"] == "websocket":
        # Closed before it is accepted, so that the browser gets status 403 only.
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
