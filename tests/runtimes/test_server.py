"""The model server: refused requests, batching, and shutdown."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raw_sockets import exchange
from slipstream import runtimes
from slipstream.runtimes import TensorSpec, protocol, server
from slipstream.runtimes.batching import Batcher
from slipstream.runtimes.python import CallableRuntime
from slipstream.runtimes.server import ModelServer

INFER = "/v2/models/model/infer"
LIMIT = 1 << 20


def tensor(
    name: str = "a",
    datatype: str = "FP32",
    shape: Any = (1, 4),
    data: Any = (1, 2, 3, 4),
    **more: Any,
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **more}


A, B = tensor(), tensor("b", data=(5, 6, 7, 8))


def model(
    function: Callable[..., Any], *names: str, outputs: tuple[str, ...] = ("y",)
) -> CallableRuntime:
    runtime = CallableRuntime("model", function)
    runtime.inputs = tuple(TensorSpec(name, "float32", (None, 4)) for name in names)
    runtime.outputs = tuple(TensorSpec(name, "float32", (None, 4)) for name in outputs)
    return runtime


def post(
    at: ModelServer,
    body: bytes,
    *more: str,
    headers: Iterable[str] = (),
    path: str = INFER,
    line: str = "",
    then_close: bool = False,
) -> bytes:
    """Send a request with the key and return the answer.

    Args:
        more, headers: override default headers; an empty value removes one. ``HOST`` in them is
            replaced by the server's host.
        line: the request line, if it is not a POST to `path`.
    """
    fields = {
        "Host": "HOST",
        "Authorization": f"Bearer {at.key}",
        "Connection": "close",
        "Content-Length": str(len(body)),
        **dict(text.split(": ", 1) for text in (*more, *headers)),
    }
    lines = [line or f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items() if v)]
    head = "\r\n".join(lines).replace("HOST", f"127.0.0.1:{at.port}")
    return exchange(at.port, head.encode() + b"\r\n\r\n" + body, then_close=then_close)


def inputs(*tensors: Any) -> bytes:
    return json.dumps({"inputs": tensors}).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def content(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def values(answer: bytes) -> list[float]:
    """Return the numbers of the only output."""
    (found,) = content(answer)["outputs"]
    return list(found["data"])


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return a - b


@pytest.fixture(scope="module")
def at() -> Iterator[ModelServer]:
    with (
        pytest.MonkeyPatch.context() as patch,
        runtimes.serving(model(difference, "a", "b"), port=0) as found,
    ):
        patch.setattr(server, "_MAX_BODY", LIMIT)
        yield found


# By name: body, status, and a pattern of the error.
MESSAGES: dict[str, tuple[bytes, int, str]] = {
    "an unknown input": (inputs(A, B, tensor("q")), 400, "no input 'q'.*a float32.*b float32"),
    "a missing input": (inputs(A), 400, "input 'b' is missing.*b float32"),
    "no inputs": (inputs(), 400, "input 'a' is missing"),
    "an input twice": (inputs(A, A, B), 400, "'a' appears twice"),
    "half precision": (inputs(tensor(datatype="FP16"), B), 400, "'a' is float16.*a float32"),
    "a truth value": (inputs(tensor(datatype="BOOL", data=[True] * 4), B), 400, "'a' is bool"),
    "integers": (inputs(tensor(datatype="INT64"), B), 400, "'a' is int64.*a float32"),
    "no datatype of the protocol": (inputs(tensor(datatype="float32"), B), 400, "'a'.*FP32"),
    "a datatype that is a list": (inputs(tensor(datatype=["FP32"]), B), 400, "'a'.*FP32"),
    "another width": (inputs(tensor(shape=[1, 3], data=[1] * 3), B), 400, r"\[1, 3\].*\[N, 4\]"),
    "another rank": (inputs(tensor(shape=[4]), B), 400, r"\[4\].*\[N, 4\]"),
    "a size of -1": (inputs(tensor(shape=[-1]), B), 400, r"'a'.*\[-1\]"),
    "a size of 1.9": (inputs(tensor(shape=[1.9, 4]), B), 400, r"'a'.*\[1.9, 4\]"),
    "a size that is a text": (inputs(tensor(shape=["1", 4]), B), 400, "'a'.*shape"),
    "a size that is true": (inputs(tensor(shape=[True, 4]), B), 400, "'a'.*shape"),
    "no shape": (inputs(tensor(shape=None), B), 400, "'a'.*None"),
    "100,000 dimensions": (inputs(tensor(shape=[9] * 100_000), B), 400, "'a'.*dimensions"),
    "other numbers of samples": (
        inputs(tensor(shape=[2, 4], data=[0] * 8), B), 400, "'a' has 2.*'b' has 1",
    ),
    "no samples": (inputs(tensor(shape=[0, 4], data=[]), B), 400, "'a' has 0"),
    "too few numbers": (inputs(tensor(data=[1, 2, 3]), B), 400, "'a'.*data"),
    "ragged rows": (inputs(tensor(data=[[1, 2], [3]]), B), 400, "'a'.*data"),
    "no data": (inputs({"name": "a", "datatype": "FP32", "shape": [1, 4]}, B), 400, "'a'.*data"),
    "texts": (inputs(tensor(data=["1"] * 4), B), 400, "'a'.*float32"),
    "nulls": (inputs(tensor(data=[None] * 4), B), 400, "'a'.*float32"),
    "NaN": (inputs(tensor(data=[float("nan")] * 4), B), 400, "'a'.*NaN"),
    "infinity": (inputs(tensor(data=[float("-inf")] * 4), B), 400, "'a'.*infinite"),
    "a number of 400 digits": (inputs(tensor(data=[10**399] * 4), B), 400, "'a'.*beyond float32"),
    "a number beyond float32": (inputs(tensor(data=[1e39] * 4), B), 400, "'a'.*beyond float32"),
    "an integer beyond its type": (
        inputs(tensor(datatype="INT8", data=[300] * 4), B), 400, "'a'.*beyond int8",
    ),
    "an answer that overflows": (
        inputs(tensor(data=[3e38] * 4), tensor("b", data=[-3e38] * 4)), 400, "'y'.*infinity",
    ),
    "a number of 5,000 digits": (b'{"inputs": [' + b"1" * 5000 + b"]}", 400, "JSON"),
    "deep JSON": (b'{"inputs": ' + b"[" * 100_000, 400, "JSON"),
    "deep data": (
        inputs(tensor(data=["DEEP"]), B).replace(b'"DEEP"', b"[" * 500 + b"]" * 500), 400, "'a'",
    ),
    "a deep shape": (
        inputs(tensor(shape="DEEP"), B).replace(b'"DEEP"', b"[" * 970 + b"]" * 970), 400, "",
    ),
    "no JSON": (b"{]", 400, "JSON"),
    "no Unicode": (b'{"inputs": "\xff"}', 400, "JSON"),
    "a list": (b"[]", 400, "JSON"),
    "an empty body": (b"", 400, "JSON"),
    "binary data that is not there": (
        inputs({**A, "parameters": {"binary_data_size": 16}}, B), 400, "'a'",
    ),
    "parameters that are a list": (inputs({**A, "parameters": []}, B), 400, "'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_invalid_message_is_refused_with_the_expected_form(at: ModelServer, name: str) -> None:
    body, code, words = MESSAGES[name]
    answer = post(at, body)
    assert status(answer) == code
    assert re.search(words, content(answer)["error"]), answer
    assert values(post(at, inputs(A, B))) == [-4.0] * 4


LARGE = b"%x\r\n%b\r\n" % (LIMIT // 2, b" " * (LIMIT // 2)) * 3 + b"0\r\n\r\n"
CHUNKED = ("Content-Length: ", "Transfer-Encoding: chunked")
# By name: differences from a valid request, and the status.
REQUESTS: dict[str, tuple[dict[str, Any], int]] = {
    "no key": ({"headers": ["Authorization: "]}, 401),
    "a wrong key": ({"headers": ["Authorization: Bearer guessed"]}, 401),
    "a wrong key in the address": (
        {"headers": ["Authorization: "], "path": f"{INFER}?key=%ff"}, 401,
    ),
    "another host": ({"headers": ["Host: evil.example"]}, 403),
    "another port": ({"headers": ["Host: 127.0.0.1:1"]}, 403),
    "no host": ({"headers": ["Host: "]}, 400),
    "two hosts": ({"headers": ["Host: HOST\r\nHost: evil.example"]}, 400),
    "a foreign page": ({"headers": ["Origin: http://evil.example"]}, 403),
    "a page without an address": ({"headers": ["Origin: null"]}, 403),
    "a page of this address": ({"headers": ["Origin: http://HOST"]}, 403),
    "another model": ({"path": "/v2/models/other/infer"}, 404),
    "metadata of another model": ({"line": "GET /v2/models/other HTTP/1.1"}, 404),
    "another path": ({"path": "/v2/repository/index"}, 404),
    "a slash at the end": ({"line": "GET /v2/ HTTP/1.1"}, 404),
    "another method": ({"line": f"PUT {INFER} HTTP/1.1"}, 405),
    "a WebSocket": ({
        "line": "GET /v2 HTTP/1.1", "body": b"",
        "headers": ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
                    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="],
    }, 403),
    "no HTTP": ({"line": "\x16\x03\x01"}, 400),
    "a header of 1 MB": ({"headers": ["X: " + "a" * 1_000_000]}, 400),
    "a negative length": ({"headers": ["Content-Length: -1"]}, 400),
    "a length of 400 digits": ({"headers": ["Content-Length: " + "9" * 400]}, 400),
    "too long, announced": ({"headers": [f"Content-Length: {LIMIT + 1}"]}, 413),
    "too long, in chunks": ({"headers": CHUNKED, "body": LARGE}, 413),
    "too long, in chunks, with a short length": ({"headers": CHUNKED[1:], "body": LARGE}, 413),
    "a chunk without a size": ({"headers": CHUNKED, "body": b"zz\r\n"}, 400),
    "compressed chunks": ({"headers": ["Transfer-Encoding: gzip"]}, 400),
    "a header length of -5": ({"headers": [f"{protocol.LENGTH}: -5"]}, 400),
    "a header length beyond the body": ({"headers": [f"{protocol.LENGTH}: 99999"]}, 400),
    "a header length of 400 digits": ({"headers": [f"{protocol.LENGTH}: {'9' * 400}"]}, 400),
    "a header length that is not a number": ({"headers": [f"{protocol.LENGTH}: 1e1"]}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_invalid_request_is_refused(
    at: ModelServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes, code = REQUESTS[name]
    answer = post(at, **{"body": inputs(A, B), **changes})
    assert status(answer) == code, answer
    assert values(post(at, inputs(A, B))) == [-4.0] * 4
    assert not any(record.exc_info for record in caplog.records)


def test_disconnecting_client_leaves_no_traceback(
    at: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert b"HTTP/1.1 5" not in post(at, b"{", "Content-Length: 100", then_close=True)
    assert values(post(at, inputs(A, B))) == [-4.0] * 4
    assert not any(record.exc_info for record in caplog.records)


def test_chunked_body_is_read(at: ModelServer) -> None:
    body = inputs(A, B)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    assert values(post(at, chunks, *CHUNKED)) == [-4.0] * 4


def test_inputs_are_matched_by_name(at: ModelServer) -> None:
    assert values(post(at, inputs(B, A))) == [-4.0] * 4
    arrays = [("b", np.full((1, 4), 5, np.float32)), ("a", np.ones((1, 4), np.float32))]
    body, length = protocol.encode("inputs", arrays)
    answer = post(at, body, f"{protocol.LENGTH}: {length}").partition(b"\r\n\r\n")
    header = re.search(rb"(?i)%b: (\d+)" % protocol.LENGTH.encode(), answer[0])
    assert header
    found = protocol.decode("outputs", answer[2], header[1].decode())
    np.testing.assert_array_equal(found["y"], np.full((1, 4), -4, np.float32))


def test_outputs_are_matched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = model(lambda x: (x, -x), "x", outputs=("plus", "minus"))
    with runtimes.serving(pair, port=0) as found, runtimes.load(found.address) as remote:
        encode = protocol.encode
        monkeypatch.setattr(
            protocol, "encode",
            lambda kind, tensors, **more: encode(
                kind, tensors[::-1] if kind == "outputs" else tensors, **more
            ),
        )  # fmt: skip
        plus, minus = remote.run([np.ones((2, 4), np.float32)])
    assert (plus[0, 0], minus[0, 0]) == (1, -1)


@contextlib.contextmanager
def asking(at: ModelServer, *bodies: bytes) -> Iterator[list[Future[bytes]]]:
    """Send requests at the same time."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        yield [pool.submit(post, at, body) for body in bodies]


