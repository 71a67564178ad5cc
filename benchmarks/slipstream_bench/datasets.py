"""Data sets that only the benches read: posts, ratings, check-ins and MLPerf logs.

Each loader raises MissingDataError if its files are not on this machine, and CorruptDataError if
they violate their format.
"""

from __future__ import annotations

import ast
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream import data
from slipstream.data import CorruptDataError, Dataset, Entry, MissingDataError, Ratings
from slipstream.data._feedback import read_ratings
from slipstream.data._files import check_positive, members, read_lines
from slipstream.data._find import find
from slipstream.errors import MissingExtraError

# Exceptions for a damaged .npz file, in addition to those for a damaged array.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
_RUNS = re.compile(
    r"\('(?P<system>[^']+)', '(?P<benchmark>[^']+)'\) n (?P<runs>\d+) min (?P<fastest>[\d.]+) "
    r"med (?P<median>[\d.]+) max (?P<slowest>[\d.]+) olympic-mean (?P<mean>[\d.]+) s .* "
    r"gbs (?P<batch>\d+) evals \[(?P<evaluations>\d+(, \d+)*)\]"
)
_STEPS = re.compile(r"\('(?P<system>[^']+)', '(?P<benchmark>[^']+)'\) (?P<values>\{.*\})")

_ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            "newsgroups", "Documents", "20 Newsgroups by date: 11,314 + 7,532 posts, 20 classes",
            "public newsgroup posts, research use", "yao8839836/text_gcn: 20ng", "data folder",
            False, "newsgroups", folder="newsgroups", files=("20newsgroups.tar.xz",),
        ),
        Entry(
            "movielens_100k", "Ratings", "100,000 ratings of 1,682 films by 943 people",
            "GroupLens: non-commercial", "RUCAIBox/RecBole: ml-100k", "data folder", False,
            "movielens_100k", folder="recsys", files=("ml-100k.inter",),
        ),
        Entry(
            "gowalla", "Interactions", "check-ins of 29,858 people at 40,981 places",
            "research data; none stated", "gusye1234/LightGCN-PyTorch: gowalla", "data folder",
            False, "gowalla", folder="recsys",
            files=("gowalla_s_adj_mat.npz", "gowalla_test.txt"),
        ),
        Entry(
            "mlperf_v07", "TrainingTimes", "times to train from logs of MLPerf Training v0.7 (TPU)",
            "facts; logs Apache-2.0", "mlcommons/training_results_v0.7", "data folder", True,
            "mlperf_v07", folder="mlperf_v07",
            files=("mlperf_v07_google_runs.txt", "mlperf_v07_google_steps.txt"),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Documents(Dataset):
    """Texts with one topic each.

    Attributes:
        train, test: one string per document.
        train_labels, test_labels: int64 [N], indices into `classes`.
    """

    train: tuple[str, ...]
    train_labels: NDArray[np.int64]
    test: tuple[str, ...]
    test_labels: NDArray[np.int64]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Interactions(Dataset):
    """Implicit feedback: pairs of user and item, sorted by user, then item.

    Attributes:
        users, items: int64 [N], training pairs.
        test_users, test_items: int64 [M], held-out pairs, disjoint from the training pairs.
        user_count, item_count: U and I.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    test_users: NDArray[np.int64]
    test_items: NDArray[np.int64]
    user_count: int
    item_count: int

    def __len__(self) -> int:
        return len(self.users)


@dataclass(frozen=True)
class TrainingRuns:
    """Repeated runs of one benchmark on one system to its quality target; times in seconds.

    Attributes:
        evaluations: number of evaluations until the target, for each of the first four runs.
    """

    system: str
    benchmark: str
    runs: int
    fastest_s: float
    median_s: float
    slowest_s: float
    olympic_mean_s: float
    global_batch: int
    evaluations: tuple[int, ...]


@dataclass(frozen=True)
class TrainingSteps:
    """Timings within one run: `blocks` of `epochs_per_block` epochs between evaluations.

    Attributes:
        run_s, train_s: time of the run, and of its part between first and last block.
        block_ms, first_block_ms: time of the median block, and of the first, which compiles.
        step_ms: time of one optimizer step; None if the log does not contain it.
        samples: number of training examples per epoch.
    """

    system: str
    benchmark: str
    run_s: float
    train_s: float
    blocks: int
    epochs_per_block: float
    block_ms: float
    first_block_ms: float
    global_batch: int
    samples: int
    step_ms: float | None


@dataclass(frozen=True)
class TrainingTimes(Dataset):
    """Times to train from public result logs."""

    runs: tuple[TrainingRuns, ...]
    steps: tuple[TrainingSteps, ...]


def why_absent(name: str) -> MissingDataError | MissingExtraError | None:
    """Return the error that loading `name` would raise; None if the set is on this machine.

    Raises:
        UnknownNameError: neither the package nor the benches have this set.
    """
    if name not in _ENTRIES:
        return data.why_absent(name)
    try:
        find(_ENTRIES[name])
    except MissingDataError as error:
        return error
    return None


def newsgroups(*, limit_per_class: int | None = None) -> Documents:
    """Load 20 Newsgroups, split by date, with headers and quotes, decoded as Latin-1.

    Args:
        limit_per_class: maximum number of posts per class and split, in the order of file numbers.
    """
    entry = _ENTRIES["newsgroups"]
    check_positive(limit_per_class=limit_per_class)
    posts: dict[tuple[str, str], dict[int, str]] = {}
    for path, content in members(entry.name, find(entry) / entry.files[0]):
        if len(path.parts) < 3 or not path.name.isdecimal():
            raise CorruptDataError(entry.name, f"'{path}' is not SPLIT/GROUP/NUMBER")
        split, group, number = path.parts[-3:]
        side = posts.setdefault((split.rsplit("-", 1)[-1], group), {})
        # The posts predate Unicode mail; Latin-1 decodes any byte.
        side[int(number)] = content.decode("latin-1")
    classes = tuple(sorted({group for _, group in posts}))

    def labelled(split: str) -> tuple[tuple[str, ...], list[int]]:
        texts: list[str] = []
        labels: list[int] = []
        for label, group in enumerate(classes):
            chosen = sorted(posts.get((split, group), {}).items())[:limit_per_class]
            texts += [text for _, text in chosen]
            labels += [label] * len(chosen)
        return tuple(texts), labels

    train, train_labels = labelled("train")
    test, test_labels = labelled("test")
    return Documents(
        entry.name, train, np.array(train_labels, dtype=np.int64),
        test, np.array(test_labels, dtype=np.int64), classes,
    )  # fmt: skip


def movielens_100k() -> Ratings:
    """Load 100,000 ratings of one to five stars, without titles."""
    entry = _ENTRIES["movielens_100k"]
    return read_ratings(entry, find(entry) / entry.files[0], "\t")


def gowalla() -> Interactions:
    """Load check-ins: 810,128 train and 217,242 test pairs, as in LightGCN (He et al., SIGIR 2020).

    The training pairs are read from the normalised adjacency matrix of users and places published
    by the LightGCN authors. Its values follow from the pairs and are not returned.
    """
    entry = _ENTRIES["gowalla"]
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


def mlperf_v07() -> TrainingTimes:
    """Load Google's runs of MLPerf Training v0.7: times to the quality target, and step times."""
    entry = _ENTRIES["mlperf_v07"]
    folder = find(entry)
    runs_file, steps_file = (folder / file for file in entry.files)
    return TrainingTimes(
        entry.name,
        tuple(_runs(entry, line, runs_file) for line in read_lines(entry, runs_file)),
        tuple(_steps(entry, line, steps_file) for line in read_lines(entry, steps_file)),
    )


def _runs(entry: Entry, line: str, path: Path) -> TrainingRuns:
    match = _match(_RUNS, entry, line, path)
    return TrainingRuns(
        match["system"], match["benchmark"], int(match["runs"]), float(match["fastest"]),
        float(match["median"]), float(match["slowest"]), float(match["mean"]), int(match["batch"]),
        tuple(int(count) for count in match["evaluations"].split(", ")),
    )  # fmt: skip


def _steps(entry: Entry, line: str, path: Path) -> TrainingSteps:
    match = _match(_STEPS, entry, line, path)
    try:
        # literal_eval does not run code.
        values = ast.literal_eval(match["values"])
        step_ms = values.get("step_ms")
        return TrainingSteps(
            match["system"], match["benchmark"], float(values["run_s"]), float(values["train_s"]),
            int(values["blocks"]), float(values["epochs_per_block"]),
            float(values["med_block_ms"]), float(values["first_block_ms"]), int(values["gbs"]),
            int(values["train_samples"]), None if step_ms is None else float(step_ms),
        )  # fmt: skip
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(
            entry.name, f"unexpected line: {line[:60]}", where=str(path)
        ) from error


def _match(pattern: re.Pattern[str], entry: Entry, line: str, path: Path) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise CorruptDataError(entry.name, f"unexpected line: {line[:60]}", where=str(path))
    return match
