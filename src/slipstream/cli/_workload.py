"""What the verbs of the flow share: the workload's options, the ledger, the words for results."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.tables import Column, Table

if TYPE_CHECKING:
    from slipstream.graph import Graph
    from slipstream.measure.ledger import Score
    from slipstream.measure.measured import Measured
    from slipstream.measure.records import Environment
    from slipstream.measure.store import Store
    from slipstream.verbs.predicting import Prediction
    from slipstream.workload import Workload

# Ends of an interval that are further apart than this factor make it a wide one.
_WIDE = 1.25
_Z90 = 1.645

Target = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="file.py:function, a plain training script.py, or a recorded run.slipgraph.",
    ),
]
Runnable = Annotated[
    str,
    typer.Argument(metavar="WORKLOAD", help="file.py:function, or a plain training script.py."),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The plain script's own arguments."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An argument of the function; repeatable."),
]
Techniques = Annotated[
    list[str] | None,
    typer.Option(
        "--technique",
        "-t",
        metavar="NAME:KEY=VALUE,...",
        help="A technique, such as amp:bf16 (slipstream advise tries all there are); joined with "
        "+ for a combination. Repeat to compare.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads", metavar="N", help="Intra-op threads; 0 for what the workload sets.", min=0
    ),
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", help="Steps to record.", min=1)]
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", metavar="TIME", help="Stop the workload when it is silent for this long."
    ),
]
WhatIf = Annotated[
    bool, typer.Option("--what-if/--no-what-if", help="Whether to simulate techniques.")
]
Batches = Annotated[
    bool, typer.Option("--batches/--no-batches", help="Whether to measure other batch sizes.")
]
Record = Annotated[
    list[str] | None,
    typer.Option(
        "--record",
        metavar="STATISTIC,...",
        help="Record these besides: regions (what torch.compile makes of the model), ids (which "
        "rows of embedding tables), spectra (singular values), grads (gradients' size and noise), "
        "sparsity (zeros).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
StorePath = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FILE",
        help="The results store; by default $SLIPSTREAM_STORE, else .slipstream/results.db.",
    ),
]


def workload_of(
    target: str, script_arguments: Sequence[str] | None, settings: Sequence[str] | None
) -> Workload:
    """The workload a command line names.

    Raises:
        UsageError: malformed; WorkloadError: no such file; UnknownNameError: no such function.
    """
    from slipstream.workload import Workload

    arguments = _arguments(target, script_arguments, settings)
    return Workload.parse(target, *(script_arguments or ()), **arguments)


def live_workload(
    target: str, script_arguments: Sequence[str] | None, settings: Sequence[str] | None
) -> Workload:
    """As `workload_of`; but a file that does not parse now may do so when it is saved next."""
    from slipstream.live.analysis import parse_workload

    arguments = _arguments(target, script_arguments, settings)
    return parse_workload(target, *(script_arguments or ()), **arguments)


def _arguments(
    target: str, script_arguments: Sequence[str] | None, settings: Sequence[str] | None
) -> dict[str, Any]:
    """What ``--set`` gives a function."""
    if target.endswith(".slipgraph"):
        raise UsageError(
            f"'{target}' is a recording, which cannot be run",
            remedy="name the workload itself, file.py:function or script.py; "
            "predict and advise take recordings",
        )
    arguments: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidArgumentError(
                "--set", f"'{text}' is not KEY=VALUE", remedy="as --set batch_size=64"
            )
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    if script_arguments and ".py:" in target:
        raise UsageError(
            f"'{script_arguments[0]}' is one argument too many",
            remedy="give a function's arguments with --set KEY=VALUE",
        )
    return arguments


def graph_of(
    target: str,
    script_arguments: Sequence[str] | None,
    settings: Sequence[str] | None,
    *,
    threads: int,
    steps: int,
    timeout: str,
    say: Callable[[str], None],
    needs: Collection[str] = (),
) -> Graph:
    """A recorded graph, or one recorded now with the statistics in `needs`."""
    if target.endswith(".slipgraph"):
        if script_arguments or settings:
            given = script_arguments[0] if script_arguments else f"--set {(settings or ('',))[0]}"
            raise UsageError(
                f"a recorded graph takes no arguments, such as '{given}'",
                remedy="name the workload itself to record it anew with other arguments",
            )
        return load_recording(Path(target))
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.profiling import profile

    return profile(
        workload_of(target, script_arguments, settings),
        steps=steps,
        threads=threads,
        timeout_s=parse_duration_ns(timeout, "--timeout") / 1e9,
        needs=needs,
        say=say,
    )


def load_recording(path: Path) -> Graph:
    """The graph in `path`; says on stderr when the code it was recorded of is another by now.

    Raises:
        GraphError: as `slipstream.graph.load`.
    """
    from slipstream.cli._output import note
    from slipstream.graph import load
    from slipstream.graph.origin import has_changed

    graph = load(path)
    if file := has_changed(graph):
        when = str(graph.meta.get("created", ""))[:16].replace("T", " ")
        note(f"{file} has changed since this recording ({when} UTC): profile it again")
    return graph


def target_of(graph: Graph) -> str | None:
    """What a command names to run the recorded workload; None where the recording cannot tell."""
    recipe = graph.meta.get("recipe")
    return str(recipe["target"]) if isinstance(recipe, Mapping) else None


def command_for(verb: str, graph: Graph, technique: str) -> str:
    """The command line that does `verb` with `technique` to the workload as it was recorded."""
    recipe = graph.meta.get("recipe")
    if not isinstance(recipe, Mapping):
        return f"slipstream {verb} WORKLOAD --technique {technique}"
    words = ["slipstream", verb, str(recipe["target"])]
    for key, value in recipe["arguments"].items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    words += ["--technique", technique]
    if recipe["threads"]:
        words += ["--threads", str(recipe["threads"])]
    if recipe["script_arguments"]:
        words += ["--", *recipe["script_arguments"]]
    return shlex.join(words)


def statistics_of(record: Sequence[str] | None) -> list[str]:
    """The statistics that ``--record a,b --record c`` names."""
    return [name.strip() for text in record or () for name in text.split(",")]


def needs_of(techniques: Iterable[str]) -> set[str]:
    """The statistics that predicting these combinations takes.

    Raises:
        UsageError: a name or setting that is not in the grammar.
    """
    from slipstream import technique

    return {
        need for text in techniques for one in technique.parse(text) for need in one.traits.needs
    }


class History:
    """The prediction ledger for one command: widens intervals, keeps new predictions."""

    def __init__(self, store: Store, environment: Environment) -> None:
        from slipstream.measure.ledger import Ledger

        self.store = store
        self.environment = environment
        self._ledger = Ledger(store)
        self._calibration = self._ledger.calibration(environment, "cpu")
        self.note = self._calibration.note

    def widen(self, ratio: float, low: float, high: float) -> tuple[float, float]:
        """The interval of a prediction, as wide as this machine's past errors demand."""
        return self._calibration.widen(ratio, low, high)

    def keep(self, predictions: Sequence[Prediction], workload: str) -> None:
        """Record what was predicted, to be scored by a later measurement."""
        for prediction in predictions:
            if prediction.why_not is None:
                record = prediction.to_record(workload, self.environment.env_id)
                self._ledger.record(record, self.environment)

    def measured(
        self, predictions: Sequence[Prediction], workload: str, threads: int | None
    ) -> dict[str, Measured]:
        """By technique: what the latest measurement of it found on this machine."""
        from slipstream.measure.measured import latest_measured

        found = latest_measured(self.store, workload, self.environment, threads)
        return {
            p.technique: found[p.technique, p.metric]
            for p in predictions
            if (p.technique, p.metric) in found
        }

    def shown_before(self, experiment_id: str) -> list[Score]:
        """Scores, by that experiment, of what was shown before it; the latest of each."""
        found = self._ledger.evidence()
        return [s for s in found if s.experiment_id == experiment_id and not s.attached]


