"""Compare two logs of the same frames: inputs, layers, outputs, latency."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.files import read_bytes
from slipstream.runtimes.preprocessing import Pipeline
from slipstream.runtimes.taps import TappedTensor
from slipstream.schema import read
from slipstream.ship.xray.assertions import Failure, check
from slipstream.ship.xray.explaining import HARMLESS, Cause, confident, explain, explain_arrays
from slipstream.ship.xray.log import Frame, Log, LogError
from slipstream.ship.xray.matching import coverage, match
from slipstream.ship.xray.statistics import Array, canonical
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_PROBES = 4
# A layer is suspect if its drift is this many times that of the layer before, and at least this.
_JUMP, _MIN_DRIFT = 3.0, 0.005
# Tensors with less drift count as equal.
_EQUAL_DRIFT = 1e-4
_MAX_ROWS = 12
# Softmax outputs: tolerance of their sum, and the largest difference of two logarithms.
_PROBABILITY, _MAX_SPAN = 1e-3, 60.0
_MAX_LABELS_BYTES = 64 << 20


@dataclass(frozen=True)
class LayerDrift:
    """Deviation of a layer from the reference's, over all frames.

    Attributes:
        name, kind: of the candidate's layer.
        reference: name of the reference's layer.
        rmse: root mean square of the difference.
        drift: `rmse` over the larger range of the two; `rmse` itself for layers without a range.
        exact: whether it was computed from values; otherwise it is estimated from projections.
        largest: the largest absolute difference; None if only estimated.
        bias: mean of the candidate minus that of the reference.
        nonfinite: number of NaN and infinite elements of the candidate.
        no_range: whether both are constant, so that `drift` is absolute.
        before: drift of the previous layer, or of the inputs; infinite if unknown.
        first: whether `before` is that of the inputs.
    """

    name: str
    kind: str
    reference: str
    rmse: float
    drift: float
    exact: bool
    largest: float | None
    bias: float
    nonfinite: int
    no_range: bool
    before: float
    first: bool

    @property
    def jump(self) -> float:
        """`drift` divided by `before`."""
        return self.drift / max(self.before, _EQUAL_DRIFT)

    @property
    def remark(self) -> str:
        """The layer's anomaly; empty if there is none."""
        if self.nonfinite:
            return f"{self.nonfinite} values are NaN or infinite"
        if self.jump >= _JUMP and self.drift >= _MIN_DRIFT:
            other = "inputs" if self.first else "layer before"
            equal = self.before < _EQUAL_DRIFT
            return (
                f"the {other} agreed"
                if equal
                else f"{self.jump:.0f} times the drift of the {other}"
            )
        return "constant: absolute difference" if self.no_range else ""


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        cause: why the inputs differ.
        layers: drift of each matched layer, in the candidate's order.
        coverage: share of the reference's multiplications that matched layers account for.
        frames: number of frames in both logs.
        flips: number of frames whose top class differs; None without such an output.
        accuracy: top-1 accuracy of reference and candidate; None without labels.
        output_drift: of the first output, RMSE over range.
        latency_ns: medians of reference and candidate, without frames whose layers were recorded.
        failures: assertions that failed.
        notes: remarks for the reader.
    """

    reference: str
    candidate: str
    cause: Cause
    layers: tuple[LayerDrift, ...]
    coverage: float
    frames: int
    flips: int | None
    accuracy: tuple[float, float] | None
    output_drift: float
    latency_ns: tuple[float, float] | None
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fix(self) -> str:
        """Lines of Python that correct the inputs; empty if none are needed."""
        return self.cause.fix

    @property
    def suspects(self) -> list[LayerDrift]:
        """Layers with a remark, the largest jump first."""
        odd = [layer for layer in self.layers if layer.nonfinite or layer.jump >= _JUMP]
        odd = [layer for layer in odd if layer.nonfinite or layer.drift >= _MIN_DRIFT]
        return sorted(odd, key=lambda layer: (-layer.nonfinite, -layer.jump))

    def tables(self) -> list[Table]:
        """Return a summary and a table of the layers that drift most."""
        rows = [("inputs", self.cause.text), ("frames", f"{self.frames} in both logs")]
        if self.cause.alternatives:
            rows.append(("equally likely", "; ".join(self.cause.alternatives)))
        if self.flips is not None:
            rows.append(("top class", f"differs in {self.flips} of {self.frames} frames"))
        if self.accuracy:
            rows.append(("accuracy", "{:.1%} reference, {:.1%} deployed".format(*self.accuracy)))
        rows.append(
            ("layers", f"{len(self.layers)} matched, {self.coverage:.1%} of multiplications")
        )
        if self.latency_ns:
            a, b = (format_duration(ns) for ns in self.latency_ns)
            rows.append(("latency", f"{a} reference, {b} deployed"))
        if self.fix:
            rows.append(("fix", self.fix))
        rows += [("assertion failed", str(failure)) for failure in self.failures]
        summary = Table.of(
            rows, [Field.of("", lambda row: row[0]), Field.of("found", lambda row: row[1])],
            f"{self.candidate} compared with {self.reference}", self.notes,
        )  # fmt: skip
        if not self.layers:
            return [summary]
        shown = sorted(self.layers, key=lambda layer: -layer.drift)[:_MAX_ROWS]
        return [summary, drift_table(shown, f"largest drift of {len(self.layers)} layers")]

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            "reference": self.reference, "candidate": self.candidate,
            "cause": {
                "kind": self.cause.kind, "text": self.cause.text, "before": self.cause.before,
                "after": self.cause.after, "stages": self.cause.stages, "fix": self.cause.fix,
                "alternatives": self.cause.alternatives,
                "pipeline": self.cause.pipeline and self.cause.pipeline.to_dict(),
            },
            "frames": self.frames, "flips": self.flips, "accuracy": self.accuracy,
            "output_drift": self.output_drift, "latency_ns": self.latency_ns,
            "coverage": self.coverage, "layers": self.layers,
            "suspects": [layer.name for layer in self.suspects],
            "failures": [str(failure) for failure in self.failures], "notes": self.notes,
        }  # fmt: skip


def drift_table(layers: Sequence[LayerDrift], title: str) -> Table:
    """Return a table with a row per layer."""
    return Table.of(
        layers,
        [
            Field[LayerDrift].of("layer", lambda layer: layer.name),
            Field[LayerDrift].of("operator", lambda layer: layer.kind, optional=True),
            Field[LayerDrift].number("drift", lambda layer: f"{layer.drift:.4f}"),
            Field[LayerDrift].number("RMSE", lambda layer: f"{layer.rmse:.3g}", optional=True),
            Field[LayerDrift].number("bias", lambda layer: f"{layer.bias:+.2g}", optional=True),
            Field[LayerDrift].of("remark", lambda layer: layer.remark),
        ],
        title,
        ["drift: RMSE over the larger range of the two"
         + ("" if all(layer.exact for layer in layers) else ", estimated from random projections")],
    )  # fmt: skip


def read_labels(path: Path) -> Mapping[str, int] | Sequence[int]:
    """Read labels from a JSON list, or an object by key; raise UsageError for anything else."""
    try:
        labels = json.loads(read_bytes(path, UsageError, most=_MAX_LABELS_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the labels: {error}", where=str(path)) from error
    kind: Any = Mapping[str, int] if isinstance(labels, dict) else Sequence[int]
    checked: Mapping[str, int] | Sequence[int] = read(kind, labels, "labels", {})
    return checked


def compare(
    reference: Path | str | Log,
    candidate: Path | str | Log,
    *,
    labels: Mapping[str, int] | Sequence[int] | None = None,
    raws: Sequence[Any] | None = None,
    pipeline: Pipeline | None = None,
    depth: int = 3,
    report: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Compare a deployed model's log with that of a reference.

    Frames are paired by their keys, or by their order if they have none.

    Args:
        labels: true classes by key, or in the order of frames.
        raws: raw inputs in the order of frames, if the logs do not have them.
        pipeline: correct preprocessing; by default that of the reference's log.
        depth: number of preprocessing stages that may be wrong simultaneously: 1, 2 or 3.
        report: called with progress messages.

    Raises:
        LogError: a log is damaged, or they have no frame or no layer in common.
        RawInputError: a raw input is damaged.
    """
    a = reference if isinstance(reference, Log) else Log.read(reference)
    b = candidate if isinstance(candidate, Log) else Log.read(candidate)
    notes = [f"{log.path.name}: {log.damage}" for log in (a, b) if log.damage]
    if not a.count or not b.count:
        empty = a if not a.count else b
        raise LogError("the log holds no complete frame", where=str(empty.path))
    report("reading both logs")
    sums = _Sums(a, b)
    pairs = list(_probe(a, b))
    if not pairs:
        raise LogError(
            f"{a.path.name} and {b.path.name} have no frame in common",
            remedy="record the same inputs in both, or pass the same key= for equal frames",
        )
    references = np.stack([frame.statistics for frame, _ in pairs])
    candidates = np.stack([frame.statistics for _, frame in pairs])
    sums.matched = match(a.layers, b.layers, references, candidates)
    for frame, other in _paired(a, b):
        sums.add(frame, other)
    cause = _cause(sums, a, raws, pipeline, depth, notes, report)
    has_layers = any(frames["elements"][:, len(_of(log, "input")):].any() for frames, log in
                     ((references, a), (candidates, b)))  # fmt: skip
    if not sums.matched and has_layers and a.layers and b.layers:
        names = [log.header.get("model", "?") for log in (a, b)]
        notes.append(f"models {names[1]} and {names[0]} share no layer: are they the same model?")
        if sums.output_shapes_differ:
            raise LogError(
                f"the logs are of different models: {names[0]} and {names[1]} have no layer in "
                "common and outputs of different sizes", where=str(b.path),
            )  # fmt: skip
    if cause.kind in ("preprocessing", "unexplained"):
        notes.append("inputs differ, which causes most of the layers' drift: fix them first")
    if softmax := _softmax(sums.outputs):
        notes.append(softmax)
    failures = tuple(check(sums.candidate_layers()))
    return Comparison(
        a.path.name, b.path.name, confident(cause), tuple(sums.drifts()),
        coverage(a.layers, {layer for layer, _ in sums.matched}), sums.count, sums.flips,
        sums.accuracy(labels), sums.output_drift(), sums.latency(), failures, tuple(notes),
    )  # fmt: skip


