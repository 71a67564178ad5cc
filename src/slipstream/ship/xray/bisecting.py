"""Find the layers that introduce error, and the few to keep in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.taps import LiteRTTap, OnnxTap, Tap, TorchTap, open_tap
from slipstream.ship.firmware.network import Network
from slipstream.ship.firmware.tflite import parse_network
from slipstream.ship.firmware.writer import write_network
from slipstream.ship.xray import litert_graphs, onnx_graphs
from slipstream.ship.xray.matching import match, plain
from slipstream.ship.xray.statistics import Array, canonical, measured
from slipstream.tables import Field, Table

_PROBES, _BATCH = 8, 25
_MAX_ROWS = 10
Run = Callable[[Array], Array]


@dataclass(frozen=True)
class LayerError:
    """Error of one layer.

    Attributes:
        introduced: RMSE over the reference's range, with inputs from the reference's layers.
        cumulative: the same with inputs from the candidate's own layers: all errors so far.
    """

    name: str
    kind: str
    introduced: float
    cumulative: float
    macs: int


@dataclass(frozen=True)
class BisectionResult:
    """Result of `bisect`.

    Attributes:
        ranking: layers, the one that introduces most error first.
        keep: names of layers to keep in float; empty if none is needed, None if all of them do not
            suffice or the models cannot be mixed.
        reference, before, after: top-1 accuracy of the reference, of the candidate, and of the
            candidate with `keep` in float.
        evaluations: number of accuracy evaluations.
    """

    ranking: tuple[LayerError, ...]
    keep: tuple[str, ...] | None
    reference: float
    before: float
    after: float
    evaluations: int

    def tables(self) -> list[Table]:
        """Return a table of the layers that introduce most error, with the advice."""
        if self.keep is None:
            advice = "no mix of both models reaches the reference"
        elif not self.keep:
            advice = "no layer needs to stay in float"
        else:
            advice = "keep in float: " + ", ".join(self.keep)
        rates = f"accuracy: {self.reference:.1%} reference, {self.before:.1%} deployed"
        return [Table.of(
            self.ranking[:_MAX_ROWS],
            [
                Field[LayerError].of("layer", lambda layer: layer.name),
                Field[LayerError].of("operator", lambda layer: layer.kind, optional=True),
                Field[LayerError].number("introduced", lambda layer: f"{layer.introduced:.4f}"),
                Field[LayerError].number("cumulative", lambda layer: f"{layer.cumulative:.4f}"),
            ],
            f"layers that introduce most error, of {len(self.ranking)}",
            [advice, f"{rates}, {self.after:.1%} mixed", f"{self.evaluations} evaluations"],
        )]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            "ranking": self.ranking, "keep": self.keep, "reference": self.reference,
            "before": self.before, "after": self.after, "evaluations": self.evaluations,
        }  # fmt: skip


def layer_errors(reference: Any, candidate: Any, inputs: Array) -> list[LayerError]:
    """Return layers by the error that each introduces in isolation, the largest first.

    Args:
        reference: the trusted model, as for `slipstream.runtimes.taps.open_tap`.
        candidate: the deployed model: ONNX, LiteRT or torch, of the same kind as the reference.
        inputs: [N, ...] of the only input of both, as the reference takes it; the first few are
            used and quantized if the candidate takes codes.

    Raises:
        InvalidArgumentError: the models differ in kind or have no layer in common.
        UnsupportedModelError: a LiteRT model has operators that cannot be written.
    """
    return _introduced(_ModelPair(reference, candidate, inputs))


def _introduced(both: _ModelPair) -> list[LayerError]:
    alone = both.on_reference()
    layers = []
    for place, (p, q) in enumerate(both.pairs):
        right = [values[p] for values in both.right]
        span = max(max(v.max() for v in right) - min(v.min() for v in right), 1e-12)

        def distance(
            values: Sequence[Array], right: Sequence[Array] = right, span: float = span
        ) -> float:
            squares = [np.square(v - r).mean() for v, r in zip(values, right, strict=True)]
            return float(np.sqrt(np.mean(squares)) / span)

        layer = both.b.layers[q]
        layers.append(LayerError(
            layer.name, layer.kind, distance([values[place] for values in alone]),
            distance([values[q] for values in both.deployed]), both.a.layers[p].macs,
        ))  # fmt: skip
    return sorted(layers, key=lambda layer: -layer.introduced)


def bisect(
    reference: Any,
    candidate: Any,
    inputs: Array,
    labels: Array | None = None,
    *,
    tolerance: float = 0.005,
    most: int = 12,
    report: Callable[[str], None] = lambda line: None,
) -> BisectionResult:
    """Find the fewest layers to keep in float, by replacing layers and measuring accuracy.

    Layers are ordered by the loss at the outputs when each alone is quantized, because later layers
    may undo an error. Prefixes of that order are doubled until accuracy is restored, then halved;
    the remaining evaluations try to drop single layers.

    Args:
        inputs: [N, ...], as for `layer_errors`.
        labels: true classes [N]; the reference's predictions if None.
        tolerance: accepted accuracy loss compared with the reference.
        most: maximum number of accuracy evaluations.
        report: called with progress messages.

    Raises:
        InvalidArgumentError: inputs and labels differ in number; other errors as `layer_errors`.
    """
    if labels is not None and len(labels) != len(inputs):
        raise InvalidArgumentError("labels", f"{len(labels)} for {len(inputs)} inputs")
    report("running layers on the reference's tensors")
    both = _ModelPair(reference, candidate, inputs)
    ranking = _introduced(both)
    first = _outputs(both.reference, inputs).argmax(1)
    truth = first if labels is None else np.asarray(labels)
    goal = float((first == truth).mean()) - tolerance
    rates: dict[frozenset[str], float] = {}

    def rate(keep: Sequence[str]) -> float:
        key = frozenset(keep)
        if key not in rates:
            report(f"accuracy with {len(keep)} layers in float")
            answers = _outputs(both.mixed(key), inputs).argmax(1)
            rates[key] = float((answers == truth).mean())
        return rates[key]

    before = rate(())
    names = _by_effect(both, [layer.name for layer in ranking], report) if before < goal else []
    low, high = 0, 0
    while rate(names[:high]) < goal and high < len(names) and len(rates) < most:
        low, high = high, min(max(2 * high, 1), len(names))
    while high - low > 1 and len(rates) < most:
        middle = (low + high) // 2
        low, high = (low, middle) if rate(names[:middle]) >= goal else (middle, high)
    keep = names[:high]
    for name in reversed(keep):
        fewer = [other for other in keep if other != name]
        if len(rates) >= most or len(keep) < 2:
            break
        keep = fewer if rate(fewer) >= goal else keep
    reached = rate(keep) >= goal
    return BisectionResult(
        tuple(ranking), tuple(keep) if reached else None, goal + tolerance, before,
        rate(keep) if reached else before, len(rates),
    )  # fmt: skip


def _by_effect(both: _ModelPair, names: Sequence[str], report: Callable[[str], None]) -> list[str]:
    """Return layers by the loss at the outputs if only that layer is the candidate's."""

    def centred(run: Run) -> Array:
        outputs = _outputs(run, both.probes)
        # An offset of all classes changes no answer.
        return np.asarray(outputs - outputs.mean(1, keepdims=True))

    reference, all_names = centred(both.reference), frozenset(names)
    losses = {}
    for number, name in enumerate(names):
        report(f"quantizing only layer {number + 1} of {len(names)}")
        losses[name] = float(np.square(centred(both.mixed(all_names - {name})) - reference).mean())
    return sorted(names, key=lambda name: -losses[name])


