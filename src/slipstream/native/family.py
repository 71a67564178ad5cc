"""One convention for compiled code: a family's signatures as data, its kernels, its calls.

A family is a folder of ``native/src`` with the functions ``slipstream_NAME``. The package that uses
it declares them once, in its ``kernels.py``, as a `Family`. A profiler sees the operator around a
call: torch records those that `slipstream.native.operators` defines, with shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.native.instruction_set import InstructionSet, cpu_features
from slipstream.native.loader import library

if TYPE_CHECKING:
    import torch

INT32, INT64 = ctypes.c_int32, ctypes.c_int64
UINT8, UINT32, UINT64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64
FLOAT, DOUBLE, POINTER, TEXT = ctypes.c_float, ctypes.c_double, ctypes.c_void_p, ctypes.c_char_p

_C_TYPES = {
    "int32_t": INT32, "int64_t": INT64, "uint32_t": UINT32, "uint64_t": UINT64, "float": FLOAT,
    "double": DOUBLE, "char": ctypes.c_char, "void*": POINTER,
}  # fmt: skip


def structure(members: str, **others: Any) -> Any:
    """Return the ctypes class of a C struct.

    Args:
        members: as in C, every pointer a ``void*``: ``int32_t op[2], root; void* head[2];``.
        others: further types by name.
    """
    types, fields = _C_TYPES | others, []
    for declaration in filter(None, map(str.strip, members.split(";"))):
        kind, names = declaration.split(None, 1)
        for name in names.split(","):
            name, _, count = name.strip().rstrip("]").partition("[")
            fields.append((name, types[kind] * int(count) if count else types[kind]))
    return type("structure", (ctypes.Structure,), {"_fields_": fields})


class Family:
    """The compiled functions of one family, declared when the library is first used.

    Attributes:
        name: of the family: ``dropout``.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Sequence[Any]],
        results: Mapping[str, Any] | None = None,
        abi: int | None = None,
    ) -> None:
        """Declare functions ``slipstream_KEY``, one per key.

        Args:
            arguments: ctypes of each function's arguments.
            results: ctypes of results other than a status (int32).
            abi: expected result of ``slipstream_NAME_abi``; None without such a function.
        """
        self.name = name
        self._arguments, self._results, self._abi = arguments, results or {}, abi
        self._seen: ctypes.CDLL | None = None
        self._library: Any = None
        self._kernels: dict[InstructionSet, int] | None = None

    @property
    def library(self) -> Any:
        """The library with signatures; None without a library or this family."""
        loaded = library()
        if loaded is None:
            return None
        if loaded is not self._seen:
            self._library = loaded if self._declare(loaded) else None
            self._kernels, self._seen = None, loaded
        return self._library

    @property
    def kernels(self) -> dict[InstructionSet, int]:
        """Numbers of the compiled kernels that run here by instruction set, best first.

        ``SLIPSTREAM_INSTRUCTION_SET`` excludes higher ones. Empty without the library.
        """
        if self.library is None:
            return {}
        if self._kernels is None:
            count = getattr(self._library, f"slipstream_{self.name}_kernel_count")
            level_of = getattr(self._library, f"slipstream_{self.name}_level")
            level_of.restype, level_of.argtypes = TEXT, [INT32]
            built = {InstructionSet(level_of(number).decode()): number for number in range(count())}
            self._kernels = {
                level: built[level] for level in cpu_features().levels if level in built
            }
        return self._kernels

    def kernel(self, level: InstructionSet | None = None) -> int | None:
        """Return the number of the kernel for `level`, by default the best; None without kernels.

        Raises:
            KeyError: no kernel of `level` runs here.
        """
        kernels = self.kernels
        if not kernels:
            return None
        return next(iter(kernels.values())) if level is None else kernels[level]

    def call(self, function: str, *arguments: object) -> None:
        """Call a function that returns a status.

        Raises:
            SlipstreamError: the status is not 0.
        """
        status = getattr(self.library, f"slipstream_{function}")(*arguments)
        if status:
            raise SlipstreamError(f"the kernel '{function}' returned status {status}")

    def _declare(self, loaded: Any) -> bool:
        """Declare the functions; return whether `loaded` has them, in the expected version."""
        try:
            if self._abi is not None:
                version = getattr(loaded, f"slipstream_{self.name}_abi")
                if version() != self._abi:
                    return False
            for key, arguments in self._arguments.items():
                function = getattr(loaded, f"slipstream_{key}")
                function.argtypes = arguments
                function.restype = self._results.get(key, INT32)
        except AttributeError:  # it was built before the family was added
            return False
        return True


def array_pointer(array: npt.NDArray[Any] | None) -> int | None:
    """Return the address of an array's data; the array must outlive the call."""
    return None if array is None else array.ctypes.data


def tensor_pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data; the tensor must outlive the call."""
    return None if tensor is None else tensor.data_ptr()
