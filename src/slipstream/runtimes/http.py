"""Runtime for models behind HTTP servers with the Open Inference Protocol."""

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
    """A model of a server, with one connection per thread.

    Args:
        url: ``http://HOST:PORT/v2/models/NAME``, or without a path if the server lists one model;
            ``?key=...`` is sent as a bearer token, never in the path.
        timeout_s: time limit of an answer.

    Raises:
        InvalidArgumentError: the URL has no host.
        ModelError: the server does not answer, or not in the protocol.
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
        self._local = threading.local()
        self._open: list[http.client.HTTPConnection] = []
        self._where = f"{parts.scheme}://{parts.netloc}"
        key = parse_qs(parts.query).get("key", [""])[0]
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        path = parts.path.rstrip("/")
        if not path:
            models = self._json("/v2").get("models") or []
            if len(models) != 1:
                raise ModelError(
                    f"the server lists {len(models)} models, so the URL must name one",
                    where=self._where,
                    remedy=f"pass {self._where}/v2/models/NAME",
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
        answer, answered = self._request("POST", f"{self._path}/infer", body, headers)
        outputs = protocol.decode("outputs", answer, answered.get(protocol.LENGTH))
        if self.outputs and outputs.keys() == {spec.name for spec in self.outputs}:
            return [outputs[spec.name] for spec in self.outputs]
        return list(outputs.values())

    def close(self) -> None:
        """Close the connections of all threads."""
        while self._open:
            self._open.pop().close()

    def _json(self, path: str) -> dict[str, Any]:
        answer, _ = self._request("GET", path)
        try:
            metadata = json.loads(answer)
        except ValueError:
            metadata = None
        if not isinstance(metadata, dict):
            raise ModelError(f"{path} is not the protocol's metadata", where=self._where)
        return metadata

    def _request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[bytes, http.client.HTTPMessage]:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        is_new = connection is None
        if connection is None:
            connection = self._connection(self._host, self._port, timeout=self._timeout_s)
            self._local.connection = connection
            self._open.append(connection)
        try:
            connection.request(method, path, body or None, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self._local.connection = None
            if not is_new and isinstance(error, http.client.RemoteDisconnected):
                # The server may close an idle connection; retry with a new one.
                return self._request(method, path, body, headers)
            raise ModelError(
                f"the server {_describe(error)}",
                where=f"{self._where}{path}",
                remedy="check that it runs and answers other clients",
            ) from error
        if response.status in _OVERLOADED:
            raise OverloadedError(f"the server is overloaded ({response.status})", where=path)
        if response.status != 200:
            message = answer[:200].decode(errors="replace").strip()
            raise ModelError(f"the server answered {response.status}: {message}", where=path)
        return answer, response.headers


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, http.client.RemoteDisconnected):
        return "dropped the connection without an answer"
    return f"cannot be reached: {error}"
