"""``slipstream predict``: predict what techniques would gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, need_place, note, progress
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.verbs.results import Prediction


@options.asks(options.Target, threads=0, steps=24, timeout="5min")
def command(
    request: options.Request,
    technique: options.Techniques = None,
    goal: options.Goals = None,
    rate: options.Rate = None,
    cluster: options.OnCluster = None,
    cluster_sizes: options.ClusterSizes = None,
    hw: Annotated[
        str | None,
        typer.Option(
            "--hw",
            metavar="FILE.toml",
            help="Accelerator that skips zeros: a TOML description, or tensordash.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the predicted step for ui.perfetto.dev, or several to FILE-1, ...",
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the plans that a technique chose from, such as burst, to an SVG file.",
        ),
    ] = None,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Predict what techniques would gain, without applying them.

    The recorded graph is edited and simulated; operators that change are micro-benchmarked once per
    machine. Predictions are stored, and `prove` scores them.

    Techniques that distribute the step over workers need a cluster: a preset, a file from
    `slipstream cluster measure`, or a short form.

        slipstream predict run.slipgraph --technique amp:bf16

        slipstream predict run.slipgraph --cluster here.toml --technique ddp:workers=4

    With --rate, a step answers one query of a server; its latency in the queue is predicted:

        slipstream predict serve.py:make -t lowbit:w8a8 --rate 40/s --goal 'p99<20ms'

    With --hw, the step is simulated on an accelerator, from masks of zeros that
    `slipstream profile --record sparsity` records:

        slipstream predict run.slipgraph --hw tensordash
    """
    from slipstream.files import write_text
    from slipstream.mlperf.serving.threads import thread_costs
    from slipstream.report.plans import plans_svg
    from slipstream.verbs.goals import met_note, parse_goals, parse_rate
    from slipstream.verbs.history import history
    from slipstream.verbs.predicting import predict
    from slipstream.verbs.results import applying, measured_note, prediction_table
    from slipstream.verbs.serving import need_inference, predict_serving, serving_table
    from slipstream.verbs.sharing import shared_table

    if hw is not None:
        excluded = {"goal": goal, "rate": rate, "cluster": cluster, "timeline": timeline,
                    "svg": svg, "store": store}  # fmt: skip
        if present := [f"--{name}" for name, value in excluded.items() if value]:
            raise UsageError(
                f"--hw excludes {', '.join(present)}", remedy=f"leave out {present[0]}, or --hw"
            )
        _on_accelerator(request, hw, technique or (), as_json=as_json)
        return
    if not technique:
        raise UsageError(
            "--technique is missing",
            remedy="for example --technique amp:bf16, or run slipstream advise to try all",
        )
    if svg is not None:
        need_place(svg, ".svg", option="--svg")
    needs = options.needs_of(technique)
    goals = parse_goals(goal or (), rate)
    where = options.cluster_of(cluster, cluster_sizes)
    with progress("predicting") as report, history(store) as past:
        graph = request.graph(report, needs, note)
        costs = None
        if rate is not None:
            need_inference(graph)
            costs = thread_costs(report)
            goals = [replace(goal, costs=costs) for goal in goals]
        predictions = predict(graph, technique, cluster=where, widen=past.widen, report=report)
        name = str(graph.meta.get("workload", request.target))
        past.keep(predictions, name)
        measured = past.measured(predictions, name, graph)
    proofs = [measured_note(name, proof) for name, proof in measured.items()]
    applied = applying(predictions)
    goal_notes = [met_note(goal, applied) for goal in goals if goal.limit and applied]
    tables = [prediction_table(graph, predictions, *goal_notes, *proofs, past.note)]
    if where is not None and any(p.shared is not None for p in predictions):
        tables.append(shared_table(graph, where, applied))
    if timeline is not None:
        _write_timelines(predictions, timeline)
    payload = []
    for p in predictions:
        proof = measured.get(p.technique)
        met = {str(goal): goal.met_by(p) for goal in goals} if p in applied else {}
        payload.append(p.to_json() | {"measured": proof and proof.to_json(), "goals_met": met})
    if rate is not None and costs is not None:
        bound = next((goal.bound for goal in goals if goal.bound), None)
        served = predict_serving(applied, parse_rate(rate), bound, costs)
        tables.append(serving_table(served, bound, costs))
        by_name = {p.technique: p.to_json() for p in served}
        for p, row in zip(predictions, payload, strict=True):
            row["serving"] = by_name.get(p.technique)
    emit(tables, payload, as_json=as_json)
    if svg is not None:
        drawn = plans_svg([p.graph for p in predictions if p.graph is not None])
        write_text(svg, drawn, "the image")


def _on_accelerator(
    request: options.Request, hw: str, techniques: Sequence[str], *, as_json: bool
) -> None:
    """Print the step, as recorded and with each technique, on an accelerator."""
    from slipstream.hardware import Accelerator
    from slipstream.verbs.devices.accelerators import accelerator_table, predict_accelerator
    from slipstream.verbs.predicting import predict

    chip = Accelerator.load(hw)
    with progress(f"simulating {chip.name}") as report:
        graph = request.graph(report, {"sparsity"} | options.needs_of(techniques), note)
        found = [predict_accelerator(graph, chip)]
        for prediction in predict(graph, techniques, report=report) if techniques else ():
            if prediction.graph is None:
                note(f"{prediction.technique}: {prediction.why_not}")
                continue
            found.append(predict_accelerator(prediction.graph, chip, name=prediction.technique))
    tables = [found[0].layer_table(), found[0].sensitivity_table(), accelerator_table(found)]
    emit(tables, [step.to_json() for step in found], as_json=as_json)


def _write_timelines(predictions: Sequence[Prediction], path: Path) -> None:
    """Write each predicted step as a trace: to `path`, or to numbered files if several."""
    from slipstream.graph import replay, write_perfetto

    graphs = [p.graph for p in predictions if p.graph is not None]
    for number, graph in enumerate(graphs, start=1):
        target = path if len(graphs) == 1 else path.with_stem(f"{path.stem}-{number}")
        write_perfetto(replay(graph), target)
