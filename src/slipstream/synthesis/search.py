"""The shortest program that meets examples, its rivals, and the inputs that tell them apart."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.durations.durations import cache_folder
from slipstream.errors import SlipstreamError
from slipstream.synthesis.examples import Examples, Inputs
from slipstream.synthesis.fitness import learned
from slipstream.synthesis.guided import MAX_CANDIDATES, GuidedSearch, hashed
from slipstream.synthesis.kernels import MAX_INPUTS, MAX_LENGTH, Found, Task, find_programs, run
from slipstream.synthesis.language import FUNCTIONS, MAX_LIST, Program, Value
from slipstream.tables import Field, Table
from slipstream.units import parse_duration_ns

_PROBES = 192  # fresh inputs on which consistent programs are compared
_IN_SEARCH = 16  # fresh inputs that tell programs apart during the search
_MAX_CONSISTENT = 20_000  # programs that are compared
_EXHAUSTIVE = 5  # up to this length all programs are tried before the search is guided
_EXHAUSTIVE_LIMITED = 3  # likewise with a limit of candidates

Limits = tuple[float, int, int | None]


@dataclass(frozen=True)
class Rival:
    """Programs that meet all examples and agree on fresh inputs.

    Attributes:
        program: the shortest of them.
        weight: share of the consistent programs, each counted as 41 to the power of -length.
    """

    program: Program
    weight: float


@dataclass(frozen=True)
class Synthesis:
    """Programs that meet all examples.

    Attributes:
        rivals: programs that differ on fresh inputs, `probes`; shortest first, then by weight.
        results: hashes of the rivals' results, 0 if invalid, uint64 [rivals, probes].
        found: number of programs tried, and their length.
        limits: maximum seconds, length and candidates of the search.
    """

    rivals: tuple[Rival, ...]
    examples: Examples
    probes: tuple[Inputs, ...]
    found: Found
    limits: Limits
    results: NDArray[np.uint64] = field(repr=False, compare=False)

    @property
    def program(self) -> Program:
        """The shortest program; call it with the inputs."""
        return self.rivals[0].program

    @property
    def confidence(self) -> float:
        """Weight of the program among all consistent ones that were found, 0 to 1."""
        return self.rivals[0].weight

    @property
    def is_minimal(self) -> bool:
        """Whether all shorter programs were tried."""
        return self.found.complete >= len(self.program.functions) - 1

    def ask(self) -> Inputs | None:
        """Return the inputs whose output decides most between rivals; None without any."""
        if len(self.rivals) < 2:
            return None
        weights = np.array([rival.weight for rival in self.rivals])

        def negative_information(probe: int) -> tuple[float, float]:
            # Where a rival is invalid, its function may have no output: such inputs come last.
            valid = self.results[:, probe] != 0
            outcomes = np.unique(self.results[valid, probe], return_inverse=True)[1]
            shares = np.bincount(outcomes.ravel(), weights[valid])
            return float(shares @ np.log(shares / shares.sum())), abs(float(shares.sum()) - 0.5)

        return self.probes[min(range(len(self.probes)), key=negative_information)]

    def answer(self, inputs: Inputs, output: Value) -> Synthesis:
        """Search again with one more example, for instance the inputs of `ask`."""
        old, places = self.examples, (*self.examples.places, "the answer")
        return _search(Examples((*old.inputs, inputs), (*old.outputs, output), places), self.limits)

    def to_json(self) -> dict[str, Any]:
        """Return the program, its rivals and what was searched."""
        rivals = [{"program": str(rival.program), "weight": rival.weight} for rival in self.rivals]
        searched = self.found.candidates / float(len(FUNCTIONS)) ** len(self.program.functions)
        return {
            "program": str(self.program), "python": self.program.python_source, "rivals": rivals,
            "confidence": self.confidence, "minimal": self.is_minimal, "ask": self.ask(),
            "candidates": self.found.candidates, "searched": searched,
            "seconds": self.found.seconds,
        }  # fmt: skip

    def table(self) -> Table:
        """Return a table of the first programs."""
        fields: tuple[Field[Rival], ...] = (
            Field.of("program", lambda rival: str(rival.program)),
            Field.number("length", lambda rival: len(rival.program.functions)),
            Field.number("weight", lambda rival: f"{rival.weight:.0%}"),
        )
        shortest = "no program is shorter" if self.is_minimal else "shorter ones may exist"
        tried = f"{self.found.candidates:,} programs tried in {self.found.seconds:.2g} s"
        notes = [f"{tried}; {shortest}"]
        if (question := self.ask()) is not None:
            shown = f"to decide, add an example with input {', '.join(map(str, question))}"
            notes.append(f"{len(self.rivals)} differ; {shown}")
        return Table.of(self.rivals[:5], fields, "programs that meet all examples", notes)


def from_examples(
    examples: Iterable[tuple[Any, Any]] | str | Path,
    *,
    max_length: int = 8,
    budget: str | float = "30s",
    max_candidates: int | None = None,
) -> Synthesis:
    """Find the shortest program of the list language that meets examples.

    Programs compute on integers from -256 to 255 and lists of at most 20 of them. All programs up
    to length 5 are tried, shortest first, but only one for each state that they reach on the
    examples. Longer ones continue the states with the highest fitness. Ctrl-C ends this part and
    returns what was found.

    Args:
        examples: pairs of an input and an output, an int or a list of ints each; a tuple of inputs
            is several arguments. Or a path to JSON lines with ``input`` and ``output``.
        max_length: maximum number of functions, up to 16.
        budget: time limit, such as ``"30s"``; a number is seconds.
        max_candidates: maximum number of programs tried; None for no limit up to length 5 and
            3 million beyond. With a limit, all are tried only up to length 3 if longer ones are
            allowed.

    Raises:
        SlipstreamError: examples are not in the language or contradictory; no program was found.
            The message names the program that meets the most examples.
    """
    seconds = parse_duration_ns(budget, "budget") / 1e9 if isinstance(budget, str) else budget
    limits = seconds, max(1, min(max_length, MAX_LENGTH)), max_candidates
    if isinstance(examples, str | Path):
        return _search(Examples.load(Path(examples)), limits)
    return _search(Examples.of(examples), limits)


def _search(examples: Examples, limits: Limits) -> Synthesis:
    seconds, max_length, candidates = limits
    generator = np.random.default_rng(0)
    inputs = [*examples.inputs, *examples.probes(_IN_SEARCH, generator)][:MAX_INPUTS]
    is_guided = max_length > _EXHAUSTIVE
    limited = _EXHAUSTIVE if candidates is None else _EXHAUSTIVE_LIMITED
    length = limited if is_guided else max_length
    found = find_programs(
        Task(inputs, examples.outputs), length, max_candidates=candidates or 1 << 62,
        max_seconds=seconds, extra=length, capacity=_MAX_CONSISTENT,
    )  # fmt: skip
    closest = ""
    if not found.programs and is_guided:
        found, closest = _guided(examples, limits, found)
    if not found.programs:
        tried = f"{found.candidates:,} were tried in {found.seconds:.2g} s"
        what = f"no program was found; {tried}, all up to length {found.complete}{closest}"
        raise SlipstreamError(what, remedy="check the examples, or raise budget or maximum length")
    probes = examples.probes(_PROBES, generator)
    results = _results(found.programs, probes)
    # Programs with equal results count as one.
    _, first, group = np.unique(results, axis=0, return_index=True, return_inverse=True)
    lengths = np.array([len(functions) for functions in found.programs])
    weights = np.bincount(group.ravel(), float(len(FUNCTIONS)) ** -lengths)
    order = np.lexsort((-weights, lengths[first]))
    rivals = tuple(
        Rival(Program(found.programs[first[n]], examples.lists), float(weights[n] / weights.sum()))
        for n in order
    )
    return Synthesis(rivals, examples, tuple(probes), found, limits, results[first[order]])


def _results(programs: Iterable[tuple[int, ...]], probes: Sequence[Inputs]) -> NDArray[np.uint64]:
    """Return hashes of results, 0 if invalid, of programs, shortest first: [programs, probes]."""
    tasks = [Task(probes[at : at + MAX_INPUTS]) for at in range(0, len(probes), MAX_INPUTS)]
    blocks = []
    for _, group in itertools.groupby(programs, len):
        rows = np.array([*group], np.uint8)
        parts = (run(task, rows) for task in tasks)
        hashes = [
            hashed(part.lists.reshape(-1, 1, MAX_LIST), part.counts.reshape(-1, 1)).reshape(
                part.counts.shape
            )
            * (part.counts != -2)
            for part in parts
        ]
        blocks.append(np.concatenate(hashes, 1))
    return np.concatenate(blocks)


def _guided(examples: Examples, limits: Limits, before: Found) -> tuple[Found, str]:
    """Continue an exhaustive search; return what was found and a text on the closest program."""
    seconds, max_length, candidates = limits
    limit = MAX_CANDIDATES if candidates is None else candidates - before.candidates
    what = [examples.inputs, examples.outputs, max_length, limit]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    search = GuidedSearch(
        examples, learned, max_length, limit, max_seconds=seconds - before.seconds,
        store=cache_folder() / f"synthesis-{name}.npz",
    )  # fmt: skip
    found = search.run()
    functions, met = search.closest
    text = "; Ctrl-C ended the search" if search.interrupted else ""
    if met:
        text += f"; {Program(functions, examples.lists)} meets {met} of {len(examples.inputs)}"
    return Found(
        found.programs, found.candidates + before.candidates,
        max(found.complete, before.complete), found.seconds + before.seconds,
    ), text  # fmt: skip