def _of(log: Log, kind: str) -> list[int]:
    return [n for n, layer in enumerate(log.layers) if layer.kind == kind]


def _paired(a: Log, b: Log) -> Iterator[tuple[Frame, Frame]]:
    """Yield frames with equal keys, or in order without keys.

    Memory is constant if both logs have the same order.
    """
    waiting: dict[Any, Frame] = {}
    others = b.frames()
    for frame in a.frames():
        key = frame.facts.get("key", frame.index)
        if key in waiting:
            yield frame, waiting.pop(key)
            continue
        for other in others:
            name = other.facts.get("key", other.index)
            if name == key:
                yield frame, other
                break
            waiting[name] = other


def _probe(a: Log, b: Log) -> Iterator[tuple[Frame, Frame]]:
    probes = 0
    for pair in _paired(a, b):
        tapped = [frame.facts.get("tapped", True) for frame in pair]
        if all(tapped) or not probes:
            yield pair
            probes += all(tapped)
        if probes == _PROBES:
            return


@dataclass
class _Sums:
    """Sums over frames, and the results computed from them."""

    a: Log
    b: Log
    matched: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.b.layers)
        self.count = self.flipped = 0
        self.chosen = False
        self.squares, self.elements = np.zeros(count), np.zeros(count)
        self.exact, self.seen = np.zeros(count), np.zeros(count)
        self.bias, self.largest = np.zeros(count), np.zeros(count)
        self.nonfinite = np.zeros(count, np.int64)
        self.low = np.full((2, count), np.inf)
        self.high = np.full((2, count), -np.inf)
        self.inputs: list[tuple[Array, Array]] = []
        self.outputs: list[tuple[Array, Array]] = []
        self.facts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.input_tensors: list[Array | None] = []
        self.answers: list[tuple[int, int] | None] = []
        self.times: tuple[list[float], list[float]] = ([], [])
        self.output_shapes_differ = False

    def add(self, frame: Frame, other: Frame) -> None:
        self.count += 1
        self.facts.append((frame.facts, other.facts))
        outputs = list(zip(_of(self.a, "output"), _of(self.b, "output"), strict=False))
        inputs = list(zip(_of(self.a, "input"), _of(self.b, "input"), strict=False))
        pairs = self.matched + outputs + inputs
        left, right = (list(side) for side in zip(*pairs, strict=True)) if pairs else ([], [])
        ours, theirs = frame.statistics[left], other.statistics[right]
        valid = (ours["elements"] > 0) & (ours["elements"] == theirs["elements"])
        at = np.array(right, int)
        for side, values in enumerate((ours, theirs)):
            np.minimum.at(self.low[side], at[valid], values["low"][valid])
            np.maximum.at(self.high[side], at[valid], values["high"][valid])
        difference = ours["projections"].astype(np.float64) - theirs["projections"]
        squares = np.square(difference).sum(1)
        for position, (p, q) in enumerate(pairs):
            if p in frame.tensors and q in other.tensors and valid[position]:
                u = canonical(frame.tensors[p], self.a.layers[p].channels_last)
                v = canonical(other.tensors[q], self.b.layers[q].channels_last)
                difference = (
                    (v - u).reshape(-1)[np.isfinite((v - u).reshape(-1))].astype(np.float64)
                )
                squares[position] = float(difference @ difference)
                self.exact[q] += 1
                self.largest[q] = max(self.largest[q], float(np.abs(difference).max(initial=0.0)))
        # Equal hashes mean equal bits, whatever rounding does to projections.
        squares[(ours["hash"] == theirs["hash"]).all(1)] = 0.0
        self.squares[at[valid]] += squares[valid]
        self.elements[at[valid]] += ours["elements"][valid]
        self.seen[at[valid]] += 1
        self.bias[at[valid]] += (theirs["mean"] - ours["mean"])[valid]
        self.nonfinite[at] += theirs["nonfinite"]
        if outputs:
            p, q = outputs[0]
            sizes = frame.statistics["elements"][p], other.statistics["elements"][q]
            self.output_shapes_differ |= bool(sizes[0] != sizes[1])
            self.outputs.append((frame.statistics[p], other.statistics[q]))
        self._answer(frame, other)
        ins = _of(self.a, "input"), _of(self.b, "input")
        self.inputs.append((frame.statistics[ins[0]], other.statistics[ins[1]]))
        keep = len(self.input_tensors) < 8 and bool(ins[0])
        self.input_tensors.append(frame.tensors.get(ins[0][0]) if keep else None)
        for times, facts in zip(self.times, (frame.facts, other.facts), strict=True):
            if "latency_ns" in facts and not facts.get("tapped"):
                times.append(facts["latency_ns"])

    def _answer(self, frame: Frame, other: Frame) -> None:
        first = frame.facts.get("answer"), other.facts.get("answer")
        if None in first:
            self.answers.append(None)
            return
        self.chosen = True
        self.flipped += first[0] != first[1]
        self.answers.append((int(first[0]), int(first[1])))  # type: ignore[arg-type]

    @property
    def flips(self) -> int | None:
        return self.flipped if self.chosen else None

    def accuracy(
        self, labels: Mapping[str, int] | Sequence[int] | None
    ) -> tuple[float, float] | None:
        if labels is None or not self.chosen:
            return None
        right = []
        for number, answer in enumerate(self.answers):
            facts = self.facts[number][0]
            try:
                label = (
                    labels[str(facts.get("key"))]
                    if isinstance(labels, Mapping)
                    else labels[int(facts.get("frame", number))]
                )
            except LookupError:
                where = f"frame {facts.get('key', number)}"
                raise InvalidArgumentError("labels", "a label is missing", where=where) from None
            if answer is not None:
                right.append((answer[0] == label, answer[1] == label))
        reference, candidate = np.mean(right, 0)
        return float(reference), float(candidate)

    def latency(self) -> tuple[float, float] | None:
        if not all(self.times):
            return None
        return float(np.median(self.times[0])), float(np.median(self.times[1]))

    def _drift(self, q: int) -> tuple[float, float, bool]:
        """Return RMSE, drift, and whether the tensors have no range to divide by."""
        rmse = float(np.sqrt(self.squares[q] / max(self.elements[q], 1)))
        spans = self.high[:, q] - self.low[:, q]
        span = float(np.max(spans[np.isfinite(spans)], initial=0.0))
        return (rmse, rmse / span, False) if span > 0 else (rmse, rmse, True)

    def output_drift(self) -> float:
        outputs = _of(self.b, "output")
        return self._drift(outputs[0])[1] if outputs else 0.0

    def drifts(self) -> Iterator[LayerDrift]:
        # The first layer is compared with the drift of its inputs, if that is known.
        inputs = [self._drift(q)[1] for q in _of(self.b, "input") if self.seen[q]]
        before, first = max(inputs, default=np.inf), True
        for p, q in self.matched:
            if not self.seen[q]:
                continue
            rmse, drift, no_range = self._drift(q)
            exact = self.exact[q] == self.seen[q]
            layer = self.b.layers[q]
            yield LayerDrift(
                layer.name, layer.kind, self.a.layers[p].name, rmse, drift, bool(exact),
                float(self.largest[q]) if exact else None, float(self.bias[q] / self.seen[q]),
                int(self.nonfinite[q]), no_range, before, first,
            )  # fmt: skip
            before, first = drift, False

    def candidate_layers(self) -> Iterator[tuple[TappedTensor, dict[str, float]]]:
        """Yield layers with the fields of `LayerView`."""
        for layer in self.drifts():
            number = next(q for _, q in self.matched if self.b.layers[q].name == layer.name)
            yield self.b.layers[number], {
                "nonfinite": layer.nonfinite, "drift": layer.drift, "rmse": layer.rmse,
                "bias": layer.bias,
                "low": float(self.low[1, number]), "high": float(self.high[1, number]),
            }  # fmt: skip


