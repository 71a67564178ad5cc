"""Decide which new files belong on a fast tier, and for how long, by a price sheet.

The saving of a file at an age is what its reads then cost less on the fast tier, less what its
space there costs more. Its mean by age is learned per context; a file counts until the trace ends.
A file stays until the age at which the sum of the means is largest.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engines.storage.policies import Float64s, Int32s
from slipstream.engines.storage.predictor import SHRINKAGE, back_off, ranked_features
from slipstream.engines.storage.traces import OPS, AccessTrace, distinct
from slipstream.errors import InvalidArgumentError
from slipstream.files import read_bytes
from slipstream.provenance import Provenance
from slipstream.schema import build
from slipstream.tables import Field, Table
from slipstream.units import format_bytes

_MONTH_S = 30 * 86400.0
_AGES = 48


@dataclass(frozen=True)
class StorageTier:
    """Prices of one tier, in any currency.

    Attributes:
        gb_month: of 10^9 bytes stored for 30 days.
        read: of one read.
        gb_read, gb_written: of 10^9 bytes.

    Raises:
        InvalidArgumentError: a price is negative.
    """

    gb_month: float
    read: float = 0.0
    gb_read: float = 0.0
    gb_written: float = 0.0

    def __post_init__(self) -> None:
        for price in fields(self):
            if not getattr(self, price.name) >= 0:
                raise InvalidArgumentError(price.name, "a price must not be negative")


@dataclass(frozen=True)
class PriceSheet:
    """The prices of a fast and a slow tier."""

    fast: StorageTier
    slow: StorageTier

    @classmethod
    def load(cls, path: str | Path) -> PriceSheet:
        """Read a TOML file with the tables ``fast`` and ``slow``, whose keys are `StorageTier`'s.

        Raises:
            SlipstreamError: the file cannot be read, is not TOML, or a price is missing or wrong.
        """
        text = read_bytes(Path(path), most=1 << 20).decode("utf-8", "replace")
        try:
            return build(cls, tomllib.loads(text), "", "price sheet", {})
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgumentError("prices", f"not TOML: {error}", where=str(path)) from error


@dataclass(frozen=True)
class TierOutcome:
    """One rule.

    Attributes:
        saved: compared with all new files on the slow tier.
        fast_gb_months: space on the fast tier.
    """

    rule: str
    saved: float
    fast_gb_months: float
    provenance: Provenance = Provenance.SIMULATED


@dataclass(frozen=True)
class TierPrediction:
    """Savings of rules on the files that are new in the second half of a trace.

    Attributes:
        slow_cost: of these files' space and reads on the slow tier.
    """

    outcomes: tuple[TierOutcome, ...]
    files: int
    file_bytes: int
    slow_cost: float

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields for ``--json``."""
        return vars(self)

    def table(self) -> Table:
        """Return the rules, the largest saving first."""
        columns: tuple[Field[TierOutcome], ...] = (
            Field.of("rule", lambda row: row.rule),
            Field.of("saved", lambda row: f"{row.saved:.4g}"),
            Field.of("of the slow tier's cost", lambda row: (
                f"{100 * row.saved / self.slow_cost:.1f} %" if self.slow_cost else None
            )),
            Field.of("fast GB-months", lambda row: f"{row.fast_gb_months:.4g}"),
        )  # fmt: skip
        notes = [
            f"simulated: {self.files:,} files of {format_bytes(self.file_bytes)} that are new in "
            f"the second half of the trace; all on the slow tier cost {self.slow_cost:.4g}",
            "future known: every file is on the fast tier exactly as long as that is worth it",
        ]
        rows = sorted(self.outcomes, key=lambda row: -row.saved)
        return Table.of(rows, columns, "a fast tier", notes)


