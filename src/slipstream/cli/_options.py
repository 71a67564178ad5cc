"""Options that several commands share, and the request that those of a workload make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._output import note
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.verbs.request import Request as Request

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
Goals = Annotated[
    list[str] | None,
    typer.Option(
        "--goal",
        "-g",
        metavar="GOAL",
        help="What must hold: 'memory<8GiB', 'latency<10ms', with --rate 'p99<20ms'; or cost. "
        "Repeatable.",
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="RATE", help="Queries that come at random, each a step, as 40/s."
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


GraphPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.SLIPGRAPH",
        help="A recorded step: `slipstream profile` and `slipstream import` write them.",
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Where workers run: a preset, a TOML file, or workers=4,link=10gbit,latency=50us.",
    ),
]
ClusterSizes = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster-set", metavar="KEY=N", help="Another size of the cluster, as devices=64."
    ),
]
# What stands last in a command's help.
_LAST = ("store", "as_json")
_SHARED = {"settings": Set, "threads": Threads, "steps": Steps, "timeout": Timeout}


def asks(
    kind: Any, *, bare: bool = False, **shared: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, whose first parameter is a `Request`, the options that make one.

    Args:
        kind: `Target`, or `Runnable` for what cannot do with a recording.
        bare: whether the workload takes no arguments here.
        shared: of the shared options, which the command has, and what they are by default.
    """
    first: dict[str, tuple[Any, Any]] = {"workload": (kind, inspect.Parameter.empty)}
    if not bare:
        first["script_arguments"] = (ScriptArguments, None)
        shared = {"settings": None, **shared}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(*positional: Any, **named: Any) -> None:
            from slipstream.verbs.request import Request

            given = signature.bind(*positional, **named)
            given.apply_defaults()
            arguments = dict(given.arguments)
            asked = {name: arguments.pop(name) for name in (*first, *shared)}
            request = Request.parse(
                asked.pop("workload"), asked.pop("script_arguments", None) or (),
                asked.pop("settings", None) or (), **asked,
            )  # fmt: skip
            if kind is Runnable:
                request.need_runnable()
            command(request, **arguments)

        parameter = functools.partial(
            inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        declared = [
            one.replace(annotation=eval(one.annotation, command.__globals__))
            for one in list(inspect.signature(command).parameters.values())[1:]
        ]
        parameters = [
            *(parameter(n, annotation=kind, default=value) for n, (kind, value) in first.items()),
            *(one for one in declared if one.name not in _LAST),
            *(parameter(n, annotation=_SHARED[n], default=value) for n, value in shared.items()),
            *(one for one in declared if one.name in _LAST),
        ]
        signature = inspect.Signature(parameters)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapper

    return decorate


def statistics_of(record: Sequence[str] | None) -> list[str]:
    """The statistics that ``--record a,b --record c`` names."""
    return [name.strip() for text in record or () for name in text.split(",")]


def needs_of(techniques: Iterable[str]) -> set[str]:
    """The statistics that predicting these combinations takes.

    Raises:
        UsageError: a name or setting that is not in the grammar.
    """
    from slipstream import technique

    parts = [one for text in techniques for one in technique.parse(text)]
    return {need for one in parts for need in one.traits.needs}


def numbers(text: str, option: str, example: str, fewest: int = 1) -> list[int]:
    """The integers that ``1,2,3`` lists, `fewest` different ones at least.

    Raises:
        InvalidArgumentError: something else is there, or too few.
    """
    from slipstream.errors import InvalidArgumentError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(
            option, f"'{text}' is not a list of numbers", remedy=f"for example {option} {example}"
        )
    listed = [int(part) for part in parts]
    if len(set(listed)) < fewest:
        raise InvalidArgumentError(
            option, f"'{text}' are fewer than {fewest} different numbers",
            remedy=f"for example {option} {example}",
        )  # fmt: skip
    return listed


def load_cluster(name: str, sizes: Sequence[str] | None, option: str = "--set") -> Cluster:
    """A cluster with the sizes that `option` gives, as hosts=64 or dims=8x8.

    Says on stderr what is doubtful about it.

    Raises:
        UsageError: a size that is none.
        UnknownNameError: no such preset, file or setting.
        InvalidArgumentError: a malformed cluster.
    """
    from slipstream.cluster import Cluster
    from slipstream.ranks import measured_here

    given: dict[str, Any] = {}
    for text in sizes or ():
        key, equals, value = text.partition("=")
        numbers = value.split("x")
        if not equals or not all(n.isdecimal() for n in numbers):
            raise UsageError(
                f"{option} {text} is not a size", remedy=f"{option} hosts=64, {option} dims=8x8"
            )
        given[key] = int(value) if len(numbers) == 1 else [int(n) for n in numbers]
    cluster = Cluster.load(name, **given)
    if measured_here(cluster) is False:
        note(f"{name} was calibrated on another machine, or on this one before it changed")
    return cluster


def cluster_of(name: str | None, sizes: Sequence[str] | None) -> Cluster | None:
    """The cluster that the options of a command name.

    Raises:
        UsageError: sizes of no cluster.
        UnknownNameError: no such preset, file or setting.
        InvalidArgumentError: a malformed cluster or size.
    """
    if name is None:
        if sizes:
            raise UsageError(f"--cluster-set {sizes[0]} sizes no cluster", remedy="--cluster NAME")
        return None
    return load_cluster(name, sizes, "--cluster-set")
