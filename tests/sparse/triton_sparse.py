"""Run by test_sparse_triton.py in a separate process: Triton's kernels against the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from formulas import OPTIONS, skewed

from slipstream.sparse.matrix import as_rows
from slipstream.sparse.metrics import ADDITIVE, NON_NEGATIVE
from slipstream.sparse.search import Limits, Searcher

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def searched(a: Any, b: Any, metric: str, device: Any, limits: Limits | None = None) -> Any:
    options = dict(OPTIONS.get(metric, {}))
    searcher = Searcher(as_rows(b, "B"), metric, options, limits or Limits(), device=device)
    run = searcher.against(as_rows(a, "A"))
    out = run.empty(len(run.left))
    run.distances(out)
    return run, np.asarray(out.cpu() if isinstance(out, torch.Tensor) else out)


def matrices(metric: str, dtype: Any) -> tuple[Any, Any]:
    """35 queries, two tiles of them, and 11 rows: empty, equal, and longer than a chunk."""
    a, b = skewed(35, 60, 1).tolil(), skewed(10, 60, 2).tolil()
    a[3], b[4] = 0, 0
    b[5] = np.arange(1, 61)
    a[6], a[34], b[7] = b[5], b[2], b[2]
    a, b = a.tocsr().astype(dtype), b.tocsr().astype(dtype)
    if metric not in NON_NEGATIVE:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], 60).astype(dtype)
        a, b = (sp.csr_matrix(rows.multiply(signs)) for rows in (a, b))
    return a, b


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("metric", ADDITIVE)
def test_distances_equal_the_cpus(metric: str, dtype: Any) -> None:
    a, b = matrices(metric, dtype)
    run, made = searched(a, b, metric, DEVICE)
    _, expected = searched(a, b, metric, None)
    assert run.device is DEVICE
    assert made.dtype == expected.dtype
    finite = np.isfinite(expected)
    scale = max(1.0, float(np.abs(expected[finite]).max()))
    tolerance = 1e-10 if dtype is np.float64 else 1e-5 * scale
    assert np.array_equal(np.isnan(made), np.isnan(expected))
    assert np.array_equal(np.isinf(made), np.isinf(expected))
    assert np.abs(made[finite] - expected[finite]).max() <= tolerance
    if metric not in ("inner_product", "russellrao", "kl_intersection"):
        assert made[34, 2] == made[34, 7] == made[6, 5] == 0


def test_the_nearest_are_sorted_with_ties_by_row_for_any_budget() -> None:
    a, b = matrices("jaccard", np.float32)
    expected = searched(a, b, "jaccard", None)[0].nearest(8)
    for limits in (Limits(), Limits(block_bytes=2**16)):
        run, _ = searched(a, b, "jaccard", DEVICE, limits)
        for made, reference in zip(run.nearest(8), expected, strict=True):
            np.testing.assert_allclose(made, reference, atol=1e-6)


def test_tensors_on_a_device_give_results_on_it() -> None:
    if DEVICE.type != "cuda":
        return
    import slipstream as ss

    a, b = matrices("manhattan", np.float32)
    on_device = [torch.sparse_csr_tensor(
        torch.from_numpy(rows.indptr), torch.from_numpy(rows.indices),
        torch.from_numpy(rows.data), rows.shape,
    ).to(DEVICE) for rows in (a, b)]  # fmt: skip
    for metric in ("manhattan", "chebyshev"):
        made = ss.sparse.pairwise_distances(*on_device, metric)
        assert made.device.type == "cuda"
        expected = ss.sparse.pairwise_distances(a, b, metric)
        np.testing.assert_allclose(made.cpu(), expected, rtol=1e-5, atol=1e-5)
    nearest: Any = ss.sparse.knn_graph(on_device[0], 4, "cosine")
    index, distance = nearest
    assert index.device.type == distance.device.type == "cuda"
    with pytest.raises(ValueError, match="B: is on cpu"):
        ss.sparse.pairwise_distances(on_device[0], b)
