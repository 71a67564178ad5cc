"""``slipstream prove``: measure techniques in one run and score their predictions."""

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
            help="Stop measuring after this time, such as 60s or 5min (on a busy machine, half as "
            "long again). The profile, timings of new operators, the quality check and process "
            "starts come on top.",
        ),
    ] = "60s",
    target: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Stop when the interval is narrower than this."),
    ] = 0.02,
    launches: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum number of launches per side, within the budget. Intervals then include "
            "the variation between launches; pass 1 for a single launch, else at least 3.",
        ),
    ] = 6,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality/--no-quality",
            help="Whether to also check the loss, metric or output; without it, no gain counts as "
            "backed.",
        ),
    ] = True,
    quality_budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time limit of the quality check per side, such as 3s or 1min. By default a tenth "
            "of --budget, at most 3s.",
        ),
    ] = None,
    cluster: options.OnCluster = None,
    cluster_sizes: options.ClusterSizes = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the traffic on the links of real ranks over time, each way, to an SVG file.",
        ),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Show every clock and metric, notes per side, real ranks, layers and links.",
        ),
    ] = False,
    to_quality: Annotated[
        bool,
        typer.Option(
            "--to-quality",
            help="Train the task file.py:function to its target instead, several times from paired "
            "seeds; see slipstream mlperf train.",
        ),
    ] = False,
    runs: Annotated[
        int,
        typer.Option("--runs", metavar="N", min=1, help="With --to-quality: runs per side."),
    ] = 5,
    predicted: Annotated[
        bool,
        typer.Option(
            "--predict/--no-predict",
            help="With --to-quality: whether to predict the result, which costs half a run per "
            "side with changed numerics.",
        ),
    ] = True,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> None:
    """Measure the workload with and without techniques, alternately, and score the predictions.

    Each side runs in its own process. They take steps alternately, in random order, so that
    changes of the machine affect all sides equally. The result is stored: see `slipstream results`.

    The prediction that `predict` or `advise` showed for the same workload, technique and threads is
    shown next to the measurement and scored. Without one, the step is recorded and predicted first.

    Before that, a technique that changes numerics runs the same first steps as the original, from
    several seeds; the effect on the loss is shown next to the speed.

    Techniques that distribute the step over workers start real ranks, on links like the cluster's
    if this machine can create them (needs root), else on the loopback interface. After the timing,
    a few more steps show which layers wait for communication, and the traffic on the link.

        slipstream prove train.py:make_workload --technique amp:bf16

        slipstream prove task.py:digits -t lowrank:0.25 --to-quality --runs 5

        slipstream prove train.py:make_workload --cluster workers=2,link=100mbit
        -t ddp:workers=2 -t ddp:workers=2+powersgd:4
    """
    from slipstream import technique as techniques
    from slipstream.verbs.history import history
    from slipstream.verbs.predicting import predict
    from slipstream.verbs.proving.proof import Proof
    from slipstream.verbs.proving.ranks import check_ranks
    from slipstream.verbs.proving.sides import check_script, default_quality_budget, prove
    from slipstream.verbs.results import refused

    if not technique:
        raise UsageError("--technique is missing", remedy="for example --technique amp:bf16")
    if to_quality:
        from slipstream.cli import mlperf_train

        threads = request.threads or 1
        mlperf_train.to_quality(
            request.target, technique, runs=runs, threads=threads, predicted=predicted,
            store=store, as_json=as_json,
        )  # fmt: skip
        return
    # Validate the whole request before anything takes time.
    chosen = {techniques.combination_name(ts): ts for ts in map(techniques.parse, technique)}
    recipe = request.workload()
    for parts in chosen.values():
        check_script(recipe, parts)
    where = options.cluster_of(cluster, cluster_sizes)
    if check_ranks(recipe, chosen, where) and not request.threads:
        # All ranks share this machine's cores, and the step is recorded as they run it.
        request = replace(request, threads=1)
    _check(budget, target, launches, quality_budget, svg)
    with progress(f"proving {recipe.name}") as report, history(store, measures=True) as past:
        shown = past.shown(request, where)
        if new := {name: parts for name, parts in chosen.items() if name not in shown}:
            graph = request.graph(report, options.needs_of(new), note)
            predictions = predict(
                graph, list(new.values()), cluster=where, widen=past.widen, report=report
            )
            # Printed before the measurement, to explain why it may fail.
            for p in refused(predictions):
                note(f"{p.technique} is measured although it does not seem to apply: {p.why_not}")
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
        note(f"{path} was not drawn: no ranks exchanged data")
        return
    write_text(path, network_svg(f"{workload}: the link of rank 0", exposed))


def _check(
    budget: str, target: float, launches: int, quality_budget: str | None, svg: Path | None
) -> None:
    from slipstream.units import parse_duration_ns

    if svg is not None:
        need_place(svg, ".svg", option="--svg")
    if not parse_duration_ns(budget, "--budget"):
        raise InvalidArgumentError(
            "--budget", "measuring needs a positive time", remedy="for example 60s, 5min"
        )
    if not 0 < target < 1:
        raise InvalidArgumentError(
            "--target", f"{target:g} is not between 0 and 1", remedy="for example 0.02 for 2 %"
        )
    if launches == 2:
        raise InvalidArgumentError(
            "--launches", "2 launches cannot show their variation", remedy="at least 3, or just 1"
        )
    if quality_budget is not None and not parse_duration_ns(quality_budget, "--quality-budget"):
        raise InvalidArgumentError(
            "--quality-budget",
            "the quality check needs a positive time",
            remedy="for example 3s, 1min; or --no-quality",
        )
