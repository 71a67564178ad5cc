"""Rules for cheaper subgraphs: search, checks, store, and use in a model."""

from __future__ import annotations

import copy
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from model_uses import check_uses
from slipstream.durations import Durations
from slipstream.errors import SlipstreamError, WorkloadError
from slipstream.graph import TensorSpec
from slipstream.surgery.fx import trace_of
from slipstream.technique import Context
from slipstream.techniques.rewrite import rules, timing
from slipstream.techniques.rewrite.expression import Constant, Expression, Instruction, Ref
from slipstream.techniques.rewrite.regions import Pattern
from slipstream.techniques.rewrite.rules import Rule, RuleStore, find_rules, use_rules
from slipstream.techniques.rewrite.search import Enumeration
from slipstream.techniques.rewrite.technique import Rewrite
from slipstream.techniques.rewrite.tracing import TracingBackend
from slipstream.techniques.rewrite.verify import why_different
from slipstream.verbs import rewriting
from slipstream.verbs.rewriting import Rewrites

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, graph_of, mlp

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
        (VARIANCE, ("variance", Ref(0), -1, False)),
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
        (VARIANCE, ("norm", Ref(0), -1, False), "the value"),
        (VARIANCE, ("variance", Ref(0), -1, True), "another shape"),
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
    path = tmp_path / "rules.db"
    rule = Rule(GELU, GELU, (), (_ROWS,))
    for store in (RuleStore(path), RuleStore(path)):
        store.add(rule)
        store.add(replace(rule, replacement=SOFTMAX), "the value differs")
        store.add_fruitless("pattern")
    again = RuleStore(path)
    assert again.rules() == [rule]
    assert again.is_refuted(replace(rule, replacement=SOFTMAX))
    assert again.fruitless == {"pattern"}
    for value in ("[[1, 2], null]", "[]"):
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE result SET value = ?", (value,))
        with pytest.raises(SlipstreamError, match=r"rules\.db"):
            RuleStore(path)
    path.write_text("[]" * 600)
    with pytest.raises(SlipstreamError, match=r"rules\.db"):
        RuleStore(path)


class Clumsy(nn.Module):
    """A manual softmax and a manual GELU between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        e = torch.exp(y - y.amax(-1, keepdim=True))
        y = e / e.sum(-1, keepdim=True)
        return self.last(0.5 * y * (1 + torch.erf(y / 2**0.5)))


_RULES = (
    (SOFTMAX, ("softmax", Ref(0), -1), (
        ("amax", (-1,), (-1,)), ("sub", (), (-1, 0)), ("exp", (), (1,)), ("sum", (-1,), (2,)),
        ("div", (), (2, 3)),
    )),
    (GELU, ("gelu", Ref(0)), (
        ("mul", (), (-1,)), ("div", (), (-1,)), ("erf", (), (1,)), ("add", (), (2,)),
        ("mul", (), (0, 3)),
    )),
)  # fmt: skip
"""Rules whose gains do not depend on the machine that runs the tests."""


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RuleStore:
    """Make the rules of softmax and GELU the known ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = RuleStore()
    for pattern, replacement, rows in _RULES:
        store.add(Rule(pattern, _expression(replacement), rows, (_ROWS,), gains=(3.0, 2.0)))
    return store


def clumsy(batch_size: int = 32) -> object:
    model = Clumsy()
    batch = torch.randn(batch_size, 48), torch.randn(batch_size, 48)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_search_finds_rules_and_judges_them_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "gains", lambda pattern, replacement, specs: (1.5, 0.5))
    store = RuleStore(tmp_path / "rules.db")

    def search(module: GraphModule) -> None:
        traced = trace_of(module)
        assert find_rules(traced, store, max_ops=1, budget_s=60)
        # Had this process been killed, another one would not search again.
        stored = RuleStore(tmp_path / "rules.db")
        assert stored.rules() == store.rules()
        with monkeypatch.context() as patched:
            patched.delattr(rules, "_search")
            assert find_rules(traced, stored, max_ops=1, budget_s=60) == []

    backend: Any = TracingBackend(search)
    torch.compile(Clumsy(), backend=backend, dynamic=False)(torch.randn(32, 48))
    assert backend.reasons == []
    found = {rule.replacement.source: rule for rule in store.rules()}
    assert {"torch.softmax(a, dim=-1)", "F.gelu(a)"} <= set(found)
    rule = found["F.gelu(a)"]
    assert (rule.is_faster(training=False), rule.is_faster(training=True)) == (True, False)
    monkeypatch.setattr(rules, "gains", lambda pattern, replacement, specs: (1.0, 1.0))
    assert rules._judged(replace(rule, gains=(0.0, 0.0)), store) is None