class _Files:
    """The files of a trace from their first request on, as columns.

    Attributes:
        first: int64 [files], position of the first request.
        saving: float64 [files, ages], of reads at that age, less that of space.
        gb_months: float64 [files, ages].
        exposed: float64 [files, ages], share of the age that the trace covers.
        slow_cost: float64 [files], of reads and space on the slow tier.
    """

    def __init__(self, trace: AccessTrace, prices: PriceSheet, edges: Float64s) -> None:
        fast, slow = prices.fast, prices.slow
        time_s = (trace.time_ns - trace.time_ns[0]) / 1e9
        _, self.first, number = np.unique(trace.objects, return_index=True, return_inverse=True)
        start_s, end_s = time_s[self.first], np.full(self.first.size, time_s[-1])
        width, ages = np.diff(edges), edges[:-1]
        self.exposed = np.clip((end_s - start_s)[:, None] - ages, 0, width) / width
        gone = trace.ops == OPS.index("delete")
        end_s[number[gone]] = time_s[gone]
        gb = trace.sizes[self.first] / 1e9
        self.gb_months = np.clip((end_s - start_s)[:, None] - ages, 0, width) * gb[:, None]
        self.gb_months /= _MONTH_S
        read = np.isin(trace.ops, [OPS.index("open"), OPS.index("read")])
        read[self.first] = False  # placement is decided then
        age = np.searchsorted(edges, time_s[read] - start_s[number[read]], "right") - 1
        cell = number[read] * _AGES + np.minimum(age, _AGES - 1)
        reads = np.bincount(cell, minlength=gb.size * _AGES).reshape(gb.size, _AGES)
        worth = slow.read - fast.read + gb * (slow.gb_read - fast.gb_read)
        self.saving = reads * worth[:, None] - self.gb_months * (fast.gb_month - slow.gb_month)
        # A new file is written to one of the tiers, another one is copied to the fast tier.
        made = np.isin(trace.ops[self.first], [OPS.index("write"), OPS.index("create")])
        self.saving[:, 0] -= gb * (fast.gb_written - made * slow.gb_written)
        self.slow_cost = (
            reads.sum(1) * (slow.read + gb * slow.gb_read) + made * gb * slow.gb_written
            + self.gb_months.sum(1) * slow.gb_month
        )  # fmt: skip


def predict_tiers(trace: AccessTrace, prices: PriceSheet) -> TierPrediction:
    """Learn from the files of a trace's first half how long those of the second stay on a tier.

    Raises:
        InvalidArgumentError: the trace has no times, no reads in its first half, or no new files in
            its second.
    """
    if np.array_equal(trace.time_ns, np.arange(len(trace))):
        raise InvalidArgumentError(
            "trace", "has no times, which space is paid by", remedy="import one with a time column"
        )
    half = len(trace) // 2
    span_s = max(float(trace.time_ns[-1] - trace.time_ns[0]) / 1e9, 1e-6)
    edges = np.concatenate([[0.0], np.geomspace(span_s * 1e-5, span_s, _AGES)])
    classes, tokens = trace.classes()
    groups = [of for _, of in back_off(*ranked_features(trace.first(half), classes[:half], tokens))]
    past, files = (_Files(part, prices, edges) for part in (trace.first(half), trace))
    new = files.first >= half
    if not new.any():
        raise InvalidArgumentError("trace", "has no new files in its second half")
    learned = _stay(past, classes[past.first], groups)[classes[files.first]]
    names = trace.names or ("",) * (int(trace.objects.max()) + 1)
    _, folder = distinct(str(PurePath(names[trace.objects[at]]).parent) for at in files.first)
    # Files are in order of their numbers; those of the first half are some of them.
    worth = np.bincount(folder[files.first < half], past.saving.sum(1), int(folder.max()) + 1)
    rules = {
        "learned": learned, "all fast": np.full(new.size, _AGES),
        "hot directories": np.where(worth[folder] > 0, _AGES, 0),
        "future known": _best(files.saving),
    }  # fmt: skip
    outcomes = []
    for rule, until in rules.items():
        held = (np.arange(_AGES) < until[:, None]) & new[:, None]
        saved, space = files.saving[held].sum(), files.gb_months[held].sum()
        outcomes.append(TierOutcome(rule, float(saved), float(space)))
    return TierPrediction(
        tuple(outcomes), int(new.sum()), int(trace.sizes[files.first[new]].sum()),
        float(files.slow_cost[new].sum()),
    )  # fmt: skip


def _best(saving: Float64s) -> npt.NDArray[np.int64]:
    """Return the number of ages, from the first, with the largest sum in each row, int64 [rows]."""
    sums = np.concatenate([np.zeros((saving.shape[0], 1)), saving.cumsum(1)], 1)
    return np.asarray(sums.argmax(1))


def _stay(past: _Files, class_of: Int32s, groups: Sequence[Int32s]) -> npt.NDArray[np.int64]:
    """Return the number of ages that files of each class stay on the fast tier, int64 [classes].

    Args:
        class_of: of each file.
        groups: of each class, the most general ones first; each is shrunk to the one before.
    """
    mean = np.zeros((groups[0].size, _AGES))
    for level, group in enumerate(groups):
        saving, exposed = np.zeros((2, int(group.max()) + 1, _AGES))
        np.add.at(saving, group[class_of], past.saving)
        np.add.at(exposed, group[class_of], past.exposed)
        strength = SHRINKAGE if level else 1e-9
        mean = (saving[group] + strength * mean) / (exposed[group] + strength)
    return _best(mean)
