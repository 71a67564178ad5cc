"""A model behind HTTP: any server that speaks the Open Inference Protocol, ours among them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import protocol
from slipstream.runtimes.runtime import Array, ModelError, OverloadedError, Runtime

_OVERLOADED = (429, 503)


class HttpRuntime(Runtime):
    """A model of a server, asked over one connection a thread.

    Args:
        url: ``http://HOST:PORT/v2/models/NAME``, or without a path where the server tells its
            model; ``?key=...`` is sent as a bearer token and is in no path.
        timeout_s: for an answer.

    Raises:
        InvalidArgumentError: no such URL.
        ModelError: nobody answers there, or not in the protocol.
    """

    kind = "http"
    concurrent = True

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise InvalidArgumentError("MODEL", f"'{url}' has no host")
        secure = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host, self._port, self._timeout_s = parts.hostname, parts.port, timeout_s
        self._own = threading.local()
        self._open: list[http.client.HTTPConnection] = []
        self._where = f"{parts.scheme}://{parts.netloc}"
        key = parse_qs(parts.query).get("key", [""])[0]
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        path = parts.path.rstrip("/")
        if not path:
            models = self._json("/v2").get("models") or []
            if len(models) != 1:
                raise ModelError(
                    "the server does not say which model is meant",
                    where=self._where,
                    remedy=f"{self._where}/v2/models/NAME",
                )
            path = f"/v2/models/{quote(str(models[0]))}"
        self._path = path
        described = self._json(path)
        super().__init__(
            str(described.get("name", path.rpartition("/")[2])),
            protocol.specs(described.get("inputs", ())),
            protocol.specs(described.get("outputs", ())),
        )

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        named = [(spec.name, array) for spec, array in zip(self.inputs, inputs, strict=True)]
        body, length = protocol.encode("inputs", named, parameters={"binary_data_output": True})
        headers = {protocol.LENGTH: str(length), "content-type": "application/octet-stream"}
        answer, answered = self._ask("POST", f"{self._path}/infer", body, headers)
        outputs = protocol.decode("outputs", answer, answered.get(protocol.LENGTH))
        if self.outputs and outputs.keys() == {spec.name for spec in self.outputs}:
            return [outputs[spec.name] for spec in self.outputs]
        return list(outputs.values())

    def close(self) -> None:
        """Close the connections of all threads."""
        while self._open:
            self._open.pop().close()

    def _json(self, path: str) -> dict[str, Any]:
        answer, _ = self._ask("GET", path)
        try:
            metadata = json.loads(answer)
        except ValueError:
            metadata = None
        if not isinstance(metadata, dict):
            raise ModelError(f"{path} is not the protocol's metadata", where=self._where)
        return metadata

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[bytes, http.client.HTTPMessage]:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        fresh = connection is None
        if connection is None:
            connection = self._connection(self._host, self._port, timeout=self._timeout_s)
            self._own.connection = connection
            self._open.append(connection)
        try:
            connection.request(method, path, body or None, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._own.connection = None
            if not fresh and isinstance(error, http.client.RemoteDisconnected):
                # It closed a connection that was idle, which it may; asked once more.
                return self._ask(method, path, body, headers)
            raise ModelError(
                f"the server {_what(error)}",
                where=f"{self._where}{path}",
                remedy="is it running, and does it answer other clients?",
            ) from error
        if response.status in _OVERLOADED:
            raise OverloadedError(f"the server is overloaded ({response.status})", where=path)
        if response.status != 200:
            message = answer[:200].decode(errors="replace").strip()
            raise ModelError(f"the server answered {response.status}: {message}", where=path)
        return answer, response.headers


def _what(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, http.client.RemoteDisconnected):
        return "dropped the connection without an answer"
    return f"cannot be asked: {error}"
