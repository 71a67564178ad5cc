"""Prove a prediction: the same reads from a throttled origin, with real files on a real disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.arguments import as_integer
from slipstream.engines.storage.shard_cache import ShardCache, throttled
from slipstream.engines.storage.simulating import StorageOrigin, capacity_of, reads, simulate
from slipstream.engines.storage.traces import AccessTrace
from slipstream.errors import InvalidArgumentError
from slipstream.files import temporary_folder
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, format_percent

_MAX_ORIGIN_BYTES = 4 << 30


@dataclass(frozen=True)
class ReplayOutcome:
    """One policy: what was predicted and measured.

    Attributes:
        predicted_ns, measured_ns: waiting for the origin, of all reads together.
        elapsed_ns: wall time of the replay, with the reads that hit.
    """

    policy: str
    predicted_hit_rate: float
    measured_hit_rate: float
    predicted_ns: float
    measured_ns: float
    elapsed_ns: float


@dataclass(frozen=True)
class ReplayProof:
    """Outcomes by policy of the same reads, with the cache's capacity."""

    outcomes: tuple[ReplayOutcome, ...]
    reads: int
    capacity_bytes: int

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields for ``--json``."""
        return vars(self)

    def table(self) -> Table:
        """Return predicted next to measured values; times are relative to the first policy's."""
        fields: tuple[Field[ReplayOutcome], ...] = (
            Field.of("policy", lambda row: row.policy),
            Field.of("hits predicted", lambda row: format_percent(row.predicted_hit_rate)),
            Field.of("measured", lambda row: format_percent(row.measured_hit_rate)),
            Field.of("stall predicted", lambda row: format_duration(row.predicted_ns)),
            Field.of("measured", lambda row: format_duration(row.measured_ns)),
            Field.of("elapsed", lambda row: format_duration(row.elapsed_ns)),
            Field.of("over the first", lambda row: (
                f"{row.elapsed_ns / self.outcomes[0].elapsed_ns:.2f}x"
            )),
        )  # fmt: skip
        title = f"{self.reads:,} reads through a cache of {format_bytes(self.capacity_bytes)}"
        return Table.of(self.outcomes, fields, title)


def prove_cache(
    trace: AccessTrace,
    capacity: int | str = "20%",
    policies: Sequence[str] = ("lru", "auto"),
    origin: StorageOrigin | None = None,
    *,
    max_reads: int = 2000,
    progress: Callable[[str], None] = lambda line: None,
) -> ReplayProof:
    """Replay the first reads of a trace through a `ShardCache` for each policy.

    Files of the recorded sizes are written to a temporary folder, and read with the latency and
    bandwidth of `origin`.

    Raises:
        InvalidArgumentError: the files would take more than 4 GiB, a policy is belady, or
            `max_reads` is not positive.
    """
    origin = origin or StorageOrigin()
    trace = reads(trace).first(as_integer("max_reads", max_reads))
    sizes = trace.object_bytes
    if sizes.sum() > _MAX_ORIGIN_BYTES:
        raise InvalidArgumentError(
            "trace", f"its files take {format_bytes(int(sizes.sum()))}, more than 4 GiB",
            remedy="replay fewer reads: --reads",
        )  # fmt: skip
    size = capacity_of(trace, capacity)
    names = trace.names or tuple(map(str, range(sizes.size)))
    requests = [
        (names[number], dict(trace.context_texts[context]))
        for number, context in zip(trace.objects, trace.contexts, strict=True)
    ]
    outcomes = []
    with temporary_folder("storage") as folder:
        path_of = {names[number]: folder / str(number) for number in set(trace.objects.tolist())}
        for path in path_of.values():
            path.write_bytes(os.urandom(int(sizes[int(path.name)])))
        fetch = throttled(
            lambda name: path_of[name].read_bytes(), origin.latency_ns / 1e9, origin.bytes_per_s
        )
        # All caches first, so that an unknown policy is refused before anything is replayed.
        caches = {
            policy: ShardCache(folder / f"cache-{policy}", size, fetch, policy=policy)
            for policy in policies
        }
        for policy, cache in caches.items():
            hit = simulate(trace, policy, size)
            progress(f"{policy}: {len(trace):,} reads")
            start_ns = time.perf_counter_ns()
            for name, context in requests:
                cache.read(name, context)
            elapsed_ns = time.perf_counter_ns() - start_ns
            outcomes.append(ReplayOutcome(
                policy, float(hit.mean()), cache.counts.hit_rate,
                float(origin.read_ns(trace.sizes[~hit]).sum()), cache.counts.origin_ns, elapsed_ns,
            ))  # fmt: skip
    return ReplayProof(tuple(outcomes), len(trace), size)