@contextlib.contextmanager
def history(path: Path | None) -> Iterator[History]:
    """The ledger in the results store at `path`."""
    from slipstream.measure.environment import capture
    from slipstream.measure.store import Store

    with Store(path) as store:
        yield History(store, capture(torch=False))


def prediction_table(
    graph: Graph,
    predictions: Sequence[Prediction],
    *notes: str,
    marked: Collection[str] = (),
) -> Table:
    """One row a technique: step time, speed-up, interval, what it rests on, the verdict.

    What does not apply follows below, with its reason. The names in `marked` carry a star, which
    a note should explain.
    """
    from slipstream.units import format_duration, format_percent, format_reach

    rows = [
        (
            p.technique + (" *" if p.technique in marked else ""),
            f"{p.speedup:.2f}x",
            format_reach(p.speedup, 1 / p.high, 1 / p.low),
            memory_change(p),
            format_duration(p.step_ns),
            p.quality.kind.value if p.quality else "-",
            ", ".join(f"{format_percent(s)} {k}" for k, s in p.shares.items()),
            p.verdict,
        )
        for p in predictions
        if p.why_not is None
    ]
    lines = [as_it_is(graph, predictions), *notes, wide_by_page_faults(graph, predictions) or ""]
    if graph.meta.get("contended"):
        lines.append("the machine was busy while the step was recorded; minima were taken")
    if graph.meta.get("unaligned_share"):
        share = format_percent(graph.meta["unaligned_share"])
        lines.append(f"the steps differ in {share} of their operators; one of them was recorded")
    lines += [f"{p.technique} {p.verdict}: {p.why_not}" for p in predictions if p.why_not]
    lines += [
        f"{p.technique}: {p.quality.advice}"
        for p in predictions
        if p.why_not is None and p.quality is not None and p.quality.advice
    ]
    return Table(
        [
            Column("technique"),
            Column("speed-up", "right"),
            Column("90 % interval", "right"),
            Column("memory", "right"),
            Column("step", "right", optional=True),
            Column("numbers", optional=True),
            Column("rests on", optional=True),
            Column("verdict"),
        ],
        rows,
        title=f"predicted for {graph.meta.get('workload', 'this step')}",
        notes=[line for line in lines if line],
    )


