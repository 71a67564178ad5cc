"""Flash, RAM and instructions of sub-networks on a microcontroller, before they are built.

The whole model is traced and calibrated once, as for export. The layers of a sub-network are those
with slices of the weights; each is lowered once per combination of sizes, and its costs are looked
up from then on, for all candidates together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from slipstream.errors import UnknownNameError, WorkloadError
from slipstream.nas.space import Depth, Kernel, Width
from slipstream.nas.supernet import Supernet, need_supernet
from slipstream.nas.trace import op_name
from slipstream.search import Candidate, Categorical, Space
from slipstream.ship.export.floats import FloatModel, FloatOperator
from slipstream.ship.export.quantize import calibrated, network_of
from slipstream.ship.firmware import (
    Forecast,
    Program,
    costs,
    forecast,
    lower,
    plan_arena,
    target,
    targets,
)
from slipstream.ship.firmware.arena import ALIGN, arena_bounds
from slipstream.ship.firmware.firmware import Firmware

Integers = NDArray[np.int64]
Columns = Mapping[str, Integers]
# Distance of tensors that cannot overlap, larger than any tensor.
_DISJOINT = 1 << 40
# Costs of a layer and the number of its kind, before the distances of its inputs.
_COSTS = 6
# Combinations of sizes of a layer for which a table of costs is kept.
_MAX_TABLE = 1 << 16
_CHUNK = 1 << 14


@dataclass(frozen=True, eq=False)
class Footprints:
    """Costs of many sub-networks, int64 [candidates].

    Attributes:
        ram: bytes of arena and stack; the arena is a lower bound of its plan.
        flash: bytes of constants and code.
        instructions: per inference.
        macs: multiply-accumulates per inference.
    """

    ram: Integers
    flash: Integers
    instructions: Integers
    macs: Integers

    def fit(self, limits: Mapping[str, float]) -> NDArray[np.bool_]:
        """Return whether each candidate keeps all limits, by name of the attribute."""
        fits = np.ones(len(self.ram), bool)
        for name, limit in limits.items():
            fits &= getattr(self, name) <= limit
        return fits


@dataclass(frozen=True)
class _Axis:
    """The size of channels of a value: `fixed`, and `per` positions of each unit of a width."""

    fixed: int
    per: tuple[tuple[str, int], ...]

    def size(self, columns: Columns) -> Integers:
        parts = (columns[name] * count for name, count in self.per)
        return sum(parts, np.array(self.fixed))


class Footprint:
    """Predicts flash, RAM and instructions of the sub-networks of a supernet.

    Args:
        net: supernet of a model that `slipstream.ship` can export.
        inputs: calibration inputs, [n, ...].
        device: name of a `Target` of firmware.

    Attributes:
        space: the parameters that change the firmware; depths whose removal cannot be exported
            keep their largest choice.

    Raises:
        UnknownNameError: instructions were not measured on `device`.
        UnsupportedModelError: the model uses operators without a kernel.
        WorkloadError: the channels of a layer do not follow from the widths.
    """

    def __init__(self, net: Supernet, inputs: torch.Tensor, *, device: str = "cortex-m4") -> None:
        self.net, self.target = need_supernet(net), target(device)
        if not costs.fitted(self.target):
            fitted = [other.name for other in targets() if costs.fitted(other)]
            raise UnknownNameError("target of predictions", device, fitted)
        model = net.export(net.space.full)
        self._floats, self._grids = calibrated(model, [inputs])
        self._nodes = self._matched()
        self._axes = {name: self._axis(name) for name in self._floats.shapes}
        self._kernels = self._kernel_names()
        self._skips = {
            name: skips
            for name, choice in net.space.choices.items()
            if isinstance(choice, Depth) and (skips := self._skipped(choice)) is not None
        }
        self.space = Space({
            name: Categorical(choice.choices, ordered=True)
            for name, choice in net.space.choices.items()
            if not isinstance(choice, Depth) or name in self._skips
        })  # fmt: skip
        self._costs: dict[tuple[Any, ...], Integers] = {}
        # By depths, then by kinds of steps.
        self._structures: dict[tuple[int, ...], tuple[FloatModel, Program]] = {}
        self._programs: dict[tuple[tuple[int, ...], ...], Program] = {}
        # Kernels, and which inputs their outputs may overlap: both follow from sizes.
        self._kinds: dict[tuple[str, tuple[bool, ...]], int] = {}

    # The sub-network's layers.

    def _matched(self) -> dict[str, Node]:
        """Return the node of the supernet for each node of the export's trace."""

        def tensors(nodes: Any) -> list[Node]:
            return [
                n
                for n in nodes
                if n.op in ("placeholder", "call_function")
                and isinstance(n.meta.get("val"), torch.Tensor)
                and op_name(n) != "_assert_tensor_metadata"
            ]

        ours, exported = tensors(self.net.nodes), tensors(self._floats.graph.graph.nodes)
        pairs = list(zip(ours, exported, strict=False))
        if len(ours) != len(exported) or any(
            op_name(a).rstrip("_") != op_name(b).rstrip("_") for a, b in pairs
        ):
            raise WorkloadError(
                "the model's export has other operators than its supernet",
                remedy="write the layers as modules of torch.nn",
            )
        return {b.name: a for a, b in pairs}

    def _axis(self, value: str) -> _Axis:
        """Return the channels of a value, its dimension 1."""
        shape = self._floats.shapes[value]
        node = self._nodes.get(value.partition(".")[0])
        axes = self.net.space.coupling.axes.get(node, []) if node is not None else []
        labels = axes[1] if len(axes) > 1 else None
        if labels is None:
            return _Axis(shape[1] if len(shape) > 1 else 1, ())
        numbers = self.net.space.coupling.raw[labels]
        per, covered = [], 0
        for name, choice in self.net.space.choices.items():
            if isinstance(choice, Width):
                counts = (numbers[:, None] == choice.components).sum(0)
                if counts.any():
                    if counts.min() != counts.max():
                        raise WorkloadError(
                            f"the units of {name} have different numbers of channels",
                            where=value, remedy=f"keep={choice.path!r} in derive_space",
                        )  # fmt: skip
                    per.append((name, int(counts[0])))
                    covered += int(counts.sum())
        return _Axis(len(numbers) - covered, tuple(per))

    def _kernel_names(self) -> dict[int, str]:
        """Return the kernel parameter of each layer that has one."""
        by_path = {c.path: n for n, c in self.net.space.choices.items() if isinstance(c, Kernel)}
        return {
            number: by_path[layer.source]
            for number, layer in enumerate(self._floats.layers)
            if layer.kind == "conv" and layer.source in by_path
        }

    def _skipped(self, choice: Depth) -> list[dict[str, str]] | None:
        """Return per block the values that its shortcuts replace; None if that cannot be exported.

        A sum with an activation becomes that activation of the shortcut, which has to have it.
        """
        names = {node: name for name, node in self._nodes.items()}
        by_output = {layer.output: layer for layer in self._floats.layers}
        blocks = []
        for _, sums in choice.blocks:
            replaced = {}
            for node, shortcut in sums:
                outputs = [names[node], *(names.get(user, "") for user in node.users)]
                layer = next(
                    (
                        by_output[o]
                        for o in outputs
                        if o in by_output and by_output[o].kind == "add"
                    ),
                    None,
                )
                if layer is None:
                    return None
                source = next(
                    (i for i in layer.inputs if self._nodes[i] in self._seen_as(shortcut)), None
                )
                producer = by_output.get(source or "")
                has = "none" if producer is None else producer.activation
                if source is None or layer.activation not in ("none", has):
                    return None
                replaced[layer.output] = source
            blocks.append(replaced)
        return blocks

    def _seen_as(self, node: Node) -> set[Node]:
        """Return a node, and the operators that ship folds into its layer's output."""
        return {node, *node.all_input_nodes, *node.users}

    def _layers(self, depths: Mapping[str, int]) -> FloatModel:
        """Return the layers that remain, as those of the whole widths."""
        replaced: dict[str, str] = {}
        for name, blocks in self._skips.items():
            for block in blocks[depths[name] :]:
                replaced |= block

        def value(name: str) -> str:
            while name in replaced:
                name = replaced[name]
            return name

        needed = {value(name) for name in self._floats.outputs}
        layers: list[FloatOperator] = []
        for layer in reversed(self._floats.layers):
            if layer.output in needed:
                inputs = tuple(value(name) for name in layer.inputs)
                needed.update(inputs)
                layers.append(replace(layer, inputs=inputs))
        outputs = [value(name) for name in self._floats.outputs]
        shapes = dict(self._floats.shapes)  # to which `network_of` adds padded values
        return replace(self._floats, layers=layers[::-1], outputs=outputs, shapes=shapes)

    def _sized(self, layers: FloatModel, config: Mapping[str, int]) -> FloatModel:
        """Return layers with the widths and kernels of a configuration."""
        columns = {name: np.array(size) for name, size in config.items()}
        shapes = {
            name: (shape[0], int(self._axes[name].size(columns)), *shape[2:])
            if len(shape) > 1
            else shape
            for name, shape in layers.shapes.items()
        }
        at = {layer.output: number for number, layer in enumerate(self._floats.layers)}
        sized = []
        for layer in layers.layers:
            kernel = self._kernels.get(at[layer.output])
            sized.append(_slice(layer, shapes, None if kernel is None else config[kernel]))
        return replace(layers, layers=sized, shapes=shapes)

    def _lowered(self, layers: FloatModel) -> Program:
        network = network_of(layers, self._grids, "subnet")
        vectors = self.target.vectors
        return lower(network, packed=not vectors, vectors=vectors)

    # Predictions.

    def predict(
        self,
        config: Mapping[str, Any] | Candidate,
        *,
        ram_bytes: int | None = None,
        flash_bytes: int | None = None,
        plan_s: float = 1.0,
    ) -> Forecast:
        """Return the forecast of a sub-network's firmware, with the plan of its arena.

        RAM is that of the exported firmware, to the byte. Constants are too; instructions depend a
        little on the scales of calibration.

        Args:
            config: configuration; names that are left out have their largest choice.
            ram_bytes, flash_bytes: limits for `Forecast.fits`.
            plan_s: CPU time of each search for a smaller arena, 1 s as for export; with 0 it may be
                larger than that of the export, never smaller.
        """
        chosen = self.net.space.checked(config)
        program = self._lowered(self._sized(self._layers(chosen), chosen))
        firmware = Firmware(b"", program, plan_arena(program, seconds=plan_s), self.target)
        return forecast(firmware, ram_bytes=ram_bytes, flash_bytes=flash_bytes)

    def predict_many(self, columns: Mapping[str, Any]) -> Footprints:
        """Return the costs of many sub-networks.

        Args:
            columns: int64 [candidates] by parameter, as from ``space.sample_columns``; names that
                are left out have their largest choice.
        """
        n = max((len(column) for column in columns.values()), default=1)
        if n > _CHUNK:  # the caches hold a chunk
            parts = [
                self.predict_many({k: c[at : at + _CHUNK] for k, c in columns.items()})
                for at in range(0, n, _CHUNK)
            ]
            return Footprints(
                *(np.concatenate(c) for c in zip(*(vars(p).values() for p in parts), strict=True))
            )
        whole = {
            name: np.broadcast_to(np.asarray(columns.get(name, size), np.int64), n)
            for name, size in self.net.space.full.items()
        }
        if not self._skips:
            return Footprints(*self._many((), whole))
        depths = np.stack([whole[name] for name in self._skips], 1)
        kinds, which = np.unique(depths, axis=0, return_inverse=True)
        found = np.zeros((4, n), np.int64)
        for number, kind in enumerate(kinds):
            mask = which.reshape(-1) == number
            part = {name: column[mask] for name, column in whole.items()}
            found[:, mask] = self._many(tuple(map(int, kind)), part)
        return Footprints(*found)

    def _many(self, depths: tuple[int, ...], columns: Columns) -> Integers:
        """Return RAM, flash, instructions and macs, int64 [4, candidates], of equal depths."""
        if depths not in self._structures:
            layers = self._layers(dict(zip(self._skips, depths, strict=False)))
            self._structures[depths] = layers, self._lowered(layers)
        layers, program = self._structures[depths]
        at = {layer.output: number for number, layer in enumerate(self._floats.layers)}
        names = [program.network.tensors[step.output].name for step in program.steps]
        inputs = {layer.output: layer.inputs for layer in layers.layers}
        chosen = {
            name: np.searchsorted(self.net.space.choices[name].choices, column)
            for name, column in columns.items()
        }
        rows = [self._looked_up(at[name], inputs[name], columns, chosen) for name in names]
        sizes = {
            index: self._bytes(tensor.name, columns)
            for index, tensor in enumerate(program.network.tensors)
            if tensor.data is None and tensor.name in self._axes
        }
        total = np.sum([row[:3] for row in rows], axis=0)
        ram = np.max([row[3] for row in rows], axis=0)
        # Constants and code.
        flash = total[1]
        varying = [row[5] for row in rows if row[5].min() < row[5].max()] or [rows[0][5]]
        groups, which = np.unique(np.stack(varying, 1), axis=0, return_inverse=True)
        for group in range(len(groups)):
            mask = which.reshape(-1) == group
            those = [row[:, mask] for row in rows]
            key = depths, tuple(int(row[5, 0]) for row in those)
            if key not in self._programs:
                config = _at(columns, int(mask.argmax()))
                self._programs[key] = self._lowered(self._sized(self._layers(config), config))
            program = self._programs[key]
            ram[mask] += arena_bounds(
                program, {index: size[mask] for index, size in sizes.items()},
                [row[4] for row in those], [list(row[_COSTS:]) for row in those],
            )  # fmt: skip
            flash[mask] += costs.code_bytes(program, self.target)
        return np.stack([ram, flash, total[0], total[2]])

    def _bytes(self, value: str, columns: Columns) -> Integers:
        shape = self._floats.shapes[value]
        rest = math.prod(shape[:1]) * math.prod(shape[2:])
        n = len(next(iter(columns.values())))
        return np.broadcast_to(_aligned(self._axes[value].size(columns) * rest), n)

    def _looked_up(
        self, number: int, inputs: Sequence[str], columns: Columns, chosen: Columns
    ) -> Integers:
        """Return the costs of a layer, int64 [costs, candidates].

        Args:
            chosen: numbers of the choices of each parameter.
        """
        layer = self._floats.layers[number]
        axes = [self._axes[name] for name in (*inputs, layer.output)]
        names = dict.fromkeys(name for axis in axes for name, _ in axis.per)
        names |= dict.fromkeys([self._kernels[number]] if number in self._kernels else [])
        code = np.zeros(len(next(iter(columns.values()))), np.int64)
        for name in names:
            code = code * len(self.net.space.choices[name].choices) + chosen[name]
        size = math.prod(len(self.net.space.choices[name].choices) for name in names)
        if size > _MAX_TABLE:
            _, first, which = np.unique(code, return_index=True, return_inverse=True)
            rows = [self._cost(layer, inputs, _at(columns, at)) for at in first.tolist()]
            return np.stack(rows, 1)[:, which.reshape(-1)]
        key = number, *inputs
        if key not in self._costs:
            self._costs[key] = np.full((_COSTS + len(inputs), size), -1, np.int64)
        table = self._costs[key]
        missing = np.flatnonzero(table[0, code] < 0)
        new, first = np.unique(code[missing], return_index=True)
        for entry, at in zip(new.tolist(), missing[first].tolist(), strict=True):
            table[:, entry] = self._cost(layer, inputs, _at(columns, at))
        return table[:, code]

    def _cost(
        self, layer: FloatOperator, inputs: Sequence[str], config: Mapping[str, int]
    ) -> Integers:
        """Lower one layer; return its costs and kind, then the distances of its inputs."""
        alone = replace(
            self._floats, layers=[replace(layer, inputs=tuple(inputs))],
            inputs=list(dict.fromkeys(inputs)), outputs=[layer.output],
        )  # fmt: skip
        program = self._lowered(self._sized(alone, config))
        (step,) = program.steps
        distances = step.distances or (None,) * len(step.inputs)
        kind = step.kernel, tuple(d is None for d in distances)
        return np.array([
            costs.instructions(step, self.target), costs.constant_bytes(program), step.macs,
            costs.stack_bytes(program, self.target), _aligned(step.scratch),
            self._kinds.setdefault(kind, len(self._kinds)),
            *(_DISJOINT if d is None else _aligned(max(d, 0)) for d in distances),
        ], np.int64)  # fmt: skip


