"""Hosts and shaped cables inside this machine, made of network namespaces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json

app = typer.Typer(
    no_args_is_help=True,
    help="Hosts and shaped cables inside this machine, to run real processes on (needs root).",
    epilog="Nothing outside the lab's own namespaces is changed.",
)

_Hosts = Annotated[int, typer.Option("--hosts", help="How many hosts, on one switch.")]
_Rate = Annotated[str, typer.Option("--rate", help="Of every cable, as 200mbit or 1gbit.")]


@app.command()
def run(
    command: Annotated[list[str], typer.Argument(help="What every host runs, after --.")],
    hosts: _Hosts = 2,
    rate: _Rate = "1gbit",
    as_json: Json = False,
) -> None:
    """Make a lab, run a command on every host, count bytes, take the lab down.

    Every host gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as torchrun
    would set them. Ctrl-C, or the end of this process in any way, takes everything down.

        slipstream netlab run --hosts 4 --rate 200mbit -- python train.py
    """
    from slipstream.cli._output import emit
    from slipstream.ranks import Netlab
    from slipstream.tables import Field, Table
    from slipstream.units import format_bytes, parse_bandwidth

    with Netlab(hosts, parse_bandwidth(rate, "rate")) as lab:
        before = lab.counters()
        codes = lab.run(command)
        after = lab.counters()
    ran = [
        {
            "host": host, "exit_code": codes[host], "sent_bytes": after[host][1] - before[host][1],
            "received_bytes": after[host][0] - before[host][0],
        }
        for host in range(hosts)
    ]  # fmt: skip
    fields: tuple[Field[dict[str, int]], ...] = (
        Field.number("host", lambda one: one["host"]),
        Field.number("exit code", lambda one: one["exit_code"]),
        Field.number("sent", lambda one: format_bytes(one["sent_bytes"])),
        Field.number("received", lambda one: format_bytes(one["received_bytes"])),
    )
    notes = ["bytes through the host's cable, headers included"]
    emit(Table.of(ran, fields, notes=notes), ran, as_json=as_json)
    if any(codes):
        raise typer.Exit(1)


@app.command()
def up(hosts: _Hosts = 2, rate: _Rate = "1gbit") -> None:
    """Make a lab and keep it until Ctrl-C, or until `slipstream netlab down`.

    It says how to run something on each of its hosts from another terminal.
    """
    import os
    import signal

    from slipstream.errors import SlipstreamError
    from slipstream.ranks import Netlab
    from slipstream.units import parse_bandwidth

    state = _state()
    if _alive(state):
        raise SlipstreamError("a lab is up already", remedy="slipstream netlab down")
    with Netlab(hosts, parse_bandwidth(rate, "rate")) as lab:
        state.write_text(f"{os.getpid()}\n")
        try:
            for host in range(hosts):
                print(f"host {host}  {lab.address(host)}  {' '.join(lab.prefix(host))} COMMAND")
            print("up; Ctrl-C takes it down", flush=True)
            signal.pause()
        finally:
            state.unlink(missing_ok=True)


@app.command()
def down() -> None:
    """Take down the lab that `slipstream netlab up` keeps in another terminal."""
    import os
    import signal
    import time

    state = _state()
    if not _alive(state):
        print("no lab is up")
        return
    os.kill(int(state.read_text()), signal.SIGTERM)
    until = time.monotonic() + 10.0
    while state.exists() and time.monotonic() < until:
        time.sleep(0.05)
    print("down" if not state.exists() else "it does not end; see its terminal")


def _state() -> Path:
    # Root's own folder: in one that everybody can write to, the name could be a link.
    return Path("/run/slipstream-netlab.pid")


def _alive(state: Path) -> bool:
    """Whether the process that keeps the lab still runs: its number may be another's by now."""
    try:
        command = Path(f"/proc/{int(state.read_text())}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return b"netlab" in command
