"""The state of an analysis, as an immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.live.costs import Costs
from slipstream.verbs.batch.model import BatchModel
from slipstream.workload import Workload

RECORDING, FIRST, RECORDED, READY, FAILED = STATES = (
    "recording",
    "first",
    "recorded",
    "ready",
    "failed",
)
"""In order; any state may be followed by the last."""


@dataclass(frozen=True)
class Problem:
    """The error of a failed analysis, at a line of the user's code.

    Attributes:
        path: absolute path of the file; empty if unknown.
        line: line number from 1; 0 if unknown.
        what: one sentence, followed by the message of the user's code on further lines.
        remedy: how to fix it; may be empty.
    """

    path: str
    line: int
    what: str
    remedy: str

    @classmethod
    def of(cls, error: SlipstreamError, workload: Workload) -> Problem:
        """Convert an error; its file defaults to that of the workload."""
        path, _, line = (error.where or "").rpartition(":")
        if not line.isdecimal() or not path:
            path, line = error.where or "", "0"
        file = Path(path) if path.endswith(".py") else workload.path
        return cls(str(file.resolve()), int(line), error.what, error.remedy or "")


@dataclass(frozen=True)
class Analysis:
    """One analysis, possibly unfinished.

    Attributes:
        number: number of the analysis in this session; the highest is the newest.
        digest: digest of the user's files when it started.
        state: one of `STATES`.
        said: description of the current activity.
        costs: costs per line; those of the previous analysis while `stale`.
        stale: whether `costs` belong to an earlier text of the file.
        advice: from state ``ready`` on, the result of `slipstream.live.work.draw`, with
            ``predictions`` as in ``Prediction.to_json``.
        batch: measured time and memory by batch size; None if not (yet) measured.
        batch_reason: why `batch` is None; empty while it is being measured.
        problem: the error in state ``failed``.
        graph: path of the recording, a ``.slipgraph``.
        document: folder with the page's document.
        expected: prediction for this text from before it was saved, see `Analyst.expect`.
        after_s: time from the save to each state, in seconds.
    """

    number: int = 0
    digest: str = ""
    state: str = RECORDING
    said: str = ""
    costs: Costs | None = None
    stale: bool = False
    advice: Mapping[str, Any] | None = None
    batch: BatchModel | None = None
    batch_reason: str = ""
    problem: Problem | None = None
    graph: Path | None = None
    document: Path | None = None
    expected: Mapping[str, Any] | None = None
    after_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the analysis is finished."""
        return self.state in (READY, FAILED)
