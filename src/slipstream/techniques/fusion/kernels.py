"""Regions as modules that run their kernel: C++ on a processor, Triton on a CUDA device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.codegen import CompileError, load, load_triton
from slipstream.techniques.fusion.emit import source
from slipstream.techniques.fusion.emit_triton import tiling, triton_source
from slipstream.techniques.fusion.loops import Nest
from slipstream.techniques.fusion.lowering import Region

# Of what Triton complains of, characters.
_LONGEST = 300


class Kernel(torch.nn.Module):
    """A compiled region: takes the tensors it reads, returns those it makes."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        nest = region.nest
        self._inputs = [(spec.shape, spec.strides) for spec in nest.inputs]
        self._outputs = [(s.shape, s.strides, getattr(torch, s.dtype)) for s in nest.outputs]
        self.operators = len(region.steps)

    def _given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is read, each as it lay when the graph was traced."""
        return [
            x if x.stride() == strides or x.numel() < 2 else _laid_out(x, shape, strides)
            for x, (shape, strides) in zip(tensors, self._inputs, strict=True)
        ]


class CppKernel(Kernel):
    """A function of a compiled library."""

    def __init__(self, function: Any, region: Region) -> None:
        super().__init__(region)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], None
        self._function = function
        self._pointers = ctypes.c_void_p * (len(self._inputs) + len(self._outputs))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the region."""
        given = self._given(tensors)
        outputs = [torch.empty_strided(*one[:2], dtype=one[2]) for one in self._outputs]
        pointers = self._pointers(*(x.data_ptr() for x in (*given, *outputs)))
        self._function(pointers, torch.get_num_threads())
        return tuple(outputs)


class TritonKernel(Kernel):
    """A kernel for a CUDA device; of a processor's tensors where Triton interprets."""

    def __init__(self, function: Any, region: Region) -> None:
        super().__init__(region)
        tiles = tiling(region.nest)
        self._launch, self._warps = function[tiles.grid], tiles.num_warps
        self._sums = {store.output for store in region.nest.stores if store.column}
        self._partial = (tiles.grid[0], region.nest.columns), _real(region.nest)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the region.

        Raises:
            CompileError: Triton does not compile it for this device.
        """
        given = self._given(tensors)
        device, (shape, real) = tensors[0].device, self._partial
        outputs = [
            torch.empty(shape, dtype=real, device=device) if number in self._sums
            else torch.empty_strided(*one[:2], dtype=one[2], device=device)
            for number, one in enumerate(self._outputs)
        ]  # fmt: skip
        with torch.cuda.device_of(tensors[0]):
            try:
                self._launch(*given, *outputs, num_warps=self._warps)
            except Exception as error:
                words = f"{type(error).__name__}: {error}"[:_LONGEST]
                raise CompileError(f"a region's kernel in Triton fails: {words}") from error
        for number in self._sums:
            layout = self._outputs[number]
            outputs[number] = outputs[number].sum(0).to(layout[2]).as_strided(*layout[:2])
        return tuple(outputs)


def _real(nest: Nest) -> torch.dtype:
    return torch.float64 if nest.real == "double" else torch.float32


def _laid_out(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A copy as it was when the graph was traced; sizes cannot differ, torch sees to that."""
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=x.dtype, device=x.device).copy_(
        x
    )


def in_cpp(regions: Sequence[Region]) -> list[Kernel]:
    """The kernel of each region, for this processor.

    Raises:
        CompileError: they cannot be compiled.
    """
    library = load(source([region.nest for region in regions]))
    return [CppKernel(getattr(library, f"region_{n}"), r) for n, r in enumerate(regions)]


def in_triton(regions: Sequence[Region]) -> list[Kernel]:
    """The kernel of each region, compiled for the device when it is first called.

    Raises:
        CompileError: Triton is not installed.
        UnsupportedError: a region has no kernel of this form.
    """
    module = load_triton(triton_source([region.nest for region in regions]))
    return [TritonKernel(getattr(module, f"region_{n}"), r) for n, r in enumerate(regions)]


def by_device(regions: Sequence[Region]) -> list[Kernel]:
    """The kernel of each region, for where its tensors are.

    Raises:
        CompileError: the compiler for it is not there, or fails.
    """
    kernels: dict[int, Kernel] = {}
    for make, on_device in ((in_cpp, False), (in_triton, True)):
        numbers = [n for n, one in enumerate(regions) if (one.nest.device != "cpu") is on_device]
        if numbers:
            kernels |= dict(zip(numbers, make([regions[n] for n in numbers]), strict=True))
    return [kernels[n] for n in range(len(regions))]
