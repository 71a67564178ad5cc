"""Micro-benchmark of ``slipstream::recursive``: a compiled model's calls on recorded structures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.graph import Call
from slipstream.native import build

if TYPE_CHECKING:
    from torch import nn

    from slipstream.techniques.recursive.cells import TreeNode

OP = "slipstream::recursive"

Product = tuple[int, int, int]
"""Inputs, outputs, and number per inner node."""


def structure_call(
    arities: Sequence[int], products: Sequence[Product], dtype: str, backward: bool, training: bool
) -> Call:
    """Return the call to time a pass, for `slipstream.durations`.

    Args:
        arities: of every node, parents before their children; nodes that remain are further roots.
        products: matmuls of an inner node.
        dtype: ``float32`` or ``float64``.
        backward: whether to time the backward pass instead of the forward pass.
        training: whether the forward pass saves what the backward pass needs.
    """
    name = f"{OP}({build()[:12] or 'python'})"
    return Call(name, (tuple(arities), tuple(products), dtype, backward, training), ())


def timer(call: Call) -> Callable[[], object]:
    """Return a function that runs a cell with the same products on the same structures."""
    import torch

    from slipstream.techniques.recursive.calls import compile_calls

    arities, products, dtype, backward, training = call.arguments
    torch.manual_seed(0)
    roots = _roots(arities)
    model = _cell(products, len(arities)).to(getattr(torch, dtype))
    compile_calls(model)

    def forward() -> torch.Tensor:
        with torch.set_grad_enabled(training):
            return torch.stack([model(root) for root in roots])

    forward()
    if not backward:
        return forward
    states, parameters = forward(), list(model.parameters())
    gradient = torch.ones_like(states)
    return lambda: torch.autograd.grad(states, parameters, gradient, retain_graph=True)


def _roots(arities: Sequence[int]) -> list[TreeNode]:
    from slipstream.techniques.recursive.cells import TreeNode

    nodes: list[TreeNode] = []
    # From the last to the first, so that the children of a node are the last ones made.
    for word in reversed(range(len(arities))):
        children = [nodes.pop() for _ in range(arities[word])]
        nodes.append(TreeNode(children, word))
    return [*reversed(nodes)]


def _cell(products: Sequence[Product], words: int) -> nn.Module:
    import torch
    from torch import nn

    hidden = math.gcd(*(size for product in products for size in product[:2]))

    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(words, hidden)
            self.products = nn.ModuleList(
                nn.Linear(inputs, outputs) for inputs, outputs, n in products for _ in range(n)
            )

        def forward(self, node: TreeNode) -> torch.Tensor:
            if not node.children:
                return self.embedding.weight[node.word]
            children = [self(child) for child in node.children]
            state = total = torch.stack(children).sum(0)
            product: Any
            for product in self.products:
                rows = product.in_features // hidden
                x = total if rows == 1 else torch.cat([*children, *[total] * rows][:rows])
                first, *gates = product(x).split(hidden)
                state = torch.tanh(first) + state
                for gate in gates:
                    state = torch.sigmoid(gate) * state
            return state

    return Recorded()
