"""The cache of micro-benchmarked calls."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.child import Child
from slipstream.durations import roofline
from slipstream.durations.fitted import fitted
from slipstream.durations.levels import CAPS, Level
from slipstream.durations.work import work
from slipstream.errors import SlipstreamWarning, StoreError
from slipstream.graph import Call, Price
from slipstream.provenance import Provenance
from slipstream.sqlite import errors_in_words, open_database, transaction

# `operator` and `asked` are set for calls as steps make them, for looking up neighbours.
# `workspace` is in bytes, `made` a JSON list of bytes.
_MIGRATIONS = (
    """
    CREATE TABLE duration (
        machine TEXT NOT NULL, call TEXT NOT NULL, threads INTEGER NOT NULL,
        nanoseconds REAL, spread REAL, workspace INTEGER, made TEXT, error TEXT,
        operator TEXT, asked TEXT, created TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
        PRIMARY KEY (machine, call, threads)
    );
    CREATE INDEX of_operator ON duration (machine, operator, threads);
    """,
)
# Increase when the micro-benchmark measures differently or the table changes. Each version has its
# own file, so that an older slipstream on the same machine keeps its timings.
_METHOD = 6
# Maximum share of wall time spent waiting for a core for a timing to be stored.
_MAX_WAITED = 0.05
_BATCH = 24
_BATCH_TIMEOUT_S = 300.0
# Stored columns of a measured call.
_ANSWER = ("nanoseconds", "spread", "workspace", "made")
# `TimingRequest.key`, and the number of threads.
_Key = tuple[str, int]


@dataclass(frozen=True)
class Timing(Price):
    """Duration of a call, from a micro-benchmark.

    Attributes:
        nanoseconds: minimum CPU time on one thread, minimum wall time on several.
        spread: relative half-width of the middle half of the samples, increased by the share of
            time that threads waited for a core.
        workspace: peak bytes of torch's allocator beyond the returned tensors; None if unknown.
        made: bytes of the storage of each returned tensor; None if unknown.
    """

    workspace: int | None = None
    made: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Ratio:
    """Ratio of the durations of two calls.

    Attributes:
        spread: relative half-width, as `Timing.spread`.
    """

    value: float
    spread: float
    provenance: Provenance


@dataclass(frozen=True)
class TimingRequest:
    """A call to time under conditions that differ from the step's.

    Attributes:
        threads: intra-op threads; None for those of the `Durations` object.
        wall: whether to use the wall clock even on one thread. CPU time of one thread cannot be
            compared with wall time of several, which includes interference by other programs.
        warm: whether operands are in the caches, as right after the operator that produced them;
            by default they are as far away as in a step that ran other operators since.
    """

    call: Call
    threads: int | None = None
    wall: bool = False
    warm: bool = False

    @classmethod
    def of(cls, call: Call | TimingRequest) -> TimingRequest:
        """Return `call` as a question under the step's conditions; a question is unchanged."""
        return call if isinstance(call, TimingRequest) else cls(call)

    @property
    def key(self) -> str:
        """Key of the answer in the cache, together with the number of threads."""
        how = " by wall clock" * self.wall + " warm" * self.warm
        return self.call.key + how


