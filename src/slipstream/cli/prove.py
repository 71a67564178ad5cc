"""``slipstream prove``: measure both sides in one run, the prediction beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli._cluster import ClusterSizes, OnCluster
from slipstream.cli._comparison import emit_comparison, show_progress
from slipstream.cli._workload import (
    Json,
    Runnable,
    ScriptArguments,
    Set,
    Steps,
    StorePath,
    Techniques,
    Threads,
    Timeout,
)
from slipstream.errors import InvalidArgumentError, UsageError


def command(
    workload: Runnable,
    script_arguments: ScriptArguments = None,
    technique: Techniques = None,
    settings: Set = None,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Stop measuring after this long (half as long again where the machine is busy); "
            "60s, 5min. On top come the profile, timings of "
            "operators that are new here, the quality check, and starting a process for each.",
        ),
    ] = "60s",
    target: Annotated[
        float,
        typer.Option(
            "--target", metavar="SHARE", help="Stop when the interval is narrower than this share."
        ),
    ] = 0.02,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality/--no-quality",
            help="Also check what becomes of the loss, metric or output; "
            "without, no gain is called backed.",
        ),
    ] = True,
    quality_budget: Annotated[
        str | None,
        typer.Option(
            "--quality-budget",
            metavar="TIME",
            help="Time for that, for each side; 3s, 1min. By default a tenth of --budget, 3s at "
            "most.",
        ),
    ] = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    cluster: OnCluster = None,
    cluster_sizes: ClusterSizes = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw what the links of real ranks carry over time, each way, into an SVG file.",
        ),
    ] = None,
    store: StorePath = None,
    as_json: Json = False,
) -> None:
    """Measure the workload with and without techniques, in turns, and score the predictions.

    Each side lives in a process of its own; they take steps in turns, in random order, so that
    whatever the machine does happens to both. The result is kept: see `slipstream results`.

    The step is recorded and predicted anew for that. What `predict` or `advise` showed before is
    scored too, and stands below the table.

    Before that, a technique that changes the numbers runs the same first steps as the original,
    from several seeds; what becomes of the loss stands beside the speed.

    Techniques that spread the step over workers start the real ranks, on links like the
    cluster's where this machine can make them (root), else on its loopback interface. Once all
    sides are timed, some more steps show which layers each waits for, and what the link carries.

        slipstream prove train.py:make_workload --technique amp:bf16

        slipstream prove train.py:make_workload --cluster workers=2,link=100mbit
        -t ddp:workers=2 -t ddp:workers=2+powersgd:4
    """
    from slipstream import technique as techniques
    from slipstream.cli._cluster import cluster_of
    from slipstream.cli._exposed import exposed_rows
    from slipstream.cli._output import need_place, note, progress
    from slipstream.cli._ranks import ranks_rows
    from slipstream.cli._workload import graph_of, history, needs_of, workload_of
    from slipstream.units import parse_duration_ns
    from slipstream.verbs._ranks import check_ranks
    from slipstream.verbs.predicting import predict
    from slipstream.verbs.proving.sides import check_script, default_quality_budget, prove

    if not technique:
        raise UsageError("no technique is named", remedy="--technique amp:bf16")
    # Everything that can be wrong in the request, before anything takes time.
    chosen = {techniques.combination_name(one): one for one in map(techniques.parse, technique)}
    names = list(chosen)
    recipe = workload_of(workload, script_arguments, settings)
    for one in chosen.values():
        check_script(recipe, one)
    where = cluster_of(cluster, cluster_sizes)
    workers = check_ranks(recipe, chosen, where)
    if workers and not threads:
        # So many of them share this machine's cores; and the step is recorded as they run it.
        threads = 1
    if svg is not None:
        need_place(svg, ".svg", option="--svg")
    timeout_s = parse_duration_ns(timeout, "--timeout") / 1e9
    if not parse_duration_ns(budget, "--budget"):
        raise InvalidArgumentError("--budget", "no time to measure in", remedy="as 60s, 5min")
    if not 0 < target < 1:
        raise InvalidArgumentError(
            "--target", f"{target:g} is no share between 0 and 1", remedy="as 0.02 for 2 %"
        )
    if quality_budget is not None and not parse_duration_ns(quality_budget, "--quality-budget"):
        raise InvalidArgumentError(
            "--quality-budget", "no time to check in", remedy="as 3s, 1min; or --no-quality"
        )
    with progress(f"proving {recipe.name}") as say, history(store) as past:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say, needs=needs_of(names),
        )  # fmt: skip
        predicted = predict(graph, names, cluster=where, widen=past.widen, say=say)
        records = {
            p.technique: p.to_record(recipe.name, past.environment.env_id)
            for p in predicted
            if p.why_not is None
        }
        # Before it is measured: where it fails, this says why.
        for p in predicted:
            if p.why_not is not None:
                note(f"{p.technique} is measured though it should not apply: {p.why_not}")
        result = prove(
            recipe,
            names,
            predictions=records,
            cluster=where,
            budget=budget,
            target=target,
            quality_budget=(quality_budget or default_quality_budget(budget)) if quality else None,
            threads=threads,
            timeout_s=timeout_s,
            store=past.store,
            progress=show_progress(say),
            say=say,
        )
        before = past.shown_before(result.experiment.experiment_id)
    exposed = exposed_rows(result)
    if svg is not None:
        _draw(svg, recipe.name, exposed)
    emit_comparison(
        result, as_json=as_json, before=before, ranks=ranks_rows(result, workers), exposed=exposed
    )


def _draw(path: Path, workload: str, exposed: list[dict[str, Any]]) -> None:
    from slipstream.cli._output import note
    from slipstream.report.curve import write_curve
    from slipstream.report.network import network_svg

    if not exposed:
        note(f"{path} was not drawn: no ranks exchanged anything")
        return
    write_curve(path, network_svg(f"{workload}: the link of rank 0", exposed))
