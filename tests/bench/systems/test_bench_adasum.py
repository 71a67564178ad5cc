"""Simulated workers: the reference of the rule, and results that all simulations share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from slipstream_bench.systems.adasum import study as study_of
from slipstream_bench.systems.adasum import tasks_other
from slipstream_bench.systems.adasum.reference import adasum_of
from slipstream_bench.systems.adasum.study import Samples, Study, combined


def samples(count: int, seed: int) -> Samples:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return Samples(x, x[:, :3].argmax(1))


@pytest.fixture
def study() -> Study:
    made = [samples(count, seed) for seed, count in enumerate((64, 100, 200))]
    return Study(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), *made, workers=4,
        batch=4, epochs=5,
    )  # fmt: skip


def test_updates_are_combined_by_layer_as_in_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    updates = {
        name: torch.randn(5, *shape, generator=generator) + 0.5
        for name, shape in {"weight": (7, 3), "bias": (7,), "zero": (2,)}.items()
    }
    updates["zero"].zero_()
    for name, found in combined(updates).items():
        torch.testing.assert_close(found, adasum_of(list(updates[name])), rtol=1e-5, atol=1e-6)


def test_one_worker_equals_averaging_and_many_equal_one_with_their_batch(
    study: Study,
) -> None:
    alone = replace(study, workers=1, batch=16)
    expected = alone.reached("average", 0.1, 0)
    assert expected.held > 50.0
    for rule in ("adasum", "adasum_hook"):
        assert alone.reached(rule, 0.1, 0) == expected
    assert study.reached("average", 0.1, 0) == expected


def test_the_rate_decreases_linearly(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[torch.Tensor] = []

    def right(model: nn.Module, weight: dict[str, torch.Tensor], of: Samples) -> float:
        ended.append(torch.cat([tensor.flatten() for tensor in weight.values()]))
        return 0.0

    monkeypatch.setattr(study_of, "_right", right)
    two = replace(study, batch=16, epochs=2, momentum=0.0)
    assert two.steps == 2
    for run in (replace(two, epochs=1), two, replace(two, falling=True)):
        run.reached("adasum", 0.1, 0)
    first, stays, falls = ended[::2]
    assert not torch.equal(first, stays)
    torch.testing.assert_close(falls, (first + stays) / 2)


def test_a_diverging_run_ends_at_chance_level(study: Study) -> None:
    assert study.reached("average", 1e30, 0).held < 70.0


def test_settings_are_chosen_on_other_samples_than_reported(study: Study) -> None:
    swapped = replace(study, choice=study.held, held=study.choice)
    found, other = (variant.reached("adasum_hook", 0.1, 0) for variant in (study, swapped))
    assert (found.chosen, found.held) == (other.held, other.chosen)


def test_places_of_a_training_that_averages_are_profiled(study: Study) -> None:
    first, last = study.profiles(0.1, 0, (0.0, 0.9))
    for products, loss in (first, last):
        assert products.shape == (4, 4, 4)
        assert loss > 0.0
    # It learned; the same step of the same training gives the same profile.
    assert last[1] < first[1]
    again = study.profiles(0.1, 0, (0.0,))[0]
    assert (again[0] == first[0]).all()


def test_other_data_is_encoded_as_numbers() -> None:
    words = tasks_other._words(["Alpha beta, ALPHA!", "", "of it"])
    assert words.shape[0] == 3
    assert sorted(words[0][words[0] > 0]) == pytest.approx(np.log1p([1.0, 2.0]))
    assert not words[1:].any()
    tone = np.sin(np.arange(4000) * 2 * np.pi * 40 / 256) * 32767
    bands = tasks_other._spectrum(tone.astype(np.int16)).reshape(16, 32)
    # Line 40 is the fortieth beyond the constant, four of which are a band.
    assert (bands.argmax(1) == 39 // 4).all()
    assert np.isfinite(tasks_other._spectrum(np.zeros(10, np.int16))).all()
    x, y = np.arange(100.0).reshape(50, 2), np.arange(50)
    shares = tasks_other._shared(x, y, 30)
    assert [len(share.x) for share in shares] == [30, 3, 17]
    assert sorted(torch.cat([share.y for share in shares]).tolist()) == list(range(50))
