"""Two logs of the same frames, held against each other: inputs, layers, outputs, latency."""

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
from slipstream.runtimes.taps import Layer
from slipstream.schema import read
from slipstream.ship.xray.assertions import Failure, check
from slipstream.ship.xray.explaining import HARMLESS, Cause, confident, explain, explain_arrays
from slipstream.ship.xray.log import Frame, Log, LogError
from slipstream.ship.xray.matching import coverage, match
from slipstream.ship.xray.statistics import Array, canonical
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_PROBES = 4
# A layer whose drift is so many times that of what comes before it is where something happens.
_JUMP, _NOTICED = 3.0, 0.005
# Of less drift than this two tensors are the same, and nothing is a multiple of it.
_NONE = 1e-4
_SHOWN = 12
# Of outputs that are taken for a softmax: how far their sum is from 1, and the largest difference
# of two logarithms.
_PROBABILITY, _MAX_SPAN = 1e-3, 60.0
_LARGEST_LABELS_BYTES = 64 << 20


@dataclass(frozen=True)
class LayerDrift:
    """How far a layer is from the reference's, over all frames.

    Attributes:
        name, kind: of the candidate's layer.
        reference: the name of the reference's.
        rmse: root mean square of the difference.
        drift: `rmse` over the larger range of the two; of a layer without a range, `rmse` itself.
        exact: computed from the values; otherwise estimated from projections.
        largest: the largest absolute difference; None where only estimated.
        bias: mean of the candidate less that of the reference.
        nonfinite: elements of the candidate that are NaN or infinite.
        no_range: both are constant, so that `drift` is absolute.
        before: drift of the layer before, or of the inputs; infinite where that is not known.
        first: what comes before are the inputs.
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
        """`drift` over that of what comes before."""
        return self.drift / max(self.before, _NONE)

    @property
    def remark(self) -> str:
        """What is odd about it; empty where nothing is."""
        if self.nonfinite:
            return f"{self.nonfinite} values are NaN or infinite"
        if self.jump >= _JUMP and self.drift >= _NOTICED:
            other = "inputs" if self.first else "layer before"
            equal = self.before < _NONE
            return f"the {other} agreed" if equal else f"{self.jump:.0f} times the {other}"
        return "constant: compared absolutely" if self.no_range else ""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        cause: why the inputs differ.
        layers: drift of each matched layer, in the candidate's order.
        coverage: share of the reference's multiplications that matched layers stand for.
        frames: that both logs hold.
        flips: frames whose first choice differs; None where there is no output to choose from.
        accuracy: share of right first choices by labels: of reference and candidate.
        output_drift: of the first output, RMSE over range.
        latency_ns: medians of reference and candidate; not of frames whose layers were recorded.
        failures: assertions that failed.
        notes: what a reader has to know.
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
        """Lines that put the inputs right; empty where nothing has to be."""
        return self.cause.fix

    @property
    def suspects(self) -> list[LayerDrift]:
        """Layers with a remark, the largest jump first."""
        odd = [one for one in self.layers if one.nonfinite or one.jump >= _JUMP]
        odd = [one for one in odd if one.nonfinite or one.drift >= _NOTICED]
        return sorted(odd, key=lambda one: (-one.nonfinite, -one.jump))

    def tables(self) -> list[Table]:
        """What a person reads: the summary, then layers that drift most."""
        rows = [("inputs", self.cause.text), ("frames", f"{self.frames} in both logs")]
        if self.cause.alternatives:
            rows.append(("as likely", "; ".join(self.cause.alternatives)))
        if self.flips is not None:
            rows.append(("first choice", f"differs in {self.flips} of {self.frames} frames"))
        if self.accuracy:
            rows.append(
                ("accuracy", "{:.1%} of the reference, {:.1%} deployed".format(*self.accuracy))
            )
        rows.append(
            ("layers", f"{len(self.layers)} matched, {self.coverage:.1%} of multiplications")
        )
        if self.latency_ns:
            a, b = (format_duration(one) for one in self.latency_ns)
            rows.append(("latency", f"{a} of the reference, {b} deployed"))
        if self.fix:
            rows.append(("fix", self.fix))
        rows += [("assertion failed", str(one)) for one in self.failures]
        summary = Table.of(
            rows, [Field.of("", lambda row: row[0]), Field.of("found", lambda row: row[1])],
            f"{self.candidate} against {self.reference}", self.notes,
        )  # fmt: skip
        if not self.layers:
            return [summary]
        shown = sorted(self.layers, key=lambda one: -one.drift)[:_SHOWN]
        return [summary, drift_table(shown, f"largest drift of {len(self.layers)} layers")]

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
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
            "suspects": [one.name for one in self.suspects],
            "failures": [str(one) for one in self.failures], "notes": self.notes,
        }  # fmt: skip


def drift_table(layers: Sequence[LayerDrift], title: str) -> Table:
    """A line a layer."""
    return Table.of(
        layers,
        [
            Field[LayerDrift].of("layer", lambda one: one.name),
            Field[LayerDrift].of("operator", lambda one: one.kind, optional=True),
            Field[LayerDrift].number("drift", lambda one: f"{one.drift:.4f}"),
            Field[LayerDrift].number("RMSE", lambda one: f"{one.rmse:.3g}", optional=True),
            Field[LayerDrift].number("bias", lambda one: f"{one.bias:+.2g}", optional=True),
            Field[LayerDrift].of("remark", lambda one: one.remark),
        ],
        title,
        ["drift: RMSE over the larger range of the two"
         + ("" if all(one.exact for one in layers) else ", estimated from random projections")],
    )  # fmt: skip


def read_labels(path: Path) -> Mapping[str, int] | Sequence[int]:
    """The right answers in a JSON file: a list, or an object by key.

    Raises:
        UsageError: there is no such file, or it holds anything but integers.
    """
    try:
        labels = json.loads(read_bytes(path, UsageError, most=_LARGEST_LABELS_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the labels cannot be read: {error}", where=str(path)) from error
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
    """Hold a deployed model's log against that of a reference.

    Frames are paired by their keys, or by their order where they have none.

    Args:
        labels: right answers by key, or in the order of frames.
        raws: raw inputs in the order of frames, where the logs do not say where they lie.
        pipeline: how inputs should be made; the reference log's own if it names one.
        depth: stages of preprocessing that may be wrong simultaneously: 1, 2 or 3.
        report: told what is done.

    Raises:
        LogError: a log is damaged, or they have no frame or no layer in common.
        RawInputError: a raw input is damaged.
    """
    a = reference if isinstance(reference, Log) else Log.read(reference)
    b = candidate if isinstance(candidate, Log) else Log.read(candidate)
    notes = [f"{log.path.name}: {log.damage}" for log in (a, b) if log.damage]
    if not a.count or not b.count:
        empty = a if not a.count else b
        raise LogError("holds no whole frame", where=str(empty.path))
    report("reading both logs")
    sums = _Sums(a, b)
    pairs = list(_probe(a, b))
    if not pairs:
        raise LogError(
            f"{a.path.name} and {b.path.name} have no frame in common",
            remedy="record the same inputs in both, or give frames the same key=",
        )
    references = np.stack([one.statistics for one, _ in pairs])
    candidates = np.stack([one.statistics for _, one in pairs])
    sums.matched = match(a.layers, b.layers, references, candidates)
    for one, other in _paired(a, b):
        sums.add(one, other)
    cause = _cause(sums, a, raws, pipeline, depth, notes, report)
    has_layers = any(one["elements"][:, len(_of(log, "input")):].any() for one, log in
                     ((references, a), (candidates, b)))  # fmt: skip
    if not sums.matched and has_layers and a.layers and b.layers:
        names = [log.header.get("model", "?") for log in (a, b)]
        notes.append(f"no layer of model {names[1]} is one of model {names[0]}: are they the same?")
        if sums.output_shapes_differ:
            raise LogError(
                f"these are logs of different models: {names[0]} and {names[1]} have no layer in "
                "common and give outputs of different sizes", where=str(b.path),
            )  # fmt: skip
    if cause.kind in ("preprocessing", "unexplained"):
        notes.append("inputs differ, so drift of layers is mostly theirs: mend them first")
    if softmax := _softmax(sums.outputs):
        notes.append(softmax)
    failures = tuple(check(sums.candidate_layers()))
    return Comparison(
        a.path.name, b.path.name, confident(cause), tuple(sums.drifts()),
        coverage(a.layers, {one for one, _ in sums.matched}), sums.count, sums.flips,
        sums.accuracy(labels), sums.output_drift(), sums.latency(), failures, tuple(notes),
    )  # fmt: skip


def _of(log: Log, kind: str) -> list[int]:
    return [n for n, one in enumerate(log.layers) if one.kind == kind]


def _paired(a: Log, b: Log) -> Iterator[tuple[Frame, Frame]]:
    """Frames of both with the same key; of logs without keys, in order. Constant memory for those
    in the same order."""
    waiting: dict[Any, Frame] = {}
    others = b.frames()
    for one in a.frames():
        key = one.facts.get("key", one.index)
        if key in waiting:
            yield one, waiting.pop(key)
            continue
        for other in others:
            name = other.facts.get("key", other.index)
            if name == key:
                yield one, other
                break
            waiting[name] = other


def _probe(a: Log, b: Log) -> Iterator[tuple[Frame, Frame]]:
    probes = 0
    for one, other in _paired(a, b):
        tapped = [frame.facts.get("tapped", True) for frame in (one, other)]
        if all(tapped) or not probes:
            yield one, other
            probes += all(tapped)
        if probes == _PROBES:
            return


@dataclass
class _Sums:
    """What is added up over frames, and what follows from it."""

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

    def add(self, one: Frame, other: Frame) -> None:
        self.count += 1
        self.facts.append((one.facts, other.facts))
        outputs = list(zip(_of(self.a, "output"), _of(self.b, "output"), strict=False))
        inputs = list(zip(_of(self.a, "input"), _of(self.b, "input"), strict=False))
        pairs = self.matched + outputs + inputs
        left, right = (list(side) for side in zip(*pairs, strict=True)) if pairs else ([], [])
        mine, theirs = one.statistics[left], other.statistics[right]
        valid = (mine["elements"] > 0) & (mine["elements"] == theirs["elements"])
        at = np.array(right, int)
        for side, values in enumerate((mine, theirs)):
            np.minimum.at(self.low[side], at[valid], values["low"][valid])
            np.maximum.at(self.high[side], at[valid], values["high"][valid])
        difference = mine["projections"].astype(np.float64) - theirs["projections"]
        squares = np.square(difference).sum(1)
        for position, (p, q) in enumerate(pairs):
            if p in one.tensors and q in other.tensors and valid[position]:
                u = canonical(one.tensors[p], self.a.layers[p].channels_last)
                v = canonical(other.tensors[q], self.b.layers[q].channels_last)
                apart = (v - u).reshape(-1)[np.isfinite((v - u).reshape(-1))].astype(np.float64)
                squares[position] = float(apart @ apart)
                self.exact[q] += 1
                self.largest[q] = max(self.largest[q], float(np.abs(apart).max(initial=0.0)))
        # An equal hash says that every bit is equal, whatever rounding does to projections.
        squares[(mine["hash"] == theirs["hash"]).all(1)] = 0.0
        self.squares[at[valid]] += squares[valid]
        self.elements[at[valid]] += mine["elements"][valid]
        self.seen[at[valid]] += 1
        self.bias[at[valid]] += (theirs["mean"] - mine["mean"])[valid]
        self.nonfinite[at] += theirs["nonfinite"]
        if outputs:
            p, q = outputs[0]
            sizes = one.statistics["elements"][p], other.statistics["elements"][q]
            self.output_shapes_differ |= bool(sizes[0] != sizes[1])
            self.outputs.append((one.statistics[p], other.statistics[q]))
        self._answer(one, other)
        ins = _of(self.a, "input"), _of(self.b, "input")
        self.inputs.append((one.statistics[ins[0]], other.statistics[ins[1]]))
        keep = len(self.input_tensors) < 8 and bool(ins[0])
        self.input_tensors.append(one.tensors.get(ins[0][0]) if keep else None)
        for side, frame in enumerate((one, other)):
            if "latency_ns" in frame.facts and not frame.facts.get("tapped"):
                self.times[side].append(frame.facts["latency_ns"])

    def _answer(self, one: Frame, other: Frame) -> None:
        first = one.facts.get("answer"), other.facts.get("answer")
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
                raise InvalidArgumentError("labels", "there is none", where=where) from None
            if answer is not None:
                right.append((answer[0] == label, answer[1] == label))
        mine, theirs = np.mean(right, 0)
        return float(mine), float(theirs)

    def latency(self) -> tuple[float, float] | None:
        if not all(self.times):
            return None
        return float(np.median(self.times[0])), float(np.median(self.times[1]))

    def _drift(self, q: int) -> tuple[float, float, bool]:
        """RMSE, drift, and whether there was no range to put it in relation to."""
        rmse = float(np.sqrt(self.squares[q] / max(self.elements[q], 1)))
        spans = self.high[:, q] - self.low[:, q]
        span = float(np.max(spans[np.isfinite(spans)], initial=0.0))
        return (rmse, rmse / span, False) if span > 0 else (rmse, rmse, True)

    def output_drift(self) -> float:
        outputs = _of(self.b, "output")
        return self._drift(outputs[0])[1] if outputs else 0.0

    def drifts(self) -> Iterator[LayerDrift]:
        # The first layer is not to blame for what its inputs bring; unknown ones blame nobody.
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

    def candidate_layers(self) -> Iterator[tuple[Layer, dict[str, float]]]:
        """What assertions look at."""
        for one in self.drifts():
            number = next(q for _, q in self.matched if self.b.layers[q].name == one.name)
            yield self.b.layers[number], {
                "nonfinite": one.nonfinite, "drift": one.drift, "rmse": one.rmse, "bias": one.bias,
                "low": float(self.low[1, number]), "high": float(self.high[1, number]),
            }  # fmt: skip


def _cause(
    sums: _Sums, reference: Log, raws: Sequence[Any] | None, pipeline: Pipeline | None, depth: int,
    notes: list[str], report: Callable[[str], None],
) -> Cause:  # fmt: skip
    mine = [one for one, _ in sums.inputs]
    theirs = [one for _, one in sums.inputs]
    if not mine[0].size or not theirs[0].size:
        return Cause("unknown", "a log holds no model input")
    if (swapped := _swapped(np.stack(mine), np.stack(theirs))) is not None:
        return swapped
    described = reference.header.get("preprocessing")
    if pipeline is None and described:
        pipeline = Pipeline.from_dict(described)
    first = np.stack([one[:1] for one in theirs])[:, 0]
    if pipeline is not None and raws is None:
        raws = [raw_of(b) if "raw" in b or "raw_bytes" in b else raw_of(a) for a, b in sums.facts]
        if any(one is None for one in raws):
            notes.append("raw inputs are missing: give raw= when recording, or raws= here")
            raws = None
    if pipeline is not None and raws is not None:
        if len(raws) != len(first):
            raise InvalidArgumentError("raws", f"{len(raws)} for {len(first)} frames")
        return explain(first, raws, pipeline, depth=depth, report=report)
    wanted = np.stack([one[:1] for one in mine])[:, 0]
    if not (wanted["elements"] == first["elements"]).all():
        sizes = f"{wanted['elements'][0]} values of the reference, {first['elements'][0]} deployed"
        return Cause("unexplained", f"inputs have different sizes: {sizes}")
    distance = np.square(wanted["projections"].astype(np.float64) - first["projections"]).sum()
    energy = (wanted["elements"] * wanted["std"].astype(np.float64) ** 2).sum()
    before = float(np.sqrt(distance / max(energy, 1e-12)))
    same = bool((wanted["hash"] == first["hash"]).all())
    if same or before < 1e-6:
        return Cause("equal", "the inputs are those of the reference", frames=len(first))
    if sums.input_tensors and all(one is not None for one in sums.input_tensors[:8]):
        tensors = [one for one in sums.input_tensors[:8] if one is not None]
        return explain_arrays(first[: len(tensors)], tensors, depth=depth, report=report)
    kind = "harmless" if before <= HARMLESS else "unexplained"
    return Cause(
        kind, f"inputs differ by {before:.1%} of their deviation; raw inputs and the reference's "  # type: ignore[arg-type]
        "pipeline, or a reference log of level layers, would tell why", before, before,
        frames=len(first),
    )  # fmt: skip


def _softmax(outputs: Sequence[tuple[Array, Array]]) -> str:
    """Whether one side's first output is the softmax of the other's, in words; else empty.

    Statistics are enough: softmax sums to 1, and keeps differences of its inputs as differences of
    its logarithms.

    Args:
        outputs: `STATISTICS` of the reference's and the candidate's output, by frame.
    """
    if not outputs:
        return ""
    mine, theirs = (np.array([pair[side] for pair in outputs]) for side in (0, 1))
    if _is_softmax_of(theirs, mine):
        if _sums_to_one(mine):
            return (
                "softmax is applied twice: the deployed output is the softmax of the reference's, "
                "which is a softmax already; leave the second one out"
            )
        return "the deployed output is the softmax of the reference's: apply it on both sides"
    if _is_softmax_of(mine, theirs):
        if _sums_to_one(theirs):
            return (
                "softmax is applied twice in the reference: its output is the softmax of the "
                "deployed one, which is a softmax already"
            )
        return "the deployed output lacks the softmax that the reference applies"
    return ""


def _sums_to_one(values: Array) -> bool:
    sums = values["mean"].astype(np.float64) * values["elements"]
    return bool((values["low"] >= 0).all() and np.allclose(sums, 1, atol=_PROBABILITY))


def _is_softmax_of(values: Array, given: Array) -> bool:
    spans = given["high"].astype(np.float64) - given["low"]
    sizes = (values["elements"] == given["elements"]) & (values["elements"] > 1)
    # Of equal inputs nothing can be told, and the rounding of tiny shares hides large differences.
    if not (sizes & (values["low"] > 0) & (spans < _MAX_SPAN)).all() or spans.max() < 0.01:
        return False
    logarithms = np.log(values["high"].astype(np.float64) / values["low"])
    return _sums_to_one(values) and np.allclose(logarithms, spans, rtol=0.01, atol=1e-3)


def _swapped(mine: Array, theirs: Array) -> Cause | None:
    """Whether a model's inputs have changed places: `STATISTICS` [frames, inputs] of both."""
    count = mine.shape[1]
    if count < 2 or theirs.shape[1] != count:
        return None
    a = mine["projections"].astype(np.float64)
    b = theirs["projections"].astype(np.float64)
    distance = np.square(a[:, :, None] - b[:, None]).sum((0, 3))
    sizes = (mine["elements"][:, :, None] == theirs["elements"][:, None]).all(0)
    distance = np.where(sizes, distance, np.inf)
    order = distance.argmin(0)
    before = np.diag(distance).sum()
    if sorted(order) != list(range(count)) or (order == np.arange(count)).all():
        return None
    after = distance[order, np.arange(count)].sum()
    if after > before / 100:
        return None
    text = ", ".join(
        f"input {n} gets what belongs to input {m}" for n, m in enumerate(order) if n != m
    )
    right = [int(np.flatnonzero(order == n)[0]) for n in range(count)]
    return Cause(
        "preprocessing", f"inputs have changed places: {text}", 1.0, 0.0, ("order",),
        f"inputs = [inputs[n] for n in {right}]", frames=len(mine),
    )  # fmt: skip


def raw_of(facts: Mapping[str, Any]) -> Any:
    """A frame's raw input, where the log has it or says where it lies."""
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
