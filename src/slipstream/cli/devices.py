"""``slipstream devices``: would another device be worth it?"""

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
            help="avx2, sse4.1, threads:2, h100, ...; repeatable. All that are known, if none.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """The recorded step on other devices, by time per sample and by cost.

    This processor with an older instruction set or more threads is measured, operator by operator,
    once per machine. GPUs and other processors are known by their data sheets.

        slipstream devices run.slipgraph

        slipstream devices run.slipgraph --device avx2 --device h100
    """
    from slipstream.verbs.devices.elsewhere import DevicePredictions, devices_for, predict_device

    with progress("devices") as report:
        graph = request.graph(report, warn=note)
        answers = []
        for name in device or devices_for(graph):
            report(name)
            answers.append(predict_device(graph, name, report=partial(_report_of, report, name)))
    result = DevicePredictions.of(graph, answers)
    emit_result(result, result.table(), as_json=as_json)


def _report_of(report: Report, name: str, line: str) -> None:
    report(f"{name}: {line}")
