"""Simulate caches over a recorded trace: hit rates, waiting time and cost by policy and size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.arguments import as_integer
from slipstream.engines.storage.policies import (
    CachePolicy,
    Float64s,
    Int32s,
    Int64s,
    next_requests,
)
from slipstream.engines.storage.tokens import Context
from slipstream.engines.storage.traces import OPS, AccessTrace
from slipstream.errors import InvalidArgumentError
from slipstream.provenance import Provenance
from slipstream.tables import Column, Field, Table, sparkline
from slipstream.units import format_bytes, format_duration, format_percent, parse_bytes

DEFAULT_POLICIES = ("lru", "s3fifo", "lirs", "wtinylfu", "learned", "auto", "belady")
_CURVE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
# Of a group of objects that is read in epochs, this share has the usual number of requests.
_EPOCH_SHARE = 0.8
_BLOCKS = 20
_MIN_BITS = 0.01


@dataclass(frozen=True)
class StorageOrigin:
    """The storage that misses are read from.

    Attributes:
        latency_ns: of one read.
        bytes_per_s: of one read, after the latency.
        price_per_gb: of 10^9 bytes read, in any currency.

    Raises:
        InvalidArgumentError: a value is negative, or the bandwidth is 0.
    """

    latency_ns: float = 20e6
    bytes_per_s: float = 50e6
    price_per_gb: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency_ns >= 0 and self.bytes_per_s > 0 and self.price_per_gb >= 0):
            raise InvalidArgumentError("origin", f"{self} has a negative value, or no bandwidth")

    def read_ns(self, sizes: Int64s) -> Float64s:
        """Return the time of a read of each size [N], float64 [N]."""
        return np.asarray(self.latency_ns + sizes * (1e9 / self.bytes_per_s), np.float64)


@dataclass(frozen=True)
class CacheOutcome:
    """One policy at one size.

    Attributes:
        hit_rate, byte_hit_rate: of requests, and of their bytes.
        origin_bytes: read from the origin.
        stall_ns: time of these reads, one after the other.
        stall_per_epoch_ns: by epoch of the largest group of objects read in epochs, else None.
        cost: of the bytes from the origin.
    """

    policy: str
    capacity_bytes: int
    hit_rate: float
    byte_hit_rate: float
    origin_bytes: int
    stall_ns: float
    stall_per_epoch_ns: float | None
    cost: float
    provenance: Provenance = Provenance.SIMULATED


@dataclass(frozen=True)
class CachePrediction:
    """Outcomes by policy, and whether the text of the contexts improves the learned row.

    Attributes:
        text_gain: hits that contexts add to the learned policy, as a share of requests; None if
            the trace has no contexts.
        text_matters: whether the gain is significant (paired, by blocks of requests, p < 0.05).
    """

    outcomes: tuple[CacheOutcome, ...]
    requests: int
    footprint_bytes: int
    text_gain: float | None
    text_matters: bool | None

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields for ``--json``."""
        return vars(self)

    def table(self) -> Table:
        """Return the outcomes, best hit rate first; belady last, as a bound."""
        fields: tuple[Field[CacheOutcome], ...] = (
            Field.of("policy", lambda row: row.policy),
            Field.of("hits", lambda row: format_percent(row.hit_rate)),
            Field.of("bytes that hit", lambda row: format_percent(row.byte_hit_rate)),
            Field.of("from the origin", lambda row: format_bytes(row.origin_bytes)),
            Field.of("stall", lambda row: format_duration(row.stall_ns)),
            Field.of("per epoch", lambda row: (
                None if row.stall_per_epoch_ns is None else format_duration(row.stall_per_epoch_ns)
            )),
            Field.of("cost", lambda row: f"{row.cost:.2f}", optional=True),
        )  # fmt: skip
        size = self.outcomes[0].capacity_bytes if self.outcomes else 0
        rows = sorted(self.outcomes, key=lambda row: (row.policy == "belady", -row.hit_rate))
        notes = [
            f"simulated: {self.requests:,} requests to {format_bytes(self.footprint_bytes)}; "
            "belady knows the future, and bounds the policies that admit every object"
        ]
        if self.text_gain is not None:
            effect = format_percent(self.text_gain, signed=True)
            notes.append(
                f"the text of the contexts changes the hits of learned by {effect} of requests"
                if self.text_matters
                else f"the text of the contexts does not matter ({effect} of requests, p > 0.05)"
            )
        return Table.of(rows, fields, f"cache of {format_bytes(size)}", notes)


