"""Tasks of the child processes: run kernels in Triton's interpreter, or compile them.

``TRITON_INTERPRET`` decides at import whether Triton interprets kernels. The sources are in a
temporary folder and only contain the kernels and their dependencies.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from slipstream.child import channel
from slipstream.codegen import import_file
from slipstream.techniques.side_by_side.cuda.resources import parsed, run_tool
from slipstream.techniques.side_by_side.hfuse import differing

_DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32,
    "u64": torch.uint64,
}  # fmt: skip
_NUMBERS = {
    "fp16": (np.float16, tl.float16), "fp32": (np.float32, tl.float32),
    "fp64": (np.float64, tl.float64), "i64": (np.int64, tl.int64), "u1": (np.bool_, tl.int1),
}  # fmt: skip
_PROT_NONE = 0
_BLACKWELL = 100
# Characters of a compiler error that are reported.
_MAX_ERROR = 800
_TARGET = re.compile(r"\.target (sm_\w+)")


class _Array:
    """A tensor that ends at a guard page.

    Args:
        count: number of elements.
        below: upper bound of integers, exclusive.
    """

    def __init__(self, count: int, dtype: Any, below: int, generator: Any) -> None:
        bytes_ = count * dtype.itemsize
        whole = -(-bytes_ // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
        self.tensor = torch.frombuffer(
            self._memory, dtype=dtype, count=count, offset=whole - bytes_
        )
        guard = self.tensor.data_ptr() + bytes_
        library = ctypes.CDLL(None, use_errno=True)
        if library.mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        if dtype.is_floating_point:
            values = torch.rand(count, generator=generator)
        else:
            high = 2 if dtype == torch.bool else below
            values = torch.randint(0, high, (count,), generator=generator)
        self.tensor.copy_(values)
        self.first = self.tensor.clone()

    def values(self) -> NDArray[np.generic]:
        """Return a copy; bfloat16 is converted to float32, which is exact."""
        tensor = self.tensor.float() if self.tensor.dtype == torch.bfloat16 else self.tensor
        return tensor.numpy().copy()


def _value(argument: Mapping[str, Any]) -> Any:
    """Return a number or constant as a kernel argument."""
    value = argument["value"]
    return getattr(tl, value) if argument["kind"] == "dtype" else value


def _interpreted(argument: Mapping[str, Any]) -> Any:
    """Return an argument for the interpreter, with the type that a device would use."""
    if argument["kind"] != "number" or argument["type"] not in _NUMBERS:
        return _value(argument)
    from triton.runtime.interpreter import TensorHandle

    dtype, type_ = _NUMBERS[argument["type"]]
    return tl.tensor(TensorHandle(np.array([argument["value"]], dtype), type_), type_)


def load(folder: str, module: str) -> Any:
    """Import a module of `folder`."""
    return import_file(Path(folder) / f"{module}.py")


def compare(
    folder: str, fused: str, parts: Sequence[Mapping[str, Any]], *,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run kernels sequentially and fused, and compare their memory.

    Args:
        folder: contains ``fused.py``, ``alone_1.py`` and so on.
        fused: name of the fused kernel.
        parts: name, grid, arguments of each kernel, and whether it adds atomically.
        report: called with the index of the running kernel; None for the fused one.

    Returns:
        Bytes ``compared``, maximum number ``differing`` in any order, and ``orders`` tried;
        ``failed``, the index of a kernel that fails alone, and ``trouble``, the error of it or of
        the fused kernel.
    """
    send = report or channel().send
    arguments: list[list[Any]] = []
    arrays: list[list[_Array]] = []
    for number, part in enumerate(parts):
        generator = torch.Generator().manual_seed(number)
        try:
            part_arrays = [
                _Array(
                    argument["value"], _DTYPES[argument["type"]], argument["below"], generator
                ) if argument["kind"] == "array" else None
                for argument in part["arguments"]
            ]  # fmt: skip
        except (OSError, OverflowError, MemoryError, RuntimeError) as error:
            return {"failed": number, "trouble": f"no memory for its arrays: {error}"}
        arrays.append([array for array in part_arrays if array is not None])
        arguments.append([
            _interpreted(argument) if array is None else array.tensor
            for array, argument in zip(part_arrays, part["arguments"], strict=True)
        ])  # fmt: skip
    for number, part in enumerate(parts):
        send({"running": number})
        try:
            kernel = getattr(load(folder, f"alone_{number + 1}"), part["kernel"])
            kernel[tuple(part["grid"])](*arguments[number])
        except Exception as error:
            return {"failed": number, "trouble": _error_text(error, folder)}
    expected = [[array.values() for array in part_arrays] for part_arrays in arrays]
    fused_arguments = [argument for values in arguments for argument in values]
    fused_arguments += [extent for part in parts for extent in part["grid"]]
    programs = sum(int(np.prod(part["grid"])) for part in parts)
    max_differing, orders, trouble = 0, (True, False), ""
    for evenly in orders:
        send({"running": None})
        for array in itertools.chain.from_iterable(arrays):
            array.tensor.copy_(array.first)
        try:
            getattr(load(folder, "fused"), fused)[(programs,)](*fused_arguments, evenly)
        except Exception as error:
            trouble = _error_text(error, folder)
            break
        max_differing = max(max_differing, sum(
            differing(array.values(), right, part["atomics"])
            for actual, rights, part in zip(arrays, expected, parts, strict=True)
            for array, right in zip(actual, rights, strict=True)
        ))  # fmt: skip
    compared = sum(array.tensor.nbytes for array in itertools.chain.from_iterable(arrays))
    return {
        "compared": compared,
        "differing": max_differing,
        "orders": len(orders),
        "trouble": trouble,
    }


