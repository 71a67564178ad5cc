"""Time every operator in a separate pass without recording."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.taps import LiteRTTap, MicroTap, OnnxTap, Tap, TorchTap, open_tap
from slipstream.ship.xray.statistics import Array
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_SLOW = 10.0
_PASSES, _MAX_S = 15, 20.0
_MAX_ROWS = 12


@dataclass(frozen=True)
class OperatorTime:
    """Time of one operator.

    Attributes:
        ns: its median time.
        expected_ns: time of the same operator in a baseline; without one, its multiplications at
            the median rate of its kind in this model; 0 if unknown.
    """

    name: str
    kind: str
    ns: float
    expected_ns: float = 0.0

    @property
    def ratio(self) -> float:
        """`ns` divided by `expected_ns`; 0 if that is unknown."""
        return self.ns / self.expected_ns if self.expected_ns else 0.0


@dataclass(frozen=True)
class Latency:
    """Result of `latency`.

    Attributes:
        total_ns: median time of an inference.
        baseline_ns: the same for the baseline; 0 without one.
        operators: in execution order; empty if the runtime does not report them.
    """

    total_ns: float
    baseline_ns: float
    operators: tuple[OperatorTime, ...]

    @property
    def ratio(self) -> float:
        """`total_ns` divided by `baseline_ns`; 0 without a baseline."""
        return self.total_ns / self.baseline_ns if self.baseline_ns else 0.0

    @property
    def slow(self) -> list[OperatorTime]:
        """Operators at least ten times slower than expected, with over 2 % of the total."""
        odd = [
            operator
            for operator in self.operators
            if operator.ratio >= _SLOW and operator.ns > 0.02 * self.total_ns
        ]
        return sorted(odd, key=lambda operator: -operator.ns)

    @property
    def remedies(self) -> list[str]:
        """Likely causes of slow operators."""
        remedies = []
        if self.ratio >= _SLOW:
            remedies.append(
                f"{self.ratio:.0f} times the baseline: reference kernels, or a delegate that was "
                "refused: check the interpreter's op resolver and log"
            )
        remedies += [
            f"{operator.name} ({operator.kind}) takes {operator.ratio:.0f} times the expected "
            "time: no fast kernel for its dtype, shape or layout"
            for operator in self.slow
        ]
        return remedies

    def tables(self) -> list[Table]:
        """Return a table of the slowest operators."""
        shown = sorted(self.operators, key=lambda operator: -operator.ns)[:_MAX_ROWS]
        against = f", {format_duration(self.baseline_ns)} the baseline" if self.baseline_ns else ""
        return [Table.of(
            shown,
            [
                Field[OperatorTime].of("operator", lambda operator: operator.name),
                Field[OperatorTime].of("kind", lambda operator: operator.kind),
                Field[OperatorTime].number("time", lambda operator: format_duration(operator.ns)),
                Field[OperatorTime].number(
                    "vs. expected", lambda entry: f"{entry.ratio:.1f}x" if entry.ratio else ""
                ),
            ],
            f"{format_duration(self.total_ns)} per inference{against}",
            self.remedies or ["no operator is slower than expected"],
        )]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            "total_ns": self.total_ns, "baseline_ns": self.baseline_ns,
            "operators": [
                {"name": timed.name, "kind": timed.kind, "ns": timed.ns, "ratio": timed.ratio}
                for timed in self.operators
            ],
            "slow": [operator.name for operator in self.slow], "remedies": self.remedies,
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
        model: as for `slipstream.runtimes.taps.open_tap`, or a tap.
        inputs: [N, ...], of which the first sample is run, or one array per input; zeros if None.
        against: a baseline: the same model on another runtime or other kernels. By default a
            .tflite or .onnx on reference kernels is compared with optimized ones.
        plain_kernels: whether to run `model` on reference kernels.
        threads: number of threads within an operator.
        report: called with progress messages.

    Raises:
        InvalidArgumentError: `inputs` are required, as for torch modules.
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
    report("timing inferences")
    total = _median(lambda: tap.plain(fed))
    baseline, expected = 0.0, {}
    if against is not None:
        other = against if isinstance(against, Tap) else open_tap(against, threads=threads)
        baseline = _median(lambda: other.plain(fed))
        expected = {operator.name: operator.ns for operator in _operators(other, fed)}
    report("timing operators")
    operators = [
        replace(operator, expected_ns=expected.get(operator.name, operator.expected_ns))
        for operator in _operators(tap, fed)
    ]
    return Latency(total, baseline, tuple(operators))


def _fed(tap: Tap, inputs: Array | Sequence[Array] | None) -> list[Array]:
    if isinstance(inputs, np.ndarray):
        return [inputs[:1]]
    if inputs is not None:
        return list(inputs)
    if not tap.inputs:
        raise InvalidArgumentError(
            "inputs",
            f"the shapes of a {tap.runtime} model's inputs are unknown",
            remedy="pass inputs",
        )
    if any(None in spec.shape[1:] for spec in tap.inputs):
        raise InvalidArgumentError(
            "inputs", "the model takes any size", remedy="pass inputs: --inputs x.npy"
        )
    dtypes = [np.float32 if not spec.scale else np.int8 for spec in tap.inputs]
    shapes = [tuple(size or 1 for size in spec.shape) for spec in tap.inputs]
    return [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _median(function: Callable[[], object]) -> float:
    """Return the median time of a call in ns, over as many calls as time permits."""
    function()
    times: list[int] = []
    end = time.perf_counter() + _MAX_S
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
        return []  # the runtime reports operator times to C++ only
    else:
        return []
    tap.run(fed)
    work = {layer.name: layer.macs for layer in tap.layers}
    rates: dict[str, list[float]] = {}
    for name, kind, ns in times:
        if work.get(name) and ns:
            rates.setdefault(kind, []).append(work[name] / ns)
    typical = {kind: float(np.median(speeds)) for kind, speeds in rates.items()}
    return [
        OperatorTime(
            name, kind, ns, work.get(name, 0) / typical[kind] if typical.get(kind) else 0.0
        )
        for name, kind, ns in times
    ]


def _onnx_times(tap: OnnxTap, fed: Sequence[Array]) -> list[tuple[str, str, float]]:
    """Return times from ONNX Runtime's profile; operators are named after their output."""
    named = {node.name: node.output[0] for node in tap.model.graph.node}
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        session = tap.session_of(None, profile=str(Path(folder) / "profile"))
        names = [spec.name for spec in tap.inputs]
        for _ in range(_PASSES):
            session.run(None, dict(zip(names, fed, strict=True)))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    durations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        facts = event.get("args", {})
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"].removesuffix("_kernel_time")
            key = named.get(node, node), str(facts.get("op_name", ""))
            durations.setdefault(key, []).append(1e3 * event["dur"])
    return [(name, kind, float(np.median(times))) for (name, kind), times in durations.items()]


def _torch_times(tap: TorchTap, fed: Sequence[Array]) -> list[tuple[str, str, float]]:
    durations: dict[str, list[float]] = {}
    began: dict[str, int] = {}
    handles = []
    for name, module in tap.leaves.items():

        def before(_module: Any, _inputs: Any, name: str = name) -> None:
            began[name] = time.perf_counter_ns()

        def after(_module: Any, _inputs: Any, _output: Any, name: str = name) -> None:
            durations.setdefault(name, []).append(time.perf_counter_ns() - began[name])

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        for _ in range(_PASSES):
            tap.plain(fed)
    finally:
        for handle in handles:
            handle.remove()
    return [
        (name, type(tap.leaves[name]).__name__, float(np.median(times)))
        for name, times in durations.items()
    ]
