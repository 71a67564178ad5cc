"""List, show and verify slipstream's data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.data import Dataset, Entry, Verification

app = typer.Typer(no_args_is_help=True, help="List, show and verify slipstream's data sets.")


@app.command("ls")
def list_sets(
    here: bool = typer.Option(False, "--here", help="Only data sets on this machine."),
    as_json: Json = False,
) -> None:
    """List every data set, and whether it is on this machine."""
    from slipstream.cli._output import emit
    from slipstream.data import available, manifest
    from slipstream.tables import Field, Table

    present = set(available())
    entries = [entry for entry in manifest() if entry.name in present or not here]
    fields: tuple[Field[Entry], ...] = (
        Field.of("name", lambda e: e.name),
        Field.of("here", lambda e: "yes" if e.name in present else "no"),
        Field.of("what it is", lambda e: e.about),
        Field.of("licence", lambda e: e.licence, optional=True),
        Field.of("from", lambda e: e.place, optional=True),
    )
    note = f"{len(present)} of {len(manifest())} are here; how to get another: data show NAME"
    table = Table.of(entries, fields, notes=[note])
    payload = [dataclasses.asdict(e) | {"here": e.name in present} for e in entries]
    emit(table, payload, as_json=as_json)


@app.command()
def show(
    name: str = typer.Argument(help="A name from `slipstream data ls`."), as_json: Json = False
) -> None:
    """Describe one data set: licence, source, shapes, checksum."""
    from slipstream.cli._output import emit
    from slipstream.data import checksum, recorded_files, why_absent
    from slipstream.data.catalogue import entry
    from slipstream.errors import SlipstreamError
    from slipstream.tables import Column, Table
    from slipstream.units import format_bytes

    described = entry(name)
    absent = why_absent(name)
    recorded = recorded_files(name)
    payload: dict[str, Any] = dataclasses.asdict(described) | {
        "here": absent is None,
        "checksum": checksum(name) if absent is None else None,
        "recorded_files": [dataclasses.asdict(file) for file in recorded],
        "fields": {},
        "missing": None if absent is None else {"what": absent.what, "remedy": absent.remedy},
    }
    if absent is None:
        try:
            payload["fields"] = _fields(described)
        except SlipstreamError as error:
            # The files are present, but a decoder may be missing.
            payload["missing"] = {"what": error.what, "remedy": error.remedy}
    rows: list[tuple[str, object]] = [
        ("what it is", described.about),
        ("licence", described.licence),
        ("may be passed on", "yes" if described.redistributable else "no"),
        ("source", described.source),
        ("from", described.place),
        ("here", "yes" if absent is None else "no"),
    ]
    if recorded:
        size = format_bytes(sum(file.size_bytes for file in recorded))
        rows.append(("on record", f"{len(recorded)} files, {size}"))
    if payload["checksum"]:
        rows.append(("checksum", payload["checksum"][:16]))
    rows += list(payload["fields"].items())
    missing = payload["missing"]
    notes = [missing["what"], f"try: {missing['remedy']}"] if missing else []
    table = Table([Column(described.kind), Column("")], rows, title=name, notes=notes)
    emit(table, payload, as_json=as_json)


@app.command()
def verify(
    name: str | None = typer.Argument(None, help="A data set; without it, all on this machine."),
    as_json: Json = False,
) -> None:
    """Compare files with their recorded checksums; exit code 1 if any differs."""
    from slipstream.cli._output import emit, progress
    from slipstream.data import available
    from slipstream.data import verify as verify_set
    from slipstream.tables import Field, Table

    checks: list[Verification] = []
    with progress("checking") as report:
        for dataset in [name] if name else available():
            report(dataset)
            checks.append(verify_set(dataset))
    words = {True: "as recorded", False: "DIFFERS", None: "no recorded checksum"}
    fields: tuple[Field[Verification], ...] = (
        Field.of("name", lambda check: check.name),
        Field.number("files", lambda check: check.files),
        Field.of("result", lambda check: words[check.ok]),
        Field.of("detail", _detail),
    )
    payload = [dataclasses.asdict(check) | {"ok": check.ok} for check in checks]
    emit(Table.of(checks, fields), payload, as_json=as_json)
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)


def _detail(check: Verification) -> str:
    parts = [f"changed: {path}" for path in check.changed]
    parts += [f"missing: {path}" for path in check.missing]
    return "\n".join(parts) or check.note


def _fields(described: Entry) -> dict[str, str]:
    """Return the shapes and sizes of what `get` returns; slow data sets are loaded in part."""
    from slipstream.data import get

    limits = {
        "cifar10_jpeg": {"limit_per_class": 10},
        "imagenet_sample": {"limit": 10},
        "stdlib_source": {"limit_bytes": 1_000_000},
    }
    options = limits.get(described.name, {})
    value: Dataset = get(described.name, **options)
    shown = {
        field.name: _describe(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name != "name"
    }
    if options:
        shown["(of)"] = ", ".join(f"{key}={number:,}" for key, number in options.items())
    return shown


def _describe(value: object) -> str:
    import numpy as np

    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, str):
        return value if 0 < len(value) < 40 else f"{len(value):,} characters"
    if isinstance(value, Mapping):
        names = ", ".join(str(key) for key in list(value)[:12])
        return f"{len(value)}: {names}" + (", ..." if len(value) > 12 else "")
    if isinstance(value, Sequence):
        if value and all(isinstance(item, (str, int)) for item in value):
            few = ", ".join(str(item)[:20] for item in value[:5])
            return f"{len(value):,}: {few}" + (", ..." if len(value) > 5 else "")
        kind = type(value[0]).__name__ if value else "item"
        return f"{len(value):,} x {kind}"
    if hasattr(value, "__len__"):
        return f"{type(value).__name__} of {len(value):,}"
    return str(value)
