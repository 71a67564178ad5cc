"""Options shared by several commands, and the `Request` built from those of a workload."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        help="file.py:function, a plain training script.py (script.py:LINE for the loop on a "
        "line), or a recorded run.slipgraph.",
    ),
]
Runnable = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="file.py:function, or a plain training script.py (script.py:LINE for the loop on a "
        "line).",
    ),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The plain script's own arguments."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Argument of the function; repeatable."),
]
Techniques = Annotated[
    list[str] | None,
    typer.Option(
        "--technique",
        "-t",
        metavar="NAME:KEY=VALUE,...",
        help="A technique, such as amp:bf16 (slipstream advise tries all of them). Join several "
        "with + to combine them; repeat the option to compare.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads", metavar="N", help="Intra-op threads; 0 keeps the workload's setting.", min=0
    ),
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", help="Steps to record.", min=1)]
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", metavar="TIME", help="Stop the workload if it reports nothing for this long."
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
        help="Also record: regions (as compiled by torch.compile), ids (rows of embedding "
        "tables that are used), spectra (singular values), grads (size and noise of gradients), "
        "sparsity (zeros).",
    ),
]
Goals = Annotated[
    list[str] | None,
    typer.Option(
        "--goal",
        "-g",
        metavar="GOAL",
        help="Limit such as 'memory<8GiB', 'latency<10ms', or 'p99<20ms' with --rate; or cost, to "
        "minimise it. Repeatable.",
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="RATE", help="Rate of random queries, each one step; for example 40/s."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
StorePath = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FILE",
        help="Results store; by default $SLIPSTREAM_STORE, else .slipstream/results.db.",
    ),
]


GraphPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.SLIPGRAPH",
        help="A recorded step, written by `slipstream profile` or `slipstream import`.",
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
    typer.Option("--cluster-set", metavar="KEY=N", help="Override a size, such as devices=64."),
]
# Options listed last in a command's help.
_LAST = ("store", "as_json")
_SHARED = {"settings": Set, "threads": Threads, "steps": Steps, "timeout": Timeout}


def asks(
    kind: Any, *, bare: bool = False, **shared: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that a `Request` is built from to a command that takes one first.

    Args:
        kind: `Target`, or `Runnable` if the command cannot use a recording.
        bare: whether the workload takes no arguments in this command.
        shared: default of each shared option that the command has.
    """
    first: dict[str, tuple[Any, Any]] = {"workload": (kind, inspect.Parameter.empty)}
    if not bare:
        first["script_arguments"] = (ScriptArguments, None)
        shared = {"settings": None, **shared}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(*positional: Any, **named: Any) -> None:
            from slipstream.verbs.request import Request

            bound = signature.bind(*positional, **named)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            fields = {name: arguments.pop(name) for name in (*first, *shared)}
            request = Request.parse(
                fields.pop("workload"), fields.pop("script_arguments", None) or (),
                fields.pop("settings", None) or (), **fields,
            )  # fmt: skip
            if kind is Runnable:
                request.need_runnable()
            command(request, **arguments)

        last = {name: (_SHARED[name], value) for name, value in shared.items()}
        signature = declare(wrapper, command, first, last)
        return wrapper

    return decorate


def declare(
    wrapper: Callable[..., None],
    command: Callable[..., None],
    first: Mapping[str, tuple[Any, Any]],
    last: Mapping[str, tuple[Any, Any]],
) -> inspect.Signature:
    """Give `wrapper` the options of `command` but the first parameter, between `first` and `last`.

    Args:
        first, last: annotation and default of options by name. ``--store`` and ``--json`` of the
            command come after `last`.
    """
    declared = [
        (name, (eval(param.annotation, command.__globals__), param.default))
        for name, param in list(inspect.signature(command).parameters.items())[1:]
    ]
    own = [(name, option) for name, option in declared if name not in _LAST]
    ending = [(name, option) for name, option in declared if name in _LAST]
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=value
        )
        for name, (kind, value) in (*first.items(), *own, *last.items(), *ending)
    ]
    signature = inspect.Signature(parameters)
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {param.name: param.annotation for param in parameters}
    return signature


def statistics_of(record: Sequence[str] | None) -> list[str]:
    """Return the names of the statistics in ``--record a,b --record c``."""
    return [name.strip() for text in record or () for name in text.split(",")]


def needs_of(techniques: Iterable[str]) -> set[str]:
    """Return the names of the statistics needed to predict these combinations.

    Raises:
        UsageError: a text is not a valid technique spec.
    """
    from slipstream import technique

    parts = [part for text in techniques for part in technique.parse(text)]
    return {need for part in parts for need in part.traits.needs}


def numbers(text: str, option: str, example: str, min_count: int = 1) -> list[int]:
    """Return the integers of a list such as ``1,2,3``.

    Raises:
        InvalidArgumentError: `text` is malformed, or has fewer than `min_count` integers.
    """
    from slipstream.errors import InvalidArgumentError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(
            option, f"'{text}' is not a list of integers", remedy=f"for example {option} {example}"
        )
    listed = [int(part) for part in parts]
    if len(set(listed)) < min_count:
        raise InvalidArgumentError(
            option, f"'{text}' has fewer than {min_count} different integers",
            remedy=f"for example {option} {example}",
        )  # fmt: skip
    return listed


def load_cluster(name: str, sizes: Sequence[str] | None, option: str = "--set") -> Cluster:
    """Load a cluster with `sizes` such as hosts=64 or dims=8x8, the values of `option`.

    Prints a note on stderr if the cluster was calibrated on another machine.

    Raises:
        UsageError: a size is malformed.
        UnknownNameError: the preset, file or setting does not exist.
        InvalidArgumentError: the cluster is malformed.
    """
    from slipstream.cluster import Cluster
    from slipstream.ranks import calibrated_here

    overrides: dict[str, Any] = {}
    for text in sizes or ():
        key, equals, value = text.partition("=")
        numbers = value.split("x")
        if not equals or not all(n.isdecimal() for n in numbers):
            raise UsageError(
                f"{option} {text} is not a size", remedy=f"{option} hosts=64 or {option} dims=8x8"
            )
        overrides[key] = int(value) if len(numbers) == 1 else [int(n) for n in numbers]
    cluster = Cluster.load(name, **overrides)
    if calibrated_here(cluster) is False:
        note(f"{name} was calibrated on another machine, or on this one before it changed")
    return cluster


def cluster_of(name: str | None, sizes: Sequence[str] | None) -> Cluster | None:
    """Return the cluster of ``--cluster`` and ``--cluster-set``, or None without one.

    Raises:
        UsageError: there are sizes without a cluster, or a size is malformed.
        UnknownNameError: the preset, file or setting does not exist.
        InvalidArgumentError: the cluster is malformed.
    """
    if name is None:
        if sizes:
            raise UsageError(f"--cluster-set {sizes[0]} needs a cluster", remedy="--cluster NAME")
        return None
    return load_cluster(name, sizes, "--cluster-set")
