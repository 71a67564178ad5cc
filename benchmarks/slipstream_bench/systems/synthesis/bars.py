"""``slipstream bench synthesis``: programs found by search."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream_bench.rows import Bar, BenchOptions
from slipstream_bench.systems.synthesis.programs import program_rows
from slipstream_bench.systems.synthesis.rewrites import rewrite_rows


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes three minutes: fewer programs, tasks, near misses and blocks."""
    yield from program_rows(options)
    yield from rewrite_rows(options)
