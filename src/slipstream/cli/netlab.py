"""Hosts and rate-limited cables inside this machine, built from network namespaces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli._options import Json

app = typer.Typer(
    no_args_is_help=True,
    help="Run processes on emulated hosts and rate-limited cables in this machine (needs root).",
    epilog="Nothing outside the lab's own namespaces is changed.",
)

_Hosts = Annotated[int, typer.Option("--hosts", help="Number of hosts, on one switch.")]
_Rate = Annotated[str, typer.Option("--rate", help="Of every cable: 200mbit, 1gbit, ...")]


@app.command()
def run(
    command: Annotated[list[str], typer.Argument(help="Command that every host runs, after --.")],
    hosts: _Hosts = 2,
    rate: _Rate = "1gbit",
    as_json: Json = False,
) -> None:
    """Create a lab, run a command on every host, count bytes, and remove the lab.

    Every host gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as torchrun
    would set them. Ctrl-C, or the end of this process for any reason, removes everything.

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
    results = [
        {
            "host": host, "exit_code": codes[host], "sent_bytes": after[host][1] - before[host][1],
            "received_bytes": after[host][0] - before[host][0],
        }
        for host in range(hosts)
    ]  # fmt: skip
    fields: tuple[Field[dict[str, int]], ...] = (
        Field.number("host", lambda row: row["host"]),
        Field.number("exit code", lambda row: row["exit_code"]),
        Field.number("sent", lambda row: format_bytes(row["sent_bytes"])),
        Field.number("received", lambda row: format_bytes(row["received_bytes"])),
    )
    notes = ["bytes through the host's cable, including headers"]
    emit(Table.of(results, fields, notes=notes), results, as_json=as_json)
    if any(codes):
        raise typer.Exit(1)


@app.command()
def up(hosts: _Hosts = 2, rate: _Rate = "1gbit") -> None:
    """Create a lab and keep it until Ctrl-C, or until `slipstream netlab down`.

    It prints how to run commands on each host from another terminal.
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
    """Remove the lab that `slipstream netlab up` keeps in another terminal."""
    import os
    import signal
    import time

    state = _state()
    if not _alive(state):
        print("no lab is up")
        return
    os.kill(int(state.read_text()), signal.SIGTERM)
    deadline = time.monotonic() + 10.0
    while state.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    print("down" if not state.exists() else "the lab does not stop; see its terminal")


def _state() -> Path:
    # Only root can write to /run: in a world-writable folder, the name could be a link.
    return Path("/run/slipstream-netlab.pid")


def _alive(state: Path) -> bool:
    """Return whether the process that keeps the lab still runs; its PID may have been reused."""
    try:
        command = Path(f"/proc/{int(state.read_text())}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return b"netlab" in command
