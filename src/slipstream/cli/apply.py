"""``slipstream apply``: transform the real workload, and see that it still runs."""

from __future__ import annotations

from slipstream.cli._workload import (
    Json,
    Runnable,
    ScriptArguments,
    Set,
    Techniques,
    Threads,
    Timeout,
)
from slipstream.errors import UsageError


def command(
    workload: Runnable,
    script_arguments: ScriptArguments = None,
    technique: Techniques = None,
    settings: Set = None,
    threads: Threads = 0,
    timeout: Timeout = "5min",
    as_json: Json = False,
) -> None:
    """Apply one technique (or combination) for real and run a few steps beside the original.

    Your files are not changed. The losses of both, from the same seed, are shown step by step.

        slipstream apply train.py:make_workload --technique amp:bf16
    """
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import workload_of
    from slipstream.tables import Column, Table
    from slipstream.units import parse_duration_ns
    from slipstream.verbs._apply import apply

    if not technique:
        raise UsageError("no technique is named", remedy="--technique amp:bf16")
    if len(technique) > 1:
        raise UsageError(
            f"{len(technique)} alternatives are named, and one can be applied",
            remedy="one --technique; to apply several together, join them with +",
        )
    recipe = workload_of(workload, script_arguments, settings)
    with progress(f"applying {technique[0]}") as say:
        applied = apply(
            recipe,
            technique[0],
            threads=threads,
            timeout_s=parse_duration_ns(timeout, "--timeout") / 1e9,
            say=say,
        )
    rows = [
        (step, _number(before), _number(after), _difference(before, after))
        for step, (before, after) in enumerate(zip(applied.before, applied.after, strict=True), 1)
    ]
    notes = ["the transformed workload runs; your files were not changed"]
    if not applied.finite:
        notes.append("a loss is not finite: do not use this technique here")
    elif applied.difference is None:
        notes.append("its steps return no number, so that losses cannot be compared")
    else:
        size = f"{100 * abs(applied.difference):.3f} %"
        notes.append(f"after {len(rows)} steps the losses differ by {size}")
    table = Table(
        [
            Column("step", "right"),
            Column("loss as it is", "right"),
            Column(f"with {technique[0]}", "right"),
            Column("difference", "right"),
        ],
        rows,
        title=f"{recipe.name} with {technique[0]}",
        notes=[*notes, *(change.diff for change in applied.code)],
    )
    payload = {
        "workload": recipe.name,
        "technique": technique[0],
        "losses_before": list(applied.before),
        "losses_after": list(applied.after),
        "finite": applied.finite,
        "relative_difference": applied.difference,
        "diffs": [change.diff for change in applied.code],
    }
    emit(table, payload, as_json=as_json)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _difference(before: float | None, after: float | None) -> str:
    if before is None or after is None or not before:
        return "-"
    return f"{100 * (after - before) / abs(before):+.3f} %"