def _cause(
    sums: _Sums, reference: Log, raws: Sequence[Any] | None, pipeline: Pipeline | None, depth: int,
    notes: list[str], report: Callable[[str], None],
) -> Cause:  # fmt: skip
    references = [frame for frame, _ in sums.inputs]
    candidates = [frame for _, frame in sums.inputs]
    if not references[0].size or not candidates[0].size:
        return Cause("unknown", "a log holds no model input")
    if (swapped := _swapped(np.stack(references), np.stack(candidates))) is not None:
        return swapped
    described = reference.header.get("preprocessing")
    if pipeline is None and described:
        pipeline = Pipeline.from_dict(described)
    first = np.stack([tensors[:1] for tensors in candidates])[:, 0]
    if pipeline is not None and raws is None:
        raws = [raw_of(b) if "raw" in b or "raw_bytes" in b else raw_of(a) for a, b in sums.facts]
        if any(raw is None for raw in raws):
            notes.append("raw inputs are missing: pass raw= when recording, or raws= here")
            raws = None
    if pipeline is not None and raws is not None:
        if len(raws) != len(first):
            raise InvalidArgumentError("raws", f"{len(raws)} for {len(first)} frames")
        return explain(first, raws, pipeline, depth=depth, report=report)
    target = np.stack([tensors[:1] for tensors in references])[:, 0]
    if not (target["elements"] == first["elements"]).all():
        sizes = f"{target['elements'][0]} values in the reference, {first['elements'][0]} deployed"
        return Cause("unexplained", f"inputs have different sizes: {sizes}")
    distance = np.square(target["projections"].astype(np.float64) - first["projections"]).sum()
    energy = (target["elements"] * target["std"].astype(np.float64) ** 2).sum()
    before = float(np.sqrt(distance / max(energy, 1e-12)))
    same = bool((target["hash"] == first["hash"]).all())
    if same or before < 1e-6:
        return Cause("equal", "the inputs equal the reference's", frames=len(first))
    if sums.input_tensors and all(tensor is not None for tensor in sums.input_tensors[:8]):
        tensors = [tensor for tensor in sums.input_tensors[:8] if tensor is not None]
        return explain_arrays(first[: len(tensors)], tensors, depth=depth, report=report)
    kind = "harmless" if before <= HARMLESS else "unexplained"
    return Cause(
        kind, f"inputs differ by {before:.1%} of their standard deviation; raw inputs and the "  # type: ignore[arg-type]
        "reference's pipeline, or a reference log of level layers, would show why", before, before,
        frames=len(first),
    )  # fmt: skip


