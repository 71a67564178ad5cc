"""``slipstream prove``: measure both sides in one run, the prediction beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit_result, need_place, note, progress, show_progress
from slipstream.errors import InvalidArgumentError, UsageError

if TYPE_CHECKING:
    from slipstream.verbs.proving.exposed import Exposed


@options.asks(options.Runnable, threads=0, steps=24, timeout="5min")
def command(
    request: options.Request,
    technique: options.Techniques = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Stop measuring after this long (half as long again where the machine is busy); "
            "60s, 5min. On top come the profile, timings of "
            "operators that are new here, the quality check, and starting a process for each.",
        ),
    ] = "60s",
    target: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Stop when the interval is narrower than this share."),
    ] = 0.02,
    launches: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Start each side this often at most, within the budget: what another process "
            "costs is then in the intervals. 1: once; from 3 on it tells.",
        ),
    ] = 6,
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
            metavar="TIME",
            help="Time for that, for each side; 3s, 1min. By default a tenth of --budget, 3s at "
            "most.",
        ),
    ] = None,
    cluster: options.OnCluster = None,
    cluster_sizes: options.ClusterSizes = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw what the links of real ranks carry over time, each way, into an SVG file.",
        ),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Every clock and metric, each side's sentences, real ranks, layers and links.",
        ),
    ] = False,
    to_quality: Annotated[
        bool,
        typer.Option(
            "--to-quality",
            help="Train the task file.py:function until its target instead, several times from "
            "paired seeds: see slipstream mlperf train.",
        ),
    ] = False,
    runs: Annotated[
        int,
        typer.Option("--runs", metavar="N", min=1, help="With --to-quality: runs of every side."),
    ] = 5,
    predicted: Annotated[
        bool,
        typer.Option(
            "--predict/--no-predict",
            help="With --to-quality: whether to predict what the runs will find, which costs half "
            "a run of every side whose numbers change.",
        ),
    ] = True,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Measure the workload with and without techniques, alternately, and score the predictions.

    Each side lives in a process of its own; they take steps in turns, in random order, so that
    whatever the machine does happens to both. The result is kept: see `slipstream results`.

    The prediction that `predict` or `advise` showed for the same workload, technique and threads is
    shown next to the measurement and scored. Without one, the step is recorded and predicted first.

    Before that, a technique that changes the numbers runs the same first steps as the original,
    from several seeds; what becomes of the loss stands beside the speed.

    Techniques that spread the step over workers start the real ranks, on links like the
    cluster's where this machine can make them (root), else on its loopback interface. Once all
    sides are timed, some more steps show which layers each waits for, and what the link carries.

        slipstream prove train.py:make_workload --technique amp:bf16

        slipstream prove task.py:digits -t lowrank:0.25 --to-quality --runs 5

        slipstream prove train.py:make_workload --cluster workers=2,link=100mbit
        -t ddp:workers=2 -t ddp:workers=2+powersgd:4
    """
    from slipstream import technique as techniques
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.history import history
    from slipstream.verbs.predicting import predict
    from slipstream.verbs.proving.proof import Proof
    from slipstream.verbs.proving.ranks import check_ranks
    from slipstream.verbs.proving.sides import check_script, default_quality_budget, prove
    from slipstream.verbs.results import refused

    if not technique:
        raise UsageError("no technique is named", remedy="--technique amp:bf16")
    if to_quality:
        from slipstream.cli import mlperf_train

        threads = request.threads or 1
        mlperf_train.to_quality(
            request.target, technique, runs=runs, threads=threads, predicted=predicted,
            store=store, as_json=as_json,
        )  # fmt: skip
        return
    # Everything that can be wrong in the request, before anything takes time.
    chosen = {techniques.combination_name(one): one for one in map(techniques.parse, technique)}
    recipe = request.workload()
    for one in chosen.values():
        check_script(recipe, one)
    where = options.cluster_of(cluster, cluster_sizes)
    if check_ranks(recipe, chosen, where) and not request.threads:
        # So many of them share this machine's cores; and the step is recorded as they run it.
        request = replace(request, threads=1)
    if svg is not None:
        need_place(svg, ".svg", option="--svg")
    if not parse_duration_ns(budget, "--budget"):
        raise InvalidArgumentError(
            "--budget", "no time to measure in", remedy="for example 60s, 5min"
        )
    if not 0 < target < 1:
        raise InvalidArgumentError(
            "--target", f"{target:g} is no share between 0 and 1", remedy="for example 0.02 for 2 %"
        )
    if launches == 2:
        raise InvalidArgumentError(
            "--launches", "two processes show no spread", remedy="3 or more; 1 for a single one"
        )
    if quality_budget is not None and not parse_duration_ns(quality_budget, "--quality-budget"):
        raise InvalidArgumentError(
            "--quality-budget",
            "no time to check in",
            remedy="for example 3s, 1min; or --no-quality",
        )
    with progress(f"proving {recipe.name}") as report, history(store, measures=True) as past:
        shown = past.shown(request, where)
        if new := {name: parts for name, parts in chosen.items() if name not in shown}:
            graph = request.graph(report, options.needs_of(new), note)
            predictions = predict(
                graph, list(new.values()), cluster=where, widen=past.widen, report=report
            )
            # Before it is measured: where it fails, this says why.
            for p in refused(predictions):
                note(f"{p.technique} is measured though it should not apply: {p.why_not}")
            shown |= past.keep(predictions, recipe.name)
        comparison = prove(
            recipe,
            list(chosen.values()),
            predictions={name: shown[name] for name in chosen if name in shown},
            cluster=where,
            budget=budget,
            target=target,
            launches=launches,
            quality_budget=(quality_budget or default_quality_budget(budget)) if quality else None,
            threads=request.threads,
            timeout_s=request.timeout_s,
            store=past.store,
            progress=show_progress(report),
            report=report,
        )
    proof = Proof(comparison)
    if svg is not None:
        _draw(svg, recipe.name, proof.exposed)
    emit_result(proof, *(proof.tables() if details else [proof.summary()]), as_json=as_json)


def _draw(path: Path, workload: str, exposed: Sequence[Exposed]) -> None:
    from slipstream.files import write_text
    from slipstream.report.network import network_svg

    if not exposed:
        note(f"{path} was not drawn: no ranks exchanged anything")
        return
    write_text(path, network_svg(f"{workload}: the link of rank 0", exposed))
