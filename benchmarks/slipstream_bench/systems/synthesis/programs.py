"""Rows of functions from examples: the language, its speed, and what searches find."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from slipstream.errors import SlipstreamError
from slipstream.native.family import array_pointer
from slipstream.synthesis import Examples, Synthesis, from_examples
from slipstream.synthesis.fitness import learned
from slipstream.synthesis.guided import MAX_CANDIDATES, GuidedSearch
from slipstream.synthesis.kernels import FAMILY, Found, Task, run
from slipstream.synthesis.language import FUNCTIONS, NAMES
from slipstream_bench.harness import times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.synthesis.reference import reference
from slipstream_bench.systems.synthesis.tasks import RandomTask, random_inputs, random_task
from slipstream_bench.systems.synthesis.training import common, edit_distance, groups

_PEER = "SLIPSTREAM_PCCODER"
"""Environment variable with the path of a checkout of PCCoder."""
_QUESTIONS = 5
_MIN_SPEED, _MIN_SPEED_AVX512 = 1.5, 3.0
"""Minimum million programs per second. With AVX2, the same code compiled by GCC is slower."""


def program_rows(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows of functions from examples."""
    yield from _semantics_row(options)
    yield from _speed_rows(options)
    yield from _peer_row(options)
    yield from _search_rows(options)
    yield from _fitness_rows(options)
    yield from _input_row(options)


