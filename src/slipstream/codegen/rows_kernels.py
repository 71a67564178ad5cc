"""Nests as modules that run their kernel: C++ on a CPU, Triton on a CUDA device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.codegen.compiler import CompileError, load
from slipstream.codegen.rows import Nest
from slipstream.codegen.rows_cpp import source
from slipstream.codegen.rows_triton import tiling, triton_source
from slipstream.codegen.triton import load_triton

# Maximum length of a quoted error of Triton, in characters.
_MAX_MESSAGE_CHARS = 300


class RowKernel(torch.nn.Module):
    """A compiled nest: takes the tensors it reads and returns those it makes."""

    def __init__(self, nest: Nest) -> None:
        super().__init__()
        self._inputs = [(spec.shape, spec.strides) for spec in nest.inputs]
        self._outputs = [(s.shape, s.strides, getattr(torch, s.dtype)) for s in nest.outputs]

    def _laid_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs with the strides they had when the nest was made."""
        return [
            x if x.stride() == strides or x.numel() < 2 else _with_strides(x, shape, strides)
            for x, (shape, strides) in zip(tensors, self._inputs, strict=True)
        ]


class CppKernel(RowKernel):
    """A function of a compiled library."""

    def __init__(self, function: Any, nest: Nest) -> None:
        super().__init__(nest)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], None
        self._function = function
        self._pointers = ctypes.c_void_p * (len(self._inputs) + len(self._outputs))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the nest."""
        inputs = self._laid_out(tensors)
        outputs = [
            torch.empty_strided(shape, strides, dtype=dtype)
            for shape, strides, dtype in self._outputs
        ]
        pointers = self._pointers(*(x.data_ptr() for x in (*inputs, *outputs)))
        self._function(pointers, torch.get_num_threads())
        return tuple(outputs)


class TritonKernel(RowKernel):
    """A kernel for a CUDA device; with CPU tensors if Triton interprets."""

    def __init__(self, function: Any, nest: Nest) -> None:
        super().__init__(nest)
        tiles = tiling(nest)
        self._launch, self._warps = function[tiles.grid], tiles.num_warps
        self._sums = {store.output for store in nest.stores if store.column}
        real = torch.float64 if nest.real == "double" else torch.float32
        self._partial = (tiles.grid[0], nest.columns), real

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the nest.

        Raises:
            CompileError: Triton cannot compile the kernel for this device.
        """
        inputs = self._laid_out(tensors)
        device, (partial_shape, real) = tensors[0].device, self._partial
        outputs = [
            torch.empty(partial_shape, dtype=real, device=device) if number in self._sums
            else torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for number, (shape, strides, dtype) in enumerate(self._outputs)
        ]  # fmt: skip
        with torch.cuda.device_of(tensors[0]):
            try:
                self._launch(*inputs, *outputs, num_warps=self._warps)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
                raise CompileError(f"Triton cannot run a generated kernel: {message}") from error
        for number in self._sums:
            shape, strides, dtype = self._outputs[number]
            outputs[number] = outputs[number].sum(0).to(dtype).as_strided(shape, strides)
        return tuple(outputs)


def _with_strides(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Copy a tensor into the layout that the nest was made for; torch guards the shape."""
    copy = torch.empty_strided(tuple(shape), tuple(strides), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def cpp_kernels(nests: Sequence[Nest]) -> list[RowKernel]:
    """Compile a kernel per nest for this CPU.

    Raises:
        CompileError: no compiler works, or it fails.
    """
    library = load(source(nests))
    return [CppKernel(getattr(library, f"region_{n}"), nest) for n, nest in enumerate(nests)]


def triton_kernels(nests: Sequence[Nest]) -> list[RowKernel]:
    """Generate a Triton kernel per nest, which is compiled at its first call.

    Raises:
        CompileError: Triton is not installed.
        UnsupportedError: a nest has no kernel of this form.
    """
    module = load_triton(triton_source(nests))
    return [TritonKernel(getattr(module, f"region_{n}"), nest) for n, nest in enumerate(nests)]


def row_kernels(nests: Sequence[Nest]) -> list[RowKernel]:
    """Make a kernel per nest, for the device of its tensors.

    Raises:
        CompileError: the device's compiler is missing, or fails.
    """
    kernels: dict[int, RowKernel] = {}
    for make, on_device in ((cpp_kernels, False), (triton_kernels, True)):
        numbers = [n for n, nest in enumerate(nests) if (nest.device != "cpu") is on_device]
        if numbers:
            kernels |= dict(zip(numbers, make([nests[n] for n in numbers]), strict=True))
    return [kernels[n] for n in range(len(nests))]
