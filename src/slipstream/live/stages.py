"""The stages of an analysis: record, draw, measure batch sizes, simulate techniques."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.child import Child, Message
from slipstream.errors import SlipstreamError
from slipstream.live.costs import Costs
from slipstream.live.queue import WORKER_TIMEOUT_S, Kind, Queue
from slipstream.live.relined import Moved
from slipstream.live.states import FIRST, READY, RECORDED, Analysis
from slipstream.verbs.batch.search import batch_model
from slipstream.verbs.children import workload_child
from slipstream.workload import Workload
from slipstream.workload.lines import project_root

_FIRST_FILE, _FULL_FILE = "first.slipgraph", "run.slipgraph"
_DRAW = "slipstream.live.work:draw"


@dataclass(frozen=True)
class AnalysisSettings:
    """Settings of every analysis; see `slipstream.live.Analyst`."""

    workload: Workload
    threads: int
    steps: int
    timeout_s: float
    techniques: tuple[str, ...] | None
    batches: bool
    batch_budget_s: float
    store: str | None


class Stages:
    """The stages of one analysis, which are called in order, as jobs of one kind.

    Args:
        queue: its worker process loads the recording and writes the document.
        folder: folder for the recordings.
        update: called with changed fields of the `Analysis`.
        add_files: called with the user's files that were run.
        latest: returns the analysis so far.
    """

    def __init__(
        self,
        settings: AnalysisSettings,
        queue: Queue,
        folder: Path,
        *,
        update: Callable[..., None],
        add_files: Callable[[list[str]], None],
        latest: Callable[[], Analysis],
    ) -> None:
        self._settings, self._queue, self._folder = settings, queue, folder
        self._update, self._add_files, self._latest = update, add_files, latest

    def record(self, same_work: Callable[[str], Analysis | None]) -> None:
        """Record one step, and then the whole recording.

        Args:
            same_work: returns an earlier analysis with a batch model of a step with this work.

        Raises:
            SlipstreamError: the user's code fails.
        """
        settings, workload = self._settings, self._parsed()
        self._folder.mkdir()
        first, full = self._folder / _FIRST_FILE, self._folder / _FULL_FILE

        def publish(state: str, recorded: Mapping[str, Any], **more: Any) -> None:
            self._add_files(recorded["files"])
            costs = Costs.of_json(recorded["costs"])
            earlier = same_work(costs.work)
            if earlier is not None:
                more |= {"batch": earlier.batch, "batch_reason": earlier.batch_reason}
            self._update(state=state, costs=costs, stale=False, **more)

        def receive(message: Message) -> None:
            if "costs" in message:
                publish(FIRST, message)
            elif "first" in message:
                self._draw(first, FIRST)
            elif message.get("say"):
                self._update(said=str(message["say"]))

        with workload_child(workload, settings.threads) as (child, keep_in):
            recorded = child.call(
                "slipstream.live.work:record",
                timeout_s=settings.timeout_s,
                on_message=receive,
                workload=workload.to_json(),
                keep_in=str(keep_in),
                threads=settings.threads,
                steps=settings.steps,
                root=str(project_root(workload.path)),
                first=str(first),
                complete=str(full),
            )
        publish(RECORDED, recorded, graph=full)
        self._draw(full, RECORDED)

    def reline(self, before: Analysis, moved: Moved) -> None:
        """Copy the analysis `before` of the same code with moved lines, instead of all stages."""
        assert before.graph is not None
        assert before.document is not None
        graph, document = self._folder / _FULL_FILE, self._folder / READY
        self._folder.mkdir()
        costs = self._queue.call(
            Kind.SIMULATING,
            "slipstream.live.work:reline",
            about=graph.parent,
            path=str(before.graph),
            document=str(before.document),
            moved={path: list(lines.items()) for path, lines in moved.items()},
            root=str(project_root(self._settings.workload.path)),
            into=str(graph),
            drawn=str(document),
        )
        self._update(
            state=READY, said="", costs=Costs.of_json(costs), stale=False, graph=graph,
            document=document, advice=before.advice, batch=before.batch,
            batch_reason=before.batch_reason,
        )  # fmt: skip

    def _draw(self, graph: Path, state: str) -> None:
        """Write the page's document of a recording, in the process that then answers what-ifs."""
        document = graph.parent / state
        document.mkdir()
        self._queue.call(
            Kind.SIMULATING, _DRAW, about=graph.parent, path=str(graph), folder=str(document),
            techniques=None, store=self._settings.store,
        )  # fmt: skip
        self._update(graph=graph, document=document)

    def measure_batches(self) -> None:
        """Measure how time and memory depend on the batch size, unless an earlier analysis did."""
        settings = self._settings
        if not settings.batches or self._latest().batch is not None:
            return
        try:
            model = batch_model(
                self._parsed(),
                threads=settings.threads,
                budget=settings.batch_budget_s,
                timeout_s=settings.timeout_s,
                report=lambda line: self._update(said=line),
            )
        except SlipstreamError as error:
            self._update(batch_reason=error.what)
            return
        self._update(batch=model, batch_reason=model.why_not or "")

    def advise(self) -> None:
        """Simulate techniques, in a separate process, so that requests do not wait for it."""
        graph = self._latest().graph
        if self._settings.techniques is None or graph is None:
            self._update(state=READY, said="")
            return
        document = graph.parent / READY
        document.mkdir(exist_ok=True)
        with Child("simulating techniques") as child:
            advice = child.call(
                _DRAW,
                timeout_s=WORKER_TIMEOUT_S,
                on_message=lambda message: self._update(said=str(message.get("say", ""))),
                path=str(graph),
                folder=str(document),
                techniques=list(self._settings.techniques),
                store=self._settings.store,
            )
        self._update(state=READY, said="", advice=advice, document=document)

    def _parsed(self) -> Workload:
        """Parse the workload again, since its file may have been fixed or broken."""
        workload = self._settings.workload
        return Workload.parse(workload.target, *workload.script_arguments, **workload.arguments)
