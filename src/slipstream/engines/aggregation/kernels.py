"""Bindings of ``native/include/slipstream/aggregation.h``."""

from __future__ import annotations

from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.native.family import DOUBLE, INT32, INT64, POINTER, UINT64, Family, structure

Mismatch = structure("int32_t job, member, other, same_dtype; int64_t values, other_values")
SumReport = structure(
    "uint64_t missing; int64_t above, detail, sent, repeated; double window; uint64_t windows"
)
DONE, ABORTED, SILENT, WAITING, TOO_LARGE, ERROR = range(6)
"""Results of a sum; another one is a failure of the kernel."""
DTYPES = ("float32", "float64", "int32")
"""Values that are summed, in the kernel's order."""
HEADER_BYTES = 48
MAX_MEMBERS = 64
"""Members per aggregator; more ranks need a tree."""

_FAMILY = Family("aggregation", {
    "aggregation_abi": [],
    "aggregator_create": [INT32],
    "aggregator_free": [POINTER],
    "aggregator_add": [POINTER, INT32, INT32, INT32, INT32, POINTER, POINTER, INT32, INT32, UINT64],
    "aggregator_remove": [POINTER, INT32],
    "aggregator_serve": [POINTER, INT32, POINTER],
    "aggregator_counts": [POINTER, POINTER],
    "member_create": [INT32, INT32, INT32, UINT64, INT32, INT32],
    "member_free": [POINTER],
    "member_abort": [POINTER],
    "member_sum": [POINTER, INT32, POINTER, POINTER, INT64, DOUBLE, DOUBLE, POINTER],
}, {
    "aggregator_create": POINTER, "aggregator_free": None,
    "member_create": POINTER, "member_free": None,
}, abi=1)  # fmt: skip


def library() -> Any:
    """Return the compiled library.

    Raises:
        SlipstreamError: it was not built, or this is not Linux.
    """
    loaded = _FAMILY.library
    if loaded is None:
        raise SlipstreamError(
            "sums over datagrams need the compiled library and Linux",
            remedy="reinstall slipstream where a C++ compiler is installed",
        )
    return loaded


class Handle:
    """An object of the library, freed once no call uses it any more."""

    def __init__(self, kind: str, *arguments: object) -> None:
        self._kind, self._library = kind, library()
        self.pointer = getattr(self._library, f"slipstream_{kind}_create")(*arguments)
        if not self.pointer:
            raise SlipstreamError(f"the kernel '{kind}' refused its arguments")

    def call(self, function: str, *arguments: object) -> int:
        """Return the status of ``slipstream_KIND_FUNCTION``."""
        status: int = getattr(self._library, f"slipstream_{self._kind}_{function}")(
            self.pointer, *arguments
        )
        return status

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            getattr(self._library, f"slipstream_{self._kind}_free")(self.pointer)
