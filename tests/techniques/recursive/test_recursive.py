"""Compiled recursive models compute what their eager recursion computes."""

from __future__ import annotations

import copy
import enum
import itertools
import pickle
import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.codegen import why_no_compiler
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native import library
from slipstream.techniques import recursive
from slipstream.techniques.recursive import cells
from slipstream.techniques.recursive.structures import linearize

pytestmark = pytest.mark.skipif(
    library() is None or why_no_compiler() is not None, reason="needs compiled code"
)
WORDS, HIDDEN = 20, 20
PASSES = ("specialize", "hoist", "fuse", "persist", "batch")


def tree(rng: random.Random, leaves: int, most: int) -> cells.TreeNode:
    if leaves == 1:
        return cells.TreeNode(word=rng.randrange(WORDS))
    count = min(most if most == 2 else rng.randint(2, most), leaves)
    cuts = [0, *sorted(rng.sample(range(1, leaves), count - 1)), leaves]
    parts = [end - first for first, end in itertools.pairwise(cuts)]
    return cells.TreeNode([tree(rng, part, most) for part in parts])


def chain(rng: random.Random, steps: int) -> cells.TreeNode:
    node = cells.TreeNode(word=rng.randrange(WORDS))
    for _ in range(steps):
        node = cells.TreeNode([node], rng.randrange(WORDS))
    return node


def grid(rng: random.Random, side: int) -> cells.TreeNode:
    nodes: dict[tuple[int, int], cells.TreeNode] = {}
    for i in range(side):
        for j in range(side):
            before = [nodes[at] for at in ((i - 1, j), (i, j - 1)) if at in nodes]
            nodes[i, j] = cells.TreeNode(before, rng.randrange(WORDS))
    return nodes[side - 1, side - 1]


MAKERS: dict[str, tuple[Any, Any]] = {
    "TreeFC": (cells.TreeFC, lambda rng: tree(rng, rng.randint(1, 12), 2)),
    "TreeRNN": (cells.TreeRNN, lambda rng: tree(rng, rng.randint(1, 12), 2)),
    "TreeLSTM": (cells.TreeLSTM, lambda rng: tree(rng, rng.randint(1, 12), 2)),
    "ChildSumTreeLSTM": (cells.ChildSumTreeLSTM, lambda rng: tree(rng, rng.randint(1, 12), 4)),
    "TreeGRU": (cells.TreeGRU, lambda rng: tree(rng, rng.randint(1, 12), 3)),
    "SimpleTreeGRU": (cells.SimpleTreeGRU, lambda rng: tree(rng, rng.randint(1, 12), 2)),
    "MVRNN": (cells.MVRNN, lambda rng: tree(rng, rng.randint(1, 12), 2)),
    "DAGRNN": (cells.DAGRNN, lambda rng: grid(rng, rng.randint(1, 6))),
    "SequenceLSTM": (cells.SequenceLSTM, lambda rng: chain(rng, rng.randint(0, 9))),
    "SequenceGRU": (cells.SequenceGRU, lambda rng: chain(rng, rng.randint(0, 9))),
}

SIMILAR = ("TreeFC", "TreeRNN", "SimpleTreeGRU", "SequenceGRU")
"""Cells whose gradients others cover."""


def worst(model: cells.Cell, net: Any, trees: list[cells.TreeNode]) -> float:
    """Largest difference of any node's states, relative to at least 1."""
    output, memo = net(trees), {}

    def eager(node: cells.TreeNode) -> Any:
        if id(node) not in memo:
            children = [eager(child) for child in node.children]
            states = model.internal(children, node.word) if children else model.leaf(node.word)
            memo[id(node)] = states
        return memo[id(node)]

    difference = 0.0
    for root in trees:
        eager(root)
    for number, node in enumerate(output.linearized.structures.objects):
        for ours, theirs in zip(output.of(number), eager(node), strict=True):
            scale = max(1.0, float(theirs.abs().max()))
            difference = max(difference, float((ours - theirs).abs().max()) / scale)
    return difference


