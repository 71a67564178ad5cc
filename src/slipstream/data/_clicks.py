"""Loaders of logs for click prediction."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipstream.data._files import read_lines
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import ClickRows, Clicks

# Fields in the order of the columns, with their number of ids in the shared numbering
# (Baltrunas et al., 2015: Frappe).
_FRAPPE = {
    "user": 957, "item": 4082, "daytime": 7, "weekday": 7, "is_weekend": 2,
    "home_or_work": 3, "cost": 2, "weather": 9, "country": 80, "city": 233,
}  # fmt: skip
_DENSE = 13
_CATEGORIES = 26


def frappe(entry: Entry) -> Clicks:
    """Load app usage by context: ids [N, 10], no dense fields, a third of the labels positive.

    The validation file (57,722 rows) serves as `train`, because the train file is not available,
    so scores are not comparable with published ones. Ids start at 0 in each field.
    """
    folder = find(entry)
    train, test = (_libfm(entry, folder / file) for file in entry.files)
    return Clicks(entry.name, train, test, tuple(_FRAPPE.values()), tuple(_FRAPPE))


def criteo_sample(entry: Entry) -> Clicks:
    """Load 200 rows of Criteo's log: dense [N, 13] with missing values (NaN), ids [N, 26].

    Hashed categories become 1, 2, ... in sorted order; 0 represents a missing one. The last 40 rows
    are `test`. The set shows the schema only; for training, see `generators.click_log`.
    """
    path = find(entry) / entry.files[0]
    header, *rows = [line.split(",") for line in read_lines(entry, path, "ascii")]
    if any(len(row) != 1 + _DENSE + _CATEGORIES for row in [header, *rows]):
        raise CorruptDataError(entry.name, "a row does not have 40 columns", where=str(path))
    try:
        labels = np.array([int(row[0]) for row in rows], dtype=np.int64)
        dense = np.array(
            [[float(cell or "nan") for cell in row[1 : 1 + _DENSE]] for row in rows],
            dtype=np.float32,
        )
    except ValueError as error:
        raise CorruptDataError(entry.name, "a cell is not a number", where=str(path)) from error
    columns = []
    cardinalities = []
    for column in range(1 + _DENSE, len(header)):
        values = [row[column] for row in rows]
        id_of = {"": 0} | {v: i + 1 for i, v in enumerate(sorted(set(values) - {""}))}
        columns.append([id_of[value] for value in values])
        cardinalities.append(len(id_of))
    ids = np.ascontiguousarray(np.array(columns, dtype=np.int64).T)
    cut = len(rows) * 4 // 5
    return Clicks(
        entry.name,
        ClickRows(ids[:cut], dense[:cut], labels[:cut]),
        ClickRows(ids[cut:], dense[cut:], labels[cut:]),
        tuple(cardinalities),
        tuple(header[1 + _DENSE :]),
    )


def _libfm(entry: Entry, path: Path) -> ClickRows:
    """Parse rows ``LABEL ID:1 ID:1 ...`` with one id per field, in the order of the fields."""
    rows = [line.replace(":1", "").split() for line in read_lines(entry, path, "ascii") if line]
    try:
        table = np.array(rows, dtype=np.int64)
    except ValueError as error:
        raise CorruptDataError(entry.name, "not LABEL ID:1 ...", where=str(path)) from error
    if table.ndim != 2 or table.shape[1] != 1 + len(_FRAPPE):
        raise CorruptDataError(entry.name, "a row does not have ten fields", where=str(path))
    sizes = np.array(list(_FRAPPE.values()))
    ids = table[:, 1:] - (np.cumsum(sizes) - sizes)
    if (ids < 0).any() or (ids >= sizes).any():
        raise CorruptDataError(entry.name, "an id out of its field's range", where=str(path))
    return ClickRows(
        ids, np.empty((len(ids), 0), dtype=np.float32), (table[:, 0] > 0).astype(np.int64)
    )
