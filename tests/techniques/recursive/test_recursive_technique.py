"""The technique recursive finds modules that call themselves, and compiles their calls."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import slipstream as ss
from model_uses import check_uses
from slipstream.codegen import why_no_compiler
from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError
from slipstream.graph.flow import matches
from slipstream.native import library
from slipstream.technique import Context
from slipstream.techniques.recursive import RecursiveModelError, compile_calls
from slipstream.techniques.recursive.calls import CompiledForward
from slipstream.techniques.recursive.technique import Recursive, recursions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, mlp

pytestmark = pytest.mark.skipif(
    library() is None or why_no_compiler() is not None, reason="needs compiled code"
)
EXAMPLE = Path(__file__).parents[3] / "examples/tree_lstm.py"


@dataclass
class Part:
    """A range of the rows of a matrix, split in halves."""

    x: torch.Tensor
    parts: list[Part]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.joined = nn.Linear(6, 10), nn.Linear(20, 10)

    def forward(self, part: Part) -> torch.Tensor:
        if not part.parts:
            return torch.tanh(self.leaf(part.x))
        return torch.tanh(self.joined(torch.cat([self(inner) for inner in part.parts])))


def split(rows: torch.Tensor) -> Part:
    middle = len(rows) // 2
    return Part(rows[0], [split(rows[:middle]), split(rows[middle:])] if middle else [])


class Rows(nn.Module):
    """Scores of matrices, [batch, rows, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scores = Encoder(), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.stack([self.encoder(split(rows)) for rows in x]))


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Rows()
    assert compile_calls(model) == ["encoder"]
    return model


def test_a_model_with_compiled_calls_bears_the_uses_of_a_model() -> None:
    check_uses(make, torch.randn(4, 7, 6), except_=("unbatched",))


def test_calls_are_one_kernel_call_with_the_same_outputs_and_gradients() -> None:
    model, x = make(), torch.randn(3, 5, 6)
    plain = copy.deepcopy(model)
    del vars(plain.encoder)["forward"]
    torch.testing.assert_close(model(x), plain(x))
    for changed in (model, plain):
        changed(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    forward: Any = model.encoder.forward
    assert isinstance(forward, CompiledForward)
    assert forward.net is not None
    assert copy.deepcopy(model).encoder.forward.module is not model.encoder


def test_dropout_that_training_switches_on_is_not_computed_without() -> None:
    class Dropped(Encoder):
        def forward(self, part: Part) -> torch.Tensor:
            if not part.parts:
                return torch.tanh(self.leaf(part.x))
            state: torch.Tensor = nn.functional.dropout(
                self(part.parts[0]) + self(part.parts[1]), 0.5, self.training
            )
            return state

    model = Dropped().eval()
    compile_calls(model)
    node = split(torch.randn(4, 6))
    model(node)
    with pytest.raises(RecursiveModelError, match=r"dropout|bernoulli"):
        model.train()(node)


def test_a_model_without_recursion_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="none of its modules calls itself"):
        compile_calls(nn.Linear(2, 2))


def classifying() -> Any:
    return Rows(), torch.randn(4, 7, 6)


def training() -> Any:
    model = Rows()
    batch = (torch.randn(4, 7, 6), torch.randint(0, 3, (4,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("make", [classifying, training])
def test_a_recorded_recursion_becomes_one_task_per_pass(make: Any, tmp_path: Path) -> None:
    graph, technique = graph_of(make), Recursive()
    (found,) = matches(graph, recursions)
    assert found.module == "encoder"
    assert found.arities == (2, 2, 0, 2, 0, 0, 2, 2, 0, 0, 2, 0, 0) * 4
    assert found.products == ((20, 10, 1),)
    assert technique.why_not(graph) is None
    passes = 1 + (make is training)
    calls = technique.required_timings(graph)
    assert len(calls) == passes
    assert not cannot_be_timed(calls)
    predicted = technique.predict(graph, Context(Durations(1, tmp_path / "d.db")))
    assert len(predicted) == len(graph) - len(found.tasks) + passes
    built = build(make, technique)
    built.step()
    assert isinstance(built.model.encoder.forward, CompiledForward)


def test_a_step_without_recursion_is_refused() -> None:
    reason = Recursive().why_not(graph_of(mlp))
    assert reason is not None
    assert "no module calls itself" in reason


@pytest.mark.full
def test_advise_names_it_for_a_script(tmp_path: Path) -> None:
    predictions = ss.predict(ss.profile(f"{EXAMPLE}:make_training", threads=1), ["recursive"])
    assert predictions[0].speedup > 1
