"""Read a training job's files through a cache on a fast disk."""

from __future__ import annotations

import builtins
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.units import LOADING
from slipstream.engines.storage.importing import import_trace
from slipstream.engines.storage.shard_cache import ShardCache
from slipstream.engines.storage.simulating import capacity_of, parse_capacity, reads, simulate
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.graph import Editor, Graph
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

_SINGLE = LOADING + "_SingleProcess"
# Below this share of the step, a cache cannot save enough to be worth a recording.
_MIN_SHARE = 0.1
# How much of loading is waiting for files is not measured, see `CachedFiles.waiting`.
_SPREAD = 0.3


@dataclass(frozen=True)
class CachedFiles(TechniqueSettings):
    """Read files below `origin` through a `ShardCache`.

    Attributes:
        trace: recorded by ``slipstream storage record``; required to predict.
        origin: folder of the files.
        folder: on the fast disk.
        capacity: bytes, or a share of the bytes of all files of the trace.
        policy: see `POLICIES`.
        waiting: share of the loading time in which the step waits for files.
    """

    trace: str = ""
    origin: str = ""
    folder: str = ""
    capacity: str = "20%"
    policy: str = "auto"
    waiting: float = 1.0

    name: ClassVar[str] = "shard_cache"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE + 3, clock="wall")
    effect: ClassVar[Quality] = Quality(QualityKind.EXACT, "the same bytes, read from another disk")

    def __post_init__(self) -> None:
        if not 0 < self.waiting <= 1:
            raise InvalidArgumentError("shard_cache:waiting", f"{self.waiting} is not in (0, 1]")
        parse_capacity(self.capacity, "shard_cache:capacity")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why loading does not limit the step, or what is missing to predict a cache."""
        loading = _loading(graph)
        if not loading.size:
            return "the step does not load batches from a torch DataLoader in its own process"
        tasks = graph.tasks
        share = tasks.duration_ns[loading].sum() / (tasks.duration_ns + tasks.gap_ns).sum()
        if share < _MIN_SHARE:
            return f"loading takes only {format_percent(float(share))} of the step"
        if not self.trace:
            return (
                f"loading takes {format_percent(float(share))} of the step, but its files are "
                "unknown: record them with slipstream storage record -o run.npz -- python "
                "train.py, then pass shard_cache:run.npz"
            )
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Shorten loading by the simulated share of bytes that hit, in the second half of reads."""
        edit = Editor(graph, str(self))
        trace = reads(import_trace(self.trace))
        half = len(trace) // 2
        hit = simulate(trace, self.policy, self.capacity)[half:]
        sizes = trace.sizes[half:]
        saved = float(sizes[hit].sum() / max(int(sizes.sum()), 1))
        remaining = 1 - self.waiting * saved
        edit.scale(_loading(graph), remaining, Provenance.SIMULATED, spread=_SPREAD)
        return edit.apply(f"{format_percent(saved)} of the bytes are read from the cache")

    def apply(self, built: BuiltWorkload) -> None:
        """Do nothing: `prepare` has replaced what the workload opens."""

    def prepare(self) -> None:
        """Open files below `origin` for reading in binary mode through the cache."""
        for setting in ("origin", "folder"):
            if not getattr(self, setting):
                raise InvalidArgumentError(
                    f"shard_cache:{setting}", "is required to apply the technique",
                    remedy="shard_cache:run.npz,origin=/slow/shards,folder=/fast/cache",
                )  # fmt: skip
        size: int | str = self.capacity
        if self.capacity.endswith("%"):
            size = capacity_of(reads(import_trace(self.trace)), self.capacity)
        cache = ShardCache(self.folder, size, self.origin, policy=self.policy)
        builtins.open = _cached(builtins.open, cache, os.path.realpath(self.origin))

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


def _loading(graph: Graph) -> NDArray[np.int64]:
    inside = np.array([text.startswith(_SINGLE) for text in graph.strings])
    return np.flatnonzero(inside[graph.tasks.scope])


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
