"""Every distance equals its formula on dense rows, natively and in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp
from formulas import FORMULAS, NON_NEGATIVE, OPTIONS, ZERO_AT_SELF, skewed
from hypothesis import given, settings
from hypothesis import strategies as st

from environments import switch_library_off
from slipstream.errors import InvalidArgumentError
from slipstream.sparse import METRICS, Semiring, kernels, pairwise_distances, reference
from slipstream_bench.datasets import movielens_100k

BACKENDS = ("avx512bw", "avx2", "scalar", "python")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set of this CPU, and the Python fall-back."""
    name = request.param
    if name == "python":
        switch_library_off(monkeypatch)
    else:
        monkeypatch.setenv("SLIPSTREAM_INSTRUCTION_SET", name)
        if kernels.native() is None or kernels.level() != {"avx512bw": 2, "avx2": 1}.get(name, 0):
            pytest.skip(f"{name} is not available")
    return name


def off(made: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    """Return the largest difference; infinite if only one is undefined or infinite."""
    made = made.astype(np.float64)
    if not np.array_equal(np.isnan(made), np.isnan(expected)):
        return np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(made[~finite], expected[~finite], equal_nan=True):
        return np.inf
    return float(np.abs(made[finite] - expected[finite]).max(initial=0.0))


def test_every_metric_is_tested() -> None:
    assert set(FORMULAS) == set(METRICS)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_equals_the_formula(metric: str, negative: bool, backend: str) -> None:
    if negative and metric in NON_NEGATIVE:
        pytest.skip("negative values have no meaning")
    a, b = skewed(23, 180, 1, negative=negative), skewed(331, 180, 2, negative=negative)
    b = sp.vstack([b, a[3:6]]).tocsr()
    expected = FORMULAS[metric](a.toarray(), b.toarray())
    made = pairwise_distances(a, b, metric, **OPTIONS.get(metric, {}))
    assert made.dtype == np.float64
    assert off(made, expected) <= 1e-10
    single = pairwise_distances(
        a.astype(np.float32), b.astype(np.float32), metric, **OPTIONS.get(metric, {})
    )
    assert single.dtype == np.float32
    # Relative to the scale of the norms: the sum of the cancelling terms.
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max()))
    assert off(single, expected) <= 1e-5 * scale


@pytest.fixture
def ratings(shared_data: object) -> sp.csr_matrix:
    """MovieLens-100k, users x films."""
    found = movielens_100k()
    return sp.csr_matrix((found.ratings.astype(np.float64), (found.users, found.items)))


@pytest.mark.parametrize("metric", METRICS)
def test_equals_the_formula_on_real_rows(metric: str, ratings: sp.csr_matrix) -> None:
    users, options = ratings[::83], OPTIONS.get(metric, {})
    expected = FORMULAS[metric](users.toarray(), ratings.toarray())
    assert off(pairwise_distances(users, ratings, metric, **options), expected) <= 1e-10
    single = pairwise_distances(
        users.astype(np.float32), ratings.astype(np.float32), metric, **options
    )
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max()))
    assert off(single, expected) <= 1e-5 * scale


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("negative", [False, True])
def test_minkowski_takes_any_power(p: float, negative: bool) -> None:
    a, b = skewed(9, 60, 3, negative=negative), skewed(140, 60, 4, negative=negative)
    dense = np.abs(a.toarray()[:, None, :] - b.toarray()[None, :, :])
    expected = (dense**p).sum(axis=2) ** (1 / p)
    scale = max(1.0, expected.max())
    assert off(pairwise_distances(a, b, "minkowski", p=p), expected) <= 1e-12 * scale


