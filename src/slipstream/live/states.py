"""One analysis as a value: how far it is, and what is known so far."""

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
"""One after the other; from any of them to the last."""


@dataclass(frozen=True)
class Problem:
    """Why there are no numbers: an error at a line of the user's.

    Attributes:
        path: absolute; empty where no file is to blame.
        line: from 1; 0 where no line is.
        what: one sentence; the code's own words follow in further lines.
        remedy: what to do about it.
    """

    path: str
    line: int
    what: str
    remedy: str

    @classmethod
    def of(cls, error: SlipstreamError, workload: Workload) -> Problem:
        """The error, at its line; at the workload's file where it names none."""
        path, _, line = (error.where or "").rpartition(":")
        if not line.isdecimal() or not path:
            path, line = error.where or "", "0"
        file = Path(path) if path.endswith(".py") else workload.path
        return cls(str(file.resolve()), int(line), error.what, error.remedy or "")


@dataclass(frozen=True)
class Analysis:
    """One analysis, as far as it is.

    Attributes:
        number: counts analyses of this session; the newest is the one that counts.
        digest: of the user's files as they were when it began.
        state: one of `STATES`.
        said: what is being done now, in words.
        costs: line by line; those of the analysis before (`stale`) until its own are there.
        stale: whether `costs` belong to an earlier text of the file.
        advice: from ``ready`` on: ``predictions``, each as ``Prediction.to_json``; ``refused``
            with reasons; ``front`` and ``best`` as names; see `slipstream.verbs.advising.Advice`.
        batch: how time and memory depend on the batch size, measured; see `batch_reason`.
        batch_reason: why there is no `batch`; empty while it is still being measured.
        problem: why it ``failed``.
        graph: the recording, a ``.slipgraph``.
        document: the folder with what the page draws.
        expected: what was predicted for this text before it was there, see `Analyst.expect`.
        after_s: seconds from the save until each state.
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
        """Whether nothing more will come of it."""
        return self.state in (READY, FAILED)
