"""An encoder layer as op-level graphs, traced without memory, and its bytes in regions."""

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
    """An encoder layer as BERT has it: x [batch, length, width], post-norm, GELU, dropout.

    Args:
        native: draw dropout's masks as bytes, by ``torch.native_dropout``, as devices do.
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
        """Dropout, by one operator or by torch's function."""
        if self.native:
            dropped: Tensor = torch.native_dropout(x, self.dropped, True)[0]
            return dropped
        return functional.dropout(x, self.dropped, self.training)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, [batch, length, width]."""
        n, t, d = x.shape
        size = d // self.heads
        q, k, v = (
            one(x).view(n, t, self.heads, size).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size), -1)
        context = (self.drop(scores) @ v).transpose(1, 2).reshape(n, t, d)
        x = self.norm1(x + self.drop(self.out(context)))
        made: Tensor = self.norm2(
            x + self.drop(self.second(self.drop(functional.gelu(self.first(x)))))
        )
        return made


@dataclass(frozen=True)
class LayerBytes:
    """A layer's step by operators: forward, then backward.

    Attributes:
        operations: of both graphs, values shared.
        lasting: values that leave the step.
    """

    operations: tuple[Operation, ...]
    lasting: frozenset[int]

    def rows(self, *, fused: bool) -> list[Moved]:
        """Every operator's bytes, with regions or each operator by itself."""
        alone = list(range(len(self.operations)))
        regions = find_regions(self.operations) if fused else alone
        return analyze(self.operations, self.lasting, regions)

    def with_mask_bits(self) -> LayerBytes:
        """The same with one bit, in place of a byte, for every element of a mask."""
        masks = {
            value
            for one in self.operations
            for (value, n), spec in zip(one.writes, one.call.outputs, strict=True)
            if spec.dtype == "bool" and n
        }

        def less(part: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple((v, n // 8 if v in masks else n) for v, n in part)

        changed = (replace(o, reads=less(o.reads), writes=less(o.writes)) for o in self.operations)
        return replace(self, operations=tuple(changed))


def traced_layer(batch: int, length: int, width: int, heads: int) -> LayerBytes:
    """An encoder layer's forward and backward at 2 bytes a number, on the meta device."""
    graphs: list[Any] = []

    def keep(module: Any, example: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module.forward)

    model = EncoderLayer(width, heads, 4 * width, native=True).to("meta", torch.bfloat16)
    x = torch.randn(batch, length, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    options: dict[str, Any] = {"fw_compiler": keep, "bw_compiler": keep}
    torch._dynamo.reset()
    made = torch.compile(model, backend=aot_autograd(**options))(x)
    made.backward(torch.empty_like(made))
    values: dict[str, int] = {}
    forward = trace_of(graphs[0], 1, values)
    # The backward's placeholders have the names of what the forward returned.
    backward = trace_of(graphs[1], 2, values)
    kept = {v for one in backward.operations for v, _ in one.reads}
    # What is only kept for the backward does not leave the step.
    lasting = frozenset(backward.leaving | {v for v in forward.leaving if v not in kept})
    return LayerBytes((*forward.operations, *backward.operations), lasting)
