"""Which channels of a traced graph must be removed together, derived from its operators.

Each axis of a tensor is an array of labels, one per position; positions with connected labels are
retained or removed together. An axis without labels keeps its size. Operators connect labels (a
residual sum), move them (a permutation), or freeze them (an operator without a rule).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch.fx import GraphModule, Node

from slipstream.nas.trace import op_name, owner_of, shape_of
from slipstream.surgery.fx import arguments_of

Labels = NDArray[np.int64]
Axes = list[Labels | None]

OUTPUT = "it is an output of the model"
INDICES = "its positions are looked up by index"
_SAME = frozenset({
    "dropout", "feature_dropout", "contiguous", "to", "detach", "alias", "type_as", "_to_copy",
    "cumsum", "softmax", "log_softmax", "lift_fresh_copy", "hardtanh", "masked_fill", "hardswish",
    "hardsigmoid", "relu6", "silu", "mish", "selu", "where", "bernoulli", "_assert_tensor_metadata",
})  # fmt: skip
"""Elementwise operators, some overloads of which torch does not tag as such."""
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "var", "std", "norm", "linalg_vector_norm"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
FACTORIES = {"zeros": 0, "ones": 0, "full": 0, "empty": 0, "new_zeros": 1, "new_ones": 1,
             "new_full": 1}  # fmt: skip
"""Operators that make a tensor of a given shape, with the number of that argument."""
VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
_THROUGH = frozenset({"contiguous", "clone", "transpose", "permute", "unsqueeze", "squeeze"})


@dataclass(frozen=True)
class Freeze:
    """Labels that an operator makes unsearchable, and the reason."""

    labels: Labels
    why: str
    where: str


@dataclass
class Coupling:
    """Labels of all tensors of a graph.

    Attributes:
        axes: labels of the axes of each node; a list of such lists for a node with several results.
        parameters: labels of the axes of each parameter and buffer, by qualified name.
        freezes: the labels that cannot be searched.
        component: number of the connected component of each label; -1 if frozen.
    """

    axes: dict[Node, Any] = field(default_factory=dict)
    parameters: dict[str, Axes] = field(default_factory=dict)
    freezes: list[Freeze] = field(default_factory=list)
    component: Labels = field(default_factory=lambda: np.zeros(0, np.int64))
    reasons: dict[int, Freeze] = field(default_factory=dict)
    _count: int = 0
    _pairs: list[tuple[Labels, Labels]] = field(default_factory=list)

    def fresh(self, size: int) -> Labels:
        """Return `size` labels that nothing is connected with yet."""
        self._count += size
        return np.arange(self._count - size, self._count)

    def tie(self, first: Labels | None, second: Labels | None, node: Node) -> Labels | None:
        """Connect two axes position by position; freeze the one that meets an axis of fixed size.

        An axis of size 1 is broadcast.
        """
        if first is None or second is None or len(first) != len(second):
            fixed = [a for a in (first, second) if a is not None and len(a) > 1]
            if first is not None and second is not None:
                return first if len(first) > len(second) else second
            for labels in fixed:
                self.freeze(labels, "it meets a dimension of fixed size", node)
            return None
        self._pairs.append((first, second))
        return first

    def freeze(self, labels: Labels | None, why: str, node: Node) -> None:
        """Make an axis unsearchable."""
        if labels is not None and len(labels):
            where = owner_of(node) or "the model"
            self.freezes.append(Freeze(labels, f"{why} ({op_name(node) or node.op})", where))

    def rows_alike(self, labels: Labels, groups: int) -> Labels:
        """Connect the positions of `groups` equal parts of an axis; return the first part."""
        rows = labels.reshape(groups, -1)
        for row in rows[1:]:
            self._pairs.append((rows[0], row))
        return np.asarray(rows[0])

    def resolve(self) -> None:
        """Compute `component` from the connections made so far."""
        n = self._count
        first = np.concatenate([a for a, _ in self._pairs] or [np.zeros(0, np.int64)])
        second = np.concatenate([b for _, b in self._pairs] or [np.zeros(0, np.int64)])
        ones = np.ones(len(first), np.int8)
        _, component = connected_components(coo_matrix((ones, (first, second)), shape=(n, n)))
        component = component.astype(np.int64)
        self.reasons = {}
        for freeze in self.freezes:
            for number in np.unique(component[freeze.labels]).tolist():
                # The output is the best explanation.
                if number not in self.reasons or freeze.why.startswith(OUTPUT):
                    self.reasons[number] = freeze
        self.raw = component.copy()
        component[np.isin(component, list(self.reasons))] = -1
        self.component = component


def couple(module: GraphModule) -> Coupling:
    """Derive the labels of all tensors of a traced graph."""
    coupling = Coupling()
    shared: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            _parameter(coupling, module, node, shared)
        elif node.op == "output":
            for source in node.all_input_nodes:
                for labels in _flat(coupling.axes.get(source)):
                    coupling.freeze(labels, OUTPUT, node)
        elif node.op == "call_function":
            coupling.axes[node] = _call(coupling, node)
        else:
            coupling.axes[node] = _unlabelled(node)
    coupling.resolve()
    return coupling


def _parameter(c: Coupling, module: GraphModule, node: Node, shared: dict[int, str]) -> None:
    tensor = attrgetter(str(node.target))(module)
    if not isinstance(tensor, torch.Tensor):
        return
    name = shared.setdefault(id(tensor), str(node.target))
    if name not in c.parameters:
        # Positions of integer buffers, such as indices, are no channels.
        searchable = tensor.is_floating_point()
        c.parameters[name] = [c.fresh(n) if searchable and n > 1 else None for n in tensor.shape]
    c.parameters[str(node.target)] = c.axes[node] = c.parameters[name]


def _unlabelled(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [[None] * v.dim() if isinstance(v, torch.Tensor) else [] for v in value]
    return [None] * value.dim() if isinstance(value, torch.Tensor) else []


def _flat(axes: Any) -> list[Labels]:
    nested = [item for item in axes or [] if isinstance(item, list)]
    found = [label for item in nested for label in _flat(item)]
    return found + [item for item in axes or [] if isinstance(item, np.ndarray)]


def _call(c: Coupling, node: Node) -> Any:
    name = op_name(node)
    if not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
        return []
    rule = _RULES.get(name)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if rule is None and (pointwise or name in _SAME):
        rule = _elementwise
    if rule is None:
        rule = next((r for part, r in _BY_PART if part in name), None)
    result = rule(c, node) if rule else None
    if result is None:
        for source in node.all_input_nodes:
            for labels in _flat(c.axes.get(source)):
                c.freeze(labels, f"{name} has no rule", node)
        return _unlabelled(node)
    return result


def _of(c: Coupling, node: Node, number: int) -> Axes:
    value = argument(node, number)
    return list(c.axes.get(value, [])) if isinstance(value, Node) else []


def argument(node: Node, number: int, default: Any = None) -> Any:
    """Return argument `number` of an operator in schema order; `default` if it has fewer."""
    arguments = arguments_of(node)
    return arguments[number] if number < len(arguments) else default


def _broadcast(
    c: Coupling, node: Node, operands: Sequence[tuple[Axes, tuple[int, ...]]], sizes: Sequence[int]
) -> Axes:
    """Connect axes and sizes of operands that are broadcast to `sizes`."""
    result: Axes = [None] * len(sizes)
    for k, size in enumerate(reversed(sizes), 1):
        # An axis of size 1 is repeated.
        whole = [a[-k] for a, found in operands if len(a) >= k and found[-k] == size > 1]
        for labels in whole:
            first = result[-k] if result[-k] is not None else whole[0]
            result[-k] = c.tie(first, labels, node)
    return result


def _elementwise(c: Coupling, node: Node) -> Any:
    name, value = op_name(node), node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    operands = [(c.axes[s], _size(s)) for s in node.all_input_nodes]
    result = _broadcast(
        c, node, [(a, size) for a, size in operands if len(a) == len(size)], shape_of(value)
    )
    if name in ("softmax", "log_softmax", "cumsum"):
        c.freeze(result[argument(node, 1)], f"{name} runs over it", node)
    return result


def _size(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    if node.op != "get_attr":
        return ()
    return tuple(attrgetter(str(node.target))(node.graph.owning_module).shape)


def _convolution(c: Coupling, node: Node) -> Axes | None:
    x, w, bias = _of(c, node, 0), _of(c, node, 1), _of(c, node, 2)
    transposed = "transpose" in op_name(node)
    groups = int(argument(node, 6, 1))
    if len(x) != len(w):
        return None
    for axis in range(2, len(w)):
        w[axis] = None
        c.axes[argument(node, 1)][axis] = None
    out, inner = (w[1], w[0]) if transposed else (w[0], w[1])
    if groups == 1:
        c.tie(x[1], inner, node)
    elif transposed:
        return None
    elif inner is None and x[1] is not None and out is not None and len(x[1]) == groups:
        c.tie(np.repeat(x[1], len(out) // groups), out, node)
    else:
        if x[1] is None:
            return None
        c.tie(c.rows_alike(x[1], groups), inner, node)
        if out is not None:
            c.rows_alike(out, groups)
    if bias:
        c.tie(out, bias[0], node)
    return [x[0], out, *[None] * (len(x) - 2)]


def _linear(c: Coupling, node: Node) -> Axes:
    x, w, bias = _of(c, node, 0), _of(c, node, 1), _of(c, node, 2)
    c.tie(x[-1], w[1], node)
    if bias:
        c.tie(w[0], bias[0], node)
    return [*x[:-1], w[0]]


def _embedding(c: Coupling, node: Node) -> Axes:
    w = _of(c, node, 0)
    c.freeze(w[0], INDICES, node)
    return [*_of(c, node, 1), w[1]]


def _channelwise(c: Coupling, node: Node) -> Axes | None:
    """Connect channels to weights and statistics, one number per channel."""
    x = _of(c, node, 0)
    if len(x) < 2:
        return None
    for number in range(1, 5):
        source = argument(node, number)
        if isinstance(source, Node) and _size(source) != (1,):
            c.tie(x[1], c.axes[source][0], node)
    return x


def _group_norm(c: Coupling, node: Node) -> Axes | None:
    x = _of(c, node, 0)
    if x[1] is not None:
        c.rows_alike(x[1], int(argument(node, 1)))
    return _channelwise(c, node)


def _layer_norm(c: Coupling, node: Node) -> Axes:
    x = _of(c, node, 0)
    for number in (2, 3):
        for k, a in enumerate(reversed(_of(c, node, number)), 1):
            c.tie(x[-k], a, node)
    return x


def _pool(c: Coupling, node: Node) -> Any:
    x = _of(c, node, 0)
    dims = next((int(d) for d in "123" if f"{d}d" in op_name(node)), len(x) - 2)
    axes = [*x[: len(x) - dims], *[None] * dims]
    return axes if isinstance(node.meta["val"], torch.Tensor) else [axes, axes]


def _reduction(c: Coupling, node: Node) -> Axes | None:
    x = _of(c, node, 0)
    number = 2 if "norm" in op_name(node) else 1
    dims, keep = argument(node, number), bool(argument(node, number + 1, False))
    if "var" in op_name(node) or "std" in op_name(node):
        keep = bool(argument(node, 3, False))
    if not isinstance(dims, (list, tuple, int)) or isinstance(dims, bool):
        return None
    gone = {d % len(x) for d in ([dims] if isinstance(dims, int) else dims)}
    remaining = [(None if n in gone else a) for n, a in enumerate(x)]
    return remaining if keep else [a for n, a in enumerate(remaining) if n not in gone]


def _matmul(c: Coupling, node: Node) -> Axes | None:
    a, b = _of(c, node, 0), _of(c, node, 1)
    if len(a) < 2 or len(b) < 2:
        return None
    c.tie(a[-1], b[-2], node)
    rank = node.meta["val"].dim()
    batch: Axes = [None] * (rank - 2)
    for k in range(3, rank + 1):
        pair = [axes[-k] for axes in (a, b) if len(axes) >= k]
        batch[2 - k] = pair[0] if len(pair) == 1 else c.tie(pair[0], pair[1], node)
    return [*batch, a[-2], b[-1]]


def _attention(c: Coupling, node: Node) -> Axes:
    q, k, v = (_of(c, node, n) for n in range(3))
    c.tie(q[-1], k[-1], node)
    c.tie(k[-2], v[-2], node)
    for n in range(len(q) - 2):
        for other in (k[n], v[n]):
            a = q[n]
            repeats = len(a) // len(other) if a is not None and other is not None else 1
            c.tie(a, np.repeat(other, repeats) if other is not None else None, node)
    mask = argument(node, 3)
    if isinstance(mask, Node):
        scores = (*_size(argument(node, 0))[:-1], _size(argument(node, 1))[-2])
        operands = [(c.axes[mask], _size(mask)), ([*q[:-1], k[-2]], scores)]
        _broadcast(c, node, operands, scores)
    return [*q[:-1], v[-1]]


def _cat(c: Coupling, node: Node) -> Axes | None:
    sources: Any = argument(node, 0)
    axis = int(argument(node, 1, 0)) % node.meta["val"].dim()
    parts = [list(c.axes[s]) for s in sources]
    result: Axes = list(parts[0])
    for n in range(len(result)):
        if n != axis:
            for other in parts[1:]:
                result[n] = c.tie(result[n], other[n], node)
    if all(p[axis] is None for p in parts):
        return result
    whole = []
    for source, p in zip(sources, parts, strict=True):
        labels = p[axis]
        if labels is None:
            labels = c.fresh(_size(source)[axis])
            c.freeze(labels, "it is concatenated from a dimension of fixed size", node)
        whole.append(labels)
    result[axis] = np.concatenate(whole)
    return result


def _stack(c: Coupling, node: Node) -> Axes:
    sources: Any = argument(node, 0)
    result = list(c.axes[sources[0]])
    for s in sources[1:]:
        result = [c.tie(a, b, node) for a, b in zip(result, c.axes[s], strict=True)]
    axis = int(argument(node, 1, 0)) % node.meta["val"].dim()
    return [*result[:axis], None, *result[axis:]]


def _split(c: Coupling, node: Node) -> Any:
    x = _of(c, node, 0)
    axis = int(argument(node, 2, 0)) % len(x)
    parts, start = [], 0
    for value in node.meta["val"]:
        end = start + shape_of(value)[axis]
        labels = x[axis]
        parts.append([*x[:axis], None if labels is None else labels[start:end], *x[axis + 1 :]])
        start = end
    return parts


def _unbind(c: Coupling, node: Node) -> Any:
    x = _of(c, node, 0)
    axis = int(argument(node, 1, 0)) % len(x)
    c.freeze(x[axis], "single positions of it are used", node)
    return [[*x[:axis], *x[axis + 1 :]] for _ in node.meta["val"]]


def _getitem(c: Coupling, node: Node) -> Any:
    parts = c.axes.get(argument(node, 0), [])
    index = argument(node, 1)
    return parts[index] if isinstance(index, int) and index < len(parts) else None


def _slice(c: Coupling, node: Node) -> Axes | None:
    x = _of(c, node, 0)
    axis = int(argument(node, 1, 0)) % len(x)
    start, end, step = (argument(node, n) for n in (2, 3, 4))
    labels = x[axis]
    if labels is not None:
        if any(isinstance(v, Node) for v in (start, end, step)):
            return None
        if step not in (1, None):
            c.freeze(labels, "it is read in steps", node)
        if argument(node, 0).op == "get_attr" and len(labels[start:end]) < len(labels):
            # Such as a table of positions, of which longer inputs read more.
            c.freeze(labels, INDICES, node)
        x[axis] = labels[start:end] if step in (1, None) else None
    return x


def _select(c: Coupling, node: Node) -> Axes:
    x = _of(c, node, 0)
    axis = int(argument(node, 1)) % len(x)
    c.freeze(x[axis], "single positions of it are used", node)
    return [*x[:axis], *x[axis + 1 :]]


def _permute(c: Coupling, node: Node) -> Axes:
    x = _of(c, node, 0)
    name, order = op_name(node), list(range(len(x)))
    if name == "permute":
        order = [int(d) % len(x) for d in argument(node, 1)]
    elif len(x) > 1:
        dims: Any = (0, 1) if name == "t" else (argument(node, 1), argument(node, 2))
        a, b = (int(d) % len(x) for d in dims)
        order[a], order[b] = order[b], order[a]
    return [x[n] for n in order]


def _reshape_one(c: Coupling, node: Node) -> Axes | None:
    x = _of(c, node, 0)
    rank = node.meta["val"].dim()
    if op_name(node) == "unsqueeze":
        axis = int(argument(node, 1)) % rank
        return [*x[:axis], None, *x[axis:]]
    dims = argument(node, 1)
    sizes = _size(argument(node, 0))
    gone = range(len(x)) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = {d % len(x) for d in gone if sizes[d] == 1}
    return [a for n, a in enumerate(x) if n not in removed]


def _expand(c: Coupling, node: Node) -> Axes:
    x, sizes = _of(c, node, 0), shape_of(node.meta["val"])
    x = [*[None] * (len(sizes) - len(x)), *x]
    return [a if a is not None and len(a) == n else None for a, n in zip(x, sizes, strict=True)]


def _repeat(c: Coupling, node: Node) -> Axes:
    times: Any = argument(node, 1)
    x = _of(c, node, 0)
    x = [*[None] * (len(times) - len(x)), *x]
    sizes = shape_of(node.meta["val"])
    return [None if a is None else np.tile(a, n // len(a)) for a, n in zip(x, sizes, strict=True)]


def _repeat_interleave(c: Coupling, node: Node) -> Axes | None:
    x, times, axis = _of(c, node, 0), argument(node, 1), argument(node, 2)
    if not isinstance(times, int) or not isinstance(axis, int):
        return None
    labels = x[axis]
    x[axis] = None if labels is None else np.repeat(labels, times)
    return x


def _pad(c: Coupling, node: Node) -> Axes:
    x, padding = _of(c, node, 0), argument(node, 1)
    for n in range(len(padding) // 2):
        if any(padding[2 * n : 2 * n + 2]):
            c.freeze(x[-1 - n], "it is padded", node)
            x[-1 - n] = None
    return x


def _roll(c: Coupling, node: Node) -> Axes:
    x = _of(c, node, 0)
    for d in argument(node, 2) or range(len(x)):
        c.freeze(x[d], "it is rolled", node)
    return x


def _index(c: Coupling, node: Node) -> Axes | None:
    x, indices = _of(c, node, 0), argument(node, 1)
    if len(indices) != 1 or not isinstance(indices[0], Node):
        return None
    c.freeze(x[0], INDICES, node)
    return [*[None] * (node.meta["val"].dim() - len(x) + 1), *x[1:]]


def _factory(c: Coupling, node: Node) -> Axes:
    sizes = node.meta["val"].shape
    return [c.fresh(n) if isinstance(n, int) and n > 1 else None for n in sizes]


def _recurrent(c: Coupling, node: Node) -> Any:
    gates = {"lstm": 4, "gru": 3}.get(op_name(node), 1)
    x, (initial, weights) = _of(c, node, 0), (argument(node, 1), argument(node, 2))
    biases, both = bool(argument(node, 3)), bool(argument(node, 7))
    states = initial if isinstance(initial, (list, tuple)) else [initial]
    per = 4 if biases else 2
    if any(len(c.axes[w]) > 2 for w in weights) or len(weights) % per:
        return None
    source, hidden = x[-1], None
    cells = [weights[k : k + per] for k in range(0, len(weights), per)]
    directions = 2 if both else 1
    for layer in range(0, len(cells), directions):
        ends = []
        for cell in cells[layer : layer + directions]:
            w_ih, w_hh, *bias = (c.axes[w] for w in cell)
            if w_hh[1] is None or len(w_hh[0]) != gates * len(w_hh[1]):
                return None
            hidden = w_hh[1] if hidden is None else c.tie(hidden, w_hh[1], node)
            for labels in (w_ih[0], w_hh[0], *(b[0] for b in bias)):
                c.tie(np.tile(w_hh[1], gates), labels, node)
            c.tie(source, w_ih[1], node)
            ends.append(w_hh[1])
        source = np.concatenate(ends)
    for state in states:
        axes = c.axes.get(state) or [None]
        c.tie(axes[-1], hidden, node)
        for labels in axes[:-1]:
            c.freeze(labels, "it is the number of layers", node)
    last: Axes = [None, None, hidden]
    return [[*x[:-1], source], *[last for _ in states]]


def _view(c: Coupling, node: Node) -> Axes | None:
    """Split both shapes into common factors, split axes into them, and merge them again."""
    x, old, new = _of(c, node, 0), _size(argument(node, 0)), shape_of(node.meta["val"])
    inner, outer = _bounds(old), _bounds(new)
    bounds = sorted(set(inner) | set(outer), reverse=True)
    if any(a % b for a, b in pairwise(bounds)):
        for labels in x:
            c.freeze(labels, "its view has no common factors", node)
        return [None] * len(new)
    factors: list[tuple[int, Labels | None]] = []
    for axis, labels in enumerate(x):
        parts = _within(bounds, inner[axis], inner[axis + 1])
        free = _free(node, parts, old, axis, new)
        factors += _split_axis(c, labels, parts, free)
    result: Axes = []
    at = 0
    for axis in range(len(new)):
        merged = factors[at : at + len(_within(bounds, outer[axis], outer[axis + 1]))]
        at += len(merged)
        result.append(_merge(c, node, merged))
    return result


def _bounds(shape: tuple[int, ...]) -> list[int]:
    products = [1]
    for n in reversed(shape):
        products.append(products[-1] * n)
    return products[::-1]


def _within(bounds: list[int], high: int, low: int) -> list[int]:
    steps = [b for b in bounds if low <= b <= high]
    return [a // b for a, b in pairwise(steps)]


def _free(node: Node, parts: list[int], old: tuple[int, ...], axis: int, new: Any) -> int:
    """Choose the factor of a split axis that stays searchable.

    A factor that is later selected from packs tensors (queries, keys, values), and is not. Of the
    last dimension, the factor before the innermost one are heads; of others, it is the largest.
    """
    if len(parts) < 2:
        return 0
    first = next((n for n in range(len(new)) if new[n : n + len(parts)] == tuple(parts)), None)
    packed = {k for k in range(len(parts)) if first is not None and _is_packing(node, first + k)}
    rest = [k for k in range(len(parts)) if k not in packed] or list(range(len(parts)))
    if axis == len(old) - 1 and len(rest) > 1:
        return rest[-2]
    return max(rest, key=lambda k: parts[k])


def _is_packing(node: Node, axis: int) -> bool:
    """Whether single positions of this axis of `node` are taken out later."""
    for user in node.users:
        name = op_name(user)
        rank = node.meta["val"].dim()
        if name in ("unbind", "select"):
            if int(argument(user, 1, 0)) % rank == axis:
                return True
        elif name in _THROUGH:
            moved = axis
            if name == "transpose":
                a, b = (int(d) % rank for d in (argument(user, 1), argument(user, 2)))
                moved = {a: b, b: a}.get(axis, axis)
            elif name == "permute":
                moved = [int(d) % rank for d in argument(user, 1)].index(axis)
            elif name == "unsqueeze":
                moved += int(argument(user, 1)) % (rank + 1) <= axis
            elif name == "squeeze":
                moved -= isinstance(argument(user, 1), int) and argument(user, 1) % rank < axis
            if _is_packing(user, moved):
                return True
    return False


def _split_axis(
    c: Coupling, labels: Labels | None, parts: list[int], free: int
) -> list[tuple[int, Labels | None]]:
    if not parts:
        return []
    if labels is None or len(parts) == 1:
        return [(n, labels if len(parts) == 1 else None) for n in parts]
    block = np.moveaxis(labels.reshape(parts), free, 0).reshape(parts[free], -1)
    for column in range(1, block.shape[1]):
        c._pairs.append((block[:, 0], block[:, column]))
    return [(n, block[:, 0].copy() if k == free else None) for k, n in enumerate(parts)]


def _merge(c: Coupling, node: Node, factors: list[tuple[int, Labels | None]]) -> Labels | None:
    labelled = {k: labels for k, (_, labels) in enumerate(factors) if labels is not None}
    if not labelled:
        return None
    best = max(labelled, key=lambda k: factors[k][0])
    for k in labelled:
        if k != best:
            c.freeze(factors[k][1], "it is merged with another searchable dimension", node)
    before = int(np.prod([n for n, _ in factors[:best]]))
    after = int(np.prod([n for n, _ in factors[best + 1 :]]))
    return np.tile(np.repeat(labelled[best], after), before)


_Rule = Callable[[Coupling, Node], Any]
_RULES: dict[str, _Rule] = {
    "linear": _linear, "embedding": _embedding, "matmul": _matmul, "mm": _matmul,
    "group_norm": _group_norm, "layer_norm": _layer_norm, "rms_norm": _layer_norm,
    "batch_norm": _channelwise, "instance_norm": _channelwise, "prelu": _channelwise,
    "bmm": _matmul, "scaled_dot_product_attention": _attention, "cat": _cat, "stack": _stack,
    "split": _split, "split_with_sizes": _split, "chunk": _split, "unbind": _unbind,
    "getitem": _getitem, "slice": _slice, "select": _select, "transpose": _permute,
    "permute": _permute, "t": _permute, "unsqueeze": _reshape_one, "squeeze": _reshape_one,
    "expand": _expand, "expand_as": _expand, "repeat": _repeat, "pad": _pad,
    "repeat_interleave": _repeat_interleave,
    "constant_pad_nd": _pad, "roll": _roll, "index": _index,
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(_REDUCTIONS, _reduction), **dict.fromkeys(FACTORIES, _factory),
    **dict.fromkeys(VIEWS, _view),
    **{f"conv{t}{d}d": _convolution for t in ("", "_transpose") for d in (1, 2, 3)},
}  # fmt: skip
_BY_PART: tuple[tuple[str, _Rule], ...] = (("pool", _pool), ("upsample", _pool))
