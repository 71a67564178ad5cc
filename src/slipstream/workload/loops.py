"""Which loop of a plain script trains: the statements around a line, and the other loops."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While, *_FUNCTIONS)
_OPTIMIZER = re.compile(r"opt", re.IGNORECASE)


def lines_around(tree: ast.AST, line: int) -> range:
    """Return the lines of the innermost loop around `line`, or of its statement without a loop.

    Empty if there is no statement on the line.
    """
    statement = loop = range(0)
    # A node comes after those that contain it.
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if line in lines:
                statement = lines
                if isinstance(node, _LOOPS):
                    loop = range(0) if isinstance(node, _FUNCTIONS) else lines
    return loop or statement


def moved(lines: range, before: bytes, after: bytes) -> range:
    """Return where `lines` of a text are in an edited text."""
    if not lines or before == after:
        return lines
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    begin, stop = lines.start - 1, lines.stop - 1
    numbers = [
        number
        for tag, start, end, first, last in matcher.get_opcodes()
        if start < stop and end > begin
        for number in (
            range(first + max(begin - start, 0), first + min(stop, end) - start)
            if tag == "equal"
            else range(first, last)
        )
    ]
    return range(min(numbers, default=-1) + 1, max(numbers, default=-1) + 2)


def other_loops(path: Path, line: int) -> list[int]:
    """Return lines where optimizers of a script step, each in another loop than that of `line`.

    An optimizer is an instance of a class of ``torch.optim``, or has a name such as ``opt_d``.

    Args:
        line: where an optimizer steps; for another line there are no other loops.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    made = set(_made_optimizers(tree))
    loops: dict[ast.AST, int] = {}
    recorded = None
    for call, loop in _calls_in_loops(tree, tree):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "step"):
            continue
        named = [ast.unparse(node) for node in (call.func.value, *call.args[:1])]
        if any(name in made or _OPTIMIZER.search(name) for name in named):
            loops.setdefault(loop, call.lineno)
            if call.lineno <= line <= (call.end_lineno or call.lineno):
                recorded = loop
    if recorded is None:
        return []
    return sorted(at for loop, at in loops.items() if loop is not recorded)


def _made_optimizers(tree: ast.AST) -> Iterator[str]:
    """Yield the variables to which an optimizer of torch is assigned, as source text."""
    import torch

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kind = getattr(torch.optim, ast.unparse(node.value.func).rpartition(".")[2], None)
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                yield from map(ast.unparse, node.targets)


def _calls_in_loops(node: ast.AST, loop: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Yield each call under `node` with the innermost loop or function around it."""
    if isinstance(node, ast.Call):
        yield node, loop
    inside = node if isinstance(node, _LOOPS) else loop
    for child in ast.iter_child_nodes(node):
        yield from _calls_in_loops(child, inside)