@pytest.mark.parametrize("name", MAKERS)
def test_all_states_equal_eager_recursion(name: str) -> None:
    torch.manual_seed(0)
    make, structure = MAKERS[name]
    rng = random.Random(1)
    model, trees = make(WORDS, HIDDEN), [structure(rng) for _ in range(12)]
    with torch.no_grad():
        assert worst(model, recursive.compile(model, trees[:4]), trees) <= 1e-5


def eager_states(model: cells.Cell, trees: list[cells.TreeNode]) -> list[torch.Tensor]:
    """States of the roots, without computing shared nodes twice."""
    memo: dict[int, Any] = {}

    def states(node: cells.TreeNode) -> Any:
        if id(node) not in memo:
            children = [states(child) for child in node.children]
            memo[id(node)] = (
                model.internal(children, node.word) if children else model.leaf(node.word)
            )
        return memo[id(node)]

    return [state for root in trees for state in states(root)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in SIMILAR else ())
        for name in MAKERS
        if name != "MVRNN"
    ],
)
def test_gradients_equal_autograds(name: str) -> None:
    torch.manual_seed(0)
    make, structure = MAKERS[name]
    rng = random.Random(1)
    model, trees = make(WORDS, HIDDEN).double(), [structure(rng) for _ in range(4)]
    parameters = list(model.parameters())
    roots = recursive.compile(model, trees[:2])([*trees, trees[0]]).roots
    ours = torch.autograd.grad(torch.cat(roots).sin().sum(), parameters)
    states = torch.stack(eager_states(model, [*trees, trees[0]]))
    for found, expected in zip(
        ours, torch.autograd.grad(states.sin().sum(), parameters), strict=True
    ):
        assert (found - expected).norm() <= 1e-9 * expected.norm()


def test_elementwise_operations_have_autograds_gradients() -> None:
    functions = (
        torch.exp, torch.abs, torch.erf, nn.functional.silu, nn.functional.leaky_relu,
        lambda x: torch.log(x * x + 1), lambda x: torch.sqrt(x * x + 1),
        lambda x: torch.rsqrt(x * x + 1), lambda x: 1 / (x * x + 1), lambda x: x / (x * x + 1),
        lambda x: torch.minimum(x, x * 0.5), lambda x: torch.maximum(x, -x),
        lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp(x * x - 1, 0.3 * x),
        lambda x: (0 * x + model.joined.bias).clamp(0.5, 1.0),
        lambda x: nn.functional.hardtanh(0 * x + model.joined.bias, 0.5, 1.0),
        lambda x: torch.where(x > 0, x, 1.0), lambda x: torch.where(x > 0, x, x * 0.1),
    )  # fmt: skip

    class Applied(cells.TreeFC):
        def internal(self, children: Any, word: Any) -> Any:
            state = joined = self.joined(torch.cat([state for (state,) in children]))
            # Different factors, so that two errors cannot cancel.
            for number, function in enumerate(functions):
                state = state + (0.3 + 0.1 * number) * function(joined)
            return (torch.tanh(0.1 * state),)

    torch.manual_seed(0)
    model, trees = Applied(WORDS, HIDDEN).double(), [tree(random.Random(2), 6, 2)]
    nn.init.constant_(model.joined.bias, 0.5)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(recursive.compile(model, trees)(trees).roots[0].sum(), parameters)
    expected = torch.autograd.grad(eager_states(model, trees)[0].sum(), parameters)
    for found, reference in zip(ours, expected, strict=True):
        assert (found - reference).norm() <= 1e-9 * reference.norm()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.div(x, x + 2, rounding_mode="floor"),
        lambda x: x - x.max(),
        lambda x: x.repeat(1),
        lambda x: (3 * x).long() + x,
        lambda x: x.half().float(),
        lambda x: ((x > 0) + (x > 1)).float(),
        lambda x: torch.stack([x, -x]).max(0).indices.float(),
    ],
)
def test_an_operator_without_equations_is_refused(function: Any) -> None:
    class Applied(cells.TreeFC):
        def internal(self, children: Any, word: Any) -> Any:
            return (function(self.joined(torch.cat([state for (state,) in children]))),)

    with pytest.raises(recursive.RecursiveModelError, match="cannot use the operator"):
        recursive.compile(Applied(WORDS, HIDDEN), [tree(random.Random(2), 3, 2)])


