"""The scheduler of zero-skipping lanes as Verilog, with test vectors and a Verilator test bench."""

from __future__ import annotations

import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError
from slipstream.files import temporary_folder, write_text
from slipstream.hardware.accelerator import FrontEnd
from slipstream.hardware.kernels import schedule

MODULE = "zero_skipping_scheduler"
_TIMEOUT_S = 400.0


def verilog(frontend: FrontEnd, lanes: int) -> str:
    """Return a combinational module that schedules one cycle.

    ``row0`` to ``rowN`` are the window, bit i of a row for lane i; ``select`` has the number of the
    option that each lane takes, or the number of options for none, lane 0 in the lowest bits;
    ``advance`` is the number of rows by which the window advances.
    """
    options, depth = frontend.options, frontend.lookahead + 1
    width = len(options).bit_length()
    lines = [f"module {MODULE} ("]
    lines += [f"  input [{lanes - 1}:0] row{row}," for row in range(depth)]
    lines += [f"  output [{width - 1}:0] select{lane}," for lane in range(lanes)]
    lines += [f"  output [{depth.bit_length() - 1}:0] advance", ");"]
    for row in range(depth):
        lines.append(f"  wire [{lanes - 1}:0] z0_{row} = row{row};")
    levels = frontend.levels(lanes)
    for number, level in enumerate(levels):
        takers: dict[tuple[int, int], str] = {}
        for lane in (lane for lane in range(lanes) if level >> lane & 1):
            choice = f"{width}'d{len(options)}"
            pairs = [(row, (lane + distance) % lanes) for row, distance in options]
            for option, (row, place) in reversed(list(enumerate(pairs))):
                choice = f"z{number}_{row}[{place}] ? {width}'d{option} : ({choice})"
                takers[row, place] = f"(select{lane} == {width}'d{option})"
            lines.append(f"  assign select{lane} = {choice};")
        for row in range(depth):
            # The highest bit comes first in a concatenation.
            bits = [
                f"z{number}_{row}[{place}]"
                + (f" & ~{takers[row, place]}" if (row, place) in takers else "")
                for place in reversed(range(lanes))
            ]
            lines.append(f"  wire [{lanes - 1}:0] z{number + 1}_{row} = {{{', '.join(bits)}}};")
    advance = str(depth)
    for row in reversed(range(1, depth)):
        advance = f"(|z{len(levels)}_{row}) ? {row} : ({advance})"
    return "\n".join([*lines, f"  assign advance = {advance};", "endmodule", ""])


def corner_and_random_windows(
    frontend: FrontEnd, lanes: int, count: int, seed: int = 0
) -> NDArray[np.uint64]:
    """Return uint64 [count, lookahead + 1]: corners first, then random windows of five densities.

    Corners are windows with no, one or two pairs, with all but one, and full ones.
    """
    depth = frontend.lookahead + 1
    places = [(row, lane) for row in range(depth) for lane in range(lanes)]
    chosen = [(), *((place,) for place in places), *combinations(places, 2)]
    corners = np.zeros((len(chosen) + len(places) + 1, depth), np.uint64)
    for window, pairs in zip(corners, chosen, strict=False):
        for row, lane in pairs:
            window[row] |= np.uint64(1 << lane)
    full = np.uint64((1 << lanes) - 1)
    corners[len(chosen) :] = full
    for window, (row, lane) in zip(corners[len(chosen) :], places, strict=False):
        window[row] ^= np.uint64(1 << lane)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 2**64, (4, max(count - len(corners), 0), depth), np.uint64)
    mixed = np.stack([
        drawn[0], drawn[0] & drawn[1], drawn[0] | drawn[1], drawn[0] & drawn[1] & drawn[2],
        drawn[0] | drawn[1] | drawn[3],
    ])  # fmt: skip
    which = np.arange(mixed.shape[1])
    return np.concatenate([corners, mixed[which % 5, which] & full])[:count]


def write_rtl(folder: Path, frontend: FrontEnd, lanes: int, vectors: int) -> list[Path]:
    """Write the module, a test bench and test vectors; return the files.

    A vector is the rows of the window (uint64), the option of each lane and the advance (uint8).

    Raises:
        SlipstreamError: the folder or a file cannot be written.
    """
    windows = corner_and_random_windows(frontend, lanes, vectors)
    selects, advance = schedule(frontend, lanes, windows)
    row = np.dtype([
        ("window", "<u8", windows.shape[1]), ("select", "u1", lanes), ("advance", "u1")
    ])  # fmt: skip
    table = np.empty(len(windows), row)
    table["window"], table["select"], table["advance"] = windows, selects, advance
    files = [folder / f"{MODULE}.v", folder / "test_bench.cpp", folder / "vectors.bin"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files[2].write_bytes(table.tobytes())
    except OSError as error:
        raise SlipstreamError(
            f"the files cannot be written: {error.strerror}", where=str(folder),
            remedy="choose another folder",
        ) from error  # fmt: skip
    write_text(files[0], verilog(frontend, lanes))
    write_text(files[1], _test_bench(frontend, lanes))
    return files


def cosimulate(frontend: FrontEnd, lanes: int, vectors: int) -> int:
    """Return the number of windows that the Verilog and the model schedule differently.

    Raises:
        SlipstreamError: Verilator is not installed, or cannot compile or run the module.
    """
    program = shutil.which("verilator")
    if program is None:
        raise SlipstreamError("Verilator is not installed", remedy="apt install verilator")
    with temporary_folder("rtl") as folder:
        module, bench, table = write_rtl(folder, frontend, lanes, vectors)
        _run(
            [program, "--cc", "--exe", "--build", "-O3", "-Wno-fatal", "--top-module", MODULE,
             "--Mdir", str(folder / "obj"), str(module), str(bench)]
        )  # fmt: skip
        return int(_run([str(folder / "obj" / f"V{MODULE}"), str(table)]))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlipstreamError(f"{Path(command[0]).name} failed: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise SlipstreamError(f"{Path(command[0]).name} failed: {lines[0]}")
    return done.stdout


def _test_bench(frontend: FrontEnd, lanes: int) -> str:
    depth = frontend.lookahead + 1
    inputs = " ".join(f"top.row{row} = window[{row}];" for row in range(depth))
    checks = " && ".join(f"top.select{lane} == bytes[{lane}]" for lane in range(lanes))
    return f"""// Prints the number of mismatches in a file of vectors: uint64 window[{depth}],
// uint8 select[{lanes}], uint8 advance.
#include <cstdint>
#include <cstdio>

#include "V{MODULE}.h"
#include "verilated.h"

double sc_time_stamp() {{ return 0; }}

int main(int argc, char** argv) {{
  std::FILE* file = argc > 1 ? std::fopen(argv[1], "rb") : nullptr;
  if (!file) return 1;
  V{MODULE} top;
  uint64_t window[{depth}];
  uint8_t bytes[{lanes + 1}];
  long mismatches = 0;
  while (std::fread(window, sizeof window, 1, file) == 1 &&
         std::fread(bytes, sizeof bytes, 1, file) == 1) {{
    {inputs}
    top.eval();
    mismatches += !({checks} && top.advance == bytes[{lanes}]);
  }}
  std::printf("%ld\\n", mismatches);
  return 0;
}}
"""
