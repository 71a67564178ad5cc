"""`Durations`: the cache of micro-benchmarked calls, and the one way to fill it."""

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

# `operator` and `asked` are of calls as a step makes them, so that neighbours can be found.
# `workspace` is in bytes, `made` a JSON list of them.
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
# Raised whenever the micro-benchmark measures something else than before, or the table changes:
# each has a file of its own, so that an older slipstream beside this one keeps its answers.
_METHOD = 6
# Of a call's time by the wall clock; what waited longer for a core is not kept for the next time.
_MOST_WAITED = 0.05
_BATCH = 24
_BATCH_TIMEOUT_S = 300.0
# What is kept of a measured call.
_ANSWER = ("nanoseconds", "spread", "workspace", "made")
# `Question.key`, and the number of threads.
_Key = tuple[str, int]


@dataclass(frozen=True)
class Answer(Price):
    """How long a call takes, from a micro-benchmark.

    Attributes:
        nanoseconds: least CPU time seen on one thread, else least wall time.
        spread: relative half-width of the middle half of the samples; larger by what threads
            waited for a core.
        workspace: bytes of torch's allocator that it needs at once beyond what it returns; None
            where that is not known.
        made: bytes of the storage of each tensor that it returns; None where that is not known.
    """

    workspace: int | None = None
    made: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Ratio:
    """How many times as long one call takes as another.

    Attributes:
        spread: relative half-width, of the same meaning as `Answer.spread`.
    """

    value: float
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

    @classmethod
    def of(cls, call: Call | Question) -> Question:
        """`call`, asked about under the step's own conditions; a question as it is."""
        return call if isinstance(call, Question) else cls(call)

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
        path: the cache; ``~/.cache/slipstream/durations-N.db`` (``$XDG_CACHE_HOME`` respected).
        level: the newest instruction set that libraries may use; None for what they use here.
    """

    def __init__(
        self, threads: int = 1, path: Path | None = None, level: Level | None = None
    ) -> None:
        self.threads = threads
        self._path = path or cache_folder() / f"durations-{_METHOD}.db"
        self._environment = dict(level.environment) if level is not None else {}
        # As another machine, which it is to whoever asks how long a call takes.
        self._machine = machine_key() + (f" {level.name}" if level is not None else "")
        self._known: dict[_Key, Answer | None] = {}
        self._looked_up: set[_Key] = set()
        self._neighbours: dict[str, list[tuple[Call, float]]] = {}
        self._warned = False
        # While `measuring` lasts; and the child that serves, with the threads that it can have.
        self._children: contextlib.ExitStack | None = None
        self._kept: tuple[Child, int] | None = None

    def lookup(self, call: Call | Question) -> Answer | None:
        """The duration of `call`, or None when it is not known."""
        key = self._key(call)
        if key not in self._known:
            self._load([key])
        return self._known.get(key)

    def ratio(self, old: Call, new: Call) -> Ratio | None:
        """How many times as long `new` takes as `old`, from the best source that knows both.

        Micro-benchmarks first; where a call cannot be run alone, a curve through the same operator
        at other sizes (`fitted`); else the machine's limits (`roofline`). None where shapes do not
        tell the work.
        """
        was, now = self.lookup(old), self.lookup(new)
        if was is not None and now is not None and was.nanoseconds:
            spread = math.hypot(was.spread, now.spread)
            return Ratio(now.nanoseconds / was.nanoseconds, spread, now.provenance)
        one, other = was or self._fitted(old), now or self._fitted(new)
        if one is not None and other is not None and one.nanoseconds:
            spread = math.hypot(one.spread, other.spread)
            return Ratio(other.nanoseconds / one.nanoseconds, spread, Provenance.FITTED)
        return self._of_limits(old, new)

    def _fitted(self, call: Call) -> Price | None:
        if call.name not in self._neighbours:
            self._neighbours[call.name] = self._measured(call.name)
        return fitted(call, self._neighbours[call.name])

    def _of_limits(self, old: Call, new: Call) -> Ratio | None:
        was, now = work(old), work(new)
        if was is None or now is None:
            return None
        known = self.limits(frozenset({was.dtype, now.dtype}))
        if known is None:
            return None
        before, after = known.least_ns(was), known.least_ns(now)
        if before is None or after is None:
            return None
        return Ratio(after / before, roofline.SPREAD, known.provenance)

    def limits(self, dtypes: frozenset[str]) -> roofline.Limits | None:
        """The machine's limits; None until `roofline.probes` of `dtypes` are measured."""
        return roofline.limits(self._nanoseconds, dtypes)

    def _nanoseconds(self, call: Call) -> float | None:
        answer = self.lookup(call)
        return None if answer is None else answer.nanoseconds

    def _measured(self, operator: str) -> list[tuple[Call, float]]:
        """Every call of `operator` measured here, with its duration in ns."""
        if not os.path.exists(self._path):
            return []
        with self._cache() as cache:
            rows = cache.execute(
                "SELECT asked, nanoseconds FROM duration WHERE machine = ? AND operator = ? "
                "AND threads = ? AND nanoseconds IS NOT NULL",
                (self._machine, operator, self.threads),
            ).fetchall()
            return [(Call.from_json(json.loads(asked)), float(took)) for asked, took in rows]

    @contextlib.contextmanager
    def _cache(self) -> Iterator[sqlite3.Connection]:
        """What is kept between runs, closed afterwards; a `StoreError` where it cannot be used."""
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
                    f"the timings kept there are damaged: {error!r}",
                    where=str(self._path),
                    remedy="move the file away; a new one is made at the next run",
                ) from error

    def measure(
        self,
        calls: Iterable[Call | Question],
        report: Callable[[str], None] = lambda line: None,
        until: float = math.inf,
        *,
        roughly: bool = False,
    ) -> None:
        """Micro-benchmark every call that is not known yet, in a child process.

        The calls of one batch are measured in turns, so that their ratios hold even when the
        machine's speed drifts. What cannot be run alone is remembered as such; what had to wait
        for a core serves this object alone, since the machine may be idle the next time. Where
        there was such a call, the machine's limits are measured too, which `ratio` falls back on.

        Args:
            calls: those first that matter most, where there is no time for all.
            until: of `time.monotonic`, when no further batch is begun.
            roughly: whether a few repetitions will do; what is measured so serves this object
                alone.

        Raises:
            ChildError: the benchmarking process died.
        """
        asked = list(calls)
        missing = self.missing(asked)
        if not missing or time.monotonic() >= until:
            return
        most = max(threads for (_, threads), _ in missing)
        with self.measuring():
            for begin in range(0, len(missing), _BATCH):
                if time.monotonic() >= until:
                    return
                batch = missing[begin : begin + _BATCH]
                report(f"measuring operators {begin + 1} to {begin + len(batch)} of {len(missing)}")
                self._benchmark(most, batch, roughly)
            dtypes = self._without_answer(asked)
            if dtypes and (probes := self.missing(roofline.probes(dtypes))):
                report("measuring this machine's limits")
                self._benchmark(self.threads, probes)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Within it one child serves every `measure`: each takes seconds to import torch."""
        if self._children is not None:
            yield
            return
        with contextlib.ExitStack() as children:
            self._children = children
            try:
                yield
            finally:
                self._children = self._kept = None

    def _child(self, threads: int) -> Child:
        """The one that serves while `measuring` lasts; another where it has too few threads."""
        assert self._children is not None
        if self._kept is None or self._kept[1] < threads:
            environment = one_pool(threads) | self._environment
            child = Child("the micro-benchmark", environment=environment)
            self._kept = self._children.enter_context(child), threads
        return self._kept[0]

    def _benchmark(
        self, most: int, batch: list[tuple[_Key, Question]], roughly: bool = False
    ) -> None:
        child = self._child(most)
        # One that fails serves no more.
        kept, self._kept = self._kept, None
        answers = child.call(
            "slipstream.durations.microbenchmark:run",
            timeout_s=_BATCH_TIMEOUT_S,
            calls=[one.call.to_json() for _, one in batch],
            threads=[threads for (_, threads), _ in batch],
            wall=[one.wall for _, one in batch],
            warm=[one.warm for _, one in batch],
            roughly=roughly,
        )
        self._kept = kept
        self._save(list(zip(batch, answers, strict=True)), keep=not roughly)

    def _without_answer(self, asked: Iterable[Call | Question]) -> frozenset[str]:
        """The dtypes of calls that could not be run alone, and whose work is known."""
        alone = (work(one) for one in asked if isinstance(one, Call) and self.lookup(one) is None)
        return frozenset(one.dtype for one in alone if one is not None)

    def missing(self, calls: Iterable[Call | Question]) -> list[tuple[_Key, Question]]:
        """Those of `calls` that `measure` would micro-benchmark now, with their keys."""
        wanted = {self._key(call): Question.of(call) for call in calls}
        self._load([key for key in wanted if key not in self._known])
        return [(key, one) for key, one in wanted.items() if key not in self._known]

    def _key(self, call: Call | Question) -> _Key:
        one = Question.of(call)
        return one.key, self.threads if one.threads is None else one.threads

    def _load(self, keys: list[_Key]) -> None:
        # The file is opened once for a call that nobody measured, not at every look.
        left = [key for key in keys if key not in self._looked_up]
        self._looked_up.update(left)
        # Not Path.exists(), which fails in a folder that may not be looked into.
        if not left or not os.path.exists(self._path):
            return
        with self._cache() as cache:
            for key in left:
                row = cache.execute(
                    "SELECT nanoseconds, spread, workspace, made FROM duration "
                    "WHERE machine = ? AND call = ? AND threads = ?",
                    (self._machine, _digest(key[0]), key[1]),
                ).fetchone()
                if row is not None:
                    self._known[key] = _answer(row[0], row[1], row[2], json.loads(row[3] or "null"))

    def _save(
        self, rows: list[tuple[tuple[_Key, Question], dict[str, Any]]], *, keep: bool = True
    ) -> None:
        with self._without_cache(), self._cache() as cache, transaction(cache):
            for (key, one), answer in rows if keep else ():
                if answer.get("waited", 0.0) > _MOST_WAITED:
                    continue
                plain = one.key == one.call.key
                cache.execute(
                    "INSERT OR REPLACE INTO duration "
                    "(machine, call, threads, nanoseconds, spread, error, operator, asked, "
                    "workspace, made) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        self._machine, _digest(key[0]), key[1], answer.get("nanoseconds"),
                        answer.get("spread"), answer.get("error"), one.call.name if plain else None,
                        json.dumps(one.call.to_json()) if plain else None,
                        answer.get("workspace"), json.dumps(answer.get("made")),
                    ),
                )  # fmt: skip
        self._neighbours.clear()
        for (key, _), answer in rows:
            self._known[key] = _answer(*(answer.get(name) for name in _ANSWER))

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


def _answer(
    nanoseconds: float | None,
    spread: float | None,
    workspace: int | None,
    made: Sequence[int] | None,
) -> Answer | None:
    if nanoseconds is None:
        return None
    took, unsure = float(nanoseconds), float(spread or 0.0)
    returned = None if made is None else tuple(made)
    return Answer(took, unsure, Provenance.MICROBENCHMARK, workspace, returned)


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
    """What must be equal for a micro-benchmark to be reused.

    The processor, the builds of libraries, and the instruction sets that these are held to.
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
