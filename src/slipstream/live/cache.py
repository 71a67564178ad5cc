"""A cache of analyses by source text, so that reverting an edit shows its costs immediately.

It belongs to one session, with one machine and one set of packages, so the texts are the key.
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

_MAX_ENTRIES = 6


@dataclass(frozen=True)
class _Entry:
    seen: Mapping[str, str]
    read: Mapping[str, str]
    analysis: Analysis


class Cache:
    """The most recent analyses and their recordings.

    Args:
        folder: has one folder per analysis; folders of evicted analyses are deleted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def of_texts_now(self) -> tuple[list[str], Analysis] | None:
        """Return the analysis of the current texts and its files, or None if not cached."""
        for digest, entry in self._entries.items():
            if unchanged(entry.seen):
                self._entries.move_to_end(digest)
                return list(entry.seen), entry.analysis
        return None

    def of_code(self, texts: Texts, root: Path) -> tuple[Analysis, Moved] | None:
        """Return the newest finished analysis of the same code as `texts`, and its moved lines.

        Args:
            root: folder that file names in lines are relative to.
        """
        for entry in reversed(self._entries.values()):
            if entry.analysis.state != READY or entry.read.keys() != texts.read.keys():
                continue
            moved = {path: moved_lines(text, texts.read[path]) for path, text in entry.read.items()}
            if None not in moved.values():
                return entry.analysis, {
                    _relative(path, root): lines or {} for path, lines in moved.items()
                }
        return None

    def of_work(self, work: str) -> Analysis | None:
        """Return the newest analysis with a batch model whose step runs the same operators."""
        for entry in reversed(self._entries.values()):
            costs = entry.analysis.costs
            if entry.analysis.batch is not None and costs is not None and costs.work == work:
                return entry.analysis
        return None

    def add(self, texts: Texts, analysis: Analysis) -> None:
        """Add the `analysis` of `texts`, and delete recordings that no entry uses."""
        self._entries[analysis.digest] = _Entry(dict(texts.seen), dict(texts.read), analysis)
        self._entries.move_to_end(analysis.digest)
        while len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)
        graphs = [entry.analysis.graph for entry in self._entries.values()]
        used = {graph.parent for graph in graphs if graph is not None}
        for folder in self._folder.iterdir():
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)


def _relative(name: str, root: Path) -> str:
    path = Path(name)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else name
