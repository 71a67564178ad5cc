"""Generated readers: from a model's own objects to flat arrays, as its `forward` reads them.

The recorded reads of all shapes form a decision tree, which becomes one Python function. It visits
nodes breadth first, with a list instead of recursion.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from slipstream.techniques.recursive.structures import StructureError, Structures
from slipstream.techniques.recursive.traced import Access, Shape

_HEAD = """\
def read(roots):
    nodes, memo = [], {}
    kinds, words, children, firsts = array("i"), array("i"), array("i"), array("i")
    inputs = {number: [] for number in with_inputs}
    for root in roots:
        place = memo.setdefault(id(root), len(nodes))
        if place == len(nodes):
            nodes.append(root)
        firsts.append(place)
    add, kind_of, word_of, child_of = nodes.append, kinds.append, words.append, children.append
    known = memo.get
    for node in nodes:
"""
_CHILD = """\
place = known(id({0}))
if place is None:
    memo[id({0})] = place = len(nodes)
    add({0})
child_of(place)
"""
# An equal integer can be one object, but is not one node.
_INTEGER_CHILD = """\
if {0}.__class__ is int:
    child_of(len(nodes))
    add({0})
else:
"""


class UnknownShapeError(Exception):
    """A node has a shape that was not traced yet."""

    def __init__(self, node: Any) -> None:
        self.node = node


def reader(shapes: Sequence[Shape]) -> Callable[[Sequence[Any]], Structures]:
    """Return a function that reads structures, nodes of which have one of `shapes`.

    The function raises `UnknownShapeError` at a node of another shape.
    """
    constants: dict[str, Any] = {"array": array, "Unknown": UnknownShapeError, "missing": object()}
    constants["with_inputs"] = [n for n, shape in enumerate(shapes) if not one_word(shape)]
    leaves = any(
        access == () and kind == "int" for s in shapes for access, kind, _ in s.observations
    )
    numbers = list(range(len(shapes)))
    body = _branch(shapes, numbers, 0, constants, leaves) if shapes else ["raise Unknown(node)"]
    source = _HEAD + "".join(f"        {line}\n" for line in body)
    source += "    return nodes, kinds, words, children, firsts, inputs\n"
    exec(compile(source, "<reader of nodes>", "exec"), constants)
    read = constants["read"]
    arities = np.array([len(shape.children) for shape in shapes] or [0], np.int64)

    def structures(roots: Sequence[Any]) -> Structures:
        try:
            nodes, kinds, words, children, firsts, inputs = read(roots)
        except (AttributeError, LookupError, TypeError, OverflowError) as error:
            raise StructureError(
                f"a node cannot be read as the model read it: {error}", -1,
                where="the structures of this call",
            ) from error  # fmt: skip
        kind = _int32s(kinds)
        offset = np.zeros(len(kind) + 1, np.int64)
        arities[kind].cumsum(out=offset[1:])
        return Structures(
            offset, _int32s(children), _int32s(words), _int32s(firsts), kind, inputs, nodes
        )

    return structures


def one_word(shape: Shape) -> bool:
    """Whether the input of nodes of a shape is at most one word."""
    return len(shape.words) <= 1 and not shape.tensors


def by_test(shapes: Sequence[Shape], chosen: list[int], depth: int) -> list[list[int]]:
    """Return the shapes of each outcome of their observation `depth`, strictest tests first."""
    order = ("missing", "is", "value", "tensor", "type", "int")

    def test_of(number: int) -> tuple[int, str]:
        _, kind, value = shapes[number].observations[depth]
        return order.index(kind), repr(value)

    return [list(group) for _, group in groupby(sorted(chosen, key=test_of), key=test_of)]


def _int32s(values: array[int]) -> Any:
    return np.frombuffer(values, np.int32) if values else np.zeros(0, np.int32)


def _branch(
    shapes: Sequence[Shape], chosen: list[int], depth: int, constants: dict[str, Any], leaves: bool
) -> list[str]:
    """Return the lines that tell `chosen` shapes apart by their observations from `depth` on."""
    first = shapes[chosen[0]]
    if len(first.observations) == depth:
        return _leaf(first, chosen[0], leaves)
    access = first.observations[depth][0]
    name = _variable(access, first)
    lines = [f"{name} = {_value(access, first)}"]
    word = "if"
    for members in by_test(shapes, chosen, depth):
        _, kind, value = shapes[members[0]].observations[depth]
        lines.append(f"{word} {_test(name, kind, value, constants)}:")
        lines += ["    " + line for line in _branch(shapes, members, depth + 1, constants, leaves)]
        word = "elif"
    return [*lines, "else:", "    raise Unknown(node)"]


def _test(name: str, kind: str, value: Any, constants: dict[str, Any]) -> str:
    if kind == "is" and (value is None or isinstance(value, bool)):
        return f"{name} is {value}"
    if kind == "missing":
        return f"{name} is missing"
    if value != value:
        return f"{name} != {name}"
    constant = f"k{len(constants)}"
    if kind in ("is", "value"):
        constants[constant] = value
        return f"{name}.__class__ is {constant}.__class__ and {name} == {constant}"
    if kind == "int":
        return f"isinstance({name}, int) and {name}.__class__ is not bool"
    if kind == "tensor":
        constants[constant] = value
        return (
            f"hasattr({name}, 'dtype') and (tuple({name}.shape), str({name}.dtype)) == {constant}"
        )
    constants[constant], length = value
    sized = "" if length is None else f" and len({name}) == {length}"
    return f"{name}.__class__ is {constant}{sized}"


def _variable(access: Access, shape: Shape) -> str:
    if not access:
        return "node"
    depth = [known for known, _, _ in shape.observations].index(access)
    return f"v{depth}"


def _value(access: Access, shape: Shape) -> str:
    if not access:
        return "node"
    *parents, (kind, key) = access
    # A part of the access without an observation of its own is a method's object.
    parent = _variable(tuple(parents), shape)
    if kind == "item":
        return f"{parent}[{key!r}]"
    if kind == "test":
        return f"{parent} {key[0]} {key[1]!r}"
    return f"{parent}.{key}()" if kind == "call" else f"getattr({parent}, {key!r}, missing)"


def _leaf(shape: Shape, number: int, leaves: bool) -> list[str]:
    lines = [f"kind_of({number})"]
    words = [_variable(access, shape) for access in shape.words]
    if one_word(shape):
        lines.append(f"word_of({words[0] if words else 0})")
    else:
        tensors = [_variable(access, shape) for access in shape.tensors]
        lines += [
            f"word_of(len(inputs[{number}]))",
            f"inputs[{number}].append(({', '.join(words + tensors)},))",
        ]
    for access in shape.children:
        child = _variable(access, shape)
        code = _CHILD.format(child)
        if leaves:
            inner = "".join(f"    {line}\n" for line in code.splitlines())
            code = _INTEGER_CHILD.format(child) + inner
        lines += code.splitlines()
    return lines
