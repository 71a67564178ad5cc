"""predict_accelerator: the recorded step on an accelerator that skips zeros."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.cluster.quantity import Quantity
from slipstream.graph import Graph, need_graph, replay
from slipstream.hardware import Accelerator, AcceleratorStep, Pass, accelerate
from slipstream.hardware.predict import LayerCost, energy_pj, ratio, sensitivity
from slipstream.hardware.simulate import PassCost
from slipstream.provenance import Provenance
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent, format_ratio

_SHORT = {Pass.FORWARD: "O", Pass.INPUT: "GA", Pass.WEIGHT: "GW"}
_PASS_KEYS = (
    "scheduled", "sparsity", "dense_cycles", "structural_cycles", "cycles", "ideal_cycles",
    "speedup", "time_ns",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class AcceleratorPrediction:
    """The recorded step on an accelerator.

    Attributes:
        name: label of the step: ``baseline`` or a technique.
        step: the step with all its layers.
        step_ns, dense_ns: its time, and with a front end that takes every pair.
    """

    name: str
    step: AcceleratorStep
    step_ns: float
    dense_ns: float

    @property
    def passes(self) -> list[tuple[LayerCost, PassCost]]:
        """The passes of all layers, each with its layer."""
        return [(layer, cost) for layer in self.step.layers for cost in layer.passes]

    def compute_speedup(self, which: Pass | None = None) -> float:
        """Return the speed-up of the array by natural zeros, in one pass or in all."""
        costs = [cost for _, cost in self.passes if which in (None, cost.which)]
        cycles = sum(cost.cycles for cost in costs)
        return sum(cost.structural_cycles for cost in costs) / cycles if cycles else 1.0

    @property
    def energy_gain(self) -> tuple[float, float]:
        """Dense energy over energy of the layers: of the lanes, and with memories."""
        dense, own = energy_pj(self.step, dense=True), energy_pj(self.step)
        return ratio(dense[0], own[0]), ratio(sum(dense), sum(own))

    def to_json(self) -> dict[str, Any]:
        compute, memory = energy_pj(self.step)
        gains = self.energy_gain
        return {
            "name": self.name,
            "accelerator": self.step.chip.name,
            "step_ns": self.step_ns,
            "dense_step_ns": self.dense_ns,
            "speedup": self.dense_ns / self.step_ns,
            "compute_speedup": self.compute_speedup(),
            "compute_pj": compute,
            "memory_pj": memory,
            "compute_energy_gain": gains[0],
            "energy_gain": gains[1],
            "provenance": str(Provenance.SIMULATED),
            "notes": list(self.step.notes),
            "sensitivity": {
                name: {"time": change[0], "energy": change[1]}
                for name, change in sensitivity(self.step).items()
            },
            "layers": [
                {
                    "module": layer.module,
                    "nans": layer.nans,
                    "passes": [
                        {"pass": cost.which, **{key: getattr(cost, key) for key in _PASS_KEYS}}
                        for cost in layer.passes
                    ],
                }
                for layer in self.step.layers
            ],
        }

    def layer_table(self) -> Table:
        """Return a table with a row per layer and pass."""
        fields: list[Field[tuple[LayerCost, PassCost]]] = [
            Field.of("layer", lambda row: row[0].module or "(model)"),
            Field.of("pass", lambda row: _SHORT[row[1].which]),
            Field.of("scheduled", lambda row: str(row[1].scheduled or "-")),
            Field.number("zeros", lambda row: format_percent(row[1].sparsity)),
            Field.number("dense cycles", lambda row: f"{row[1].dense_cycles:,}"),
            Field.number("cycles", lambda row: f"{row[1].cycles:,}"),
            Field.number("natural", lambda row: format_ratio(row[1].speedup)),
            Field.number("structural", lambda row: format_ratio(row[1].structural_speedup)),
            Field.number("time", lambda row: format_duration(row[1].time_ns)),
            Field.of("bound", lambda row: _bound(row[1], self.step.chip), optional=True),
        ]
        notes = [
            "O: forward, GA: gradient of the input, GW: gradient of the weight",
            "natural: speed-up of the array by zeros in the tensors; structural: by padding",
            *self.step.notes,
        ]
        return Table.of(self.passes, fields, f"layers on {self.step.chip.name}", notes)

    def sensitivity_table(self) -> Table:
        """Return a table with a row per constant of the description."""
        constants = _constants(self.step.chip)
        fields: list[Field[tuple[str, tuple[float, float]]]] = [
            Field.of("constant", lambda row: row[0]),
            Field.number("value", lambda row: f"{constants[row[0]].value:g}"),
            Field.number("time if doubled", lambda row: format_percent(row[1][0], signed=True)),
            Field.number("energy if doubled", lambda row: format_percent(row[1][1], signed=True)),
            Field.of("provenance", lambda row: str(constants[row[0]].provenance)),
            Field.of("source", lambda row: constants[row[0]].source, optional=True),
        ]
        title = "sensitivity of the layers to each constant"
        return Table.of(list(sensitivity(self.step).items()), fields, title, ["energies in pJ"])


def predict_accelerator(
    graph: Graph, chip: Accelerator | str | Path, *, name: str = "baseline"
) -> AcceleratorPrediction:
    """Predict the recorded step on an accelerator.

    Args:
        graph: recorded with the statistic "sparsity"; layers without masks are dense.
        chip: a description, a TOML file, or a chip that ships with the package.
        name: label of the step.

    Raises:
        SlipstreamError: the description is invalid, the step has no layers, or has an operator that
            the accelerator cannot run.
    """
    need_graph(graph)
    described = chip if isinstance(chip, Accelerator) else Accelerator.load(chip)
    step = accelerate(graph, described)
    return AcceleratorPrediction(name, step, replay(step.graph).step_ns, replay(step.dense).step_ns)


def accelerator_table(predictions: list[AcceleratorPrediction]) -> Table:
    """Return a table with a row per predicted step."""
    chip = predictions[0].step.chip
    fields: list[Field[AcceleratorPrediction]] = [
        Field.of("step", lambda p: p.name),
        *map(_pass_field, Pass),
        Field.number("all passes", lambda p: format_ratio(p.compute_speedup())),
        Field.number("dense step", lambda p: format_duration(p.dense_ns)),
        Field.number("step", lambda p: format_duration(p.step_ns)),
        Field.number("energy of lanes", lambda p: format_ratio(p.energy_gain[0])),
        Field.number("with memories", lambda p: format_ratio(p.energy_gain[1])),
    ]
    kinds = Counter(str(quantity.provenance) for quantity in _constants(chip).values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    notes = [
        "O, GA, GW: speed-up of the array by zeros in the tensors; energy: dense over this",
        f"constants of {chip.name}: {counts}; {chip.about}",
    ]
    return Table.of(predictions, fields, f"the step on {chip.name}", notes)


def _pass_field(which: Pass) -> Field[AcceleratorPrediction]:
    return Field.number(_SHORT[which], lambda p: format_ratio(p.compute_speedup(which)))


def _constants(chip: Accelerator) -> dict[str, Quantity]:
    return {"clock_hz": chip.clock_hz, **vars(chip.memory), **vars(chip.energy)}


def _bound(cost: PassCost, chip: Accelerator) -> str:
    compute_ns = cost.cycles / chip.clock_hz.value * 1e9
    return "memory" if cost.time_ns > compute_ns * (1 + 1e-9) else "array"
