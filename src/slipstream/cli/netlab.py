"""Hosts and shaped cables inside this machine, made of network namespaces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    no_args_is_help=True,
    help="Hosts and shaped cables inside this machine, to run real processes on (needs root).",
    epilog="Nothing outside the lab's own namespaces is changed.",
)

_Hosts = Annotated[int, typer.Option("--hosts", help="How many hosts, on one switch.")]
_Rate = Annotated[str, typer.Option("--rate", help="Of every cable, as 200mbit or 1gbit.")]
_Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


@app.command()
def run(
    command: Annotated[list[str], typer.Argument(help="What every host runs, after --.")],
    hosts: _Hosts = 2,
    rate: _Rate = "1gbit",
    as_json: _Json = False,
) -> None:
    """Make a lab, run a command on every host, count bytes, take the lab down.

    Every host gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as torchrun
    would set them. Ctrl-C, or the end of this process in any way, takes everything down.

        slipstream netlab run --hosts 4 --rate 200mbit -- python train.py
    """
    from slipstream.ranks import Netlab
    from slipstream.units import parse_bandwidth

    with Netlab(hosts, parse_bandwidth(rate, "rate")) as lab:
        before = lab.counters()
        codes = lab.run(command)
        after = lab.counters()
    _show(hosts, codes, before, after, as_json)
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


def _show(
    hosts: int, codes: Sequence[int], before: Sequence[Any], after: Sequence[Any], as_json: bool
) -> None:
    from slipstream.cli._output import emit
    from slipstream.tables import Column, Table
    from slipstream.units import format_bytes

    received = [a[0] - b[0] for a, b in zip(after, before, strict=True)]
    sent = [a[1] - b[1] for a, b in zip(after, before, strict=True)]
    table = Table(
        [Column("host", "right"), Column("exit code", "right"), Column("sent", "right"),
         Column("received", "right")],
        [(h, codes[h], format_bytes(sent[h]), format_bytes(received[h])) for h in range(hosts)],
        notes=["bytes through the host's cable, headers included"],
    )  # fmt: skip
    emit(
        table,
        [{"host": h, "exit_code": codes[h], "sent_bytes": sent[h], "received_bytes": received[h]}
         for h in range(hosts)],
        as_json=as_json,
    )  # fmt: skip
