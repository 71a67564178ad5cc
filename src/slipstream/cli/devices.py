"""``slipstream devices``: predict a step on other devices."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import Report, emit_result, note, progress


@options.asks(options.Target, threads=0, steps=24, timeout="5min")
def command(
    request: options.Request,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="avx2, sse4.1, threads:2, h100, ...; repeatable. By default all devices.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict the recorded step on other devices, by time per sample and cost.

    For this processor with an older instruction set or more threads, operators are measured once
    per machine. GPUs and other processors are predicted from their data sheets.

        slipstream devices run.slipgraph

        slipstream devices run.slipgraph --device avx2 --device h100
    """
    from slipstream.verbs.devices.elsewhere import DevicePredictions, devices_for, predict_device

    with progress("devices") as report:
        graph = request.graph(report, warn=note)
        found = []
        for name in device or devices_for(graph):
            report(name)
            found.append(predict_device(graph, name, report=partial(_report_of, report, name)))
    result = DevicePredictions.of(graph, found)
    emit_result(result, result.table(), as_json=as_json)


def _report_of(report: Report, name: str, line: str) -> None:
    report(f"{name}: {line}")
