"""`Durations`: the cache of micro-benchmarked calls, and the one way to fill it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.child import Child
from slipstream.errors import SlipstreamWarning, StoreError
from slipstream.graph import Call
from slipstream.provenance import Provenance
from slipstream.sqlite import errors_in_words, open_database, transaction

_MIGRATIONS = (
    """
    CREATE TABLE duration (
        machine TEXT NOT NULL, call TEXT NOT NULL, threads INTEGER NOT NULL,
        nanoseconds REAL, spread REAL, error TEXT, created TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
        PRIMARY KEY (machine, call, threads)
    );
    """,
)
# Raised whenever the micro-benchmark measures something else than before: old answers are void.
_METHOD = 5
# Of a call's time by the wall clock; what waited longer for a core is not kept for the next time.
_MOST_WAITED = 0.05
_BATCH = 24
_BATCH_TIMEOUT_S = 300.0
# `Question.key`, and the number of threads.
_Key = tuple[str, int]


@dataclass(frozen=True)
class Answer:
    """How long a call takes.

    Attributes:
        nanoseconds: least CPU time seen on one thread, else least wall time.
        spread: relative half-width of the middle half of the samples; larger by what threads
            waited for a core.
    """

    nanoseconds: float
    spread: float
    provenance: Provenance


@dataclass(frozen=True)
class Question:
    """How long a call takes under other conditions than the step's own.

    Attributes:
        threads: intra-op threads; None for as many as the `Durations` that is asked stands for.
        wall: by the wall clock even on one thread. CPU time of one thread and wall time of
            several are not to be compared: the one leaves out what other programs do, the other
            does not.
        warm: with its operands in the caches, as right after the operator that made them; else as
            far away as in a step that has since done other things.
    """

    call: Call
    threads: int | None = None
    wall: bool = False
    warm: bool = False

    @property
    def key(self) -> str:
        """What an answer is kept under, beside the number of threads."""
        how = " by wall clock" * self.wall + " warm" * self.warm
        return self.call.key + how


class Durations:
    """Durations of calls on this machine with this build of torch, kept between runs.

    `measure` is called before a prediction and may take seconds; `lookup` answers from what is
    known and never measures, so that predictions take milliseconds and run no code.

    Args:
        threads: intra-op threads the calls run with.
        path: the cache; ``~/.cache/slipstream/durations.db`` (``$XDG_CACHE_HOME`` respected).
    """

    def __init__(self, threads: int = 1, path: Path | None = None) -> None:
        self.threads = threads
        self._path = path or cache_folder() / "durations.db"
        self._machine = machine_key()
        self._known: dict[_Key, Answer | None] = {}
        self._unknown: set[_Key] = set()
        self._warned = False

    def lookup(self, call: Call | Question) -> Answer | None:
        """The duration of `call`, or None when it is not known."""
        key = self._key(call)
        if key not in self._known and key not in self._unknown:
            self._load([key])
            # The file is opened once for a call that nobody measured, not at every look.
            self._unknown.add(key)
        return self._known.get(key)

    def measure(
        self, calls: Iterable[Call | Question], say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Micro-benchmark every call that is not known yet, in a child process.

        The calls of one batch are measured in turns, so that their ratios hold even when the
        machine's speed drifts. What cannot be run alone is remembered as such; what had to wait
        for a core serves this object alone, since the machine may be idle the next time.

        Raises:
            ChildError: the benchmarking process died.
        """
        missing = self.missing(calls)
        if not missing:
            return
        most = max(threads for (_, threads), _ in missing)
        with Child("the micro-benchmark", environment=one_pool(most)) as child:
            for begin in range(0, len(missing), _BATCH):
                say(f"measuring operators {begin + 1}-{min(begin + _BATCH, len(missing))} "
                    f"of {len(missing)}")  # fmt: skip
                batch = missing[begin : begin + _BATCH]
                found = child.call(
                    "slipstream.durations.microbenchmark:run",
                    timeout_s=_BATCH_TIMEOUT_S,
                    calls=[one.call.to_json() for _, one in batch],
                    threads=[threads for (_, threads), _ in batch],
                    wall=[one.wall for _, one in batch],
                    warm=[one.warm for _, one in batch],
                )
                self._save(list(zip([key for key, _ in batch], found, strict=True)))

    def missing(self, calls: Iterable[Call | Question]) -> list[tuple[_Key, Question]]:
        """Those of `calls` that `measure` would micro-benchmark now, with their keys."""
        wanted = {self._key(call): _question(call) for call in calls}
        self._load([key for key in wanted if key not in self._known])
        return [(key, one) for key, one in wanted.items() if key not in self._known]

    def _key(self, call: Call | Question) -> _Key:
        one = _question(call)
        return one.key, self.threads if one.threads is None else one.threads

    def _load(self, keys: list[_Key]) -> None:
        # Not Path.exists(), which fails in a folder that may not be looked into.
        if not os.path.exists(self._path):
            return
        with errors_in_words(self._path):
            connection = open_database(self._path, _MIGRATIONS)
            try:
                for key in keys:
                    row = connection.execute(
                        "SELECT nanoseconds, spread FROM duration "
                        "WHERE machine = ? AND call = ? AND threads = ?",
                        (self._machine, _digest(key[0]), key[1]),
                    ).fetchone()
                    if row is not None:
                        self._known[key] = _answer(row[0], row[1])
            finally:
                connection.close()

    def _save(self, rows: list[tuple[_Key, dict[str, Any]]]) -> None:
        with self._without_cache(), errors_in_words(self._path):
            connection = open_database(self._path, _MIGRATIONS)
            try:
                with transaction(connection):
                    for key, found in rows:
                        if found.get("waited", 0.0) > _MOST_WAITED:
                            continue
                        connection.execute(
                            "INSERT OR REPLACE INTO duration "
                            "(machine, call, threads, nanoseconds, spread, error) "
                            "VALUES (?, ?, ?, ?, ?, ?)",
                            (
                                self._machine, _digest(key[0]), key[1], found.get("nanoseconds"),
                                found.get("spread"), found.get("error"),
                            ),
                        )  # fmt: skip
            finally:
                connection.close()
        for key, found in rows:
            self._known[key] = _answer(found.get("nanoseconds"), found.get("spread"))

    @contextlib.contextmanager
    def _without_cache(self) -> Iterator[None]:
        """What cannot be kept for the next time still serves this one."""
        try:
            yield
        except StoreError as error:
            if not self._warned:
                place = "XDG_CACHE_HOME names the folder it goes to"
                warnings.warn(
                    f"timings of operators cannot be kept: {error.what} ({self._path}); {place}",
                    SlipstreamWarning,
                    stacklevel=2,
                )
            self._warned = True


