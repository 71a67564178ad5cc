"""Finished analyses that are kept: going back to one of these texts shows its numbers at once."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.live._relined import Moved, moved_lines
from slipstream.live._texts import Texts, says_still
from slipstream.live.states import READY, Analysis

_MOST = 6


@dataclass(frozen=True)
class _One:
    seen: Mapping[str, str]
    read: Mapping[str, str]
    analysis: Analysis


class Kept:
    """The newest few, with the recordings in their folders.

    Args:
        folder: holds a folder for each analysis; those of others are removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: OrderedDict[str, _One] = OrderedDict()

    def of_now(self) -> tuple[list[str], Analysis] | None:
        """The files that an analysis is of, and the analysis, where they are so now."""
        for digest, one in self._found.items():
            if says_still(one.seen):
                self._found.move_to_end(digest)
                return list(one.seen), one.analysis
        return None

    def of_code(self, texts: Texts, root: Path) -> tuple[Analysis, Moved] | None:
        """The newest that is done and of the same code as `texts`; and where its lines are now.

        Args:
            root: the folder that lines are named from.
        """
        for one in reversed(self._found.values()):
            if one.analysis.state != READY or one.read.keys() != texts.read.keys():
                continue
            moved = {path: moved_lines(text, texts.read[path]) for path, text in one.read.items()}
            if None not in moved.values():
                named = {_named(path, root): lines or {} for path, lines in moved.items()}
                return one.analysis, named
        return None

    def of_work(self, work: str) -> Analysis | None:
        """The newest whose step runs the same operators, and whose batch model is there."""
        for one in reversed(self._found.values()):
            costs = one.analysis.costs
            if one.analysis.batch is not None and costs is not None and costs.work == work:
                return one.analysis
        return None

    def keep(self, texts: Texts, analysis: Analysis) -> None:
        """Keep `analysis`, which is of `texts`; what was overtaken goes, too."""
        self._found[analysis.digest] = _One(dict(texts.seen), dict(texts.read), analysis)
        self._found.move_to_end(analysis.digest)
        while len(self._found) > _MOST:
            self._found.popitem(last=False)
        graphs = [one.analysis.graph for one in self._found.values()]
        used = {graph.parent for graph in graphs if graph is not None}
        for folder in self._folder.iterdir():
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)


def _named(path: str, root: Path) -> str:
    """A file as lines name it."""
    one = Path(path)
    return one.relative_to(root).as_posix() if one.is_relative_to(root) else path
