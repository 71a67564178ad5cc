"""An encoder layer as operator graphs, traced without memory, and its bytes in regions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn import functional

from slipstream.durations.movement import Moved, analyze, find_regions
from slipstream.graph.operations import Operation
from slipstream.surgery.fx.trace import trace_of

_DROPPED = 0.1


class EncoderLayer(nn.Module):
    """BERT's encoder layer: x [batch, length, width], post-norm, GELU, dropout.

    Args:
        native: draw dropout masks as bytes by ``torch.native_dropout``, as GPUs do.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, dropped: float = _DROPPED, native: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropped, self.native = heads, dropped, native
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def drop(self, x: Tensor) -> Tensor:
        """Apply dropout, by one operator or by torch's function."""
        if self.native:
            dropped: Tensor = torch.native_dropout(x, self.dropped, True)[0]
            return dropped
        return functional.dropout(x, self.dropped, self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to the same."""
        n, t, d = x.shape
        size = d // self.heads
        q, k, v = (
            layer(x).view(n, t, self.heads, size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size), -1)
        context = (self.drop(scores) @ v).transpose(1, 2).reshape(n, t, d)
        x = self.norm1(x + self.drop(self.out(context)))
        output: Tensor = self.norm2(
            x + self.drop(self.second(self.drop(functional.gelu(self.first(x)))))
        )
        return output


@dataclass(frozen=True)
class LayerBytes:
    """Operators of a layer's step: forward, then backward.

    Attributes:
        operations: operations of both graphs, with shared values.
        lasting: values that outlive the step.
    """

    operations: tuple[Operation, ...]
    lasting: frozenset[int]

    def rows(self, *, fused: bool) -> list[Moved]:
        """Return every operator's bytes, in regions or separately."""
        alone = list(range(len(self.operations)))
        regions = find_regions(self.operations) if fused else alone
        return analyze(self.operations, self.lasting, regions)

    def with_mask_bits(self) -> LayerBytes:
        """Return the same step with one bit per element of a mask instead of a byte."""
        masks = {
            value
            for operation in self.operations
            for (value, n), spec in zip(operation.writes, operation.call.outputs, strict=True)
            if spec.dtype == "bool" and n
        }

        def less(part: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple((v, n // 8 if v in masks else n) for v, n in part)

        changed = (replace(o, reads=less(o.reads), writes=less(o.writes)) for o in self.operations)
        return replace(self, operations=tuple(changed))


def traced_layer(batch: int, length: int, width: int, heads: int) -> LayerBytes:
    """Trace an encoder layer's forward and backward pass in bfloat16, on the meta device."""
    graphs: list[Any] = []

    def keep(module: Any, example: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module.forward)

    model = EncoderLayer(width, heads, 4 * width, native=True).to("meta", torch.bfloat16)
    x = torch.randn(batch, length, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    options: dict[str, Any] = {"fw_compiler": keep, "bw_compiler": keep}
    torch._dynamo.reset()
    output = torch.compile(model, backend=aot_autograd(**options))(x)
    output.backward(torch.empty_like(output))
    values: dict[str, int] = {}
    forward = trace_of(graphs[0], 1, values)
    # Placeholders of the backward graph have the names of what the forward graph returned.
    backward = trace_of(graphs[1], 2, values)
    saved = {v for operation in backward.operations for v, _ in operation.reads}
    # Values that are only saved for the backward pass do not outlive the step.
    lasting = frozenset(backward.leaving | {v for v in forward.leaving if v not in saved})
    return LayerBytes((*forward.operations, *backward.operations), lasting)
