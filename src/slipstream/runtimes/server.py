"""A small model server on the loopback interface, with dynamic batching and load shedding.

The queue is bounded, and waiting requests expire. A request that would wait too long is refused
with 503 and a retry time, so that the others are answered in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream import loopback
from slipstream.errors import MissingExtraError
from slipstream.runtimes import protocol
from slipstream.runtimes.batching import Batcher, BatchPolicy
from slipstream.runtimes.runtime import Array, ModelError, Runtime, TensorSpec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

DEFAULT_PORT = 8500
_MAX_BODY = 256 << 20
_MAX_MESSAGE = 1000
# Wait for an idle worker; one that hangs in a call is abandoned.
_END_S = 0.2


@dataclass(eq=False)
class _Pending:
    inputs: list[Array]
    answer: asyncio.Future[list[Array]]
    _claimed: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.shapes = [(array.dtype, *array.shape[1:]) for array in self.inputs]

    def claim(self) -> bool:
        """Return True for the first caller only: the worker, or the deadline."""
        return self._claimed.acquire(blocking=False)

    def expire(self) -> None:
        """Refuse the request if it still waits, and free its inputs."""
        if self.claim():
            self.inputs = []
            if not self.answer.done():
                self.answer.set_exception(TimeoutError())


@dataclass
class ModelServer:
    """A running server.

    Attributes:
        port: port on 127.0.0.1.
        key: secret that requests must present.
        answered, refused, failed: number of requests so far.
    """

    model: Runtime
    port: int
    key: str = field(repr=False)
    answered: int = 0
    refused: int = 0
    failed: int = 0

    @property
    def address(self) -> str:
        """URL for `slipstream.runtimes.load`, including the key."""
        return f"http://{loopback.HOST}:{self.port}/?key={self.key}"


@contextlib.contextmanager
def serving(
    model: Runtime,
    *,
    port: int | None = None,
    policy: BatchPolicy | None = None,
    waiting: int = 64,
    deadline_s: float = 1.0,
) -> Iterator[ModelServer]:
    """Serve `model` until the block ends; the caller closes the model.

    Args:
        port: port to listen on; None for `DEFAULT_PORT`, or a free one if it is taken.
        policy: how requests are batched.
        waiting: maximum number of waiting requests; more are refused.
        deadline_s: maximum time that a request waits before it is refused.

    Raises:
        MissingExtraError: the extra ``[live]`` is not installed.
        SlipstreamError: the port is taken.
    """
    try:
        import starlette  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the model server", "starlette", "live") from error
    listening = loopback.listen(port, DEFAULT_PORT)
    server = ModelServer(model, listening.getsockname()[1], loopback.new_key())
    batcher: Batcher[_Pending] = Batcher(policy or BatchPolicy(), waiting)
    worker = threading.Thread(
        target=_answer_all, args=(model, batcher), name="slipstream-model", daemon=True
    )
    worker.start()
    try:
        application = _application(server, batcher, deadline_s)
        with loopback.running(application, listening, "the model server"):
            yield server
    finally:
        batcher.end()
        worker.join(_END_S)


def _answer_all(model: Runtime, batcher: Batcher[_Pending]) -> None:
    while (batch := batcher.take()) is not None:
        while batch:
            group = [pending for pending in batch if pending.shapes == batch[0].shapes]
            batch = [pending for pending in batch if pending.shapes != group[0].shapes]
            # Claimed only now, so that requests of a later call can still expire.
            _answer(model, [pending for pending in group if pending.claim()])


def _answer(model: Runtime, batch: Sequence[_Pending]) -> None:
    """Answer requests of equal shapes together, or separately if that fails."""
    if not batch:
        return
    counts = [len(pending.inputs[0]) for pending in batch]
    try:
        joined = [np.concatenate(parts) for parts in zip(*(a.inputs for a in batch), strict=True)]
        outputs = model.run(joined)
    except (Exception, SystemExit) as error:
        if len(batch) == 1:
            _settle(batch[0], ModelError(f"{type(error).__name__}: {error}"))
            return
        for pending in batch:
            _answer(model, [pending])
        return
    ends = np.cumsum(counts)[:-1]
    split = [np.split(output, ends) for output in outputs]
    for pending, *parts in zip(batch, *split, strict=True):
        _settle(pending, parts)


def _settle(pending: _Pending, answer: list[Array] | Exception) -> None:
    def settle() -> None:
        if pending.answer.done():
            return  # expired, or the client disconnected
        if isinstance(answer, Exception):
            pending.answer.set_exception(answer)
        else:
            pending.answer.set_result(answer)

    with contextlib.suppress(RuntimeError):  # the server's loop has ended
        pending.answer.get_loop().call_soon_threadsafe(settle)


def _application(server: ModelServer, batcher: Batcher[_Pending], deadline_s: float) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    hosts = {f"{name}:{server.port}" for name in (loopback.HOST, "localhost")}

    def rejected(request: Request) -> Response | None:
        """Reject other host names, browser pages, and requests without the key."""
        if request.headers.get("host") not in hosts or "origin" in request.headers:
            return _refusal(403, "only programs on this machine may send requests")
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = key or request.query_params.get("key", "")
        if not loopback.same_key(key, server.key):
            return _refusal(401, "the key is missing or wrong: use the printed address")
        name = request.path_params.get("name", server.model.name)
        if name != server.model.name:
            return _refusal(404, f"there is no model '{name}', only '{server.model.name}'")
        return None

    async def metadata(request: Request) -> Response:
        if (response := rejected(request)) is not None:
            return response
        model = server.model
        if request.url.path == "/v2":
            return JSONResponse({"name": "slipstream", "models": [model.name]})
        return JSONResponse(protocol.describe(model.name, model.inputs, model.outputs))

    async def ready(request: Request) -> Response:
        counts = {"answered": server.answered, "refused": server.refused, "failed": server.failed}
        return rejected(request) or JSONResponse({**counts, "waiting": batcher.waiting()})

    async def infer(request: Request) -> Response:
        if (response := rejected(request)) is not None:
            return response
        try:
            body = await _read(request)
            if body is None:
                what = f"the body is larger than {_MAX_BODY >> 20} MiB"
                return _refusal(413, what, connection="close")
            length = request.headers.get(protocol.LENGTH)
            tensors = protocol.decode("inputs", body, length)
            pending = _Pending(
                protocol.match(tensors, server.model.inputs),
                asyncio.get_running_loop().create_future(),
            )
        except (ModelError, ClientDisconnect) as error:
            return _refusal(400, str(error))
        if not batcher.put(pending):
            server.refused += 1
            return _refusal(503, "too many requests are waiting", **{"retry-after": "1"})
        deadline = asyncio.get_running_loop().call_later(deadline_s, pending.expire)
        try:
            outputs = await pending.answer
            answer = _response(server.model, outputs, binary=length is not None)
        except TimeoutError:
            server.refused += 1
            return _refusal(503, "the request waited too long", **{"retry-after": "1"})
        except asyncio.CancelledError:
            pending.expire()
            return _refusal(503, "the server is shutting down")
        except Exception as error:
            server.failed += 1
            return _refusal(500, str(error))
        finally:
            deadline.cancel()
        server.answered += 1
        return answer

    @contextlib.asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[None]:
        yield

    application = Starlette(
        routes=[
            Route("/v2", metadata),
            Route("/v2/health/ready", ready),
            Route("/v2/models/{name}", metadata),
            Route("/v2/models/{name}/infer", infer, methods=["POST"]),
        ],
        lifespan=lifespan,
    )
    application.router.redirect_slashes = False
    return application


def _refusal(status: int, what: str, **headers: str) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": what[:_MAX_MESSAGE]}, status, headers)


async def _read(request: Request) -> bytearray | None:
    """Read the body; None if it is too large, also for chunked bodies without a length."""
    body, size = bytearray(), int(request.headers.get("content-length") or 0)
    if size <= _MAX_BODY:
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY:
                return None
    return body if size <= _MAX_BODY else None


def _response(model: Runtime, outputs: list[Array], *, binary: bool) -> Response:
    from starlette.responses import JSONResponse, Response

    names = [spec.name for spec in model.outputs] or [f"output_{n}" for n in range(len(outputs))]
    if binary:
        body, header = protocol.encode(
            "outputs", list(zip(names, outputs, strict=True)), model_name=model.name
        )
        return Response(body, headers={protocol.LENGTH: str(header)})
    for name, array in zip(names, outputs, strict=True):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return _refusal(
                400, f"'{name}' has NaN or infinity for these inputs, which JSON cannot "
                "represent; the binary form of the protocol can",
            )  # fmt: skip
    return JSONResponse({"model_name": model.name, "outputs": _as_json(names, outputs)})


def _as_json(names: Sequence[str], outputs: Sequence[Array]) -> list[dict[str, Any]]:
    described = protocol.describe("", (), ())["outputs"]
    for name, array in zip(names, outputs, strict=True):
        spec = TensorSpec(name, array.dtype.name, array.shape)
        (entry,) = protocol.describe("", (), (spec,))["outputs"]
        described.append({**entry, "data": array.reshape(-1).tolist()})
    return described  # type: ignore[no-any-return]