def _semantics_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "programs: results that differ between kernels and reference"
    if not options.wants(bar, 20):
        return
    options.progress(bar)
    generator = np.random.default_rng(0)
    total, together = 1_000_000 if options.full else 100_000, 5000
    wrong = 0
    for number in range(total // together):
        inputs = [tuple(random_inputs(2, generator)) for _ in range(2)]
        programs = generator.integers(41, size=(together, 1 + number % 10), dtype=np.uint8)
        results = [run(Task(inputs), programs, number=kernel) for kernel in FAMILY.kernels.values()]
        for at, program in enumerate(programs.tolist()):
            expected = [reference(program, values) for values in inputs]
            wrong += any(
                result.value(at, row) != value
                for result in results for row, value in enumerate(expected)
            )  # fmt: skip
    levels = ", ".join(FAMILY.kernels)
    yield at_most(bar, wrong, 0, f"of {total}", n=total, detail=f"lengths 1 to 10; {levels}")


def _runner(
    task: Task, programs: NDArray[np.uint8], kernel: int, threads: int = 1
) -> Callable[[], None]:
    """Return a function that runs programs without storing their results."""
    valid = np.zeros(len(programs), np.bool_)
    return lambda: FAMILY.call(
        "synthesis_run", kernel, ctypes.byref(task.structure), array_pointer(programs),
        len(programs), programs.shape[1], array_pointer(valid), None, None, threads,
    )  # fmt: skip


def _five_examples(generator: np.random.Generator) -> Task:
    return Task([(values,) for values in random_inputs(5, generator)], [0] * 5)


def _speed_rows(options: BenchOptions) -> Iterator[Bar]:
    generator = np.random.default_rng(1)
    task = _five_examples(generator)
    programs = generator.integers(41, size=(400_000, 5), dtype=np.uint8)
    repeats = 15 if options.full else 5
    for level, kernel in FAMILY.kernels.items():
        bar = f"programs: length 5 on 5 examples, {level}"
        if not options.wants(bar, 5):
            continue
        times = times_s(_runner(task, programs, kernel), repeats)
        speed = len(programs) / float(np.median(times)) / 1e6
        detail = f"CPU time, one thread; {min(times):.3g} to {max(times):.3g} s"
        least = _MIN_SPEED_AVX512 if level.startswith("avx512") else _MIN_SPEED
        yield at_least(bar, speed, least, "M/s", n=repeats, detail=detail)
    bar = "programs: two threads over one"
    if options.wants(bar, 5) and FAMILY.kernels:
        kernel = next(iter(FAMILY.kernels.values()))
        single, double = (
            np.array([float(times_s(_runner(task, programs, kernel, n), clock="wall")[0])
                      for _ in range(repeats)])
            for n in (1, 2)
        )  # fmt: skip
        yield at_least(bar, float(np.median(single) / np.median(double)), 1.8, "x", n=repeats,
                       detail="wall time; needs two idle cores")  # fmt: skip


def _peer_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "programs: speed over PCCoder's interpreter"
    if not options.wants(bar, 15):
        return
    folder = os.environ.get(_PEER)
    if folder is None:
        yield not_judged(bar, "x", ">= 300", f"set {_PEER} to a checkout of amitz25/PCCoder")
        return
    options.progress(bar)
    generator = np.random.default_rng(2)
    inputs = random_inputs(5, generator)
    task = Task([(values,) for values in inputs], [0] * 5)
    rows: list[list[int]] = []
    while len(rows) < 20_000:
        row = generator.integers(len(FUNCTIONS) - 2, size=5).tolist()
        if NAMES.index("SEARCH") not in row and _reads_known_numbers(row):
            rows.append(row)
    programs = np.array(rows, np.uint8)
    theirs = _peer(folder, rows[:2000], inputs)
    kernel = next(iter(FAMILY.kernels.values()))
    blocks = [
        (float(times_s(theirs)[0]) / 2000, float(times_s(_runner(task, programs, kernel))[0]) / 2e4)
        for _ in range(5)
    ]
    ratios = [peer / ours for peer, ours in blocks]
    yield at_least(
        bar, float(np.median(ratios)), 300, "x", n=len(ratios),
        detail=f"the same programs of length 5 on 5 examples, CPU time; it runs "
        f"{1 / np.median([peer for peer, _ in blocks]):,.0f} programs/s",
    )  # fmt: skip


def _reads_known_numbers(program: Sequence[int]) -> bool:
    """Whether a number exists before it is read, and two lists before they are zipped."""
    numbers, lists = 0, 1
    for function in program:
        if (function in (9, 37, 38) and not numbers) or (32 <= function <= 36 and lists < 2):
            return False
        numbers, lists = (numbers + 1, lists) if function < 11 else (numbers, lists + 1)
    return True


def _peer(folder: str, programs: list[list[int]], inputs: list[list[int]]) -> Callable[[], None]:
    """Return a function that runs programs in PCCoder's interpreter."""
    sys.path.insert(0, folder)
    try:
        from dsl import function, impl, types  # type: ignore[import-not-found]
        from dsl.program import Program  # type: ignore[import-not-found]
        from dsl.value import Value  # type: ignore[import-not-found]
        from env.statement import Statement  # type: ignore[import-not-found]
    finally:
        sys.path.remove(folder)
    names = {"LAST": "TAIL", "SCANL1": "SCAN1L", "odd": "ODD", "even": "EVEN"}
    ready = []
    for row in programs:
        statements: list[Any] = []
        numbers, lists = [0], [0]
        for at, f in enumerate(row, 1):
            name, _, of = NAMES[f].partition(" ")
            arguments: list[Any] = [impl.NAME2FUNC[names.get(of, of)]] if of else []
            arguments += [numbers[-1]] if f in (9, 37, 38) else []
            arguments += lists[-2:] if name == "ZIPWITH" else lists[-1:]
            statements.append(Statement(impl.NAME2FUNC[names.get(name, name)], arguments))
            (numbers if f < 11 else lists).append(at)
        ready.append(Program([types.LIST], statements))
    values = [Value.construct(row) for row in inputs]
    invalid = function.OutputOutOfRangeError, function.NullInputError

    def run_all() -> None:
        for program in ready:
            try:
                for value in values:
                    program(value)
            except invalid:
                pass

    return run_all


def _search_rows(options: BenchOptions) -> Iterator[Bar]:
    for length, consistent, right in ((5, 100, 60), (7, 92, 35), (10, 88, None)):
        prefix = f"programs: length {length}"
        if not options.wants(f"{prefix}, tasks solved", 60):
            continue
        number = 200 if options.full else 20
        generator = np.random.default_rng(length)
        solved, fresh, answered, longest, candidates = 0, 0, 0, 0.0, []
        for at in range(number):
            options.progress(f"{prefix}: task {at + 1} of {number}")
            task = random_task(length, generator, is_list=at % 2 == 0, irreducible=True)
            found: list[Synthesis] = []

            longest = max(
                longest, float(times_s(partial(_search, task, length, found), settle=0)[0])
            )
            if not found:
                continue
            solved += 1
            candidates.append(found[0].found.candidates)
            inputs = random_inputs(200, generator)
            is_right = _is_right(found[0], task, inputs)
            fresh += is_right
            answered += is_right or _asked(found[0], task, inputs)
        tried = f"{number} tasks, half of them lists, without a solution of length 4"
        detail = f"{tried}; at most {longest:.2g} s; {np.mean(candidates or [0]):,.0f} candidates"
        detail += f", {np.mean(candidates or [0]) / 41.0**length:.2g} of the space"
        share = 100 / number
        yield at_least(f"{prefix}, tasks solved", solved * share, consistent, "%", n=number,
                       detail=detail)  # fmt: skip
        if length == 5:
            yield at_most(f"{prefix}, longest search", longest, 3, "s", n=number)
        if right is not None:
            bar = f"{prefix}, right on 200 fresh inputs"
            yield at_least(bar, fresh * share, right, "%", n=number, detail=tried)
            bar = f"{prefix}, right after up to {_QUESTIONS} questions"
            yield at_least(bar, answered * share, 95, "%", n=number, detail=tried)


def _fitness_rows(options: BenchOptions) -> Iterator[Bar]:
    number = 100 if options.full else 6
    for length in (7, 10):
        bar = f"programs: length {length}, learned fitness over edit distance"
        if not options.wants(bar, 12 * number):
            continue
        generator = np.random.default_rng(length)
        solved = np.zeros(3)
        seconds = []
        for at in range(number):
            options.progress(f"{bar}: task {at + 1} of {number}")
            task = random_task(length, generator, is_list=at % 2 == 0, irreducible=True)
            examples = Examples.of(task.pairs)
            found: list[Found] = []
            for fitness in (learned, edit_distance):
                search = GuidedSearch(examples, fitness, length, max_seconds=600)
                time = times_s(partial(_append, found, search), settle=0)
                seconds.append(float(time[0]) / found[-1].candidates)
            more = int(MAX_CANDIDATES * max(1, seconds[-2] / seconds[-1]))
            search = GuidedSearch(examples, edit_distance, length, more, max_seconds=600)
            found.append(found[1] if found[1].programs else search.run())
            solved += [bool(result.programs) for result in found]
        learned_rate, edit_rate, timed_rate = solved * 100 / number
        ratio = float(np.median(np.array(seconds[::2]) / seconds[1::2]))
        shown = f"{learned_rate:.0f} % of {number} tasks solved; with edit distance"
        yield at_least(f"{bar}, equal candidates", learned_rate - edit_rate, 5, "points", n=number,
                       detail=f"{shown} {edit_rate:.0f} %; at most 3 M each")  # fmt: skip
        yield at_least(f"{bar}, equal CPU time", learned_rate - timed_rate, 5, "points", n=number,
                       detail=f"{shown} {timed_rate:.0f} %, with {ratio:.2g} times the candidates"
                       )  # fmt: skip
    yield from _rank_row(options)


def _append(found: list[Found], search: GuidedSearch) -> None:
    found.append(search.run())


def _rank_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "programs: rank correlation of fitness and shared functions, programs of one length"
    if not options.wants(bar, 10):
        return
    generator = np.random.default_rng(7)
    correlations = [
        [float(spearmanr(fitness(states, goal), shared).statistic)
         for fitness in (learned, edit_distance)]
        for at in range(400 if options.full else 100)
        for goal, (states, target) in groups(generator, is_list=at % 2 == 0)
        if len(set(shared := common(states.programs, target))) > 1
    ]  # fmt: skip
    # A fitness that is equal for all programs ranks none of them.
    ours, edit = np.nan_to_num(correlations).mean(0).tolist()
    detail = f"mean over groups of 16 programs; edit distance {edit:.2f}"
    yield at_least(bar, ours, 0.6, "", n=len(correlations), detail=detail)


def _search(task: RandomTask, length: int, found: list[Synthesis]) -> None:
    """Append the program that is found, if any."""
    limit = None if length <= 5 else 3_000_000
    with suppress(SlipstreamError):
        found.append(
            from_examples(task.pairs, max_length=length, budget="300s", max_candidates=limit)
        )


def _is_right(found: Synthesis, task: RandomTask, inputs: list[list[int]]) -> bool:
    def result(program: Callable[..., Any], values: list[int]) -> object:
        try:
            return program(values)
        except SlipstreamError:
            return None

    expected = [result(task.truth, values) for values in inputs]
    return all(
        value is None or result(found.program, values) == value
        for values, value in zip(inputs, expected, strict=True)
    )


def _asked(found: Synthesis, task: RandomTask, inputs: list[list[int]]) -> bool:
    """Whether answers to questions lead to a program that is right on all inputs."""
    for _ in range(_QUESTIONS):
        question = found.ask()
        if question is None:
            return False
        try:
            found = found.answer(question, task.truth(*question))
        except SlipstreamError:
            return False
        if _is_right(found, task, inputs):
            return True
    return False


def _input_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "programs: longest check of examples that are refused"
    if not options.wants(bar, 1):
        return
    refused: list[list[tuple[Any, Any]]] = [
        [([1], 1), ([1], 2)], [([1, 300], 1)], [([1], 1), (1, 1)], [],
    ]  # fmt: skip

    def check(pairs: list[tuple[Any, Any]]) -> None:
        try:
            from_examples(pairs)
        except SlipstreamError:
            return
        raise RuntimeError("the examples were not refused")

    times = [1e3 * float(times_s(lambda pairs=pairs: check(pairs))[0]) for pairs in refused]  # type: ignore[misc]
    yield at_most(bar, max(times), 100, "ms", n=len(times),
                  detail="contradictory, out of range, of two types, none")  # fmt: skip
