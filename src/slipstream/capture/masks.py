"""Masks of the nonzero operands of layers in a step, one bit per value."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.graph.statistics import OperandMask

if TYPE_CHECKING:
    import torch

_MAX_BYTES = 1 << 29


class MaskRecorder:
    """Context manager that records masks of linear layers and convolutions while `active`.

    Values are compared with zero in the dtype that the layer computes in, see autocast.
    NaN counts as nonzero. A step that was recorded is read and cleared with `take`. Masks beyond
    512 MiB and calls with keyword arguments only are omitted, and all masks of a compiled model
    that ran before the recorder was entered.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        import torch

        kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)
        self._layers = [
            (name, module) for name, module in model.named_modules() if isinstance(module, kinds)
        ]
        self._hooks = ExitStack()
        self._masks: list[OperandMask] = []
        self._calls: Counter[str] = Counter()
        self._bytes = 0
        self.active = True

    def __enter__(self) -> MaskRecorder:
        for name, module in self._layers:
            handle = module.register_forward_hook(partial(self._record, name))
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def take(self) -> tuple[OperandMask, ...]:
        """Return the masks since the last call, in the order in which they were recorded."""
        masks = tuple(self._masks)
        self._masks, self._bytes = [], 0
        self._calls.clear()
        return masks

    def _record(self, name: str, layer: Any, inputs: Any, output: torch.Tensor) -> None:
        if not self.active or not inputs:
            return
        call = self._calls[name]
        self._calls[name] += 1
        self._add(name, call, "activation", inputs[0].to(output.dtype))
        self._add(name, call, "weight", layer.weight.to(output.dtype))
        if output.requires_grad:
            # The hook belongs to this version: a later change in place has its own gradient.
            output.register_hook(partial(self._add, name, call, "gradient"))

    def _add(self, name: str, call: int, operand: Any, tensor: torch.Tensor) -> None:
        import torch

        values = tensor.detach()
        if self._bytes + values.numel() // 8 > _MAX_BYTES:
            return
        packed = np.packbits((values != 0).cpu().numpy())
        self._bytes += packed.nbytes
        nans = int(torch.isnan(values).sum()) if bool(torch.isnan(values.sum())) else 0
        dtype = str(values.dtype).removeprefix("torch.")
        shape = tuple(values.shape)
        self._masks.append(OperandMask(name, call, operand, shape, dtype, nans, packed.tobytes()))
