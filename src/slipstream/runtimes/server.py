"""A small model server on the loopback interface, which says no before it breaks down.

It batches dynamically. What waits is bounded: a request that would wait behind too many, or has
waited longer than anybody wants its answer, is refused at once with 503 and a time to come back,
so that those who are served are served in time (load shedding). A server that queues without
bound answers everybody too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream import loopback
from slipstream.errors import MissingExtraError, SlipstreamError
from slipstream.runtimes import protocol
from slipstream.runtimes.batching import Batcher, BatchPolicy
from slipstream.runtimes.runtime import Array, Runtime, TensorSpec

DEFAULT_PORT = 8500
_KEY_BYTES = 24
_LARGEST_BODY = 256 << 20


@dataclass
class _Asked:
    """A request that waits for its answer."""

    inputs: list[Array]
    answer: asyncio.Future[list[Array]]
    came_ns: int = field(default_factory=time.perf_counter_ns)

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        return [(array.dtype, *array.shape[1:]) for array in self.inputs]


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
    server = ModelServer(model, listening.getsockname()[1], secrets.token_urlsafe(_KEY_BYTES))
    batcher: Batcher[_Asked] = Batcher(policy or BatchPolicy(), waiting)
    worker = threading.Thread(
        target=_answer_all, args=(server, batcher, deadline_s), name="slipstream-model", daemon=True
    )
    worker.start()
    try:
        with loopback.running(_application(server, batcher), listening, "the model server"):
            yield server
    finally:
        batcher.end()
        worker.join(10.0)


def _answer_all(server: ModelServer, batcher: Batcher[_Asked], deadline_s: float) -> None:
    """The worker's loop: batches, until the server ends."""
    while (batch := batcher.take()) is not None:
        oldest = time.perf_counter_ns() - deadline_s * 1e9
        for one in batch:
            if one.came_ns < oldest:
                _settle(one, TimeoutError())
        timely = [one for one in batch if one.came_ns >= oldest]
        while timely:
            alike = [one for one in timely if one.shapes == timely[0].shapes]
            timely = [one for one in timely if one.shapes != alike[0].shapes]
            _answer(server.model, alike)


def _answer(model: Runtime, asked: Sequence[_Asked]) -> None:
    counts = [len(one.inputs[0]) for one in asked]
    try:
        joined = [np.concatenate(parts) for parts in zip(*(a.inputs for a in asked), strict=True)]
        outputs = model.run(joined)
    except Exception as error:
        for one in asked:
            _settle(one, error)
        return
    ends = np.cumsum(counts)[:-1]
    split = [np.split(output, ends) for output in outputs]
    for one, *parts in zip(asked, *split, strict=True):
        _settle(one, parts)


def _settle(asked: _Asked, answer: list[Array] | Exception) -> None:
    def settle() -> None:
        if asked.answer.done():
            return  # whoever asked has left
        if isinstance(answer, Exception):
            asked.answer.set_exception(answer)
        else:
            asked.answer.set_result(answer)

    with contextlib.suppress(RuntimeError):  # the server's loop has ended
        asked.answer.get_loop().call_soon_threadsafe(settle)


def _application(server: ModelServer, batcher: Batcher[_Asked]) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    names = [spec.name for spec in server.model.outputs]
    hosts = {f"{name}:{server.port}" for name in (loopback.HOST, "localhost")}

    def refusal(status: int, what: str, **headers: str) -> Response:
        return JSONResponse({"error": what}, status, headers)

    def unwelcome(request: Request) -> Response | None:
        """Another name that leads here, a page of a browser, or somebody without the key."""
        if request.headers.get("host") not in hosts or "origin" in request.headers:
            return refusal(403, "only programs on this machine may ask")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or request.query_params.get("key", "")
        if not secrets.compare_digest(given.encode(), server.key.encode()):
            return refusal(401, "the key is missing or wrong: it is in the address printed")
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
        if int(request.headers.get("content-length") or 0) > _LARGEST_BODY:
            return refusal(413, f"more than {_LARGEST_BODY >> 20} MiB")
        length = request.headers.get(protocol.LENGTH)
        try:
            inputs = protocol.decode(
                "inputs", await request.body(), int(length) if length else None
            )
            counts = {len(array) if array.ndim else 0 for array in inputs}
            if len(counts) != 1 or counts == {0}:
                return refusal(400, "every input has as many samples, one at least")
        except (SlipstreamError, ValueError) as error:
            return refusal(400, str(error))
        asked = _Asked(inputs, asyncio.get_running_loop().create_future())
        if not batcher.put(asked):
            server.refused += 1
            return refusal(503, "too many requests wait", **{"retry-after": "1"})
        try:
            outputs = await asked.answer
        except TimeoutError:
            server.refused += 1
            return refusal(503, "it waited too long", **{"retry-after": "1"})
        except Exception as error:
            server.failed += 1
            return refusal(500, f"{type(error).__name__}: {error}")
        server.answered += 1
        given = names or [f"output_{n}" for n in range(len(outputs))]
        if length is None:
            return JSONResponse(
                {"model_name": server.model.name, "outputs": _as_json(given, outputs)}
            )
        body, header = protocol.encode(
            "outputs", list(zip(given, outputs, strict=True)), model_name=server.model.name
        )
        return Response(body, headers={protocol.LENGTH: str(header)})

    @contextlib.asynccontextmanager
    async def lifespan(application: Any) -> AsyncIterator[None]:
        yield

    return Starlette(
        routes=[
            Route("/v2", metadata),
            Route("/v2/health/ready", ready),
            Route("/v2/models/{name}", metadata),
            Route("/v2/models/{name}/infer", infer, methods=["POST"]),
        ],
        lifespan=lifespan,
    )


def _as_json(names: Sequence[str], outputs: Sequence[Array]) -> list[dict[str, Any]]:
    described = protocol.describe("", (), ())["outputs"]
    for name, array in zip(names, outputs, strict=True):
        spec = TensorSpec(name, array.dtype.name, array.shape)
        (one,) = protocol.describe("", (), (spec,))["outputs"]
        described.append({**one, "data": array.reshape(-1).tolist()})
    return described  # type: ignore[no-any-return]
