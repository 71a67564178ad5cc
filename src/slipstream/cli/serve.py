"""``slipstream serve``: a small model server on this machine."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Annotated

import typer

from slipstream.cli import _options as options


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="model.onnx, model.tflite, or file.py:function of a workload."
        ),
    ],
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=65535,
            help="Port on 127.0.0.1; by default the first free port from 8500 on.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, help="Maximum batch size.")
    ] = 1,
    max_queue_delay: Annotated[
        str,
        typer.Option(metavar="TIME", help="Maximum time to wait for a batch to fill."),
    ] = "0ms",
    waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum queue length; more are rejected.")
    ] = 64,
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="Reject requests that wait longer.")
    ] = "1s",
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=0, help="Intra-op threads.")
    ] = 1,
    technique: options.Techniques = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Serve a model over HTTP on this machine, by the Open Inference Protocol (KServe V2).

    Queued requests are batched. Under overload, it immediately rejects some with status 503, so
    that the others are answered in time. Requests need the key in the printed address. Stop it with
    Ctrl-C: it first answers the requests it has accepted.

        slipstream serve model.onnx --batch 8 --max-queue-delay 2ms

        slipstream mlperf serve 'http://127.0.0.1:8500/?key=...' --data digits --scenario server
    """  # fmt: skip
    from slipstream import runtimes
    from slipstream import technique as techniques
    from slipstream.cli._output import emit, note, progress
    from slipstream.tables import Column, Table
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.request import Request

    policy = runtimes.BatchPolicy(
        batch, round(parse_duration_ns(max_queue_delay, "--max-queue-delay"))
    )
    deadline_s = parse_duration_ns(deadline, "--deadline") / 1e9
    parts = [part for text in technique or () for part in techniques.parse(text)]
    arguments = Request.parse(model, settings=settings or ()).arguments
    with progress("serve") as report:
        report("loading the model")
        loaded = runtimes.load(model, threads=threads, arguments=arguments, techniques=parts)
    with (
        loaded,
        runtimes.serving(
            loaded, port=port, policy=policy, waiting=waiting, deadline_s=deadline_s
        ) as server,
    ):
        payload = {"address": server.address, "model": loaded.name, "kind": loaded.kind}
        row = [server.address, loaded.name, str(policy)]
        table = Table(
            [Column("address"), Column("model"), Column("batching")], [row],
            notes=["only on this machine, and only with the key; stop it with Ctrl-C"],
        )  # fmt: skip
        emit(table, payload, as_json=as_json)
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    note(
        f"serve: {server.answered:,} requests answered, {server.refused:,} rejected, "
        f"{server.failed:,} failed"
    )
