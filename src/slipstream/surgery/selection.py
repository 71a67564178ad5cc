"""Which modules a technique changes: ``only=GLOB`` and ``except=GLOB``, read in one way."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slipstream.errors import WorkloadError
from slipstream.graph import Graph

EVERYTHING = "*"


@dataclass(frozen=True)
class Selection:
    """Modules by qualified name, as ``model.named_modules()`` has them.

    Attributes:
        only: pattern of the names that are taken.
        except_: pattern of the names among them that are not; empty for none.
    """

    only: str = EVERYTHING
    except_: str = ""

    @property
    def everything(self) -> bool:
        """Whether no module is left out."""
        return self.only == EVERYTHING and not self.except_

    def __contains__(self, name: str) -> bool:
        # The model itself has no name, which an empty pattern would match.
        left_out = bool(self.except_) and fnmatchcase(name, self.except_)
        return fnmatchcase(name, self.only) and not left_out

    def why_none(self, names: Iterable[str]) -> str | None:
        """None, or why these names of modules leave nothing to change, with the nearest of them.

        A pattern that matches none of them is taken for a mistake, also of what to leave out.
        """
        known = list(dict.fromkeys(names))
        for setting, pattern in (("only", self.only), ("except", self.except_)):
            if not pattern or any(fnmatchcase(name, pattern) for name in known):
                continue
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
            return f"{setting}={pattern} is none of its modules; near: {', '.join(near) or 'none'}"
        if not any(name in self for name in known):
            return f"except={self.except_} leaves none of its modules"
        return None

    def need_some(self, technique: str, names: Iterable[str]) -> None:
        """Raise a `WorkloadError` where these names leave nothing to change."""
        if not self.everything and (reason := self.why_none(names)) is not None:
            raise WorkloadError(f"{technique}: {reason}", remedy="only=GLOB, except=GLOB by name")


def module_of(graph: Graph, task: int) -> str:
    """The qualified name of the module that a task ran in; empty for the model itself."""
    return graph.task(task).module.partition(".")[2]