class Item:
    """A node with any attributes."""

    word: int

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __bool__(self) -> bool:
        return self.word > 3


class Op(enum.Enum):
    ADD, SUBTRACT = 1, 2


def leaf(model: Any, node: Any) -> Any:
    return model.embedding.weight[node.word]


def pair(**attributes: Any) -> Item:
    return Item(parts=(Item(word=1, parts=()), Item(word=2, parts=())), **attributes)


def combined(function: Any) -> Any:
    def rule(model: Any, node: Any) -> Any:
        return function(node, *map(model, node.parts)) if node.parts else leaf(model, node)

    return rule


RULES: dict[str, tuple[Any, list[Any]]] = {
    "an attribute that some nodes lack": (
        lambda model, node: model(node.only) * 2 if hasattr(node, "only") else leaf(model, node),
        [Item(word=1), Item(only=Item(word=2))],
    ),
    "the length of a container": (
        lambda model, node: sum(model(part) for part in node.parts) if len(node.parts)
        else leaf(model, node),
        [Item(parts=deque(Item(word=n, parts=deque()) for n in range(k))) for k in (2, 3)],
    ),
    "a member of an Enum": (
        combined(lambda node, a, b: a + b if node.op is Op.ADD else a - b),
        [pair(op=op) for op in Op],
    ),
    "the truth value of a node": (
        combined(lambda node, a, b: a + b if node else a - b), [pair(word=n) for n in (2, 5)],
    ),
    "equal integers": (
        lambda model, node: model.embedding.weight[node] if isinstance(node, int)
        else -2 * model(node[1]) + model(node[0]),
        [(3, 3), (3, 5)],
    ),
    "a comparison with a word": (
        combined(lambda node, a, b: a + b if node.word > 12 else a - b),
        [pair(word=n) for n in (7, 13, 14)],
    ),
    "the remainder of a word": (
        combined(lambda node, a, b: a + b if node.word % 4 > 1 else a - b),
        [pair(word=n) for n in (5, 7)],
    ),
    "a word as a factor": (
        combined(lambda node, a, b: a * node.word + b), [pair(word=n) for n in (5, 7)],
    ),
    "a word in a tensor": (
        combined(lambda node, a, b: a * torch.tensor(node.word) + b),
        [pair(word=n) for n in (5, 7)],
    ),
    "a size": (
        combined(lambda node, a, b: a.expand(node.word, HIDDEN).sum(0) + b),
        [pair(word=n) for n in (5, 7)],
    ),
}  # fmt: skip


class Ruled(nn.Module):
    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.embedding, self.rule = nn.Embedding(WORDS, HIDDEN), rule

    def forward(self, node: Any) -> Any:
        return self.rule(self, node)


@pytest.mark.parametrize("name", RULES)
def test_what_forward_reads_from_a_node_decides_its_equations(name: str) -> None:
    rule, nodes = RULES[name]
    model = Ruled(rule)
    with torch.no_grad():
        net = recursive.compile(model, nodes[:1])
        for node in nodes:
            torch.testing.assert_close(net([node]).roots[0][0], model(node))


def test_a_node_that_is_not_read_the_same_way_twice_is_refused() -> None:
    class Changing:
        @property
        def word(self) -> float:
            return random.random()

    model = Ruled(lambda model, node: model.embedding.weight[0] * node.word)
    with pytest.raises(recursive.RecursiveModelError, match="not read in the same way twice"):
        recursive.compile(model, [Changing()])


def test_gradients_do_not_need_nodes_of_every_kind() -> None:
    model, rng = cells.DAGRNN(WORDS, HIDDEN), random.Random(2)
    net, leaf = recursive.compile(model, [grid(rng, 3)]), cells.TreeNode(word=1)
    (ours,) = torch.autograd.grad(net([leaf]).roots[0].sum(), [model.joined.bias])
    (expected,) = torch.autograd.grad(model(leaf)[0].sum(), [model.joined.bias])
    torch.testing.assert_close(ours, expected)


