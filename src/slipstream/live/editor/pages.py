"""Live pages of the workloads that the editor shows: of the same analyses, in the same process."""

from __future__ import annotations

import contextlib
import threading

from slipstream.live.analysis import Analyst


class Pages:
    """Serves the page of an analyst from when it is first asked for. Thread-safe."""

    def __init__(self) -> None:
        self._served: dict[int, str] = {}
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()

    def address(self, analyst: Analyst) -> str:
        """Where the page is, with the key of this session.

        Raises:
            SlipstreamError: as `slipstream.live.server.serving`.
        """
        # Here: an editor that shows no page need not wait for what serves it.
        from slipstream.live.server import serving

        with self._lock:
            if id(analyst) not in self._served:
                live = self._open.enter_context(serving(analyst))
                self._served[id(analyst)] = live.address
            return self._served[id(analyst)]

    def close(self) -> None:
        """Serve them no more."""
        with self._lock:
            self._open.close()
            self._served.clear()
