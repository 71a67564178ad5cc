"""Which operator is slow: every one timed in a pass of its own, in which nothing is recorded."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.taps import LiteRTTap, MicroTap, OnnxTap, Tap, TorchTap, open_tap
from slipstream.ship.xray.statistics import Array
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_SLOW = 10.0
_PASSES, _MOST_S = 15, 20.0
_SHOWN = 12


@dataclass(frozen=True)
class OperatorTime:
    """One operator.

    Attributes:
        ns: its median time.
        expected_ns: of a baseline's same operator, where there is one; else what its
            multiplications would take at the median rate of those of its kind in this model; 0
            where not known.
    """

    name: str
    kind: str
    ns: float
    expected_ns: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times as long as expected; 0 where nothing is."""
        return self.ns / self.expected_ns if self.expected_ns else 0.0


@dataclass(frozen=True)
class Latency:
    """What `latency` found.

    Attributes:
        total_ns: median of a whole inference.
        baseline_ns: the same of the baseline; 0 without one.
        operators: in the order they run; empty where the runtime does not tell.
    """

    total_ns: float
    baseline_ns: float
    operators: tuple[OperatorTime, ...]

    @property
    def ratio(self) -> float:
        """The whole against the baseline; 0 without one."""
        return self.total_ns / self.baseline_ns if self.baseline_ns else 0.0

    @property
    def slow(self) -> list[OperatorTime]:
        """Those more than ten times as slow as expected, and long enough to matter."""
        odd = [
            one for one in self.operators if one.ratio >= _SLOW and one.ns > 0.02 * self.total_ns
        ]
        return sorted(odd, key=lambda one: -one.ns)

    @property
    def remedies(self) -> list[str]:
        """What to look at."""
        remedies = []
        if self.ratio >= _SLOW:
            remedies.append(
                f"{self.ratio:.0f} times the baseline: plain (reference) kernels, or a delegate "
                "that was refused: look at the interpreter's op resolver and its log"
            )
        remedies += [
            f"{one.name} ({one.kind}) takes {one.ratio:.0f} times what is expected: no fast kernel "
            "for its dtype, shape or layout"
            for one in self.slow
        ]
        return remedies

    def tables(self) -> list[Table]:
        """The operators that take most."""
        shown = sorted(self.operators, key=lambda one: -one.ns)[:_SHOWN]
        against = f", {format_duration(self.baseline_ns)} the baseline" if self.baseline_ns else ""
        return [Table.of(
            shown,
            [
                Field[OperatorTime].of("operator", lambda one: one.name),
                Field[OperatorTime].of("kind", lambda one: one.kind),
                Field[OperatorTime].number("time", lambda one: format_duration(one.ns)),
                Field[OperatorTime].number(
                    "of expected", lambda one: f"{one.ratio:.1f}x" if one.ratio else ""
                ),
            ],
            f"{format_duration(self.total_ns)} an inference{against}",
            self.remedies or ["no operator stands out"],
        )]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "total_ns": self.total_ns, "baseline_ns": self.baseline_ns,
            "operators": [
                {"name": one.name, "kind": one.kind, "ns": one.ns, "ratio": one.ratio}
                for one in self.operators
            ],
            "slow": [one.name for one in self.slow], "remedies": self.remedies,
        }  # fmt: skip


