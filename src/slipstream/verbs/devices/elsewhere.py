"""predict_device: how long the recorded step takes on another device.

Devices at hand are measured: for this CPU with an older instruction set or with more threads, every
operator of the step is micro-benchmarked. Others are predicted from data sheets: kernels of a GPU
are scaled by `slipstream.durations.wave_scaling`, operators of a CPU by the same split between
memory and arithmetic (`roofline.scaled`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slipstream.cluster.devices import Device, device_kinds
from slipstream.durations import Durations, common_spread, roofline, usable_cores
from slipstream.durations.levels import LEVELS, Level, level_of, levels_here
from slipstream.durations.roofline import datasheet_limits, device_named
from slipstream.durations.work import work
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.graph import Call, Editor, Graph, Kind, need_graph, replay
from slipstream.hardware.accelerator import Accelerator, is_described
from slipstream.hardware.predict import accelerate
from slipstream.provenance import Provenance
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration
from slipstream.verbs.devices.gpu import scale_kernels
from slipstream.verbs.predicting import predict, prediction_of, refusal
from slipstream.verbs.results import INTERVAL, SPEEDUP, Predicted, Prediction, named

_THREADS = re.compile(r"(?:threads:)?([0-9]+)(?: threads?)?")
_HOUR_NS = 3.6e12
_UNKNOWN_SPREAD = 0.5
_PREDICTION_KEYS = (
    "baseline_ns", "step_ns", "speedup", "speedup_interval", "samples_per_step", "provenance",
    "reason",
)  # fmt: skip
_SOURCES = {Provenance.MICROBENCHMARK: "measured here", Provenance.DATASHEET: "data sheet"}
# Spread of durations scaled by the limits of two devices.
_SHEET_SPREAD = 0.35


@dataclass(frozen=True)
class DevicePrediction:
    """The recorded step on a device.

    Attributes:
        device: its name, as `predict_device` takes it.
        about: description.
        provenance: provenance of its speed: measured here, or from its data sheet.
        prediction: of the step there; `Prediction.why_not` gives the reason if there is none.
        price_per_hour: dollars; None if unknown.
    """

    device: str
    about: str
    provenance: Provenance
    prediction: Prediction
    price_per_hour: float | None = None

    @property
    def sample_ns(self) -> float:
        """Nanoseconds per sample, or per step if the number of samples is unknown."""
        return self.prediction.step_ns / max(self.prediction.samples[1], 1)

    @property
    def dollars_per_million(self) -> float | None:
        """Dollars per million samples (or steps); None without a price."""
        if self.price_per_hour is None or math.isnan(self.prediction.step_ns):
            return None
        return self.price_per_hour * self.sample_ns * 1e6 / _HOUR_NS

    def to_json(self) -> dict[str, Any]:
        predicted = self.prediction.to_json()
        return {
            "device": self.device,
            "about": self.about,
            "known": str(self.provenance),
            "price_per_hour": self.price_per_hour,
            "sample_ns": self.sample_ns,
            "dollars_per_million_samples": self.dollars_per_million,
            **{key: predicted[key] for key in _PREDICTION_KEYS},
        }


@dataclass(frozen=True)
class DevicePredictions:
    """The recorded step on several devices by time per sample, failed predictions last."""

    graph: Graph
    devices: tuple[DevicePrediction, ...]

    @classmethod
    def of(cls, graph: Graph, devices: Iterable[DevicePrediction]) -> DevicePredictions:
        by_time = sorted(devices, key=lambda p: (math.isnan(p.sample_ns), p.sample_ns))
        return cls(graph, tuple(by_time))

    def to_json(self) -> list[dict[str, Any]]:
        return [prediction.to_json() for prediction in self.devices]

    def table(self) -> Table:
        """Return a table with a row per predicted device; notes give reasons for the others."""
        graph = self.graph
        predicted = [p for p in self.devices if isinstance(p.prediction, Predicted)]
        per = "sample" if graph.samples else "step"
        priced = [p for p in predicted if p.dollars_per_million is not None]
        fields: list[Field[DevicePrediction]] = [
            Field.of("device", lambda p: p.device),
            Field.number("step", lambda p: format_duration(p.prediction.step_ns)),
            Field.number(f"per {per}", lambda p: format_duration(p.sample_ns)),
            Field.number("faster", lambda p: SPEEDUP.cell(p.prediction)),
            Field.number("90 % interval", lambda p: INTERVAL.cell(p.prediction)),
            Field.of("source", lambda p: _SOURCES.get(p.provenance, str(p.provenance))),
        ]
        where = graph.meta.get("device_name") or graph.meta.get("cpu_capability") or "here"
        notes = [f"as recorded ({where}): {format_duration(replay(graph).step_ns)} per step"]
        if priced:
            fields.append(Field.number(f"$ per million {per}s", _price))
            cheapest = min(priced, key=lambda p: p.dollars_per_million or math.inf)
            notes.append(f"cheapest per {per}, of devices with a price: {cheapest.device}")
        notes += [
            f"{p.device}: {p.prediction.why_not}"
            for p in self.devices
            if p.prediction.why_not is not None
        ]
        if any(p.provenance is Provenance.DATASHEET for p in predicted):
            notes.append(
                "data sheets give limits, not kernel times: such a row is a rough estimate"
            )
        return Table.of(predicted, fields, f"{named(graph)} on other devices", notes)


def _price(prediction: DevicePrediction) -> str:
    cost = prediction.dollars_per_million
    return "-" if cost is None else f"{cost:.3g}"


def predict_device(
    graph: Graph,
    device: str,
    *,
    durations: Callable[[int, Level | None], Durations] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> DevicePrediction:
    """Predict the step of `graph` on another device.

    Args:
        device: an instruction set of this CPU ("avx2", "sse4.1"), a number of threads
            ("threads:2"), a kind of device with a data sheet ("h100-sxm", or "H100"), or an
            accelerator ("tensordash", or a TOML file that describes it).
        durations: (threads, level) -> source of durations; this machine's cache by default.
        report: called with a short line of progress.

    Raises:
        UnknownNameError: unknown device.
        InvalidArgumentError: `graph` is not a graph, or an accelerator cannot run it.
        ChildError: the micro-benchmark died.
    """
    need_graph(graph)
    source = durations or (lambda threads, level: Durations(threads, level=level))
    if (count := _THREADS.fullmatch(device.strip())) is not None:
        return _more_threads(graph, int(count[1]), source, report)
    before = replay(graph)
    price = None
    if (level := _level(device)) is not None:
        name, about = level.name, f"this processor, with {level.name} at most"
        provenance, metric = Provenance.MICROBENCHMARK, "cpu"
        outcome = _other_level(graph, level, source, report)
    elif is_described(device):
        chip = Accelerator.load(device)
        name, about, provenance, metric = chip.name, chip.about, Provenance.SIMULATED, "wall"
        outcome = accelerate(graph, chip).graph
    else:
        kind = kind_named(device)
        name, about, provenance, metric = kind.kind, kind.about, Provenance.DATASHEET, "wall"
        price = kind.price_per_hour.value if kind.price_per_hour is not None else None
        on_gpu = (graph.tasks.kind == Kind.KERNEL).any()
        outcome = (
            _gpu_to_gpu(graph, before.peak_bytes, kind)
            if on_gpu
            else _cpu_to_sheet(graph, before.peak_bytes, kind, source, report)
        )
    prediction = (
        refusal(name, before, outcome)
        if isinstance(outcome, str)
        else prediction_of(name, metric, before, outcome)
    )
    return DevicePrediction(name, about, provenance, prediction, price)


def devices_for(graph: Graph) -> list[str]:
    """Return the devices that this step can be predicted on: those at hand, then data sheets."""
    need_graph(graph)
    kinds = [name for name, kind in device_kinds().items() if kind.memory_bytes_per_s is not None]
    if (graph.tasks.kind == Kind.KERNEL).any():
        return [name for name in kinds if device_kinds()[name].multiprocessors is not None]
    here = [level.name for level in levels_here() if level != _recorded_level(graph)]
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= usable_cores()]
    recorded = int(graph.meta.get("threads", 1))
    here += [f"threads:{count}" for count in counts if count != recorded]
    return here + [name for name in kinds if "fp32" in device_kinds()[name].flops]


def _level(name: str) -> Level | None:
    plain = name.lower().replace(".", "").replace("-", "").removeprefix("cpu:")
    return next((level for level in LEVELS if level.name.replace(".", "") == plain), None)


def kind_named(name: str) -> Device:
    """Return the kind of device with this name, prefix or driver name."""
    kinds = device_kinds()
    if name.lower() in kinds:
        return kinds[name.lower()]
    near = [kind for kind in kinds if kind.partition("-")[0] == name.lower()]
    if near:
        return kinds[near[0]]
    if (device := device_named(name)) is not None:
        return device
    raise UnknownNameError("device", name, [*(level.name for level in LEVELS), "threads:2", *kinds])


def _recorded_level(graph: Graph) -> Level | None:
    return level_of(str(graph.meta.get("cpu_capability", "")))


def _level_to_force(level: Level | None) -> Level | None:
    """Return None for the level that libraries choose by default on this machine."""
    here = levels_here()
    return None if here and level == here[0] else level


def _other_level(
    graph: Graph,
    level: Level,
    durations: Callable[[int, Level | None], Durations],
    report: Callable[[str], None],
) -> Graph | str:
    """Return the step with every operator's ratio to another instruction set, measured here.

    Like the functions below, returns the reason as a string if it cannot be predicted.
    """
    recorded = _recorded_level(graph)
    if (graph.tasks.kind == Kind.KERNEL).any():
        return "the step runs on a GPU"
    if recorded is None:
        return "the recording does not contain the instruction set that its libraries used"
    if level not in levels_here():
        return f"this CPU has no {level.name}, so it cannot be measured here"
    threads = int(graph.meta.get("threads", 1))
    here, target = (
        durations(threads, _level_to_force(recorded)),
        durations(threads, _level_to_force(level)),
    )
    edit = Editor(graph, level.name)
    if level != recorded:
        calls = list(_calls(graph).values())
        for source in (here, target):
            source.measure(calls, lambda line: report(f"{level.name}: {line}"))
        for task, call in _calls(graph).items():
            recorded_ns = float(graph.tasks.duration_ns[task])
            duration, provenance, spread = _at_level(recorded_ns, call, here, target)
            edit.set_duration(task, duration, provenance, spread=spread)
    return edit.apply(f"the step with {level.name}")


def _at_level(
    recorded_ns: float, call: Call, here: Durations, target: Durations
) -> tuple[float, Provenance, float]:
    """Return an operator's duration at another level, its provenance and its spread."""
    here_answer, there_answer = here.lookup(call), target.lookup(call)
    if here_answer is not None and there_answer is not None and here_answer.nanoseconds:
        ratio = there_answer.nanoseconds / here_answer.nanoseconds
        spread = math.hypot(here_answer.spread, there_answer.spread)
        return recorded_ns * ratio, Provenance.MICROBENCHMARK, spread
    # The operator cannot be timed alone.
    op_work = work(call)
    if op_work is not None:
        limits = [source.limits(frozenset({op_work.dtype})) for source in (here, target)]
        if limits[0] is not None and limits[1] is not None:
            duration = roofline.scaled(recorded_ns, op_work, limits[0], limits[1])
            if duration is not None:
                return duration, Provenance.ROOFLINE, _SHEET_SPREAD
    return recorded_ns, Provenance.ASSUMED, _UNKNOWN_SPREAD


