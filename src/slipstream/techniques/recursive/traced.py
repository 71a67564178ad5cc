"""Trace a recursive ``forward(node)``: one graph of operators for each shape that a node can have.

A node is replaced by a proxy that records what `forward` reads, and the recursive call by
placeholders for the children's states. The recorded reads identify the node's shape at call time.
The contract: control flow depends on the structure alone, not on values of tensors (P1), so that
all recursive calls of a node can be made first (P2), independently of each other (P3).
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from slipstream.errors import SlipstreamError

Access = tuple[tuple[str, Any], ...]
"""How a value is reached from a node: ("attr", name), ("item", key), ("call", name) or, for the
result of a comparison, ("test", (operator, number)) each."""
Observation = tuple[Access, str, Any]
"""What was read: its access; "is", "missing", "value", "int", "tensor" or "type"; and what must be
equal."""

MAX_SHAPES = 64
"""Maximum number of different shapes of nodes; each has its own code."""


class RecursiveModelError(SlipstreamError):
    """A recursive model cannot be compiled; `where` is the source line at fault."""


class _FirstCall(BaseException):
    """Carries the child of a recursive call out of `forward`."""

    def __init__(self, node: Any) -> None:
        self.node = node


@dataclass(frozen=True, eq=False)
class Shape:
    """Operators of `forward` for nodes of one shape.

    Attributes:
        observations: what it reads from a node, in order, and finds there.
        children: accesses of the children on which it recurses, in order of first call.
        words: accesses of the integers that it computes with.
        tensors: accesses of the node's tensors.
        module: operators; its inputs are the children's states, child by child, then the tensors.
            A word occurs as a `Word` argument, or in the ``meta["word"]`` of a constant.
    """

    observations: tuple[Observation, ...]
    children: tuple[Access, ...]
    words: tuple[Access, ...]
    tensors: tuple[Access, ...]
    module: GraphModule


@dataclass(frozen=True)
class Word:
    """An argument of an operator that is a word of the node.

    Attributes:
        number: its place in `Shape.words`.
    """

    number: int


@dataclass
class Record:
    """Reads of a run of `forward` on a proxy; values of `replaced` are read instead of its own."""

    replaced: dict[Access, Any] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    children: list[tuple[Access, Any]] = field(default_factory=list)
    integers: dict[Access, int] = field(default_factory=dict)
    structural: set[Access] = field(default_factory=set)
    tensors: dict[Access, torch.Tensor] = field(default_factory=dict)

    def wrap(self, value: Any, access: Access) -> Any:
        """Return what `forward` sees instead of `value`, and record it."""
        value = self.replaced.get(access, value)
        if value is None or isinstance(value, (bool, str, bytes, float, Enum, type)):
            self.observe(access, "is", value)
            return value
        if isinstance(value, int):
            self.observe(access, "int", None)
            self.integers[access] = value
            return _Integer(self, value, access)
        if isinstance(value, torch.Tensor):
            self.observe(access, "tensor", (tuple(value.shape), str(value.dtype)))
            self.tensors[access] = value
            return value
        if isinstance(value, MethodType):
            return lambda: self.wrap(value(), (*access[:-1], ("call", access[-1][1])))
        length = len(value) if hasattr(type(value), "__len__") else None
        self.observe(access, "type", (type(value), length))
        return _Proxy(self, value, access)

    def observe(self, access: Access, kind: str, value: Any) -> None:
        """Add an observation, unless the access is observed already."""
        if all(access != known for known, _, _ in self.observations):
            self.observations.append((access, kind, value))


class _Integer(int):
    """An integer of a node during tracing; records what Python, rather than torch, computes."""

    record: Record
    access: Access

    def __new__(cls, record: Record, value: int, access: Access) -> _Integer:
        self = super().__new__(cls, value)
        self.record, self.access = record, access
        return self

    def __bool__(self) -> bool:
        return bool(self._compared("!=", 0))

    def _compared(self, sign: str, other: Any) -> Any:
        result = _COMPARISONS[sign](int.__int__(self), other)
        if type(other) not in (int, float):
            self.record.structural.add(self.access)
            return result
        return self.record.wrap(result, (*self.access, ("test", (sign, other))))


def _computed(name: str) -> Callable[..., Any]:
    """Return a method of `_Integer` after which nodes with another value have another shape."""
    method = getattr(int, name)

    def computed(self: _Integer, *others: Any) -> Any:
        self.record.structural.add(self.access)
        return method(self, *others)

    return computed


_COMPARISONS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
for _sign, _function in _COMPARISONS.items():
    setattr(
        _Integer, f"__{_function.__name__}__",
        lambda self, other, sign=_sign: self._compared(sign, other),
    )  # fmt: skip
for _name in (
    *(f"__{side}{name}__" for side in ("", "r") for name in
      ("add", "sub", "mul", "floordiv", "truediv", "mod", "divmod", "pow", "lshift", "rshift",
       "and", "or", "xor")),
    "__neg__", "__abs__", "__invert__", "__hash__", "__float__", "__int__", "__str__", "__format__",
):  # fmt: skip
    setattr(_Integer, _name, _computed(_name))


class _Proxy:
    """Stands for a node, or a part of it, during tracing."""

    __slots__ = ("_access", "_record", "_value")

    def __init__(self, record: Record, value: Any, access: Access) -> None:
        object.__setattr__(self, "_record", record)
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_access", access)

    @property
    def __class__(self) -> Any:
        return type(self._value)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AttributeError("a node cannot change its class")

    def __getattr__(self, name: str) -> Any:
        access = (*self._access, ("attr", name))
        try:
            value = getattr(self._value, name)
        except AttributeError:
            if not name.startswith("__"):
                self._record.observe(access, "missing", None)
            raise
        return self._record.wrap(value, access)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self._value))[number]]
        value = self._value[number]
        if isinstance(number, int):
            number = int(number)
            number += len(self._value) * (number < 0)
        return self._record.wrap(value, (*self._access, ("item", number)))

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[number] for number in range(len(self._value))])

    def __bool__(self) -> bool:
        value = bool(self._value)
        if hasattr(type(self._value), "__bool__"):
            self._record.wrap(value, (*self._access, ("call", "__bool__")))
        return value

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        raise RecursiveModelError(
            f"a {type(self._value).__name__} that is read from a node is compared",
            where=source_line(), remedy="compare numbers, strings, members of an Enum or None",
        )  # fmt: skip

    def __hash__(self) -> int:
        return id(self._value)


class _NoScalars(TorchDispatchMode):
    """Refuses to turn a tensor into a Python value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise RecursiveModelError(
                "control flow, or a Python number, depends on the value of a tensor",
                where=source_line(),
                remedy="decide by the structure of the data; select values with torch.where",
            )
        return func(*args, **(kwargs or {}))


