"""Read LoadGen's logs: the detail log and the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError

DETAIL, SUMMARY, ACCURACY = (
    "mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json",
)  # fmt: skip
_MARK = ":::MLLOG "
_SHARES = ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90")


class LogError(SlipstreamError):
    """A log is missing, truncated, or not LoadGen's."""


@dataclass(frozen=True)
class DetailLog:
    """A detail log.

    Attributes:
        values: last logged value by key.
        errors, warnings: lines marked as errors or warnings, ``key: value``.
    """

    values: Mapping[str, Any]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`."""
        return self.values.get(key, default)

    @property
    def valid(self) -> bool:
        """Whether LoadGen calls the run valid and logged no errors."""
        return self.get("result_validity") == "VALID" and not self.errors

    def latencies_ns(self) -> dict[str, float]:
        """Return latencies of queries by name: ``p50`` to ``p99.9``, ``mean``, ``min``, ``max``."""
        per_query = "_per_query" if "result_mean_query_latency_ns" in self.values else ""
        query = "_query" if per_query else ""
        values = {
            f"p{float(share):g}": self.get(f"result_{share}_percentile{per_query}_latency_ns")
            for share in _SHARES
        }
        for name in ("mean", "min", "max"):
            values[name] = self.get(f"result_{name}{query}_latency_ns")
        return {name: float(value) for name, value in values.items() if value is not None}


def read_detail(path: Path) -> DetailLog:
    """Read a run's detail log.

    Raises:
        LogError: the log cannot be read, or a line is not LoadGen's.
    """
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LogError(f"the log cannot be read: {error.strerror}", where=str(path)) from error
    values: dict[str, Any] = {}
    errors, warnings = [], []
    for number, line in enumerate(lines, 1):
        _, mark, text = line.partition(_MARK)
        try:
            entry = json.loads(text)
            key, value, about = entry["key"], entry["value"], entry["metadata"]
            marked = (about["is_error"], about["is_warning"])
        except (ValueError, KeyError, TypeError) as error:
            raise LogError("this line is not LoadGen's", where=f"{path}:{number}") from error
        if not mark:
            raise LogError("this line is not LoadGen's", where=f"{path}:{number}")
        values[key] = value
        if marked[0]:
            errors.append(f"{key}: {value}")
        elif marked[1]:
            warnings.append(f"{key}: {value}")
    if not values:
        raise LogError("the log is empty: the run did not end", where=str(path))
    return DetailLog(values, tuple(errors), tuple(warnings))


def read_answers(path: Path) -> list[tuple[int, bytes]]:
    """Return (sample index, answer bytes) of every logged answer, in LoadGen's order.

    Raises:
        LogError: the log cannot be read or parsed.
    """
    try:
        entries = json.loads(path.read_text("utf-8") or "[]")
        return [(int(entry["qsl_idx"]), bytes.fromhex(entry["data"])) for entry in entries]
    except OSError as error:
        raise LogError(f"the log cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise LogError("the file is not a log of answers", where=str(path)) from error


def as_class(answer: bytes) -> int | None:
    """Decode an answer of 4 or 8 bytes as a class; None for other sizes."""
    if len(answer) not in (4, 8):
        return None
    return int(np.frombuffer(answer, np.int32 if len(answer) == 4 else np.int64)[0])
