"""Write the report of a step: one HTML file that needs nothing else."""

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
    """Write one self-contained HTML file about `graph`: open it in any browser, send it to anyone.

    It has the timeline, the breakdown by module, source line and operator, memory with
    lifetimes, ranked what-ifs with switches to combine them, and past predictions beside their
    measurements. It loads nothing. See ``docs/report.md`` for how to read it.

    Args:
        path: the file; one that is there is replaced, whole or not at all.
        techniques: names in the grammar to simulate; all that are installed when none is named.
        what_if: whether to simulate any; unknown durations are micro-benchmarked first.
        redact: take absolute paths and names of hosts and users out of all texts.
        store: the results store with past predictions and what was measured, which is only read.
        comparisons: what ``ss.prove`` found for this workload, besides what the store holds.
        durations: where durations come from; this machine's cache by default.
        report: called with a short line whenever there is progress.

    Returns:
        `path`.

    Raises:
        UsageError: a technique that is not in the grammar.
        InvalidArgumentError: a comparison of another workload, or `graph` is none.
        GraphError: the graph's dependencies form a cycle.
        SlipstreamError: the file cannot be written.
    """
    need_graph(graph)
    path = Path(path)
    environment = capture(torch=False)
    workload = str(graph.meta.get("workload", ""))
    past = past_predictions(store, environment, workload, comparisons)
    simulated = WhatIfs("skipped", "no what-ifs were asked for")
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
