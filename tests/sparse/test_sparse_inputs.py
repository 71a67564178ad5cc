"""Accepted and refused inputs; arguments are never changed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from formulas import skewed

from slipstream.errors import InvalidArgumentError
from slipstream.sparse import METRICS, distance_tiles, knn_graph, pairwise_distances, radius_join
from slipstream.sparse.matrix import as_rows

ROWS = skewed(30, 50, 1)


def same(made: Any, metric: str = "manhattan") -> bool:
    expected = pairwise_distances(ROWS, metric=metric)
    return np.array_equal(pairwise_distances(made, metric=metric), expected, equal_nan=True)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok", "bsr"])
def test_accepts_every_scipy_format_and_class(form: str) -> None:
    assert same(ROWS.asformat(form))
    assert same(sp.csr_array(ROWS).asformat(form))
    assert same(ROWS.toarray())


def test_accepts_torch_tensors() -> None:
    dense = torch.from_numpy(ROWS.toarray())
    assert same(dense)
    assert same(dense.to_sparse())
    with torch.sparse.check_sparse_tensor_invariants(False):
        assert same(dense.to_sparse_csr())
    half = pairwise_distances(dense.to_sparse().bfloat16())
    assert half.dtype == np.float32
    assert np.allclose(half, pairwise_distances(ROWS), rtol=0.02, atol=0.2)
    with pytest.raises(InvalidArgumentError, match="layout"):
        pairwise_distances(dense.to_sparse_csc())


@pytest.mark.parametrize(
    "dtype", [np.float16, np.int8, np.uint8, np.int16, bool, np.int32, np.int64]
)
def test_converts_types(dtype: Any) -> None:
    whole = ROWS.copy()
    whole.data = np.ceil(whole.data) % 100
    whole.eliminate_zeros()
    made = pairwise_distances(whole.toarray().astype(dtype), metric="manhattan")
    assert made.dtype == (np.float64 if dtype in (np.int32, np.int64) else np.float32)
    dense = whole.toarray().astype(dtype).astype(np.float64)
    expected = pairwise_distances(dense, metric="manhattan")
    assert np.allclose(made, expected, rtol=1e-6)


def scrambled() -> sp.csr_matrix:
    """`ROWS` with shuffled columns, entries split in two, and explicit zeros."""
    rng = np.random.default_rng(1)
    indptr, indices, data = [0], [], []
    for i in range(ROWS.shape[0]):
        row = ROWS[i]
        columns = np.concatenate([row.indices, row.indices, rng.integers(0, 50, 3)])
        values = np.concatenate([row.data / 2, row.data / 2, np.zeros(3)])
        order = rng.permutation(len(columns))
        indices.append(columns[order])
        data.append(values[order])
        indptr.append(indptr[-1] + len(columns))
    parts = (np.concatenate(data), np.concatenate(indices).astype(np.int64), np.array(indptr))
    return sp.csr_matrix(parts, shape=ROWS.shape)


@pytest.mark.parametrize("metric", METRICS)
def test_duplicates_order_and_explicit_zeros_do_not_matter_and_are_preserved(metric: str) -> None:
    matrix = scrambled()
    copies = [array.copy() for array in (matrix.indptr, matrix.indices, matrix.data)]
    assert same(matrix, metric)
    for before, after in zip(copies, (matrix.indptr, matrix.indices, matrix.data), strict=True):
        assert np.array_equal(before, after)


def test_values_that_cancel_count_as_absent() -> None:
    rows = sp.csr_matrix(([1.0, -1.0, 2.0], ([0, 0, 1], [0, 0, 1])), shape=(2, 3))
    assert pairwise_distances(rows, metric="hamming")[0, 1] == pytest.approx(1 / 3)


@pytest.mark.parametrize("columns", [10**7, 2**31 + 5, 2**40])
def test_accepts_columns_beyond_32_bits(columns: int) -> None:
    rng = np.random.default_rng(2)
    places = np.sort(rng.choice(50, 50, replace=False) * (columns // 50))
    data = (ROWS.data, places[ROWS.indices], ROWS.indptr)
    wide = sp.csr_array(data, shape=(ROWS.shape[0], columns))
    assert same(wide)
    assert same(wide, "jaccard")
    index, _ = knn_graph(wide, 4, "cosine")
    assert np.array_equal(index, knn_graph(ROWS, 4, "cosine")[0])
    # The number of columns still counts if the metric divides by it.
    share = pairwise_distances(wide, metric="hamming") * columns
    assert np.allclose(share, pairwise_distances(ROWS, metric="hamming") * 50)


def test_accepts_no_rows_no_columns_and_no_entries() -> None:
    for shape in ((0, 5), (3, 0), (4, 7)):
        empty = sp.csr_matrix(shape)
        for metric in METRICS:
            if metric == "correlation":
                continue
            made = pairwise_distances(empty, metric=metric)
            assert made.shape == (shape[0], shape[0])
            assert np.isfinite(made).all()


def changed(value: float) -> sp.csr_matrix:
    rows = ROWS.copy()
    rows.data[7] = value
    return rows


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=r"^B: .*(NaN|infinity).*\b\d+\b.*\b\d+\b"):
        pairwise_distances(ROWS, changed(value))


@pytest.mark.parametrize(
    "metric", ["hellinger", "jensenshannon", "kl", "kl_intersection", "ruzicka"]
)
def test_negative_values_are_refused_if_meaningless(metric: str) -> None:
    with pytest.raises(ValueError, match=rf"^A: {metric}\b.*\b0\b.*\brow \d+\b.*-3"):
        pairwise_distances(changed(-3.0), ROWS, metric)


def broken(name: str, index: int, value: int) -> sp.csr_matrix:
    rows = ROWS.copy()
    getattr(rows, name)[index] = value
    return rows


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("unknown metric", {"metric": "manhatan"}, "metric: unknown metric 'manhatan'"),
    ("no metric", {"metric": 3}, "metric: int is not a name"),
    ("columns", {"B": ROWS[:, :-1]}, "A: 50 columns, but B has 49"),
    ("column too large", {"B": broken("indices", 3, 50)}, "B: column 50 in a matrix of 50"),
    ("overflowed column", {"B": broken("indices", 3, -2)}, "B: column -2 in a matrix of 50"),
    ("pointers", {"B": broken("indptr", 3, 9999)}, "B: its row pointers do not ascend"),
    ("complex", {"B": ROWS.astype(complex)}, "B: values of type complex128"),
    ("one dimension", {"B": np.ones(50)}, "B: has 1 dimensions, not two"),
    ("words", {"B": np.array([["a"]])}, "B: values of type <U1"),
    ("p", {"metric": "minkowski", "p": 0}, "p: 0 is not a positive number"),
    ("p of another", {"metric": "cosine", "p": 3}, "p: not an argument of cosine"),
    ("smoothing", {"metric": "kl", "smoothing": -1}, "smoothing: -1 is not zero or positive"),
    ("no function", {"metric": "minkowski", "p": True}, "p: True is not"),
    ("words for smoothing", {"metric": "kl", "smoothing": "a"}, "smoothing: 'a' is not zero"),
    ("words for normalise", {"metric": "kl", "normalise": "no"}, "normalise: 'no' is not True"),
    ("threads", {"n_jobs": 0}, "n_jobs: 0"),
    ("size in words", {"block_bytes": "64MiB"}, "block_bytes: '64MiB' is not an integer"),
    ("rows of two lengths", {"B": [[1.0], [1.0, 2.0]]}, "B: its rows differ in length"),
    ("three dimensions", {"B": torch.ones(2, 2, 2).to_sparse()}, "B: has 3 dimensions, not two"),
    ("batch", {"B": torch.ones(2, 3, 3).to_sparse_csr()}, "B: has 3 dimensions, not two"),
    ("hybrid", {"B": torch.ones(2, 2).to_sparse(1)}, "B: has dense dimensions"),
    ("result in a list", {"out": []}, "out: is a list"),
    ("memory", {"block_bytes": 5}, "block_bytes: 5 is too small"),
    ("overflow", {"B": ROWS * 1e200}, "A: euclidean of values as large as"),
    ("high power", {"metric": "minkowski", "p": 40}, "p: minkowski of values no larger than"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_an_invalid_argument_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")) as caught:
        pairwise_distances(ROWS, **arguments)
    assert isinstance(caught.value, InvalidArgumentError)


def test_values_with_underflowing_squares_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^A: euclidean\b.*\d+e-\d+\b.*\d+e-\d+\b"):
        pairwise_distances(ROWS * 1e-200)
    assert pairwise_distances(ROWS * 1e-200, metric="manhattan").max() > 0


def test_entries_with_an_overflowing_sum_are_refused() -> None:
    large = np.array([3e38, 3e38], np.float32)
    twice = sp.csr_matrix((large, np.array([1, 1]), np.array([0, 2])), shape=(1, 3))
    with pytest.raises(ValueError, match=r"^A: .*infinity.*\b0\b.*\b1\b"):
        pairwise_distances(twice, metric="cosine")


def test_numpy_scalars_are_valid_options() -> None:
    for p in (np.int64(3), np.float32(3)):
        made = pairwise_distances(ROWS, metric="minkowski", p=p)
        assert np.array_equal(made, pairwise_distances(ROWS, metric="minkowski", p=3))
    as_it_is = pairwise_distances(ROWS, metric="hellinger", normalise=False)
    made = pairwise_distances(ROWS, metric="hellinger", normalise=np.False_)
    assert np.array_equal(made, as_it_is)
    assert not np.array_equal(made, pairwise_distances(ROWS, metric="hellinger"))


@pytest.mark.parametrize("rows", [0, 2.5, "many"])
def test_tiles_have_whole_numbers_of_rows(rows: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="rows"):
        distance_tiles(ROWS, rows=rows)


def test_a_typo_gets_a_suggestion() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pairwise_distances(ROWS, metric="manhatan")
    assert "manhattan" in str(caught.value.remedy)


@pytest.mark.parametrize("count", [0, -1, 31, 2.5, "5", True])
def test_more_neighbours_than_rows_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="n_neighbors"):
        knn_graph(ROWS, count)
    with pytest.raises(ValueError, match=r"<= n_samples_fit, .* = 31, n_samples_fit = 30"):
        knn_graph(ROWS, 31)
    with pytest.raises(ValueError, match=r"< n_samples_fit, .* = 30, n_samples_fit = 30"):
        knn_graph(ROWS, 30, include_self=False)
    assert knn_graph(ROWS, 30)[0].shape == (30, 30)


def test_join_arguments_are_named_by_their_own_names() -> None:
    for metric in ("jaccard", "canberra"):
        with pytest.raises(InvalidArgumentError, match=r"^X: 50 columns\b.*\bY\b.*\b49\b"):
            list(radius_join(ROWS, ROWS[:, :-1], metric))
    with pytest.raises(InvalidArgumentError, match=r"^metric: inner_product\b"):
        radius_join(ROWS, metric="inner_product")


def test_a_similarity_has_no_nearest_neighbours() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^metric: inner_product\b"):
        knn_graph(ROWS, 3, "dot")


def test_int64_pointers_are_preserved() -> None:
    rows = as_rows(ROWS, "X")
    assert rows.indptr.dtype == np.int64


def test_the_package_does_not_need_scikit_learn() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import slipstream as ss\n"
        "from slipstream.errors import MissingExtraError\n"
        "print(ss.sparse.pairwise_distances([[1.0, 0.0], [0.0, 1.0]])[0, 1])\n"
        "for name in ('NearestNeighbors', 'KNeighborsTransformer', 'patch_sklearn'):\n"
        "    try:\n"
        "        getattr(ss.sparse, name)\n"
        "    except MissingExtraError as error:\n"
        "        print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("1.41421")
    assert run.stdout.count("scikit-learn") == 3
    assert run.stdout.count("pip install 'slipstream[sparse]'") == 3
