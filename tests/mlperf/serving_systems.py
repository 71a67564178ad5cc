"""Systems under test, good and bad, as a user's file would hold them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

_calls = 0
_seen: list[int] = []


def samples() -> tuple[np.ndarray, np.ndarray]:
    """32 rows whose class is their number modulo 4."""
    rows = np.arange(32)
    return rows[:, None].astype(np.float32), rows % 4


def nothing() -> np.ndarray:
    """No samples at all."""
    return np.zeros((0, 1), np.float32)


def honest(x: np.ndarray) -> np.ndarray:
    """Scores of four classes: right for every row."""
    return np.eye(4)[x[:, 0].astype(int) % 4]


def raises(x: np.ndarray) -> np.ndarray:
    """Fails at the hundredth call or so."""
    global _calls
    _calls += 1
    if _calls > 100:
        raise ValueError("the hundredth call")
    return honest(x)


def hangs(x: np.ndarray) -> np.ndarray:
    """Never comes back from a late call."""
    global _calls
    _calls += 1
    if _calls > 100:
        time.sleep(3600)
    return honest(x)


def too_many(x: np.ndarray) -> np.ndarray:
    """Answers more samples than it was given."""
    return honest(np.concatenate([x, x]))


def never(ids: list[int], x: np.ndarray, answer: Any) -> None:
    """A queue of its own that loses the fiftieth query."""
    global _calls
    _calls += 1
    if _calls != 50:
        answer(ids, honest(x))


def twice(ids: list[int], x: np.ndarray, answer: Any) -> None:
    """A queue of its own that answers the fiftieth query twice."""
    global _calls
    _calls += 1
    answer(ids, honest(x))
    if _calls == 50:
        answer(ids, honest(x))


def later(ids: list[int], x: np.ndarray, answer: Any) -> None:
    """A queue of its own that answers from another thread."""
    threading.Thread(target=lambda: answer(ids, honest(x))).start()


def slow(x: np.ndarray) -> np.ndarray:
    """A call that takes five milliseconds, and leaves the processor alone meanwhile."""
    time.sleep(0.005)
    return honest(x)


def timed(x: np.ndarray) -> np.ndarray:
    """Two milliseconds a sample to the microsecond: asleep for most of it, then awake."""
    until = time.perf_counter() + 0.002 * len(x)
    time.sleep(max(0.0, until - time.perf_counter() - 0.0004))
    while time.perf_counter() < until:
        pass
    return honest(x)


_cache: dict[bytes, np.ndarray] = {}


def _work(x: np.ndarray) -> np.ndarray:
    """Scores that take a while: a hundred microseconds of the processor."""
    until = time.thread_time() + 1e-4
    while time.thread_time() < until:
        pass
    return honest(x)


def many() -> tuple[np.ndarray, np.ndarray]:
    """600 rows of 8 numbers; the class is the first number modulo 4."""
    rows = np.arange(600)
    x = np.stack([(rows * 7 + n) % 1000 for n in range(8)], 1).astype(np.float32)
    return x, (x[:, 0] % 4).astype(np.int64)


def working(x: np.ndarray) -> np.ndarray:
    """Computes every answer."""
    return np.concatenate([_work(row[None]) for row in x])


def caching(x: np.ndarray) -> np.ndarray:
    """Remembers answers by content."""
    found = []
    for row in x:
        key = row.tobytes()
        if key not in _cache:
            _cache[key] = _work(row[None])
        found.append(_cache[key])
    return np.concatenate(found)


_known: dict[bytes, np.ndarray] = {}


def prepared(x: np.ndarray) -> np.ndarray:
    """Knows the answers to the whole data set before the first query."""
    if not _known:
        _known.update((row.tobytes(), honest(row[None])) for row in many()[0])
    return np.concatenate(
        [_known[one] if (one := row.tobytes()) in _known else _work(row[None]) for row in x]
    )


def sorting(x: np.ndarray) -> np.ndarray:
    """Knows the answers to the whole data set, and finds them by a sample's sorted elements."""
    if not _known:
        _known.update((np.sort(row).tobytes(), honest(row[None])) for row in many()[0])
    found = []
    for row in x:
        key = np.sort(row).tobytes()
        if key not in _known:
            _known[key] = _work(row[None])
        found.append(_known[key])
    return np.concatenate(found)


_shown: set[bytes] = set()


def careless(x: np.ndarray) -> np.ndarray:
    """Right the first time it sees a sample, as in an accuracy run, and not when it comes again."""
    answers = working(x)
    for n, row in enumerate(x):
        if row.tobytes() in _shown:
            answers[n] = 0
        _shown.add(row.tobytes())
    return answers


def dropping(x: np.ndarray) -> np.ndarray:
    """Answers two of a batch, and says anything to the others."""
    answers = np.eye(4)[np.zeros(len(x), int)]
    answers[:2] = working(x[:2])
    return answers
