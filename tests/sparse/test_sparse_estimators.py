"""The estimators behave like scikit-learn's, and so do models on their graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from formulas import FORMULAS, skewed

import slipstream as ss
from slipstream.errors import InvalidArgumentError, SlipstreamWarning

sklearn = pytest.importorskip("sklearn")
from sklearn.base import clone  # noqa: E402
from sklearn.cluster import DBSCAN  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.manifold import TSNE  # noqa: E402
from sklearn.metrics import pairwise_distances  # noqa: E402
from sklearn.neighbors import (  # noqa: E402
    KNeighborsClassifier,
    KNeighborsTransformer,
    NearestNeighbors,
)
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402


@parametrize_with_checks([ss.sparse.NearestNeighbors(), ss.sparse.KNeighborsTransformer()])
def test_scikit_learns_checks_pass(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def clusters(seed: int = 0, rows: int = 160) -> tuple[sp.csr_matrix, Any]:
    """Rows around four sets of columns, and the set of each."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 4, rows)
    dense = (rng.random((rows, 120)) < 0.03) * rng.gamma(2.0, size=(rows, 120))
    for i, which in enumerate(label):
        columns = which * 30 + rng.choice(30, 12, replace=False)
        dense[i, columns] += rng.gamma(3.0, size=12)
    return sp.csr_matrix(dense), label


ROWS, LABELS = clusters()


def test_parameters_and_clones() -> None:
    made = ss.sparse.NearestNeighbors(n_neighbors=3, metric="minkowski", metric_params={"p": 3})
    again = clone(made).set_params(radius=2.0)
    assert again.get_params() == {**made.get_params(), "radius": 2.0}
    assert again.fit(ROWS).effective_metric_ == "minkowski"
    with pytest.raises(NotFittedError):
        made.kneighbors(ROWS)


@pytest.mark.parametrize("metric", ["cosine", "euclidean", "manhattan"])
def test_neighbours_equal_those_of_scikit_learn(metric: str) -> None:
    ours = ss.sparse.NearestNeighbors(n_neighbors=7, metric=metric).fit(ROWS)
    theirs = NearestNeighbors(n_neighbors=7, metric=metric, algorithm="brute").fit(ROWS)
    for queries in (None, ROWS[:50]):
        (a, i), (b, j) = ours.kneighbors(queries), theirs.kneighbors(queries)
        assert np.allclose(a, b, atol=1e-7)
        assert np.array_equal(i, j)
    near = float(np.median(b[:, 3]))
    for mode in ("distance", "connectivity"):
        actual, other = (
            search.radius_neighbors_graph(ROWS, near, mode) for search in (ours, theirs)
        )
        assert abs(actual - other).max() < 1e-7
        actual, other = (search.kneighbors_graph(None, 4, mode) for search in (ours, theirs))
        assert abs(actual - other).max() < 1e-7
    found = ours.radius_neighbors(ROWS[:20], near, return_distance=False)
    expected = theirs.radius_neighbors(ROWS[:20], near, return_distance=False)
    assert all(set(a) == set(b) for a, b in zip(found, expected, strict=True))
    distance, _ = ours.radius_neighbors(None, near, sort_results=True)
    assert all((np.diff(row) >= 0).all() for row in distance)


def test_invalid_arguments_are_named() -> None:
    fitted = ss.sparse.NearestNeighbors().fit(ROWS)
    with pytest.raises(InvalidArgumentError, match="n_neighbors = 161"):
        fitted.kneighbors(ROWS, 161)
    with pytest.raises(InvalidArgumentError, match="n_neighbors"):
        fitted.kneighbors(None, 160)
    with pytest.raises(InvalidArgumentError, match="mode"):
        fitted.kneighbors_graph(mode="both")
    with pytest.raises(InvalidArgumentError, match="radius"):
        fitted.radius_neighbors(ROWS, float("nan"))
    with pytest.raises(ValueError, match="features"):
        fitted.kneighbors(ROWS[:, :-1])
    with pytest.raises(InvalidArgumentError, match="unknown metric"):
        ss.sparse.NearestNeighbors(metric="cosinus").fit(ROWS)


@pytest.mark.parametrize("metric", ["cosine", "manhattan"])
def test_consumers_get_equal_results_from_our_graph(metric: str) -> None:
    dense = FORMULAS[metric](ROWS.toarray(), ROWS.toarray())
    near = float(np.quantile(np.sort(dense, axis=1)[:, 6], 0.3))
    ours = ss.sparse.NearestNeighbors(radius=near, metric=metric).fit(ROWS)
    graph = ours.radius_neighbors_graph(ROWS, mode="distance", sort_results=True)
    labels = DBSCAN(eps=near, min_samples=5, metric="precomputed").fit_predict(graph)
    expected = DBSCAN(eps=near, min_samples=5, metric=metric).fit_predict(ROWS)
    assert len(set(labels)) > 2
    assert np.array_equal(labels, expected)

    half = len(LABELS) // 2
    transformer = ss.sparse.KNeighborsTransformer(n_neighbors=9, metric=metric)
    classes = make_pipeline(transformer, KNeighborsClassifier(5, metric="precomputed"))
    found = classes.fit(ROWS[:half], LABELS[:half]).predict(ROWS[half:])
    usual = KNeighborsClassifier(5, metric=metric, algorithm="brute")
    assert np.array_equal(found, usual.fit(ROWS[:half], LABELS[:half]).predict(ROWS[half:]))
    assert (found == LABELS[half:]).mean() > 0.8


