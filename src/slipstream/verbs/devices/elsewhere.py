"""predict_device: how long the recorded step takes on another device.

Devices at hand are measured: this processor with an older instruction set, or with more threads, is
another device, and every operator of the step is micro-benchmarked on it. Others are known by their
data sheets: kernels of a GPU are scaled by `slipstream.durations.wave_scaling`, operators of a CPU
by the same share of memory and arithmetic (`roofline.scaled`).
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
from slipstream.provenance import Provenance
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration
from slipstream.verbs.devices.gpu import scale_kernels
from slipstream.verbs.predicting import predict, prediction_of, refusal
from slipstream.verbs.results import INTERVAL, SPEEDUP, Predicted, Prediction, named

_THREADS = re.compile(r"(?:threads:)?([0-9]+)(?: threads?)?")
_HOUR_NS = 3.6e12
_UNKNOWN_SPREAD = 0.5
_SHARED_KEYS = (
    "baseline_ns", "step_ns", "speedup", "speedup_interval", "samples_per_step", "provenance",
    "why_not",
)  # fmt: skip
_KNOWN = {Provenance.MICROBENCHMARK: "measured here", Provenance.DATASHEET: "data sheet"}
# Between two levels of one processor the cost of an operator that cannot be run alone is the same
# but for its arithmetic; of a data sheet's device nothing was seen at all.
_SHEET_SPREAD = 0.35


@dataclass(frozen=True)
class DevicePrediction:
    """The recorded step on a device.

    Attributes:
        device: its name, as `predict_device` takes it.
        about: in words.
        known: how the device is known: measured here, or by its data sheet.
        prediction: of the step there; `Prediction.why_not` says why there is none.
        price_per_hour: dollars; None where it is not known.
    """

    device: str
    about: str
    known: Provenance
    prediction: Prediction
    price_per_hour: float | None = None

    @property
    def sample_ns(self) -> float:
        """Nanoseconds a sample; of a step whose samples are not known, of a step."""
        return self.prediction.step_ns / max(self.prediction.samples[1], 1)

    @property
    def dollars_per_million(self) -> float | None:
        """Of a million samples (or steps); None without a price."""
        if self.price_per_hour is None or math.isnan(self.prediction.step_ns):
            return None
        return self.price_per_hour * self.sample_ns * 1e6 / _HOUR_NS

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        predicted = self.prediction.to_json()
        return {
            "device": self.device,
            "about": self.about,
            "known": str(self.known),
            "price_per_hour": self.price_per_hour,
            "sample_ns": self.sample_ns,
            "dollars_per_million_samples": self.dollars_per_million,
            **{key: predicted[key] for key in _SHARED_KEYS},
        }


@dataclass(frozen=True)
class DevicePredictions:
    """The recorded step on several devices, by time per sample; what cannot be told comes last."""

    graph: Graph
    devices: tuple[DevicePrediction, ...]

    @classmethod
    def of(cls, graph: Graph, devices: Iterable[DevicePrediction]) -> DevicePredictions:
        """These devices in order."""
        by_time = sorted(devices, key=lambda one: (math.isnan(one.sample_ns), one.sample_ns))
        return cls(graph, tuple(by_time))

    def to_json(self) -> list[dict[str, Any]]:
        """As results are printed."""
        return [one.to_json() for one in self.devices]

    def table(self) -> Table:
        """One row a device that can be told; the others below, with the reason."""
        graph = self.graph
        told = [one for one in self.devices if isinstance(one.prediction, Predicted)]
        per = "sample" if graph.samples else "step"
        priced = [one for one in told if one.dollars_per_million is not None]
        fields: list[Field[DevicePrediction]] = [
            Field.of("device", lambda one: one.device),
            Field.number("step", lambda one: format_duration(one.prediction.step_ns)),
            Field.number(f"per {per}", lambda one: format_duration(one.sample_ns)),
            Field.number("faster", lambda one: SPEEDUP.cell(one.prediction)),
            Field.number("90 % interval", lambda one: INTERVAL.cell(one.prediction)),
            Field.of("known from", lambda one: _KNOWN.get(one.known, str(one.known))),
        ]
        where = graph.meta.get("device_name") or graph.meta.get("cpu_capability") or "here"
        notes = [f"as recorded ({where}): {format_duration(replay(graph).step_ns)} per step"]
        if priced:
            fields.append(Field.number(f"$ a million {per}s", _price))
            cheapest = min(priced, key=lambda one: one.dollars_per_million or math.inf)
            notes.append(f"cheapest per {per} where prices are known: {cheapest.device}")
        notes += [
            f"{one.device}: {one.prediction.why_not}"
            for one in self.devices
            if one.prediction.why_not is not None
        ]
        if any(one.known is Provenance.DATASHEET for one in told):
            notes.append("data sheets tell limits, not kernels: such a row is a first guess")
        return Table.of(told, fields, f"{named(graph)} on other devices", notes)


def _price(one: DevicePrediction) -> str:
    cost = one.dollars_per_million
    return "-" if cost is None else f"{cost:.3g}"


def predict_device(
    graph: Graph,
    device: str,
    *,
    durations: Callable[[int, Level | None], Durations] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DevicePrediction:
    """The step of `graph` on another device.

    Args:
        device: an instruction set of this processor ("avx2", "sse4.1"), a number of threads
            ("threads:2"), or a kind of device by its data sheet ("h100-sxm"; "H100" will do).
        durations: threads and level to where durations come from; this machine's cache by default.
        say: called with a short line whenever there is progress.

    Raises:
        UnknownNameError: no such device.
        InvalidArgumentError: `graph` is no graph.
        ChildError: the micro-benchmark died.
    """
    need_graph(graph)
    source = durations or (lambda threads, level: Durations(threads, level=level))
    if (count := _THREADS.fullmatch(device.strip())) is not None:
        return _more_threads(graph, int(count[1]), source, say)
    before = replay(graph)
    price = None
    if (level := _level(device)) is not None:
        name, about = level.name, f"this processor, with {level.name} at most"
        known, metric = Provenance.MICROBENCHMARK, "cpu"
        outcome = _other_level(graph, level, source, say)
    else:
        kind = kind_named(device)
        name, about, known, metric = kind.kind, kind.about, Provenance.DATASHEET, "wall"
        price = kind.price_per_hour.value if kind.price_per_hour is not None else None
        on_gpu = (graph.tasks.kind == Kind.KERNEL).any()
        outcome = (
            _gpu_to_gpu(graph, before.peak_bytes, kind)
            if on_gpu
            else _cpu_to_sheet(graph, before.peak_bytes, kind, source, say)
        )
    answer = (
        refusal(name, before, outcome)
        if isinstance(outcome, str)
        else prediction_of(name, metric, before, outcome)
    )
    return DevicePrediction(name, about, known, answer, price)


def devices_for(graph: Graph) -> list[str]:
    """The devices a step of this kind can be predicted on: those at hand, then by data sheet."""
    need_graph(graph)
    kinds = [name for name, kind in device_kinds().items() if kind.memory_bytes_per_s is not None]
    if (graph.tasks.kind == Kind.KERNEL).any():
        return [name for name in kinds if device_kinds()[name].multiprocessors is not None]
    here = [one.name for one in levels_here() if one != _recorded_level(graph)]
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= usable_cores()]
    now = int(graph.meta.get("threads", 1))
    here += [f"threads:{count}" for count in counts if count != now]
    return here + [name for name in kinds if "fp32" in device_kinds()[name].flops]


def _level(name: str) -> Level | None:
    plain = name.lower().replace(".", "").replace("-", "").removeprefix("cpu:")
    return next((one for one in LEVELS if one.name.replace(".", "") == plain), None)


def kind_named(name: str) -> Device:
    """A kind of device by its name, the beginning of it, or what a driver calls it.

    Raises:
        UnknownNameError: no such kind.
    """
    kinds = device_kinds()
    if name.lower() in kinds:
        return kinds[name.lower()]
    near = [kind for kind in kinds if kind.partition("-")[0] == name.lower()]
    if near:
        return kinds[near[0]]
    if (device := device_named(name)) is not None:
        return device
    raise UnknownNameError("device", name, [*(one.name for one in LEVELS), "threads:2", *kinds])


def _recorded_level(graph: Graph) -> Level | None:
    return level_of(str(graph.meta.get("cpu_capability", "")))


def _as_asked(level: Level | None) -> Level | None:
    """None for the level that libraries choose here by themselves: it needs no telling."""
    here = levels_here()
    return None if here and level == here[0] else level


def _other_level(
    graph: Graph,
    level: Level,
    durations: Callable[[int, Level | None], Durations],
    say: Callable[[str], None],
) -> Graph | str:
    """The step where every operator's ratio to another instruction set here is measured.

    As all such functions below: the edited step, or why it cannot be told.
    """
    recorded = _recorded_level(graph)
    if (graph.tasks.kind == Kind.KERNEL).any():
        return "the step runs on a GPU"
    if recorded is None:
        return "the recording does not say which instruction set its libraries used"
    if level not in levels_here():
        return f"this processor has no {level.name}: it cannot be measured here"
    threads = int(graph.meta.get("threads", 1))
    here, there = durations(threads, _as_asked(recorded)), durations(threads, _as_asked(level))
    edit = Editor(graph, level.name)
    if level != recorded:
        calls = list(_calls(graph).values())
        for source in (here, there):
            source.measure(calls, lambda line: say(f"{level.name}: {line}"))
        for task, call in _calls(graph).items():
            now = float(graph.tasks.duration_ns[task])
            duration, provenance, spread = _at_level(now, call, here, there)
            edit.set_duration(task, duration, provenance, spread=spread)
    return edit.apply(f"the step with {level.name}")


def _at_level(
    now: float, call: Call, here: Durations, there: Durations
) -> tuple[float, Provenance, float]:
    """What takes `now` here, there: its duration, where that is from, and its spread."""
    was, becomes = here.lookup(call), there.lookup(call)
    if was is not None and becomes is not None and was.nanoseconds:
        ratio = becomes.nanoseconds / was.nanoseconds
        return now * ratio, Provenance.MICROBENCHMARK, math.hypot(was.spread, becomes.spread)
    # It cannot be run alone.
    needs = work(call)
    if needs is not None:
        limits = [one.limits(frozenset({needs.dtype})) for one in (here, there)]
        if limits[0] is not None and limits[1] is not None:
            duration = roofline.scaled(now, needs, limits[0], limits[1])
            if duration is not None:
                return duration, Provenance.ROOFLINE, _SHEET_SPREAD
    return now, Provenance.ASSUMED, _UNKNOWN_SPREAD


def _more_threads(
    graph: Graph,
    count: int,
    durations: Callable[[int, Level | None], Durations],
    say: Callable[[str], None],
) -> DevicePrediction:
    if count < 1:
        raise InvalidArgumentError("device", f"{count} threads are none")
    level = _as_asked(_recorded_level(graph))
    source = durations(int(graph.meta.get("threads", 1)), level)
    name = f"threads:{count}"
    (prediction,) = predict(graph, [name], durations=source, say=say)
    about = f"this processor, {count} thread{'s' * (count != 1)}"
    return DevicePrediction(name, about, Provenance.MICROBENCHMARK, prediction)


def _gpu_to_gpu(graph: Graph, peak_bytes: int, kind: Device) -> Graph | str:
    """Kernels by wave scaling; what the host does, and copies, stay as they are."""
    name = str(graph.meta.get("device_name", ""))
    if not name:
        return "the recording does not name the GPU it ran on"
    if (origin := device_named(name)) is None:
        return f"the GPU it was recorded on, {name}, has no data sheet here"
    return _misfit(peak_bytes, kind) or scale_kernels(graph, origin, kind)


def _misfit(peak_bytes: int, kind: Device) -> str | None:
    """Why the step's tensors cannot be there at once; None where they can."""
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
    say: Callable[[str], None],
) -> Graph | str:
    """Operators by the two machines' limits: here they are measured, there the maker tells them.

    A GPU works while the host goes on: an operator takes as long as it is issued or as its kernel
    runs, whichever is longer.
    """
    datasheet = datasheet_limits(kind)
    if datasheet is None:
        return "its data sheet here has no bandwidth of its memory"
    if (misfit := _misfit(peak_bytes, kind)) is not None:
        return misfit
    calls = {task: (call, one) for task, call in _calls(graph).items() if (one := work(call))}
    dtypes = frozenset(one.dtype for _, one in calls.values() if one.flops)
    here_source = durations(int(graph.meta.get("threads", 1)), _as_asked(_recorded_level(graph)))
    here_source.measure(roofline.probes(dtypes), say)
    here = here_source.limits(dtypes)
    if here is None:
        return "this machine's limits cannot be measured"
    on_gpu = kind.multiprocessors is not None
    # What it takes to call an operator is this host's; a kernel's launch is part of it.
    there = roofline.Limits(
        datasheet.flops_per_s,
        datasheet.bytes_per_s,
        0.0 if on_gpu else here.call_ns,
        datasheet.provenance,
    )
    # Nothing is issued to a GPU faster than operators are called here.
    issuing = max(here.call_ns, datasheet.call_ns) if on_gpu else 0.0
    edit = Editor(graph, kind.kind)
    known = []
    for task, (_, one) in calls.items():
        now = float(graph.tasks.duration_ns[task])
        scaled = roofline.scaled(now, one, here, there)
        if scaled is not None:
            known.append((task, max(scaled, issuing)))
    spread = common_spread(graph, [task for task, _ in known], _SHEET_SPREAD)
    for task, duration in known:
        edit.set_duration(task, duration, Provenance.DATASHEET, spread=spread)
    return edit.apply(f"{len(known)} operators within the limits of {kind.kind}")


def _calls(graph: Graph) -> dict[int, Call]:
    """By task: the operator it calls, where its arguments are known."""
    return {
        task: graph.calls[number]
        for task, number in enumerate(graph.tasks.call.tolist())
        if number >= 0
    }
