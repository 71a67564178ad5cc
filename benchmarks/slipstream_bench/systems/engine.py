"""``slipstream bench engine``: speed and exactness of the event engine.

Times are CPU time of one thread. Rows without a comparison report the minimum of the repeats and
the median.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from slipstream.native import (
    CycleError,
    Edges,
    Policy,
    Program,
    Schedule,
    library,
    quantize_ns,
    why_no_library,
)
from slipstream_bench.harness import guarded, paired, times_s
from slipstream_bench.programs import large_program, random_program, seeded
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, for_all_seeds, not_judged

Floats = npt.NDArray[np.float64]

_TASKS = 10**6
_EXACT_FULL, _EXACT_QUICK = 1000, 200


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows.

    Quick takes less than a minute: 200 random programs per exact property instead of 1,000, fewer
    repeats and fewer edits; the speed bars keep their full size.
    """
    if library() is None:
        yield not_judged("native engine", "", "available", str(why_no_library()))
        return
    yield from _speed_rows(options)
    yield from _growth_rows(options)
    yield from _python_rows(options)
    yield from _resimulation_rows(options)
    yield from _bandwidth_row(options)
    yield from _exact_rows(options)


def _simulation_s(program: Program, repeats: int) -> Floats:
    """Return seconds of each pass, [repeats]."""
    return times_s(program.compile("native").simulate, repeats)


def _spread(times: Floats) -> str:
    over = float(np.median(times) / times.min())
    return f"minimum of {len(times)}, median {over:.2f}x of it"


# ---- speed ------------------------------------------------------------------------------------


def _speed_rows(options: BenchOptions) -> Iterator[Bar]:
    repeats = 15 if options.full else 7
    cases = [
        ("fixed order, random edges", Policy.FIXED, None, 20.0),
        ("fixed order, trace-like edges", Policy.FIXED, 256, 20.0),
        ("priority lanes, random edges", Policy.PRIORITY, None, 4.0),
        ("priority lanes, trace-like edges", Policy.PRIORITY, 256, 4.0),
        ("preemptive lanes, trace-like edges", Policy.PREEMPTIVE, 256, None),
        ("first-in-first-out lanes, trace-like edges", Policy.FIFO, 256, None),
    ]
    for name, policy, locality, target in cases:
        bar = f"speed: {name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        times = _simulation_s(large_program(_TASKS, policy=policy, locality=locality), repeats)
        speed = _TASKS / float(times.min()) / 1e6
        detail = f"10^6 tasks, 32 lanes, 2*10^6 dependencies, one thread; {_spread(times)}"
        if target is None:
            yield Bar(bar, speed, "M tasks/s", "reported", None, repeats, f"no bar; {detail}")
        else:
            yield at_least(bar, speed, target, "M tasks/s", n=repeats, detail=detail)


