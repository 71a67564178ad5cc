"""``slipstream bench compression``: encoders, replicas, and predicted steps next to real ones.

Models sleep instead of computing, within autograd, so that links and schedule are judged (one model
computes); ranks are processes on hosts with shaped links. Predictions use a profile of one process,
a calibration of the same links that alternates with the steps, and micro-benchmarks of the
encoders, as for a user. Everything runs at a higher priority than other programs, if permitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slipstream.cluster import Cluster, ClusterError, LinkKind, star
from slipstream.cluster.fitting import fit
from slipstream.cluster.quantity import NOT_GIVEN
from slipstream.cluster.samples import COMPUTING, Operation
from slipstream.durations import Durations, Timing, TimingRequest
from slipstream.graph import Call, Editor, Exchange, Graph, StepPhase, replace_tasks
from slipstream.ranks import why_no_netlab
from slipstream.ranks.calibration import computing_operations, cores, fitted_cluster, samples_of
from slipstream.ranks.hosts import HEADERS
from slipstream.techniques.distributed.compression.technique import OP
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.verbs.results import Prediction
from slipstream.workload import Workload
from slipstream_bench.lab import MBIT, first_served
from slipstream_bench.rank_models import batch_of, model_of
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.compression import encoders, rank
from slipstream_bench.systems.compression.rank import MEETING
from slipstream_bench.systems.compression.ranks import run

METHODS = ("none", "cast:bf16", "powersgd:4,start=2", "topk:0.01", "sign")
# Difference from which a verdict counts.
_CLEAR = 0.05
# Ranks that compute share this machine's caches and cores, and wait for the slower one at every
# bucket, so that they take longer than the recorded step alone. Predictions are for the pace of
# ranks that send one number per bucket, up to this factor.
_BUSY = 1.5
# Bytes per second of a link that takes no time.
_UNLIMITED = 1e15
# Sizes of messages that determine the links' rates; the shortest shows the latency alone. Adding
# sums is also timed without messages; messages to a neighbour are not added.
_REDUCED = (1 << 9, 1 << 17, 1 << 19, 1 << 20)
_SHIFTED = (1 << 9, 1 << 16, 1 << 18, 1 << 19)
_ADDED = 1 << 20
# An acknowledgement of 66 bytes for every two packets.
_ACKNOWLEDGED = 33 / 1448
# Around every message gloo's two sides exchange requests and acknowledgements: measured, of
# all-reduces and gathers of 16 bytes between 2 and 4 ranks (362 to 387).
_MESSAGE_BYTES = 370
_ROW = "steps"
_AUTOS = ("cast:bf16", "powersgd:4")
_CELLS = 60
_DECIDES_AFTER = 50
# Encoders as slow as on a device that takes this many seconds longer per byte of gradients: with
# this processor's own, compression is worth it on every link that can be shaped here.
_CROSSING = (("topk:0.01", 130e-9), ("powersgd:4,start=2", 160e-9))
_AROUND = (30, 45, 70, 110)


@dataclass(frozen=True)
class Model:
    """A stack of linear layers.

    Attributes:
        layers, width: number and width of float32 layers; two parameters per layer.
        forward_s, backward_s: time that each layer sleeps in addition to computing.
        rows: rows of a rank's batch.
        bucket_mb: bucket size of DDP.
    """

    layers: int
    width: int
    forward_s: float
    backward_s: float
    rows: int
    bucket_mb: float

    def spec(self) -> list[Any]:
        """Return the arguments of `model_of`."""
        return [self.layers, self.width, self.forward_s, self.backward_s, self.rows]


MODELS = {
    "narrow": Model(8, 256, 0.010, 0.025, 4, 0.5),
    "wide": Model(8, 320, 0.005, 0.010, 4, 0.8),
    "slow": Model(4, 256, 0.030, 0.090, 4, 0.25),
    "computing": Model(6, 320, 0.0, 0.0, 1024, 0.8),
}
# Slow enough that busy cores still shape them; so models are smaller, and sleep longer.
LINKS = (15, 30, 60, 120)


def graph_of(model: Model) -> Graph:
    """Return the recorded step of one process, including its sleep."""
    import torch

    torch.set_num_threads(1)
    net = model_of(model.spec())
    workload = Workload.of(
        net,
        batch_of(model.spec(), 0),
        lambda out: out.sum(),
        torch.optim.SGD(net.parameters(), 1e-3),
    )
    return asleep(profile(workload, steps=8, threads=1), model)


def asleep(graph: Graph, model: Model) -> Graph:
    """Add the sleep of a model's layers, which is no operator's time, to a recorded step.

    Raises:
        ClusterError: the step has a different number of layers.
    """
    edit = Editor(graph, "sleeping")
    tasks = graph.tasks
    names = np.array([graph.string(int(n)) for n in tasks.name.tolist()])
    takes_ns = tasks.duration_ns + tasks.gap_ns
    for phase, name, layer_s in (
        (StepPhase.FORWARD, "aten::clone", model.forward_s),
        (StepPhase.BACKWARD, "aten::threshold_backward", model.backward_s),
    ):
        ours = np.flatnonzero(tasks.phase == phase)
        last = int(ours[0])
        sleeping = ours[names[ours] == name].tolist()
        if len(sleeping) != model.layers:
            raise ClusterError(f"{len(sleeping)} places to sleep in, of {model.layers}")
        for task in sleeping if layer_s else ():
            computed_ns = float(takes_ns[last:task].sum())
            edit.set_gap(task, max(0.0, layer_s * 1e9 - computed_ns))
            # The recorded gap has been replaced.
            takes_ns[task] = tasks.duration_ns[task]
            last = task
    return edit.apply(f"{model.layers} layers sleep")


def predicted(
    graph: Graph, model: Model, cluster: Cluster, methods: Sequence[str], ranks: int,
    durations: Durations | None = None,
) -> dict[str, Prediction]:  # fmt: skip
    """Return the prediction of each method."""
    ddp = f"ddp:{ranks},bucket_mb={model.bucket_mb:g}"
    texts = [ddp if how == "none" else f"{ddp}+{how}" for how in methods]
    predictions = predict(graph, texts, cluster=cluster, durations=durations)
    return dict(zip(methods, predictions, strict=True))


@dataclass(frozen=True)
class Measured:
    """Measurements of ranks in one run.

    Attributes:
        arms: per method ``median_s`` of a step of its slowest rank, ``sent`` bytes of a rank, and
            the method that `auto` has ``chosen``.
        cluster: fitted to communications that alternated with the steps, so that disturbances of
            the shaped links affect both.
    """

    arms: dict[str, dict[str, Any]]
    cluster: Cluster


def measured(
    model: Model, megabits: float, methods: Sequence[str], ranks: int, rounds: int,
    slow_s: float = 0.0,
) -> Measured:  # fmt: skip
    """Run steps of each method alternately, on links of `megabits` Mbit/s.

    Raises:
        ClusterError: a rank failed, or no latency and bandwidth fit the communications.
    """
    all_ranks = tuple(range(ranks))
    operations = [Operation("all_reduce", size, all_ranks, rounds) for size in _REDUCED]
    operations += [Operation("p2p", size, all_ranks, rounds) for size in _SHIFTED]
    operations.append(Operation("add", _ADDED, all_ranks, rounds))
    operations += computing_operations(ranks, rounds)
    in_a_turn = [
        asdict(replace(operation, repeats=_repeats(operation), warmup=0))
        for operation in operations
    ]
    answers = run(
        ranks, megabits * MBIT, rank.steps, methods=methods, model=model.spec(),
        bucket_mb=model.bucket_mb, slow_s=slow_s, decide=_DECIDES_AFTER, rounds=rounds,
        operations=in_a_turn,
    )  # fmt: skip
    arms = {}
    for of_ranks in zip(*(found for found, _ in answers), strict=True):
        slowest = np.max([result["times_s"] for result in of_ranks], axis=0)
        arms[of_ranks[0]["how"]] = {**of_ranks[0], "median_s": float(np.median(slowest))}
    samples = samples_of(operations, [times_s for _, times_s in answers])
    where = f"network lab, cables of {megabits:g} Mbit/s"
    return Measured(arms, fitted_cluster(ranks, where, True, fit(samples), samples, "gloo"))


def _repeats(operation: Operation) -> int:
    """Return repeats per turn, more for short operations, whose times vary more."""
    if operation.kind in COMPUTING:
        return 3
    return 1 if operation.nbytes > _REDUCED[0] else 5


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: one model on one link; encoders keep their full size."""
    yield from encoders.bars(options)
    reason = why_no_netlab()
    if reason is not None:
        yield not_judged("predicted step, median error", "%", "<= 5 (largest <= 12)", reason)
        return
    graphs: dict[str, Graph] = {}
    with first_served():
        yield from _grid(options, graphs)
        yield from _crossovers(options, graphs)


