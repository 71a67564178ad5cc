"""A small model server on the loopback interface, which says no before it breaks down.

It batches dynamically. What waits is bounded: a request that would wait behind too many, or has
waited longer than anybody wants its answer, is refused at once with 503 and a time to come back,
so that those who are served are served in time (load shedding). A server that queues without
bound answers everybody too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream import loopback
from slipstream.errors import MissingExtraError
from slipstream.runtimes import protocol
from slipstream.runtimes.batching import Batcher, BatchPolicy
from slipstream.runtimes.runtime import Array, ModelError, Runtime, TensorSpec

DEFAULT_PORT = 8500
_LARGEST_BODY = 256 << 20
_MAX_MESSAGE = 1000
# For a worker that has nothing left to answer; one that is in a call which hangs is left behind.
_END_S = 0.2


@dataclass(eq=False)
class _Pending:
    """A request that waits for its answer."""

    inputs: list[Array]
    answer: asyncio.Future[list[Array]]
    _claimed: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.shapes = [(array.dtype, *array.shape[1:]) for array in self.inputs]

    def claim(self) -> bool:
        """Whether the caller is the first: the worker that answers it, or what gives it up."""
        return self._claimed.acquire(blocking=False)

    def expire(self) -> None:
        """Refuse it if it still waits; what it holds is freed at once."""
        if self.claim():
            self.inputs = []
            if not self.answer.done():
                self.answer.set_exception(TimeoutError())


@dataclass
class ModelServer:
    """A server that runs in threads of its own.

    Attributes:
        port: on 127.0.0.1.
        key: whoever has it may ask.
        answered, refused, failed: requests so far.
    """

    model: Runtime
    port: int
    key: str = field(repr=False)
    answered: int = 0
    refused: int = 0
    failed: int = 0

    @property
    def address(self) -> str:
        """What `slipstream.runtimes.load` takes; it holds the key."""
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
    """Serve `model` until the block ends; the model is the caller's to close.

    Args:
        port: to listen on; None for a free one, `DEFAULT_PORT` if that is.
        policy: how requests are batched.
        waiting: requests that may wait; more are refused.
        deadline_s: after which one that still waits is refused.

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
    """The worker's loop: batches, until the server ends."""
    while (batch := batcher.take()) is not None:
        while batch:
            group = [pending for pending in batch if pending.shapes == batch[0].shapes]
            batch = [pending for pending in batch if pending.shapes != group[0].shapes]
            # Not before: a request that is not in the next call can still expire.
            _answer(model, [pending for pending in group if pending.claim()])


def _answer(model: Runtime, batch: Sequence[_Pending]) -> None:
    """Answer requests of the same shapes together; separately if that fails."""
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
            return  # expired, or the client has left
        if isinstance(answer, Exception):
            pending.answer.set_exception(answer)
        else:
            pending.answer.set_result(answer)

    with contextlib.suppress(RuntimeError):  # the server's loop has ended
        pending.answer.get_loop().call_soon_threadsafe(settle)


def _application(server: ModelServer, batcher: Batcher[_Pending], deadline_s: float) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    names = [spec.name for spec in server.model.outputs]
    hosts = {f"{name}:{server.port}" for name in (loopback.HOST, "localhost")}

    def refusal(status: int, what: str, **headers: str) -> Response:
        return JSONResponse({"error": what[:_MAX_MESSAGE]}, status, headers)

    def unwelcome(request: Request) -> Response | None:
        """Another name that leads here, a page of a browser, or somebody without the key."""
        if request.headers.get("host") not in hosts or "origin" in request.headers:
            return refusal(403, "only programs on this machine may ask")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or request.query_params.get("key", "")
        if not loopback.same_key(given, server.key):
            return refusal(401, "the key is missing or wrong: it is in the address printed")
        name = request.path_params.get("name", server.model.name)
        if name != server.model.name:
            return refusal(404, f"there is no model '{name}' here, only '{server.model.name}'")
        return None

    async def metadata(request: Request) -> Response:
        if (no := unwelcome(request)) is not None:
            return no
        model = server.model
        if request.url.path == "/v2":
            return JSONResponse({"name": "slipstream", "models": [model.name]})
        return JSONResponse(protocol.describe(model.name, model.inputs, model.outputs))

    async def ready(request: Request) -> Response:
        counts = {"answered": server.answered, "refused": server.refused, "failed": server.failed}
        return unwelcome(request) or JSONResponse({**counts, "waiting": batcher.waiting()})

    async def infer(request: Request) -> Response:
        if (no := unwelcome(request)) is not None:
            return no
        try:
            body = await read(request)
            if body is None:
                large = f"the body is larger than {_LARGEST_BODY >> 20} MiB"
                return refusal(413, large, connection="close")
            length = request.headers.get(protocol.LENGTH)
            tensors = protocol.decode("inputs", body, length)
            pending = _Pending(
                protocol.match(tensors, server.model.inputs),
                asyncio.get_running_loop().create_future(),
            )
        except (ModelError, ClientDisconnect) as error:
            return refusal(400, str(error))
        if not batcher.put(pending):
            server.refused += 1
            return refusal(503, "too many requests wait", **{"retry-after": "1"})
        deadline = asyncio.get_running_loop().call_later(deadline_s, pending.expire)
        try:
            outputs = await pending.answer
            answer = answered(outputs, binary=length is not None)
        except TimeoutError:
            server.refused += 1
            return refusal(503, "it waited too long", **{"retry-after": "1"})
        except asyncio.CancelledError:
            pending.expire()
            return refusal(503, "the server is shutting down")
        except Exception as error:
            server.failed += 1
            return refusal(500, str(error))
        finally:
            deadline.cancel()
        server.answered += 1
        return answer

    async def read(request: Request) -> bytearray | None:
        """The body; None if it is too large, however it is framed: chunks announce no length."""
        body, size = bytearray(), int(request.headers.get("content-length") or 0)
        if size <= _LARGEST_BODY:
            async for part in request.stream():
                body += part
                if len(body) > _LARGEST_BODY:
                    return None
        return body if size <= _LARGEST_BODY else None

    def answered(outputs: list[Array], *, binary: bool) -> Response:
        given = names or [f"output_{n}" for n in range(len(outputs))]
        if binary:
            body, header = protocol.encode(
                "outputs", list(zip(given, outputs, strict=True)), model_name=server.model.name
            )
            return Response(body, headers={protocol.LENGTH: str(header)})
        for name, array in zip(given, outputs, strict=True):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return refusal(
                    400, f"'{name}' has NaN or infinity for these inputs, which JSON cannot "
                    "represent; the binary form of the protocol can",
                )  # fmt: skip
        return JSONResponse({"model_name": server.model.name, "outputs": _as_json(given, outputs)})

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


def _as_json(names: Sequence[str], outputs: Sequence[Array]) -> list[dict[str, Any]]:
    described = protocol.describe("", (), ())["outputs"]
    for name, array in zip(names, outputs, strict=True):
        spec = TensorSpec(name, array.dtype.name, array.shape)
        (one,) = protocol.describe("", (), (spec,))["outputs"]
        described.append({**one, "data": array.reshape(-1).tolist()})
    return described  # type: ignore[no-any-return]