class _ModelPair:
    """Two models of one kind, their matched layers, and layer outputs for a few probes.

    Attributes:
        a, b: the reference and the candidate.
        pairs: indices of matched layers of both.
        right, deployed: outputs of every layer of a and of b, by probe.
    """

    def __init__(self, reference: Any, candidate: Any, inputs: Array) -> None:
        self.a, self.b = _opened(reference), _opened(candidate)
        kinds = (OnnxTap, TorchTap, LiteRTTap)
        if type(self.a) is not type(self.b) or not isinstance(self.b, kinds):
            raise InvalidArgumentError(
                "candidate", f"a {self.b.runtime} model cannot be compared with {self.a.runtime}",
                remedy="pass two .onnx files, two .tflite files, or two torch modules",
            )  # fmt: skip
        if not len(inputs):
            raise InvalidArgumentError("inputs", "is empty", remedy="pass at least one")
        self.probes = inputs[:_PROBES]
        self.right = [self._values(self.a, x) for x in self._each(self.a)]
        self.deployed = [self._values(self.b, x) for x in self._each(self.b)]
        statistics = [
            np.stack([measured([canonical(value) for value in values]) for values in side])
            for side in (self.right, self.deployed)
        ]
        self.pairs = match(self.a.layers, self.b.layers, *statistics)
        if not self.pairs:
            raise InvalidArgumentError(
                "candidate", "the model has no layer in common with the reference"
            )

    def _each(self, tap: Tap) -> list[Array]:
        return [_coded(tap, self.probes[n : n + 1]) for n in range(len(self.probes))]

    @staticmethod
    def _values(tap: Tap, x: Array) -> list[Array]:
        """Return the output of each layer, dequantized."""
        return [
            np.zeros(0, np.float32) if value is None else np.array(layer.real(value), np.float32)
            for value, layer in zip(tap.run([x])[1], tap.layers, strict=True)
        ]

    def reference(self, x: Array) -> Array:
        return _real(self.a, self.a.plain([_coded(self.a, x)]))

    def on_reference(self) -> list[list[Array]]:
        """Return outputs of b's matched layers on a's tensors, by probe."""
        if isinstance(self.b, TorchTap):
            return _torch_alone(self, self.b)
        if isinstance(self.b, LiteRTTap):
            return _litert_alone(self, self.b)
        assert isinstance(self.b, OnnxTap)
        return _onnx_alone(self, self.b)

    def mixed(self, keep: frozenset[str]) -> Run:
        """Return the candidate with the layers `keep` replaced by the reference's."""
        a, b = self.a, self.b
        if not keep:
            return lambda x: _real(b, b.plain([_coded(b, x)]))
        if isinstance(a, OnnxTap) and isinstance(b, OnnxTap):
            layers = {layer.name for layer in b.layers}
            session = b.session_of(onnx_graphs.hybrid(b.model, a.model, keep, layers))
            name = b.inputs[0].name
            return lambda x: np.asarray(session.run(None, {name: x})[0])
        if isinstance(a, LiteRTTap) and isinstance(b, LiteRTTap):
            tensors = {
                b.indices[q]: a.indices[p] for p, q in self.pairs if b.layers[q].name in keep
            }
            graph = litert_graphs.hybrid(_network(b), _network(a), tensors)
            interpreter = LiteRTTap(write_network(graph))
            return lambda x: _real(b, interpreter.plain([_coded(b, x)]))
        assert isinstance(a, TorchTap)
        assert isinstance(b, TorchTap)
        modules = {plain(name): module for name, module in a.leaves.items()}

        def replaced(name: str, output: Any, inputs: tuple[Any, ...]) -> Any:
            module = modules.get(plain(name.partition("#")[0])) if name in keep else None
            return None if module is None else module(*inputs)

        return lambda x: _replacing(b, x, replaced)[0][0]


