"""Ways are compared at the same bytes, with the dense table and its codes beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from slipstream.data.generators.clicks import click_log
from slipstream.data.generators.feedback import implicit_feedback
from slipstream.techniques.embedding.dlrm import DLRM
from slipstream.techniques.embedding.quality import CONVERTED, DENSE, compare, ranked
from slipstream.techniques.embedding.quality_tasks import (
    ClickTask,
    Feedback,
    auc,
    first_users,
    split,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_auc_is_the_usual_one() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        labels = draw.integers(0, 2, 50)
        labels[:2] = 0, 1
        scores = draw.integers(0, 9, 50).astype(float)  # with ties
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


def test_products_of_the_click_model_are_those_of_pairs() -> None:
    torch.manual_seed(0)
    model = DLRM((50, 40), 3, 4, bottom=(5,), top=(6,))
    ids, dense = torch.tensor([[1, 2], [3, 4]]), torch.randn(2, 3)
    first, second = model.tables[0](ids[:, 0]), model.tables[1](ids[:, 1])
    numbers = model.network.bottom(dense)
    pairs = [(first * numbers), (second * numbers), (second * first)]
    expected = torch.cat([numbers, *(pair.sum(1, keepdim=True) for pair in pairs)], 1)
    torch.testing.assert_close(model(ids, dense), model.network.top(expected)[:, 0])
    assert float(model.tables[0].weight.detach().abs().max()) <= 50**-0.5  # type: ignore[operator]


def test_recall_counts_what_was_held_out() -> None:
    log = implicit_feedback(40, 60, per_user=10, seed=1)
    task = Feedback(log.data, "small", dim=8)
    model = task.model()
    # A model that knows the held-out pairs finds all of them, as long as a user has at most 20.
    truth = torch.zeros(40, 60)
    truth[log.data.test_users, log.data.test_items] = 1
    u, s, v = torch.linalg.svd(truth, full_matrices=False)
    known = Feedback(log.data, "small", dim=40).model()
    with torch.no_grad():
        known.user.weight.copy_(u * s)  # type: ignore[operator, union-attr]
        known.item.weight.copy_(v.T)  # type: ignore[operator, union-attr]
    assert task.score(known) == 1
    assert task.score(model) < 0.8


def test_users_and_items_are_numbered_anew() -> None:
    log = implicit_feedback(40, 60, per_user=10, seed=1).data
    few = first_users(log, 10)
    assert few.user_count == 10
    assert few.users.max() < 10
    assert few.items.max() < few.item_count
    assert np.bincount(few.items).min() >= 3
    parts = split(log.users, log.items, 40, 60, "parts")
    assert len(parts.users) + len(parts.test_users) == len(log.users)


def test_a_comparison_has_every_baseline() -> None:
    log = implicit_feedback(300, 400, rank=4, per_user=40, taste=2.0, seed=0)
    task = Feedback(log.data, "planted", dim=16, epochs=3, batch=256)
    found = list(compare(task, [4], ["lowdim", "hash"], seeds=1, least_rows=100))
    by_name = {one.method: one for one in found}
    assert set(by_name) == {DENSE, "int8", "int4", CONVERTED, "lowdim", "hash"}
    assert by_name["int8"].ratio == pytest.approx(64 / 20)
    assert by_name["int4"].ratio == pytest.approx(64 / 12)
    assert all(one.ratio >= 4 for one in found if one.asked == 4)
    assert by_name["int8"].mean == pytest.approx(by_name[DENSE].mean, abs=0.01)
    assert by_name["lowdim"].mean > by_name["hash"].mean
    order = ranked(found, 4)
    assert {one.method for one in order} == {"int4", CONVERTED, "lowdim", "hash"}
    assert [one.mean for one in order] == sorted((one.mean for one in order), reverse=True)


def test_clicks_are_learnt_and_never_better_than_the_truth() -> None:
    log = click_log(
        20_000, test_rows=5_000, cardinalities=(3000, 500, 20), dense=2, signal=0.8, seed=0
    )
    task = ClickTask(log.data, "clicks", dim=4)
    (dense, *_, robe) = compare(task, [20], ["robe"], seeds=1, convert=False)
    best = auc(log.test_probabilities, log.data.test.labels)
    assert best == pytest.approx(log.bayes_auc, abs=0.03)
    assert 0.6 < robe.mean < best + 0.005
    assert 0.65 < dense.mean < best + 0.005