def measured_note(technique: str, one: Measured) -> str:
    """What a measurement found, in the words of a prediction's row."""
    from slipstream.units import format_percent, format_reach

    claim = one.claim
    reach = format_reach(1 / claim.ratio, _inverse(claim.high), _inverse(claim.low))
    return (
        f"{technique}: measured {1 / claim.ratio:.2f}x {reach} on {one.created[:10]} "
        f"({claim.metric} time, {format_percent(claim.level)} interval; {claim.verdict})"
    )


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio > 0 else math.inf


def wide_by_page_faults(graph: Graph, predictions: Sequence[Prediction]) -> str | None:
    """Why intervals are wide, and what to do, where page faults are most of the reason."""
    from slipstream.graph.page_faults import page_fault_error_ns
    from slipstream.units import format_percent

    wide = [
        p
        for p in predictions
        if p.why_not is None and "allocator" not in p.technique and p.low * _WIDE < p.high
    ]
    if not wide:
        return None
    share = page_fault_error_ns(graph) / wide[0].baseline_ns
    # Of independent errors the squares add up: more than half of the narrowest one's.
    half = min(math.log(p.high / p.low) for p in wide) / 2
    if 2 * (_Z90 * share) ** 2 < half**2:
        return None
    return (
        f"intervals are wide because of page faults: they differ by {format_percent(share)} of "
        "this step from launch to launch; take `allocator` first, alone or as "
        "--technique TECHNIQUE+allocator, which keeps the pages and is predicted closely"
    )


def as_it_is(graph: Graph, predictions: Sequence[Prediction]) -> str:
    """The recorded step in one line."""
    from slipstream.units import format_bytes, format_duration

    step_ns = predictions[0].baseline_ns if predictions else 0.0
    peak = max((p.memory[0] for p in predictions), default=0)
    threads = graph.meta.get("threads")
    return (
        f"as it is: {format_duration(step_ns)} per step"
        + (f", {graph.samples} samples" if graph.samples else "")
        + f", {format_bytes(peak) + ' of tensors at most' if peak else 'memory not recorded'}"
        + (f" ({reason})" if not peak and (reason := graph.meta.get("memory_reason")) else "")
        + (f" ({threads} thread{'s' * (threads != 1)}, without contention)" if threads else "")
    )


def memory_change(prediction: Prediction) -> str:
    """The step's peak as it would be, and by how much that differs."""
    from slipstream.units import format_bytes

    before, after = prediction.memory
    if not before or not after:
        return "-"
    percent = round(100 * (after / before - 1))
    return f"{format_bytes(after)}, " + (f"{percent:+d} %" if percent else "0 %")