def simulate(
    trace: AccessTrace,
    policy: str = "auto",
    capacity: int | str = "10%",
    *,
    by_bytes: bool = False,
    classes: Int32s | None = None,
) -> npt.NDArray[np.bool_]:
    """Return which requests of a trace would hit, bool [N].

    Args:
        policy: one of `POLICIES`.
        capacity: bytes, such as ``200GB``, or a share of the bytes of all objects.
        by_bytes: see `CachePolicy`.
        classes: classes of context from `AccessTrace.classes`, to determine them only once.
    """
    engine = CachePolicy(policy, capacity_of(trace, capacity), by_bytes=by_bytes)
    contexts = trace.classes()[0] if classes is None and policy in ("learned", "auto") else classes
    following = next_requests(trace.objects) if policy == "belady" else None
    return engine.simulate(trace.objects, trace.sizes, contexts, following)


def parse_capacity(capacity: int | str, argument: str = "capacity") -> int | float:
    """Return a capacity: an int in bytes, or a float as a share of the bytes of all objects.

    Raises:
        InvalidArgumentError: `argument` is neither a positive size nor a share of up to 100 %.
    """
    if not isinstance(capacity, str):
        return as_integer(argument, capacity)
    if not capacity.endswith("%"):
        return as_integer(argument, parse_bytes(capacity, argument))
    try:
        share = float(capacity[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidArgumentError(
            argument,
            f"'{capacity}' is not a share above 0 and up to 100 %",
            remedy="for example 10%",
        )
    return share


def capacity_of(trace: AccessTrace, capacity: int | str) -> int:
    """Return a capacity in bytes; a share such as ``10%`` refers to the bytes of all objects."""
    size = parse_capacity(capacity)
    return size if isinstance(size, int) else max(1, round(size * int(trace.object_bytes.sum())))


def predict_cache(
    trace: AccessTrace,
    capacity: int | str = "10%",
    policies: Sequence[str] = DEFAULT_POLICIES,
    origin: StorageOrigin | None = None,
    *,
    by_bytes: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> CachePrediction:
    """Simulate policies over a trace; see `simulate` for the arguments and errors."""
    origin = origin or StorageOrigin()
    trace = reads(trace)
    size = capacity_of(trace, capacity)
    classes, tokens = trace.classes()
    epochs = max((group.epochs for group in epoch_groups(trace, classes, tokens)), default=0)
    outcomes, hits = [], {}
    run = functools.partial(simulate, trace, capacity=size, by_bytes=by_bytes)
    for policy in dict.fromkeys(policies):
        progress(policy)
        hits[policy] = hit = run(policy, classes=classes)
        missed = trace.sizes[~hit]
        missed_bytes, stall_ns = int(missed.sum()), float(origin.read_ns(missed).sum())
        outcomes.append(CacheOutcome(
            policy, size, float(hit.mean()), 1 - missed_bytes / max(int(trace.sizes.sum()), 1),
            missed_bytes, stall_ns, stall_ns / epochs if epochs else None,
            missed_bytes / 1e9 * origin.price_per_gb,
        ))  # fmt: skip
    gain = matters = None
    if len(tokens) > 1 and "learned" in hits:
        plain = run("learned", classes=np.zeros_like(classes))
        gain = float(np.mean(hits["learned"]) - np.mean(plain))
        matters = _differs(hits["learned"], plain)
    return CachePrediction(
        tuple(outcomes), len(trace), int(trace.object_bytes.sum()), gain, matters
    )


def reads(trace: AccessTrace) -> AccessTrace:
    """Return the requests that a cache serves: all but creations and deletions.

    Raises:
        InvalidArgumentError: none is left.
    """
    return trace.select(served_requests(trace))


def served_requests(trace: AccessTrace) -> npt.NDArray[np.bool_]:
    """Return which requests a cache serves, bool [N]; see `reads`."""
    served = ~np.isin(trace.ops, [OPS.index("create"), OPS.index("delete")])
    if not served.any():
        raise InvalidArgumentError("trace", "has no reads", remedy="record a longer run")
    return served


def _differs(first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_]) -> bool:
    """Whether hits differ by a paired t-test over blocks of consecutive requests."""
    from scipy.stats import ttest_1samp

    change = first.astype(np.int8) - second.astype(np.int8)
    if change.size < 2 * _BLOCKS or not change.any():
        return False
    means = [part.mean() for part in np.array_split(change, _BLOCKS)]
    return bool(np.ptp(means) == 0 or ttest_1samp(means, 0.0).pvalue < 0.05)


@dataclass(frozen=True)
class EpochGroup:
    """Objects of one class of context that are read in epochs.

    Attributes:
        tokens: of the class, by key.
        objects: their number.
        epochs: how often each was read.
    """

    tokens: Context
    objects: int
    epochs: int


def epoch_groups(
    trace: AccessTrace, classes: Int32s, tokens: Sequence[Context]
) -> list[EpochGroup]:
    """Return the classes whose objects were all read equally often, most bytes first."""
    pairs, counts = np.unique(
        classes.astype(np.int64) << 32 | trace.objects.astype(np.int64), return_counts=True
    )
    group, found = pairs >> 32, []
    for number in np.unique(group).tolist():
        per_object = counts[group == number]
        usual = int(np.median(per_object))
        if usual >= 2 and np.mean(abs(per_object - usual) <= 1) >= _EPOCH_SHARE:
            found.append(EpochGroup(tokens[number], per_object.size, usual))
    return sorted(found, key=lambda row: -row.objects * row.epochs)


@dataclass(frozen=True)
class StorageProfile:
    """Properties of a trace that decide what a cache is worth.

    Attributes:
        once: share of objects requested only once.
        curve: miss ratio of requests by share of the footprint, for each policy.
        information: by key of the contexts, the bits by which it lowers the entropy of the
            logarithm of re-access intervals; largest first.
        epochs: see `epoch_groups`.
    """

    requests: int
    objects: int
    footprint_bytes: int
    once: float
    curve: dict[str, dict[float, float]]
    information: dict[str, float]
    epochs: tuple[EpochGroup, ...]
    notes: dict[str, int]

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields for ``--json``."""
        return vars(self)

    def tables(self) -> list[Table]:
        """Return the curve of miss ratios, and the keys and epochs."""
        summary = [
            f"{self.requests:,} requests to {self.objects:,} objects of "
            f"{format_bytes(self.footprint_bytes)}; {format_percent(self.once)} of them once",
            *(f"{name}: {count:,}" for name, count in self.notes.items()),
        ]
        curves = [
            (policy, sparkline([*ratios.values()], 1.0), *(f"{r:.3f}" for r in ratios.values()))
            for policy, ratios in self.curve.items()
        ]
        keys = [(key, f"{bits:.2f}") for key, bits in self.information.items()]
        groups = []
        for group in self.epochs:
            text = "; ".join(f"{key}: {text}" for key, text in group.tokens) or "all requests"
            groups.append((text, group.objects, group.epochs))
        explained = "what each key explains of the time to the next request"
        silent = max(self.information.values(), default=1.0) < _MIN_BITS
        note = ["no key explains it: the text of the contexts does not matter here"] * silent
        ratios = ("policy", "", *map(format_percent, _CURVE))
        tables = [
            Table([*map(Column, ratios)], curves, "miss ratio by cache size", summary),
            Table([Column("key"), Column("bits")], keys, explained, note),
            Table([*map(Column, ("read in epochs", "objects", "epochs"))], groups, "epochs"),
        ]
        return [table for table in tables if table.rows]


def profile_storage(
    trace: AccessTrace,
    progress: Callable[[str], None] = lambda line: None,
    policies: Sequence[str] = ("lru", "learned"),
) -> StorageProfile:
    """Describe a trace: footprint, miss-ratio curves of policies, information of keys, epochs."""
    trace = reads(trace)
    classes, tokens = trace.classes()
    curve = {}
    for policy in policies:
        progress(f"miss ratios of {policy}")
        curve[policy] = {
            share: 1 - float(simulate(trace, policy, f"{100 * share}%", classes=classes).mean())
            for share in _CURVE
        }
    counts = np.bincount(trace.objects)
    counts = counts[counts > 0]
    return StorageProfile(
        len(trace), counts.size, int(trace.object_bytes.sum()), float(np.mean(counts == 1)), curve,
        key_information(trace, classes, tokens), tuple(epoch_groups(trace, classes, tokens)),
        trace.notes,
    )  # fmt: skip


def key_information(
    trace: AccessTrace, classes: Int32s, tokens: Sequence[Context]
) -> dict[str, float]:
    """Return the information of each key about the octave of the interval, in bits.

    It exceeds that of the same values in a random order, which is not 0 if there are many values.
    """
    following = next_requests(trace.objects)
    interval = np.minimum(following - np.arange(len(trace)), 1 << 62).astype(np.float64)
    octave = np.log2(interval).astype(np.int64)  # 62 without another request
    gains, shuffled = {}, np.random.default_rng(0).permutation(octave)
    for key in sorted({key for context in tokens for key, _ in context}):
        values = [dict(context).get(key, "") for context in tokens]
        _, of_class = np.unique(values, return_inverse=True)
        value = of_class[classes]
        gains[key] = max(0.0, _entropy(value * 64 + shuffled) - _entropy(value * 64 + octave))
    return dict(sorted(gains.items(), key=lambda item: -item[1]))


def _entropy(values: Int64s) -> float:
    _, counts = np.unique(values, return_counts=True)
    share = counts / values.size
    return float(-(share * np.log2(share)).sum())
