"""Rules for cheaper subgraphs: search, checks, store, and use in a model."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from slipstream.errors import SlipstreamError
from slipstream.graph import TensorSpec
from slipstream.surgery.fx import trace_of
from slipstream.techniques.rewrite.expression import Constant, Expression, Instruction, Ref
from slipstream.techniques.rewrite.rules import Rule, RuleStore, find_rules, use_rules
from slipstream.techniques.rewrite.search import Enumeration
from slipstream.techniques.rewrite.tracing import TracingBackend
from slipstream.techniques.rewrite.verify import why_different

_ROWS = TensorSpec("float32", (32, 48), (48, 1))


def _expression(*rows: tuple[object, ...], constants: tuple[float, ...] = ()) -> Expression:
    """Return an expression of one input; its value is that of the last row."""
    instructions = tuple(Instruction(str(op), tuple(arguments)) for op, *arguments in rows)
    return Expression(1, instructions, Ref(len(rows)), constants)


SOFTMAX = _expression(
    ("amax.default", Ref(0), (-1,), True),
    ("sub.Tensor", Ref(0), Ref(1), 1),
    ("exp.default", Ref(2)),
    ("sum.dim_IntList", Ref(3), (-1,), True, None),
    ("div.Tensor", Ref(3), Ref(4)),
)
GELU = _expression(
    ("mul.Tensor", Ref(0), Constant(0)),
    ("div.Tensor", Ref(0), Constant(1)),
    ("erf.default", Ref(2)),
    ("add.Tensor", Ref(3), 1, 1),
    ("mul.Tensor", Ref(1), Ref(4)),
    constants=(0.5, 2**0.5),
)
VARIANCE = _expression(
    ("mean.dim", Ref(0), (-1,), True, None),
    ("sub.Tensor", Ref(0), Ref(1), 1),
    ("pow.Tensor_Scalar", Ref(2), 2),
    ("mean.dim", Ref(3), (-1,), False, None),
)
CLAMP = _expression(("clamp_min.default", Ref(0), 0), ("mul.Tensor", Ref(1), 1.0))


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (SOFTMAX, ("softmax", Ref(0), -1)),
        (GELU, ("gelu", Ref(0))),
        (VARIANCE, ("var", Ref(0), -1, False, 0)),
    ],
    ids=["softmax", "gelu", "variance"],
)
def test_the_search_finds_the_library_function(
    pattern: Expression, replacement: tuple[object, ...]
) -> None:
    found = next(Enumeration(pattern, [_ROWS], max_ops=1).candidates())
    expected = _expression(replacement)
    assert found.instructions == expected.instructions
    assert why_different(pattern, found, [_ROWS]) is None


@pytest.mark.parametrize(
    ("pattern", "replacement", "reason"),
    [
        (SOFTMAX, ("softmax", Ref(0), -2), "the value differs"),
        (SOFTMAX, ("log_softmax", Ref(0), -1), "the value differs"),
        (GELU, ("gelu_tanh", Ref(0)), "the value differs"),
        (VARIANCE, ("var", Ref(0), -1, False, 1), "the value"),
        (VARIANCE, ("var", Ref(0), -1, True, 0), "another shape"),
        (CLAMP, ("relu", Ref(0)), "the gradient of input 1 differs"),
        (
            _expression(("clone.default", Ref(0), None)),
            ("transpose", Ref(0), 0, 1),
            "another shape",
        ),
    ],
)
def test_near_misses_are_refuted(
    pattern: Expression, replacement: tuple[object, ...], reason: str
) -> None:
    different = why_different(pattern, _expression(replacement), [_ROWS])
    assert different is not None
    assert reason in different


def test_a_view_of_the_input_does_not_replace_a_copy() -> None:
    copy = _expression(("clone.default", Ref(0), None))
    same = Expression(1, (), Ref(0))
    assert why_different(copy, same, [_ROWS]) == "only one of them returns a view of its input"


def test_an_expression_survives_json_with_its_source() -> None:
    again = Expression.from_json(GELU.to_json())
    assert again == GELU
    assert again.source == "mul(mul(a, 0.5), add(erf(div(a, 1.41421)), 1, 1))"


def test_a_damaged_rule_is_reported_with_its_file(tmp_path: Path) -> None:
    store = RuleStore(tmp_path / "rules.db")
    store.add(Rule(GELU, GELU, (), (_ROWS,)))
    assert store.rules() == [Rule(GELU, GELU, (), (_ROWS,))]
    with sqlite3.connect(tmp_path / "rules.db") as connection:
        connection.execute("UPDATE verdict SET rule = '[1, 2]'")
    connection.close()
    with pytest.raises(SlipstreamError, match=r"rules\.db"):
        store.rules()


class Clumsy(nn.Module):
    """A manual softmax between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        e = torch.exp(y - y.amax(-1, keepdim=True))
        return self.last(e / e.sum(-1, keepdim=True))


def test_found_rules_replace_the_subgraph_of_another_model(tmp_path: Path) -> None:
    store = RuleStore(tmp_path / "rules.db")
    x = torch.randn(32, 48)

    def search(traced: GraphModule) -> None:
        find_rules(trace_of(traced), store, max_ops=1, budget_s=60)

    torch.compile(Clumsy(), backend=TracingBackend(search), dynamic=False)(x)  # type: ignore[call-overload]
    assert "torch.softmax(a, dim=-1)" in [rule.replacement.source for rule in store.rules()]
    torch._dynamo.reset()

    model, changed = Clumsy(), Clumsy()
    changed.load_state_dict(model.state_dict())
    replaced, _ = use_rules(changed, store)
    expected, actual = model(x), changed(x)
    assert replaced == ["torch.softmax(a, dim=-1)"]
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for ours, theirs in zip(model.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad)