def _growth_rows(options: BenchOptions) -> Iterator[Bar]:
    sizes = (10**4, 10**5, 10**6)
    for name, policy in (("fixed order", Policy.FIXED), ("priority lanes", Policy.PRIORITY)):
        bar = f"cost exponent, 10^4 to 10^6 tasks: {name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        times = [
            float(_simulation_s(large_program(size, policy=policy), 3 * 10**6 // size + 6).min())
            for size in sizes
        ]
        slope = float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
        speeds = ", ".join(f"{size / s / 1e6:.1f}" for size, s in zip(sizes, times, strict=True))
        detail = f"log-log slope over three sizes, trace-like edges; {speeds} M tasks/s"
        yield at_most(bar, slope, 1.25, "", n=len(sizes), detail=detail)


def _python_rows(options: BenchOptions) -> Iterator[Bar]:
    tasks = 10**5 if options.full else 3 * 10**4
    for name, policy in (("fixed order", Policy.FIXED), ("priority lanes", Policy.PRIORITY)):
        bar = f"native against Python: {name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        program = large_program(tasks, policy=policy)
        arms = {
            "native": program.compile("native").simulate,
            "Python": program.compile("python").simulate,
        }
        taken = paired(arms, blocks=8)
        speed = tasks / taken.median_s("Python") / 1e6
        detail = f"the same {tasks} tasks in one run; Python {speed:.2f} M tasks/s"
        yield taken.ratio("Python", "native").at_least(bar, 10.0, detail=detail)


# ---- re-simulation ----------------------------------------------------------------------------


def _resimulation_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare two kinds of edits of 1 % of the tasks.

    *A module's tasks*: the result of selecting a layer, one interval of the forward pass and one of
    the backward pass, across all lanes. *Scattered tasks*: the result of selecting one kind of
    operation everywhere, here every 100th task. Each moves everything after it by another amount,
    so nearly all times change differently, and a full pass is run.
    """
    module = "re-simulation of 1 % of tasks: a module"
    written = "re-simulation of 1 % of tasks: a module, timeline written out"
    scattered = "re-simulation of 1 % of tasks: scattered"
    if not any(map(options.wants, (module, written, scattered))):
        return
    options.progress(module)
    edits = 100 if options.full else 20
    compiled = large_program(_TASKS).compile("native")
    base = compiled.simulate()
    compiled.resimulate([0], [1.0], base=base)  # builds the tables of the plan
    full_s = float(times_s(compiled.simulate, 7).min())
    rng = np.random.default_rng(0)

    def cost(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[float, float, float, bool]:
        new = quantize_ns(base.duration_ns[ids] * rng.uniform(0.3, 1.5))
        arms: dict[str, Callable[[], object]] = {
            "brief": lambda: compiled.resimulate(ids, new, base=base),
            "written": lambda: _written(compiled.resimulate(ids, new, base=base)),
            "full": compiled.simulate,
        }
        taken = paired(arms, blocks=5, settle_s=0.0, once=True)
        edited = compiled.resimulate(ids, new, base=base)
        duration = base.duration_ns.copy()
        duration[ids] = new
        same = _same_bits(edited, compiled.simulate(duration))
        brief, whole = (taken.ratio(arm, "full").value for arm in ("brief", "written"))
        return brief, whole, edited.recomputed_tasks / _TASKS, same

    half = _TASKS // 200
    costs = []
    for _ in range(edits):
        first = int(rng.integers(0, _TASKS // 2 - half))
        forward = np.arange(first, first + half)
        costs.append(cost(np.concatenate([forward, _TASKS - 1 - forward[::-1]])))
    ratios, whole_ratios, shares, same = (list(column) for column in zip(*costs, strict=True))
    detail = (
        f"90th percentile of {edits} edits, share of a full pass ({full_s * 1e3:.1f} ms); median "
        f"{100 * statistics.median(ratios):.0f} %, {100 * statistics.median(shares):.1f} % of "
        f"tasks recomputed; {sum(same)} of {edits} equal a full pass to the bit; gives makespan "
        "and step times, the timeline is written when read"
    )
    worst = 100 * float(np.quantile(ratios, 0.9))
    if options.wants(module):
        row = at_most(
            module, worst, 20.0, "% of a full pass", n=edits, detail=detail, data={"shares": ratios}
        )
        yield row if all(same) else replace(row, holds=False)
    if options.wants(written):
        yield Bar(
            written,
            100 * float(np.quantile(whole_ratios, 0.9)),
            "% of a full pass",
            "reported",
            None,
            edits,
            "no bar: as the row above, but reads start and end of all 10^6 tasks, which moves "
            "more than half of the bytes of a full pass",
        )
    if options.wants(scattered):
        costs = [cost(rng.choice(_TASKS, _TASKS // 100, replace=False)) for _ in range(edits // 5)]
        yield Bar(
            scattered,
            100 * float(np.quantile([ratio for ratio, *_ in costs], 0.9)),
            "% of a full pass",
            "reported",
            None,
            len(costs),
            "no bar: every 100th task moves all later ones by another amount, so all times change "
            "and a full pass is run",
        )


def _written(schedule: Schedule) -> tuple[object, object]:
    return schedule.start_ns, schedule.end_ns


def _bandwidth_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "fixed order against memory bandwidth"
    if not options.wants(bar):
        return
    options.progress(bar)
    source, target = np.ones(8 * _TASKS), np.ones(8 * _TASKS)
    arms: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, source),
        "simulate": large_program(_TASKS).compile("native").simulate,
    }
    taken = paired(arms, blocks=9)
    copy_bytes_per_s = 2 * source.nbytes / taken.median_s("copy")
    # Per task: lane 4, row offset 4, one predecessor 4, duration 8, its end gathered 8; start 8 and
    # end 8 written.
    moved = 44 * _TASKS / taken.median_s("simulate")
    ratio = taken.ratio("copy", "simulate")
    share = 100 * ratio.value * 44 * _TASKS / (2 * source.nbytes)
    detail = (
        f"no bar; 44 bytes per task make {moved / 1e9:.1f} GB/s; a copy runs at "
        f"{copy_bytes_per_s / 1e9:.1f} GB/s"
    )
    row = Bar(bar, share, "% of copy speed", "reported", None, ratio.n, detail)
    yield guarded(row, {"copy over simulate": ratio})


# ---- exact properties -------------------------------------------------------------------------


def _exact_rows(options: BenchOptions) -> Iterator[Bar]:
    properties: list[tuple[str, Callable[[np.random.Generator], bool]]] = [
        ("(a) identity edit gives byte-equal timeline", identity_edit_changes_nothing),
        ("(b) makespan >= longest path and busy time", makespan_is_bounded_below),
        ("(c) fixed order: shorter task, no longer makespan", shorter_is_never_longer),
        ("(d) insert then remove restores the timeline", insert_then_remove_restores),
        ("(f) acyclic, or a cycle is named", acyclic_or_named_cycle),
        ("native equals Python to the bit", native_equals_python),
        ("re-simulation equals a full pass to the bit", resimulation_equals_full_pass),
    ]
    yield from for_all_seeds(
        options,
        "exact",
        [(name, seeded(holds)) for name, holds in properties],
        quick=_EXACT_QUICK,
        full=_EXACT_FULL,
        detail="random programs: all policies, lags, delays, gaps, resources, memory",
    )


def _same_bits(a: Schedule, b: Schedule) -> bool:
    return (
        a.start_ns.tobytes() == b.start_ns.tobytes()
        and a.end_ns.tobytes() == b.end_ns.tobytes()
        and a.step_end_ns.tobytes() == b.step_end_ns.tobytes()
        and a.makespan_ns == b.makespan_ns
    )


def _same_memory(a: Schedule, b: Schedule) -> bool:
    pairs = zip(
        (a.memory.birth_ns, a.memory.death_ns, a.memory.peak_bytes, a.memory.peak_time_ns),
        (b.memory.birth_ns, b.memory.death_ns, b.memory.peak_bytes, b.memory.peak_time_ns),
        strict=True,
    )
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def identity_edit_changes_nothing(rng: np.random.Generator) -> bool:
    """Re-simulation without a change and a copied program give the same bytes."""
    program = random_program(rng, fixed=bool(rng.integers(2)), on_grid=bool(rng.integers(2)))
    compiled = program.compile()
    base = compiled.simulate()
    every = np.arange(program.tasks)
    return (
        _same_bits(base, compiled.resimulate([], [], base=base))
        and _same_bits(base, compiled.resimulate(every, program.duration_ns, base=base))
        and _same_bits(base, replace(program).compile().simulate())
    )


def makespan_is_bounded_below(rng: np.random.Generator) -> bool:
    """No schedule is shorter than its longest path of dependencies or its busiest lane."""
    program = random_program(rng)
    result = program.compile().simulate()
    busy = float(result.lane_busy_ns.max(initial=0.0))
    return result.makespan_ns >= longest_path_ns(program) and result.makespan_ns >= busy


def longest_path_ns(program: Program) -> float:
    """Return the longest path over the edges of all steps, without lanes or the engine."""
    edges = program.edges
    columns = (edges.src, edges.dst, edges.delay_ns, edges.lag)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    sorter = TopologicalSorter[int]({task: [] for task in range(program.tasks)})
    for src, dst, _, lag in rows:
        if lag == 0:
            sorter.add(dst, src)
    order = list(sorter.static_order())
    preds: dict[int, list[tuple[int, float, int]]] = {task: [] for task in order}
    for src, dst, delay, lag in rows:
        preds[dst].append((src, delay, lag))
    before: dict[int, float] = {}
    longest = 0.0
    for _ in range(program.steps):
        end: dict[int, float] = {}
        for task in order:
            releases = [(before if lag else end).get(s, -math.inf) + d for s, d, lag in preds[task]]
            end[task] = max(releases, default=0.0)
            end[task] = max(end[task], 0.0) + float(program.duration_ns[task])
            longest = max(longest, end[task])
        before = end
    return longest


def shorter_is_never_longer(rng: np.random.Generator) -> bool:
    """On fixed-order lanes the makespan is monotonic in every duration."""
    program = random_program(rng, fixed=True, on_grid=False)
    compiled = program.compile()
    shorter = program.duration_ns.copy()
    shorter[rng.integers(program.tasks)] *= rng.random()
    return compiled.simulate(shorter).makespan_ns <= compiled.simulate().makespan_ns


def insert_then_remove_restores(rng: np.random.Generator) -> bool:
    """Inserting a task on an edge, or without one, and removing it restores the timeline."""
    program = random_program(rng)
    result = program.compile().simulate()
    longer = insert_task(program, rng)
    longer.compile().simulate()
    restored = remove_task(longer, longer.tasks - 1)
    return _same_bits(result, restored.compile().simulate())


def insert_task(program: Program, rng: np.random.Generator) -> Program:
    """Return a copy with one more task, the last, on a random edge of the step if there is one."""
    edges = program.edges
    new = program.tasks
    within = np.flatnonzero(edges.lag == 0)
    chosen = within[:0] if within.size == 0 else rng.choice(within, 1)
    # A separate lane, so that no lane's fixed order can close a cycle.
    return Program(
        lane=np.append(program.lane, program.lanes),
        duration_ns=np.append(program.duration_ns, 1.0),
        gap_ns=np.append(program.gap_ns, 0.0),
        priority=np.append(program.priority, 0),
        policies=np.append(program.policies, Policy.FIFO),
        quantum_ns=np.append(program.quantum_ns, 0.0),
        edges=Edges(
            np.concatenate([edges.src, edges.src[chosen], np.full(chosen.size, new)]),
            np.concatenate([edges.dst, np.full(chosen.size, new), edges.dst[chosen]]),
            np.concatenate([edges.delay_ns, edges.delay_ns[chosen], np.zeros(chosen.size)]),
            np.concatenate([edges.lag, np.zeros(2 * chosen.size, np.uint8)]),
        ),
        steps=program.steps,
        resources=program.resources,
    )


def remove_task(program: Program, task: int) -> Program:
    """Return a copy without the last task, with its predecessors linked to its successors."""
    edges = program.edges
    enters, leaves = np.flatnonzero(edges.dst == task), np.flatnonzero(edges.src == task)
    before, after = (grid.ravel() for grid in np.meshgrid(enters, leaves))
    retained = (edges.src != task) & (edges.dst != task)
    return Program(
        lane=program.lane[:task],
        duration_ns=program.duration_ns[:task],
        gap_ns=program.gap_ns[:task],
        priority=program.priority[:task],
        policies=program.policies,
        quantum_ns=program.quantum_ns,
        edges=Edges(
            np.concatenate([edges.src[retained], edges.src[before]]),
            np.concatenate([edges.dst[retained], edges.dst[after]]),
            np.concatenate(
                [edges.delay_ns[retained], edges.delay_ns[before] + edges.delay_ns[after]]
            ),
            np.concatenate([edges.lag[retained], edges.lag[before] | edges.lag[after]]),
        ),
        steps=program.steps,
        resources=program.resources,
    )


def acyclic_or_named_cycle(rng: np.random.Generator) -> bool:
    """Either the schedule respects every edge, or the named tasks wait for each other."""
    program = random_program(rng, acyclic=False)
    edges = program.edges
    within = edges.lag == 0
    src, dst = edges.src[within], edges.dst[within]
    try:
        result = program.compile().simulate()
    except CycleError as error:
        gates = set(zip(src.tolist(), dst.tolist(), strict=True))
        for lane in np.flatnonzero(program.policies == Policy.FIXED):
            on_lane = np.flatnonzero(program.lane == lane).tolist()
            gates |= set(itertools.pairwise(on_lane))
        cycle = error.tasks
        return all(pair in gates for pair in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    released = result.end_ns[:, src] + edges.delay_ns[within]
    return bool(np.all(result.start_ns[:, dst] >= released))


def native_equals_python(rng: np.random.Generator) -> bool:
    """Both engines give the same timelines and memory."""
    program = random_program(rng, on_grid=bool(rng.integers(2)))
    native, python = program.compile("native").simulate(), program.compile("python").simulate()
    return _same_bits(native, python) and _same_memory(native, python)


def resimulation_equals_full_pass(rng: np.random.Generator) -> bool:
    """Several edited durations in a row give the result of full passes."""
    compiled = random_program(rng, fixed=True, on_grid=bool(rng.integers(2))).compile()
    base = compiled.simulate()
    for _ in range(3):
        ids = rng.permutation(compiled.program.tasks)[: rng.integers(0, 10)]
        duration = base.duration_ns.copy()
        duration[ids] = rng.integers(0, 9, ids.size)
        base = compiled.resimulate(ids, duration[ids], base=base)
        if not _same_bits(base, compiled.simulate(duration)):
            return False
    return True
