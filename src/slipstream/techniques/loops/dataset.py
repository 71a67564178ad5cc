"""Files of measured schedules: one program per line, with the times of its schedules."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.codegen.compiler import CompileError, compiler
from slipstream.codegen.program import Program
from slipstream.codegen.schedule import Schedule, Tree
from slipstream.errors import ChildError, SlipstreamError
from slipstream.files import opened, read_bytes
from slipstream.techniques.loops.generate import random_program, random_schedule
from slipstream.techniques.loops.running import Runner

# Relative difference of two halves of the calls above which a sample is not used.
MAX_DISAGREEMENT = 0.05
# Sums in float32 are added in different orders.
_MAX_ERROR = 1e-2
_ATTEMPTS = 3
_START = b'{"program":'


@dataclass(frozen=True)
class Measured:
    """A program and the times of its schedules, the first of which is the unscheduled one.

    Attributes:
        ns: minimum CPU time of each schedule, one thread.
        disagreement: relative difference between the minima of two halves of the calls.
    """

    program: Program
    schedules: tuple[Schedule, ...]
    ns: tuple[float, ...]
    disagreement: tuple[float, ...]


def generate_samples(
    path: Path, programs: int, schedules: int, seed: int = 0, budget_s: float = 0.7,
    report: Callable[[str], None] = lambda text: None,
) -> int:  # fmt: skip
    """Append measured programs to a file until it has `programs`; return how many were added.

    Program n is derived from `seed` and n, so that an interrupted call can be repeated.

    Raises:
        CompileError: there is no compiler.
        SlipstreamError: a schedule that was accepted changes a result.
    """
    done = _complete_lines(path) if path.exists() else 0
    added = 0
    with Runner(budget_s) as runner:
        for number in range(done, programs):
            row = _measured(runner, random.Random(f"{seed}:{number}"), schedules)
            with path.open("a") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
            added += 1
            report(f"{number + 1} of {programs} programs")
    return added


def _complete_lines(path: Path) -> int:
    """Drop an incomplete last line, which an interrupted call leaves; return the others' number."""
    content = read_bytes(path)
    end = content.rfind(b"\n") + 1
    rest = content[end:]
    if (
        content[: len(_START)] != _START[: len(content)]
        or rest[: len(_START)] != _START[: len(rest)]
    ):
        raise SlipstreamError(
            "the file exists and does not hold measured programs", where=str(path),
            remedy="name another file",
        )  # fmt: skip
    if rest:
        os.truncate(path, end)
    return content.count(b"\n")


def distinct_schedules(rng: random.Random, program: Program, count: int) -> list[Schedule]:
    """Return the empty schedule and up to `count` random ones with different loop trees."""
    found = {Tree(program).key: Schedule()}
    for _ in range(_ATTEMPTS * count):
        schedule = random_schedule(rng, program)
        found.setdefault(Tree(program, schedule).key, schedule)
        if len(found) > count:
            break
    return list(found.values())


def _measured(runner: Runner, rng: random.Random, count: int) -> dict[str, Any]:
    program = random_program(rng)
    schedules = distinct_schedules(rng, program, count)
    row: dict[str, Any] = {
        "program": program.to_json(), "schedules": [s.to_json() for s in schedules],
        "compiler": compiler().version,
    }  # fmt: skip
    try:
        timings = runner.time(program, schedules)
    except (CompileError, ChildError) as error:
        return row | {"error": str(error)[:300]}
    for schedule, timing in zip(schedules, timings, strict=True):
        if timing.error > _MAX_ERROR:
            raise SlipstreamError(
                f"a schedule changes a result by {timing.error:.2g}", where=str(schedule),
                remedy=f"report this program: {program.key}",
            )  # fmt: skip
    return row | {
        "ns": [t.ns for t in timings],
        "disagreement": [round(t.disagreement, 4) for t in timings],
    }


def read_samples(path: Path) -> Iterator[Measured]:
    """Yield the programs of a file that were measured.

    Raises:
        SlipstreamError: a line is not a measured program; it is named.
    """
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if "error" in row:
                    continue
                yield Measured(
                    Program.from_json(row["program"]),
                    tuple(map(Schedule.from_json, row["schedules"])),
                    tuple(row["ns"]), tuple(row["disagreement"]),
                )  # fmt: skip
            except (SlipstreamError, ValueError, KeyError, TypeError) as error:
                raise SlipstreamError(
                    f"the line is not a measured program ({error})",
                    where=f"{path}:{number}",
                    remedy="delete the line, or generate the file again",
                ) from error
