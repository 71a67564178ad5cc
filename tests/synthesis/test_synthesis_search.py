"""Functions from examples: minimal programs, rivals, questions, and what is not an example."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream as ss
from slipstream.errors import SlipstreamError
from slipstream.synthesis import search as searching
from slipstream.synthesis.examples import Examples
from slipstream.synthesis.fitness import Fitness, Goal, States, learned
from slipstream.synthesis.guided import GuidedSearch, start
from slipstream.synthesis.kernels import Task, run
from slipstream.synthesis.language import NAMES
from slipstream_bench.systems.synthesis.tasks import random_task
from slipstream_bench.systems.synthesis.training import edit_distance, groups


def test_programs_meet_the_examples_and_none_is_shorter() -> None:
    generator = np.random.default_rng(0)
    for number in range(10):
        task = random_task(4, generator, is_list=number % 2 == 0)
        found = ss.synth.from_examples(task.pairs, max_length=4)
        assert all(found.program(inputs) == output for inputs, output in task.pairs)
        assert found.is_minimal
        native = Task([(inputs,) for inputs, _ in task.pairs])
        for length in range(1, len(found.program.functions)):
            every = np.array(list(itertools.product(range(41), repeat=length)), np.uint8)
            results = run(native, every)
            for row in np.flatnonzero(results.valid):
                assert any(results.value(row, e) != pair[1] for e, pair in enumerate(task.pairs))


def test_all_programs_that_differ_are_rivals_and_a_question_decides() -> None:
    def function(values: list[int]) -> int:
        return max(values, default=0)

    found = ss.synth.from_examples([([1, 2, 3], 3), ([4, 5], 5)])
    assert {"LAST", "MAXIMUM"} <= {str(rival.program) for rival in found.rivals}
    assert found.confidence < 1
    for _ in range(5):
        question = found.ask()
        if question is None:
            break
        results = {rival.program(*question) for rival in found.rivals[:2]}
        assert results
        found = found.answer(question, function(*question))  # type: ignore[arg-type]
    assert str(found.program) == "MAXIMUM"


def test_no_question_is_repeated() -> None:
    found = ss.synth.from_examples([([1, 2, 3], [1, 4, 9])], max_length=3)
    questions: list[Any] = []
    # The last rivals agree wherever all of them are valid.
    while (question := found.ask()) is not None:
        assert question not in questions
        questions.append(question)
        found = found.answer(question, [value**2 for value in question[0]])  # type: ignore[union-attr]
    assert str(found.program) == "MAP **2"


def test_longer_programs_that_meet_the_examples_are_rivals_too() -> None:
    names = ("SORT", "MAP *2", "FILTER >0", "SUM")
    truth = ss.synth.Program(tuple(NAMES.index(name) for name in names))
    inputs = [[3, -1, 4], [2, -7, 1], [-3, 9]]
    found = ss.synth.from_examples([(values, truth(values)) for values in inputs], max_length=5)
    fresh = [[5, 0, -2, 7], [1, 1, -8], [-6]]
    expected = [truth(values) for values in fresh]
    results = [[rival.program(values) for values in fresh] for rival in found.rivals]
    assert expected in results
    assert {len(rival.program.functions) for rival in found.rivals} >= {3, 4, 5}


def test_several_arguments() -> None:
    pairs = [((2, [5, 6, 7]), [5, 6]), ((1, [3, -3]), [3]), ((3, [0, 9, 8, 1]), [0, 9, 8])]
    found = ss.synth.from_examples(pairs)
    assert str(found.program) == "TAKE"
    assert found.program.python_source == "def program(n, xs1):\n    return xs1[:max(n, 0)]\n"


@pytest.mark.parametrize(
    ("lines", "place", "problem"),
    [
        ([], None, "there are none"),
        (["[1, 2]"], ":1", "not an object with the fields"),
        (['{"input": [1], "output": 2}', "{"], ":2", "not JSON"),
        (['{"input": [1, 256], "output": 2}'], ":1", "the input contains 256, outside -256..255"),
        (['{"input": [1], "output": true}'], ":1", "the output is True, neither an integer"),
        (['{"input": [[1]], "output": 1}'], ":1", "the input contains a list"),
        (['{"inputs": [1, "a"], "output": 1}'], ":1", "the input 2 is 'a', neither"),
        (['{"input": [1], "output": 1}', '{"input": 1, "output": 1}'], ":2",
         "is (integer) -> integer, but"),
        (['{"input": [1], "output": 1}', "", '{"input": [1], "output": 2}'], ":3",
         "has the same input and the output 1"),
        ([f'{{"input": {[1] * 21}, "output": 2}}'], ":1", "has 21 elements; 20 are allowed"),
        ([f'{{"input": [{n}], "output": 2}}' for n in range(33)], None, "at most 32"),
    ],
)  # fmt: skip
def test_what_is_not_an_example_is_named(
    lines: list[str], place: str | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(SlipstreamError) as raised:
        ss.synth.from_examples(path)
    assert problem in raised.value.what
    assert raised.value.remedy
    assert ('"inputs"' in raised.value.remedy) == (problem == "the input contains a list")
    assert raised.value.where == (None if place is None else f"{path}{place}")


@pytest.mark.parametrize("pairs", [[1], [([1], 1, 2)], "[]"])
def test_pairs_are_pairs(pairs: Any) -> None:
    with pytest.raises(SlipstreamError):
        ss.synth.from_examples(pairs)


def test_a_search_without_a_result_reports_what_it_tried() -> None:
    pairs = [([1, 2], [100, -77]), ([2, 1], [5]), ([0, 3], [-200])]
    with pytest.raises(SlipstreamError, match=r"no program was found; .* all up to length 2"):
        ss.synth.from_examples(pairs, max_length=2)
    with pytest.raises(SlipstreamError, match="no program was found"):
        ss.synth.from_examples(pairs, max_length=6, budget="10ms")


@pytest.mark.parametrize("fitness", [learned, edit_distance])
@pytest.mark.parametrize("is_list", [True, False])
def test_guided_programs_meet_the_examples_within_the_limit(
    fitness: Fitness, is_list: bool
) -> None:
    task = random_task(3, np.random.default_rng(1), is_list=is_list)
    examples = Examples.of(task.pairs)
    search = GuidedSearch(examples, fitness, 6, max_candidates=100_000)
    found = search.run()
    assert found.programs
    assert found.candidates <= 100_000
    for functions in found.programs:
        assert all(ss.synth.Program(functions)(inputs) == output for inputs, output in task.pairs)


def test_a_killed_search_continues_from_its_last_level(tmp_path: Path) -> None:
    examples = Examples.of(random_task(3, np.random.default_rng(1), is_list=True).pairs)
    expected = GuidedSearch(examples, edit_distance, 6, max_candidates=100_000).run()
    lengths = []

    def killed(states: States, goal: Goal) -> Any:
        lengths.append(states.programs.shape[1])
        if lengths == [1, 2]:
            raise KeyboardInterrupt
        return edit_distance(states, goal)

    path = tmp_path / "cache" / "search.npz"
    for _ in range(2):
        search = GuidedSearch(examples, killed, 6, max_candidates=100_000, store=path)
        found = search.run()
        assert path.exists() == search.interrupted
    assert lengths[:3] == [1, 2, 2]
    assert (found.programs, found.candidates) == (expected.programs, expected.candidates)
    for damage in (b"", b"x"):
        path.write_bytes(damage)
        again = GuidedSearch(examples, edit_distance, 6, max_candidates=100_000, store=path).run()
        assert again.candidates == expected.candidates


_NONE = [([1, 2], [100, -77]), ([2, 1], [1]), ([0, 3], [-200])]


def test_ctrl_c_ends_a_guided_search_with_the_closest_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    def interrupted(states: States, goal: Goal) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return edit_distance(states, goal)

    monkeypatch.setattr(searching, "learned", interrupted)
    with pytest.raises(SlipstreamError, match=r"Ctrl-C ended the search; .* meets 1 of 3"):
        ss.synth.from_examples(_NONE, max_length=6, max_candidates=200_000)


def test_edit_distances_of_lists_are_exact() -> None:
    generator = np.random.default_rng(0)
    lists = [generator.integers(-2, 3, n).tolist() for n in generator.integers(0, 21, 40)]
    for output, value in itertools.pairwise(lists):
        row = list(range(len(output) + 1))
        for at, element in enumerate(value, 1):
            new = [at]
            for place, other in enumerate(output):
                new.append(min(new[-1] + 1, row[place + 1] + 1, row[place] + (other != element)))
            row = new
        score = edit_distance(start(Examples.of([(value, output)])), Goal([output]))
        assert score.tolist() == [-(row[-1] + 2 * (row[-1] > 0))]


@pytest.mark.parametrize("is_list", [True, False])
def test_the_learned_fitness_recognizes_the_way_to_the_goal(is_list: bool) -> None:
    generator = np.random.default_rng(3)
    is_first = [
        learned(states, goal).argmax() == 0
        for _ in range(20) for goal, (states, _) in groups(generator, is_list=is_list)
    ]  # fmt: skip
    assert np.mean(is_first) > 0.25  # chance: 1 of 16
