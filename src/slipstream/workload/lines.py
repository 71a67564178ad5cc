"""Which lines are the user's, and which of them made each module and the optimizer."""

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

_ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))


@dataclass(frozen=True)
class Line:
    """A line of the user's, and the function it is in.

    Attributes:
        file: from the project's root, with forward slashes; without a root the file's name alone.
        function: its qualified name, ``Block.forward``.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


Chain: TypeAlias = tuple[Line, ...]
"""The user's lines behind a call, from the outermost to the one that made it."""


def project_root(path: Path) -> Path:
    """The folder whose files count as the user's: the nearest that is marked as a project's.

    Args:
        path: the workload's file; its own folder where none above is marked.
    """
    folder = path.resolve().parent
    for above in (folder, *folder.parents):
        if any((above / mark).exists() for mark in _ROOT_MARKS):
            return above
    return folder


class UserLines:
    """Tells the user's lines from others; within it, it sees them make modules and optimizers.

    Attributes:
        root: the project's folder, or None: whatever is neither torch's, Python's nor ours counts.
        returned: where the user's function returns the parts of a step, none of a script.
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
            # What the user's code has put in its place stays.
            if kind.__init__ is watched:  # type: ignore[misc]
                kind.__init__ = original  # type: ignore[misc]

    def chain(self, frame: FrameType | None) -> Chain:
        """The user's lines among `frame` and its callers, outermost first."""
        lines: list[Line] = []
        while frame is not None:
            code = frame.f_code
            file = self._files.get(code.co_filename)
            if file is None:
                file = self._files[code.co_filename] = self._shown(code.co_filename)
            if file:
                lines.append(Line(file, frame.f_lineno, code.co_qualname))
            frame = frame.f_back
        return tuple(reversed(lines))

    def made(self, thing: Any) -> Chain:
        """The user's lines that made a module or optimizer; none where nobody saw it."""
        reference, chain = self._made.get(id(thing), (None, ()))
        return chain if reference is not None and reference() is thing else ()

    def note_return(self, function: Any) -> None:
        """Keep where `function` returns, or begins where it does so at several places."""
        code: CodeType | None = getattr(function, "__code__", None)
        if code is None or not (file := self._shown(code.co_filename)):
            return
        lines = {
            one.positions.lineno
            for one in dis.get_instructions(code)
            if one.opname.startswith("RETURN_")
            and one.positions
            and one.opname != "RETURN_GENERATOR"
        }
        number = lines.pop() if len(lines) == 1 else None
        self.returned = (Line(file, number or code.co_firstlineno, code.co_qualname),)

    def file_of(self, kind: type) -> str:
        """The user's file a class is defined in; empty where it is none of theirs."""
        module = sys.modules.get(kind.__module__)
        path = getattr(module, "__file__", None)
        return self._shown(path) if path else ""

    def _shown(self, path: str) -> str:
        """A file of the user's as it is named; empty where it is somebody else's."""
        if path.startswith("<") or not _INSTALLED.isdisjoint(Path(path).parts):
            return ""
        if path.startswith(_libraries()):
            return ""
        if self.root is None:
            return os.path.basename(path)
        whole = Path(path).resolve()
        return whole.relative_to(self.root).as_posix() if whole.is_relative_to(self.root) else ""

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
    """Whether a frame is the constructor of `made` itself, which calls its base class's."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is made


@functools.cache
def _libraries() -> tuple[str, ...]:
    import torch

    return (_STANDARD_LIBRARY + os.sep, _PACKAGE + os.sep, os.path.dirname(torch.__file__) + os.sep)
