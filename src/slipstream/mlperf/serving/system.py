"""The system under test in the child process: it answers each of LoadGen's queries once.

LoadGen ends the process if a callback raises, and waits forever for missing answers. So nothing
here raises into LoadGen: errors are sent to the parent with their cause, and the process ends.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from slipstream.child import channel, describe_error, is_user_file
from slipstream.mlperf.serving.library import Library
from slipstream.runtimes import Batcher, BatchPolicy, ModelError, OverloadedError, Runtime
from slipstream.runtimes.runtime import Array

_TICK_S = 0.2
_TICKS_PER_MESSAGE = 5


class Call:
    """The current model call of a thread; cheap, since every call sets and clears it.

    Attributes:
        indices: indices of the call's samples; None between calls.
        seen, since: `indices` that the watch saw last, and since when.
        buffer, address: buffer of this thread's answers while LoadGen reads them. Getting the
            address of an array takes longer than copying a few classes.
    """

    __slots__ = ("address", "buffer", "indices", "seen", "since", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.buffer, self.address = np.empty((0, 1)), 0
        self.indices: Sequence[int] | None = None
        self.seen: Sequence[int] | None = None
        self.since = 0.0

    def hold(self, answers: Array) -> int:
        """Copy `answers` [N, ...] to the buffer, and return the bytes per answer."""
        count, buffer = len(answers), self.buffer
        size = answers.nbytes // count
        if (
            count > len(buffer)
            or answers.dtype is not buffer.dtype
            or size != buffer.strides[0]
            or answers.ndim != buffer.ndim
        ):
            self.buffer = buffer = np.empty_like(answers, order="C")
            self.address = buffer.__array_interface__["data"][0]
        buffer[:count] = answers
        return size


class Watch(threading.Thread):
    """Thread that detects hanging calls and missing answers, and reports progress to the parent.

    Attributes:
        patience_s: maximum time of a model call, and without any answer while queries wait.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__(name="slipstream-watch", daemon=True)
        self.patience_s = patience_s
        self.issued = self.answered = self.refused = 0
        self.calls: list[Call] = []
        self._over = threading.Event()
        self._sending = threading.Lock()

    def run(self) -> None:
        """Check calls and counts periodically until `end`."""
        seen, since, ticks = -1, time.monotonic(), 0
        while not self._over.wait(_TICK_S):
            now, ticks = time.monotonic(), ticks + 1
            if self.answered != seen or self.issued == self.answered:
                seen, since = self.answered, now
            for call in list(self.calls):
                if call.seen is not call.indices:
                    call.seen, call.since = call.indices, now
                elif call.indices is not None and now - call.since > self.patience_s:
                    self.fail(
                        ModelError(
                            f"the model's call for sample {call.indices[0]} has not returned for "
                            f"{now - call.since:.1f} s",
                            where=_user_place(call.thread),
                            remedy="if it is only slow, give it longer: --call-timeout 60s",
                        )
                    )
            busy = any(call.indices is not None for call in self.calls)
            if now - since > self.patience_s and not busy:
                missing = self.issued - self.answered
                self.fail(
                    ModelError(
                        f"{missing} of {self.issued} queries were never answered: nothing came for "
                        f"{now - since:.1f} s",
                        remedy="answer every query once; for a slow system: --call-timeout 60s",
                    )
                )
            if ticks % _TICKS_PER_MESSAGE == 0:
                self._send({"say": f"{self.answered:,} queries answered"})

    def call(self) -> Call:
        """Return a new `Call` for this thread."""
        call = Call()
        self.calls.append(call)
        return call

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        if self.is_alive():
            self.join()

    def fail(self, error: BaseException) -> NoReturn:
        """Send an error to the parent, and end this process, in which LoadGen still waits."""
        with self._sending:
            channel().send({"error": describe_error(error)})
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(3)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            channel().send(message)


def _user_place(thread: int) -> str | None:
    frame = sys._current_frames().get(thread)
    for entry in reversed(traceback.extract_stack(frame) if frame else ()):
        if is_user_file(entry.filename):
            return f"{entry.filename}:{entry.lineno}"
    return None


