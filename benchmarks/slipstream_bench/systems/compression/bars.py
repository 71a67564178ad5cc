"""``slipstream bench compression``: encoders, replicas, and predicted steps beside real ones.

Models sleep in place of computing, within autograd, so that links and schedule are what is judged
(one computes for real); ranks are processes on hosts with shaped cables. Predictions come from a
profile of one process, a calibration of the same cables that takes turns with the steps, and
micro-benchmarks of the encoders, as a user's do. All of it runs at a higher priority than other
programs, where that is allowed.
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
from slipstream.durations import Answer, Durations, Question
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
# A gap that a verdict is asked about.
_CLEAR = 0.05
# Ranks that compute for real share this machine's caches and cores, and wait for the slower one at
# every bucket, which takes them longer than the recorded step took alone: predictions are for steps
# at the pace of ranks that send a number of every bucket, up to so much longer.
_BUSY = 1.5
# Bytes a second of a link that takes no time.
_UNLIMITED = 1e15
# Messages whose times say what the cables carry; the shortest shows latency alone. Sums are added
# up as well, which is timed without any message, too; messages to a neighbour are not.
_REDUCED = (1 << 9, 1 << 17, 1 << 19, 1 << 20)
_SHIFTED = (1 << 9, 1 << 16, 1 << 18, 1 << 19)
_ADDED = 1 << 20
# An acknowledgement for every two packets, of 66 bytes.
_ACKNOWLEDGED = 33 / 1448
# Around every message gloo's two sides tell each other what they want and have, and acknowledge it:
# measured, of all-reduces and gathers of 16 bytes between 2 and 4 ranks (362 to 387).
_MESSAGE_BYTES = 370
_ROW = "steps"
_AUTOS = ("cast:bf16", "powersgd:4")
_CELLS = 60
_DECIDES_AFTER = 50
# Encoders as slow as on a device that takes so many seconds longer for a byte of gradients: with
# this processor's own, compression pays on every link that can be shaped here.
_CROSSING = (("topk:0.01", 130e-9), ("powersgd:4,start=2", 160e-9))
_AROUND = (30, 45, 70, 110)


@dataclass(frozen=True)
class Model:
    """A stack of linear layers.

    Attributes:
        layers, width: float32; two parameters a layer.
        forward_s, backward_s: what each layer sleeps besides computing.
        rows: of a rank's batch.
        bucket_mb: of DDP.
    """

    layers: int
    width: int
    forward_s: float
    backward_s: float
    rows: int
    bucket_mb: float

    def spec(self) -> list[Any]:
        """As a rank of the bench is told."""
        return [self.layers, self.width, self.forward_s, self.backward_s, self.rows]


MODELS = {
    "narrow": Model(8, 256, 0.010, 0.025, 4, 0.5),
    "wide": Model(8, 320, 0.005, 0.010, 4, 0.8),
    "slow": Model(4, 256, 0.030, 0.090, 4, 0.25),
    "computing": Model(6, 320, 0.0, 0.0, 1024, 0.8),
}
# Slow enough that busy cores still shape them; models are smaller for it, and sleep longer.
LINKS = (15, 30, 60, 120)


def graph_of(model: Model) -> Graph:
    """The step of one process alone, recorded; with what it sleeps."""
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
    """A recorded step of a model with what its layers sleep, which is no operator's time.

    Raises:
        ClusterError: the step has not so many layers.
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
        found = ours[names[ours] == name].tolist()
        if len(found) != model.layers:
            raise ClusterError(f"{len(found)} places to sleep in, of {model.layers}")
        for task in found if layer_s else ():
            computed_ns = float(takes_ns[last:task].sum())
            edit.set_gap(task, max(0.0, layer_s * 1e9 - computed_ns))
            # The gap that was recorded is not there any more.
            takes_ns[task] = tasks.duration_ns[task]
            last = task
    return edit.apply(f"{model.layers} layers sleep")


def predicted(
    graph: Graph, model: Model, cluster: Cluster, methods: Sequence[str], ranks: int,
    durations: Durations | None = None,
) -> dict[str, Prediction]:  # fmt: skip
    """Of each method."""
    ddp = f"ddp:{ranks},bucket_mb={model.bucket_mb:g}"
    texts = [ddp if how == "none" else f"{ddp}+{how}" for how in methods]
    found = predict(graph, texts, cluster=cluster, durations=durations)
    return dict(zip(methods, found, strict=True))


@dataclass(frozen=True)
class Measured:
    """What ranks did in one run.

    Attributes:
        arms: of each method: ``median_s`` of a step of its slowest rank, ``sent`` bytes of a rank,
            what `auto` has ``chosen``.
        cluster: fitted to communications that took turns with the steps, so that whatever kept
            this machine from shaping its cables is in both.
    """

    arms: dict[str, dict[str, Any]]
    cluster: Cluster


