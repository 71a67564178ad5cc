"""Name resolution in Python files with Triton kernels, which are read and never run.

Names are followed through imports into files in the source's folder, and into helpers of installed
packages that Triton compiles. Other imports remain imports.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.files import read_bytes
from slipstream.techniques.side_by_side.hfuse import KernelSourceError

_MAX_BYTES = 16 << 20
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
# Packages whose functions are imported, not copied.
_NOT_FOLLOWED = frozenset({"triton", "torch", "numpy"}) | sys.stdlib_module_names


@dataclass(frozen=True, eq=False)
class PythonFile:
    """A parsed file.

    Attributes:
        path: path of the file.
        text: its bytes, to which positions in the syntax tree refer.
        starts: offset of each line in `text`.
        bound: statements that bind or change each top-level name.
        starred: lines with ``from module import *``.
        changed: names that a function declares ``global``, with the line.
    """

    path: Path
    text: bytes
    starts: tuple[int, ...]
    bound: Mapping[str, tuple[ast.stmt, ...]]
    starred: tuple[int, ...]
    changed: Mapping[str, int]

    def where(self, line: int) -> str:
        """``file:line``."""
        return f"{self.path.name}:{line}"

    def span(self, node: ast.expr | ast.stmt | ast.arg | ast.alias) -> tuple[int, int]:
        """Return the start and end of a node in `text`."""
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def segment(self, node: ast.expr | ast.stmt | ast.arg) -> str:
        """Return the text of a node."""
        begin, end = self.span(node)
        return self.text[begin:end].decode()

    def imported(self, name: str) -> str:
        """Return the qualified name that an import binds to `name`; empty if none does."""
        for statement in self.bound.get(name, ()):
            for node in ast.walk(statement):
                for alias in getattr(node, "names", ()) if _is_import(node) else ():
                    if bound_by(alias) == name:
                        module = f"{getattr(node, 'module', None) or ''}."
                        full = f"{module}{alias.name}".lstrip(".")
                        return full if alias.asname or module != "." else full.partition(".")[0]
        return ""


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def bound_by(alias: ast.alias) -> str:
    """Return the name that an import alias binds."""
    return alias.asname or alias.name.partition(".")[0]


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, except the contents of functions."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from outside_functions(child)


def _names_of(statement: ast.AST) -> Iterator[str]:
    """Yield the top-level names that a statement binds or modifies."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from map(bound_by, statement.names)
    elif isinstance(statement, ast.Name):
        if isinstance(statement.ctx, ast.Store | ast.Del):
            yield statement.id
    elif isinstance(statement, ast.Attribute | ast.Subscript) and isinstance(
        statement.ctx, ast.Store | ast.Del
    ):
        root: ast.AST = statement
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Name):
            yield root.id
    elif not isinstance(statement, ast.Lambda | _COMPREHENSIONS):
        for child in ast.iter_child_nodes(statement):
            yield from _names_of(child)


def read_file(path: Path) -> PythonFile:
    """Read and parse a file.

    Raises:
        KernelSourceError: the file cannot be read, or is not valid Python.
    """
    try:
        text = read_bytes(path, most=_MAX_BYTES)
    except SlipstreamError as error:
        raise KernelSourceError(f"'{path}' cannot be read: {error.what}") from None
    try:
        text.decode()
        tree = ast.parse(text)
    except SyntaxError as error:
        where = f"{path.name}:{error.lineno or 1}"
        raise KernelSourceError(f"'{path}' is not valid Python: {error.msg}", where=where) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise KernelSourceError(f"'{path}' is not valid Python: {error}", where=path.name) from None
    bound: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in dict.fromkeys(_names_of(statement)):
            bound.setdefault(name, []).append(statement)
    starts = tuple(itertools.accumulate(map(len, re.split(rb"(?<=\n)", text)), initial=0))
    nodes = list(ast.walk(tree))
    starred = tuple(
        node.lineno for node in nodes
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    )  # fmt: skip
    changed = {
        name: node.lineno for node in nodes if isinstance(node, ast.Global) for name in node.names
    }
    return PythonFile(
        path,
        text,
        starts,
        {name: tuple(statements) for name, statements in bound.items()},
        starred,
        changed,
    )


