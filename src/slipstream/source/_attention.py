"""Attention that is written out in a ``forward`` of the file, as one fused call."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field

from slipstream.source._names import is_written, nodes_in, variables_in
from slipstream.source._parts import reachable
from slipstream.source._places import Places
from slipstream.source._source import EditLocationError, Source

_SOFTMAX = ("torch.softmax", "torch.nn.functional.softmax")
_MATMUL = ("torch.matmul", "torch.bmm")
_DROPOUT = "torch.nn.functional.dropout"
_LAST_TWO: frozenset[tuple[float | None, ...]] = frozenset([(-2, -1), (-1, -2), (2, 3), (3, 2)])
# Methods that return a view: they may be called later than they are written.
_VIEWS = frozenset(["transpose", "permute", "view", "reshape", "unsqueeze", "flatten", "unflatten"])
_MASKED = -1e4
_SIDES = 2


@dataclass
class _Found:
    """One attention on its way to a fused call.

    Attributes:
        statements: those that only compute its scores and weights, to be removed.
        read: the expressions that the call reads instead.
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
    """Replace every ``softmax(q @ k.transpose(-2, -1) * s) @ v`` of the model's classes.

    Intermediate results may have names, as long as nothing else reads them. Masks may be
    ``masked_fill`` with minus infinity.

    Raises:
        EditLocationError: there is none, or one has a step that is not supported.
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
        raise source.location_error("the model's classes contain no written-out attention", model)
    edited = source.with_import("torch")
    for attention in attentions:
        mask = f", attn_mask={attention.keep}" if attention.keep else ""
        dropout = f", dropout_p={attention.dropout}" if attention.dropout else ""
        edited = edited.replace(
            attention.product,
            f"{where.torch}.nn.functional.scaled_dot_product_attention("
            f"{attention.query}, {attention.key}, {source.segment(attention.value)}"
            f"{mask}{dropout}, scale={attention.scale})",
        )
        for statement in attention.statements:
            edited = edited.remove(statement)
    return edited


def _products(
    source: Source, function: ast.FunctionDef
) -> list[tuple[ast.expr, ast.expr, ast.expr]]:
    """Return every matmul of a function with its two operands."""
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
    """Whether `left`, or a value of a variable in it, contains a softmax."""
    nodes = list(ast.walk(left))
    names = {node.id for node in variables_in(left)}
    for _ in range(len(function.body)):
        assignments = [
            node
            for node in nodes_in(ast.Assign, function)
            if node.lineno < left.lineno
            and any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
        ]
        nodes += [part for node in assignments for part in ast.walk(node.value)]
        further = (node.value for node in assignments if _softmax_of(source, node.value) is None)
        more = {node.id for node in variables_in(*further)}
        if more <= names:
            break
        names |= more
    return any(_softmax_of(source, node) is not None for node in nodes)


def _softmax_of(source: Source, node: ast.AST) -> ast.expr | None:
    """Return the operand of a softmax over the last dimension; None for anything else."""
    if not isinstance(node, ast.Call):
        return None
    args = list(node.args)
    if source.names.qualified(node.func) in _SOFTMAX and args:
        scores, dims = args[0], args[1:]
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "softmax":
        scores, dims = node.func.value, args
    else:
        return None
    dims += [keyword.value for keyword in node.keywords if keyword.arg == "dim"]
    only_dim = all(keyword.arg == "dim" for keyword in node.keywords)
    return scores if only_dim and [_number(dim) for dim in dims] == [-1] else None


class _Reader:
    """Reader of one attention, from the matmul with the values back to queries and keys."""

    def __init__(self, source: Source, function: ast.FunctionDef, torch: str) -> None:
        self._source = source
        self._function = function
        self._torch = torch

    def read(self, product: ast.expr, left: ast.expr, value: ast.expr) -> _Found:
        """Return the parts of the attention whose last step is `product`."""
        attention = _Found(product, value)
        weights = self._resolved(attention, left)
        if (dropped := self._dropped(weights)) is not None:
            inner, attention.dropout = dropped
            weights = self._resolved(attention, inner)
        scores = _softmax_of(self._source, weights)
        if scores is None:
            raise self._refusal(weights)
        scores = self._resolved(attention, scores)
        if (masked := self._masked(scores)) is not None:
            inner, attention.keep, mask = masked
            attention.read.append(mask)
            scores = self._resolved(attention, inner)
        if isinstance(scores, ast.BinOp) and isinstance(scores.op, (ast.Mult, ast.Div)):
            attention.read.append(scores.right)
            text = self._factor(scores.right)
            attention.scale = text if isinstance(scores.op, ast.Mult) else f"1 / {text}"
            scores = self._resolved(attention, scores.left)
        sides = _sides(self._source, scores)
        if sides is None:
            raise self._refusal(scores)
        query, transposed = sides
        key = self._untransposed(transposed)
        for operand in (query, key):
            self._check_plain(operand)
        attention.query, attention.key = (self._source.segment(operand) for operand in (query, key))
        attention.read += [query, key]
        self._check_unchanged(attention)
        return attention

    def _resolved(self, found: _Found, expression: ast.expr) -> ast.expr:
        """Return the value of a variable that is read only here, and mark its statement."""
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
        raise self._source.location_error(
            f"'{expression.id}' is also read elsewhere, or is not assigned with '='",
            expression,
        )

    def _readers(self, made: ast.Assign, name: str) -> list[ast.Name]:
        """Return the places that may read the value a statement assigns, in text order."""
        same = variables_in(self._function, name=name)
        after = [node for node in same if node.lineno > (made.end_lineno or made.lineno)]
        stores = filter(is_written, after)
        # The next assignment to the name may still read it.
        until = min(
            (self._source.names.statement(node).end_lineno or node.lineno for node in stores),
            default=math.inf,
        )
        return [node for node in after if not is_written(node) and node.lineno <= until]

    def _dropped(self, node: ast.expr) -> tuple[ast.expr, str] | None:
        """Return the operand of dropout, and its probability as the fused call takes it."""
        if not isinstance(node, ast.Call) or not node.args:
            return None
        names = self._source.names
        if names.qualified(node.func) == _DROPOUT:
            arguments: dict[str | None, ast.expr] = {
                keyword.arg: keyword.value for keyword in node.keywords
            }
            unknown = set(arguments) - {"p", "training"}
            arguments.update(zip(("p", "training"), node.args[1:], strict=False))
            rate, training = arguments.get("p"), arguments.get("training")
            if rate is None or training is None or unknown:
                raise self._refusal(node)
            on = self._source.segment(training)
            return node.args[0], f"{self._source.segment(rate)} if {on} else 0.0"
        kinds = {
            names.qualified(value.func) if isinstance(value, ast.Call) else None
            for value in names.values(node.func)
        }
        if kinds != {"torch.nn.Dropout"} or len(node.args) != 1 or node.keywords:
            return None
        module = self._source.segment(node.func)
        return node.args[0], f"{module}.p if {module}.training else 0.0"

    def _masked(self, node: ast.expr) -> tuple[ast.expr, str, ast.expr] | None:
        """Return the scores under a mask, the text of the inverted mask, and the mask."""
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
            left, right = (self._source.segment(side) for side in (mask.left, mask.comparators[0]))
            keep = f"{left} != {right}"
        else:
            keep = f"~{text}" if isinstance(mask, (ast.Name, ast.Attribute)) else f"~({text})"
        return node.func.value, keep, mask

    def _factor(self, node: ast.expr) -> str:
        """Return the text of a scale that is certainly a number, such as a square root."""
        text = self._source.segment(node)
        if _is_number(self._source, node):
            return text if isinstance(node, (ast.Constant, ast.Call)) else f"({text})"
        identity = self._source.names.identity(node)
        bound = self._source.names.bindings(*identity) if identity is not None else []
        values = [getattr(self._source.names.statement(node), "value", None) for node in bound]
        if values and all(
            value is not None and _is_number(self._source, value) for value in values
        ):
            return text
        raise self._source.location_error(
            f"'{text}' may be a tensor, and a scale must be a number", node
        )

    def _untransposed(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Attribute) and node.attr == "mT":
            return node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            dims = tuple(_number(dim) for dim in node.args)
            if node.func.attr == "transpose" and dims in _LAST_TWO and not node.keywords:
                return node.func.value
        raise self._refusal(node)

    def _check_plain(self, node: ast.expr) -> None:
        """Refuse anything but views of a tensor: the fused call would run it later."""
        for inner in ast.walk(node):
            called = inner.func if isinstance(inner, ast.Call) else None
            view = isinstance(called, ast.Attribute) and called.attr in _VIEWS
            if (called and not view) or isinstance(inner, (ast.NamedExpr, ast.Await, ast.Lambda)):
                raise self._refusal(inner)

    def _check_unchanged(self, found: _Found) -> None:
        """Refuse if a variable that the call reads is assigned between."""
        if not found.statements:
            return
        read = {node.id for node in variables_in(*found.read)}
        block = self._function.body
        last = self._source.names.within(found.product, block)
        assert last is not None
        begin = min(block.index(statement) for statement in found.statements)
        for statement in block[begin : block.index(last)]:
            for node in ast.walk(statement):
                again = isinstance(node, ast.Name) and is_written(node) and node.id in read
                in_place = isinstance(node, ast.Attribute) and node.attr.endswith("_")
                if again or in_place or isinstance(node, ast.AugAssign):
                    raise self._refusal(node)

    def _refusal(self, node: ast.AST) -> EditLocationError:
        text = " ".join(self._source.segment(node).split())
        return self._source.location_error(f"'{text}' is not a supported step of attention", node)


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
    """Return the value of a written-out number: -1, 1e-5, float("-inf"), -math.inf."""
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