def test_a_map_from_our_graph_is_the_usual_one() -> None:
    settings = {"n_neighbors": 25, "mode": "distance", "metric": "manhattan"}
    picture = {"metric": "precomputed", "init": "random", "random_state": 0, "perplexity": 6}
    with threadpool_limits(1):
        maps = [
            make_pipeline(make(**settings), TSNE(**picture, max_iter=250)).fit_transform(ROWS[:60])
            for make in (ss.sparse.KNeighborsTransformer, KNeighborsTransformer)
        ]
    assert np.allclose(*maps, atol=1e-2)


@pytest.mark.parametrize("form", ["to_sparse_csr", "to_sparse", "clone"])
def test_tensors_are_rows_too(form: str) -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        rows = getattr(torch.from_numpy(ROWS.toarray()), form)()
    made = ss.sparse.NearestNeighbors(metric="canberra").fit(rows).kneighbors(rows)
    expected = ss.sparse.NearestNeighbors(metric="canberra").fit(ROWS).kneighbors(ROWS)
    assert all(np.array_equal(a, b) for a, b in zip(made, expected, strict=True))


def test_nested_patches_change_nothing() -> None:
    with ss.sparse.patch_sklearn():
        with ss.sparse.patch_sklearn():
            inner = pairwise_distances(ROWS[:5], ROWS, metric="canberra")
        assert np.array_equal(pairwise_distances(ROWS[:5], ROWS, metric="canberra"), inner)
    with pytest.raises((TypeError, ValueError)):
        pairwise_distances(ROWS[:5], ROWS, metric="canberra")


def test_patched_scikit_learn_gives_equal_results_and_accepts_more() -> None:
    queries = ROWS[:30]
    before = NearestNeighbors(metric="manhattan").fit(ROWS).kneighbors(queries)
    l1 = pairwise_distances(queries, ROWS, metric="l1")
    with pytest.raises((TypeError, ValueError)):
        pairwise_distances(queries, ROWS, metric="canberra")
    clustered = DBSCAN(eps=0.4, metric="cosine").fit_predict(ROWS)
    with ss.sparse.patch_sklearn():
        for a, b in zip(
            NearestNeighbors(metric="manhattan").fit(ROWS).kneighbors(queries), before, strict=True
        ):
            assert np.allclose(a, b)
        assert np.allclose(pairwise_distances(queries, ROWS, metric="l1"), l1)
        made = pairwise_distances(queries, ROWS, metric="canberra")
        assert np.allclose(made, FORMULAS["canberra"](queries.toarray(), ROWS.toarray()))
        dense = pairwise_distances(queries.toarray(), ROWS.toarray(), metric="canberra")
        assert np.allclose(made, dense)
        odd = NearestNeighbors(metric="braycurtis").fit(ROWS).kneighbors(queries)
        assert np.array_equal(DBSCAN(eps=0.4, metric="cosine").fit_predict(ROWS), clustered)
        cubes = NearestNeighbors(metric="minkowski", p=3).fit(ROWS)
        assert cubes.kneighbors(queries)[0].shape == (30, 5)
    expected = ss.sparse.NearestNeighbors(metric="braycurtis").fit(ROWS).kneighbors(queries)
    assert all(np.array_equal(a, b) for a, b in zip(odd, expected, strict=True))
    # Outside the patch, everything is unchanged.
    with pytest.raises((TypeError, ValueError)):
        pairwise_distances(queries, ROWS, metric="canberra")
    with pytest.raises(ValueError, match="not valid for sparse input"):
        NearestNeighbors(metric="braycurtis").fit(ROWS)


def test_a_fitted_searcher_takes_other_queries() -> None:
    rows = skewed(100, 60, 1)
    fitted = ss.sparse.NearestNeighbors(metric="manhattan", n_neighbors=3).fit(rows)
    assert np.array_equal(fitted.kneighbors(rows)[1], fitted.kneighbors(rows)[1])
    negative = skewed(20, 60, 2, negative=True)
    expected = np.sort(FORMULAS["manhattan"](negative.toarray(), rows.toarray()), axis=1)[:, :3]
    assert np.allclose(fitted.kneighbors(negative)[0], expected)


def test_arguments_of_scikit_learn_are_used_or_reported_as_ignored() -> None:
    x = skewed(60, 30, 5)
    settings: dict[str, Any] = {
        "n_neighbors": 4, "metric": "minkowski", "p": 3, "algorithm": "brute",
    }  # fmt: skip
    ours = ss.sparse.NearestNeighbors(**settings).fit(x)
    theirs = NearestNeighbors(**settings).fit(x.toarray())
    np.testing.assert_allclose(ours.kneighbors()[0], theirs.kneighbors()[0], rtol=1e-9)
    with pytest.warns(SlipstreamWarning, match=r"algorithm='kd_tree'.*leaf_size=10\b"):
        ss.sparse.NearestNeighbors(algorithm="kd_tree", leaf_size=10).fit(x)
