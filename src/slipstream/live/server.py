"""The live page: a server on the loopback interface for one session and its clients.

    with serving(Analyst("train.py:make_workload")) as live:
        print(live.address)      # http://127.0.0.1:8377/?key=...

It serves the page (the report's own assets), the document of each analysis, and a WebSocket that
pushes analyses and receives requests for edits. `guard.py` controls access.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream import loopback
from slipstream.live.analysis import Analyst
from slipstream.live.guard import Guard
from slipstream.live.session import Session
from slipstream.report.html import assets, live_html

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket

DEFAULT_PORT = 8377
_MAX_MESSAGE_BYTES = 1 << 20
_TYPES = {"document.json": "application/json", "columns.deflate": "application/octet-stream"}


@dataclass
class Live:
    """A running server of the live page.

    Attributes:
        port: port on 127.0.0.1.
        key: key of this session, which permits everything that the page can do.
    """

    analyst: Analyst
    port: int
    key: str = field(repr=False)

    @property
    def address(self) -> str:
        """Address of the page, including the key."""
        return f"http://{loopback.HOST}:{self.port}/?key={self.key}"


@contextlib.contextmanager
def serving(analyst: Analyst, port: int | None = None) -> Iterator[Live]:
    """Serve the page of `analyst` until the block ends; the caller closes the analyst.

    Args:
        port: port on 127.0.0.1; None for `DEFAULT_PORT`, or a free one if that is taken.

    Raises:
        MissingExtraError: the extra ``[live]`` is not installed.
        SlipstreamError: the port is taken, or the page is missing from the installation.
    """
    listening = loopback.listen(port, DEFAULT_PORT)
    live = Live(analyst, listening.getsockname()[1], loopback.new_key())
    assets()
    application = Guard(_application(analyst), live.port, live.key)
    with loopback.running(
        application, listening, "the live page", ws="websockets-sansio",
        ws_max_size=_MAX_MESSAGE_BYTES,
    ):  # fmt: skip
        yield live


def _application(analyst: Analyst) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route, WebSocketRoute

    sessions: list[Session] = []

    @contextlib.asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[None]:
        sessions.append(Session(analyst, asyncio.get_running_loop()))
        yield
        sessions.pop().close()

    async def page(request: Request) -> Response:
        # The guard passes a key only for a page embedded in another one.
        text, policy = live_html(request.query_params.get("key"))
        return _text(text, "text/html", {"content-security-policy": policy})

    async def part(request: Request) -> Response:
        script, style = assets()
        parts = {"/page.js": (script, "text/javascript"), "/page.css": (style, "text/css")}
        return _text(*parts.get(request.url.path, ("yes", "text/plain")))

    async def document(request: Request) -> Response:
        number, state, name = (request.path_params[key] for key in ("number", "state", "name"))
        path = sessions[0].document(number, state, name) if name in _TYPES else None
        if path is None or not path.exists():
            return Response("outdated", status_code=404)
        return FileResponse(path, media_type=_TYPES[name], headers={"cache-control": "no-store"})

    async def live(websocket: WebSocket) -> None:
        await _talk(sessions[0], websocket)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/page.js", part),
            Route("/page.css", part),
            Route("/alive", part),
            Route("/document/{number}/{state}/{name}", document),
            WebSocketRoute("/live", live),
        ],
        lifespan=lifespan,
    )


def _text(text: str, kind: str, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response

    fixed = {
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(text, media_type=kind, headers={**fixed, **(headers or {})})


async def _talk(session: Session, websocket: WebSocket) -> None:
    """Send updates to one client and answer its requests until it disconnects.

    A client that sends anything but JSON objects is disconnected with status 1003.
    """
    from starlette.websockets import WebSocketDisconnect

    await websocket.accept()
    queue = session.join()

    async def send() -> None:
        while True:
            # ASCII, because an answer may contain a lone surrogate, which UTF-8 cannot encode.
            await websocket.send_text(json.dumps(await queue.get()))

    async def answer(request: dict[str, Any]) -> None:
        response = await asyncio.to_thread(session.answer, request)
        queue.put_nowait({"type": "answer", "id": request.get("id"), **response})

    sending = asyncio.create_task(send())
    answering: set[asyncio.Task[None]] = set()
    try:
        while True:
            request = await websocket.receive_json()
            if not isinstance(request, dict):
                raise TypeError
            task = asyncio.create_task(answer(request))
            answering.add(task)
            task.add_done_callback(answering.discard)
    except WebSocketDisconnect:
        pass
    except (ValueError, KeyError, TypeError, RecursionError):
        await websocket.close(1003)
    finally:
        session.leave(queue)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await sending
