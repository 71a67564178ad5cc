"""Several Triton kernels in one: each with programs of its own, as far as it can tell.

Every kernel becomes a function that is told which of its programs it is and how many there are;
``tl.program_id`` and ``tl.num_programs`` are read from that, also in all that it calls. A function
has names of its own, so that only parameters, and what files have at their outermost level, are
named apart. The fused kernel deals its programs out: evenly, so that every kernel has some on a
multiprocessor until all end, or one kernel after the other. A program takes one branch: it needs
the most shared memory and registers of any kernel, not the sum. The user's files are read, never
written or run.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; its form for Triton is
that of combo kernels in `torch._inductor`, which do not deal evenly between unequal grids.
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
    is_constexpr,
    kept_annotations,
    outside_functions,
    references,
)

_IDS = {"program_id": "ids", "num_programs": "programs"}
_TRITON, _LANGUAGE = ("import triton", "triton"), ("import triton.language as tl", "tl")
_MOST_PROGRAMS, _MOST_WARPS = 2**31 - 1, 32
# Registers of assembly that tell a program which it is.
_TYPE = re.compile(r"(u?int|b?float)(\d+)")
_SHORT_TYPE = re.compile(r"(?:i|u|fp|bf)\d+")
_SHORT = {"int": "i", "uint": "u", "float": "fp", "bfloat": "bf"}
_PLACES = re.compile(r"%n?(ctaid|clusterid|cluster_ctaid)|%gridid")
_ROUTE = """
@{triton}.jit
def {p}turn({p}at, {p}count, {p}total, {p}evenly: {tl}.constexpr):
    # How many programs of a kernel with {p}count of {p}total come before the one at {p}at,
    # and whether that is one of its: evenly, where at * count passes a multiple of total.
    if {p}evenly:
        {p}product = {p}at.to({tl}.int64) * {p}count
        {p}before = ({p}product // {p}total).to({tl}.int32)
        {p}rest = {p}product - {p}before.to({tl}.int64) * {p}total
        {p}its = {p}rest + {p}count >= {p}total
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
    """One of a kernel.

    Attributes:
        name: as its kernel has it.
        fused: as the fused kernel has it.
        constexpr: whether it is a constant of the compiled kernel.
        default: as it is written; empty if it has none.
        type: as it is annotated, in Triton's short words (``i64``); empty if it is not.
    """

    name: str
    fused: str
    constexpr: bool
    default: str
    type: str


@dataclass(frozen=True)
class ProgramPart:
    """One of the kernels.

    Attributes:
        launch: what was asked for.
        name: of the kernel.
        parameters: in order.
        source: of a module with this kernel as it is alone.
        alone: its name there.
        atomics: whether it adds atomically, in whatever order its programs run.
        tuned: decorators left out, whose values are arguments now: ``autotune``, ``heuristics``.
        num_warps, num_stages: it is launched with.
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
        """Of its grid."""
        return math.prod(self.launch.grid)

    @property
    def cells(self) -> dict[str, str | int]:
        """What a table says of it."""
        return {"programs": self.programs, "warps": self.num_warps}

    def to_json(self) -> dict[str, str | int]:
        """The same for a program."""
        return {
            "kernel": self.name, "programs": self.programs, "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }  # fmt: skip


@dataclass(frozen=True)
class FusedPrograms:
    """What was made.

    Attributes:
        name: of the kernel.
        source: a module with it and all it needs.
        parts: the kernels in it.
        evenly: name of the last parameter: True deals programs out evenly, False in order.
        files: that were read.
        shared_bytes: to launch it with: none, Triton's launcher knows what it needs.
    """

    name: str
    source: str
    parts: tuple[ProgramPart, ...]
    evenly: str
    files: tuple[Path, ...]
    shared_bytes: ClassVar[int] = 0

    @property
    def num_warps(self) -> int:
        """To launch it with: the most of any of its kernels."""
        return max(part.num_warps for part in self.parts)

    @property
    def num_stages(self) -> int:
        """As `num_warps`."""
        return max(part.num_stages for part in self.parts)

    @property
    def threads(self) -> int:
        """Of a program."""
        return 32 * self.num_warps

    @property
    def notes(self) -> list[str]:
        """What has become of decorators."""
        return [
            f"{part.name}: what @{' and @'.join(part.tuned)} chose is an argument now"
            for part in self.parts if part.tuned
        ]  # fmt: skip

    @property
    def launch_rule(self) -> str:
        """How it is to be launched, in a sentence."""
        return _launch_rule(self.name, [part.programs for part in self.parts], self.evenly,
                            self.num_warps, self.num_stages)  # fmt: skip


def _launch_rule(
    name: str, programs: Sequence[int], evenly: str, num_warps: int, num_stages: int
) -> str:
    return (
        f"{name}[({' + '.join(map(str, programs))},)](arguments of each kernel in order, then each "
        f"kernel's own grid as x, y, z, then {evenly}=True or False, num_warps={num_warps}, "
        f"num_stages={num_stages})"
    )


@dataclass(frozen=True, eq=False)
class _Statement:
    """One of a file's outermost level, with all it refers to."""

    file: PythonFile
    node: ast.stmt
    targets: tuple[tuple[Reference, Target], ...]


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A kernel where it stands."""

    launch: Launch
    file: PythonFile
    node: ast.FunctionDef
    kept: tuple[str, ...]
    tuned: tuple[str, ...]

    @property
    def key(self) -> _Key:
        return Target(self.file, self.node.name).key

    @property
    def arguments(self) -> list[ast.arg]:
        return [*self.node.args.posonlyargs, *self.node.args.args]

    @property
    def defaults(self) -> list[str]:
        given = [self.file.segment(one) for one in self.node.args.defaults]
        return [""] * (len(self.arguments) - len(given)) + given


_Key = tuple[str, str]


def fuse(launches: Sequence[Launch], name: str = "") -> FusedPrograms:
    """One kernel of all of `launches`.

    Args:
        name: of the fused kernel; by default all names joined.

    Raises:
        KernelSourceError: a file cannot be read, or a kernel does what a fused one cannot.
        UnknownNameError: a file has no such kernel.
        UsageError: a launch is none that a GPU can do.
    """
    if keyword.iskeyword(name):
        raise UsageError(f"'{name}' is no name of a kernel: it is a word of Python's")
    project = Project()
    kernels = [_find_kernel(project, one) for one in launches]
    programs = [math.prod(one.grid) for one in launches]
    if sum(programs) > _MOST_PROGRAMS:
        raise UsageError(
            f"the grids have {sum(programs):,} programs together, more than {_MOST_PROGRAMS:,}",
            remedy="smaller grids: k:grid=64x2",
        )
    warps = [_setting(one, "num_warps", 4) for one in kernels]
    stages = [_setting(one, "num_stages", 3) for one in kernels]
    writer = _Writer(project, kernels, name or "_".join(one.launch.kernel for one in kernels))
    parameters = writer.parameters()
    rule = _launch_rule(writer.name, programs, writer.evenly, max(warps), max(stages))
    names = ", ".join(f"{one.launch.path.name}:{one.node.name}" for one in kernels)
    head = f"# Kernels side by side, by slipstream hfuse: {' '.join(names.split())}.\n# {rule}\n"
    source = "\n".join([head, writer.body(), writer.fused(parameters)])
    parts = []
    for kernel, some, num_warps, num_stages in zip(kernels, parameters, warps, stages, strict=True):
        alone = _Writer(project, [kernel], "", native=True)
        name = alone.named(kernel)
        atomics = any("atomic_" in ast.unparse(one.node) for one in alone.order)
        parts.append(ProgramPart(kernel.launch, kernel.node.name, tuple(some), alone.body(), name,
                          atomics, kernel.tuned, num_warps, num_stages))  # fmt: skip
    return FusedPrograms(writer.name, source, tuple(parts), writer.evenly, project.paths)


def _setting(kernel: _Kernel, name: str, default: int) -> int:
    text = kernel.launch.values.get(name, str(default))
    if name in {one.arg for one in kernel.arguments}:
        return default
    number = int(text) if text.isdigit() else 0
    if not number or (name == "num_warps" and (number > _MOST_WARPS or number & (number - 1))):
        raise UsageError(
            f"{name}={text} of {kernel.launch.kernel} is none",
            remedy="for example num_warps=4: 1, 2, 4, 8, 16 or 32; num_stages=3",
        )
    return number


def _find_kernel(project: Project, launch: Launch) -> _Kernel:
    file, name = project.file(launch.path), launch.kernel
    if name not in file.bound:
        known = [
            one for one, (node, *_) in file.bound.items()
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(called(each)).endswith("jit") for each in node.decorator_list)
        ]  # fmt: skip
        raise UnknownNameError(f"kernel of {file.path.name}", name, known)
    node = file.bound[name][0]
    if len(file.bound[name]) > 1:
        project.target(file, name, (), node.lineno)
    if not isinstance(node, ast.FunctionDef):
        raise KernelSourceError(f"{name} is no function", where=file.where(node.lineno))
    kept: list[str] = []
    tuned: list[str] = []
    for one in node.decorator_list:
        dotted = _dotted(project, file, called(one))
        word = dotted.rpartition(".")[2] if dotted.startswith("triton.") else ""
        if word == "jit":
            kept += _kept_settings(file, one)
        elif word not in ("autotune", "heuristics"):
            raise KernelSourceError(
                f"{name} has a decorator that is none of Triton's: @{file.segment(called(one))}",
                where=file.where(one.lineno), remedy="name the kernel it wraps",
            )  # fmt: skip
        elif "pre_hook" in file.segment(one):
            raise KernelSourceError(
                f"{name} has a hook that runs before it, which a fused kernel has not",
                where=file.where(one.lineno), remedy="run it yourself, without pre_hook",
            )  # fmt: skip
        tuned.append(word)
    if "jit" not in tuned:
        raise KernelSourceError(
            f"{name} is no kernel: it has no @triton.jit", where=file.where(node.lineno)
        )
    if node.args.vararg or node.args.kwarg or node.args.kwonlyargs:
        raise KernelSourceError(
            f"{name} takes *arguments, **arguments, or some by keyword only",
            where=file.where(node.lineno), remedy="name them all",
        )  # fmt: skip
    return _Kernel(launch, file, node, tuple(kept), tuple(one for one in tuned if one != "jit"))


def called(node: ast.expr) -> ast.expr:
    """A decorator without its arguments."""
    return node.func if isinstance(node, ast.Call) else node


def _dotted(project: Project, file: PythonFile, node: ast.expr) -> str:
    """Under which name something that is imported is known to all."""
    root, _, rest = ast.unparse(node).partition(".")
    target = project.target(file, root, rest.split(".") if rest else [], node.lineno)
    return ".".join(filter(None, [target.dotted, rest])) if target else ""


def _kept_settings(file: PythonFile, decorator: ast.expr) -> Iterator[str]:
    """Parameters of a kernel that its ``jit`` shall not specialize for."""
    for setting in decorator.keywords if isinstance(decorator, ast.Call) else ():
        if setting.arg in ("repr", "launch_metadata", "noinline"):
            continue
        try:
            names = ast.literal_eval(setting.value)
        except ValueError:
            names = None
        if setting.arg != "do_not_specialize" or not isinstance(names, list | tuple):
            raise KernelSourceError(
                f"jit({setting.arg}=...) is not carried over",
                where=file.where(setting.value.lineno),
            )
        yield from map(str, names)


class _Writer:
    """Text of a module with kernels and all they need.

    Args:
        kernels: in order.
        name: of the fused kernel; empty where there is none.
        native: kernels stay kernels, with program ids of their own.
    """

    def __init__(
        self, project: Project, kernels: Sequence[_Kernel], name: str, *, native: bool = False
    ) -> None:
        self._project, self._kernels, self._native = project, kernels, native
        self._kernel_nodes: dict[ast.stmt, _Kernel] = {one.node: one for one in kernels}
        self.order: list[_Statement] = []
        self._imports: set[_Key] = {_TRITON, _LANGUAGE}
        self._written: dict[_Key, set[str]] = {}
        self._statements: dict[ast.stmt, _Statement | None] = {}
        for one in kernels:
            self._written.setdefault(one.key, set()).add(one.node.name)
            self._add(one.file, one.node)
        for key in (_TRITON, _LANGUAGE):
            self._written.setdefault(key, set()).add(key[1])
        self._p = "slip_"
        while any(word.startswith(self._p) for word in project.words):
            self._p += "_"
        self._taken: set[str] = set()
        self.name = self._free(name) if name else ""
        self._names = {
            key: self._free(key[1], fresh=written != {key[1]})
            for key, written in self._written.items()
        }
        self.evenly = self._free("EVENLY")
        self._placed = self._needing_places()

    def _add(self, file: PythonFile, node: ast.stmt) -> None:
        """Take a statement, after all that it refers to."""
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
                    f"the module '{reference.name}' as a value: what is asked of it is not known",
                    where=file.where(reference.nodes[0].lineno), remedy="name what you need of it",
                )  # fmt: skip
            targets.append((reference, target))
            written = ast.unparse(reference.nodes[target.used])
            if target.file is None:
                self._imports.add(target.key)
                written = target.name
            elif target.file.bound[target.name][0] is not node:
                self._add(target.file, target.file.bound[target.name][0])
            self._written.setdefault(target.key, set()).add(written)
        for name in (name for name, some in file.bound.items() if node in some):
            self._written.setdefault(Target(file, name).key, set()).add(name)
        statement = _Statement(file, node, tuple(targets))
        self._statements[node] = statement
        self.order.append(statement)

    def _is_decorator(self, node: ast.stmt, reference: Reference) -> bool:
        """Whether it is in a kernel's decorator, which is left out."""
        if node not in self._kernel_nodes or not isinstance(node, ast.FunctionDef):
            return False
        return any(reference.nodes[0] in ast.walk(one) for one in node.decorator_list)

    def _free(self, name: str, *, fresh: bool = False) -> str:
        """`name`, or if it is taken, or another is wanted, one like it that no file uses."""
        if fresh or name in self._taken or hasattr(builtins, name):
            words = self._project.words | self._taken
            name = next(new for n in itertools.count(1) if (new := f"{name}_{n}") not in words)
        self._taken.add(name)
        return name

    def _needing_places(self) -> frozenset[_Key]:
        """Functions that ask which program they are, themselves or through others."""
        if self._native:
            return frozenset()
        placed: set[_Key] = set()
        while True:
            before = len(placed)
            for statement in self.order:
                if any(
                    _id_word(reference, target) or target.key in placed
                    for reference, target in statement.targets
                ) or _asked_in_assembly(statement):  # fmt: skip
                    node = statement.node
                    if not isinstance(node, ast.FunctionDef):
                        raise KernelSourceError(
                            "a program id outside of a function",
                            where=statement.file.where(node.lineno),
                        )
                    placed.add(Target(statement.file, node.name).key)
            if len(placed) == before:
                return frozenset(placed)

    def body(self) -> str:
        """All but the fused kernel."""
        imports = [_import_line(*key, self._names[key]) for key in self._imports]
        rest = [self._text(one) for one in self.order]
        return "\n\n\n".join(["\n".join(sorted(imports)), *rest]) + "\n"

    def _text(self, statement: _Statement) -> str:
        """A statement with what it uses under its new names."""
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
        for each in outside_functions(node):
            if isinstance(each, ast.alias):
                edits += self._alias_edits(file, each)
        return head + _edited(file.text, begin, end, edits)

    def named(self, kernel: _Kernel) -> str:
        """A kernel's name in the text."""
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
        placed = target.key in self._placed
        if (word or placed) and reference.call is None:
            raise KernelSourceError(
                f"'{ast.unparse(reference.nodes[-1])}', which asks which program it is, as a value",
                where=where, remedy="call it by its name",
            )  # fmt: skip
        if word and reference.call is not None:
            given = [*reference.call.args, *(one.value for one in reference.call.keywords)]
            if len(given) != 1:
                raise KernelSourceError(f"{word} has one argument", where=where)
            start, stop = file.span(reference.call)
            first, last = file.span(given[0])
            yield start, first, f"{self._p}{_IDS[word]}["
            yield last, stop, "]"
            return
        new = self._names[target.key]
        if new == ast.unparse(node) and not placed:
            return
        start, stop = file.span(node)
        # Before Python 3.12, what is in an f-string is not where its node says.
        if re.sub(rb"\s", b"", file.text[start:stop]).decode() != ast.unparse(node):
            raise KernelSourceError(f"'{ast.unparse(node)}' within an f-string", where=where)
        yield start, stop, new
        if placed and reference.call is not None:
            behind = file.text.index(b"(", stop) + 1
            some = reference.call.args or reference.call.keywords
            yield behind, behind, f"{self._p}ids, {self._p}programs" + (", " if some else "")

    def _name_edits(
        self, file: PythonFile, node: ast.FunctionDef | ast.ClassDef
    ) -> Iterator[tuple[int, int, str]]:
        """Of a function or class: its name, and what a function is told."""
        key = Target(file, node.name).key
        word = re.compile(rb"(?:def|class)\s+(\w+)\s*(?:\(\s*)?")
        match = word.match(file.text, file.span(node)[0])
        assert match is not None, "the parser takes nothing else"
        if self._names[key] != node.name:
            yield *match.span(1), self._names[key]
        if key in self._placed:
            some = file.text[match.end() : match.end() + 1] != b")"
            told = f"{self._p}ids, {self._p}programs" + (", " if some else "")
            yield match.end(), match.end(), told

    def _signature_edits(
        self, file: PythonFile, node: ast.FunctionDef
    ) -> Iterator[tuple[int, int, str]]:
        """Of a function's annotations those that are not of constants."""
        arguments = [one for one in ast.walk(node.args) if isinstance(one, ast.arg)]
        kept = kept_annotations(node)
        for one in arguments:
            if one.annotation is not None and one.annotation not in kept:
                start = file.span(one)[0] + len(one.arg.encode())
                yield start, file.span(one.annotation)[1], ""
        if node.returns is not None:
            start, stop = file.span(node.returns)
            yield file.text.rindex(b"->", 0, start), stop, ""

    def _alias_edits(self, file: PythonFile, alias: ast.alias) -> Iterator[tuple[int, int, str]]:
        """Of an import within a statement that is carried over."""
        key = Target(file, bound_by(alias)).key
        if self._names.get(key, bound_by(alias)) != bound_by(alias):
            yield *file.span(alias), f"{alias.name} as {self._names[key]}"

    def parameters(self) -> list[list[Parameter]]:
        """Of every kernel, named for the fused one."""
        names = [one.node.name for one in self._kernels]
        parameters = []
        for number, kernel in enumerate(self._kernels, 1):
            prefix = kernel.node.name if names.count(kernel.node.name) == 1 else (
                f"{kernel.node.name}_{number}"
            )  # fmt: skip
            parameters.append([
                Parameter(one.arg, self._free(f"{prefix}_{one.arg}"), is_constexpr(one), default,
                          _short_type(one))
                for one, default in zip(kernel.arguments, kernel.defaults, strict=True)
            ])  # fmt: skip
        return parameters

    def fused(self, parameters: Sequence[Sequence[Parameter]]) -> str:
        """The kernel that deals its programs out, with what it needs for that."""
        p, tl = self._p, self._tl
        listed, untouched, grids = [], [], []
        for number, (kernel, some) in enumerate(zip(self._kernels, parameters, strict=True), 1):
            notes = [
                f": {tl}.constexpr" if one.constexpr else f': "{one.type}"' if one.type else ""
                for one in some
            ]
            listed.append(", ".join(one.fused + n for one, n in zip(some, notes, strict=True)))
            fused = {one.name: one.fused for one in some} | {
                str(place): one.fused for place, one in enumerate(some)
            }
            untouched += [fused[one] for one in kernel.kept if one in fused]
            grids.append([self._free(f"grid_{number}_{axis}") for axis in "xyz"])
        listed += [", ".join(grid) for grid in grids]
        untouched += [name for grid in grids for name in grid]
        lines = [f"{p}at_1 = {tl}.program_id(0)"]
        lines.append(f"{p}total_1 = " + " + ".join(" * ".join(grid) for grid in grids))
        indent = ""
        for number, (kernel, some, grid) in enumerate(
            zip(self._kernels, parameters, grids, strict=True), 1
        ):
            last, n = number == len(self._kernels), number
            call = functools.partial(self._call, kernel, some, grid)
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
        signature = ",\n    ".join([*filter(None, listed), f"{self.evenly}: {tl}.constexpr"])
        names = ", ".join(f'"{name}"' for name in untouched)
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
        place = f"{self._p}place({at}, {x}, {y}), ({', '.join(grid)})"
        given = [place] if kernel.key in self._placed else []
        return (
            f"{self._names[kernel.key]}({', '.join([*given, *(one.fused for one in parameters)])})"
        )


def _short_type(argument: ast.arg) -> str:
    """Of a parameter that is annotated with a type of Triton's; else empty."""
    node = argument.annotation
    if isinstance(node, ast.Constant) and _SHORT_TYPE.fullmatch(str(node.value)):
        return str(node.value)
    match = _TYPE.fullmatch(ast.unparse(node).rpartition(".")[2]) if node else None
    return f"{_SHORT[match[1]]}{match[2]}" if match else ""


def _is_bare_module(reference: Reference, target: Target) -> bool:
    """Whether a module is passed about, so that it is not seen what is asked of it."""
    module = target.text.startswith("import ") if target.file is None else not target.name
    return module and not reference.attributes[target.used :]


def _id_word(reference: Reference, target: Target) -> str:
    """``program_id`` or ``num_programs`` of Triton, where a reference is that; else empty."""
    full = ".".join([target.dotted, *reference.attributes[target.used :]])
    word = full.rpartition(".")[2]
    return word if full.startswith("triton.language.") and word in _IDS else ""


def _asked_in_assembly(statement: _Statement) -> bool:
    for node in ast.walk(statement.node):
        if isinstance(node, ast.Constant) and _PLACES.search(str(node.value)):
            raise KernelSourceError(
                "assembly that asks which program it is", where=statement.file.where(node.lineno),
                remedy="tl.program_id asks so that it can be answered",
            )  # fmt: skip
    return False


def _import_line(text: str, bound: str, name: str) -> str:
    """An import that binds `name` in place of `bound`."""
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
