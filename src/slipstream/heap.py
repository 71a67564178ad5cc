"""The C library's heap: retain freed pages, and count page faults.

glibc returns large freed blocks to the system. Allocating them again costs a page fault per 4 KiB:
the kernel finds a page, fills it with zeros and maps it. A training step frees and allocates the
same memory every time; see ``malloc_trim(3)`` and ``mallopt(3)``.
"""

from __future__ import annotations

import ctypes
import functools

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1

KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 46), "MALLOC_MMAP_MAX_": "0"}
"""Environment variables under which a program retains its pages from the start."""


def keep_pages() -> bool:
    """Make this process retain freed pages; returns whether the C library supports it.

    This cannot be undone: glibc's adaptive thresholds cannot be restored.
    """
    set_option = _mallopt()
    if set_option is None:
        return False
    return bool(set_option(_M_TRIM_THRESHOLD, _NEVER)) and bool(set_option(_M_MMAP_MAX, 0))


def can_keep_pages() -> bool:
    """Whether `keep_pages` has an effect here, which requires glibc."""
    return _mallopt() is not None


def page_faults() -> int:
    """Return the number of minor page faults of this thread; 0 if they are not counted."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    except (ImportError, AttributeError):
        return 0


@functools.cache
def _mallopt() -> ctypes._NamedFuncPointer | None:
    try:
        library = ctypes.CDLL(None)
        # musl has neither symbol.
        library.gnu_get_libc_version  # noqa: B018
        function = library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