def _more_threads(
    graph: Graph,
    count: int,
    durations: Callable[[int, Level | None], Durations],
    report: Callable[[str], None],
) -> DevicePrediction:
    if count < 1:
        raise InvalidArgumentError("device", f"{count} threads cannot run a step; pass at least 1")
    level = _level_to_force(_recorded_level(graph))
    source = durations(int(graph.meta.get("threads", 1)), level)
    name = f"threads:{count}"
    (prediction,) = predict(graph, [name], durations=source, report=report)
    about = f"this processor, {count} thread{'s' * (count != 1)}"
    return DevicePrediction(name, about, Provenance.MICROBENCHMARK, prediction)


def _gpu_to_gpu(graph: Graph, peak_bytes: int, kind: Device) -> Graph | str:
    """Scale kernels by wave scaling; host work and copies keep their durations."""
    name = str(graph.meta.get("device_name", ""))
    if not name:
        return "the recording does not name the GPU it ran on"
    if (origin := device_named(name)) is None:
        return f"the GPU it was recorded on, {name}, has no data sheet"
    return _misfit(peak_bytes, kind) or scale_kernels(graph, origin, kind)


def _misfit(peak_bytes: int, kind: Device) -> str | None:
    """Return why the step's peak memory exceeds the device's; None if it fits."""
    if kind.memory_bytes is None or peak_bytes <= kind.memory_bytes.value:
        return None
    return (
        f"its tensors take {format_bytes(peak_bytes)}, and the device has "
        f"{format_bytes(kind.memory_bytes.value)}"
    )


