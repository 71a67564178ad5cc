"""Which layer introduces error, and which few have to stay in float."""

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
_SHOWN = 10
Run = Callable[[Array], Array]


@dataclass(frozen=True)
class Introduced:
    """A layer, and its part in what goes wrong.

    Attributes:
        introduced: RMSE over the reference's range, run on what the reference's layers gave.
        cumulative: the same, run on what the candidate's own layers gave: all errors so far.
    """

    name: str
    kind: str
    introduced: float
    cumulative: float
    macs: int


@dataclass(frozen=True)
class Bisected:
    """What `bisect` found.

    Attributes:
        ranking: layers, what introduces most error first.
        keep: names of layers that have to stay in float; empty where none has to, None where even
            all of them would not do, or the candidate cannot be mixed.
        reference, before, after: share of right first choices: of the reference, of the candidate,
            and of the candidate with `keep` in float.
        evaluations: of accuracy that it took.
    """

    ranking: tuple[Introduced, ...]
    keep: tuple[str, ...] | None
    reference: float
    before: float
    after: float
    evaluations: int

    def tables(self) -> list[Table]:
        """The layers that introduce most, and what to keep."""
        if self.keep is None:
            advice = "no mixture of both reaches the reference"
        elif not self.keep:
            advice = "nothing has to stay in float"
        else:
            advice = "keep in float: " + ", ".join(self.keep)
        rates = f"right: {self.reference:.1%} of the reference, {self.before:.1%} deployed"
        return [Table.of(
            self.ranking[:_SHOWN],
            [
                Field[Introduced].of("layer", lambda one: one.name),
                Field[Introduced].of("operator", lambda one: one.kind, optional=True),
                Field[Introduced].number("introduced", lambda one: f"{one.introduced:.4f}"),
                Field[Introduced].number("so far", lambda one: f"{one.cumulative:.4f}"),
            ],
            f"layers that introduce most error, of {len(self.ranking)}",
            [advice, f"{rates}, {self.after:.1%} so", f"{self.evaluations} evaluations"],
        )]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "ranking": self.ranking, "keep": self.keep, "reference": self.reference,
            "before": self.before, "after": self.after, "evaluations": self.evaluations,
        }  # fmt: skip


def introduced(reference: Any, candidate: Any, inputs: Array) -> list[Introduced]:
    """Layers by the error that each introduces by itself, the largest first.

    Args:
        reference: the model that is trusted, as `slipstream.runtimes.taps.open_tap` takes it.
        candidate: the deployed one: ONNX, LiteRT or torch, of the same kind as the reference.
        inputs: [N, ...] of the only input of both, as the reference takes it; the first few are
            used. Where the candidate takes codes, they are rounded to its own.

    Raises:
        InvalidArgumentError: the two are not of one such kind, or have no layer in common.
        UnsupportedModelError: a LiteRT model has operators that cannot be written.
    """
    return _introduced(_Both(reference, candidate, inputs))


def _introduced(both: _Both) -> list[Introduced]:
    alone = both.on_reference()
    layers = []
    for place, (p, q) in enumerate(both.pairs):
        right = [one[p] for one in both.right]
        span = max(max(one.max() for one in right) - min(one.min() for one in right), 1e-12)

        def distance(
            values: Sequence[Array], right: Sequence[Array] = right, span: float = span
        ) -> float:
            squares = [np.square(v - r).mean() for v, r in zip(values, right, strict=True)]
            return float(np.sqrt(np.mean(squares)) / span)

        layer = both.b.layers[q]
        layers.append(Introduced(
            layer.name, layer.kind, distance([one[place] for one in alone]),
            distance([one[q] for one in both.deployed]), both.a.layers[p].macs,
        ))  # fmt: skip
    return sorted(layers, key=lambda one: -one.introduced)