def source_line(trace: TracebackType | None = None) -> str | None:
    """Return file and line of the user's innermost frame, of the caller or of a traceback."""
    frames = traceback.extract_stack() if trace is None else traceback.extract_tb(trace)
    own = __name__.replace(".", "/")
    for frame in reversed(frames):
        name = frame.filename.replace("\\", "/")
        if "/torch/" not in name and own not in name and not name.startswith("<"):
            return f"{frame.filename}:{frame.lineno}"
    return None


class Tracer:
    """Traces `method` of `model` on example nodes.

    Attributes:
        states: shape of each state, found from a node without recursive calls.
        dtype: of the states.
        state_tree: their nesting in the result, see `torch.utils._pytree`.
    """

    def __init__(self, model: nn.Module, method: str = "forward") -> None:
        self.model, self.method = model, method
        found = getattr(model, method)
        # As `compile_calls` wraps it.
        self._original: Callable[[Any], Any] = getattr(found, "written", found)
        self.states: tuple[tuple[int, ...], ...] = ()
        self.dtype = torch.float32
        self.state_tree: Any = None

    def trace(self, node: Any) -> Shape:
        """Trace a node, whose shape is new."""
        if not self.states:
            self._find_states(node)
        record = Record()
        with _NoScalars(), torch.no_grad():
            self._run(record, node, self._zeros)
        children = [access for access, _ in record.children]
        first = self._operators(record, node, {})
        words: list[Access] = []
        structural: dict[Access, int] = {}
        for access, value in record.integers.items():
            found = None
            for other in (value - 1, value + 1):
                if other < 0 or access in record.structural:
                    continue
                try:
                    second = self._operators(record, node, {access: other})
                    found = _mark(first.graph, second, first, value, other, Word(len(words)))
                except RecursiveModelError:
                    continue
                if found is not None:
                    break
            if found is None:
                structural[access] = value
            elif found:
                words.append(access)
        observations = tuple(
            (access, "value", structural[access]) if access in structural else (access, kind, value)
            for access, kind, value in record.observations
        )
        return Shape(observations, tuple(children), tuple(words), tuple(record.tensors), first)

    def _zeros(self, number: int) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=self.dtype) for shape in self.states]

    def _find_states(self, node: Any) -> None:
        """Descend to a node without recursive calls, and read the shapes of its states."""
        seen: set[int] = set()

        def stop(child: Any) -> Any:
            raise _FirstCall(child)

        while True:
            if id(node) in seen:
                raise RecursiveModelError(
                    "the structure has a cycle: a node is its own descendant",
                    remedy="pass trees or directed acyclic graphs",
                )
            seen.add(id(node))
            try:
                with self._replaced(stop), torch.no_grad(), _NoScalars():
                    states = self._call(node)
                break
            except _FirstCall as call:
                node = call.node
        flat = self._flat(states)
        if {state.dtype for state in flat} not in ({torch.float32}, {torch.float64}):
            raise RecursiveModelError(
                f"states are {', '.join(str(state.dtype) for state in flat)}",
                remedy="compute all states in float32, or all in float64",
            )
        self.state_tree = tree_flatten(states)[1]
        self.states = tuple(tuple(state.shape) for state in flat)
        self.dtype = flat[0].dtype

    def _flat(self, states: Any) -> list[torch.Tensor]:
        flat: list[Any] = tree_flatten(states)[0]
        if not flat or not all(isinstance(state, torch.Tensor) for state in flat):
            raise RecursiveModelError(
                f"{type(self.model).__name__}.{self.method} returns {type(states).__name__}",
                remedy="return a tensor or a tuple of tensors, the states of the node",
            )
        return flat

    @contextmanager
    def _replaced(self, call: Callable[[Any], Any]) -> Iterator[None]:
        """Make recursive calls go to `call`."""
        before = vars(self.model).get(self.method)
        vars(self.model)[self.method] = call
        try:
            yield
        finally:
            del vars(self.model)[self.method]
            if before is not None:
                vars(self.model)[self.method] = before

    def _call(self, node: Any) -> Any:
        try:
            return self._original(node)
        except SlipstreamError:
            raise
        except Exception as error:
            raise RecursiveModelError(
                f"{type(self.model).__name__}.{self.method} fails on a node: "
                f"{type(error).__name__}: {error}",
                where=source_line(error.__traceback__),
                remedy="pass a list of the model's nodes; test their types with isinstance",
            ) from error

    def _run(self, record: Record, node: Any, states: Callable[[int], Any]) -> list[torch.Tensor]:
        known: dict[Any, int] = {}

        def call(child: Any, *more: Any, **named: Any) -> Any:
            if isinstance(child, torch.Tensor) or more or named:
                raise RecursiveModelError(
                    "a recursive call is passed a tensor" if isinstance(child, torch.Tensor)
                    else "a recursive call has more arguments than the child",
                    where=source_line(),
                    remedy="recurse on the children of the node alone",
                )  # fmt: skip
            access: Access = ()
            if type(child) is _Proxy:
                access, value = child._access, child._value
            elif type(child) is _Integer:
                access, value = child.access, record.integers[child.access]
            if not access:
                raise RecursiveModelError(
                    "a recursive call is made on the node itself, or on an object not read from it",
                    where=source_line(), remedy="recurse on the children of the node",
                )  # fmt: skip
            if access not in known:
                known[access] = len(record.children)
                record.children.append((access, value))
            return tree_unflatten(list(states(known[access])), self.state_tree)

        with self._replaced(call):
            flat = self._flat(self._call(record.wrap(node, ())))
        shapes = tuple(tuple(state.shape) for state in flat)
        if shapes != self.states:
            raise RecursiveModelError(
                f"a node with {len(record.children)} children has states of shapes "
                f"{_shapes(shapes)}, but a leaf has {_shapes(self.states)}",
                remedy="return states of the same shapes for every node",
            )
        return flat

    def _operators(self, record: Record, node: Any, replaced: dict[Access, Any]) -> GraphModule:
        count, per = len(record.children), len(self.states)
        inputs = [state for number in range(count) for state in self._zeros(number)]
        accesses = list(record.tensors)
        tensors = [record.tensors[access].detach().clone() for access in accesses]

        def run(*flat: torch.Tensor) -> list[torch.Tensor]:
            node_tensors = dict(zip(accesses, flat[count * per :], strict=True))
            other = Record({**replaced, **node_tensors})
            return self._run(other, node, lambda n: flat[n * per : (n + 1) * per])

        with torch.no_grad():
            module: GraphModule = make_fx(run)(*inputs, *tensors)
        return module


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _mark(
    graph: Graph, second: GraphModule, first: GraphModule, value: int, other: int, word: Word
) -> bool | None:
    """Mark in `graph` what differs between two traces, of `value` and of `other`, as `word`.

    Returns:
        Whether anything differs; None if the graphs have different operators.
    """
    nodes, others = list(graph.nodes), list(second.graph.nodes)
    if [(n.op, n.op == "call_function" and n.target) for n in nodes] != [
        (n.op, n.op == "call_function" and n.target) for n in others
    ]:
        return None
    marks: list[tuple[Node, str, Any]] = []
    for node, twin in zip(nodes, others, strict=True):
        if node.op == "get_attr":
            ours, theirs = _constant(first, node), _constant(second, twin)
            if ours is theirs:
                continue
            if isinstance(ours, nn.Parameter) or isinstance(theirs, nn.Parameter):
                return None
            if torch.equal(ours, theirs):
                continue
            if not (bool((ours == value).all()) and bool((theirs == other).all())):
                raise RecursiveModelError(
                    "a constant depends on a word of the node, but is not the word",
                    remedy="compute with the word in tensors, for example by an embedding",
                )
            marks.append((node, "word", word))
        elif node.op == "call_function":
            changed = tuple(
                word if _differs(a, b) and (a, b) == (value, other) else a
                for a, b in zip(node.args, twin.args, strict=True)
            )
            if node.target is not torch.ops.aten.select.int and _differs(
                [*node.args, *node.kwargs.values()], [*twin.args, *twin.kwargs.values()]
            ):
                return None
            if any(type(a) is Word and a == word for a in changed):
                marks.append((node, "args", changed))
            elif any(_differs(a, b) for a, b in zip(node.args, twin.args, strict=True)):
                return None
    for node, key, value_of_mark in marks:
        node.meta[key] = value_of_mark
    return bool(marks)


def _differs(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) != len(b) or any(map(_differs, a, b))
    plain = (int, float, bool)
    return isinstance(a, plain) and isinstance(b, plain) and a != b and a == a


def _constant(module: GraphModule, node: Node) -> torch.Tensor:
    tensor: torch.Tensor = getattr(module, str(node.target))
    return tensor
