"""Small faults that a programmer could make, one at a time, in a file of the package.

A fault replaces an operator, constant, condition or function in one place. Texts for people,
types, and code for progress and printing are left alone. Each fault has a digest, by which faults
are drawn, so that the choice does not depend on the surrounding lines.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
_COMPUTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "+"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
_SWAPPED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "maximum": "minimum",
    "minimum": "maximum", "ceil": "floor", "floor": "ceil", "argmin": "argmax",
    "argmax": "argmin", "median": "mean", "mean": "median", "sorted": "list", "sum": "max",
    "hypot": "max", "cumsum": "asarray", "union": "intersection", "floor_divide": "true_divide",
}  # fmt: skip
_UNSEEN = re.compile(
    r"TIMEOUT|DEADLINE|WIDTH|SHOWN|_MOST_LISTED|__version__|__all__|MIGRATIONS|_SCHEMA"
)
# Functions that format text for people, whose wording is tested elsewhere.
_FOR_EYES = re.compile(
    r"^(__repr__|__str__|_repr_\w+_|say|_say\w*|describe|\w*words|to_markdown|remedy|_remedy)$"
)
_TALKS = frozenset({"say", "warn", "print", "progress", "append_note", "debug", "info", "echo"})


@dataclass(frozen=True)
class Fault:
    """One place of a file, with replacement text.

    Attributes:
        path: of the file, from the root.
        begin, end: offsets into the file's text.
        place: the function it is in, with its classes.
    """

    path: str
    begin: int
    end: int
    before: str
    after: str
    place: str
    line: int
    text: str
    digest: str

    def source(self) -> str:
        """Return the whole file with the fault."""
        whole = (ROOT / self.path).read_text("utf-8")
        return whole[: self.begin] + self.after + whole[self.end :]

    def __str__(self) -> str:
        place = f"{self.path}:{self.line} {self.place}"
        return f"{self.digest} {place}: `{self.before}` -> `{self.after}` in `{self.text}`"


def planted(path: str, before: str, after: str) -> Fault:
    """Return a fault written by hand.

    Raises:
        ValueError: `before` does not stand in the file exactly once.
    """
    whole = (ROOT / path).read_text("utf-8")
    if whole.count(before) != 1:
        raise ValueError(f"{path} has {whole.count(before)} times: {before}")
    begin = whole.index(before)
    line = whole.count("\n", 0, begin) + 1
    digest = hashlib.sha256(f"{path} {before} {after}".encode()).hexdigest()[:10]
    text = whole.splitlines()[line - 1].strip()
    place = _Places(path).place_of(line)
    return Fault(path, begin, begin + len(before), before, after, place, line, text, digest)


def faults_of(path: str) -> list[Fault]:
    """Return all faults of one file, in its order."""
    return list(_Places(path).faults())


def drawn(paths: Iterable[str], count: int, seed: str) -> list[Fault]:
    """Return `count` faults, drawn per file in proportion to its places, reproducibly by seed."""
    every = [fault for path in paths for fault in faults_of(path)]
    ranked = sorted(
        every, key=lambda fault: hashlib.sha256((seed + fault.digest).encode()).digest()
    )
    return ranked[:count]


class _Places:
    def __init__(self, path: str) -> None:
        self.path = path
        self.whole = (ROOT / path).read_text("utf-8")
        self.lines = self.whole.splitlines()
        starts = [0]
        for line in self.whole.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts = starts
        self.raw = [line.encode() for line in self.whole.splitlines()]
        self.seen: Counter[str] = Counter()

    def faults(self) -> Iterator[Fault]:
        yield from self._inside(ast.parse(self.whole), "")

    def place_of(self, line: int) -> str:
        """Return the function that contains a line, with its classes."""
        found, inside = [], ast.parse(self.whole).body
        while inside:
            here = [node for node in inside if node.lineno <= line <= (node.end_lineno or 0)]
            inside = []
            for inner in here:
                if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                    found.append(inner.name)
                    inside = inner.body
        return ".".join(found)

    def _inside(self, node: ast.AST, place: str) -> Iterator[Fault]:
        for child in ast.iter_child_nodes(node):
            if self._left_alone(child):
                continue
            inner = place
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                inner = f"{place}.{child.name}".lstrip(".")
            for begin, end, after in self._replacements(child):
                yield self._fault(begin, end, after, inner)
            match child:
                # Types and decorators are not behaviour.
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    block = ast.Module(body=child.body, type_ignores=[])
                    yield from self._inside(block, inner)
                    if not isinstance(child, ast.ClassDef):
                        values = [*child.args.defaults, *child.args.kw_defaults]
                        defaults = [default for default in values if default is not None]
                        yield from self._inside(ast.Tuple(defaults, ast.Load()), inner)
                case ast.AnnAssign(value=ast.expr() as value):
                    yield from self._inside(ast.Expression(value), inner)
                case ast.AnnAssign():
                    pass
                case _:
                    yield from self._inside(child, inner)

    def _left_alone(self, node: ast.AST) -> bool:
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Assert():
                return True
            case ast.Expr(value=ast.Constant(value=str())):
                return True
            case ast.FunctionDef(name=name) if _FOR_EYES.match(name):
                return True
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return True
            case ast.Assign(targets=[ast.Name(id=name)]) if _UNSEEN.search(name):
                return True
            case ast.Expr(value=ast.Call(func=called)):
                return _last(called) in _TALKS
        return False

    def _replacements(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=compared):
                for leaf, op, other in zip([left, *compared], ops, compared, strict=False):
                    yield from self._between(leaf, other, *_COMPARED[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _COMPUTED:
                if not (_is_text(left) or _is_text(right)):
                    yield from self._between(left, right, *_COMPUTED[type(op)])
            case ast.BoolOp(op=op, values=values):
                words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield from self._between(values[0], values[1], *words)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                if not isinstance(operand, ast.Constant):
                    yield self._begin(node), self._begin(operand), ""
            case ast.Constant(value=bool() as value):
                yield self._begin(node), self._end(node), str(not value)
            case ast.Constant(value=int() | float() as value):
                other = value + 1 if value in (0, 1) else value * 2
                yield self._begin(node), self._end(node), repr(other)
            case ast.Constant(value="left" | "right" as side):
                other = "right" if side == "left" else "left"
                yield self._begin(node), self._end(node), f'"{other}"'
            case ast.Call(func=called) if (name := _last(called)) in _SWAPPED:
                end = self._end(called)
                yield end - len(name), end, _SWAPPED[name]
            case ast.If(test=test) | ast.IfExp(test=test) if isinstance(
                test, ast.Name | ast.Attribute | ast.Call
            ):
                yield self._begin(test), self._begin(test), "not "
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
                yield self._begin(node), self._end(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._begin(node), self._end(node), "pass"

    def _between(
        self, operand: ast.expr, other: ast.expr, before: str, after: str
    ) -> Iterator[tuple[int, int, str]]:
        begin, end = self._end(operand), self._begin(other)
        found = re.search(
            rf"(?<![\w*/<>=!]){re.escape(before)}(?![\w*/<>=])", self.whole[begin:end]
        )
        if found:
            yield begin + found.start(), begin + found.end(), after

    def _begin(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        """Convert a column in UTF-8 bytes, as `ast` reports it."""
        return self.starts[line - 1] + len(self.raw[line - 1][:column].decode())

    def _fault(self, begin: int, end: int, after: str, place: str) -> Fault:
        line = self.whole.count("\n", 0, begin) + 1
        text = self.lines[line - 1].strip()
        before = self.whole[begin:end]
        key = f"{self.path} {place} {text} {before} {after}"
        self.seen[key] += 1
        digest = hashlib.sha256(f"{key} {self.seen[key]}".encode()).hexdigest()[:10]
        return Fault(self.path, begin, end, before, after, place, line, text, digest)


def _last(called: ast.expr) -> str:
    match called:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
