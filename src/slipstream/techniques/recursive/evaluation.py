"""Constants, and inputs that depend on the words of nodes alone, computed by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils._pytree import tree_map

from slipstream.techniques.recursive.lowering import Constant, Lowered
from slipstream.techniques.recursive.traced import RecursiveModelError, Shape, Word

Tensors = Mapping[str, torch.Tensor]


class Weights:
    """The current parameters and buffers of a model, by the tensors seen while tracing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[int, str] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def add(self, shape: Shape) -> None:
        """Find the names of all tensors of a trace."""
        for node in shape.module.graph.nodes:
            if node.op == "get_attr":
                self.name(getattr(shape.module, str(node.target)))

    def name(self, tensor: torch.Tensor) -> str | None:
        """Return the qualified name of a tensor that was seen while tracing; None for others."""
        if id(tensor) not in self._names:
            for named in (self._model.named_parameters, self._model.named_buffers):
                for name, own in named(remove_duplicate=False):
                    if own is tensor:
                        # Keeps it alive, so that its id is not used again.
                        self._names[id(tensor)], self._tensors[id(tensor)] = name, tensor
        return self._names.get(id(tensor))

    def current(self) -> dict[str, torch.Tensor]:
        """Return the present parameters and buffers that were seen, by name."""
        found = {}
        for name in self._names.values():
            owner: Any = self._model
            *path, last = name.split(".")
            for part in path:
                owner = owner._modules[part]
            tensor = owner._parameters.get(last)
            found[name] = owner._buffers[last] if tensor is None else tensor
        return found


def evaluate(
    shape: Shape,
    targets: Iterable[Node],
    weights: Weights,
    tensors: Tensors,
    computed: dict[Node, Any] | None = None,
    words: Sequence[torch.Tensor] = (),
) -> list[Any]:
    """Evaluate nodes of a trace that depend on parameters and words alone.

    Args:
        computed: values by node, extended here; of placeholders for node tensors.
        words: the node's words, int64 scalars.
    """  # fmt: skip
    values = {} if computed is None else computed

    def of(node: Node) -> Any:
        if node in values:
            return values[node]
        if node.op == "get_attr":
            tensor = getattr(shape.module, str(node.target))
            word = node.meta.get("word")
            if word is not None:
                values[node] = words[word.number].expand(tensor.shape)
            else:
                name = weights.name(tensor)
                values[node] = tensor if name is None else tensors[name]
            return values[node]
        arguments = node.meta.get("args", node.args)
        mapped = tree_map(lambda a: of(a) if isinstance(a, Node) else a, tuple(arguments))
        values[node] = _called(node, list(mapped), words)
        return values[node]

    return [of(node) for node in targets]


def _called(node: Node, arguments: list[Any], words: Sequence[torch.Tensor]) -> Any:
    target: Any = node.target
    if any(isinstance(argument, Word) for argument in arguments):
        if target is not torch.ops.aten.select.int or isinstance(arguments[1], Word):
            raise RecursiveModelError(
                f"a word is an argument of {node.target}",
                remedy="use words only as indices, for example of an embedding",
            )
        tensor, dim, word = arguments
        rows = tensor.movedim(dim, 0)
        # Of a batch, other ways to index make a gradient of the whole table for every word.
        found = torch.nn.functional.embedding(words[word.number], rows.reshape(len(rows), -1))
        return found.reshape(rows.shape[1:])
    if target in (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.detach.default):
        return arguments[0]
    return target(*arguments, **node.kwargs)


def constant_value(constant: Constant, weights: Weights, tensors: Tensors) -> torch.Tensor:
    """Evaluate a constant with the current parameters."""
    value: torch.Tensor = evaluate(constant.shape_of, [constant.node], weights, tensors)[0]
    return value


def word_table(
    lowered: Lowered, weights: Weights, tensors: Tensors, columns: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return what the equations load from the kind's table, [rows, width].

    Args:
        columns: of each word, int64 [rows], then of each tensor of the node, [rows, ...].
    """
    shape = lowered.shape
    placeholders = [n for n in shape.module.graph.nodes if n.op == "placeholder"]
    of_tensors = placeholders[len(placeholders) - len(shape.tensors) :] if shape.tensors else []
    targets = [node for node, _ in lowered.inputs]
    count = len(shape.words)

    def row(*fields: torch.Tensor) -> torch.Tensor:
        computed: dict[Node, Any] = dict(zip(of_tensors, fields[count:], strict=True))
        parts = evaluate(shape, targets, weights, tensors, computed, fields[:count])
        return torch.cat([part.reshape(-1) for part in parts])

    mapped: Callable[..., torch.Tensor] = torch.vmap(row)
    return mapped(*columns)


def vocabulary(lowered: Lowered, weights: Weights) -> int | None:
    """Return the number of words that a kind can look up; None if its input is not one word."""
    shape = lowered.shape
    if len(shape.words) != 1 or shape.tensors:
        return None
    sizes = []
    for node in shape.module.graph.nodes:
        arguments = node.meta.get("args", node.args)
        name = getattr(node.target, "_opname", "")
        if name == "select" and any(isinstance(a, Word) for a in arguments):
            sizes.append(arguments[0].meta["val"].shape[arguments[1]])
        elif name == "embedding" or name == "index":
            sizes.append(arguments[0].meta["val"].shape[0])
    return min(sizes, default=None)
