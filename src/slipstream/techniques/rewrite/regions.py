"""Connected groups of operators with a single result, in traced graphs.

Operators are read as `Step`s, without views and without numbers, and a rule is found by the wiring
of its steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.graph.operations import Operation, operations_of
from slipstream.graph.traffic import is_view as is_view_call
from slipstream.graph.traffic import short_name, traffic
from slipstream.surgery.fx import TracedGraph, arguments_of
from slipstream.techniques.rewrite.expression import (
    Constant,
    Expression,
    Instruction,
    Ref,
    call,
    is_view,
)

MAX_INPUTS = 4
MAX_STEPS = 48
_OPERATORS = frozenset({
    "abs", "add", "addmm", "amax", "amin", "baddbmm", "bmm", "cat", "clamp", "clamp_max",
    "clamp_min", "clone", "cumsum", "div", "erf", "exp", "expm1", "gather", "gelu",
    "linalg_vector_norm", "log", "log1p", "logsumexp", "_log_softmax", "masked_fill", "max",
    "maximum", "mean", "minimum", "mm", "mul", "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub",
    "sigmoid", "silu", "_softmax", "sqrt", "stack", "sub", "sum", "tanh", "var", "where",
})  # fmt: skip
_REDUCED_DIMS = frozenset({
    "amax", "amin", "cumsum", "linalg_vector_norm", "logsumexp", "_log_softmax", "max", "mean",
    "_softmax", "sum", "var",
})  # fmt: skip
Row = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, reduced dimensions (negative), operands of a step in a skeleton: -1 - k for input k."""


@dataclass(frozen=True)
class Step:
    """An operator; views are looked through.

    Attributes:
        operands: per tensor the step that made it, or -1 - k for value k from elsewhere.
        readers: steps that read its result; -1 for a reader that is not a step.
    """

    name: str
    dims: tuple[int, ...]
    operands: tuple[int, ...]
    readers: frozenset[int]


def _name_and_dims(call: Call) -> tuple[str, tuple[int, ...]]:
    """Return a step's name; a name that is not supported is empty."""
    name = short_name(call)
    if name not in _OPERATORS or "!" in call.op or not call.outputs:
        return "", ()
    dims: tuple[int, ...] = ()
    if name in _REDUCED_DIMS:
        place = 2 if name == "linalg_vector_norm" else 1
        value = call.arguments[place] if len(call.arguments) > place else None
        rank = len(call.inputs[0].shape)
        listed = value if isinstance(value, (list, tuple)) else (value,)
        dims = tuple(int(d) % max(rank, 1) - rank for d in listed if isinstance(d, int))
    return {"rsub": "sub"}.get(name, name), dims


def traced_steps(traced: TracedGraph) -> list[Step]:
    """Return the steps of a traced graph, one per operation."""
    maker = {value: n for n, made in enumerate(traced.outputs) for value in made}
    operators = set(traced.nodes)
    others = {
        value for node, value in traced.value.items() for user in node.users
        if value in maker and user not in operators and traced.value.get(user) != value
    }  # fmt: skip
    specs = [operation.call.inputs for operation in traced.operations]
    return _steps(traced.operations, traced.inputs, specs, traced.leaving | others)


def recorded_steps(graph: Graph) -> tuple[list[Step], list[int]]:
    """Return the forward steps of a recorded step, and the task of each."""
    operations, lasting = operations_of(graph)
    forward = [o for o in operations if o.part == StepPhase.FORWARD and not is_view_call(o.call)]
    inputs = [tuple(value for value, _ in o.reads) for o in forward]
    specs = [
        [spec for spec, n in zip(o.call.inputs, traffic(o.call).reads, strict=True) if n]
        for o in forward
    ]
    return _steps(forward, inputs, specs, lasting), [o.task for o in forward]


