"""A workload as the editor shows it: the newest analysis, notes and advice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from slipstream.errors import SlipstreamError
from slipstream.live.analysis import Analysis, Analyst
from slipstream.live.costs import Costs
from slipstream.live.editor.notes import History, Notes, make_notes, read_text
from slipstream.live.editor.text import spans
from slipstream.live.edits import Edited, with_technique

# Minimum predicted speed-up of a diagnostic in the editor.
WORTH_IT = 1.02
_MAX_ADVICE = 5


@dataclass(frozen=True)
class Advice:
    """A worthwhile technique with an edit of the file.

    Attributes:
        line: first line that the edit changes, from 0.
        speedup: predicted speed-up, with the 90 % interval `low` to `high`.
        quality: one word for the effect on numerics; empty if unknown.
    """

    technique: str
    line: int
    speedup: float
    low: float
    high: float
    quality: str

    @property
    def said(self) -> str:
        """The technique and its predicted gain, as one sentence."""
        return f"{self.technique} is {self.predicted}"

    @property
    def predicted(self) -> str:
        """The predicted gain as text."""
        text = f"predicted {self.speedup:.2f}x [{self.low:.2f}, {self.high:.2f}]"
        return text + (f"; numerics: {self.quality}" if self.quality else "")


@dataclass(frozen=True)
class View:
    """The current analysis with its notes and advice, as an immutable value.

    Attributes:
        notes: notes by absolute path.
        advised: text of the workload's file that the lines of `advice` refer to.
    """

    analysis: Analysis = field(default_factory=Analysis)
    costs: Costs | None = None
    notes: Mapping[str, Notes] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()
    advised: str = ""


class Watch:
    """Listener to a workload's analyses, which updates `view` in the analyst's threads.

    Args:
        changed: called in one of those threads at every visible change of `view`.

    Attributes:
        path: absolute path of the workload's file.
    """

    def __init__(self, analyst: Analyst, changed: Callable[[], None]) -> None:
        self.analyst = analyst
        self.path = str(analyst.workload.path.resolve())
        self.view = View()
        self._changed = changed
        self._history = History()
        self._texts: dict[str, str] = {}
        self._number = -1
        self._recorded = -1
        self._lock = threading.Lock()
        self._stop_listening = analyst.listen(self._update)

    def close(self) -> None:
        """Stop the analyses."""
        self._stop_listening()
        self.analyst.close()

    def _update(self, analysis: Analysis) -> None:
        with self._lock:
            before = self.view
            if analysis.number != self._number:
                # The analysis uses the files on disk.
                self._number = analysis.number
                paths = {self.path, *before.notes}
                self._texts = {path: read_text(path) for path in paths}
            view = replace(before, analysis=analysis)
            costs = analysis.costs
            if costs is not None and not analysis.stale and costs is not before.costs:
                view = replace(view, costs=costs, notes=self._notes(costs), advice=())
                if analysis.state != "first" and self._recorded != analysis.number:
                    self._recorded = analysis.number
                    self._history.add(self._texts, costs)
            if analysis.advice is not None and analysis.advice is not before.analysis.advice:
                text = self._texts[self.path]
                view = replace(view, advice=self._advice(analysis.advice, text), advised=text)
            self.view = view
        if _shown(view) != _shown(before):
            self._changed()

    def _notes(self, costs: Costs) -> dict[str, Notes]:
        paths = {self.path, *(line.path for line in costs.lines if line.path)}
        for path in paths - self._texts.keys():
            self._texts[path] = read_text(path)
        return {path: make_notes(path, self._texts[path], costs, self._history) for path in paths}

    def _advice(self, advice: Mapping[str, object], text: str) -> tuple[Advice, ...]:
        predictions = advice.get("predictions")
        worthwhile: list[Advice] = []
        rows = predictions if isinstance(predictions, list) else []
        for row in sorted(rows, key=lambda row: -float(row["speedup"])):
            name, speedup = str(row["technique"]), float(row["speedup"])
            if row.get("reason") or speedup < WORTH_IT or len(worthwhile) == _MAX_ADVICE:
                continue
            try:
                edited = with_technique(text, self.analyst.workload, name)
            except SlipstreamError:
                # The place of the edit is ambiguous; the page shows the technique and the reason.
                continue
            low, high = map(float, row["speedup_interval"])
            quality = str(row.get("numerics") or "")
            worthwhile.append(Advice(name, _first_change(edited), speedup, low, high, quality))
        return tuple(worthwhile)


def _first_change(edited: Edited) -> int:
    """Return the first line, from 0, that the edit changes or inserts before."""
    replacements = spans(edited.before, edited.after)
    return edited.before.count("\n", 0, replacements[0].begin) if replacements else 0


def _shown(view: View) -> tuple[object, ...]:
    """Return the visible parts of a view, for comparison."""
    analysis = view.analysis
    return (
        id(view.costs), analysis.stale, analysis.problem, view.advice, analysis.state,
        analysis.said, analysis.number,
    )  # fmt: skip
