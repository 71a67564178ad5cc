"""Run, plan and trace one program on many hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit_result, need_place, note, progress

app = typer.Typer(
    no_args_is_help=True,
    help="Run one script on many hosts: a program of functions on slices of their devices.",
    epilog="Start with: slipstream control plan FILE.py:make_program --hosts 4",
)

_Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT", help="file.py:function that takes the controller and returns a program."
    ),
]
_Engine = Annotated[
    str,
    typer.Option("--engine", metavar="NAME", help="local, ray, monarch, or sim: no processes."),
]
_Hosts = Annotated[int, typer.Option("--hosts", help="Number of hosts.", min=1)]
_Devices = Annotated[int, typer.Option("--devices", help="Devices per host.", min=1)]


@app.command()
def run(
    script: _Script,
    engine: _Engine = "local",
    hosts: _Hosts = 2,
    devices: _Devices = 1,
    launches: Annotated[int, typer.Option(help="Number of launches.", min=1)] = 10,
    as_json: Json = False,
) -> None:
    """Launch the program repeatedly, and show its outputs, time and messages per launch.

    slipstream control run two_stages.py:make_program --engine ray --hosts 2
    """
    from slipstream.engines.controller import run_program

    with progress("control") as report:
        found = run_program(script, engine, hosts, devices, launches, report)
    emit_result(found, found.table(), as_json=as_json)


@app.command()
def plan(
    script: _Script,
    hosts: _Hosts = 2,
    devices: _Devices = 1,
    compute: Annotated[
        str, typer.Option("--compute", metavar="TIME", help="Of a device per computation.")
    ] = "1ms",
    as_json: Json = False,
) -> None:
    """Show nodes, placement and messages, and predict the time per launch, without hosts.

    slipstream control plan two_stages.py:make_program --hosts 512 --compute 5ms
    """
    from slipstream.engines.controller import plan_program
    from slipstream.units import parse_duration_ns

    found = plan_program(script, hosts, devices, parse_duration_ns(compute, "--compute"))
    emit_result(found, found.table(), as_json=as_json)


@app.command()
def trace(
    script: _Script,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.slipgraph", help="The timeline.")
    ],
    engine: _Engine = "local",
    hosts: _Hosts = 2,
    devices: _Devices = 1,
) -> None:
    """Record when each host ran each node of one launch, as a graph for explain and export.

    slipstream control trace two_stages.py:make_program -o launch.slipgraph
    """
    from slipstream.engines.controller import trace_program
    from slipstream.graph import save

    need_place(output, ".slipgraph")
    with progress("control") as report:
        report(f"starting {hosts} hosts")
        graph = trace_program(script, engine, hosts, devices)
        save(graph, output)
    note(f"wrote {len(graph)} tasks; next: slipstream explain {output} --by lane")
