"""A cache of analyses by the texts they are of: going back to one shows its numbers at once.

It is one session's, on one machine with one set of packages, so that the texts are the whole key.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.live.relined import Moved, moved_lines
from slipstream.live.states import READY, Analysis
from slipstream.live.texts import Texts, unchanged

_MOST = 6


@dataclass(frozen=True)
class _Entry:
    seen: Mapping[str, str]
    read: Mapping[str, str]
    analysis: Analysis


class Cache:
    """The newest few, with the recordings in their folders.

    Args:
        folder: holds a folder for each analysis; those of others are removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def of_texts_now(self) -> tuple[list[str], Analysis] | None:
        """The files that an analysis is of, and the analysis, where they are so now."""
        for digest, entry in self._entries.items():
            if unchanged(entry.seen):
                self._entries.move_to_end(digest)
                return list(entry.seen), entry.analysis
        return None

    def of_code(self, texts: Texts, root: Path) -> tuple[Analysis, Moved] | None:
        """The newest that is done and of the same code as `texts`; and where its lines are now.

        Args:
            root: the folder that lines are named from.
        """
        for entry in reversed(self._entries.values()):
            if entry.analysis.state != READY or entry.read.keys() != texts.read.keys():
                continue
            moved = {path: moved_lines(text, texts.read[path]) for path, text in entry.read.items()}
            if None not in moved.values():
                named = {_named(path, root): lines or {} for path, lines in moved.items()}
                return entry.analysis, named
        return None

    def of_work(self, work: str) -> Analysis | None:
        """The newest whose step runs the same operators, and whose batch model is there."""
        for entry in reversed(self._entries.values()):
            costs = entry.analysis.costs
            if entry.analysis.batch is not None and costs is not None and costs.work == work:
                return entry.analysis
        return None

    def add(self, texts: Texts, analysis: Analysis) -> None:
        """Add `analysis`, which is of `texts`; recordings that nothing here needs are removed."""
        self._entries[analysis.digest] = _Entry(dict(texts.seen), dict(texts.read), analysis)
        self._entries.move_to_end(analysis.digest)
        while len(self._entries) > _MOST:
            self._entries.popitem(last=False)
        graphs = [entry.analysis.graph for entry in self._entries.values()]
        used = {graph.parent for graph in graphs if graph is not None}
        for folder in self._folder.iterdir():
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)


def _named(path: str, root: Path) -> str:
    """A file as lines name it."""
    one = Path(path)
    return one.relative_to(root).as_posix() if one.is_relative_to(root) else path
