"""What the child processes do: run kernels in Triton's interpreter, or compile them.

Whether Triton interprets is decided when it is imported, by ``TRITON_INTERPRET``. The sources are
files of a folder of their own; they have the kernels and what those need, nothing else of the
user's files.
"""

from __future__ import annotations

import ctypes
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
from slipstream.codegen import imported
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
# Of what a compiler complains of, characters.
_LONGEST = 800
_TARGET = re.compile(r"\.target (sm_\w+)")


class _Array:
    """A tensor that ends at a page nobody may touch.

    Args:
        count: of elements.
        below: what integers stay below.
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
        """A copy; numpy has no bfloat16, of which every value is a float32."""
        tensor = self.tensor.float() if self.tensor.dtype == torch.bfloat16 else self.tensor
        return tensor.numpy().copy()


def _value(argument: Mapping[str, Any]) -> Any:
    """A number or constant, as a kernel is given it."""
    value = argument["value"]
    return getattr(tl, value) if argument["kind"] == "dtype" else value


def _interpreted(argument: Mapping[str, Any]) -> Any:
    """The same for the interpreter, which has Python's numbers where a device has float32."""
    if argument["kind"] != "number" or argument["type"] not in _NUMBERS:
        return _value(argument)
    from triton.runtime.interpreter import TensorHandle

    dtype, type_ = _NUMBERS[argument["type"]]
    return tl.tensor(TensorHandle(np.array([argument["value"]], dtype), type_), type_)


def load(folder: str, module: str) -> Any:
    """A module of a file in `folder`."""
    return imported(Path(folder) / f"{module}.py")


def compare(
    folder: str, fused: str, parts: Sequence[Mapping[str, Any]], *,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run kernels one after the other and fused, and compare what they leave in memory.

    Args:
        folder: has ``fused.py``, and ``alone_1.py`` and so on.
        fused: name of the fused kernel.
        parts: per kernel its name, grid, arguments, and whether it adds atomically.
        report: told the number of the kernel that is run; None for the fused one.

    Returns:
        bytes compared, the most that differ in any order, orders tried; ``failed``, the number of
        a kernel that fails alone, and ``trouble``, what it or the fused one failed with.
    """
    tell = report or channel().send
    given: list[list[Any]] = []
    arrays: list[list[_Array]] = []
    for number, part in enumerate(parts):
        generator = torch.Generator().manual_seed(number)
        try:
            some = [
                _Array(one["value"], _DTYPES[one["type"]], one["below"], generator)
                if one["kind"] == "array" else None
                for one in part["arguments"]
            ]  # fmt: skip
        except (OSError, OverflowError, MemoryError, RuntimeError) as error:
            return {"failed": number, "trouble": f"no memory for its arrays: {error}"}
        arrays.append([one for one in some if one is not None])
        given.append([
            _interpreted(argument) if array is None else array.tensor
            for array, argument in zip(some, part["arguments"], strict=True)
        ])  # fmt: skip
    for number, part in enumerate(parts):
        tell({"running": number})
        try:
            kernel = getattr(load(folder, f"alone_{number + 1}"), part["kernel"])
            kernel[tuple(part["grid"])](*given[number])
        except Exception as error:
            return {"failed": number, "trouble": _told(error, folder)}
    expected = [[array.values() for array in some] for some in arrays]
    arguments = [one for some in given for one in some]
    arguments += [extent for part in parts for extent in part["grid"]]
    programs = sum(int(np.prod(part["grid"])) for part in parts)
    most, orders, trouble = 0, (True, False), ""
    for evenly in orders:
        tell({"running": None})
        for array in (array for some in arrays for array in some):
            array.tensor.copy_(array.first)
        try:
            getattr(load(folder, "fused"), fused)[(programs,)](*arguments, evenly)
        except Exception as error:
            trouble = _told(error, folder)
            break
        most = max(most, sum(
            differing(array.values(), right, part["atomics"])
            for some, rights, part in zip(arrays, expected, parts, strict=True)
            for array, right in zip(some, rights, strict=True)
        ))  # fmt: skip
    compared = sum(array.tensor.nbytes for some in arrays for array in some)
    return {"compared": compared, "differing": most, "orders": len(orders), "trouble": trouble}


def _told(error: BaseException, folder: str) -> str:
    """An error with the line of the kernel that it came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [str(one.line).strip() for one in frames if one.filename.startswith(folder)]
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{text} in `{lines[-1]}`" if lines else text


def machine_code(
    folder: str, module: str, kernel: str, arguments: Sequence[Mapping[str, Any]],
    capability: int, num_warps: int, num_stages: int, unspecialized: int,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel needs on a device that need not be there, as ptxas reports it.

    It is compiled as for a launch with these arguments: arrays begin at multiples of 16 bytes, and
    numbers that are 1 or multiples of 16 are known to be.

    Args:
        module: a file of `folder`.
        capability: 90 for ``sm_90``.
        unspecialized: of the last arguments, how many nothing is known of.

    Returns:
        the fields of `Compiled`, or ``trouble``.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        function = getattr(load(folder, module), kernel)
        signature, constants, known = {}, {}, {}
        open_ = len(arguments) - unspecialized
        for place, (name, one) in enumerate(zip(function.arg_names, arguments, strict=True)):
            signature[name] = f"*{one['type']}" if one["kind"] == "array" else one["type"]
            one_ = one["value"] == 1 and one["type"].startswith("i") and place < open_
            if one["kind"] in ("constexpr", "dtype") or (one["kind"] == "number" and one_):
                signature[name], constants[name] = "constexpr", _value(one)
            elif one["kind"] == "array" or (
                one["type"].startswith("i") and not one["value"] % 16 and place < open_
            ):
                known[place,] = [["tt.divisibility", 16]]
        code = triton.compile(
            ASTSource(fn=function, signature=signature, constexprs=constants, attrs=known),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        ptx = code.asm["ptx"]
        target = _TARGET.search(ptx)
        assert target is not None, "ptx names what it is for"
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
        return {"trouble": "\n".join(line for line in lines if folder not in line)[:_LONGEST]}
    compiled = asdict(parsed(report, ptx))
    return {**compiled, "shared_bytes": code.metadata.shared, "code_bytes": len(code.asm["cubin"])}