def _softmax(outputs: Sequence[tuple[Array, Array]]) -> str:
    """Report whether one side's first output is the softmax of the other's; else return "".

    Their `STATISTICS` by frame suffice: softmax sums to 1, and differences of its inputs are
    differences of its logarithms.
    """
    if not outputs:
        return ""
    reference, candidate = (np.array([pair[side] for pair in outputs]) for side in (0, 1))
    if _is_softmax_of(candidate, reference):
        if _sums_to_one(reference):
            return (
                "softmax is applied twice: the deployed output is the softmax of the reference's, "
                "which is already a softmax; remove the second one"
            )
        return "the deployed output is the softmax of the reference's: apply it on both sides"
    if _is_softmax_of(reference, candidate):
        if _sums_to_one(candidate):
            return (
                "softmax is applied twice in the reference: its output is the softmax of the "
                "deployed one, which is already a softmax"
            )
        return "the deployed output lacks the softmax that the reference applies"
    return ""


def _sums_to_one(values: Array) -> bool:
    sums = values["mean"].astype(np.float64) * values["elements"]
    return bool((values["low"] >= 0).all() and np.allclose(sums, 1, atol=_PROBABILITY))


def _is_softmax_of(values: Array, inputs: Array) -> bool:
    spans = inputs["high"].astype(np.float64) - inputs["low"]
    sizes = (values["elements"] == inputs["elements"]) & (values["elements"] > 1)
    # Equal inputs are inconclusive, and rounding of tiny probabilities hides large differences.
    if not (sizes & (values["low"] > 0) & (spans < _MAX_SPAN)).all() or spans.max() < 0.01:
        return False
    logarithms = np.log(values["high"].astype(np.float64) / values["low"])
    return _sums_to_one(values) and np.allclose(logarithms, spans, rtol=0.01, atol=1e-3)