def bisect(
    reference: Any,
    candidate: Any,
    inputs: Array,
    labels: Array | None = None,
    *,
    tolerance: float = 0.005,
    most: int = 12,
    report: Callable[[str], None] = lambda line: None,
) -> Bisected:
    """The fewest layers that have to stay in float, by replacing layers and counting right answers.

    Layers are tried in the order of what the outputs lose by each where all others are float: what
    a layer introduces may be taken away by those behind it. Prefixes of that order are doubled
    until accuracy is back, then halved; what evaluations are left try to do without single layers
    again.

    Args:
        inputs: [N, ...], as `introduced` takes them.
        labels: right classes [N]; the reference's own first choices if None.
        tolerance: by how much accuracy may stay below the reference's.
        most: evaluations of accuracy.
        report: told what is done.

    Raises:
        as `introduced`; InvalidArgumentError: inputs and labels are not of one number.
    """
    if labels is not None and len(labels) != len(inputs):
        raise InvalidArgumentError("labels", f"{len(labels)} for {len(inputs)} inputs")
    report("layers on the reference's tensors")
    both = _Both(reference, candidate, inputs)
    ranking = _introduced(both)
    first = _outputs(both.reference, inputs).argmax(1)
    truth = first if labels is None else np.asarray(labels)
    goal = float((first == truth).mean()) - tolerance
    known: dict[frozenset[str], float] = {}

    def rate(keep: Sequence[str]) -> float:
        key = frozenset(keep)
        if key not in known:
            report(f"accuracy with {len(keep)} layers in float")
            answers = _outputs(both.mixed(key), inputs).argmax(1)
            known[key] = float((answers == truth).mean())
        return known[key]

    before = rate(())
    names = _by_effect(both, [one.name for one in ranking], report) if before < goal else []
    low, high = 0, 0
    while rate(names[:high]) < goal and high < len(names) and len(known) < most:
        low, high = high, min(max(2 * high, 1), len(names))
    while high - low > 1 and len(known) < most:
        middle = (low + high) // 2
        low, high = (low, middle) if rate(names[:middle]) >= goal else (middle, high)
    keep = names[:high]
    for name in reversed(keep):
        rest = [one for one in keep if one != name]
        if len(known) >= most or len(keep) < 2:
            break
        keep = rest if rate(rest) >= goal else keep
    reached = rate(keep) >= goal
    return Bisected(
        tuple(ranking), tuple(keep) if reached else None, goal + tolerance, before,
        rate(keep) if reached else before, len(known),
    )  # fmt: skip


def _by_effect(both: _Both, names: Sequence[str], report: Callable[[str], None]) -> list[str]:
    """Layers by what the outputs lose where each alone is the candidate's, most first."""

    def centred(run: Run) -> Array:
        outputs = _outputs(run, both.probes)
        return np.asarray(
            outputs - outputs.mean(1, keepdims=True)
        )  # what all classes gain changes no answer

    right, everything = centred(both.reference), frozenset(names)
    lost = {}
    for number, name in enumerate(names):
        report(f"layer {number + 1} of {len(names)} alone")
        lost[name] = float(np.square(centred(both.mixed(everything - {name})) - right).mean())
    return sorted(names, key=lambda name: -lost[name])


class _Both:
    """Two models of one kind, which layer is which, and what they gave for a few probes.

    Attributes:
        a, b: the reference and the candidate.
        pairs: numbers of layers of both.
        right, deployed: what every layer of a, of b gave, by probe.
    """

    def __init__(self, reference: Any, candidate: Any, inputs: Array) -> None:
        self.a, self.b = _opened(reference), _opened(candidate)
        kinds = (OnnxTap, TorchTap, LiteRTTap)
        if type(self.a) is not type(self.b) or not isinstance(self.b, kinds):
            raise InvalidArgumentError(
                "candidate", f"a {self.b.runtime} model beside one of {self.a.runtime}",
                remedy="both .onnx, both .tflite, or both torch modules",
            )  # fmt: skip
        if not len(inputs):
            raise InvalidArgumentError("inputs", "there are none")
        self.probes = inputs[:_PROBES]
        self.right = [self._values(self.a, x) for x in self._each(self.a)]
        self.deployed = [self._values(self.b, x) for x in self._each(self.b)]
        statistics = [
            np.stack([measured([canonical(value) for value in one]) for one in side])
            for side in (self.right, self.deployed)
        ]
        self.pairs = match(self.a.layers, self.b.layers, *statistics)
        if not self.pairs:
            raise InvalidArgumentError("candidate", "it has no layer in common with the reference")

    def _each(self, tap: Tap) -> list[Array]:
        return [_coded(tap, self.probes[n : n + 1]) for n in range(len(self.probes))]

    @staticmethod
    def _values(tap: Tap, x: Array) -> list[Array]:
        """What each layer gives, as real numbers."""
        return [
            np.zeros(0, np.float32) if value is None else np.array(layer.real(value), np.float32)
            for value, layer in zip(tap.run([x])[1], tap.layers, strict=True)
        ]

    def reference(self, x: Array) -> Array:
        """Outputs of the reference."""
        return _real(self.a, self.a.plain([_coded(self.a, x)]))

    def on_reference(self) -> list[list[Array]]:
        """What each matched layer of b gives on a's tensors, by probe."""
        if isinstance(self.b, TorchTap):
            return _torch_alone(self, self.b)
        if isinstance(self.b, LiteRTTap):
            return _litert_alone(self, self.b)
        assert isinstance(self.b, OnnxTap)
        return _onnx_alone(self, self.b)

    def mixed(self, keep: frozenset[str]) -> Run:
        """The candidate with some layers of the reference in their places."""
        a, b = self.a, self.b
        if not keep:
            return lambda x: _real(b, b.plain([_coded(b, x)]))
        if isinstance(a, OnnxTap) and isinstance(b, OnnxTap):
            layers = {one.name for one in b.layers}
            session = b.session_of(onnx_graphs.hybrid(b.model, a.model, keep, layers))
            name = b.inputs[0].name
            return lambda x: np.asarray(session.run(None, {name: x})[0])
        if isinstance(a, LiteRTTap) and isinstance(b, LiteRTTap):
            kept = {b.indices[q]: a.indices[p] for p, q in self.pairs if b.layers[q].name in keep}
            graph = litert_graphs.hybrid(_network(b), _network(a), kept)
            interpreter = LiteRTTap(write_network(graph))
            return lambda x: _real(b, interpreter.plain([_coded(b, x)]))
        assert isinstance(a, TorchTap)
        assert isinstance(b, TorchTap)
        modules = {plain(name): module for name, module in a.leaves.items()}

        def replaced(name: str, output: Any, given: tuple[Any, ...]) -> Any:
            module = modules.get(plain(name.partition("#")[0])) if name in keep else None
            return None if module is None else module(*given)

        return lambda x: _replacing(b, x, replaced)[0][0]


