"""The C library's heap: keep the pages it has, and count those it asks the system for.

glibc gives large freed blocks back to the system. Asking for them again costs a page fault for
every 4 KiB: the kernel finds a page, fills it with zeros and maps it. A training step frees and
asks for the same memory every time; see ``malloc_trim(3)`` and ``mallopt(3)``.
"""

from __future__ import annotations

import ctypes
import functools

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1

KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 46), "MALLOC_MMAP_MAX_": "0"}
"""Environment variables under which a program keeps its pages from its start."""


def keep_pages() -> bool:
    """Let this process keep every page it has from now on; False where that cannot be said.

    It lasts as long as the process: glibc's own rule, which adapts, cannot be put back.
    """
    set_option = _mallopt()
    if set_option is None:
        return False
    return bool(set_option(_M_TRIM_THRESHOLD, _NEVER)) and bool(set_option(_M_MMAP_MAX, 0))


def can_keep_pages() -> bool:
    """Whether `keep_pages` would do anything here: with glibc."""
    return _mallopt() is not None


def page_faults() -> int:
    """How often this thread was given a page of memory so far; 0 where nobody counts."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    except (ImportError, AttributeError):
        return 0


@functools.cache
def _mallopt() -> ctypes._NamedFuncPointer | None:
    try:
        library = ctypes.CDLL(None)
        # musl has the symbol of neither.
        library.gnu_get_libc_version  # noqa: B018
        function = library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
