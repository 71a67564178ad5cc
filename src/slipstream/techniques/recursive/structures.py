"""Structures as flat arrays, and their linearization: levels, numbers and groups of nodes.

Source: Fegade et al., "Cortex: A Compiler for Recursive Deep Learning Models", MLSys 2021.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data import Tree, parse_tree
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native.family import Family, structure

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MASK_SLOTS = 2
"""Children beyond this number never select separate code for those that are leaves."""

_CYCLE, _RANGE, _ARITY = 16, 17, 18
_POINTER = ctypes.c_void_p
FAMILY = Family(
    "recursive", {"linearize": [_POINTER], "read_take": [_POINTER] * 6}, {"read_take": None}
)
_Arguments = structure(
    "int64_t nodes, slots, kinds; int32_t mask_slots, reserved; void* offset, child, kind, tabled, "
    "place, child_of, groups; int64_t capacity, group_count, levels, bad_node;"
)


class StructureError(SlipstreamError):
    """A structure is not a finite tree or DAG; `node` is the number of the node at fault."""

    def __init__(
        self, what: str, node: int, *, where: str | None = None, remedy: str | None = None
    ) -> None:
        self.node = node
        super().__init__(what, where=where or f"node {node}", remedy=remedy)


@dataclass(frozen=True, eq=False)
class Structures:
    """The nodes of several trees or DAGs, in any order.

    Attributes:
        offset: int64 [nodes + 1]; children of node n are ``child[offset[n]:offset[n + 1]]``.
        child: int32 [edges], numbers of nodes.
        word: int32 [nodes], row of the node's input; any number if it has none.
        roots: int32 [trees].
        kind: int32 [nodes], number of the model's shape of node; None if it is the one with that
            number of children.
        inputs: for kinds whose input is not one word, its fields or tensors by row.
        objects: the nodes that were read; None if arrays were passed.
    """

    offset: Int64s
    child: Int32s
    word: Int32s
    roots: Int32s
    kind: Int32s | None = None
    inputs: dict[int, list[Any]] = field(default_factory=dict)
    objects: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.objects is not None:
            return
        nodes = len(self.word)
        if self.kind is not None and len(self.kind) != nodes:
            raise InvalidArgumentError(
                "kind", f"{len(self.kind)} kinds do not fit {nodes} nodes", remedy="pass one each"
            )
        if (
            len(self.offset) != nodes + 1
            or self.offset[0] != 0
            or self.offset[-1] > len(self.child)
        ):
            raise InvalidArgumentError(
                "offset", f"{len(self.offset)} offsets do not fit {nodes} nodes and "
                f"{len(self.child)} children",
                remedy="pass nodes + 1 offsets, from 0 to the number of children",
            )  # fmt: skip
        if len(self.roots) and not 0 <= self.roots.min() <= self.roots.max() < nodes:
            raise StructureError("a root is not a node", int(self.roots.max()))

    @classmethod
    def of(
        cls, offset: Any, child: Any, word: Any, roots: Any = None, kind: Any = None
    ) -> Structures:
        """Return structures from integers; by default, roots are the nodes without parents.

        Raises:
            InvalidArgumentError: the lengths do not fit, or a value is not an integer.
            StructureError: a child or a root is not a node.
        """
        offsets = _integers("offset", offset, np.int64)
        children = _integers("child", child, np.int32)
        words = _integers("word", word, np.int32)
        if roots is None:
            inside = children[(children >= 0) & (children < len(words))]
            roots = np.flatnonzero(np.bincount(inside, minlength=len(words)) == 0)
        kinds = None if kind is None else _integers("kind", kind, np.int32)
        return cls(offsets, children, words, _integers("roots", roots, np.int32), kinds)

    @classmethod
    def of_trees(cls, trees: Sequence[Tree | str], number_of: Callable[[str], int]) -> Structures:
        """Return structures from binary trees (see `slipstream.data`).

        Args:
            trees: parsed, or as text: ``(3 (2 a) (4 (2 good) (2 film)))``.
            number_of: returns the number of a word.

        Raises:
            CorruptDataError: a text is not a binary tree.
            StructureError: a word has no number.
        """
        offsets, children, words, roots, base = [0], [], [], [], 0
        for number, item in enumerate(trees):
            tree = parse_tree(item, where=f"tree {number}") if isinstance(item, str) else item
            for left, right, word in zip(tree.left, tree.right, tree.words, strict=True):
                if left >= 0:
                    children += [base + int(left), base + int(right)]
                offsets.append(len(children))
                try:
                    words.append(number_of(word) if left < 0 else 0)
                except LookupError as error:
                    raise StructureError(
                        f"the word {word!r} has no number", len(words), where=f"tree {number}",
                        remedy="return a number for words that are not in the vocabulary",
                    ) from error  # fmt: skip
            base += len(tree.words)
            roots.append(base - 1)
        return cls.of(offsets, children, words, roots)

    @property
    def nodes(self) -> int:
        return len(self.word)

    def number_of(self, node: Any) -> int | None:
        """Return the number of a node that was read; None if it was not."""
        return next((n for n, item in enumerate(self.objects or ()) if item is node), None)

    @property
    def arity(self) -> Int64s:
        """Number of children of each node, int64 [nodes]."""
        return np.diff(self.offset)


def _integers(name: str, values: Any, dtype: Any) -> Any:
    """Return a contiguous array of one dimension and a type, without changing a value."""
    try:
        array = np.asarray(values)
        with np.errstate(invalid="ignore"):
            integers = np.ascontiguousarray(array, dtype)
        if array.ndim == 1 and (array == integers).all():
            return integers
        problem = (
            f"the {array.dtype} values of shape {list(array.shape)} are not all {dtype.__name__}"
        )
    except (TypeError, ValueError, OverflowError) as error:
        problem = str(error)
    raise InvalidArgumentError(name, problem, remedy="pass a list or an array of integers")


@dataclass(frozen=True)
class Linearizer:
    """Reads structures from objects of any type.

    Attributes:
        children: returns the children of a node; empty for a leaf.
        word: returns the integer input of a node, or None.
    """

    children: Callable[[Any], Sequence[Any]]
    word: Callable[[Any], int | None]

    def __call__(self, roots: Iterable[Any]) -> Structures:
        """Return the structures below `roots`; a node that is reached twice is one node.

        Raises:
            StructureError: the nodes cannot be read.
        """
        nodes = list(roots)
        count = len(nodes)
        memo = {id(node): number for number, node in enumerate(nodes)}
        places = [memo[id(node)] for node in nodes]
        offsets, children, words = [0], [], []
        for number, node in enumerate(nodes):
            try:
                for child in self.children(node):
                    place = memo.get(id(child)) if not isinstance(child, int) else None
                    if place is None:
                        memo[id(child)] = place = len(nodes)
                        nodes.append(child)
                    children.append(place)
                word = self.word(node)
            except (TypeError, AttributeError, LookupError, ValueError) as error:
                raise StructureError(
                    f"the children or the word of a {type(node).__name__} cannot be read: {error}",
                    number, remedy="check the callables of the Linearizer",
                ) from error  # fmt: skip
            offsets.append(len(children))
            words.append(-1 if word is None else int(word))
        return Structures.of(offsets, children, words, places[:count])


def nested() -> Linearizer:
    """Return a linearizer of nested tuples or lists: an integer is a leaf, and its word."""
    return Linearizer(
        lambda node: () if isinstance(node, int) else node,
        lambda node: node if isinstance(node, int) else None,
    )


@dataclass(frozen=True, eq=False)
class Linearized:
    """Structures, numbered by level: every child has a larger number than its parents.

    Attributes:
        structures: what was linearized.
        place: int32 [nodes], number of each given node.
        child_of: int32 [slots, nodes] by number; -1 if there is no such child.
        groups: int32 [groups, 5]: level (0 without children), kind, mask of children that are
            leaves, first number, count.
        levels: number of levels.
        word: int32 [nodes], by number.
        roots: int32 [trees], numbers of the roots.
        made_for: the generated code that the groups belong to.
    """

    structures: Structures
    place: Int32s
    child_of: Int32s
    groups: Int32s
    levels: int
    word: Int32s
    roots: Int32s
    made_for: object = None

    @property
    def nodes(self) -> int:
        return len(self.place)

    @property
    def widths(self) -> Int64s:
        """Number of nodes of each level, int64 [levels]."""
        return np.bincount(self.groups[:, 0], self.groups[:, 4], self.levels).astype(np.int64)

    def numbers(self, kind: int) -> Int32s:
        """Return the numbers of a kind's nodes, ascending."""
        groups = self.groups[self.groups[:, 1] == kind, 3:]
        ranges = [np.arange(first, first + count, dtype=np.int32) for first, count in groups[::-1]]
        return np.sort(np.concatenate(ranges)) if ranges else np.zeros(0, np.int32)