class Durations:
    """Durations of calls on this machine with this build of torch, cached between runs.

    `measure` is called before a prediction and may take seconds; `lookup` reads the cache and never
    measures, so that predictions take milliseconds and run no code.

    Args:
        threads: intra-op threads of the calls.
        path: cache file; ``durations-N.db`` in `cache_folder` by default.
        level: newest instruction set that libraries may use; None for their own choice.
    """

    def __init__(
        self, threads: int = 1, path: Path | None = None, level: Level | None = None
    ) -> None:
        self.threads = threads
        self._path = path or cache_folder() / f"durations-{_METHOD}.db"
        self._environment = dict(level.environment) if level is not None else {}
        # A level has its own timings, like another machine.
        self._machine = machine_key() + (f" {level.name}" if level is not None else "")
        self._answers: dict[_Key, Timing | None] = {}
        self._looked_up: set[_Key] = set()
        self._neighbours: dict[str, list[tuple[Call, float]]] = {}
        self._warned = False
        # Set within `measuring`: its children, and the current child with its maximum of threads.
        self._children: contextlib.ExitStack | None = None
        self._current: tuple[Child, int] | None = None

    def lookup(self, call: Call | TimingRequest) -> Timing | None:
        """Return the duration of `call`, or None if it is unknown."""
        key = self._key(call)
        if key not in self._answers:
            self._load([key])
        return self._answers.get(key)

    def ratio(self, old: Call, new: Call) -> Ratio | None:
        """Return the duration of `new` relative to `old`, from the best source that has both.

        These are micro-benchmarks; for a call that cannot run in isolation a curve through the same
        operator at other sizes (`fitted`); else the machine's limits (`roofline`). None if the
        work does not follow from the shapes.
        """
        was, now = self.lookup(old), self.lookup(new)
        if was is not None and now is not None and was.nanoseconds:
            spread = math.hypot(was.spread, now.spread)
            return Ratio(now.nanoseconds / was.nanoseconds, spread, now.provenance)
        before, after = was or self._fitted(old), now or self._fitted(new)
        if before is not None and after is not None and before.nanoseconds:
            spread = math.hypot(before.spread, after.spread)
            return Ratio(after.nanoseconds / before.nanoseconds, spread, Provenance.FITTED)
        return self._of_limits(old, new)

    def _fitted(self, call: Call) -> Price | None:
        if call.name not in self._neighbours:
            self._neighbours[call.name] = self._measured(call.name)
        return fitted(call, self._neighbours[call.name])

    def _of_limits(self, old: Call, new: Call) -> Ratio | None:
        was, now = work(old), work(new)
        if was is None or now is None:
            return None
        limits = self.limits(frozenset({was.dtype, now.dtype}))
        if limits is None:
            return None
        before, after = limits.min_ns(was), limits.min_ns(now)
        if before is None or after is None:
            return None
        return Ratio(after / before, roofline.SPREAD, limits.provenance)

    def limits(self, dtypes: frozenset[str]) -> roofline.Limits | None:
        """Return the machine's limits; None until `roofline.probes` of `dtypes` are measured."""
        return roofline.limits(self._nanoseconds, dtypes)

    def _nanoseconds(self, call: Call) -> float | None:
        answer = self.lookup(call)
        return None if answer is None else answer.nanoseconds

    def _measured(self, operator: str) -> list[tuple[Call, float]]:
        """Return all measured calls of `operator` with their durations in ns."""
        if not os.path.exists(self._path):
            return []
        with self._cache() as cache:
            rows = cache.execute(
                "SELECT asked, nanoseconds FROM duration WHERE machine = ? AND operator = ? "
                "AND threads = ? AND nanoseconds IS NOT NULL",
                (self._machine, operator, self.threads),
            ).fetchall()
            return [
                (Call.from_json(json.loads(call)), float(elapsed_ns)) for call, elapsed_ns in rows
            ]

    @contextlib.contextmanager
    def _cache(self) -> Iterator[sqlite3.Connection]:
        """Open the cache file; raises `StoreError` if it cannot be used."""
        with (
            errors_in_words(self._path),
            contextlib.closing(open_database(self._path, _MIGRATIONS)) as cache,
        ):
            try:
                yield cache
            except (
                ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
            ) as error:  # fmt: skip
                raise StoreError(
                    f"the stored timings are damaged: {error!r}",
                    where=str(self._path),
                    remedy="move the file away; a new one is created at the next run",
                ) from error

    def measure(
        self,
        calls: Iterable[Call | TimingRequest],
        report: Callable[[str], None] = lambda line: None,
        until: float = math.inf,
        *,
        roughly: bool = False,
    ) -> None:
        """Micro-benchmark every call without a cached duration, in a child process.

        The calls of a batch are interleaved, so that their ratios hold while the machine's speed
        drifts. Calls that cannot run in isolation are recorded as such; the machine's limits are
        measured for them, which `ratio` falls back on. Timings that waited for a core are not
        stored, since the machine may be idle at the next run.

        Args:
            calls: the most important ones first, in case there is no time for all.
            until: time of `time.monotonic` after which no batch is started.
            roughly: whether a few repetitions suffice; such timings are not stored.

        Raises:
            ChildError: the benchmarking process died.
        """
        requested = list(calls)
        missing = self.missing(requested)
        if not missing or time.monotonic() >= until:
            return
        max_threads = max(threads for (_, threads), _ in missing)
        with self.measuring():
            for begin in range(0, len(missing), _BATCH):
                if time.monotonic() >= until:
                    return
                batch = missing[begin : begin + _BATCH]
                report(f"measuring operators {begin + 1} to {begin + len(batch)} of {len(missing)}")
                self._benchmark(max_threads, batch, roughly)
            dtypes = self._without_answer(requested)
            if dtypes and (probes := self.missing(roofline.probes(dtypes))):
                report("measuring this machine's limits")
                self._benchmark(self.threads, probes)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Use one child for every `measure` of the block, since importing torch takes seconds."""
        if self._children is not None:
            yield
            return
        with contextlib.ExitStack() as children:
            self._children = children
            try:
                yield
            finally:
                self._children = self._current = None

    def _child(self, threads: int) -> Child:
        """Return the current child, or a new one if it has too few threads."""
        assert self._children is not None
        if self._current is None or self._current[1] < threads:
            environment = one_pool(threads) | self._environment
            child = Child("the micro-benchmark", environment=environment)
            self._current = self._children.enter_context(child), threads
        return self._current[0]

    def _benchmark(
        self, max_threads: int, batch: list[tuple[_Key, TimingRequest]], roughly: bool = False
    ) -> None:
        child = self._child(max_threads)
        # A child that fails is not used again.
        current, self._current = self._current, None
        answers = child.call(
            "slipstream.durations.microbenchmark:run",
            timeout_s=_BATCH_TIMEOUT_S,
            calls=[question.call.to_json() for _, question in batch],
            threads=[threads for (_, threads), _ in batch],
            wall=[question.wall for _, question in batch],
            warm=[question.warm for _, question in batch],
            roughly=roughly,
        )
        self._current = current
        self._save(list(zip(batch, answers, strict=True)), store=not roughly)

    def _without_answer(self, calls: Iterable[Call | TimingRequest]) -> frozenset[str]:
        """Return the dtypes of calls that could not run in isolation and whose work is known."""
        works = (work(call) for call in calls if isinstance(call, Call) and not self.lookup(call))
        return frozenset(call_work.dtype for call_work in works if call_work is not None)

    def missing(self, calls: Iterable[Call | TimingRequest]) -> list[tuple[_Key, TimingRequest]]:
        """Return the calls that `measure` would micro-benchmark now, with their keys."""
        questions = {self._key(call): TimingRequest.of(call) for call in calls}
        self._load([key for key in questions if key not in self._answers])
        return [(key, q) for key, q in questions.items() if key not in self._answers]

    def _key(self, call: Call | TimingRequest) -> _Key:
        question = TimingRequest.of(call)
        return question.key, self.threads if question.threads is None else question.threads

    def _load(self, keys: list[_Key]) -> None:
        # Look up each call in the file only once.
        new = [key for key in keys if key not in self._looked_up]
        self._looked_up.update(new)
        # Not Path.exists(), which raises for a folder without permission.
        if not new or not os.path.exists(self._path):
            return
        with self._cache() as cache:
            for key in new:
                row = cache.execute(
                    "SELECT nanoseconds, spread, workspace, made FROM duration "
                    "WHERE machine = ? AND call = ? AND threads = ?",
                    (self._machine, _digest(key[0]), key[1]),
                ).fetchone()
                if row is not None:
                    self._answers[key] = _answer(
                        row[0], row[1], row[2], json.loads(row[3] or "null")
                    )

    def _save(
        self, rows: list[tuple[tuple[_Key, TimingRequest], dict[str, Any]]], *, store: bool = True
    ) -> None:
        with self._without_cache(), self._cache() as cache, transaction(cache):
            for (key, question), answer in rows if store else ():
                if answer.get("waited", 0.0) > _MAX_WAITED or answer.get("transient"):
                    continue
                plain = question.key == question.call.key
                cache.execute(
                    "INSERT OR REPLACE INTO duration "
                    "(machine, call, threads, nanoseconds, spread, error, operator, asked, "
                    "workspace, made) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        self._machine, _digest(key[0]), key[1], answer.get("nanoseconds"),
                        answer.get("spread"), answer.get("error"),
                        question.call.name if plain else None,
                        json.dumps(question.call.to_json()) if plain else None,
                        answer.get("workspace"), json.dumps(answer.get("made")),
                    ),
                )  # fmt: skip
        self._neighbours.clear()
        for (key, _), answer in rows:
            self._answers[key] = _answer(*(answer.get(name) for name in _ANSWER))

    @contextlib.contextmanager
    def _without_cache(self) -> Iterator[None]:
        """Warn once if timings cannot be stored; they are still used in this process."""
        try:
            yield
        except StoreError as error:
            if not self._warned:
                place = "set XDG_CACHE_HOME to another folder"
                warnings.warn(
                    f"timings of operators cannot be stored: {error.what} ({self._path}); {place}",
                    SlipstreamWarning,
                    stacklevel=2,
                )
            self._warned = True


def _answer(
    nanoseconds: float | None,
    spread: float | None,
    workspace: int | None,
    made: Sequence[int] | None,
) -> Timing | None:
    if nanoseconds is None:
        return None
    returned = None if made is None else tuple(made)
    provenance = Provenance.MICROBENCHMARK
    return Timing(float(nanoseconds), float(spread or 0.0), provenance, workspace, returned)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def cache_folder() -> Path:
    """Return the folder of cached measurements; honours ``$XDG_CACHE_HOME``."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "slipstream"
    try:
        return Path.home() / ".cache" / "slipstream"
    except RuntimeError:
        # Users in many containers have no home.
        return Path(tempfile.gettempdir()) / f"cache-{os.getuid()}" / "slipstream"


def machine_key() -> str:
    """Return a hash of what must be equal for a timing to be reused.

    This is the processor, the builds of libraries, and their limits of instruction sets.
    """
    from importlib.metadata import version

    from slipstream.native import build, cpu_features

    facts = {
        "native": build(),
        "level": cpu_features().best,
        "caps": [os.environ.get(name) for name in CAPS],
        "cpu": _cpu_model(),
        "torch": version("torch"),
        "cores": os.cpu_count(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _cpu_model() -> str:
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            fields = ("model name", "stepping", "flags", "CPU part", "Features")
            values: dict[str, str] = {}
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in fields:
                    values.setdefault(key.strip(), value.strip())
            return json.dumps(values, sort_keys=True)
    except OSError:
        return platform.processor() or platform.machine()


def one_pool(threads: int) -> dict[str, str]:
    """Return variables that limit OpenMP, BLAS and torch to `threads`; none for 0."""
    if not threads:
        return {}
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def usable_cores() -> int:
    """Return the number of physical cores that this process may use."""
    import psutil

    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:
        # Not available on every system.
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