def measured(
    model: Model, megabits: float, methods: Sequence[str], ranks: int, rounds: int,
    slow_s: float = 0.0,
) -> Measured:  # fmt: skip
    """Steps of each method in turns, on cables of so many Mbit/s.

    Raises:
        ClusterError: a rank failed, or no latency and bandwidth explain the communications.
    """
    everybody = tuple(range(ranks))
    operations = [Operation("all_reduce", size, everybody, rounds) for size in _REDUCED]
    operations += [Operation("p2p", size, everybody, rounds) for size in _SHIFTED]
    operations.append(Operation("add", _ADDED, everybody, rounds))
    operations += computing_operations(ranks, rounds)
    in_a_turn = [asdict(replace(one, repeats=_repeats(one), warmup=0)) for one in operations]
    answers = run(
        ranks, megabits * MBIT, rank.steps, methods=methods, model=model.spec(),
        bucket_mb=model.bucket_mb, slow_s=slow_s, decide=_DECIDES_AFTER, rounds=rounds,
        operations=in_a_turn,
    )  # fmt: skip
    arms = {}
    for of_ranks in zip(*(found for found, _ in answers), strict=True):
        slowest = np.max([one["times_s"] for one in of_ranks], axis=0)
        arms[of_ranks[0]["how"]] = {**of_ranks[0], "median_s": float(np.median(slowest))}
    samples = samples_of(operations, [times_s for _, times_s in answers])
    where = f"network lab, cables of {megabits:g} Mbit/s"
    return Measured(arms, fitted_cluster(ranks, where, True, fit(samples), samples, "gloo"))


def _repeats(operation: Operation) -> int:
    """In one turn: what is short scatters."""
    if operation.kind in COMPUTING:
        return 3
    return 1 if operation.nbytes > _REDUCED[0] else 5


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: one model on one link; encoders keep their full size."""
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
    wanted = cells if options.full else [("narrow", LINKS[2], 2)]
    yield from grid_rows(options, graphs, wanted, _ROW, "predicted step", _summary)


def grid_rows(
    options: BenchOptions,
    graphs: dict[str, Graph],
    cells: Sequence[tuple[str, int, int]],
    prefix: str,
    over_all: str,
    summary: Callable[[Sequence[Bar]], Iterable[Bar]],
    methods: Sequence[str] = METHODS,
) -> Iterator[Bar]:
    """A row a cell, then rows over all cells there are, those recorded before among them.

    Args:
        graphs: of models by name, recorded at the first need.
        cells: model, Mbit/s and ranks of each.
        prefix: of the cells' rows.
        over_all: what the names of the rows over all begin with.
        summary: makes these rows.
    """
    known = {**options.recorded, **options.done}
    rows = {
        bar: row for bar, row in known.items() if bar.startswith(prefix) and "cells" in row.data
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
    """Each method's step measured and predicted, which the data holds for `cells_of`.

    Raises:
        ClusterError: as `measured`; or the cores are busy with other programs.
    """
    model = MODELS[name]
    others = [] if model.forward_s else [MEETING]
    others += ["auto"] if methods is METHODS else []
    run = measured(model, megabits, [*methods, *others], ranks, rounds)
    found = run.arms
    beside = 1.0
    if MEETING in others:
        beside = _pace(graph, model, run, ranks)
        graph = _shared_machine(graph, ranks, beside)
    told = predicted(graph, model, run.cluster, methods, ranks)
    said, errors = [], []
    data: dict[str, Any] = {"cells": {}}
    for how in methods:
        step_ms, wanted_ms = found[how]["median_s"] * 1e3, told[how].step_ns / 1e6
        errors.append(abs(wanted_ms / step_ms - 1.0))
        ratio = found[how]["sent"] / _interface_bytes(told[how].graph)
        data["cells"][how] = {
            "step_ms": step_ms, "predicted_ms": wanted_ms, "bytes_over_told": ratio,
        }  # fmt: skip
        said.append(f"{how} {step_ms:.1f} (predicted {wanted_ms:.1f}, {ratio:.3f} x the bytes)")
    if MEETING in others:
        data["meeting_over_recorded"] = beside
        said.append(f"computing; sending a number a bucket takes {beside:.2f} x the recorded step")
    if "auto" in others:
        auto_ms = found["auto"]["median_s"] * 1e3
        data["auto"] = {"step_ms": auto_ms, "chosen": found["auto"]["chosen"]}
        said.append(f"auto {auto_ms:.1f} took {found['auto']['chosen']}")
    return at_most(
        bar, 100 * max(errors), 12.0, "%", n=len(errors), detail=", ".join(said) + "; ms", data=data
    )


def _pace(graph: Graph, model: Model, run: Measured, ranks: int) -> float:
    """How many times longer ranks that send a number of every bucket take than the recorded step.

    Raises:
        ClusterError: so many times that the cores must be busy with other programs.
    """
    alone, links = _shared_machine(graph, ranks, 1.0), _without_bytes(run.cluster)
    told_s = predicted(alone, model, links, ["none"], ranks)["none"].step_ns / 1e9
    meeting_s: float = run.arms[MEETING]["median_s"]
    if meeting_s > _BUSY * told_s:
        raise ClusterError(
            "the cores are busy: with a number of every bucket sent the ranks' step takes "
            f"{1e3 * meeting_s:.0f} ms, as recorded it would {1e3 * told_s:.0f}"
        )
    return meeting_s / told_s


def _shared_machine(graph: Graph, ranks: int, slower: float) -> Graph:
    """The step of one of `ranks` that compute on the cores of one machine, so much slower there."""
    machine = {**graph.meta.get("machine", {}), "cpu.logical": max(1, cores() // ranks)}
    graph = replace(graph, meta={**graph.meta, "machine": machine})
    tasks = graph.tasks
    return replace_tasks(
        graph, duration_ns=slower * tasks.duration_ns, gap_ns=slower * tasks.gap_ns
    )


def _without_bytes(cluster: Cluster) -> Cluster:
    """Where messages take as long to start, and no time for their bytes."""
    link = LinkKind.of("unlimited", _UNLIMITED)
    return replace(cluster, topology=star(cluster.devices, link), overlap_penalty=NOT_GIVEN)


def _interface_bytes(graph: Graph | None) -> float:
    """What one rank's interface sends in a step for gloo to exchange what the graph does."""
    assert graph is not None
    return sum(
        row.sent_bytes * (HEADERS + _ACKNOWLEDGED) + _MESSAGE_BYTES * _messages(row)
        for row in graph.exchanges
    )