def linearize(
    structures: Structures,
    tabled: npt.NDArray[np.uint8] | None = None,
    *,
    mask_slots: int = MASK_SLOTS,
    slots: int | None = None,
    made_for: object = None,
) -> Linearized:
    """Number the nodes of structures by height, in compiled code.

    Args:
        tabled: uint8 [kinds + 1], whether the states of a kind depend on its word alone; by
            default, a node's kind is its number of children, and those without are.
        mask_slots: number of children whose kinds form groups.
        slots: maximum number of children, if known.
        made_for: see `Linearized`.

    Raises:
        StructureError: there is a cycle, or a child is not a node.
        SlipstreamError: the compiled library is missing.
    """
    if FAMILY.library is None:
        raise SlipstreamError(
            "structures are linearized by the compiled library, which is not available",
            remedy="install slipstream with a C++ compiler",
        )
    nodes = structures.nodes
    slots = int(structures.arity.max(initial=0)) if slots is None else slots
    if tabled is None:
        tabled = np.zeros(slots + 2, np.uint8)
        tabled[0] = 1
    place, child_of = np.empty(nodes, np.int32), np.empty((slots, nodes), np.int32)
    capacity = min(nodes, 256)
    while True:
        groups = np.empty((capacity, 5), np.int32)
        kind = structures.kind
        arguments = _Arguments(
            nodes=nodes, slots=slots, kinds=max(len(tabled) - 1, 1), mask_slots=mask_slots,
            offset=structures.offset.ctypes.data, child=structures.child.ctypes.data,
            kind=None if kind is None else kind.ctypes.data, tabled=tabled.ctypes.data,
            place=place.ctypes.data, child_of=child_of.ctypes.data, groups=groups.ctypes.data,
            capacity=capacity,
        )  # fmt: skip
        status = FAMILY.library.slipstream_linearize(ctypes.byref(arguments))
        if status:
            raise _fault(structures, status, arguments.bad_node)
        if arguments.group_count <= capacity:
            break
        capacity = arguments.group_count
    word = np.empty(nodes, np.int32)
    word[place] = structures.word
    return Linearized(
        structures, place, child_of, groups[: arguments.group_count], arguments.levels, word,
        place[structures.roots], made_for,
    )  # fmt: skip


def _fault(structures: Structures, status: int, node: int) -> SlipstreamError:
    if status == _CYCLE:
        return StructureError(
            f"node {node} is its own descendant", node, remedy="pass trees or acyclic graphs"
        )
    if status == _RANGE:
        first, end = structures.offset[node : node + 2]
        children = structures.child[first:end].tolist()
        return StructureError(
            f"children {children} of node {node} are not all in 0 to {structures.nodes - 1}, or "
            "the node's kind is unknown", node, remedy="number nodes from 0",
        )  # fmt: skip
    if status == _ARITY:
        return StructureError(f"the offsets of node {node} decrease", node, remedy="sort them")
    return SlipstreamError(f"linearization failed with status {status}")
