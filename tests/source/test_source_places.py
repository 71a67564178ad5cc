"""The model, the optimizer and the loop are found, or a reason is given; nothing is guessed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.source import (
    AlreadyAppliedError,
    EditLocationError,
    Places,
    Source,
    accumulate,
    locate,
)
from slipstream.source._names import Names

_LOADER = "torch.utils.data.DataLoader"


def where(text: str, function: str | None = None) -> Places:
    return locate(Source.of(text.encode(), Path("train.py")), function)


def added(source: Source) -> list[str]:
    """Return the added lines of the diff, without indentation."""
    return [
        line[1:].strip()
        for line in source.diff().splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]


def line_before(source: Source, line: str) -> str:
    lines = [line.strip() for line in source.text.splitlines()]
    return lines[lines.index(line) - 1]


def compiled(text: str, function: str | None = None) -> Source:
    return where(text, function).after_model("{model} = {torch}.compile({model})")


_RETURN = "    return model, batch, loss, opt\n"


@pytest.mark.parametrize(
    ("text", "function", "before"),
    [
        # The last statement that constructs it, before training.
        (
            "import torch\nmodel = A()\nmodel = B(model)\n"
            "opt = torch.optim.SGD(model.parameters())\nmodel = C(model)\n",
            None,
            "model = B(model)",
        ),
        # After the whole condition in which it is constructed.
        (
            "import torch\nif x:\n  model = A()\nelse:\n  model = B()\n"
            "opt = torch.optim.SGD(model.parameters())\n",
            None,
            "model = B()",
        ),
        # Through arguments, filters, groups and variables.
        (
            "from torch import optim as o\n"
            "def go(net, rate):\n"
            "  keep = [p for p in net.parameters() if p.requires_grad]\n"
            "  opt = o.AdamW(keep, rate)\n"
            "def main():\n  model = A()\n  go(model, 1)\n",
            None,
            "model = A()",
        ),
        (
            "from torch import optim as o\n"
            "class Run:\n  @staticmethod\n  def go(net, *, rate=1):\n"
            "    opt = o.AdamW(net.parameters(), rate)\n"
            "model = A()\nRun.go(model)\n",
            None,
            "model = A()",
        ),
        (
            "from torch.optim import SGD\nmodel = A()\n"
            "opt = SGD([{'params': model.parameters(), 'lr': 1}])\n",
            None,
            "model = A()",
        ),
        # An optimizer of another library is recognised by its use.
        (
            "import lion\nmodel = A()\nopt = lion.Lion(model.parameters())\n"
            "clip(model.parameters())\nopt.step()\n",
            None,
            "model = A()",
        ),
        # Weights are loaded under the names that they have without the edit.
        (
            "import torch\nmodel = A()\nmodel.load_state_dict(start)\nif resume:\n"
            "  model.load_state_dict(last)\nopt = torch.optim.SGD(model.parameters())\n"
            "model.load_state_dict(last)\n",
            None,
            "model.load_state_dict(last)",
        ),
        # A function's result may be assigned first, and its parts may be keywords.
        (
            "import slipstream as ss\n"
            "def make():\n  model = A()\n  x = 1\n"
            "  built = ss.BuiltWorkload(model, batch=x)\n  return built\n",
            "make",
            "model = A()",
        ),
        (
            "def make():\n  model = A()\n  other = model\n  return dict(batch=1, model=model)\n",
            "make",
            "model = A()",
        ),
        # Not the return of a nested function.
        (
            "def make():\n  model = A()\n  def loss(a, b):\n    return a\n"
            "  return model, 1, loss\n",
            "make",
            "model = A()",
        ),
    ],
)
def test_the_statement_that_constructs_the_model_is_found(
    text: str, function: str | None, before: str
) -> None:
    source = compiled(text, function)
    assert line_before(source, "model = torch.compile(model)") == before


@pytest.mark.parametrize(
    ("returned", "lines"),
    [
        (
            "A(), batch, loss, opt",
            ["model = A()", "model = torch.compile(model)", "return model, batch, loss, opt"],
        ),
        (
            "(net := A()), batch",
            ["net = A()", "net = torch.compile(net)", "return (net), batch"],
        ),
        (
            "{'batch': batch, 'model': A(\n  3)}",
            [
                "model = (A(", "3))", "model = torch.compile(model)",
                "return {'batch': batch, 'model': model}",
            ],
        ),
    ],
)  # fmt: skip
def test_an_unnamed_model_gets_a_name(returned: str, lines: list[str]) -> None:
    text = f"import torch\ndef make(batch):\n    return {returned}\n"
    assert added(compiled(text, "make")) == lines


@pytest.mark.parametrize(
    ("text", "function", "message", "line"),
    [
        ("x = 1\n", None, r"torch\.optim\.SGD\(model\.parameters\(\)\)", None),
        (
            "import torch\na, b = A(), B()\n"
            "x = torch.optim.SGD(a.parameters())\ny = torch.optim.SGD(b.parameters())\n",
            None,
            "'a' and 'b'",
            3,
        ),
        (
            "import torch\nm = A()\nx = torch.optim.SGD(m.head.parameters())\n",
            None,
            r"'m\.head'",
            3,
        ),
        (
            "import torch\nx = torch.optim.SGD(A().parameters())\n",
            None,
            r"'A\(\)'",
            2,
        ),
        (
            "import torch\nx = torch.optim.SGD(make_groups(m))\n",
            None,
            "whose parameters",
            2,
        ),
        (
            "import torch\nfrom models import m\nx = torch.optim.SGD(m.parameters())\n",
            None,
            "'m' .* block",
            2,
        ),
        (
            "import torch\nfor i in y:\n  m = A()\nx = torch.optim.SGD(m.parameters())\n",
            None,
            "'m' .* loop",
            3,
        ),
        (
            "import torch\ndef go(m):\n  x = torch.optim.SGD(m.parameters())\n",
            None,
            "'m'",
            None,
        ),
        ("def make():\n  return go\n", "make", r"make\(\)", 2),
        ("def make():\n  return *parts, 1\n", "make", r"make\(\)", 2),
        ("def make():\n  return {**parts}\n", "make", r"make\(\)", 2),
        ("def make():\n  pass\n", "make", r"make\(\) .*nothing", 1),
        (
            "def make():\n  if x: return A(), 1\n  return B(), 1\n",
            "make",
            r"make\(\) .* 2 places",
            1,
        ),
        ("def make(): pass\ndef make(): pass\n", "make", "'make' .* several", None),
        ("make = partial(go)\n", "make", "'make' .* function", None),
        (
            "import torch\ndef make():\n  return {'batch': torch.randn(3), 'model': A()}\n",
            "make",
            "batch",
            3,
        ),
    ],
)
def test_uncertain_code_is_not_guessed(
    text: str, function: str | None, message: str, line: int | None
) -> None:
    with pytest.raises(EditLocationError, match=message) as error:
        compiled(text, function)
    assert error.value.where == (f"train.py:{line}" if line else "train.py")


def test_the_only_optimizer_is_found() -> None:
    text = "import torch\na = torch.optim.SGD(m.parameters())\n"
    scheduled = text + "s = torch.optim.lr_scheduler.StepLR(a, 1)\n"
    assert where(scheduled).optimizer.kind == "SGD"
    with pytest.raises(EditLocationError, match=r"\b2 optimizers\b.*\b2 and 3\b"):
        _ = where(text + "b = torch.optim.Adam(m.parameters())\n").optimizer
    # A function may create another one in addition to the returned one.
    both = f"import torch\ndef make(m):\n  a = torch.optim.SGD(m.parameters())\n  {_OTHER}"
    assert where(both, "make").optimizer.kind == "Adam"
    helped = "def make(m):\n  a = new_optimizer(m)\n  return m, 1, 1, a\n"
    with pytest.raises(EditLocationError, match=r"'a'.*\boptimizer\b"):
        _ = where(helped, "make").optimizer


_OTHER = "b = torch.optim.Adam(m.parameters())\n  return m, 1, 1, b\n"


def test_a_name_that_is_not_torchs_does_not_count_as_torchs() -> None:
    for text in (
        "import optim\nx = optim.SGD(m.parameters())\n",
        "from .torch import optim\nx = optim.SGD(m.parameters())\n",
        "from torch import optim\noptim = mine\nx = optim.SGD(m.parameters())\n",
    ):
        with pytest.raises(EditLocationError, match="no optimizer"):
            _ = where(text).optimizer


def test_of_several_loaders_the_one_of_the_loop_is_found() -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "model = A()\nopt = torch.optim.SGD(model.parameters())\n"
        "train = DataLoader(a)\ntest = DataLoader(b)\n"
        "for i, (x, y) in enumerate(tqdm(train)):\n"
        "  loss = model(x)\n  loss.backward()\n  opt.step()\n"
    )
    assert added(where(text).set_call(_LOADER, num_workers="4")) == [
        "train = DataLoader(a, num_workers=4)"
    ]
    with pytest.raises(EditLocationError, match=r"\b5 and 6\b"):
        where(text.replace("tqdm(train)", "mix(train, test)")).set_call(_LOADER, num_workers="4")
    with pytest.raises(EditLocationError, match="not called"):
        where("x = 1\n").set_call(_LOADER, num_workers="4")


def test_defaults_and_lines_at_the_top_are_edited() -> None:
    text = "import os\nx = 1\nimport torch\ndef make(a, batch_size=32, *, n=4): pass\n"
    assert added(where(text, "make").set_default("batch_size", "64")) == [
        "def make(a, batch_size=64, *, n=4): pass"
    ]
    for missing in ("a", "b"):
        with pytest.raises(EditLocationError, match=f"'{missing}'"):
            where(text, "make").set_default(missing, "1")
    # Not before torch is imported.
    source = where(text).at_top("{torch}.set_num_threads(4)")
    assert line_before(source, "torch.set_num_threads(4)") == "import torch"
    with pytest.raises(AlreadyAppliedError):
        where(source.text).at_top("{torch}.set_num_threads(4)")


_HEAD = "import torch\nm = A()\nopt = torch.optim.SGD(m.parameters())\n"
_LOOP = "  loss = f(m(x), y)\n  opt.zero_grad()\n  loss.backward()\n  opt.step()\n"


@pytest.mark.parametrize(
    ("body", "message", "line"),
    [
        ("for x in d:\n  loss = f(x)\n  loss.backward()\n  opt.step()\n", "the model", 4),
        ("for x in d:\n  loss = m(x)\n  g(loss)\n  opt.step()\n", "no loop .* backward", 7),
        ("for x in d:\n  opt.step()\n", "no loop .* backward", 5),
        ("for x in d:\n  loss = m(x)\n  loss.backward()\n", r"opt\.step\(\)", None),
        (
            "for x in d:\n  o = m(x)\n  f(o).backward()\n  f(o).backward()\n  opt.step()\n",
            "simple statements",
            7,
        ),
        (f"for x in d:\n{_LOOP}for x in e:\n{_LOOP}", r"opt\.step\(\) .* 2 places", 13),
        ("for x in d:\n  opt.step(lambda: m(x).backward())\n", "closure .* not a function", 5),
        ("for x in d:\n  def c(): m(x).backward()\n  opt.step(c)\n", "one line", 5),
        ("for x in d:\n  z = f(m(x)).backward()\n  opt.step()\n", "not a whole statement", 5),
        (
            "for x in d:\n  o = m(x)\n  if o: pass\n  loss = f(o)\n  loss.backward()\n"
            "  opt.step()\n",
            "simple statements",
            6,
        ),
        (
            "for x in d:\n  o = m(x); loss = f(o)\n  loss.backward()\n  opt.step()\n",
            "one line",
            5,
        ),
        (
            "for x in d:\n  if x: o = m(x)\n  loss = f(o)\n  loss.backward()\n  opt.step()\n",
            "simple statements",
            5,
        ),
        (
            "for x in d:\n  loss = f(x)\n  o = m(x)\n  loss.backward()\n  opt.step()\n",
            "after the loss",
            6,
        ),
    ],
)
def test_an_unsupported_loop_is_left_alone(body: str, message: str, line: int | None) -> None:
    with pytest.raises(EditLocationError, match=message) as error:
        where(_HEAD + body).wrap_forward("with f():")
    assert error.value.where == (f"train.py:{line}" if line else "train.py")


@pytest.mark.parametrize(
    ("loop", "lines"),
    [
        (
            f"for i, x in enumerate(d, 1):\n{_LOOP}",
            [
                "if (i - 1) % 3 == 0:", "opt.zero_grad()", "(loss / 3).backward()",
                "if i % 3 == 0:", "opt.step()",
            ],
        ),
        (
            f"for x in 1, 2:\n{_LOOP}",
            [
                "for step, x in enumerate((1, 2)):", "if step % 3 == 0:", "opt.zero_grad()",
                "(loss / 3).backward()", "if (step + 1) % 3 == 0:", "opt.step()",
            ],
        ),
        (
            "for i in range(9):\n  (m(x) + m(y)).backward(retain_graph=True)\n"
            "  torch.nn.utils.clip_grad_norm_(m.parameters(), 1)\n"
            "  opt.step()\n  schedule.step()\n  m.zero_grad()\n  print(i)\n",
            [
                "(((m(x) + m(y)) / 3)).backward(retain_graph=True)", "if (i + 1) % 3 == 0:",
                "torch.nn.utils.clip_grad_norm_(m.parameters(), 1)", "opt.step()",
                "schedule.step()", "m.zero_grad()",
            ],
        ),
        (
            f"for _ in range(9):\n{_LOOP}",
            [
                "for step in range(9):", "if step % 3 == 0:", "opt.zero_grad()",
                "(loss / 3).backward()", "if (step + 1) % 3 == 0:", "opt.step()",
            ],
        ),
    ],
)  # fmt: skip
def test_the_update_runs_once_for_all_batches(loop: str, lines: list[str]) -> None:
    source = accumulate(where(_HEAD + loop), 3)
    assert added(source) == lines
    with pytest.raises(AlreadyAppliedError):
        accumulate(where(source.text), 3)


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        ("while go():\n  for _ in range(4):\n    m(x).backward()\n  opt.step()\n", 5),
        (
            "for step, x in enumerate(d):\n  scaler.scale(m(x)).backward()\n"
            "  if step % n == 0:\n    scaler.step(opt)\n    opt.zero_grad()\n",
            6,
        ),
        (
            "for i, x in enumerate(d):\n  m(x).backward()\n  if i % n == 0:\n    opt.step()\n"
            "    opt.zero_grad()\nif i % n:\n  opt.step()\n",
            6,
        ),
    ],
    ids=["inner loop", "scaled", "batches that remain"],
)
def test_a_loop_of_another_form_that_accumulates_is_recognized(loop: str, line: int) -> None:
    with pytest.raises(AlreadyAppliedError, match="accumulates") as error:
        accumulate(where(_HEAD + loop), 3)
    assert str(error.value.where) == f"train.py:{line}"


@pytest.mark.parametrize(
    ("loop", "message", "line"),
    [
        ("while go():\n" + _LOOP, "for loop", 4),
        ("def update(x):\n" + _LOOP + "for x in d: update(x)\n", r"steps in update\(\), which", 4),
        ("for x in d:\n  if x: continue\n" + _LOOP, "batches", 5),
        ("for x in d:\n" + _LOOP.replace("  opt.zero_grad()\n", ""), "gradients", 4),
        ("for x in d:\n" + _LOOP + "  print(x)\n  schedule.step()\n", r"schedule\.step", 10),
        ("for x in d:\n" + _LOOP.replace("  opt.step", "  if x: opt.step"), r"opt\.step\(\)", 8),
        ("for x in d:\n" + _LOOP.replace("  loss.b", "  if x: loss.b"), "backward .* condition", 7),
    ],
)
def test_a_loop_that_cannot_accumulate_is_left_alone(loop: str, message: str, line: int) -> None:
    with pytest.raises(EditLocationError, match=message) as error:
        accumulate(where(_HEAD + loop), 3)
    assert str(error.value.where) == f"train.py:{line}"


def test_the_places_of_a_long_script_are_found_in_linear_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups = 0
    owner = Names.owner

    def counted(names: Names, variable: ast.Name) -> ast.AST | None:
        nonlocal lookups
        lookups += 1
        return owner(names, variable)

    def count(lines: int) -> int:
        nonlocal lookups
        lookups = 0
        head = "import torch\nm = f(0)\n" + "x = f(x, m)\n" * lines
        _ = where(head + "opt = torch.optim.SGD(m.parameters(), x)\nfor x in d:\n" + _LOOP).steps
        return lookups

    monkeypatch.setattr(Names, "owner", counted)
    assert count(80) < 2.5 * count(40)


def test_inputs_are_those_of_the_model() -> None:
    def inputs(text: str, function: str | None = None) -> list[str]:
        found = where(text, function)
        return [found.source.segment(node) for node in found.inputs]

    def make(batch: str, loss: str = "loss") -> str:
        return f"import torch\ndef make():\n  b = {batch}\n  return m, b, {loss}, o\n"

    assert inputs(make("x, y"), "make") == ["x"]
    assert inputs(make("torch.randn(3)", "None"), "make") == ["b"]
    assert inputs(_HEAD + "for x, y in d:\n" + _LOOP) == ["x"]
    cases: list[Callable[[], list[str]]] = [
        lambda: inputs(make("load()"), "make"),
        lambda: inputs(make("load()", "None"), "make"),
        lambda: inputs(make("(x, z), y"), "make"),
        lambda: inputs(make("x, y, z"), "make"),
        lambda: inputs(_HEAD + "for x, y in d:\n" + _LOOP.replace("m(x)", "m(x, y)")),
        lambda: inputs(_HEAD + "for x, y in d:\n" + _LOOP.replace("m(x)", "m(*x)")),
    ]
    for case in cases:
        with pytest.raises(EditLocationError, match="only input cannot be identified"):
            case()


_TWO_LOOPS = """\
import torch
a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
first = torch.optim.SGD(a.parameters())
second = torch.optim.SGD(b.parameters())
for x in data:
    first.zero_grad()
    loss = a(x).mean()
    loss.backward()
    first.step()
for x in data:
    second.zero_grad()
    loss = b(x).mean()
    loss.backward()
    second.step()
"""


def test_lines_select_the_loop_that_is_edited() -> None:
    source = Source.of(_TWO_LOOPS.encode(), Path("train.py"))
    places = locate(source, None, range(10, 15))
    changed = places.wrap_forward("with f({model}):")
    assert added(changed) == ["with f(b):", "loss = b(x).mean()"]
    assert added(places.on(changed).set_optimizer(fused="True"))[0].startswith("second = ")
    with pytest.raises(EditLocationError, match="2 optimizers"):
        _ = locate(source, None).optimizer