def _aligned(size: Any) -> Any:
    return -(-size // ALIGN) * ALIGN


def _at(columns: Columns, candidate: int) -> dict[str, int]:
    return {name: int(column[candidate]) for name, column in columns.items()}


def _slice(
    layer: FloatOperator, shapes: Mapping[str, tuple[int, ...]], kernel: int | None
) -> FloatOperator:
    """Return a layer with the first channels of its weights, and the centre of its kernel."""
    if layer.weight is None:
        return layer
    outputs, inputs = shapes[layer.output][1], shapes[layer.inputs[0]][1]
    weight = layer.weight[:outputs]
    groups = layer.groups
    if groups > 1:
        groups = inputs
    else:
        weight = weight[:, :inputs]
    changes: dict[str, Any] = {}
    if kernel is not None:
        margin = (weight.shape[-1] - kernel) // 2
        for axis in (2, 3):
            if weight.shape[axis] > 1:
                weight = weight.narrow(axis, margin, kernel)
        changes = {
            "kernel": (int(weight.shape[2]), int(weight.shape[3])),
            "padding": tuple(max(0, side - margin * layer.dilation[n // 2] * bool(side))
                             for n, side in enumerate(layer.padding)),
        }  # fmt: skip
    bias = None if layer.bias is None else layer.bias[:outputs]
    return replace(layer, weight=weight, bias=bias, groups=groups, **changes)
