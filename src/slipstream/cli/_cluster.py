"""What commands that predict for a cluster share: its options, and the words for results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import UsageError
from slipstream.tables import Column, Table

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.graph import Graph
    from slipstream.verbs.predicting import Prediction
    from slipstream.verbs.spreading import Compressing

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


def load_cluster(name: str, sizes: Sequence[str] | None, option: str = "--set") -> Cluster:
    """A cluster with the sizes that `option` gives, as hosts=64 or dims=8x8.

    Says on stderr what is doubtful about it.

    Raises:
        UsageError: a size that is none.
        UnknownNameError: no such preset, file or setting.
        InvalidArgumentError: a malformed cluster.
    """
    from slipstream.cli._output import note
    from slipstream.cluster import Cluster, measured_here

    given: dict[str, Any] = {}
    for text in sizes or ():
        key, equals, value = text.partition("=")
        numbers = value.split("x")
        if not equals or not all(n.isdecimal() for n in numbers):
            raise UsageError(
                f"{option} {text} is not a size", remedy=f"{option} hosts=64, {option} dims=8x8"
            )
        given[key] = int(value) if len(numbers) == 1 else [int(n) for n in numbers]
    found = Cluster.load(name, **given)
    if measured_here(found) is False:
        note(f"{name} was calibrated on another machine, or on this one before it changed")
    return found


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


def in_words(found: Compressing) -> list[str]:
    """Should gradients be compressed? The answer, and why."""
    from slipstream.units import format_duration

    step, budget = found.dense.step_ns, found.budget_ns
    best = found.best
    why = (
        f"sending holds the step up by {format_duration(budget)} of {format_duration(step)}, "
        "the most that encoding and decoding may cost"
    )
    if found.needed <= 1.0:
        return [
            "should I compress? No: what is sent is hidden behind the backward pass, "
            "so there is nothing to win"
        ]
    if best is None:
        head = "No: none of the installed methods is predicted to be faster"
        if not found.methods:
            head = "Perhaps, but no method is installed that applies here"
    else:
        gain = found.dense.ratio / best.prediction.ratio
        head = f"Yes: {best.prediction.technique} is predicted {gain:.2f}x as fast as without"
    enough = (
        "no fewer bytes would hide it, for its latency alone shows"
        if math.isinf(found.needed)
        else f"{found.needed:.3g} times fewer bytes would do (within 5 %), more is of no use"
    )
    lines = [f"should I compress? {head}", f"why: {why}; {enough}"]
    return lines + [
        f"{method.prediction.technique}: pays {_below(method.pays_below)} of bandwidth a "
        f"worker; here {_bits(found.bandwidth)}"
        for method in found.methods
    ]


def _below(rate: float) -> str:
    if not rate:
        return "at no rate"
    return "at any rate" if math.isinf(rate) else f"below {_bits(rate)}"


def _bits(rate: float) -> str:
    for factor, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if 8 * rate >= factor:
            return f"{8 * rate / factor:.3g} {unit}"
    return f"{8 * rate:.3g} bit/s"


def shared_table(
    graph: Graph, cluster: Cluster, predictions: Sequence[Prediction], *words: str
) -> Table:
    """One row a prediction that spreads the step: communication, what is sent, cost, the walls."""
    from slipstream.units import format_bytes, format_duration
    from slipstream.verbs.sharing import no_longer_exposed

    rows, notes = [], list(words)
    first: Prediction | None = None
    for p in predictions:
        if p.shared is None:
            continue
        one = p.shared
        first = first or p
        money = one.dollars(p.step_ns)
        samples = p.samples[1]
        rows.append(
            (
                p.technique,
                format_duration(p.step_ns),
                f"{samples / p.step_ns * 1e9:.4g}" if samples else "-",
                format_duration(one.exposed_ns),
                format_duration(one.hidden_ns),
                format_bytes(one.sent_bytes),
                "-" if money is None else f"{money / max(samples, 1) * 1e6:.3g}",
                one.walls[0].name if one.walls else "-",
                one.next_wall or "-",
            )
        )
        if first.shared is not None and p is not first:
            gone = no_longer_exposed(
                first.technique, first.shared.exposed_by_layer, p.technique, one.exposed_by_layer
            )
            notes += [gone] * bool(gone)
        if one.fits is False:
            notes.append(
                f"{p.technique}: {format_bytes(p.memory[1])} do not fit into the memory of a device"
            )
    kind = "" if cluster.device is None else f"; a {cluster.device.kind} is taken to compute"
    notes += [
        f"on {cluster.name}: {cluster.devices} devices{kind or '; devices are taken to compute'} "
        "as the recorded step did",
        _basis(cluster),
    ]
    if cluster.price_per_hour is None:
        notes.append("no price is known: add price_per_hour to the cluster's device")
    elif cluster.device is not None and cluster.device.price_per_hour is not None:
        notes.append(f"price: {cluster.device.price_per_hour.source}")
    return Table(
        [
            Column("technique"),
            Column("step", "right"),
            Column("samples/s", "right"),
            Column("exposed", "right"),
            Column("hidden", "right", optional=True),
            Column("sent/worker", "right"),
            Column("$/M samples" if graph.samples else "$/M steps", "right"),
            Column("wall"),
            Column("then"),
        ],
        rows,
        title="communication, cost and walls",
        notes=notes,
    )


def _basis(cluster: Cluster) -> str:
    from slipstream.units import format_percent

    known = cluster.calibration
    if known is None:
        return (
            f"network: {cluster.provenance}, taken to be 25 % unsure; "
            "measure yours: slipstream cluster measure"
        )
    return (
        f"network: fitted to measurements of {known.date}, nine of ten within "
        f"{format_percent(known.residual_p90)}"
    )
