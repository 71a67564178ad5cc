"""The builder restores what it probes, and its result is consistent and within the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import slipstream as ss
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.quadratic import (
    Linear,
    ShorteningResult,
    convert,
    sensitivities,
    shorten,
)


def network(*, branch_norm: bool = False) -> nn.Sequential:
    """Four convolutions of 8 x 8 images, two of which are removable, and a classifier."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    convert(model, except_="13", init="random", branch_norm=branch_norm)
    return model


X = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """Return names of modules whose state has changed in any bit."""
    return {
        name.rpartition(".")[0]
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }


def test_a_probe_changes_one_layer_and_is_undone_before_the_next() -> None:
    model = network()
    before, seen = states(model), []

    def score(probe: nn.Module) -> float:
        assert not probe.training
        seen.append(changed(probe, before))
        return float(len(seen))

    rows = sensitivities(model, score, X)
    assert seen == [set(), {"0"}, {"3"}, {"6"}, {"9"}]
    assert changed(model, before) == set()
    assert model.training
    assert {row.name: row.drop for row in rows} == {"0": -1, "3": -2, "6": -3, "9": -4}


def test_the_indicator_is_cost_over_loss_and_harmless_layers_go_first() -> None:
    drops = {"0": 0.4, "3": 0.2, "6": 0.0, "9": -0.1}
    rows = sensitivities(network(), scorer(drops), X)
    assert [row.name for row in rows[:2]] == ["9", "6"]  # both infinite: the larger one first
    by_name = {row.name: row for row in rows}
    third = by_name["3"]
    # Three projections of 3 x 3 x 8 weights to 8 channels at 64 positions, and 8 biases.
    assert third.parameters == pytest.approx((3 * 9 * 64 + 8) / parameters(network()))
    assert third.operations / by_name["0"].operations == pytest.approx(8)
    assert third.redundancy == pytest.approx(third.parameters * third.operations / 0.2)


def scorer(drops: dict[str, float]) -> Any:
    """A score that decreases by this much for the masked layer, in order of requests."""
    values = iter([1.0, *(1.0 - drop for drop in drops.values())])
    return lambda model: next(values, 0.5)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("of", ["parameters", "operations"])
@pytest.mark.parametrize("budget", [0.9, 0.75, 0.5, 0.25])
def test_it_ends_at_the_budget_with_a_network_that_runs_and_learns(of: Any, budget: float) -> None:
    model = network(branch_norm=True)
    before = states(model)
    trained: list[nn.Module] = []
    drops = {"0": 0.4, "3": 0.1, "6": 0.2, "9": 0.3}
    result = shorten(model, trained.append, scorer(drops), X, budget=budget, of=of)
    assert trained == [result.model]
    assert changed(model, before) == set()
    assert budget * 0.95 <= result.share <= budget
    if of == "parameters":
        assert result.share == pytest.approx(parameters(result.model) / parameters(model))
    result.model(X).square().sum().backward()
    assert all(parameter.grad is not None for parameter in result.model.parameters())
    layer = result.model[0]
    assert isinstance(layer, type(model[0]))
    assert layer.gamma is not None


def test_layers_are_removed_in_order_and_leave_their_stride() -> None:
    drops = {"0": 0.5, "3": -1.0, "6": 1e-9, "9": 0.5}
    result = shorten(network(), lambda model: None, scorer(drops), X, budget=0.33)
    assert result.removed == ("3", "6")
    assert isinstance(result.model[3], nn.Identity)
    assert isinstance(result.model[6], nn.AvgPool2d)
    assert result.model[7].num_features == 8  # 16 channels are no longer computed or read
    assert result.model[9].weight.shape[1] == 8
    text = str(result.table().to_markdown())
    assert text.index("| 3 ") < text.index("| 6 ") < text.index("| 9 ")
    assert "removed" in text


