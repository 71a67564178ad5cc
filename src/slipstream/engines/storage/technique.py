"""Read a training job's files through a cache on a fast disk."""

from __future__ import annotations

import builtins
import functools
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.storage.importing import import_trace
from slipstream.engines.storage.reading import READING_TASK, READS, recorded_trace
from slipstream.engines.storage.shard_cache import ShardCache
from slipstream.engines.storage.simulating import capacity_of, parse_capacity, reads, simulate
from slipstream.engines.storage.traces import AccessTrace
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.graph import Editor, Graph, replay
from slipstream.provenance import Provenance
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.units import format_percent
from slipstream.workload import BuiltWorkload, Workload

# Below this share of the step, a cache cannot save enough to be worth one.
_MIN_SHARE = 0.1
# Of the remaining waiting: reads of a recorded run, and of assumed epochs.
_SPREAD, _ASSUMED_SPREAD = 0.1, 0.3
# Assumed time of a file on the fast disk.
_HIT_NS = 100_000.0


@dataclass(frozen=True)
class CachedFiles(TechniqueSettings):
    """Read files below `origin` through a `ShardCache`.

    Attributes:
        trace: recorded by ``slipstream storage record``; by default the reads of the profiled steps
            or, if they are less than two epochs, shuffled epochs over the files in their folder.
        origin: folder of the files.
        folder: on the fast disk.
        capacity: bytes, or a share of the bytes of all files: of `trace`, else below `origin`.
        policy: see `POLICIES`.
    """

    trace: str = ""
    origin: str = ""
    folder: str = ""
    capacity: str = "20%"
    policy: str = "auto"

    name: ClassVar[str] = "shard_cache"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE + 3, clock="wall")
    effect: ClassVar[Quality] = Quality(QualityKind.EXACT, "the same bytes, read from another disk")

    def __post_init__(self) -> None:
        parse_capacity(self.capacity, "shard_cache:capacity")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why waiting for files does not limit the step; None if it does."""
        reading = _reading(graph)
        if not reading.size:
            return "no torch DataLoader of the profiled steps opened files in Python"
        edit = Editor(graph, str(self))
        edit.scale(reading, 0.0, Provenance.SIMULATED)
        share = 1 - replay(edit.apply("")).step_ns / replay(graph).step_ns
        if share < _MIN_SHARE:
            return f"waiting for files makes only {format_percent(max(share, 0.0))} of the step"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Shorten waiting by the simulated share of bytes that hit, in the second half of reads."""
        found: Any = graph.meta[READS]
        trace, determined = recorded_trace(found)
        if self.trace:
            trace, determined = reads(import_trace(self.trace)), True
        half = len(trace) // 2
        hit = simulate(trace, self.policy, self.capacity)[half:]
        sizes = trace.sizes[half:]
        saved = float(sizes[hit].sum() / max(int(sizes.sum()), 1))
        fast = min(_HIT_NS * found["per_batch"] / max(found["waiting_ns"], 1.0), 1.0)
        edit = Editor(graph, str(self))
        edit.scale(
            _reading(graph), 1 - saved * (1 - fast),
            Provenance.SIMULATED if determined else Provenance.ASSUMED,
            spread=_SPREAD if determined else _ASSUMED_SPREAD,
        )  # fmt: skip
        basis = "reads" if determined else "assumed epochs"
        return edit.apply(f"{format_percent(saved)} of the bytes of {basis} are in the cache")

    def apply(self, built: BuiltWorkload) -> None:
        """Do nothing: `prepare` has replaced what the workload opens."""

    def prepare(self) -> None:
        """Open files below `origin` for reading in binary mode through the cache."""
        for setting in ("origin", "folder"):
            if not getattr(self, setting):
                raise InvalidArgumentError(
                    f"shard_cache:{setting}", "is required to apply the technique",
                    remedy="for example shard_cache:origin=/slow/shards,folder=/fast/cache",
                )  # fmt: skip
        origin, size = os.path.realpath(self.origin), self.capacity
        if not os.path.isdir(origin):
            raise InvalidArgumentError("shard_cache:origin", f"{self.origin} is not a folder")
        if f"{os.path.realpath(self.folder)}/".startswith(f"{origin}/"):
            raise InvalidArgumentError("shard_cache:folder", "must not be in the origin's folder")
        if size.endswith("%"):
            sizes = reads(import_trace(self.trace)) if self.trace else _below(origin)
            size = str(capacity_of(sizes, size))
        original = builtins.open

        def fetch(name: str) -> bytes:
            with original(os.path.join(origin, name), "rb") as file:
                content: bytes = file.read()
            return content

        cache = ShardCache(self.folder, size, fetch, policy=self.policy)
        # pathlib opens files through io.open.
        builtins.open = io.open = _cached(original, cache, origin)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the lines to write by hand."""
        capacity = "200GB" if self.capacity.endswith("%") else self.capacity
        return CodeChange(
            "",
            "no edit of your file; by hand:\n"
            f'    cache = ss.storage.ShardCache("{self.folder or "/fast/cache"}", "{capacity}", '
            f'"{self.origin or "/slow/shards"}")\n'
            "    ... cache.open(name) instead of open(path)",
        )


def _reading(graph: Graph) -> NDArray[np.int64]:
    """Return the tasks that wait for files, in the step's process and in workers."""
    names = np.array([text == READING_TASK for text in graph.strings])
    return np.flatnonzero(names[graph.tasks.name])


def _below(folder: str) -> AccessTrace:
    """Return one read of every file below a folder.

    Raises:
        InvalidArgumentError: there is none.
    """
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    if not files:
        raise InvalidArgumentError("shard_cache:origin", f"there are no files below {folder}")
    return AccessTrace.of([*map(str, files)], [path.stat().st_size for path in files])


def _cached(original: Any, cache: ShardCache, origin: str) -> Any:
    """Return `open` that reads files below `origin` through `cache`."""

    @functools.wraps(original)
    def cached_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "rb" and isinstance(file, (str, os.PathLike)):
            path = os.path.realpath(file)
            if path.startswith(origin + os.sep):
                try:
                    return cache.open(str(Path(path).relative_to(origin)))
                except SlipstreamError as error:
                    # As the program expects it, for example if the file does not exist.
                    raise error.__cause__ or error from None
        return original(file, mode, *args, **kwargs)

    return cached_open
