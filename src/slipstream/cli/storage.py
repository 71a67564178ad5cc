"""Predict and prove what a cache of files or objects saves, from a trace of the reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit_result, need_place, note, progress

if TYPE_CHECKING:
    from slipstream.engines.storage import StorageOrigin

app = typer.Typer(
    no_args_is_help=True,
    help="Predict and prove what a cache of files or objects saves, from a trace of the reads.",
    epilog="Start with: slipstream storage record -o run.npz -- python train.py",
)

_Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="run.npz, or another trace that `slipstream storage import` reads.",
    ),
]
_Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.npz", help="The trace.")]
_SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Count malformed entries instead of stopping.")
]
_Size = Annotated[
    str, typer.Option("--size", help="Capacity: 200GB, or a share of the bytes of all objects.")
]
_ByBytes = Annotated[
    bool, typer.Option("--by-bytes", help="Rank objects for bytes that hit, not for requests.")
]
_Policies = Annotated[
    str,
    typer.Option(
        "--policies", metavar="NAME,...",
        help="Of lru, fifo, sieve, s3fifo, lirs, wtinylfu, learned, auto, belady.",
    ),
]  # fmt: skip
_DRAWN = ("lru", "s3fifo", "wtinylfu", "learned", "belady")
_Latency = Annotated[str, typer.Option("--latency", help="Of a read from the origin.")]
_Bandwidth = Annotated[str, typer.Option("--bandwidth", help="Of a read from the origin.")]


@app.command()
def record(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="The program and its arguments.")
    ],
    output: _Output,
) -> None:
    """Run a program, and record the files that its Python processes open.

    slipstream storage record -o run.npz -- python train.py
    """
    from slipstream.engines.storage import record_trace
    from slipstream.engines.storage.recording import BLIND_SPOTS

    need_place(output, ".npz")
    trace, status = record_trace(command)
    trace.save(output)
    for name, count in trace.notes.items():
        note(f"{name}: {count:,}")
    note(BLIND_SPOTS)
    note(f"wrote {len(trace):,} requests; next: slipstream storage profile {output}")
    if status:
        note(f"the program failed with exit status {status}")
        raise typer.Exit(1)


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="OTLP .pb or .json, Jaeger .json, .csv with a header, .oracleGeneral, or "
            "cache_traces:NAME.",
        ),
    ],
    output: _Output,
    skip_bad: _SkipBad = False,
) -> None:
    """Read a trace of another tool, and write it as columns.

    slipstream storage import spans.json -o run.npz
    """
    from slipstream.engines.storage import import_trace

    need_place(output, ".npz")
    with progress("import") as report:
        report(source)
        trace = import_trace(source, skip_bad=skip_bad)
        trace.save(output)
    for name, count in trace.notes.items():
        note(f"{name}: {count:,}")
    note(f"wrote {len(trace):,} requests; next: slipstream storage predict {output} --size 10%")


@app.command()
def profile(
    trace: _Trace,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw miss ratios of policies and belady to an SVG."),
    ] = None,
    skip_bad: _SkipBad = False,
    as_json: Json = False,
) -> None:
    """Show working set, miss-ratio curve, what each key of the contexts explains, and epochs.

    slipstream storage profile run.npz --svg misses.svg
    """
    from slipstream.engines.storage import import_trace, profile_storage
    from slipstream.files import write_text
    from slipstream.report.storage import miss_ratio_svg

    if svg is not None:
        need_place(svg, ".svg")
    policies = ("lru", "learned") if svg is None else _DRAWN
    with progress("profile") as report:
        found = profile_storage(import_trace(trace, skip_bad=skip_bad), report, policies)
    if svg is not None:
        write_text(svg, miss_ratio_svg(f"{trace}: miss ratio by cache size", found.curve))
        note(f"wrote {svg}")
    emit_result(found, *found.tables(), as_json=as_json)


@app.command()
def predict(
    trace: _Trace,
    size: _Size = "10%",
    policies: _Policies = "lru,s3fifo,lirs,wtinylfu,learned,auto,belady",
    latency: _Latency = "20ms",
    bandwidth: _Bandwidth = "50MB/s",
    price: Annotated[
        float, typer.Option(help="Of 10^9 bytes read from the origin, in any currency.", min=0)
    ] = 0.0,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Compare a fast and a slow tier instead: tables [fast] and [slow] with gb_month, "
            "and optionally read, gb_read, gb_written.",
        ),
    ] = None,
    by_bytes: _ByBytes = False,
    skip_bad: _SkipBad = False,
    as_json: Json = False,
) -> None:
    """Compare cache policies up to Belady's: hits, waiting time per epoch, cost.

    slipstream storage predict run.npz --size 10% --latency 20ms --bandwidth 50MB/s
    """
    from slipstream.engines.storage import PriceSheet, import_trace, predict_cache, predict_tiers
    from slipstream.engines.storage.simulating import parse_capacity

    if prices is not None:
        sheet = PriceSheet.load(prices)
        tiers = predict_tiers(import_trace(trace, skip_bad=skip_bad), sheet)
        emit_result(tiers, tiers.table(), as_json=as_json)
        return
    parse_capacity(size, "--size")
    origin = _origin(latency, bandwidth, price)
    with progress("predict") as report:
        found = predict_cache(
            import_trace(trace, skip_bad=skip_bad), size, _names(policies),
            origin, by_bytes=by_bytes, progress=report,
        )  # fmt: skip
    emit_result(found, found.table(), as_json=as_json)


@app.command()
def prove(
    trace: _Trace,
    size: _Size = "20%",
    policies: _Policies = "lru,auto",
    latency: _Latency = "20ms",
    bandwidth: _Bandwidth = "50MB/s",
    reads: Annotated[int, typer.Option(help="Number of reads to replay.", min=1)] = 2000,
    skip_bad: _SkipBad = False,
    as_json: Json = False,
) -> None:
    """Replay reads from a throttled origin through real caches; compare with the prediction.

    slipstream storage prove run.npz --size 20% --reads 2000
    """
    from slipstream.engines.storage import import_trace, prove_cache
    from slipstream.engines.storage.simulating import parse_capacity

    parse_capacity(size, "--size")
    origin = _origin(latency, bandwidth, 0.0)
    with progress("prove") as report:
        found = prove_cache(
            import_trace(trace, skip_bad=skip_bad), size, _names(policies),
            origin, max_reads=reads, progress=report,
        )  # fmt: skip
    emit_result(found, found.table(), as_json=as_json)


def _names(policies: str) -> list[str]:
    from slipstream.errors import InvalidArgumentError

    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise InvalidArgumentError("--policies", "names no policy", remedy="for example lru,auto")
    return names


def _origin(latency: str, bandwidth: str, price: float) -> StorageOrigin:
    from slipstream.engines.storage import StorageOrigin
    from slipstream.units import parse_bandwidth, parse_duration_ns

    return StorageOrigin(
        parse_duration_ns(latency, "--latency"), parse_bandwidth(bandwidth, "--bandwidth"), price
    )
