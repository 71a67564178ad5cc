"""Write the report of a step as a self-contained HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.durations import Durations
from slipstream.files import write_text
from slipstream.graph import Graph, need_graph
from slipstream.measure.comparison import Comparison
from slipstream.measure.environment import capture
from slipstream.measure.redact import Redactor
from slipstream.report.document import make_document, redacted
from slipstream.report.history import past_predictions
from slipstream.report.html import to_html
from slipstream.report.what_if import WhatIfs, what_ifs


def write_report(
    graph: Graph,
    path: Path | str,
    *,
    techniques: Sequence[str] = (),
    what_if: bool = True,
    redact: bool = False,
    store: Path | None = None,
    comparisons: Sequence[Comparison] = (),
    durations: Durations | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a self-contained HTML report of `graph`.

    It has the timeline, the breakdown by module, source line and operator, memory with lifetimes,
    ranked what-ifs with switches to combine them, and past predictions next to their measurements.
    It loads nothing else. ``docs/report.md`` explains it.

    Args:
        path: output file, replaced atomically if it exists.
        techniques: technique specs to simulate; by default all installed techniques.
        what_if: whether to simulate techniques, which micro-benchmarks unknown durations first.
        redact: whether to remove absolute paths and names of hosts and users from all texts.
        store: results store with past predictions and measurements, which is only read.
        comparisons: results of ``ss.prove`` for this workload, in addition to the store.
        durations: cache of durations; this machine's by default.
        report: called with a line of progress.

    Returns:
        `path`.

    Raises:
        UsageError: a technique spec is invalid.
        InvalidArgumentError: a comparison is of another workload, or `graph` is not a graph.
        GraphError: the graph's dependencies form a cycle.
        SlipstreamError: the file cannot be written.
    """
    need_graph(graph)
    path = Path(path)
    environment = capture(torch=False)
    workload = str(graph.meta.get("workload", ""))
    past = past_predictions(store, environment, workload, comparisons)
    simulated = WhatIfs("skipped", "what-ifs were not requested")
    if what_if:
        report("simulating what-ifs")
        simulated = what_ifs(
            graph, techniques, durations=durations, widen=past.widen, report=report
        )
    report("drawing")
    document, arrays = make_document(graph, simulated, past, environment)
    if redact:
        document = redacted(document, Redactor())
    page = to_html(document, arrays.base64())
    write_text(path, page, "the report", "name another file: -o FILE")
    return path