@dataclass(frozen=True)
class Reference:
    """A use of a top-level name, with the attributes accessed.

    Attributes:
        nodes: the name, then each attribute: ``tl``, ``tl.extra``, ``tl.extra.cuda``.
        call: the call of the last node; None if it is used as a value.
    """

    nodes: tuple[ast.Name | ast.Attribute, ...]
    call: ast.Call | None

    @property
    def name(self) -> str:
        """The top-level name."""
        root = self.nodes[0]
        assert isinstance(root, ast.Name), "references start with a name"
        return root.id

    @property
    def attributes(self) -> list[str]:
        """The attributes accessed."""
        return [node.attr for node in self.nodes[1:] if isinstance(node, ast.Attribute)]


class _References(ast.NodeVisitor):
    """Collector of references to names that are not local to a function."""

    def __init__(self) -> None:
        self.references: list[Reference] = []
        self._locals: list[frozenset[str]] = []

    def _scope(self, names: frozenset[str], nodes: Sequence[ast.AST]) -> None:
        self._locals.append(names)
        for node in nodes:
            self.visit(node)
        self._locals.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        # All annotations of nested functions and methods are copied.
        inner = [child.annotation for child in ast.walk(node.args) if isinstance(child, ast.arg)]
        annotations = [*inner, node.returns] if self._locals else constexpr_annotations(node)
        for child in (*outside, *filter(None, annotations)):
            self.visit(child)
        self._scope(_arguments(node.args) | _stored(node.body), node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._scope(_arguments(node.args), [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(child)
        self._scope(frozenset(), node.body)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, _COMPREHENSIONS):
            names = _stored([generator.target for generator in node.generators])
            self._scope(names, list(ast.iter_child_nodes(node)))
        else:
            super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._refer(node.func, node)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._refer(node, None)

    def visit_Name(self, node: ast.Name) -> None:
        self._refer(node, None)

    def _refer(self, node: ast.expr, call: ast.Call | None) -> None:
        nodes: list[ast.Name | ast.Attribute] = []
        root = node
        while isinstance(root, ast.Attribute):
            nodes.append(root)
            root = root.value
        if not isinstance(root, ast.Name):
            self.visit(root)
        elif not any(root.id in names for names in self._locals):
            self.references.append(Reference((root, *reversed(nodes)), call))


def _arguments(arguments: ast.arguments) -> frozenset[str]:
    return frozenset(node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg))


def _stored(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Return the names that `nodes` bind."""
    names: set[str] = set()
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(bound_by(node))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            names.add(node.name)
    return frozenset(names)


def constexpr_annotations(function: ast.FunctionDef) -> list[ast.expr]:
    """Return the annotations of constants, the only ones that Triton reads in a helper."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [each.annotation for each in arguments if each.annotation and is_constexpr(each)]


def is_constexpr(argument: ast.arg) -> bool:
    """Whether a parameter is a compile-time constant."""
    return argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)


def references(statement: ast.stmt) -> list[Reference]:
    """Return the references of a top-level statement, including those to itself."""
    visitor = _References()
    visitor.visit(statement)
    return visitor.references


@dataclass(frozen=True)
class Target:
    """The definition or import that a reference resolves to.

    Attributes:
        file: file that defines it; None if it remains an import.
        name: its name in that file, empty for the module itself; or the name that the import binds.
        dotted: qualified name of an import, such as ``triton.language``.
        used: number of the reference's attributes that led to it.
        text: text of the import statement.
    """

    file: PythonFile | None
    name: str
    dotted: str = ""
    used: int = 0
    text: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the target, equal for all references to it."""
        return (self.file.path.resolve().as_posix() if self.file else self.text, self.name)


@dataclass(frozen=True)
class _Module:
    dotted: str
    path: Path | None
    folders: tuple[str, ...]

    @classmethod
    def find(cls, dotted: str, folders: Sequence[str]) -> _Module | None:
        """Find a module in `folders` without importing its packages."""
        origin, full = None, ""
        for part in dotted.split("."):
            full = f"{full}.{part}".lstrip(".")
            spec = PathFinder.find_spec(full, list(folders))
            if spec is None:
                return None
            folders, origin = spec.submodule_search_locations or (), spec.origin
        return cls(dotted, Path(origin) if origin and origin.endswith(".py") else None,
                   tuple(folders))  # fmt: skip


class Project:
    """Cache of the files of kernels and of those they import."""

    def __init__(self) -> None:
        self._files: dict[Path, PythonFile] = {}

    @property
    def words(self) -> frozenset[str]:
        """All words in all files."""
        return frozenset(
            word.decode()
            for file in self._files.values()
            for word in re.findall(rb"\w+", file.text)
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all files."""
        return tuple(self._files)

    def file(self, path: Path) -> PythonFile:
        """Return a parsed file."""
        key = path.resolve()
        if key not in self._files:
            self._files[key] = read_file(path)
        return self._files[key]

    def target(
        self, file: PythonFile, name: str, attributes: Sequence[str], line: int
    ) -> Target | None:
        """Resolve a top-level name of `file`; return None for a builtin.

        Raises:
            KernelSourceError: the name is bound twice, changed by a function, or undefined.
        """
        statements = file.bound.get(name)
        if statements is None:
            self._need_builtin(file, name, line)
            return None
        if len(statements) > 1 and not all(map(_is_import, statements)):
            raise KernelSourceError(
                f"'{name}' is bound or changed more than once, so its value is ambiguous",
                where=file.where(statements[1].lineno), remedy="use a separate name",
            )  # fmt: skip
        if name in file.changed:
            raise KernelSourceError(
                f"a function changes '{name}', which a copy would not reflect",
                where=file.where(file.changed[name]), remedy="pass it as an argument",
            )  # fmt: skip
        statement = statements[-1]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return self._follow(file, statement, name, attributes)
        return Target(file, name, file.imported(name))

    def _need_builtin(self, file: PythonFile, name: str, line: int) -> None:
        if hasattr(builtins, name) or name in ("__file__", "__name__"):
            return
        what, where = f"'{name}' is not defined in {file.path.name}", line
        if file.starred:
            what, where = f"'{name}' may be imported by this 'import *'", file.starred[0]
        raise KernelSourceError(what, where=file.where(where), remedy="import it by name")

    def _follow(
        self, file: PythonFile, statement: ast.Import | ast.ImportFrom, name: str,
        attributes: Sequence[str],
    ) -> Target:  # fmt: skip
        alias = next(alias for alias in statement.names if bound_by(alias) == name)
        text = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        if isinstance(statement, ast.ImportFrom):
            dotted, names, used, level = statement.module or "", [alias.name], -1, statement.level
            imported = Target(None, name, f"{dotted}.{alias.name}", 0, f"from {dotted} {text}")
        else:
            dotted, names, used, level = alias.name if alias.asname else name, [], 0, 0
            imported = Target(None, name, dotted, 0, text)
        names += attributes
        if level:
            folder = file.path.resolve().parents[level - 1]
            start = _Module(dotted, folder / "__init__.py", (str(folder),))
            module = _Module.find(dotted, start.folders) if dotted else start
            target = self._walk(module, names, used) if module else None
            if target is None:
                raise KernelSourceError(
                    "the imported module or name is not found", where=file.where(statement.lineno)
                )
            return target
        if dotted.partition(".")[0] in _NOT_FOLLOWED:
            return imported
        local = _Module.find(dotted, [str(file.path.resolve().parent)])
        target = self._walk(local, names, used) if local else None
        if target is not None:
            return target
        installed = _Module.find(dotted, sys.path)
        try:
            target = self._walk(installed, names, used) if installed else None
        except KernelSourceError:  # Names in packages may be ambiguous; keep the import.
            target = None
        return target if target is not None and _is_compiled(target) else imported

    def _walk(self, module: _Module, names: Sequence[str], used: int) -> Target | None:
        """Resolve attributes `names` of a module; None if that fails."""
        file = self.file(module.path) if module.path and module.path.is_file() else None
        if not names:
            return Target(file, "", module.dotted, used) if file else None
        head, *rest = names
        if file is not None and head in file.bound:
            target = self.target(file, head, rest, 1)
            return target and replace(target, used=used + 1 + target.used)
        submodule = _Module.find(head, module.folders)
        return self._walk(submodule, rest, used + 1) if submodule else None


def _is_compiled(target: Target) -> bool:
    """Whether a target is a function that Triton compiles."""
    statement = target.file.bound[target.name][-1] if target.file and target.name else None
    return isinstance(statement, ast.FunctionDef) and any(
        "jit" in ast.unparse(decorator) for decorator in statement.decorator_list
    )
