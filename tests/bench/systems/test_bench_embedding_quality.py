"""Embedding methods at equal size, with the dense table and its codes as references."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from slipstream.techniques.embedding.planning import MIXED, plan
from slipstream_bench.generators.clicks import click_log
from slipstream_bench.generators.feedback import implicit_feedback
from slipstream_bench.rows import Bar
from slipstream_bench.systems.embedding.dlrm import DLRM
from slipstream_bench.systems.embedding.quality import (
    CONVERTED,
    DENSE,
    Scored,
    compare,
    epochs_to,
    ranked,
)
from slipstream_bench.systems.embedding.quality_bars import (
    _NOT_BELOW,
    _OVER_HASH,
    _PLAN,
    _TRAIN,
    _rows,
    _Study,
)
from slipstream_bench.systems.embedding.quality_tasks import (
    ClickTask,
    Feedback,
    auc,
    first_users,
    split,
)
from slipstream_bench.systems.embedding.quality_texts import _task


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_auc_matches_its_definition() -> None:
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
    # A model that knows the held-out pairs finds all of them if a user has at most 20.
    truth = torch.zeros(40, 60)
    truth[log.data.test_users, log.data.test_items] = 1
    u, s, v = torch.linalg.svd(truth, full_matrices=False)
    feedback = Feedback(log.data, "small", dim=40).model()
    with torch.no_grad():
        feedback.user.weight.copy_(u * s)  # type: ignore[operator, union-attr]
        feedback.item.weight.copy_(v.T)  # type: ignore[operator, union-attr]
    assert task.score(feedback) == 1
    assert task.score(model) < 0.8


def test_users_and_items_are_renumbered() -> None:
    log = implicit_feedback(40, 60, per_user=10, seed=1).data
    few = first_users(log, 10)
    assert few.user_count == 10
    assert few.users.max() < 10
    assert few.items.max() < few.item_count
    assert np.bincount(few.items).min() >= 3
    parts = split(log.users, log.items, 40, 60, "parts")
    assert len(parts.users) + len(parts.test_users) == len(log.users)


def test_the_most_popular_items_are_a_baseline() -> None:
    log = implicit_feedback(40, 60, per_user=10, seed=1)
    data = dataclasses.replace(
        log.data, users=np.arange(40), items=np.zeros(40, int), test_users=np.arange(40),
        test_items=np.full(40, 30),
    )  # fmt: skip
    # Item 0 is not offered again; of the others, which are equal, the first twenty are chosen.
    assert Feedback(data, "small").yardstick().endswith("0.0000")
    popular = dataclasses.replace(data, users=np.arange(39), items=np.full(39, 30))
    popular = dataclasses.replace(popular, test_users=np.array([39]), test_items=np.array([30]))
    assert Feedback(popular, "small").yardstick().endswith("1.0000")
    clicks = click_log(100, test_rows=10, seed=0)
    assert ClickTask(clicks.data, "c").yardstick() == ""
    assert "0.8123" in ClickTask(clicks.data, "c", best=0.8123).yardstick()


def test_settings_are_chosen_on_training_data() -> None:
    log = implicit_feedback(40, 60, per_user=10, seed=1).data
    held = Feedback(log, "small").validation().data
    pairs = sorted(zip(log.users, log.items, strict=True))
    parts = [*zip(held.users, held.items, strict=True)]
    parts += zip(held.test_users, held.test_items, strict=True)
    assert sorted(parts) == pairs
    assert 0 < len(held.test_users) < 0.2 * len(pairs)
    clicks = ClickTask(click_log(100, test_rows=10, seed=0).data, "c")
    rows = clicks.validation().data
    assert (len(rows.train), len(rows.test)) == (90, 10)
    assert np.array_equal(rows.test.ids, clicks.data.train.ids[90:])


class Knob(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 16)
        self.rate, self.epochs = 0.0, 0


@dataclass
class Known:
    """Held-out data prefers three times the rate, test data a third; epochs add one each."""

    name = "known"
    metric = "points"
    epochs = 2
    rate = 0.1
    likes: float = 1 / 3

    def model(self) -> nn.Module:
        return Knob()

    def counts(self) -> dict[str, torch.Tensor]:
        return {"table": 1 / torch.arange(1, 601)}

    def training(self, model: nn.Module, rate: float) -> Iterator[None]:
        assert isinstance(model, Knob)
        while True:
            model.rate, model.epochs = rate, model.epochs + 1
            yield

    def score(self, model: nn.Module) -> float:
        assert isinstance(model, Knob)
        if model.rate > 0.9:
            return float("nan")
        return model.epochs - abs(model.rate / self.rate - self.likes)

    def yardstick(self) -> str:
        return ""

    def validation(self) -> Known:
        return Known(3.0)


def test_each_method_gets_the_best_rate_on_held_out_data() -> None:
    found = list(compare(Known(), [4], ["hash", "lowdim"], seeds=2, least_rows=100))
    for result in found:
        assert result.rate == pytest.approx(0.3)
        assert result.scores == pytest.approx((2 - 8 / 3,) * 2)
    (plain, *_) = compare(Known(), [4], ["hash"], seeds=1, rates=(1.0,), least_rows=100)
    assert plain.rate == 0.1
    hashed = next(scored for scored in found if scored.method == "hash")
    assert epochs_to(Known(), hashed, 0.9 - 8 / 3, 3, least_rows=100) == [1, 1]
    assert epochs_to(Known(), hashed, 2.9 - 8 / 3, 3, least_rows=100) == [3, 3]
    assert epochs_to(Known(), hashed, 5.0, 3, least_rows=100) == [None, None]


def test_rows_name_the_winner_and_every_baseline() -> None:
    def at(method: str, requested: float, score: float, ratio: float, rate: float = 0.1) -> Scored:
        return Scored(method, requested, 100, ratio, rate, (score, score))

    scored = [
        at(DENSE, 1, 0.9, 1), at("int8", 1, 0.89, 3.2), at("int4", 1, 0.88, 5.3),
        at("lowdim", 16, 0.8, 16), at("tt", 16, 0.5, 16), at("hot_tt", 16, 0.6, 16, 0.3),
        at("robe", 16, 0.55, 16), at("hash", 16, 0.4, 16),
    ]  # fmt: skip
    study = _Study("known", Known, (16,), (), (_OVER_HASH, _PLAN, _TRAIN))
    over, planned, train = _rows(study, Known(), 16, [*scored, at(CONVERTED, 16, 0.7, 16)], 1)
    assert over.bar == "quality, known at 16x: ROBE over hashed rows"
    assert (over.value, over.holds) == (pytest.approx(0.15), True)
    assert (planned.value, planned.holds) == (pytest.approx(-0.1), False)
    assert (train.value, train.holds) == (pytest.approx(0.05), True)
    for phrase in ("best at this size: lowdim", "int8 0.8900 (3.2x)", "hot_tt 0.6000 [3]"):
        assert phrase in over.detail
    assert over.detail.index("lowdim") < over.detail.index("robe") < over.detail.index("int4")


def test_a_comparison_has_every_baseline() -> None:
    log = implicit_feedback(300, 400, rank=4, per_user=40, taste=2.0, seed=0)
    task = Feedback(log.data, "planted", dim=16, epochs=3, batch=256)
    found = list(compare(task, [4], ["lowdim", "hash"], seeds=1, rates=(1.0,), least_rows=100))
    by_name = {scored.method: scored for scored in found}
    assert set(by_name) == {DENSE, "int8", "int4", CONVERTED, "lowdim", "hash"}
    assert by_name["int8"].ratio == pytest.approx(64 / 18, rel=0.01)
    assert by_name["int4"].ratio == pytest.approx(64 / 10, rel=0.01)
    assert all(scored.ratio >= 4 for scored in found if scored.requested == 4)
    assert by_name["int8"].mean == pytest.approx(by_name[DENSE].mean, abs=0.01)
    assert by_name["lowdim"].mean > by_name["hash"].mean
    order = ranked(found, 4)
    assert {scored.method for scored in order} == {"int4", CONVERTED, "lowdim", "hash"}
    assert [scored.mean for scored in order] == sorted(
        (scored.mean for scored in order), reverse=True
    )


def test_clicks_are_learned_and_never_better_than_the_truth() -> None:
    log = click_log(
        20_000, test_rows=5_000, cardinalities=(3000, 500, 20), dense=2, signal=0.8, seed=0
    )
    task = ClickTask(log.data, "clicks", dim=4)
    (dense, *_, robe) = compare(task, [20], ["robe"], seeds=1, rates=(1.0,), convert=False)
    best = auc(log.test_probabilities, log.data.test.labels)
    assert best == pytest.approx(log.bayes_auc, abs=0.03)
    assert 0.6 < robe.mean < best + 0.005
    assert 0.65 < dense.mean < best + 0.005


def test_a_plan_is_compared_with_the_variation_of_seeds() -> None:
    def rows(plan: float, seeds: int) -> Bar:
        log = implicit_feedback(40, 60, per_user=10, seed=1)
        task = Feedback(log.data, "made up", dim=8)
        study = _Study("made up", lambda: task, (16,), (), (_NOT_BELOW,))
        apart = (0.0, 0.01, -0.01)[:seeds]
        scored = [
            Scored(method, 1.0 if method == DENSE else 16, 1, 16.0, 0.1,
                   tuple(mean + offset for offset in apart))
            for method, mean in ((DENSE, 0.5), ("lowdim", 0.4), (MIXED, 0.45), (CONVERTED, plan))
        ]  # fmt: skip
        (row,) = _rows(study, task, 16, scored, 1)
        return row

    # The worse of both plans counts; 0.01 is the deviation.
    assert rows(0.395, 3).holds is True
    assert rows(0.38, 3).holds is False
    assert rows(0.45, 1).holds is None


def test_texts_are_learned_as_bags_of_words() -> None:
    draw = np.random.default_rng(0)
    texts = [
        (" ".join(["good", "fine"][label] if draw.random() < 0.5 else "word" for _ in range(6))
         + f" only{number}", label)
        for number, label in enumerate(draw.integers(0, 2, 400).tolist())
    ]  # fmt: skip
    task = _task("made up", texts[:300], texts[300:], classes=2)
    # Words that occur once have no row.
    assert task.word_count == 3
    assert int(task.counts()["words"].sum()) == sum(map(len, task.train.ids))
    torch.manual_seed(0)
    model = task.model()
    before = task.score(model)
    for _ in islice(task.training(model, 0.03), 3):
        pass
    assert task.score(model) > max(before, 0.9)
    held = task.validation()
    assert len(held.train.ids) + len(held.test.ids) == len(task.train.ids)
    assert set(plan(model, task.counts(), ratio=8, least_rows=1).tables) == {"words"}
