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