def test_kl_may_be_smoothed_and_normalised() -> None:
    a, b = skewed(9, 60, 3), skewed(140, 60, 4)
    for smoothing in (0.01, 3.0):
        x, y = (m.toarray() + smoothing for m in (a, b))
        expected = FORMULAS["kl"](x, y)
        assert off(pairwise_distances(a, b, "kl", smoothing=smoothing), expected) <= 1e-10
    full = b[b.getnnz(axis=1) > 0]
    itself = pairwise_distances(full, full, "kl", smoothing=0.01, normalise=True)
    assert np.abs(np.diag(itself)).max() <= 1e-15
    assert itself.min() >= -1e-15
    shares = [
        m / np.maximum(m.sum(axis=1, keepdims=True), 1e-300) for m in (a.toarray(), b.toarray())
    ]
    expected = FORMULAS["kl"](*shares)
    assert off(pairwise_distances(a, b, "kl", normalise=True), expected) <= 1e-10


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("metric", ZERO_AT_SELF)
def test_identical_rows_are_at_distance_zero(
    metric: str, dtype: npt.DTypeLike, size: float
) -> None:
    rows = skewed(40, 90, 5)
    rows = rows[rows.getnnz(axis=1) > 1].astype(dtype)
    rows.data = (rows.data * size).astype(dtype)
    distances = pairwise_distances(rows, rows.copy(), metric, **OPTIONS.get(metric, {}))
    assert (np.diagonal(distances) == 0).all()
    assert not np.isnan(distances).any()


def test_russell_rao_of_a_row_with_itself_is_not_zero() -> None:
    rows = skewed(12, 30, 1)
    own = np.diagonal(pairwise_distances(rows, metric="russellrao"))
    assert off(own, 1 - rows.getnnz(axis=1) / 30) <= 1e-15


def test_tiny_and_huge_rows_keep_their_relative_distance() -> None:
    # An absolute threshold below which distances count as zero would lose these.
    rows = skewed(12, 30, 1)
    for metric in ("euclidean", "manhattan", "chebyshev"):
        plain = pairwise_distances(rows, metric=metric)
        for size in (2.0**-100, 2.0**90):
            assert np.allclose(
                pairwise_distances(rows * size, metric=metric) / size, plain, rtol=1e-9, atol=0
            )


def test_two_user_defined_semirings(backend: str) -> None:
    a, b = skewed(13, 60, 3, negative=True), skewed(80, 60, 4, negative=True)
    x, y = a.toarray(), b.toarray()
    squared = Semiring(
        lambda p, q: (p - q) ** 2, "sum", left_unit=np.square, right_unit=np.square,
        post=lambda d: np.sqrt(np.maximum(d, 0.0)),
    )  # fmt: skip
    # Without the exact recomputation of the built-in metric, a root of rounding errors remains.
    made = pairwise_distances(a, b, squared)
    assert off(made**2, FORMULAS["sqeuclidean"](x, y)) <= 1e-10
    widest = Semiring(
        lambda p, q: np.abs(p - q), "max", left_unit=np.abs, right_unit=np.abs,
        post=lambda d: np.maximum(d, 0.0),
    )  # fmt: skip
    assert off(pairwise_distances(a, b, widest), FORMULAS["chebyshev"](x, y)) == 0
    least = Semiring(lambda p, q: p + q, "min")
    shared = (x[:, None] != 0) & (y[None] != 0)
    expected = np.where(shared, x[:, None] + y[None], np.inf).min(axis=2)
    assert off(pairwise_distances(a, b, least), expected) == 0


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_a_semiring_takes_columns_in_any_number_of_chunks(
    reduce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = skewed(9, 60, 3, negative=True), skewed(80, 60, 4, negative=True)
    units = {"left_unit": np.abs, "right_unit": np.abs}
    for some in ({}, units):
        semiring = Semiring(lambda p, q: np.abs(p - q), reduce, **some)
        whole = pairwise_distances(a, b, semiring)
        for part in (1, 37):
            monkeypatch.setattr(reference, "_PART", part)
            assert np.array_equal(pairwise_distances(a, b, semiring), whole)
        monkeypatch.undo()


def test_an_invalid_semiring_is_explained() -> None:
    rows = skewed(12, 30, 1)
    with pytest.raises(InvalidArgumentError, match=r"\bsum\b.*\bmax\b.*\bmin\b"):
        Semiring(np.multiply, "mean")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^semiring\.product: .*\[\]"):
        pairwise_distances(rows, metric=Semiring(lambda p, q: p.sum()))
    with pytest.raises(InvalidArgumentError, match=r"^p: .*\bSemiring\b"):
        pairwise_distances(rows, metric=Semiring(np.multiply), p=3)
    with pytest.raises(InvalidArgumentError, match=r"product: None\b"):
        Semiring(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"left_unit: 2\b"):
        Semiring(np.multiply, left_unit=2)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^semiring\.product: .*\bcomplex128\b"):
        pairwise_distances(rows, metric=Semiring(lambda p, q: p * 1j))


def test_a_semiring_may_write_into_its_arguments() -> None:
    rows = skewed(12, 30, 1)
    before = rows.data.copy()
    plain = Semiring(np.multiply, left_unit=np.square, right_unit=np.square)
    in_place = Semiring(
        lambda p, q: np.multiply(p, q, out=p),
        left_unit=lambda p: np.square(p, out=p),
        right_unit=lambda q: np.square(q, out=q),
    )
    expected = pairwise_distances(rows, metric=plain)
    assert np.array_equal(pairwise_distances(rows, metric=in_place), expected)
    assert np.array_equal(rows.data, before)


# ---- axioms --------------------------------------------------------------------------------------

_VALUES = st.one_of(
    st.integers(-4, 4).map(float), st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-3)
)


