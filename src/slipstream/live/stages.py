"""The stages of one analysis: record, draw, measure batch sizes, simulate techniques."""

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

# Here, so that who only waits for a recording need not import what makes it.
_FIRST_FILE, _WHOLE_FILE = "first.slipgraph", "run.slipgraph"
_DRAW = "slipstream.live.work:draw"


@dataclass(frozen=True)
class AnalysisSettings:
    """What is asked of every analysis; see `slipstream.live.Analyst`."""

    workload: Workload
    threads: int
    steps: int
    timeout_s: float
    techniques: tuple[str, ...] | None
    batches: bool
    batch_budget_s: float
    store: str | None


class Stages:
    """One analysis on its way; its stages are called in their order, as jobs of one kind.

    Args:
        queue: whose worker process loads the recording and draws it.
        folder: for its recordings.
        update: called with what is new: changes of the `Analysis`.
        add_files: called with the user's files that took part.
        latest: the analysis as far as it is.
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
        """The step, first once, then as often as is asked for.

        Args:
            same_work: an earlier analysis, with its batch model, of a step that did the same work.

        Raises:
            SlipstreamError: what is wrong with the user's code.
        """
        settings, workload = self._settings, self._parsed()
        self._folder.mkdir()
        first, whole = self._folder / _FIRST_FILE, self._folder / _WHOLE_FILE

        def publish(state: str, recorded: Mapping[str, Any], **more: Any) -> None:
            # What is drawn of it comes after.
            self._add_files(recorded["files"])
            costs = Costs.of_json(recorded["costs"])
            before = same_work(costs.work)
            if before is not None:
                more |= {"batch": before.batch, "batch_reason": before.batch_reason}
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
                whole=str(whole),
            )
        publish(RECORDED, recorded, graph=whole)
        self._draw(whole, RECORDED)

    def reline(self, before: Analysis, moved: Moved) -> None:
        """In place of all of it, where the code is that of `before` and its lines have moved."""
        assert before.graph is not None
        assert before.document is not None
        graph, document = self._folder / _WHOLE_FILE, self._folder / READY
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
        """Have what the page draws of a recording made, by the process that then answers of it."""
        document = graph.parent / state
        document.mkdir()
        self._queue.call(
            Kind.SIMULATING, _DRAW, about=graph.parent, path=str(graph), folder=str(document),
            techniques=None, store=self._settings.store,
        )  # fmt: skip
        self._update(graph=graph, document=document)

    def measure_batches(self) -> None:
        """How time and memory depend on the batch size, where that is not known yet."""
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
        """Simulate techniques, in a process apart: what is asked for meanwhile does not wait."""
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
        """The workload, whose file is looked at: it may have been mended, or broken, meanwhile."""
        one = self._settings.workload
        return Workload.parse(one.target, *one.script_arguments, **one.arguments)
