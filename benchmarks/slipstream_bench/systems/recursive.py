"""``slipstream bench recursive``: compiled recursive models, eager recursion and peers.

Times are CPU time of one thread over requests of consecutive trees of the Stanford Sentiment
Treebank, each from the objects of the trees: linearization is included. DyNet batches on the fly;
its rows are measured if the package `dynet` can be imported.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

import slipstream
from slipstream.codegen import PRELUDE, load, why_no_compiler
from slipstream.codegen.tile import tile_shape, tile_source
from slipstream.data import get
from slipstream.heap import keep_pages
from slipstream.techniques import recursive
from slipstream.techniques.recursive import Structures, TreeLSTM, TreeNode
from slipstream.techniques.recursive.structures import linearize
from slipstream_bench.harness import one_thread, paired, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

Requests = list[list[TreeNode]]

_SPEED = {
    (256, 1): {"eager": 8.0, "DyNet": 5.0, "level-batched": 4.5},
    (256, 10): {"eager": 10.0, "DyNet": 2.5, "level-batched": 2.5},
    (512, 1): {"eager": 6.0},
}
_CELLS = (
    recursive.TreeFC, recursive.TreeRNN, recursive.TreeLSTM, recursive.ChildSumTreeLSTM,
    recursive.TreeGRU, recursive.SimpleTreeGRU, recursive.MVRNN, recursive.DAGRNN,
)  # fmt: skip
_NO_DYNET = "the package dynet is not installed"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes two minutes: fewer requests and structures."""
    if (reason := why_no_compiler()) is not None:
        yield not_judged("TreeLSTM, hidden 256, batch 1 over eager", "x", ">= 8", reason)
        return
    keep_pages()
    with one_thread(gradients=False):
        yield from _equal_rows(options)
        yield from _speed_rows(options)
        yield from _limit_rows(options)
        yield from _linearizer_rows(options)
        yield from _pass_rows(options)
        yield from _accounting_row(options)
    with one_thread():
        yield from _training_rows(options)
        yield from _prediction_rows(options)


# Data and peers.


@functools.cache
def sentences() -> tuple[tuple[TreeNode, ...], int]:
    """Return the validation trees and the size of their vocabulary."""
    numbers: dict[str, int] = {}
    roots = []
    for tree in get("sst").validation:
        nodes: list[TreeNode] = []
        for left, right, word in zip(tree.left, tree.right, tree.words, strict=True):
            if left < 0:
                nodes.append(TreeNode(word=numbers.setdefault(word, len(numbers))))
            else:
                nodes.append(TreeNode([nodes[left], nodes[right]]))
        roots.append(nodes[-1])
    return tuple(roots), len(numbers)


def requests(batch: int, count: int) -> Requests:
    """Return requests of `batch` consecutive trees."""
    trees, _ = sentences()
    return [list(trees[at : at + batch]) for at in range(0, batch * count, batch)]