@st.composite
def matrices(draw: st.DrawFn) -> npt.NDArray[np.float64]:
    """Three to six short rows with many zeros."""
    shape = (draw(st.integers(3, 6)), draw(st.integers(1, 7)))
    cells = st.one_of(st.just(0.0), _VALUES)
    drawn = draw(st.lists(cells, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(drawn).reshape(shape)


SYMMETRIC = tuple(sorted(set(METRICS) - {"kl", "kl_intersection"}))
TRUE_METRICS = (
    "canberra", "chebyshev", "euclidean", "hamming", "hellinger", "jaccard", "jensenshannon",
    "manhattan", "minkowski", "ruzicka",
)  # fmt: skip


def check_axioms(dense: npt.NDArray[np.float64], seed: int, scale: float) -> None:
    """Symmetry, the triangle inequality, and invariance to column order and scale (cosine)."""
    order = np.random.default_rng(seed).permutation(dense.shape[1])
    for metric in METRICS:
        rows = np.abs(dense) if metric in NON_NEGATIVE else dense
        d, moved = (
            pairwise_distances(sp.csr_matrix(matrix), metric=metric, **OPTIONS.get(metric, {}))
            for matrix in (rows, rows[:, order])
        )
        largest = max(1.0, float(np.abs(d[np.isfinite(d)]).max(initial=0.0)))
        assert off(moved, d) <= 1e-10 * largest, metric
        if metric == "correlation":
            # Its means are multiplied by the number of columns on one side.
            assert np.allclose(d, d.T, rtol=0, atol=1e-12, equal_nan=True)
        elif metric in SYMMETRIC:
            assert np.array_equal(d, d.T, equal_nan=True), metric
        if metric in TRUE_METRICS:
            through = d[:, :, None] + d[None, :, :]
            assert (d[:, None, :] <= through + 1e-9 * largest).all(), metric
    plain = pairwise_distances(sp.csr_matrix(dense), metric="cosine")
    scaled = pairwise_distances(sp.csr_matrix(dense * scale), sp.csr_matrix(dense), "cosine")
    assert off(scaled, plain) <= 1e-12


_CASES = given(dense=matrices(), seed=st.integers(0, 99), scale=st.floats(1e-20, 1e20))


@settings(max_examples=60, deadline=None)
@_CASES
def test_axioms(dense: npt.NDArray[np.float64], seed: int, scale: float) -> None:
    check_axioms(dense, seed, scale)


@pytest.mark.full
@settings(max_examples=2000, deadline=None)
@_CASES
def test_axioms_have_no_counterexample_in_2000(
    dense: npt.NDArray[np.float64], seed: int, scale: float
) -> None:
    check_axioms(dense, seed, scale)