@pytest.mark.parametrize("branch_norm", [False, True])
def test_it_starts_like_a_first_order_network_if_possible(branch_norm: bool) -> None:
    drops = {"0": 0.5, "3": -1.0, "6": 1e-9, "9": 0.5}
    model = network(branch_norm=branch_norm)
    result = shorten(model, lambda model: None, scorer(drops), X, budget=0.75)
    layer = result.model[0]
    assert isinstance(layer, type(model[0]))
    assert not torch.equal(layer.weight, model[0].weight)
    second = layer.weight[8:16]
    assert bool((second == 0).all()) is not branch_norm


def test_a_residual_sum_keeps_its_channels() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 24), nn.Linear(24, 6)
            self.same, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.second(self.first(x).relu())
            out: torch.Tensor = self.head(x + self.same(x))
            return out

    model = Residual()
    convert(model, init="random")
    x = torch.randn(2, 6)
    drops = {"first": 0.1, "second": 0.1, "same": 0.0, "head": 0.1}
    result = shorten(model, lambda model: None, scorer(drops), x, budget=0.5)
    # `second` returns fewer channels than it takes; `first` may lose units, which only it reads.
    assert result.removed[0] == "same"
    assert "second" not in result.removed
    assert result.model(x).shape == (2, 3)
    assert 0.475 <= result.share <= 0.5


def test_it_finds_the_layer_that_the_task_does_not_need() -> None:
    """A product of two inputs: the first layer can compute it, the second is useless."""
    torch.manual_seed(0)
    x = torch.randn(512, 2)
    y = x[:, 0] * x[:, 1]
    model = nn.Sequential(Linear(2, 8), Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():  # passes its input on
        model[1].weight.copy_(torch.cat([torch.zeros(16, 8), torch.eye(8)]))

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(300):
            optimizer.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            optimizer.step()

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return -float((model(x)[:, 0] - y).square().mean())

    model[1].requires_grad_(False)
    train(model)
    result = ss.quadratic.shorten(model, train, score, x, budget=0.25)
    assert isinstance(result, ShorteningResult)
    assert result.removed == ("1",)
    assert result.after > -1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": 1.0}, r"not in \(0, 1\)"),
        ({"budget": 0.001}, "cannot be reached"),
        ({"of": "layers"}, "neither parameters nor"),
        ({"mask": 0.0}, r"not in \(0, 1\]"),
        ({"score": lambda model: float("nan")}, "is nan for the whole model"),
        ({"model": nn.Sequential(nn.Linear(2, 2))}, "no quadratic layer"),
        ({"model": Linear(2, 2)}, "is a single layer"),
    ],
)
def test_errors_explain_themselves(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "model": network(), "train": lambda model: None, "score": lambda model: 1.0, "x": X,
        "budget": 0.5,
    }  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=words):
        shorten(**{**arguments, **change})


def test_a_model_that_cannot_be_traced_loses_only_whole_layers() -> None:
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) if bool((x > 1e9).any()) else torch.tanh(layer(x))
            return x

    model, x = Looping(), torch.randn(3, 4)
    drops = {"layers.0": 0.4, "layers.1": 0.0, "layers.2": 0.1, "layers.3": 0.3}
    result = shorten(model, lambda model: None, scorer(drops), x, budget=0.5)
    assert result.removed == ("layers.1", "layers.2")
    with pytest.raises(InvalidArgumentError, match=r"pass 0\.500 or more"):
        shorten(copy.deepcopy(model), lambda model: None, scorer(drops), x, budget=0.45)


def test_class_labels_are_learned_as_before() -> None:
    torch.manual_seed(0)
    x, labels = X.repeat(8, 1, 1, 1), torch.arange(4).repeat(8)

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(30):
            optimizer.zero_grad()
            cross_entropy(model(x), labels).backward()
            optimizer.step()

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(x).argmax(1) == labels).float().mean())

    model = network(branch_norm=True)
    train(model)
    result = shorten(model, train, score, X, budget=0.5)
    assert result.before == result.after == 1.0