# ---- the grid ------------------------------------------------------------------------------------


def _grid(options: BenchOptions, graphs: dict[str, Graph]) -> Iterator[Bar]:
    cells = [(name, megabits, 2) for name in MODELS for megabits in LINKS]
    cells += [("narrow", megabits, 4) for megabits in LINKS[1:3]]
    selected = cells if options.full else [("narrow", LINKS[2], 2)]
    yield from grid_rows(options, graphs, selected, _ROW, "predicted step", _summary)


def grid_rows(
    options: BenchOptions,
    graphs: dict[str, Graph],
    cells: Sequence[tuple[str, int, int]],
    prefix: str,
    over_all: str,
    summary: Callable[[Sequence[Bar]], Iterable[Bar]],
    methods: Sequence[str] = METHODS,
) -> Iterator[Bar]:
    """Yield a row per cell, then rows over all cells, including recorded ones.

    Args:
        graphs: graphs of models by name, recorded when first needed.
        cells: model, Mbit/s and ranks of each cell.
        prefix: prefix of the cells' rows.
        over_all: prefix of the summary rows.
        summary: makes the summary rows.
    """
    known_rows = {**options.recorded, **options.done}
    rows = {
        bar: row
        for bar, row in known_rows.items()
        if bar.startswith(prefix) and "cells" in row.data
    }
    measured_now = False
    for name, megabits, ranks in cells:
        bar = f"{prefix}: {name}, {megabits} Mbit/s, {ranks} ranks: largest error"
        if not options.wants(bar):
            continue
        options.progress(bar)
        graph = graphs[name] = graphs.get(name) or graph_of(MODELS[name])
        rounds = 5 if options.full else 3
        try:
            row = cell_row(bar, graph, name, megabits, ranks, rounds, methods)
        except ClusterError as error:
            yield not_judged(bar, "%", "<= 12", error.what)
            continue
        rows[bar] = row
        measured_now = True
        yield row
    if rows and (measured_now or options.wants(over_all)):
        yield from summary(list(rows.values()))


