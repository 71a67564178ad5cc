"""Analyses of a workload while it is edited, as the page and the language server show them.

    analyst = Analyst("train.py:make_workload")
    analyst.listen(lambda analysis: print(analysis.state, analysis.costs))
    analyst.watch()                      # analyse now, and again whenever the file is saved
    ...
    analyst.close()

An analysis goes through the states ``recording``, ``first`` (costs of one step), ``recorded``
(the whole recording) and ``ready`` (techniques simulated), or ends as ``failed`` with a `Problem`
at the user's line. A newer save cancels the running analysis. User code runs in a new process each
time, and recordings are processed in others, so that this process stays small and responsive.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.child.fork_server import ForkServer
from slipstream.durations.durations import one_pool
from slipstream.errors import SlipstreamError
from slipstream.live.cache import Cache
from slipstream.live.queue import Kind, Queue, warm_server
from slipstream.live.stages import AnalysisSettings, Stages
from slipstream.live.states import FAILED, READY, STATES, Analysis, Problem
from slipstream.live.texts import Texts, parse_workload, sha256, unchanged
from slipstream.workload import Workload
from slipstream.workload.lines import project_root

__all__ = ["DEFAULT_TIMEOUT_S", "Analysis", "Analyst", "Problem", "parse_workload"]

DEFAULT_TIMEOUT_S = 60.0
_POLL_S = 0.05
_MAX_MESSAGE_LENGTH = 200
_NO_BATCHES = "disabled by --no-batches"
# Time limit for timing steps at several batch sizes.
_BATCH_BUDGET_S = 4.0


class Analyst:
    """Repeated analysis of one workload. Thread-safe.

    Args:
        workload: a `Workload`, ``file.py:function`` or a plain script.
        threads: intra-op threads; 0 keeps the workload's setting.
        steps: profiled steps of a whole recording.
        timeout_s: maximum time without progress, after which the step is killed.
        techniques: techniques to simulate; None for none, empty for all that are installed.
        batches: whether to measure how time and memory depend on the batch size.
        batch_budget_s: approximate time for timing steps at several batch sizes.
        server: server to fork processes from, which the caller closes; by default a new one.
        store: results store with past predictions and measurements.

    Raises:
        SlipstreamError: `workload` is malformed, see `Workload.parse`. A file that does not parse
            is a `Problem` of the analysis instead.
    """

    def __init__(
        self,
        workload: Workload | str,
        *,
        threads: int = 0,
        steps: int = 24,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        techniques: Sequence[str] | None = (),
        batches: bool = True,
        batch_budget_s: float = _BATCH_BUDGET_S,
        server: ForkServer | None = None,
        store: Path | None = None,
    ) -> None:
        if not isinstance(workload, Workload):
            workload = parse_workload(workload)
        self.workload = workload
        self._settings = AnalysisSettings(
            workload, threads, steps, timeout_s,
            None if techniques is None else tuple(techniques),
            batches, batch_budget_s, str(store) if store else None,
        )  # fmt: skip
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-live-"))
        self._owns_server = server is None
        self._server = server or warm_server(one_pool(threads))
        self._queue = Queue(self._server)
        self._changed = threading.Condition()
        self._listeners: list[Callable[[Analysis], None]] = []
        self._number = 0
        self._closed = False
        self._watcher: threading.Thread | None = None
        self._texts = Texts(workload.path)
        self._cache = Cache(self._folder)
        self._expected: tuple[str, Mapping[str, Any]] | None = None
        self._latest = Analysis()
        self._history: list[dict[str, Any]] = []

    @property
    def latest(self) -> Analysis:
        """The newest analysis, possibly unfinished."""
        return self._latest

    @property
    def history(self) -> list[dict[str, Any]]:
        """Finished recordings, oldest first: digest, Unix time, step ns, peak bytes, samples."""
        return list(self._history)

    def listen(self, listener: Callable[[Analysis], None]) -> Callable[[], None]:
        """Call `listener` with every update, in a thread of the analyst.

        Returns:
            A function that removes the listener.
        """
        self._listeners.append(listener)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return remove

    def wait(self, number: int, *, state: str = READY, timeout_s: float = 600.0) -> Analysis:
        """Wait until analysis `number` or a newer one reaches `state` or fails, and return it.

        Raises:
            TimeoutError: it did not within `timeout_s`.
        """

        def reached() -> bool:
            latest = self._latest
            in_state = latest.done or STATES.index(latest.state) >= STATES.index(state)
            return latest.number >= number and in_state

        with self._changed:
            if not self._changed.wait_for(reached, timeout_s):
                raise TimeoutError(f"analysis {number} is not {state} after {timeout_s:g} s")
            return self._latest

    def analyse(self, *, again: bool = False) -> int:
        """Analyse the files on disk, and return the number of that analysis.

        Cancels a running analysis of another text. If the text was analysed recently, the cached
        analysis is shown immediately and nothing runs, unless `again`.
        """
        with self._changed:
            if self._closed:
                return self._latest.number
            latest = self._latest
            current = latest.number == self._number and latest.state != FAILED
            # The watcher may have seen an edit before `expect` was called for it.
            current = current and latest.expected == self._expectation()
            if current and not again and self._number and unchanged(self._texts.seen):
                return self._number
            self._number += 1
            self._queue.cancel(Kind.ANALYSING)
            self._submit(self._number, again)
            return self._number

    def watch(self) -> int:
        """Analyse now and whenever one of the user's files changes; return the first number."""
        if self._server is not None:
            self._server.warm_up()
        number = self.analyse()
        with self._changed:
            if self._watcher is None and not self._closed:
                self._watcher = threading.Thread(
                    target=self._poll_files, name="slipstream-watch", daemon=True
                )
                self._watcher.start()
        return number

    def simulate(
        self, technique: str, cluster: str | None = None, workers: int | None = None
    ) -> dict[str, Any]:
        """Predict the latest recording with `technique`, a technique spec.

        Args:
            cluster: preset or short form of the cluster, for techniques that need workers.
            workers: number of devices to use; None for the number in `technique`.

        Returns:
            A prediction as in `slipstream.report.document`; or ``technique`` and ``reason``.

        Raises:
            UsageError: `technique` is not a valid technique spec.
            SlipstreamError: there is no recording yet.
        """
        prediction: dict[str, Any] = self.ask(
            "slipstream.live.work:simulate", path=self._recording(), text=technique,
            cluster=cluster, workers=workers,
        )  # fmt: skip
        return prediction

    def on_device(self, device: str) -> dict[str, Any]:
        """Predict the latest recording on another device, as in `DevicePrediction.to_json`.

        Raises:
            UnknownNameError: the device is unknown.
            SlipstreamError: there is no recording yet.
        """
        recording = self._recording()
        prediction: dict[str, Any] = self._queue.call(
            Kind.MEASURING, "slipstream.live.work:on_device", about=Path(recording).parent,
            path=recording, device=device,
        )  # fmt: skip
        return prediction

    def _recording(self) -> str:
        graph = self._latest.graph
        if graph is None:
            raise SlipstreamError("there is no recording yet", remedy="wait for the first numbers")
        return str(graph)

    def ask(self, function: str, **arguments: Any) -> Any:
        """Call ``module:function(**arguments)`` in the process that has loaded the recording.

        Raises:
            SlipstreamError: raised by the function.
        """
        graph = self._latest.graph
        return self._queue.call(
            Kind.SIMULATING, function, about=graph and graph.parent, **arguments
        )

    def edit(self, function: str, **arguments: Any) -> Any:
        """Call ``module:function(**arguments)``, which edits a file, in the process for edits.

        Raises:
            SlipstreamError: raised by the function.
        """
        return self._queue.call(Kind.EDITING, function, **arguments)

    def expect(self, digest: str, values: Mapping[str, Any]) -> None:
        """Store the prediction `values` for the workload's file with this SHA-256 `digest`.

        They become ``Analysis.expected`` of its analysis, to compare with the measurement.
        """
        self._expected = (digest, dict(values))

    def close(self) -> None:
        """Stop everything that runs, and delete the recordings."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.close()
        if self._watcher is not None:
            self._watcher.join(30)
        if self._server is not None and self._owns_server:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Analyst:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, number: int, again: bool) -> None:
        started = time.monotonic()
        stages = Stages(
            self._settings,
            self._queue,
            self._folder / f"{number}",
            update=lambda **changes: self._update(number, started, **changes),
            add_files=self._add_files,
            latest=lambda: self._latest,
        )

        def record() -> None:
            self._record(number, stages, None if again else self._cache)

        for stage in (record, stages.measure_batches, stages.advise):
            self._queue.submit(Kind.ANALYSING, functools.partial(self._run, number, started, stage))

    def _run(self, number: int, started: float, stage: Callable[[], None]) -> None:
        if self._latest.number == number and self._latest.done:
            return
        try:
            stage()
            self._cache.add(self._texts, self._latest)
        except CancelledError:
            pass
        except SlipstreamError as error:
            self._fail(number, started, Problem.of(error, self.workload))
        except Exception as error:
            # A defect of slipstream must not end the session.
            what = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_LENGTH]
            self._fail(number, started, Problem("", 0, what, ""))

    def _fail(self, number: int, started: float, problem: Problem) -> None:
        # A failure of a cancelled analysis is not reported.
        with contextlib.suppress(CancelledError):
            self._update(number, started, state=FAILED, said="", problem=problem, stale=True)

    def _record(self, number: int, stages: Stages, cache: Cache | None) -> None:
        """Record the step with the current files, unless `cache` has a recording of it."""
        before, expected = self._latest, self._expectation()
        self._texts.read_all()
        cached = cache.of_texts_now() if cache is not None else None
        if cached is not None:
            files, analysis = cached
            self._texts.add(files)
            self._publish(number, replace(analysis, number=number, expected=expected))
            return
        initial = Analysis(
            number,
            self._texts.digest,
            said="starting",
            costs=before.costs,
            stale=True,
            batch_reason="" if self._settings.batches else _NO_BATCHES,
            expected=expected,
        )
        self._publish(number, initial)
        root = project_root(self.workload.path)
        same_code = cache.of_code(self._texts, root) if cache is not None else None
        if same_code is not None:
            stages.reline(*same_code)
        else:
            stages.record(lambda work: cache.of_work(work) if cache is not None else None)
            costs = self._latest.costs
            assert costs is not None
            self._history.append({
                "digest": self._latest.digest, "at": time.time(), "step_ns": costs.step_ns,
                "peak_bytes": costs.peak_bytes, "samples": costs.samples,
            })  # fmt: skip

    def _update(self, number: int, started: float, **changes: Any) -> None:
        latest = self._latest
        if "state" in changes:
            after_s = {**latest.after_s, changes["state"]: time.monotonic() - started}
            changes["after_s"] = after_s
        self._publish(number, replace(latest, number=number, **changes))

    def _publish(self, number: int, analysis: Analysis) -> None:
        with self._changed:
            if number != self._number or self._closed:
                raise CancelledError
            self._latest = analysis
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener(analysis)

    def _expectation(self) -> Mapping[str, Any] | None:
        if self._expected is None:
            return None
        digest, values = self._expected
        try:
            content = self.workload.path.read_bytes()
        except OSError:
            return None
        return values if sha256(content) == digest else None

    def _add_files(self, files: Sequence[str]) -> None:
        self._texts.add(files)
        with self._changed:
            self._latest = replace(self._latest, digest=self._texts.digest)

    def _poll_files(self) -> None:
        seen = self._texts.stamps()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, _POLL_S):
                    return
            now = self._texts.stamps()
            # Files that were added since the last poll have not changed.
            if any(seen.get(path, stamp) != stamp for path, stamp in now.items()):
                self.analyse()
            seen = now
