"""The system under test, inside the child: it takes LoadGen's queries and answers each one once.

LoadGen itself ends the process when a callback raises, and waits for ever for an answer that does
not come. So nothing here raises into it: what goes wrong is told to the parent, with its cause,
and the process ends.
"""

from __future__ import annotations

import os
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
_TOLD_EVERY = 5


class Watch(threading.Thread):
    """Sees to it that queries are answered in time; tells the parent how far the run is.

    Attributes:
        patience_s: how long a model's call may take, and how long nothing may be answered while
            queries wait.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__(name="slipstream-watch", daemon=True)
        self.patience_s = patience_s
        self.issued = self.answered = self.refused = 0
        # By thread: when the call that it is in began, and the first sample's index.
        self.calls: dict[int, tuple[float, int]] = {}
        self._over = threading.Event()
        self._telling = threading.Lock()

    def run(self) -> None:
        """Look at the counts now and then, until `end`."""
        seen, since, ticks = -1, time.monotonic(), 0
        while not self._over.wait(_TICK_S):
            now, ticks = time.monotonic(), ticks + 1
            if self.answered != seen or self.issued == self.answered:
                seen, since = self.answered, now
            for thread, (began, index) in list(self.calls.items()):
                if now - began > self.patience_s:
                    self.fail(
                        ModelError(
                            f"the model's call for sample {index} has not returned for "
                            f"{now - began:.1f} s",
                            where=_user_place(thread),
                            remedy="if it is only slow, give it longer: --patience 60s",
                        )
                    )
            if now - since > self.patience_s and not self.calls:
                missing = self.issued - self.answered
                self.fail(
                    ModelError(
                        f"{missing} of {self.issued} queries were never answered: nothing came for "
                        f"{now - since:.1f} s",
                        remedy="every query must be answered once; a slow system: --patience 60s",
                    )
                )
            if ticks % _TOLD_EVERY == 0:
                self._tell({"say": f"{self.answered:,} queries answered"})

    def end(self) -> None:
        """Stop watching; nothing is told any more."""
        self._over.set()
        if self.is_alive():
            self.join()

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the parent what went wrong, and end this process, in which LoadGen still waits."""
        with self._telling:
            channel().send({"error": describe_error(error)})
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(3)

    def _tell(self, message: dict[str, Any]) -> None:
        with self._telling:
            channel().send(message)


def _user_place(thread: int) -> str | None:
    frame = sys._current_frames().get(thread)
    for one in reversed(traceback.extract_stack(frame) if frame else ()):
        if is_user_file(one.filename):
            return f"{one.filename}:{one.lineno}"
    return None


class System:
    """A model behind LoadGen's two callbacks.

    Args:
        in_line: queries are answered in the thread that issues them, as where the next one comes
            only when this one is answered; else worker threads take batches by `policy`.
        workers: threads that call the model.
        classes: the answer is the class of the largest score; else all of the first output.
    """

    def __init__(
        self,
        model: Runtime,
        library: Library,
        watch: Watch,
        *,
        in_line: bool,
        policy: BatchPolicy,
        workers: int = 1,
        classes: bool = True,
    ) -> None:
        import mlperf_loadgen

        self._complete = mlperf_loadgen.QuerySamplesComplete
        self._response = mlperf_loadgen.QuerySampleResponse
        self._model, self._library, self._watch = model, library, watch
        self._classes = classes
        self._in_line = in_line
        # What waits is a part of a query of many samples, or one of one.
        self._policy = policy
        self._batcher: Batcher[tuple[int, int]] = Batcher(policy)
        self._threads = [
            threading.Thread(target=self._work, name=f"slipstream-model-{n}", daemon=True)
            for n in range(0 if in_line else workers)
        ]
        for one in self._threads:
            one.start()

    def issue(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        """LoadGen's callback: samples to answer, each an id and an index into the library."""
        self._watch.issued += len(ids)
        if not self._in_line:
            for one in zip(ids, indices, strict=True):
                self._batcher.put(one)
        elif len(ids) <= self._policy.maximum:
            self._answer(ids, indices)
        else:
            for first in range(0, len(ids), self._policy.maximum):
                part = slice(first, first + self._policy.maximum)
                self._answer(ids[part], indices[part])

    def flush(self) -> None:
        """LoadGen's second callback: nothing more comes; what waits is answered anyhow."""

    def close(self) -> None:
        """End the workers."""
        self._batcher.end()
        for one in self._threads:
            one.join()

    def _work(self) -> None:
        while (batch := self._batcher.take()) is not None:
            ids, indices = zip(*batch, strict=True)
            self._answer(ids, indices)

    def _answer(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        watch, thread = self._watch, threading.get_ident()
        watch.calls[thread] = (time.monotonic(), indices[0])
        try:
            answers = self._answers(self._model.run(self._library.take(indices)))
        except OverloadedError:
            # LoadGen wants an answer to every query; the run is not valid with empty ones.
            watch.refused += len(ids)
            answers = np.zeros((len(ids), 1), np.int8)
        except BaseException as error:
            watch.fail(error)
        del watch.calls[thread]
        # LoadGen copies, if at all, before the call returns: `answers` lives as long.
        first, size = answers.__array_interface__["data"][0], answers.strides[0]
        self._complete([self._response(one, first + n * size, size) for n, one in enumerate(ids)])
        watch.answered += len(ids)

    def _answers(self, outputs: list[Array]) -> Array:
        """What each sample is answered, C-contiguous [N, ...]."""
        scores = outputs[0]
        if self._classes and scores.ndim == 2:
            return np.asarray(scores.argmax(1))
        return np.ascontiguousarray(scores.reshape(len(scores), -1))


class OwnQueue:
    """A system with a queue of its own: ``function(ids, *inputs, answer)``.

    It is called with every query, and calls ``answer(ids, outputs)`` for each sample once, from
    any thread, now or later.
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
        self._lock = threading.Lock()

    def issue(self, ids: Sequence[int], indices: Sequence[int]) -> None:
        """Pass the query on."""
        watch, thread = self._watch, threading.get_ident()
        with self._lock:
            watch.issued += len(ids)
            self._open.update(zip(ids, indices, strict=True))
        watch.calls[thread] = (time.monotonic(), indices[0])
        try:
            self._function(list(ids), *self._library.take(indices), answer=self.answer)
        except BaseException as error:
            watch.fail(error)
        watch.calls.pop(thread, None)

    def answer(self, ids: Sequence[int], outputs: Any) -> None:
        """What the system says to these queries: an array [len(ids), ...]."""
        array = np.asarray(outputs)
        with self._lock:
            unknown = [one for one in ids if one not in self._open]
            if unknown:
                self._watch.fail(
                    ModelError(
                        f"the query {unknown[0]} was answered twice, or never asked",
                        remedy="answer every query once",
                    )
                )
            if array.ndim == 0 or len(array) != len(ids):
                self._watch.fail(
                    ModelError(f"{len(ids)} queries were answered with {array.shape} outputs")
                )
            for one in ids:
                del self._open[one]
        if self._classes and array.ndim == 2:
            array = array.argmax(1)
        array = np.ascontiguousarray(array.reshape(len(ids), -1))
        first, size = array.__array_interface__["data"][0], array.strides[0]
        self._complete([self._response(one, first + n * size, size) for n, one in enumerate(ids)])
        with self._lock:
            self._watch.answered += len(ids)

    def flush(self) -> None:
        """Nothing more comes."""

    def close(self) -> None:
        """The user's threads end with the process."""