def test_a_model_without_gradients_here_says_why() -> None:
    trees = [tree(random.Random(3), 4, 2)]
    with pytest.raises(recursive.RecursiveModelError, match="two matrices of a node"):
        recursive.compile(cells.MVRNN(WORDS, HIDDEN), trees)(trees)
    detached = Ruled(combined(lambda node, a, b: a.detach() + b))
    with pytest.raises(recursive.RecursiveModelError, match=r"detach\(\) is ignored"):
        recursive.compile(detached, [pair()])([pair()])
    half = recursive.compile(cells.TreeFC(WORDS, HIDDEN), trees, weights=torch.bfloat16)
    with pytest.raises(recursive.RecursiveModelError, match="16 bits"):
        half(trees)


def test_a_vocabulary_too_large_for_tables_is_looked_up_per_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.techniques.recursive import net as nets

    monkeypatch.setattr(nets, "_MAX_TABLE_BYTES", 100)
    torch.manual_seed(0)
    model, rng = cells.TreeLSTM(WORDS, HIDDEN), random.Random(4)
    trees = [tree(rng, 9, 2) for _ in range(3)]
    with torch.no_grad():
        assert worst(model, recursive.compile(model, trees), trees) <= 1e-5


def test_a_word_used_as_a_number_is_read_for_every_node() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)

        def forward(self, node: cells.TreeNode) -> torch.Tensor:
            x = torch.tensor(node.word).expand(HIDDEN).float()
            for child in node.children:
                x = x + torch.tanh(self.weight @ self(child))
            return x

    model = Counted()
    trees = [chain(random.Random(seed), 5) for seed in range(3)]
    with torch.no_grad():
        roots = recursive.compile(model, trees[:1])(trees).roots[0]
        torch.testing.assert_close(roots, torch.stack([model(root) for root in trees]))