def _messages(row: Exchange) -> int:
    """Of one rank: gloo's all-reduce goes twice around the ring, in two pieces at a time."""
    return (row.ranks - 1) * (4 if row.collective.kind == "all_reduce" else 1)


def cells_of(row: Bar) -> dict[str, tuple[float, float]]:
    """By method: its step, measured and predicted, ms; of a `cell_row`."""
    return {how: (c["step_ms"], c["predicted_ms"]) for how, c in row.data["cells"].items()}


def _summary(rows: Sequence[Bar]) -> Iterator[Bar]:
    """Rows over all cells there are."""
    errors, verdicts, wire, slower, behind = [], [], [], [], []
    for row in rows:
        cells = cells_of(row)
        wire += [abs(cell["bytes_over_told"] - 1.0) for cell in row.data["cells"].values()]
        errors += [abs(wanted / step - 1.0) for step, wanted in cells.values()]
        dense, dense_told = cells["none"]
        for how, (step, wanted) in cells.items():
            if how != "none" and abs(step / dense - 1.0) > _CLEAR:
                verdicts.append((step < dense) == (wanted < dense_told))
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
    near = sum(one <= 0.08 for one in behind)
    yield at_least(
        "auto within 8 % of the best of its candidates", 100 * near / len(behind), 90.0, "%",
        n=len(behind), detail=f"the worst {100 * max(behind):.1f} % behind",
    )  # fmt: skip


# ---- where compression begins to pay -------------------------------------------------------------


class _Slower:
    """Durations of encoders on a device that takes longer, as the ranks of the bench sleep."""

    def __init__(self, slow_s: float) -> None:
        self._here, self._slow_s = Durations(threads=1), slow_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here, name)

    def lookup(self, call: Call | Question) -> Answer | None:
        """As here, and what is slept for."""
        found = self._here.lookup(call)
        inner = call.call if isinstance(call, Question) else call
        if found is None or not inner.name.startswith(OP.partition("(")[0]):
            return found
        numbers = sum(int(np.prod(shape)) for shape in inner.arguments[1])
        return replace(found, nanoseconds=found.nanoseconds + 4e9 * self._slow_s * numbers)


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
    """Where the measured ratio of the two passes 1, and where the predicted one does."""
    ratios, told = [], []
    for megabits in _AROUND:
        options.progress(f"{bar}: {megabits} Mbit/s")
        run = measured(MODELS["narrow"], megabits, ["none", how], 2, 6, slow_s=slow_s)
        ratios.append(run.arms[how]["median_s"] / run.arms["none"]["median_s"])
        durations: Any = _Slower(slow_s)
        found = predicted(graph, MODELS["narrow"], run.cluster, ["none", how], 2, durations)
        told.append(found[how].step_ns / found["none"].step_ns)
    crossing, wanted = (
        float(np.exp(np.interp(0.0, np.log(side), np.log(_AROUND)))) for side in (ratios, told)
    )
    between = ratios[0] < 1.0 < ratios[-1] and told[0] < 1.0 < told[-1]
    error = 100 * abs(crossing / wanted - 1.0)
    rows = zip(_AROUND, ratios, told, strict=True)
    return Bar(
        bar, error, "%", "<= 15", between and error <= 15.0, len(ratios),
        f"predicted {wanted:.0f}, measured {crossing:.0f} Mbit/s; time over none "
        + ", ".join(f"at {at}: {one:.3f} (predicted {other:.3f})" for at, one, other in rows)
        + f"; an encoder that takes {1e9 * slow_s:.0f} ms/MB longer than here",
    )  # fmt: skip