def _cpu_to_sheet(
    graph: Graph,
    peak_bytes: int,
    kind: Device,
    durations: Callable[[int, Level | None], Durations],
    report: Callable[[str], None],
) -> Graph | str:
    """Scale operators by the limits of both machines, measured here and from the data sheet there.

    A GPU runs asynchronously: an operator takes the longer of its issue and its kernel.
    """
    datasheet = datasheet_limits(kind)
    if datasheet is None:
        return "its data sheet has no memory bandwidth"
    if (misfit := _misfit(peak_bytes, kind)) is not None:
        return misfit
    calls = {task: op_work for task, call in _calls(graph).items() if (op_work := work(call))}
    dtypes = frozenset(op_work.dtype for op_work in calls.values() if op_work.flops)
    here_source = durations(
        int(graph.meta.get("threads", 1)), _level_to_force(_recorded_level(graph))
    )
    here_source.measure(roofline.probes(dtypes), report)
    here = here_source.limits(dtypes)
    if here is None:
        return "this machine's limits cannot be measured"
    on_gpu = kind.multiprocessors is not None
    # The cost of calling an operator is this host's, and includes a kernel's launch.
    target = roofline.Limits(
        datasheet.flops_per_s,
        datasheet.bytes_per_s,
        0.0 if on_gpu else here.call_ns,
        datasheet.provenance,
    )
    # A GPU is issued work no faster than operators are called here.
    issuing = max(here.call_ns, datasheet.call_ns) if on_gpu else 0.0
    edit = Editor(graph, kind.kind)
    durations_ns = []
    for task, op_work in calls.items():
        recorded_ns = float(graph.tasks.duration_ns[task])
        scaled = roofline.scaled(recorded_ns, op_work, here, target)
        if scaled is not None:
            durations_ns.append((task, max(scaled, issuing)))
    spread = common_spread(graph, [task for task, _ in durations_ns], _SHEET_SPREAD)
    for task, duration in durations_ns:
        edit.set_duration(task, duration, Provenance.DATASHEET, spread=spread)
    return edit.apply(f"{len(durations_ns)} operators within the limits of {kind.kind}")


def _calls(graph: Graph) -> dict[int, Call]:
    return {
        task: graph.calls[number]
        for task, number in enumerate(graph.tasks.call.tolist())
        if number >= 0
    }
