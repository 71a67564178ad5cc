"""Record what a DataLoader waits for while a step is profiled: files as tasks of the graph.

A loader's fetch of one batch is timed in the process that runs it, the step's own or a worker that
was forked from it. The time in which the fetch is neither on a core nor waiting for one is the time
of its files, if it opened any.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.units import LOADING
from slipstream.engines.storage.traces import AccessTrace
from slipstream.graph import Dependency, Editor, Graph, Kind
from slipstream.measure.arms import RunDelay, delay_between
from slipstream.provenance import Provenance

READING_TASK = "file reads"
"""Name of the tasks that represent waiting for files; scopes name the kind of ``DataLoader``."""
READS = "reads"
"""Key of a graph's metadata with the files that loaders opened, see `with_reads`."""
_CODE = (".py", ".pyc", ".so", ".pth")
_WRITES = os.O_WRONLY | os.O_RDWR
# Epochs of which the second half is that of a cache that has learned.
_EPOCHS = 20
_MAX_FILES = 100_000
_MAX_READS = 50_000


class FetchLog:
    """Appends to a file a line for every fetch, in this process and its forks.

    Each is a JSON array: data set, workers, CPU time and waiting in ns, opened files.
    """

    def __init__(self, path: Path) -> None:
        from torch.utils.data._utils import fetch

        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._local = threading.local()
        self._skipped = tuple({sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/"})
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            kind.fetch = self._timed(kind.fetch)  # type: ignore[method-assign]
        # Cannot be removed, and ends with the child process.
        sys.addaudithook(self._on_event)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from torch.utils.data import get_worker_info

        @functools.wraps(original)
        def timed(fetcher: Any, index: Any) -> Any:
            if getattr(self._local, "files", None) is not None:
                return original(fetcher, index)
            delay = self._delay()
            files: list[str] = []
            self._local.files = files
            queued, wall, cpu = delay.read(), time.perf_counter_ns(), time.thread_time_ns()
            try:
                return original(fetcher, index)
            finally:
                self._local.files = None
                cpu_ns, wall_ns = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
                waited = wall_ns - cpu_ns - (delay_between(queued, delay.read()) or 0)
                worker = get_worker_info()
                workers = 0 if worker is None else worker.num_workers
                row = [id(fetcher.dataset), workers, cpu_ns, max(waited, 0), files]
                with suppress(OSError):  # the disk is full
                    os.write(self._file, (json.dumps(row) + "\n").encode())

        return timed

    def _delay(self) -> RunDelay:
        """Return the reader of this thread's run delay, opened in this process."""
        if getattr(self._local, "pid", 0) != os.getpid():
            self._local.pid, self._local.delay = os.getpid(), RunDelay()
            self._local.delay.open()
        delay: RunDelay = self._local.delay
        return delay

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        files = getattr(self._local, "files", None)
        if event != "open" or files is None:
            return
        path, _, flags = arguments
        if isinstance(path, (str, bytes)) and not flags & _WRITES:
            text = os.path.abspath(os.fsdecode(path))
            if not text.startswith(self._skipped) and not text.endswith(_CODE):
                files.append(text)


@dataclass(frozen=True)
class Fetches:
    """Fetches of the data set that a step reads most, in order of their ends.

    Attributes:
        workers: of the loader; 0 if the step's process fetches.
        cpu_ns, waiting_ns: float64 [fetches].
        files: opened files, in order.
    """

    workers: int
    cpu_ns: NDArray[np.float64]
    waiting_ns: NDArray[np.float64]
    files: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Fetches | None:
        """Return the fetches in a log; None if no file was opened in any."""
        rows = []
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # truncated
                rows.append(json.loads(line))
        opened = Counter(row[0] for row in rows if row[4])
        if not opened:
            return None
        (dataset, _), *_ = opened.most_common(1)
        rows = [row for row in rows if row[0] == dataset]
        cpu, waiting = (np.array([row[at] for row in rows], np.float64) for at in (2, 3))
        files = tuple(name for row in rows for name in row[4])
        return cls(int(rows[-1][1]), cpu, waiting, files)


def with_reads(graph: Graph, log: Path) -> Graph:
    """Return a recorded step with its file reads as tasks; unchanged if loaders opened no file.

    In a loader without workers they precede the rest of the loading. Workers get lanes of their
    own, each with its share of every batch, ahead of the step that waits for it. The metadata
    ``reads`` have the common ``folder``, ``files`` (name and bytes of each), ``order`` (indices of
    `files` as opened), ``listed`` (files in the folder with their suffixes), ``per_batch`` (opened
    files), ``waiting_ns`` of a fetch, and ``workers``.
    """
    fetches = Fetches.read(log)
    prefix = LOADING + ("_MultiProcessing" if fetches and fetches.workers else "_SingleProcess")
    starts = np.array([text.startswith(prefix) for text in graph.strings])
    tasks = graph.tasks
    loads = np.flatnonzero(starts[tasks.scope] & (tasks.call < 0))
    if fetches is None or not loads.size:
        return graph
    # The first fetches also start workers and load code.
    steady = slice(fetches.cpu_ns.size // 4, None)
    waiting = fetches.waiting_ns[steady]
    wait_ns = float(waiting.mean())
    low, high = np.percentile(waiting, [25, 75])
    spread = float((high - low) / 2 / max(wait_ns, 1.0))
    edit = Editor(graph, "")
    if fetches.workers:
        # Of taking a batch, what is not waiting for a worker: the lanes determine that.
        take_ns = float(graph.meta.get("loading_cpu_ns", np.inf)) / loads.size
        taken_ns = np.minimum(tasks.duration_ns[loads], take_ns)
        edit.set_duration(loads, taken_ns, Provenance.MEASURED)
        share = loads.size / fetches.workers
        busy_ns = float(fetches.cpu_ns[steady].mean())
        for worker in range(fetches.workers):
            lane = edit.lane(f"loader {worker}")
            for name, ns, kind in (
                (READING_TASK, wait_ns, Kind.WAIT), ("data loading", busy_ns, Kind.HOST)
            ):  # fmt: skip
                last = edit.insert(
                    int(loads[-1]), name, ns * share, Provenance.MEASURED, spread=spread,
                    kind=kind, lane=lane,
                )  # fmt: skip
            edit.connect(last, int(loads[0]), Dependency.DATA, lag=1)
    else:
        # The end of an epoch, or another loader, waits for no file.
        least_ns = float(waiting.min())
        loads = loads[tasks.duration_ns[loads] >= least_ns / 2]
        rest = np.maximum(tasks.duration_ns[loads] - least_ns, 0.0)
        edit.set_duration(loads, rest, Provenance.MEASURED)
        edit.insert_all(
            loads, READING_TASK, wait_ns, Provenance.MEASURED, before=True, spread=spread,
            kind=Kind.WAIT,
        )  # fmt: skip
    numbers: dict[str, int] = {}
    order = [numbers.setdefault(name, len(numbers)) for name in fetches.files[:_MAX_READS]]
    folder = os.path.commonpath([os.path.dirname(name) for name in numbers])
    reads = {
        "folder": folder, "files": [[name, _size(name)] for name in numbers], "order": order,
        "listed": _count_below(folder, {Path(name).suffix for name in numbers}),
        "per_batch": len(fetches.files) / fetches.cpu_ns.size, "waiting_ns": wait_ns,
        "workers": fetches.workers,
    }  # fmt: skip
    return replace(edit.apply(""), edits=graph.edits, meta={**graph.meta, READS: reads})


def _size(name: str) -> int:
    try:
        return os.stat(name).st_size
    except OSError:
        return 0


def _count_below(folder: str, suffixes: Container[str]) -> int:
    """Count the files below a folder with one of the suffixes, up to `_MAX_FILES`."""
    count = 0
    for _, _, names in os.walk(folder):
        count += sum(Path(name).suffix in suffixes for name in names)
        if count >= _MAX_FILES:
            return _MAX_FILES
    return count


def recorded_trace(reads: Mapping[str, Any]) -> tuple[AccessTrace, bool]:
    """Return the reads of a longer run as a trace, and whether the recorded ones determine it.

    If files are read equally often, the trace has several epochs: in the recorded order if that is
    the same in two epochs, else shuffled. With less than two epochs, as many files of the mean size
    as the folder has are assumed. Otherwise the trace has the recorded reads.

    Args:
        reads: see `with_reads`.
    """
    names, sizes = zip(*reads["files"], strict=True)
    order, count = np.array(reads["order"], np.int64), len(names)
    determined = order.size >= 2 * count
    if np.ptp(np.bincount(order)) > 1 + bool(reads["workers"]):
        return AccessTrace.of([names[n] for n in order], [sizes[n] for n in order]), determined
    if not determined:
        sizes, count = (int(np.mean(sizes)),), max(int(reads["listed"]), count)
    random, first = np.random.default_rng(0), order[:count]
    if determined and np.array_equal(first, order[count : 2 * count]):
        epochs = [first] * _EPOCHS
    else:
        epochs = [random.permutation(count) for _ in range(_EPOCHS)]
    objects = np.concatenate(epochs).astype(np.int32)
    return AccessTrace.checked(objects, np.resize(sizes, count)[objects]), determined