def _opened(model: Any) -> Tap:
    return model if isinstance(model, Tap) else open_tap(model)


def _coded(tap: Tap, x: Array) -> Array:
    return tap.coded([x])[0] if isinstance(tap, LiteRTTap) else x


def _real(tap: Tap, outputs: Sequence[Array]) -> Array:
    layer = tap.outputs[0] if tap.outputs else None
    return outputs[0] if layer is None else layer.real(outputs[0])


def _onnx_alone(both: _Both, candidate: OnnxTap) -> list[list[Array]]:
    layers = [candidate.layers[q] for _, q in both.pairs]
    names = [layer.name for layer in layers]
    fetched = [candidate.fetched[q] for _, q in both.pairs]
    session = candidate.session_of(onnx_graphs.on_reference(candidate.model, names, fetched))
    outputs = []
    for n, values in enumerate(both.right):
        given = [values[p] for p, _ in both.pairs]
        fed = onnx_graphs.reference_inputs(names, given, session)
        gives = session.run(fetched, {candidate.inputs[0].name: both.probes[n : n + 1], **fed})
        outputs.append([layer.real(one) for layer, one in zip(layers, gives, strict=True)])
    return outputs


def _litert_alone(both: _Both, candidate: LiteRTTap) -> list[list[Array]]:
    numbers = [candidate.indices[q] for _, q in both.pairs]
    cut = LiteRTTap(write_network(litert_graphs.on_reference(_network(candidate), numbers)))
    outputs = []
    for n, values in enumerate(both.right):
        given = [both.probes[n : n + 1], *(values[p] for p, _ in both.pairs)]
        gives = cut.plain(cut.coded(given))
        outputs.append([layer.real(one) for layer, one in zip(cut.outputs, gives, strict=True)])
    return outputs


def _network(tap: LiteRTTap) -> Network:
    return parse_network(tap.content)


def _torch_alone(both: _Both, candidate: TorchTap) -> list[list[Array]]:
    import torch

    outputs = []
    for n, values in enumerate(both.right):
        wanted = {candidate.layers[q].name: values[p] for p, q in both.pairs}

        def replaced(name: str, output: Any, inputs: Any, wanted: dict[str, Array] = wanted) -> Any:
            # The reference's tensor goes on from here, so that the next layer is alone.
            return torch.from_numpy(wanted[name]).to(output) if name in wanted else None

        gives = _replacing(candidate, both.probes[n : n + 1], replaced)[1]
        outputs.append([np.asarray(gives[q], np.float32) for _, q in both.pairs])
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
    """What `run` gives of all inputs, [N, classes]; one at a time where it takes no more."""
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