def _question(call: Call | Question) -> Question:
    return call if isinstance(call, Question) else Question(call)


def _answer(nanoseconds: float | None, spread: float | None) -> Answer | None:
    if nanoseconds is None:
        return None
    return Answer(float(nanoseconds), float(spread or 0.0), Provenance.MICROBENCHMARK)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def cache_folder() -> Path:
    """Where this machine's measurements are kept between runs."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "slipstream"
    try:
        return Path.home() / ".cache" / "slipstream"
    except RuntimeError:
        # A user without a home, as in many containers.
        return Path(tempfile.gettempdir()) / f"cache-{os.getuid()}" / "slipstream"


def machine_key() -> str:
    """What must be equal for a micro-benchmark to be reused: processor and library builds."""
    from importlib.metadata import version

    facts = {
        "method": _METHOD,
        "cpu": _cpu_model(),
        "torch": version("torch"),
        "cores": os.cpu_count(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _cpu_model() -> str:
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            wanted = ("model name", "stepping", "flags", "CPU part", "Features")
            seen: dict[str, str] = {}
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in wanted:
                    seen.setdefault(key.strip(), value.strip())
            return json.dumps(seen, sort_keys=True)
    except OSError:
        return platform.processor() or platform.machine()


def one_pool(threads: int) -> dict[str, str]:
    """Environment that keeps OpenMP, BLAS and torch at `threads`; nothing for 0."""
    if not threads:
        return {}
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def usable_cores() -> int:
    """Physical cores this process may use; two threads of one core do not count twice."""
    import psutil

    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:
        # Not every system can tell.
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
