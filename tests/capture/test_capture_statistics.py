"""Statistics of real steps of functions and scripts, recorded after the timed ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from slipstream.capture import STATISTICS
from slipstream.workload import BuiltWorkload, build_from
from tiny_models import record

OF_VALUES = tuple(name for name in STATISTICS if name != "regions")


def build(result: Any) -> BuiltWorkload:
    return build_from(result, [], 0, "small")


def words() -> BuiltWorkload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    batch = (torch.randint(0, 11, (5, 4)), torch.randint(0, 3, (5,)))
    return build((model, batch, cross_entropy, torch.optim.SGD(model.parameters(), 0.1)))


def test_all_statistics_agree_with_the_model_and_its_batch() -> None:
    built = words()
    found = record(built, *OF_VALUES).statistics
    assert found.recorded == tuple(sorted(OF_VALUES))
    assert found.reasons == {}
    assert found.same_batch
    (table,) = found.ids
    assert table.lookups == 20 * found.steps
    assert set(table.hot_ids) == set(built.batch[0].flatten().tolist())
    assert {(entry.parameter, entry.of) for entry in found.spectra} == {
        (f"model.{name}.weight", of) for name in "03" for of in ("weight", "gradient")
    }
    weight = next(entry for entry in found.spectra if entry.of == "weight")
    true = torch.linalg.svdvals(built.model[0].weight.detach())
    assert weight.values == pytest.approx(true.tolist(), rel=1e-5)
    assert [grad.parameter for grad in found.grads] == [
        f"model.{name}" for name, _ in built.model.named_parameters()
    ]
    seen = set(table.hot_ids)
    assert found.grads[0].zeros >= 1 - len(seen) / 11  # rows that were not looked up
    by_module = {entry.module: entry for entry in found.sparsity}
    assert by_module["model.1"].outputs == by_module["model.3"].inputs
    assert 0.2 < (by_module["model.1"].outputs or 0.0) < 0.8


def test_only_requested_statistics_are_recorded() -> None:
    found = record(words(), "ids").statistics
    assert found.recorded == ("ids",)
    assert found.ids
    assert found.spectra == found.grads == found.sparsity == ()
    assert record(words()).statistics.recorded == ()


def test_statistics_take_separate_steps_and_leave_tasks_unchanged() -> None:
    plain, recorded = record(words()), record(words(), *OF_VALUES)
    assert recorded.meta["steps"] == plain.meta["steps"] == 3
    assert recorded.meta["events_per_step"] == plain.meta["events_per_step"]
    assert np.array_equal(recorded.tasks.name, plain.tasks.name)
    assert recorded.strings == plain.strings
    assert np.array_equal(recorded.memory.nbytes, plain.memory.nbytes)


def test_the_reason_of_an_absent_statistic_is_stored() -> None:
    model = nn.Conv2d(1, 1, 1)
    found = record(build((model, torch.randn(1, 1, 4, 4))), *OF_VALUES).statistics
    assert "no embedding" in found.reasons["ids"]
    assert "no optimizer" in found.reasons["grads"]
    assert "matrix" in found.reasons["spectra"]
    assert found.sparsity


def test_a_step_that_hides_its_model_still_shows_ids_and_gradients() -> None:
    table, head = nn.Embedding(7, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.1)

    def step() -> Any:
        optimizer.zero_grad()
        loss = head(table(torch.randint(0, 7, (4,)))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = record(build(step), *OF_VALUES).statistics
    assert not found.same_batch
    assert [table.table for table in found.ids] == ["a table of 7 x 2"]
    assert [grad.parameter for grad in found.grads] == [
        f"parameter {n} of group 0" for n in range(3)
    ]
    assert "hides its model" in found.reasons["spectra"]
    assert "hides its model" in found.reasons["sparsity"]


def test_a_compiled_model_is_observed_uncompiled() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    # Without Inductor, no C++ has to be compiled.
    model: Any = torch.compile(plain, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    built = build((model, (torch.randn(6, 4), torch.randn(6, 1)), mse_loss, optimizer))
    found = record(built, "sparsity", "ids").statistics
    assert [entry.module for entry in found.sparsity] == [f"model._orig_mod.{n}" for n in range(3)]
    assert (found.sparsity[1].outputs or 0.0) > 0.1
