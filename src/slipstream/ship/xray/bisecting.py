"""Which layer introduces error, and which few have to stay in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.taps import OnnxTap, Tap, TorchTap, open_tap
from slipstream.ship.xray import onnx_graphs
from slipstream.ship.xray.matching import match, plain
from slipstream.ship.xray.statistics import Array, canonical, measured
from slipstream.tables import Field, Table

_PROBES, _BATCH = 8, 25
_SHOWN = 10


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
        candidate: the deployed one: ONNX or torch, of the same kind as the reference.
        inputs: [N, ...] of the only input of both; the first few are used.

    Raises:
        InvalidArgumentError: the two are not of one such kind, or have no layer in common.
    """
    a, b = _opened(reference), _opened(candidate)
    if type(a) is not type(b) or not isinstance(b, (OnnxTap, TorchTap)):
        raise InvalidArgumentError(
            "candidate", f"a {b.runtime} model beside one of {a.runtime}",
            remedy="both .onnx, or both torch modules",
        )  # fmt: skip
    probes = [inputs[n : n + 1] for n in range(min(len(inputs), _PROBES))]
    if not probes:
        raise InvalidArgumentError("inputs", "there are none")
    right = [_values(a, a.run([x])[1]) for x in probes]
    outputs = [_values(b, b.run([x])[1]) for x in probes]
    statistics = [np.stack([_stat(one) for one in side]) for side in (right, outputs)]
    pairs = match(a.layers, b.layers, *statistics)
    if not pairs:
        raise InvalidArgumentError("candidate", "it has no layer in common with the reference")
    alone = _on_reference(b, pairs, probes, right)
    layers = []
    for place, (p, q) in enumerate(pairs):
        span = max(float(max(r[p].max() for r in right) - min(r[p].min() for r in right)), 1e-12)

        def distance(values: Sequence[Array], p: int = p, span: float = span) -> float:
            squares = [np.square(v - r[p]).mean() for v, r in zip(values, right, strict=True)]
            return float(np.sqrt(np.mean(squares))) / span

        layer = b.layers[q]
        layers.append(Introduced(
            layer.name, layer.kind, distance([one[place] for one in alone]),
            distance([one[q] for one in outputs]), a.layers[p].macs,
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
    say: Callable[[str], None] = lambda line: None,
) -> Bisected:
    """The fewest layers that have to stay in float, by replacing layers and counting right answers.

    Prefixes of the ranking by introduced error are doubled until accuracy is back, then halved;
    what evaluations are left try to do without single layers again.

    Args:
        inputs: [N, ...].
        labels: right classes [N]; the reference's own first choices if None.
        tolerance: by how much accuracy may stay below the reference's.
        most: evaluations of accuracy.
        say: told what is done.

    Raises:
        InvalidArgumentError: as of `introduced`; inputs and labels are not of one number.
    """
    if labels is not None and len(labels) != len(inputs):
        raise InvalidArgumentError("labels", f"{len(labels)} for {len(inputs)} inputs")
    say("layers on the reference's tensors")
    ranking = introduced(reference, candidate, inputs)
    a, b = _opened(reference), _opened(candidate)
    first = _answers(a.plain, inputs)
    truth = first if labels is None else np.asarray(labels)
    goal = float((first == truth).mean()) - tolerance
    known: dict[frozenset[str], float] = {}

    def rate(keep: Sequence[str]) -> float:
        key = frozenset(keep)
        if key not in known:
            say(f"accuracy with {len(keep)} layers in float")
            known[key] = float((_answers(_mixed(a, b, key), inputs) == truth).mean())
        return known[key]

    names = [one.name for one in ranking]
    before = rate(())
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


def _opened(model: Any) -> Tap:
    return model if isinstance(model, Tap) else open_tap(model)


def _values(tap: Tap, values: Sequence[Array | None]) -> list[Array]:
    return [
        np.zeros(0, np.float32) if value is None else np.array(layer.real(value), np.float32)
        for layer, value in zip(tap.layers, values, strict=True)
    ]


def _stat(values: Sequence[Array]) -> Array:
    return measured([canonical(one) for one in values])


def _on_reference(
    candidate: OnnxTap | TorchTap, pairs: Sequence[tuple[int, int]], probes: Sequence[Array],
    right: Sequence[Sequence[Array]],
) -> list[list[Array]]:  # fmt: skip
    """What each matched layer gives on the reference's tensors, for each probe."""
    layers = [candidate.layers[q] for _, q in pairs]
    if isinstance(candidate, TorchTap):
        return [
            _torch_on_reference(candidate, pairs, x, r) for x, r in zip(probes, right, strict=True)
        ]
    names = [layer.name for layer in layers]
    fetched = [candidate.fetched[q] for _, q in pairs]
    model = onnx_graphs.on_reference(candidate.model, names, fetched)
    session = candidate.session_of(model)
    outputs = []
    for x, values in zip(probes, right, strict=True):
        fed = onnx_graphs.reference_inputs(names, [values[p] for p, _ in pairs], session)
        given = session.run(fetched, {candidate.inputs[0].name: x, **fed})
        outputs.append([layer.real(one) for layer, one in zip(layers, given, strict=True)])
    return outputs


def _torch_on_reference(
    candidate: TorchTap, pairs: Sequence[tuple[int, int]], x: Array, right: Sequence[Array]
) -> list[Array]:
    import torch

    wanted = {candidate.layers[q].name: right[p] for p, q in pairs}

    def replaced(name: str, output: Any, inputs: Any) -> Any:
        # The reference's tensor goes on from here, so that the next layer is alone with its error.
        return torch.from_numpy(wanted[name]).to(output) if name in wanted else None

    candidate.replace = replaced
    try:
        values = candidate.run([x])[1]
    finally:
        candidate.replace = None
    given = _values(candidate, values)
    return [given[q] for _, q in pairs]


def _mixed(a: Tap, b: Tap, keep: frozenset[str]) -> Callable[[Sequence[Array]], list[Array]]:
    """The candidate with some layers of the reference in their places."""
    if not keep:
        return b.plain
    if isinstance(a, OnnxTap) and isinstance(b, OnnxTap):
        session = b.session_of(
            onnx_graphs.hybrid(b.model, a.model, keep, {one.name for one in b.layers})
        )
        name = b.inputs[0].name
        return lambda inputs: session.run(None, {name: inputs[0]})
    assert isinstance(a, TorchTap)
    assert isinstance(b, TorchTap)
    others = {plain(name): module for name, module in a.leaves.items()}

    def run(inputs: Sequence[Array]) -> list[Array]:
        def replaced(name: str, output: Any, given: tuple[Any, ...]) -> Any:
            module = others.get(plain(name.partition("#")[0])) if name in keep else None
            return None if module is None else module(*given)

        b.replace = replaced
        try:
            return b.run(inputs)[0]
        finally:
            b.replace = None

    return run


def _answers(run: Callable[[Sequence[Array]], list[Array]], inputs: Array) -> Array:
    """First choices [N]; one at a time where the model takes no more."""
    choices: list[Array] = []
    size = _BATCH
    at = 0
    while at < len(inputs):
        part = inputs[at : at + size]
        try:
            output = run([part])[0]
        except Exception:
            if size == 1:
                raise
            size = 1
            continue
        choices.append(output.reshape(len(part), -1).argmax(1))
        at += len(part)
    return np.concatenate(choices)