def _steps(
    operations: Sequence[Operation],
    inputs: Sequence[Sequence[int]],
    specs: Sequence[Sequence[TensorSpec]],
    leaving: Collection[int],
) -> list[Step]:
    """Return a step per operation.

    Args:
        inputs, specs: per operation the values that it reads, and their specs.
        leaving: values that have other readers.
    """
    maker = {value: n for n, o in enumerate(operations) for value, _ in o.writes}
    read = {value for values in inputs for value in values}
    readers: list[set[int]] = [set() for _ in operations]
    for value, n in maker.items():
        # The second result of max, its indices, is never replaced.
        if value in leaving or (value != operations[n].writes[0][0] and value in read):
            readers[n].add(-1)
    rows = []
    for n, operation in enumerate(operations):
        complete = len(inputs[n]) == len(specs[n])
        name, dims = _name_and_dims(operation.call) if complete else ("", ())
        operands = []
        for value, spec in zip(inputs[n], specs[n], strict=False):
            if value in maker:
                readers[maker[value]].add(n)
                operands.append(maker[value])
            elif spec.shape != ():
                operands.append(-1 - value)
        rows.append((name, dims, tuple(operands)))
    return [Step(*row, frozenset(readers[n])) for n, row in enumerate(rows)]


def candidates(steps: Sequence[Step], root: int) -> list[frozenset[int]]:
    """Return groups of steps whose only result is that of `root`, small ones first.

    They are cut at a distance from `root`, and where a single value separates them from the rest.
    """
    groups = set()
    # Without linear layers, since those of attention's inputs are as near as its own products.
    for excluded in (("",), ("", "addmm", "mm")):
        distance, cone = {root: 0}, [root]
        for n in cone:
            for operand in steps[n].operands:
                skipped = operand in distance or operand < 0 or len(cone) >= MAX_STEPS
                if not skipped and steps[operand].name not in excluded:
                    distance[operand] = distance[n] + 1
                    cone.append(operand)
        for depth in set(distance.values()):
            groups.add(_closed(steps, root, {n for n in cone if distance[n] <= depth}))
        for cut in cone[1:]:
            groups.add(_closed(steps, root, set(cone) - {cut}))
    return sorted((group for group in groups if len(group) > 1), key=lambda g: (len(g), sorted(g)))


def _closed(steps: Sequence[Step], root: int, members: set[int]) -> frozenset[int]:
    """Return the members that are reachable from `root`, and that no other step reads."""
    members = set(members)
    while True:
        reached, queue = {root}, [root]
        for n in queue:
            for operand in steps[n].operands:
                if operand in members and operand not in reached:
                    reached.add(operand)
                    queue.append(operand)
        closed = {n for n in reached if n == root or steps[n].readers <= reached}
        if closed == members:
            return frozenset(closed)
        members = closed


def skeleton(steps: Sequence[Step], members: frozenset[int], root: int) -> tuple[Row, ...]:
    """Return the wiring of a group, its root last."""
    rows: list[Row] = []
    place: dict[int, int] = {}
    inputs: dict[int, int] = {}

    def visit(n: int) -> int:
        if n not in members:
            return -1 - inputs.setdefault(n, len(inputs))
        if n not in place:
            operands = tuple(visit(operand) for operand in steps[n].operands)
            rows.append((steps[n].name, steps[n].dims, operands))
            place[n] = len(rows) - 1
        return place[n]

    visit(root)
    return tuple(rows)


def matched(steps: Sequence[Step], rows: Sequence[Row], root: int) -> frozenset[int] | None:
    """Return the steps whose wiring is `rows` with `root` last; None if there are none."""
    bound: dict[int, int] = {}
    outside: dict[int, int] = {}
    queue = [(len(rows) - 1, root)]
    while queue:
        row, n = queue.pop()
        if row < 0:
            if outside.setdefault(row, n) != n:
                return None
            continue
        if bound.setdefault(row, n) != n:
            return None
        if n < 0 or steps[n].name != rows[row][0] or steps[n].dims != tuple(rows[row][1]):
            return None
        operands = rows[row][2]
        if len(operands) != len(steps[n].operands):
            return None
        queue += [
            pair
            for pair in zip(operands, steps[n].operands, strict=True)
            if pair[0] < 0 or bound.get(pair[0]) != pair[1]
        ]
    members = frozenset(bound.values())
    closed = all(n == root or steps[n].readers <= members for n in members)
    disjoint = len(members) == len(bound) and members.isdisjoint(outside.values())
    return members if closed and disjoint else None