def _opened(model: Any) -> Tap:
    return model if isinstance(model, Tap) else open_tap(model)


def _coded(tap: Tap, x: Array) -> Array:
    return tap.coded([x])[0] if isinstance(tap, LiteRTTap) else x


def _real(tap: Tap, outputs: Sequence[Array]) -> Array:
    layer = tap.outputs[0] if tap.outputs else None
    return outputs[0] if layer is None else layer.real(outputs[0])


def _onnx_alone(both: _ModelPair, candidate: OnnxTap) -> list[list[Array]]:
    layers = [candidate.layers[q] for _, q in both.pairs]
    names = [layer.name for layer in layers]
    fetched = [candidate.fetched[q] for _, q in both.pairs]
    session = candidate.session_of(onnx_graphs.on_reference(candidate.model, names, fetched))
    outputs = []
    for n, values in enumerate(both.right):
        tensors = [values[p] for p, _ in both.pairs]
        inputs = onnx_graphs.reference_inputs(names, tensors, session)
        codes = session.run(fetched, {candidate.inputs[0].name: both.probes[n : n + 1], **inputs})
        outputs.append([layer.real(value) for layer, value in zip(layers, codes, strict=True)])
    return outputs


def _litert_alone(both: _ModelPair, candidate: LiteRTTap) -> list[list[Array]]:
    numbers = [candidate.indices[q] for _, q in both.pairs]
    cut = LiteRTTap(write_network(litert_graphs.on_reference(_network(candidate), numbers)))
    outputs = []
    for n, values in enumerate(both.right):
        inputs = [both.probes[n : n + 1], *(values[p] for p, _ in both.pairs)]
        codes = cut.plain(cut.coded(inputs))
        outputs.append([layer.real(value) for layer, value in zip(cut.outputs, codes, strict=True)])
    return outputs


def _network(tap: LiteRTTap) -> Network:
    return parse_network(tap.content)


def _torch_alone(both: _ModelPair, candidate: TorchTap) -> list[list[Array]]:
    import torch

    outputs = []
    for n, values in enumerate(both.right):
        references = {candidate.layers[q].name: values[p] for p, q in both.pairs}

        def replaced(
            name: str, output: Any, inputs: Any, references: dict[str, Array] = references
        ) -> Any:
            # Continue with the reference's tensor, so that the next layer runs in isolation.
            return torch.from_numpy(references[name]).to(output) if name in references else None

        tensors = _replacing(candidate, both.probes[n : n + 1], replaced)[1]
        outputs.append([np.asarray(tensors[q], np.float32) for _, q in both.pairs])
    return outputs


def _replacing(
    tap: TorchTap, x: Array, replaced: Callable[..., Any]
) -> tuple[list[Array], list[Array | None]]:
    tap.replace = replaced
    try:
        return tap.run([x])
    finally:
        tap.replace = None


def _outputs(run: Run, inputs: Array) -> Array:
    """Return outputs of `run` for all inputs, [N, classes]; one by one if it refuses batches."""
    outputs: list[Array] = []
    size, at = _BATCH, 0
    while at < len(inputs):
        part = inputs[at : at + size]
        try:
            output = run(part)
        except Exception:
            if size == 1:
                raise
            size = 1
            continue
        outputs.append(output.reshape(len(part), -1))
        at += len(part)
    return np.concatenate(outputs)