class System:
    """A model behind LoadGen's callback, `issue`.

    Args:
        scenario: single-stream and multi-stream queries are answered by the issuing thread, since
            the next one follows the answer; server queries by workers, batched by `policy`; offline
            queries by workers, in parts of the policy's maximum.
        workers: threads that call the model.
        classes: whether the answer is the argmax of the scores; otherwise the whole first output.
        taken: list to which each batch of a server is appended: its size, and ns from when a worker
            could take it until it was answered; None to record nothing.
    """

    def __init__(
        self,
        model: Runtime,
        library: Library,
        watch: Watch,
        *,
        scenario: str,
        policy: BatchPolicy,
        workers: int = 1,
        classes: bool = True,
        taken: list[tuple[int, int]] | None = None,
    ) -> None:
        import mlperf_loadgen

        self._complete = mlperf_loadgen.QuerySamplesComplete
        self._response = mlperf_loadgen.QuerySampleResponse
        self._model, self._library, self._watch = model, library, watch
        self._classes, self._taken = classes, taken
        self._max_batch, self._delays = policy.maximum, policy.delay_ns > 0
        self._call: Call | None = None
        in_line = scenario in ("single-stream", "multi-stream")
        self.issue = {"server": self._queue, "offline": self._split}.get(scenario, self._answer_now)
        self._queries: Batcher[tuple[int, int]] = Batcher(policy)
        self._parts: queue.SimpleQueue[tuple[Sequence[int], Sequence[int]] | None] = (
            queue.SimpleQueue()
        )
        work = self._work_on_parts if scenario == "offline" else self._work_on_queries
        work = work if taken is None else self._work_and_record
        self._threads = [
            threading.Thread(target=work, name=f"slipstream-model-{n}", daemon=True)
            for n in range(0 if in_line else workers)
        ]
        for thread in self._threads:
            thread.start()

    def _answer_now(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        self._watch.issued += len(ids)
        call = self._call
        if call is None:
            call = self._call = self._watch.call()
        self._answer(call, ids, indices)

    def _queue(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        self._watch.issued += len(ids)
        for query in zip(ids, indices, strict=True):
            self._queries.put(query)

    def _split(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        self._watch.issued += len(ids)
        for first in range(0, len(ids), self._max_batch):
            part = slice(first, first + self._max_batch)
            self._parts.put((ids[part], indices[part]))

    def close(self) -> None:
        """Stop the workers."""
        self._queries.end()
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()

    def _work_on_queries(self) -> None:
        call = self._watch.call()
        while (batch := self._queries.take()) is not None:
            ids, indices = zip(*batch, strict=True)
            self._answer(call, ids, indices)

    def _work_and_record(self) -> None:
        assert self._taken is not None
        call, ended = self._watch.call(), 0
        while True:
            idle = self._delays or not self._queries.waiting()
            if (batch := self._queries.take()) is None:
                return
            # If queries were waiting, the time includes taking them.
            began = time.perf_counter_ns() if idle else ended
            ids, indices = zip(*batch, strict=True)
            self._answer(call, ids, indices)
            ended = time.perf_counter_ns()
            self._taken.append((len(ids), ended - began))

    def _work_on_parts(self) -> None:
        call = self._watch.call()
        while (part := self._parts.get()) is not None:
            self._answer(call, *part)

    def _answer(self, call: Call, ids: Sequence[int], indices: Sequence[int]) -> None:
        call.indices = indices
        try:
            answers = self._answers(self._model.run(self._library.take(indices)))
            size = call.hold(answers)
        except OverloadedError:
            # LoadGen needs an answer to every query; empty ones make the run invalid.
            self._watch.refused += len(ids)
            size = call.hold(np.zeros((len(ids), 1), np.int8))
        except BaseException as error:
            self._watch.fail(error)
        call.indices = None
        first = call.address
        response = self._response
        if len(ids) == 1:
            self._complete([response(ids[0], first, size)])
        else:
            places = range(first, first + size * len(ids), size)
            self._complete([response(i, p, size) for i, p in zip(ids, places, strict=True)])
        self._watch.answered += len(ids)

    def _answers(self, outputs: list[Array]) -> Array:
        scores = outputs[0]
        if self._classes and scores.ndim == 2:
            return np.asarray(scores.argmax(1))
        return scores


class AsyncSystem:
    """A system that queues queries itself: ``function(ids, *inputs, answer)``.

    The function is called with every query. It must call ``answer(ids, outputs)`` once per sample,
    from any thread and at any time.
    """

    def __init__(
        self, function: Callable[..., Any], library: Library, watch: Watch, classes: bool = True
    ) -> None:
        import mlperf_loadgen

        self._complete = mlperf_loadgen.QuerySamplesComplete
        self._response = mlperf_loadgen.QuerySampleResponse
        self._function, self._library, self._watch = function, library, watch
        self._classes = classes
        self._open: dict[int, int] = {}
        self._call: Call | None = None
        self._lock = threading.Lock()

    def issue(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        """Pass a query to the function."""
        watch = self._watch
        if self._call is None:
            self._call = watch.call()
        with self._lock:
            watch.issued += len(ids)
            self._open.update(zip(ids, indices, strict=True))
        self._call.indices = indices
        try:
            self._function(list(ids), *self._library.take(indices), answer=self.answer)
        except BaseException as error:
            watch.fail(error)
        self._call.indices = None

    def answer(self, ids: Sequence[int], outputs: Any) -> None:
        """Answer queries with `outputs`, an array [len(ids), ...]."""
        array = np.asarray(outputs)
        with self._lock:
            unknown = [query for query in ids if query not in self._open]
            if unknown:
                self._watch.fail(
                    ModelError(
                        f"the query {unknown[0]} was answered twice, or never issued",
                        remedy="answer every query once",
                    )
                )
            if array.ndim == 0 or len(array) != len(ids):
                self._watch.fail(
                    ModelError(f"{len(ids)} queries were answered with {array.shape} outputs")
                )
            for query in ids:
                del self._open[query]
        if self._classes and array.ndim == 2:
            array = array.argmax(1)
        array = np.ascontiguousarray(array.reshape(len(ids), -1))
        first, size = array.__array_interface__["data"][0], array.strides[0]
        self._complete([self._response(i, first + n * size, size) for n, i in enumerate(ids)])
        with self._lock:
            self._watch.answered += len(ids)

    def close(self) -> None:
        """Do nothing: the user's threads end with the process."""