@pytest.mark.parametrize(
    "options",
    [
        *({"passes": recursive.Passes(**{name: False})} for name in PASSES),
        {"workers": 2},
    ],
)  # fmt: skip
def test_every_pass_can_be_switched_off(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, rng = cells.TreeLSTM(WORDS, HIDDEN), random.Random(2)
    trees = [tree(rng, 9, 2) for _ in range(5)]
    with torch.no_grad():
        assert worst(model, recursive.compile(model, trees, **options), trees) <= 1e-5


@pytest.mark.parametrize(("make", "per_level"), [(cells.TreeLSTM, 1), (cells.TreeGRU, 2)])
def test_a_request_is_one_launch_with_a_barrier_per_chained_product(
    make: Any, per_level: int
) -> None:
    model, rng = make(WORDS, HIDDEN), random.Random(3)
    trees = [tree(rng, 12, 2) for _ in range(3)]
    net = recursive.compile(model, trees)
    with torch.no_grad():
        levels = net(trees).linearized.levels
    assert (net.launches, net.barriers) == (1, per_level * (levels - 1))
    plan = net.explain(trees, gains=make is cells.TreeLSTM)
    assert (plan.launches, plan.barriers) == (net.launches, net.barriers)
    assert (plan.nodes, plan.widths.sum()) == (69, 69)
    assert plan.weight_bytes > 0
    assert set(plan.gains) == (set(PASSES) if make is cells.TreeLSTM else set())
    for name in plan.gains:
        other = net.with_passes(**{name: False})
        with torch.no_grad():
            other(trees)
        plan = other.explain(trees)
        assert plan.launches == other.launches
        assert plan.barriers == other.barriers, name


def test_weights_changed_in_place_are_packed_again() -> None:
    model, rng = cells.TreeLSTM(WORDS, HIDDEN), random.Random(4)
    trees = [tree(rng, 6, 2)]
    net = recursive.compile(model, trees)
    with torch.no_grad():
        net(trees)
        model.joined.weight.mul_(0.5)
        model.embedding.weight.add_(0.1)
        assert worst(model, net, trees) <= 1e-5


def test_other_parameters_are_traced_again() -> None:
    model, trees = cells.TreeFC(WORDS, HIDDEN), [tree(random.Random(4), 6, 2)]
    net = recursive.compile(model, trees)
    for change in (
        lambda: model.double(),
        lambda: setattr(model, "joined", nn.Linear(2 * HIDDEN, HIDDEN, bias=False).double()),
        lambda: setattr(model, "embedding", nn.Embedding(2 * WORDS, HIDDEN).double()),
    ):
        with torch.no_grad():
            net(trees)
            change()
            more = [
                cells.TreeNode([trees[0], cells.TreeNode(word=model.embedding.num_embeddings - 1)])
            ]
            torch.testing.assert_close(net(more).roots[0][0], model(more[0])[0])
    model.bfloat16()
    with pytest.raises(recursive.RecursiveModelError, match="states are torch"):
        net(trees)
    model.float()
    with torch.no_grad():
        torch.testing.assert_close(net(trees).roots[0][0], model(trees[0])[0])


def test_inference_tensors_are_packed_for_every_call() -> None:
    with torch.inference_mode():
        model, trees = cells.TreeFC(WORDS, HIDDEN), [tree(random.Random(4), 6, 2)]
        net = recursive.compile(model, trees)
        for _ in range(2):
            torch.testing.assert_close(net(trees).roots[0][0], model(trees[0])[0])
            model.joined.weight.mul_(0.5)


def test_a_long_chain_needs_no_recursion() -> None:
    model = cells.SequenceGRU(WORDS, HIDDEN)
    with torch.no_grad():
        net = recursive.compile(model, [chain(random.Random(5), 3)])
        output = net([chain(random.Random(6), 50_000)])
        order = output.linearized
        assert order.levels == 50_001
        inner = np.flatnonzero(order.child_of[0] >= 0)
        below = output.states[0][order.child_of[0][inner]]
        expected = model.cell(model.embedding(torch.from_numpy(order.word[inner])), below)
    assert len(inner) == 50_000
    assert (output.states[0][inner] - expected).abs().max() <= 1e-5


def test_shared_nodes_of_a_dag_are_computed_once() -> None:
    node = cells.TreeNode(word=1)
    for _ in range(40):
        node = cells.TreeNode([node, node])
    model = cells.TreeFC(WORDS, HIDDEN)
    with torch.no_grad():
        net = recursive.compile(model, [node])
        assert net([node]).linearized.nodes == 41
        assert worst(model, net, [node]) <= 1e-5


def test_bad_structures_and_models_are_refused() -> None:
    model = cells.TreeFC(WORDS, HIDDEN)
    good = cells.TreeNode([cells.TreeNode(word=1), cells.TreeNode(word=2)])
    net = recursive.compile(model, [good])
    cyclic = cells.TreeNode([cells.TreeNode(word=1), cells.TreeNode(word=2)])
    cyclic.children = (cyclic, good)
    with torch.no_grad():
        with pytest.raises(recursive.StructureError, match="its own descendant"):
            net([cyclic])
        with pytest.raises(recursive.StructureError, match="not in 0 to 19"):
            net([cells.TreeNode(word=WORDS)])
        assert len(net([]).states[0]) == 0
    with pytest.raises(recursive.StructureError, match="not all in 0 to 1"):
        linearize(recursive.Structures.of([0, 0, 1], [7], [0, 0], [1]))

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, HIDDEN)

        def forward(self, node: Any) -> torch.Tensor:
            if not node.children:
                return self.embedding.weight[node.word]
            state: torch.Tensor = self(node.children[0])
            return -state if state.sum() > 0 else state

    with pytest.raises(recursive.RecursiveModelError, match="value of a tensor") as error:
        recursive.compile(Branching(), [good])
    assert "test_recursive.py" in str(error.value.where)


def test_trees_are_read_from_text() -> None:
    model = cells.TreeFC(WORDS, HIDDEN)
    text = "(3 (2 a) (4 (2 good) (2 film)))"
    words = {"a": 0, "good": 1, "film": 2}
    leaf = [cells.TreeNode(word=word) for word in range(3)]
    same = cells.TreeNode([leaf[0], cells.TreeNode(leaf[1:])])
    with torch.no_grad():
        net = recursive.compile(model, [same])
        found = net(recursive.Structures.of_trees([text], words.__getitem__)).roots[0]
        torch.testing.assert_close(found, net([same]).roots[0])
    with pytest.raises(SlipstreamError, match="not closed"):
        recursive.Structures.of_trees(["(3 (2 a)"], words.__getitem__)


