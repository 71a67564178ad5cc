"""SimGrid as the peer of ``slipstream bench cluster``, built if it is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.cluster.topology import Float64s
from slipstream.errors import ChildError
from slipstream_bench.systems.cluster.traces import HOSTS, Trace

_SOURCE = Path(__file__).with_name("simgrid.cpp")
_HEADER = Path("/usr/include/simgrid/s4u.hpp")
_LIMIT_S = 600
# Plain max-min sharing: no correction for protocols, no window, maximum precision.
_SETTINGS = (
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "surf/precision:1e-15",
    "maxmin/precision:1e-9",
)


def why_no_peer() -> str | None:
    """Return what is missing to build the SimGrid peer, or None."""
    if not _HEADER.exists():
        return "SimGrid's headers are not installed (Debian: libsimgrid-dev)"
    return None if shutil.which("g++") else "g++ is not installed (needed to build the peer)"


@dataclass(frozen=True)
class Answer:
    """End of each transfer, float64 [transfers], and the CPU time of the simulation."""

    end_s: Float64s
    cpu_s: float


class Peer:
    """A built peer, as a context manager."""

    def __enter__(self) -> Peer:
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-simgrid-")
        self._program = Path(self._folder.name) / "peer"
        command = ["g++", "-O2", "-std=c++17", str(_SOURCE), "-o", str(self._program), "-lsimgrid"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            self._folder.cleanup()
            raise ChildError("the SimGrid peer cannot be built", where=built.stderr[-500:])
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def run(self, trace: Trace) -> Answer:
        """Simulate the trace; every pair of hosts must have one route."""
        path = Path(self._folder.name) / "trace"
        path.write_text("\n".join(_lines(trace)) + "\n")
        command = [str(self._program), str(path), *(f"--cfg={setting}" for setting in _SETTINGS),
                   "--log=root.thresh:error"]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
        if done.returncode:
            raise ChildError("the SimGrid peer failed", where=done.stderr[-500:])
        numbers = np.array(done.stdout.split(), np.float64)
        return Answer(numbers[1:], float(numbers[0]))


def _lines(trace: Trace) -> list[str]:
    hops, links = trace.paths()
    offset = np.concatenate([[0], np.cumsum(hops)])
    capacity = trace.capacity_bytes_per_s
    _, first = np.unique(trace.src * HOSTS + trace.dst, return_index=True)
    lines = [f"{HOSTS} {capacity.size} {first.size} {trace.nbytes.size}"]
    lines += [f"{bandwidth:.17g}" for bandwidth in capacity]
    for n in first.tolist():
        path = " ".join(map(str, links[offset[n] : offset[n + 1]].tolist()))
        lines.append(f"{trace.src[n]} {trace.dst[n]} {hops[n]} {path}")
    lines += [
        f"{at:.17g} {size:.0f} {a} {b}"
        for at, size, a, b in zip(trace.arrival_s, trace.nbytes, trace.src, trace.dst, strict=True)
    ]
    return lines