def level_batched(model: TreeLSTM, roots: Sequence[TreeNode]) -> torch.Tensor:
    """Return the hidden states of all nodes, by one gather and one product per level."""
    levels: list[list[TreeNode]] = []

    def visit(node: TreeNode) -> int:
        level = 1 + max(map(visit, node.children), default=-1)
        if level == len(levels):
            levels.append([])
        levels[level].append(node)
        return level

    for root in roots:
        visit(root)
    place: dict[int, int] = {}
    for node in itertools.chain.from_iterable(levels):
        place[id(node)] = len(place)
    hidden = torch.empty(len(place), model.joined.in_features // 2)
    cell = torch.empty_like(hidden)
    at = 0
    for level in levels:
        if level[0].children:
            left, right = (
                torch.tensor([place[id(node.children[k])] for node in level]) for k in (0, 1)
            )
            gates = model.joined(torch.cat([hidden[left], hidden[right]], 1))
            i, o, u, first, second = gates.chunk(5, 1)
            c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(first) * cell[left]
            c = c + torch.sigmoid(second) * cell[right]
        else:
            words = torch.tensor([node.word for node in level])
            i, o, u = model.input(model.embedding(words)).chunk(3, 1)
            c = torch.sigmoid(i) * torch.tanh(u)
        cell[at : at + len(level)] = c
        hidden[at : at + len(level)] = torch.sigmoid(o) * torch.tanh(c)
        at += len(level)
    return hidden


@functools.cache
def _dynet() -> Any:
    """Return the package with batching on the fly; None if it is not installed."""
    if importlib.util.find_spec("dynet") is None:
        return None
    dynet_config = importlib.import_module("dynet_config")

    dynet_config.set(mem=1500, autobatch=1)
    return importlib.import_module("dynet")


class _InDyNet:
    """A Tree-LSTM of the same sizes; a call computes the hidden states of the roots."""

    def __init__(self, words: int, hidden: int) -> None:
        dy = _dynet()
        self._parameters = parameters = dy.ParameterCollection()
        self._embedding = parameters.add_lookup_parameters((words, hidden))
        self._input = [
            (parameters.add_parameters((hidden,)), parameters.add_parameters((hidden, hidden)))
            for _ in range(3)
        ]
        self._joined = [
            [parameters.add_parameters(s) for s in ((hidden,), (hidden, hidden), (hidden, hidden))]
            for _ in range(5)
        ]

    def __call__(self, roots: Sequence[TreeNode]) -> None:
        self.loss(roots).value()

    def loss(self, roots: Sequence[TreeNode]) -> Any:
        """Return the sum of the roots' hidden states."""
        dy = _dynet()
        dy.renew_cg()
        return dy.esum([dy.sum_elems(self._states(root)[0]) for root in roots])

    def _states(self, node: TreeNode) -> tuple[Any, Any]:
        dy = _dynet()
        if not node.children:
            x = self._embedding[node.word]
            i, o, u = (dy.affine_transform([b, w, x]) for b, w in self._input)
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
            return dy.cmult(dy.logistic(o), dy.tanh(c)), c
        (h1, c1), (h2, c2) = (self._states(child) for child in node.children)
        i, o, u, f1, f2 = (dy.affine_transform([b, w, h1, v, h2]) for b, w, v in self._joined)
        c = dy.cmult(dy.logistic(i), dy.tanh(u))
        c = c + dy.cmult(dy.logistic(f1), c1) + dy.cmult(dy.logistic(f2), c2)
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c


# Rows.


def _random_tree(rng: np.random.Generator, words: int, pool: list[TreeNode]) -> TreeNode:
    """Return a binary tree over 1 to 20 leaves, some of them nodes of `pool`."""
    nodes = [
        TreeNode(word=int(rng.integers(words))) if not pool or rng.random() < 0.9
        else pool[rng.integers(len(pool))]
        for _ in range(rng.integers(1, 21))
    ]  # fmt: skip
    while len(nodes) > 1:
        at = int(rng.integers(len(nodes) - 1))
        nodes[at : at + 2] = [TreeNode(nodes[at : at + 2], int(rng.integers(words)))]
    pool.append(nodes[0])
    return nodes[0]


def _equal_rows(options: BenchOptions) -> Iterator[Bar]:
    for weights, limit in ((None, 1e-5), (torch.bfloat16, 2e-2)):
        kind = "bfloat16 weights" if weights else "float32"
        bar = f"states of all nodes: largest difference from eager, {kind}"
        count = 300 if options.full else 30
        if not options.wants(bar):
            continue
        options.progress(bar)
        worst = {}
        for make in _CELLS:
            torch.manual_seed(0)
            model, rng, pool = make(50, 32), np.random.default_rng(0), list[TreeNode]()
            trees = [_random_tree(rng, 50, pool) for _ in range(count)]
            net = recursive.compile(model, trees[:4], weights=weights, workers=1)
            worst[make.__name__] = _difference(model, net(trees))
        yield at_most(
            bar, max(worst.values()), limit, "", n=len(_CELLS) * count,
            detail="relative to at least 1; DAGs with shared nodes", data=worst,
        )  # fmt: skip


def _difference(model: Any, output: recursive.RecursiveOutput) -> float:
    nodes = output.linearized.structures.objects or []
    memo: dict[int, Any] = {}
    worst = 0.0
    # A child has a larger number than its parents.
    for number in np.argsort(-output.index):
        node = nodes[number]
        states = [memo[id(child)] for child in node.children]
        memo[id(node)] = model.internal(states, node.word) if states else model.leaf(node.word)
        for ours, theirs in zip(output.of(int(number)), memo[id(node)], strict=True):
            scale = max(1.0, float(theirs.abs().max()))
            worst = max(worst, float((ours - theirs).abs().max()) / scale)
    return worst


def _over(call: Callable[[list[TreeNode]], object], chosen: Requests) -> Callable[[], None]:
    def run() -> None:
        for request in chosen:
            call(request)

    return run


def _eager(model: TreeLSTM, request: list[TreeNode]) -> list[Any]:
    return [model(tree) for tree in request]


def _speed_rows(options: BenchOptions) -> Iterator[Bar]:
    _, words = sentences()
    for (hidden, batch), targets in _SPEED.items():
        where = f"TreeLSTM, hidden {hidden}, batch {batch}"
        named = {peer: f"{where}: over {peer}" for peer in targets}
        half = f"{where}, bfloat16 weights: over eager"
        if not any(options.wants(bar, 15) for bar in (*named.values(), half)):
            continue
        options.progress(where)
        torch.manual_seed(0)
        model = TreeLSTM(words, hidden)
        chosen = requests(batch, 40 if options.full or batch == 1 else 8)
        net = recursive.compile(model, chosen[0], workers=1)
        arms: dict[str, Callable[[], object]] = {
            "ours": _over(net, chosen),
            "eager": _over(functools.partial(_eager, model), chosen),
            "level-batched": _over(functools.partial(level_batched, model), chosen),
        }
        if hidden == 512:
            low = recursive.compile(model, chosen[0], workers=1, weights=torch.bfloat16)
            arms["bfloat16"] = _over(low, chosen)
        if _dynet() is not None and "DyNet" in targets:
            arms["DyNet"] = _over(_InDyNet(words, hidden), chosen)
        taken = paired(arms, blocks=30 if options.full else 8, budget_s=90.0)
        detail = f"{len(chosen)} requests per sample; {taken}"
        for peer, target in targets.items():
            if peer not in arms:
                yield not_judged(named[peer], "x", f">= {target:g}", _NO_DYNET)
            elif options.wants(named[peer]):
                yield taken.ratio(peer, "ours").at_least(named[peer], target, detail=detail)
        if "bfloat16" in arms and options.wants(half):
            yield taken.ratio("eager", "bfloat16").at_least(half, 9.0, detail=detail)


_LIMITS = r"""
extern "C" void sweep(const real* memory, i64 count, i64 times, real* out) {
  const vec* from = reinterpret_cast<const vec*>(memory);
  vec sum[8] = {};
  for (i64 t = 0; t < times; ++t)
    for (i64 i = 0; i < count / kLanes; i += 8) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) sum[j] += from[i + j];
    }
  for (int j = 0; j < 8; ++j)
    for (int l = 0; l < kLanes; ++l) out[l] += sum[j][l];
}
extern "C" void spin(const real* memory, i64 count, i64 times, real* out) {
  vec sum[24];
  for (int j = 0; j < 24; ++j) sum[j] = vec{} + memory[j];
  vec a = vec{} + 0.5f, b = vec{} + memory[0];
  for (i64 t = 0; t < times; ++t) {
#pragma GCC unroll 24
    for (int j = 0; j < 24; ++j) sum[j] = sum[j] * a + b;
    IN_REGISTER(a);
  }
  for (int j = 0; j < 24; ++j)
    for (int l = 0; l < kLanes; ++l) out[l] += sum[j][l];
}
"""


def _diamonds(rows: int, levels: int, words: int) -> Structures:
    """Return DAGs with one inner node per level, both children of which are the node below."""
    nodes = np.arange(rows * (levels + 1)).reshape(rows, -1)
    offset = np.concatenate([[0], np.cumsum(np.where(nodes % (levels + 1), 2, 0).ravel())])
    child = np.repeat(nodes[:, :-1].ravel(), 2)
    return Structures.of(offset, child, nodes.ravel() % words, nodes[:, -1])


def _limit_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare a level with few rows, and one with many, with what the processor can do."""
    lanes = tile_shape([], 1).lanes
    library = load(PRELUDE + "using real = float;\n" + tile_source(lanes) + _LIMITS)
    out = np.zeros(64, np.float32)
    levels = 60
    for hidden in (256, 512):
        free = f"level of 4 rows over 1 row, hidden {hidden}"
        narrow = f"level of 1 row, hidden {hidden}: bytes/s over a read-only sweep's"
        wide = f"level of 256 rows, hidden {hidden}: flop/s over a loop in registers"
        if not any(options.wants(bar, 10) for bar in (free, narrow, wide)):
            continue
        options.progress(f"levels of hidden {hidden}")
        torch.manual_seed(0)
        model = TreeLSTM(300, hidden)
        pair = TreeNode([TreeNode(word=0), TreeNode(word=1)])
        net = recursive.compile(model, [TreeNode([pair, pair])], workers=1)
        order = {n: net.linearize(_diamonds(n, levels if n < 9 else 4, 300)) for n in (1, 4, 256)}
        size = 2 * hidden * 5 * hidden
        panel = np.random.default_rng(0).random(size + 32, np.float32)
        panel = panel[-(panel.ctypes.data // 4) % 16 :]
        run = functools.partial(_call, library, panel, out)
        taken = paired(
            {
                "1 row": functools.partial(net, order[1]),
                "4 rows": functools.partial(net, order[4]),
                "256 rows": functools.partial(net, order[256]),
                "sweep": functools.partial(run, "sweep", size, levels),
                "registers": functools.partial(run, "spin", size, 200_000),
            },
            blocks=15, warm=True,
        )  # fmt: skip
        if options.wants(free):
            yield taken.ratio("4 rows", "1 row").at_most(free, 1.35, detail=f"{taken}")
        if options.wants(narrow):
            ratio = taken.ratio("sweep", "1 row")
            yield ratio.at_least(narrow, 0.80, detail=f"{levels} levels; {taken}")
        if options.wants(wide):
            # The states of leaves are looked up, and so are the first level's products.
            flops = 2 * 256 * 3 * size / taken.median_s("256 rows")
            peak = 2 * 24 * lanes * 200_000 / taken.median_s("registers")
            yield at_least(wide, flops / peak, 0.70, "x", detail=f"{flops / 1e9:.0f} Gflop/s")


def _call(
    library: Any, panel: Any, out: Any, name: Literal["sweep", "spin"], count: int, times: int
) -> None:
    function = getattr(library, name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function(panel.ctypes.data, count, times, out.ctypes.data)


def _linearizer_rows(options: BenchOptions) -> Iterator[Bar]:
    """Linearize generated trees, in arrays; and structures of extreme shapes."""
    rate, constant = "linearizer: nodes/s", "linearizer: time per node, 10^4 to 10^7 nodes"
    if options.wants(rate) or options.wants(constant):
        options.progress(rate)
        sizes = [10**4, 10**5, 10**6, 10**7] if options.full else [10**4, 10**5, 10**6]
        per_node = {}
        for size in sizes:
            structures = _heap(size)
            elapsed_s = times_s(functools.partial(linearize, structures), 9)
            per_node[size] = float(np.median(elapsed_s)) / structures.nodes
        if options.wants(rate):
            yield at_least(rate, 1e-6 / per_node[10**6], 5.0, "M nodes/s", detail="10^6 nodes")
        if options.wants(constant):
            worst = max(per_node.values()) / min(per_node.values())
            shown = {str(size): round(1e9 * value, 2) for size, value in per_node.items()}
            yield at_most(constant, worst, 1.2, "x", detail=f"ns: {shown}", data=shown)
    _, words = sentences()
    torch.manual_seed(0)
    model = TreeLSTM(words, 256)
    bar = "linearization: share of a request of batch 10, hidden 256"
    if options.wants(bar):
        options.progress(bar)
        chosen = requests(10, 20)
        net = recursive.compile(model, chosen[0], workers=1)
        taken = paired({"linearize": _over(net.linearize, chosen), "all": _over(net, chosen)})
        yield taken.ratio("linearize", "all").at_most(bar, 0.08, detail=f"{taken}")
    bar = "DAG of 40 diamonds, hidden 256"
    if options.wants(bar):
        options.progress(bar)
        node = TreeNode(word=0)
        for _ in range(40):
            node = TreeNode([TreeNode([node, node]), TreeNode([node, node])])
        net = recursive.compile(model, [node], workers=1)
        elapsed_s = times_s(functools.partial(net, [node]), 9)
        yield at_most(
            bar, 1e3 * float(np.median(elapsed_s)), 50.0, "ms", detail="2^80 paths, 121 nodes"
        )
    bar = "chain of 50,000 nodes: largest difference from a loop"
    if options.wants(bar):
        options.progress(bar)
        chain_model = recursive.SequenceGRU(50, 32)
        node, words_of = TreeNode(word=0), np.random.default_rng(0).integers(50, size=50_000)
        for word in words_of.tolist():
            node = TreeNode([node], word)
        state = recursive.compile(chain_model, [node.children[0]], workers=1)([node]).roots[0][0]
        expected = chain_model.leaf(0)
        for word in words_of.tolist():
            expected = chain_model.internal([expected], word)
        yield at_most(bar, float((state - expected[0]).abs().max()), 1e-5, "", n=50_000)


def _heap(size: int) -> Structures:
    """Return balanced binary trees of 63 nodes, children before parents."""
    trees = max(size // 63, 1)
    parents = np.arange(31)
    child = np.stack([2 * parents + 1, 2 * parents + 2], 1).ravel()
    # Node i of a heap is number 62 - i, so that children precede their parents.
    child = (62 - child).reshape(31, 2)[::-1].ravel()
    arity = np.tile(np.repeat([0, 2], [32, 31]), trees)
    offset = np.concatenate([[0], np.cumsum(arity)])
    base = 63 * np.arange(trees)
    return Structures.of(offset, (base[:, None] + child).ravel(), np.zeros(63 * trees), base + 62)


def _pass_rows(options: BenchOptions) -> Iterator[Bar]:
    """Switch single optimizations off, on perfect trees of height 7."""
    targets = {"fuse": 1.5, "batch": 2.0, "specialize": None, "hoist": None, "persist": None}
    bars = {name: f"TreeFC, height 7, batch 10: gain of {name}" for name in targets}
    if not any(map(options.wants, bars.values())):
        return
    options.progress("gains of the passes")
    torch.manual_seed(0)
    model, rng = recursive.TreeFC(1000, 256), np.random.default_rng(0)
    roots = [_perfect(7, rng) for _ in range(10)]
    arms: dict[str, Callable[[], object]] = {}
    for name in ("all", *targets):
        passes = recursive.Passes(**({} if name == "all" else {name: False}))
        net = recursive.compile(model, roots[:1], workers=1, passes=passes)
        arms[name] = functools.partial(net, roots)
    taken = paired(arms, blocks=15)
    for name, target in targets.items():
        ratio = taken.ratio(name, "all")
        if not options.wants(bars[name]):
            continue
        detail = f"time without it; {taken}"
        yield (
            ratio.reported(bars[name], detail=detail) if target is None
            else ratio.at_least(bars[name], target, detail=detail)
        )  # fmt: skip


def _perfect(height: int, rng: np.random.Generator) -> TreeNode:
    if height == 0:
        return TreeNode(word=int(rng.integers(1000)))
    return TreeNode([_perfect(height - 1, rng) for _ in range(2)])


def _accounting_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "launches and barriers as explain() says"
    if not options.wants(bar):
        return
    options.progress(bar)
    exact = total = 0
    rng = np.random.default_rng(1)
    for make in _CELLS:
        trees = [_random_tree(rng, 50, []) for _ in range(3)]
        for passes in (recursive.Passes(), recursive.Passes(fuse=False)):
            net = recursive.compile(make(50, 32), trees, workers=1, passes=passes)
            net(trees)
            plan = net.explain(trees)
            exact += (plan.launches, plan.barriers) == (net.launches, net.barriers)
            total += 1
    yield Bar(bar, exact, f"of {total}", f"= {total}", exact == total, total)


def _training_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "gradients: largest difference from autograd, float64"
    if options.wants(bar):
        options.progress(bar)
        worst = {}
        for make in _CELLS:
            if make is recursive.MVRNN:
                continue
            torch.manual_seed(0)
            model, rng, pool = make(50, 32).double(), np.random.default_rng(0), list[TreeNode]()
            trees = [_random_tree(rng, 50, pool) for _ in range(8)]
            parameters = list(model.parameters())
            net = recursive.compile(model, trees[:2], workers=1)
            ours = torch.autograd.grad(torch.cat(net(trees).roots).sin().sum(), parameters)
            states = torch.stack([state for tree in trees for state in model(tree)])
            expected = torch.autograd.grad(states.sin().sum(), parameters)
            worst[make.__name__] = max(
                float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True)
            )
        yield at_most(bar, max(worst.values()), 1e-9, "", n=len(worst), data=worst)
    bar = "training of TreeLSTM, hidden 256, batch 10: over eager"
    if not options.wants(bar, 20):
        return
    options.progress(bar)
    _, words = sentences()
    torch.manual_seed(0)
    model = TreeLSTM(words, 256)
    # Eager recursion makes a gradient of the whole table for every leaf.
    model.embedding.weight.requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = requests(10, 3)
    net = recursive.compile(model, chosen[0], workers=1)

    def step(states: Callable[[list[TreeNode]], torch.Tensor], request: list[TreeNode]) -> None:
        torch.autograd.grad(states(request).sum(), parameters)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.0)  # weights change, and are packed again

    arms = {
        "ours": lambda request: net(request).roots[0],
        "eager": lambda request: torch.stack([model(tree)[0] for tree in request]),
    }
    taken = paired(
        {name: _over(functools.partial(step, arm), chosen) for name, arm in arms.items()},
        blocks=15 if options.full else 6, budget_s=40.0,
    )  # fmt: skip
    yield taken.ratio("eager", "ours").at_least(
        bar, 4.0, detail=f"forward, backward and changed weights; embeddings frozen; {taken}"
    )


def _prediction_rows(options: BenchOptions) -> Iterator[Bar]:
    """Predict the speed-up of `slipstream predict -t recursive`, and measure it."""
    bar = "predicted speed-up: median error"
    if not options.wants(bar, 40):
        return
    _, words = sentences()
    errors = {}
    kinds = (recursive.TreeRNN, recursive.TreeLSTM, recursive.ChildSumTreeLSTM,
             recursive.TreeGRU, recursive.SimpleTreeGRU)  # fmt: skip
    for hidden in (128, 256) if options.full else (256,):
        for make in kinds:
            options.progress(f"{bar}: {make.__name__}, hidden {hidden}")
            torch.manual_seed(0)
            model, request = _Batch(make(words, hidden)).eval(), (requests(8, 1)[0],)
            graph = slipstream.profile(slipstream.Workload.of(model, request), threads=1)
            predicted = slipstream.predict(graph, ["recursive"])[0].speedup
            compiled = copy.deepcopy(model)
            recursive.compile_calls(compiled)
            with torch.no_grad():
                taken = paired(
                    {"ours": functools.partial(compiled, *request),
                     "eager": functools.partial(model, *request)}, blocks=8,
                )  # fmt: skip
            measured = taken.ratio("eager", "ours").value
            errors[f"{make.__name__}, {hidden}"] = 100 * (predicted / measured - 1)
    shown = ", ".join(f"{name}: {error:+.0f}" for name, error in errors.items())
    yield at_most(
        bar, float(np.median(np.abs([*errors.values()]))), 15.0, "%", n=len(errors), detail=shown,
        data=errors,
    )  # fmt: skip


class _Batch(torch.nn.Module):
    """States of the roots of several trees."""

    def __init__(self, cell: recursive.Cell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, trees: list[TreeNode]) -> torch.Tensor:
        return torch.stack([self.cell(tree)[0] for tree in trees])