def sample(value: float) -> bytes:
    return inputs(tensor(data=[value] * 4))


def test_batches_are_limited_to_the_maximum() -> None:
    waiting: Batcher[int] = Batcher(runtimes.BatchPolicy(3))
    for number in range(7):
        waiting.put(number)
    waiting.end()
    assert [waiting.take() for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6], None]


def test_failing_request_does_not_fail_its_batch() -> None:
    sizes: list[int] = []

    def function(x: np.ndarray) -> np.ndarray:
        sizes.append(len(x))
        if (x > 1000).any():
            raise SystemExit("too large")
        return x

    policy = runtimes.BatchPolicy(3, 60 * 10**9)
    with (
        runtimes.serving(model(function, "a"), port=0, policy=policy, deadline_s=60) as found,
        asking(found, sample(1), sample(2000), sample(2)) as answers,
    ):
        codes = [status(answer.result()) for answer in answers]
        assert (found.answered, found.failed) == (2, 1)
        assert "too large" in content(answers[1].result())["error"]
    assert codes == [200, 500, 200]
    assert sizes[0] == 3


@pytest.fixture
def hung() -> Iterator[tuple[CallableRuntime, threading.Event]]:
    """A model whose calls hang until the test ends, and an event that is set by the first."""
    begun, end = threading.Event(), threading.Event()

    def function(x: np.ndarray) -> np.ndarray:
        begun.set()
        end.wait()
        return x

    yield model(function, "a"), begun
    end.set()


def test_deadline_and_shutdown_work_behind_a_hanging_call(
    hung: tuple[CallableRuntime, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    slow, begun = hung
    with ThreadPoolExecutor(2) as pool:
        with runtimes.serving(slow, port=0, deadline_s=2.0) as found:
            first = pool.submit(post, found, sample(1))
            assert begun.wait(60)
            second = pool.submit(post, found, sample(2))
            assert status(second.result(60)) == 503
            assert not first.done()
        assert status(first.result(60)) == 503
    assert not any(record.exc_info for record in caplog.records)