def cell_row(
    bar: str, graph: Graph, name: str, megabits: int, ranks: int, rounds: int,
    methods: Sequence[str] = METHODS,
) -> Bar:  # fmt: skip
    """Return a row of each method's measured and predicted step; its data is for `cells_of`.

    Raises:
        ClusterError: as `measured` raises, or the cores are busy with other programs.
    """
    model = MODELS[name]
    others = [] if model.forward_s else [MEETING]
    others += ["auto"] if methods is METHODS else []
    run = measured(model, megabits, [*methods, *others], ranks, rounds)
    arms = run.arms
    pace = 1.0
    if MEETING in others:
        pace = _pace(graph, model, run, ranks)
        graph = _shared_machine(graph, ranks, pace)
    predictions = predicted(graph, model, run.cluster, methods, ranks)
    notes, errors = [], []
    data: dict[str, Any] = {"cells": {}}
    for how in methods:
        step_ms, wanted_ms = arms[how]["median_s"] * 1e3, predictions[how].step_ns / 1e6
        errors.append(abs(wanted_ms / step_ms - 1.0))
        ratio = arms[how]["sent"] / _interface_bytes(predictions[how].graph)
        data["cells"][how] = {
            "step_ms": step_ms, "predicted_ms": wanted_ms, "bytes_over_told": ratio,
        }  # fmt: skip
        notes.append(f"{how} {step_ms:.1f} (predicted {wanted_ms:.1f}, {ratio:.3f} x the bytes)")
    if MEETING in others:
        data["meeting_over_recorded"] = pace
        notes.append(f"computing; sending a number per bucket takes {pace:.2f} x the recorded step")
    if "auto" in others:
        auto_ms = arms["auto"]["median_s"] * 1e3
        data["auto"] = {"step_ms": auto_ms, "chosen": arms["auto"]["chosen"]}
        notes.append(f"auto {auto_ms:.1f} chose {arms['auto']['chosen']}")
    return at_most(
        bar,
        100 * max(errors),
        12.0,
        "%",
        n=len(errors),
        detail=", ".join(notes) + "; ms",
        data=data,
    )


