"""A session of the live page: messages to clients, and their requests."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from slipstream.child import is_user_file
from slipstream.cluster import Cluster, presets
from slipstream.errors import SlipstreamError, UsageError, WorkloadError
from slipstream.live.analysis import Analysis, Analyst
from slipstream.live.edits import inspect_target
from slipstream.live.states import FAILED
from slipstream.live.stops import Pace, stop_at, stops
from slipstream.live.texts import sha256
from slipstream.tables import json_values

_EDITS = "slipstream.live.edits"
_MAX_FILES = 6
_MAX_TEXT_LENGTH = 400_000


class Session:
    """A session that sends every analysis to all clients and serves their requests. Thread-safe.

    Args:
        analyst: source of the analyses.
        loop: event loop that serves the clients.
    """

    def __init__(self, analyst: Analyst, loop: asyncio.AbstractEventLoop) -> None:
        self.analyst = analyst
        self._loop = loop
        self._clients: set[asyncio.Queue[dict[str, Any]]] = set()
        self._undo: list[dict[str, str]] = []
        # Serializes the edits of all clients.
        self._editing = threading.Lock()
        self._published: Analysis | None = None
        self._place: tuple[str, dict[str, Any]] | None = None
        self._stop_listening = analyst.listen(self._publish)

    def join(self) -> asyncio.Queue[dict[str, Any]]:
        """Return a queue of messages for a new client, starting with the current state."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        queue.put_nowait({"type": "about", "clusters": _clusters()})
        for message in self._messages(self.analyst.latest, None):
            queue.put_nowait(message)
        self._clients.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        """Remove the client of `queue`."""
        self._clients.discard(queue)

    def close(self) -> None:
        """Stop listening to the analyst."""
        self._stop_listening()

    def document(self, number: str, state: str, name: str) -> Path | None:
        """Return the file `name` of an analysis's document; None if it is not the latest."""
        latest = self.analyst.latest
        folder = latest.document
        if str(latest.number) != number or folder is None or folder.name != state:
            return None
        return folder / name

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a request: return its ``result``, or an ``error`` with what, where and remedy."""
        try:
            action = self._actions.get(str(request.get("do")))
            if action is None:
                raise UsageError(f"the page requests '{request.get('do')}', which does not exist")
            return {"result": json_values(action(self, request))}
        except SlipstreamError as error:
            return {"error": {"what": error.what, "where": error.where, "remedy": error.remedy}}
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            what = f"the page's request is malformed: {type(error).__name__}: {error}"
            return {"error": {"what": what, "where": None, "remedy": "load the page again"}}

    def _simulate(self, request: Mapping[str, Any]) -> Any:
        workers, cluster = request.get("workers"), request.get("cluster")
        if workers is not None and type(workers) is not int:
            raise TypeError(f"workers is {workers!r}, not an integer")
        if cluster is not None and not isinstance(cluster, str):
            raise TypeError(f"cluster is {cluster!r}, not text")
        return self.analyst.simulate(str(request["technique"]), cluster, workers)

    def _preview(self, request: Mapping[str, Any]) -> Any:
        return self.analyst.edit(
            f"{_EDITS}:preview", target=self._target, change=_change(request),
            digest=request.get("digest"),
        )  # fmt: skip

    def _save(self, request: Mapping[str, Any]) -> Any:
        change = _change(request)
        with self._editing:
            expected = self._expected(change)
            saved: dict[str, str] = self.analyst.edit(
                f"{_EDITS}:save", target=self._target, change=change, digest=str(request["digest"])
            )
            self._undo.append(saved)
            if expected is not None:
                self.analyst.expect(saved["after"], expected)
        self.analyst.analyse()
        return saved

    def _take_back(self, request: Mapping[str, Any]) -> Any:
        with self._editing:
            if not self._undo:
                raise WorkloadError("this session has no edit to undo")
            last = self._undo[-1]
            try:
                digests = self.analyst.edit(
                    f"{_EDITS}:take_back", target=self._target, digest=last["after"]
                )
            except WorkloadError as error:
                raise WorkloadError(
                    error.what,
                    where=error.where,
                    remedy="undo the edit by hand; "
                    f"{self._path.name}.orig is the file before the edit",
                ) from error
            self._undo.pop()
        self.analyst.analyse()
        return digests

    _actions: ClassVar[Mapping[str, Callable[[Session, Mapping[str, Any]], Any]]] = {
        "simulate": _simulate,
        "device": lambda self, request: self.analyst.on_device(str(request["device"])),
        "preview": _preview,
        "save": _save,
        "undo": _take_back,
        "again": lambda self, _: {"number": self.analyst.analyse(again=True)},
    }

    def _expected(self, change: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the prediction for the step after `change`, to compare with its measurement."""
        latest = self.analyst.latest
        costs, batch = latest.costs, latest.batch
        if costs is None:
            return None
        if "batch" in change:
            ratio = self._samples_per_batch()
            if batch is None or ratio is None:
                return None
            expected = stop_at(batch, int(change["batch"]) * ratio, Pace.of(costs, batch))
            if expected is None:
                return None
            name = f"batch_size {change['batch']}"
        else:
            name = str(change["technique"])
            predicted = self.analyst.simulate(name)
            if "reason" in predicted:
                return None
            samples = predicted["samples"] or costs.samples
            low, high = predicted["speedup_interval"]
            # Time of the recorded step, scaled to the samples of the predicted one.
            scale = predicted["step_ns"] * predicted["speedup"]
            expected = {
                "samples": samples,
                "step_ns": [predicted["step_ns"], scale / high, scale / low],
                "peak_bytes": predicted["peak_bytes"],
            }
        before = {
            "step_ns": costs.step_ns, "peak_bytes": costs.peak_bytes, "samples": costs.samples,
        }  # fmt: skip
        return {"change": name, "before": before, **expected}

    def _publish(self, analysis: Analysis) -> None:
        before, self._published = self._published, analysis
        self._loop.call_soon_threadsafe(self._send, self._messages(analysis, before))

    def _send(self, messages: list[dict[str, Any]]) -> None:
        for queue in self._clients:
            for message in messages:
                queue.put_nowait(message)

    def _messages(self, now: Analysis, before: Analysis | None) -> list[dict[str, Any]]:
        """Return messages about the changes from `before` to `now`, or about all if None.

        The state comes last, so that a page that shows a failure is up to date otherwise.
        """
        messages: list[dict[str, Any]] = []
        if now.costs is not None and (before is None or before.costs is not now.costs):
            messages.append({"type": "costs", "costs": now.costs.to_json(), "files": _texts(now)})
        new_edge = before is None or before.batch is not now.batch or before.state != now.state
        if new_edge or (before is not None and before.batch_reason != now.batch_reason):
            messages.append({"type": "batch", **self._batch(now)})
        messages.append(self._state(now))
        return [json_values(message) for message in messages]

    def _state(self, now: Analysis) -> dict[str, Any]:
        document = None
        if now.document is not None and not now.stale:
            document = f"document/{now.number}/{now.document.name}"
        return {
            "type": "state",
            "workload": self.analyst.workload.name,
            "number": now.number,
            "state": now.state,
            "said": now.said,
            "stale": now.stale,
            "problem": vars(now.problem) if now.problem is not None else None,
            "document": document,
            "expected": now.expected,
            "after_s": dict(now.after_s),
            "history": self.analyst.history[-50:],
            "undo": len(self._undo),
        }

    def _batch(self, now: Analysis) -> dict[str, Any]:
        """Return the batch sizes of the bars, and the place of the batch size in the file."""
        place = self._look()
        reason = place.get("reason") or ""
        ratio = self._samples_per_batch()
        if not reason and now.stale:
            failed = "the last save could not be analysed"
            reason = failed if now.state == FAILED else "the last save is being analysed"
        elif not reason and now.costs is not None and ratio is None:
            reason = (
                f"the file sets {place.get('value')}, but a step has {now.costs.samples} samples"
            )
        model = now.batch
        sizes = stops(model, Pace.of(now.costs, model)) if model is not None else []
        return {
            "place": {key: place.get(key) for key in ("value", "line", "digest")},
            "file": self._path.name,
            "read_only": reason,
            "reason": now.batch_reason,
            "measuring": model is None and not now.batch_reason,
            "per_batch": ratio or 1,
            "stops": sizes,
            "max_batch": model.max_batch() if model is not None else None,
            "limit_bytes": model.limit_bytes if model is not None else None,
            "knee": model.knee if model is not None else None,
            "best": model.best() if model is not None else None,
        }

    def _look(self) -> dict[str, Any]:
        try:
            digest = sha256(self._path.read_bytes())
        except OSError as error:
            return {"reason": f"the file cannot be read: {error.strerror}"}
        if "batch_size" in self.analyst.workload.arguments:
            return {"reason": "--set batch_size sets it for this session", "digest": digest}
        if self._place is None or self._place[0] != digest:
            try:
                self._place = digest, inspect_target(self._target)
            except SlipstreamError as error:
                return {"reason": error.what, "digest": digest}
        return self._place[1]

    def _samples_per_batch(self) -> int | None:
        """Return samples per step divided by the file's batch size; None if not an integer."""
        value, costs = self._look().get("value"), self.analyst.latest.costs
        if not value or costs is None or not costs.samples or costs.samples % value:
            return None
        return int(costs.samples // value)

    @property
    def _path(self) -> Path:
        return self.analyst.workload.path

    @property
    def _target(self) -> str:
        return self.analyst.workload.file_and_place


@functools.cache
def _clusters() -> list[dict[str, Any]]:
    """Return the cluster presets with their number of devices."""
    return [{"name": name, "devices": Cluster.load(name).devices} for name in sorted(presets())]


def _change(request: Mapping[str, Any]) -> dict[str, Any]:
    if "batch" in request:
        batch = request["batch"]
        if type(batch) is not int or batch < 1:
            raise ValueError(f"batch is {batch!r}, not a positive integer")
        return {"batch": batch}
    return {"technique": str(request["technique"])}


def _texts(now: Analysis) -> list[dict[str, Any]]:
    """Return the current texts of the most expensive files."""
    assert now.costs is not None
    texts: dict[str, str] = {}
    for line in now.costs.lines:
        if line.path in texts or not is_user_file(line.path) or len(texts) >= _MAX_FILES:
            continue
        try:
            text = Path(line.path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if len(text) <= _MAX_TEXT_LENGTH:
            texts[line.path] = text
    return [{"path": path, "text": text} for path, text in texts.items()]