def searched(built: Any) -> Any:
    """Return the result of a search with one operator and no time."""
    program = rewriting._search(built, 1, 0.0)
    next(program)
    built.step()
    with pytest.raises(StopIteration) as ended:
        next(program)
    return ended.value.value


def test_stored_rules_are_timed_at_the_sizes_of_the_model(
    stored: RuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "gains", lambda pattern, replacement, specs: specs[0].shape)
    monkeypatch.setattr(rewriting, "report_progress", lambda line: None)
    for size, gains in ((32, (3.0, 2.0)), (8, (8, 48))):
        torch._dynamo.reset()

        def sized(size: int = size) -> object:
            return clumsy(size)

        found = searched(build(sized))
        assert [tuple(row[4:]) for row in found["rules"]] == [gains, gains]
        assert "the --budget was spent" in found["reasons"][0]


def test_code_that_the_tracer_skips_is_reported(
    stored: RuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Clumsy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x * next(self.parameters()).sum()

    def make() -> object:
        model, batch = Broken(), (torch.randn(8, 48), torch.randn(8, 48))
        return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)

    monkeypatch.setattr(rewriting, "report_progress", lambda line: None)
    torch._dynamo.reset()
    found = searched(build(make))
    assert any("skipped code at test_rewrite.py:" in reason for reason in found["reasons"])
    for operators, note in ((0, "saw no operators"), (7, "operators searched: 7; no faster")):
        assert note in Rewrites("w", (), operators, ()).table().notes[0]


def test_stored_rules_are_timed_again_in_another_dtype(
    stored: RuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "gains", lambda pattern, replacement, specs: (1.0, 1.0))
    model = Clumsy().bfloat16()
    replaced, _ = use_rules(model, stored)
    model(torch.randn(32, 48).bfloat16())
    assert replaced == []


def test_a_rewritten_model_bears_the_uses_of_a_model(stored: RuleStore) -> None:
    def make() -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Clumsy()
        use_rules(model, stored)
        return model

    check_uses(make, torch.randn(4, 48))


def test_gradients_of_a_rewritten_model_are_those_of_the_original(stored: RuleStore) -> None:
    model, x = Clumsy(), torch.randn(32, 48)
    changed = copy.deepcopy(model)
    replaced, _ = use_rules(changed, stored, training=True)
    for each in (model, changed):
        each(x).square().sum().backward()
    assert len(replaced) == 2
    for ours, theirs in zip(model.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad)


def test_the_step_is_predicted_with_the_measured_gains(stored: RuleStore) -> None:
    graph = graph_of(clumsy)
    technique = Rewrite()
    assert technique.why_not(graph) is None
    predicted = technique.predict(graph, Context(Durations(1)))
    names, before = ([g.task(n).name for n in range(len(g))] for g in (predicted, graph))
    assert names.count("slipstream::rewrite") == 4
    assert "aten::erf" in before
    assert "aten::erf" not in names
    assert "2 subgraphs of 10 operators" in predicted.edits[-1].what


def test_rewrite_does_not_apply_without_rules_that_match(
    stored: RuleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = Rewrite().why_not(graph_of(mlp))
    assert reason is not None
    assert "none of the 2 known rules applies" in reason
    with pytest.raises(WorkloadError, match="no known rule applies"):
        build(mlp, Rewrite())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert "no rules are known" in str(Rewrite().why_not(graph_of(mlp)))


def test_apply_rewrites_a_workload_and_restores_one_that_differs(stored: RuleStore) -> None:
    built = build(clumsy, Rewrite())
    assert built.model._compiled_call_impl is not None
    torch._dynamo.reset()
    wrong = replace(stored.rules()[1], replacement=_expression(("relu", Ref(0))))
    RuleStore().add(wrong)
    with pytest.raises(WorkloadError, match="computes something else"):
        build(clumsy, Rewrite())


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("meta", 0)])
def test_rules_are_only_for_tensors_on_the_cpu(device: str, count: int) -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(2, 3, device=device)
    specs = rules._specs(Pattern(SOFTMAX, (node,), node))
    assert len(specs or ()) == count
