"""Timing of all kernels for a shape on this machine; the winner is stored."""

from __future__ import annotations

import time
import warnings

import torch

from slipstream.errors import SlipstreamWarning, StoreError
from slipstream.native import cpu_features
from slipstream.sqlite import errors_in_words, open_database, transaction
from slipstream.techniques.lowbit.dispatch import (
    MIGRATIONS,
    Key,
    Shape,
    candidates,
    machine,
    shape_key,
    winners,
    winners_path,
)
from slipstream.techniques.lowbit.kernels import matmul, pack_weights


def autotune(shape: Shape, *, budget_s: float = 0.02) -> dict[str, float]:
    """Time every candidate on this machine; layers then use the fastest for this shape.

    Each candidate is timed by CPU time of one thread. The winner is stored with the timings of
    operators, per processor and build.

    Args:
        shape: the shape of the product; `rows` None means 256.
        budget_s: CPU time per candidate in seconds, beyond a first call.

    Returns:
        Seconds per call by scheme, fastest first; empty without the compiled library.
    """
    allowed = cpu_features().levels
    rows = shape.rows or 256
    w = torch.randint(0, 2**shape.weight_bits, (shape.n, shape.k), dtype=torch.uint8)
    a = torch.randint(0, 2**shape.activation_bits, (rows, shape.k), dtype=torch.uint8)
    threads = torch.get_num_threads()
    times_s: dict[str, float] = {}
    torch.set_num_threads(1)
    try:
        for scheme in candidates(shape, allowed):
            packed = pack_weights(
                w, shape.weight_bits, activation_bits=shape.activation_bits, scheme=scheme
            )
            matmul(a, packed)
            best_s, end = float("inf"), time.thread_time() + budget_s
            while time.thread_time() < end or best_s == float("inf"):
                before = time.thread_time_ns()
                matmul(a, packed)
                best_s = min(best_s, (time.thread_time_ns() - before) / 1e9)
            times_s[scheme] = best_s
    finally:
        torch.set_num_threads(threads)
    ordered = dict(sorted(times_s.items(), key=lambda item: item[1]))
    if ordered:
        key, winner = shape_key(shape, allowed), next(iter(ordered))
        winners()[key] = winner
        _store(key, winner)
    return ordered


def _store(key: Key, scheme: str) -> None:
    path = winners_path()
    try:
        with errors_in_words(path):
            connection = open_database(path, MIGRATIONS)
            try:
                with transaction(connection):
                    connection.execute(
                        "INSERT OR REPLACE INTO winner VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (machine(), *key, scheme),
                    )
            finally:
                connection.close()
    except StoreError as error:
        warnings.warn(
            f"the choice of a kernel cannot be stored: {error.what} ({path})",
            SlipstreamWarning,
            stacklevel=3,
        )
