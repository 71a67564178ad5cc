"""Attention that is written out in a forward of the file, as one fused call."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field

from slipstream.source._names import is_written, nodes_in, variables_in
from slipstream.source._parts import reachable
from slipstream.source._places import Places
from slipstream.source._source import NotPlacedError, Source

_SOFTMAX = ("torch.softmax", "torch.nn.functional.softmax")
_MATMUL = ("torch.matmul", "torch.bmm")
_DROPOUT = "torch.nn.functional.dropout"
_LAST_TWO: frozenset[tuple[float | None, ...]] = frozenset([(-2, -1), (-1, -2), (2, 3), (3, 2)])
# What only looks at a tensor from another side: it may be called later than it is written.
_VIEWS = frozenset(["transpose", "permute", "view", "reshape", "unsqueeze", "flatten", "unflatten"])
_MASKED = -1e4
_SIDES = 2


@dataclass
class _Found:
    """One attention on its way to a call.

    Attributes:
        statements: that only compute its scores and weights.
        read: the expressions that the call reads in place of them.
    """

    product: ast.expr
    value: ast.expr
    statements: list[ast.stmt] = field(default_factory=list)
    dropout: str = ""
    keep: str = ""
    scale: str = "1.0"
    query: str = ""
    key: str = ""
    read: list[ast.expr] = field(default_factory=list)


def fuse_attention(where: Places) -> Source:
    """The file with ``softmax(q @ k.transpose(-2, -1) * s) @ v`` as one call, wherever it is.

    In the classes that make up the model. The steps in between may have names, as long as nothing
    else reads them. Masks are understood as ``masked_fill`` with minus infinity.

    Raises:
        NotPlacedError: there is none, or one with a step that is not understood.
    """
    source = where.source
    model = where.model_class
    attentions = [
        _Reader(source, function, where.torch).read(product, left, value)
        for kind in reachable(source.names, model)
        for function in kind.body
        if isinstance(function, ast.FunctionDef)
        for product, left, value in _products(source, function)
        if _leads_to_softmax(source, function, left)
    ]
    if not attentions:
        raise source.not_placed("no attention is written out in the model's own classes", model)
    edited = source.with_import("torch")
    for one in attentions:
        mask = f", attn_mask={one.keep}" if one.keep else ""
        dropout = f", dropout_p={one.dropout}" if one.dropout else ""
        edited = edited.replace(
            one.product,
            f"{where.torch}.nn.functional.scaled_dot_product_attention("
            f"{one.query}, {one.key}, {source.segment(one.value)}{mask}{dropout}, "
            f"scale={one.scale})",
        )
        for statement in one.statements:
            edited = edited.remove(statement)
    return edited


def _products(
    source: Source, function: ast.FunctionDef
) -> list[tuple[ast.expr, ast.expr, ast.expr]]:
    """Every matmul of a function with its two sides."""
    pairs = [(node, _sides(source, node)) for node in ast.walk(function)]
    return [(node, *sides) for node, sides in pairs if sides and isinstance(node, ast.expr)]


def _sides(source: Source, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right
    if isinstance(node, ast.Call) and source.names.qualified(node.func) in _MATMUL:
        plain = len(node.args) == _SIDES and not node.keywords
        return (node.args[0], node.args[1]) if plain else None
    return None


def _leads_to_softmax(source: Source, function: ast.FunctionDef, left: ast.expr) -> bool:
    """Whether a softmax stands in `left`, or in what a name in it was given."""
    nodes = list(ast.walk(left))
    names = {node.id for node in variables_in(left)}
    for _ in range(len(function.body)):
        given = [
            node
            for node in nodes_in(ast.Assign, function)
            if node.lineno < left.lineno
            and any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
        ]
        nodes += [part for node in given for part in ast.walk(node.value)]
        further = (one.value for one in given if _softmax_of(source, one.value) is None)
        more = {node.id for node in variables_in(*further)}
        if more <= names:
            break
        names |= more
    return any(_softmax_of(source, node) is not None for node in nodes)


def _softmax_of(source: Source, node: ast.AST) -> ast.expr | None:
    """What a softmax over the last dimension is taken of."""
    if not isinstance(node, ast.Call):
        return None
    args = list(node.args)
    if source.names.qualified(node.func) in _SOFTMAX and args:
        scores, rest = args[0], args[1:]
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "softmax":
        scores, rest = node.func.value, args
    else:
        return None
    rest += [keyword.value for keyword in node.keywords if keyword.arg == "dim"]
    known = all(keyword.arg == "dim" for keyword in node.keywords)
    return scores if known and [_number(one) for one in rest] == [-1] else None


class _Reader:
    """Reads one attention, from the product with the values back to queries and keys."""

    def __init__(self, source: Source, function: ast.FunctionDef, torch: str) -> None:
        self._source = source
        self._function = function
        self._torch = torch

    def read(self, product: ast.expr, left: ast.expr, value: ast.expr) -> _Found:
        """The parts of the attention whose last step is `product`."""
        attention = _Found(product, value)
        weights = self._given(attention, left)
        if (dropped := self._dropped(weights)) is not None:
            inner, attention.dropout = dropped
            weights = self._given(attention, inner)
        scores = _softmax_of(self._source, weights)
        if scores is None:
            raise self._refusal(weights)
        scores = self._given(attention, scores)
        if (filled := self._filled(scores)) is not None:
            inner, attention.keep, mask = filled
            attention.read.append(mask)
            scores = self._given(attention, inner)
        if isinstance(scores, ast.BinOp) and isinstance(scores.op, (ast.Mult, ast.Div)):
            attention.read.append(scores.right)
            text = self._factor(scores.right)
            attention.scale = text if isinstance(scores.op, ast.Mult) else f"1 / {text}"
            scores = self._given(attention, scores.left)
        sides = _sides(self._source, scores)
        if sides is None:
            raise self._refusal(scores)
        query, transposed = sides
        key = self._untransposed(transposed)
        for one in (query, key):
            self._check_plain(one)
        attention.query, attention.key = (self._source.segment(one) for one in (query, key))
        attention.read += [query, key]
        self._check_unchanged(attention)
        return attention

    def _given(self, found: _Found, expression: ast.expr) -> ast.expr:
        """What a name that is read here alone was given, in a statement that goes."""
        if not isinstance(expression, ast.Name):
            return expression
        block = self._function.body
        here = self._source.names.within(expression, block)
        place = block.index(here) if here is not None else 0
        for statement in reversed(block[:place]):
            if not any(map(is_written, variables_in(statement, name=expression.id))):
                continue
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                named = isinstance(target, ast.Name)
                if named and self._readers(statement, expression.id) == [expression]:
                    found.statements.append(statement)
                    return statement.value
            break
        raise self._source.not_placed(
            f"'{expression.id}' is read elsewhere too, or made in another way than by '='",
            expression,
        )

    def _readers(self, made: ast.Assign, name: str) -> list[ast.Name]:
        """Where what a statement gives a name may be read, by the order of the text."""
        same = variables_in(self._function, name=name)
        after = [one for one in same if one.lineno > (made.end_lineno or made.lineno)]
        stores = filter(is_written, after)
        # The next statement that gives the name a value may read it once more.
        until = min(
            (self._source.names.statement(one).end_lineno or one.lineno for one in stores),
            default=math.inf,
        )
        return [one for one in after if not is_written(one) and one.lineno <= until]

    def _dropped(self, node: ast.expr) -> tuple[ast.expr, str] | None:
        """What dropout is applied to, and its probability as the fused call takes it."""
        if not isinstance(node, ast.Call) or not node.args:
            return None
        names = self._source.names
        if names.qualified(node.func) == _DROPOUT:
            given: dict[str | None, ast.expr] = {one.arg: one.value for one in node.keywords}
            unknown = set(given) - {"p", "training"}
            given.update(zip(("p", "training"), node.args[1:], strict=False))
            rate, training = given.get("p"), given.get("training")
            if rate is None or training is None or unknown:
                raise self._refusal(node)
            on = self._source.segment(training)
            return node.args[0], f"{self._source.segment(rate)} if {on} else 0.0"
        kinds = {
            names.qualified(one.func) if isinstance(one, ast.Call) else None
            for one in names.values(node.func)
        }
        if kinds != {"torch.nn.Dropout"} or len(node.args) != 1 or node.keywords:
            return None
        module = self._source.segment(node.func)
        return node.args[0], f"{module}.p if {module}.training else 0.0"

    def _filled(self, node: ast.expr) -> tuple[ast.expr, str, ast.expr] | None:
        """The scores under a mask, what it keeps as text, and the mask."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        if node.func.attr != "masked_fill" or len(node.args) != 2 or node.keywords:
            return None
        mask, value = node.args
        number = _number(value)
        if number is None or number > _MASKED:
            raise self._refusal(node)
        text = self._source.segment(mask)
        if isinstance(mask, ast.Compare) and len(mask.ops) == 1 and isinstance(mask.ops[0], ast.Eq):
            left, right = (self._source.segment(one) for one in (mask.left, mask.comparators[0]))
            keep = f"{left} != {right}"
        else:
            keep = f"~{text}" if isinstance(mask, (ast.Name, ast.Attribute)) else f"~({text})"
        return node.func.value, keep, mask

    def _factor(self, node: ast.expr) -> str:
        """A scale that is surely a number: of Python, a square root, a power of a size."""
        text = self._source.segment(node)
        if _is_number(self._source, node):
            return text if isinstance(node, (ast.Constant, ast.Call)) else f"({text})"
        identity = self._source.names.identity(node)
        bound = self._source.names.bindings(*identity) if identity is not None else []
        values = [getattr(self._source.names.statement(one), "value", None) for one in bound]
        if values and all(one is not None and _is_number(self._source, one) for one in values):
            return text
        raise self._source.not_placed(
            f"'{text}' may be a tensor, and a scale must be a number", node
        )

    def _untransposed(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Attribute) and node.attr == "mT":
            return node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            dims = tuple(_number(one) for one in node.args)
            if node.func.attr == "transpose" and dims in _LAST_TWO and not node.keywords:
                return node.func.value
        raise self._refusal(node)

    def _check_plain(self, node: ast.expr) -> None:
        """Refuse what may do something else than look at a tensor: it would happen later."""
        for one in ast.walk(node):
            called = one.func if isinstance(one, ast.Call) else None
            view = isinstance(called, ast.Attribute) and called.attr in _VIEWS
            if (called and not view) or isinstance(one, (ast.NamedExpr, ast.Await, ast.Lambda)):
                raise self._refusal(one)

    def _check_unchanged(self, found: _Found) -> None:
        """Refuse where what the call reads gets another value before it."""
        if not found.statements:
            return
        read = {node.id for node in variables_in(*found.read)}
        block = self._function.body
        last = self._source.names.within(found.product, block)
        assert last is not None
        begin = min(block.index(one) for one in found.statements)
        for statement in block[begin : block.index(last)]:
            for node in ast.walk(statement):
                again = isinstance(node, ast.Name) and is_written(node) and node.id in read
                in_place = isinstance(node, ast.Attribute) and node.attr.endswith("_")
                if again or in_place or isinstance(node, ast.AugAssign):
                    raise self._refusal(node)

    def _refusal(self, node: ast.AST) -> NotPlacedError:
        text = " ".join(self._source.segment(node).split())
        return self._source.not_placed(
            f"'{text}' is no step of attention that is understood here", node
        )


def _is_number(source: Source, node: ast.expr) -> bool:
    if _number(node) is not None:
        return True
    if isinstance(node, ast.Call):
        return source.names.qualified(node.func) == "math.sqrt"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _number(node.right) in (-0.5, 0.5)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _number(node.left) is not None and _is_number(source, node.right)
    return False


def _number(node: ast.expr) -> float | None:
    """A number that is written out: -1, 1e-5, float("-inf"), -math.inf."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float":
        text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        return {"-inf": -math.inf, "inf": math.inf}.get(str(text))
    if isinstance(node, ast.Attribute) and node.attr == "inf":
        return math.inf
    return None