def _swapped(reference: Array, candidate: Array) -> Cause | None:
    """Detect swapped model inputs from `STATISTICS` [frames, inputs] of both."""
    count = reference.shape[1]
    if count < 2 or candidate.shape[1] != count:
        return None
    a = reference["projections"].astype(np.float64)
    b = candidate["projections"].astype(np.float64)
    distance = np.square(a[:, :, None] - b[:, None]).sum((0, 3))
    sizes = (reference["elements"][:, :, None] == candidate["elements"][:, None]).all(0)
    distance = np.where(sizes, distance, np.inf)
    order = distance.argmin(0)
    before = np.diag(distance).sum()
    if sorted(order) != list(range(count)) or (order == np.arange(count)).all():
        return None
    after = distance[order, np.arange(count)].sum()
    if after > before / 100:
        return None
    text = ", ".join(f"input {n} gets the data of input {m}" for n, m in enumerate(order) if n != m)
    right = [int(np.flatnonzero(order == n)[0]) for n in range(count)]
    return Cause(
        "preprocessing", f"inputs are swapped: {text}", 1.0, 0.0, ("order",),
        f"inputs = [inputs[n] for n in {right}]", frames=len(reference),
    )  # fmt: skip


def raw_of(facts: Mapping[str, Any]) -> Any:
    """Return a frame's raw input, from the log or the file it names; None if there is none."""
    if "raw" in facts:
        path = Path(str(facts["raw"]))
        return path.read_bytes() if path.is_file() else None
    if "raw_bytes" not in facts:
        return None
    content = bytes.fromhex(facts["raw_bytes"])
    if "raw_array" not in facts:
        return content
    dtype, shape = facts["raw_array"]
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape)