def test_an_embedding_that_is_not_a_number_is_refused() -> None:
    model = cells.TreeFC(WORDS, HIDDEN)
    with torch.no_grad():
        model.embedding.weight[3, 5] = float("nan")
        trees = [tree(random.Random(1), 4, 2)]
        with pytest.raises(recursive.RecursiveModelError, match="is not a number") as error:
            recursive.compile(model, trees)(trees)
    assert "row 3 of 20" in str(error.value.where)


def test_structures_linearized_before_a_new_shape_are_linearized_again() -> None:
    model, rng = cells.ChildSumTreeLSTM(WORDS, HIDDEN), random.Random(8)
    first = [tree(rng, 6, 2)]
    net = recursive.compile(model, first)
    order = net.linearize(first)
    with torch.no_grad():
        before = net(order).roots[0].clone()
        net([cells.TreeNode([cells.TreeNode(word=w) for w in range(3)])])
        assert torch.equal(net(order).roots[0], before)
        assert net.linearize(order) is not order


def test_kinds_that_do_not_fit_the_number_of_children_are_refused() -> None:
    model, rng = cells.TreeFC(WORDS, HIDDEN), random.Random(9)
    net = recursive.compile(model, [tree(rng, 6, 2)])
    good = net.linearize([tree(rng, 6, 2)]).structures
    assert good.kind is not None
    for kind in (np.flip(good.kind).copy(), np.full_like(good.kind, 9)):
        with pytest.raises(recursive.StructureError, match="no shape of this model"):
            net.linearize(replace(good, kind=kind))


@pytest.mark.parametrize(
    ("offset", "child", "word", "kind", "name"),
    [
        ([0, 0], [], ["a"], None, "word"),
        ([0, 0], [], [1 << 40], None, "word"),
        ([0, 0], [], [float("nan")], None, "word"),
        ([0, 0], [[]], [1], None, "child"),
        ([0, 0], [], [1], [0, 0], "kind"),
    ],
)
def test_arrays_that_are_not_integers_are_refused(
    offset: Any, child: Any, word: Any, kind: Any, name: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}:"):
        recursive.Structures.of(offset, child, word, None, kind)


def test_arguments_of_another_type_are_refused() -> None:
    model, leaf_node = cells.TreeFC(WORDS, HIDDEN), cells.TreeNode(word=1)
    for arguments, named in (
        ((None, []), {}), ((model, []), {"method": "other"}), ((model, leaf_node), {}),
        ((model, []), {"workers": 0}),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError):
            recursive.compile(*arguments, **named)
    with pytest.raises(recursive.RecursiveModelError, match="fails on a node: AttributeError"):
        recursive.compile(model, [None])
    with pytest.raises(InvalidArgumentError, match="no module 'other'"):
        recursive.compile_calls(model, ["other"])
    with pytest.raises(recursive.StructureError, match="the word 'b' has no number"):
        recursive.Structures.of_trees(["(3 (2 a) (2 b))"], {"a": 1}.__getitem__)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_compiled_model_refuses_to_be_copied(copied: Any) -> None:
    model, rng = cells.TreeFC(WORDS, HIDDEN), random.Random(10)
    net = recursive.compile(model, [tree(rng, 3, 2)])
    with pytest.raises(recursive.RecursiveModelError, match="copy or save its `model`"):
        copied(net)


def test_children_have_larger_numbers_than_their_parents() -> None:
    rng = np.random.default_rng(0)
    children = [[]] + [rng.integers(0, n, rng.integers(0, 4)).tolist() for n in range(1, 200)]
    offset = np.cumsum([0, *map(len, children)])
    order = linearize(
        recursive.Structures.of(offset, list(itertools.chain(*children)), np.zeros(200))
    )
    numbers = np.broadcast_to(np.arange(200), order.child_of.shape)
    assert (order.child_of > numbers)[order.child_of >= 0].all()
    assert sorted(order.place) == list(range(200))