def _error_text(error: BaseException, folder: str) -> str:
    """Describe an error with the kernel's line that raised it."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [str(frame.line).strip() for frame in frames if frame.filename.startswith(folder)]
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{text} in `{lines[-1]}`" if lines else text


def machine_code(
    folder: str, module: str, kernel: str, arguments: Sequence[Mapping[str, Any]],
    capability: int, num_warps: int, num_stages: int, unspecialized: int,
) -> dict[str, Any]:  # fmt: skip
    """Compile a kernel for a device, which may be absent, and return the resources ptxas reports.

    Compilation is specialised to the arguments: arrays start at multiples of 16 bytes, and integers
    that are 1 or multiples of 16 are treated as such.

    Args:
        module: name of a module in `folder`.
        capability: compute capability, 90 for ``sm_90``.
        unspecialized: number of last arguments without specialisation.

    Returns:
        The fields of `Compiled`, or the error as ``trouble``.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        function = getattr(load(folder, module), kernel)
        signature, constants, attributes = {}, {}, {}
        specialized = len(arguments) - unspecialized
        for place, (name, argument) in enumerate(zip(function.arg_names, arguments, strict=True)):
            kind, type_, value = argument["kind"], argument["type"], argument["value"]
            signature[name] = f"*{type_}" if kind == "array" else type_
            is_integer = type_.startswith("i") and place < specialized
            if kind in ("constexpr", "dtype") or (kind == "number" and is_integer and value == 1):
                signature[name], constants[name] = "constexpr", _value(argument)
            elif kind == "array" or (is_integer and not value % 16):
                attributes[place,] = [["tt.divisibility", 16]]
        code = triton.compile(
            ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        ptx = code.asm["ptx"]
        target = _TARGET.search(ptx)
        assert target is not None, "PTX names its target"
        tools = triton.knobs.nvidia
        newer = capability >= _BLACKWELL and hasattr(tools, "ptxas_blackwell")
        tool = tools.ptxas_blackwell if newer else tools.ptxas
        source = Path(folder) / f"{module}.ptx"
        source.write_text(ptx)
        report = run_tool(
            [tool.path, f"-arch={target[1]}", "-v", str(source), "-o", f"{source}.cubin"]
        )
    except Exception as error:
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        return {"trouble": "\n".join(line for line in lines if folder not in line)[:_MAX_ERROR]}
    compiled = asdict(parsed(report, ptx))
    return {**compiled, "shared_bytes": code.metadata.shared, "code_bytes": len(code.asm["cubin"])}
