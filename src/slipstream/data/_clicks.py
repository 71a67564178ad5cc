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


def frappe(entry: Entry) -> Clicks:
    """Load app usage by context: ids [N, 10], no dense fields, a third of the labels positive.

    The validation file (57,722 rows) serves as `train`, because the train file is not available,
    so scores are not comparable with published ones. Ids start at 0 in each field.
    """
    folder = find(entry)
    train, test = (_libfm(entry, folder / file) for file in entry.files)
    return Clicks(entry.name, train, test, tuple(_FRAPPE.values()), tuple(_FRAPPE))


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
