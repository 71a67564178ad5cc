"""Fusion of Triton kernels into one, each with separate programs.

Every kernel becomes a function with its program ids and their number as parameters, which replace
``tl.program_id`` and ``tl.num_programs`` in it and in everything it calls. Functions have local
names, so only parameters and top-level names of files are made distinct. The fused kernel assigns
its programs to kernels: interleaved, so that every kernel has some on a multiprocessor until all
finish, or one kernel after another. A program takes one branch: it needs the maximum shared memory
and registers of any kernel, not the sum. The user's files are read, never written or run.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; the form for Triton is
that of combo kernels in `torch._inductor`, which do not interleave grids of different sizes.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import keyword
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slipstream.errors import UnknownNameError, UsageError
from slipstream.techniques.side_by_side.hfuse import KernelSourceError, Launch
from slipstream.techniques.side_by_side.triton.source import (
    Project,
    PythonFile,
    Reference,
    Target,
    bound_by,
    constexpr_annotations,
    is_constexpr,
    outside_functions,
    references,
)

_IDS = {"program_id": "ids", "num_programs": "programs"}
_TRITON, _LANGUAGE = ("import triton", "triton"), ("import triton.language as tl", "tl")
_MAX_PROGRAMS, _MAX_WARPS = 2**31 - 1, 32
_TYPE = re.compile(r"(u?int|b?float)(\d+)")
_SHORT_TYPE = re.compile(r"(?:i|u|fp|bf)\d+")
_SHORT = {"int": "i", "uint": "u", "float": "fp", "bfloat": "bf"}
# Assembly registers that contain a program's index.
_ID_REGISTERS = re.compile(r"%n?(ctaid|clusterid|cluster_ctaid)|%gridid")
_ROUTE = """
@{triton}.jit
def {p}turn({p}at, {p}count, {p}total, {p}evenly: {tl}.constexpr):
    # The number of programs of a kernel with {p}count of {p}total before the one at {p}at, and
    # whether that one belongs to it: interleaved, if at * count passes a multiple of total.
    if {p}evenly:
        {p}product = {p}at.to({tl}.int64) * {p}count
        {p}before = ({p}product // {p}total).to({tl}.int32)
        {p}remainder = {p}product - {p}before.to({tl}.int64) * {p}total
        {p}its = {p}remainder + {p}count >= {p}total
    else:
        {p}before = {tl}.minimum({p}at, {p}count)
        {p}its = {p}at < {p}count
    return {p}before, {p}its


@{triton}.jit
def {p}place({p}at, {p}x, {p}y):
    return {p}at % {p}x, {p}at // {p}x % {p}y, {p}at // ({p}x * {p}y)
"""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel.

    Attributes:
        name: its name in the kernel.
        fused: its name in the fused kernel.
        constexpr: whether it is a compile-time constant.
        default: source text of its default; empty if it has none.
        type: annotated type in Triton's short form (``i64``); empty if it has none.
    """

    name: str
    fused: str
    constexpr: bool
    default: str
    type: str


@dataclass(frozen=True)
class ProgramPart:
    """A kernel of the fused kernel.

    Attributes:
        launch: the requested launch.
        name: name of the kernel.
        parameters: its parameters, in order.
        source: source of a module with the unchanged kernel.
        alone: its name in that module.
        atomics: whether it adds atomically, so that sums depend on the order of its programs.
        tuned: omitted decorators whose values are now arguments: ``autotune``, ``heuristics``.
        num_warps, num_stages: options of its launch.
    """

    launch: Launch
    name: str
    parameters: tuple[Parameter, ...]
    source: str
    alone: str
    atomics: bool
    tuned: tuple[str, ...]
    num_warps: int
    num_stages: int

    @property
    def programs(self) -> int:
        """Number of programs of its grid."""
        return math.prod(self.launch.grid)

    @property
    def cells(self) -> dict[str, str | int]:
        """Cells of its table row, by column."""
        return {"programs": self.programs, "warps": self.num_warps}

    def to_json(self) -> dict[str, str | int]:
        """Return a JSON-serializable dictionary."""
        return {
            "kernel": self.name, "programs": self.programs, "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }  # fmt: skip


@dataclass(frozen=True)
class FusedPrograms:
    """A fused kernel.

    Attributes:
        name: name of the kernel.
        source: source of a module with the kernel and everything it needs.
        parts: its kernels.
        evenly: name of the last parameter: True interleaves the programs of all kernels, False
            runs them in order.
        files: files that were read.
        shared_bytes: dynamic shared memory of a launch; 0, because Triton determines it.
    """

    name: str
    source: str
    parts: tuple[ProgramPart, ...]
    evenly: str
    files: tuple[Path, ...]
    shared_bytes: ClassVar[int] = 0

    @property
    def num_warps(self) -> int:
        """Warps of a launch: the maximum of its kernels."""
        return max(part.num_warps for part in self.parts)

    @property
    def num_stages(self) -> int:
        """Pipeline stages of a launch: the maximum of its kernels."""
        return max(part.num_stages for part in self.parts)

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.num_warps

    @property
    def notes(self) -> list[str]:
        """Notes on omitted decorators."""
        return [
            f"{part.name}: values chosen by @{' and @'.join(part.tuned)} are now arguments"
            for part in self.parts if part.tuned
        ]  # fmt: skip

    @property
    def launch_rule(self) -> str:
        """One-line description of its launch."""
        return _launch_rule(self.name, [part.programs for part in self.parts], self.evenly,
                            self.num_warps, self.num_stages)  # fmt: skip


def _launch_rule(
    name: str, programs: Sequence[int], evenly: str, num_warps: int, num_stages: int
) -> str:
    return (
        f"{name}[({' + '.join(map(str, programs))},)](arguments of each kernel in order, then each "
        f"kernel's grid as x, y, z, then {evenly}=True or False, num_warps={num_warps}, "
        f"num_stages={num_stages})"
    )


@dataclass(frozen=True, eq=False)
class _Statement:
    """A top-level statement of a file, with everything it refers to."""

    file: PythonFile
    node: ast.stmt
    targets: tuple[tuple[Reference, Target], ...]


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A kernel in its file."""

    launch: Launch
    file: PythonFile
    node: ast.FunctionDef
    not_specialized: tuple[str, ...]
    tuned: tuple[str, ...]

    @property
    def key(self) -> _Key:
        return Target(self.file, self.node.name).key

    @property
    def arguments(self) -> list[ast.arg]:
        return [*self.node.args.posonlyargs, *self.node.args.args]

    @property
    def defaults(self) -> list[str]:
        texts = [self.file.segment(default) for default in self.node.args.defaults]
        return [""] * (len(self.arguments) - len(texts)) + texts


_Key = tuple[str, str]


def fuse(launches: Sequence[Launch], name: str = "") -> FusedPrograms:
    """Fuse the kernels of `launches`.

    Args:
        name: name of the fused kernel; by default all names joined.

    Raises:
        KernelSourceError: a file cannot be read, or a kernel uses something a fused one cannot.
        UnknownNameError: a file does not have the kernel.
        UsageError: a launch is invalid.
    """
    if keyword.iskeyword(name):
        raise UsageError(f"'{name}' cannot be the name of a kernel: it is a keyword of Python")
    project = Project()
    kernels = [_find_kernel(project, launch) for launch in launches]
    programs = [math.prod(launch.grid) for launch in launches]
    if sum(programs) > _MAX_PROGRAMS:
        raise UsageError(
            f"the grids have {sum(programs):,} programs in total, more than {_MAX_PROGRAMS:,}",
            remedy="use smaller grids: k:grid=64x2",
        )
    warps = [_setting(kernel, "num_warps", 4) for kernel in kernels]
    stages = [_setting(kernel, "num_stages", 3) for kernel in kernels]
    name = name or "_".join(kernel.launch.kernel for kernel in kernels)
    writer = _Writer(project, kernels, name)
    parameters = writer.parameters()
    rule = _launch_rule(writer.name, programs, writer.evenly, max(warps), max(stages))
    names = ", ".join(f"{kernel.launch.path.name}:{kernel.node.name}" for kernel in kernels)
    head = f"# Kernels side by side, by slipstream hfuse: {' '.join(names.split())}.\n# {rule}\n"
    source = "\n".join([head, writer.body(), writer.fused(parameters)])
    parts = []
    for kernel, own, num_warps, num_stages in zip(kernels, parameters, warps, stages, strict=True):
        alone = _Writer(project, [kernel], "", native=True)
        atomics = any("atomic_" in ast.unparse(statement.node) for statement in alone.order)
        parts.append(ProgramPart(
            kernel.launch, kernel.node.name, tuple(own), alone.body(), alone.name_of(kernel),
            atomics, kernel.tuned, num_warps, num_stages,
        ))  # fmt: skip
    return FusedPrograms(writer.name, source, tuple(parts), writer.evenly, project.paths)


def _setting(kernel: _Kernel, name: str, default: int) -> int:
    text = kernel.launch.values.get(name, str(default))
    if name in {argument.arg for argument in kernel.arguments}:
        return default
    number = int(text) if text.isdigit() else 0
    if not number or (name == "num_warps" and (number > _MAX_WARPS or number & (number - 1))):
        raise UsageError(
            f"{name}={text} of {kernel.launch.kernel} is invalid",
            remedy="num_warps is 1, 2, 4, 8, 16 or 32; num_stages is at least 1",
        )
    return number


def _find_kernel(project: Project, launch: Launch) -> _Kernel:
    file, name = project.file(launch.path), launch.kernel
    if name not in file.bound:
        kernels = [
            function for function, (node, *_) in file.bound.items()
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(called(decorator)).endswith("jit") for decorator in node.decorator_list)
        ]  # fmt: skip
        raise UnknownNameError(f"kernel of {file.path.name}", name, kernels)
    node = file.bound[name][0]
    if len(file.bound[name]) > 1:
        project.target(file, name, (), node.lineno)
    if not isinstance(node, ast.FunctionDef):
        raise KernelSourceError(f"{name} is not a function", where=file.where(node.lineno))
    not_specialized: list[str] = []
    tuned: list[str] = []
    for decorator in node.decorator_list:
        dotted = _dotted(project, file, called(decorator))
        word = dotted.rpartition(".")[2] if dotted.startswith("triton.") else ""
        if word == "jit":
            not_specialized += _not_specialized(file, decorator)
        elif word not in ("autotune", "heuristics"):
            raise KernelSourceError(
                f"{name} has a decorator that is not part of Triton: "
                f"@{file.segment(called(decorator))}",
                where=file.where(decorator.lineno), remedy="name the kernel it wraps",
            )  # fmt: skip
        elif "pre_hook" in file.segment(decorator):
            raise KernelSourceError(
                f"{name} has a pre_hook, which a fused kernel does not run",
                where=file.where(decorator.lineno), remedy="remove pre_hook and call it yourself",
            )  # fmt: skip
        tuned.append(word)
    if "jit" not in tuned:
        raise KernelSourceError(
            f"{name} is not a kernel: it has no @triton.jit", where=file.where(node.lineno)
        )
    if node.args.vararg or node.args.kwarg or node.args.kwonlyargs:
        raise KernelSourceError(
            f"{name} takes *args, **kwargs or keyword-only parameters",
            where=file.where(node.lineno), remedy="use named positional parameters only",
        )  # fmt: skip
    omitted = tuple(decorator for decorator in tuned if decorator != "jit")
    return _Kernel(launch, file, node, tuple(not_specialized), omitted)


def called(node: ast.expr) -> ast.expr:
    """Return a decorator without its arguments."""
    return node.func if isinstance(node, ast.Call) else node


def _dotted(project: Project, file: PythonFile, node: ast.expr) -> str:
    """Return the qualified name of an imported object; empty if it is not imported."""
    root, _, rest = ast.unparse(node).partition(".")
    target = project.target(file, root, rest.split(".") if rest else [], node.lineno)
    return ".".join(filter(None, [target.dotted, rest])) if target else ""


def _not_specialized(file: PythonFile, decorator: ast.expr) -> Iterator[str]:
    """Yield the parameters in ``do_not_specialize`` of a kernel's ``jit``."""
    for setting in decorator.keywords if isinstance(decorator, ast.Call) else ():
        if setting.arg in ("repr", "launch_metadata", "noinline"):
            continue
        try:
            names = ast.literal_eval(setting.value)
        except ValueError:
            names = None
        if setting.arg != "do_not_specialize" or not isinstance(names, list | tuple):
            raise KernelSourceError(
                f"jit({setting.arg}=...) is not supported",
                where=file.where(setting.value.lineno),
            )
        yield from map(str, names)


class _Writer:
    """Writer of a module with kernels and everything they need.

    Args:
        kernels: the kernels, in order.
        name: name of the fused kernel; empty if there is none.
        native: keep kernels unchanged, with their program ids.
    """

    def __init__(
        self, project: Project, kernels: Sequence[_Kernel], name: str, *, native: bool = False
    ) -> None:
        self._project, self._kernels, self._native = project, kernels, native
        self._kernel_nodes: dict[ast.stmt, _Kernel] = {kernel.node: kernel for kernel in kernels}
        self.order: list[_Statement] = []
        self._imports: set[_Key] = {_TRITON, _LANGUAGE}
        self._written: dict[_Key, set[str]] = {}
        self._statements: dict[ast.stmt, _Statement | None] = {}
        for kernel in kernels:
            self._written.setdefault(kernel.key, set()).add(kernel.node.name)
            self._add(kernel.file, kernel.node)
        for key in (_TRITON, _LANGUAGE):
            self._written.setdefault(key, set()).add(key[1])
        self._prefix = "slip_"
        while any(word.startswith(self._prefix) for word in project.words):
            self._prefix += "_"
        self._taken: set[str] = set()
        self.name = self._free(name) if name else ""
        self._names = {
            key: self._free(key[1], fresh=written != {key[1]})
            for key, written in self._written.items()
        }
        self.evenly = self._free("EVENLY")
        self._needs_ids = self._functions_with_ids()

    def _add(self, file: PythonFile, node: ast.stmt) -> None:
        """Add a statement after everything it refers to."""
        if node in self._statements:
            return
        self._statements[node] = None
        targets = []
        for reference in references(node):
            if self._is_decorator(node, reference):
                continue
            target = self._project.target(
                file, reference.name, reference.attributes, reference.nodes[0].lineno
            )
            if target is None:
                continue
            if _is_bare_module(reference, target):
                raise KernelSourceError(
                    f"the module '{reference.name}' is used as a value, which hides what is used",
                    where=file.where(reference.nodes[0].lineno),
                    remedy="access its members by name",
                )  # fmt: skip
            targets.append((reference, target))
            written = ast.unparse(reference.nodes[target.used])
            if target.file is None:
                self._imports.add(target.key)
                written = target.name
            elif target.file.bound[target.name][0] is not node:
                self._add(target.file, target.file.bound[target.name][0])
            self._written.setdefault(target.key, set()).add(written)
        for name in (name for name, statements in file.bound.items() if node in statements):
            self._written.setdefault(Target(file, name).key, set()).add(name)
        statement = _Statement(file, node, tuple(targets))
        self._statements[node] = statement
        self.order.append(statement)

    def _is_decorator(self, node: ast.stmt, reference: Reference) -> bool:
        """Whether a reference is in a kernel's decorator, which is omitted."""
        if node not in self._kernel_nodes or not isinstance(node, ast.FunctionDef):
            return False
        return any(reference.nodes[0] in ast.walk(decorator) for decorator in node.decorator_list)

    def _free(self, name: str, *, fresh: bool = False) -> str:
        """Return `name`, or a similar name that no file uses if it is taken or `fresh` is set."""
        if fresh or name in self._taken or hasattr(builtins, name):
            words = self._project.words | self._taken
            name = next(new for n in itertools.count(1) if (new := f"{name}_{n}") not in words)
        self._taken.add(name)
        return name

    def _functions_with_ids(self) -> frozenset[_Key]:
        """Return the functions that read program ids, directly or through calls."""
        if self._native:
            return frozenset()
        found: set[_Key] = set()
        while True:
            before = len(found)
            for statement in self.order:
                if any(
                    _id_word(reference, target) or target.key in found
                    for reference, target in statement.targets
                ) or _reads_ids_in_assembly(statement):  # fmt: skip
                    node = statement.node
                    if not isinstance(node, ast.FunctionDef):
                        raise KernelSourceError(
                            "a program id is used outside of a function",
                            where=statement.file.where(node.lineno),
                        )
                    found.add(Target(statement.file, node.name).key)
            if len(found) == before:
                return frozenset(found)

    def body(self) -> str:
        """Return the module without the fused kernel."""
        imports = [_import_line(*key, self._names[key]) for key in self._imports]
        statements = [self._text(statement) for statement in self.order]
        return "\n\n\n".join(["\n".join(sorted(imports)), *statements]) + "\n"

    def _text(self, statement: _Statement) -> str:
        """Return a statement with renamed references."""
        file, node = statement.file, statement.node
        begin, end = file.span(node)
        edits: list[tuple[int, int, str]] = []
        for reference, target in statement.targets:
            edits += self._edits(statement, reference, target)
        head = ""
        kernel = self._kernel_nodes.get(node)
        if kernel is not None:
            head = f"@{self._triton}.jit\n"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.decorator_list:
            begin = file.text.rindex(b"@", 0, file.span(node.decorator_list[0])[0])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            edits += self._name_edits(file, node)
        if isinstance(node, ast.FunctionDef):
            edits += self._signature_edits(file, node)
        for child in outside_functions(node):
            if isinstance(child, ast.alias):
                edits += self._alias_edits(file, child)
        return head + _edited(file.text, begin, end, edits)

    def name_of(self, kernel: _Kernel) -> str:
        """Return a kernel's name in the module."""
        return self._names[kernel.key]

    @property
    def _triton(self) -> str:
        return self._names[_TRITON]

    @property
    def _tl(self) -> str:
        return self._names[_LANGUAGE]

    def _edits(
        self, statement: _Statement, reference: Reference, target: Target
    ) -> Iterator[tuple[int, int, str]]:
        file, node = statement.file, reference.nodes[target.used]
        where = file.where(reference.nodes[0].lineno)
        word = "" if self._native else _id_word(reference, target)
        needs_ids = target.key in self._needs_ids
        if (word or needs_ids) and reference.call is None:
            raise KernelSourceError(
                f"'{ast.unparse(reference.nodes[-1])}' reads its program id and is used as a value",
                where=where, remedy="call it by its name",
            )  # fmt: skip
        if word and reference.call is not None:
            values = [*reference.call.args, *(pair.value for pair in reference.call.keywords)]
            if len(values) != 1:
                raise KernelSourceError(f"{word} takes one argument", where=where)
            start, stop = file.span(reference.call)
            first, last = file.span(values[0])
            yield start, first, f"{self._prefix}{_IDS[word]}["
            yield last, stop, "]"
            return
        new = self._names[target.key]
        if new == ast.unparse(node) and not needs_ids:
            return
        start, stop = file.span(node)
        # Before Python 3.12, positions of nodes in f-strings are wrong.
        if re.sub(rb"\s", b"", file.text[start:stop]).decode() != ast.unparse(node):
            raise KernelSourceError(f"'{ast.unparse(node)}' is used in an f-string", where=where)
        yield start, stop, new
        if needs_ids and reference.call is not None:
            start = file.text.index(b"(", stop) + 1
            has_arguments = reference.call.args or reference.call.keywords
            yield start, start, self._id_arguments + (", " if has_arguments else "")

    @property
    def _id_arguments(self) -> str:
        return f"{self._prefix}ids, {self._prefix}programs"

    def _name_edits(
        self, file: PythonFile, node: ast.FunctionDef | ast.ClassDef
    ) -> Iterator[tuple[int, int, str]]:
        """Yield edits of a function's or class's name, and the parameters of program ids."""
        key = Target(file, node.name).key
        word = re.compile(rb"(?:def|class)\s+(\w+)\s*(?:\(\s*)?")
        match = word.match(file.text, file.span(node)[0])
        assert match is not None, "definitions start with a keyword and a name"
        if self._names[key] != node.name:
            yield *match.span(1), self._names[key]
        if key in self._needs_ids:
            has_parameters = file.text[match.end() : match.end() + 1] != b")"
            parameters = self._id_arguments + (", " if has_parameters else "")
            yield match.end(), match.end(), parameters

    def _signature_edits(
        self, file: PythonFile, node: ast.FunctionDef
    ) -> Iterator[tuple[int, int, str]]:
        """Yield edits that remove a function's annotations, except those of constants."""
        arguments = [child for child in ast.walk(node.args) if isinstance(child, ast.arg)]
        retained = constexpr_annotations(node)
        for argument in arguments:
            if argument.annotation is not None and argument.annotation not in retained:
                start = file.span(argument)[0] + len(argument.arg.encode())
                yield start, file.span(argument.annotation)[1], ""
        if node.returns is not None:
            start, stop = file.span(node.returns)
            yield file.text.rindex(b"->", 0, start), stop, ""

    def _alias_edits(self, file: PythonFile, alias: ast.alias) -> Iterator[tuple[int, int, str]]:
        """Yield the edit of an import inside a copied statement."""
        key = Target(file, bound_by(alias)).key
        if self._names.get(key, bound_by(alias)) != bound_by(alias):
            yield *file.span(alias), f"{alias.name} as {self._names[key]}"

    def parameters(self) -> list[list[Parameter]]:
        """Return every kernel's parameters with their names in the fused kernel."""
        names = [kernel.node.name for kernel in self._kernels]
        parameters = []
        for number, kernel in enumerate(self._kernels, 1):
            prefix = kernel.node.name if names.count(kernel.node.name) == 1 else (
                f"{kernel.node.name}_{number}"
            )  # fmt: skip
            parameters.append([
                Parameter(argument.arg, self._free(f"{prefix}_{argument.arg}"),
                          is_constexpr(argument), default, _short_type(argument))
                for argument, default in zip(kernel.arguments, kernel.defaults, strict=True)
            ])  # fmt: skip
        return parameters

    def fused(self, parameters: Sequence[Sequence[Parameter]]) -> str:
        """Return the fused kernel with its helper functions."""
        p, tl = self._prefix, self._tl
        groups, unspecialized, grids = [], [], []
        for number, (kernel, own) in enumerate(zip(self._kernels, parameters, strict=True), 1):
            annotations = [
                f": {tl}.constexpr" if each.constexpr else f': "{each.type}"' if each.type else ""
                for each in own
            ]
            annotated = zip(own, annotations, strict=True)
            groups.append(", ".join(each.fused + text for each, text in annotated))
            fused = {each.name: each.fused for each in own} | {
                str(place): each.fused for place, each in enumerate(own)
            }
            unspecialized += [fused[name] for name in kernel.not_specialized if name in fused]
            grids.append([self._free(f"grid_{number}_{axis}") for axis in "xyz"])
        groups += [", ".join(grid) for grid in grids]
        unspecialized += [name for grid in grids for name in grid]
        lines = [f"{p}at_1 = {tl}.program_id(0)"]
        lines.append(f"{p}total_1 = " + " + ".join(" * ".join(grid) for grid in grids))
        indent = ""
        for number, (kernel, own, grid) in enumerate(
            zip(self._kernels, parameters, grids, strict=True), 1
        ):
            last, n = number == len(self._kernels), number
            call = functools.partial(self._call, kernel, own, grid)
            if last:
                lines.append(indent + call(f"{p}at_{n}"))
                break
            lines += [
                f"{indent}{p}count_{n} = {' * '.join(grid)}",
                f"{indent}{p}before_{n}, {p}its_{n} = {p}turn({p}at_{n}, {p}count_{n}, "
                f"{p}total_{n}, {self.evenly})",
                f"{indent}if {p}its_{n}:",
                f"{indent}    {call(f'{p}before_{n}')}",
                f"{indent}else:",
                f"{indent}    {p}at_{n + 1} = {p}at_{n} - {p}before_{n}",
                f"{indent}    {p}total_{n + 1} = {p}total_{n} - {p}count_{n}",
            ]
            indent += "    "
        signature = ",\n    ".join([*filter(None, groups), f"{self.evenly}: {tl}.constexpr"])
        names = ", ".join(f'"{name}"' for name in unspecialized)
        body = "\n".join(f"    {line}" for line in lines)
        route = _ROUTE.format(p=p, tl=tl, triton=self._triton)
        return (
            f"{route}\n\n@{self._triton}.jit(do_not_specialize=[{names}])\n"
            f"def {self.name}(\n    {signature},\n):\n{body}\n"
        )

    def _call(
        self, kernel: _Kernel, parameters: Sequence[Parameter], grid: Sequence[str], at: str
    ) -> str:
        x, y, _ = grid
        place = f"{self._prefix}place({at}, {x}, {y}), ({', '.join(grid)})"
        arguments = [place] if kernel.key in self._needs_ids else []
        arguments += [parameter.fused for parameter in parameters]
        return f"{self._names[kernel.key]}({', '.join(arguments)})"


def _short_type(argument: ast.arg) -> str:
    """Return the annotated Triton type of a parameter in short form; empty if it has none."""
    node = argument.annotation
    if isinstance(node, ast.Constant) and _SHORT_TYPE.fullmatch(str(node.value)):
        return str(node.value)
    match = _TYPE.fullmatch(ast.unparse(node).rpartition(".")[2]) if node else None
    return f"{_SHORT[match[1]]}{match[2]}" if match else ""


def _is_bare_module(reference: Reference, target: Target) -> bool:
    """Whether a module is used as a value, so that its used members are unknown."""
    module = target.text.startswith("import ") if target.file is None else not target.name
    return module and not reference.attributes[target.used :]


def _id_word(reference: Reference, target: Target) -> str:
    """Return ``program_id`` or ``num_programs`` if a reference is that of Triton; else empty."""
    full = ".".join([target.dotted, *reference.attributes[target.used :]])
    word = full.rpartition(".")[2]
    return word if full.startswith("triton.language.") and word in _IDS else ""


def _reads_ids_in_assembly(statement: _Statement) -> bool:
    for node in ast.walk(statement.node):
        if isinstance(node, ast.Constant) and _ID_REGISTERS.search(str(node.value)):
            raise KernelSourceError(
                "assembly reads a program id", where=statement.file.where(node.lineno),
                remedy="use tl.program_id",
            )  # fmt: skip
    return False


def _import_line(text: str, bound: str, name: str) -> str:
    """Return an import that binds `name` instead of `bound`."""
    if name == bound:
        return text
    if " as " in text:
        return f"{text.rpartition(' as ')[0]} as {name}"
    return f"{text} as {name}" if "." not in text or text.startswith("from") else (
        f"{text}\nimport {bound} as {name}"
    )  # fmt: skip


def _edited(text: bytes, begin: int, end: int, edits: Sequence[tuple[int, int, str]]) -> str:
    pieces, at = [], begin
    for start, stop, new in sorted(set(edits)):
        if start < begin or stop > end:
            continue
        pieces += [text[at:start], new.encode()]
        at = stop
    return b"".join([*pieces, text[at:end]]).decode()
