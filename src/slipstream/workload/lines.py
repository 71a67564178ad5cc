"""The user's source lines, and those that created each module and the optimizer."""

from __future__ import annotations

import dis
import functools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

from slipstream.workload.packages import import_place

_ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))


@dataclass(frozen=True)
class Line:
    """A line of the user's code.

    Attributes:
        file: path relative to the project's root, with forward slashes; without a root the file
            name.
        function: qualified name of the enclosing function, ``Block.forward``.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


Chain: TypeAlias = tuple[Line, ...]
"""The user's lines in the call stack, outermost first."""


def project_root(path: Path) -> Path:
    """Return the nearest parent folder of a project, whose files count as the user's.

    Args:
        path: the workload's file, from whose `import_place` the search starts.
    """
    folder, _ = import_place(path)
    for above in (folder, *folder.parents):
        if any((above / mark).exists() for mark in _ROOT_MARKS):
            return above
    return folder


class UserLines:
    """Identifies the user's lines; as a context, records those that create modules.

    Attributes:
        root: the project's folder; None for all files except those of Python, torch, slipstream.
        returned: where the user's function returns the parts of a step; empty for scripts.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self.returned: Chain = ()
        self._files: dict[str, str] = {}
        self._made: dict[int, tuple[weakref.ref[Any], Chain]] = {}
        self._watching: list[tuple[type, Callable[..., None], Callable[..., None]]] = []

    def __enter__(self) -> UserLines:
        import torch

        for kind in (torch.nn.Module, torch.optim.Optimizer):
            original, watched = kind.__init__, self._watched(kind.__init__)
            self._watching.append((kind, original, watched))
            kind.__init__ = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        while self._watching:
            kind, original, watched = self._watching.pop()
            # Replacements by the user's code are retained.
            if kind.__init__ is watched:  # type: ignore[misc]
                kind.__init__ = original  # type: ignore[misc]

    def chain(self, frame: FrameType | None) -> Chain:
        """Return the user's lines among `frame` and its callers, outermost first."""
        lines: list[Line] = []
        while frame is not None:
            code = frame.f_code
            file = self._files.get(code.co_filename)
            if file is None:
                file = self._files[code.co_filename] = self.shown(code.co_filename)
            if file:
                lines.append(Line(file, frame.f_lineno, code.co_qualname))
            frame = frame.f_back
        return tuple(reversed(lines))

    def made(self, thing: Any) -> Chain:
        """Return the user's lines that created a module or optimizer; empty if not observed."""
        reference, chain = self._made.get(id(thing), (None, ()))
        return chain if reference is not None and reference() is thing else ()

    def note_return(self, function: Any) -> None:
        """Record where `function` returns; where it begins if it has several return statements."""
        code: CodeType | None = getattr(function, "__code__", None)
        if code is None or not (file := self.shown(code.co_filename)):
            return
        lines = {
            instruction.positions.lineno
            for instruction in dis.get_instructions(code)
            if instruction.opname.startswith("RETURN_")
            and instruction.positions
            and instruction.opname != "RETURN_GENERATOR"
        }
        number = lines.pop() if len(lines) == 1 else None
        self.returned = (Line(file, number or code.co_firstlineno, code.co_qualname),)

    def file_of(self, kind: type) -> str:
        """Return the user's file that defines a class; empty for other files."""
        module = sys.modules.get(kind.__module__)
        path = getattr(module, "__file__", None)
        return self.shown(path) if path else ""

    def shown(self, path: str) -> str:
        """Return the displayed name of a user's file; empty for other files."""
        if path.startswith("<") or not _INSTALLED.isdisjoint(Path(path).parts):
            return ""
        if path.startswith(_libraries()):
            return ""
        if self.root is None:
            return os.path.basename(path)
        full = Path(path).resolve()
        return full.relative_to(self.root).as_posix() if full.is_relative_to(self.root) else ""

    def _watched(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def make(made: Any, *arguments: Any, **named: Any) -> None:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and _makes(frame, made):
                frame = frame.f_back
            chain = self.chain(frame)
            if chain:
                self._made[id(made)] = weakref.ref(made), chain
            original(made, *arguments, **named)

        return make


def _makes(frame: FrameType, made: Any) -> bool:
    """Whether a frame is a constructor of `made`, which calls that of its base class."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is made


@functools.cache
def _libraries() -> tuple[str, ...]:
    import torch

    return (_STANDARD_LIBRARY + os.sep, _PACKAGE + os.sep, os.path.dirname(torch.__file__) + os.sep)
