"""Planted redundancy is found and taken away exactly; ensembles are what their members say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.techniques.ensembles import Ensemble, build, compact, evaluate, redundancy


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 9, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9 * 4, 3),
    )  # fmt: skip


def plant(model: nn.Sequential) -> None:
    """In the first layer: a duplicate, a scaled copy, a constant and a dead unit."""
    layer, norm = model[0], model[1]
    with torch.no_grad():
        weight, bias = layer.weight, layer.bias
        bias += 0.5  # so that no other unit of a random layer is dead
        weight[3], bias[3] = weight[0], bias[0]
        weight[4], bias[4] = 2.5 * weight[1], 2.5 * bias[1]
        weight[5], bias[5] = 0.0, 0.7
        weight[6], bias[6] = 0.0, -1.0
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.zero_()
            norm.running_var.fill_(1.0)


@pytest.mark.parametrize(("make", "shape"), [(mlp, (6,)), (cnn, (2, 8, 8))])
def test_what_was_planted_goes_and_outputs_stay(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    plant(model)
    batches = list(torch.randn(8, 64, *shape))
    before = copy.deepcopy(model.state_dict())
    found = compact(model, batches)
    assert (found.layers[0].dead, found.layers[0].dependent) == (2, 2)
    assert (found.layers[1].dead, found.layers[1].dependent) == (0, 0)
    x = torch.randn(50, *shape)
    torch.testing.assert_close(found.model(x), model(x), rtol=1e-5, atol=1e-5)
    assert found.parameters < 1
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


def test_a_lower_correlation_takes_more() -> None:
    torch.manual_seed(0)
    batches = list(torch.randn(8, 64, 6))
    model = mlp()
    model[1] = nn.Tanh()  # of which no unit is dead
    sizes = [compact(model, batches, c).parameters for c in (1.0, 0.95, 0.8)]
    assert sizes[0] == 1.0
    assert sizes == sorted(sizes, reverse=True)
    assert sum(one.dependent for one in redundancy(model, batches, 0.8)) > 0


def fit(x: torch.Tensor, y: torch.Tensor) -> Any:
    def train(model: nn.Module, share: float, seed: int) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(round(100 * share)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return train


@pytest.mark.parametrize("method", ["independent", "peers", "snapshot"])
def test_members_differ_and_together_are_no_worse(method: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    train = fit(x[:200], y[:200])
    made = build(mlp(), train, members=3, method=method, sample=[x[:200]])
    assert len(made.members) == 3
    quality = evaluate(made, x[200:], y[200:])
    alone = [evaluate(Ensemble([one]), x[200:], y[200:]) for one in made.members]
    assert quality.disagreement > 0
    assert quality.nll <= sum(one.nll for one in alone) / 3  # the logarithm is concave
    assert alone[0].disagreement == 0
    torch.testing.assert_close(made(x).sum(-1), torch.ones(300))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: build(mlp(), lambda *_: None, members=0), InvalidArgumentError, "less than one"),
        (lambda: compact(mlp(), []), InvalidArgumentError, "are none"),
        (lambda: compact(mlp(), [torch.zeros(1, 6)], 1.5), InvalidArgumentError, "not in"),
        (lambda: compact(nn.Linear(2, 2), [torch.zeros(1, 2)]), WorkloadError, "Sequential"),
        (
            lambda: compact(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), [torch.zeros(1, 2)]),
            WorkloadError,
            "Softmax",
        ),
        (
            lambda: evaluate(Ensemble([mlp()]), torch.zeros(2, 6), torch.zeros(0)),
            InvalidArgumentError,
            "labels|are 0",
        ),
        (
            lambda: Ensemble([nn.Linear(2, 2), nn.Linear(2, 3)])(torch.zeros(1, 2)),
            InvalidArgumentError,
            "different shapes",
        ),
    ],
)
def test_errors_say_what(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