def latency(
    model: Any,
    inputs: Array | Sequence[Array] | None = None,
    *,
    against: Any = None,
    plain_kernels: bool = False,
    threads: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> Latency:
    """Time a model, whole and by operator.

    Args:
        model: as `slipstream.runtimes.taps.open_tap` takes it, or a tap.
        inputs: [N, ...] of which the first sample is run, or one array for each input; zeros if
            None.
        against: a baseline: the same model on another runtime or other kernels; a .tflite or .onnx
            that runs on plain kernels is held against itself on optimised ones.
        plain_kernels: run `model` on plain kernels.
        threads: inside an operator.
        report: told what is done.

    Raises:
        InvalidArgumentError: `inputs` are needed, as of a torch module.
        ModelError: the model fails.
    """
    tap = (
        model
        if isinstance(model, Tap)
        else open_tap(model, reference=plain_kernels, threads=threads)
    )
    fed = _fed(tap, inputs)
    if against is None and plain_kernels:
        against = model
    report("whole inferences")
    total = _median(lambda: tap.plain(fed))
    baseline, expected = 0.0, {}
    if against is not None:
        other = against if isinstance(against, Tap) else open_tap(against, threads=threads)
        baseline = _median(lambda: other.plain(fed))
        expected = {one.name: one.ns for one in _operators(other, fed)}
    report("operators")
    operators = _operators(tap, fed)
    times = [
        OperatorTime(one.name, one.kind, one.ns, expected.get(one.name, one.expected_ns))
        for one in operators
    ]
    return Latency(total, baseline, tuple(times))


def _fed(tap: Tap, inputs: Array | Sequence[Array] | None) -> list[Array]:
    if isinstance(inputs, np.ndarray):
        return [inputs[:1]]
    if inputs is not None:
        return list(inputs)
    if not tap.inputs:
        raise InvalidArgumentError("inputs", f"a {tap.runtime} model does not tell what it takes")
    if any(None in one.shape[1:] for one in tap.inputs):
        raise InvalidArgumentError(
            "inputs",
            "the model takes any size",
            remedy="name inputs of the size meant: --inputs x.npy",
        )
    dtypes = [np.float32 if not one.scale else np.int8 for one in tap.inputs]
    shapes = [tuple(size or 1 for size in one.shape) for one in tap.inputs]
    return [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _median(function: Callable[[], object]) -> float:
    """Median nanoseconds of a call, of as many as there is time for."""
    function()
    times: list[int] = []
    end = time.perf_counter() + _MOST_S
    while len(times) < _PASSES and (time.perf_counter() < end or not times):
        began = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - began)
    return float(np.median(times))


def _operators(tap: Tap, fed: Sequence[Array]) -> list[OperatorTime]:
    if isinstance(tap, OnnxTap):
        times = _onnx_times(tap, fed)
    elif isinstance(tap, TorchTap):
        times = _torch_times(tap, fed)
    elif isinstance(tap, LiteRTTap) and not isinstance(tap, MicroTap):
        return []  # the runtime tells the times of its operators to C++ only
    else:
        return []
    tap.run(fed)
    work = {layer.name: layer.macs for layer in tap.layers}
    rates: dict[str, list[float]] = {}
    for name, kind, ns in times:
        if work.get(name) and ns:
            rates.setdefault(kind, []).append(work[name] / ns)
    usual = {kind: float(np.median(speeds)) for kind, speeds in rates.items()}
    return [
        OperatorTime(name, kind, ns, work.get(name, 0) / usual[kind] if usual.get(kind) else 0.0)
        for name, kind, ns in times
    ]


def _onnx_times(tap: OnnxTap, fed: Sequence[Array]) -> list[tuple[str, str, float]]:
    """By ONNX Runtime's own profile; an operator is named after the layer it gives."""
    named = {node.name: node.output[0] for node in tap.model.graph.node}
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        session = tap.session_of(None, profile=str(Path(folder) / "profile"))
        names = [one.name for one in tap.inputs]
        for _ in range(_PASSES):
            session.run(None, dict(zip(names, fed, strict=True)))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    taken: dict[tuple[str, str], list[float]] = {}
    for event in events:
        facts = event.get("args", {})
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"].removesuffix("_kernel_time")
            key = named.get(node, node), str(facts.get("op_name", ""))
            taken.setdefault(key, []).append(1e3 * event["dur"])
    return [(name, kind, float(np.median(times))) for (name, kind), times in taken.items()]


def _torch_times(tap: TorchTap, fed: Sequence[Array]) -> list[tuple[str, str, float]]:
    taken: dict[str, list[float]] = {}
    began: dict[str, int] = {}
    handles = []
    for name, module in tap.leaves.items():

        def before(_module: Any, _inputs: Any, name: str = name) -> None:
            began[name] = time.perf_counter_ns()

        def after(_module: Any, _inputs: Any, _output: Any, name: str = name) -> None:
            taken.setdefault(name, []).append(time.perf_counter_ns() - began[name])

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        for _ in range(_PASSES):
            tap.plain(fed)
    finally:
        for handle in handles:
            handle.remove()
    return [
        (name, type(tap.leaves[name]).__name__, float(np.median(times)))
        for name, times in taken.items()
    ]
