"""Loader of ratings."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from slipstream.data._files import read_lines, read_text
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import Ratings


def movielens_latest_small(entry: Entry) -> Ratings:
    """Load 100,836 ratings of half to five stars, with titles."""
    folder = find(entry)
    ratings = read_ratings(entry, folder / "ratings.csv", ",")
    movies = csv.reader(io.StringIO(read_text(entry, folder / "movies.csv"), newline=""))
    titles = {row[0]: row[1] for row in movies if len(row) > 1}
    return Ratings(
        entry.name, ratings.users, ratings.items, ratings.ratings, ratings.timestamps,
        ratings.user_ids, ratings.item_ids,
        tuple(titles.get(str(item), "") for item in ratings.item_ids),
    )  # fmt: skip


def read_ratings(entry: Entry, path: Path, separator: str) -> Ratings:
    """Parse a heading, followed by rows of user, item, rating and time.

    Raises:
        CorruptDataError: a row is not four numbers.
    """
    _, *rows = read_lines(entry, path)
    try:
        columns = np.array([row.split(separator) for row in rows], dtype=np.float64)
    except ValueError as error:
        raise CorruptDataError(entry.name, "a row contains text", where=str(path)) from error
    if columns.ndim != 2 or columns.shape[1] != 4 or not np.isfinite(columns).all():
        raise CorruptDataError(entry.name, "a row does not have four numbers", where=str(path))
    user_ids, users = np.unique(columns[:, 0].astype(np.int64), return_inverse=True)
    item_ids, items = np.unique(columns[:, 1].astype(np.int64), return_inverse=True)
    return Ratings(
        entry.name, users.astype(np.int64), items.astype(np.int64),
        columns[:, 2].astype(np.float32), columns[:, 3].astype(np.int64), user_ids, item_ids,
    )  # fmt: skip
