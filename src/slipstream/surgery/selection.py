"""Select modules by name: ``only=GLOB`` and ``except=GLOB``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slipstream.errors import WorkloadError
from slipstream.graph import Graph

EVERYTHING = "*"


@dataclass(frozen=True)
class ModuleSelection:
    """Modules by qualified name, as in ``model.named_modules()``.

    Attributes:
        only: pattern of included names.
        except_: pattern of names excluded from these; empty for none.
    """

    only: str = EVERYTHING
    except_: str = ""

    @property
    def everything(self) -> bool:
        """Whether all modules are included."""
        return self.only == EVERYTHING and not self.except_

    def __contains__(self, name: str) -> bool:
        # The model itself has no name, which an empty pattern would match.
        excluded = bool(self.except_) and fnmatchcase(name, self.except_)
        return fnmatchcase(name, self.only) and not excluded

    def no_match_reason(self, names: Iterable[str]) -> str | None:
        """Return why no module in `names` is selected, with similar names; None if one is.

        A pattern, also an excluding one, that matches no name is treated as a mistake.
        """
        unique = list(dict.fromkeys(names))
        for setting, pattern in (("only", self.only), ("except", self.except_)):
            if not pattern or any(fnmatchcase(name, pattern) for name in unique):
                continue
            near = difflib.get_close_matches(pattern, unique, n=3, cutoff=0.3) or unique[:3]
            listed = ", ".join(near) or "none"
            return f"{setting}={pattern} matches none of its modules; near: {listed}"
        if not any(name in self for name in unique):
            return f"except={self.except_} leaves none of its modules"
        return None

    def require_match(self, technique: str, names: Iterable[str]) -> None:
        """Raise a `WorkloadError` if none of the names is selected."""
        if not self.everything and (reason := self.no_match_reason(names)) is not None:
            raise WorkloadError(
                f"{technique}: {reason}",
                remedy="pass only=GLOB or except=GLOB with names of modules",
            )


def module_of(graph: Graph, task: int) -> str:
    """Return the qualified name of the module that a task ran in; empty for the model itself."""
    return graph.task(task).module.partition(".")[2]
