"""Outputs are compared up to rounding, in eval mode, without changing the model."""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.surgery import difference, outputs_of, tensors_in


def test_runs_without_dropout_and_keeps_statistics() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
    model[1].eval()
    x = torch.randn(8, 3)
    before = model[1].running_mean.clone()
    (first,), (second,) = (outputs_of(model, lambda: model(x)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(model[1].running_mean, before)
    assert [m.training for m in (model, model[0], model[1])] == [True, True, False]


def test_keeps_the_random_state() -> None:
    model = nn.Linear(2, 2)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    outputs_of(model, lambda: model(torch.randn(1, 2)))
    assert torch.equal(torch.rand(4), expected)


def test_ignores_rounding() -> None:
    x = torch.randn(50)
    assert difference([{"a": x}], [{"a": x * (1 + 1e-6)}]) is None


def test_describes_differences() -> None:
    x = torch.ones(3)
    assert re.search(r"\boutput 0\b.*\b0\.1\b", str(difference([x], [x + 0.1])))
    assert "shape" in str(difference([x], [torch.ones(4)]))
    assert "structured" in str(difference([x], [(x, x)]))
    assert "differs" in str(difference([torch.tensor([1])], [torch.tensor([2])]))
    assert "no tensor" in str(difference([None], [None]))


def test_a_new_nan_is_a_difference() -> None:
    x = torch.ones(3)
    assert difference([x], [torch.tensor([1.0, float("nan"), 1.0])]) is not None
    assert difference([x / 0], [x / 0]) is None


@dataclass
class _Output:
    logits: Any
    loss: Any = None


_Pair = namedtuple("_Pair", "a b")


class _Mapping(OrderedDict[str, Any]):
    """A mapping like those of libraries, which torch does not traverse."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: SimpleNamespace(loss=None, logits=x),
        lambda x: _Output(x),
        lambda x: _Mapping(logits=x),
        lambda x: _Pair(1, x),
        lambda x: [{"deep": SimpleNamespace(states=(x,))}],
    ],
)
def test_finds_tensors_in_any_output(wrap: Any) -> None:
    x = torch.ones(3)
    assert tensors_in(wrap(x)) == [x]
    assert difference([wrap(x)], [wrap(x * (1 + 1e-6))]) is None
    assert re.search(r"\boutput \d\b.*\b0\.1\b", str(difference([wrap(x)], [wrap(x + 0.1)])))


def test_handles_cyclic_references() -> None:
    knot = SimpleNamespace(x=torch.ones(1), model=nn.Linear(1, 1))
    knot.self = knot
    assert tensors_in(knot) == [knot.x]
