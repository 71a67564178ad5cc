"""Loaders of ratings and implicit feedback."""

from __future__ import annotations

import csv
import io
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.data._files import read_lines, read_text
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import Interactions, Ratings

# Exceptions for a damaged .npz file, in addition to those for a damaged array.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)


def movielens_latest_small(entry: Entry) -> Ratings:
    """Load 100,836 ratings of half to five stars, with titles."""
    folder = find(entry)
    ratings = _ratings(entry, folder / "ratings.csv", ",")
    movies = csv.reader(io.StringIO(read_text(entry, folder / "movies.csv"), newline=""))
    titles = {row[0]: row[1] for row in movies if len(row) > 1}
    return Ratings(
        entry.name, ratings.users, ratings.items, ratings.ratings, ratings.timestamps,
        ratings.user_ids, ratings.item_ids,
        tuple(titles.get(str(item), "") for item in ratings.item_ids),
    )  # fmt: skip


def movielens_100k(entry: Entry) -> Ratings:
    """Load 100,000 ratings of one to five stars, without titles."""
    return _ratings(entry, find(entry) / entry.files[0], "\t")


def gowalla(entry: Entry) -> Interactions:
    """Load check-ins: 810,128 train and 217,242 test pairs, as in LightGCN (He et al., SIGIR 2020).

    The training pairs are read from the normalised adjacency matrix of users and places published
    by the LightGCN authors. Its values follow from the pairs and are not returned.
    """
    folder = find(entry)
    test_users, test_items = _adjacency_lists(entry, folder / "gowalla_test.txt")
    indptr, indices, nodes = _csr(entry, folder / "gowalla_s_adj_mat.npz")
    user_count = int(test_users.max()) + 1 if len(test_users) else 0
    if user_count > nodes:
        raise CorruptDataError(entry.name, "the matrix lacks a test user", where=str(folder))
    # Users precede items, so the rows of users have entries only in item columns.
    end = int(indptr[user_count])
    items = indices[:end] - user_count
    users = np.repeat(np.arange(user_count), np.diff(indptr[: user_count + 1]))
    item_count = nodes - user_count
    if len(items) * 2 != len(indices) or (len(items) and items.min() < 0):
        raise CorruptDataError(entry.name, "the matrix is not bipartite", where=str(folder))
    if len(test_items) and test_items.max() >= item_count:
        raise CorruptDataError(entry.name, "the matrix lacks a test item", where=str(folder))
    order = np.lexsort((items, users))
    return Interactions(
        entry.name, users[order], items[order], test_users, test_items, user_count, item_count
    )


def _ratings(entry: Entry, path: Path, separator: str) -> Ratings:
    """Parse a heading, followed by rows of user, item, rating and time."""
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


def _adjacency_lists(entry: Entry, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    users: list[int] = []
    items: list[int] = []
    for line in read_lines(entry, path, "ascii"):
        try:
            numbers = [int(word) for word in line.split()]
        except ValueError as error:
            raise CorruptDataError(entry.name, "an id is not a number", where=str(path)) from error
        if len(numbers) > 1:
            user_items = sorted(numbers[1:])
            users += [numbers[0]] * len(user_items)
            items += user_items
    if users and (min(users) < 0 or min(items) < 0):
        raise CorruptDataError(entry.name, "an id is negative", where=str(path))
    return np.array(users, dtype=np.int64), np.array(items, dtype=np.int64)


def _csr(entry: Entry, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Read row pointers, column indices and size of a square CSR matrix stored by SciPy."""
    try:
        # Instead of scipy.sparse.load_npz, to refuse object arrays and to check the fields.
        with np.load(path, allow_pickle=False) as file:
            indptr = file["indptr"].astype(np.int64)
            indices = file["indices"].astype(np.int64)
            rows, columns = (int(length) for length in file["shape"])
            layout = bytes(file["format"].item())
    except (OSError, ValueError, LookupError, TypeError, *_ZIP_ERRORS) as error:
        raise CorruptDataError(
            entry.name, f"not a sparse matrix: {error}", where=str(path)
        ) from error
    valid = (
        layout == b"csr"
        and rows == columns
        and indptr.shape == (rows + 1,)
        and indptr[0] == 0
        and indptr[-1] == len(indices)
        and bool((np.diff(indptr) >= 0).all())
        and (len(indices) == 0 or (indices.min() >= 0 and indices.max() < columns))
    )
    if not valid:
        raise CorruptDataError(entry.name, "not a valid square CSR matrix", where=str(path))
    return indptr, indices, rows