def matches_of(
    steps: Sequence[Step], rules: Mapping[tuple[Row, ...], Any]
) -> Iterator[tuple[tuple[Row, ...], int, frozenset[int]]]:
    """Yield the skeletons of rules that occur in a step, with root and members."""
    by_name: dict[str, list[tuple[Row, ...]]] = {}
    for rows in rules:
        by_name.setdefault(rows[-1][0], []).append(rows)
    for root, step in enumerate(steps):
        for rows in by_name.get(step.name, ()):
            if (members := matched(steps, rows, root)) is not None:
                yield rows, root, members


@dataclass(frozen=True)
class Pattern:
    """A group of a traced graph as an expression.

    Attributes:
        reads: nodes of the inputs.
        root: node of the operator that made the result.
    """

    expression: Expression
    reads: tuple[Node, ...]
    root: Node


def pattern_of(
    traced: TracedGraph, members: frozenset[int], root: int, at_base: bool, viewed: bool
) -> Pattern | None:
    """Return a group as an expression of at most `MAX_INPUTS` inputs; None if it is not one.

    Args:
        at_base: whether views of inputs become part of it.
        viewed: whether a view of its result, which is all that others read, becomes part of it.
    """
    inside = {traced.nodes[n] for n in members}
    reads: list[Node] = []
    instructions: list[Instruction] = []
    constants: list[float] = []
    place: dict[Node, Ref] = {}

    def base(node: Node) -> Node:
        while not _is_maker(node, inside) and (source := _viewed(node)) is not None:
            node = source
        return node

    def argument(value: Any, kind: str) -> Any:
        if isinstance(value, Node):
            return visit(value)
        if isinstance(value, (list, tuple)):
            return tuple(argument(item, "") for item in value)
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return str(value)
        if isinstance(value, float) or (kind == "number" and type(value) is int and value != 1):
            constants.append(value)
            return Constant(len(constants) - 1)
        if value is None or isinstance(value, (int, bool, str)):
            return value
        raise ValueError(f"{value!r} is not data")

    def visit(node: Node) -> Ref:
        if node in place:
            return place[node]
        source = base(node)
        if not _is_maker(source, inside) and (not at_base or source is node):
            node_read = _unexpanded(node)
            if node_read not in place:
                # Input k is -1 - k until the number of inputs is known.
                place[node_read] = Ref(-1 - len(reads))
                reads.append(node_read)
            place[node] = place[node_read]
            return place[node]
        if getattr(node.target, "__name__", "") == "getitem":
            place[node] = visit(node.all_input_nodes[0])
            return place[node]
        target: Any = node.target
        pairs = zip(arguments_of(node), target._schema.arguments, strict=True)
        arguments = tuple(argument(value, str(declared.type)) for value, declared in pairs)
        op = name_of(target)
        instructions.append(Instruction("max_values" if op == "max.dim" else op, arguments))
        place[node] = Ref(len(instructions) - 1)
        return place[node]

    try:
        final = visit(_with_view(traced.nodes[root]) if viewed else traced.nodes[root])
    except (ValueError, AttributeError):
        return None
    if not 1 <= len(reads) <= MAX_INPUTS or not instructions:
        return None

    def resolved(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(value.index + len(reads) if value.index >= 0 else -1 - value.index)
        return tuple(map(resolved, value)) if isinstance(value, tuple) else value

    rows = tuple(Instruction(i.op, resolved(i.arguments)) for i in instructions)
    expression = Expression(len(reads), rows, resolved(final), tuple(constants))
    return Pattern(expression, tuple(reads), traced.nodes[root])


def _is_maker(node: Node, inside: set[Node]) -> bool:
    """Whether a member made the value, directly or as the first of several results."""
    is_part = getattr(node.target, "__name__", "") == "getitem"
    return node in inside or (is_part and node.args[0] in inside)


def _viewed(node: Node) -> Node | None:
    """Return the node that `node` is a view of, if it is an operator's only result."""
    target: Any = node.target
    single = isinstance(node.meta.get("val"), torch.Tensor)
    if not single or not hasattr(target, "_schema") or not is_view(name_of(target)):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) else None