def _pace(graph: Graph, model: Model, run: Measured, ranks: int) -> float:
    """Return the pace of ranks that send one number per bucket, relative to the recorded step.

    Raises:
        ClusterError: the pace shows that other programs use the cores.
    """
    alone, links = _shared_machine(graph, ranks, 1.0), _without_bytes(run.cluster)
    predicted_s = predicted(alone, model, links, ["none"], ranks)["none"].step_ns / 1e9
    meeting_s: float = run.arms[MEETING]["median_s"]
    if meeting_s > _BUSY * predicted_s:
        raise ClusterError(
            "the cores are busy: with one number sent per bucket the ranks' step takes "
            f"{1e3 * meeting_s:.0f} ms instead of the recorded {1e3 * predicted_s:.0f}"
        )
    return meeting_s / predicted_s


def _shared_machine(graph: Graph, ranks: int, slower: float) -> Graph:
    """Return the step, slower as if `ranks` processes compute on the cores of one machine."""
    machine = {**graph.meta.get("machine", {}), "cpu.logical": max(1, cores() // ranks)}
    graph = replace(graph, meta={**graph.meta, "machine": machine})
    tasks = graph.tasks
    return replace_tasks(
        graph, duration_ns=slower * tasks.duration_ns, gap_ns=slower * tasks.gap_ns
    )


def _without_bytes(cluster: Cluster) -> Cluster:
    """Return the cluster with links of unlimited bandwidth and the same latency."""
    link = LinkKind.of("unlimited", _UNLIMITED)
    return replace(cluster, topology=star(cluster.devices, link), overlap_penalty=NOT_GIVEN)


def _interface_bytes(graph: Graph | None) -> float:
    """Return the bytes that a rank's interface sends in a step of the graph with gloo."""
    assert graph is not None
    return sum(
        row.sent_bytes * (HEADERS + _ACKNOWLEDGED) + _MESSAGE_BYTES * _messages(row)
        for row in graph.exchanges
    )


def _messages(row: Exchange) -> int:
    """Return messages per rank; gloo's all-reduce passes the ring twice, in two pieces each."""
    return (row.ranks - 1) * (4 if row.collective.kind == "all_reduce" else 1)


def cells_of(row: Bar) -> dict[str, tuple[float, float]]:
    """Return measured and predicted step by method, in ms, from a `cell_row`."""
    return {how: (c["step_ms"], c["predicted_ms"]) for how, c in row.data["cells"].items()}


def _summary(rows: Sequence[Bar]) -> Iterator[Bar]:
    """Yield summary rows over all cells."""
    errors, verdicts, wire, slower, behind = [], [], [], [], []
    for row in rows:
        cells = cells_of(row)
        wire += [abs(cell["bytes_over_told"] - 1.0) for cell in row.data["cells"].values()]
        errors += [abs(predicted_ms / step - 1.0) for step, predicted_ms in cells.values()]
        dense, dense_predicted = cells["none"]
        for how, (step, predicted_ms) in cells.items():
            if how != "none" and abs(step / dense - 1.0) > _CLEAR:
                verdicts.append((step < dense) == (predicted_ms < dense_predicted))
        auto = row.data["auto"]["step_ms"]
        tried = [step for how, (step, _) in cells.items() if how.startswith(_AUTOS)]
        slower.append(auto / dense - 1.0)
        behind.append(auto / min(dense, *tried) - 1.0)
    count = len(errors)
    few = "" if count >= _CELLS else f", not {_CELLS}"
    middle, largest = statistics.median(errors), max(errors)
    within = middle <= 0.05 and largest <= 0.12
    yield Bar(
        "predicted step, median error", 100 * middle, "%", "<= 5 (largest <= 12)",
        None if few and within else within, count,
        f"largest {100 * largest:.1f} %, {sum(e <= 0.12 for e in errors)} of {count} cells{few} "
        "within 12 %",
    )  # fmt: skip
    if verdicts:
        yield at_least(
            "verdict of the prediction", 100 * sum(verdicts) / len(verdicts), 95.0, "%",
            n=len(verdicts), detail="faster or slower than none, where it differs by 5 %",
        )  # fmt: skip
    yield at_most(
        "bytes at the interface against those told", 100 * statistics.median(wire), 3.0, "%",
        n=len(wire),
        detail=f"largest {100 * max(wire):.1f} %; headers, acknowledgements, gloo's own",
    )  # fmt: skip
    yield at_most("auto against none", 100 * max(slower), 3.0, "%", n=len(slower),
                  detail=f"the worst of {len(slower)}, after {_DECIDES_AFTER} steps")  # fmt: skip
    near = sum(excess <= 0.08 for excess in behind)
    yield at_least(
        "auto within 8 % of the best of its candidates", 100 * near / len(behind), 90.0, "%",
        n=len(behind), detail=f"the worst {100 * max(behind):.1f} % behind",
    )  # fmt: skip


# ---- where compression begins to pay -------------------------------------------------------------


class _Slower:
    """Durations of encoders on a slower device, for ranks that sleep as long."""

    def __init__(self, slow_s: float) -> None:
        self._here, self._slow_s = Durations(threads=1), slow_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here, name)

    def lookup(self, call: Call | TimingRequest) -> Timing | None:
        """Return the duration on this machine plus the sleep."""
        answer = self._here.lookup(call)
        inner = call.call if isinstance(call, TimingRequest) else call
        if answer is None or not inner.name.startswith(OP.partition("(")[0]):
            return answer
        numbers = sum(int(np.prod(shape)) for shape in inner.arguments[1])
        return replace(answer, nanoseconds=answer.nanoseconds + 4e9 * self._slow_s * numbers)


def _crossovers(options: BenchOptions, graphs: dict[str, Graph]) -> Iterator[Bar]:
    for how, slow_s in _CROSSING if options.full else ():
        bar = f"bandwidth from which {how} stops to pay, measured against predicted"
        if not options.wants(bar):
            continue
        options.progress(bar)
        graph = graphs["narrow"] = graphs.get("narrow") or graph_of(MODELS["narrow"])
        try:
            yield _crossing_row(bar, options, graph, how, slow_s)
        except ClusterError as error:
            yield not_judged(bar, "%", "<= 15", error.what)


def _crossing_row(bar: str, options: BenchOptions, graph: Graph, how: str, slow_s: float) -> Bar:
    """Find where the measured ratio of two methods passes 1, and where the predicted one does."""
    ratios, predicted_ratios = [], []
    for megabits in _AROUND:
        options.progress(f"{bar}: {megabits} Mbit/s")
        run = measured(MODELS["narrow"], megabits, ["none", how], 2, 6, slow_s=slow_s)
        ratios.append(run.arms[how]["median_s"] / run.arms["none"]["median_s"])
        durations: Any = _Slower(slow_s)
        predictions = predicted(graph, MODELS["narrow"], run.cluster, ["none", how], 2, durations)
        predicted_ratios.append(predictions[how].step_ns / predictions["none"].step_ns)
    crossing, predicted_crossing = (
        float(np.exp(np.interp(0.0, np.log(side), np.log(_AROUND))))
        for side in (ratios, predicted_ratios)
    )
    between = ratios[0] < 1.0 < ratios[-1] and predicted_ratios[0] < 1.0 < predicted_ratios[-1]
    error = 100 * abs(crossing / predicted_crossing - 1.0)
    rows = zip(_AROUND, ratios, predicted_ratios, strict=True)
    return Bar(
        bar, error, "%", "<= 15", between and error <= 15.0, len(ratios),
        f"predicted {predicted_crossing:.0f}, measured {crossing:.0f} Mbit/s; time over none "
        + ", ".join(f"at {at}: {ratio:.3f} (predicted {other:.3f})" for at, ratio, other in rows)
        + f"; an encoder that takes {1e9 * slow_s:.0f} ms/MB longer than on this machine",
    )  # fmt: skip
