"""Honest, failing and cheating systems under test, in the form of a user's file."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

_calls = 0
_seen: list[int] = []


def samples() -> tuple[np.ndarray, np.ndarray]:
    """32 rows; the class is the row number modulo 4."""
    rows = np.arange(32)
    return rows[:, None].astype(np.float32), rows % 4


def nothing() -> np.ndarray:
    """No samples."""
    return np.zeros((0, 1), np.float32)


def honest(x: np.ndarray) -> np.ndarray:
    """Correct scores of four classes."""
    return np.eye(4)[x[:, 0].astype(int) % 4]


def raises(x: np.ndarray) -> np.ndarray:
    """Fails after a hundred calls."""
    global _calls
    _calls += 1
    if _calls > 100:
        raise ValueError("the hundredth call")
    return honest(x)


def hangs(x: np.ndarray) -> np.ndarray:
    """Hangs after a hundred calls."""
    global _calls
    _calls += 1
    if _calls > 100:
        time.sleep(3600)
    return honest(x)


def too_many(x: np.ndarray) -> np.ndarray:
    """Returns more answers than samples."""
    return honest(np.concatenate([x, x]))


def never(ids: list[int], x: np.ndarray, answer: Any) -> None:
    """Never answers the fiftieth query."""
    global _calls
    _calls += 1
    if _calls != 50:
        answer(ids, honest(x))


def twice(ids: list[int], x: np.ndarray, answer: Any) -> None:
    """Answers the fiftieth query twice."""
    global _calls
    _calls += 1
    answer(ids, honest(x))
    if _calls == 50:
        answer(ids, honest(x))


def later(ids: list[int], x: np.ndarray, answer: Any) -> None:
    """Answers from another thread."""
    threading.Thread(target=lambda: answer(ids, honest(x))).start()


def slow(x: np.ndarray) -> np.ndarray:
    """Sleeps for 5 ms per call."""
    time.sleep(0.005)
    return honest(x)


def timed(x: np.ndarray) -> np.ndarray:
    """Takes 2 ms per sample exactly: sleeps for most of it, then spins."""
    until = time.perf_counter() + 0.002 * len(x)
    time.sleep(max(0.0, until - time.perf_counter() - 0.0004))
    while time.perf_counter() < until:
        pass
    return honest(x)


_cache: dict[bytes, np.ndarray] = {}


def _work(x: np.ndarray) -> np.ndarray:
    """Correct scores after 100 us of CPU time."""
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
    """Caches answers by content."""
    found = []
    for row in x:
        key = row.tobytes()
        if key not in _cache:
            _cache[key] = _work(row[None])
        found.append(_cache[key])
    return np.concatenate(found)


_prepared: dict[bytes, np.ndarray] = {}


def prepared(x: np.ndarray) -> np.ndarray:
    """Precomputes the answers to the whole data set."""
    if not _prepared:
        _prepared.update((row.tobytes(), honest(row[None])) for row in many()[0])
    return np.concatenate(
        [_prepared[key] if (key := row.tobytes()) in _prepared else _work(row[None]) for row in x]
    )


def sorting(x: np.ndarray) -> np.ndarray:
    """Precomputes the answers to the whole data set by a sample's sorted elements."""
    if not _prepared:
        _prepared.update((np.sort(row).tobytes(), honest(row[None])) for row in many()[0])
    found = []
    for row in x:
        key = np.sort(row).tobytes()
        if key not in _prepared:
            _prepared[key] = _work(row[None])
        found.append(_prepared[key])
    return np.concatenate(found)


_shown: set[bytes] = set()


def careless(x: np.ndarray) -> np.ndarray:
    """Answers correctly only when it first sees a sample, as in an accuracy run."""
    answers = working(x)
    for n, row in enumerate(x):
        if row.tobytes() in _shown:
            answers[n] = 0
        _shown.add(row.tobytes())
    return answers


def dropping(x: np.ndarray) -> np.ndarray:
    """Computes two answers per batch and makes up the others."""
    answers = np.eye(4)[np.zeros(len(x), int)]
    answers[:2] = working(x[:2])
    return answers