def name_of(operator: Any) -> str:
    """Return the name of an ATen operator with its overload, such as ``add.Tensor``."""
    return f"{operator._opname}.{operator._overloadname}"


def _unexpanded(node: Node) -> Node:
    """Return the node that `node` views without any change."""

    def layout(node: Node) -> tuple[Any, ...]:
        value = node.meta["val"]
        return value.shape, value.stride(), value.storage_offset()

    while (source := _viewed(node)) is not None and layout(source) == layout(node):
        node = source
    return node


def _with_view(node: Node) -> Node:
    """Return the node of the first value, `node` or its only view, that users read."""
    users = list(node.users)
    if len(users) == 1 and _viewed(users[0]) is node:
        target: Any = users[0].target
        if target._opname in ("view", "_unsafe_view"):
            return users[0]
    return node


def sizes_of(pattern: Expression, specs: Sequence[TensorSpec]) -> list[dict[int, int]]:
    """Return other extents for those of a pattern, with which its views remain possible.

    Args:
        specs: the inputs where it was found.

    Returns:
        Maps from an extent to another: extents that views join are products of others.
    """
    fixed, joined = {1}, dict[int, tuple[int, ...]]()
    values = [
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
    ]
    with torch.no_grad():
        for instruction in pattern.instructions:
            first = instruction.arguments[0]
            source = values[(first[0] if isinstance(first, tuple) else first).index]
            made = call(instruction, values, pattern.constants)
            values.append(made)
            name = instruction.op.partition(".")[0]
            if name in ("select", "slice", "split", "unbind", "narrow"):
                fixed.add(source.shape[int(instruction.arguments[1])])
            if name in ("view", "_unsafe_view", "reshape"):
                for left, right in _groups(tuple(source.shape), tuple(made.shape)):
                    for whole, parts in ((left, right), (right, left)):
                        if len(whole) == 1 < len(parts):
                            joined.setdefault(whole[0], parts)
            if name in ("cat", "stack"):
                fixed.update(made.shape[int(instruction.arguments[1]) :][:1])
    extents = {extent for spec in specs for extent in spec.shape}
    extents.update(*joined.values())
    atoms = sorted(extents - set(joined) - fixed)

    def size_of(extent: int, sizes: Mapping[int, int]) -> int:
        if extent in joined:
            return math.prod(size_of(part, sizes) for part in joined[extent])
        return sizes.get(extent, extent)

    maps = []
    for choice in _CHOICES:
        sizes = dict(zip(atoms, itertools.cycle(choice), strict=False))
        sizes |= {extent: extent for extent in fixed}
        maps.append(sizes | {extent: size_of(extent, sizes) for extent in joined})
    return maps


_CHOICES = (
    (3, 4, 5, 6), (2, 5, 3, 7), (5, 3, 8, 2), (1, 6, 4, 3), (4, 1, 7, 5), (7, 8, 1, 4),
    (6, 2, 9, 3), (8, 16, 12, 10),
)  # fmt: skip


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the groups of extents that a view joins or splits, without extents of 1."""
    sides = [[extent for extent in shape if extent != 1] for shape in (before, after)]
    while all(sides):
        left, right = ([side.pop(0)] for side in sides)
        while (a := math.prod(left)) != (b := math.prod(right)):
            shorter, side = (left, sides[0]) if a < b else (right, sides[1])
            if not side:
                return
            shorter.append(side.pop(0))
        yield tuple(left), tuple(right)
