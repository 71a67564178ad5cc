"""Training of a compiled recursive model: states with gradients, by a second kernel.

The backward kernel passes gradients from level to level. Gradients of weights are deferred: one
product over all nodes of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from slipstream.codegen.program import Load
from slipstream.techniques.recursive.backward import Backward, backward_of
from slipstream.techniques.recursive.emission import point
from slipstream.techniques.recursive.lowering import Product
from slipstream.techniques.recursive.stages import staged
from slipstream.techniques.recursive.structures import Int32s, Linearized

if TYPE_CHECKING:
    from slipstream.techniques.recursive.net import Compiled, RecursiveNet

Buffers = dict[tuple[int, str], torch.Tensor]
"""Rows of all nodes, [nodes, width], by kind and name."""


@dataclass(frozen=True)
class Trainer:
    """Kernels of both passes for the kinds seen so far."""

    kinds: Sequence[Backward]
    forward: Compiled
    backward: Compiled

    @classmethod
    def of(cls, net: RecursiveNet) -> Trainer:
        """Generate and compile the kernels."""
        kinds = [backward_of(kind, net.state_widths) for kind in net.kinds]
        return cls(
            kinds,
            net.compiled({n: staged(kind.forward) for n, kind in enumerate(kinds)}),
            net.compiled({n: staged(kind.equations) for n, kind in enumerate(kinds)}),
        )

    def states(
        self, net: RecursiveNet, linearized: Linearized, tensors: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the states of all nodes, [nodes, width] each, with gradients."""
        constants = net.constant_values(tensors)
        numbers = {kind: linearized.numbers(kind) for kind in range(len(self.kinds))}
        word, tables = net.tables(linearized, tensors, ())
        request = _Request(net, self, linearized, word, numbers, sorted(tables), len(constants))
        states: Sequence[torch.Tensor] = _States.apply(
            request, *constants, *(tables[kind] for kind in request.tabled)
        )
        return list(states)


@dataclass(frozen=True)
class _Request:
    net: RecursiveNet
    trainer: Trainer
    linearized: Linearized
    word: Int32s
    numbers: Mapping[int, Int32s]
    tabled: Sequence[int]
    constants: int

    def run(
        self,
        compiled: Compiled,
        groups: Int32s,
        inputs: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        saved: Buffers,
        workers: int | None,
    ) -> None:
        """Call a kernel; buffers that it stores are added to `saved`."""

        def stored(kind: int, buffer: str) -> torch.Tensor:
            equations = self.trainer.kinds[kind]
            width = {**equations.forward.saved, **equations.equations.saved}[buffer]
            empty = torch.empty(self.linearized.nodes, width, dtype=self.net.dtype)
            return saved.setdefault((kind, buffer), empty)

        tables = dict(zip(self.tabled, inputs[self.constants :], strict=True))
        pointers = np.zeros(len(compiled.kernel.pointers), np.int64)
        alive = point(pointers, compiled.kernel, {
            "saved": stored, "table": tables.get, "word": lambda: self.word,
            "panel": lambda panel: self.net.panel(panel, inputs),
            "constant": lambda number: inputs[number].contiguous(),
            "state": states.__getitem__, "gradient": gradients.__getitem__,
            "child": self.linearized.child_of.__getitem__,
        })  # fmt: skip
        self.net.launch(compiled, groups, pointers, workers)
        del alive


class _States(torch.autograd.Function):
    """States of all nodes from the constants and tables of their equations."""

    @staticmethod
    def forward(ctx: Any, request: _Request, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        net, states = request.net, request.net.empty_states(request.linearized)
        groups = request.linearized.groups.copy()
        groups[:, 2] = 0
        ctx.request, ctx.groups, ctx.saved = request, groups, {}
        request.run(request.trainer.forward, groups, inputs, states, [], ctx.saved, net.workers)
        ctx.save_for_backward(*inputs, *states)
        return tuple(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        request: _Request = ctx.request
        tensors = ctx.saved_tensors
        inputs, states = tensors[: -len(gradients)], tensors[-len(gradients) :]
        sums = [
            torch.zeros_like(state) if gradient is None else gradient.clone()
            for state, gradient in zip(states, gradients, strict=True)
        ]
        # Parents before their children; one worker, since rows of children are added to.
        levels = np.split(ctx.groups, np.flatnonzero(np.diff(ctx.groups[:, 0])) + 1)
        groups = np.ascontiguousarray(np.concatenate(levels[::-1]))
        saved = dict(ctx.saved)
        request.run(request.trainer.backward, groups, inputs, states, sums, saved, 1)
        results: list[torch.Tensor | None] = [None] * len(inputs)
        for place, kind in enumerate(request.tabled):
            table = inputs[request.constants + place]
            rows = torch.from_numpy(request.numbers[kind]).long()
            words = torch.from_numpy(request.word[request.numbers[kind]]).long()
            gradient = torch.zeros_like(table)
            results[request.constants + place] = gradient.index_add_(
                0, words, saved[kind, "x"].index_select(0, rows)
            )
        for kind, numbers in request.numbers.items():
            if len(numbers):
                _add_constants(results, request, kind, inputs, states, saved)
        return (None, *results)


def _add_constants(
    results: list[torch.Tensor | None],
    request: _Request,
    kind: int,
    inputs: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    saved: Buffers,
) -> None:
    """Add the gradients of constants from all nodes of a kind."""
    rows = torch.from_numpy(request.numbers[kind]).long()  # ascending
    contiguous = len(rows) == int(rows[-1] - rows[0]) + 1

    def chosen(buffer: torch.Tensor) -> torch.Tensor:
        if contiguous:
            return buffer[int(rows[0]) : int(rows[-1]) + 1]
        return buffer.index_select(0, rows)

    def gradient_of(number: int) -> torch.Tensor:
        result = results[number]
        if result is None:
            result = results[number] = torch.zeros(inputs[number].shape, dtype=inputs[number].dtype)
        return result

    def values(load: Load, length: int) -> torch.Tensor:
        name, through = load.buffer, load.index.through
        first, end = load.index.offset, load.index.offset + length
        if name == "table":
            table = inputs[request.constants + request.tabled.index(kind)]
            words = torch.from_numpy(request.word[request.numbers[kind]]).long()
            return table.index_select(0, words)[:, first:end]
        if through is not None:
            child = torch.from_numpy(request.linearized.child_of[int(through[0][5:])])
            return states[int(name[1:])].index_select(0, chosen(child).long())[:, first:end]
        if name[0] == "c":
            return inputs[int(name[1:])].reshape(1, -1)[:, first:end].expand(len(rows), length)
        return chosen(saved[kind, name])[:, first:end]

    backward = request.trainer.kinds[kind]
    for product in backward.forward.products:
        assert isinstance(product, Product)
        sums = chosen(saved[kind, f"d{product.name}"])
        weight = gradient_of(product.weight)
        weight = weight.view(weight.shape[-2:] if weight.dim() > 1 else (-1, 1))
        for load, first, length in product.inputs:
            x = values(load, length)
            if product.columns_first:
                weight[:, first : first + length].addmm_(sums.T, x)
            else:
                weight[first : first + length].addmm_(x.T, sums)
    for number, places in backward.constants.items():
        flat = gradient_of(number).view(-1)
        for at, buffer, column, length in places:
            flat[at : at + length] += chosen(saved[kind, buffer])[:, column:][:, :length].sum(0)
